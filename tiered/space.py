"""Which ranges of a tier's space are free. Offsets and sizes in bytes; moves nothing, knows no file and no memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping

__all__ = ["FreeSpace"]


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
        self._capacity = 0
        self._free_bytes = 0
        self._starts: list[int] = []  # free ranges by address
        self._sizes: dict[int, int] = {}  # their sizes
        self._by_size: list[tuple[int, int]] = []  # the same ranges as (size, start)
        self._used: dict[int, int] = {}
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def free_bytes(self) -> int:
        """Sum of the free ranges; a single request of this size may still not fit."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        return self._capacity - self._free_bytes

    @property
    def largest(self) -> int:
        """The largest request that would be granted now."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_at_end(self) -> int:
        """Size of the free range that ends at ``capacity``: growing by the rest of a request is enough to grant it."""
        last = self._starts[-1] if self._starts else None
        return self._sizes[last] if last is not None and last + self._sizes[last] == self._capacity else 0

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
        capacity, self._capacity = self._capacity, 0
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
        if capacity < self._capacity:
            raise AssertionError(f"a space of {self._capacity} bytes cannot become {capacity}")
        old, self._capacity = self._capacity, capacity
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
