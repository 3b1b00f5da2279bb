"""Bounded work: the pipeline of bytes, threads, the watchdog of storage, rates, phases, progress and units."""
