"""Files of Flax in msgpack: damaged and hostile ones, and pickles of trees. tests/data/everyday has those of Flax."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from flax import serialization
from recorded import DATA

import jaxckpt
from jaxckpt._cli.main import main
from jaxckpt._formats.byte_reader import MIN_LOCATED_BYTES
from jaxckpt.errors import DataError, NotACheckpointError, StorageError

EVERYDAY = DATA / "everyday"


def test_a_truncated_file_is_refused_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.msgpack"
    data = (EVERYDAY / "chunked.msgpack").read_bytes()
    for end in range(1, len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(DataError):
            jaxckpt.open(path)
    path.write_bytes(data + b"\xc0")
    with pytest.raises(DataError, match="1 bytes after its end"):
        jaxckpt.open(path)


ARRAY = b"\x93\x91\x01\xa5uint8\xc4\x01x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"\x81\xa1a" * 100_000 + b"\xc0", "nested deeper than 200", id="deep maps"),
        pytest.param(b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0", "nested deeper than 200", id="deep lists"),
        pytest.param(b"\x81\xa1a\xdd\xff\xff\xff\xff", "ends in the middle", id="4 billion values in 5 bytes"),
        pytest.param(b"\xdf\xff\xff\xff\xff\xa1a", "ends in the middle", id="4 billion keys in 5 bytes"),
        pytest.param(b"\x81\xa1a\xc6\xff\xff\xff\xff", "ends in the middle", id="4 GiB of bytes"),
        pytest.param(b"\x81\xa1a\xdb\xff\xff\xff\xff", "ends in the middle", id="4 GiB of text"),
        pytest.param(b"\x82\xa1a\x01\xa1a\x02", "same key twice", id="a key twice"),
        pytest.param(b"\x81\xa1a\xc1", "is not msgpack", id="a code that is not used"),
        pytest.param(b"\x81\xa1a\xd4\x01\xc0", "damaged", id="an array that is None"),
        pytest.param(b"\x81\xa1a\xc7\x0a\x01" + ARRAY, "expected", id="an array beyond its extension"),
        pytest.param(b"\x81\xa1a\xc7\x0c\x01" + ARRAY.replace(b"\x91\x01", b"\x91\x02"), "has 1 bytes", id="too short"),
        pytest.param(b"\x81\xa1a\xc7\x0c\x01" + ARRAY.replace(b"\x91\x01", b"\x91\xff"), "sizes", id="negative side"),
    ],
)
def test_a_hostile_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.msgpack").write_bytes(content)
    with pytest.raises(DataError, match=message):
        jaxckpt.open(tmp_path / "x.msgpack")


def test_chunks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def chunked(shape: tuple[int, ...], chunks: list[Any]) -> dict[str, Any]:
        parts = ({str(n): part for n, part in enumerate(parts)} for parts in (shape, chunks))
        return {"__msgpack_chunked_array__": True} | dict(zip(("shape", "chunks"), parts, strict=True))

    four = np.arange(4, dtype=np.int16)
    for shape, chunks in [
        ((3, 3), [four, four]),
        ((2, 3), [four, four]),
        ((8,), [four, four.astype(np.int32)]),
        ((0,), [four]),
    ]:
        packed = serialization.msgpack.packb({"w": chunked(shape, chunks)}, default=serialization._msgpack_ext_pack)
        (tmp_path / "x.msgpack").write_bytes(packed)
        with pytest.raises(DataError):
            jaxckpt.open(tmp_path / "x.msgpack")


def test_large_arrays_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 4 * MIN_LOCATED_BYTES + 12)
    tree = {"w": np.arange(3 * MIN_LOCATED_BYTES, dtype=np.float32).reshape(16, 3, -1), "n": np.arange(5)}
    (tmp_path / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = jaxckpt.open(tmp_path)
    assert np.array_equal(checkpoint["w"][3:7, 1:, 5:99], tree["w"][3:7, 1:, 5:99])
    assert np.array_equal(jaxckpt.load_numpy(tmp_path)["w"], tree["w"])
    with (tmp_path / "flax_model.msgpack").open("r+b") as file:
        file.truncate(MIN_LOCATED_BYTES)
    for read in (lambda: checkpoint["w"][:], lambda: jaxckpt.open(tmp_path)):
        with pytest.raises((DataError, StorageError), match=r"ends|was replaced after it was opened"):
            read()


def test_a_sharded_flax_model(tmp_path: Path) -> None:
    parts = {"1": {"a": {"w": np.arange(3)}}, "2": {"a": {"b": np.ones(2)}, "c": np.zeros(1)}}
    for number, part in parts.items():
        (tmp_path / f"flax_model-0000{number}-of-00002.msgpack").write_bytes(serialization.msgpack_serialize(part))
    files = {"a/w": 1, "a/b": 2, "c": 2}
    index = {"weight_map": {name: f"flax_model-0000{n}-of-00002.msgpack" for name, n in files.items()}}
    (tmp_path / "flax_model.msgpack.index.json").write_bytes(json.dumps(index).encode())
    assert sorted(jaxckpt.open(tmp_path).leaves) == ["a/b", "a/w", "c"]
    (tmp_path / "flax_model-00001-of-00002.msgpack").unlink()
    with pytest.raises(DataError, match="not in its folder"):
        jaxckpt.open(tmp_path)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_for_pytorch_beside_the_same_one_for_flax(is_sharded: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    name = "flax_model-00001-of-00001.msgpack" if is_sharded else "flax_model.msgpack"
    (tmp_path / name).write_bytes(serialization.msgpack_serialize({"kernel": np.ones(2)}))
    if is_sharded:
        (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": {"kernel": name}}))
    torch.save({"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert list(jaxckpt.open(tmp_path)) == ["weight"]


def test_steps_of_a_flax_folder() -> None:
    assert jaxckpt.Run(EVERYDAY / "flax").steps() == [9, 100]
    assert jaxckpt.load_numpy(f"{EVERYDAY / 'flax'}@9")["step"] == 9


def test_files_with_different_prefixes_are_not_one_run(tmp_path: Path) -> None:
    for prefix, step in (("checkpoint_", 10), ("best_", 3)):
        (tmp_path / f"{prefix}{step}").write_bytes(serialization.to_bytes({"w": np.full(2, step)}))
    with pytest.raises(NotACheckpointError, match="open one of them: best_3, checkpoint_10"):
        jaxckpt.open(tmp_path)
    assert jaxckpt.load_numpy(tmp_path / "best_3")["w"][0] == 3
    for step in (0.85, 0.9):  # which Flax also accepts
        (tmp_path / "floats").mkdir(exist_ok=True)
        (tmp_path / "floats" / f"checkpoint_{step}").write_bytes(serialization.to_bytes({"w": np.full(2, step)}))
    with pytest.raises(NotACheckpointError, match=r"open one of them: checkpoint_0.85, checkpoint_0.9"):
        jaxckpt.open(tmp_path / "floats")


def test_no_file_of_a_flax_folder_hides_the_newest_step(tmp_path: Path) -> None:
    run = Path(shutil.copytree(EVERYDAY / "flax", tmp_path / "run"))
    (run / "notes_101").write_text("of something else")
    newest = (run / "checkpoint_100").read_bytes()
    for damaged in (b"", b"\0" + newest[1:], newest[:-1]):
        (run / "checkpoint_100").write_bytes(damaged)
        with pytest.raises(DataError, match="checkpoint_100"):
            jaxckpt.load_numpy(run)
        assert jaxckpt.load_numpy(f"{run}@9")["step"] == 9
    (run / "checkpoint_100").write_bytes(newest)
    with ocp.PyTreeCheckpointer() as checkpointer:  # as newer versions of Flax do
        checkpointer.save(run / "checkpoint_101", {"step": np.array(101)})
    with pytest.raises(
        NotACheckpointError, match=r"is a folder, which Flax wrote through Orbax: open .*checkpoint_101"
    ):
        jaxckpt.open(run)
    assert jaxckpt.Run(run).steps() == [9, 100, 101]
    assert [jaxckpt.load_numpy(f"{run}@{name}")["step"] for name in ("9", "100", "101", "latest")] == [9, 100, 101, 101]


def test_a_lost_aggregate_file_is_reported(tmp_path: Path) -> None:
    path = Path(shutil.copytree(EVERYDAY / "orbax0520_agg", tmp_path / "x"))
    (path / "checkpoint").unlink()
    with pytest.raises(DataError, match="no data for 13 of its leaves"):
        jaxckpt.open(path)


def test_a_lost_array_of_orbax_0_2_is_reported(tmp_path: Path) -> None:
    path = Path(shutil.copytree(EVERYDAY / "orbax027_pytree", tmp_path / "x"))
    for lost in [child for child in path.iterdir() if child.is_dir()]:
        lost.rename(tmp_path / "lost")
        with pytest.raises(DataError, match=f"lacks the array '{lost.name}', to which checkpoint refers"):
            jaxckpt.open(path)
        (tmp_path / "lost").rename(lost)


def test_a_step_without_the_mark_of_the_others_was_never_committed(tmp_path: Path) -> None:
    run = Path(shutil.copytree(EVERYDAY / "orbax0520_manager", tmp_path / "run"))
    for step in (1, 2):
        (run / str(step) / "_CHECKPOINT_METADATA").unlink()  # as Orbax before 0.5
    assert jaxckpt.open(run).metadata == {"step": 2}
    (run / "1" / "commit_success.txt").touch()
    assert jaxckpt.open(run).metadata == {"step": 1}
    with pytest.raises(NotACheckpointError, match=r"no commit_success\.txt, although other steps"):
        jaxckpt.open(run / "2")


# Pickles --------------------------------------------------------------------------------------------------


class State(NamedTuple):
    count: Any
    inner: Any


class Unknown:
    def __reduce__(self) -> Any:
        return (print, ("this code must not run",))


@pytest.mark.parametrize("protocol", range(6))
def test_other_leaves_of_a_pickle_stay_readable(
    protocol: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = {"state": State(3, {"w": np.ones((2, 3))}), "unknown": Unknown(), "set": {1}}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(state, protocol))
    checkpoint = jaxckpt.open(tmp_path / "x.pkl")
    assert checkpoint["state/1/w"][:].tolist() == [[1.0] * 3] * 2
    found = jaxckpt.load_numpy(tmp_path / "x.pkl", select="state/*")
    assert found["state"][0] == 3
    for name, reason in {"unknown": "print, whose code is never run", "set": "set"}.items():
        with pytest.raises(DataError, match=reason):
            jaxckpt.load_numpy(tmp_path / "x.pkl", select=name)
    assert capfd.readouterr().out == ""


def test_truncated_pickles_are_refused(tmp_path: Path) -> None:
    data = (EVERYDAY / "brax_protocol_2.pkl").read_bytes()
    for end in range(2, len(data), 7):
        (tmp_path / "x.pkl").write_bytes(data[:end])
        with pytest.raises(DataError, match="damaged"):
            jaxckpt.open(tmp_path / "x.pkl")


def test_leaves_that_cannot_be_read_are_not_damage(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"w": np.ones(3), "unknown": Unknown(), "set": {1}}))
    report = jaxckpt.verify(tmp_path / "x.pkl")
    assert report.ok
    assert not report.problems
    assert {problem.leaf: problem.reason.split(";")[0] for problem in report.unsupported} == {
        "unknown": "it holds an object made by builtins.print, whose code is never run",
        "set": "it is a set, which a pytree cannot hold",
    }
    assert "2 leaves cannot be read, without damage" in str(report)
    checkpoint = jaxckpt.open(tmp_path / "x.pkl")
    assert checkpoint["w"].unreadable is None
    assert "unreadable, because it is a set" in repr(checkpoint["set"])


def test_the_command_line_of_a_file_with_leaves_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"w": np.ones(3), "unknown": Unknown()}))
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "x.pkl")])
    assert result.exit_code == 6, result.output
    result = CliRunner().invoke(main, ["show", str(tmp_path / "x.pkl")])
    assert result.exit_code == 0
    assert "uint8" not in result.output
    assert "unreadable" in result.output
    (tmp_path / "y.bin").write_bytes(b"some text")
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "y.bin")])
    assert result.exit_code == 4
    assert "in no format that jaxckpt reads" in result.output
