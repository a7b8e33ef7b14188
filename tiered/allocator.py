"""Which ranges of a tier's space are free. Offsets and sizes in bytes; moves nothing, knows no file and no memory.

What to move so that a request fits in one piece. Pure: offsets and bytes; moves nothing.

Tensors of unequal size leave holes between them, and a hole that is too small is of no use. But what nobody looks at can be
moved. So a hole is widened on one side: its neighbours slide across, up to another hole, which joins it; or up to one that fits
into a hole elsewhere, and leaves its room behind. Of all the ways, the one with the fewest bytes to move.

A move costs time of the memory, while every lease waits; an eviction costs time of the link below, which has less to give.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isinf
from typing import NamedTuple

from tiered.types import Slot

__all__ = ["FreeSpace", "Move", "moves"]

class FreeSpace:
    """Ranges of ``[0, capacity)``, each either free or in use.

    Best fit, and the lowest address among equals: what was given back is handed out again before the untouched end of a
    growing file is, and rewriting is faster there than writing fresh. Neighbouring free ranges are merged at once, so
    freeing everything always restores one range. Lookups bisect two sorted lists of the free ranges.

    All offsets and sizes are multiples of ``alignment``; ``capacity`` is rounded down to it, requests are rounded up.
    Misuse (double free, overlap, a range that was not handed out) is our bug: AssertionError.
    """

    def __init__(self, capacity: int, alignment: int) -> None:
        if capacity < 0 or alignment < 1:
            raise AssertionError(f"no space of {capacity} bytes aligned to {alignment}")
        self.alignment = alignment
        self.capacity = 0
        self._free_bytes = 0
        self._starts: list[int] = []  # free ranges by address
        self._sizes: dict[int, int] = {}  # their sizes
        self._by_size: list[tuple[int, int]] = []  # the same ranges as (size, start)
        self._used: dict[int, int] = {}
        self.grow(capacity)

    @property
    def free_bytes(self) -> int:
        """Sum of the free ranges; a single request of this size may still not fit."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        return self.capacity - self._free_bytes

    @property
    def largest(self) -> int:
        """The largest request that would be granted now."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_at_end(self) -> int:
        """Size of the free range that ends at ``capacity``: growing by the rest of a request is enough to grant it."""
        last = self._starts[-1] if self._starts else None
        return self._sizes[last] if last is not None and last + self._sizes[last] == self.capacity else 0

    def round_up(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """Offset and size of a range of at least ``nbytes`` (>= 1); None when no free range is that large."""
        if nbytes < 1:
            raise AssertionError(f"request for {nbytes} bytes")
        size = self.round_up(nbytes)
        found = bisect_left(self._by_size, (size, 0))
        if found == len(self._by_size):
            return None
        start = self._by_size[found][1]
        self._take(start, start, size)
        return start, size

    def free(self, offset: int, size: int) -> None:
        """Give back a range exactly as it was handed out."""
        if self._used.get(offset) != size:
            raise AssertionError(f"free of [{offset}, {offset + size}), which is not in use as one range")
        del self._used[offset]
        self._insert(offset, size)

    def free_all(self, sizes: Mapping[int, int]) -> None:
        """``free`` the range of ``sizes[offset]`` at each offset; neighbours go together, which is quicker for many."""
        used, begin, end = self._used, 0, 0
        for offset in sorted(sizes):
            size = sizes[offset]
            if used.pop(offset, None) != size:
                raise AssertionError(f"free of [{offset}, {offset + size}), which is not in use as one range")
            if offset != end:
                if end > begin:
                    self._insert(begin, end - begin)
                begin = offset
            end = offset + size
        if end > begin:
            self._insert(begin, end - begin)

    def claim(self, offset: int, size: int) -> None:
        """Mark a given free range as in use, as ``allocate`` would have."""
        if not self.is_free(offset, size):
            raise AssertionError(f"claim of [{offset}, {offset + size}), which is not wholly free")
        self._take(self._starts[bisect_right(self._starts, offset) - 1], offset, size)

    def restore(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Exactly these ranges, each an offset and a size, are in use from here on; whatever was kept before does not count."""
        capacity, self.capacity = self.capacity, 0
        self._starts, self._sizes, self._by_size, self._used, self._free_bytes = [], {}, [], {}, 0
        self.grow(capacity)
        for offset, size in sorted(ranges):
            self.claim(offset, size)

    def move(self, offset: int, size: int, to: int) -> None:
        """``free`` here and ``claim`` there, which may overlap: what is not free stays as it was."""
        self.free(offset, size)
        if not self.is_free(to, size):
            self.claim(offset, size)
            raise AssertionError(f"move of [{offset}, {offset + size}) to {to}, where it is not wholly free")
        self.claim(to, size)

    def is_free(self, offset: int, size: int) -> bool:
        """Whether ``[offset, offset + size)`` is aligned, not empty, inside the space, and wholly free."""
        if size < 1 or offset < 0 or offset % self.alignment or size % self.alignment:
            return False
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset + size <= self._starts[at] + self._sizes[self._starts[at]]

    def grow(self, capacity: int) -> None:
        """Extend the space (never shrinks it); the new end is free."""
        capacity -= capacity % self.alignment
        if capacity < self.capacity:
            raise AssertionError(f"a space of {self.capacity} bytes cannot become {capacity}")
        old, self.capacity = self.capacity, capacity
        if capacity > old:
            self._insert(old, capacity - old)

    def _take(self, start: int, offset: int, size: int) -> None:
        """Cut ``[offset, offset + size)`` out of the free range that begins at ``start``."""
        end = start + self._sizes[start]
        self._remove(start)
        if start < offset:
            self._add(start, offset - start)
        if offset + size < end:
            self._add(offset + size, end - offset - size)
        self._used[offset] = size
        self._free_bytes -= size

    def _insert(self, offset: int, size: int) -> None:
        """Make a range free and merge it with its free neighbours."""
        self._free_bytes += size
        at = bisect_left(self._starts, offset)
        after = self._starts[at] if at < len(self._starts) else None
        before = self._starts[at - 1] if at else None
        if after == offset + size:
            size += self._remove(after)
        if before is not None and before + self._sizes[before] == offset:
            size += self._remove(before)
            offset = before
        self._add(offset, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._starts, start)
        self._sizes[start] = size
        insort(self._by_size, (size, start))

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size


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
