"""In each round, some processes stop at a phase, and continue after the others have ended their calls."""

from __future__ import annotations

from peer import PHASES, args, at, attempt, count, meet, note, operate, process_id, report, sleep_until, there

operate("save", 0, 60)
for number, (phase, victims) in enumerate(args["rounds"], 1):
    others = sorted(set(range(count)) - set(victims))
    reported = [f"reported{number}-{process}" for process in others]
    back = at(phase, sleep_until(reported, "CONT")) if process_id in victims else lambda: None
    meet(f"ready{number}")
    said, seconds = attempt(PHASES[phase][0], number, args["timeout"])
    note(f"reported{number}")
    back()
    meet(f"over{number}")
    now = there()
    after, _ = attempt("save", number, 60)
    report(said=said, seconds=seconds, there=now, after=after)
