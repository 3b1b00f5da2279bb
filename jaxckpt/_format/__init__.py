"""The data model of a checkpoint: trees, boxes, stacks, Zarr metadata and the manifest. No input or output."""
