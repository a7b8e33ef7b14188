"""What autograd saves for backward, in a store."""

from tiered.activations.offload import ActivationOffload, ActivationStatistics, offload_activations

__all__ = ["ActivationOffload", "ActivationStatistics", "offload_activations"]
