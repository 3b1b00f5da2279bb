"""Bytes: file systems and object stores, files and tensors on them."""
