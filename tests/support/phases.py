"""The phases of an operation at which a fault is injected into a process of a job."""

from __future__ import annotations

PHASES = {
    "plan agreement": ("save", "_save.consistency.OwnFingerprint.complete"),
    "folder check": ("save", "_save.shared_path.require_shared"),
    "writing": ("save", "_store.files.FileWriter.write"),
    "before the barrier": ("save", "_save.shared_path.SharedPath.publish"),
    "publishing": ("save", "_job.rendezvous.Rendezvous.broadcast"),  # just after process 0 published
    "writing in the background": ("save_async", "_store.files.FileWriter.write"),
    "before the barrier in the background": ("save_async", "_save.shared_path.SharedPath.publish"),
    "exchanging": ("save with an exchange", "_save.staging.replicate_box"),
    "opening": ("restore", "_sources.source.load_manifest"),
    "reading": ("restore", "_store.files.FileReader.read"),
    "sending": ("shared restore", "_devices.interconnect.Interconnect.gather"),
}
"""For each phase, the operation, and the function call in the victim's process with which it begins."""
