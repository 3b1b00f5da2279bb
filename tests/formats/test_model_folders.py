"""Folders with two models, or with remains of another one: what transformers leaves and reads, and what we read."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import CheckpointExistsError, DataError, InputError, NotACheckpointError

numpy = pytest.importorskip("safetensors.numpy")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def write_sharded(folder: Path, value: float, stem: str = "model", names: tuple[str, ...] = ("a", "b")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: f"{stem}-{n:05d}-of-{len(names):05d}.safetensors" for n, name in enumerate(names, 1)}
    for name, file in files.items():
        numpy.save_file({name: np.full(2, value)}, folder / file)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def write_single(folder: Path, value: float, name: str = SINGLE) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numpy.save_file({name: np.full(2, value) for name in ("a", "b")}, folder / name)


def values(path: Path | str) -> set[float]:
    return {float(number) for array in jaxckpt.load_numpy(path).values() for number in np.unique(array)}


def paths_in(message: str) -> list[str]:
    """The paths that an error says to give."""
    given = re.search(r"[Gg]ive the path of (?:the one to read|one of them|one file)(?:, such as)?,? ([^;,]*)", message)
    assert given, message
    return given[1].split(" or ")


def test_a_single_file_beside_an_index_of_other_files_is_an_error_that_says_how_to_choose(tmp_path: Path) -> None:
    write_single(tmp_path / "model", 1)
    write_sharded(tmp_path / "model", 2)
    for call in (jaxckpt.load_numpy, jaxckpt.open, jaxckpt.verify, jaxckpt.restore):
        with pytest.raises(InputError, match=f"holds two models: the file {SINGLE}.* that {INDEX} names") as caught:
            call(tmp_path / "model")
    single, index = paths_in(str(caught.value))
    assert (values(single), values(index)) == ({1}, {2})
    jaxckpt.convert(index, tmp_path / "ours")
    assert values(tmp_path / "ours") == {2}
    with pytest.raises(CheckpointExistsError, match="holds files that are not part of one checkpoint"):
        jaxckpt.convert(tmp_path / "ours", tmp_path / "model", format="safetensors", overwrite=True)
    Path(single).unlink()  # the other way out
    assert values(tmp_path / "model") == {2}


def test_half_of_the_files_of_an_index_beside_a_single_file_is_also_an_error(tmp_path: Path) -> None:
    write_single(tmp_path / "model", 1)
    write_sharded(tmp_path / "model", 2)
    (tmp_path / "model" / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="holds two models") as caught:
        jaxckpt.open(tmp_path / "model")
    single, index = paths_in(str(caught.value))
    assert values(single) == {1}
    with pytest.raises(DataError, match=r"names the file 'model-00001-of-00002.safetensors', which is not in"):
        jaxckpt.open(index)


def test_a_stale_index_is_ignored_with_a_warning(tmp_path: Path) -> None:
    write_sharded(tmp_path / "model", 2)
    for file in (tmp_path / "model").glob("model-*"):
        file.unlink()
    with pytest.raises(DataError, match="which is not in its folder"):
        jaxckpt.open(tmp_path / "model")
    write_single(tmp_path / "model", 1)
    with pytest.warns(UserWarning, match=f"{INDEX} is ignored: none of its files exists, so {SINGLE} is read"):
        assert values(tmp_path / "model") == {1}
    jaxckpt.save(tmp_path / "ours", {"a": np.full(2, 3.0)})
    jaxckpt.convert(tmp_path / "ours", tmp_path / "model", format="safetensors", overwrite=True)
    assert values(tmp_path / "model") == {3}


def test_an_index_of_the_single_file_and_other_files_beside_an_index(tmp_path: Path) -> None:
    write_single(tmp_path / "model", 1)
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE, "b": SINGLE}}))
    assert values(tmp_path / "model") == {1}
    write_sharded(tmp_path / "mistral", 2)
    write_single(tmp_path / "mistral", 1, "consolidated.safetensors")  # which only Mistral's own code reads
    assert values(tmp_path / "mistral") == {2}


def test_several_indices_are_an_error_that_says_how_to_choose(tmp_path: Path) -> None:
    write_sharded(tmp_path / "model", 1, "consolidated")
    write_sharded(tmp_path / "model", 2, "other")
    with pytest.raises(InputError, match="has several index files") as caught:
        jaxckpt.open(tmp_path / "model")
    (path,) = paths_in(str(caught.value))
    assert values(path) == {1}
    write_sharded(tmp_path / "model", 3)  # the one that transformers reads
    assert values(tmp_path / "model") == {3}


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model", "adapter_model"])
def test_variants_beside_the_default(stem: str, tmp_path: Path) -> None:
    for value, other in enumerate(("consolidated", f"{stem}.fp16", f"{stem}.non_ema"), 1):
        write_single(tmp_path, value, f"{other}.safetensors")
    with pytest.raises(NotACheckpointError, match=r"has 3 \.safetensors files, but no index"):
        jaxckpt.open(tmp_path)
    write_single(tmp_path, 4, f"{stem}.safetensors")
    assert values(tmp_path) == {4}
    write_sharded(tmp_path, 5, f"{stem}.fp16")
    (tmp_path / f"{stem}.fp16.safetensors.index.json").rename(tmp_path / f"{stem}.safetensors.index.fp16.json")
    assert values(tmp_path) == {4}
    assert values(tmp_path / f"{stem}.safetensors.index.fp16.json") == {5}


def test_a_variant_alone(tmp_path: Path) -> None:
    write_sharded(tmp_path, 5, "model.fp16")
    (tmp_path / "model.fp16.safetensors.index.json").rename(tmp_path / "model.safetensors.index.fp16.json")
    assert values(tmp_path) == {5}


def test_complete_shards_without_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path, 1, names=("a", "b", "c"))
    (tmp_path / INDEX).unlink()
    assert set(jaxckpt.open(tmp_path).leaves) == {"a", "b", "c"}
    numpy.save_file({"a": np.ones(2)}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(DataError, match="'a' is also in another file"):
        jaxckpt.open(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(NotACheckpointError, match="no index"):
        jaxckpt.open(tmp_path)


def test_other_names_of_safetensors_files(tmp_path: Path) -> None:
    for name in ("x.sft", "0a1b2c3d"):  # the second as in the cache of a hub
        write_single(tmp_path, 1, name)
        assert values(tmp_path / name) == {1}


def test_folders_of_torch_without_an_index(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for number in (1, 2):
        torch.save({f"{number}": torch.full((2,), 2.0)}, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    assert values(tmp_path) == {2}
    torch.save({"1": torch.full((2,), 1.0)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert values(tmp_path) == {1}


def test_roots_list_the_checkpoints_in_them(tmp_path: Path) -> None:
    write_single(tmp_path / "trainer" / "checkpoint-500", 1)
    write_single(tmp_path / "diffusers" / "unet", 1, "diffusion_pytorch_model.safetensors")
    write_single(tmp_path / "diffusers" / "vae", 1, "diffusion_pytorch_model.safetensors")
    (tmp_path / "diffusers" / "model_index.json").write_text("{}")
    write_single(tmp_path / "hub" / "snapshots" / "0a1b", 1)
    for root, inside in {"trainer": "checkpoint-500", "diffusers": "unet, vae", "hub": "snapshots/0a1b"}.items():
        for call in (jaxckpt.open, jaxckpt.verify, jaxckpt.load_numpy):
            with pytest.raises(
                NotACheckpointError, match=f"it is a folder of checkpoints; open one of them: {inside}$"
            ):
                call(tmp_path / root)


def test_bin_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    index, files = "pytorch_model.bin.index.json", {n: f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)}
    for number, file in files.items():
        torch.save({f"{number}": torch.full((2,), 2.0)}, tmp_path / file)
    (tmp_path / index).write_text(json.dumps({"weight_map": {f"{n}": file for n, file in files.items()}}))
    assert values(tmp_path) == {2}
    torch.save({f"{n}": torch.full((2,), 1.0) for n in files}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        InputError, match=r"holds two models: the file pytorch_model\.bin, .* that pytorch_model"
    ) as caught:
        jaxckpt.open(tmp_path)
    single, indexed = paths_in(str(caught.value))
    assert (values(single), values(indexed)) == ({1}, {2})
    for file in files.values():
        (tmp_path / file).unlink()
    with pytest.warns(UserWarning, match="is ignored: none of its files exists"):
        assert values(tmp_path) == {1}
    write_single(tmp_path, 4)  # which transformers prefers
    assert values(tmp_path) == {4}


# transformers ---------------------------------------------------------------------------------------------


@pytest.fixture
def save_llama() -> Callable[..., None]:
    """Saves a model of transformers whose weights all have one value, in one file or in shards."""
    pytest.importorskip("transformers", reason="transformers writes the folders")
    import torch
    import transformers

    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 16)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)

    def save(folder: Path, value: float, **how: Any) -> None:
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(folder, **how)

    return save


def read_by_transformers(folder: Path) -> float:
    import transformers

    with contextlib.redirect_stderr(io.StringIO()):
        return transformers.LlamaForCausalLM.from_pretrained(folder).lm_head.weight[0, 0].item()


def test_folders_that_transformers_saved_twice(save_llama: Callable[..., None], tmp_path: Path) -> None:
    save_llama(tmp_path, 1, max_shard_size="2KB")
    assert values(tmp_path) == {1} == {read_by_transformers(tmp_path)}
    save_llama(tmp_path, 2)
    assert (tmp_path / INDEX).exists()
    with pytest.warns(UserWarning, match=f"{INDEX} is ignored"):
        assert values(tmp_path) == {2} == {read_by_transformers(tmp_path)}
    save_llama(tmp_path, 3, max_shard_size="2KB")
    assert read_by_transformers(tmp_path) == 2  # the older of the two
    with pytest.raises(InputError, match=f"holds two models: the file {SINGLE}, which transformers reads") as caught:
        jaxckpt.rules.huggingface_rules(tmp_path)
    for path, value in zip(paths_in(str(caught.value)), (2, 3), strict=True):
        rules = jaxckpt.rules.huggingface_rules(path)
        tree = jaxckpt.load_numpy(path, rename=rules)
        assert tree["head"]["kernel"][0, 0] == tree["layers"]["0"]["mlp"]["up"]["kernel"][0, 0] == value
