"""Fixtures of the tests of saves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxckpt._store.files import FileWriter


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Blocks all writes until it is set."""
    opened = threading.Event()
    write = FileWriter.write

    def wait(*arguments: Any) -> Any:
        assert opened.wait(60)
        return write(*arguments)

    monkeypatch.setattr(FileWriter, "write", wait)
    yield opened
    opened.set()
