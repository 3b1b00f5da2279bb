"""Types of the arguments of a restore, for signatures whose result has the type of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec, Sharding

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._model.select import Select
from jaxckpt._restore.strictness import Strict
from jaxckpt._rules.rename import Renaming

T = TypeVar("T")

DescribedLeaf: TypeAlias = jax.ShapeDtypeStruct | Sharding | PartitionSpec

DescribedTree: TypeAlias = "DescribedLeaf | Mapping[str, DescribedTree] | Sequence[DescribedTree] | None"
"""A target that describes arrays. The result has arrays in their places, so its type is another."""


class RestoreArguments(TypedDict, total=False):
    """The keyword arguments that every restore takes; `jaxckpt.restore` describes them."""

    mesh: Mesh | None
    specs: Specs
    select: Select | None
    rename: Renaming | None
    strict: Strict
    dtype: Dtypes
    tied: bool
