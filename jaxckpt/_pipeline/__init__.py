"""Bounded work: the pipeline through which all bytes move, to storage and from it."""
