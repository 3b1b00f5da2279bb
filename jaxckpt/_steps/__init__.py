"""A directory of training steps."""
