"""What a command leaves in files, and which files it may write over: those that it made.

Numbers for people, in columns.

How training goes, while it goes: a live display in a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from tiered import MisuseError, __version__
from tiered.errors import shown
from tiered.types import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from tiered import TieredStore

__all__ = [
    "MADE_BY",
    "Counters",
    "Gauge",
    "Progress",
    "Silent",
    "bandwidth",
    "duration",
    "exact_size",
    "refuse_unwritable",
    "table",
    "told_environment",
    "told_io",
    "told_noise",
    "write_report",
]

MADE_BY = "tiered"
"""Begins what our files say of who made them."""
# How a file of ours begins:
_REPORT = re.compile(rf'\{{\s*"{MADE_BY}": "'.encode())
_PICTURE = re.compile(rb"\x89PNG.*" + f"{MADE_BY} (bench|train)".encode(), re.DOTALL)
_SEARCHED = 64 << 10


def refuse_unwritable(path: str | None, option: str = "--json") -> None:
    """Raises MisuseError when there could be no report in the end, or when it would replace what is not ours."""
    if path is None or path == "-":
        return
    try:
        _check_writable(path)
        free = _may_be_replaced(path)
    except OSError as error:
        raise MisuseError(f"cannot write {path}: {error.strerror}; name another file with {option}") from error
    if not free:
        raise MisuseError(f"{path} is there already and is none of our reports, so it stays: name another file with {option}")


def _check_writable(path: str) -> None:
    """Raises OSError unless it can be written to. Nothing is left behind, and no FIFO is opened: there may be no reader yet."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        new = os.path.realpath(path)  # what a dangling link points to
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(new)
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISREG(mode):
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _may_be_replaced(path: str) -> bool:
    """Whether nothing is lost: it is not there, is no file, is empty or ours."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return True
    with Path(path).open("rb") as file:
        beginning = file.read(_SEARCHED)
    return bool(_REPORT.match(beginning) or _PICTURE.match(beginning))


def write_report(path: str | None, report: dict[str, Any]) -> None:
    """As JSON to the file ``path``, "-" for stdout; it says which version made it."""
    if path is None:
        return
    written = json.dumps({MADE_BY: __version__, **report}, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(written)
    else:
        Path(path).write_text(written, encoding="utf-8")


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lines of ``rows``, as ``shown``; the first ``left`` columns begin at the same place, the others end at the same place."""
    rows = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in pairs]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bandwidth(bytes_per_second: float) -> str:
    """In GB/s, with three digits that mean something."""
    value = bytes_per_second / 1e9
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}" if value >= 0.01 else f"{value:.5f}"


def duration(seconds: float) -> str:
    unit, size = next((u for u in (("s", 1.0), ("ms", 1e-3)) if seconds >= u[1]), ("us", 1e-6))
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def exact_size(nbytes: int) -> str:
    """As it would be given: "4KiB"; bytes where it is not a whole number of anything larger."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size:,}{unit}"
    return f"{nbytes:,}B"


def told_environment(report: Mapping[str, Any]) -> str:
    """Of a report that holds ``measure.environment()``."""
    commit = f" (commit {report['commit']})" if report["commit"] else ""
    return (
        f"tiered {report['tiered']}{commit}, torch {report['torch']}, Python {report['python']}, {report['kernel']}, "
        f"{report['cores']} cores, {format_size(report['memory_bytes'])} of memory"
    )


def told_io(report: Mapping[str, Any]) -> str:
    """How a report's store does I/O, and a warning where that is not with the drive itself."""
    how = f"{report['backend']} on {report['filesystem'] or 'an unknown filesystem'}"
    if report["in_memory"]:
        return f"{how}: THIS IS MEMORY, not a drive"
    return f"{how}, O_DIRECT" if report["direct"] else f"{how}: NO O_DIRECT here, this measures the page cache"


def told_noise(noise: Mapping[str, float]) -> str:
    """Of what ``measure.Noise`` saw."""
    return f"meanwhile other programs used {noise['others']:.0%} of all cores' time, {noise['steal']:.0%} was stolen"


INTERVAL = 2.0
"""Seconds between two plain lines at least."""


class Silent(io.StringIO):
    """Nobody reads what is printed there."""

    def write(self, text: str) -> int:
        return len(text)


@dataclass(frozen=True)
class Counters:
    """Totals: seconds, and bytes that the process moved from and to its disks."""

    seconds: float
    read: int
    written: int
    stalled_for_reads: float
    stalled_for_room: float

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.seconds - other.seconds,
            self.read - other.read,
            self.written - other.written,
            self.stalled_for_reads - other.stalled_for_reads,
            self.stalled_for_room - other.stalled_for_room,
        )

    @property
    def stalled(self) -> float:
        return self.stalled_for_reads + self.stalled_for_room


class Gauge:
    """Reads the counters of this process and of its store. ``counted_by``: "kernel"; "store" where the kernel does not tell."""

    def __init__(self, store: TieredStore) -> None:
        self._store, self._process = store, psutil.Process()
        try:
            self._process.io_counters()
            self.counted_by = "kernel"
        except (psutil.Error, AttributeError, NotImplementedError, OSError):
            self.counted_by = "store"

    def read(self) -> Counters:
        seen = self._store.statistics()
        if self.counted_by == "kernel":
            kernel = self._process.io_counters()
            moved = kernel.read_bytes, kernel.write_bytes
        else:
            moved = sum(link.up.bytes for link in seen.links), sum(link.down.bytes for link in seen.links)
        return Counters(time.monotonic(), *moved, seen.stalled_for_reads, seen.stalled_for_room)

    def pool(self) -> float:
        """Share of the DRAM budget that is in use."""
        dram = self._store.statistics().tier("dram")
        return dram.used / dram.capacity


class Progress:
    """A context manager; prints to ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console: Console | None = None
        self._live: Live | None = None
        self._printed = float("-inf")
        self._began, self._from = time.monotonic(), 0.0
        if stream.isatty():
            from rich.console import Console

            console = Console(file=stream, highlight=False)
            self._console = None if console.is_dumb_terminal else console

    def __enter__(self) -> Progress:
        if self._console is not None:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def working(self, what: str, share: float) -> None:
        """Busy with ``what``; ``share`` of the whole is done. The last thing that is said has a share of 1."""
        self._show(what, "", share, last=share >= 1)

    def preparing(self, done: int, total: int) -> None:
        """``done`` of ``total`` parameters have their initial values and are in the store."""
        self._show(f"writing initial values {done / total:4.0%}", "", done / total, last=done == total)

    def begin(self, share: float = 0.0) -> None:
        """The first step begins now; ``share`` of the training was done before."""
        self._began, self._from = time.monotonic(), share
        self._printed = float("-inf")

    def stepped(
        self, step: int, steps: int | None, share: float, loss: float, tokens: int, moved: Counters, pool: float
    ) -> None:
        """After each step. ``share`` of the whole training that is done; ``tokens`` and ``moved`` in this step."""
        gone = time.monotonic() - self._began
        what = f"step {step}/{steps}" if steps else f"step {step}"
        rates = (
            f"loss {loss:.3f}  {tokens / moved.seconds:.0f} tokens/s  "
            f"read {moved.read / moved.seconds / 1e9:.2f} write {moved.written / moved.seconds / 1e9:.2f} GB/s  "
            f"stalled {moved.stalled / moved.seconds:.0%}  pool {pool:.0%}"
        )
        left = f"{_clock(gone / (share - self._from) * (1 - share))} left" if share < 1 else f"{_clock(gone)} in all"
        self._show(what, rates, share, left, last=share >= 1)

    def _show(self, what: str, rates: str, share: float, left: str = "", *, last: bool) -> None:
        if self._live is not None:
            self._live.update(_display(what, rates, share, left))
            return
        if last or time.monotonic() - self._printed >= INTERVAL:
            self._printed = time.monotonic()
            print("  ".join(part for part in (what, rates, left) if part), file=self._stream, flush=True)


def _display(what: str, rates: str, share: float, left: str) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    first = Table.grid(padding=(0, 2))
    first.add_row(what, ProgressBar(total=1.0, completed=share, width=30), left)
    both = Table.grid()
    both.add_row(first)
    if rates:
        both.add_row(rates)
    return both


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
