"""``tiered generate``: text of a model in a store."""
