"""``tiered bench io --duration``: write for minutes and show how the rate changes as caches fill and the drive grows hot."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiered import TieredStore
from tiered.cli.bench.plot import plot_sustained
from tiered.cli.bench.reports import Measuring, reported
from tiered.cli.bench.series import Setup, StoreWorkload, refuse_full_disk
from tiered.cli.info.machine import store_facts
from tiered.cli.output import (
    Progress,
    counted,
    duration,
    rate,
    rate_unit,
    table,
    told_environment,
    told_io,
    told_noise,
)
from tiered.measuring.meters import scratch_store
from tiered.types import format_size

__all__ = ["DriveWindow", "sustained"]

WINDOWS = 120
"""Most windows; none is shorter than SHORTEST seconds, because single transfers would look like changes of the rate."""
SHORTEST = 1.0


@dataclass(frozen=True)
class DriveWindow:
    """The ``bytes`` written to the disk between two moments, which are seconds since the beginning."""

    began: float
    ended: float
    bytes: int

    @property
    def rate(self) -> float:
        return self.bytes / max(self.ended - self.began, 1e-9)

    def as_json(self) -> dict[str, float]:
        return {"began_seconds": self.began, "ended_seconds": self.ended, "bytes": self.bytes, "bytes_per_second": self.rate}


def sustained(folder: str, setup: Setup, seconds: float, json: str | None, plot: str | None) -> int:
    """Write through a store for ``seconds`` and print the rate over time; returns the exit code."""

    def measure(under: Measuring) -> Callable[[], str]:
        report = under.report
        report |= setup.as_json() | {"asked_seconds": seconds} | store_facts(folder, setup.backend)
        refuse_full_disk(folder, setup.disk_bytes)
        store = under.stack.enter_context(scratch_store(folder, dram=setup.pool, backend=setup.backend))
        windows = _windows(store, StoreWorkload(store, setup, under.stop), setup, seconds, under.progress)
        report["sustained"] = _as_json(windows)
        return lambda: _describe(report, setup, windows)

    return reported(measure, json, plot, plot_sustained)


def _windows(store: TieredStore, walk: StoreWorkload, setup: Setup, seconds: float, progress: Progress) -> list[DriveWindow]:
    """Replace one tensor after the other, and commit when all were replaced and at the end."""
    least = max(SHORTEST, seconds / WINDOWS)
    windows: list[DriveWindow] = []
    start = began = time.perf_counter()
    before = 0
    for count in itertools.count(1):
        walk.replace(f"w/{count % setup.tensors}")
        now = time.perf_counter()
        so_far = rate(count * setup.tensor / (now - start))
        progress.working(f"writing, {so_far} so far", min(0.999, (now - start) / seconds))
        over = now - start >= seconds
        if over or count % setup.tensors == 0:
            store.commit()
            now = time.perf_counter()
        if over or now - began >= least:
            written = store.statistics().links[-1].down.bytes
            windows.append(DriveWindow(began - start, now - start, written - before))
            began, before = now, written
        if over:
            break
    progress.working("done", 1.0)
    if len(windows) > 1 and windows[-1].ended - windows[-1].began < least / 2:  # too short for a rate of its own
        last, rest = windows.pop(), windows.pop()
        windows.append(DriveWindow(rest.began, last.ended, rest.bytes + last.bytes))
    return windows


def _as_json(windows: list[DriveWindow]) -> dict[str, Any]:
    whole = DriveWindow(0.0, windows[-1].ended, sum(window.bytes for window in windows))
    least = min(windows, key=lambda window: window.rate)
    return {
        "whole": whole.as_json(),
        "first": windows[0].as_json(),
        "last": windows[-1].as_json(),
        "least": least.as_json(),
        "windows": [window.as_json() for window in windows],
    }


def _describe(report: dict[str, Any], setup: Setup, windows: list[DriveWindow]) -> str:
    found = report["sustained"]
    names = ("whole", "first", "last", "least")
    unit, factor = rate_unit(*(found[name]["bytes_per_second"] for name in names))
    rows = [["", unit, "from", "to"]]
    for name in names:
        one = found[name]
        times = [duration(one[f"{end}_seconds"]) for end in ("began", "ended")]
        rows.append([name, f"{one['bytes_per_second'] * factor:.2f}", *times])
    return "\n".join(
        [
            told_environment(report),
            told_io(report),
            f"{counted(report['tensors'], 'tensor')} of {format_size(report['tensor_bytes'])} written over and over through "
            f"{format_size(report['pool_bytes'])} of memory, checksums on, a commit each time; {told_noise(report['noise'])}",
            *setup.notes(),
            f"{format_size(found['whole']['bytes'])} written in {duration(found['whole']['ended_seconds'])}, "
            f"{counted(len(windows), 'window')}",
            "",
            table(rows),
        ]
    )
