"""Other names for leaves, and rules that map one tree to another, as a view of a source."""
