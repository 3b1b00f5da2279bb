"""What a checkpoint is: trees, boxes, stacks, Zarr metadata and the manifest. No input or output."""
