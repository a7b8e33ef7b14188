"""What an engine prints and writes: lines between steps, times, operations, events for csv files and TensorBoard.

After each step an engine tells its monitors, which are functions of a ``MonitoredStep``. Another one is a function that makes
one, and two lines in ``Monitors``.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tiered.errors import MisuseError
from tiered.integrations.deepspeed.config import FlopsProfile, Log, Reports
from tiered.store import TieredStore
from tiered.types import format_size

__all__ = ["MonitoredStep", "Monitors"]

PHASES = ("forward", "backward", "step")


class MonitoredStep(NamedTuple):
    """What monitors are told of a step: its number, the samples and skipped steps so far, the learning rates, the losses of its
    passes, the loss scale (None: there is none), and the milliseconds of each phase, where they are measured."""

    number: int
    samples: int
    skipped: int
    rates: Sequence[float]
    losses: Sequence[torch.Tensor] = ()
    scale: float | None = None
    milliseconds: Mapping[str, float] = MappingProxyType({})

    def events(self) -> dict[str, float]:
        """Return values by the names that DeepSpeed writes them under."""
        found = {"train_loss": sum(float(loss) for loss in self.losses) / len(self.losses)} if self.losses else {}
        found["lr"] = float(self.rates[0])
        if self.scale is not None:
            found["loss_scale"] = self.scale
        found |= {f"elapsed_time_ms_{phase}": value for phase, value in self.milliseconds.items()}
        return {f"Train/Samples/{name}": value for name, value in found.items()}


Monitor = Callable[[MonitoredStep], None]


class Monitors:
    """The reports of one rank; only the first one has any."""

    def __init__(self, reports: Reports, store: TieredStore, module: nn.Module, *, first: bool) -> None:
        reports = reports if first else Reports()
        self._device, self._module, self._flops = store.device, module, reports.flops
        self._seconds = dict.fromkeys(PHASES, 0.0) if reports.wall_clock else {}
        self._profiled = not reports.flops.enabled
        self._counting, self._open = ExitStack(), ExitStack()
        self._told: list[Monitor] = []
        if reports.csv.enabled:
            self._told.append(_rows(_folder(reports.csv)))
        if reports.tensorboard.enabled:
            self._told.append(_scalars(reports.tensorboard, self._open))
        if reports.steps is not None:
            self._told.append(_lines(reports.steps, store if reports.memory else None))

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Have a block count as the phase ``name`` of step number ``step``. Operations are counted from the first forward of
        that step until the end of the backward pass, or an exception."""
        trains = torch.is_grad_enabled() and self._module.training
        if name == "forward" and trains and step == self._flops.profile_step and not self._profiled:
            self._profiled = True
            self._counting.enter_context(_counted(self._module, self._flops, step))
        began = self._now()
        try:
            yield
        except BaseException as error:
            self._counting.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            if self._seconds:
                self._seconds[name] += self._now() - began
        if name == "backward":
            self._counting.close()

    def _now(self) -> float:
        """Return the time, where phases are timed when the device has done its work, which counts where it was asked for."""
        if self._seconds and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    def stepped(self, step: MonitoredStep) -> None:
        """Tell the monitors of a step."""
        milliseconds = {phase: 1e3 * seconds for phase, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        for monitor in self._told:
            monitor(step._replace(milliseconds=milliseconds))

    def close(self) -> None:
        """Close what is open; operations that were counted so far are not told."""
        self._counting.__exit__(GeneratorExit, GeneratorExit(), None)
        self._open.close()


# What is done after a step


def _lines(every: int, store: TieredStore | None) -> Monitor:
    """Return what prints each step of ``every`` many: rates, speed, times where they are measured, the memory of ``store``."""
    since, before = time.monotonic(), 0

    def say(step: MonitoredStep) -> None:
        nonlocal since, before
        if step.number % every:
            return
        now = time.monotonic()
        speed = (step.samples - before) / max(now - since, 1e-9)
        since, before = now, step.samples
        rates = [float(rate) for rate in step.rates]
        lines = [f"step={step.number}, skipped={step.skipped}, lr={rates}, {speed:.1f} samples/s"]
        if step.milliseconds:
            lines.append("time (ms) | " + " | ".join(f"{phase}: {value:.2f}" for phase, value in step.milliseconds.items()))
        if store is not None:
            used = [f"{one.name}: {format_size(one.used)}, peak {format_size(one.peak)}" for one in store.statistics().tiers]
            lines.append("memory | " + " | ".join(used))
        print("\n".join(f"tiered: {line}" for line in lines), flush=True)

    return say


def _rows(folder: Path) -> Monitor:
    """Return what writes a csv file for each kind of event."""

    def write(step: MonitoredStep) -> None:
        for name, value in step.events().items():
            path = folder / f"{name.replace('/', '_')}.csv"
            fresh = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step.samples, value])

    return write


def _scalars(log: Log, stack: ExitStack) -> Monitor:
    """Return what writes events for TensorBoard, until ``stack`` is closed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MisuseError('tensorboard is enabled, and not installed: pip install tensorboard, or "enabled": false') from error
    writer: Any = SummaryWriter(log_dir=str(_folder(log)))
    stack.callback(writer.close)

    def write(step: MonitoredStep) -> None:
        for name, value in step.events().items():
            writer.add_scalar(name, value, step.samples)
        writer.flush()

    return write


# Operations


@contextmanager
def _counted(module: nn.Module, profile: FlopsProfile, step: int) -> Iterator[None]:
    """Count the operations of a block, and print them, or write them to a file; nothing where it ends by an exception."""
    began = time.monotonic()
    with FlopCounterMode(display=False) as counter:
        yield
    text = _profile(counter, module, profile, step, time.monotonic() - began)
    if profile.output_file is None:
        print(text, flush=True)
    else:
        path = Path(profile.output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


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
