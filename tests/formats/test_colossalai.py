"""ColossalAI's checkpoints, written in a process with torch by the steps of ColossalAI's source."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import processes
import pytest
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import Options
from jaxckpt.errors import DataError, InputError

pytestmark = [
    pytest.mark.child,
    pytest.mark.skipif(
        not (importlib.util.find_spec("torch") and importlib.util.find_spec("safetensors")),
        reason="torch and safetensors make the checkpoints",
    ),
]

SHAPES = {
    "embed.weight": (14, 8),
    "layers.0.up.weight": (16, 8),
    "layers.0.up.bias": (16,),
    "layers.0.down.weight": (8, 16),
    "layers.0.norm.weight": (8,),
    "layers.0.rotary": (4,),
    "layers.1.up.weight": (16, 8),
    "layers.1.norm.weight": (8,),
    "head.weight": (14, 8),
}
FLOAT32 = {"layers.0.norm.weight", "layers.1.norm.weight", "layers.0.rotary", "head.weight"}
OF_RANKS = [f"{files} of each rank, {kind}" for files in ("file", "files") for kind in ("bin", "safetensors")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colossalai")
    processes.run_python(Path(__file__).parents[1] / "programs" / "colossalai_writer.py", args=[str(folder)])
    return folder


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "file of each rank, safetensors", tmp_path / "copy"))


def require_expected(folder: Path, found: dict[str, Any], missing: set[str]) -> None:
    assert found.keys() == SHAPES.keys() - missing
    for name, array in found.items():
        wanted = (folder / "expected" / name).read_bytes()
        assert (array.shape, np.asarray(array).tobytes()) == (SHAPES[name], wanted), name
        assert array.dtype == ("float32" if name in FLOAT32 else "bfloat16"), name


@pytest.mark.parametrize("name", [*OF_RANKS, "whole"])
def test_every_bit_comes_back(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    missing = {"layers.0.rotary"} if name == "whole" else set()
    require_expected(folder, jaxckpt.load_numpy(folder / name), missing)
    for sides in ((2, 4), (3, 2)):
        mesh = jax.make_mesh(sides, ("x", "y"), devices=jax.devices()[: sides[0] * sides[1]])
        tree = jaxckpt.restore(
            folder / name,
            mesh=mesh,
            specs=lambda path, leaf: P("x", "y") if len(leaf.shape) == 2 else P("x"),
            options=Options(indivisible="replicate"),
        )
        require_expected(folder, tree, missing)
    assert jaxckpt.verify(folder / name).ok
    assert jaxckpt.open(folder / name).format == "colossalai"


@pytest.mark.parametrize("name", ["optimizer", "optimizer in background"])
def test_the_state_of_an_optimizer_comes_back(folder: Path, name: str) -> None:
    tree = jaxckpt.load_numpy(folder / name)
    assert tree["param_groups"] == [{"lr": 0.01, "betas": (0.9, 0.999), "amsgrad": False, "params": [0, 1, 2]}]
    assert set(tree["state"]) == {0, 1, 2}
    for number, state in tree["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].tobytes() == (folder / "expected" / str(number) / key).read_bytes()
        assert state["step"] == 3
    assert tree["state"][0].get("extra") == ({"a": [1, 2]} if name == "optimizer in background" else None)


def test_a_model_and_its_optimizer_in_one_folder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "whole", tmp_path / "both")
    shutil.copytree(folder / "optimizer", tmp_path / "both", dirs_exist_ok=True)
    tree = jaxckpt.load_numpy(tmp_path / "both")
    assert tree["model"].keys() == SHAPES.keys() - {"layers.0.rotary"}
    assert tree["optimizer"].keys() == {"param_groups", "state"}
    shutil.copytree(folder / OF_RANKS[0], tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(InputError, match="several index files"):
        jaxckpt.open(tmp_path / "both")


def test_a_model_in_safetensors_and_its_optimizer_in_one_folder(folder: Path, tmp_path: Path) -> None:
    jaxckpt.convert(folder / "whole", tmp_path / "both", format="safetensors")  # as save_model(use_safetensors=True)
    shutil.copytree(folder / "optimizer in background", tmp_path / "both", dirs_exist_ok=True)
    tree = jaxckpt.load_numpy(tmp_path / "both")
    require_expected(folder, tree["model"], {"layers.0.rotary"})
    assert tree["optimizer"].keys() == {"param_groups", "state"}


def test_a_model_of_hugging_face_may_also_have_an_index_of_bin_files(folder: Path, tmp_path: Path) -> None:
    jaxckpt.convert(folder / "whole", tmp_path / "model", format="safetensors")
    shutil.copy(folder / "whole" / "pytorch_model.bin.index.json", tmp_path / "model")
    assert jaxckpt.open(tmp_path / "model").format == "safetensors"
    require_expected(folder, jaxckpt.load_numpy(tmp_path / "model"), {"layers.0.rotary"})


def change(folder: Path, number: int, name: str, **changes: Any) -> None:
    path = folder / f"pytorch_model-meta-dist-{number:05d}.json"
    record = json.loads(path.read_text())
    record["metadata"][name] |= changes
    path.write_text(json.dumps(record))


def test_a_rank_that_is_missing_is_reported(copied: Path) -> None:
    record = json.loads((copied / "pytorch_model-meta-dist-00001.json").read_text())
    del record["metadata"]["layers.0.up.weight"]
    (copied / "pytorch_model-meta-dist-00001.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"'layers.0.up.weight'.*\n.*\[8:16, 0:8\] is not in any shard"):
        jaxckpt.open(copied)
    (copied / "pytorch_model-meta-dist-00001.json").unlink()
    with pytest.raises(DataError, match=r"meta-dist files \[0, 2, 3\]: some are missing"):
        jaxckpt.open(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": [4, 0]}, r"\[8, 8\] in .*, expected|\[4:8, 0:8\] is in 2 shards"),
        ({"offsets": [0, 0]}, r"\[8:16, 0:8\] is not in any shard"),
        ({"lengths": [6, 8]}, r"is \[8, 8\] in .*00001.safetensors, expected \[6, 8\] at \[8, 0\] of \[16, 8\]"),
        ({"lengths": [9, 8]}, r"is \[8, 8\] in .*, expected \[9, 8\]"),
        ({"lengths": [8]}, "have different numbers of dimensions"),
        ({"offsets": [-8, 0]}, "is damaged"),
        ({"global_shape": [24, 8]}, r"global_shape \[24, 8\] in .*00001.safetensors, \[16, 8\] in"),
        ({"file": "../copy/pytorch_model-dist-00001.safetensors"}, "outside its folder"),
        ({"file": "/etc/passwd"}, "outside its folder"),
        ({"file": "gone.safetensors"}, "gone.safetensors is missing"),
        ({"file": "pytorch_model-dist-00002.safetensors"}, "which should hold it"),
    ],
)
def test_metadata_that_does_not_fit_is_reported(copied: Path, changes: dict[str, Any], message: str) -> None:
    change(copied, 1, "layers.0.up.weight", **changes)
    with pytest.raises(DataError, match=message):
        jaxckpt.open(copied)


def test_replicas_must_be_the_same(copied: Path, folder: Path) -> None:
    data = bytearray((copied / "pytorch_model-dist-00001.safetensors").read_bytes())
    wanted = (folder / "expected" / "layers.0.norm.weight").read_bytes()
    data[data.index(wanted)] ^= 1
    (copied / "pytorch_model-dist-00001.safetensors").write_bytes(data)
    with pytest.raises(DataError, match=r"'layers.0.norm.weight'.*not the same in .*00000.* and .*00001"):
        jaxckpt.load_numpy(copied)
    assert jaxckpt.load_numpy(copied, select="head.weight")


def test_an_index_that_does_not_fit_is_reported(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "whole", tmp_path / "copy"))
    path = copy / "pytorch_model.bin.index.json"
    record = json.loads(path.read_text())
    for weight_map, message in (
        ({**record["weight_map"], "more": "pytorch_model-00001.bin"}, "'more' is in the index but not in the file"),
        ({**record["weight_map"], "more": "../pytorch_model-00001.bin"}, "outside its folder"),
        (dict(list(record["weight_map"].items())[1:]), "'embed.weight' is in the file but not in the index"),
        ({"a": 1}, "is damaged"),
    ):
        path.write_text(json.dumps({**record, "weight_map": weight_map}))
        with pytest.raises(DataError, match=message):
            jaxckpt.open(copy)
