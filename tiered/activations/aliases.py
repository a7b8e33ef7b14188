"""Whether something else uses the memory of a tensor: another tensor, a graph, an array of NumPy, or an object of Python."""

from __future__ import annotations

import sys

import torch

__all__ = ["has_aliases"]


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many tensors are on this memory, and how many Python objects of it there are; both with an offset."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _users(torch.empty(1, device="cpu"))


def has_aliases(tensor: torch.Tensor) -> bool:
    """Return whether anything but ``tensor`` uses its memory."""
    return any(count > alone for count, alone in zip(_users(tensor), _ALONE, strict=True))
