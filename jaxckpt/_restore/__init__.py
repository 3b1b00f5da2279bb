"""Restoring: manifest, target, goals, destinations, plan, reading, placing."""
