"""How few bytes could cross the link? The offline optimum of a trace and a budget, from below.

    .venv/bin/python -m bench.optimum training --budget 25%
    .venv/bin/python -m bench.optimum zipf_write --budget 4096 --exact 20

The model, and its linear relaxation, are in ``tiered/planning/optimum.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array

from bench.traces import TRACES, Trace
from tiered.planning import optimum
from tiered.planning.optimum import Problem
from tiered.types import parse_size

__all__ = ["Problem", "budget_of", "exact_bound", "lower_bound", "problem"]


def problem(trace: Trace, budget: int, *, final_writeback: bool = True) -> Problem:
    """The relaxation of ``tiered.planning.optimum``. ValueError: a key is larger than ``budget``."""
    return optimum.problem(trace.accesses, trace.sizes, budget, final_writeback=final_writeback)


def lower_bound(trace: Trace, budget: int, *, final_writeback: bool = True) -> float:
    """Bytes that every way to serve ``trace`` in ``budget`` bytes moves at least."""
    return optimum.lower_bound(trace.accesses, trace.sizes, budget, final_writeback=final_writeback)


def exact_bound(trace: Trace, budget: int, *, seconds: float, final_writeback: bool = True) -> tuple[float, float]:
    """What whole keys move at least, and the least found (``inf``: none), after ``seconds`` of branch and cut.

    The same problem as ``lower_bound``, with every interval kept or not: the relaxation is not attainable where sizes do
    not fit together, nor where write-backs pull it apart. Both numbers are the optimum when the search ended in time.

    Here what is held across an access is one row over all intervals that span it, a knapsack, instead of a sum carried from
    one to the next: that says the same, and only from such rows does the solver find cover inequalities (Crowder, Johnson,
    Padberg, "Solving large-scale zero-one linear programming problems", 1983), which is what closes the gap.
    """
    p = problem(trace, budget, final_writeback=final_writeback)
    if not p.binary:
        return float(p.base), float(p.base)
    held, room = _knapsacks(p)
    width = p.at_least.shape[1] - p.equal.shape[0]
    rows = [LinearConstraint(held, -np.inf, room)] if len(room) else []
    if p.at_least.shape[0]:
        rows.append(LinearConstraint(csc_array(p.at_least[:, :width]), 1, np.inf))
    whole = np.zeros(width)
    whole[: p.binary] = 1
    options = {"time_limit": seconds}
    with _silence():
        solved = milp(p.cost[:width], constraints=rows, bounds=Bounds(0, 1), integrality=whole, options=options)
    bound = lower_bound(trace, budget, final_writeback=final_writeback)  # the search may end before it has one
    if solved.mip_dual_bound is not None:
        bound = max(bound, p.base + float(solved.mip_dual_bound))
    return bound, p.base + (np.inf if solved.fun is None else float(solved.fun))


@contextmanager
def _silence() -> Iterator[None]:
    """HiGHS writes lines of its own to the standard output, in the middle of our tables."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def _knapsacks(p: Problem) -> tuple[csc_array, np.ndarray]:
    """Bytes that each variable but the last ones holds across an access, and the room there: where not all fits, and no
    neighbour says more."""
    accesses = p.equal.shape[0]
    width = p.equal.shape[1] - accesses
    held = -np.cumsum(p.equal[:, :width].toarray(), axis=0)
    room = np.array(p.upper[width:])
    rows = list[int]()
    for t in np.flatnonzero(held.sum(axis=1) > room):
        if rows and room[rows[-1]] <= room[t] and (held[t] <= held[rows[-1]]).all():
            continue
        if rows and room[t] <= room[rows[-1]] and (held[rows[-1]] <= held[t]).all():
            rows.pop()
        rows.append(t)
    return csc_array(held[rows]), room[rows]


def budget_of(trace: Trace, text: str) -> int:
    """Bytes for ``"25%"`` of all keys (three of the largest at least) or for a size such as ``"4KiB"``."""
    if text.endswith("%"):
        return max(3 * trace.largest, int(trace.total * float(text[:-1]) / 100))
    return parse_size(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.optimum",
        description="The fewest bytes that must cross the link below a memory of some size, for a trace.",
        epilog="example: python -m bench.optimum training --budget 25%",
    )
    parser.add_argument("trace", choices=TRACES, help="a trace of bench/traces.py")
    parser.add_argument("--budget", default="25%", help="a size, or a share of all bytes (default 25%%)")
    parser.add_argument("--exact", type=float, metavar="SECONDS", help="also search for the optimum of whole keys")
    args = parser.parse_args(arguments)
    trace = TRACES[args.trace]()
    try:
        budget = budget_of(trace, args.budget)
        bound = lower_bound(trace, budget)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.trace}: {len(trace.accesses)} accesses, {trace.total} bytes in {len(trace.sizes)} keys, budget {budget}")
    print(f"at least {bound:.0f} bytes (linear relaxation)")
    if args.exact is not None:
        low, high = exact_bound(trace, budget, seconds=args.exact)
        print(f"whole keys: at least {low:.0f}, at most {high:.0f} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
