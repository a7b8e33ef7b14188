"""Copies of rows that were read from their blocks last, in ordinary memory: a look-up that finds a row here needs no block.

Under Zipf's law most draws are of few rows, which lie in as many blocks: what a block brings beside such a row is of no use. A
copy here takes the room of a row.
"""

from __future__ import annotations

import threading
from itertools import count

import torch

from tiered.tables import kernel

__all__ = ["LEAST_ROW", "RowCache"]

CACHE_SHARE, MOST_BYTES = 8, 64 << 20
"""A cache takes the bytes of such a part of the pool, and so many, at most."""
ROW_BYTES = 128
"""The cache has room for the numbers of as many rows as it could have of this size."""
KEY_BYTES = 32
"""Bytes that the number of a row takes, with where the copy is, and as much that stays empty."""
HEAD_BYTES = 56
LEAST_ROW = 64
"""Bytes: smaller rows have no copies, because their numbers would take as much."""
ID_BITS = 36
"""A table with more rows has no copies. There are ``2 ** (62 - ID_BITS)`` numbers for tables in the life of a store."""


class _Generation:
    """Copies that were made in one time. Its memory is laid out as ``libaio_ext/row_cache.cdef.h`` says."""

    def __init__(self, nbytes: int) -> None:
        slots = 1 << max(1, (2 * nbytes // (ROW_BYTES + KEY_BYTES)).bit_length() - 1)
        room = max(0, nbytes - slots * KEY_BYTES // 2 - HEAD_BYTES)
        self._keys = torch.full((slots,), -1, dtype=torch.int64, device="cpu")
        self._places = torch.empty(slots, dtype=torch.int64, device="cpu")
        self._copies = torch.empty(room, dtype=torch.uint8, device="cpu")
        addresses = self._keys.data_ptr(), self._places.data_ptr(), slots, self._copies.data_ptr()
        self._head = torch.tensor([*addresses, room, 0, 0], dtype=torch.int64, device="cpu")
        self.address = self._head.data_ptr()


class RowCache:
    """Copies of rows of all tables of a store; ``budget``: bytes of its pool in host memory.

    Copies are in two generations. When there is no room in the young one, the old one goes, with what was not read since, and
    a new one begins. A copy is found by the number of its table and the number of the row: a table that takes another number
    has no copies any more.
    """

    def __init__(self, budget: int) -> None:
        self._nbytes = min(budget // CACHE_SHARE, MOST_BYTES) // 2
        self._lock = threading.RLock()
        self._numbers = count()
        self._young: _Generation | None = None
        self._old: _Generation | None = None
        self._closed = False

    def number(self, rows: int, row_nbytes: int) -> int | None:
        """Return a new number for a table; None for one whose rows have no copies, and when there are no numbers any more."""
        if kernel.lib is None or not LEAST_ROW <= row_nbytes <= self._nbytes // 8 or rows >= 1 << ID_BITS:
            return None
        number = next(self._numbers)
        return number if number < 1 << (62 - ID_BITS) else None

    def read(self, number: int, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """Copy what there is of the rows ``ids`` to ``rows``; return the indices of the others. None: of all. Both are
        contiguous and in host memory, ``ids`` int64 of one dimension, not negative, and changed by nobody meanwhile."""
        with self._lock:
            young, old = self._young, self._old
            if young is None or old is None:
                return None
            missing = torch.empty_like(ids)
            tag, nbytes = number << ID_BITS, rows.nbytes // max(1, len(ids))
            lacking = kernel.lib.row_cache_read(
                young.address, old.address, tag, ids.data_ptr(), len(ids), nbytes, rows.data_ptr(), missing.data_ptr()
            )
            return missing[:lacking]

    def keep(self, number: int, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep copies of ``rows``, which are the rows ``ids``, as ``read`` has them, if they are not very many."""
        if not len(ids) or rows.nbytes > self._nbytes // 2:
            return
        with self._lock:
            tag, nbytes, kept = number << ID_BITS, rows.nbytes // len(ids), 0
            while not self._closed:  # by another thread, which forgot everything
                young = self._young
                if young is None or self._old is None:
                    young = self._begin()
                left = len(ids) - kept
                where = ids.data_ptr() + 8 * kept, left, nbytes, rows.data_ptr() + kept * nbytes
                kept += kernel.lib.row_cache_keep(young.address, tag, *where)
                if kept == len(ids):
                    return
                self._begin()

    def forget(self, number: int, ids: torch.Tensor) -> None:
        """Forget the copies of the rows ``ids``, as ``read`` has them."""
        with self._lock:
            young, old = self._young, self._old
            if young is not None and old is not None:
                kernel.lib.row_cache_forget(young.address, old.address, number << ID_BITS, ids.data_ptr(), len(ids))

    def close(self) -> None:
        """Forget everything for good, and give the memory back. Idempotent."""
        with self._lock:
            self._closed = True
            self._young = self._old = None

    def _begin(self) -> _Generation:
        """Begin another generation, and return it."""
        self._old, self._young = self._young or _Generation(0), None  # before there is a third one
        self._young = fresh = _Generation(self._nbytes)
        return fresh
