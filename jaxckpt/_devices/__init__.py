"""Devices: shardings, exchange between processes, and copies to the host."""
