"""A directory of steps: Checkpointer, retention, deletion, preemption, followers, forks and the local tier."""
