"""``tiered plan``."""
