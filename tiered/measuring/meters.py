"""Tools of every measurement: scratch stores that leave nothing behind, counters of time, bytes and memory, medians with their
spread, a description of the machine, and the rates of a store's disk when it does nothing else."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from tiered.errors import CapacityError, MisuseError, UncommittedWarning
from tiered.store import TieredStore
from tiered.tiers.nvme import NvmeTier
from tiered.types import VERSION, BackendName

__all__ = [
    "GIB",
    "PREFETCHED",
    "Meter",
    "MovedBytes",
    "Noise",
    "Rates",
    "Spread",
    "Usage",
    "bytes_of",
    "environment",
    "free_on",
    "measure",
    "peak_memory",
    "percentile",
    "quantiles",
    "scratch_folder",
    "scratch_store",
    "turns",
]

GIB = 1 << 30
Item = TypeVar("Item")
DATA_FILE = "data.0"
REPEATED = 4 << 20
"""Bytes of random contents before they repeat: a drive that compresses or knows zeros gains nothing from them."""


@contextmanager
def scratch_folder(parent: str) -> Iterator[str]:
    """Make a new folder in ``parent``, and remove it with its contents at the end. Raises MisuseError."""
    if not os.path.isdir(parent):
        what = "is not a folder" if os.path.lexists(parent) else "does not exist"
        raise MisuseError(f"{parent} {what}; name one on the drive to measure with --drive")
    if os.path.lexists(os.path.join(parent, DATA_FILE)):
        raise MisuseError(f"{parent} holds a store, which stays as it is; name the folder around it with --drive")
    try:
        folder = tempfile.mkdtemp(prefix="tiered-scratch-", dir=os.path.abspath(parent))
    except OSError as error:
        raise MisuseError(f"cannot make a folder in {parent}: {error.strerror}; name another one with --drive") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def scratch_store(parent: str, *, dram: int, backend: BackendName = "auto") -> Iterator[TieredStore]:
    """Open a store in a new folder in ``parent``, and remove both at the end.

    The data file is unlinked as soon as it is open, so the system frees its space even if this process is killed.
    """
    with scratch_folder(parent) as folder:
        with warnings.catch_warnings():  # the report says whether there is O_DIRECT
            warnings.simplefilter("ignore")
            store = TieredStore.open(folder, dram=dram, backend=backend, keep=1)
        try:
            nvme = store._parts.nvme
            assert isinstance(nvme, NvmeTier)
            nvme.drop_names()
            yield store
        finally:
            with warnings.catch_warnings():  # nothing in it was meant to last
                warnings.simplefilter("ignore", UncommittedWarning)
                store.close()


def free_on(folder: str) -> int:
    """Return the free bytes of the filesystem of ``folder``; sys.maxsize where it does not count them (ramfs)."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def bytes_of(nbytes: int) -> torch.Tensor:
    """Make a uint8 tensor of ``nbytes`` with random contents."""
    piece = torch.randint(0, 256, (min(nbytes, REPEATED),), dtype=torch.uint8, device="cpu")
    return piece.repeat(-(-nbytes // REPEATED))[:nbytes] if nbytes > REPEATED else piece


@dataclass(frozen=True)
class Usage:
    """The differences between two readings of a ``Meter``.

    ``read`` and ``written`` are bytes between the store and its disk. ``kernel_read`` and ``kernel_written`` are the bytes that
    this process moved from and to drives (/proc/self/io), None where the kernel does not count them. ``cpu_seconds`` are this
    process's, in user and system mode. Calls waited ``stalled_for_reads`` and ``stalled_for_room`` seconds for the store.
    """

    seconds: float
    cpu_seconds: float
    read: int
    written: int
    kernel_read: int | None
    kernel_written: int | None
    stalled_for_reads: float = 0.0
    stalled_for_room: float = 0.0

    def until(self, later: Usage) -> Usage:
        """Return the differences between these totals and ``later`` ones."""
        found: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            after, before = getattr(later, name), getattr(self, name)
            found[name] = None if after is None or before is None else after - before
        return Usage(**found)

    @property
    def bytes(self) -> int:
        """The bytes that the store counted, both ways."""
        return self.read + self.written

    @property
    def kernel_bytes(self) -> int | None:
        """The bytes that the kernel counted, both ways."""
        if self.kernel_read is None or self.kernel_written is None:
            return None
        return self.kernel_read + self.kernel_written

    @property
    def counted_by(self) -> str:
        """Whose counts ``disk_read`` and ``disk_written`` are: "kernel", or "store" where the kernel has none."""
        return "store" if self.kernel_bytes is None else "kernel"

    @property
    def disk_read(self) -> int:
        """Bytes that the store read from drives, by the kernel's count where it has one: fewer than ``read`` where the page
        cache had some. What the process read beside the store, such as modules that are loaded late, counts in neither."""
        return self.read if self.kernel_read is None else min(self.read, self.kernel_read)

    @property
    def disk_written(self) -> int:
        """Bytes that the store wrote to drives, likewise."""
        return self.written if self.kernel_written is None else min(self.written, self.kernel_written)

    @property
    def stalled(self) -> float:
        """Seconds that calls waited for the store."""
        return self.stalled_for_reads + self.stalled_for_room


@dataclass(frozen=True)
class MovedBytes:
    """The ``bytes`` that count of what was moved in ``seconds``, and what that took. ``latencies``: seconds of each operation,
    where measured; ``usage``: None for other programs."""

    bytes: int
    seconds: float
    cpu_seconds: float
    latencies: Sequence[float] = ()
    usage: Usage | None = None

    @classmethod
    def of(cls, usage: Usage, nbytes: int, latencies: Sequence[float]) -> MovedBytes:
        """Return what this process used to move ``nbytes``."""
        return cls(nbytes, usage.seconds, usage.cpu_seconds, latencies, usage)

    @property
    def rate(self) -> float:
        return self.bytes / max(self.seconds, 1e-9)

    @property
    def cpu_seconds_per_gib(self) -> float:
        return self.cpu_seconds / max(self.bytes / GIB, 1e-9)


class Meter:
    """Reads the counters of this process and, where ``store`` is given, of the store and its link to the disk."""

    def __init__(self, store: TieredStore | None) -> None:
        self._store, self._process = store, psutil.Process()
        self._before = self._read()

    def lap(self) -> Usage:
        """Return what was used since the last lap, or since this meter was made."""
        before, self._before = self._before, self._read()
        return before.until(self._before)

    def _read(self) -> Usage:
        """Return the totals of this moment."""
        moved, stalled = (0, 0), (0.0, 0.0)
        if self._store is not None:
            seen = self._store.statistics()
            stalled = seen.stalled_for_reads, seen.stalled_for_room
            for disk in seen.links[-1:]:
                moved = disk.up.bytes, disk.down.bytes
        kernel: tuple[int | None, int | None] = (None, None)
        try:
            counted = self._process.io_counters()
            kernel = counted.read_bytes, counted.write_bytes
        except (psutil.Error, AttributeError, NotImplementedError, OSError):
            pass  # a kernel or container without /proc/self/io
        return Usage(time.perf_counter(), time.process_time(), *moved, *kernel, *stalled)


def peak_memory() -> int:
    """Return the most bytes of memory that this process had at once (VmHWM).

    Not ``getrusage``, whose count begins with the memory of the parent process; it is the fallback without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    found = next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), None)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 if found is None else found


class Noise:
    """Measures the load of other programs on this machine, from the moment it is made."""

    def __init__(self) -> None:
        self._began, self._cpu = psutil.cpu_times(), time.process_time()
        self._children = _children()

    def seen(self) -> dict[str, float]:
        """Return shares of the time of all cores: used by this program (``own``), by ``others``, by other virtual machines
        (``steal``)."""
        now = psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._began, name) for name in now._fields}
        # guest time is in user time as well
        total = sum(seconds for name, seconds in spent.items() if not name.startswith("guest")) or 1.0
        idle = spent["idle"] + spent.get("iowait", 0.0)
        steal = spent.get("steal", 0.0)
        own = time.process_time() - self._cpu + _children() - self._children
        others = max(0.0, total - idle - steal - own)
        return {"others": others / total, "own": own / total, "steal": steal / total}


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def turns(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, list[Item]]]:
    """Number the rounds, and give the order of each, so that each item is first as often as the others."""
    for number in range(rounds):
        first = number % len(items)
        yield number, [*items[first:], *items[:first]]


@dataclass(frozen=True)
class Spread:
    """The median and the extremes of several runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of ``values``."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def by(cls, values: Sequence[float], others: Sequence[float]) -> Spread:
        """Compute the spread of the ratios of ``values`` to ``others``, round by round."""
        return cls.of([one / other for one, other in zip(values, others, strict=True)])

    def shown(self, factor: float = 1.0, digits: int = 2) -> str:
        """Format as "median [least - most]", each multiplied by ``factor``."""
        median, least, most = (f"{value * factor:,.{digits}f}" for value in (self.median, self.least, self.most))
        return f"{median} [{least} - {most}]"

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.least, "max": self.most}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of ascending values, the smallest that at least ``share`` of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Compute the percentiles that reports show of latencies; empty for no values."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {name: percentile(ordered, share) for name, share in shares.items()} if ordered else {}


def environment() -> dict[str, Any]:
    """Describe the circumstances of a measurement: versions, the commit of a checkout, and the machine."""
    return {
        "tiered": VERSION,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _commit() -> str | None:
    """Return the commit of the checkout that has this package; None for an installed package, also inside another checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


PIECES = 24
PIECE_SHARE = 16
"""A piece is at most this fraction of the pool, so that all pieces together are one and a half times the pool."""
LARGEST_PIECE = 16 << 20
PREFETCHED = 4
"""Tensors, or pieces of one, that are prefetched while one is leased."""


@dataclass(frozen=True)
class Rates:
    """The rates of a disk in bytes per second, each way by itself."""

    read: float
    write: float

    def seconds(self, read: float, written: float) -> float:
        """Return how long these bytes take one way after the other: both at once are not faster."""
        return read / self.read + written / self.write


def measure(store: TieredStore) -> Rates | None:
    """Measure the store's disk, checksums included: write PIECES tensors twice and read them twice; the second passes count,
    because the first one writes to new extents and finds the pool full of other tensors.

    Returns None where the disk has no room for the tensors. They are deleted again; nothing is committed."""
    pool = store.statistics().tier("dram").capacity
    piece = torch.arange(min(LARGEST_PIECE, pool // PIECE_SHARE), dtype=torch.uint8, device="cpu")
    keys = [f"rates/{index}" for index in range(PIECES)]
    rates = []
    try:
        for direction in ("write", "write", "read", "read"):
            before = store.statistics().links[-1]
            for index, key in enumerate(keys):
                if direction == "write":
                    store.put(key, piece)
                else:
                    store.prefetch(keys[index + 1 : index + 1 + PREFETCHED], tier="dram")
                    with store.lease(key, tier="dram"):
                        pass
            store.offload(keys)  # else a pool that has room for all of them would keep them
            after = store.statistics().links[-1]
            flows = (after.down, before.down) if direction == "write" else (after.up, before.up)
            rates.append((flows[0].bytes - flows[1].bytes) / max(1e-9, flows[0].busy_seconds - flows[1].busy_seconds))
    except CapacityError:
        return None
    finally:
        for key in keys:
            if key in store:
                store.delete(key)
    return Rates(read=rates[3], write=rates[1])
