"""Tensors that stand for what is in the store."""
