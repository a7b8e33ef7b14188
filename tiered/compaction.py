"""What to move so that a request fits in one piece. Pure: offsets and bytes; moves nothing.

Tensors of unequal size leave holes between them, and a hole that is too small is of no use. But what nobody looks at can be
moved. So a hole is widened on one side: its neighbours slide across, up to another hole, which joins it; or up to one that fits
into a hole elsewhere, and leaves its room behind. Of all the ways, the one with the fewest bytes to move.

A move costs time of the memory, while every lease waits; an eviction costs time of the link below, which has less to give.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from math import isinf
from typing import NamedTuple

from tiered.types import Slot

__all__ = ["Move", "moves"]

TRIED = 32
"""So many holes are tried to be widened, the largest first; all of them where the bytes to move have no limit."""


class Move(NamedTuple):
    """What is in ``slot`` goes to the offset ``to``."""

    slot: Slot
    to: int


def moves(
    slots: Sequence[Slot], capacity: int, nbytes: int, movable: Container[int], most: float, *, any_way: bool = False
) -> list[Move] | None:
    """Moves, one after the other, after which ``nbytes`` are free in one piece; [] where they are already.

    ``slots`` are all that are given, by offset; ``movable`` the offsets of those that may be moved. Whatever one of them moves
    to is free by then, but for what it frees itself. None: it takes more than ``most`` bytes, or no way was found.
    ``any_way``: the first that is found will do.
    """
    layout = _Layout(slots, capacity, movable)
    if layout.holes and layout.holes[-1].nbytes >= nbytes:
        return []
    best: list[Move] | None = None
    for hole in islice(reversed(layout.holes), None if isinf(most) else TRIED):
        for widen in (layout.widen_up, layout.widen_down):
            found = widen(hole, nbytes, most)
            if found is not None and any_way:
                return found
            if found is not None:
                best, most = found, sum(move.slot.nbytes for move in found) - 1
    return best


class _Hole(NamedTuple):
    """``above``: the number of the slot above it."""

    nbytes: int
    offset: int
    above: int = 0


class _Layout:
    """Slots, and the ``holes`` between them, the smallest first."""

    def __init__(self, slots: Sequence[Slot], capacity: int, movable: Container[int]) -> None:
        self._slots, self._capacity, self._movable = slots, capacity, movable
        self.holes: list[_Hole] = []
        end = 0
        for index, (offset, nbytes) in enumerate(slots):
            if offset > end:
                self.holes.append(_Hole(offset - end, end, index))
            end = offset + nbytes
        if capacity > end:
            self.holes.append(_Hole(capacity - end, end, len(slots)))
        self.holes.sort()

    def widen_up(self, hole: _Hole, nbytes: int, most: float) -> list[Move] | None:
        """Neighbours above the hole slide down across it."""
        found = self._across(hole, self._above(hole), nbytes, most)
        if found is None:
            return None
        sliding, plan = found
        to = hole.offset
        for slot in sliding:
            plan.append(Move(slot, to))
            to += slot.nbytes
        return plan

    def widen_down(self, hole: _Hole, nbytes: int, most: float) -> list[Move] | None:
        """Neighbours below the hole slide up across it."""
        found = self._across(hole, self._below(hole), nbytes, most)
        if found is None:
            return None
        sliding, plan = found
        to = hole.offset + hole.nbytes
        for slot in sliding:
            to -= slot.nbytes
            plan.append(Move(slot, to))
        return plan

    def _across(
        self, hole: _Hole, neighbours: Iterator[tuple[Slot, int]], nbytes: int, most: float
    ) -> tuple[list[Slot], list[Move]] | None:
        """Which of ``neighbours`` slide across the hole, and perhaps one move to another, so that the hole has ``nbytes``."""
        sliding: list[Slot] = []
        sizes: list[tuple[int, int]] = []  # of those that slide, in order, each with its place among them
        largest = self.holes[-1].nbytes
        lacking = nbytes - hole.nbytes
        low, high = hole.offset, hole.offset + hole.nbytes  # of all that takes part
        for slot, behind in neighbours:
            most -= slot.nbytes
            if most < 0 or slot.offset not in self._movable:
                return None
            insort(sizes, (slot.nbytes, len(sliding)))
            sliding.append(slot)
            lacking -= behind
            if lacking <= 0:
                return sliding, []
            low, high = min(low, slot.offset - behind), max(high, slot.offset + slot.nbytes + behind)
            at = bisect_left(sizes, (lacking, 0))
            if at == len(sizes) or sizes[at][0] > largest:
                continue
            leaving = sliding[sizes[at][1]]
            to = self._elsewhere(leaving.nbytes, low, high)
            if to is not None:
                return [slot for slot in sliding if slot is not leaving], [Move(leaving, to)]
        return None

    def _elsewhere(self, nbytes: int, low: int, high: int) -> int | None:
        """Offset of the smallest hole of ``nbytes`` that is not between ``low`` and ``high``."""
        fitting = islice(self.holes, bisect_left(self.holes, _Hole(nbytes, 0)), None)
        return next((hole.offset for hole in fitting if not low <= hole.offset < high), None)

    def _above(self, hole: _Hole) -> Iterator[tuple[Slot, int]]:
        """Slots above the hole, the nearest first, each with the bytes that are free behind it."""
        for index in range(hole.above, len(self._slots)):
            slot = self._slots[index]
            end = self._slots[index + 1].offset if index + 1 < len(self._slots) else self._capacity
            yield slot, end - slot.offset - slot.nbytes

    def _below(self, hole: _Hole) -> Iterator[tuple[Slot, int]]:
        """Slots below the hole, likewise."""
        for index in range(hole.above - 1, -1, -1):
            slot = self._slots[index]
            before = self._slots[index - 1] if index else Slot(0, 0)
            yield slot, slot.offset - before.offset - before.nbytes
