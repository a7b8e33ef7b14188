"""Forwards that backward computes again: in parts of the batch, or whole."""
