"""Conversion between formats and layouts."""
