"""Read ranges of a file at the rate of the drive, past the page cache, to memory that need not be aligned.

Threads read pieces with O_DIRECT into buffers in huge pages (in pages of 4 KiB a piece would be many segments for the drive);
the caller's thread alone copies them to where they are wanted. So an exception in the caller never leaves a thread that writes
to the caller's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from tiered.format.locked_file import make_direct

__all__ = ["DirectReader"]

PIECE = 2 << 20
READERS, BUFFERS = 3, 5
HUGE_PAGE = 2 << 20
ALIGNMENT = 4096
"""Bytes: of offsets and lengths of direct reads."""


class DirectReader:
    """Reads of the file that is ``opened`` and has that ``path``. Used by one thread at a time."""

    def __init__(self, path: str, opened: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._threads: ThreadPoolExecutor | None = None
        self._buffers: list[memoryview] = []
        self.direct = os.fstat(self._fd).st_ino == os.fstat(opened).st_ino and make_direct(self._fd)
        """Whether the filesystem has direct I/O; otherwise nothing can be read here."""

    def read(self, at: int, into: memoryview) -> int:
        """Read ``len(into)`` bytes (into memory of bytes) from ``at`` on. Returns how many there were, fewer at the end of the
        file. Raises OSError."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READERS, "tiered-source")
            self._buffers = [_buffer() for _ in range(BUFFERS)]
        free, pending, done = list(self._buffers), deque[tuple[Future[int], memoryview, int, int, int]](), 0
        ends = [*range((at // PIECE + 1) * PIECE, at + len(into), PIECE), at + len(into)]
        try:
            begin = at
            for end in ends:
                if not free:
                    buffer, count = _copied(*pending.popleft(), into, at)
                    free.append(buffer)
                    done += count
                start, buffer = begin // ALIGNMENT * ALIGNMENT, free.pop()
                length = -(-(end - start) // ALIGNMENT) * ALIGNMENT
                job = self._threads.submit(_read, self._fd, buffer[:length], start)
                pending.append((job, buffer, start, begin, end))
                begin = end
            while pending:
                done += _copied(*pending.popleft(), into, at)[1]
        except BaseException:
            self._forget()  # threads may still read into these buffers
            raise
        return done

    def _forget(self) -> None:
        threads, self._threads, self._buffers = self._threads, None, []
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


def _read(fd: int, into: memoryview, at: int) -> int:
    """Read until ``into`` is full, or the file ends; return the bytes read."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], at + done)
        done += count
        if not count or done % ALIGNMENT:
            break
    return done


def _copied(
    job: Future[int], buffer: memoryview, start: int, begin: int, end: int, into: memoryview, at: int
) -> tuple[memoryview, int]:
    """Copy what ``job`` read of ``begin`` to ``end``. Returns its buffer, and how many bytes these were."""
    count = max(0, min(start + job.result(), end) - begin)
    if count:
        source = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + begin - start
        target = ctypes.addressof(ctypes.c_char.from_buffer(into)) + begin - at
        ctypes.memmove(target, source, count)  # lets other threads of Python run
    return buffer, count


def _buffer() -> memoryview:
    """Return memory for a piece, in huge pages where the system has them."""
    length = PIECE + ALIGNMENT
    mapping = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE
    return memoryview(mapping)[skip : skip + length]
