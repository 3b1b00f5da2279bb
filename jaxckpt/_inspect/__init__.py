"""For people: opening a checkpoint, the plan of a restore, verifying, comparing, reports."""
