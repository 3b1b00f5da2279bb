"""The process that runs JAX's coordination service, which is not process 0 of the job, stops during a save."""

from __future__ import annotations

from renumbered import index

from peer import args, at, attempt, count, meet, note, operate, process_id, sleep_until, report, there  # isort: skip

operate("save", 0, 60)
stops = process_id == 0
others = [f"raised-{process}" for process in range(1, count)]
back = at("writing", sleep_until(others, "CONT")) if stops else lambda: None
meet("ready")
said, seconds = attempt("save", 1, args["timeout"])
note("raised")
back()
meet("over")
now = there()
after, _ = attempt("save", 2, 60)
report(index=index, stops=stops, said=said, seconds=seconds, there=now, after=after)
