"""``tiered bench step``: the time of an optimizer step whose state is on disk, and the time that the disk needs for the bytes
of this step alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from tiered import CapacityError, MisuseError, TieredStore, zero
from tiered.cli.bench.reports import Measuring, reported
from tiered.cli.bench.series import refuse_full_disk
from tiered.cli.info.machine import store_facts
from tiered.cli.output import (
    counted,
    rate_unit,
    table,
    told_environment,
    told_io,
    told_noise,
)
from tiered.cli.train.optimizers import kind_named
from tiered.measuring import fio
from tiered.measuring.meters import (
    Meter,
    Rates,
    Spread,
    Usage,
    measure,
    scratch_folder,
    scratch_store,
)
from tiered.store.opening import SMALLEST_DRAM
from tiered.types import BackendName, format_size

__all__ = ["Stack", "StepOptions", "Stepper", "Update", "bench"]

Dtype = Literal["float32", "bfloat16"]
Update = Literal["on_fetch", "in_backward"]
WARM_UP = 4
"""Steps that do not count: the first has no updates, the second makes the moments, in the third the store learns the order."""
TOKENS = 4
REPORTED = ("parameters", "dtype", "optimizer", "update", "passes", "micro_batch", "rounds")
"""Options that are part of the report."""
LAYERS = 16
"""Least number of layers; a layer's parameters also take at most a 32nd of the memory."""


@dataclass(frozen=True)
class StepOptions:
    """Options of ``tiered bench step``.

    ``dram``: bytes, None for a tenth of the state. ``threads``: None for one less than torch's default, because the store's own
    thread needs a core. ``passes``: batches per step; ``micro_batch``: parts of each batch inside units."""

    folder: str
    parameters: int
    dram: int | None
    dtype: Dtype
    update: Update
    passes: int
    micro_batch: int
    backend: BackendName
    rounds: int
    beside: Literal["fio", "nothing"]
    threads: int | None = None
    optimizer: str = "adamw"

    @property
    def state(self) -> int:
        """Bytes of parameters, of which a bf16 one is the upper half of its master, and what the optimizer keeps for them."""
        return int(self.parameters * kind_named(self.optimizer).bytes_kept)

    @property
    def pool(self) -> int:
        """Bytes of the store's memory."""
        return self.state // 10 if self.dram is None else self.dram


class Stack(nn.Module):
    """Square layers one after the other, with hardly any computing. The layers are residual, because without that gradients and
    moments become subnormal numbers, with which a processor computes many times more slowly."""

    def __init__(self, layers: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype, device="meta") for _ in range(layers))

    @classmethod
    def of(cls, options: StepOptions) -> Stack:
        """Make a stack of about ``options.parameters``."""
        dtype: torch.dtype = getattr(torch, options.dtype)
        most = min(options.parameters // LAYERS, options.pool // 32 // dtype.itemsize)
        width = max(64, math.isqrt(most) // 64 * 64)
        return cls(max(1, round(options.parameters / width**2)), width, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Stepper:
    """Runs training steps of ``model`` in one store. ``loss`` makes the loss of one pass; ``paging``: more arguments of
    ``zero.page``."""

    def __init__(
        self,
        store: TieredStore,
        model: nn.Module,
        loss: Callable[[nn.Module], torch.Tensor],
        *,
        optimizer: str = "adamw",
        update: Update = "on_fetch",
        passes: int = 1,
        **paging: Any,
    ) -> None:
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model = zero.page(model, store, **paging)
        self._optimizer = kind_named(optimizer).ours(self.model.parameters(), lr=1e-4, update=update)
        self._loss, self._passes, self._meter = loss, passes, Meter(store)

    def step(self) -> Usage:
        """Run forward and backward of each pass and the optimizer's step, and measure them."""
        self._meter.lap()
        for _ in range(self._passes):
            self._loss(self.model).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._meter.lap()


def bench(options: StepOptions, json: str | None) -> int:
    """Measure and print; returns the exit code."""
    return reported(partial(_measure, options), json)


def _measure(options: StepOptions, under: Measuring) -> Callable[[], str]:
    if options.pool < SMALLEST_DRAM:
        raise MisuseError(f"--dram {format_size(options.pool)} is too small for a store: the least is 1MiB")
    if options.update == "in_backward" and options.passes > 1:
        raise MisuseError("--update in_backward makes each pass a step: without --passes")
    report, stack, threads = under.report, under.stack, torch.get_num_threads()
    stack.callback(torch.set_num_threads, threads)
    report |= {name: getattr(options, name) for name in REPORTED}
    report |= {"pool_bytes": options.pool, "threads": options.threads or max(1, threads - 1)}
    torch.set_num_threads(report["threads"])
    report |= store_facts(options.folder, options.backend)
    refuse_full_disk(options.folder, 3 * options.state + (1 << 30 if options.beside == "fio" else 0), "--parameters")
    under.progress.working("writing the parameters", 0.0)
    store = stack.enter_context(scratch_store(options.folder, dram=options.pool, backend=options.backend))
    torch.manual_seed(0)
    model = Stack.of(options)
    inputs = next(model.parameters()).new_ones((TOKENS * options.micro_batch, model.width), device="cpu")
    stepper = Stepper(
        store, model, lambda model: model(inputs).float().square().mean(), micro_batch=options.micro_batch,
        optimizer=options.optimizer, update=options.update, passes=options.passes,
    )  # fmt: skip
    disk = _disk(options, stack)
    steps, disks = _rounds(stepper, disk, options.rounds, under)
    report |= {"parameters": stepper.parameters, "peak_bytes": store.statistics().tiers[0].peak}
    report["units"] = zero.statistics(stepper.model).units
    report |= _numbers(stepper.parameters, steps, disks)
    return lambda: _describe(report)


def _disk(options: StepOptions, stack: ExitStack) -> Callable[[], Rates]:
    """Make a function that measures the disk now: with fio, or through a store with large tensors. It is a store of its own:
    its tensors would be part of what the model's store learns a step to be, and displace the model."""
    if options.beside == "nothing":
        beside = stack.enter_context(scratch_store(options.folder, dram=options.pool, backend=options.backend))

        def through_the_store() -> Rates:
            found = measure(beside)
            if found is None:
                raise CapacityError("the disk has no room for the measurement: lower --parameters")
            return found

        return through_the_store
    buffers = stack.enter_context(fio.huge_buffers(fio.BLOCK * fio.DEPTH))
    program = fio.Fio(stack.enter_context(scratch_folder(options.folder)), 1 << 30, buffers)
    program.prepare()

    def by_fio() -> Rates:
        read, write = (program.run(fio.Job(mode, "libaio")).rate for mode in ("read", "write"))
        return Rates(read, write)

    return by_fio


def _rounds(
    stepper: Stepper, disk: Callable[[], Rates], rounds: int, under: Measuring
) -> tuple[list[Usage], list[Rates]]:
    """Run steps and measurements of the disk in turn."""
    total = WARM_UP + rounds
    for number in range(WARM_UP):
        under.stop.check()
        under.progress.working(f"warming up: step {number + 1} of {WARM_UP}", number / total)
        stepper.step()
    steps, disks = [], []
    for number in range(rounds):
        under.stop.check()
        under.progress.working(f"round {number + 1} of {rounds}", (WARM_UP + number) / total)
        disks.append(disk())
        steps.append(stepper.step())
    under.progress.working("done", 1.0)
    return steps, disks


def _numbers(parameters: int, steps: list[Usage], disks: list[Rates]) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        return Spread.of(values).as_json()

    kernel = [step.kernel_bytes for step in steps if step.kernel_bytes is not None]
    alone = [disk.seconds(step.read, step.written) for step, disk in zip(steps, disks, strict=True)]
    return {
        "seconds": spread([step.seconds for step in steps]),
        "waited_seconds": spread([step.stalled for step in steps]),
        "read_bytes_per_parameter": spread([step.read / parameters for step in steps]),
        "written_bytes_per_parameter": spread([step.written / parameters for step in steps]),
        "kernel_bytes_per_parameter": spread([n / parameters for n in kernel]) if kernel else None,
        "disk_read_bytes_per_second": spread([disk.read for disk in disks]),
        "disk_write_bytes_per_second": spread([disk.write for disk in disks]),
        "disk_seconds": spread(alone),
        "step_by_disk": Spread.by([step.seconds for step in steps], alone).as_json(),
    }


def _describe(report: dict[str, Any]) -> str:
    def told(name: str, factor: float = 1.0) -> str:
        found = report[name]
        return Spread(found["median"], found["min"], found["max"]).shown(factor) if found else "the kernel does not count them"

    slow = [report[f"disk_{way}_bytes_per_second"]["median"] for way in ("read", "write")]
    unit, factor = rate_unit(*slow)
    rows = [
        ["seconds per step", told("seconds")],
        ["  of these waiting for the store", told("waited_seconds")],
        ["bytes read per parameter", told("read_bytes_per_parameter")],
        ["bytes written per parameter", told("written_bytes_per_parameter")],
        ["both, as the kernel counts them", told("kernel_bytes_per_parameter")],
        [f"the disk alone reads, {unit}", told("disk_read_bytes_per_second", factor)],
        [f"the disk alone writes, {unit}", told("disk_write_bytes_per_second", factor)],
        ["seconds the disk alone needs for these bytes", told("disk_seconds")],
        ["step by disk alone", told("step_by_disk")],
    ]
    return "\n".join(
        [
            told_environment(report),
            told_io(report),
            f"{report['parameters']:,} parameters, {report['dtype']}, in {counted(report['units'], 'unit')}; "
            f"{report['optimizer']}, "
            f"{report['update']}, {counted(report['passes'], 'pass')} of {counted(report['micro_batch'], 'part')}, "
            f"{counted(report['threads'], 'thread')} of torch; "
            f"{format_size(report['pool_bytes'])} of memory, {format_size(report['peak_bytes'])} used at most",
            f"{counted(report['rounds'], 'round')}: median [least - most]; {told_noise(report['noise'])}",
            "",
            table(rows),
        ]
    )
