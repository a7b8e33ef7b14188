"""Page a model's parameters around the forward and backward of its modules."""
