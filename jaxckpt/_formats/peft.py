"""LoRA adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors.

The tensors of the module that holds the base's "m.weight" [out, in] are "base_model.model.m.lora_A.weight" [r, in] and
"base_model.model.m.lora_B.weight" [out, r]. The module computes with weight + scale × B A.

It is long because an adapter is read in two ways, as leaves of its own and merged into its base, with the same checks.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np

from jaxckpt._formats.huggingface import huggingface_rules, read_config, tensor_names
from jaxckpt._formats.index_files import convert_checked, reads_files
from jaxckpt._formats.model_families import FAMILIES
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array, assign
from jaxckpt._model.tree import nested_dicts
from jaxckpt._options import Options
from jaxckpt._rules.apply_rule import SourceLeaves
from jaxckpt._rules.mapped_data import ComputedData
from jaxckpt._rules.rule import Rule, captures, fill_captures, matching_paths, paths_in
from jaxckpt._rules.rule_set import Rules
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, Replicas
from jaxckpt._sources.open_source import Location, source_at
from jaxckpt._sources.source import Source
from jaxckpt.errors import DataError, InputError, MismatchError, Problem

_Number = TypeVar("_Number", int, float)

_CONFIG = "adapter_config.json"
_START = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@explain_keywords
@reads_files
def lora_rules(adapter: str | os.PathLike[str], *, base: str | os.PathLike[str], scan: bool = False) -> Rules:
    """Make rules that map the tensors of a LoRA adapter of PEFT to leaves. Their inverse writes an adapter.

    The adapter of the kernel "layers/{i}/attn/q/kernel" is "layers/{i}/attn/q/lora/lora_a" [in, rank] and "…/lora_b"
    [rank, out], the parameters of `flax.nnx.LoRALinear`. `lora_b` includes the scale (`lora_alpha` / rank), because
    `nnx.LoRA` applies none.

    Args:
        adapter: A folder with adapter_config.json, and usually with adapter_model.safetensors. Without the tensors, as
            before an export, `target_modules` in the configuration names the modules.
        base: The folder of the base model, as for `huggingface_rules`. Its config.json is enough.
        scan: Whether layers are stacked along axis 0.

    Raises:
        DataError, StorageError: As `huggingface_rules`.
        InputError: The adapter is of another kind than LoRA, or uses parts of PEFT that jaxckpt does not support. Or
            `rank_pattern` or `alpha_pattern` differs between layers, and `scan` stacks them.
    """
    config = _adapter_config(adapter)
    names = tensor_names(_tensors(adapter))
    rules: list[Rule] = []
    for rule in huggingface_rules(base, scan=scan).rules:
        source, target = paths_in(rule.source)[0], paths_in(rule.target)[0]
        module = source.removesuffix(".weight")
        if not (source.endswith(".weight") and target.endswith("/kernel")):
            continue
        if not (matching_paths(f"{_START}{module}.lora_A.weight", names) if names else _is_target(module, config)):
            continue
        if len(paths_in(rule.target)) > 1:
            raise InputError(f"{source} is split into several leaves, for which jaxckpt has no LoRA rules")
        counted = captures(source)
        stacked = [axis for axis in ("i", "e") if axis in counted and axis not in captures(target)]
        front = "".join(f"{axis} " for axis in stacked)
        numbers = {axis: rule.numbers.get(axis) or range(rule.sizes[axis]) for axis in counted}
        modules = [dict(zip(numbers, values, strict=True)) for values in itertools.product(*numbers.values())]
        adapted = [at for at in modules if f"{_START}{fill_captures(module, at)}.lora_A.weight" in names]
        if stacked or not adapted:  # layers are stacked only if the adapter has all of them
            adapted = modules
        groups: dict[tuple[int, float], list[dict[str, int]]] = {}
        for at in adapted:
            groups.setdefault(_settings(fill_captures(module, at), config), []).append(at)
        is_partial = len(groups) > 1 or len(adapted) < len(modules)
        for (rank, scale), group in groups.items():
            own = {axis: [*dict.fromkeys(at[axis] for at in group)] for axis in counted} if is_partial else {}
            if math.prod(map(len, own.values())) not in (1, len(group)) or any(axis in stacked for axis in own):
                raise InputError(
                    f"rank_pattern or alpha_pattern in {_CONFIG} of {os.fspath(adapter)} differs between the modules of"
                    f" {source}, or only some are adapted, for which there are no rules: merge_lora merges such an"
                    " adapter"
                )
            for letter, sides, factor in (("A", "r k -> {}k r", 1.0), ("B", "k r -> {}r k", scale)):
                rules.append(
                    Rule(
                        source=f"{_START}{module}.lora_{letter}.weight",
                        target=f"{target.removesuffix('kernel')}lora/lora_{letter.lower()}",
                        layout=sides.format(front),
                        numbers={**rule.numbers, **own},
                        sizes={"r": rank, **{axis: rule.sizes[axis] for axis in counted if axis in rule.sizes}},
                        scale=factor,
                    )
                )
    if not rules:
        raise InputError(f"the adapter {os.fspath(adapter)} names no module of the base {os.fspath(base)}")
    return Rules(rules)


@explain_keywords
def merge_lora(base: Location, adapter: str | os.PathLike[str]) -> ForeignCheckpoint:
    """A Hugging Face folder with a LoRA adapter of PEFT merged into its weights, when these are read.

    Pass the result to `convert`, `restore` or `load_numpy`, with the rules for `base`. Merged weights are computed in
    float32 and rounded once to the dtype of the base, which must not be quantized. Tensors of `modules_to_save` replace
    those of the base, in its dtype. If config.json of the base names no family that jaxckpt knows, `fan_in_fan_out` of
    the adapter decides whether square weights are [in, out].

    Args:
        base: The folder of the base model.
        adapter: The folder of the adapter.

    Raises:
        MismatchError: A tensor of the adapter fits no tensor of the base, or its rank is not that of the
            configuration, or it changes one of embedding and head, which are one tensor in the base; one error lists
            them. A read raises it if such an adapter has both, and they differ.
        InputError: As `lora_rules`.
        Exception: As `jaxckpt.open`.
    """
    config, options = _adapter_config(adapter), Options()
    source = source_at(base, options)
    adapted = source_at(_tensors(adapter), options)
    leaves, lora = SourceLeaves(source), SourceLeaves(adapted)
    tensors: dict[str, Any] = {path: leaves.leaf(path) for path in leaves.paths}
    pairs: dict[str, dict[str, ForeignArray]] = {}
    problems: list[Problem] = []
    replaced: dict[str, str] = {}
    model = _base_config(source)
    names = {path: _base_name(path) for path in lora.paths}
    tied = {path: lora.array(path) for path in lora.paths if _is_tied(model) and _TIED.fullmatch(names[path])}
    tied_data = _TiedData("", {path: array.data for path, array in tied.items()})
    are_equal = (  # as far as can be said before they are read
        len({(array.dtype, array.shape) for array in tied.values()}) == 1
        and any(_HEAD.fullmatch(names[path]) for path in tied)
        and any(names[path] in tensors and not _HEAD.fullmatch(names[path]) for path in tied)
    )
    for path in lora.paths:
        match, name, value = _TENSOR.fullmatch(path), names[path], lora.array(path)
        tensor = tensors.get(name)
        if ".lora_" in path and match is None:
            problems.append(Problem(path, "is not a tensor of LoRA that jaxckpt can merge"))
        elif path in tied and not are_equal:
            problems.append(Problem(path, _UNTIED))
        elif path in tied and tensor is None:
            continue  # a head that the base does not repeat: compared when the embedding is read
        elif not isinstance(tensor, ForeignArray) or not path.startswith(_START):
            problems.append(Problem(path, f"has no tensor {name!r} in the base"))
        elif tensor.dtype not in _WEIGHTS:
            problems.append(Problem(path, f"is for {name!r} of dtype {tensor.dtype}: jaxckpt merges no quantized base"))
        elif match:
            pairs.setdefault(match[1], {})[match[2]] = value
        elif name in replaced or value.shape != tensor.shape:
            problems.append(Problem(path, f"cannot replace {name!r} of shape {list(tensor.shape)}"))
        else:  # of modules_to_save, or a targeted embedding or head, which PEFT saves too
            replaced[name] = path
            new = replace(value, data=tied_data) if path in tied else value
            tensors[name] = replace(tensor, data=_CastData(new))
    squares: list[str] = []
    sides_of_others: set[bool] = set()
    for module, pair in pairs.items():
        name, (rank, scale) = f"{module}.weight", _settings(module, config)
        path = f"{_START}{module}.lora_{min(pair)}.weight"
        tensor, a, b = tensors[name], pair.get("A"), pair.get("B")
        shapes = [array.shape if array else None for array in (b, a)]
        fits = [shapes == [(*sides[:1], rank), (rank, *sides[1:])] for sides in (tensor.shape, tensor.shape[::-1])]
        if a is None or b is None:
            problems.append(Problem(path, f"has no lora_{'A' if a is None else 'B'}"))
        elif len(tensor.shape) != 2 or not any(fits):
            what = f"and its lora_B do not fit {name!r} of shape {list(tensor.shape)}, with rank {rank} of {_CONFIG}"
            problems.append(Problem(path, what))
        elif name in replaced and ".base_layer." not in replaced[name]:
            problems.append(Problem(replaced[name], "replaces a tensor into which the adapter is merged"))
        else:
            is_transposed = fits[1]
            if not all(fits):
                sides_of_others.add(is_transposed)
            elif (is_known := _is_conv1d(module, model)) is None:  # a square weight fits both ways
                is_transposed = bool(config.fan_in_fan_out)
                squares.append(path)
            else:
                is_transposed = is_known
            tensors[name] = replace(tensor, data=_MergedData(tensor, a, b, scale, is_transposed))
    if sides_of_others - {bool(config.fan_in_fan_out)}:
        reason = f"is for a square weight, and fan_in_fan_out in {_CONFIG} is not that of the other weights"
        problems += [Problem(path, reason) for path in squares]
    if not lora.paths:
        raise InputError(f"the adapter {os.fspath(adapter)} has no tensors")
    if problems:
        raise MismatchError.of(f"the adapter {os.fspath(adapter)} does not fit {source.url}", problems)
    view = compose(source.url, nested_dicts(tensors), source.manifest.format, metadata=source.manifest.metadata)
    return replace(view, origins=[source, adapted])


_WEIGHTS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes of weights that are not quantized."""

_CONV1D_FAMILIES = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp_decoder"}
"""The families with weights that are [in, out]. PEFT, too, follows the base, and not `fan_in_fan_out`."""

_CONV1D = re.compile(r"(.*\.)?(c_attn|q_attn|c_proj|c_fc)")
"""The modules with such weights. Others of these families, such as heads, have [out, in]."""

_TIED = re.compile(
    r"(.+\.)?(embed_tokens|wte|word_embeddings?|shared|tokens_embed|tok_embeddings|embed_in|embeddings?"
    r"|lm_head|generator_lm_head|proj_out|embed_out|decoder)\.weight"
)
_HEAD = re.compile(r"(.+\.)?(lm_head|generator_lm_head|proj_out|embed_out|decoder)\.weight")
_UNTIED = "is for an embedding or head that are one tensor in the base, and PEFT trained it as two"


def _base_name(path: str) -> str:
    """The name of the tensor of the base that a tensor of an adapter changes."""
    if match := _TENSOR.fullmatch(path):
        return f"{match[1]}.weight"
    return re.sub(r"\.(modules_to_save|base_layer)\b", "", path.removeprefix(_START))


def _is_conv1d(module: str, model: Mapping[str, Any]) -> bool | None:
    """Whether the weight of a module is [in, out]; None if the configuration of the base does not decide that."""
    if any(part.get("model_type") in _CONV1D_FAMILIES for part in _configs(model)):
        return _CONV1D.fullmatch(module) is not None
    return False if model.get("model_type") in FAMILIES else None


def _is_tied(model: Mapping[str, Any]) -> bool:
    """Whether the embedding is also the head. Older versions of transformers write `tie_word_embeddings` if false."""
    said = [part["tie_word_embeddings"] for part in _configs(model) if "tie_word_embeddings" in part]
    return bool(model.get("model_type")) and bool(model.get("tie_word_embeddings", any(said) or not said))


def _configs(model: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """A configuration, and those of its parts, such as of text_config."""
    yield model
    for part in model.values():
        if isinstance(part, dict):
            yield from _configs(cast("dict[str, Any]", part))


def _base_config(base: Source) -> Mapping[str, Any]:
    """The configuration of the base; empty if it has none."""
    try:
        return read_config(base.url)
    except DataError:
        return {}


@dataclass(frozen=True, slots=True)
class _TiedData(Replicas):
    """The embedding and the head of an adapter, for a base in which they are one tensor. They must be equal."""

    def difference(self, first: str, other: str, box: Box) -> MismatchError:
        return MismatchError.of(f"{other} differs: the adapter does not fit its base", [Problem(first, _UNTIED)])


@dataclass(frozen=True, slots=True)
class _CastData(ComputedData):
    """A tensor in the dtype of another."""

    array: ForeignArray

    def read(self, box: Box, target: Array) -> None:
        values = np.empty(target.shape, DTYPES[self.array.dtype])
        self.array.data.read(box, values)
        assign(target, values)

    @property
    def origins(self) -> Iterable[ArrayData]:
        return (self.array.data,)


@dataclass(frozen=True, slots=True)
class _MergedData(ComputedData):
    """A weight of the base + scale × B A."""

    base: ForeignArray
    a: ForeignArray
    b: ForeignArray
    scale: float
    is_transposed: bool

    def read(self, box: Box, target: Array) -> None:
        rows, columns = box[::-1] if self.is_transposed else box
        rank = (0, self.a.shape[0])
        with np.errstate(all="ignore"):  # infinity and NaN are values like others
            delta = np.float32(self.scale) * (_floats(self.b, (rows, rank)) @ _floats(self.a, (rank, columns)))
            assign(target, _floats(self.base, box) + (delta.T if self.is_transposed else delta))

    @property
    def origins(self) -> Iterable[ArrayData]:
        return (array.data for array in (self.base, self.a, self.b))


def _floats(array: ForeignArray, box: Box) -> Array:
    values = np.empty([b - a for a, b in box], DTYPES[array.dtype])
    array.data.read(box, values)
    return values.astype(np.float32)


def _tensors(adapter: str | os.PathLike[str]) -> str:
    return os.path.join(os.fspath(adapter), "adapter_model.safetensors")


_Rank = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Alpha = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]


class _Adapter(msgspec.Struct, frozen=True):
    """The configuration of an adapter, as far as it is used."""

    r: _Rank
    lora_alpha: _Alpha
    rank_pattern: dict[str, _Rank] | None = None
    """The rank of the modules whose names end with a match of a regular expression."""

    alpha_pattern: dict[str, _Alpha] | None = None
    use_rslora: bool | None = None
    fan_in_fan_out: bool | None = None
    target_modules: str | list[str] | None = None
    """A regular expression, or the ends of names."""


_UNSUPPORTED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "target_parameters", "trainable_token_indices",
    "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Settings with which a module computes something else than with weight + scale × B A, or the base is another one."""

_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights with which PEFT subtracts the first B A from the weights of the base."""


def _adapter_config(adapter: str | os.PathLike[str]) -> _Adapter:
    """The configuration of an adapter. Raises InputError if jaxckpt does not support it."""
    config = read_config(adapter, _CONFIG)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{os.fspath(adapter)} is of peft_type {config.get('peft_type')!r}, expected 'LORA'")
    wrong = [name for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        wrong.append("bias")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        wrong.append(
            f"init_lora_weights={start!r} (it changes the base: PEFT converts the adapter with"
            " save_pretrained(…, path_initial_model_for_weight_conversion=…))"
        )
    if wrong:
        raise InputError(f"{_CONFIG} of {os.fspath(adapter)} has {', '.join(wrong)}, which jaxckpt does not support")
    where = os.path.join(os.fspath(adapter), _CONFIG)
    record = convert_checked(where, config, _Adapter)
    targets = [record.target_modules] if isinstance(record.target_modules, str) else []
    patterns = [_key_pattern(key) for key in (*(record.rank_pattern or ()), *(record.alpha_pattern or ()))]
    for pattern in (*patterns, *targets):
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise DataError(
                f"{where} has the regular expression {pattern[:80]!r}, which is invalid: {error}"
            ) from error
    return record


def _settings(module: str, config: _Adapter) -> tuple[int, float]:
    """The rank of a module, and the factor of its B A."""
    rank = _setting(module, config.rank_pattern, config.r)
    alpha = _setting(module, config.alpha_pattern, config.lora_alpha)
    return rank, alpha / (rank**0.5 if config.use_rslora else rank)


def _setting(module: str, patterns: Mapping[str, _Number] | None, default: _Number) -> _Number:
    patterns = patterns or {}
    matches = (value for key, value in patterns.items() if re.fullmatch(_key_pattern(key), module))
    return next(matches, patterns.get(module, default))  # a name with signs of a regular expression may not match it


def _key_pattern(key: str) -> str:
    """The regular expression that PEFT makes of a key of `rank_pattern` or `alpha_pattern`."""
    return rf"(.*\.)?({key})"


def _is_target(module: str, config: _Adapter) -> bool:
    """Whether the configuration names a module: by the end of its name, or by a regular expression."""
    targets = config.target_modules or ()
    if targets == "all-linear":
        return not module.endswith(("lm_head", "gate", "router", "score", "classifier"))
    module = re.sub(r"\{\w+\}", "0", module)
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    # PEFT may name the modules of each layer.
    module, *ends = (re.sub(r"(?<![^.])\d+(?![^.])", "0", name) for name in (module, *targets))
    return any(module == end or module.endswith(f".{end}") for end in ends)
