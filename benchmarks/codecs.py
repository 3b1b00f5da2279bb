"""Codecs on a trained model's state: the compressed size, and the CPU time of one core to encode and decode.

A transformer learns with Adam to predict the next byte of this project's pages and sources. tensorstore then encodes
and decodes the model's state in memory, in chunks of 512 KiB with checksums, as in a checkpoint. This takes two to
three minutes on two cores.

    python benchmarks/codecs.py [steps]
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import tensorstore as ts

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 256, 4, 4, 64, 8
CHUNK_BYTES, ROUNDS, GIB = 512 << 10, 3, 1 << 30

Array = np.ndarray[Any, Any]


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, WIDTH)(tokens) + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x += nn.SelfAttention(HEADS)(nn.LayerNorm()(x), mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(256)(nn.LayerNorm()(x))


def trained(steps: int) -> tuple[Any, Any]:
    """Parameters and Adam's state after this number of steps."""
    root = Path(__file__).parents[1]
    files = sorted([*root.glob("docs/*.md"), *root.glob("jaxckpt/**/*.py")])
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    draw = np.random.default_rng(0)
    model, optimizer = Transformer(), optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    state = optimizer.init(params)

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    for number in range(1, steps + 1):
        begun = draw.integers(0, len(text) - LENGTH - 1, BATCH)
        tokens = np.stack([text[start : start + LENGTH + 1] for start in begun]).astype(np.int32)
        params, state, loss = step(params, state, tokens)
        if number in (1, steps // 2, steps):
            print(f"step {number}: loss {float(loss):.2f}", file=sys.stderr)
    return params, state


def flat(tree: Any, dtype: Any = np.float32) -> Array:
    return np.concatenate([np.asarray(leaf).astype(dtype).ravel() for leaf in jax.tree.leaves(tree)])


def codecs(itemsize: int) -> dict[str, dict[str, Any] | None]:
    found: dict[str, dict[str, Any] | None] = {"none": None}
    for level in (1, 3, 9):
        found[f"zstd {level}"] = {"name": "zstd", "configuration": {"level": level}}
    for shuffle, level in itertools.product(("noshuffle", "shuffle", "bitshuffle"), (1, 3, 5)):
        settings = {"cname": "zstd", "clevel": level, "shuffle": shuffle, "typesize": itemsize, "blocksize": 0}
        found[f"blosc {shuffle} {level}"] = {"name": "blosc", "configuration": settings}
    return found


def measured(values: Array, codec: dict[str, Any] | None) -> tuple[float, float, float]:
    """(compressed share of the size, CPU seconds per GiB to encode, to decode); the best of several rounds."""
    held = values.view(f"u{values.itemsize}") if values.dtype == ml_dtypes.bfloat16 else values
    encodings, decodings, left = [], [], 0
    for _ in range(ROUNDS):
        array = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "memory"},
                "metadata": {
                    "shape": held.shape,
                    "data_type": str(held.dtype),
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": [CHUNK_BYTES // held.itemsize]},
                    },
                    "codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        *([codec] if codec else []),
                        {"name": "crc32c"},
                    ],
                },
            },
            create=True,
            context=ts.Context({"data_copy_concurrency": {"limit": 1}}),
        ).result()
        begun = time.process_time()
        array.write(held).result()
        encoded = time.process_time()
        assert np.array_equal(array.read().result(), held)
        decoded = time.process_time()
        assert array.kvstore is not None
        keys = [key for key in array.kvstore.list().result() if not key.endswith(b".json")]
        left = sum(len(array.kvstore.read(key).result().value) for key in keys)
        encodings.append((encoded - begun) / held.nbytes * GIB)
        decodings.append((decoded - encoded) / held.nbytes * GIB)
    return left / held.nbytes, min(encodings), min(decodings)


def main() -> None:
    params, state = trained(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
    groups = {
        "parameters, bfloat16": flat(params, ml_dtypes.bfloat16),
        "parameters, float32": flat(params),
        "first moments, float32": flat(state[0].mu),
        "second moments, float32": flat(state[0].nu),
    }
    for name, values in groups.items():
        print(f"\n{name}: {values.nbytes / 1e6:.1f} MB\n")
        print("| codec | left | encode, s/GiB | decode, s/GiB |\n|---|---:|---:|---:|")
        for codec, settings in codecs(values.itemsize).items():
            left, encode, decode = measured(values, settings)
            print(f"| {codec} | {left:.3f} | {encode:.2f} | {decode:.2f} |", flush=True)


if __name__ == "__main__":
    main()
