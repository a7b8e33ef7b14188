"""The DRAM tier, a pool of pinned host memory: one arena on huge pages, cut into slots that tensors can lie in."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import resource
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tiered.allocator import FreeSpace
from tiered.errors import CapacityError
from tiered.interfaces import Streams
from tiered.tiers.first_touch import FirstTouch
from tiered.types import Slot, format_size

__all__ = ["DramConfig", "DramTier"]

HUGE_PAGE = 2 << 20
MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class DramConfig:
    """Configuration: ``capacity`` is a hard limit in bytes, ``alignment`` that of every slot; 4096 suits O_DIRECT on today's
    drives."""

    capacity: int
    alignment: int = 4096


class DramTier:
    """Slots in one anonymous mapping that starts on a 2 MiB boundary.

    The page size decides the disk's bandwidth: a 1 MiB block in 4 KiB pages is 256 segments for the drive, in huge pages it is
    one. The pool never uses more memory than its capacity, rounded down to the alignment; pages are taken from the system at
    first touch, or a little before (``FirstTouch``).

    The mapping lives as long as ``arena`` or any object made from it: tensors that alias a slot may outlive the tier. The
    mapping is absent from forked children, which must not use it.

    Raises CapacityError when the capacity is below one alignment or the system refuses the address space.
    """

    name = "dram"
    streams: Streams | None = None
    """None: the host has no queue of work."""

    def __init__(self, config: DramConfig) -> None:
        space = FreeSpace(max(0, config.capacity), config.alignment)
        if space.capacity == 0:
            raise CapacityError(
                f"a DRAM budget of {config.capacity} bytes holds nothing: the minimum is {config.alignment} bytes"
            )
        self._space = space
        self.capacity, self.alignment = space.capacity, space.alignment
        """Bytes; the capacity is a multiple of the alignment."""
        self._arena: ctypes.Array[ctypes.c_char] | None = _map(space.capacity)
        _arenas[self.address] = self._arena
        self._first_touch = FirstTouch(self._arena)

    @property
    def used(self) -> int:
        """Bytes in allocated slots, padding included."""
        return self._space.used_bytes

    @property
    def largest(self) -> int:
        """Size in bytes of the largest request that would be granted now."""
        return self._space.largest

    @property
    def arena(self) -> ctypes.Array[ctypes.c_char]:
        """The slots' memory, ``capacity`` bytes. A reference to it (or a ``from_buffer`` of it) keeps the mapping alive."""
        if self._arena is None:
            raise AssertionError("the DRAM tier was closed")
        return self._arena

    @property
    def address(self) -> int:
        """Address of the arena: the slot at offset ``o`` begins at ``address + o``."""
        return ctypes.addressof(self.arena)

    def allocate(self, nbytes: int) -> Slot | None:
        slot = self._space.allocate(nbytes)
        if slot is not None:
            self._first_touch.reached(slot.offset + slot.nbytes)
        return slot

    @property
    def slots(self) -> Sequence[Slot]:
        """The allocated slots, by offset."""
        return self._space.slots

    def free(self, slot: Slot) -> None:
        self._space.free(slot.offset, slot.nbytes)

    def restore(self, slots: Iterable[Slot]) -> None:
        self._space.restore((slot.offset, slot.nbytes) for slot in slots)

    def move(self, slot: Slot, offset: int) -> Slot:
        self._space.move(slot.offset, slot.nbytes, offset)
        ctypes.memmove(self.address + offset, self.address + slot.offset, slot.nbytes)
        return Slot(offset, slot.nbytes)

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        """Return the slot's first bytes as a uint8 tensor of shape (nbytes,), and its owner: a ctypes array that torch refers
        to."""
        arena = self._arena
        assert arena is not None, "the DRAM tier was closed"
        assert 1 <= nbytes <= slot.nbytes
        owner = _array_type(nbytes).from_address(ctypes.addressof(arena) + slot.offset)
        owner.arena = arena  # type: ignore[attr-defined]  # a ctypes array has room for attributes
        return torch.frombuffer(owner, dtype=torch.uint8), owner

    def give_back(self) -> int:
        """Give the memory of free ranges back to the system, which gives zeros at the next touch. Return the bytes of these
        ranges, whole pages only. Nothing may be using them, a device's copies included."""
        given = 0
        for offset, size in self._space.free_ranges():
            begin = -(-(self.address + offset) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (self.address + offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end and _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED) == 0:
                given += end - begin
        return given

    def close(self) -> None:
        """Release the arena. Idempotent; aliases stay valid."""
        self._first_touch.close()
        self._arena = None


@functools.lru_cache(maxsize=1024)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return a cached type: making one takes ten times as long as making a tensor of it (22 and 2 µs), and sizes recur."""
    return ctypes.c_char * nbytes


def _map(nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return ``nbytes`` of zeroed private memory on a huge page boundary, as an array that keeps its mapping alive."""
    length = nbytes + HUGE_PAGE  # room for alignment; the rest is never touched, hence never backed
    try:
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"the system refuses {format_size(length)} of memory for the DRAM tier ({error}): ask for less, or raise the limit"
            + _limits()
        ) from error
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    skip = -base % HUGE_PAGE
    # MADV_DONTFORK: a child's copy-on-write would move pages away under I/O in flight. Advice on exactly the slots' range also
    # keeps the kernel from backing its end with a huge page that is only partly ours.
    span = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without it is slower, or copies more at fork, but is correct
                mapping.madvise(getattr(mmap, advice), skip, span)
    return (ctypes.c_char * nbytes).from_buffer(mapping, skip)


def _limits() -> str:
    """Return the process's own limits of memory, for an error message; empty where there are none."""
    found = []
    for name, flag in (("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")):
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY:
            found.append(f"ulimit {flag} is {soft:,} bytes")
    return f" ({', '.join(found)})" if found else ""


# In a forked child the arena's range is unmapped (MADV_DONTFORK) and may be given to another mapping, which collecting the
# arena's mapping object would unmap. So children keep a reference to every arena.
_arenas: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_char]] = weakref.WeakValueDictionary()
_inherited: list[ctypes.Array[ctypes.c_char]] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_arenas.values()))
