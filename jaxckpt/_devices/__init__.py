"""Devices: shardings as boxes and records, and keys of random number generators."""
