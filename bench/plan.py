"""What a plan says, beside what runs do: seconds of a step, bytes of the drive, and the most memory of the process.

    .venv/bin/python -m bench.plan --dir /mnt/nvme > bench/results/plan_<hardware>_<date>.md
    .venv/bin/python -m bench.plan --model gpt --budget 50% --update on_fetch       one row
    .venv/bin/python -m bench.plan --activations store --micro-batch 2              rows of these ways, too

Four models, budgets of 10, 50 and 90 % of the state, and both update modes: 24 rows. The machine is measured first, in the same
run and the same folder. Each row trains in a process of its own: some steps until their order is known, then the median of
five. The plan is made in this process right before, and the operations of the model are timed by shape each time, because the
speed of a virtual machine changes by a third within minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.step import Model as Mlp
from bench.step import NextTokens
from tiered import zero
from tiered.cli.bench.step import Stepper, Update
from tiered.cli.output import told_environment
from tiered.cli.train.model import GPT, Shape
from tiered.measuring.meters import environment, peak_memory, scratch_store
from tiered.measuring.probes import measured_machine
from tiered.planning.dry_run import Activations
from tiered.planning.machine import Machine
from tiered.planning.plan import Choice, Planner, Prediction
from tiered.planning.sources import Workload, subject_of
from tiered.zero import Policy
from tiered.zero.rules.exact import AdamWRule

__all__ = ["CASES", "Case", "Measured", "measure"]

WARM_UP, STEPS = 5, 5
STATE = 12
"""Bytes of parameters and moments, for each parameter."""


@dataclass(frozen=True)
class Subject:
    """A model and its tokens."""

    make: Callable[[], nn.Module]
    batch: int
    tokens: int


MODELS = {
    "gpt": Subject(lambda: GPT(Shape(8, 384, 6, 128)), 4, 128),
    "gpt-wide": Subject(lambda: GPT(Shape(3, 768, 12, 64)), 2, 64),
    "gpt-recomputed": Subject(lambda: GPT(Shape(6, 512, 8, 128, recompute=True)), 2, 128),
    "mlp": Subject(lambda: Mlp(16, 384), 8, 32),
}


@dataclass(frozen=True)
class Case:
    """One row: ``budget`` is a share of the state; ``activations`` and ``micro_batch`` as in ``zero.page``."""

    model: str
    budget: float
    update: Update
    activations: Activations = "memory"
    micro_batch: int = 1

    @property
    def way(self) -> str:
        return f"{self.micro_batch} parts" if self.micro_batch > 1 else self.activations


@dataclass(frozen=True)
class Measured:
    """Medians of a step, and the most bytes of memory of the process, and of its pool. Of a step ``waited`` for the store, and
    ``updating``."""

    seconds: float
    waited: float
    updating: float
    spread: tuple[float, float]
    moved: float
    process: int
    pool: int


UPDATES: tuple[Update, ...] = ("on_fetch", "in_backward")
CASES = [Case(model, budget, update) for model in MODELS for budget in (0.1, 0.5, 0.9) for update in UPDATES]


def dram_of(case: Case) -> int:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in MODELS[case.model].make().parameters())
    return max(1 << 20, int(case.budget * STATE * parameters))


def train(case: Case, folder: str) -> dict[str, Any]:
    """Train in this process; medians of a step."""
    subject = MODELS[case.model]
    torch.manual_seed(0)
    dram = dram_of(case)
    with torch.device("meta"):
        model = subject.make()
    with scratch_store(folder, dram=dram) as store:
        stepper = Stepper(
            store, model, NextTokens(subject.batch, subject.tokens), update=case.update, activations=case.activations,
            micro_batch=case.micro_batch,
        )  # fmt: skip
        steps, updating = [], [0.0]
        for _ in range(WARM_UP + STEPS):
            steps.append(stepper.step())
            updating.append(zero.statistics(stepper.model).update_seconds)
        pool = store.statistics().tier("dram").peak
    steps = steps[WARM_UP:]
    taken = [step.seconds for step in steps]
    return {
        "seconds": statistics.median(taken), "spread": (min(taken), max(taken)), "process": peak_memory(), "pool": pool,
        "moved": statistics.fmean(step.bytes for step in steps),
        "waited": statistics.median(step.stalled for step in steps),
        "updating": statistics.median(b - a for a, b in itertools.pairwise(updating[WARM_UP:])),
    }  # fmt: skip


def measure(case: Case, folder: str, threads: int) -> Measured:
    """Train in a process of its own."""
    given = json.dumps({"case": case.__dict__, "folder": folder, "threads": threads})
    done = subprocess.run([sys.executable, "-m", "bench.plan", "--worker", given], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"training failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def planner_of(name: str, machine: Machine) -> Planner:
    """Return what plans cases of a model, which is on the meta device; its operations are timed now."""
    subject = MODELS[name]
    with torch.device("meta"):
        model = subject.make()
    found = subject_of(model, Workload(subject.batch, subject.tokens))
    return Planner(found, machine, AdamWRule(1e-3, (0.9, 0.999), 1e-8, 0.01, False), Policy(), 1, measure=True)


def rows(cases: list[Case], machine: Machine, folder: str, threads: int) -> Iterator[tuple[Case, Prediction, Measured]]:
    for case in cases:
        choice = Choice(case.update, case.activations, dram_of(case), case.micro_batch)
        planned = planner_of(case.model, machine).predict(choice)
        yield case, planned, measure(case, folder, threads)


def row(case: Case, chosen: Prediction, measured: Measured) -> tuple[str, tuple[float, float, float]]:
    moved, process = chosen.read + chosen.written, chosen.memory.process
    errors = chosen.seconds / measured.seconds - 1, moved / max(1.0, measured.moved) - 1, process / measured.process - 1
    low, high = measured.spread
    parts = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in chosen.by_work.items() if seconds >= 0.005)
    return (
        f"| {case.model} | {case.budget:.0%} | {case.update} | {case.way} | {chosen.seconds:.3f} "
        f"| {measured.seconds:.3f} [{low:.3f}, {high:.3f}] | {errors[0]:+.0%} | {moved / 1e6:.1f} "
        f"| {measured.moved / 1e6:.1f} | {errors[1]:+.1%} | {process / 2**20:.0f} "
        f"| {measured.process / 2**20:.0f} | {errors[2]:+.0%} "
        f"| {parts}, waiting {chosen.waiting:.2f} "
        f"| update {measured.updating:.2f}, waiting {measured.waited:.2f}, "
        f"rest {measured.seconds - measured.updating - measured.waited:.2f} |"
    ), errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--budget", action="append", help="share of the state, like 50%%")
    parser.add_argument("--update", action="append", choices=UPDATES)
    parser.add_argument("--activations", action="append", choices=("memory", "recompute", "store"), help="default: memory")
    parser.add_argument("--micro-batch", action="append", type=int, default=[], help="parts of a batch inside units")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--machine", help="the file of a machine, instead of measuring one")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        given = json.loads(options.worker)
        torch.set_num_threads(given["threads"])
        print(json.dumps(train(Case(**given["case"]), given["folder"])))
        return 0
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    machine = Machine.of(options.machine) if options.machine else measured_machine(options.dir)
    budgets = [float(text.rstrip("%")) / 100 for text in options.budget or ()]
    ways = [(way, 1) for way in options.activations or ([] if options.micro_batch else ["memory"])]
    chosen = [
        Case(case.model, case.budget, case.update, way, parts)
        for way, parts in [*ways, *(("memory", parts) for parts in options.micro_batch)]
        for case in CASES
        if case.model in (options.model or MODELS) and (not budgets or case.budget in budgets)
        and case.update in (options.update or UPDATES)
    ]
    print(told_environment(environment()) + f", {options.threads} threads of torch\n")
    print(f"Machine: {machine}\n")
    heads = ("model", "budget", "update", "activations", "s planned", "s measured [least, most]", "error", "MB planned",
             "MB measured", "error", "MiB planned", "MiB measured", "error", "planned seconds", "measured")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|---|---:|---|---|" + "---:|" * 9 + "---|---|")
    errors = []
    for case, plan, measured in rows(chosen, machine, options.dir, options.threads):
        text, error = row(case, plan, measured)
        errors.append(error)
        print(text, flush=True)
    for name, found in zip(("seconds", "bytes", "memory"), zip(*errors, strict=True), strict=True):
        print(f"\n- {name}: median error {statistics.median(found):+.1%}, from {min(found):+.1%} to {max(found):+.1%}", end="")
    print(f"\n\n{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
