"""``tiered bench io``: the rates of a store with large tensors, in rounds interleaved with fio, and the time of a lease while
another thread writes as fast as the store allows."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any, Literal

from tiered import TieredStore
from tiered.cli.bench.plot import plot_rounds
from tiered.cli.bench.reports import Measuring, reported
from tiered.cli.bench.series import Run, Series, Setup, StoreWorkload, in_rounds, ratios, refuse_full_disk, series_as_json
from tiered.cli.info.machine import store_facts
from tiered.cli.output import (
    counted,
    duration,
    rate_unit,
    table,
    told_environment,
    told_io,
    told_noise,
)
from tiered.cli.stop import StopRequest
from tiered.measuring import fio
from tiered.measuring.meters import DATA_FILE, Spread, Usage, quantiles, scratch_folder, scratch_store
from tiered.types import exact_size, format_size

__all__ = ["MODES", "Beside", "Flood", "IoOptions", "bench"]

RUNNING = 2
"""The other thread writes this many times the pool before any read counts; by then reads wait for its write-backs."""


@dataclass
class Flood:
    """Measures leases of tensors on disk, ``alone`` and ``flooded`` by the writes of another thread, in seconds each."""

    store: TieredStore
    setup: Setup
    stop: StopRequest
    alone: array[float] = field(default_factory=lambda: array("d"))
    flooded: array[float] = field(default_factory=lambda: array("d"))
    written: list[float] = field(default_factory=list)
    """Bytes per second that went to the disk during each round's flood."""

    def round(self) -> None:
        """Lease every tensor once, one after the other, without prefetching; then do the same in the flood."""
        self.store.commit()  # writes back all dirty tensors, so that the reads are alone
        self.alone.extend(self._leases())
        with self._flood():
            began, before = time.perf_counter(), self._written()
            self.flooded.extend(self._leases())
            self.written.append((self._written() - before) / (time.perf_counter() - began))

    def _leases(self) -> Iterator[float]:
        for index in range(self.setup.tensors):
            self.stop.check()
            began = time.perf_counter()
            with self.store.lease(f"r/{index}"):
                pass
            yield time.perf_counter() - began

    def _written(self) -> int:
        return self.store.statistics().links[-1].down.bytes

    @contextmanager
    def _flood(self) -> Iterator[None]:
        """Run a thread that replaces tensors until this context ends, and raise its error, if any."""
        over, begun = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def write() -> None:
            walk = StoreWorkload(self.store, self.setup, StopRequest())
            count = 0
            try:
                while not over.is_set():
                    walk.replace(f"w/{count % self.setup.tensors}")
                    count += 1
                    if count * self.setup.tensor >= RUNNING * self.setup.pool:
                        begun.set()
            except BaseException as error:
                errors.append(error)
            finally:
                begun.set()

        thread = threading.Thread(target=write, name="tiered-flood")
        thread.start()
        try:
            begun.wait()
            self.stop.check()
            yield
        finally:
            over.set()
            thread.join()
        if errors:
            raise errors[0]

    @property
    def ratios(self) -> dict[str, float]:
        """The ratio of each percentile, in the flood by alone."""
        alone, flooded = quantiles(self.alone), quantiles(self.flooded)
        return {name: flooded[name] / max(alone[name], 1e-9) for name in alone}

    def as_json(self) -> dict[str, Any]:
        """Return the percentiles, their ratios and the rate of writing."""
        return {
            "alone_seconds": quantiles(self.alone),
            "flooded_seconds": quantiles(self.flooded),
            "ratios": self.ratios,
            "leases": len(self.flooded),
            "written_bytes_per_second": Spread.of(self.written).as_json(),
        }

    def described(self) -> str:
        """Format the percentiles as a table."""
        alone, flooded = quantiles(self.alone), quantiles(self.flooded)
        rows = [["one lease", *alone]]
        rows += [[name, *map(duration, found.values())] for name, found in (("alone", alone), ("in the flood", flooded))]
        rows.append(["ratio", *(f"{ratio:.2f}" for ratio in self.ratios.values())])
        unit, factor = rate_unit(*self.written)
        told = (
            f"flood: {counted(len(self.flooded), 'lease')} each way, without prefetching; another thread meanwhile wrote "
            f"{Spread.of(self.written).shown(factor)} {unit}"
        )
        return f"{told}\n{table(rows)}"


MODES = ("read", "write", "mixed", "flood")
Beside = Literal["fio", "nothing"]
DEPENDS = {"read": "lease", "write": "room for one", "mixed": "lease"}
"""What a latency of each mode is the time of."""


@dataclass(frozen=True)
class IoOptions:
    """Options of ``tiered bench io``. ``folder``: where the scratch store is made; ``modes``: some of MODES; ``beside``: what
    else is measured in the same rounds."""

    folder: str
    modes: Sequence[str]
    rounds: int
    beside: Beside
    plot: str | None = None


def bench(options: IoOptions, setup: Setup, json: str | None) -> int:
    """Measure and print; returns the exit code."""
    return reported(partial(_measure, options, setup), json, options.plot, plot_rounds)


def _measure(options: IoOptions, setup: Setup, under: Measuring) -> Callable[[], str]:
    report, stack, stop, progress = under.report, under.stack, under.stop, under.progress
    report |= {"rounds": options.rounds, **setup.as_json()}
    if options.beside == "fio":
        report["fio"] = {"version": fio.version(), "block_bytes": fio.BLOCK, "depth": fio.DEPTH}
    report |= store_facts(options.folder, setup.backend)
    refuse_full_disk(options.folder, setup.disk_bytes + (setup.moved if options.beside == "fio" else 0))
    progress.working("writing the tensors to read", 0.0)
    store = stack.enter_context(scratch_store(options.folder, dram=setup.pool, backend=setup.backend))
    walk = StoreWorkload(store, setup, stop)
    walk.prepare()
    ours: dict[fio.Mode, Run] = {"read": walk.read, "write": walk.write, "mixed": walk.mixed}
    runs = {mode: {"tiered": run} for mode, run in ours.items() if mode in options.modes}
    if options.beside == "fio" and runs:
        report["fio"] |= _add_fio(options.folder, setup, runs, stack, _descriptor(store.folder))
    measured = in_rounds(runs, options.rounds, stop, progress) if runs else {}
    report["modes"] = {mode: series_as_json(series) for mode, series in measured.items()}
    told = ""
    if "flood" in options.modes:
        flood = Flood(store, setup, stop)
        for turn in range(options.rounds):
            progress.working(f"flood: round {turn + 1} of {options.rounds}", turn / options.rounds)
            flood.round()
        progress.working("done", 1.0)
        report["flood"], told = flood.as_json(), f"\n\n{flood.described()}"
    return lambda: _describe(report, setup, measured) + told


def _descriptor(folder: str) -> tuple[str, str] | None:
    """Find the folder and name under which another process opens the unlinked data file of the scratch store in ``folder``.

    None where there is no /proc."""
    open_files = "/proc/self/fd"
    for number in os.listdir(open_files) if os.path.isdir(open_files) else ():
        try:
            found = os.readlink(f"{open_files}/{number}")
        except OSError:  # the descriptor of listdir itself
            continue
        if found.removesuffix(" (deleted)") == os.path.join(os.path.realpath(folder), DATA_FILE):
            return f"/proc/{os.getpid()}/fd", number
    return None


class _Beside:
    """Runs fio in the store's own ``data`` file, because one part of a drive may be faster than another.

    fio reads the first bytes of the file. It writes in turn to the two sets of extents behind them, as the store does, which
    never overwrites in place; the tensors there are never read (``StoreWorkload``). Without ``data``, fio has its own file in
    ``folder``.
    """

    def __init__(self, folder: str, data: tuple[str, str] | None, nbytes: int, buffers: fio.Buffers) -> None:
        end = os.stat(os.path.join(*data)).st_size if data is not None else 0
        if data is not None and end > 3 * nbytes:  # three sets of extents and a header
            at, name = data
            self.where = "the store's own data file"
            self.reader, *self.writers = (
                fio.Fio(at, nbytes, buffers, name, place) for place in (0, end - 2 * nbytes, end - nbytes)
            )
        else:
            self.where = "its own file"
            self.reader = fio.Fio(folder, nbytes, buffers)
            self.reader.prepare()
            self.writers = [self.reader]

    def of(self, job: fio.Job) -> Run:
        """Make the run of ``job``."""
        if job.mode == "read":
            return partial(self.reader.run, job)
        places = cycle(self.writers)
        return lambda: next(places).run(job)


def _add_fio(
    folder: str, setup: Setup, runs: Mapping[fio.Mode, dict[str, Run]], stack: ExitStack, data: tuple[str, str] | None
) -> dict[str, Any]:
    """Add a run of fio to each mode for each engine that works here; returns the facts about fio for the report."""
    buffers = stack.enter_context(fio.huge_buffers(fio.BLOCK * fio.DEPTH))
    beside = _Beside(stack.enter_context(scratch_folder(folder)), data, setup.moved, buffers)
    engines, unavailable = fio.working(lambda engine: beside.reader.run(fio.Job("read", engine)))
    for engine in engines:
        for mode, named in runs.items():
            job = fio.Job(mode, engine, order=setup.order)
            named[job.name] = beside.of(job)
    command = beside.writers[0].command(fio.Job("write", "libaio", order=setup.order))
    return {"buffers": buffers.words, "place": beside.where, "unavailable": unavailable, "command": " ".join(command)}


def _describe(report: Mapping[str, Any], setup: Setup, measured: Mapping[fio.Mode, Sequence[Series]]) -> str:
    unit, factor = rate_unit(*(value for series in measured.values() for one in series for value in one.rates))
    rows = [["", "", unit, "CPU s per GiB", "p50", "p99", "p99.9", "of one", "moved", "by the kernel", "tiered by this"]]
    for mode, series in measured.items():
        by = ratios(series)
        for one in series:
            row = [mode if one is series[0] else "", one.name]
            row += [Spread.of(one.rates).shown(factor), f"{Spread.of(one.cpu).median:.2f}"]
            times = one.latency()
            row += [duration(times[name]) if times else "" for name in ("p50", "p99", "p99.9")]
            row += [DEPENDS[mode] if times else "", *(_counted(one.usages) if one.usages else ["", ""])]
            rows.append([*row, by[one.name].shown() if one.name in by else ""])
    if len(rows) == len(measured) + 1:
        rows = [row[:-1] for row in rows]
    told = [
        told_environment(report),
        told_io(report),
        f"{counted(report['tensors'], 'tensor')} of {format_size(report['tensor_bytes'])} each way through "
        f"{format_size(report['pool_bytes'])} of memory, {report['ahead']} prefetched, {report['order']}, checksums on",
        *setup.notes(),
        f"{counted(report['rounds'], 'round')}, interleaved: median [least - most]; {told_noise(report['noise'])}",
    ]
    if "fio" in report and measured:
        told.append(
            f"{report['fio']['version']}: direct, {exact_size(report['fio']['block_bytes'])} blocks, depth "
            f"{report['fio']['depth']}, {report['fio']['buffers']}, in {report['fio']['place']}; its writes end with an "
            "fsync (end_fsync=1), as those of the store end with a commit"
        )
        told += [f"fio {engine} left out: {why}" for engine, why in report["fio"]["unavailable"].items()]
    if measured:
        told += ["", table(rows, "llr"), *_doubts(measured)]
    return "\n".join(told)


def _counted(usages: Sequence[Usage]) -> list[str]:
    """Format the bytes of a round, as the store and as the kernel count them."""
    ours = Spread.of([usage.bytes for usage in usages]).median
    kernel = [usage.kernel_bytes for usage in usages if usage.kernel_bytes is not None]
    return [format_size(ours), format_size(Spread.of(kernel).median) if kernel else "not counted"]


def _doubts(measured: Mapping[fio.Mode, Sequence[Series]]) -> list[str]:
    """Warn where the kernel counted fewer bytes than the store moved: then something other than a local drive answered."""
    for mode, series in measured.items():
        for usage in series[0].usages:
            if usage.kernel_bytes is not None and usage.kernel_bytes < 0.9 * usage.bytes:
                return [
                    f"{mode}: the kernel counted less than was moved: a cache or a network filesystem answered, not a drive"
                ]
    return []
