"""Passes over large tensors in a store: read, written until they are durable, and both."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from tiered import CapacityError, MisuseError, TieredStore
from tiered.cli.measure import GIB, Meter, Usage, bytes_of, free_on
from tiered.cli.stop import StopRequest
from tiered.cli.table import exact_size
from tiered.config import SMALLEST_DRAM
from tiered.sizes import format_size
from tiered.types import PIECE_BYTES, BackendName, TensorSpec

__all__ = ["Order", "Pass", "Setup", "Walk", "refuse_full_disk"]

Order = Literal["sequential", "random"]

TENSOR = 16 << 20
"""Bytes of a tensor, unless --tensor says another; smaller where --size is small."""
AHEAD = 4
"""Tensors that are asked for while one is leased."""
SMALLEST = 4 * SMALLEST_DRAM
WARM_UP = 2
"""Passes before any counts: what is written takes turns between two sets of extents, and fresh ones are slower."""


@dataclass(frozen=True)
class Setup:
    """One configuration that is measured. ``pool``: bytes of the store's memory; ``tensors`` of ``tensor`` bytes each way."""

    pool: int
    tensor: int
    tensors: int
    backend: BackendName = "auto"
    ahead: int = AHEAD
    order: Order = "sequential"

    @classmethod
    def of(cls, *, size: int, dram: int, backend: BackendName, order: Order = "sequential") -> Setup:
        """At least eight tensors in the pool, and four times as many in all. Raises MisuseError."""
        for name, given, least in (("size", size, SMALLEST), ("dram", dram, SMALLEST_DRAM)):
            if given < least:
                raise MisuseError(f"--{name} {exact_size(given)} is too small to measure: the least is {exact_size(least)}")
        pool = min(dram, size // 4)
        tensor = min(TENSOR, pool // 8 // 4096 * 4096)
        return cls(pool, tensor, size // tensor, backend, order=order)

    @property
    def moved(self) -> int:
        """Bytes each way in each round."""
        return self.tensor * self.tensors

    @property
    def disk_bytes(self) -> int:
        """What is read, and two sets of what is written."""
        return 3 * self.moved + (128 << 20)

    def as_json(self) -> dict[str, Any]:
        return {
            "pool_bytes": self.pool,
            "tensor_bytes": self.tensor,
            "tensors": self.tensors,
            "ahead": self.ahead,
            "order": self.order,
        }


@dataclass(frozen=True)
class Pass:
    """``asked``: bytes that were to be moved. Only these count, and only if they were: neither what was read twice (because it
    was evicted again before it was used) nor what was found in memory makes a rate better. ``latencies``: seconds of calls."""

    usage: Usage
    asked: int
    latencies: list[float] = field(default_factory=list)

    @property
    def useful(self) -> int:
        return min(self.asked, self.usage.bytes)

    @property
    def rate(self) -> float:
        return self.useful / max(self.usage.seconds, 1e-9)

    @property
    def cpu_seconds_per_gib(self) -> float:
        return self.usage.cpu_seconds / max(self.useful / GIB, 1e-9)


def refuse_full_disk(folder: str, needed: int) -> None:
    """Raises CapacityError where the filesystem has no room for ``needed`` bytes."""
    free = free_on(folder)
    if needed > free:
        raise CapacityError(
            f"this needs {format_size(needed)} of disk, {folder} has {format_size(free)} free: lower --size, "
            "or name a folder on another device with --dir"
        )


class Walk:
    """Passes over a store's tensors: those of ``r/`` are only read, those of ``w/`` only written."""

    def __init__(self, store: TieredStore, setup: Setup, stop: StopRequest) -> None:
        self._store, self._setup, self._stop = store, setup, stop
        self._meter = Meter(store)
        self._chance = random.Random(0)
        self._reads = [f"r/{index}" for index in range(setup.tensors)]
        self._writes = [f"w/{index}" for index in range(setup.tensors)]
        self._spec = TensorSpec("uint8", (setup.tensor,), 1)
        self._latencies: list[float] = []

    def prepare(self) -> None:
        """Put what will be read, at the begin of the file, and write until extents are written over."""
        value = bytes_of(self._setup.tensor)
        for key in self._reads:
            self._stop.check()
            self._store.put(key, value)
        self._store.commit()
        for _ in range(WARM_UP):
            self.write()

    def read(self) -> Pass:
        """Lease one tensor after the other while the next ones are on their way. Latencies: of these leases."""
        self._begin()
        for index in range(len(self._reads)):
            self._read(index)
        return self._end(self._setup.moved)

    def write(self) -> Pass:
        """Replace all tensors, and commit: the time until everything is on disk. Latencies: until there is room for each."""
        self._begin()
        for key in self._writes:
            began = time.perf_counter()
            self.replace(key)
            self._latencies.append(time.perf_counter() - began)
        self._store.commit()
        return self._end(self._setup.moved)

    def mixed(self) -> Pass:
        """Read one, write one, and commit. Latencies: of the reads."""
        self._begin()
        for index, key in enumerate(self._writes):
            self.replace(key)
            self._read(index)
        self._store.commit()
        return self._end(2 * self._setup.moved)

    def replace(self, key: str) -> None:
        """New contents as a WRITE lease leaves them, made in place, a byte of each piece that has a checksum: what
        is measured is their way to the disk."""
        self._stop.check()
        self._store.create(key, self._spec)
        with self._store.lease(key, access="write") as tensor:
            tensor[::PIECE_BYTES].add_(1)

    def _begin(self) -> None:
        if self._setup.order == "random":
            self._chance.shuffle(self._reads)
            self._chance.shuffle(self._writes)
        self._latencies = []
        self._meter.lap()

    def _end(self, asked: int) -> Pass:
        return Pass(self._meter.lap(), asked, self._latencies)

    def _read(self, index: int) -> None:
        self._stop.check()
        began = time.perf_counter()
        self._store.prefetch(self._reads[index + 1 : index + 1 + self._setup.ahead])
        with self._store.lease(self._reads[index]):
            pass
        self._latencies.append(time.perf_counter() - began)
