"""What can be read: checkpoints of jaxckpt and of other libraries, each as a manifest and readers of boxes."""
