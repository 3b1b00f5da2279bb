"""Bytes on file systems and in buckets, and how they become a checkpoint. No JAX."""
