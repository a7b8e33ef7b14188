"""What the tests of saved activations share: a store of its own for each, a small network, and that nothing is left."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import tiered
from tiered import TieredStore
from tiered.store.activations import _Books

__all__ = ["Network", "Watched", "block", "nothing_is_left"]


def block(store: TieredStore, *, keep: int = 0, min_bytes: int = 1) -> tiered.offload_activations:
    """A block in which all goes to the store that can."""
    return tiered.offload_activations(store, keep=keep, min_bytes=min_bytes)


class Network(nn.Module):
    """Two layers, with dropout; each forward is the same for the same ``seed``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.x = torch.randn(64, width)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(torch.tanh(self.first(x)), 0.25)
        return torch.sigmoid(self.second(hidden)) * x

    def forward(self, around: Callable[..., Any] | None = None) -> torch.Tensor:
        torch.manual_seed(7)
        x = self.x.clone().requires_grad_()
        for _ in range(3):
            x = self.parts(x) if around is None else around(self.parts, x)
        return self.norm(x).pow(2).sum()

    def gradients(self) -> list[torch.Tensor]:
        found = [parameter.grad.clone() for parameter in self.parameters() if parameter.grad is not None]
        self.zero_grad()
        return found


class Watched:
    """Storages that a network's modules made, by weak references."""

    def __init__(self, network: nn.Module) -> None:
        self.storages: list[StorageWeakRef] = []
        self.hooks = [module.register_forward_hook(self._made) for module in network.modules()]

    def _made(self, module: nn.Module, given: Any, made: torch.Tensor) -> None:
        self.storages.append(StorageWeakRef(made.untyped_storage()))

    @property
    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def nothing_is_left(store: TieredStore) -> None:
    """Assert that no activation, number, room or lease is left, once transfers that were under way have ended."""
    gc.collect()
    store.offload()  # waits for what is in flight, also of what is to be deleted
    assert [key for key in store if key.startswith("tiered.saved/")] == []
    books = _Books.of(store)
    with books.lock:
        books.sweep()
    assert not books.traces
    assert (books.free, books.used) == ({}, {})
    assert store._engine.state.doomed == {}
    if not len(store):
        assert [tier.used for tier in store.statistics().tiers] == [0] * len(store.statistics().tiers)


def descriptors() -> int:
    """Return how many files are open, once what other tests left is collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
