"""Formats of other libraries, found by their entry points."""
