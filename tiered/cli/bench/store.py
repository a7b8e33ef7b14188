"""``tiered bench store``: time every call of a store on tensors of many sizes, each size in a scratch store of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from tiered import MisuseError, TieredStore
from tiered.cli.bench.reports import Measuring, reported
from tiered.cli.info.machine import store_facts
from tiered.cli.output import (
    duration,
    rate,
    table,
    told_environment,
    told_io,
    told_noise,
)
from tiered.cli.stop import StopRequest
from tiered.measuring.meters import PREFETCHED, bytes_of, free_on, percentile, scratch_store
from tiered.store.opening import SMALLEST_DRAM, default_dram
from tiered.types import BackendName, exact_size, format_size

__all__ = ["StoreJobOptions", "bench"]

USUAL_DRAM = 4 << 30
USUAL_POOL = 256 << 20
FEWEST, MOST = 4, 256
"""Bounds for the number of tensors in the pool of one size, which is otherwise as many as USUAL_POOL holds."""
LEAST_RUNS = 3
SLOT = 4096
STAGES = 9
"""Stages of the measurement of one size, for the progress display."""


@dataclass(frozen=True)
class StoreJobOptions:
    """Options of ``tiered bench store``. ``folder``: where the scratch stores are made; ``sizes`` and ``dram`` in bytes;
    ``seconds`` for each line."""

    folder: str
    sizes: tuple[int, ...]
    dram: int | None
    backend: BackendName
    seconds: float


@dataclass(frozen=True)
class Line:
    """The measurement of one operation on tensors of ``nbytes``: ``latencies`` in seconds, ascending, in ``seconds`` together.

    ``misses``: leases that had to wait. ``moves``: whether the operation moves the bytes of the tensor.
    """

    nbytes: int
    operation: str
    where: str
    latencies: tuple[float, ...]
    seconds: float
    misses: int
    moves: bool = True

    @property
    def per_second(self) -> float:
        return len(self.latencies) / max(self.seconds, 1e-9)

    def latency(self) -> dict[str, float]:
        """Return the percentiles of the latencies."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: percentile(self.latencies, share) for name, share in shares.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "size_bytes": self.nbytes,
            "operation": self.operation,
            "where": self.where,
            "operations": len(self.latencies),
            "misses": self.misses,
            "seconds": self.seconds,
            "operations_per_second": self.per_second,
            "bytes_per_second": self.per_second * self.nbytes if self.moves else None,
            "latency_seconds": self.latency(),
        }

    def row(self) -> list[str]:
        """Format the row of the table."""
        moved = rate(self.per_second * self.nbytes) if self.moves else "-"
        times = [duration(seconds) for seconds in self.latency().values()]
        count = f"{self.per_second:,.0f}" if self.per_second >= 10 else f"{self.per_second:.1f}"
        return [exact_size(self.nbytes), self.operation, self.where, f"{len(self.latencies):,}", count, moved, *times]


@dataclass(frozen=True)
class Measurement:
    """The measurement of one size: ``pool`` bytes of memory with room for ``slots`` tensors, and more ``tensors`` than fit."""

    nbytes: int
    pool: int
    slots: int

    @classmethod
    def of(cls, nbytes: int, dram: int) -> Measurement:
        """Plan tensors of ``nbytes`` in at most ``dram`` bytes of memory."""
        slot = -(-nbytes // SLOT) * SLOT
        slots = min(MOST, max(FEWEST, USUAL_POOL // slot), dram // slot)
        return cls(nbytes, max(SMALLEST_DRAM, slots * slot), slots)

    @property
    def tensors(self) -> int:
        slots = self.pool // (-(-self.nbytes // SLOT) * SLOT)
        return slots + max(2, slots // 2)

    @property
    def disk_bytes(self) -> int:
        return (self.tensors + 2) * (-(-self.nbytes // SLOT) * SLOT) + (64 << 20)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the pool, of the tensor to put, and of the tensor that get returns."""
        return self.pool + 2 * self.nbytes

    def why_not(self, dram: int, disk: int, memory: int) -> str | None:
        """Say why this size cannot be measured; None where it can."""
        if self.slots < 2:
            return f"needs room for two tensors, and --dram is {format_size(dram)}"
        if self.memory_bytes > memory:
            return f"needs {format_size(self.memory_bytes)} of memory, {format_size(memory)} is available: lower --dram"
        if self.disk_bytes > disk:
            return f"needs {format_size(self.disk_bytes)} of disk, {format_size(disk)} is free"
        return None


def bench(options: StoreJobOptions, json: str | None) -> int:
    """Measure and print; returns the exit code."""
    return reported(partial(_measure, options), json)


def _measure(options: StoreJobOptions, under: Measuring) -> Callable[[], str]:
    dram = min(USUAL_DRAM, default_dram()) if options.dram is None else options.dram
    if dram < SMALLEST_DRAM:
        raise MisuseError(f"--dram {exact_size(dram)} is too small for a store: the least is {exact_size(SMALLEST_DRAM)}")
    lines: list[Line] = []
    skipped: list[dict[str, Any]] = []
    facts = store_facts(options.folder, options.backend)
    for at, nbytes in enumerate(options.sizes):
        plan = Measurement.of(nbytes, dram)
        why = plan.why_not(dram, free_on(options.folder), psutil.virtual_memory().available)
        if why is not None:
            skipped.append({"size_bytes": nbytes, "why": why})
            continue

        def tell(done: int, what: str, at: int = at, nbytes: int = nbytes) -> None:
            share = (at + done / STAGES) / len(options.sizes)
            under.progress.working(f"{exact_size(nbytes)}: {what}", min(share, 0.999))

        lines += _measure_size(options, plan, under.stop, tell)
    under.progress.working("done", 1.0)
    report = under.report
    report |= facts | {"dram_bytes": dram, "seconds_per_line": options.seconds}
    report |= {"lines": [line.as_json() for line in lines], "skipped": skipped}
    return lambda: _describe(report, lines)


def _measure_size(
    options: StoreJobOptions, plan: Measurement, stop: StopRequest, tell: Callable[[int, str], None]
) -> Iterator[Line]:
    told = itertools.count()

    def now(what: str) -> None:
        stop.check()
        tell(next(told), what)

    now("preparing")
    value = bytes_of(plan.nbytes)
    with scratch_store(options.folder, dram=plan.pool, backend=options.backend) as store:
        keys = [str(index) for index in range(plan.tensors)]
        few = keys[: max(1, plan.slots // 8)]  # too few for background write-backs to begin
        runs = _Runs(store, plan.nbytes, options.seconds, stop)

        def put(key: str) -> None:
            store.put(key, value)

        def lease(key: str) -> None:
            with store.lease(key):
                pass

        for key in [*few, *few]:  # twice, because a replaced tensor has a second slot whose pages are new
            put(key)
        for name, operation in (("put", put), ("get", store.get)):
            now(f"{name}, in memory")
            yield runs.line(name, "in memory", itertools.cycle(few), operation)
        for name, operation in (("lease", lease), ("prefetch", lambda key: store.prefetch([key]))):
            now(f"{name}, in memory")
            yield runs.line(name, "in memory", itertools.cycle(few), operation, moves=False)
        now("put, memory full")
        for key in keys:  # until memory is full of tensors that have to be written back
            stop.check()
            put(key)
        walk = itertools.cycle(keys)  # one walk for all operations: the next tensor is always the one that was used longest ago
        yield runs.line("put", "memory full", walk, put)
        now("writing everything back")
        store.commit()  # clean tensors leave memory before dirty ones, and only tensors on disk are measured below
        for name, operation in (("get", store.get), ("lease", lease)):
            now(f"{name}, on disk")
            yield runs.line_of_misses(name, walk, operation, 4 * len(keys))
        now("prefetched")
        yield from runs.lines_ahead(walk, max(1, min(PREFETCHED, plan.slots - 2)))


class _Runs:
    """Repeats operations and times each."""

    def __init__(self, store: TieredStore, nbytes: int, seconds: float, stop: StopRequest) -> None:
        self._store, self._nbytes, self._seconds, self._stop = store, nbytes, seconds, stop

    def _enough(self, began: float, runs: int) -> bool:
        self._stop.check()
        return runs >= LEAST_RUNS and time.perf_counter() - began >= self._seconds

    def line(
        self, name: str, where: str, walk: Iterator[str], operation: Callable[[str], object], *, moves: bool = True
    ) -> Line:
        """Time ``operation`` on one key after the other."""
        latencies: list[float] = []
        misses, began = self._store.statistics().misses, time.perf_counter()
        for key in walk:
            before = time.perf_counter()
            operation(key)
            latencies.append(time.perf_counter() - before)
            if self._enough(began, len(latencies)):
                break
        seconds = time.perf_counter() - began
        return self._made(name, where, latencies, seconds, self._store.statistics().misses - misses, moves=moves)

    def line_of_misses(self, name: str, walk: Iterator[str], operation: Callable[[str], object], most: int) -> Line:
        """Time ``operation`` in the same way, and count only the calls that found their tensor on disk, of at most ``most``."""
        latencies: list[float] = []
        began = time.perf_counter()
        for runs, key in enumerate(walk, 1):
            misses, before = self._store.statistics().misses, time.perf_counter()
            operation(key)
            taken = time.perf_counter() - before
            if self._store.statistics().misses > misses:
                latencies.append(taken)
            if self._enough(began, len(latencies) if runs < most else runs):
                break
        return self._made(name, "on disk", latencies, sum(latencies), len(latencies))

    def lines_ahead(self, walk: Iterator[str], ahead: int) -> Iterator[Line]:
        """Time leases along the walk while the next ``ahead`` tensors are prefetched, and the calls of ``prefetch``.

        The ``seconds`` of the leases are those of the whole walk, because bytes also arrive during the calls of ``prefetch``.
        """
        asking: list[float] = []
        leasing: list[float] = []
        misses, began = self._store.statistics().misses, time.perf_counter()
        following = list(itertools.islice(walk, ahead))
        for key in walk:
            current, following = following[0], [*following[1:], key]
            before = time.perf_counter()
            self._store.prefetch(following)
            between = time.perf_counter()
            with self._store.lease(current):
                leasing.append(time.perf_counter() - between)
            asking.append(between - before)
            if self._enough(began, len(leasing)):
                break
        seconds = time.perf_counter() - began
        misses = self._store.statistics().misses - misses
        yield self._made(f"prefetch {ahead}", "on disk", asking, sum(asking), 0, moves=False)
        yield self._made("lease", "fetched ahead", leasing, seconds, misses)

    def _made(
        self, name: str, where: str, latencies: list[float], seconds: float, misses: int, *, moves: bool = True
    ) -> Line:
        return Line(self._nbytes, name, where, tuple(sorted(latencies)), seconds, misses, moves)


def _describe(report: dict[str, Any], lines: Sequence[Line]) -> str:
    head = ["size", "operation", "tensor", "runs", "per s", "rate", "p50", "p90", "p99", "max"]
    told = [
        told_environment(report),
        told_io(report),
        f"one caller, {report['seconds_per_line']:g} s a line, checksums on; {told_noise(report['noise'])}",
        "",
    ]
    if lines:
        told.append(table([head, *(line.row() for line in lines)], "lllr"))
    told += [f"{exact_size(found['size_bytes'])}: skipped, {found['why']}" for found in report["skipped"]]
    return "\n".join(told)
