"""Rules for models of Hugging Face's transformers: from the tensors of a folder to a plain nested tree.

The tree, with the axes of each leaf; `scan=True` stacks the layers, so that "layers/{i}/x" is "layers/x" with an axis
for the layers in front:

    embed/embedding [vocab, model]      layers/{i}/attn/{q,k,v}/kernel [model, heads, dim]   …/bias [heads, dim]
    norm/scale [model]                  layers/{i}/attn/o/kernel [heads, dim, model]
    head/kernel [model, vocab]          layers/{i}/mlp/{gate,up}/kernel [model, hidden], mlp/down/kernel [hidden, model]
    positions/embedding [n, model]      layers/{i}/{attn_norm,mlp_norm,…}/scale [model]
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxckpt._formats.local_files import reads_files
from jaxckpt._formats.maxtext import maxtext_rules
from jaxckpt._keywords import explain_keywords
from jaxckpt._options import Options
from jaxckpt._rules.axis_layouts import AxisLayout as Axes
from jaxckpt._rules.axis_layouts import axes_of
from jaxckpt._rules.rule import Paths, Rule, matching_paths, paths_in
from jaxckpt._rules.rule_set import Rules
from jaxckpt._sources.open_source import source_at
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.store_path import local_path
from jaxckpt.errors import DataError, InputError, NotACheckpointError, show_count

Config = Mapping[str, Any]


@explain_keywords
@reads_files
def huggingface_rules(
    folder: str | os.PathLike[str],
    *,
    layout: Literal["plain", "maxtext"] = "plain",
    scan: bool | None = None,
    vocab_size: int | None = None,
) -> Rules:
    """Make rules that map the tensors of a Hugging Face folder to a tree of arrays. Pass them as `rename=`.

    Supported families: Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) and GPT-2. docs/huggingface.md names the
    leaves. Weights quantized in float8 blocks, or in int8 or float8 by compressed-tensors, are dequantized. If the
    model uses its embedding as head and the folder also stores the head, both must be equal: a read compares them.

    Args:
        folder: A local folder with the model's config.json, and usually with its tensors: the rules follow their names,
            which differ between versions of transformers. Or the file or index of tensors in such a folder.
        layout: "plain" is a nested tree, which also fits a Flax NNX model with these names; "maxtext" is the tree of
            MaxText's checkpoints, for all families except GPT-2.
        scan: Whether layers are stacked: along axis 0, as for `jax.lax.scan`, or along axis 1 for MaxText. By default
            only for MaxText.
        vocab_size: Rows of the embedding and columns of the head, if they differ from the folder's: rows of zeros are
            appended, or the last rows are removed. MaxText uses 256128 for Gemma 2.

    Returns:
        The rules. Their `inverse(dtype=…)` maps back to the folder's tensors.

    Raises:
        DataError: The folder or its config.json is missing, config.json is incomplete or has another number of layers
            than the tensors, or the files of the tensors are damaged.
        StorageError: config.json cannot be read.
        InputError: The model's family or its quantization is not supported, or an argument is invalid.
    """
    config = _config_of(folder)
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        raise InputError(
            f"{folder} is of model_type {family!r}, for which there are no rules: they exist for"
            f" {', '.join(_FAMILIES)}. Write your own Rules for other models."
        )
    if layout not in ("plain", "maxtext"):
        raise InputError(f'layout must be "plain" or "maxtext", found {layout!r}')
    is_plain = layout == "plain"
    try:
        stacked = bool(scan) and is_plain
        rules = _gpt2(config, stacked) if family == "gpt2" else _llama(config, stacked, **_FAMILIES[family])
        names = _tensor_names(folder)
        _require_layers(folder, config, names)
        rules = _as_stored(rules, names)
        resized = [_resized(rule, config, vocab_size) for rule in rules.rules]
        rules = Rules([_add_scales(rule, config) for rule in resized], rules.drop)
        return rules if is_plain else maxtext_rules(rules, config, scan is not False)
    except KeyError as error:
        raise DataError(f"the config.json of {folder} has no {error.args[0]!r}") from error
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"the config.json of {folder} has a value that does not fit: {error}") from error


def _config_of(folder: str | os.PathLike[str]) -> Config:
    local = local_path(folder, "folder, the first argument,")
    if local is None:
        raise InputError(f"{folder} must be a local folder: its config.json is read")
    if os.path.isfile(local):
        local = os.path.dirname(local)
    path = Path(local) / "config.json"
    with translate_os_errors(f"cannot read {path}"):
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (FileNotFoundError, NotADirectoryError) as error:
            if not os.path.exists(local):
                raise DataError(
                    f"there is no folder {local}: to download a model, call"
                    f" huggingface_hub.snapshot_download(name, local_dir={os.fspath(folder)!r})"
                ) from error
            raise DataError(f"{local} has no config.json: give the folder of a model of Hugging Face") from error
        except (IsADirectoryError, msgspec.MsgspecError) as error:
            raise DataError(f"{path} cannot be read as a model's configuration: {error}") from error


_BUFFERS = (
    "transformer.h.{i}.attn.bias",
    "transformer.h.{i}.attn.masked_bias",
    "h.{i}.attn.bias",
    "h.{i}.attn.masked_bias",
    "model.layers.{i}.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
    "layers.{i}.self_attn.rotary_emb.inv_freq",
    "rotary_emb.inv_freq",
)
"""Constants that older versions of transformers stored and newer ones ignore: causal masks, and the frequencies of
rotary positions, which follow from the configuration."""


def _tensor_names(folder: str | os.PathLike[str]) -> Collection[str]:
    """The names of the tensors in a folder; none if it has only the configuration. Raises DataError."""
    try:
        return source_at(folder, Options()).manifest.numbers.keys()
    except NotACheckpointError:
        return ()


def _require_layers(folder: str | os.PathLike[str], config: Config, names: Iterable[str]) -> None:
    """Raise DataError if the folder has tensors of more or fewer layers than its config.json says."""
    numbers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
    field = "n_layer" if config.get("model_type") == "gpt2" else "num_hidden_layers"
    if numbers and max(numbers) + 1 != int(config[field]):
        raise DataError(
            f"the config.json of {folder} has {field} {config[field]}, but the tensors of the folder are of"
            f" {show_count(max(numbers) + 1, 'layer')}: correct {field}, or download the folder again"
        )


_LAYER = re.compile(r"(?:(?:model\.)?layers|(?:transformer\.)?h)\.(\d{1,9})\.")
"""The start of the name of a layer's tensor."""


def _as_stored(rules: Rules, names: Collection[str]) -> Rules:
    """The rules for the names in a folder, which differ between versions of transformers and classes of models."""
    stored = list(rules.rules)
    if not {"wte.weight", "embed_tokens.weight"}.isdisjoint(names):  # a model without a head, such as GPT2Model
        stored = [replace(rule, source=re.sub(r"^(transformer|model)\.", "", str(rule.source))) for rule in stored]
    is_classifier = "score.weight" in names
    if "lm_head.weight" not in names and (is_classifier or "embed_tokens.weight" in names):
        stored = [rule for rule in stored if rule != _HEAD]
    if is_classifier:
        stored.append(Rule(source="score.weight", target="score/kernel", layout="c m -> m c"))
    if "score.bias" in names:
        stored.append(Rule(source="score.bias", target="score/bias"))
    if "lm_head.weight" in names and _HEAD not in stored:
        stored = [
            replace(rule, copies="lm_head.weight") if rule.target == "embed/embedding" else rule for rule in stored
        ]
    return Rules(stored, [name for name in _BUFFERS if matching_paths(name, names)])


def huggingface_dtype(folder: str | os.PathLike[str]) -> str:
    """The dtype of the weights of a Hugging Face folder, from its config.json. Raises DataError."""
    return _dtype(_config_of(folder))


def _dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def _resized(rule: Rule, config: Config, vocab_size: int | None) -> Rule:
    """The rule, for a vocabulary of another size if it makes the embedding or the head."""
    layout = {"embed/embedding": "v m -> v m", "head/kernel": "v m -> m v"}.get(str(rule.target))
    if vocab_size is None or layout is None:
        return rule
    return replace(rule, layout=layout, sizes={"v": int(config["vocab_size"])}, resized={"v": vocab_size})


def _add_scales(rule: Rule, config: Config) -> Rule:
    """The rule, with scales if it is for a layer's weight in a quantized model. Raises InputError."""
    quantization: Config | None = config.get("quantization_config")
    if quantization is None or not re.fullmatch(r"(model\.)?layers\..*_proj\.weight", str(rule.source)):
        return rule
    method, block = str(quantization["quant_method"]), quantization.get("weight_block_size")
    suffix = "_scale_inv"
    if method == "compressed-tensors":
        suffix, block = "_scale", _block_of(quantization)
    elif method != "fp8" or not block:
        raise InputError(
            f"a model quantized by {method!r} cannot be read; rules exist for block-wise fp8, and for int8 and"
            " float8 of compressed-tensors"
        )
    return replace(rule, scales=f"{rule.source}{suffix}", block=tuple(block) if block else None, dtype=_dtype(config))


def _block_of(quantization: Config) -> Sequence[int] | None:
    """The sides of blocks in compressed-tensors; None if each scale is for a row or a tensor. Raises InputError."""
    weights: list[Config] = [group["weights"] for group in quantization["config_groups"].values()]
    blocks = [
        _sides(scheme.get("block_structure")) or (scheme.get("group_size") and (1, scheme["group_size"]))
        for scheme in weights
    ]
    is_packed = "pack" in str(quantization.get("format"))
    is_plain = all(scheme.get("symmetric", True) and scheme["num_bits"] == 8 for scheme in weights)
    if is_packed or len(set(blocks)) > 1 or not is_plain:
        raise InputError(
            "for compressed-tensors, rules exist only for symmetric 8-bit quantization that is not packed and is the"
            " same for all weights"
        )
    return blocks[0] or None


def _sides(block: str | Sequence[int] | None) -> tuple[int, ...]:
    """The sides of a block; older versions of compressed-tensors write "128x128"."""
    return tuple(map(int, block.split("x"))) if isinstance(block, str) else tuple(block or ())


_LayerLeaf = tuple[str, Paths, str]
"""(tensor of a layer; leaf, or the leaves into which its heads are split; layout)."""


def _layer_rules(
    prefix: str, leaves: Iterable[_LayerLeaf], sizes: Mapping[str, int], scan: bool, **more: Any
) -> list[Rule]:
    """Rules that make leaves of each layer. `sizes` has the number of layers, "i", and the sizes of other axes."""
    rules: list[Rule] = []
    for source, target, layout in leaves:
        dims = Axes.parse(layout).source
        targets = tuple(f"layers/{name}" if scan else f"layers/{{i}}/{name}" for name in paths_in(target))
        rules.append(
            Rule(
                source=f"{prefix}.{source}",
                target=targets[0] if len(targets) == 1 else targets,
                layout=layout.replace("->", "-> i") if scan else layout,
                sizes={axis: size for axis, size in sizes.items() if axis in ("i", *axes_of(dims))},
                axis=dims.index(("h", "d")) if len(targets) > 1 else 0,
                **more,
            )
        )
    return rules


_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}


def _llama(
    config: Config,
    scan: bool,
    *,
    bias: str = "",
    norms: Mapping[str, str] = _NORMS,
    head_norms: bool = False,
    is_tied: bool = False,
    offset: float = 0.0,
) -> Rules:
    """The rules for Llama and for families with the same architecture.

    Args:
        config: The folder's config.json.
        scan: Whether layers are stacked.
        bias: The attention projections that have a bias, such as "qkv".
        norms: Maps Hugging Face's names of a layer's norms to the names in the tree.
        head_norms: Whether queries and keys have norms.
        is_tied: Whether the embedding is also the head, if the configuration does not specify this.
        offset: Added to the weights of norms.
    """
    heads = int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    sizes = {"i": int(config["num_hidden_layers"]), "d": dim}
    norm: dict[str, Any] = {"offset": offset, "dtype": "float32"} if offset else {}
    if config.get("attention_bias"):
        bias = "qkvo"
    weights = [
        ("self_attn.o_proj.weight", "attn/o/kernel", "m (h d) -> h d m"),
        ("mlp.down_proj.weight", "mlp/down/kernel", "m f -> f m"),
    ]
    weights += [(f"self_attn.{n}_proj.weight", f"attn/{n}/kernel", "(h d) m -> m h d") for n in "qkv"]
    weights += [(f"self_attn.{n}_proj.bias", f"attn/{n}/bias", "(h d) -> h d") for n in "qkv" if n in bias]
    if "o" in bias:
        weights.append(("self_attn.o_proj.bias", "attn/o/bias", "m -> m"))
    weights += [(f"mlp.{n}_proj.weight", f"mlp/{n}/kernel", "f m -> m f") for n in ("gate", "up")]
    if config.get("mlp_bias"):
        weights += [(f"mlp.{n}_proj.bias", f"mlp/{n}/bias", "f -> f") for n in ("gate", "up", "down")]
    scales = [(f"{theirs}.weight", f"{ours}/scale", "m -> m") for theirs, ours in norms.items()]
    if head_norms:
        scales += [(f"self_attn.{n}_norm.weight", f"attn/{n}_norm/scale", "d -> d") for n in "qk"]
    rules = [
        Rule(source="model.embed_tokens.weight", target="embed/embedding"),
        Rule(source="model.norm.weight", target="norm/scale", **norm),
        *_layer_rules("model.layers.{i}", weights, sizes, scan),
        *_layer_rules("model.layers.{i}", scales, sizes, scan, **norm),
    ]
    return Rules(rules if config.get("tie_word_embeddings", is_tied) else [*rules, _HEAD])


_HEAD = Rule(source="lm_head.weight", target="head/kernel", layout="v m -> m v")


def _gpt2(config: Config, scan: bool) -> Rules:
    sizes = {"i": int(config["n_layer"]), "d": int(config["n_embd"]) // int(config["n_head"])}
    leaves: list[_LayerLeaf] = [
        ("attn.c_attn.weight", tuple(f"attn/{n}/kernel" for n in "qkv"), "m (h d) -> m h d"),
        ("attn.c_attn.bias", tuple(f"attn/{n}/bias" for n in "qkv"), "(h d) -> h d"),
        ("attn.c_proj.weight", "attn/o/kernel", "(h d) m -> h d m"),
        ("attn.c_proj.bias", "attn/o/bias", "m -> m"),
    ]
    for theirs, ours in (("ln_1", "attn_norm"), ("ln_2", "mlp_norm")):
        leaves += [(f"{theirs}.weight", f"{ours}/scale", "m -> m"), (f"{theirs}.bias", f"{ours}/bias", "m -> m")]
    for theirs, ours in (("mlp.c_fc", "mlp/up"), ("mlp.c_proj", "mlp/down")):
        leaves += [(f"{theirs}.weight", f"{ours}/kernel", "f g -> f g"), (f"{theirs}.bias", f"{ours}/bias", "g -> g")]
    rules = [
        Rule(source="transformer.wte.weight", target="embed/embedding"),
        Rule(source="transformer.wpe.weight", target="positions/embedding"),
        Rule(source="transformer.ln_f.weight", target="norm/scale"),
        Rule(source="transformer.ln_f.bias", target="norm/bias"),
        *_layer_rules("transformer.h.{i}", leaves, sizes, scan),
    ]
    return Rules(rules if config.get("tie_word_embeddings", True) else [*rules, _HEAD])


_GEMMA: Mapping[str, Any] = {
    "norms": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attn_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    },
    "is_tied": True,
    "offset": 1.0,
}
"""Gemma stores the weights of norms minus 1; the tree has the full scale, in float32."""

_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"bias": "qkv"},
    "qwen3": {"head_norms": True},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "head_norms": True},
    "gpt2": {},
}
"""How each family differs from Llama; GPT-2 has rules of its own."""
