"""The format: trees, manifests, stacks, grids and chunks. No JAX and no I/O."""
