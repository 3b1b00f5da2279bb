"""MindSpore's files: its tutorial, every form of layout compared with NumPy, damage, and unsupported content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P
from mindspore_files import DATA, TUTORIAL, ckpt, layout, map_parameter, strategy_json, strategy_protobuf, tutorial
from strategies import damaged

import jaxckpt
from jaxckpt import JaxckptError
from jaxckpt._formats.mindspore import read_ckpt, read_strategy
from jaxckpt.errors import DataError, InputError, NotACheckpointError, TreeError

FORMS = {"strategy.ckpt": strategy_protobuf, "strategy.json": strategy_json}


def rows(name: str, ranks: list[int]) -> np.ndarray:
    return np.concatenate([np.array(DATA["ranks"][rank][name], np.float32) for rank in ranks])


# The tutorial ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FORMS)
def test_the_tutorial(tmp_path: Path, strategy: str) -> None:
    """Four ranks of [2, 8] form one [8, 8], which is restored onto two devices as [4, 8] each."""
    found = jaxckpt.formats.mindspore_ranks(tutorial(tmp_path), strategy=tmp_path / strategy)
    merged = jaxckpt.load_numpy(found)
    printed = np.array(DATA["merged"]["moments.weight"], np.float32)
    np.testing.assert_array_equal(merged["moments.weight"], printed, strict=True)
    # The merged weight that the tutorial prints is of another run, so compare with its ranks in order.
    np.testing.assert_array_equal(merged["weight"], rows("weight", [0, 1, 2, 3]), strict=True)
    np.testing.assert_array_equal(merged["learning_rate"], np.array([0.01], np.float32), strict=True)
    np.testing.assert_array_equal(merged["momentum"], np.array([0.9], np.float32), strict=True)
    assert merged.keys() == DATA["merged"].keys()

    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split = {"weight": P("x"), "moments.weight": P("x")}
    on_two = jaxckpt.restore(found, mesh=mesh, specs=lambda path, leaf: split.get(path, P()))
    for rank, shard in enumerate(on_two["moments.weight"].addressable_shards):
        assert shard.data.shape == (4, 8)
        loaded = np.array(DATA["loaded"][rank]["moments.weight"], np.float32)
        np.testing.assert_array_equal(np.asarray(shard.data), loaded)
    np.testing.assert_array_equal(np.asarray(on_two["weight"]), rows("weight", [0, 1, 2, 3]))
    assert np.asarray(on_two["learning_rate"]) == np.float32(0.01)


def test_all_operations_of_a_checkpoint(tmp_path: Path) -> None:
    found = jaxckpt.formats.mindspore_ranks(tutorial(tmp_path), strategy=tmp_path / "strategy.ckpt")
    jaxckpt.convert(found, tmp_path / "ours")
    assert jaxckpt.diff(found, tmp_path / "ours").identical
    assert jaxckpt.verify(found).ok
    np.testing.assert_array_equal(jaxckpt.open(found)["weight"][3:5], rows("weight", [1, 2])[1:3])
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    restored = jaxckpt.restore(tmp_path / "ours", mesh=mesh, specs={"weight": P("a", "b"), "moments.weight": P("b")})
    np.testing.assert_array_equal(np.asarray(restored["weight"]), rows("weight", [0, 1, 2, 3]))


def test_a_file_opens_by_itself(tmp_path: Path) -> None:
    files = tutorial(tmp_path)
    alone = jaxckpt.load_numpy(files[2])
    assert alone.keys() == DATA["ranks"][2].keys()
    np.testing.assert_array_equal(alone["weight"], rows("weight", [2]), strict=True)


# The content of a .ckpt file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16".split()
)
def test_every_bit_of_every_dtype_comes_back(tmp_path: Path, name: str) -> None:
    bits = np.arange(240, dtype=np.uint8) % (2 if name == "bool" else 251)
    data = bits.view(getattr(ml_dtypes, name, name)).reshape(5, -1)
    (tmp_path / "a.ckpt").write_bytes(ckpt({"w": data, "scalar": data[0, 0], "one": data[0, :1]}, crc=True))
    found = jaxckpt.load_numpy(tmp_path / "a.ckpt")
    assert found["w"].dtype == data.dtype
    assert found["w"].tobytes() == data.tobytes()
    assert found["scalar"].shape == ()
    assert found["scalar"].tobytes() == data[0, 0].tobytes()
    assert found["one"].shape == (1,)


def test_a_large_tensor_is_stored_in_several_values(tmp_path: Path) -> None:
    data = np.arange(3 * 4 * 5, dtype=np.int32).reshape(3, 4, 5)
    for slice_bytes in (4, 12, 28, 80, 100):
        (tmp_path / "a.ckpt").write_bytes(ckpt({"a": data[0], "w": data, "z": data[1]}, slice_bytes=slice_bytes))
        np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "a.ckpt")["w"], data, strict=True)
    (tmp_path / "a.ckpt").write_bytes(ckpt({"w": data}, slice_bytes=6))
    with pytest.raises(DataError, match="one of which ends in the middle of an element"):
        jaxckpt.load_numpy(tmp_path / "a.ckpt")


def test_texts_scalars_and_empty_tensors(tmp_path: Path) -> None:
    held = {"info": np.array("épo·𝟙"), "empty": np.zeros((0, 3), np.float32), "none": np.zeros(0, np.int8)}
    (tmp_path / "a.ckpt").write_bytes(ckpt(held) + old_scalar("epoch", 7))
    found = jaxckpt.load_numpy(tmp_path / "a.ckpt")
    assert found["info"] == "épo·𝟙"
    assert found["empty"].shape == (0, 3)
    assert found["none"].shape == (0,)
    np.testing.assert_array_equal(found["epoch"], np.array(7, np.int32), strict=True)


def old_scalar(name: str, value: int) -> bytes:
    """A scalar as older versions write it, with dims [0]."""
    return ckpt({name: np.array([value], np.int32)}).replace(b"\x08\x01\x12\x05Int32", b"\x08\x00\x12\x05Int32")


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(map_parameter("table"))
    with pytest.raises(DataError, match="'table' is a MapParameter"):
        jaxckpt.open(path)
    path.write_bytes(ckpt({"w": np.zeros(2, np.float32)}).replace(b"Float32", b"Quint4x"))
    with pytest.raises(TreeError, match="'w' has dtype Quint4x"):
        jaxckpt.open(path)
    path.write_bytes(ckpt({"a": np.zeros(2), "b": np.zeros(2)}) + ckpt({"a": np.ones(2)}))
    with pytest.raises(DataError, match="has 'a' twice"):
        jaxckpt.open(path)
    path.write_bytes(ckpt({"a": np.zeros(2)}) * 2)
    with pytest.raises(DataError, match=r"'a' has 32 bytes, expected 16 of Float64\[2\]"):
        jaxckpt.open(path)
    path.write_bytes(ckpt({"a": np.zeros(2)}) + ckpt({"a": np.zeros(2, np.float32)}))
    with pytest.raises(DataError, match=r"'a' is Float64\[2\] and then Float32\[2\]"):
        jaxckpt.open(path)
    path.write_bytes(ckpt({"w": np.zeros(8)})[:-1])
    with pytest.raises(DataError, match=r"a\.ckpt is damaged"):
        jaxckpt.open(path)
    path.write_bytes(b"\n\x02\x00\x05")
    with pytest.raises(DataError, match="a field has the number 0"):
        jaxckpt.open(path)


def test_torch_files_of_that_name_are_refused(tmp_path: Path) -> None:
    for magic in (b"PK\3\4", b"\x80\2"):
        (tmp_path / "a.ckpt").write_bytes(magic + bytes(100))
        with pytest.raises((NotACheckpointError, DataError)):  # DataError: a damaged pickle
            jaxckpt.open(tmp_path / "a.ckpt")


# Layouts --------------------------------------------------------------------------------------------------


def parts_of(
    data: np.ndarray, dev_matrix: list[int], tensor_map: list[int], opt: tuple[int, int] = (0, 0)
) -> list[np.ndarray]:
    """Each rank's part, by MindSpore's own rule: the grid counted from the right, then the optimizer's shards."""
    found: list[np.ndarray] = []
    step, size = opt
    for rank in range(int(np.prod(dev_matrix))):
        place = np.unravel_index(rank, dev_matrix)
        part = data
        for dim, side in enumerate(tensor_map):
            if side >= 0:
                part = np.split(part, dev_matrix[-1 - side], dim)[place[-1 - side]]
        found.append(np.split(part, size)[rank // step % size] if step else part)
    return found


def write(folder: Path, ranks: list[dict[str, Any]], layouts: dict[str, Any], name: str = "strategy.ckpt") -> Any:
    files = {rank: folder / f"{rank}.ckpt" for rank in range(len(ranks))}
    for rank, held in enumerate(ranks):
        files[rank].write_bytes(ckpt(held))
    (folder / name).write_bytes(FORMS[name](layouts))
    return files


@given(st.data())
@settings(max_examples=40)
def test_any_device_matrix_and_tensor_map(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("layout")
    dev_matrix = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sides = data.draw(st.permutations([*range(len(dev_matrix)), -1, -1]))
    tensor_map = sides[: data.draw(st.integers(1, 3))]
    shape = [data.draw(st.integers(1, 2)) * (1 if side < 0 else dev_matrix[-1 - side]) for side in tensor_map]
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    ranks = [{"w": part} for part in parts_of(array, dev_matrix, tensor_map)]
    name = data.draw(st.sampled_from(sorted(FORMS)))
    files = write(folder, ranks, {"w": layout(dev_matrix, tensor_map)}, name)
    found = jaxckpt.load_numpy(jaxckpt.formats.mindspore_ranks(files, strategy=folder / name))
    np.testing.assert_array_equal(found["w"], array, strict=True)


@pytest.mark.parametrize(
    ("dev_matrix", "tensor_map", "step", "size"),
    [([4], [-1, -1], 1, 4), ([4], [-1, -1], 1, 2), ([2, 4], [0, -1], 4, 2), ([2, 4], [0, -1], 4, -1),
     ([4, 2], [-1, 0], 2, 2), ([2, 2, 2], [1, 0], 4, 2)],
)  # fmt: skip
def test_rows_that_the_optimizer_split_again(
    tmp_path: Path, dev_matrix: list[int], tensor_map: list[int], step: int, size: int
) -> None:
    array = np.arange(32 * 4, dtype=np.float32).reshape(32, 4)
    actual = int(np.prod(dev_matrix)) // step if size < 0 else size
    ranks = [{"w": part} for part in parts_of(array, dev_matrix, tensor_map, (step, actual))]
    shards = layout(dev_matrix, tensor_map, opt_weight_shard_step=step, opt_weight_shard_size=size)
    for name in FORMS:
        files = write(tmp_path, ranks, {"w": shards}, name)
        found = jaxckpt.load_numpy(jaxckpt.formats.mindspore_ranks(files, strategy=tmp_path / name))
        np.testing.assert_array_equal(found["w"], array, strict=True)
    wrong = shards | {"opt_weight_shard_step": 3}
    with pytest.raises(DataError, match="'w' has opt_weight_shard_step 3"):
        jaxckpt.formats.mindspore_ranks(write(tmp_path, ranks, {"w": wrong}), strategy=tmp_path / "strategy.ckpt")


def test_rows_split_by_hand(tmp_path: Path) -> None:
    array = np.arange(70, dtype=np.float32).reshape(10, 7)
    ranks = [{"w": part} for part in np.split(array, [1, 6])]
    by_hand = layout([3], [0, -1], param_split_shape=[1, 5, 4], indices_offset=[0, 3, 8])
    for name in FORMS:
        files = write(tmp_path, ranks, {"w": by_hand}, name)
        found = jaxckpt.load_numpy(jaxckpt.formats.mindspore_ranks(files, strategy=tmp_path / name))
        np.testing.assert_array_equal(found["w"], array, strict=True)
    wrong = by_hand | {"param_split_shape": [1, 4, 5]}
    with pytest.raises(DataError, match=r"'w' has shape \[5, 7\] in rank 1, expected \[4, 7\] for \[1:5, 0:7\]"):
        jaxckpt.formats.mindspore_ranks(write(tmp_path, ranks, {"w": wrong}), strategy=tmp_path / "strategy.ckpt")
    files = write(tmp_path, ranks, {"w": by_hand | {"field": 2}})
    with pytest.raises(DataError, match="'w' is split within each of 2 fields"):
        jaxckpt.formats.mindspore_ranks(files, strategy=tmp_path / "strategy.ckpt")


@pytest.mark.parametrize("form", [strategy_protobuf, strategy_json])
def test_pipeline_stages(tmp_path: Path, form: Any) -> None:
    """Two stages of two ranks. Each has its own array, an array that both share, and a stale copy of the other's."""
    embedding, first, second = (np.arange(16, dtype=np.float32).reshape(4, 4) + 100 * n for n in range(3))
    halves = [np.split(array, 2) for array in (embedding, first, second)]
    ranks = [{"embedding": halves[0][i], "first": halves[1][i], "second": np.zeros((2, 4), np.float32)} for i in (0, 1)]
    ranks += [{"embedding": halves[0][i], "second": halves[2][i], "lr": np.float32(1)} for i in (0, 1)]
    split = layout([2], [0, -1])
    stages = [{"embedding": split, "first": split}, {"embedding": split, "second": split}]
    files = write(tmp_path, ranks, {"w": split})
    suffix = "json" if form is strategy_json else "ckpt"
    merged = tmp_path / f"merged.{suffix}"
    merged.write_bytes(
        form({f"{s}-{name}": held for s, layouts in enumerate(stages) for name, held in layouts.items()})
    )
    folder = tmp_path / "strategies"
    folder.mkdir()
    for rank in range(4):
        (folder / f"rank{rank}.{suffix}").write_bytes(form(stages[rank // 2], rank // 2))
    for strategy in (merged, folder):
        found = jaxckpt.load_numpy(jaxckpt.formats.mindspore_ranks(files, strategy=strategy))
        np.testing.assert_array_equal(found["embedding"], embedding, strict=True)
        np.testing.assert_array_equal(found["first"], first, strict=True)
        np.testing.assert_array_equal(found["second"], second, strict=True)
        assert found["lr"] == 1
    with pytest.raises(DataError, match="'second' is missing from every rank of stage 1"):
        jaxckpt.formats.mindspore_ranks({0: files[0], 1: files[1]}, strategy=merged)
    files[3].write_bytes(ckpt(ranks[3] | {"embedding": halves[0][0]}))
    with pytest.raises(DataError, match=r"'embedding'.*not the same in stage 0 and stage 1"):
        jaxckpt.load_numpy(jaxckpt.formats.mindspore_ranks(files, strategy=merged))
    wrong = "rank 2 belongs to stage 1, as each stage has 2 devices; the strategy has stages 0"
    with pytest.raises(DataError, match=wrong):
        jaxckpt.formats.mindspore_ranks(files, strategy=tmp_path / "strategy.ckpt")


def test_folders_of_ranks_and_specs_by_hand(tmp_path: Path) -> None:
    array = np.arange(32, dtype=np.float32).reshape(8, 4).astype(ml_dtypes.bfloat16)
    for rank in range(4):
        (tmp_path / f"rank_{rank}").mkdir()
        part = np.ascontiguousarray(np.split(array, 2, 1)[rank % 2])
        safetensors.numpy.save_file({"w": part}, tmp_path / f"rank_{rank}" / "net.safetensors")
    for specs in (P(None, "mp"), {"w": P(None, "mp")}, lambda path, leaf: P(None, "mp")):
        found = jaxckpt.formats.mindspore_ranks(tmp_path, mesh={"dp": 2, "mp": 2}, specs=specs)
        read = jaxckpt.load_numpy(found)["w"]
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes()
    with pytest.raises(DataError, match=r"'w'.*not the same in rank 0 and rank 1"):
        jaxckpt.load_numpy(jaxckpt.formats.mindspore_ranks(tmp_path))
    (tmp_path / "rank_2" / "net-2.ckpt").write_bytes(b"")
    with pytest.raises(InputError, match=r"rank_2 has 2: net-2.ckpt, net.safetensors"):
        jaxckpt.formats.mindspore_ranks(tmp_path)
    (tmp_path / "rank_2" / "net-2.ckpt").unlink()
    (tmp_path / "rank1").mkdir()
    (tmp_path / "rank1" / "net.ckpt").write_bytes(b"")
    with pytest.raises(InputError, match=r"rank_1 is of the same rank as .*rank1/net\.ckpt"):
        jaxckpt.formats.mindspore_ranks(tmp_path)
    with pytest.raises(NotACheckpointError, match="no folder rank_0"):
        jaxckpt.formats.mindspore_ranks(tmp_path / "rank_1")
    with pytest.raises(NotACheckpointError, match="does not exist"):
        jaxckpt.formats.mindspore_ranks(tmp_path / "nowhere")
    with pytest.raises(InputError, match="pass either"):
        jaxckpt.formats.mindspore_ranks(tmp_path, strategy="x", specs=P())


# Coverage -------------------------------------------------------------------------------------------------


def test_shards_that_are_missing_short_or_not_equal_are_named(tmp_path: Path) -> None:
    files, strategy = tutorial(tmp_path), tmp_path / "strategy.ckpt"
    with pytest.raises(
        DataError,
        match=r"shards of 'weight' do not exactly cover its shape \[8, 8\]:\n.*\[4:6, 0:8\] is not in any shard",
    ):
        jaxckpt.formats.mindspore_ranks({rank: path for rank, path in files.items() if rank != 2}, strategy=strategy)
    whole = {name: np.array(value, np.float32) for name, value in DATA["ranks"][1].items()}
    files[1].write_bytes(ckpt(whole | {"weight": whole["weight"][:1]}))
    with pytest.raises(DataError, match=r"'weight' is float32\[1, 8\] in rank 1, float32\[2, 8\] in rank 0"):
        jaxckpt.formats.mindspore_ranks(files, strategy=strategy)
    files[1].write_bytes(ckpt({"weight": whole["weight"]}))
    with pytest.raises(
        DataError,
        match=r"'moments.weight' do not exactly cover its shape \[8, 8\]:\n.*\[2:4, 0:8\] is not in any shard",
    ):
        jaxckpt.formats.mindspore_ranks(files, strategy=strategy)
    files[1].unlink()
    with pytest.raises(DataError, match=r"net\.ckpt is missing"):
        jaxckpt.formats.mindspore_ranks(files, strategy=strategy)


def test_shards_that_overlap_are_named(tmp_path: Path) -> None:
    """Two ranks at one place of the grid are replicas, but their values differ."""
    files = tutorial(tmp_path)
    (tmp_path / "s.json").write_bytes(
        strategy_json({"weight": layout([2, 2], [0, -1]), "moments.weight": layout([4], [0, -1])})
    )
    found = jaxckpt.formats.mindspore_ranks(files, strategy=tmp_path / "s.json")
    with pytest.raises(DataError, match=r"'weight': .*not the same in rank 0 and rank 2, which should hold replicas"):
        jaxckpt.load_numpy(found)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"weight": layout([4], [0])}, r"'weight' has 2 dimensions; its strategy has tensor_map \[0\]"),
        ({"weight": layout([4], [1, -1])}, r"tensor_map \[1, -1\] over dev_matrix \[4\]"),
        ({"weight": layout([1 << 30], [0, -1])}, "the strategy has 1073741824 devices"),
        ({"weight": layout([0], [0, -1])}, "the strategy has 0 devices"),
        (
            {"weight": layout([4], [0, -1]), "b": layout([2], [0])},
            "different numbers of devices for 'weight', 'b'",
        ),
        ({}, "has no arrays"),
    ],
)
def test_strategies_that_do_not_fit_are_reported(tmp_path: Path, layouts: Any, message: str) -> None:
    files = tutorial(tmp_path)
    for name, form in FORMS.items():
        (tmp_path / name).write_bytes(form(layouts))
        with pytest.raises(DataError, match=message):
            jaxckpt.formats.mindspore_ranks(files, strategy=tmp_path / name)


def test_a_json_strategy_also_has_the_shape(tmp_path: Path) -> None:
    files = tutorial(tmp_path)
    (tmp_path / "s.json").write_bytes(strategy_json({"weight": layout([4], [0, -1], tensor_shape=[8, 9])}))
    with pytest.raises(DataError, match=r"'weight' has shape \[8, 8\] by its shards, but its strategy has \[8, 9\]"):
        jaxckpt.formats.mindspore_ranks(files, strategy=tmp_path / "s.json")


# Damage ---------------------------------------------------------------------------------------------------


TENSORS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "text": np.array("ab"), "b": np.arange(3, dtype=np.int8)}
CKPT = ckpt(TENSORS, slice_bytes=24)


@given(damaged(CKPT))
@settings(max_examples=400)
def test_a_damaged_ckpt_gives_an_error_or_the_undamaged_part(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.ckpt"
    path.write_bytes(content)
    try:
        found = jaxckpt.load_numpy(path)
    except JaxckptError:
        return
    for name, value in found.items():
        if name in TENSORS and not isinstance(value, str):  # otherwise its name was damaged
            assert value.dtype == TENSORS[name].dtype
            assert value.shape == TENSORS[name].shape
            assert (value.view(np.uint8) != TENSORS[name].view(np.uint8)).sum() <= (len(content) == len(CKPT))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@settings(max_examples=300)
def test_a_damaged_strategy_gives_an_error_or_right_data(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"damaged-{name}"
    if not folder.exists():
        folder.mkdir()
        tutorial(folder)
    files = {rank: folder / f"node{rank}" / "net.ckpt" for rank in range(4)}
    (folder / name).write_bytes(data.draw(damaged(FORMS[name](TUTORIAL))))
    try:
        found = jaxckpt.load_numpy(jaxckpt.formats.mindspore_ranks(files, strategy=folder / name))
    except JaxckptError:
        return
    np.testing.assert_array_equal(found["weight"], rows("weight", [0, 1, 2, 3]))
    np.testing.assert_array_equal(found["moments.weight"], rows("moments.weight", [0, 1, 2, 3]))


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.ckpt"
    path.write_bytes(content)
    for read in (read_ckpt, read_strategy):
        with pytest.raises(JaxckptError):
            read(str(path))


def test_nested_json_is_reported(tmp_path: Path) -> None:
    for text in ("{" * 50_000, json.dumps({"parallel_layout_item": 3}), '{"parallel_layout_item": {"w": {}}}'):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(DataError, match=r"s\.json is damaged"):
            read_strategy(str(tmp_path / "s.json"))


def test_a_damaged_type_is_not_the_name_of_a_dtype(tmp_path: Path) -> None:
    """One bit of "Float32" makes it "float32", which jaxckpt and NumPy know."""
    whole = ckpt({"w": np.full(3, 7, np.float32)})
    assert b"Float32" in whole
    (tmp_path / "x.ckpt").write_bytes(whole.replace(b"Float32", b"float32"))
    with pytest.raises(TreeError, match="'w' has dtype float32 of MindSpore, which"):
        jaxckpt.load_numpy(tmp_path / "x.ckpt")


def test_unknown_fields_are_damage(tmp_path: Path) -> None:
    """A flipped bit in a field's number makes the field unknown. If it were ignored, the array would be lost."""
    names = [f"w{n}" for n in range(3)]
    whole = ckpt({name: np.full(3, 7, np.float32) for name in names})
    for at in range(len(whole)):
        for bit in range(3, 7):
            (tmp_path / "x.ckpt").write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            try:
                found = jaxckpt.load_numpy(tmp_path / "x.ckpt")
            except JaxckptError:
                continue
            assert len(found) == len(names), at
