"""The report of a training: its summary as text and as JSON, and the recording of some steps as a trace and a picture."""

from __future__ import annotations

import itertools
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import psutil
import torch

import tiered
from tiered import TieredStore, Timeline, zero
from tiered.cli.output import counted, rate_unit, refuse_unplottable, refuse_unwritable
from tiered.cli.train.model import Shape, build
from tiered.cli.train.optimizers import kind_of
from tiered.cli.train.options import Options
from tiered.cli.train.timeline import describe_timeline, plot_timeline, write_timeline
from tiered.measuring.meters import Rates, Usage
from tiered.planning.dry_run import Activations
from tiered.telemetry import StoreStatistics
from tiered.types import exact_size, format_size

if TYPE_CHECKING:
    from tiered.cli.train.loop import Result

__all__ = ["TEMPERATURE", "TOP_P", "StepRecording", "Summary", "describe", "predicted"]

@dataclass(frozen=True)
class Summary:
    """The measurements of a training: ``moved`` from the beginning of the first step to the update of the last one, then
    ``seen``, the store's statistics, then the ``rates`` of the disk.

    In a resumed training, only ``earlier_losses`` are of the steps before. With several ``ranks`` the losses are means,
    ``tokens`` are those of all ranks, and everything else is rank 0's. ``sample``: text that
    the model of one process writes at the end. ``paging``: what became of activations, and what
    ``--auto`` chose.
    """

    options: Options
    steps: int
    losses: tuple[float, ...]
    earlier_losses: tuple[float, ...]
    tokens: int
    parameters: int
    moved: Usage
    paging: zero.PagingStatistics
    rates: Rates | None
    seen: StoreStatistics
    peak_rss: int
    baseline_rss: int
    generation: int
    folder: str
    ranks: int = 1
    sample: str | None = None

    @property
    def last_loss(self) -> float:
        """The mean of the last five losses, because single losses scatter."""
        last = self.losses[-min(5, len(self.losses)) :]
        return sum(last) / len(last)

    @property
    def serial_seconds(self) -> float | None:
        """How long the same bytes take one after the other when the disk does nothing else; None where not measured."""
        return None if self.rates is None else self.rates.seconds(self.moved.disk_read, self.moved.disk_written)

    @property
    def waited_share(self) -> float | None:
        """The share of ``serial_seconds`` that was not hidden behind the compute."""
        return self.moved.stalled / self.serial_seconds if self.serial_seconds else None

    @property
    def fitted(self) -> bool:
        """Whether the store evicted nothing from memory."""
        return self.seen.evictions == 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the parameters and of what the optimizer keeps for them."""
        return round(kind_of(self.options).bytes_kept * self.parameters)

    @property
    def in_memory_bytes(self) -> int:
        """Bytes of these and of the gradients, as training in memory has them."""
        return round(kind_of(self.options).bytes_in_memory * self.parameters)

    def _activations(self) -> dict[str, Any]:
        found = self.paging.activations
        if found is None:
            return {"modules_computed_again": self.paging.computed_again}
        return {
            "offloaded_bytes": found.offloaded,
            "restored_bytes": found.restored,
            "hidden_bytes": found.hidden,
            "waited_in_forward_seconds": found.waited_in_forward,
            "waited_in_backward_seconds": found.waited_in_backward,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the summary in bytes and seconds."""
        moved, steps, dram = self.moved, self.steps, self.seen.tier("dram")
        losses = [*self.earlier_losses, *self.losses]
        return {
            "resumed_after": len(self.earlier_losses),
            "steps": steps,
            "seconds": moved.seconds,
            "tokens_per_second": self.tokens / moved.seconds,
            "loss": {"first": losses[0], "last": self.last_loss, "all": losses},
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "pool": {"budget_bytes": dram.capacity, "peak_bytes": dram.peak},
            "hbm": {"budget_bytes": top.capacity, "peak_bytes": top.peak} if (top := self.seen.tiers[0]) is not dram else None,
            "per_step": {
                "seconds": moved.seconds / steps,
                "read_bytes": moved.disk_read / steps,
                "written_bytes": moved.disk_written / steps,
                "read_bytes_per_parameter": moved.disk_read / steps / self.parameters,
                "written_bytes_per_parameter": moved.disk_written / steps / self.parameters,
            },
            "time": {
                "compute_seconds": moved.seconds - moved.stalled - self.paging.update_seconds,
                "optimizer_seconds": self.paging.update_seconds,
                "waiting_for_reads_seconds": moved.stalled_for_reads,
                "waiting_for_room_seconds": moved.stalled_for_room,
            },
            "io": {
                "one_after_the_other_seconds": self.serial_seconds,
                "waited_seconds": moved.stalled,
                "waited_share": self.waited_share,
                "read_bytes_per_second_alone": self.rates.read if self.rates else None,
                "write_bytes_per_second_alone": self.rates.write if self.rates else None,
                "counted_by": moved.counted_by,
            },
            "activations": {"where": self.options.activations, **self._activations()},
            "plan": None if self.paging.plan is None else asdict(self.paging.plan),
            "peak_rss_bytes": self.peak_rss,
            "baseline_rss_bytes": self.baseline_rss,
            "in_memory_bytes": self.in_memory_bytes,
            "backend": self.seen.backend,
            "direct": self.seen.direct,
            "prefetch": self.options.prefetch,
            **({} if self.ranks == 1 else {"ranks": self.ranks, "stage": self.options.stage}),
            "sample": self.sample,
            "generation": self.generation,
            "folder": self.folder,
        }


def _told(summary: Summary) -> list[str]:
    """Describe where activations were, where not in memory."""
    found, plan, steps = summary.paging.activations, summary.paging.plan, summary.steps
    again = summary.paging.computed_again
    if summary.options.activations == "recompute":
        return [f"backward  computed the insides of {counted(again // steps, 'module')} per step again"]
    if found is None:
        return []
    chosen = []
    if plan is not None:
        ways = Counter(plan.ways.values())
        told = {"memory": "in memory", "recompute": "computed again", "store": "in the store"}
        of_each = ", ".join(f"{number} {told[way]}" for way, number in sorted(ways.items()))
        step = f", {plan.predicted:.2f} s a pass predicted, {plan.measured:.2f} measured"
        chosen = [
            f"plan      chosen {counted(plan.choices, 'time')}: activations of modules {of_each}{step}"
            if plan.choices
            else "plan      none was made: training ended before the measurement"
        ]
        if again:
            chosen.append(f"backward  computed the insides of {counted(again, 'module')} in all again")
    hidden = f"{found.hidden / found.restored:.0%} of them in time" if found.restored else "none came back"
    return [
        *chosen,
        f"backward  {_amount(found.offloaded / steps)} per step went into the store, "
        f"{_amount(found.restored / steps)} came back, {hidden};",
        f"          forward waited {found.waited_in_forward / steps:.2f} s per step for room, backward "
        f"{found.waited_in_backward / steps:.2f} s for bytes",
    ]


def describe(summary: Summary, other_way: str | None, again: str) -> str:
    """Format the summary in several lines. ``other_way`` is a command to compare with, ``again`` one that continues."""
    moved, steps = summary.moved, summary.steps
    dram = summary.seen.tier("dram")

    def spent(what: str, seconds: float) -> str:
        return f"  {what:<22}{seconds / steps:8.2f} s {seconds / moved.seconds:6.0%}"

    def flow(what: str, nbytes: int) -> str:
        return f"{what} {_amount(nbytes / steps)} per step, {nbytes / steps / summary.parameters:.1f} bytes per parameter"

    how = f"{summary.seen.backend}, {'O_DIRECT' if summary.seen.direct else 'no O_DIRECT here'}"
    rest = max(0, summary.peak_rss - summary.baseline_rss - dram.peak)
    return "\n".join(
        [
            "",
            f"loss      {summary.losses[0]:.3f} -> {summary.last_loss:.3f} in {counted(steps, 'step')} "
            f"of {counted(summary.tokens // steps, 'token')}, {moved.seconds:.0f} s, "
            f"{summary.tokens / moved.seconds:.0f} tokens/s",
            *_state(summary),
            *(
                f"device    {format_size(tier.capacity)} for parameters, {format_size(tier.peak)} used at the peak"
                for tier in summary.seen.tiers
                if tier.name == "hbm"
            ),
            f"memory    {format_size(summary.peak_rss)} at the peak: {format_size(summary.baseline_rss)} Python and torch, "
            f"{format_size(dram.peak)} the store,",
            f"          {format_size(rest)} activations and everything else; without a store,",
            f"          parameters, gradients and states of {summary.options.optimizer} alone would take "
            f"{format_size(summary.in_memory_bytes)}",
            f"disk      {flow('read', moved.disk_read)}",
            f"          {flow('wrote', moved.disk_written)}; {how}",
            *_told(summary),
            "time      per step",
            spent("forward and backward", moved.seconds - moved.stalled - summary.paging.update_seconds),
            spent("optimizer", summary.paging.update_seconds),
            spent("waiting for reads", moved.stalled_for_reads),
            spent("waiting for writes", moved.stalled_for_room),
            spent("together", moved.seconds),
            *_waited(summary),
            f"saved     {summary.folder}, generation {summary.generation}",
            *_written(summary),
            "",
            *([f"{'without' if summary.options.prefetch == 'on' else 'with'} prefetching: {other_way}"] if other_way else []),
            *([f"more of its text: {_generate(summary)}"] if summary.sample is not None else []),
            f"more steps: {again} --steps {2 * (len(summary.earlier_losses) + steps)}",
            f"weights as safetensors: {shlex.join(['tiered', 'export', _exported(summary), '--out', 'weights'])}",
            "text of your own: tiered train STORE --text FILE",
            "model of your own: docs/training.md",
        ]
    )


def predicted(summary: Summary) -> dict[str, Any] | None:
    """Return what ``tiered.plan`` predicts of a step, with the rates of the drive that the training measured at its end, and
    this machine's operations timed; None where a plan does not know these options."""
    options, rates = summary.options, summary.rates
    if options.activations not in get_args(Activations) or rates is None or options.hbm or summary.ranks > 1:
        return None
    machine = {
        "read": rates.read, "write": rates.write, "base": summary.baseline_rss, "threads": torch.get_num_threads(),
        "cores": psutil.cpu_count() or 1,
    }  # fmt: skip
    optimizer: Any = options.optimizer
    model = build(Shape.of(options))
    plan = tiered.plan(
        model, workload=tiered.Workload(options.batch, options.context, accumulate=options.accumulate), machine=machine,
        dram=options.dram, optimizer=optimizer, update=options.update, activations=cast(Activations, options.activations),
        micro_batch=options.micro_batch, measure=True,
    )
    found = plan.of_step()
    by = "tiered.plan, with the rates of the drive that were measured when the training ended, and operations timed then."
    return None if found is None else found | {"by": by}


def _written(summary: Summary) -> list[str]:
    """Describe the text that the model writes."""
    if summary.sample is None:
        return []
    lines = [part for line in summary.sample.strip("\n").split("\n") for part in textwrap.wrap(line, WIDTH) or [""]]
    done = counted(len(summary.earlier_losses) + summary.steps, "step")
    return [f"its text  after {done}:", *(f"          {line}".rstrip() for line in lines)]


def _generate(summary: Summary) -> str:
    """Return the command that has the model go on with a text."""
    words = ["tiered", "generate", summary.folder, "--prompt", "ROMEO:", "--temperature", f"{TEMPERATURE:g}"]
    return shlex.join([*words, "--top-p", f"{TOP_P:g}", "--dram", exact_size(summary.options.dram)])


def _exported(summary: Summary) -> str:
    """The folder that ``tiered export`` takes: of several ranks the one above their stores."""
    return summary.folder if summary.ranks == 1 else str(Path(summary.folder).parent)


def _state(summary: Summary) -> list[str]:
    state, dram = summary.state_bytes, summary.seen.tier("dram")
    told = f"state     {format_size(state)} of parameters and states of {summary.options.optimizer}"
    budget = f"          ({format_size(dram.capacity)}, of which {format_size(dram.peak)} were used)"
    if summary.fitted:
        return [f"{told}, all in the memory of --dram", f"{budget}: nothing was evicted, and less may work, too"]
    return [f"{told}, {state / dram.capacity:.1f} times --dram", budget]


def _waited(summary: Summary) -> list[str]:
    told = f"waited    {summary.moved.stalled / summary.steps:.2f} s per step for the disk"
    if not summary.serial_seconds or summary.rates is None:
        return [f"{told}; what it needs alone was not measured"]
    unit, factor = rate_unit(summary.rates.read, summary.rates.write)
    read, write = summary.rates.read * factor, summary.rates.write * factor
    share = max(0.0, 1 - summary.moved.stalled / summary.serial_seconds)
    hidden = f": {share:.0%} of its work was hidden behind computing" if share else ": none of its work was hidden"
    if summary.serial_seconds < LITTLE * summary.moved.seconds:
        hidden = ""  # what there is of it is noise
    return [
        f"{told}; alone it needs {summary.serial_seconds / summary.steps:.2f} s for these bytes",
        f"          (just now: read {read:.1f}, write {write:.1f} {unit}){hidden}",
    ]


def _amount(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


TEMPERATURE, TOP_P, WIDTH = 0.7, 0.8, 68
"""How the text that the model writes is drawn, and characters of a line of it."""
LITTLE = 0.05
"""Share of a training below which nothing is said of how much of the drive's work computing hid."""
WARM_UP = 5
"""Steps before the recording: they make the moments, and the store learns the order of a step."""


class StepRecording:
    """Records ``options.timeline_steps`` steps after ``WARM_UP``, or the last steps where there are fewer.

    ``done``: steps of earlier processes.
    """

    def __init__(self, options: Options, done: int = 0) -> None:
        self._options = options
        last = options.steps - done if options.steps is not None else WARM_UP + options.timeline_steps
        self._first = max(1, min(WARM_UP, last - options.timeline_steps) + 1)
        self._timeline: Timeline | None = None
        self._steps = 0

    @property
    def wanted(self) -> bool:
        """Whether an option asks for a recording."""
        return self._options.timeline is not None or self._options.plot is not None

    def refuse_unwritable(self) -> None:
        """Raise MisuseError where a file could not be written in the end."""
        refuse_unwritable(self._options.timeline, "--timeline")
        refuse_unplottable(self._options.plot)

    def of(self, results: Iterator[Result], store: TieredStore) -> Iterator[Result]:
        """Yield the same results, and record the steps that make some of them."""
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
        """Write the files; returns a description for people."""
        if not self.wanted:
            return None
        if self._timeline is None or not self._steps:
            return f"timeline  training ended before step {self._first}: nothing was recorded"
        if self._options.timeline is not None:
            write_timeline(self._options.timeline, self._timeline)
        if self._options.plot is not None:
            plot_timeline(self._options.plot, self._timeline, title)
        return describe_timeline(self._timeline, self._steps)
