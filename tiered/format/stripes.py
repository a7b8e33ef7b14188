"""Where the bytes of a striped extent lie: on all drives of a store.

A striped extent begins at the same offset of every data file. Its bytes are cut into stripes of STRIPE_BYTES, which the files
get in turn: stripe s is in file s % k of k files, the (s // k)th of its part there. The parts have no padding between or behind
them, so an extent takes as many bytes as one on a single drive. In a slot and in a manifest its file is k, one beyond the last.

Pure functions: no file, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiered.types import PIECE_BYTES, Location

__all__ = ["LARGEST_WHOLE", "STRIPE_BYTES", "is_striped", "located", "lowest", "place", "ranges", "rest", "striped", "tightest"]

STRIPE_BYTES = PIECE_BYTES
"""Bytes of a stripe, part of the format. A multiple of PIECE_BYTES, so that each piece is in one file and a wrong checksum
names one drive, and of every alignment that an extent may have."""
LARGEST_WHOLE = 64 << 20
"""Bytes of the largest tensor that is not striped: more than what is in flight, so a smaller one gains little."""

Starts = Sequence[tuple[int, int]]
"""Ascending first and last offsets at which something may begin."""


def is_striped(file: int, files: int) -> bool:
    """Return whether an extent in that file is striped; ``files`` is the number of data files."""
    return file == files > 1


def ranges(file: int, offset: int, nbytes: int, files: int) -> list[tuple[int, int, int]]:
    """Return the ranges of an extent: the index of a data file, the offset there, and bytes. One, if it is not striped."""
    if not is_striped(file, files):
        return [(file, offset, nbytes)]
    rows, left = divmod(nbytes, files * STRIPE_BYTES)
    sizes = (rows * STRIPE_BYTES + min(STRIPE_BYTES, max(0, left - index * STRIPE_BYTES)) for index in range(files))
    return [(index, offset, size) for index, size in enumerate(sizes) if size]


def place(at: int, files: int) -> tuple[int, int]:
    """Return the file of byte ``at`` of a striped extent, and the offset in its part there."""
    stripe, within = divmod(at, STRIPE_BYTES)
    return stripe % files, stripe // files * STRIPE_BYTES + within


def rest(at: int) -> int:
    """Return how many bytes from byte ``at`` on are in one stripe."""
    return STRIPE_BYTES - at % STRIPE_BYTES


def striped(parts: Sequence[Location]) -> Location:
    """Return the location of a striped slot whose part in each file is there."""
    return parts[0]._replace(parts=tuple(parts))


def located(location: Location, at: int) -> Location:
    """Return where byte ``at`` of a slot is."""
    fd, offset, path, parts = location
    if parts:
        file, at = place(at, len(parts))
        fd, offset, path, _ = parts[file]
    return Location(fd, offset + at, path)


def tightest(starts: Sequence[Starts]) -> int | None:
    """Return an offset that all files have among their ``starts``, from where they have the least choice; None without one."""
    found = _in_all(starts)
    return min(found, key=lambda one: (one[1] - one[0], one[0]))[0] if found else None


def lowest(starts: Sequence[Starts]) -> int | None:
    """Return the lowest offset that all files have among their ``starts``; None without one."""
    found = _in_all(starts)
    return found[0][0] if found else None


def _in_all(starts: Sequence[Starts]) -> Starts:
    found = starts[0]
    for others in starts[1:]:
        found = list(_in_both(found, others))
    return found


def _in_both(ones: Starts, others: Starts) -> Iterator[tuple[int, int]]:
    one = other = 0
    while one < len(ones) and other < len(others):
        first, last = max(ones[one][0], others[other][0]), min(ones[one][1], others[other][1])
        if first <= last:
            yield first, last
        if ones[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
