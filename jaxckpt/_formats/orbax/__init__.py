"""Reads and writes Orbax's checkpoints, without importing Orbax."""
