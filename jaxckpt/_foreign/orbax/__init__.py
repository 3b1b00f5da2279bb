"""Orbax's checkpoints, read and written without importing Orbax."""
