"""Stores of 1 MiB over each native backend, for the fixtures of conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from tiered import TieredStore
from tiered.io.probe import libaio_unavailable

__all__ = ["BACKENDS", "WITHOUT", "Backend", "Open", "push_out"]

Backend = Literal["libaio", "posix"]
Open = Callable[..., TieredStore]

WITHOUT = libaio_unavailable()
BACKENDS: list[Backend] = ["posix"] if WITHOUT else ["libaio", "posix"]


def push_out(store: TieredStore) -> None:
    """Fill the pool with other tensors, so that all that nobody holds leaves it."""
    for number in range(8):
        store.put(f"ballast {number}", torch.zeros(200 << 10, dtype=torch.uint8))
    for number in range(8):
        store.delete(f"ballast {number}")
