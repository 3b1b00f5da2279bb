"""Restoring: target, match, abstract leaves, wants, reads, destinations, placement."""
