"""Valid paths and URLs, and the store of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import jaxckpt
from jaxckpt._cli.listing import list_checkpoints
from jaxckpt._store.bucket import Bucket
from jaxckpt._store.folder import Folder
from jaxckpt._store.store_path import local_path, store_at


def test_paths_are_folders_and_urls_are_buckets(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"{tmp_path}/"):
        store = store_at(path, jaxckpt.Options())
        assert isinstance(store, Folder)
        assert store.folder == str(tmp_path)
    assert isinstance(store_at("memory://a/b", jaxckpt.Options()), Bucket)


def test_a_file_url_means_the_same_everywhere_and_in_tensorstore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b%"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for url in (folder.as_uri(), folder.as_uri().replace("file://", "file://localhost"), f"{folder.as_uri()}/"):
        assert local_path(url) == str(folder) == ts.KvStore.Spec(url).to_json()["path"].rstrip("/")
    url = folder.as_uri()
    jaxckpt.save(f"{url}/ckpt", {"w": np.ones(3)})
    jaxckpt.convert(f"{url}/ckpt", f"{url}/w.safetensors")
    jaxckpt.convert(f"{url}/w.safetensors", f"{url}/again")
    with jaxckpt.Checkpointer(f"{url}/run") as steps:
        steps.save(1, {"w": 1})
    assert sorted(os.listdir(folder)) == ["again", "ckpt", "run", "w.safetensors"]
    assert jaxckpt.diff(f"{url}/w.safetensors", folder / "again").leaves[0].differing == 0
    assert [entry.name for entry in list_checkpoints(url)] == ["again", "ckpt", "run", "w.safetensors"]
    assert "w.safetensors" in jaxckpt.report(f"{url}/w.safetensors")
    with pytest.raises(jaxckpt.errors.InputError, match="is not absolute"):
        jaxckpt.convert(folder / "ckpt", "file://tmp/x.npz")


def test_a_step_of_a_run_at_the_top_of_memory() -> None:
    with jaxckpt.Checkpointer("memory://top") as run:
        for step in (10, 20):
            run.save(step, {"w": step})
    jaxckpt.Run("memory://top").pin(10, "paper")
    for name, step in (("10", 10), ("paper", 10), ("latest", 20)):
        assert jaxckpt.load_numpy(f"memory://top@{name}") == {"w": step}
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="memory://top has no step 30"):
        jaxckpt.open("memory://top@30")
    jaxckpt.save("memory://other@20", {"w": 1})
    assert jaxckpt.load_numpy("memory://other@20") == {"w": 1}


@pytest.mark.parametrize(
    "url", ["memory://above/run/3", "memory://above//3", "memory://above///3", "file:///tmp/above/run/3", "above/run/3"]
)
def test_a_store_knows_its_parent_directory(url: str) -> None:
    store = store_at(url, jaxckpt.Options())
    above, name = store.parent_and_name() or (None, "")
    assert above is not None
    assert name == "3"
    assert above.child(name) in (store, store.absolute())
    assert store_at("memory://above", jaxckpt.Options()).parent_and_name() is not None
    for top in ("/", "s3://bucket"):
        assert store_at(top, jaxckpt.Options()).parent_and_name() is None


def test_a_broken_link_is_reported(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "unmounted")
    for path in (link, link / "below" / "it"):
        for call in (jaxckpt.open, jaxckpt.Checkpointer, lambda path: jaxckpt.save(path, {"x": 1})):
            with pytest.raises(
                jaxckpt.errors.InputError, match=r"link is a symbolic link to .*unmounted, which does not exist"
            ):
                call(path)
    (tmp_path / "unmounted").mkdir()
    jaxckpt.save(link, {"x": 1})
    assert jaxckpt.load_numpy(link) == {"x": 1}


def test_a_checkpoint_is_not_overwritten_through_a_link(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "best", {"x": 1})
    (tmp_path / "latest").symlink_to("best")
    with pytest.raises(
        jaxckpt.errors.CheckpointExistsError, match=r"latest is a symbolic link to .*/best, and overwriting"
    ):
        jaxckpt.save(tmp_path / "latest", {"x": 2}, overwrite=True)
    assert jaxckpt.load_numpy(tmp_path / "best") == {"x": 1}
    (tmp_path / "above").symlink_to(".")  # links above the checkpoint are followed
    jaxckpt.save(tmp_path / "above" / "best", {"x": 3}, overwrite=True)
    assert jaxckpt.load_numpy(tmp_path / "latest") == {"x": 3}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (Path("s3://bucket/x"), "lost a slash"),
        ("s3:/bucket/x", "lost a slash"),
        ("", "non-empty"),
        (5, "non-empty"),
        ("a\0b", "non-empty"),
        (b"bytes", "non-empty"),
        ("s3://bucket/x?token=HUSH", "query"),
        ("s3://bucket/x#HUSH", "query or a fragment"),
        ("s3://me:HUSH@bucket/x", "credentials"),
        ("http://HUSH@127.0.0.1/x", "credentials"),
        ("nonsense://bucket/x", "not a URL"),
        ("nonsense://bucket/x", r"its scheme must be one of s3://, gs://, memory://, http://, https://, file://\. To"),
        ("abfs://container@account.dfs.core.windows.net/HUSH", r"path abfs://… is not a URL .* must be one of s3://"),
        ("ftp://me:HUSH@host/x", "must be one of s3://"),
        ("s3a://bucket/x", r"one of s3://.*did you mean 's3'\? To use"),
        ("s3://", "names no bucket or folder: give a URL such as s3://bucket/run"),
        ("gs:///", "names no bucket or folder"),
        ("memory://", "names no bucket or folder"),
        ("file:///HUSH/a.zip|zip:", r"has a '\|', which leads into a file.* unpack the archive, or write %7C"),
        ("s3://bucket/a.zip|zip:", r"has a '\|'"),
        ("s3://bucket/50%", "not a URL.*% as %25"),
        ("s3://bucket/../other/x", r"segment '\.\.'"),
        ("gs://bucket/a/%2e%2E/x", r"segment '\.\.'"),
        ("memory://a/./x", r"segment '\.'"),
        ("s3://bucket/a\nb", r"segment 'a\\nb'"),
        ("gs://bucket/\udcff", r"segment '\\udcff'"),
        ("file://tmp/x", r"is not absolute.*file:///tmp/x"),
        ("file://./x", "is not absolute"),
        ("file://~/x", "is not absolute"),
        ("file://x", "is not absolute"),
        ("file://", "is not absolute"),
        ("file:///tmp/a%00b", "has a null byte, %00"),
    ],
)
def test_a_value_that_is_not_a_path_is_reported_without_secrets(path: Any, reason: str) -> None:
    for call in (jaxckpt.open, jaxckpt.verify, jaxckpt.restore, lambda path: jaxckpt.save(path, {"x": 1})):
        with pytest.raises(jaxckpt.errors.InputError, match=reason) as caught:
            call(path)
        assert "HUSH" not in str(caught.value)


def test_a_url_into_an_archive_creates_no_folder(tmp_path: Path) -> None:
    for write in (jaxckpt.Checkpointer, lambda url: jaxckpt.save(url, {"x": 1})):
        with pytest.raises(jaxckpt.errors.InputError, match="unpack the archive"):
            write(f"file://{tmp_path}/a.zip|zip:")
    assert os.listdir(tmp_path) == []
    jaxckpt.save(f"file://{tmp_path}/a%7Cb", {"x": 1})
    assert jaxckpt.load_numpy(f"{tmp_path}/a|b") == {"x": 1}


def test_a_url_of_http_is_read_only() -> None:
    """No server runs there, and nothing is requested."""
    url = "http://127.0.0.1:1/run"
    for write in (
        jaxckpt.Checkpointer,
        lambda url: jaxckpt.save(url, {"x": object()}),
        lambda url: jaxckpt.save_async(url, {"x": 1}),
    ):
        with pytest.raises(jaxckpt.errors.StorageError, match=rf"cannot write to {url}: .* is read-only"):
            write(url)


def test_file_urls_of_names_that_are_not_utf_8_are_different_paths(tmp_path: Path) -> None:
    for byte in (0xFE, 0xFF):
        jaxckpt.save(f"file://{tmp_path}/%{byte:x}", {"byte": byte})
        assert jaxckpt.load_numpy(f"{tmp_path}/{os.fsdecode(bytes([byte]))}") == {"byte": byte}


def test_a_local_path_need_not_be_utf_8(tmp_path: Path) -> None:
    path = f"{tmp_path}/\udcff"
    jaxckpt.save(path, {"w": np.arange(3.0)})
    for name, form in (("x.npz", None), ("x.safetensors", None), ("x.zarr", None), ("orbax", "orbax")):
        jaxckpt.convert(path, f"{path}-{name}", format=form)
        assert os.path.exists(f"{path}-{name}")
    assert jaxckpt.load_numpy(f"{path}-x.npz")["w"].tolist() == [0, 1, 2]
    assert r"\udcff" in jaxckpt.report(path).encode().decode()
    for options in (jaxckpt.Options(compression="zstd"), jaxckpt.Options(io="tensorstore")):
        with pytest.raises(jaxckpt.errors.StorageError, match="which is not valid UTF-8: rename it, or save without"):
            jaxckpt.save(f"{path}-z", {"w": np.arange(3.0)}, options=options)
    with pytest.raises(jaxckpt.errors.StorageError, match="which is not valid UTF-8"):
        jaxckpt.load_numpy(f"{path}-orbax")


@pytest.mark.parametrize(
    "storage", [{"endpoint": "\udcff"}, {"endpont": "x"}, {"aws_region": 5}, {"bucket": "other"}, {"path": "x"}]
)
def test_an_invalid_storage_option_is_an_input_error(storage: dict[str, Any]) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=r"Options\.storage"):
        jaxckpt.open("s3://bucket/x", options=jaxckpt.Options(storage=storage))


def test_storage_is_not_shown_and_retries_are_limited() -> None:
    options = jaxckpt.Options(storage={"secret": "HUSH", "retry_seconds": float("inf")})
    assert "HUSH" not in repr(options)
    with pytest.raises(jaxckpt.errors.InputError):
        jaxckpt.open("memory://x", options=options)
    with pytest.raises(jaxckpt.errors.NotACheckpointError):
        jaxckpt.open("memory://nothing", options=jaxckpt.Options(storage={"retry_seconds": float("inf")}))
    with pytest.raises(jaxckpt.errors.InputError, match=r"\['retry_seconds'\] must be a number above zero, found '5'"):
        jaxckpt.Options(storage={"retry_seconds": "5"})
