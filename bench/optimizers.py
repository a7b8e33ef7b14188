"""Training steps of one GPT with several optimizers in a store, beside torch's AdamW in memory: seconds, bytes and memory.

    .venv/bin/python -m bench.optimizers --dir /mnt/nvme                          168 million parameters, 32 tokens a step
    .venv/bin/python -m bench.optimizers --optimizer adamw --optimizer adamw8bit --layers 12

Each trains in a process of its own. The processes take turns, one step each, so that all of them see the same drive and the
same other programs. In stores the memory is a share (``--share``) of parameters and fp32 moments, the same for all, and updates
are made within backward. "state": the bytes of a parameter and its states. The bound is the larger of the seconds of the step
in memory and of its bytes at the rate of the drive, which is measured between the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tiered.cli.bench.trainer import TrainerOptions, Variant, training
from tiered.cli.output import Progress, told_environment
from tiered.cli.train.optimizers import kind_named
from tiered.cli.train.options import OPTIMIZERS
from tiered.measuring.drive import DEPTH, PIECE, Drive, Point
from tiered.measuring.fio import Mode
from tiered.measuring.meters import Spread, environment, turns
from tiered.types import format_size

MEMORY = Variant("in memory: torch's AdamW", "memory")
STORED = ("adamw", "adamw_bf16", "adamw8bit", "adamw4bit")
WAYS: tuple[Mode, ...] = ("read", "write")
WARM_UP = 4
"""Steps until the order is known and all states are there."""


class Ended(NamedTuple):
    """A training that has ended: the steps that count, and what it said last."""

    variant: Variant
    steps: list[dict[str, Any]]
    end: dict[str, Any]


def measure(options: argparse.Namespace, each: TrainerOptions) -> tuple[list[Ended], list[float]]:
    """Return the trainings with their steps, and the seconds that the drive took for a byte after each round."""
    with ExitStack() as stack:
        at = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        progress = stack.enter_context(Progress(sys.stderr))
        variants = [MEMORY, *(Variant(name, "disk", name) for name in options.optimizer or STORED)]
        probe = stack.enter_context(closing(Drive(at / "probe", 1 << 30)))
        probe.prepare()
        trainings = [stack.enter_context(training(each, variant)) for variant in variants]
        steps: list[list[dict[str, Any]]] = [[] for _ in trainings]
        for one in trainings:
            one.begin()
        costs = []
        total = WARM_UP + options.steps
        for number, order in turns(range(len(trainings)), total):
            for turn, place in enumerate(order):
                one = trainings[place]
                progress.working(f"step {number + 1} of {total}, {one.variant.name}", (number + turn / len(trainings)) / total)
                steps[place].append(one.step())
            if number >= WARM_UP:
                costs.append(sum(0.5 / probe.run(Point(way, "sequential", PIECE, DEPTH)).rate for way in WAYS))
        progress.working("done", 1.0)
        return [Ended(one.variant, found[WARM_UP:], one.end()) for one, found in zip(trainings, steps, strict=True)], costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=32, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=1, help="texts of a step")
    parser.add_argument("--share", type=float, default=0.1, help="of parameters and fp32 moments that memory has room for")
    parser.add_argument("--steps", type=int, default=7, help="that count")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help=f"default: {', '.join(STORED)}")
    options = parser.parse_args()
    shape = options.layers, options.width, options.heads, options.context
    each = TrainerOptions(options.dir, None, *shape, options.batch, update="in_backward")
    each = replace(each, dram=int(options.share * each.state))
    parameters = each.shape.parameters
    print(told_environment(environment()))
    trainings, costs = measure(options, each)
    print(
        f"\nGPT of {parameters / 1e6:.1f} M parameters, {options.batch} x {options.context} tokens a step, in stores "
        f"with {format_size(each.pool)} of memory; {options.steps} steps after {WARM_UP}. The drive moves "
        f"{1e-9 / statistics.median(costs):.2f} GB/s.\n"
    )
    print("| optimizer | state, bytes | seconds a step | by memory | by adamw | by the bound | bytes a step and parameter "
          "| update | waiting | peak MiB | loss |\n|---|---:|" + "---:|" * 9)  # fmt: skip
    memory, usual = ([step["seconds"] for step in one.steps] for one in trainings[:2])
    for one in trainings:
        taken = [step["seconds"] for step in one.steps]
        moved = [step["read"] + step["written"] for step in one.steps]
        bound = [max(beside, nbytes * cost) for beside, nbytes, cost in zip(memory, moved, costs, strict=True)]
        by = [Spread.by(taken, other).shown() for other in (memory, usual, bound)]
        phases = (statistics.median(step["phases"][name] for step in one.steps) for name in ("update", "waiting"))
        print(
            f"| {one.variant.name} | {kind_named(one.variant.optimizer).bytes_kept:.2f} | {Spread.of(taken).shown()} "
            f"| {' | '.join(by)} | {statistics.fmean(moved) / parameters:.2f} "
            f"| {' | '.join(f'{phase:.2f}' for phase in phases)} "
            f"| {one.end['peak_rss'] / 2**20:.0f} | {one.steps[-1]['losses'][-1]:.4f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
