"""Tensors of unequal size in one pool: how much may be moved within it, and how many bytes over the link that saves.

    .venv/bin/python -m bench.pool                          Markdown, half a minute
    .venv/bin/python -m bench.pool --effort thorough        the same with ``effort="thorough"``
    .venv/bin/python -m bench.pool --trace uniform_read     one of them

The store's own ``Occupancy`` and ``NextUse`` along each trace, over a pool that only pretends to have memory, and no disk: what
comes out are the numbers of "on demand" in ``bench/follow.py``, with the same traces followed to their end. In each column a
request may have so many times its own bytes moved. Ratios to the bound of ``bench/optimum.py``, and behind the stroke the bytes
moved for each byte over the link.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch

from bench.optimum import budget_of, lower_bound
from bench.traces import TRACES, Access, Key, Trace, next_positions
from tiered.interfaces import Streams
from tiered.keep import Decision, decide
from tiered.occupancy import Occupancy
from tiered.prefetch import Plan, Touch
from tiered.residency import Copy, Directory
from tiered.space import FreeSpace
from tiered.store import _next_use
from tiered.types import Access as Lease
from tiered.types import Slot, TensorSpec

__all__ = ["Pool", "Run", "decision_for", "main"]

LIMITS = (0, 2, 4, 8, 16, 32, math.inf)
UNEQUAL = ("training_unequal", "uniform_read", "uniform_write", "zipf_read", "zipf_write", "experts")
FEWEST = 256
"""Bytes of the smallest budget, for a store has 1 MiB and ``bench/follow.py`` 4 KiB for each."""


class Pool:
    """A memory of which only the places are kept."""

    name = "pool"
    streams: Streams | None = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._space = FreeSpace(capacity, 1)

    def allocate(self, nbytes: int) -> Slot | None:
        found = self._space.allocate(nbytes)
        return Slot(*found) if found else None

    def free(self, slot: Slot) -> None:
        self._space.free(slot.offset, slot.nbytes)

    def move(self, slot: Slot, offset: int) -> Slot:
        self._space.move(slot.offset, slot.nbytes, offset)
        return Slot(offset, slot.nbytes)

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        raise NotImplementedError

    def close(self) -> None:
        pass


def decision_for(trace: Trace, budget: int, effort: str) -> Decision:
    """As ``store.follow`` makes it."""
    keys, uses = [key for key, _ in trace.accesses], [use for _, use in trace.accesses]
    sizes = [trace.sizes[key] for key in keys]
    return decide(keys, uses, sizes, budget, thorough=effort == "thorough", then=trace.then)


class Run:
    """``trace`` in ``budget`` bytes; for a request ``most`` times its own may be moved. ``linked`` went over the link."""

    def __init__(self, trace: Trace, budget: int, most: float, decision: Decision) -> None:
        plan = Plan([Touch(key, None, use) for key, use in trace.accesses], trace.then)
        self.linked, self._most, self._sizes = 0, most, trace.sizes
        self.place = Occupancy(Pool(budget), _next_use(plan, decision), bottom=False)
        self._directory = Directory(2, lambda copy: self.place.note(copy) if copy.tier == 0 else None)
        following, end = next_positions(trace), len(trace.accesses)
        for position, (key, access) in enumerate(trace.accesses):
            copy = self._resident(key, access)
            plan.happened(key)
            if access is Access.WRITE:
                self._directory.grant(self._directory.entry(key), 0, Lease.WRITE)
                self._directory.release(copy, Lease.WRITE)
            self.place.policy.touched(key)
            after = following[position]
            if after < end and trace.accesses[after][1] is Access.PUT:
                self._directory.forget(key)
        for copy in list(self.place.copies.values()):
            self._clean(copy)

    @property
    def moved(self) -> int:
        return self.place.moved

    def _resident(self, key: Key, access: Access) -> Copy:
        nbytes, entry = self._sizes[key], self._directory.find(key)
        spec = TensorSpec("uint8", (nbytes,), 1)
        if access is Access.PUT:
            if entry is not None:
                self._directory.forget(key)
            entry = self._directory.put(key, spec, 0, self._room(nbytes))
        else:
            if entry is None:
                entry = self._directory.restore(key, spec, self._directory.next_id, Slot(0, nbytes), b"", 0)
            if entry.copies[0] is None:
                self.linked += nbytes
                self._directory.begin_fill(entry, 0, self._room(nbytes))
                self._directory.end_fill(entry, 0, None)
        copy = entry.copies[0]
        assert copy is not None
        return copy

    def _room(self, nbytes: int) -> Slot:
        slot = self.place.allocate(nbytes, self._most)
        if slot is None:
            for copy in self.place.victims(nbytes, lambda copy: True, self._most) or ():
                self._clean(copy)
                self._directory.evict(copy)
            slot = self.place.allocate(nbytes, self._most)
        assert slot is not None
        return slot

    def _clean(self, copy: Copy) -> None:
        if copy.dirty:
            entry = self._directory.entry(copy.key)
            self.linked += copy.nbytes
            self._directory.begin_writeback(entry, 0, Slot(0, copy.nbytes))
            self._directory.end_writeback(entry, 0, None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pool",
        description="Bytes over the link, and bytes moved in memory, by how much a request may have moved.",
        epilog="example: python -m bench.pool --trace uniform_read",
    )
    parser.add_argument("--trace", action="append", choices=TRACES, help="only this one (may be repeated)")
    parser.add_argument("--effort", choices=("quick", "thorough"), default="quick", help="of follow (default quick)")
    args = parser.parse_args(arguments)
    print("| trace | budget | " + " | ".join("no limit" if math.isinf(most) else str(most) for most in LIMITS) + " |")
    print("|---|" + "---:|" * (1 + len(LIMITS)))
    for name in args.trace or UNEQUAL:
        trace = TRACES[name]()
        for share in ("5%", "10%", "25%", "50%", "90%"):
            budget = max(budget_of(trace, share), FEWEST)
            bound = lower_bound(trace, budget)
            decision = decision_for(trace, budget, args.effort)
            runs = [Run(trace, budget, most, decision) for most in LIMITS]
            cells = " | ".join(f"{run.linked / bound:.3f} / {run.moved / run.linked:.1f}" for run in runs)
            print(f"| {name} | {share} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
