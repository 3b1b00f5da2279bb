"""Restoring: target, match, forms, wants, reads, destinations, placement."""
