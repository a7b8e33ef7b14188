"""Activations in memory, computed again, in the store, and where a plan puts them: seconds of a step, interleaved.

    .venv/bin/python -m bench.activations --dir /mnt/nvme > bench/results/activations_<hardware>_<date>.md
    .venv/bin/python -m bench.activations --shape long --steps 5       one shape

Each variant trains the same model in a process of its own, with half of its state in DRAM. The processes take turns, one step
each, so that all of them see the same drive and the same other programs. "auto" may have a share (``--share``) of the
activations in memory, and is measured after it has chosen. Losses of all variants have to be equal, or nothing is printed.
Beside them is what a plan made right before says of each variant that is the same for all modules, on the machine as measured
in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tiered.cli.bench.trainer import TrainerOptions, Variant, training
from tiered.cli.output import told_environment
from tiered.cli.train.model import GPT, Shape
from tiered.measuring.meters import Spread, environment, turns
from tiered.measuring.probes import measured_machine
from tiered.planning.dry_run import Activations
from tiered.planning.machine import Machine
from tiered.planning.plan import Choice, Planner, Prediction
from tiered.planning.sources import Workload, subject_of
from tiered.zero import Policy
from tiered.zero.rules.exact import AdamWRule

PLANNED: tuple[Activations, ...] = ("memory", "recompute", "store")
VARIANTS: tuple[Literal["memory", "recompute", "store", "auto"], ...] = (*PLANNED, "auto")
WARM_UP = 6
"""Steps before those that count: three are measured by "auto", and the order of the steps that follow is known after two."""
STATE = 12


@dataclass(frozen=True)
class Case:
    """``share``: of the model's state that DRAM has room for."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    share: float = 0.5

    @property
    def shape(self) -> Shape:
        return Shape.of(self)

    @property
    def dram(self) -> int:
        return max(8 << 20, int(self.share * STATE * self.shape.parameters))


SHAPES = {
    "wide": Case(4, 768, 12, 256, 2),
    "long": Case(4, 256, 4, 1024, 2),
    "small": Case(8, 384, 6, 128, 2),
}


def saved_by(case: Case) -> int:
    """Return about how many bytes of activations a pass of the model saves: measured in memory, once."""
    torch.manual_seed(0)
    model, found = GPT(case.shape), dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    batch = torch.zeros(case.batch, case.context, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    del kept
    return sum(nbytes for address, nbytes in found.items() if address not in parameters)


def planned(case: Case, machine: Machine) -> dict[str, Prediction]:
    """Return what a plan says of each variant that it knows; operations of the model are timed now."""
    with torch.device("meta"):
        model = GPT(case.shape)
    subject = subject_of(model, Workload(case.batch, case.context))
    planner = Planner(subject, machine, AdamWRule(1e-4, (0.9, 0.999), 1e-8, 0.01, False), Policy(), 1, measure=True)
    return {way: planner.predict(Choice("on_fetch", way, case.dram)) for way in PLANNED}


def run(name: str, case: Case, folder: str, steps: int, share: float, machine: Machine) -> None:
    saved = saved_by(case)
    memory = int(share * saved)
    predicted = planned(case, machine)
    shape = case.layers, case.width, case.heads, case.context
    each = TrainerOptions(folder, None, *shape, case.batch, dram=case.dram, clip=0.0)
    with ExitStack() as stack:
        trainings = {
            way: stack.enter_context(training(each, Variant(way, "disk", activations=way, activation_memory=memory)))
            for way in VARIANTS
        }
        rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
        for one in trainings.values():
            one.begin()
        for _, order in turns(VARIANTS, WARM_UP + steps):
            for variant in order:
                rows[variant].append(trainings[variant].step())
        ended = {variant: one.end() for variant, one in trainings.items()}
    losses = {variant: [one["losses"] for one in found] for variant, found in rows.items()}
    if any(found != losses["memory"] for found in losses.values()):
        sys.exit(f"{name}: losses differ: {losses}")
    base = [one["seconds"] for one in rows["memory"][WARM_UP:]]
    chosen = ended["auto"]["plan"]
    print(f"\n## {name}: {case.layers} layers of width {case.width}, {case.batch} x {case.context} tokens\n")
    print(f"{case.shape.parameters / 1e6:.1f} M parameters, DRAM for {case.share:.0%} of the state.")
    print(f"A pass saves {saved / 2**20:.0f} MiB, of which auto may keep {memory / 2**20:.0f} MiB in memory.")
    print(f"Losses of {WARM_UP + steps} steps are equal, bit for bit.\n")
    print("| activations | seconds a step, median [least, most] | by memory, of pairs | planned | waited | MB moved a step "
          "| peak MiB |\n|---|---:|---:|---:|---:|---:|---:|")  # fmt: skip
    for variant in VARIANTS:
        found = rows[variant][WARM_UP:]
        taken = [one["seconds"] for one in found]
        plan = f"{predicted[variant].seconds / predicted['memory'].seconds:.2f}" if variant in predicted else "-"
        print(
            f"| {variant} | {Spread.of(taken).shown(digits=3)} | {Spread.by(taken, base).shown()} | {plan} "
            f"| {statistics.median(one['phases']['waiting'] for one in found):.2f} "
            f"| {statistics.median(one['read'] + one['written'] for one in found) / 1e6:.0f} "
            f"| {ended[variant]['peak_rss'] / 2**20:.0f} |"
        )
    hides = "moves activations beside computing" if predicted["store"].hides_activations else "does not hide activations"
    print(f"\nThe plan says that the drive {hides}.")
    ways = list(chosen["ways"].values())
    counts = ", ".join(f"{ways.count(way)} {way}" for way in PLANNED)
    print(f"\nauto chose {chosen['choices']} times: {counts}; the rest: {chosen['rest']}. {chosen['why']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=7, help="that count")
    parser.add_argument("--share", type=float, default=0.5, help="of the activations that auto may keep in memory")
    options = parser.parse_args()
    began = time.monotonic()
    print(told_environment(environment()))
    machine = measured_machine(options.dir)
    for name, case in SHAPES.items():
        if name in (options.shape or SHAPES):
            run(name, case, options.dir, options.steps, options.share, machine)
    print(f"\n{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
