"""Reads of a file in the background: what a program does that only reads beside one that computes."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

__all__ = ["Reading"]

PIECE = 4 << 20
HUGE_PAGE = 2 << 20


class Reading:
    """Reads of a file in the background, in turn from its beginning to its end, each piece checked as a store checks it."""

    THREADS = 4

    def __init__(self, file: Path) -> None:
        self._pieces = file.stat().st_size // PIECE
        self._descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        self._threads = ThreadPoolExecutor(self.THREADS)
        self._buffers = [_buffer() for _ in range(self.THREADS)]
        self._running: list[Future[None]] = []
        self._next = 0

    def begin(self, nbytes: int) -> None:
        """Have the threads read ``nbytes``, rounded to whole pieces."""
        count = round(nbytes / PIECE)
        numbers = iter([(self._next + number) % self._pieces for number in range(count)])
        self._next += count
        lock = threading.Lock()

        def work(buffer: memoryview) -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                _read(self._descriptor, number, buffer)
                xxhash.xxh3_128_digest(buffer)

        self._running = [self._threads.submit(work, buffer) for buffer in self._buffers]

    def wait(self) -> None:
        """Wait until all is read. Raises OSError."""
        running, self._running = self._running, []
        for one in running:
            one.result()

    def close(self) -> None:
        self.wait()
        self._threads.shutdown()
        os.close(self._descriptor)


def _read(descriptor: int, number: int, buffer: memoryview) -> None:
    if os.preadv(descriptor, [buffer], number * PIECE) != PIECE:
        raise OSError(f"piece {number} was read short")


def _buffer() -> memoryview:
    """Return memory for a piece, in huge pages that the process has touched."""
    memory = mmap.mmap(-1, PIECE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    skip = -address % HUGE_PAGE
    ctypes.memset(address + skip, 1, PIECE)
    return memoryview(memory)[skip : skip + PIECE]
