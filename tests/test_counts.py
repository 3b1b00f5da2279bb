"""Being written by the test helper (started 23:42); delivered within minutes."""
