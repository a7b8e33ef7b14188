"""``tiered bench train``: train one model in memory, in a store without a disk, and on disk, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psutil

from tiered import CapacityError, MisuseError
from tiered.cli.bench.reports import Measuring, reported
from tiered.cli.bench.series import refuse_full_disk
from tiered.cli.bench.trainer import PHASES, BenchTraining, TrainerOptions, Variant, training
from tiered.cli.info.machine import store_facts
from tiered.cli.output import counted, table, told_environment, told_io, told_noise
from tiered.cli.train.model import GRADIENT_BYTES, STATE_BYTES
from tiered.measuring.meters import Spread, scratch_folder
from tiered.types import format_size

__all__ = ["WARM_UP", "bench", "describe"]

WARM_UP = 5
"""Steps that do not count: they make the moments, and the store learns the order of a step."""
VARIANTS = (Variant("on disk", "disk"), Variant("DRAM only", "dram"), Variant("in memory", "memory"))
"""The order in which they start: the first one decides which modules the last one computes in parts."""


def bench(options: TrainerOptions, json: str | None) -> int:
    """Measure and print; returns the exit code."""

    def measure(under: Measuring) -> Callable[[], str]:
        if options.update == "in_backward" and options.accumulate > 1:
            raise MisuseError("--update in_backward makes each batch a step: leave out --accumulate")
        _refuse_small_machine(options)
        report = under.report
        report |= {
            "model": {name: getattr(options, name) for name in ("layers", "width", "heads", "context", "batch", "accumulate")},
            "parameters": options.shape.parameters, "micro_batch": options.micro_batch, "update": options.update,
            "rounds": options.rounds,
        }  # fmt: skip
        report |= store_facts(options.folder, options.backend)
        here = replace(options, folder=under.stack.enter_context(scratch_folder(options.folder)))
        report |= _train(here, under)
        return lambda: describe(report)

    return reported(measure, json)


def _refuse_small_machine(options: TrainerOptions) -> None:
    """Raise CapacityError where the three trainings, which run at the same time, do not fit in memory or on disk."""
    needed = (STATE_BYTES + GRADIENT_BYTES) * options.shape.parameters + options.whole + options.pool
    available = psutil.virtual_memory().available
    if needed > available:
        raise CapacityError(
            f"the three trainings need {format_size(needed)} of memory without activations, {format_size(available)} is "
            "available: lower --layers or --width"
        )
    refuse_full_disk(options.folder, 2 * options.state, "--layers or --width")


def _train(options: TrainerOptions, under: Measuring) -> dict[str, Any]:
    """Run steps of all three in turn, so that changes over time affect all alike."""
    trainings: dict[str, BenchTraining] = {}
    begun: dict[str, dict[str, Any]] = {}
    split: tuple[str, ...] = ()
    for variant in VARIANTS:
        under.stop.check()
        under.progress.working(f"{variant.name}: making the model", 0.0)
        trainings[variant.place] = one = under.stack.enter_context(training(options, variant, split))
        begun[variant.place] = one.begin()
        split = split or tuple(begun[variant.place]["split"])
    steps: dict[str, list[dict[str, Any]]] = {place: [] for place in trainings}
    total = WARM_UP + options.rounds
    for number in range(total):
        what = f"warming up: step {number + 1}" if number < WARM_UP else f"round {number - WARM_UP + 1} of {options.rounds}"
        for turn, (place, one) in enumerate(trainings.items()):
            under.stop.check()
            under.progress.working(f"{what}, {one.variant.name}", (number + turn / len(trainings)) / total)
            steps[place].append(one.step())
    under.progress.working("done", 1.0)
    ended = {place: one.end() for place, one in trainings.items()}
    parameters = options.shape.parameters
    return {
        "variants": {
            place: _numbers(steps[place][WARM_UP:], steps["memory"][WARM_UP:], parameters)
            | ended[place]
            | {
                "baseline_rss": begun[place]["baseline"],
                "losses": [step["losses"] for step in steps[place]],
                "norms": [step["norm"] for step in steps[place]],
                "differs": _difference(steps[place], steps["memory"]),
            }
            for place in reversed(trainings)
        }
    }


def _numbers(steps: list[dict[str, Any]], beside: list[dict[str, Any]], parameters: int) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        return Spread.of(values).as_json()

    def moved(name: str) -> dict[str, float] | None:
        found = [step[name] / parameters for step in steps if step[name] is not None]
        return spread(found) if found else None

    taken = [step["seconds"] for step in steps]
    return {
        "seconds": spread(taken),
        "by_memory": Spread.by(taken, [step["seconds"] for step in beside]).as_json(),
        "phases": {name: spread([step["phases"][name] for step in steps]) for name in PHASES},
        "bytes_per_parameter": {name: moved(name) for name in ("read", "written", "kernel_read", "kernel_written")},
    }


def _difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str | None:
    """Describe the first loss or norm that is not the same bit by bit; None where all are."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        for a, b in zip([*one["losses"], one["norm"]], [*other["losses"], other["norm"]], strict=True):
            if repr(a) != repr(b):  # compares NaNs as equal; every other float has its own shortest form
                return f"step {number}: {a!r}, not {b!r}"
    return None


def describe(report: Mapping[str, Any]) -> str:
    """Format the report as text."""
    variants: Mapping[str, Mapping[str, Any]] = report["variants"]
    names: dict[str, str] = {variant.place: variant.name for variant in VARIANTS}

    def told(spread: Mapping[str, float] | None, digits: int = 2) -> str:
        return "-" if spread is None else Spread(spread["median"], spread["min"], spread["max"]).shown(digits=digits)

    def size(nbytes: int | None) -> str:
        return "-" if nbytes is None else format_size(nbytes)

    rows = [["", *(names[place] for place in variants)]]
    rows.append(["seconds per step", *(told(v["seconds"], 3) for v in variants.values())])
    rows.append(["by training in memory", *(told(v["by_memory"]) for v in variants.values())])
    for phase in PHASES:
        rows.append([f"  {phase}", *(told(v["phases"][phase], 3) for v in variants.values())])
    for name, what in ("kernel_read", "bytes read per parameter"), ("kernel_written", "bytes written per parameter"):
        rows.append([what, *(told(v["bytes_per_parameter"][name]) for v in variants.values())])
    rows.append(["peak memory", *(size(v["peak_rss"]) for v in variants.values())])
    rows.append(["  before the model", *(size(v["baseline_rss"]) for v in variants.values())])
    rows.append(["  pool of the store", *(size(v["pool"] and v["pool"]["peak_bytes"]) for v in variants.values())])
    model = report["model"]
    disk = variants["disk"]
    lines = [
        told_environment(report),
        told_io(report),
        f"GPT of {report['parameters']:,} parameters: {counted(model['layers'], 'layer')} of width {model['width']}, context "
        f"{model['context']}",
        f"{model['accumulate']} x {counted(model['batch'], 'text')} per step, {counted(report['micro_batch'], 'part')} inside "
        f"units, {report['update']}",
        f"on disk with {format_size(disk['pool']['budget_bytes'])} of memory in {counted(disk['units'], 'unit')}",
        f"{counted(report['rounds'], 'round')}, interleaved: median [least - most]; bytes as the kernel counts them; "
        f"{told_noise(report['noise'])}",
        "",
        table(rows),
        "",
    ]
    for variant in ("dram", "disk"):
        differs = variants[variant]["differs"]
        steps = len(variants[variant]["losses"])
        same = f"the same losses and norms as in memory in all {steps} steps, bit by bit"
        lines.append(f"{names[variant]}: {same if differs is None else f'differs from training in memory at {differs}'}")
    return "\n".join(lines)
