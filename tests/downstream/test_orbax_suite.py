"""Orbax's own tests of its v1 Checkpointer, which its package contains, run with jaxckpt's arrays."""

from __future__ import annotations

from pathlib import Path

import orbax.checkpoint.experimental.v1 as ocp
import pytest
from absl import flags
from orbax.checkpoint.experimental.v1._src.handlers.registration import global_registry
from orbax.checkpoint.experimental.v1._src.training.checkpointer_test_base import CheckpointerTestBase

import jaxckpt
import jaxckpt.orbax

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Orbax raises various warnings

if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # pytest, not absl, parses the command line


class TestCheckpointer(CheckpointerTestBase.Test):
    test_save_async = None
    """Not run: it looks for the data files of Orbax's database (OCDBT)."""

    test_context_constructor_override = None
    """Not run: it sets `use_ocdbt`, and looks for `manifest.ocdbt`."""

    test_custom_save_decision_policy = None
    """Not run: it compares the times of decisions with those in the metadata, which on a busy machine are closer."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        flags.FLAGS.test_tmpdir = str(tmp_path)

    def setUp(self) -> None:
        super().setUp()
        entries = global_registry().get_all_entries()
        self.addCleanup(entries.__setitem__, slice(None), list(entries))
        jaxckpt.orbax.register_v1()

    def test_the_arrays_are_written_by_jaxckpt(self) -> None:
        with ocp.training.Checkpointer(self.directory) as checkpointer:
            self.save(checkpointer, 0, self.pytree)
        assert jaxckpt.verify(self.directory / "0" / "state").ok
