"""Memory for copies of stored tensors that a loop asks for, one after the other, and lets go of.

malloc is no place for them. After the first block of a size was freed, glibc takes that size from its heap, and keeps what is
freed there, in each thread's heap apart, up to some 64 MiB and the holes between others: a process that is limited to its pool
and little more is killed. So a copy of some size is a mapping of its own, which returns to the system as it is freed. A few
mappings that were freed last are used again, because a new one has to be faulted in, which takes as long as the copy itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import torch

__all__ = ["Copies"]

LEAST = 1 << 20
"""Bytes: malloc has the smaller ones."""
UNUSED = 16 << 20
"""Bytes of freed mappings that stay, at most."""
COUNT = 8
"""Freed mappings that stay, at most."""
SLACK = 4
"""A mapping is used again for what leaves one in so many of its bytes unused, at most."""
HUGE_PAGE = 2 << 20


class Copies:
    """Gives memory on the CPU for copies. Any thread may use it, and any thread, or the collector, may free what it gave.

    No lock guards it, as finalizers must take none: each step is one call of a ``deque``. A mapping that an exception, or
    another thread, takes out of it in between returns to the system with its last reference.
    """

    def __init__(self) -> None:
        self._unused: deque[mmap.mmap] = deque(maxlen=COUNT)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor in memory of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST:
            return torch.empty(shape, dtype=dtype, device="cpu")  # the default device may be another
        mapping = self._again(nbytes) or _mapped(nbytes)
        array = _array_type(nbytes).from_buffer(mapping)
        weakref.finalize(array, _keep, self._unused, mapping).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8).view(dtype).view(*shape)

    @property
    def unused(self) -> int:
        """Bytes of freed mappings that stay."""
        return sum(map(len, list(self._unused)))

    def clear(self) -> None:
        """Return what is unused to the system."""
        self._unused.clear()

    def _again(self, nbytes: int) -> mmap.mmap | None:
        """Return a mapping that was freed and is about as large."""
        for _ in range(COUNT):
            try:
                mapping = self._unused.pop()
            except IndexError:
                break
            if nbytes <= len(mapping) <= nbytes + nbytes // SLACK:
                return mapping
            self._unused.appendleft(mapping)
        return None


def _keep(unused: deque[mmap.mmap], mapping: mmap.mmap) -> None:
    """Keep a mapping that was freed, in the place of those that were freed first."""
    unused.append(mapping)
    while sum(map(len, list(unused))) > UNUSED:
        with contextlib.suppress(IndexError):  # another thread was faster
            unused.popleft()


def _mapped(nbytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without it faults more often
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


@functools.lru_cache(maxsize=1024)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return a cached type, because making one takes longer than a mapping."""
    return ctypes.c_char * nbytes
