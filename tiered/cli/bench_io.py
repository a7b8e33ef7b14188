"""``tiered bench io``: large tensors through the store, in rounds that are interleaved, with fio between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from tiered import CapacityError, MisuseError, TieredError, TieredStore
from tiered.cli import fio
from tiered.cli.machine import store_facts
from tiered.cli.measure import GIB, Meter, Noise, Spread, Usage, bytes_of, environment, free_on, scratch_folder, scratch_store
from tiered.cli.progress import Progress
from tiered.cli.report import refuse_unwritable, write_report
from tiered.cli.stop import Stopped, StopRequest
from tiered.cli.table import exact_size, table, told_environment, told_io, told_noise
from tiered.config import SMALLEST_DRAM
from tiered.sizes import format_size
from tiered.types import BackendName, TensorSpec

__all__ = ["Options", "Setup", "Walk", "bench"]

MODES: tuple[fio.Mode, ...] = ("read", "write", "mixed")
TENSOR = 16 << 20
"""Bytes of a tensor; smaller only where --size is small."""
AHEAD = 4
"""Tensors that are asked for while one is leased."""
SMALLEST = 4 * SMALLEST_DRAM
WARM_UP = 2
"""Passes before any counts: what is written takes turns between two sets of extents, and fresh ones are slower."""


@dataclass(frozen=True)
class Options:
    """``folder`` around the scratch store; ``size`` bytes each way in each round; ``beside``: what is measured with it."""

    folder: str
    size: int
    dram: int
    backend: BackendName
    rounds: int
    beside: Literal["fio", "nothing"]


@dataclass(frozen=True)
class Setup:
    """One configuration that is measured. ``pool``: bytes of the store's memory; ``tensors`` of ``tensor`` bytes each way."""

    pool: int
    tensor: int
    tensors: int
    backend: BackendName = "auto"
    ahead: int = AHEAD

    @classmethod
    def of(cls, options: Options) -> Setup:
        """At least eight tensors in the pool, and four times as many in all. Raises MisuseError."""
        for name, given, least in (("size", options.size, SMALLEST), ("dram", options.dram, SMALLEST_DRAM)):
            if given < least:
                raise MisuseError(f"--{name} {exact_size(given)} is too small to measure: the least is {exact_size(least)}")
        pool = min(options.dram, options.size // 4)
        tensor = min(TENSOR, pool // 8 // 4096 * 4096)
        return cls(pool, tensor, options.size // tensor, options.backend)

    @property
    def moved(self) -> int:
        """Bytes each way in each round."""
        return self.tensor * self.tensors

    @property
    def disk_bytes(self) -> int:
        """What is read, and two sets of what is written."""
        return 3 * self.moved + (128 << 20)

    def as_json(self) -> dict[str, Any]:
        return {"pool_bytes": self.pool, "tensor_bytes": self.tensor, "tensors": self.tensors, "ahead": self.ahead}


@dataclass(frozen=True)
class Pass:
    """``asked``: bytes that were to be moved. Only these count, and only if they were: neither what was read twice (because it
    was evicted again before it was used) nor what was found in memory makes a rate better."""

    usage: Usage
    asked: int

    @property
    def useful(self) -> int:
        return min(self.asked, self.usage.bytes)

    @property
    def rate(self) -> float:
        return self.useful / max(self.usage.seconds, 1e-9)

    @property
    def cpu_seconds_per_gib(self) -> float:
        return self.usage.cpu_seconds / max(self.useful / GIB, 1e-9)


@dataclass
class Series:
    """Results of one thing that is measured, one per round."""

    name: str
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)

    def add(self, result: Pass | fio.Result) -> None:
        self.rates.append(result.rate)
        self.cpu.append(result.cpu_seconds_per_gib)
        if isinstance(result, Pass):
            self.usages.append(result.usage)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "bytes_per_second": {**Spread.of(self.rates).as_json(), "all": self.rates},
            "cpu_seconds_per_gib": Spread.of(self.cpu).as_json(),
        }
        if self.usages:
            found["bytes"] = [usage.bytes for usage in self.usages]
            found["kernel_bytes"] = [usage.kernel_bytes for usage in self.usages]
        return found


class Walk:
    """Passes over a store's tensors: those of ``r/`` are only read, those of ``w/`` only written."""

    def __init__(self, store: TieredStore, setup: Setup, stop: StopRequest) -> None:
        self._store, self._setup, self._stop = store, setup, stop
        self._meter = Meter(store)
        self._reads = [f"r/{index}" for index in range(setup.tensors)]
        self._writes = [f"w/{index}" for index in range(setup.tensors)]
        self._spec = TensorSpec("uint8", (setup.tensor,), 1)

    def prepare(self) -> None:
        """Put what will be read, and write until extents are written over."""
        value = bytes_of(self._setup.tensor)
        for key in self._reads:
            self._stop.check()
            self._store.put(key, value)
        for _ in range(WARM_UP):
            self.write()

    def read(self) -> Pass:
        """Lease one tensor after the other while the next ones are on their way."""
        self._meter.lap()
        for index in range(len(self._reads)):
            self._read(index)
        return Pass(self._meter.lap(), self._setup.moved)

    def write(self) -> Pass:
        """Replace all tensors, and commit: the time until everything is on disk."""
        self._meter.lap()
        for key in self._writes:
            self._write(key)
        self._store.commit()
        return Pass(self._meter.lap(), self._setup.moved)

    def mixed(self) -> Pass:
        """Read one, write one, and commit."""
        self._meter.lap()
        for index, key in enumerate(self._writes):
            self._write(key)
            self._read(index)
        self._store.commit()
        return Pass(self._meter.lap(), 2 * self._setup.moved)

    def _read(self, index: int) -> None:
        self._stop.check()
        self._store.prefetch(self._reads[index + 1 : index + 1 + self._setup.ahead])
        with self._store.lease(self._reads[index]):
            pass

    def _write(self, key: str) -> None:
        """New contents as a WRITE lease leaves them, made in place: what is measured is their way to the disk."""
        self._stop.check()
        self._store.create(key, self._spec)
        with self._store.lease(key, access="write") as tensor:
            tensor[::4096].add_(1)


def bench(options: Options, json: str | None) -> int:
    """Measure and print; returns the exit code."""
    refuse_unwritable(json)
    setup = Setup.of(options)
    report: dict[str, Any] = environment() | {"rounds": options.rounds, **setup.as_json()}
    if options.beside == "fio":
        report["fio"] = {"version": fio.version(), "block_bytes": fio.BLOCK, "depth": fio.DEPTH}
    noise = Noise()
    try:
        with StopRequest() as stop, ExitStack() as stack:
            progress = stack.enter_context(Progress(sys.stderr))
            report |= store_facts(options.folder, options.backend)
            _refuse_full_disk(options, setup)
            progress.working("writing what will be read", 0.0)
            store = stack.enter_context(scratch_store(options.folder, dram=setup.pool, backend=options.backend))
            walk = Walk(store, setup, stop)
            walk.prepare()
            runs: dict[fio.Mode, dict[str, Callable[[], Pass | fio.Result]]]
            runs = {"read": {"tiered": walk.read}, "write": {"tiered": walk.write}, "mixed": {"tiered": walk.mixed}}
            if options.beside == "fio":
                report["fio"] |= _add_fio(options, setup, runs, stack)
            measured = _rounds(runs, options.rounds, stop, progress)
    except Stopped as stopped:
        print("tiered: stopped; the scratch store is removed", file=sys.stderr)
        return stopped.exit_code
    report["noise"] = noise.seen()
    report["modes"] = {mode: _mode_as_json(series) for mode, series in measured.items()}
    if json != "-":
        print(_describe(report, measured))
    write_report(json, report)
    return 0


def _refuse_full_disk(options: Options, setup: Setup) -> None:
    needed = setup.disk_bytes + (setup.moved if options.beside == "fio" else 0)
    free = free_on(options.folder)
    if needed > free:
        raise CapacityError(
            f"this needs {format_size(needed)} of disk, {options.folder} has {format_size(free)} free: lower --size, "
            "or name a folder on another device with --dir"
        )


def _add_fio(
    options: Options, setup: Setup, runs: Mapping[fio.Mode, dict[str, Callable[[], Pass | fio.Result]]], stack: ExitStack
) -> dict[str, Any]:
    """A run of every mode for every engine that works here; what there is to know about them."""
    buffers = stack.enter_context(fio.huge_buffers(fio.BLOCK * fio.DEPTH))
    bench = fio.Fio(stack.enter_context(scratch_folder(options.folder)), setup.moved, buffers)
    bench.prepare()
    unavailable = {}
    for engine in fio.ENGINES:
        try:
            bench.run(fio.Job("read", engine))
        except TieredError as error:
            unavailable[engine] = str(error)
            continue
        for mode, named in runs.items():
            job = fio.Job(mode, engine)
            named[job.name] = partial(bench.run, job)
    return {"buffers": buffers.words, "unavailable": unavailable, "command": " ".join(bench.command(fio.Job("read", "libaio")))}


def _rounds(
    runs: Mapping[fio.Mode, Mapping[str, Callable[[], Pass | fio.Result]]],
    rounds: int,
    stop: StopRequest,
    progress: Progress,
) -> dict[fio.Mode, list[Series]]:
    """Everything once in each round, so that what changes with time meets all alike."""
    measured = {mode: {name: Series(name) for name in named} for mode, named in runs.items()}
    total, done = rounds * sum(map(len, runs.values())), 0
    for turn in range(rounds):
        for mode, named in runs.items():
            for name, run in named.items():
                stop.check()
                progress.working(f"round {turn + 1} of {rounds}: {mode}, {name}", done / total)
                measured[mode][name].add(run())
                done += 1
    progress.working("done", 1.0)
    return {mode: list(series.values()) for mode, series in measured.items()}


def _ratios(series: Sequence[Series]) -> dict[str, Spread]:
    """Ours by each of the others, of the pairs in each round."""
    ours, *others = series
    return {other.name: Spread.of([a / b for a, b in zip(ours.rates, other.rates, strict=True)]) for other in others}


def _mode_as_json(series: Sequence[Series]) -> dict[str, Any]:
    return {
        **{one.name: one.as_json() for one in series},
        "ratios": {name: spread.as_json() for name, spread in _ratios(series).items()},
    }


def _describe(report: Mapping[str, Any], measured: Mapping[fio.Mode, Sequence[Series]]) -> str:
    rows = [["", "", "GB/s", "CPU s per GiB", "moved", "by the kernel", "tiered by this"]]
    for mode, series in measured.items():
        ratios = _ratios(series)
        for one in series:
            row = [mode if one is series[0] else "", one.name]
            row += [Spread.of(one.rates).shown(1e-9), f"{Spread.of(one.cpu).median:.2f}"]
            row += _counted(one.usages) if one.usages else ["", ""]
            rows.append([*row, ratios[one.name].shown() if one.name in ratios else ""])
    if len(rows) == len(measured) + 1:
        rows = [row[:-1] for row in rows]
    told = [
        told_environment(report),
        told_io(report),
        f"{report['tensors']} tensors of {format_size(report['tensor_bytes'])} each way through "
        f"{format_size(report['pool_bytes'])} of memory, {report['ahead']} fetched ahead, checksums on",
        f"{report['rounds']} rounds, interleaved: median [least - most]; {told_noise(report['noise'])}",
    ]
    if "fio" in report:
        told.append(
            f"{report['fio']['version']}: direct, {exact_size(report['fio']['block_bytes'])} blocks, depth "
            f"{report['fio']['depth']}, {report['fio']['buffers']}"
        )
        told += [f"fio {engine} left out: {why}" for engine, why in report["fio"]["unavailable"].items()]
    told += ["", table(rows, left=2), *_doubts(measured)]
    return "\n".join(told)


def _counted(usages: Sequence[Usage]) -> list[str]:
    """Bytes of a round, as the store and as the kernel count them."""
    ours = Spread.of([usage.bytes for usage in usages]).median
    kernel = [usage.kernel_bytes for usage in usages if usage.kernel_bytes is not None]
    return [format_size(ours), format_size(Spread.of(kernel).median) if kernel else "does not tell"]


def _doubts(measured: Mapping[fio.Mode, Sequence[Series]]) -> list[str]:
    """Where the kernel saw less than we moved, something other than a local drive answered."""
    for mode, series in measured.items():
        for usage in series[0].usages:
            if usage.kernel_bytes is not None and usage.kernel_bytes < 0.9 * usage.bytes:
                return [
                    f"of {mode} the kernel counted less than was moved: a cache or a network filesystem answered, not a drive"
                ]
    return []

