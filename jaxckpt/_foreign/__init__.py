"""Checkpoints of other libraries: one module per format, their registry, and conversion."""
