"""Which store is at a path."""

from __future__ import annotations

import os
import re
import reprlib

from jaxckpt._bucket import Bucket
from jaxckpt._errors import InputError
from jaxckpt._folder import Folder
from jaxckpt._options import Options
from jaxckpt._store import Store


def store_at(path: str | os.PathLike[str], options: Options) -> Store:
    """The store at a local path, or at a URL that tensorstore's kvstore takes. Raises InputError."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if not isinstance(text, str) or not text or "\0" in text:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"path, the first argument, must be a non-empty str or PathLike, found {reprlib.repr(path)}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
            raise InputError(f"path {text!r} looks like a URL that lost a slash, as in a pathlib.Path: give a str")
        return Folder(text.rstrip("/") or "/", os.path.abspath(os.path.expanduser(text)))
    if scheme == "file":
        return Folder(text.rstrip("/"), os.path.abspath("/" + rest.lstrip("/")))
    return Bucket.at(text.rstrip("/"), options)
