"""``tiered info``."""
