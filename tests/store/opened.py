"""Stores of 1 MiB over each native backend, for the fixtures of conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiered import TieredStore

__all__ = ["Open", "push_out"]

Open = Callable[..., TieredStore]


def push_out(store: TieredStore) -> None:
    """Fill the pool with other tensors, so that all that nobody holds leaves it."""
    for number in range(8):
        store.put(f"ballast {number}", torch.zeros(200 << 10, dtype=torch.uint8))
    for number in range(8):
        store.delete(f"ballast {number}")
