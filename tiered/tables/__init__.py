"""Tables: rows by number, in blocks that are ordinary tensors of a store."""
