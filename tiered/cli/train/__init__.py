"""``tiered train``."""
