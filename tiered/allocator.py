"""The free-space allocator of a tier, and the plan of the moves that defragment it.

``FreeSpace`` hands out ranges of an address space. ``moves`` plans which slots to move so that a request fits in one piece.
Both work on offsets and sizes in bytes only: no memory, no file, no I/O.

Tensors of unequal size leave holes between them, and a hole that is too small is of no use. The plan widens a hole on one side:
its neighbouring slots slide across it, up to another hole, which joins it, or up to a slot that fits into a hole elsewhere and
is moved there. Of all plans it takes the one that moves the fewest bytes.

A move costs memory bandwidth, and no lease is granted meanwhile; an eviction costs bandwidth of the link below, which is
scarcer.
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
    """A free-space allocator over ``[0, capacity)``: best fit, and the lowest address among ranges of equal size.

    So a range that was given back is reused before the untouched end of a growing file: rewriting is faster there than writing
    fresh. Neighbouring free ranges are merged at once, so freeing everything always restores one range. Lookups bisect two
    sorted lists of the free ranges.

    All offsets and sizes are multiples of ``alignment``; ``capacity`` is rounded down to it, requests are rounded up. Misuse (a
    double free, an overlap, a range that was not handed out) is an internal error: AssertionError.
    """

    def __init__(self, capacity: int, alignment: int) -> None:
        if capacity < 0 or alignment < 1:
            raise AssertionError(f"no space of {capacity} bytes aligned to {alignment}")
        self.alignment = alignment
        self.capacity = 0
        self._free_bytes = 0
        self._starts: list[int] = []  # free ranges by address
        self._sizes: dict[int, int] = {}  # of the free ranges, by address
        self._by_size: list[tuple[int, int]] = []  # the same ranges as (size, start)
        self._used: dict[int, int] = {}
        self.grow(capacity)

    @property
    def free_bytes(self) -> int:
        """Sum of the free ranges in bytes; a single request of this size may still not fit."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        return self.capacity - self._free_bytes

    @property
    def largest(self) -> int:
        """Size of the largest request that would be granted now."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_at_end(self) -> int:
        """Size of the free range that ends at ``capacity``: growing by the rest of a request is enough to grant it."""
        last = self._starts[-1] if self._starts else None
        return self._sizes[last] if last is not None and last + self._sizes[last] == self.capacity else 0

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return offset and size of each free range, by address."""
        return [(start, self._sizes[start]) for start in self._starts]

    def round_up(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """Return offset and size of a range of at least ``nbytes`` (>= 1); None when no free range is that large."""
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
        """Give back the range of ``sizes[offset]`` bytes at each offset. Neighbouring ranges are merged first, which makes this
        faster than calling ``free`` for each."""
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
        """Set the ranges in use to exactly ``ranges``, each an offset and a size, whatever was in use before."""
        capacity, self.capacity = self.capacity, 0
        self._starts, self._sizes, self._by_size, self._used, self._free_bytes = [], {}, [], {}, 0
        self.grow(capacity)
        for offset, size in sorted(ranges):
            self.claim(offset, size)

    def move(self, offset: int, size: int, to: int) -> None:
        """Give back the range at ``offset`` and claim as much at ``to``. The two may overlap; when ``to`` is not free nothing
        changes."""
        self.free(offset, size)
        if not self.is_free(to, size):
            self.claim(offset, size)
            raise AssertionError(f"move of [{offset}, {offset + size}) to {to}, where it is not wholly free")
        self.claim(to, size)

    def is_free(self, offset: int, size: int) -> bool:
        """Return whether ``[offset, offset + size)`` is aligned, not empty, inside the space, and wholly free."""
        if size < 1 or offset < 0 or offset % self.alignment or size % self.alignment:
            return False
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset + size <= self._starts[at] + self._sizes[self._starts[at]]

    def grow(self, capacity: int) -> None:
        """Extend the space to ``capacity`` bytes; the new end is free. A space never shrinks."""
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
"""Largest number of holes that a plan tries to widen, the largest hole first. A plan without a limit on bytes tries all of
them."""


class Move(NamedTuple):
    """A step of a plan: move the bytes of ``slot`` to the offset ``to``."""

    slot: Slot
    to: int


def moves(
    slots: Sequence[Slot], capacity: int, nbytes: int, movable: Container[int], most: float, *, any_way: bool = False
) -> list[Move] | None:
    """Return moves, to be made one after the other, after which ``nbytes`` are free in one piece; [] where they are already.

    ``slots`` are all slots in use, by offset; ``movable`` are the offsets of those that may be moved. The target of each move
    is free by then, but for what the moved slot itself frees. None: every plan that was found moves more than ``most`` bytes,
    or none was found. ``any_way`` returns the first plan that is found.
    """
    layout = _Layout(slots, capacity, movable)
    if layout.holes and layout.holes[-1].nbytes >= nbytes:
        return []
    best: list[Move] | None = None
    for hole in islice(layout.promising(nbytes, most), None if isinf(most) else TRIED):
        for widen in (layout.widen_up, layout.widen_down):
            found = widen(hole, nbytes, most)
            if found is not None and any_way:
                return found
            if found is not None:
                best, most = found, sum(move.slot.nbytes for move in found) - 1
    return best


class _Hole(NamedTuple):
    """A hole; ``above`` is the index of the slot above it."""

    nbytes: int
    offset: int
    above: int = 0
    section: int = 0


class _Section:
    """What lies between two slots that cannot be moved: the ``holes`` and, before each of them, the ``bytes`` of the slots
    since the hole before, in order of their offsets; and the ``sizes`` of all slots."""

    __slots__ = ("bytes", "holes", "sizes")

    def __init__(self) -> None:
        self.holes: list[int] = []
        self.bytes: list[int] = []
        self.sizes: list[int] = []

    def reach(self, most: float, largest: int) -> int:
        """Return no less than the bytes that a hole may get by a plan that moves ``most`` bytes: those of neighbouring holes
        with at most so many bytes between them, and of one slot that moves into a hole of ``largest`` bytes."""
        best = free = between = first = 0
        for last, hole in enumerate(self.holes):
            free += hole
            if last:
                between += self.bytes[last]
            while between > most:
                first += 1
                between -= self.bytes[first]
                free -= self.holes[first - 1]
            best = max(best, free)
        return best + max((size for size in self.sizes if size <= largest), default=0)


class _Layout:
    """The slots of a tier and the ``holes`` between them, the smallest hole first."""

    def __init__(self, slots: Sequence[Slot], capacity: int, movable: Container[int]) -> None:
        self._slots, self._capacity, self._movable = slots, capacity, movable
        self.holes: list[_Hole] = []
        self._sections = [section := _Section()]
        end = number = between = 0
        for index, (offset, nbytes) in enumerate(slots):
            if offset > end:
                self.holes.append(_Hole(offset - end, end, index, number))
                section.holes.append(offset - end)
                section.bytes.append(between)
                between = 0
            if offset in movable:
                section.sizes.append(nbytes)
                between += nbytes
            else:
                self._sections.append(section := _Section())
                number, between = number + 1, 0
            end = offset + nbytes
        if capacity > end:
            self.holes.append(_Hole(capacity - end, end, len(slots), number))
            section.holes.append(capacity - end)
            section.bytes.append(between)
        self.holes.sort()

    def promising(self, nbytes: int, most: float) -> Iterator[_Hole]:
        """Yield the holes that may get ``nbytes`` by a plan that moves ``most`` bytes, the largest hole first."""
        largest = self.holes[-1].nbytes if self.holes else 0
        good = [bool(one.holes) and one.reach(most, largest) >= nbytes for one in self._sections]
        return (hole for hole in reversed(self.holes) if good[hole.section])

    def widen_up(self, hole: _Hole, nbytes: int, most: float) -> list[Move] | None:
        """Return moves that slide neighbours above the hole down across it."""
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
        """Return moves that slide neighbours below the hole up across it."""
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
        """Choose which of ``neighbours`` slide across the hole, and at most one that moves elsewhere, so that the hole has
        ``nbytes``."""
        sliding: list[Slot] = []
        sizes: list[tuple[int, int]] = []  # of the slots that slide, in order, each with its index among them
        largest = self.holes[-1].nbytes
        lacking = nbytes - hole.nbytes
        low, high = hole.offset, hole.offset + hole.nbytes  # bounds of everything that takes part
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
        """Return the offset of the smallest hole of ``nbytes`` that is not between ``low`` and ``high``."""
        fitting = islice(self.holes, bisect_left(self.holes, _Hole(nbytes, 0)), None)
        return next((hole.offset for hole in fitting if not low <= hole.offset < high), None)

    def _above(self, hole: _Hole) -> Iterator[tuple[Slot, int]]:
        """Yield the slots above the hole, the nearest first, each with the number of free bytes behind it."""
        for index in range(hole.above, len(self._slots)):
            slot = self._slots[index]
            end = self._slots[index + 1].offset if index + 1 < len(self._slots) else self._capacity
            yield slot, end - slot.offset - slot.nbytes

    def _below(self, hole: _Hole) -> Iterator[tuple[Slot, int]]:
        """Yield the slots below the hole, the nearest first, each with the number of free bytes before it."""
        for index in range(hole.above - 1, -1, -1):
            slot = self._slots[index]
            before = self._slots[index - 1] if index else Slot(0, 0)
            yield slot, slot.offset - before.offset - before.nbytes
