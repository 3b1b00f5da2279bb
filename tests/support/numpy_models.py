"""The decoders of Hugging Face's families in NumPy, as functions of the tree that `huggingface_rules` makes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def _softmax(x: Any) -> Any:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _silu(x: Any) -> Any:
    return x * _sigmoid(x)


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _capped(x: Any, cap: float | None) -> Any:
    return x if cap is None else cap * np.tanh(x / cap)


def _project(x: Any, leaf: Any, equation: str) -> Any:
    return np.einsum(equation, x, leaf["kernel"]) + leaf.get("bias", 0.0)


def _norm(x: Any, leaf: Any, epsilon: float) -> Any:
    """RMSNorm with a scale, or with Gemma's weight, or LayerNorm if there is a bias."""
    if "bias" in leaf:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return x * (1 + leaf["weight"]) if "weight" in leaf else x * leaf["scale"] + leaf.get("bias", 0.0)


def _rotated(x: Any, config: dict[str, Any], pairs: bool = False) -> Any:
    """Rotary positions: of halves, or of neighbours, as in DeepSeek and Llama 4."""
    rope = config["rope_parameters"]
    rope = rope.get("sliding_attention", rope)
    dim = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    x, rest = x[..., :dim], x[..., dim:]
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else np.split(x, 2, -1)
    angles = np.arange(x.shape[1])[:, None, None] * rope["rope_theta"] ** (-np.arange(dim // 2) / (dim // 2))
    sin, cos = np.sin(angles), np.cos(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _attention(layer: Any, x: Any, config: dict[str, Any]) -> Any:
    epsilon = config.get("rms_norm_eps", 1e-5)
    if "kv_a" in layer:
        rope, nope, rank = (config[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"))
        q = _project(
            _norm(_project(x, layer["q_a"], "btm,mr->btr"), layer["q_a_norm"], 1e-6), layer["q_b"], "btr,rhd->bthd"
        )
        compressed = _project(x, layer["kv_a"], "btm,mr->btr")
        kv = _project(_norm(compressed[..., :rank], layer["kv_a_norm"], 1e-6), layer["kv_b"], "btr,rhd->bthd")
        k_rope = np.broadcast_to(_rotated(compressed[:, :, None, rank:], config, True), (*kv.shape[:3], rope))
        k, v = np.concatenate([kv[..., :nope], k_rope], -1), kv[..., nope:]
        q = np.concatenate([q[..., :nope], _rotated(q[..., nope:], config, True)], -1)
    else:
        q, k, v = (_project(x, layer[name], "btm,mhd->bthd") for name in "qkv")
        if "q_norm" in layer:  # of each head, or of all heads together
            whole = next(iter(layer["q_norm"].values())).ndim == 2
            flat = [(*y.shape[:2], -1) if whole else y.shape for y in (q, k)]
            norms = [{name: leaf.ravel() for name, leaf in layer[f"{name}_norm"].items()} for name in "qk"]
            q, k = (
                _norm(y.reshape(sides), norm, epsilon).reshape(y.shape)
                for y, sides, norm in zip((q, k), flat, norms, strict=True)
            )
        if "rope_parameters" in config:
            q, k = (_rotated(y, config, "llama4" in config["model_type"]) for y in (q, k))
        if config.get("use_qk_norm"):
            q, k = (_norm(y, {"scale": 1}, epsilon) for y in (q, k))
    k, v = (np.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v))
    scale = config.get("query_pre_attn_scalar") or q.shape[-1]
    scores = _capped(np.einsum("bthd,bshd->bhts", q, k) / scale**0.5, config.get("attn_logit_softcapping"))
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    if "sinks" in layer:
        sinks = np.broadcast_to(layer["sinks"][:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, sinks], -1)
    weights = _softmax(scores)[..., : q.shape[1]]
    return _project(np.einsum("bhts,bshd->bthd", weights, v), layer["o"], "bthd,hdm->btm")


def _largest(scores: Any, count: int) -> Any:
    """Whether each score is among the `count` largest ones."""
    return scores >= np.sort(scores, -1)[..., -count, None]


def _routing(layer: Any, x: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """The factor of each expert's input, and of its output."""
    logits, family, count = (
        _project(x, layer["router"], "btm,me->bte"),
        config["model_type"],
        config["num_experts_per_tok"],
    )
    chosen = _largest(logits, count)
    if family == "llama4_text":
        return chosen * _sigmoid(logits), chosen
    if family == "deepseek_v3":
        scores = _sigmoid(logits)
        corrected = scores + layer["router"]["correction"]
        groups = corrected.reshape(*corrected.shape[:2], config["n_group"], -1)
        best = np.sort(groups, -1)[..., -2:].sum(-1)
        corrected = np.where(_largest(best, config["topk_group"])[..., None], groups, -np.inf).reshape(corrected.shape)
        scores = scores * _largest(corrected, count)
        return 1.0, scores / scores.sum(-1, keepdims=True) * config["routed_scaling_factor"]
    scores = _softmax(logits) * chosen
    return 1.0, scores / scores.sum(-1, keepdims=True) if config.get("norm_topk_prob", True) else scores


def _experts(layer: Any, x: Any, config: dict[str, Any]) -> Any:
    of_input, of_output = _routing(layer, x, config)
    inputs = np.ones((*x.shape[:2], layer["down"]["kernel"].shape[0], 1)) * x[:, :, None]
    inputs = inputs * np.broadcast_to(of_input, inputs.shape[:3])[..., None]
    if config["model_type"] == "llama4_text":
        gate, up = np.moveaxis(_project(inputs, layer["gate_up"], "btem,emnf->btenf"), -2, 0)
        hidden = _silu(gate) * up
    elif "gate_up" in layer:
        both = _project(inputs, layer["gate_up"], "btem,emfn->btefn")
        gate, up = np.minimum(both[..., 0], config["swiglu_limit"]), np.clip(both[..., 1], -7.0, 7.0) + 1
        hidden = gate * _sigmoid(1.702 * gate) * up
    else:
        hidden = _silu(np.einsum("btem,emf->btef", inputs, layer["gate"]["kernel"]))
        hidden = hidden * np.einsum("btem,emf->btef", inputs, layer["up"]["kernel"])
    outputs = _project(hidden, layer["down"], "btef,efm->btem")
    y = np.einsum("btem,bte->btm", outputs, np.broadcast_to(of_output, outputs.shape[:3]))
    if "shared" in layer:
        shared = _mlp(layer["shared"], x, _silu)
        y = y + (_sigmoid(x @ layer["shared_gate"]["kernel"]) * shared if "shared_gate" in layer else shared)
    return y


def _mlp(layer: Any, x: Any, act: Any) -> Any:
    up = _project(x, layer["up"], "btm,mf->btf")
    up = act(_project(x, layer["gate"], "btm,mf->btf")) * up if "gate" in layer else act(up)
    return _project(up, layer["down"], "btf,fm->btm")


def logits(tree: Any, tokens: Any, config: dict[str, Any]) -> Any:
    """The logits of a decoder. `config` is the model's config.json."""
    family = config["model_type"]
    epsilon = config.get("rms_norm_eps") or config.get("layer_norm_epsilon") or config["layer_norm_eps"]
    act = _gelu if "gpt2" in family or "gemma" in family else _silu
    if family == "gpt_neox":
        act = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / 2**0.5)))
    embedding = np.asarray(tree["embed"]["embedding"], np.float64)
    x = embedding[tokens]
    if "gemma" in family:
        x = x * x.shape[-1] ** 0.5
    if "positions" in tree:
        x = x + tree["positions"]["embedding"][: x.shape[1]]
    for number in range(len(tree["layers"])):
        layer = tree["layers"][str(number)]
        start = x
        y = _attention(layer["attn"], _norm(x, layer["attn_norm"], epsilon) if "attn_norm" in layer else x, config)
        x = x + (_norm(y, layer["post_attn_norm"], epsilon) if "post_attn_norm" in layer else y)
        y = start if config.get("use_parallel_residual") else x
        y = _norm(y, layer["mlp_norm"], epsilon) if "mlp_norm" in layer else y
        y = _experts(layer["moe"], y, config) if "moe" in layer else _mlp(layer["mlp"], y, act)
        x = x + (_norm(y, layer["post_mlp_norm"], epsilon) if "post_mlp_norm" in layer else y)
    x = _norm(x, tree["norm"], epsilon)
    head = tree["head"]["kernel"] if "head" in tree else embedding.T
    return _capped(x @ head, config.get("final_logit_softcapping"))
