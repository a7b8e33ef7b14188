"""The rates of a drive without a store: what the bounds of benchmarks are computed with.

Eight threads read or write pieces of 4 MiB with O_DIRECT. Their buffers are in huge pages, as the pool of a store is: in pages
of 4 KiB each piece would be 1,024 segments for the drive, and the rate a half of what it can do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

__all__ = ["Reading", "read_rate", "write_rate"]

PIECE, READERS = 4 << 20, 8
HUGE_PAGE = 2 << 20


def read_rate(files: Sequence[Path], most: int = 4 << 30) -> float:
    """Return the bytes per second at which ``files`` are read, the first ``most`` bytes of each."""
    read, seconds = 0, 0.0
    for file in files:
        pieces = min(most, file.stat().st_size) // PIECE
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            seconds += _in_threads(partial(_read, descriptor), pieces)
        finally:
            os.close(descriptor)
        read += pieces * PIECE
    return read / seconds


def write_rate(file: Path, nbytes: int) -> float:
    """Return the bytes per second at which a new ``file`` is written, fdatasync included. Removes it."""
    pieces = nbytes // PIECE
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, pieces * PIECE)
        seconds = _in_threads(partial(_write, descriptor), pieces)
        began = time.perf_counter()
        os.fdatasync(descriptor)
        seconds += time.perf_counter() - began
    finally:
        os.close(descriptor)
        file.unlink()
    return pieces * PIECE / seconds


class Reading:
    """Reads of a file in the background, in turn from its beginning to its end, each piece checked as a store checks it: what
    a program does that only reads beside one that computes."""

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


def _write(descriptor: int, number: int, buffer: memoryview) -> None:
    if os.pwritev(descriptor, [buffer], number * PIECE) != PIECE:
        raise OSError(f"piece {number} was written short")


def _in_threads(work: Callable[[int, memoryview], None], pieces: int) -> float:
    """Call ``work`` with the number of each piece and a buffer. Returns the seconds that it took."""
    numbers, lock = iter(range(pieces)), threading.Lock()
    failed: list[BaseException] = []

    def worker(buffer: memoryview) -> None:
        try:
            while not failed:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                work(number, buffer)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=worker, args=(_buffer(),)) for _ in range(READERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failed:
        raise failed[0]
    return seconds


def _buffer() -> memoryview:
    """Return memory for a piece, in huge pages that the process has touched."""
    memory = mmap.mmap(-1, PIECE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    skip = -address % HUGE_PAGE
    ctypes.memset(address + skip, 1, PIECE)
    return memoryview(memory)[skip : skip + PIECE]
