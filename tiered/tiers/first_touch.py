"""Touch the pages of a mapping before they are needed, in threads of their own.

The system gives a page, zeroed, to whoever touches it first, and a direct read touches all that it reads into. That takes the
time of the thread that submits reads: a fifth of a second for each GiB on hardware, and up to three where a hypervisor has to
find the memory first. Threads that run ahead of the first use spare it.
"""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

__all__ = ["FirstTouch"]

THREADS = 2
LEAST = 64 << 20
"""Bytes in use from which on pages are touched ahead: less is soon touched, and many stores are small."""
TOUCHED_AHEAD = 256 << 20
"""Bytes that are touched ahead at most; never more than are in use."""
PIECE = 16 << 20
MADV_POPULATE_WRITE = 23  # since Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class FirstTouch:
    """Touches pages of ``arena``, which its threads keep alive while they do. Where the system refuses, it stops: the page is
    touched when it is used."""

    def __init__(self, arena: ctypes.Array[ctypes.c_char]) -> None:
        self._arena: ctypes.Array[ctypes.c_char] | None = arena
        self._asked = 0
        self._threads: ThreadPoolExecutor | None = None
        self._refused = False

    def reached(self, end: int) -> None:
        """Note that bytes before ``end`` of the arena are in use."""
        arena = self._arena
        if end < LEAST or self._refused or arena is None:
            return
        until = min(len(arena), end + min(TOUCHED_AHEAD, end))
        if until - self._asked < PIECE and until < len(arena):
            return
        begin = max(self._asked, end)
        self._asked = max(self._asked, until)
        for at in range(begin, until, PIECE):
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, "tiered-first-touch")
            self._threads.submit(self._touch, arena, at, min(PIECE, until - at))

    def _touch(self, arena: ctypes.Array[ctypes.c_char], at: int, nbytes: int) -> None:
        if self._refused:
            return
        address = ctypes.addressof(arena) + at
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        advised = _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + nbytes - begin), MADV_POPULATE_WRITE)
        self._refused = self._refused or advised != 0

    def close(self) -> None:
        """Stop, and let go of the arena. Idempotent."""
        self._arena = None
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
