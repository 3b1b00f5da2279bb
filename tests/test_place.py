"""What a path may be, and which store is at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jaxckpt
from jaxckpt._bucket import Bucket
from jaxckpt._folder import Folder
from jaxckpt._place import store_at


def test_paths_are_folders_and_urls_are_buckets(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"{tmp_path}/"):
        store = store_at(path, jaxckpt.Options())
        assert isinstance(store, Folder)
        assert store.folder == str(tmp_path)
    assert isinstance(store_at("memory://a/b", jaxckpt.Options()), Bucket)


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
        ("nonsense://bucket/x", "no URL"),
    ],
)
def test_what_is_no_path_is_told_without_secrets(path: Any, reason: str) -> None:
    for call in (jaxckpt.open, jaxckpt.verify, jaxckpt.restore, lambda path: jaxckpt.save(path, {"x": 1})):
        with pytest.raises(jaxckpt.InputError, match=reason) as caught:
            call(path)
        assert "HUSH" not in str(caught.value)


@pytest.mark.parametrize("storage", [{"endpont": "x"}, {"aws_region": 5}, {"bucket": "other"}, {"path": "x"}])
def test_what_storage_cannot_be_is_an_input_error(storage: dict[str, Any]) -> None:
    with pytest.raises(jaxckpt.InputError, match=r"Options\.storage"):
        jaxckpt.open("s3://bucket/x", options=jaxckpt.Options(storage=storage))


def test_storage_does_not_show_and_retries_are_bounded() -> None:
    options = jaxckpt.Options(storage={"secret": "HUSH"}, retry_seconds=float("inf"))
    assert "HUSH" not in repr(options)
    with pytest.raises(jaxckpt.InputError):
        jaxckpt.open("memory://x", options=options)
    with pytest.raises(jaxckpt.NotACheckpointError):
        jaxckpt.open("memory://nothing", options=jaxckpt.Options(retry_seconds=float("inf")))
    with pytest.raises(jaxckpt.InputError, match="retry_seconds must be above zero, found '5'"):
        jaxckpt.Options(retry_seconds="5")  # type: ignore[arg-type]
