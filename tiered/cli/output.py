"""Output of the commands: numbers and tables as text, report files and pictures, and the progress of a command under way.

A report or picture never replaces a file that this program did not write.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from tiered import MisuseError, __version__
from tiered.errors import shown
from tiered.types import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from tiered import ActivationStatistics, MemoryStatistics
    from tiered.measuring.meters import Usage

__all__ = [
    "INTERVAL",
    "MADE_BY",
    "UNPRINTABLE",
    "Progress",
    "Silent",
    "counted",
    "duration",
    "live_rows",
    "rate",
    "rate_unit",
    "refuse_unplottable",
    "refuse_unwritable",
    "table",
    "told_environment",
    "told_io",
    "told_noise",
    "write_report",
]

MADE_BY = "tiered"
"""The first key of reports, and the first word of the Software field of pictures."""
UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, with which the text of a model could command the terminal."""
# The beginnings of files that tiered writes:
_REPORT = re.compile(rf'\{{\s*"{MADE_BY}": "'.encode())
_PICTURE = re.compile(rb"\x89PNG.*" + f"{MADE_BY} (bench|train|plan)".encode(), re.DOTALL)
_DRAWING = re.compile(rb"<\?xml.*" + f"{MADE_BY} plan".encode(), re.DOTALL)
_SEARCHED = 64 << 10


def refuse_unwritable(path: str | None, option: str = "--json") -> None:
    """Raise MisuseError where a report could not be written to ``path``, or would replace a foreign file."""
    if path is None or path == "-":
        return
    try:
        _check_writable(path)
        free = _may_be_replaced(path)
    except OSError as error:
        raise MisuseError(f"cannot write {path}: {error.strerror}; name another file with {option}") from error
    if not free:
        raise MisuseError(f"{path} exists already and is not a report of tiered, so it stays: name another file with {option}")


def refuse_unplottable(path: str | None, kinds: tuple[str, ...] = (".png",)) -> None:
    """Raise MisuseError where no picture could be written to ``path``: no matplotlib, wrong suffix, a foreign file. ``kinds``:
    the suffixes that there are."""
    if path is None:
        return
    if not path.endswith(kinds):
        raise MisuseError(f"--plot {path} does not end in {' or '.join(kinds)}, which the picture is")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MisuseError("--plot needs matplotlib: pip install '.[plot]' in a clone, or pip install matplotlib") from error
    refuse_unwritable(path, "--plot")


def _check_writable(path: str) -> None:
    """Raise OSError unless ``path`` can be written. Leaves nothing behind, and opens no FIFO, which may have no reader yet."""
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
    """Whether writing to ``path`` loses nothing: no such file, not a regular file, empty, or written by tiered."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return True
    with Path(path).open("rb") as file:
        beginning = file.read(_SEARCHED)
    return bool(_REPORT.match(beginning) or _PICTURE.match(beginning) or _DRAWING.match(beginning))


def write_report(path: str | None, report: dict[str, Any]) -> None:
    """Write ``report`` and the version of this package as JSON to the file ``path``; "-" is stdout, None writes nothing."""
    if path is None:
        return
    written = json.dumps({MADE_BY: __version__, **report}, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(written)
    else:
        Path(path).write_text(written, encoding="utf-8")


def table(rows: Sequence[Sequence[str]], align: str = "lr") -> str:
    """Format ``rows`` in columns, with control characters escaped and long cells shortened.

    ``align`` has an "l" or "r" for each column; its last letter is also that of the columns after it."""
    rows = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        letters = align.ljust(len(row), align[-1])
        cells = zip(row, widths, letters, strict=False)
        lines.append("  ".join(c.ljust(w) if letter == "l" else c.rjust(w) for c, w, letter in cells).rstrip())
    return "\n".join(lines)


def counted(number: int, what: str) -> str:
    """Format a number with its noun: "1 round", "1,000 rounds", "2 passes"."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


LEAST_GB = 1e7
"""Bytes per second below which a rate is given in MB/s, because two digits of GB/s would say nothing of it."""


def rate_unit(*bytes_per_second: float) -> tuple[str, float]:
    """Choose one unit for several rates, so that none of them looks like 0; returns its name and the factor to it."""
    return ("GB/s", 1e-9) if all(rate >= LEAST_GB or rate == 0 for rate in bytes_per_second) else ("MB/s", 1e-6)


def rate(bytes_per_second: float) -> str:
    """Format a rate in GB/s, or in MB/s where it is small."""
    unit, factor = rate_unit(bytes_per_second)
    return f"{bytes_per_second * factor:.2f} {unit}"


def duration(seconds: float) -> str:
    """Format a time in s, ms or us."""
    unit, size = next((u for u in (("s", 1.0), ("ms", 1e-3)) if seconds >= u[1]), ("us", 1e-6))
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def told_environment(report: Mapping[str, Any]) -> str:
    """Describe the circumstances in a report that has ``meters.environment()``."""
    commit = f" (commit {report['commit']})" if report["commit"] else ""
    return (
        f"tiered {report['tiered']}{commit}, torch {report['torch']}, Python {report['python']}, {report['kernel']}, "
        f"{report['cores']} cores, {format_size(report['memory_bytes'])} of memory"
    )


def told_io(report: Mapping[str, Any]) -> str:
    """Describe how the store of a report does I/O, with a warning where the drive itself is not measured."""
    how = f"{report['backend']} on {report['filesystem'] or 'an unknown filesystem'}"
    if report["in_memory"]:
        return f"{how}: THIS IS MEMORY, not a drive"
    return f"{how}, O_DIRECT" if report["direct"] else f"{how}: NO O_DIRECT here, this measures the page cache"


def told_noise(noise: Mapping[str, float]) -> str:
    """Describe what ``meters.Noise`` saw."""
    return f"meanwhile other programs used {noise['others']:.0%} of all cores' time, {noise['steal']:.0%} was stolen"


INTERVAL = 2.0
"""Least seconds between two plain lines."""


class Silent(io.StringIO):
    """A stream that drops its text."""

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def live_rows(console: Console, **options: Any) -> Iterator[Live]:
    """Have rows at the end of a terminal that are drawn again as they change. Keys are not shown meanwhile: those, and the
    ^C of Ctrl-C, would move the cursor away from the rows that are erased."""
    from rich.live import Live

    with _unechoed(console.file), Live(console=console, **options) as live:
        yield live


@contextmanager
def _unechoed(stream: IO[str]) -> Iterator[None]:
    """Let a terminal show no keys within the block. They are read afterwards."""
    try:
        descriptor = stream.fileno()
        with suppress(OSError):  # it is not the terminal of this process, so it stops none that changes it
            if os.tcgetpgrp(descriptor) != os.getpgrp():  # in the background, where a change would stop the process
                descriptor = -1
        before = termios.tcgetattr(descriptor) if descriptor >= 0 else None
    except (OSError, ValueError, termios.error):  # no terminal
        before = None
    if before is None:
        yield
        return
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


class Progress:
    """Shows on ``stream`` how far a command is: a live display in a terminal, plain lines elsewhere. A context manager.

    ``quiet``: seconds before the first plain line, for what is often over before."""

    def __init__(self, stream: TextIO, quiet: float = float("-inf")) -> None:
        self._stream = stream
        self._console: Console | None = None
        self._live: Live | None = None
        self._rows = ExitStack()
        self._began, self._from = time.monotonic(), 0.0
        self._printed = self._began + quiet - INTERVAL
        self._offloaded = 0
        if stream.isatty():
            from rich.console import Console

            console = Console(file=stream, highlight=False)
            self._console = None if console.is_dumb_terminal else console

    def __enter__(self) -> Progress:
        if self._console is not None:
            self._live = self._rows.enter_context(live_rows(self._console, refresh_per_second=4))
        return self

    def __exit__(self, *exception: object) -> None:
        self._rows.close()

    def working(self, what: str, share: float) -> None:
        """Show that ``what`` is under way and that ``share`` of the whole is done; a share of 1 is always shown."""
        self._show(what, [], share, last=share >= 1)

    def preparing(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` parameters have their initial values and are in the store."""
        self._show(f"writing initial values {done / total:4.0%}", [], done / total, last=done == total)

    def note(self, what: str) -> None:
        """Show a line that stays."""
        if self._live is not None:
            self._live.console.print(what, markup=False, soft_wrap=True)
        else:
            print(what, file=self._stream, flush=True)

    def begin(self, share: float = 0.0) -> None:
        """Start the clock of the first step; ``share`` of the training was done before."""
        self._began, self._from = time.monotonic(), share
        self._printed = float("-inf")

    def stepped(
        self,
        step: int,
        steps: int | None,
        share: float,
        loss: float,
        tokens: int,
        moved: Usage,
        pool: float,
        activations: ActivationStatistics | None = None,
        memory: MemoryStatistics | None = None,
    ) -> None:
        """Show a completed step. ``share``: of the whole training; ``tokens`` and ``moved``: of this step; ``pool``: the share
        of the DRAM budget in use. ``activations``: those of the training so far, where they go into the store.
        ``memory``: where that of the process is."""
        gone = time.monotonic() - self._began
        what = f"step {step}/{steps}" if steps else f"step {step}"
        read, written = moved.disk_read / moved.seconds, moved.disk_written / moved.seconds
        unit, factor = rate_unit(read, written)
        disk = f"disk: reads {read * factor:.2f}, writes {written * factor:.2f} {unit}"
        if activations is not None:
            nbytes, self._offloaded = activations.offloaded - self._offloaded, activations.offloaded
            disk += f"; {nbytes / 1e6:.0f} MB of activations into the store in this step"
        held = f"memory: store {pool:.0%}"
        if memory is not None:
            where = "" if memory.limit is None else " (cgroup)"
            held += (
                f" of {format_size(memory.budget)}, rest of process {format_size(memory.beyond)}, "
                f"free {format_size(memory.headroom)}{where}"
            )
        waiting = f"waiting for the disk {moved.stalled / moved.seconds:.0%} of the time"
        rates = [f"loss {loss:.3f}, {tokens / moved.seconds:.0f} tokens/s, {waiting}", disk, held]
        left = f"{_clock(gone / (share - self._from) * (1 - share))} to go" if share < 1 else f"{_clock(gone)} in all"
        self._show(what, rates, share, left, last=share >= 1)

    def _show(self, what: str, rates: Sequence[str], share: float, left: str = "", *, last: bool) -> None:
        if self._live is not None:
            self._live.update(_display(what, rates, share, left))
            return
        if last or time.monotonic() - self._printed >= INTERVAL:
            self._printed = time.monotonic()
            print("  ".join(part for part in (what, *rates, left) if part), file=self._stream, flush=True)


def _display(what: str, rates: Sequence[str], share: float, left: str) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    first = Table.grid(padding=(0, 2))
    first.add_row(what, ProgressBar(total=1.0, completed=share, width=30), left)
    both = Table.grid()
    both.add_row(first)
    for line in rates:
        both.add_row(line)
    return both


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
