"""Frozen snapshots of what a store did since it was opened. Bytes are bytes, times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FlowStatistics", "LinkStatistics", "StoreStatistics", "TierStatistics"]


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """One direction of a link. ``busy_seconds`` is the time during which at least one transfer was under way."""

    transfers: int
    bytes: int
    failed: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """``up`` is towards the compute (reads, for the disk), ``down`` is away from it (write-backs)."""

    src: str
    dst: str
    up: FlowStatistics
    down: FlowStatistics


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Bytes are those of slots, padding included. ``held`` copies are pinned by aliases that outlived their lease."""

    name: str
    capacity: int
    used: int
    peak: int
    copies: int
    held: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """``hits`` are leases that were granted at once, ``misses`` those that waited.

    ``stalled_for_reads`` is time that callers waited for bytes to arrive, ``stalled_for_room`` time that they waited for space,
    that is for write-backs or for leases of others to end. ``wakes`` counts how often a call had something to do for the
    engine's thread.
    """

    backend: str
    direct: bool
    tensors: int
    generation: int
    leases: int
    hits: int
    misses: int
    stalled_for_reads: float
    stalled_for_room: float
    wakes: int
    prefetched: int
    prefetched_unused: int
    evictions: int
    tiers: tuple[TierStatistics, ...]
    links: tuple[LinkStatistics, ...]

    @property
    def stalled(self) -> float:
        return self.stalled_for_reads + self.stalled_for_room
