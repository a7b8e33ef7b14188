"""``tiered bench``."""
