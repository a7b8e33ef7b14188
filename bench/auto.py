"""What ``activations="auto"`` chose, beside the best of an exhaustive search over the ways of a GPT's blocks.

    .venv/bin/python -m bench.auto --dir /mnt/nvme > bench/results/auto_<hardware>_<date>.md

One model trains in one process. After the warm-up has chosen, each assignment of memory, recompute and store to the blocks that
fits into the same memory trains some steps, and then the best of them and the chosen one train in turns. Other modules stay as
they were chosen. A step of each assignment is not measured, because its order is not known yet.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from typing import get_args

import torch
import torch.nn.functional as F
from torch import nn

from bench.activations import Case, saved_by
from tiered import zero
from tiered.cli.bench.step import Stepper
from tiered.cli.output import told_environment
from tiered.cli.train.model import GPT
from tiered.measuring.meters import environment, scratch_store
from tiered.tuning.program import Way, evaluate
from tiered.zero.paging.pager import pager_of

CASE = Case(layers=4, width=256, heads=4, context=512, batch=2)
BUDGET = 28 << 20
"""Bytes of DRAM: with so many each block is a segment, and two thirds of the state fit."""
UNMEASURED, BRIEFLY, FINALLY, BEST = 2, 2, 5, 4


def search(share: float, folder: str, seed: int) -> None:
    torch.manual_seed(0)
    memory = int(share * saved_by(CASE))
    drawn = random.Random(seed)
    with scratch_store(folder, dram=BUDGET) as store:
        tokens = torch.randint(0, 256, (CASE.batch, CASE.context))

        def loss(model: nn.Module) -> torch.Tensor:
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

        stepper = Stepper(store, GPT(CASE.shape), loss, activations=zero.AutoPlan(memory=memory, change=0.99))

        def step() -> float:
            return stepper.step().seconds

        for _ in range(6):
            step()
        chooser = pager_of(stepper.model).adaptive
        assert chooser is not None
        profile, chosen, pool = chooser._profile, dict(chooser.ways), chooser._pool
        assert profile is not None
        blocks = [name for name in chosen if name.startswith("blocks.")]
        limit = memory - chooser._saved.keep

        def fits(ways: dict[str, Way]) -> bool:
            return evaluate(profile, ways, chooser._rest, pool).memory <= limit

        def measured(ways: dict[str, Way], counted: int) -> list[float]:
            chooser.ways = dict(ways)
            for _ in range(UNMEASURED):
                step()
            return [step() for _ in range(counted)]

        products = itertools.product(get_args(Way), repeat=len(blocks))
        every = [chosen | dict(zip(blocks, ways, strict=True)) for ways in products]
        feasible = [ways for ways in every if fits(ways)]
        drawn.shuffle(feasible)
        brief = [(min(measured(ways, BRIEFLY)), number) for number, ways in enumerate(feasible)]
        finalists = [feasible[number] for _, number in sorted(brief)[:BEST]]
        finalists = [chosen, *(ways for ways in finalists if ways != chosen)]
        taken: list[list[float]] = [[] for _ in finalists]
        for _ in range(FINALLY):
            for at_, ways in enumerate(finalists):
                taken[at_].append(statistics.median(measured(ways, BRIEFLY)))
        medians = [statistics.median(found) for found in taken]
        print(f"\n## {share:.0%} of the activations may stay in memory ({memory / 2**20:.0f} MiB)\n")
        print(f"{len(feasible)} of {len(every)} assignments of {len(blocks)} blocks fit. {chooser.chosen().why}\n")
        print("| ways of the blocks | seconds a step, median [least, most] | by the best | predicted |")
        print("|---|---:|---:|---:|")
        for ways, found, middle in zip(finalists, taken, medians, strict=True):
            told = ", ".join(ways[name] for name in blocks) + (" (chosen)" if ways is chosen else "")
            predicted = evaluate(profile, ways, chooser._rest, pool).seconds
            took = f"{middle:.3f} [{min(found):.3f}, {max(found):.3f}]"
            print(f"| {told} | {took} | {middle / min(medians):.2f} | {predicted:.3f} |")
        worst = max(brief)[0]
        print(f"\nThe slowest of all took {worst:.3f} s.", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--share", type=float, action="append", help="of the activations that may stay in memory")
    options = parser.parse_args()
    began = time.monotonic()
    print(told_environment(environment()))
    print(f"\nGPT of {CASE.layers} layers, width {CASE.width}, {CASE.batch} x {CASE.context} tokens; DRAM {BUDGET >> 20} MiB")
    for share in options.share or (0.3, 0.6):
        search(share, options.dir, 0)
    print(f"\n{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
