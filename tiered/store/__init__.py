"""``TieredStore`` and what it consists of."""
