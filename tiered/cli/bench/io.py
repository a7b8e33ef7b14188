"""How long a read waits while another thread writes as fast as the store takes it, beside how long it takes alone.

``tiered bench io``: large tensors through the store, in rounds that are interleaved, with fio between them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any, Literal

from tiered import TieredError, TieredStore
from tiered.cli.bench import fio
from tiered.cli.bench.plot import plot_rounds
from tiered.cli.bench.series import Run, Series, Setup, Workload, in_rounds, ratios, refuse_full_disk, series_as_json
from tiered.cli.machine import store_facts
from tiered.cli.measure import DATA_FILE, Noise, Spread, Usage, environment, quantiles, scratch_folder, scratch_store
from tiered.cli.output import (
    Progress,
    duration,
    exact_size,
    refuse_unplottable,
    refuse_unwritable,
    table,
    told_environment,
    told_io,
    told_noise,
    write_report,
)
from tiered.cli.stop import Stopped, StopRequest
from tiered.types import format_size

__all__ = ["MODES", "Beside", "Flood", "Options", "bench"]

RUNNING = 2
"""Pools that the other thread has written before any read counts: by then its write-backs are what room has to wait for."""


@dataclass
class Flood:
    """Rounds of both. ``alone`` and ``flooded``: seconds of each lease of a tensor that was on disk."""

    store: TieredStore
    setup: Setup
    stop: StopRequest
    alone: array[float] = field(default_factory=lambda: array("d"))
    flooded: array[float] = field(default_factory=lambda: array("d"))
    written: list[float] = field(default_factory=list)
    """Bytes per second that went to the disk during each round's flood."""

    def round(self) -> None:
        """Lease every tensor once, one after the other, with nothing fetched ahead; then the same in the flood."""
        self.store.commit()  # what is dirty is on disk, so that reads are alone
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
        """Another thread replaces tensors until this context ends; its error, if any, is raised here."""
        over, begun = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def write() -> None:
            walk = Workload(self.store, self.setup, StopRequest())
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
        """Of the same percentile, in the flood by alone."""
        alone, flooded = quantiles(self.alone), quantiles(self.flooded)
        return {name: flooded[name] / max(alone[name], 1e-9) for name in alone}

    def as_json(self) -> dict[str, Any]:
        return {
            "alone_seconds": quantiles(self.alone),
            "flooded_seconds": quantiles(self.flooded),
            "ratios": self.ratios,
            "leases": len(self.flooded),
            "written_bytes_per_second": Spread.of(self.written).as_json(),
        }

    def described(self) -> str:
        """A table for people."""
        alone, flooded = quantiles(self.alone), quantiles(self.flooded)
        rows = [["one lease", *alone]]
        rows += [[name, *map(duration, found.values())] for name, found in (("alone", alone), ("in the flood", flooded))]
        rows.append(["ratio", *(f"{ratio:.2f}" for ratio in self.ratios.values())])
        told = (
            f"flood: {len(self.flooded)} leases each way, nothing fetched ahead; another thread meanwhile wrote "
            f"{Spread.of(self.written).shown(1e-9)} GB/s"
        )
        return f"{told}\n{table(rows)}"


MODES = ("read", "write", "mixed", "flood")
Beside = Literal["fio", "nothing"]
DEPENDS = {"read": "lease", "write": "room for one", "mixed": "lease"}
"""What a latency is the time of."""


@dataclass(frozen=True)
class Options:
    """``folder`` around the scratch store; ``modes`` are some of MODES; ``beside``: what is measured with it."""

    folder: str
    modes: Sequence[str]
    rounds: int
    beside: Beside
    plot: str | None = None


def bench(options: Options, setup: Setup, json: str | None) -> int:
    """Measure and print; returns the exit code."""
    refuse_unwritable(json)
    refuse_unplottable(options.plot)
    report: dict[str, Any] = environment() | {"rounds": options.rounds, **setup.as_json()}
    if options.beside == "fio":
        report["fio"] = {"version": fio.version(), "block_bytes": fio.BLOCK, "depth": fio.DEPTH}
    noise = Noise()
    flood = None
    try:
        with StopRequest() as stop, ExitStack() as stack:
            progress = stack.enter_context(Progress(sys.stderr))
            report |= store_facts(options.folder, setup.backend)
            refuse_full_disk(options.folder, setup.disk_bytes + (setup.moved if options.beside == "fio" else 0))
            progress.working("writing what will be read", 0.0)
            store = stack.enter_context(scratch_store(options.folder, dram=setup.pool, backend=setup.backend))
            walk = Workload(store, setup, stop)
            walk.prepare()
            ours: dict[fio.Mode, Run] = {"read": walk.read, "write": walk.write, "mixed": walk.mixed}
            runs = {mode: {"tiered": run} for mode, run in ours.items() if mode in options.modes}
            if options.beside == "fio" and runs:
                report["fio"] |= _add_fio(options.folder, setup, runs, stack, _descriptor(store.folder))
            measured = in_rounds(runs, options.rounds, stop, progress) if runs else {}
            if "flood" in options.modes:
                flood = Flood(store, setup, stop)
                for turn in range(options.rounds):
                    progress.working(f"round {turn + 1} of {options.rounds}: flood", turn / options.rounds)
                    flood.round()
                progress.working("done", 1.0)
    except Stopped as stopped:
        print("tiered: stopped; the scratch store is removed", file=sys.stderr)
        return stopped.exit_code
    report["noise"] = noise.seen()
    report["modes"] = {mode: series_as_json(series) for mode, series in measured.items()}
    if flood is not None:
        report["flood"] = flood.as_json()
    if json != "-":
        print(_describe(report, measured))
        if flood is not None:
            print(f"\n{flood.described()}")
    write_report(json, report)
    if options.plot is not None:
        plot_rounds(options.plot, report)
    return 0


def _descriptor(folder: str) -> tuple[str, str] | None:
    """Where another process finds the data file of the scratch store in ``folder``, which has no name any more: folder and
    name. None where there is no /proc."""
    open_files = "/proc/self/fd"
    for number in os.listdir(open_files) if os.path.isdir(open_files) else ():
        try:
            found = os.readlink(f"{open_files}/{number}")
        except OSError:  # that of listing them
            continue
        if found.removesuffix(" (deleted)") == os.path.join(os.path.realpath(folder), DATA_FILE):
            return f"/proc/{os.getpid()}/fd", number
    return None


class _Beside:
    """fio, where the store reads and writes: its own ``data`` file, for one part of a drive may be quicker than another.

    What is read are its first bytes; what is written takes turns between the two sets of extents behind them, as a store that
    overwrites nothing does. Nobody reads the tensors there (``Workload``). Without ``data``, a file of its own in ``folder``.
    """

    def __init__(self, folder: str, data: tuple[str, str] | None, nbytes: int, buffers: fio.Buffers) -> None:
        end = os.stat(os.path.join(*data)).st_size if data is not None else 0
        if data is not None and end > 3 * nbytes:  # and a header
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
        if job.mode == "read":
            return partial(self.reader.run, job)
        places = cycle(self.writers)
        return lambda: next(places).run(job)


def _add_fio(
    folder: str, setup: Setup, runs: Mapping[fio.Mode, dict[str, Run]], stack: ExitStack, data: tuple[str, str] | None
) -> dict[str, Any]:
    """A run of every mode for every engine that works here; what there is to know about them."""
    buffers = stack.enter_context(fio.huge_buffers(fio.BLOCK * fio.DEPTH))
    beside = _Beside(stack.enter_context(scratch_folder(folder)), data, setup.moved, buffers)
    unavailable = {}
    for engine in fio.ENGINES:
        try:
            beside.reader.run(fio.Job("read", engine))
        except TieredError as error:
            unavailable[engine] = str(error)
            continue
        for mode, named in runs.items():
            job = fio.Job(mode, engine, order=setup.order)
            named[job.name] = beside.of(job)
    command = beside.writers[0].command(fio.Job("write", "libaio", order=setup.order))
    return {"buffers": buffers.words, "place": beside.where, "unavailable": unavailable, "command": " ".join(command)}


def _describe(report: Mapping[str, Any], measured: Mapping[fio.Mode, Sequence[Series]]) -> str:
    rows = [["", "", "GB/s", "CPU s per GiB", "p50", "p99", "p99.9", "of one", "moved", "by the kernel", "tiered by this"]]
    for mode, series in measured.items():
        by = ratios(series)
        for one in series:
            row = [mode if one is series[0] else "", one.name]
            row += [Spread.of(one.rates).shown(1e-9), f"{Spread.of(one.cpu).median:.2f}"]
            times = one.latency()
            row += [duration(times[name]) if times else "" for name in ("p50", "p99", "p99.9")]
            row += [DEPENDS[mode] if times else "", *(_counted(one.usages) if one.usages else ["", ""])]
            rows.append([*row, by[one.name].shown() if one.name in by else ""])
    if len(rows) == len(measured) + 1:
        rows = [row[:-1] for row in rows]
    told = [
        told_environment(report),
        told_io(report),
        f"{report['tensors']} tensors of {format_size(report['tensor_bytes'])} each way through "
        f"{format_size(report['pool_bytes'])} of memory, {report['ahead']} fetched ahead, {report['order']}, checksums on",
        f"{report['rounds']} rounds, interleaved: median [least - most]; {told_noise(report['noise'])}",
    ]
    if "fio" in report and measured:
        told.append(
            f"{report['fio']['version']}: direct, {exact_size(report['fio']['block_bytes'])} blocks, depth "
            f"{report['fio']['depth']}, {report['fio']['buffers']}, in {report['fio']['place']}; what it writes ends with an "
            "fsync (end_fsync=1), as ours with a commit"
        )
        told += [f"fio {engine} left out: {why}" for engine, why in report["fio"]["unavailable"].items()]
    if measured:
        told += ["", table(rows, "llr"), *_doubts(measured)]
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
