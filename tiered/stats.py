"""Frozen snapshots of what a store did since it was opened. Bytes are bytes, times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FlowStatistics", "LinkStatistics", "StoreStatistics", "TierStatistics"]


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """One direction of a link.

    ``transfers`` that ended well moved ``bytes`` (of tensors, without padding); ``failed`` others ended with an error.
    ``busy_seconds`` is the time during which at least one was under way, so ``bytes / busy_seconds`` is the link's rate.
    """

    transfers: int
    bytes: int
    failed: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Between the tiers named ``src`` (the upper) and ``dst``. ``up`` is towards the compute (reads, for the disk), ``down`` is
    away from it (write-backs)."""

    src: str
    dst: str
    up: FlowStatistics
    down: FlowStatistics


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """``name`` is "hbm", "dram" or "nvme". ``capacity``, ``used`` and ``peak`` are bytes of slots, padding included.

    ``copies`` counts tensors that have a copy here. ``held`` of them, and of those replaced or deleted since, are pinned by
    aliases that outlived their lease. ``moved`` bytes went to another place within the tier since ``open``, to
    make one hole of several.
    """

    name: str
    capacity: int
    used: int
    peak: int
    copies: int
    held: int
    moved: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counters since ``open``, but for ``tensors``, ``generation`` and ``tiers``, which say how it is now.

    ``backend``: name of the I/O backend, "none" without a disk. ``direct``: whether I/O bypasses the page cache (O_DIRECT).
    ``leases`` were asked for: ``hits`` had their answer at once, ``misses`` after waiting. ``stalled_for_reads`` is time that
    callers, threads and coroutines, waited for bytes to arrive, ``stalled_for_room`` time that they waited for space, that is
    for write-backs or for leases of others to end; those of several callers add up. ``wakes`` counts how often a call had
    something to do for the engine's thread. ``prefetched`` counts fetches that nobody waited for when they began, one a hop,
    ``prefetched_unused`` those of them that were evicted before anybody used them. ``evictions`` are copies that left a tier
    for others. ``tiers`` are from the top; ``links[i]`` joins ``tiers[i]`` and ``tiers[i + 1]``.
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

    def tier(self, name: str) -> TierStatistics:
        """The tier of that name. Raises KeyError where there is none."""
        return {tier.name: tier for tier in self.tiers}[name]

    @property
    def stalled(self) -> float:
        """Seconds that callers waited, for whatever reason."""
        return self.stalled_for_reads + self.stalled_for_room
