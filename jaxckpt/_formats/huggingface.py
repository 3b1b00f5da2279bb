"""Rules for models of Hugging Face's transformers: from the tensors of a folder to a plain nested tree.

The tree, with the axes of each leaf; `scan=True` stacks the layers, so that "layers/{i}/x" is "layers/x" with an axis
for the layers in front:

    embed/embedding [vocab, model]      layers/{i}/attn/{q,k,v}/kernel [model, heads, dim]   …/bias [heads, dim]
    norm/scale [model]                  layers/{i}/attn/o/kernel [heads, dim, model]
    head/kernel [model, vocab]          layers/{i}/mlp/{gate,up}/kernel [model, hidden], mlp/down/kernel [hidden, model]
    positions/embedding [n, model]      layers/{i}/{attn_norm,mlp_norm,…}/scale [model]

It is long because a family's exceptions (towers, experts, fused and quantized tensors) all change the same rules.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from jaxckpt._formats.index_files import MAX_INDEX_BYTES, reads_files
from jaxckpt._formats.maxtext import maxtext_rules
from jaxckpt._formats.model_families import CONSTANTS, FAMILIES, SINGLE_TOWERS, Tower
from jaxckpt._keywords import explain_keywords
from jaxckpt._model import typed_json
from jaxckpt._options import Options
from jaxckpt._rules.axis_layouts import AxisLayout as Axes
from jaxckpt._rules.axis_layouts import axes_of
from jaxckpt._rules.rule import Rule, captures, matching_paths, paths_in
from jaxckpt._rules.rule_set import Rules
from jaxckpt._sources.open_source import located, source_at
from jaxckpt._store.foreign_files import exists, is_visible_file, read_small, using_files
from jaxckpt._store.store_path import local_path, unchecked_store_at
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

    docs/huggingface.md has a table of the supported families, and names the leaves. Experts are stacked along an axis,
    whether the folder has a tensor for each expert or for all experts of a layer. Weights quantized in float8 blocks,
    in MXFP4, or in int8 or float8 by compressed-tensors, are dequantized. If the model uses its embedding as head and
    the folder also stores the head, both must be equal: a read compares them. The layers with which DeepSeek predicts
    further tokens, and scales of activations, are left out.

    Args:
        folder: A folder, or its URL, with the model's config.json, and usually with its tensors: the rules follow their
            names, which differ between versions of transformers. Or the file or index of tensors in such a folder.
        layout: "plain" is a nested tree, which also fits a Flax NNX model with these names; "maxtext" is the tree of
            MaxText's checkpoints, for llama, mistral, qwen2, qwen3, gemma2 and gemma3_text.
        scan: Whether layers are stacked: along axis 0, as for `jax.lax.scan`, or along axis 1 for MaxText. By default
            only for MaxText.
        vocab_size: Rows of the embedding and columns of the head, if they differ from the folder's: rows of zeros are
            appended, or the last rows are removed. MaxText uses 256128 for Gemma 2.

    Returns:
        The rules. Their `inverse(dtype=…)` maps back to the folder's tensors. If these are quantized, they become
        floats: delete `quantization_config` from a config.json that you copy.

    Raises:
        DataError: The folder or its config.json is missing, config.json is incomplete or has another number of layers
            than the tensors, or the files of the tensors are damaged.
        StorageError: config.json cannot be read.
        InputError: The model's family or its quantization is not supported, or an argument is invalid.
    """
    config = read_config(folder)
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise InputError(
            f"{folder} is of model_type {family!r}, for which there are no rules: they exist for"
            f" {', '.join(FAMILIES)}. Write your own Rules for other models."
        )
    if layout not in ("plain", "maxtext"):
        raise InputError(f'layout must be "plain" or "maxtext", found {layout!r}')
    is_plain = layout == "plain"
    try:
        only = [SINGLE_TOWERS[name] for name in config.get("architectures") or () if name in SINGLE_TOWERS]
        quantization: Config = config.get("quantization_config") or {}
        config = {**config, "mxfp4": quantization.get("quant_method") == "mxfp4"}
        stored = _Stored(tensor_names(folder))
        rules: list[Rule] = []
        drop = [name for name in CONSTANTS if matching_paths(name, stored.names)]
        if quantization:
            drop += filter(_SCALES_OF_ACTIVATIONS.search, stored.names)
        for tower in FAMILIES[family]:
            if only and tower.target not in only:
                continue
            own, unused = _tower_rules(folder, tower, config, stored, bool(scan) and is_plain)
            rules += [
                _add_scales(_resized(rule, {**config, **tower.config_in(config)}, vocab_size), config, stored)
                for rule in own
            ]
            drop += unused
        if vocab_size is not None and not any(rule.resized for rule in rules):
            raise InputError(f"vocab_size= is not for models of model_type {family!r}")
        plain = Rules(rules, drop)
        return plain if is_plain else maxtext_rules(plain, config, scan is not False)
    except KeyError as error:
        raise DataError(f"the config.json of {folder} has no {error.args[0]!r}") from error
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"the config.json of {folder} has a value that does not fit: {error}") from error


def read_config(folder: str | os.PathLike[str], name: str = "config.json") -> Config:
    """The configuration of a model or adapter in a folder. Raises DataError, StorageError, InputError."""
    local_path(folder, "folder, the first argument,")  # checks it
    path, files = located(unchecked_store_at(folder, Options()))
    with using_files(files):
        path = os.path.dirname(path) if is_visible_file(path) else path
        where = f"{path}/{name}"
        if not exists(path):
            raise DataError(
                f"there is no folder {path}: to download a model, call"
                f" huggingface_hub.snapshot_download(name, local_dir={os.fspath(folder)!r})"
            )
        if not exists(where):
            raise DataError(f"{path} has no {name}: give the folder of a model of Hugging Face")
        try:
            return typed_json.decode(read_small(where, MAX_INDEX_BYTES), dict[str, Any])
        except (DataError, ValueError, RecursionError) as error:  # a UnicodeDecodeError is not a MsgspecError
            raise DataError(f"{where} cannot be read as a model's configuration: {error}") from error


def tensor_names(folder: str | os.PathLike[str]) -> Collection[str]:
    """The names of the tensors in a folder; none if it has only the configuration. Raises DataError."""
    try:
        return source_at(folder, Options()).manifest.numbers.keys()
    except NotACheckpointError:
        return ()


def _require_layers(
    folder: str | os.PathLike[str], start: str, tower: Tower, config: Config, names: Iterable[str]
) -> Sequence[str]:
    """Raise DataError if the folder has tensors of more or fewer layers of a tower than its config.json says.

    Returns the tensors of layers that predict further tokens (multi-token prediction of DeepSeek), which follow the
    layers of the model. transformers ignores them.
    """
    pattern = re.compile(re.escape(start).replace(r"\{i\}", r"(\d{1,9})") + r"\.")
    numbers = {name: int(match[1]) for name in names if (match := pattern.match(name))}
    field = tower.keys.get("num_hidden_layers", "num_hidden_layers")
    count = int(config["num_hidden_layers"])
    allowed = count + int(config.get("num_nextn_predict_layers") or 0)
    found = max(numbers.values(), default=count - 1) + 1
    if not count <= found <= allowed:
        raise DataError(
            f"the config.json of {folder} has {field} {count}, but the tensors of the folder are of"
            f" {show_count(found, 'layer')}: correct {field}, or download the folder again"
        )
    return [name for name, number in numbers.items() if number >= count]


# Tables -----------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A line of a table of model_families.py."""

    source: str
    targets: tuple[str, ...]
    layout: str
    condition: str


@functools.cache
def _lines(table: str) -> Sequence[_Line]:
    lines: list[_Line] = []
    for text in filter(None, table.splitlines()):
        text, _, condition = text.partition(" if ")
        alternatives = [part.split(",") for part in re.findall(r"\{([^{}]*,[^{}]*)\}", text)]
        for choice in zip(*alternatives, strict=True) if alternatives else [()]:
            chosen = iter(choice)
            source, target, *layout = re.sub(r"\{[^{}]*,[^{}]*\}", lambda _: next(chosen), text).split(None, 2)  # noqa: B023
            parts = re.search(r"\[(.*)\]", target)
            targets = [target.replace(parts[0], part) for part in parts[1].split(",")] if parts else [target]
            sides = "".join(layout).strip()
            layout = f"{sides} -> {sides}" if sides and "->" not in sides else sides
            lines.append(_Line(source, tuple(targets), layout, condition.strip()))
    return lines


class _Stored:
    """The names of the tensors in a folder; none if it has only the configuration."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self._shapes = {re.sub(r"\d+", "0", name) for name in names}

    def has(self, name: str) -> bool:
        """Whether there is a tensor with this name, with any numbers."""
        return re.sub(r"\{\w+\}|\d+", "0", name) in self._shapes


def _tower_rules(
    folder: str | os.PathLike[str], tower: Tower, config: Config, stored: _Stored, scan: bool
) -> tuple[list[Rule], Sequence[str]]:
    """The rules for a model, or for a part of it with layers of its own, and the tensors that it does not use."""
    config = {**config, **tower.config_in(config)}
    heads = int(config["num_attention_heads"])
    sizes = {"two": 2, "i": int(config["num_hidden_layers"])}
    if tower.has_given_heads:
        sizes["h"] = heads
    else:
        sizes["d"] = int(config.get("head_dim") or config["hidden_size"] // heads)
    experts = next((int(config[name]) for name in _EXPERT_COUNTS if config.get(name)), 0)
    if experts:
        sizes["e"] = experts
    lines = _lines(tower.table)
    prefixes = tower.prefixes
    complete = [line.source for line in lines if line.source[0] not in "./"]
    prefix = next(
        (start for start in prefixes if any(f"{start}{name}" in stored.names for name in complete)), prefixes[0]
    )

    def full(line: _Line) -> str:
        name = f"{tower.layers}{line.source}" if line.source.startswith(".") else line.source
        return name[1:] if name.startswith("/") else f"{prefix}{name}"

    drop = _require_layers(folder, f"{prefix}{tower.layers}", tower, config, stored.names)
    rules: dict[tuple[str, ...], Rule] = {}
    used: dict[str, _Line] = {}
    embed = ("embed/embedding",)
    of_experts = _expert_layers(config, sizes["i"]) if experts else []
    has_other_head = any(stored.has(f"{name}.weight") for name in ("score", "classifier", "qa_outputs"))
    for line in lines:
        source, is_head = full(line), line.targets == ("head/kernel",)
        is_stored = stored.has(source)
        if not _holds(line.condition, {**config, "stored": is_stored, "copy": is_stored}):
            if is_head and is_stored and embed in rules:
                rules[embed] = _with_copy(rules[embed], source, stored)
            continue
        if line.condition.startswith("copy") and line.targets in rules:
            rules[line.targets] = _with_copy(rules[line.targets], source, stored)
            continue
        if is_head and stored.names and not is_stored and (not prefix or has_other_head):
            continue  # a base model, such as a LlamaModel, has no head, and a classifier has another one
        earlier = {used[name].targets: used[name] for name in line.targets if name in used}
        if earlier and (not is_stored or any(stored.has(full(other)) for other in earlier.values())):
            continue
        for targets in earlier:
            rules.pop(targets, None)
        used |= dict.fromkeys(line.targets, line)
        layers: Sequence[int] | None = range(sizes["i"]) if drop and line.source.startswith(".") else None
        if experts and line.targets[0].startswith(("mlp/", "moe/")):
            layers = [n for n in range(sizes["i"]) if (n in of_experts) == line.targets[0].startswith("moe/")]
        if layers is None or layers:
            rules[line.targets] = _rule_of_line(line, source, tower.target, sizes, config, layers, scan)
    return [*rules.values()], drop


def _with_copy(rule: Rule, name: str, stored: _Stored) -> Rule:
    """The rule for a tensor that the folder repeats under another name, or has only under this name."""
    if not stored.has(paths_in(rule.source)[0]):
        return replace(rule, source=name)
    return replace(rule, copies=(*paths_in(rule.copies), name))


_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _holds(condition: str, config: Config) -> bool:
    """Whether a condition such as "a and !b or c" holds, for settings of config.json."""
    values = [
        [bool(config.get(name.strip("! "))) != name.strip().startswith("!") for name in term.split(" and ")]
        for term in condition.split(" or ")
    ]
    return not condition or any(map(all, values))


def _expert_layers(config: Config, count: int) -> Sequence[int]:
    """The numbers of the layers with experts, as the settings of the different families say."""
    if config.get("moe_layers"):
        return [*map(int, config["moe_layers"])]
    step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
    dense: Collection[int] = config.get("mlp_only_layers") or range(int(config.get("first_k_dense_replace") or 0))
    return [number for number in range(count) if (number + 1) % step == 0 and number not in dense]


def _rule_of_line(
    line: _Line,
    source: str,
    target: str,
    sizes: Mapping[str, int],
    config: Config,
    layers: Sequence[int] | None,
    scan: bool,
) -> Rule:
    """The rule of a line, for all layers or for some."""
    layout, is_layer = line.layout, line.source.startswith(".")
    start = "" if line.source.startswith("/") else target
    if is_layer:
        start += "layers/" if scan else "layers/{i}/"
    if is_layer and scan:
        layout = layout.replace("->", "-> i")
    axes = axes_of(Axes.parse(layout).source) if layout else []
    more: dict[str, Any] = {}
    if "n" in axes:
        more["axis"] = "n"
    elif len(line.targets) == 3:  # queries, keys and values, which differ in the number of heads
        of_keys = int(config.get("num_key_value_heads") or config["num_attention_heads"]) * sizes["d"]
        more["parts"] = (int(config["num_attention_heads"]) * sizes["d"], of_keys, of_keys)
    if layers is not None:
        more["numbers"] = {"i": tuple(layers)}
    known = {*axes, *captures(source)} - {*more.get("numbers", ())}
    targets = tuple(f"{start}{name}" for name in line.targets)
    return Rule(
        source=source,
        target=targets[0] if len(targets) == 1 else targets,
        layout=layout,
        sizes={axis: size for axis, size in sizes.items() if axis in known},
        **more,
    )


def huggingface_dtype(folder: str | os.PathLike[str]) -> str:
    """The dtype of the weights of a Hugging Face folder, from its config.json. Raises DataError."""
    return _dtype(read_config(folder))


def _dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def _resized(rule: Rule, config: Config, vocab_size: int | None) -> Rule:
    """The rule, for a vocabulary of another size if it makes the embedding or the head."""
    layout = {"embed/embedding": "v m -> v m", "head/kernel": "v m -> m v"}.get(str(rule.target))
    if vocab_size is None or layout is None:
        return rule
    return replace(rule, layout=layout, sizes={"v": int(config["vocab_size"])}, resized={"v": vocab_size})


def _add_scales(rule: Rule, config: Config, stored: _Stored) -> Rule:
    """The rule, with scales if it is for a weight that may be quantized. Raises InputError."""
    quantization: Config | None = config.get("quantization_config")
    source, target = paths_in(rule.source)[0], paths_in(rule.target)[0]
    if source.endswith("_blocks"):
        scales = source.replace("_blocks", "_scales")
        return replace(rule, scales=scales, packed="float4_e2m1fn", dtype=_dtype(config))
    if quantization is None or config["mxfp4"]:
        return rule
    method, block = str(quantization["quant_method"]), quantization.get("weight_block_size")
    suffix = "_scale" if method == "compressed-tensors" else "_scale_inv"
    is_usual = "layers/" in target and re.search(r"(_proj(_with_mqa)?|\.w[123])\.weight$", source)
    if not is_usual and not stored.has(f"{source}{suffix}"):
        return rule
    if method == "compressed-tensors":
        block = _block_of(quantization)
    elif method != "fp8" or not block:
        raise InputError(
            f"a model quantized by {method!r} cannot be read; rules exist for block-wise fp8, for int8 and float8 of"
            " compressed-tensors, and for MXFP4 of gpt_oss"
        )
    return replace(rule, scales=f"{rule.source}{suffix}", block=tuple(block) if block else None, dtype=_dtype(config))


_SCALES_OF_ACTIVATIONS = re.compile(r"\.(input|output|[qkv])_(scale|zero_point)$")
"""The names of tensors with which compressed-tensors quantizes activations and the cache of keys and values."""


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
