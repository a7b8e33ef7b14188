"""What a process takes beside the pool while a model is built, paged and trained: refused where there is no room for it, and
memory that was freed goes back to the system before more is taken.

glibc keeps what was freed for later: after gradients and initial values of many MiB came and went, hundreds of MiB stayed
with the process, in nobody's budget. malloc_trim(3) gives them back, mallinfo2(3) says how much is in use. While a model is
built or paged, mallopt(3) has large blocks be mappings of their own, which return as they are freed, and leave no holes in the
heap that a training would spread over; in training that would cost a tenth of the time, since each activation would be faulted
in anew, page by page. Elsewhere there are no such calls, and nothing is given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from tiered import TieredStore
from tiered.memory import anonymous, beside_pool, headroom, refuse_without_room

__all__ = ["Trimmer", "compiler", "refuse_little_room", "returned_at_once"]

KEPT = 32 << 20
"""Bytes of freed memory that a process keeps, at most, before it is trimmed."""
OFTEN = 8 << 20
SELDOM = 16 << 20
LOOK_SHARE = 4
"""Bytes that come and go between two looks at the process: this fraction of the pool, not fewer, and not more."""
SCARCE = 64 << 20
"""Where fewer bytes than these are left to take, what a step will take again is given back, too."""
WORKING = 32 << 20
"""Bytes of pieces on their way, and of the buffers of torch's libraries."""
COMPILER = 80 << 20
"""Bytes of ``torch._dynamo``, which torch imports with its first optimizer."""


class Trimmer:
    """For a ``pool`` (bytes) and a model whose largest parameter has ``largest`` bytes: looks at the process whenever 8 to 16
    MiB came and went, and trims it where it keeps more of what was freed than the rest of ``beside_pool`` leaves it (8 to 32
    MiB).

    What was trimmed must be faulted in anew: a step that trims after every few gradients takes a third longer, one that trims
    its activations a tenth. So what a step takes again is left with the process: the heap may be as large as the most that was
    in use of it at once, unless little is left to take. (Blocks of 32 MiB and more are mappings of their own, which return at
    once.) To ask what is in use takes a walk over all that is free, so that is asked only where the process is larger than it
    may be by what was known.
    """

    def __init__(self, pool: int, largest: int = 0) -> None:
        self._kept = min(max(OFTEN, (beside_pool(pool) - largest - WORKING) // 2), KEPT)
        self._every, self._passed = min(max(OFTEN, pool // LOOK_SHARE), self._kept, SELDOM), 0
        libc: Any = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)
        self._info = getattr(libc, "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _InUse
        self._most = 0  # bytes of the heap in use at once
        self._others = 0  # of the process that are neither heap nor mapped by malloc, when it was trimmed last
        self._measure()

    def passed(self, nbytes: int) -> None:
        """``nbytes`` were allocated and freed."""
        self._passed += nbytes
        if self._passed < self._every:
            return
        self._passed = 0
        size = self._size()
        if size > self._others + self._most + self._kept:
            heap, mapped = self._in_use()
            self._most = max(self._most, heap)
            if size - mapped > self._others + self._most + self._kept:
                self.trim()
                return
        if size > self._trimmed + self._every and headroom() < SCARCE:
            self.trim()

    def trim(self) -> None:
        """Give all back that is free."""
        self._passed = 0
        if self._trim is not None:
            self._trim(0)
            self._measure()

    def _measure(self) -> None:
        heap, mapped = self._in_use()
        self._trimmed = self._size()
        self._most = max(self._most, heap)
        self._others = self._trimmed - heap - mapped

    def _size(self) -> int:
        """Bytes of memory that the process has."""
        return anonymous() if self._trim is not None else 0

    def _in_use(self) -> tuple[int, int]:
        """Bytes that were allocated and not freed, of the heap and in mappings of their own. None where the C library does not
        say: then what is in use is trimmed for nothing, and counts among the others."""
        if self._info is None:
            return 0, 0
        found = self._info()
        return int(found.uordblks), int(found.hblkhd)


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Blocks of 1 MiB and more are returned to the system as they are freed, in all threads; afterwards those of 32 MiB are,
    which is as far as glibc would have come by itself. Where the environment says it (``MALLOC_MMAP_THRESHOLD_``, or
    ``GLIBC_TUNABLES``), that stays."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None or "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        yield
        return
    option(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        option(_M_MMAP_THRESHOLD, 32 << 20)
        option(_M_TRIM_THRESHOLD, 64 << 20)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``, by their numbers in malloc.h."""


class _InUse(ctypes.Structure):
    """``struct mallinfo2``: bytes in blocks of the heaps, and in mappings of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def refuse_little_room(store: TieredStore, what: str, *, largest: int = 0, more: int = 0) -> None:
    """Raises CapacityError if a memory cgroup leaves less than ``what`` may take beside the pool, and the rest of the pool.

    The first call for a store asks for all that is said of it (``beside_pool``), later ones for what ``what`` itself needs.
    ``largest``: bytes of the largest parameter, or gradient, that will be whole in ordinary memory. ``more``: bytes for what
    else comes, as the caller wishes.
    """
    pool = store.statistics().tier("dram")
    beside = largest + WORKING if store in _known else beside_pool(pool.capacity, largest)
    refuse_without_room(what, pool.capacity - pool.peak + beside + more, "open the store with a smaller dram=")
    _known.add(store)


def compiler() -> int:
    """Bytes that the first optimizer takes with it."""
    return 0 if "torch._dynamo" in sys.modules else COMPILER


_known: weakref.WeakSet[TieredStore] = weakref.WeakSet()
"""Stores for which there was room for all."""
