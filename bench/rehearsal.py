"""An order that runs through the store's own ``Pool`` and ``NextUse``, over a memory that has places and no bytes.

It moves what a store moves on demand, holes that unequal sizes leave included. A tenth of a second for 1,000 touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiered.allocator import FreeSpace
from tiered.engine.policy import NextUse, OrderPlan, Touch
from tiered.engine.pool import MOVED, Pool
from tiered.engine.residency import Copy, Directory
from tiered.engine.retention import RetentionPlan, dead_after
from tiered.interfaces import Memory, Streams
from tiered.types import Access, Key, Slot, TensorSpec, Then, Use

if TYPE_CHECKING:
    import torch

__all__ = ["MovablePlaces", "Places", "Rehearsal"]


class Places:
    """A memory of which only the places are kept."""

    name = "places"
    streams: Streams | None = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._space = FreeSpace(capacity, 1)

    def allocate(self, nbytes: int) -> Slot | None:
        return self._space.allocate(nbytes)

    @property
    def slots(self) -> Sequence[Slot]:
        return self._space.slots

    def free(self, slot: Slot) -> None:
        self._space.free(slot.offset, slot.nbytes)

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        raise NotImplementedError

    def close(self) -> None:
        pass


class MovablePlaces(Places):
    """One whose slots can be moved."""

    def move(self, slot: Slot, offset: int) -> Slot:
        self._space.move(slot.offset, slot.nbytes, offset)
        return Slot(offset, slot.nbytes)


class Rehearsal:
    """An order in ``memory``, on demand; for a request ``most`` times its own bytes may be moved. What is dead is deleted."""

    def __init__(
        self,
        keys: Sequence[Key],
        uses: Sequence[Use],
        sizes: Sequence[int],
        memory: Memory,
        decision: RetentionPlan,
        then: Then,
        most: float = MOVED,
    ) -> None:
        self._touches, self._most = list(zip(keys, uses, sizes, strict=True)), most
        self._plan = OrderPlan([Touch(key, None, use) for key, use, _ in self._touches], then)
        self.place = Pool(memory, NextUse.along(self._plan, decision.price, decision.keep), bottom=False)
        self._directory = Directory(
            2, lambda copy: self.place.note(copy) if copy.tier == 0 else None
        )
        self._dying = dead_after(keys, uses, then)
        self._linked = 0

    def round(self) -> int:
        """All touches, once; the bytes that went over the link."""
        before = self._linked
        for (key, use, nbytes), dies in zip(self._touches, self._dying, strict=True):
            copy = self._resident(key, use, nbytes)
            self._plan.happened(key)
            if use is Use.WRITE:
                self._directory.grant(self._directory.entry(key), 0, Access.WRITE)
                self._directory.release(copy, Access.WRITE)
            self.place.policy.touched(key)
            if dies:
                self._directory.forget(key)
        return self._linked - before

    def rest(self) -> int:
        """Write back what is dirty; the bytes of it."""
        before = self._linked
        for copy in list(self.place.copies.values()):
            self._clean(copy)
        return self._linked - before

    def _resident(self, key: Key, use: Use, nbytes: int) -> Copy:
        entry = self._directory.find(key)
        if use is Use.PUT:
            if entry is not None:
                self._directory.forget(key)
            entry = self._directory.put(key, TensorSpec("uint8", (nbytes,), 1), 0, self._room(nbytes))
        elif entry is None:
            spec, fresh = TensorSpec("uint8", (nbytes,), 1), self._directory.next_id
            entry = self._directory.restore(key, spec, fresh, Slot(0, nbytes), b"", 0)
        if entry.copies[0] is None:
            self._linked += entry.nbytes
            self._directory.begin_fill(entry, 0, self._room(entry.nbytes))
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
            self._linked += copy.nbytes
            self._directory.begin_writeback(entry, 0, Slot(0, copy.nbytes))
            self._directory.end_writeback(entry, 0, None)
