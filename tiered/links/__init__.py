"""Links: they move tensors between neighbouring tiers."""
