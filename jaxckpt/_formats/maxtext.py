"""Rules from a Hugging Face folder's tensors to MaxText's tree, derived from the rules to the plain tree.

MaxText stacks layers along axis 1 (`param_scan_axis`), divides queries by the square root of the head's size if its
model does not, and interleaves the two halves of a head that Llama 3.1 rotates. Its checkpoints have the leaves below
"params/params". The names are those of its checkpoint_conversion/utils/param_mapping.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes

from jaxckpt._rules.axis_layouts import AxisLayout
from jaxckpt._rules.rule import Paths, Rule, paths_in
from jaxckpt._rules.rule_set import Rules
from jaxckpt.errors import InputError

_NAMES = {
    "embed": "token_embedder",
    "norm": "decoder/decoder_norm",
    "head": "decoder/logits_dense",
    "attn/q": "self_attention/query",
    "attn/k": "self_attention/key",
    "attn/v": "self_attention/value",
    "attn/o": "self_attention/out",
    "attn/q_norm": "self_attention/query_norm",
    "attn/k_norm": "self_attention/key_norm",
    "mlp/gate": "mlp/wi_0",
    "mlp/up": "mlp/wi_1",
    "mlp/down": "mlp/wo",
    "attn_norm": "pre_self_attention_layer_norm",
    "mlp_norm": "post_self_attention_layer_norm",
}

_GEMMA_NAMES = {
    "attn_norm": "pre_self_attention_norm",
    "post_attn_norm": "post_self_attention_norm",
    "mlp_norm": "pre_ffw_norm",
    "post_mlp_norm": "post_ffw_norm",
}

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
_SCALED_QUERIES = ("llama", "mistral", "gemma2")
_PATTERN = {"gemma3_text": 6}
"""Number of alternating kinds of layers, each of which is stacked separately."""

LayerGroup = tuple[str, str, range | int | None]
"""(path of layers in MaxText's tree, suffix of the first name below it, numbers of the layers). The numbers are a range
of layers that are stacked, one layer, or None for all layers, with `{i}` in the path."""


def maxtext_rules(plain: Rules, config: Mapping[str, Any], scan: bool) -> Rules:
    """The rules to MaxText's tree, from the rules to the plain tree without `scan`. Raises InputError."""
    family = str(config["model_type"])
    if family not in _FAMILIES:
        raise InputError(f'layout="maxtext" is for {", ".join(_FAMILIES)}, and the model is {family}')
    names = {**_NAMES, **_GEMMA_NAMES} if "gemma" in family else _NAMES
    rules: list[Rule] = []
    for rule in plain.rules:
        (target,) = paths_in(rule.target)
        module, _, leaf = target.removeprefix("layers/{i}/").rpartition("/")
        if module not in names:
            raise InputError(f'layout="maxtext" has no leaf for {target}: MaxText has no classifiers')
        if leaf == "weight":  # a norm of Gemma
            leaf, rule = "scale", replace(rule, offset=1.0, dtype="float32")
        if module in ("attn/q", "attn/k"):
            rule = _adapt_query_or_key(rule, module == "attn/q", config)
        if not target.startswith("layers/"):
            scale = _embedding_scale(config) if module == "embed" else 1.0
            rules.append(replace(rule, target=f"params/params/{names[module]}/{leaf}", scale=scale))
            continue
        groups = _groups(family, int(config["num_hidden_layers"]), scan)
        rules += [_rule_for_group(rule, f"{names[module]}/{leaf}", group) for group in groups if group[2] != range(0)]
    return Rules(rules, plain.drop)


def _embedding_scale(config: Mapping[str, Any]) -> float:
    """The factor for embeddings, which Gemma applies at run time and MaxText during conversion."""
    root = float(config["hidden_size"]) ** 0.5
    by_family = {"gemma2": root, "gemma3_text": float(ml_dtypes.bfloat16(root))}
    return by_family.get(str(config["model_type"]), 1.0)


def _adapt_query_or_key(rule: Rule, is_query: bool, config: Mapping[str, Any]) -> Rule:
    dim = rule.sizes["d"]
    if is_query and config["model_type"] in _SCALED_QUERIES:
        # Of Gemma 2 27B, whose setting is 144, MaxText's own conversion takes the 128 of a head.
        of_model = config.get("query_pre_attn_scalar") if config["model_type"] == "gemma2" else None
        rule = replace(rule, scale=1 / math.sqrt(of_model or dim))
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "llama3" or not rule.layout.startswith("(h d)"):
        return rule
    layout = rule.layout.replace("(h d)", "(h half d)").replace("h d", "h (d half)")
    return replace(rule, layout=layout, sizes={**rule.sizes, "half": 2, "d": dim // 2})


def _groups(family: str, layers: int, scan: bool) -> Iterator[LayerGroup]:
    if family == "gemma2":  # each layer of MaxText is a pair of layers, with local and with global attention
        for number, kind in enumerate(("_local", "_global")):
            if scan:
                yield "decoder/layers", kind, range(number, layers, 2)
            else:
                yield from ((f"decoder/layers_{pair}", kind, 2 * pair + number) for pair in range(layers // 2))
    elif not scan:
        yield "decoder/layers_{i}", "", None
    elif family in _PATTERN:
        count = _PATTERN[family]
        scanned = layers - layers % count
        yield from ((f"decoder/layers/layers_{kind}", "", range(kind, scanned, count)) for kind in range(count))
        yield from ((f"decoder/layers_remainder/layers_{n - scanned}", "", n) for n in range(scanned, layers))
    else:
        yield "decoder/layers", "", range(layers)


def _rule_for_group(rule: Rule, name: str, group: LayerGroup) -> Rule:
    """A rule for a leaf of each layer, for the layers of a group."""
    prefix, kind, numbers = group
    head, slash, tail = name.partition("/")
    target = f"params/params/{prefix}/{head}{kind}{slash}{tail}"
    if numbers is None:
        return replace(rule, target=target)
    sizes = {axis: size for axis, size in rule.sizes.items() if axis != "i"}
    if isinstance(numbers, int):
        source, scales = _filled(rule.source, numbers), _filled(rule.scales, numbers)
        return replace(rule, source=source, scales=scales, target=target, sizes=sizes)
    layout = AxisLayout.parse(rule.layout)
    dims = (*layout.target[:1], ("i",), *layout.target[1:])
    return replace(
        rule, target=target, layout=str(AxisLayout(layout.source, dims)), sizes=sizes, numbers={"i": numbers}
    )


def _filled(name: Paths, number: int) -> str:
    """The path of one layer's leaf, or "" if `name` is empty."""
    return "".join(paths_in(name)).replace("{i}", str(number))
