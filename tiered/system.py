"""Descriptors are closed once, also where an exception of a signal handler strikes the call that closes them.

What the kernel says that direct I/O needs.

How much memory this process has, and may still take, by the system and by its cgroups.

An fd that polls readable from ``set`` until ``clear``: how a private worker reaches whoever waits in an event loop.

What a process takes beside the pool while a model is built, paged and trained: refused where there is no room for it, and
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
from tiered.telemetry import StoreStatistics

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
    "headroom",
    "refuse_little_room",
    "refuse_without_room",
    "returned_at_once",
    "wait_for",
]

class Once:
    """Steps that are made once each: ``run``, where it was struck, goes on with the one after the last that was begun.

    A step is a function of C's with its arguments (``partial(os.close, fd)``). To take it and to make it is one call, so no
    signal handler runs between these two.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._left = map(methodcaller("__call__"), iter(steps))
        self._count = len(steps)

    def run(self) -> None:
        """Make the steps that are left. What the system answers counts for nothing."""
        for _ in range(self._count):
            try:  # noqa: SIM105 - nothing but builtins: a module is empty when the interpreter ends, and finalizers run then
                next(self._left, None)
            except OSError:
                pass


LARGEST_ALIGNMENT = 1 << 20
"""Bytes: no drive needs more, and a store's header has at most this size."""


class _Statx(ctypes.Structure):
    """``struct statx`` up to the two fields that are wanted; see statx(2)."""

    _fields_ = [
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_char * 148),
        ("memory_alignment", ctypes.c_uint32),
        ("offset_alignment", ctypes.c_uint32),
        ("after", ctypes.c_char * 96),
    ]


def direct_io_alignment(fd: int) -> int:
    """What the kernel says direct I/O on this file needs, in bytes; 0 where it does not say (before Linux 6.1)."""
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
"""Beside its pool a process takes this fraction of it and so many bytes, after its imports; a model's activations apart."""
SPENT = 16 << 20
"""Bytes of these that are taken, or that the kernel takes for the process, when a model is first built."""
BESIDE_LARGEST = 96 << 20
"""Bytes beside a parameter, or a gradient, that is as large as all of that."""


def beside_pool(pool: int, largest: int = 0) -> int:
    """Bytes that building, loading, paging and training take at most beside a pool of ``pool`` bytes, activations apart.

    ``largest``: bytes of the largest parameter, or gradient, that is whole in ordinary memory.
    """
    return max(pool // POOL_SHARE + BESIDE_POOL - SPENT, largest + BESIDE_LARGEST)


def anonymous() -> int:
    """Bytes of anonymous memory of this process: heap, stacks, what was touched of a pool. 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def refuse_without_room(what: str, nbytes: int, mend: str) -> None:
    """Raises CapacityError if this process's cgroup leaves less than ``nbytes``, which ``what`` may take from here on: beyond
    its limit the kernel kills it. ``mend``: what to do about it, beside raising the limit."""
    room = cgroup_room()
    if room is not None and nbytes > room.headroom:
        raise CapacityError(
            f"{what} may take {nbytes:,} bytes more, and the memory cgroup {room.folder} leaves {room.headroom:,} of its limit "
            f"of {room.limit:,}: {mend}, or raise the limit by {nbytes - room.headroom:,} bytes"
        )


def headroom() -> int:
    """Bytes that this process may still take: what the system has, or its memory cgroup allows, whichever is less."""
    available: int = psutil.virtual_memory().available
    room = cgroup_room()
    return available if room is None else min(available, room.headroom)


class CgroupRoom(NamedTuple):
    """``headroom``: bytes that processes may still take; what the page cache has of ``limit`` is theirs for the asking."""

    folder: str
    limit: int
    headroom: int


def cgroup_room() -> CgroupRoom | None:
    """The least that this process's memory cgroup (v2 or v1) and those above it allow; None where none sets a limit."""
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
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                cached = _page_cache(folder / "memory.stat")
            except (OSError, ValueError):
                continue  # "max", or a hierarchy that is mounted elsewhere
            found.append(CgroupRoom(str(folder), most, max(0, most - used + cached)))
    limited = [room for room in found if room.limit < 1 << 60]  # v1 writes "none" as nearly 2**63
    return min(limited, key=lambda room: room.headroom, default=None)


def _page_cache(statistics: Path) -> int:
    """Bytes of file pages that the kernel takes back when a cgroup is full: without those of tmpfs. 0 where it does not
    say: the limit holds all the same."""
    try:
        values = dict(line.split(maxsplit=1) for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    total = "total_" if "total_inactive_file" in values else ""  # v1 counts those of the cgroups below apart
    return sum(int(values.get(f"{total}{name}", 0)) for name in ("inactive_file", "active_file"))


_AT_ONCE = 4096  # bytes
_LONGEST_WAIT = 1e6  # seconds; poll(2) counts milliseconds in an int


class _Condition(Protocol):
    """A ``threading.Condition``."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def acquire(self) -> bool: ...


def wait_for(changed: _Condition, seconds: float) -> None:
    """``changed.wait``, which Ctrl-C leaves without the lock if it strikes as that is taken again; here it is had in any case.

    The lock is an RLock: another one would let a thread release what is not its own.
    """
    try:
        changed.wait(seconds)
    except BaseException:
        while True:  # whatever else strikes meanwhile: the first exception is told
            try:
                while not changed._is_owned():  # type: ignore[attr-defined]
                    changed.acquire()
                break
            except BaseException:
                continue
        raise


class Wakeup:
    """A pipe, since eventfd is Linux's. Any thread may ``set``; whoever closes makes sure that nobody sets it any more.

    Clear it before looking at what it announces, then nothing is missed: what comes later sets it again. After ``close``
    setting it does nothing: a collection that finds it together with who sets it may end the two in either order.
    """

    _reading = _writing = -1  # also where the system refuses the pipe
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
        """Whether it is set, after at most ``timeout`` seconds."""
        poller = select.poll()
        poller.register(self._reading, select.POLLIN)
        return bool(poller.poll(min(max(timeout, 0.0), _LONGEST_WAIT) * 1000))

    def close(self) -> None:
        self._reading = self._writing = -1  # their numbers may be another file's soon
        self._closing.run()


class OwnedWakeup(Wakeup):
    """Closed with its last reference and not before: a finalizer may set it as long as it holds who has it."""

    def __del__(self) -> None:
        self.close()


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


class Watched(Protocol):
    """A store, as far as its pool is asked for."""

    def statistics(self) -> StoreStatistics: ...


def refuse_little_room(store: Watched, what: str, *, largest: int = 0, more: int = 0) -> None:
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


_known: weakref.WeakSet[Watched] = weakref.WeakSet()
"""Stores for which there was room for all."""
