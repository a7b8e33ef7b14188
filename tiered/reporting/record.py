"""Record what each step of a training takes: loss, time and what it went into, bytes of the drive, memory by kind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tiered.reporting.timeline import as_rows
from tiered.store import TieredStore
from tiered.store.memory_watch import MemoryWatch

__all__ = ["RunRecord"]

WARM_UP, STEPS = 5, 3
"""Steps before those whose timeline is recorded, and how many these are."""
MOST = 5_000
"""Steps of the series; of a longer run every second one is dropped, as often as needed."""


class RunRecord:
    """What the steps of a training in ``store`` took. ``updating``: seconds that updates took so far (of a paged model,
    ``zero.statistics(model).update_seconds``). ``done``: steps before; ``steps``: whose timeline is recorded, after five. Used
    by one thread, between the steps."""

    def __init__(
        self, store: TieredStore, updating: Callable[[], float] = lambda: 0.0, done: int = 0, steps: int = STEPS
    ) -> None:
        self._store, self.updating = store, updating
        first = store.statistics().memory
        self._base = first.beyond
        self.limit = first.limit
        self._series: dict[str, list[Any]] = {}
        self._losses: dict[int, float] = {}
        self._every, self.steps, self.begun = 1, 0, False
        self._recording = ExitStack()
        self._timeline: Any = None
        self._span: Any = None
        self._first, self._last = done + WARM_UP + 1, done + WARM_UP + steps
        self._done = done
        self._before = self._read()

    def _read(self) -> tuple[float, ...]:
        seen = self._store.statistics()
        disk = seen.links[-1] if seen.links else None
        moved = (0, 0) if disk is None else (disk.up.bytes, disk.down.bytes)
        return (time.perf_counter(), *moved, seen.stalled_for_reads, seen.stalled_for_room, self.updating())

    def begin(self) -> None:
        """Note that the first step begins: what was before is not counted."""
        self._before, self.begun = self._read(), True
        self._look_at_timeline()

    def stepped(self, step: int, loss: float | None = None, tokens: int | None = None) -> None:
        """Note that a step has ended, and another one begins. ``tokens``: those of this step."""
        now = self._read()
        seconds, read, written, reads, room, update = (b - a for a, b in zip(self._before, now, strict=True))
        memory = MemoryWatch.of(self._store).most()
        if loss is not None:
            self.lost(step, loss)
        self._done = step
        self.steps += 1
        if self.steps % self._every == 0:
            compute = max(0.0, seconds - reads - room - update)
            values = {
                "step": step, "seconds": seconds, "tokens": tokens, "read": read, "written": written, "waited_reads": reads,
                "waited_room": room, "update": update, "compute": compute, "memory_base": min(self._base, memory.beyond),
                "memory_pool": memory.touched, "memory_beyond": max(0, memory.beyond - self._base),
            }  # fmt: skip
            for name, value in values.items():
                self._series.setdefault(name, []).append(value)
            if len(self._series["step"]) > MOST:
                self._every *= 2
                self._series = {name: found[1::2] for name, found in self._series.items()}
        self._before = now
        self._look_at_timeline()

    def lost(self, step: int, loss: float) -> None:
        """Note the loss of a step."""
        self._losses[step] = loss

    def _look_at_timeline(self) -> None:
        """Begin, or end, the recording of the timeline before the step that follows."""
        if self._span is not None:
            self._span.end()
            self._span = None
        coming = self._done + 1
        if not self._first <= coming <= self._last:
            self._recording.close()
            return
        if self._timeline is None:
            self._timeline = self._recording.enter_context(self._store.timeline(limit=200_000))
        self._span = self._store.span("step", f"step {coming}")

    def close(self) -> None:
        """End what is being recorded; a step that has not ended is left out."""
        self._span = None
        self._recording.close()

    @contextmanager
    def closing(self) -> Iterator[RunRecord]:
        """Close the record after a block of code, however it ends."""
        try:
            yield self
        finally:
            self.close()

    def as_json(self) -> dict[str, Any]:
        """Return what was recorded, for ``json.dumps``: ``series`` by step, ``losses``, ``timeline`` (None: none was recorded).
        """
        series: dict[str, list[Any]] | None = dict(self._series) or None
        if series is not None and None in series["tokens"]:
            del series["tokens"]
        return {
            "series": series,
            "losses": {
                "steps": list(self._losses),
                "values": [value if math.isfinite(value) else None for value in self._losses.values()],
            },
            "timeline": None if self._timeline is None else as_rows(self._timeline),
            "memory_limit": self.limit,
        }
