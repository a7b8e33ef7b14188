"""What measuring takes: a store of its own that leaves nothing behind, counters, and numbers that say how much they scatter.

How fast the store's disk reads, and writes, when it does nothing else: the measure for how much waiting was avoided.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import tiered
from tiered import CapacityError, MisuseError, TieredStore
from tiered.types import BackendName

__all__ = [
    "GIB",
    "Meter",
    "Noise",
    "Rates",
    "Spread",
    "Usage",
    "bytes_of",
    "environment",
    "free_on",
    "measure",
    "percentile",
    "quantiles",
    "scratch_folder",
    "scratch_store",
]

GIB = 1 << 30
DATA_FILE = "data.0"
REPEATED = 4 << 20
"""Bytes of random contents before they repeat: a drive that compresses or knows zeros gains nothing from them."""


@contextmanager
def scratch_folder(parent: str) -> Iterator[str]:
    """A new folder in ``parent`` that nobody else has; it is removed with what is in it. Raises MisuseError."""
    if not os.path.isdir(parent):
        what = "is not a folder" if os.path.lexists(parent) else "does not exist"
        raise MisuseError(f"{parent} {what}; name one on the drive to measure with --dir")
    if os.path.lexists(os.path.join(parent, DATA_FILE)):
        raise MisuseError(f"{parent} holds a store, which stays as it is; name the folder around it with --dir")
    try:
        folder = tempfile.mkdtemp(prefix="tiered-scratch-", dir=os.path.abspath(parent))
    except OSError as error:
        raise MisuseError(f"cannot make a folder in {parent}: {error.strerror}; name another one with --dir") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def scratch_store(
    parent: str, *, dram: int, backend: BackendName = "auto"
) -> Iterator[TieredStore]:
    """A store in a new folder in ``parent``, removed afterwards.

    Its data file loses its name as soon as it is open: the system takes the space back even if this process is killed.
    """
    with scratch_folder(parent) as folder:
        with warnings.catch_warnings():  # that there is no O_DIRECT stands in what is printed
            warnings.simplefilter("ignore")
            store = TieredStore.open(folder, dram=dram, backend=backend, keep=1)
        with closing(store):
            nvme = store._parts.nvme
            assert nvme is not None
            nvme.drop_names()
            yield store


def free_on(folder: str) -> int:
    """Bytes that the filesystem of ``folder`` gives us; as many as can be where it does not count (ramfs)."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def bytes_of(nbytes: int) -> torch.Tensor:
    """A tensor of ``nbytes`` with random contents, uint8."""
    piece = torch.randint(0, 256, (min(nbytes, REPEATED),), dtype=torch.uint8)
    return piece.repeat(-(-nbytes // REPEATED))[:nbytes] if nbytes > REPEATED else piece


@dataclass(frozen=True)
class Usage:
    """Differences between two readings of a ``Meter``: seconds, and bytes as the store and as the kernel count them.

    ``cpu_seconds`` are this process's, in user and system mode; ``kernel_read`` and ``kernel_written`` are what it caused to
    be moved from and to drives (/proc/self/io), None where the kernel does not tell.
    """

    seconds: float
    cpu_seconds: float
    read: int
    written: int
    kernel_read: int | None
    kernel_written: int | None

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def kernel_bytes(self) -> int | None:
        if self.kernel_read is None or self.kernel_written is None:
            return None
        return self.kernel_read + self.kernel_written


class Meter:
    """Counters of this process, and of its store's link to the disk where it has one."""

    def __init__(self, store: TieredStore | None) -> None:
        self._store, self._process = store, psutil.Process()
        self._before = self._read()

    def lap(self) -> Usage:
        """What was used since the last lap, or since the beginning."""
        before, self._before = self._before, self._read()
        differences = [b if b is None or a is None else b - a for a, b in zip(before, self._before, strict=True)]
        seconds, cpu, read, written, kernel_read, kernel_written = differences
        assert seconds is not None
        assert cpu is not None
        whole = [None if n is None else int(n) for n in (kernel_read, kernel_written)]
        return Usage(seconds, cpu, int(read or 0), int(written or 0), *whole)

    def _read(self) -> tuple[float | None, ...]:
        moved = (0, 0)
        if self._store is not None:
            for disk in self._store.statistics().links[-1:]:
                moved = disk.up.bytes, disk.down.bytes
        kernel: tuple[int | None, int | None] = (None, None)
        try:
            counted = self._process.io_counters()
            kernel = (counted.read_bytes, counted.write_bytes)
        except (psutil.Error, AttributeError, OSError):
            pass  # a kernel or container without /proc/self/io
        return (time.perf_counter(), time.process_time(), *moved, *kernel)


class Noise:
    """What others did on this machine since it was made."""

    def __init__(self) -> None:
        self._began, self._cpu = psutil.cpu_times(), time.process_time()
        self._children = _children()

    def seen(self) -> dict[str, float]:
        """Shares of the time of all cores: ``others`` were busy, ``steal`` went to other virtual machines."""
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


@dataclass(frozen=True)
class Spread:
    """Of several runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, factor: float = 1.0, digits: int = 2) -> str:
        median, least, most = (f"{value * factor:.{digits}f}" for value in (self.median, self.least, self.most))
        return f"{median} [{least} - {most}]"

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.least, "max": self.most}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank of values in ascending order: the smallest one that at least ``share`` of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """What is told of latencies: the median, the tail, and the worst; nothing of none."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {name: percentile(ordered, share) for name, share in shares.items()} if ordered else {}


def environment() -> dict[str, Any]:
    """What a number needs beside it: versions, the commit where this runs from a checkout, and the machine."""
    return {
        "tiered": tiered.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _commit() -> str | None:
    """Of the checkout that this package lies in; None where it is installed, also inside of another project's checkout."""
    root = Path(tiered.__file__).resolve().parents[1]
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
"""A piece is at most one in this many of the pool, so that all of them are half as much again as the pool holds."""
LARGEST_PIECE = 16 << 20
AHEAD = 4
"""Pieces that are asked for while one is leased."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second, through the store, checksums included."""

    read: float
    write: float


def measure(store: TieredStore) -> Rates | None:
    """Write PIECES tensors twice and read them twice; the second pass of each counts (the first one's extents are fresh, its
    pool full of others). None where the disk has no room for them. The tensors are deleted again; nothing is committed."""
    pool = store.statistics().tier("dram").capacity
    piece = torch.arange(min(LARGEST_PIECE, pool // PIECE_SHARE), dtype=torch.uint8)
    keys = [f"rates/{index}" for index in range(PIECES)]
    rates = []
    try:
        for direction in ("write", "write", "read", "read"):
            before = store.statistics().links[-1]
            for index, key in enumerate(keys):
                if direction == "write":
                    store.put(key, piece)
                else:
                    store.prefetch(keys[index + 1 : index + 1 + AHEAD], tier="dram")
                    with store.lease(key, tier="dram"):
                        pass
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
