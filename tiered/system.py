"""What the operating system says and does: memory limits, malloc, descriptors, direct I/O alignment, and wake-ups by pipe.

The parts are independent of each other: ``Once`` closes descriptors exactly once under signals; ``direct_io_alignment`` asks
statx(2); ``headroom`` and the ``refuse_*`` functions compare needs with the memory that the system and the cgroups leave;
``wait_for`` and ``Wakeup`` let threads and event loops wait; ``Trimmer`` and ``returned_at_once`` return freed memory.

glibc keeps freed memory for later: after gradients and initial values of many MiB were freed, hundreds of MiB stayed with the
process, beyond any budget. malloc_trim(3) returns them, mallinfo2(3) says how much is in use. While a model is built or paged,
mallopt(3) makes large blocks mappings of their own, which return when they are freed and leave no holes in the heap over which
a training would spread. In training that would cost a tenth of the time, because each activation would be faulted in anew, page
by page. Other C libraries have no such calls, and nothing is returned there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from tiered.errors import CapacityError
from tiered.telemetry import MemoryStatistics, StoreStatistics
from tiered.types import format_size

__all__ = [
    "LARGEST_ALIGNMENT",
    "CgroupRoom",
    "Once",
    "OwnedWakeup",
    "Trimmer",
    "Wakeup",
    "anonymous",
    "beside_pool",
    "cgroup_room",
    "compiler",
    "direct_io_alignment",
    "free_in_heap",
    "headroom",
    "memory_of_process",
    "refuse_little_room",
    "refuse_without_room",
    "returned_at_once",
    "to_stay_free",
    "wait_for",
]


class Once:
    """Steps that run once each: a ``run`` after an interrupted one continues after the last step that was begun.

    A step is a C function with its arguments (``partial(os.close, fd)``). Taking a step and calling it is one call, so no
    signal handler runs between the two.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._left = map(methodcaller("__call__"), iter(steps))
        self._count = len(steps)

    def run(self) -> None:
        """Run the steps that are left. Errors of the system are ignored."""
        for _ in range(self._count):
            try:  # noqa: SIM105 - nothing but builtins: a module is empty when the interpreter ends, and finalizers run then
                next(self._left, None)
            except OSError:
                pass


LARGEST_ALIGNMENT = 1 << 20
"""Bytes; no drive needs more, and the header of a data file is at most this large."""


class _Statx(ctypes.Structure):
    """``struct statx`` up to the two fields that are read here; see statx(2)."""

    _fields_ = [
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_char * 148),
        ("memory_alignment", ctypes.c_uint32),
        ("offset_alignment", ctypes.c_uint32),
        ("after", ctypes.c_char * 96),
    ]


def direct_io_alignment(fd: int) -> int:
    """Return the alignment in bytes that the kernel requires for direct I/O on this file; 0 where it does not say (before Linux
    6.1)."""
    at_empty_path, statx_dioalign = 0x1000, 0x2000
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return 0
    found = _Statx()
    if statx(fd, b"", at_empty_path, statx_dioalign, ctypes.byref(found)) != 0 or not found.mask & statx_dioalign:
        return 0
    needed = max(int(found.memory_alignment), int(found.offset_alignment))
    return needed if needed <= LARGEST_ALIGNMENT else 0


POOL_SHARE = 10
BESIDE_POOL = 128 << 20
"""Beside its pool and its imports a process takes one POOL_SHAREth of the pool and BESIDE_POOL bytes, activations not
counted."""
SPENT = 16 << 20
"""Bytes of BESIDE_POOL that the process, or the kernel for it, has taken when a model is first built."""
BESIDE_LARGEST = 96 << 20
"""Bytes that a process takes beside a parameter, or a gradient, that is as large as all of BESIDE_POOL."""


def beside_pool(pool: int, largest: int = 0) -> int:
    """Return the bytes that building, loading, paging and training take at most beside a pool of ``pool`` bytes, without
    activations.

    ``largest``: bytes of the largest parameter, or gradient, that is whole in ordinary memory.
    """
    return max(pool // POOL_SHARE + BESIDE_POOL - SPENT, largest + BESIDE_LARGEST)


def anonymous() -> int:
    """Return the bytes of anonymous memory of this process: heap, stacks, touched pages of a pool. 0 where the system does not
    say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def refuse_without_room(what: str, nbytes: int, mend: str) -> None:
    """Raise CapacityError if this process's cgroup leaves less than ``nbytes``, which ``what`` may take from here on: beyond
    its limit the kernel kills the process. ``mend``: the advice of the error, beside raising the limit."""
    room = cgroup_room()
    if room is not None and nbytes > room.headroom:
        raise CapacityError(
            f"{what} may take {nbytes:,} bytes more, and the memory cgroup {room.folder} leaves {room.headroom:,} of its limit "
            f"of {room.limit:,}: {mend}, or raise the limit by {nbytes - room.headroom:,} bytes"
        )


def headroom() -> int:
    """Return the bytes that this process may still take: what the system has or its memory cgroup allows, whichever is less."""
    available: int = psutil.virtual_memory().available
    room = cgroup_room()
    return available if room is None else min(available, room.headroom)


def memory_of_process() -> MemoryStatistics:
    """Return what memory this process has and may still take. The numbers of a pool are 0: they are for the store to fill in.
    """
    available, room = int(psutil.virtual_memory().available), cgroup_room()
    left = available if room is None else min(available, room.headroom)
    return MemoryStatistics(0, 0, 0, anonymous(), left, None if room is None else room.limit)


def free_in_heap() -> int:
    """Return the bytes that malloc holds and nobody uses: what is allocated next takes these, and no memory of the system. 0
    where the C library does not say."""
    info: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return 0
    info.restype = _InUse
    return int(info().fordblks)


class CgroupRoom(NamedTuple):
    """The limit of a memory cgroup. ``headroom``: bytes that its processes may still take; page cache counts as headroom,
    because the kernel gives it up on demand."""

    folder: str
    limit: int
    headroom: int


def cgroup_room() -> CgroupRoom | None:
    """Return the tightest limit among this process's memory cgroup (v2 or v1) and its ancestors; None where none sets one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[CgroupRoom] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder == root.parent:
                break
            try:
                most = int((folder / limit).read_text())
                if most >= 1 << 60:  # v1 writes "none" as nearly 2**63; what is asked below takes the kernel longer
                    continue
                used, cached = int((folder / usage).read_text()), _page_cache(folder / "memory.stat")
            except (OSError, ValueError):
                continue  # "max", or a hierarchy that is mounted elsewhere
            found.append(CgroupRoom(str(folder), most, max(0, most - used + cached)))
    return min(found, key=lambda room: room.headroom, default=None)


def _page_cache(statistics: Path) -> int:
    """Return the bytes of file pages, without those of tmpfs, that the kernel reclaims when a cgroup is full. 0 where the
    statistics do not say: the limit holds in any case."""
    try:
        values = dict([line.split(maxsplit=1) for line in statistics.read_text().splitlines()])
    except (OSError, ValueError):
        return 0
    total = "total_" if "total_inactive_file" in values else ""  # v1 counts those of the cgroups below separately
    return sum(int(values.get(f"{total}{name}", 0)) for name in ("inactive_file", "active_file"))


_AT_ONCE = 4096  # bytes
_LONGEST_WAIT = 1e6  # seconds; poll(2) counts milliseconds in an int


class _Condition(Protocol):
    """The part of ``threading.Condition`` that ``wait_for`` uses."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def acquire(self) -> bool: ...


def wait_for(changed: _Condition, seconds: float) -> None:
    """Wait as ``changed.wait`` does, and hold the lock afterwards in any case: Ctrl-C during its reacquisition would lose it.

    The lock must be an RLock: with another one a thread could release a lock that it does not own.
    """
    try:
        changed.wait(seconds)
    except BaseException:
        while True:  # other exceptions may strike meanwhile; the first one is raised
            try:
                while not changed._is_owned():  # type: ignore[attr-defined]
                    changed.acquire()
                break
            except BaseException:
                continue
        raise


class Wakeup:
    """A pipe that polls readable from ``set`` until ``clear``: how a worker wakes whoever waits in poll(2) or an event loop.

    A pipe, because eventfd exists on Linux only. Any thread may call ``set``. Clear before looking at the announced state, so
    that no later change is missed. After ``close``, ``set`` does nothing: a garbage collection that finds the wake-up together
    with its caller may finalize the two in either order.
    """

    _reading = _writing = -1  # also where the system refuses to make the pipe
    _closing = Once()

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self._closing = Once(partial(os.close, self._reading), partial(os.close, self._writing))
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)

    def fileno(self) -> int:
        return self._reading

    def set(self) -> None:
        if self._writing >= 0:
            with contextlib.suppress(BlockingIOError):  # a full pipe is readable
                os.write(self._writing, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._reading, _AT_ONCE)) == _AT_ONCE:
                pass

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds; return whether it is set."""
        poller = select.poll()
        poller.register(self._reading, select.POLLIN)
        return bool(poller.poll(min(max(timeout, 0.0), _LONGEST_WAIT) * 1000))

    def close(self) -> None:
        self._reading = self._writing = -1  # their numbers may soon be another file's
        self._closing.run()


class OwnedWakeup(Wakeup):
    """A wake-up that is closed with its last reference and not before, so that a finalizer may set it while it has a
    reference."""

    def __del__(self) -> None:
        self.close()


RESERVE = 64 << 20
FREE_SHARE = 16
"""Of the memory that a process may take RESERVE bytes, or one in FREE_SHARE, are to stay free: for the system, buffers of
libraries, pieces in flight."""


def to_stay_free(nbytes: int) -> int:
    """Return how many of ``nbytes`` of memory are to stay free."""
    return max(RESERVE, nbytes // FREE_SHARE)


KEPT = 32 << 20
"""Most bytes of freed memory that a process keeps before it is trimmed."""
OFTEN = 8 << 20
SELDOM = 16 << 20
AGAIN = 8
"""Of the highest use of the heap, the part that is left beside it."""
LOOK_SHARE = 4
"""A trimmer looks at the process after this fraction of the pool was allocated and freed, within OFTEN and SELDOM bytes."""
SCARCE = 64 << 20
"""With fewer bytes of headroom, memory that the next step will take again is returned, too."""
WORKING = 32 << 20
"""Bytes of pieces in flight, and of the buffers of torch's libraries."""
COMPILER = 80 << 20
"""Bytes of ``torch._dynamo``, which torch imports with its first optimizer."""


class Trimmer:
    """Returns freed memory to the system when the process keeps more of it than its share of ``beside_pool`` (8 to 32 MiB).

    ``pool`` is in bytes; ``largest`` is the size of the model's largest parameter in bytes. The trimmer looks at the process
    whenever 8 to 16 MiB were allocated and freed.

    Trimmed memory must be faulted in anew: a step that trims after every few gradients takes a third longer, one that trims its
    activations a tenth. So memory that a step takes again is left with the process: the heap may be as large as its highest use
    at any one time, unless headroom is scarce. ``look`` is called where that is expected. Where it lies between two looks
    nevertheless, and the heap is again as large as before the last trim, the step has taken again what was returned, and it is
    left, as far as that is an ``AGAIN``-th of the highest use (within OFTEN and SELDOM bytes) more than is kept in any case:
    beyond, it may be what fragments leave over, which nobody takes. (Blocks of 32 MiB and more are mappings of their own, which
    return when they are freed.) Measuring the use walks over all free blocks, so it is done only when the process is larger
    than the last measurement explains.
    """

    def __init__(self, pool: int, largest: int = 0) -> None:
        self._kept = min(max(OFTEN, (beside_pool(pool) - largest - WORKING) // 2), KEPT)
        self._every, self._passed = min(max(OFTEN, pool // LOOK_SHARE), self._kept, SELDOM), 0
        libc: Any = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)
        self._info = getattr(libc, "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _InUse
        self._most = 0  # most bytes of the heap that were in use at once
        self._before = 0  # of the heap, before the last trim
        self._left = 0  # bytes beyond the highest use that are left, because a step takes them again
        self._others = 0  # bytes of the process that were neither heap nor mapped by malloc at the last trim
        self._measure()

    def passed(self, nbytes: int) -> None:
        """Count ``nbytes`` that were allocated and freed, and trim when it is time."""
        self._passed += nbytes
        if self._passed < self._every:
            return
        self._passed = 0
        size = self._size()
        if size > self._others + self._most + self._left + self._kept:
            heap, mapped = self._in_use()
            self._most = max(self._most, heap)
            kept = size - mapped - self._others
            more = kept - self._most - self._kept
            if self._left < more <= min(max(OFTEN, self._most // AGAIN), SELDOM) and kept <= self._before:
                self._left = more
            elif more > self._left:
                self._before = kept
                self.trim()
                return
        if size > self._trimmed + self._every and headroom() < SCARCE:
            self.trim()

    def look(self) -> None:
        """Measure the use of the heap where it may be the highest: as backward begins, when nothing of a forward is freed."""
        if self._size() > self._others + self._most:
            self._most = max(self._most, self._in_use()[0])

    def trim(self) -> None:
        """Return all free memory to the system."""
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
        """Return the bytes of memory that the process has."""
        return anonymous() if self._trim is not None else 0

    def _in_use(self) -> tuple[int, int]:
        """Return the bytes that are allocated in the heap and in mappings of their own. (0, 0) where the C library does not
        say: then a trim may find nothing, and memory in use counts among the rest of the process."""
        if self._info is None:
            return 0, 0
        found = self._info()
        return int(found.uordblks), int(found.hblkhd)


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Return blocks of 1 MiB and more to the system as they are freed, in all threads. After the block the threshold is 32 MiB,
    the highest that glibc reaches by itself. A threshold from the environment (``MALLOC_MMAP_THRESHOLD_``, or
    ``GLIBC_TUNABLES``) stays."""
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
    """``struct mallinfo2``: bytes in blocks of the heaps and in mappings of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Watched(Protocol):
    """The part of a store whose pool is compared with the headroom."""

    @property
    def device(self) -> Any: ...

    def statistics(self) -> StoreStatistics: ...


def refuse_little_room(store: Watched, what: str, *, largest: int = 0, more: int = 0) -> None:
    """Raise CapacityError if a memory cgroup leaves less than ``what`` may take beside the pool, and the rest of the pool.

    The first call for a store requires all of ``beside_pool``, later ones only what ``what`` itself needs. ``largest``: bytes
    of the largest parameter, or gradient, that will be whole in ordinary memory. ``more``: further bytes that the caller knows
    of. A store on the meta device takes no memory.
    """
    if store.device.type == "meta":
        return
    pool = store.statistics().tier("dram")
    beside = largest + WORKING if store in _known else beside_pool(pool.capacity, largest)
    refuse_without_room(what, pool.capacity - pool.peak + beside + more, "open the store with a smaller dram=")
    _known.add(store)


def refuse_little_disk(store: Watched, what: str, nbytes: int) -> None:
    """Raise CapacityError if the bottom tier has less than ``nbytes`` free for ``what``, before hours of work show it."""
    bottom = store.statistics().tiers[-1]
    free = max(0, bottom.capacity - bottom.used)
    if nbytes > free:
        raise CapacityError(
            f"{what} takes {format_size(nbytes)}, and tier {bottom.name} has {format_size(free)} free: make room there, "
            "or put the store on a larger drive"
        )


def compiler() -> int:
    """Return the bytes that the first optimizer's import of the compiler takes."""
    return 0 if "torch._dynamo" in sys.modules else COMPILER


_known: weakref.WeakSet[Watched] = weakref.WeakSet()
"""Stores whose whole need was compared with the headroom before."""
