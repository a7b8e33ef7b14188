"""Tensors whose bytes follow from a name and a number, so that any process can say what they have to be."""

from __future__ import annotations

import random
import zlib

import torch

from tiered import TieredStore
from tiered.types import Location

__all__ = ["content", "evict_all", "extent", "holds"]


def content(key: str, version: int, nbytes: int) -> torch.Tensor:
    """uint8 of shape (nbytes,)."""
    seed = random.Random(zlib.crc32(key.encode()) ^ version).randbytes(min(nbytes, 4096))
    whole = (seed * (nbytes // max(1, len(seed)) + 1))[:nbytes]
    found = torch.frombuffer(bytearray(whole), dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
    found[::4096] ^= torch.arange(len(found[::4096])).to(torch.uint8)  # no two blocks are the same
    return found


def holds(store: TieredStore, key: str, version: int, nbytes: int) -> None:
    assert torch.equal(store.get(key), content(key, version, nbytes)), f"{key!r} is not version {version}"


def evict_all(store: TieredStore) -> None:
    """Whatever is read next comes from the disk."""
    (capacity,) = [tier.capacity for tier in store.statistics().tiers if tier.name == "dram"]
    store.put("ballast", torch.empty(capacity, dtype=torch.uint8))
    store.delete("ballast")


def extent(store: TieredStore, key: str) -> Location:
    """Where on the disk ``key`` is."""
    with store._engine.lock:
        copy = store._engine.state.directory.entry(key).copies[-1]
    assert copy is not None
    assert store._parts.nvme is not None
    return store._parts.nvme.locate(copy.slot)
