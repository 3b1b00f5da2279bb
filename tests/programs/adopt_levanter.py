"""The hook of docs/adopt.md in Levanter's own Trainer: a run that resumes equals one that does not stop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import optax
from levanter.checkpoint import CheckpointerConfig
from levanter.distributed import DistributedConfig, RayConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from page_blocks import blocks
from processes import PASSED

import jaxckpt

HOOK, SCRIPT = blocks("adopt.md", "Levanter")
In, Out, Batch = hax.Axis("in", 8), hax.Axis("out", 8), hax.Axis("batch", 16)


def loss(model: hax.nn.Linear, x: hax.NamedArray, key: jax.Array | None = None) -> hax.NamedArray:
    return hax.mean((model(x).rename({"out": "in"}) - hax.sin(x)) ** 2, ("batch", "in"))


def data_from(step: int) -> Iterator[hax.NamedArray]:
    for number in itertools.count(step):
        yield hax.named(jax.random.normal(jax.random.key(number), (16, 8)), (Batch, In))


def train(until: int, run: str) -> list[jax.Array]:
    config = TrainerConfig(
        id="test",
        tracker=NoopConfig(),
        ray=RayConfig(auto_start_cluster=False),
        distributed=DistributedConfig(initialize_jax_distributed=False),
        checkpointer=CheckpointerConfig(save_interval=None, keep=[]),
        num_train_steps=until,
        train_batch_size=16,
        tensor_parallel_axes=["out"],
        model_axis_size=2,
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
    )
    config.initialize()
    names = {
        "trainer": Trainer(config, optax.adam(1e-2), loss),
        "key": jax.random.PRNGKey(0),
        "model_init": lambda: hax.nn.Linear.init(In, Out, key=jax.random.key(3)),
        "data_from": data_from,
        "run": run,
    }
    exec(HOOK + SCRIPT.replace("trainer.train(", "trained = trainer.train("), names)
    return jax.tree.leaves(eqx.filter(names["trained"].state, eqx.is_array))


train(25, "run")
assert jaxckpt.Run("run").steps() == [10, 20, 25]
resumed = train(50, "run")
assert jaxckpt.Run("run").steps() == [10, 20, 25, 30, 40, 50]
assert all((a == b).all() for a, b in zip(resumed, train(50, "whole"), strict=True))
assert not Path("checkpoints").exists()
print(PASSED)
