"""The free-space allocator of a tier, and the plan of the moves that defragment it.

``FreeSpace`` hands out ranges of an address space. ``SlotMap`` plans which slots to move so that a request fits in one piece.
Both work on offsets and sizes in bytes only: no memory, no file, no I/O.

Tensors of unequal size leave holes between them, and a hole that is too small is of no use. The plan widens a hole on one side:
its neighbouring slots slide across it, up to another hole, which joins it, or up to a slot that fits into a hole elsewhere and
is moved there. Of all plans it takes the one that moves the fewest bytes.

A move costs memory bandwidth, and no lease is granted meanwhile; an eviction costs bandwidth of the link below, which is
scarcer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise, starmap
from math import isinf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.types import Slot

__all__ = ["FreeSpace", "Move", "SlotMap"]

_Numbers = NDArray[np.int64]
_Flags = NDArray[np.bool_]


class SlotList(list[Slot]):
    """Slots by offset. Their offsets and sizes are in arrays, too, from when somebody has asked for these: to make them of
    thousands of slots takes longer than all else that a search for room does."""

    _arrays: list[_Numbers] | None = None  # offsets and sizes, with room for more slots than there are

    def add(self, slot: Slot) -> None:
        at, count = bisect_left(self, slot), len(self)
        self.insert(at, slot)
        if (arrays := self._arrays) is not None:
            if count == len(arrays[0]):
                arrays[:] = [np.resize(array, count + SPARE) for array in arrays]
            for array, value in zip(arrays, slot, strict=True):
                array[at + 1 : count + 1] = array[at:count]
                array[at] = value

    def take_out(self, offset: int) -> None:
        at, count = bisect_left(self, (offset,)), len(self)
        del self[at]
        for array in self._arrays or ():
            array[at : count - 1] = array[at + 1 : count]

    def arrays(self) -> tuple[_Numbers, _Numbers]:
        """Return offsets and sizes. They change with the slots."""
        count = len(self)
        if self._arrays is None:
            both = np.fromiter(chain.from_iterable(self), np.int64, 2 * count).reshape(count, 2)
            self._arrays = [np.resize(both[:, column], count + SPARE) for column in (0, 1)]
        return self._arrays[0][:count], self._arrays[1][:count]


SPARE = 256
"""Slots that arrays have room for beyond those that there are, when they are made."""


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
        self._slots: SlotList | None = None  # ranges in use by address, once somebody has asked for them
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

    @property
    def slots(self) -> SlotList:
        """The ranges in use, by address."""
        if self._slots is None:
            self._slots = SlotList(starmap(Slot, sorted(self._used.items())))
        return self._slots

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return offset and size of each free range, by address."""
        return [(start, self._sizes[start]) for start in self._starts]

    def round_up(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> Slot | None:
        """Return a range of at least ``nbytes`` (>= 1); None when no free range is that large."""
        if nbytes < 1:
            raise AssertionError(f"request for {nbytes} bytes")
        size = -(-nbytes // self.alignment) * self.alignment
        found = bisect_left(self._by_size, (size, 0))
        if found == len(self._by_size):
            return None
        start = self._by_size[found][1]
        return self._take(start, start, size)

    def free(self, offset: int, size: int) -> None:
        """Give back a range exactly as it was handed out."""
        if self._used.get(offset) != size:
            raise AssertionError(f"free of [{offset}, {offset + size}), which is not in use as one range")
        del self._used[offset]
        if self._slots is not None:
            self._slots.take_out(offset)
        self._insert(offset, size)

    def free_all(self, sizes: Mapping[int, int]) -> None:
        """Give back the range of ``sizes[offset]`` bytes at each offset. Neighbouring ranges are merged first, which makes this
        faster than calling ``free`` for each."""
        used, begin, end = self._used, 0, 0
        self._slots = None
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
        self._starts, self._sizes, self._by_size, self._used, self._slots, self._free_bytes = [], {}, [], {}, None, 0
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

    def _take(self, start: int, offset: int, size: int) -> Slot:
        """Cut ``[offset, offset + size)`` out of the free range that begins at ``start``."""
        stop, end = start + self._sizes[start], offset + size
        left = []
        if start < offset:
            left.append((start, offset - start))
        if end < stop:
            left.append((end, stop - end))
        self._replace((start,), left)
        taken = Slot(offset, size)
        self._used[offset] = size
        self._free_bytes -= size
        if self._slots is not None:
            self._slots.add(taken)
        return taken

    def _insert(self, offset: int, size: int) -> None:
        """Make a range free and merge it with its free neighbours."""
        self._free_bytes += size
        at, merged = bisect_left(self._starts, offset), []
        if at < len(self._starts) and self._starts[at] == offset + size:
            merged.append(offset + size)
            size += self._sizes[offset + size]
        before = self._starts[at - 1] if at else None
        if before is not None and before + self._sizes[before] == offset:
            merged.append(before)
            size += self._sizes[before]
            offset = before
        self._replace(merged, ((offset, size),))

    def _replace(self, gone: Iterable[int], ranges: Iterable[tuple[int, int]]) -> None:
        """Have ``ranges``, each an offset and a size, be free in the place of those that begin at ``gone``."""
        for start in gone:
            size = self._sizes.pop(start)
            del self._starts[bisect_left(self._starts, start)]
            del self._by_size[bisect_left(self._by_size, (size, start))]
        for start, size in ranges:
            insort(self._starts, start)
            self._sizes[start] = size
            insort(self._by_size, (size, start))


TRIED = 32
"""Largest number of holes that a plan tries to widen, the largest hole first. A plan without a limit on bytes tries all of
them."""


class Move(NamedTuple):
    """A step of a plan: move the bytes of ``slot`` to the offset ``to``."""

    slot: Slot
    to: int


WALKED = 200
"""Most slots that a loop walks over sooner than arrays are made of them."""


class SlotMap:
    """The slots in use of a tier, by offset, and those that may be moved: read once, and asked for many requests, each with
    some of the slots ``gone``.

    ``fixed`` are the offsets of slots that may not be moved; ``gone`` are offsets, too. Nothing may change meanwhile.
    """

    def __init__(self, slots: Sequence[Slot], capacity: int, fixed: Collection[int]) -> None:
        self._slots, self._capacity, self._fixed = slots, capacity, fixed

    def moves(
        self, nbytes: int, most: float, gone: Collection[int] = (), *, any_way: bool = False
    ) -> list[Move] | None:
        """Return moves, to be made one after the other, after which ``nbytes`` are free in one piece; [] where they are
        already.

        The target of each move is free by then, but for what the moved slot itself frees. None: every plan that was found moves
        more than ``most`` bytes, or none was found. ``any_way`` returns the first plan that is found.
        """
        if len(self._slots) <= WALKED:
            search = self._search_among_few(frozenset(gone))
        else:
            rows = self._rows_without(gone)
            if rows.largest < nbytes and not rows.promise(nbytes, most):
                return None
            search = rows.search()
        if search.largest >= nbytes:
            return []
        best: _Window | None = None
        for find, index in islice(search.promising(nbytes, most), None if isinf(most) else 2 * TRIED):
            found = find(index, nbytes, most)
            if found is not None:
                best = found
                if any_way:
                    break
                most = search.nbytes(found) - 1
        return None if best is None else search.plan(best)

    def slides(self, nbytes: int, most: float, gone: Collection[int] = ()) -> range | None:
        """Return the offsets that ``nbytes`` of room, and what slides together to make it, lie in; None: there is no room.

        No slot moves to a hole elsewhere, so there may be no room where ``moves`` finds a plan.
        """
        if len(self._slots) <= WALKED:
            return self._slides_in_a_walk(nbytes, most, frozenset(gone))
        rows = self._rows_without(gone)
        used, free, below = rows.used, rows.free, rows.below
        # Holes are numbered by the slot above them. The slots between two holes join these, and all holes between them: for
        # each hole, as the upper one, the lowest that leaves ``most`` bytes or fewer to be moved, and no slot that cannot be.
        lowest = np.searchsorted(used, used - most)
        above_fixed = np.where(rows.fixed, np.arange(1, len(used)), 0)
        lowest[1:] = np.maximum(lowest[1:], np.maximum.accumulate(above_fixed))
        found = np.flatnonzero(free - below[lowest] >= nbytes)
        if not len(found):
            return None
        high, low = int(found[0]), int(lowest[found[0]])
        begin = used[low] + below[low]  # the end of the slot below the lowest hole
        return range(int(begin), int(used[high] + free[high]))

    def _slides_in_a_walk(self, nbytes: int, most: float, gone: Container[int]) -> range | None:
        free = moved = hole = begin = end = 0  # of a window from ``begin`` on: its free bytes, its slots'; the hole above it
        window: deque[tuple[int, int, int]] = deque()  # each hole, with the bytes and the end of the slot above it
        for offset, size, movable in self._each:
            hole, end = hole + offset - end, offset + size
            if offset in gone:
                hole += size
                continue
            if free + hole >= nbytes:
                return range(begin, offset)
            window.append((hole, size, end))
            free, moved, hole = free + hole, moved + size, 0
            if not movable:
                window.clear()
                free, moved, begin = 0, 0, end
            while moved > most:
                before, size, begin = window.popleft()
                free, moved = free - before, moved - size
        return None

    def _search_among_few(self, gone: Container[int]) -> _Search:
        slots = [slot for slot in self._slots if slot.offset not in gone]
        sizes = [slot.nbytes for slot in slots]
        used = [0, *accumulate(sizes)]
        free = [slot.offset - before for slot, before in zip(slots, used, strict=False)]
        free.append(self._capacity - used[-1])
        fixed = [index for index, slot in enumerate(slots) if slot.offset in self._fixed]
        gaps = zip(free, [0, *free[:-1]], strict=True)
        holes = [(end - begin, index) for index, (end, begin) in enumerate(gaps) if end > begin]
        largest = max(holes, default=(0, 0))[0]
        leaving: dict[int, list[int]] = {}
        for index, slot in enumerate(slots):
            if slot.nbytes <= largest and slot.offset not in self._fixed:
                leaving.setdefault(slot.nbytes, []).append(index)
        return _Search(sizes, fixed, used, free, holes, sorted(leaving.items()))

    def _rows_without(self, gone: Collection[int]) -> _Rows:
        offsets, sizes, fixed = self._arrays
        if gone:
            stays = np.ones(len(offsets), np.bool_)
            stays[_places(offsets, gone)] = False
            offsets, sizes, fixed = offsets[stays], sizes[stays], fixed[stays]
        return _Rows(offsets, sizes, fixed, self._capacity)

    @cached_property
    def _each(self) -> list[tuple[int, int, bool]]:
        """Offset and size of each slot, and whether it may move; then the end."""
        each = [(slot.offset, slot.nbytes, slot.offset not in self._fixed) for slot in self._slots]
        return [*each, (self._capacity, 0, False)]

    @cached_property
    def _arrays(self) -> tuple[_Numbers, _Numbers, _Flags]:
        """Offsets and sizes of the slots, and whether each must stay where it is."""
        slots = self._slots
        offsets, sizes = (slots if isinstance(slots, SlotList) else SlotList(slots)).arrays()
        fixed = np.zeros(len(slots), np.bool_)
        fixed[_places(offsets, self._fixed)] = True
        return offsets, sizes, fixed


def _places(offsets: _Numbers, of: Collection[int]) -> NDArray[np.intp]:
    """Return the indices of some of the slots that begin at ``offsets``."""
    wanted = np.fromiter(of, np.int64, len(of))
    found = np.searchsorted(offsets, wanted)
    assert (offsets.take(found, mode="clip") == wanted).all() if len(offsets) else not len(wanted), "an offset of no slot"
    return found


class _Rows:
    """Slots, whether each is fixed, and of the hole below each slot, and of the last one, three sums: bytes in slots below it
    (``used``), free bytes up to its end (``free``) and to its beginning (``below``)."""

    def __init__(self, offsets: _Numbers, sizes: _Numbers, fixed: _Flags, capacity: int) -> None:
        self.offsets, self.sizes, self.fixed = offsets, sizes, fixed
        self.used = np.concatenate(([0], np.cumsum(sizes)))
        self.free = np.append(offsets, capacity) - self.used
        self.below = np.concatenate(([0], self.free[:-1]))
        holes = self.free - self.below
        self.holes = np.flatnonzero(holes)
        self.largest = int(holes.max())

    def promise(self, nbytes: int, most: float) -> bool:
        """Return whether some hole may get ``nbytes``: what ``_Search.promising`` asks of each, of all of them at once."""
        used, free, below, holes = self.used, self.free, self.below, self.holes
        elsewhere = self.sizes[~self.fixed & (self.sizes <= self.largest)]
        least = nbytes - (elsewhere.max() if len(elsewhere) else 0)
        stay = np.flatnonzero(self.fixed)
        at = np.searchsorted(stay, holes)
        fixed_above, fixed_below = np.append(stay, len(self.sizes))[at], np.concatenate(([0], stay + 1))[at]
        highest = np.minimum(fixed_above, np.searchsorted(used, used[holes] + most, side="right") - 1)
        lowest = np.maximum(fixed_below, np.searchsorted(used, used[holes] - most))
        return bool((free[highest] - below[holes] >= least).any() or (free[holes] - below[lowest] >= least).any())

    def search(self) -> _Search:
        small = np.flatnonzero((self.sizes <= self.largest) & ~self.fixed)
        small = small[np.argsort(self.sizes[small], kind="stable")]
        different, begins = np.unique(self.sizes[small], return_index=True)
        some = pairwise((*begins.tolist(), len(small)))
        leaving = [(size, small[begin:end].tolist()) for size, (begin, end) in zip(different.tolist(), some, strict=True)]
        gaps = (self.free - self.below)[self.holes]
        holes = list(zip(gaps.tolist(), self.holes.tolist(), strict=True))
        fixed = np.flatnonzero(self.fixed).tolist()
        return _Search(self.sizes.tolist(), fixed, self.used.tolist(), self.free.tolist(), holes, leaving)


class _Window(NamedTuple):
    """The slots ``[low, high)``, of which all slide to one side: down, or up. ``leaving``, one of them, moves to the offset
    ``to``, outside the window, instead."""

    low: int
    high: int
    down: bool
    leaving: int = -1
    to: int = -1


class _Search:
    """The slots of a tier, the holes between them, and sums by which a plan is found without a walk over the slots.

    Slots that slide to one side of a window join the holes before, between and behind them. So a window of slots has what it
    needs where the sum of its holes, and of the slot that leaves, is large enough; the sums grow with the window, so the
    smallest window is found by bisection, once for each size of a slot that may leave.
    """

    def __init__(
        self,
        sizes: list[int],
        fixed: list[int],
        used: list[int],
        free: list[int],
        holes: list[tuple[int, int]],
        leaving: list[tuple[int, list[int]]],
    ) -> None:
        """``fixed``: the indices of slots that stay; ``used`` and ``free``: bytes before each slot, and in all; ``holes``: the
        bytes of each, and the index of the slot above it; ``leaving``: the slots that can be moved and that fit into a hole,
        the indices of each size, the smallest size first."""
        self._sizes, self._fixed, self._bytes, self._free, self._leaving = sizes, fixed, used, free, leaving
        self._free_below = [0, *free[:-1]]  # free bytes before the hole before slot i
        self._holes = sorted(holes)
        self.largest = self._holes[-1][0] if self._holes else 0

    def nbytes(self, window: _Window) -> int:
        """Return how many bytes are moved."""
        return self._bytes[window.high] - self._bytes[window.low]

    def plan(self, window: _Window) -> list[Move]:
        low, high, down, leaving, to = window
        found = [] if leaving < 0 else [Move(self._slot(leaving), to)]
        order = range(low, high) if down else range(high - 1, low - 1, -1)
        at = self._begin(low) if down else self._end(high)
        for index in order:
            if index == leaving:
                continue
            slot = self._slot(index)
            at -= 0 if down else slot.nbytes
            found.append(Move(slot, at))
            at += slot.nbytes if down else 0
        return found

    def promising(self, nbytes: int, most: float) -> Iterator[tuple[Callable[[int, int, float], _Window | None], int]]:
        """Yield how the holes may be widened that may get ``nbytes`` by moving ``most`` bytes, the largest hole first: by
        ``widen_up`` or ``widen_down``, with the index of the slot above the hole."""
        free, below = self._free, self._free_below
        least = nbytes - (self._leaving[-1][0] if self._leaving else 0)
        for _, index in reversed(self._holes):
            if free[self._highest(index, most)] - below[index] >= least:
                yield self.widen_up, index
            if free[index] - below[self._lowest(index, most)] >= least:
                yield self.widen_down, index

    def widen_up(self, low: int, nbytes: int, most: float) -> _Window | None:
        """Return the smallest window above the hole below slot ``low``: its slots slide down across the hole."""
        free, limit = self._free, self._highest(low, most)
        wanted = self._free_below[low] + nbytes
        high = bisect_left(free, wanted, low + 1, limit + 1)
        found = _Window(low, high, down=True) if high <= limit else None
        for size, indices in self._leaving_with(wanted - free[limit]):
            first = bisect_left(indices, low)
            if first == len(indices):
                continue
            end = max(bisect_left(free, wanted - size, low + 1, limit + 1), indices[first] + 1)
            if end <= limit and end < high:
                to = self._elsewhere(size, low, end)
                if to is not None:
                    high, found = end, _Window(low, end, True, indices[first], to)
        return found

    def widen_down(self, high: int, nbytes: int, most: float) -> _Window | None:
        """Return the smallest window below the hole below slot ``high``: its slots slide up across the hole."""
        below, limit = self._free_below, self._lowest(high, most)
        wanted = self._free[high] - nbytes
        low = bisect_right(below, wanted, limit, high) - 1
        found = _Window(low, high, down=False) if low >= limit else None
        for size, indices in self._leaving_with(below[limit] - wanted):
            last = bisect_left(indices, high) - 1
            if last < 0:
                continue
            begin = min(bisect_right(below, wanted + size, limit, high) - 1, indices[last])
            if begin >= limit and begin > low:
                to = self._elsewhere(size, begin, high)
                if to is not None:
                    low, found = begin, _Window(begin, high, False, indices[last], to)
        return found

    def _highest(self, low: int, most: float) -> int:
        """Return where a window that begins at ``low`` must end: at a slot that cannot be moved, or with ``most`` bytes."""
        at = bisect_left(self._fixed, low)
        fixed = self._fixed[at] if at < len(self._fixed) else len(self._sizes)
        return min(fixed, bisect_right(self._bytes, self._bytes[low] + most) - 1)

    def _lowest(self, high: int, most: float) -> int:
        """Return where a window that ends at ``high`` must begin."""
        at = bisect_left(self._fixed, high)
        return max(self._fixed[at - 1] + 1 if at else 0, bisect_left(self._bytes, self._bytes[high] - most))

    def _leaving_with(self, least: int) -> list[tuple[int, list[int]]]:
        """Return the sizes of at least ``least`` bytes, with the indices of their slots."""
        return self._leaving[bisect_left(self._leaving, (least,)) :]

    def _elsewhere(self, nbytes: int, low: int, high: int) -> int | None:
        """Return the offset of the smallest hole of ``nbytes`` that does not belong to the window."""
        for _, index in self._holes[bisect_left(self._holes, (nbytes, 0)) :]:
            if not low <= index <= high:
                return self._begin(index)
        return None

    def _slot(self, index: int) -> Slot:
        return Slot(self._begin(index) + self._free[index] - self._free_below[index], self._sizes[index])

    def _begin(self, index: int) -> int:
        """Return the offset of the hole below slot ``index``."""
        return self._free_below[index] + self._bytes[index]

    def _end(self, index: int) -> int:
        """Return where the hole below slot ``index`` ends."""
        return self._free[index] + self._bytes[index]
