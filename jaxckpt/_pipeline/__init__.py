"""Bounded work: the pipeline through which bytes move, threads, the watchdog of storage, rates, phases, progress and units."""
