"""Read ranges of a file at the rate of the drive, past the page cache, to memory that need not be aligned.

Threads read pieces with O_DIRECT into buffers in huge pages (in pages of 4 KiB a piece would be many segments for the drive);
the caller's thread alone copies them to where they are wanted. So an exception in the caller never leaves a thread that writes
to the caller's memory. Where the next ranges are known, the threads read on while the caller does something else.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tiered.format.locked_file import make_direct

__all__ = ["DirectReader"]

PIECE = 2 << 20
READERS, BUFFERS = 3, 8
HUGE_PAGE = 2 << 20
DIRECT_ALIGNMENT = 4096
"""Bytes: of offsets and lengths of direct reads."""


@dataclass(frozen=True)
class _Piece:
    """Bytes ``begin`` to ``end`` of the file, which ``job`` reads into ``buffer`` from ``start`` on."""

    begin: int
    end: int
    start: int
    buffer: memoryview
    job: Future[int]


class DirectReader:
    """Reads of the file that is ``opened`` and has that ``path``. Used by one thread at a time."""

    def __init__(self, path: str, opened: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._threads: ThreadPoolExecutor | None = None
        self._free: list[memoryview] = []
        self._ahead: deque[_Piece] = deque()
        self._coming: Iterator[tuple[int, int]] = iter(())
        self._expected: list[tuple[int, int]] = []
        self._order: list[int] = []  # of the expected ranges, by where they begin
        self.direct = os.fstat(self._fd).st_ino == os.fstat(opened).st_ino and make_direct(self._fd)
        """Whether the filesystem has direct I/O; otherwise nothing can be read here."""

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Tell which ranges (first byte, number of bytes) ``read`` will be asked for, in that order. Only time depends on it:
        what was read ahead and is not asked for next is read in vain."""
        self._expected = list(ranges)
        self._order = sorted(range(len(self._expected)), key=lambda number: self._expected[number][0])

    def read(self, at: int, into: memoryview) -> int:
        """Read ``len(into)`` bytes (into memory of bytes) from ``at`` on. Returns how many there were, fewer at the end of the
        file. Raises OSError."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READERS, "tiered-source")
            self._free = [_buffer() for _ in range(BUFFERS)]
        begin, end = at, at + len(into)
        try:
            while begin < end:
                if not (self._ahead and self._ahead[0].begin <= begin < self._ahead[0].end):
                    self._turn_to(begin, end)
                self._read_ahead()
                piece = self._ahead[0]
                stop = min(piece.end, end)
                count = _copied(piece, begin, stop, into[begin - at : stop - at])
                begin += count
                if begin == piece.end:
                    self._free.append(self._ahead.popleft().buffer)
                elif begin < stop:  # the file ends
                    break
            self._read_ahead()
        except BaseException:
            self._forget()  # threads may still read into these buffers
            raise
        return begin - at

    def _turn_to(self, begin: int, end: int) -> None:
        """Read ahead from ``begin``: in the order that is expected, where one of its ranges has ``begin``; or to ``end``."""
        while self._ahead:
            piece = self._ahead.pop()
            if not piece.job.cancel():
                piece.job.exception()  # until the thread has done with the buffer
            self._free.append(piece.buffer)
        found = bisect_right(self._order, begin, key=lambda number: self._expected[number][0])
        number = self._order[found - 1] if found else 0
        ranges = [(begin, end - begin)]
        if found and begin < sum(self._expected[number]):
            ranges = [(begin, sum(self._expected[number]) - begin), *self._expected[number + 1 :]]
        self._coming = _pieces(ranges)

    def _read_ahead(self) -> None:
        assert self._threads is not None
        while self._free:
            begin, end = next(self._coming, (0, 0))
            if begin == end:
                return
            buffer, start = self._free.pop(), begin // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            length = -(-(end - start) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
            job = self._threads.submit(_read, self._fd, buffer[:length], start)
            self._ahead.append(_Piece(begin, end, start, buffer, job))

    def _forget(self) -> None:
        threads, self._threads, self._free = self._threads, None, []
        self._ahead.clear()
        self._coming = iter(())
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Let threads and buffers go, and close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._forget()
        if fd >= 0:
            os.close(fd)


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for at, nbytes in ranges:
        begin = at
        while begin < at + nbytes:
            end = min((begin // PIECE + 1) * PIECE, at + nbytes)
            yield begin, end
            begin = end


def _read(fd: int, into: memoryview, at: int) -> int:
    """Read until ``into`` is full, or the file ends; return the bytes read."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], at + done)
        done += count
        if not count or done % DIRECT_ALIGNMENT:
            break
    return done


def _copied(piece: _Piece, begin: int, end: int, into: memoryview) -> int:
    """Copy bytes ``begin`` to ``end``, which lie in ``piece``. Returns how many of them the file has. Raises OSError."""
    count = max(0, min(piece.start + piece.job.result(), end) - begin)
    if count:
        source = ctypes.addressof(ctypes.c_char.from_buffer(piece.buffer)) + begin - piece.start
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(into)), source, count)  # lets other threads of Python run
    return count


def _buffer() -> memoryview:
    """Return memory for a piece, in huge pages where the system has them."""
    length = PIECE + DIRECT_ALIGNMENT
    mapping = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE
    return memoryview(mapping)[skip : skip + length]
