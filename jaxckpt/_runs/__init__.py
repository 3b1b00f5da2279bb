"""A directory of steps: Checkpointer, retention, deletion, preemption, followers and forks."""
