"""What all commands of ``tiered bench`` do around a measurement: refuse files that could not be written, show progress, stop,
say how busy the machine was, print what was found and write it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tiered.cli.output import Progress, refuse_unplottable, refuse_unwritable, write_report
from tiered.cli.stop import Stopped, StopRequest
from tiered.measuring.meters import Noise, environment

__all__ = ["Draw", "Measuring", "reported"]

Draw = Callable[[str, dict[str, Any]], None]
"""Draws a report into the file of that path."""


@dataclass(frozen=True)
class Measuring:
    """A measurement under way. ``report``: what is found, as ``--json`` writes it. ``stack``: what ends with it."""

    stop: StopRequest
    progress: Progress
    stack: ExitStack
    report: dict[str, Any]


def reported(
    measure: Callable[[Measuring], Callable[[], str]], json: str | None, plot: str | None = None, draw: Draw | None = None
) -> int:
    """Measure, print and write the report; returns the exit code. ``measure`` returns a function that makes the text, because
    the report says how busy the machine was only when all has ended."""
    refuse_unwritable(json)
    refuse_unplottable(plot)
    report, noise = environment() | {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}, Noise()
    try:
        with StopRequest() as stop, ExitStack() as stack:
            describe = measure(Measuring(stop, stack.enter_context(Progress(sys.stderr)), stack, report))
    except Stopped as stopped:
        print("tiered: stopped; the scratch files are removed", file=sys.stderr)
        return stopped.exit_code
    report["noise"] = noise.seen()
    if json != "-":
        print(describe())
    write_report(json, report)
    if plot is not None and draw is not None:
        draw(plot, report)
    return 0
