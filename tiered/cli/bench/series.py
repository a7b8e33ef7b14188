"""Measurements in interleaved rounds, so that changes over time affect all runs alike; and the workload of ``tiered bench io``,
which reads and writes large tensors in a store."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiered import CapacityError, MisuseError, TieredStore
from tiered.cli.output import Progress
from tiered.cli.stop import StopRequest
from tiered.measuring.drive import Order
from tiered.measuring.meters import PREFETCHED, Meter, MovedBytes, Spread, Usage, bytes_of, free_on, quantiles
from tiered.store.opening import SMALLEST_DRAM
from tiered.types import PIECE_BYTES, BackendName, TensorSpec, exact_size, format_size

__all__ = [
    "Run",
    "Series",
    "Setup",
    "StoreWorkload",
    "in_rounds",
    "passed",
    "ratios",
    "refuse_full_disk",
    "series_as_json",
]

Group = TypeVar("Group", bound=Hashable)


Run = Callable[[], MovedBytes]


@dataclass
class Series:
    """The results of one run over all rounds: one rate per round, and the latencies of all rounds together."""

    name: str
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    latencies: array[float] = field(default_factory=lambda: array("d"))

    def add(self, result: MovedBytes) -> None:
        """Add the result of a round."""
        self.rates.append(result.rate)
        self.cpu.append(result.cpu_seconds_per_gib)
        self.latencies.extend(result.latencies)
        if result.usage is not None:
            self.usages.append(result.usage)

    def latency(self) -> dict[str, float]:
        """Return the percentiles of the latencies; empty where none were measured."""
        return quantiles(self.latencies)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "bytes_per_second": {**Spread.of(self.rates).as_json(), "all": self.rates},
            "cpu_seconds_per_gib": Spread.of(self.cpu).as_json(),
        }
        if self.latencies:
            found["latency_seconds"] = self.latency()
        if self.usages:
            found["bytes"] = [usage.bytes for usage in self.usages]
            found["kernel_bytes"] = [usage.kernel_bytes for usage in self.usages]
        return found


def in_rounds(
    runs: Mapping[Group, Mapping[str, Run]], rounds: int, stop: StopRequest, progress: Progress
) -> dict[Group, list[Series]]:
    """Run everything once in each round; returns the results by group, in the order of names.

    The order of the runs changes from round to round, because each run affects the next one through the cache of the drive and
    the temperature of the CPU."""
    measured = {group: {name: Series(name) for name in named} for group, named in runs.items()}
    total, done = rounds * sum(map(len, runs.values())), 0
    for turn in range(rounds):
        for group, named in runs.items():
            names, onwards = list(named), -1 if turn % 2 else 1
            for name in (names[(turn + onwards * place) % len(names)] for place in range(len(names))):
                stop.check()
                progress.working(f"round {turn + 1} of {rounds}: {group}, {name}", done / total)
                measured[group][name].add(named[name]())
                done += 1
    progress.working("done", 1.0)
    return {group: list(series.values()) for group, series in measured.items()}


def ratios(series: Sequence[Series]) -> dict[str, Spread]:
    """Divide the rate of the first series by that of each other one, round by round."""
    ours, *others = series
    return {other.name: Spread.by(ours.rates, other.rates) for other in others}


def series_as_json(series: Sequence[Series]) -> dict[str, Any]:
    """Return all series by name, and their ratios."""
    return {
        **{one.name: one.as_json() for one in series},
        "ratios": {name: spread.as_json() for name, spread in ratios(series).items()},
    }


TENSOR = 16 << 20
"""Bytes of a tensor; smaller where --size or --dram is small."""
SMALLEST = 4 * SMALLEST_DRAM
WARM_UP = 2
"""Passes that do not count: writes alternate between two sets of extents, and new extents are slower."""


@dataclass(frozen=True)
class Setup:
    """One configuration: ``pool`` bytes of the store's memory, and ``tensors`` of ``tensor`` bytes each way.

    ``asked``: the bytes each way and the bytes of memory that the options asked for."""

    pool: int
    tensor: int
    tensors: int
    backend: BackendName = "auto"
    ahead: int = PREFETCHED
    order: Order = "sequential"
    asked: tuple[int, int] | None = None

    @classmethod
    def of(cls, *, size: int, dram: int, backend: BackendName, order: Order = "sequential") -> Setup:
        """Choose sizes so that the pool has room for eight tensors and a quarter of all tensors. Raises MisuseError."""
        for name, given, least in (("size", size, SMALLEST), ("dram", dram, SMALLEST_DRAM)):
            if given < least:
                raise MisuseError(f"--{name} {exact_size(given)} is too small to measure: the least is {exact_size(least)}")
        pool = min(dram, size // 4)
        tensor = min(TENSOR, pool // 8 // 4096 * 4096)
        return cls(pool, tensor, size // tensor, backend, order=order, asked=(size, dram))

    def notes(self) -> list[str]:
        """Say which of the sizes that were asked for are not those of the measurement, and why."""
        found = []
        if self.asked is not None and self.pool < self.asked[1]:
            found.append(
                f"not --dram {exact_size(self.asked[1])}: the store has a quarter of --size {exact_size(self.asked[0])}, "
                "so that most reads come from the disk"
            )
        if self.tensor < TENSOR:
            size, dram = self.asked or (self.moved, self.pool)
            needed = (("--dram", dram, 8 * TENSOR), ("--size", size, 4 * 8 * TENSOR))
            enough = " and ".join(f"{name} {exact_size(least)}" for name, given, least in needed if given < least)
            why = f"the store's memory has room for eight, to prefetch some; {enough} is enough"
            found.append(f"not tensors of {exact_size(TENSOR)}: {why}")
        if self.asked is not None and self.moved != self.asked[0]:
            found.append(f"not --size {exact_size(self.asked[0])}: {exact_size(self.moved)} are whole tensors")
        return found

    @property
    def moved(self) -> int:
        """Bytes that a round moves each way."""
        return self.tensor * self.tensors

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk: the tensors to read, and two sets of extents to write."""
        return 3 * self.moved + (128 << 20)

    def as_json(self) -> dict[str, Any]:
        """Return the sizes in bytes, counts and the order, for a JSON report."""
        return {
            "pool_bytes": self.pool,
            "tensor_bytes": self.tensor,
            "tensors": self.tensors,
            "ahead": self.ahead,
            "order": self.order,
        }


def passed(usage: Usage, asked: int, latencies: Sequence[float] = ()) -> MovedBytes:
    """Return the result of a pass that had to move ``asked`` bytes.

    At most the bytes that were asked for count, and at most those that moved: a tensor that was evicted before its use and read
    twice does not improve the rate, and neither does one that was found in memory."""
    return MovedBytes.of(usage, min(asked, usage.bytes), latencies)


def refuse_full_disk(folder: str, needed: int, lower: str = "--size") -> None:
    """Raise CapacityError where the filesystem of ``folder`` has no room for ``needed`` bytes, which the options
    ``lower`` make fewer."""
    free = free_on(folder)
    if needed > free:
        raise CapacityError(
            f"this needs {format_size(needed)} of disk, {folder} has {format_size(free)} free: lower {lower}, "
            "or name a folder on another device with --drive"
        )


class StoreWorkload:
    """Makes passes over a store's tensors. Tensors below ``r/`` are only read, tensors below ``w/`` only written."""

    def __init__(self, store: TieredStore, setup: Setup, stop: StopRequest) -> None:
        self._store, self._setup, self._stop = store, setup, stop
        self._meter = Meter(store)
        self._chance = random.Random(0)
        self._reads = [f"r/{index}" for index in range(setup.tensors)]
        self._writes = [f"w/{index}" for index in range(setup.tensors)]
        self._spec = TensorSpec("uint8", (setup.tensor,), 1)
        self._latencies: list[float] = []

    def prepare(self) -> None:
        """Put the tensors to read at the beginning of the file, and write until writes reuse extents."""
        value = bytes_of(self._setup.tensor)
        for key in self._reads:
            self._stop.check()
            self._store.put(key, value)
        self._store.commit()
        for _ in range(WARM_UP):
            self.write()

    def read(self) -> MovedBytes:
        """Lease one tensor after the other while the next ones are prefetched. The latencies are those of the leases."""
        self._begin()
        for index in range(len(self._reads)):
            self._read(index)
        return self._end(self._setup.moved)

    def write(self) -> MovedBytes:
        """Replace all tensors and commit, which ends when all bytes are on disk. The latencies are the waits for room."""
        self._begin()
        for key in self._writes:
            began = time.perf_counter()
            self.replace(key)
            self._latencies.append(time.perf_counter() - began)
        self._store.commit()
        return self._end(self._setup.moved)

    def mixed(self) -> MovedBytes:
        """Read and replace tensors in turn, and commit. The latencies are those of the reads."""
        self._begin()
        for index, key in enumerate(self._writes):
            self.replace(key)
            self._read(index)
        self._store.commit()
        return self._end(2 * self._setup.moved)

    def replace(self, key: str) -> None:
        """Replace a tensor and change one byte of each checksummed piece in place, so that hardly anything but the way to the
        disk is measured."""
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

    def _end(self, asked: int) -> MovedBytes:
        return passed(self._meter.lap(), asked, self._latencies)

    def _read(self, index: int) -> None:
        self._stop.check()
        began = time.perf_counter()
        self._store.prefetch(self._reads[index + 1 : index + 1 + self._setup.ahead])
        with self._store.lease(self._reads[index]):
            pass
        self._latencies.append(time.perf_counter() - began)
