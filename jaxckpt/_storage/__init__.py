"""Reads and writes bytes on file systems and object stores, as small files, as objects and as arrays."""
