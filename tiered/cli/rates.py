"""How fast the store's disk reads, and writes, when it does nothing else: the measure for how much waiting was avoided."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiered import CapacityError, TieredStore

__all__ = ["Rates", "measure"]

PIECES = 24
PIECE_SHARE = 16
"""A piece is at most one in this many of the pool, so that all of them are half as much again as the pool holds."""
LARGEST_PIECE = 16 << 20
AHEAD = 4
"""Pieces that are asked for while one is leased."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second, through the store, checksums included."""

    read: float
    write: float


def measure(store: TieredStore) -> Rates | None:
    """Write PIECES tensors twice and read them twice; the second pass of each counts (the first one's extents are fresh, its
    pool full of others). None where the disk has no room for them. The tensors are deleted again; nothing is committed."""
    pool = store.statistics().tier("dram").capacity
    piece = torch.arange(min(LARGEST_PIECE, pool // PIECE_SHARE), dtype=torch.uint8)
    keys = [f"rates/{index}" for index in range(PIECES)]
    rates = []
    try:
        for direction in ("write", "write", "read", "read"):
            before = store.statistics().links[-1]
            for index, key in enumerate(keys):
                if direction == "write":
                    store.put(key, piece)
                else:
                    store.prefetch(keys[index + 1 : index + 1 + AHEAD], tier="dram")
                    with store.lease(key, tier="dram"):
                        pass
            after = store.statistics().links[-1]
            flows = (after.down, before.down) if direction == "write" else (after.up, before.up)
            rates.append((flows[0].bytes - flows[1].bytes) / max(1e-9, flows[0].busy_seconds - flows[1].busy_seconds))
    except CapacityError:
        return None
    finally:
        for key in keys:
            if key in store:
                store.delete(key)
    return Rates(read=rates[3], write=rates[1])
