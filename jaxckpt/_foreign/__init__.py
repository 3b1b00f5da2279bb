"""Other libraries' checkpoints: one module a format, their registry, and conversion."""
