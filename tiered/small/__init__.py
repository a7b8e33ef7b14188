"""Many small tensors by name, in pages that are ordinary tensors of a store."""
