"""Restoring: manifest, target, layout, plan, reading, placing."""
