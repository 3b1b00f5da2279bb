"""Tensors of a Hugging Face folder of a model family, with values derived from their names."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)


def tensors(family: str, config: Mapping[str, Any]) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    m, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, k = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    layer = {"self_attn.q_proj.weight": (q, m), "self_attn.k_proj.weight": (k, m), "self_attn.v_proj.weight": (k, m)}
    layer |= {"self_attn.o_proj.weight": (m, q), "mlp.gate_proj.weight": (f, m), "mlp.up_proj.weight": (f, m)}
    layer |= {"mlp.down_proj.weight": (m, f), "input_layernorm.weight": (m,), "post_attention_layernorm.weight": (m,)}
    if "gemma" in family:
        layer |= {"pre_feedforward_layernorm.weight": (m,), "post_feedforward_layernorm.weight": (m,)}
    if family in ("qwen3", "gemma3_text"):
        layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    if family == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", k), ("v", k))}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], m), "model.norm.weight": (m,)}
    if not config.get("tie_word_embeddings", "gemma" in family):
        shapes["lm_head.weight"] = (config["vocab_size"], m)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {name: tensor(name, shape) for name, shape in shapes.items()}
