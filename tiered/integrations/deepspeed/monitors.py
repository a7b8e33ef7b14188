"""What an engine prints and writes: lines between steps, times, operations, events for csv files and TensorBoard."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tiered import MisuseError, TieredStore
from tiered.integrations.deepspeed.config import FlopsProfile, Log, Reports
from tiered.types import format_size

__all__ = ["Event", "Monitors"]

Event = tuple[str, float, int]
"""Name, value, and how many samples were trained on by then."""
PHASES = ("forward", "backward", "step")


class Monitors:
    """The reports of one rank; only the first one prints and writes."""

    def __init__(self, reports: Reports, store: TieredStore, *, first: bool) -> None:
        self._reports, self._store, self._first = reports, store, first
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since, self._samples = time.monotonic(), 0
        self._flops: FlopCounterMode | None = None
        self._flops_began, self._profiled = 0.0, False
        self._tensorboard = _tensorboard(reports.tensorboard) if first and reports.tensorboard.enabled else None
        self._csv = _folder(reports.csv) if first and reports.csv.enabled else None

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add what a block takes to the seconds of ``phase``."""
        if not self._reports.wall_clock:
            yield
            return
        self._wait()
        began = time.monotonic()
        try:
            yield
        finally:
            self._wait()
            self._seconds[phase] += time.monotonic() - began

    def _wait(self) -> None:
        """Wait for the device, where there is one, so that its work counts where it was asked for."""
        if self._store.device.type == "cuda":
            torch.cuda.synchronize(self._store.device)

    # -- after a step ------------------------------------------------------------------------------------------------------

    def stepped(self, step: int, samples: int, skipped: int, rates: Sequence[float], events: Sequence[Event]) -> None:
        """Report step number ``step``, after ``samples`` in all, ``skipped`` steps left out, with learning rates ``rates``."""
        milliseconds = {phase: 1e3 * seconds for phase, seconds in self._seconds.items()}
        if self._reports.wall_clock:
            timed = [(f"Train/Samples/elapsed_time_ms_{phase}", value, samples) for phase, value in milliseconds.items()]
            events = [*events, *timed]
        self._write(events)
        every = self._reports.steps
        if every is not None and step % every == 0:
            now = time.monotonic()
            speed = (samples - self._samples) / max(now - self._since, 1e-9)
            self._say(f"step={step}, skipped={skipped}, lr={[float(rate) for rate in rates]}, {speed:.1f} samples/s")
            if self._reports.wall_clock:
                self._say("time (ms) | " + " | ".join(f"{phase}: {value:.2f}" for phase, value in milliseconds.items()))
            if self._reports.memory:
                used = self._store.statistics().tiers
                self._say(
                    "memory | " + " | ".join(f"{t.name}: {format_size(t.used)}, peak {format_size(t.peak)}" for t in used)
                )
            self._since, self._samples = now, samples
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def _say(self, line: str) -> None:
        if self._first:
            print(f"tiered: {line}", flush=True)

    def _write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events if self._csv is not None else ():
            assert self._csv is not None
            path = self._csv / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            fresh = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])
        if self._tensorboard is not None:
            for name, value, samples in events:
                self._tensorboard.add_scalar(name, value, samples)
            self._tensorboard.flush()

    # -- operations --------------------------------------------------------------------------------------------------------

    def begin_flops(self, step: int) -> None:
        """Begin to count operations, where ``step`` is the one to profile and this is its first pass."""
        profile = self._reports.flops
        if profile.enabled and not self._profiled and step == profile.profile_step:
            self._flops, self._profiled = FlopCounterMode(display=False), True
            self._flops.__enter__()  # type: ignore[no-untyped-call]
            self._flops_began = time.monotonic()

    def end_flops(self, module: nn.Module, step: int) -> None:
        """Print what was counted, after the backward pass."""
        counter, self._flops = self._flops, None
        if counter is None:
            return
        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        seconds = time.monotonic() - self._flops_began
        if not self._first:
            return
        text = _profile(counter, module, self._reports.flops, step, seconds)
        if self._reports.flops.output_file is None:
            print(text, flush=True)
        else:
            path = Path(self._reports.flops.output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    def give_up(self) -> None:
        """Stop counting, after an exception."""
        counter, self._flops = self._flops, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close what is open."""
        self.give_up()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _profile(counter: FlopCounterMode, module: nn.Module, profile: FlopsProfile, step: int, seconds: float) -> str:
    """Return the lines of a profile: the whole model, then the modules with most operations at each depth."""
    counts: dict[str, dict[Any, int]] = {str(name): dict(found) for name, found in counter.get_flop_counts().items()}
    total = counter.get_total_flops()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    lines = [
        f"tiered: operations of forward and backward, step {step}",
        f"parameters {parameters:,}, operations {total:,} in {1e3 * seconds:.2f} ms",
    ]
    if not profile.detailed:
        return "\n".join(lines)
    of = {name: sum(found.values()) for name, found in counts.items() if name != "Global"}
    depths: dict[int, list[str]] = {}
    for name in of:
        depths.setdefault(name.count("."), []).append(name)
    for depth in sorted(depths):
        if profile.module_depth >= 0 and depth > profile.module_depth:
            break
        first = sorted(depths[depth], key=lambda name: (-of[name], name))[: max(profile.top_modules, 1)]
        share = total or 1
        lines.append(f"depth {depth}: " + ", ".join(f"{name} {of[name]:,} ({of[name] / share:.0%})" for name in first))
    return "\n".join(lines)


def _folder(log: Log) -> Path:
    folder = Path(log.output_path or ".") / log.job_name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tensorboard(log: Log) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MisuseError('tensorboard is enabled, and not installed: pip install tensorboard, or "enabled": false') from error
    return SummaryWriter(log_dir=str(_folder(log)))
