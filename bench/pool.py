"""Tensors of unequal size in one pool: how much may be moved within it, and how many bytes over the link that saves.

    .venv/bin/python -m bench.pool                          Markdown, half a minute
    .venv/bin/python -m bench.pool --trace uniform_read     one of them

The store's own ``Pool`` and ``NextUse`` along each trace, over a pool that only pretends to have memory, and no disk: what
comes out are the numbers of "on demand" in ``bench/follow.py``, with the same traces followed to their end. In each column a
request may have so many times its own bytes moved. Ratios to the bound of ``bench/optimum.py``, and behind the stroke the bytes
moved for each byte over the link.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from bench.optimum import budget_of, lower_bound
from bench.rehearsal import MovablePlaces, Rehearsal
from bench.traces import TRACES, Access, Key, Trace
from tiered.engine.retention import RetentionPlan, plan_retention

__all__ = ["Run", "decision_for", "main"]

LIMITS = (0, 2, 4, 8, 16, 32, math.inf)
UNEQUAL = ("training_unequal", "uniform_read", "uniform_write", "zipf_read", "zipf_write", "experts")
FEWEST = 256
"""Bytes of the smallest budget, for a store has 1 MiB and ``bench/follow.py`` 4 KiB for each."""


class Run:
    """``trace`` in ``budget`` bytes; for a request ``most`` times its own may be moved. ``linked`` went over the link, what is
    dirty at the end included."""

    def __init__(self, trace: Trace, budget: int, most: float, decision: RetentionPlan) -> None:
        keys, uses, sizes = _touches(trace)
        rehearsal = Rehearsal(keys, uses, sizes, MovablePlaces(budget), decision, trace.then, most)
        self.linked = rehearsal.round() + rehearsal.rest()
        self.moved = rehearsal.place.moved


def decision_for(trace: Trace, budget: int) -> RetentionPlan:
    """As ``store.follow`` makes it."""
    return plan_retention(*_touches(trace), budget, then=trace.then)


def _touches(trace: Trace) -> tuple[list[Key], list[Access], list[int]]:
    keys, uses = [key for key, _ in trace.accesses], [use for _, use in trace.accesses]
    return keys, uses, [trace.sizes[key] for key in keys]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pool",
        description="Bytes over the link, and bytes moved in memory, by how much a request may have moved.",
        epilog="example: python -m bench.pool --trace uniform_read",
    )
    parser.add_argument("--trace", action="append", choices=TRACES, help="only this one (may be repeated)")
    args = parser.parse_args(arguments)
    print("| trace | budget | " + " | ".join("no limit" if math.isinf(most) else str(most) for most in LIMITS) + " |")
    print("|---|" + "---:|" * (1 + len(LIMITS)))
    for name in args.trace or UNEQUAL:
        trace = TRACES[name]()
        for share in ("5%", "10%", "25%", "50%", "90%"):
            budget = max(budget_of(trace, share), FEWEST)
            bound = lower_bound(trace, budget)
            decision = decision_for(trace, budget)
            runs = [Run(trace, budget, most, decision) for most in LIMITS]
            cells = " | ".join(f"{run.linked / bound:.3f} / {run.moved / run.linked:.1f}" for run in runs)
            print(f"| {name} | {share} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
