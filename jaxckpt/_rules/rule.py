"""One rule: the paths of its source and target leaves, and how target values are made from source values."""

from __future__ import annotations

import math
import numbers
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxckpt._keywords import explain_names
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.paths import closest_hint, path_problem
from jaxckpt._options import require_whole_number
from jaxckpt._rules.axis_layouts import AxisLayout, MisfitError, axes_of
from jaxckpt.errors import InputError, show_path

Paths = str | tuple[str, ...]

_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("source", "target", "scales", "copies"), (str, tuple, list)),
    **dict.fromkeys(("parts", "block"), (tuple, list, type(None))),
    **dict.fromkeys(("sizes", "resized", "numbers"), (Mapping,)),
    **dict.fromkeys(("scale", "offset"), (numbers.Real,)),
    **dict.fromkeys(("layout", "packed"), (str,)),
    "axis": (int, str),
    "tied": (bool, np.bool_),
}
"""The accepted types of each field of a rule. Sets are not accepted, because the order of paths matters."""

_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)\}")


@explain_names
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How leaves of a source become leaves of a target.

    Examples:
        >>> from jaxckpt.rules import Rule
        >>> one = Rule(
        ...     source="model.layers.{i}.self_attn.q_proj.weight", target="layers/q/kernel",
        ...     layout="(heads dim) model -> i model heads dim", sizes={"dim": 64},
        ... )
        >>> one.inverse().layout
        'i model heads dim -> (heads dim) model'

    Attributes:
        source: The path of the source leaf; `{i}` matches a whole number. Several paths are joined along
            `axis`. If source and target end with "/**", the rule is for all leaves below a container, of any
            shape; it has neither layout nor sizes, and layers are stacked or unstacked along `axis`.
        target: The path of the target leaf. If only the source has a number such as `{i}`, the leaves are
            stacked along the axis of that name in the target's layout. If only the target has it, the source is
            unstacked along its axis of that name. Several paths are parts along `axis`.
        layout: The axes of source and target in einops notation, such as "(h d) m -> m h d". Empty: no change.
        sizes: Sizes of axes that the shapes do not determine. It may also give the count of a number in the
            paths: with {"i": 32}, a missing number from 0 to 31 is an error.
        numbers: The values of a number in the paths, such as {"i": range(3, 61)}: others do not match, and a
            missing one is an error. Leaves are stacked in this order.
        axis: The dimension of the target along which sources are joined, or of the source along which targets
            are split. Or the name of an axis that only the source has: each target is one index of it. With
            layout="(h n d) m -> m h d" and axis="n", three targets are the q, k and v of each head.
        parts: Sizes along `axis` of several sources or targets. By default targets have equal sizes. `inverse`
            needs `parts` if the sizes of the sources differ.
        dtype: The dtype of the target, cast as by NumPy. None: the dtype of the source.
        scales: For quantized sources, the paths of the scales, one for each path of `source`. Each value is
            first multiplied by the scale of its block, in float32. The target is float32 unless `dtype` is
            given. `inverse` does not quantize.
        block: The shape of a block of values with one scale, such as (128, 128). None: the scales have the
            shape of the values, with size 1 in each dimension that they do not depend on.
        packed: For sources of bytes with two 4-bit values each, the dtype of the values: "float4_e2m1fn" for
            MXFP4. The first is in the low bits. The last dimension has twice the size, and the scales are
            exponents (float8_e8m0fnu). There is no inverse.
        resized: Target sizes of axes whose source size, in `sizes`, differs, such as {"vocab": 256128}. Larger
            targets are padded with zeros; smaller targets are truncated.
        scale: Target values are source × scale + offset, computed in float32, or in float64 for float64 and
            int64. If the source has integers, a scale or offset needs `dtype`.
        offset: Added to the scaled values; see `scale`.
        tied: Whether another rule has the same source. `inverse` makes the source from the other rule's target.
        copies: Paths of source leaves that repeat `source`, such as the stored head of a model that uses its
            embedding as head. All values that are read are compared bit for bit: a difference is a DataError.
            `inverse` leaves them out.
    """

    source: Paths
    target: Paths
    layout: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    axis: int | str = 0
    parts: tuple[int, ...] | None = None
    dtype: str | None = None
    scales: Paths = ()
    block: tuple[int, ...] | None = None
    packed: str = ""
    resized: Mapping[str, int] = field(default_factory=dict[str, int])
    scale: float = 1.0
    offset: float = 0.0
    tied: bool = False
    copies: Paths = ()

    def inverse(self, dtype: str | None = None) -> Rule:
        """The rule from target to source.

        Args:
            dtype: The dtype of the source, used only if this rule casts. None: the dtype of the target.

        Raises:
            InputError: `dtype` is not the name of a dtype, or the rule has `packed`.
        """
        _require_dtype(dtype, "inverse(dtype=)")
        if self.packed:
            raise InputError(
                f"{self} has no inverse: values of {self.packed} are read, not written. To export such a model as"
                " floats, make the rules for a folder whose config.json has no quantization_config"
            )
        return Rule(
            source=self.target,
            target=self.source,
            layout=str(AxisLayout.parse(self.layout).inverse()) if self.layout else "",
            sizes={**self.sizes, **self.resized},
            resized={axis: self.sizes[axis] for axis in self.resized},
            numbers=self.numbers,
            axis=self.axis,
            parts=self.parts,
            dtype=None if self.dtype is None else dtype,
            scale=1 / self.scale,
            offset=-self.offset / self.scale,
        )

    def __post_init__(self) -> None:
        for argument, kinds in _KINDS.items():
            if not isinstance(value := getattr(self, argument), kinds):
                type_names = " or ".join(kind.__name__ for kind in kinds)
                raise InputError(f"Rule.{argument} must be of type {type_names}, found {reprlib.repr(value)}")
        for argument, is_optional in (("source", False), ("target", False), ("scales", True), ("copies", True)):
            names: Any = getattr(self, argument)
            paths: tuple[Any, ...] = paths_in(names) if names else ()
            if not all(isinstance(path, str) and path for path in paths) or not (paths or is_optional):
                raise InputError(f"Rule.{argument} must be a path or a tuple of paths, found {names!r}")
            if invalid := next(filter(path_problem, paths), None):
                raise InputError(f"Rule.{argument} {invalid!r} {path_problem(invalid)}")
            if len({frozenset(captures(path)) for path in paths}) > 1:
                raise InputError(f"{self}: all paths of Rule.{argument} must have the same numbers")
        if self.scales and [set(captures(name)) for name in paths_in(self.scales)] != [
            set(captures(self.source)) for _ in paths_in(self.source)
        ]:
            raise InputError(f"{self}: scales= must name one path for each source, with the same numbers")
        sources = paths_in(self.source)
        if self.copies and (len(sources) > 1 or captures((*sources, *paths_in(self.copies)))):
            raise InputError(f"{self}: copies= needs one source, and paths without numbers such as {{i}}")
        if (self.block is not None or self.packed) and not self.scales:
            raise InputError(f"{self}: {'packed' if self.packed else 'block'}= needs scales=")
        if self.packed not in ("", "float4_e2m1fn"):
            raise InputError(f'{self}: packed= must be "float4_e2m1fn", found {self.packed!r}')
        several = max(len(paths_in(self.source)), len(paths_in(self.target))) > 1
        if len(paths_in(self.source)) > 1 and len(paths_in(self.target)) > 1:
            raise InputError(f"{self} joins several sources into several targets: make it two rules")
        if self.parts is not None and not several:
            raise InputError(f"{self} has parts=, but one source and one target")
        for argument, counts in (
            ("parts", self.parts or ()),
            ("block", self.block or ()),
            ("sizes", self.sizes.values()),
            ("resized", self.resized.values()),
        ):
            for number in counts:
                require_whole_number(number, f"{self}: a number in {argument}=", minimum=1)
        if isinstance(self.axis, int):
            require_whole_number(self.axis, f"{self}: axis=", minimum=0)
        for name, values in self.numbers.items():
            if not isinstance(values, Sequence) or isinstance(values, str) or len({*values}) < max(1, len(values)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"{self}: numbers= must have different numbers for {name!r}, found {values!r}")
            for number in values:
                require_whole_number(number, f"{self}: a number in numbers=", minimum=0)
        _require_dtype(self.dtype, "Rule.dtype")
        if not self.scale or not math.isfinite(self.scale) or not math.isfinite(self.offset):
            raise InputError(f"{self} has scale {self.scale} and offset {self.offset}, which have no inverse")
        one_sided = set(captures(self.source)) ^ set(captures(self.target))
        known_axes = {*captures(self.source), *captures(self.target)}
        layout = AxisLayout.parse(self.layout) if self.layout else None
        if layout:
            only = set(axes_of(layout.source)) ^ set(axes_of(layout.target))
            known_axes |= {*axes_of(layout.source), *axes_of(layout.target)}
            if isinstance(self.axis, str):
                one_side = layout.source if len(paths_in(self.target)) > 1 else layout.target
                if not several or self.axis not in only & {*axes_of(one_side)} or self.parts is not None:
                    raise InputError(
                        f"{self}: axis={self.axis!r} must be an axis of only the side with one path, without parts="
                    )
                only -= {self.axis}
            if only != one_sided:
                raise InputError(
                    f"{self}: the layout has axes {sorted(only)} on one side only, and the paths have numbers"
                    f" {sorted(one_sided)} on one side only; they must be the same"
                )
        elif isinstance(self.axis, str):
            raise InputError(f"{self}: axis={self.axis!r} needs a layout with this axis")
        elif one_sided and not self.is_for_container:
            raise InputError(f"{self} stacks or unstacks leaves, so it needs a layout that names the axis")
        self._require_container_rule(one_sided)
        alone = {dim for side in (layout.source, layout.target) for dim in side if len(dim) == 1} if layout else set()
        for axis in self.resized:
            if several or (axis,) not in alone or axis not in self.sizes:
                raise InputError(
                    f"{self}: resized= needs one source, one target, a layout in which {axis!r} is a dimension by"
                    " itself, and its size in the source in sizes="
                )
        if unknown := sorted(map(str, self.numbers.keys() - {*captures(self.source), *captures(self.target)})):
            raise InputError(f"{self}: numbers= names {unknown[0]!r}, which is not a number in its paths")
        if unknown := sorted(map(str, self.sizes.keys() - known_axes)):
            raise InputError(
                f"{self}: sizes= names {unknown[0]!r}, which is not an axis{closest_hint(unknown[0], known_axes)}"
            )

    def _require_container_rule(self, one_sided: Set[str]) -> None:
        """Raise InputError for "**" in a rule that is not for a container, and for what such a rule cannot have."""
        paths = [*paths_in(self.source), *paths_in(self.target)]
        wild = [path for path in paths if "**" in path.split("/")]
        if wild and not (self.is_for_container and all(path.split("/").count("**") == 1 for path in wild)):
            raise InputError(f'{self}: "**" is the last component of one source and one target, or of neither')
        if wild and (self.layout or self.sizes or self.resized or self.parts or self.scales or self.copies):
            raise InputError(f'{self}: "**" is for leaves of any shape, so layout=, sizes= and the like are for others')
        if wild and len(one_sided) > 1:
            raise InputError(f'{self}: with "**", only one number may be on one side, found {sorted(one_sided)}')

    @property
    def is_for_container(self) -> bool:
        """Whether it is for all leaves below a container."""
        return all(isinstance(name, str) and name.split("/")[-1] == "**" for name in (self.source, self.target))

    @property
    def takes_keys(self) -> bool:
        """Whether PRNG keys may be its source: it renames or stacks leaves, and computes nothing."""
        computes = self.dtype or self.scales or self.packed or (self.scale, self.offset) != (1, 0)
        return isinstance(self.source, str) and isinstance(self.target, str) and not computes

    def for_leaf(self, tail: str, ndim: int) -> Rule:
        """The rule for the leaves with this path below the containers of a rule, and this rank in the source."""
        source, target = (f"{str(name)[:-2]}{tail}" for name in (self.source, self.target))
        numbers = captures((source, target))
        layers = [name for name in numbers if (f"{{{name}}}" in source) != (f"{{{name}}}" in target)]
        if not layers:
            return replace(self, source=source, target=target)
        stacks = f"{{{layers[0]}}}" in source
        dims = [f"d{number}_" for number in range(ndim if stacks else ndim - 1)]
        assert isinstance(self.axis, int)  # a named axis needs a layout
        whole = [*dims[: self.axis], layers[0], *dims[self.axis :]]
        sides = (dims, whole) if stacks else (whole, dims)
        if self.axis > len(dims) or (not stacks and not ndim):
            raise MisfitError(f"{show_path(source)} has {ndim} dimensions, too few for axis={self.axis}")
        return replace(self, source=source, target=target, layout=" -> ".join(map(" ".join, sides)), axis=0)

    def __repr__(self) -> str:
        values = ((own.name, getattr(self, own.name)) for own in fields(self))
        shown = (f"{name}={value!r}" for name, value in values if value and (name, value) != ("scale", 1))
        return f"Rule({', '.join(shown)})"

    def __str__(self) -> str:
        return f"rule {_shown(self.source)} → {_shown(self.target)}"


def _require_dtype(name: object, what: str) -> None:
    if name is not None and not (isinstance(name, str) and name in DTYPES):
        raise InputError(
            f"{what} {reprlib.repr(name)} is not the name of a dtype, such as"
            f" 'bfloat16'{closest_hint(str(name), DTYPES)}"
        )


# Names ----------------------------------------------------------------------------------------------------


def _shown(names: Paths) -> str:
    first, *others = paths_in(names)
    return " + ".join([first, "…", others[-1]] if len(others) > 3 else [first, *others])


def paths_in(names: Paths) -> tuple[str, ...]:
    """The paths in `names`, as a tuple."""
    return (names,) if isinstance(names, str) else names


def captures(names: Paths) -> list[str]:
    """The names of the captures, such as `i` for `{i}`, in paths."""
    return list(dict.fromkeys(name for path in paths_in(names) for name in _CAPTURE.findall(path)))


CaptureValues = tuple[tuple[str, int], ...]
"""(name, number) of each capture in a path, sorted by name."""


def matching_paths(
    name: str, paths: Collection[str], numbers: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> dict[CaptureValues, str]:
    """The paths that match a name with captures, by the numbers of the captures; of some, only these `numbers`."""
    if not _CAPTURE.search(name):
        return {(): name} if name in paths else {}
    pattern = re.escape(name)
    for capture in captures(name):
        escaped = re.escape(f"{{{capture}}}")
        values = "|".join(map(str, numbers[capture])) if capture in numbers else "0|[1-9][0-9]{0,17}"
        pattern = pattern.replace(escaped, f"(?P<{capture}>{values})", 1)
        pattern = pattern.replace(escaped, f"(?P={capture})")
    matches = filter(None, map(re.compile(pattern).fullmatch, paths))
    return {tuple(sorted((key, int(value)) for key, value in match.groupdict().items())): match[0] for match in matches}


def tails_below(name: str, paths: Collection[str]) -> dict[str, str]:
    """For each path below the containers that a name with "**" matches: a whole path that has it."""
    head = re.escape(name[:-2])
    for capture in captures(name):
        head = head.replace(re.escape(f"{{{capture}}}"), "(?:0|[1-9][0-9]{0,17})")
    matches = filter(None, map(re.compile(f"{head}(.+)", re.DOTALL).fullmatch, paths))
    return {match[1]: match[0] for match in matches}


def fill_captures(name: str, numbers: Mapping[str, int]) -> str:
    """The path with these numbers in place of the captures."""
    return _CAPTURE.sub(lambda match: str(numbers[match[1]]), name)
