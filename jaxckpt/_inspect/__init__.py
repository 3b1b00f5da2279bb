"""Inspection: opening a checkpoint, planning a restore, verifying, comparing, reports."""
