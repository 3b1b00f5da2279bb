"""Threads under Ctrl-C."""

from __future__ import annotations

import sys

import pytest
from processes import RunPython


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="is_alive has no such lock")
def test_an_interrupt_does_not_look_like_the_end_of_the_program(run_python: RunPython) -> None:
    """An interrupt inside `is_alive()` of the main thread, which others may call, makes it return False forever."""
    run_python(
        """
        import sys, threading
        from jaxckpt._pipeline.threads import is_shutting_down

        def interrupt(frame, event, argument):
            if frame.f_code.co_name != "_wait_for_tstate_lock":
                return None
            def line(frame, event, argument):
                if event == "line" and frame.f_locals.get("lock") is not None:
                    interrupt.lines += 1
                    if interrupt.lines == 3:  # the lock is known to be held
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return line
            return line

        interrupt.lines = 0
        sys.settrace(interrupt)
        try:
            threading.main_thread().is_alive()
        except KeyboardInterrupt:
            pass
        sys.settrace(None)
        print(threading.main_thread().is_alive(), is_shutting_down())
        """,
        word="False False",
    )
