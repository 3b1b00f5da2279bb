"""Checkpoints that OneFlow 0.9.0 wrote, in tests/data/oneflow, and checkpoints in the form of OneFlow 1.0.

OneFlow 1.0 has no wheels on PyPI, so this file follows its source. The bytes were compared with those that its
check_point_v2.py writes when it runs on OneFlow 0.9.0.

python/oneflow/framework/check_point_v2.py: save, tensor_getstate, _save_tensor_to_disk, legacy_load
python/oneflow/framework/tensor.py: _numpy (bfloat16 as float32)
oneflow/api/python/framework/tensor.cpp: MakeTensorType ("oneflow.Tensor"), MakeParameterType ("oneflow.nn.Parameter")
oneflow/api/python/framework/dtype.cpp: py::pickle, the number of the data type
"""

from __future__ import annotations

import collections
import functools
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from recorded import DATA, decoded, recorded, require_same

import jaxckpt
from jaxckpt import JaxckptError
from jaxckpt.errors import DataError, NotACheckpointError, SpecError

# Files that OneFlow wrote ----------------------------------------------------------------------------------

REAL, EXPECTED = DATA / "oneflow", recorded("oneflow")


def test_optimizer_states_have_numbers_and_names_as_keys() -> None:
    """JAX cannot flatten OneFlow's dict {"step": 2, 0: {…}}, so the order of the file is kept."""
    found = jaxckpt.load_numpy(REAL / "adam")["state"]
    assert type(found) is collections.OrderedDict
    assert list(found) == ["step", 0, 1, 2, 3]
    assert jaxckpt.open(REAL / "adam").format == "oneflow"
    assert jaxckpt.open(REAL / "adam")["state/0/exp_avg"].shape == (3, 4)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), {"state": found})
    target["state"]["step"] = 0
    require_equal(
        jaxckpt.restore(REAL / "adam", target, select=lambda path: path.startswith("state/")), {"state": found}
    )


def test_ranks_of_a_oneflow_job_are_combined() -> None:
    files = {rank: REAL / f"rank{rank}" for rank in range(4)}
    split = {"rows": P(("a", "b")), "columns": P(None, ("a", "b")), "both": P("a", "b"), "whole": P(), "count": P()}
    found = jaxckpt.formats.oneflow_ranks(files, mesh={"a": 2, "b": 2}, specs={"state": split})
    wanted = decoded(EXPECTED["global"])
    del wanted["state"]["sum"]  # its parts must be summed, which a reader does not do
    require_same(jaxckpt.load_numpy(found), wanted)


def test_a_oneflow_graph_in_stages_is_combined() -> None:
    def split(path: str, leaf: Any) -> P:
        if path.endswith("m_stage3.linear.weight"):
            return P(None, "rank")
        return P() if path.endswith(("m_stage3.linear.bias", "TrainStep")) else P("rank")

    found = jaxckpt.load_numpy(
        jaxckpt.formats.oneflow_ranks({0: REAL / "graph/rank0", 1: REAL / "graph/rank1"}, specs=split)
    )
    with np.load(REAL / "graph" / "loaded.npz") as loaded:
        wanted = {name: loaded[name] for name in loaded.files}
    step = wanted.pop("System-Train-TrainStep")
    names = {name.partition("/")[2]: array for name, array in wanted.items()}
    require_same(found, {"module_pipeline": names, "System-Train-TrainStep": step})


def test_a_graph_of_oneflow_opens(tmp_path: Path) -> None:
    """flow.save of a graph writes model.mlir next to the folders of its variables."""
    shutil.copytree(REAL / "variables", tmp_path / "graph")
    (tmp_path / "graph" / "snapshot_done").rename(tmp_path / "graph" / "model.mlir")
    require_same(jaxckpt.load_numpy(tmp_path / "graph"), decoded(EXPECTED["variables"]))


def test_each_lost_file_of_oneflow_is_reported(tmp_path: Path) -> None:
    for file in sorted((REAL / "adam").rglob("*")):
        copy = tmp_path / file.relative_to(REAL).as_posix().replace("/", "_")
        shutil.copytree(REAL / "adam", copy)
        lost = copy / file.relative_to(REAL / "adam")
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
        with pytest.raises((DataError, NotACheckpointError)):
            jaxckpt.load_numpy(copy)
        if file.name == "pickled_data":
            with pytest.raises(DataError, match="pickled_data is missing"):
                jaxckpt.formats.oneflow_ranks({0: copy})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "python"])
def test_damaged_pickles_of_oneflow_raise_our_errors(name: str, tmp_path: Path) -> None:
    shutil.copytree(REAL / name, tmp_path / "x")
    pickled = tmp_path / "x" / "pickled_data"
    whole = pickled.read_bytes()
    for at in range(len(whole)):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]):
            pickled.write_bytes(content)
            try:
                jaxckpt.load_numpy(tmp_path / "x")
            except JaxckptError:
                continue
            assert len(content) == len(whole)


# As OneFlow 1.0 writes ------------------------------------------------------------------------------------

NUMBERS = {"float32": 2, "float64": 3, "int64": 6, "float16": 9, "bfloat16": 11, "bool": 12, "complex64": 20}
NAMES = {"float32": "kFloat", "float64": "kDouble", "int64": "kInt64", "float16": "kFloat16", "bfloat16": "kBFloat16"}


class dtype:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return __import__("copyreg").__newobj__, (dtype,), self.number


class Tensor:
    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def numpy(self) -> np.ndarray:
        return self.array.astype(np.float32) if self.array.dtype == ml_dtypes.bfloat16 else self.array

    def __reduce__(self) -> Any:
        if folder is None:
            state = {"data": self.numpy(), "dtype": dtype(NUMBERS[self.array.dtype.name]), "device": "cpu"}
        else:
            name = f"tensor_{sum(path.is_dir() for path in folder.iterdir())}"
            save_tensor(folder / name, self)
            state = {"path": name}
        return __import__("copyreg").__newobj__, (type(self),), state


class Parameter(Tensor):
    pass


folder: Path | None = None
"""The folder that OneFlow calls save_load_path."""


def save_tensor(path: Path, tensor: Tensor) -> None:
    path.mkdir()
    (path / "out").write_bytes(tensor.numpy().tobytes())
    dims = "".join(f"  dim: {side}\n" for side in tensor.array.shape)
    (path / "meta").write_text(f"shape {{\n{dims}}}\ndata_type: {NAMES[tensor.array.dtype.name]}\n")


Save = Callable[..., None]


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> Save:
    """flow.save, with its classes under the names of OneFlow's."""
    modules = {"oneflow": {"Tensor": Tensor}, "oneflow.nn": {"Parameter": Parameter}}
    modules["oneflow._oneflow_internal"] = {"dtype": dtype}
    for module, classes in modules.items():
        made = types.ModuleType(module)
        for name, kind in classes.items():
            setattr(made, name, kind)
            monkeypatch.setattr(kind, "__module__", module)
        monkeypatch.setitem(sys.modules, module, made)

    def save(value: Any, path: Path, save_as_external_data: bool = False, protocol: int = 4) -> None:
        global folder
        content = {"protocol_version": 1, "__oneflow__": None, "data": value}
        if save_as_external_data:
            path.mkdir()
            folder = path
        try:
            pickled = pickle.dumps(content, protocol)
        finally:
            folder = None
        (path / "pickled_data" if save_as_external_data else path).write_bytes(pickled)

    return save


def test_the_writer_uses_oneflows_names(save: Save, tmp_path: Path) -> None:
    save({"w": Parameter(np.ones(2))}, tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    assert b"oneflow.nn" in content
    assert b"oneflow._oneflow_internal" in content
    assert b"test_oneflow" not in content


RNG = np.random.default_rng(0)
WEIGHT = RNG.integers(0, 256, (1024, 64), np.uint8).view(np.float32)
HALF = RNG.integers(0, 1 << 16, (8, 6), np.uint16).view(ml_dtypes.bfloat16)
STATE: dict[str, Any] = {
    "model": collections.OrderedDict(
        {
            "linear.weight": WEIGHT,
            "linear.bias": np.arange(16, dtype=np.float64),
            "half": np.ones((4, 4), np.float16),
            "brain": np.where(np.isnan(HALF), np.zeros_like(HALF), HALF),
            "count": np.array(7),
        }
    ),
    "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "state": {0: {"m": WEIGHT[:3]}}},
}


def with_tensors(tree: Any, pick: Callable[[np.ndarray], np.ndarray] = lambda array: array) -> Any:
    return jax.tree.map(lambda leaf: Parameter(pick(leaf)) if isinstance(leaf, np.ndarray) else leaf, tree)


def require_equal(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_checkpoint_of_one_rank_comes_back(save: Save, tmp_path: Path, external: bool, protocol: int) -> None:
    save(with_tensors(STATE), tmp_path / "x", external, protocol)
    require_equal(jaxckpt.load_numpy(tmp_path / "x"), STATE)
    assert jaxckpt.open(tmp_path / "x").format == "oneflow"
    np.testing.assert_array_equal(jaxckpt.open(tmp_path / "x")["model/linear.weight"][100:103, 2], WEIGHT[100:103, 2])


def test_folders_of_variables_come_back(tmp_path: Path) -> None:
    """The form of OneFlow 0.4."""
    path = tmp_path / "x"
    path.mkdir()
    (path / "snapshot_done").touch()
    for name, array in STATE["model"].items():
        save_tensor(path / name, Tensor(array))
    require_equal(jaxckpt.load_numpy(path), dict(STATE["model"]))
    (path / "half").rename(tmp_path / "half")
    (path / "half").symlink_to("half")  # a link to itself: listing it fails, even for root
    with pytest.raises(jaxckpt.errors.StorageError, match=r"cannot list .*half"):
        jaxckpt.load_numpy(path)


COLUMNS = {"linear.weight": P(None, "model"), "linear.bias": P("model"), "brain": P("data", "model"), "half": P("data")}


def part(rank: int, path: Any, array: np.ndarray) -> np.ndarray:
    """The part of an array that rank (data, model) of a 2x2 mesh holds."""
    place = {"data": rank // 2, "model": rank % 2}
    spec = COLUMNS.get(path[-1].key, ())
    for dim, axis in enumerate(spec):
        if axis is not None:
            array = np.split(array, 2, dim)[place[axis]]
    return array.copy()


@pytest.fixture
def ranks(save: Save, tmp_path: Path) -> dict[int, Path]:
    for rank in range(4):
        held = jax.tree_util.tree_map_with_path(
            lambda path, leaf, rank=rank: Parameter(part(rank, path, leaf)) if isinstance(leaf, np.ndarray) else leaf,
            STATE,
        )
        save(held, tmp_path / f"rank{rank}", rank % 2 == 0)
    return {rank: tmp_path / f"rank{rank}" for rank in range(4)}


def specs(path: str, leaf: Any) -> P:
    return COLUMNS.get(path.rpartition("/")[2], P())


MESH = {"data": 2, "model": 2}


def test_ranks_are_combined(ranks: dict[int, Path]) -> None:
    found = jaxckpt.formats.oneflow_ranks(ranks, mesh=MESH, specs=specs)
    require_equal(jaxckpt.load_numpy(found), STATE)
    jax.config.update("jax_enable_x64", True)
    try:
        for sides in ((2, 4), (3, 2)):
            mesh = jax.make_mesh(sides, ("data", "model"), devices=jax.devices()[: sides[0] * sides[1]])
            options = jaxckpt.Options(indivisible="replicate")
            require_equal(jaxckpt.restore(found, mesh=mesh, options=options), STATE)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert jaxckpt.verify(found).ok
    assert jaxckpt.open(found)["model/brain"].spec == P("data", "model")


def test_ranks_are_converted_to_one_checkpoint(ranks: dict[int, Path], tmp_path: Path) -> None:
    found = jaxckpt.formats.oneflow_ranks(ranks, mesh=MESH, specs=specs)
    jaxckpt.convert(found, tmp_path / "ours")
    require_equal(jaxckpt.load_numpy(tmp_path / "ours"), STATE)


def test_ranks_that_do_not_fit_are_reported(ranks: dict[int, Path], save: Save, tmp_path: Path) -> None:
    together = functools.partial(jaxckpt.formats.oneflow_ranks, mesh=MESH, specs=specs)
    with pytest.raises(DataError, match=r"'model/brain'.*\n.*\[4:8, 3:6\] is not in any shard"):
        together({rank: ranks[rank] for rank in (0, 1, 2)})
    with pytest.raises(SpecError, match="'rows'"):
        jaxckpt.formats.oneflow_ranks(ranks, mesh=MESH, specs=P("rows"))
    with pytest.raises(DataError, match=r"'model/linear.weight'.*not the same in rank 0 and rank 1"):
        jaxckpt.load_numpy(jaxckpt.formats.oneflow_ranks(ranks, mesh=MESH, specs=lambda path, leaf: P()))
    other = {**STATE, "optimizer": {**STATE["optimizer"], "param_groups": [{"lr": 0.2, "betas": (0.9, 0.99)}]}}
    save(jax.tree.map(lambda leaf: leaf, with_tensors(other)), tmp_path / "other")
    with pytest.raises(DataError, match=r"'optimizer/param_groups/0/lr' differs between ranks"):
        together({**ranks, 1: tmp_path / "other"})
    with pytest.raises(NotACheckpointError, match="does not exist"):
        together({**ranks, 1: tmp_path / "gone"})


def test_stages_of_a_pipeline_are_combined(save: Save, tmp_path: Path) -> None:
    save({"a": {"w": Tensor(WEIGHT)}, "step": 1}, tmp_path / "0")
    save({"b": {"w": Tensor(WEIGHT)}, "step": 1}, tmp_path / "1")
    found = jaxckpt.load_numpy(jaxckpt.formats.oneflow_ranks({0: tmp_path / "0", 1: tmp_path / "1"}))
    require_equal(found, {"a": {"w": WEIGHT}, "b": {"w": WEIGHT}, "step": 1})


# Damage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("out", b"1234567", r"out is 7 bytes long, expected 8 of float32\[2\]"),
        ("out", None, "out is missing"),
        ("meta", None, "meta is missing"),
        ("meta", b"shape {\n  dim: 1000000000000\n}\ndata_type: kFloat\n", "expected 4000000000000 of"),
        ("meta", b"shape {\n  dim: -2\n}\ndata_type: kFloat\n", "has no shape"),
        ("meta", b"shape {" + b"dim: 1 " * 5000 + b"} data_type: kFloat", "at most 30"),
        ("meta", b"{" * 60_000, "has no shape"),
        ("meta", b"shape {" + b" " * 60_000, "has no shape"),
    ],
)
@pytest.mark.timeout(60)
def test_damaged_tensors_are_reported(
    save: Save, tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    save({"w": Tensor(np.ones(2, np.float32))}, tmp_path / "x", True)
    path = tmp_path / "x" / "tensor_0" / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        jaxckpt.open(tmp_path / "x")


def test_paths_stay_inside_and_nothing_is_run(save: Save, tmp_path: Path) -> None:
    save({"w": Tensor(np.ones(2, np.float32))}, tmp_path / "x", True)
    pickled = tmp_path / "x" / "pickled_data"
    before = pickled.read_bytes()
    for name in (b"../tens0", b"/tensor0"):
        pickled.write_bytes(before.replace(b"tensor_0", name))
        with pytest.raises(DataError, match="outside its folder"):
            jaxckpt.open(tmp_path / "x")
    pickled.write_bytes(before.replace(b"protocol_version", b"protocol_versioN"))
    with pytest.raises(DataError, match="not a file that flow"):
        jaxckpt.open(tmp_path / "x")

    class Runs:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit",)

    save({"w": Tensor(np.ones(2)), "x": Runs()}, tmp_path / "y")
    with pytest.raises(DataError, match=r"'x'.*builtins\.exec"):
        jaxckpt.load_numpy(tmp_path / "y")
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "y", select="w")["w"], np.ones(2))


def test_a_tensor_folder_without_a_leaf_or_with_two_is_damage(save: Save, tmp_path: Path) -> None:
    shared = Parameter(np.ones(2, np.float32))
    save({"a": shared, "b": shared, "c": Parameter(np.zeros(2, np.float32))}, tmp_path / "x", True)
    found = jaxckpt.load_numpy(tmp_path / "x")
    require_equal(found, {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32), "c": np.zeros(2, np.float32)})
    pickled = tmp_path / "x" / "pickled_data"
    whole = pickled.read_bytes()
    assert b"tensor_1" in whole
    pickled.write_bytes(whole.replace(b"tensor_1", b"tensor_0"))
    with pytest.raises(DataError, match="two of its tensors are in 'tensor_0'"):
        jaxckpt.load_numpy(tmp_path / "x")
    pickled.write_bytes(whole)
    shutil.copytree(tmp_path / "x/tensor_1", tmp_path / "x/tensor_7")
    with pytest.raises(DataError, match=r"no leaf for .*tensor_7"):
        jaxckpt.load_numpy(tmp_path / "x")
