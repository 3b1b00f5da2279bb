"""Files and folders that are not read: each error names what they are, and the way out."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

import jaxckpt
from jaxckpt._store.tensors import ROOT_CONTEXT
from jaxckpt.errors import NotACheckpointError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:f492c859ee\nsize 133\n"
LFS = "Git LFS pointer.*git lfs pull"

FILES = {
    "model.safetensors": (POINTER, LFS),
    "flax_model.msgpack": (POINTER, LFS),
    "pytorch_model.bin": (POINTER, LFS),
    "x.npz": (POINTER, LFS),
    "weights.h5": (POINTER, LFS),
    "x": (b"GGUF\x03\0\0\0", "GGUF file of llama.cpp: open"),
    "x.pkl": (gzip.compress(b"x"), "compressed with gzip: decompress"),
    "x.pt.zst": (b"\x28\xb5\x2f\xfd123", "compressed with zstd"),
    "y.safetensors": (b"<!DOCTYPE html><html>Sign in</html>", "HTML page, from a failed download"),
    "z.msgpack": (b"\n <HTML><body>404", "HTML page, from a failed download"),
    "e.safetensors": (b"<?xml version='1.0'?><Error><Code>AccessDenied", "XML text.*download"),
    "f.npz": (b"", "is empty"),
    "j.bin": (b'{"error":"Repository not found"}', "error message of a server"),
    "m.onnx": (b"\x08\x07\x12\x07pytorch", "ONNX model"),
    "m.tflite": (b"\x1c\0\0\0TFL3", "TensorFlow Lite"),
    "model.ckpt-0.index": (b"\0\0\0", r"index of a TensorFlow checkpoint: .*tf\.train\.load_checkpoint"),
    "model.ckpt-0.data-00000-of-00001": (b"\0\0\0", "part of a TensorFlow checkpoint"),
    "t.parquet": (b"PAR1xxxx", "Parquet"),
    "z.zip": (b"PK\3\4" + b"\0" * 30, "zip archive in no format that jaxckpt reads: extract it"),
    "m.7z": (b"7z\xbc\xaf\x27\x1c", "compressed with 7-Zip"),
    "k.safetensors": (b"Invalid username or password.", "error message of a server.*after a login"),
    "k.pt": (b"Entry not found", "error message of a server"),
    "zeros.safetensors": (b"\0" * 5000, "begins with zeros, as a download or copy that never finished"),
    "w.safetensors.incomplete": (b"\x40\0\0\0\0\0\0\0{}", "unfinished download: complete it"),
    "config.json": (b'{"model_type": "llama"}', "describes a model, without its weights: give the path of its folder"),
    "_METADATA": (b"{}", "part of a checkpoint of Orbax: give the path of its folder"),
    "m.weights.json": (b'{"metadata": {"total_size": 8}}', "index of Keras's sharded weights: save them without"),
    "__0_0.distcp": (b"\1\2", r"part of a checkpoint of torch\.distributed\.checkpoint: give the path"),
    "notes.txt": (b"some text", "in no format that jaxckpt reads; it begins with b'some text'"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_named_by_its_first_bytes(name: str, tmp_path: Path) -> None:
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    for call in (jaxckpt.open, jaxckpt.verify, jaxckpt.restore):
        with pytest.raises(NotACheckpointError, match=message) as caught:
            call(tmp_path / name)
        assert "manifest.json" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


@pytest.mark.parametrize("name", ["model.safetensors", "flax_model.msgpack", "pytorch_model.bin"])
def test_a_cloned_repository_without_its_large_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(POINTER)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotACheckpointError, match=f"{name}: run `git lfs pull`"):
        jaxckpt.open(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["saved_model.pb", "variables"], "SavedModel of TensorFlow"),
        (["checkpoint", "model.ckpt-0.index", "model.ckpt-0.meta"], "TensorFlow checkpoint"),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], r"DeepSpeed.*zero_to_fp32\.py"),
        (["global_step10", "latest", "zero_to_fp32.py"], "DeepSpeed"),
        (["model.gguf"], "GGUF"),
        (["config.json", "tokenizer.json"], "has the config.json of a model, but no weights"),
        (["notes.txt", "b"], r"has no manifest\.json, and no file of another library's format: it holds b, notes\.txt"),
    ],
)
def test_a_folder_is_named_by_its_files(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(NotACheckpointError, match=message):
        jaxckpt.open(tmp_path)


def test_a_folder_of_files_names_them(tmp_path: Path) -> None:
    """As `ls` does."""
    for name in ("iter_10/mp_rank_00/model.npz", "iter_10/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        np.savez(tmp_path / name, w=np.ones(3)) if name.endswith("npz") else (tmp_path / name).write_text("x")
    with pytest.raises(NotACheckpointError, match=r"open one of them: iter_10/mp_rank_00/model\.npz"):
        jaxckpt.open(tmp_path)


def test_a_page_in_place_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>" + b" " * 5000)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotACheckpointError, match=r"holds model\.safetensors, which is an HTML page"):
        jaxckpt.open(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    for path in (tmp_path, index):
        with pytest.raises(NotACheckpointError, match=r"holds model-00001.*, which is an HTML page"):
            jaxckpt.open(path)


def test_archives(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    for name, message in {"m.nemo": "archive of NVIDIA NeMo: extract it", "m.tar": "tar archive: extract it"}.items():
        with tarfile.open(tmp_path / name, "w") as archive:
            archive.add(tmp_path / "x.npy", "x.npy")
        with pytest.raises(NotACheckpointError, match=message):
            jaxckpt.open(tmp_path / name)


@pytest.mark.filterwarnings("ignore")
def test_torchscript(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), tmp_path / "m.pt")
    for call in (jaxckpt.open, jaxckpt.verify):
        with pytest.raises(NotACheckpointError, match=r"TorchScript program: .* save its state_dict\(\)"):
            call(tmp_path / "m.pt")


def test_files_of_others_in_a_bucket() -> None:
    """They are named as on a file system."""
    keys = ts.KvStore.open("memory://others/", context=ROOT_CONTEXT).result()
    for name, content, expected in (
        ("model.gguf", b"GGUF....", "it is a GGUF file"),
        ("pointer.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("unknown", b"\1\2\3\4", "in no format that jaxckpt reads; it begins with"),
        ("bundle/variables.index", b"", "is a folder with a TensorFlow checkpoint"),
        ("hub/snapshots/model.safetensors", b"", "is a folder of checkpoints; open one of them: snapshots"),
    ):
        keys.write(name, content).result()
        with pytest.raises(NotACheckpointError, match=expected):
            jaxckpt.open(f"memory://others/{name.partition('/')[0]}")
    with pytest.raises(NotACheckpointError, match="the path does not exist"):
        jaxckpt.open("memory://others/missing.safetensors")
