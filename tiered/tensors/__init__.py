"""Tensors as a store takes them, and a mapping of them."""
