"""What a training run was like, for people and as JSON.

Records some steps of a training and leaves them as a trace and as a picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered import TieredStore, Timeline
from tiered.cli.bench.plot import refuse_unplottable
from tiered.cli.measure import Rates
from tiered.cli.output import Counters, refuse_unwritable
from tiered.cli.train.timeline import describe_timeline, plot_timeline, write_timeline
from tiered.telemetry import StoreStatistics
from tiered.types import format_size

if TYPE_CHECKING:
    from tiered.cli.train.command import Options
    from tiered.cli.train.loop import Result

__all__ = ["Recording", "Summary", "describe"]

STATE_BYTES = 12
IN_MEMORY_BYTES = 16
"""Per parameter, fp32: value, gradient, two moments."""


@dataclass(frozen=True)
class Summary:
    """Measured from the first step's beginning to the last one's update; ``rates`` right afterwards, ``seen`` in between.

    ``earlier_losses`` are of the steps before, where training was resumed: in nothing else. Of several ``ranks`` the losses are
    means, and ``tokens`` are all ranks'; the rest is rank 0's, ``generation`` and ``folder``, too.
    """

    steps: int
    losses: tuple[float, ...]
    earlier_losses: tuple[float, ...]
    tokens: int
    parameters: int
    moved: Counters
    update_seconds: float
    rates: Rates | None
    seen: StoreStatistics
    counted_by: str
    peak_rss: int
    baseline_rss: int
    generation: int
    folder: str
    prefetch: str
    ranks: int = 1
    stage: int = 3

    @property
    def last_loss(self) -> float:
        """Mean of the last steps, since single ones scatter."""
        last = self.losses[-min(5, len(self.losses)) :]
        return sum(last) / len(last)

    @property
    def serial_seconds(self) -> float | None:
        """How long the same bytes take one after the other when the disk does nothing else; None if that was not measured."""
        if self.rates is None:
            return None
        return self.moved.read / self.rates.read + self.moved.written / self.rates.write

    @property
    def waited_share(self) -> float | None:
        """Of ``serial_seconds``: what was not hidden behind the compute."""
        return self.moved.stalled / self.serial_seconds if self.serial_seconds else None

    def as_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        moved, steps, dram = self.moved, self.steps, self.seen.tier("dram")
        losses = [*self.earlier_losses, *self.losses]
        return {
            "resumed_after": len(self.earlier_losses),
            "steps": steps,
            "seconds": moved.seconds,
            "tokens_per_second": self.tokens / moved.seconds,
            "loss": {"first": losses[0], "last": self.last_loss, "all": losses},
            "parameters": self.parameters,
            "state_bytes": STATE_BYTES * self.parameters,
            "pool": {"budget_bytes": dram.capacity, "peak_bytes": dram.peak},
            "hbm": {"budget_bytes": top.capacity, "peak_bytes": top.peak} if (top := self.seen.tiers[0]) is not dram else None,
            "per_step": {
                "seconds": moved.seconds / steps,
                "read_bytes": moved.read / steps,
                "written_bytes": moved.written / steps,
                "read_bytes_per_parameter": moved.read / steps / self.parameters,
                "written_bytes_per_parameter": moved.written / steps / self.parameters,
            },
            "time": {
                "compute_seconds": moved.seconds - moved.stalled - self.update_seconds,
                "optimizer_seconds": self.update_seconds,
                "waiting_for_reads_seconds": moved.stalled_for_reads,
                "waiting_for_room_seconds": moved.stalled_for_room,
            },
            "io": {
                "one_after_the_other_seconds": self.serial_seconds,
                "waited_seconds": moved.stalled,
                "waited_share": self.waited_share,
                "read_bytes_per_second_alone": self.rates.read if self.rates else None,
                "write_bytes_per_second_alone": self.rates.write if self.rates else None,
                "counted_by": self.counted_by,
            },
            "peak_rss_bytes": self.peak_rss,
            "in_memory_bytes": IN_MEMORY_BYTES * self.parameters,
            "backend": self.seen.backend,
            "direct": self.seen.direct,
            "prefetch": self.prefetch,
            **({} if self.ranks == 1 else {"ranks": self.ranks, "stage": self.stage}),
            "generation": self.generation,
            "folder": self.folder,
        }


def describe(summary: Summary, other_way: str | None, again: str) -> str:
    """Several lines. ``other_way`` is a command to compare with, ``again`` one to go on with."""
    moved, steps = summary.moved, summary.steps
    dram = summary.seen.tier("dram")
    state = STATE_BYTES * summary.parameters

    def spent(what: str, seconds: float) -> str:
        return f"  {what:<22}{seconds / steps:8.2f} s {seconds / moved.seconds:6.0%}"

    def flow(what: str, nbytes: int) -> str:
        return f"{what} {_amount(nbytes / steps)} per step, {nbytes / steps / summary.parameters:.1f} bytes per parameter"

    how = f"{summary.seen.backend}, {'O_DIRECT' if summary.seen.direct else 'no O_DIRECT here'}"
    return "\n".join(
        [
            "",
            f"loss      {summary.losses[0]:.3f} -> {summary.last_loss:.3f} in {steps} steps of {summary.tokens // steps:,} "
            f"tokens, {moved.seconds:.0f} s, {summary.tokens / moved.seconds:.0f} tokens/s",
            f"state     {format_size(state)}, {state / dram.capacity:.1f} times the budget of {format_size(dram.capacity)} "
            f"(the pool's peak: {format_size(dram.peak)})",
            *(
                f"device    {format_size(tier.capacity)} of it for parameters (its peak: {format_size(tier.peak)})"
                for tier in summary.seen.tiers
                if tier.name == "hbm"
            ),
            f"memory    {format_size(summary.peak_rss)} at most, {format_size(summary.baseline_rss)} of it torch itself;",
            f"          training in memory holds {format_size(IN_MEMORY_BYTES * summary.parameters)} of parameters, gradients, "
            "states",
            f"disk      {flow('read', moved.read)}",
            f"          {flow('wrote', moved.written)}; {how}",
            "time      per step",
            spent("forward and backward", moved.seconds - moved.stalled - summary.update_seconds),
            spent("optimizer", summary.update_seconds),
            spent("waiting for reads", moved.stalled_for_reads),
            spent("waiting for writes", moved.stalled_for_room),
            spent("together", moved.seconds),
            _overlap(summary),
            f"saved     {summary.folder}, generation {summary.generation}",
            "",
            *([f"{'without' if summary.prefetch == 'on' else 'with'} fetching ahead: {other_way}"] if other_way else []),
            f"more steps: {again} --steps {2 * (len(summary.earlier_losses) + steps)}",
        ]
    )


def _overlap(summary: Summary) -> str:
    waited = summary.moved.stalled / summary.steps
    if not summary.serial_seconds or summary.rates is None:
        return f"overlap   training waited {waited:.2f} s per step for the disk; the disk alone was not measured"
    read, write = summary.rates.read / 1e9, summary.rates.write / 1e9
    return (
        f"overlap   for these bytes the disk by itself (just now: read {read:.1f}, write {write:.1f} GB/s) needs\n"
        f"          {summary.serial_seconds / summary.steps:.2f} s per step; training waited {waited:.2f} s, "
        f"{summary.waited_share:.0%} of that"
    )


def _amount(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


WARM_UP = 5
"""Steps before: until then the order of a step is not known, and the moments are made."""


class Recording:
    """Of ``options.timeline_steps`` steps after ``WARM_UP``, or of the last ones where there are fewer.

    ``done`` were made before.
    """

    def __init__(self, options: Options, done: int = 0) -> None:
        self._options = options
        last = options.steps - done if options.steps is not None else WARM_UP + options.timeline_steps
        self._first = max(1, min(WARM_UP, last - options.timeline_steps) + 1)
        self._timeline: Timeline | None = None
        self._steps = 0

    @property
    def wanted(self) -> bool:
        return self._options.timeline is not None or self._options.plot is not None

    def refuse_unwritable(self) -> None:
        """Raises MisuseError when there could be no file in the end."""
        refuse_unwritable(self._options.timeline, "--timeline")
        refuse_unplottable(self._options.plot)

    def of(self, results: Iterator[Result], store: TieredStore) -> Iterator[Result]:
        """The same results; the steps that make some of them are recorded."""
        if not self.wanted:
            yield from results
            return
        with ExitStack() as stack:
            for number in itertools.count(1):
                if number == self._first:
                    self._timeline = stack.enter_context(store.timeline())
                with store.span("step", f"step {number}"):
                    result = next(results, None)
                if result is None:
                    return
                self._steps += self._timeline is not None and self._timeline.ended is None
                if self._steps == self._options.timeline_steps:
                    stack.close()
                yield result

    def write(self, title: str) -> str | None:
        """Leave the files; returns what there is to be told."""
        if not self.wanted:
            return None
        if self._timeline is None or not self._steps:
            return f"timeline  training ended before step {self._first}: nothing was recorded"
        if self._options.timeline is not None:
            write_timeline(self._options.timeline, self._timeline)
        if self._options.plot is not None:
            plot_timeline(self._options.plot, self._timeline, title)
        return describe_timeline(self._timeline, self._steps)
