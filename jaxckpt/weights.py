"""Weights for followers: published in bfloat16 as exact differences, which readers apply to get the same bits.

A publication is an ordinary step of a run's directory. An anchor holds the weights. A link holds the XOR with the
previous publication, compressed by zstd, with the low bytes of all words separate from the high bytes. An Adam step at
a small learning rate changes few bfloat16 words. Links are published, checked, leased and deleted like any step.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt._arguments.pytree import flatten
from jaxckpt._arguments.specs import Specs
from jaxckpt._formats.average import average as average
from jaxckpt._formats.sampler_deltas import ENCODINGS, Encoding, PublishedVersion, SamplerDeltas
from jaxckpt._formats.sampler_deltas import require_rules as _require_rules
from jaxckpt._keywords import explain_keywords, explain_names
from jaxckpt._model.select import Rename, Select
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options, options_or_default, require_whole_number
from jaxckpt._rules.rule_set import Rules
from jaxckpt._runs.checkpointer import Checkpointer
from jaxckpt._runs.run import Run
from jaxckpt._save.running_saves import PendingSave
from jaxckpt._store.store_path import local_path
from jaxckpt.errors import DataError, InputError

_ANCHOR = "anchor"
"""The metric that names the anchor of a publication's chain."""

_CHAIN = "chain"
"""The metric that identifies the chain: a random number, because a directory may be emptied and reused with equal step
numbers. Metrics are taken from process 0, so the processes need not agree on it first."""


@explain_names
class Publisher:
    """Publishes weights for followers: bfloat16, as differences from the last publication.

    Every process creates a Publisher with the same arguments, and calls `publish` with the same steps. `subscribe`
    yields the same bits to each follower. Publications are steps in a directory of their own: full weights (an anchor),
    then differences. Only the publications of the last two anchors are kept. The last published weights stay on the
    devices: 2 bytes per parameter.

    Args:
        directory: A local path or a URL that no `Checkpointer` uses.
        anchor_every: How many publications share an anchor. A new follower reads at most this many.
        format: For samplers of other libraries, which read folders `weight_v000001`, …, in a local directory. "xor" and
            "overwrite": versions for sglang's `/pull_weights`, as slime writes them. "sparse": safetensors with flat
            indices and values of the changed elements, for vLLM and TRL. An anchor is a Hugging Face folder. None: for
            `subscribe`.
        rules: With `format`: `Rules` from the published tree to the names of the samplers, such as `rules.inverse()` of
            `huggingface_rules`. They must only move elements, and compute no values.
        base: With `format`: a Hugging Face folder whose other files, such as config.json, each anchor contains.
        options: See `Options`; `compression` is always "zstd", and `non_finite` must be "ignore".

    Raises:
        InputError: The directory has steps that no Publisher wrote, or an argument is invalid.

    Examples:
        >>> import shutil, jax.numpy as jnp, jaxckpt
        >>> shutil.rmtree("/tmp/jaxckpt-doc/weights", ignore_errors=True)
        >>> with jaxckpt.weights.Publisher("/tmp/jaxckpt-doc/weights") as publisher:
        ...     published = [publisher.publish(step, {"w": jnp.full(4, 1 + step / 8)}) for step in range(3)]
        >>> [(step, float(w["w"][0])) for step, w in jaxckpt.weights.subscribe("/tmp/jaxckpt-doc/weights")]
        [(2, 1.25)]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        anchor_every: int = 100,
        format: Encoding | None = None,
        rules: Rules | None = None,
        base: str | os.PathLike[str] | None = None,
        options: Options | None = None,
    ) -> None:
        self._anchor_every = require_whole_number(anchor_every, "anchor_every", minimum=1)
        self._oldest_anchor = -1.0
        """The number of the oldest anchor that is kept."""

        packed = replace(options_or_default(options), compression="zstd")
        if packed.non_finite != "ignore":
            raise InputError('Options.non_finite must be "ignore" in a Publisher, because it stores differences')
        self._deltas: SamplerDeltas | None = None
        if format is not None:
            self._deltas = _sampler_deltas(directory, format, rules, base)
            directory = os.path.join(os.fspath(directory), "_jaxckpt")
        elif rules is not None or base is not None:
            raise InputError("rules= and base= need format=: subscribe takes rename= instead")
        self._checkpointer = Checkpointer(directory, keep_if=self._is_needed, on_preemption="ignore", options=packed)
        newest = self._checkpointer.latest_step()
        self._next = 0 if newest is None else newest + 1
        try:
            self._anchor = -1.0 if newest is None else self._anchor_of(newest)
        except BaseException:
            self._checkpointer.close()  # the directory belongs to another run and stays unchanged
            raise
        self._chain = 0.0
        self._last_weights: Tree = None
        """The last published weights, in bfloat16; None before the first publication and after a failure."""

        self._last_save: PendingSave | None = None
        """The save of the last publication."""

        self._anchor_save: PendingSave | None = None
        """The save of the last anchor."""

    def _anchor_of(self, number: int) -> float:
        return _require_anchor(self._checkpointer.path(number), self._checkpointer.metrics(number))

    def _is_needed(self, number: int, metrics: Mapping[str, float | None]) -> bool:
        return (metrics.get(_ANCHOR) or 0.0) >= self._oldest_anchor

    def publish(self, step: int, weights: Tree) -> bool:
        """Publish weights. Every process calls this.

        Args:
            step: The number of the training step, for followers.
            weights: A pytree of floating-point arrays. It is safe to donate them as soon as this returns.

        Returns:
            Whether the weights are being published: False if `Options.when_busy` skips them.

        Raises:
            InputError: A leaf is not a floating-point array.
            Exception: As `Checkpointer.save`. The next publication is then an anchor.
        """
        step = require_whole_number(step, "step", minimum=0)
        last_weights, self._last_weights = self._last_weights, None
        _require_floats(weights)
        now = _map_by_mesh(_as_bfloat16, weights)
        number = self._next
        linked = (
            last_weights is not None
            # Another save may have reported the failure of the last publication.
            and (self._last_save is None or self._last_save.error is None)
            and number - self._anchor < self._anchor_every
            and _has_same_layout(now, last_weights)
        )
        anchor, chain = (self._anchor, self._chain) if linked else (float(number), random.SystemRandom().random())
        has_failed = self._anchor_save is not None and self._anchor_save.error is not None
        oldest_anchor = self._oldest_anchor if linked or has_failed else self._anchor
        export = None
        if self._deltas is not None:
            oldest = number if self._anchor < 0 else int(max(0.0, oldest_anchor))
            export = PublishedVersion(self._deltas, number + 1, not linked, oldest + 1, step)
        self._next += 1  # even if this fails, because the step may have been published
        saved = self._checkpointer.save(
            number,
            _map_by_mesh(_difference if export is None else _word_difference, now, last_weights) if linked else now,
            metrics={_ANCHOR: anchor, _CHAIN: chain},
            metadata={"step": step, "previous": number - 1 if linked else None},
            export=export,
        )
        if not saved:
            self._last_weights, self._next = last_weights, number
            return False
        self._last_weights, self._last_save = now, self._checkpointer.pending
        if not linked:
            self._oldest_anchor, self._anchor, self._chain = oldest_anchor, anchor, chain
            self._anchor_save = self._last_save
        return True

    def close(self) -> None:
        """Wait for the last publication, and record the end for followers. Raises the error of the publication."""
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._checkpointer.__exit__(kind, error, trace)


def _sampler_deltas(
    directory: str | os.PathLike[str], format: Encoding, rules: Rules | None, base: str | os.PathLike[str] | None
) -> SamplerDeltas:
    """What writes for samplers of other libraries. Raises InputError."""
    if format not in ENCODINGS:
        raise InputError(f"format must be one of {', '.join(map(repr, ENCODINGS))} or None, found {format!r}")
    target, files = local_path(directory, "directory"), None if base is None else local_path(base, "base")
    if target is None or (base is not None and (files is None or not os.path.isdir(files))):
        raise InputError(f"format={format!r} needs a local directory, and base= a local folder")
    return SamplerDeltas(target, format, _require_rules(rules), files)


@explain_keywords
def subscribe(
    directory: str | os.PathLike[str],
    target: Tree = None,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    select: Select | None = None,
    rename: Rename | None = None,
    timeout_seconds: float | None = None,
    poll_seconds: float = 0.1,
    options: Options | None = None,
) -> Generator[tuple[int, Tree]]:
    """Iterate over the weights that a `Publisher` publishes: each iteration yields the newest. One process calls this.

    Args:
        directory: The directory of the `Publisher`.
        target: As for `jaxckpt.restore`; its dtypes must be bfloat16. It has none of the leaves that `select` leaves
            out.
        mesh: As for `jaxckpt.restore`.
        specs: As for `jaxckpt.restore`.
        select: As for `jaxckpt.restore`: follow only these leaves. The others are not read.
        rename: As for `jaxckpt.restore`: a mapping or a function. `Rules` are an error, because they cannot be applied
            to differences.
        timeout_seconds: End without an error if nothing is published for this many seconds; None: no limit.
        poll_seconds: Seconds between checks of the directory.
        options: See `Options`.

    Yields:
        (step, weights): the training step and its weights, bit for bit as published. The next weights are computed from
        these arrays, so do not donate them.

    Raises:
        DataError: A publication since the newest anchor is missing.
        InputError: `directory` holds no published weights; `target` asks for anything other than bfloat16 arrays, or
            has leaves that `select` leaves out; or `rename` is a `Rules`.
        Exception: As `Run.follow` and `jaxckpt.restore`.
    """
    if isinstance(rename, Rules):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            "subscribe takes no Rules as rename=, because they cannot be applied to the differences that are published:"
            " pass a mapping or a function, or apply the rules to the weights before they are published"
        )
    # The returned generator must not depend on the current folder when it runs.
    run = Run(directory, options=options)
    return _subscribe(run, target, mesh, specs, select, rename, timeout_seconds, poll_seconds)


def _subscribe(
    run: Run,
    target: Tree,
    mesh: Mesh | None,
    specs: Specs,
    select: Select | None,
    rename: Rename | None,
    timeout_seconds: float | None,
    poll_seconds: float,
) -> Generator[tuple[int, Tree]]:
    """The generator of `subscribe`."""
    tried: tuple[int, float | None] | None = None
    while True:
        newest = run.latest_step()
        newest_chain, newest_seen = _newest_chain(run, newest), newest or 0
        if newest_chain is not None and newest_chain == tried:
            raise DataError(f"{run.directory} lacks a publication since its newest anchor, {newest_chain[0]}")
        tried = newest_chain
        weights: Tree = None
        last_applied: tuple[int, float | None] | None = None
        after = newest_chain[0] - 1 if newest_chain else -1
        for publication in run._follow(after, -1, timeout_seconds, poll_seconds):  # pyright: ignore[reportPrivateUsage]
            if last_applied is not None and publication.number <= last_applied[0]:  # the directory is used again
                newest_seen = run.latest_step() or 0
            _require_anchor(publication.path, publication.metrics)
            note, chain = publication.open().metadata, publication.metrics.get(_CHAIN)
            if note["previous"] is None:
                weights = publication.restore(target, mesh=mesh, specs=specs, select=select, rename=rename)
                if select is not None:
                    _require_selected(weights, target)
                _require_bfloat16(weights)
            elif (note["previous"], chain) == last_applied:
                link = publication.restore(jax.tree.map(_link_of, weights), select=select, rename=rename)
                weights = _apply_link(weights, link)
            else:  # publications were deleted before this loop reached them
                break
            last_applied = publication.number, chain
            # The newest at the time of the check, because a fast publisher would always be ahead.
            if publication.number >= newest_seen:
                yield note["step"], jax.tree.map(lambda leaf: leaf, weights)  # whose containers the caller may change
                newest_seen = run.latest_step() or 0
        else:
            return


def _newest_chain(run: Run, newest: int | None) -> tuple[int, float | None] | None:
    """(the number of the newest publication's anchor, the id of its chain); None before the first publication."""
    if newest is None:
        return None
    metrics = run.metrics(newest)
    return int(_require_anchor(run.path(newest), metrics)), metrics.get(_CHAIN)


def _require_anchor(path: str, metrics: Mapping[str, float | None]) -> float:
    """The number of the anchor of a publication. Raises InputError for any other step."""
    if (anchor := metrics.get(_ANCHOR)) is None:
        raise InputError(
            f"{path} holds no published weights: Publisher and subscribe need a directory that no Checkpointer uses"
        )
    return anchor


# On the devices -------------------------------------------------------------------------------------------


def _map_by_mesh(function: Callable[..., Sequence[jax.Array]], *trees: Tree) -> Tree:
    """The results of a jitted function of lists, applied to the leaves of trees.

    It is called once for each mesh or set of devices, because JAX compiles no program for several of them.
    """
    columns = [jax.tree.leaves(tree) for tree in trees]
    groups: dict[Hashable, list[int]] = {}
    for number, leaf in enumerate(columns[0]):
        groups.setdefault(_mesh_key(leaf), []).append(number)
    made: list[Any] = [None] * len(columns[0])
    for numbers in groups.values():
        results = function(*([column[number] for number in numbers] for column in columns))
        for number, result in zip(numbers, results, strict=True):
            made[number] = result
    return jax.tree.unflatten(jax.tree.structure(trees[0]), made)


def _mesh_key(leaf: Any) -> Hashable:
    """The mesh or the devices of a leaf; None for a NumPy array."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding.mesh
    return None if sharding is None else frozenset(sharding.device_set)


@jax.jit
def _as_bfloat16(weights: Sequence[jax.Array]) -> list[jax.Array]:
    # Copied, because bfloat16 leaves would otherwise be the caller's arrays, which it may donate.
    return [jnp.array(leaf, jnp.bfloat16, copy=True) for leaf in weights]


def _planes(leaf: jax.Array) -> jax.Array:
    """The low bytes of all words, followed by the high bytes."""
    return jnp.moveaxis(jax.lax.bitcast_convert_type(leaf, jnp.uint8), -1, 0)


@jax.jit
def _difference(now: Sequence[jax.Array], before: Sequence[jax.Array]) -> list[jax.Array]:
    return [_planes(new) ^ _planes(old) for new, old in zip(now, before, strict=True)]


@jax.jit
def _word_difference(now: Sequence[jax.Array], before: Sequence[jax.Array]) -> list[jax.Array]:
    """The XOR of the bits, as bfloat16: rules then move it like the weights."""

    def bits(leaf: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint16)

    return [
        jax.lax.bitcast_convert_type(bits(new) ^ bits(old), jnp.bfloat16) for new, old in zip(now, before, strict=True)
    ]


@jax.jit
def _xor(weights: Sequence[jax.Array], link: Sequence[jax.Array]) -> list[jax.Array]:
    def changed(leaf: jax.Array, planes: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jnp.moveaxis(_planes(leaf) ^ planes, 0, -1), jnp.bfloat16)

    return [changed(leaf, planes) for leaf, planes in zip(weights, link, strict=True)]


def _apply_link(weights: Tree, link: Tree) -> Tree:
    """The weights after the differences in `link`, in the layout of `weights`."""
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), _map_by_mesh(_xor, weights, link), weights)


def _link_of(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape and sharding of a leaf's difference: two planes of bytes, each in the leaf's layout."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P(None, *sharding.spec), memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct((2, *leaf.shape), jnp.uint8, sharding=sharding)


def _has_same_layout(now: Tree, before: Tree) -> bool:
    """Whether both trees have the same structure, shapes and shardings. A difference then moves no leaf."""

    def kinds(tree: Tree) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(leaf.shape, leaf.sharding) for leaf in leaves]

    return kinds(now) == kinds(before)


def _require_floats(weights: Tree) -> None:
    """Raise InputError unless all leaves are floating-point arrays."""
    dtypes = {getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(weights)}
    if all(dtype is not None and jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return  # avoids building up to 20,000 paths
    for leaf in flatten(weights)[0]:
        dtype = getattr(leaf.value, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise InputError(f"weights must be floating-point arrays, but {leaf.path!r} is not")


def _require_selected(weights: Tree, target: Tree) -> None:
    """Raise InputError if a restored tree has values of the target, as it does for leaves that are not selected."""
    values = {id(leaf) for leaf in jax.tree.leaves(target)}
    for leaf in flatten(weights)[0]:
        if id(leaf.value) in values:
            raise InputError(f"target has a leaf {leaf.path!r} that select= leaves out: leave it out of target too")


def _require_bfloat16(weights: Tree) -> None:
    """Raise InputError unless all restored leaves are jax.Arrays in bfloat16."""
    for leaf in flatten(weights)[0]:
        if not isinstance(leaf.value, jax.Array):
            raise InputError(
                f"target must ask for jax.Arrays, and asks for {type(leaf.value).__name__} at {leaf.path!r}: call"
                " np.asarray on what subscribe yields"
            )
        if leaf.value.dtype != jnp.bfloat16:
            raise InputError(
                f"weights are published as bfloat16, but target asks for {leaf.value.dtype} at {leaf.path!r}: cast the"
                " weights that subscribe yields"
            )
