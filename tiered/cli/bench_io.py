"""``tiered bench io``: large tensors through the store, in rounds that are interleaved, with fio between them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Literal

from tiered import TieredError
from tiered.cli import fio
from tiered.cli.flood import Flood
from tiered.cli.machine import store_facts
from tiered.cli.measure import DATA_FILE, Noise, Spread, Usage, environment, scratch_folder, scratch_store
from tiered.cli.plot import plot_rounds, refuse_unplottable
from tiered.cli.progress import Progress
from tiered.cli.report import refuse_unwritable, write_report
from tiered.cli.series import Run, Series, in_rounds, ratios, series_as_json
from tiered.cli.stop import Stopped, StopRequest
from tiered.cli.table import duration, exact_size, table, told_environment, told_io, told_noise
from tiered.cli.walk import Setup, Walk, refuse_full_disk
from tiered.sizes import format_size

__all__ = ["MODES", "Beside", "Options", "bench"]

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
            walk = Walk(store, setup, stop)
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
    overwrites nothing does. Nobody reads the tensors there (``Walk``). Without ``data``, a file of its own in ``folder``.
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
