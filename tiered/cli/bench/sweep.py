"""``tiered bench io --sweep``: read and write blocks of a plain file through the I/O backends, without a store, for every
combination of block, depth and backend, with fio in the same rounds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from tiered import MisuseError, TieredError
from tiered.cli.bench.io import Beside
from tiered.cli.bench.plot import plot_sweep
from tiered.cli.bench.reports import Measuring, reported
from tiered.cli.bench.series import Run, Series, in_rounds, ratios, refuse_full_disk, series_as_json
from tiered.cli.info.machine import IN_MEMORY, filesystem
from tiered.cli.output import (
    counted,
    duration,
    rate,
    rate_unit,
    table,
    told_environment,
    told_io,
    told_noise,
)
from tiered.io.backends import open_backend, unavailable
from tiered.measuring import fio
from tiered.measuring.drive import Cache, Checksums, Drive, Order, Point
from tiered.measuring.meters import Spread, scratch_folder
from tiered.types import BackendName, exact_size, format_size

__all__ = ["SweepOptions", "sweep"]

NAME = "tiered-sweep"


@dataclass(frozen=True)
class SweepOptions:
    """Options of ``--sweep``, all combinations of which are measured. ``size``: bytes of the file; ``seconds``: longest time of
    a pass."""

    folder: str
    size: int
    modes: Sequence[fio.Mode]
    orders: Sequence[Order]
    blocks: Sequence[int]
    depths: Sequence[int]
    backends: Sequence[BackendName]
    checksums: Sequence[Checksums]
    cache: Cache
    seconds: float
    rounds: int
    beside: Beside
    plot: str | None = None

    @property
    def memory(self) -> int:
        """Bytes of I/O buffers that the largest combination of block and depth needs."""
        return max(self.blocks) * max(self.depths)

    def points(self) -> list[Point]:
        """Combine the options."""
        combined = itertools.product(self.modes, self.orders, self.blocks, self.depths, self.checksums)
        return [Point(*each) for each in combined]


def sweep(options: SweepOptions, json: str | None) -> int:
    """Measure and print; returns the exit code."""
    return reported(partial(_measure, options), json, options.plot, plot_sweep)


def _measure(options: SweepOptions, under: Measuring) -> Callable[[], str]:
    report, stack = under.report, under.stack
    report |= {"rounds": options.rounds, "size_bytes": options.size, "seconds": options.seconds}
    if options.beside == "fio":
        report["fio"] = {"version": fio.version()}
    working, report["unavailable"] = _working(options)
    disk = filesystem(options.folder)
    refuse_full_disk(options.folder, options.size)
    folder = stack.enter_context(scratch_folder(options.folder))
    drive = Drive(os.path.join(folder, NAME), options.size, options.memory, options.cache, under.stop.check)
    stack.enter_context(closing(drive))
    for point in options.points():
        drive.refuse(point)
    report |= {"filesystem": disk["type"], "in_memory": disk["type"] in IN_MEMORY, "direct": drive.direct}
    report |= {"cache": options.cache}
    under.progress.working("writing the file", 0.0)
    drive.prepare()
    runs: dict[Point, dict[str, Run]] = {}
    for point in options.points():
        runs[point] = {name: partial(drive.run, point, name, options.seconds) for name in working}
    if options.beside == "fio":
        report["fio"] |= _add_fio(options, folder, runs, stack)
    else:
        os.unlink(drive.path)  # the system takes the space back even if this process is killed
    measured = in_rounds(runs, options.rounds, under.stop, under.progress)
    report["points"] = [_point_as_json(point, series) for point, series in measured.items()]
    return lambda: _describe(report, options, measured)


def _working(options: SweepOptions) -> tuple[list[BackendName], dict[str, str]]:
    """Return the backends that work here, and the reasons why others do not. Raises MisuseError where none works."""
    known, working = unavailable(), []
    left_out: dict[str, str] = {}
    for name in options.backends:
        why = known.get(name)
        try:
            if why is None:
                open_backend(name, max(options.depths)).close()
        except (TieredError, OSError) as error:
            why = str(error)
        if why is None:
            working.append(name)
        else:
            left_out[name] = why
    if not working:
        raise MisuseError(f"none of these backends works here: {'; '.join(left_out.values())}")
    return working, left_out


def _add_fio(options: SweepOptions, folder: str, runs: Mapping[Point, dict[str, Run]], stack: ExitStack) -> dict[str, Any]:
    """Add a run of fio to each point without checksums, because fio computes other ones; returns the facts about fio."""
    buffers = stack.enter_context(fio.huge_buffers(options.memory))
    bench = fio.Fio(folder, options.size, buffers, NAME)
    engines, unavailable = fio.working(lambda engine: bench.run(fio.Job("read", engine, cache=options.cache, seconds=0.1)))
    for engine in engines:
        for point, named in runs.items():
            if point.checksums == "off":
                job = fio.Job(point.mode, engine, point.block, point.depth, point.order, options.cache, options.seconds)
                named[job.name] = partial(bench.run, job)
    return {"buffers": buffers.words, "unavailable": unavailable}


def _point_as_json(point: Point, series: Sequence[Series]) -> dict[str, Any]:
    found = series_as_json(series)
    return {**point.as_json(), "ratios": found.pop("ratios"), "by": found}


def _describe(report: Mapping[str, Any], options: SweepOptions, measured: Mapping[Point, Sequence[Series]]) -> str:
    checked = len(options.checksums) > 1 or options.checksums[0] == "on"
    first = next(iter(measured.values()))[0].name
    unit, factor = rate_unit(*(value for series in measured.values() for one in series for value in one.rates))
    head = ["", "", "block", "depth", "by", unit, "CPU s per GiB", "p50", "p99", "p99.9", f"{first} by this"]
    rows = [[*head[:4], "checksums", *head[4:]] if checked else list(head)]
    for point, series in measured.items():
        by = ratios(series)
        for one in series:
            row = [point.mode, point.order, exact_size(point.block), str(point.depth)]
            row += [point.checksums] if checked else []
            row += [one.name, Spread.of(one.rates).shown(factor), f"{Spread.of(one.cpu).median:.2f}"]
            times = one.latency()
            row += [duration(times[name]) if times else "" for name in ("p50", "p99", "p99.9")]
            rows.append([*row, by[one.name].shown() if one.name in by else ""])
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    told = [
        told_environment(report),
        told_io({**report, "backend": "blocks of a plain file, no store"}),
        f"{counted(report['rounds'], 'round')}, interleaved: median [least - most], each pass at most {report['seconds']} s of "
        f"a file of {format_size(report['size_bytes'])}; {told_noise(report['noise'])}",
        "latencies: of a block, from its submission to its completion; writes end with an fsync, which counts in the rate",
    ]
    if options.cache == "buffered":
        told[1] = f"blocks of a plain file, no store, on {report['filesystem']}: BUFFERED, through the page cache, as asked"
    if checked:
        told.append("checksums: of each block, before its write or after its read, in the thread that submits")
    uneven = [block for block in options.blocks if options.size % block]
    if uneven:
        their = ", ".join(map(exact_size, uneven))
        told.append(f"not --size {exact_size(options.size)} for blocks of {their}: the file has no whole number of them")
    told += [f"{name} left out: {why}" for name, why in report["unavailable"].items()]
    if "fio" in report:
        told.append(f"{report['fio']['version']}: same file, blocks and depths, {report['fio']['buffers']}; end_fsync=1")
        told += [f"fio {engine} left out: {why}" for engine, why in report["fio"]["unavailable"].items()]
    return "\n".join([*told, "", table(rows, "llr"), "", *_best(measured)])


def _best(measured: Mapping[Point, Sequence[Series]]) -> list[str]:
    """Name the fastest combination of each mode and order."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for point, series in measured.items():
        for one in series:
            found = (Spread.of(one.rates).median, f"{exact_size(point.block)} x {point.depth}, {one.name}")
            best[point.mode, point.order] = max(best.get((point.mode, point.order), found), found)
    return [f"best of {mode}, {order}: {rate(found)} ({how})" for (mode, order), (found, how) in best.items()]
