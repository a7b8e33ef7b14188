"""Values of tensors in fewer bytes than their element type has."""
