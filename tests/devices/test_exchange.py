"""Boxes that no process holds completely, sent to all processes: every dtype, bit for bit."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PROGRAMS, RunProcesses

from jaxckpt._devices.interconnect import box_replicator, transfer_context
from jaxckpt._model.dtypes import DTYPES


def test_positions_in_a_split_dimension_have_64_bits() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    with transfer_context(mesh):
        long = jax.ShapeDtypeStruct((1 << 34,), jnp.int8, sharding=sharding)
        program = jax.make_jaxpr(box_replicator(sharding, (16,)))(long, jax.ShapeDtypeStruct((1,), jnp.int64))
    products = re.findall(r"(\w+)\[\] = mul", str(program))
    assert products == ["i64"], program


def test_every_dtype_keeps_its_bits(run_processes: RunProcesses) -> None:
    done = run_processes(PROGRAMS / "exchange_every_dtype.py", processes=2, devices_per_process=2, timeout=200)
    # Two dtypes have every spec, the others have one spec and one box.
    shards = 2 * (5 + 5 + len(DTYPES) - 2)
    assert [one.stdout for one in done] == [f"{shards}\n"] * 2
