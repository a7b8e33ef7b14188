"""Parts that move tensors between neighbouring tiers."""
