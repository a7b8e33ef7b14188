"""Tensors of torch's type whose values are in the store."""
