"""How training goes, while it goes: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import psutil

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from tiered import TieredStore

__all__ = ["Counters", "Gauge", "Progress", "Silent"]

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
