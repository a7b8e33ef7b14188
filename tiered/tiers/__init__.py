"""Parts that own space."""
