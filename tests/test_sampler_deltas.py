"""Weights for samplers of other libraries: each version has the bits that were published, under their names."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from processes import PROGRAMS, RunProcesses, environment, start
from sampler import Sampler

import jaxckpt

DATA = Path(__file__).parent / "data" / "transformers" / "llama"
FAST = jaxckpt.Options(sync=False)
ENCODINGS = ["xor", "overwrite", "sparse"]
rules = jaxckpt.rules.huggingface_rules(DATA, scan=True)


def last_dimension(path: str, leaf: Any) -> P:
    dims = [dim for dim, side in enumerate(leaf.shape) if side % 4 == 0]
    return P(*("model" if dims and dim == dims[-1] else None for dim in range(len(leaf.shape))))


@pytest.fixture(scope="module")
def params() -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    return jaxckpt.restore(DATA, mesh=mesh, specs=last_dimension, rename=rules)


def trained(params: Any, step: int) -> Any:
    """The weights of a step: few words differ from those of the step before."""
    return jax.tree.map(lambda leaf: leaf * (1 + 2e-4 * step), params)


def scaled(scale: float, leaf: Any) -> jax.Array:
    return jnp.asarray(leaf * scale)


def require_bits(sampler: Sampler, weights: Any, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    bits = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    jaxckpt.save(folder, bits, options=FAST)
    expected = jaxckpt.load_numpy(folder, rename=rules.inverse())
    found = sampler.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_version_has_the_published_bits(encoding: Any, params: Any, tmp_path: Path) -> None:
    sampler, late = Sampler(tmp_path / "w"), Sampler(tmp_path / "w")
    with jaxckpt.weights.Publisher(
        tmp_path / "w", anchor_every=4, format=encoding, rules=rules.inverse(), base=DATA, options=FAST
    ) as publisher:
        for step in range(10):
            assert publisher.publish(step, trained(params, step))
            publisher._checkpointer.wait()
            assert sampler.newest() == step + 1
            sampler.pull(step + 1)
            require_bits(sampler, trained(params, step), tmp_path / "expected")
    late.pull(10)
    require_bits(late, trained(params, 9), tmp_path / "expected")
    kept = sorted(name for name in os.listdir(tmp_path / "w") if name.startswith("weight_v"))
    assert kept == [f"weight_v{version:06d}" for version in range(5, 11)], "the last two anchors and their differences"
    full, delta = ((tmp_path / f"w/weight_v{version:06d}") for version in (9, 10))
    assert (full / "config.json").read_bytes() == (DATA / "config.json").read_bytes()
    assert jaxckpt.load_numpy(full).keys() == jaxckpt.load_numpy(DATA).keys()
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (full, delta)]
    assert sizes[1] < sizes[0]


def test_transformers_loads_a_full_version(params: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers loads the version")
    with jaxckpt.weights.Publisher(tmp_path, format="xor", rules=rules.inverse(), base=DATA, options=FAST) as publisher:
        publisher.publish(0, params)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weight_v000001")
    assert model.num_parameters() == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_publisher_that_starts_again_publishes_everything(encoding: Any, params: Any, tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "w")
    for life in range(3):
        with jaxckpt.weights.Publisher(
            tmp_path / "w", format=encoding, rules=rules.inverse(), options=FAST
        ) as publisher:
            for step in (2 * life, 2 * life + 1):
                publisher.publish(step, trained(params, step))
        (tmp_path / "w/.weight_v000099").mkdir()  # as of a job that was killed; the next one deletes it
        sampler.pull(sampler.newest())
        require_bits(sampler, trained(params, 2 * life + 1), tmp_path / "expected")


def test_after_a_failure_everything_is_published(params: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxckpt._formats import sampler_deltas

    write, failures = sampler_deltas.write_tensors, [OSError(28, "no space left")]

    def failing(path: str, *rest: Any) -> None:
        if "weight_v000003" in path and failures:
            raise failures.pop()
        write(path, *rest)

    monkeypatch.setattr(sampler_deltas, "write_tensors", failing)
    sampler = Sampler(tmp_path / "w")
    with jaxckpt.weights.Publisher(tmp_path / "w", format="xor", rules=rules.inverse(), options=FAST) as publisher:
        for step in range(3):
            publisher.publish(step, trained(params, step))
        with pytest.raises(jaxckpt.errors.StorageError, match="no space left"):
            publisher.publish(3, trained(params, 3))
        assert publisher.publish(4, trained(params, 4))
        publisher._checkpointer.wait()
        sampler.pull(sampler.newest())
        require_bits(sampler, trained(params, 4), tmp_path / "expected")


def test_several_processes_write_their_own_tensors(run_processes: RunProcesses, tmp_path: Path) -> None:
    given = {"model": str(DATA), "out": str(tmp_path), "encodings": ENCODINGS}
    run_processes(PROGRAMS / "sampler_deltas.py", processes=2, devices_per_process=4, args=given, timeout=120)
    for encoding in ENCODINGS:
        sampler = Sampler(tmp_path / encoding)
        for version in (1, 2, 3):
            sampler.pull(version)
            expected = jaxckpt.load_numpy(tmp_path / f"expected-{version - 1}", rename=rules.inverse())
            found = sampler.tensors()
            assert found.keys() == expected.keys()
            assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
            assert len([*(tmp_path / encoding / f"weight_v{version:06d}").glob("*.safetensors")]) == 2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_bit_pattern(encoding: Any, tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    with jaxckpt.weights.Publisher(tmp_path, format=encoding, options=FAST) as publisher:
        for words in (bits, bits[::-1].copy(), bits ^ 1):
            publisher.publish(0, {"x": jnp.asarray(words.view(jnp.bfloat16))})
    sampler = Sampler(tmp_path)
    sampler.pull(3)
    np.testing.assert_array_equal(sampler.words["x"], bits ^ 1)


@pytest.mark.child
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_publisher_that_is_killed_publishes_no_wrong_bits(
    encoding: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The campaign publishes 1,000 versions, a third in each encoding, and kills the publishers at random moments."""
    if not request.config.getoption("--campaign"):
        pytest.skip("the campaign kills publishers")
    out, chance, last, kills, checked = tmp_path / "w", random.Random(0), 340, 0, 0
    sampler, floats = Sampler(out), jaxckpt.load_numpy(DATA, rename=rules)
    command = [str(PROGRAMS / "sampler_publisher.py"), str(out), encoding, str(DATA), str(last)]
    while sampler.newest() < last:
        child, end = start(command, environment(1)), time.monotonic() + chance.uniform(4, 20)
        while child.poll() is None and (kills >= 20 or time.monotonic() < end):
            newest = sampler.newest()
            if newest == sampler.version:
                time.sleep(0.01)
                continue
            try:
                sampler.pull(newest)
            except FileNotFoundError:  # deleted before it was read
                continue
            step = jaxckpt.open(out / f"_jaxckpt/{newest - 1:08d}").metadata["step"]
            scale = 1 + 1e-4 * (step * 7919 % 1009)
            require_bits(sampler, jax.tree.map(functools.partial(scaled, scale), floats), tmp_path / "e")
            checked += 1
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.wait()
    print(f"{encoding}: {last} versions, {kills} kills, {checked} pulls compared bit for bit")
    assert kills > 2
    assert checked > last // 4


def test_a_flipped_bit_is_found_by_the_checksums(params: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The campaign flips 300 random bits of each encoding with checksums, in turn."""
    chance, rounds = random.Random(0), 300 if request.config.getoption("--campaign") else 3
    for encoding in ("xor", "overwrite"):
        out = tmp_path / encoding
        with jaxckpt.weights.Publisher(out, format=encoding, rules=rules.inverse(), options=FAST) as publisher:
            for step in (0, 1):
                publisher.publish(step, trained(params, step))
        (file,) = (out / "weight_v000002").glob("*.safetensors")
        content, n_found = file.read_bytes(), 0
        for _ in range(rounds):
            flipped, position = bytearray(content), chance.randrange(len(content))
            flipped[position] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            sampler = Sampler(out)
            try:
                sampler.pull(2)
            except (ValueError, RuntimeError, AssertionError, LookupError, MemoryError, OverflowError):
                n_found += 1
            else:  # a bit that no reader uses
                require_bits(sampler, trained(params, 1), tmp_path / "expected")
        assert n_found > 0.8 * rounds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "zip"}, "format must be one of 'xor', 'overwrite', 'sparse' or None"),
        ({"rules": rules}, "rules= and base= need format="),
        ({"format": "xor", "base": "missing"}, "base= a local folder"),
        ({"format": "xor", "rules": {"a": "b"}}, "rules must be jaxckpt.rules.Rules, found dict"),
        (
            {"format": "xor", "rules": jaxckpt.rules.Rules([jaxckpt.rules.Rule(source="a", target="b", offset=1.0)])},
            "computes values, and differences can only be moved",
        ),
    ],
)
def test_invalid_arguments(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=message):
        jaxckpt.weights.Publisher(tmp_path / "w", **arguments)
    assert not any(tmp_path.iterdir())
