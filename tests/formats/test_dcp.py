"""Checkpoints of torch.distributed.checkpoint, written by real gloo jobs. This process does not import torch."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import processes
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.errors import DataError, NotACheckpointError

pytestmark = [
    pytest.mark.child,
    pytest.mark.filterwarnings("ignore:.*records neither how many files:UserWarning"),
    pytest.mark.skipif(
        not (importlib.util.find_spec("torch") and importlib.util.find_spec("safetensors")),
        reason="torch and safetensors make the checkpoints",
    ),
]

KINDS = ("dtensors", "training", "safetensors")
Written = Callable[[int], Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The folder that a job of one, two or four processes wrote."""
    folder = tmp_path_factory.mktemp("dcp")
    processes.run_python(processes.PROGRAMS / "dcp_writer.py", args=[str(folder), "1", "2", "4"], timeout=240)
    return lambda count: folder / str(count)


def expected(folder: Path, kind: str) -> dict[str, np.ndarray]:
    """Global tensors by path, from their bytes."""
    found: dict[str, np.ndarray] = {}
    with np.load(folder / f"{kind}.npz") as saved:
        for key in saved:
            dtype, sides, path = key.split(":", 2)
            known = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
            found[path] = saved[key].view(known).reshape([int(side) for side in sides.split(",") if side])
    return found


def at(tree: Any, path: str) -> Any:
    for part in path.split("/"):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def same(found: Any, wanted: np.ndarray) -> bool:
    found = np.asarray(found)
    return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def but_opaque(path: str) -> bool:
    return path != "opaque"


@pytest.mark.parametrize(("count", "kind"), list(itertools.product([1, 2, 4], KINDS)))
def test_every_bit_comes_back_as_numpy(written: Written, count: int, kind: str) -> None:
    tree = jaxckpt.load_numpy(written(count) / kind, select=but_opaque)
    tensors = expected(written(count), kind)
    assert len(tensors) >= 3
    for path, wanted in tensors.items():
        assert same(at(tree, path), wanted), path


SPECS = {"rows": P("x", "y"), "columns": P("y", "x"), "both": P(("x", "y"))}


def test_every_bit_comes_back_on_a_mesh(written: Written, run_python: processes.RunPython) -> None:
    """In a separate process, which checks that torch is not imported."""
    folders = [str(written(count)) for count in (1, 2, 4)]
    run_python(processes.PROGRAMS / "dcp_restore.py", args=folders, word=processes.PASSED)


def test_the_metadata_is_the_path_of_its_folder(written: Written) -> None:
    path = written(2) / "training"
    assert jaxckpt.open(path / ".metadata").path == str(path)


def test_python_objects_and_containers_come_back(written: Written) -> None:
    tree = jaxckpt.load_numpy(written(2) / "dtensors", select=but_opaque)
    assert {name: tree[name] for name in ("step", "lr", "name", "betas", "schedule", "nothing")} == {
        "step": 7,
        "lr": 1e-3,
        "name": "run/1",
        "betas": (0.9, 0.999),
        "schedule": [1, 2, 3],
        "nothing": None,
    }
    assert isinstance(tree["layers"], list)
    np.testing.assert_array_equal(tree["array"], np.arange(6, dtype=np.float32).reshape(2, 3))
    group = jaxckpt.load_numpy(written(2) / "training")["optimizer"]["param_groups"][0]
    assert group["params"][0] == "0.weight"
    assert group["betas"] == (0.9, 0.999)


def test_objects_that_need_code_are_named_and_can_be_left_out(written: Written) -> None:
    path = written(2) / "dtensors"
    with pytest.raises(DataError, match=r"(?s)select=:.*'opaque': .*pathlib\.(_local\.)?PosixPath"):
        jaxckpt.load_numpy(path)
    report = jaxckpt.verify(path)
    assert report.ok
    assert [problem.leaf for problem in report.unsupported] == ["opaque"]


def test_restored_and_saved_again_it_is_equal(written: Written, tmp_path: Path) -> None:
    """A restored tree, saved again, is an equal checkpoint in jaxckpt's format."""
    mesh = jax.make_mesh((8,), ("x",))
    path = written(4) / "training"
    state = jaxckpt.restore(path, mesh=mesh, specs=lambda path, leaf: P("x") if leaf.shape[:1] == (24,) else P())
    assert state["model"]["0.weight"].sharding == NamedSharding(mesh, P("x"))
    jaxckpt.save(tmp_path / "ours", state)
    assert not jaxckpt.diff(path, tmp_path / "ours").differing


# Damage ---------------------------------------------------------------------------------------------------

DAMAGE = processes.PROGRAMS / "dcp_damage.py"


@pytest.fixture(scope="session")
def damaged(written: Written, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    out = processes.run_python(DAMAGE, args=[str(written(2) / "training"), str(folder)])
    assert "torch cannot load it" in out
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hole", r"'model.0.weight'.*\n.*\[12:24, 0:12\] is not in any shard"),
        ("overlap", r"'model.0.weight'.*\n.*\[12:13, 0:12\] is in 2 shards"),
        ("beyond", r"'model.0.weight'.*\n.*\[12:24, 0:12\] is outside"),
        ("huge", r"'model.0.weight', float32\[1099511627776, 12\], has \d+ bytes in all"),
        ("nowhere", r"'model.0.weight' at \[0, 0\] is not in any file"),
        ("upwards", "outside its folder"),
        ("absolute", "outside its folder"),
        ("long", r"distcp is \d+ bytes long, expected at least 1099"),
        ("list", r"the container at .*param_groups' has the indices"),
        ("negative", "an entry of its storage_data is damaged"),
        ("path", "is below another leaf"),
        ("same path", "two of its names have the path 'step'"),
        ("hostile place", "an entry of its storage_data is damaged"),
        ("as safetensors", r"written with serialization_format=SAFETENSORS, which torch\..* cannot load either"),
    ],
)
def test_damaged_metadata_is_reported_when_opened(damaged: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        jaxckpt.open(damaged / name)
    assert not (damaged / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another dtype", r"holds float32\[12, 12\], expected int32\[12, 12\]"),
        ("another shape", r"holds float32\[12, 12\], expected float32\[12, 6\]"),
        ("elsewhere", "the archive at byte 100 is damaged"),
        ("encoded", "encoded by zstd"),
    ],
)
def test_wrong_metadata_is_reported_when_read(damaged: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"'model/0.weight'(.|\n)*{message}"):
        jaxckpt.load_numpy(damaged / name)
    rest = jaxckpt.load_numpy(damaged / name, select="optimizer")
    assert rest["optimizer"]["param_groups"][0]["lr"] == 0.01


def test_code_in_unneeded_parts_is_not_run(damaged: Path) -> None:
    assert jaxckpt.load_numpy(damaged / "hostile", select="step")["step"] == 2
    assert not (damaged / "run").exists()


@pytest.fixture
def copied(written: Written, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written(2) / "training", tmp_path / "copy"))


def test_truncated_or_missing_files_are_reported(copied: Path) -> None:
    data = (copied / "__1_0.distcp").read_bytes()
    (copied / "__1_0.distcp").write_bytes(data[:-1])
    with pytest.raises(DataError, match=r"__1_0.distcp is \d+ bytes long"):
        jaxckpt.open(copied)
    (copied / "__1_0.distcp").unlink()
    with pytest.raises(DataError, match=r"__1_0.distcp is missing"):
        jaxckpt.open(copied)
    (copied / ".metadata").write_bytes((copied / ".metadata").read_bytes()[:1000])
    with pytest.raises(DataError, match=r"\.metadata: the pickle"):
        jaxckpt.open(copied)
    (copied / ".metadata").unlink()
    with pytest.raises(NotACheckpointError, match=r"no \.metadata: the save never finished"):
        jaxckpt.open(copied)


def test_verify_finds_a_flipped_bit(written: Written, copied: Path) -> None:
    """By the CRC-32 that torch stores for each tensor."""
    assert jaxckpt.verify(copied).ok
    wanted = expected(written(2), "training")["model/0.weight"][:12].tobytes()
    data = bytearray((copied / "__0_0.distcp").read_bytes())
    data[data.index(wanted) + 100] ^= 4
    (copied / "__0_0.distcp").write_bytes(data)
    report = jaxckpt.verify(copied)
    assert [problem.leaf for problem in report.problems] == ["model/0.weight"]
    assert "its CRC-32 checksum is" in report.problems[0].reason


def test_each_lost_file_is_reported(written: Written, tmp_path: Path) -> None:
    for kind in KINDS:
        folder = Path(shutil.copytree(written(4) / kind, tmp_path / kind))
        *files, last = sorted(folder.iterdir())
        for lost in [*files, *([last] if kind != "safetensors" else [])]:  # their number is not recorded
            lost.rename(tmp_path / "lost")
            with pytest.raises((DataError, NotACheckpointError)):
                jaxckpt.open(folder)
            (tmp_path / "lost").rename(lost)
        jaxckpt.open(folder)


def test_sharded_safetensors_must_cover(written: Written, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written(4) / "safetensors", tmp_path / "copy"))
    with pytest.warns(UserWarning, match="records neither how many files it has .* 4 ranks"):
        jaxckpt.open(folder)
    lost = folder / "shard-00002-model-00001-of-00001.safetensors"
    lost.rename(folder / "x")
    with pytest.raises(DataError, match="a file for shard 4, but none for shard 2"):
        jaxckpt.open(folder)
    shutil.copy(folder / "shard-00001-model-00001-of-00001.safetensors", lost)
    with pytest.raises(DataError, match=r"'model\.(rows|columns)'.*\n.* is in 2 shards"):
        jaxckpt.open(folder)


# Megatron Core --------------------------------------------------------------------------------------------

MEGATRON = Path(__file__).parents[1] / "data" / "megatron"


def megatron(path: Path) -> Any:
    return jaxckpt.load_numpy(path, select=lambda name: not name.startswith("args"))


def test_a_folder_of_megatron_has_its_common_state() -> None:
    found = megatron(MEGATRON)
    norm = np.float32([[0, 0, 0], [1, 1, 1]])
    wanted = {
        "checkpoint_version": 3.0,
        "decoder.bias": np.arange(4).astype(ml_dtypes.bfloat16),
        "decoder.layers.extra_state/shard_0_2": [{"scale": np.ones(2, np.float32)}],
        "decoder.layers.extra_state/shard_1_2": [{"scale": np.ones(2, np.float32)}],
        "decoder.layers.norm": norm,
        "decoder.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
        "iteration": 7,
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "step": np.array(3)},
    }
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert all(same(a, np.asarray(b)) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    with pytest.raises(DataError, match=r"(?s)select=:.*'args': it holds an object made by argparse\.Namespace"):
        jaxckpt.load_numpy(MEGATRON)


def test_each_lost_file_of_megatron_is_reported(tmp_path: Path) -> None:
    wanted = megatron(MEGATRON)
    for lost in sorted(MEGATRON.iterdir()):
        folder = Path(shutil.copytree(MEGATRON, tmp_path / lost.name))
        (folder / lost.name).unlink()
        if lost.name in ("make.py", "metadata.json"):
            assert jax.tree.structure(megatron(folder)) == jax.tree.structure(wanted)
        else:
            with pytest.raises((DataError, NotACheckpointError)):
                megatron(folder)
            assert lost.name == ".metadata" or not jaxckpt.verify(folder).ok


def test_a_newer_megatron_has_its_common_state_among_the_objects(tmp_path: Path) -> None:
    processes.run_python(processes.PROGRAMS / "newer_megatron.py", args=[str(tmp_path / "x")])
    (tmp_path / "x" / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    found = jaxckpt.load_numpy(tmp_path / "x")
    assert {name: found[name] for name in ("iteration", "optimizer")} == {"iteration": 7, "optimizer": {"lr": 0.1}}
    assert found.keys() == {"weight", "iteration", "optimizer"}


def test_an_old_backend_of_megatron_is_refused(tmp_path: Path) -> None:
    shutil.copy(MEGATRON / "common.pt", tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    zarr = pytest.importorskip("zarr")
    zarr.open_group(tmp_path, mode="a", zarr_format=2).create_array("decoder.weight", data=np.ones((2, 3)))
    with pytest.raises(NotACheckpointError, match="another backend of Megatron than torch_dist"):
        jaxckpt.open(tmp_path)
    (tmp_path / "metadata.json").write_text('{"model": "mine"}')
    assert jaxckpt.load_numpy(tmp_path)["decoder.weight"].shape == (2, 3)


def test_a_name_that_is_both_common_and_sharded_is_reported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MEGATRON, tmp_path / "x"))
    program = "import sys, torch; torch.save({sys.argv[2]: 1}, sys.argv[1])"
    processes.run_python(program, args=[str(folder / "common.pt"), "decoder.bias"])
    with pytest.raises(DataError, match=r"common\.pt: 'decoder\.bias' is in both the common"):
        jaxckpt.open(folder)
