"""Checksums of several large pieces at once, on as many threads as the process has cores.

One core hashes 10 to 20 GB/s, less where others use its memory's channels, and a modern drive delivers 14. xxHash gives up the
interpreter's lock for a large piece, so threads are enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["LARGE", "Hashing"]

Piece = TypeVar("Piece")
LARGE = 1 << 20
"""Bytes of a piece for which another thread is woken: to wake one takes as long as to hash some hundred kibibytes."""
MOST = 4
"""Threads, at most: these have the bandwidth of most machines' memory."""


class Hashing:
    """Hashes for one caller at a time. Threads begin with the first call that has work for them."""

    def __init__(self, threads: int | None = None) -> None:
        """``threads``: how many hash at once, the caller's included; None: as many as there are cores, and ``MOST`` at most."""
        self.threads = min(MOST, _cores()) if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None

    def digests(self, pieces: Sequence[Piece], digest: Callable[[Piece], bytes], sizes: Sequence[int]) -> list[bytes]:
        """Return ``digest(piece)`` for each of ``pieces``, in their order. Those of at least ``LARGE`` bytes, by ``sizes``, are
        divided among the threads by their bytes."""

        def several(some: Sequence[Piece]) -> list[bytes]:
            return [digest(piece) for piece in some]

        if self.threads < 2 or len(pieces) < 2 or min(sizes) < LARGE:
            return several(pieces)
        share, begins, taken = sum(sizes) / self.threads, [0], 0
        for place, size in enumerate(sizes):
            if taken >= share:
                begins.append(place)
                taken = 0
            taken += size
        parts = [pieces[begin:end] for begin, end in zip(begins, (*begins[1:], len(pieces)), strict=True)]
        others: list[Future[list[bytes]]] = []
        try:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads - 1, "tiered-hashing")
            others += [self._pool.submit(several, part) for part in parts[1:]]
        except RuntimeError:  # the system starts no more threads, or the interpreter ends
            self.threads = 1
            return several(pieces)
        return [*several(parts[0]), *(found for other in others for found in other.result())]

    def close(self) -> None:
        """End the threads. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
