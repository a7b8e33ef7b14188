"""Results of what is measured again and again, in rounds that are interleaved: what changes with time meets all alike.

Passes over large tensors in a store: read, written until they are durable, and both.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from tiered import CapacityError, MisuseError, TieredStore
from tiered.cli.measure import GIB, Meter, Spread, Usage, bytes_of, free_on, quantiles
from tiered.cli.output import Progress, exact_size
from tiered.cli.stop import StopRequest
from tiered.store.opening import SMALLEST_DRAM
from tiered.types import PIECE_BYTES, BackendName, TensorSpec, format_size

__all__ = [
    "Order",
    "Pass",
    "Result",
    "Run",
    "Series",
    "Setup",
    "Workload",
    "in_rounds",
    "ratios",
    "refuse_full_disk",
    "series_as_json",
]

Group = TypeVar("Group", bound=Hashable)


class Result(Protocol):
    """Of one round. ``latencies``: seconds of each operation, where they were taken; ``usage``: None of other programs."""

    @property
    def rate(self) -> float: ...
    @property
    def cpu_seconds_per_gib(self) -> float: ...
    @property
    def latencies(self) -> Sequence[float]: ...
    @property
    def usage(self) -> Usage | None: ...


Run = Callable[[], Result]


@dataclass
class Series:
    """Results of one thing that is measured, one per round; ``latencies`` of all together."""

    name: str
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    latencies: array[float] = field(default_factory=lambda: array("d"))

    def add(self, result: Result) -> None:
        self.rates.append(result.rate)
        self.cpu.append(result.cpu_seconds_per_gib)
        self.latencies.extend(result.latencies)
        if result.usage is not None:
            self.usages.append(result.usage)

    def latency(self) -> dict[str, float]:
        """Empty where none was taken."""
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
    """Everything once in each round; by group, in the order of names. Who begins, and from three on who follows whom, changes
    from round to round, for what ran before leaves its trace: a drive's cache, a warm CPU."""
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
    """The first one's rate by each other's, of the pairs in each round."""
    ours, *others = series
    return {other.name: Spread.of([a / b for a, b in zip(ours.rates, other.rates, strict=True)]) for other in others}


def series_as_json(series: Sequence[Series]) -> dict[str, Any]:
    return {
        **{one.name: one.as_json() for one in series},
        "ratios": {name: spread.as_json() for name, spread in ratios(series).items()},
    }


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


class Workload:
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
