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
    ],
)
def test_a_folder_is_named_by_its_files(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(NotACheckpointError, match=message):
        jaxckpt.open(tmp_path)


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
    with pytest.raises(jaxckpt.errors.DataError, match=r"TorchScript program: save its state_dict\(\)"):
        jaxckpt.open(tmp_path / "m.pt")


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
