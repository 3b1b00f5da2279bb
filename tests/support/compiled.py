"""Keeps compiled code in a folder, for tests that start the same training several times."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_SETTINGS = {
    "JAX_COMPILATION_CACHE_DIR": "",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
FOLDER = "COMPILED_PROGRAMS"
"""The environment variable that names the folder. JAX would read its own variable too early in a forked process."""


def keep() -> None:
    """Keep what this process and its children compile."""
    folder = Path(os.environ[FOLDER])
    for name, value in _SETTINGS.items():
        os.environ[name] = value or str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
