"""How few bytes could cross the link? The offline optimum of a trace and a budget, from below.

    .venv/bin/python -m bench.optimum training --budget 25%
    .venv/bin/python -m bench.optimum zipf_write --budget 4096 --exact 20

The model: a memory of ``budget`` bytes over a disk that has everything at the start. A key is resident while it is accessed
(there is no bypass). Bringing it in costs its size, unless the access is a PUT. A copy that was written to is dirty, and is
written back, which costs its size again, before it is dropped, unless a PUT comes before the next READ or WRITE of it. What
is still dirty at the end is written back if ``final_writeback`` says so.

Nothing is gained by fetching before the access, by dropping later than just after one, nor by cleaning what stays. So a
solution says for each pair of consecutive accesses of a key (an *interval*) whether the copy is kept in between, and what
is kept across any one access must fit beside the key accessed. An interval that is kept saves a fetch; a *run*, that is all
intervals from one write to the next, saves a write-back when all of them are kept. Choosing is NP-hard: with unequal sizes
(Chrobak, Woeginger, Makino, Xu, "Caching is hard, even in the fault model", 2012), and with write-backs even where sizes
are equal (Beckmann, Gibbons, Haeupler, McGuffey, "Writeback-aware caching", 2020). Its linear relaxation, which keeps
fractions of keys, is a flow of bytes through time (as in Berger, Beckmann, Harchol-Balter, "Practical bounds on optimal
caching with variable object sizes", 2018) with one more row per interval of a run, and gives a bound from below. With equal
sizes and no writes it is the optimum itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csc_array

from bench.traces import TRACES, Access, Trace, next_positions
from tiered.types import parse_size

__all__ = ["Problem", "budget_of", "exact_bound", "lower_bound", "problem"]


@dataclass(frozen=True)
class Problem:
    """Minimise ``base + cost @ x`` where ``equal @ x == 0``, ``at_least @ x >= 1`` and ``0 <= x <= upper``.

    x holds the kept fraction of each interval, then the written-back fraction of each run, then the bytes held across each
    access.
    """

    base: int
    cost: Sequence[int]
    upper: Sequence[int]
    binary: int
    equal: csc_array
    at_least: csc_array


def problem(trace: Trace, budget: int, *, final_writeback: bool = True) -> Problem:
    """The relaxation as described above. ValueError: a key is larger than ``budget``."""
    if trace.largest > budget:
        raise ValueError(f"the largest key has {trace.largest} bytes, the budget is {budget}")
    accesses, following, end = trace.accesses, next_positions(trace), len(trace.accesses)
    intervals: list[tuple[int, int]] = []  # first and next position; the same bytes are held strictly between them
    runs: list[list[int]] = []  # the intervals of each
    run_of: dict[str, list[int]] = {}  # the run that is open for a key
    base = 0
    saving: list[int] = []
    writebacks: list[int] = []
    seen: set[str] = set()
    for position, (key, access) in enumerate(accesses):
        size = trace.sizes[key]
        if key not in seen and access is not Access.PUT:
            base += size
        seen.add(key)
        if access is not Access.READ:
            run_of[key] = []
        after = following[position]
        successor = accesses[after][1] if after < end else None
        if successor is Access.PUT:  # the bytes are dead; what a run saved so far is all it can
            _close(run_of.pop(key, None), size, runs, writebacks)
            continue
        run = run_of.get(key)
        if successor is None and (run is None or final_writeback):
            base += size if run is not None else 0
            continue
        if run is not None:
            run.append(len(intervals))
        intervals.append((position, after))
        base += size if successor is not None else 0
        saving.append(size if successor is not None else 0)
        if successor is not Access.READ:
            _close(run_of.pop(key, None), size, runs, writebacks)
    return _matrices(trace, budget, base, intervals, saving, runs, writebacks)


def _close(run: list[int] | None, size: int, runs: list[list[int]], writebacks: list[int]) -> None:
    if run:
        runs.append(run)
        writebacks.append(size)


def _matrices(
    trace: Trace,
    budget: int,
    base: int,
    intervals: list[tuple[int, int]],
    saving: list[int],
    runs: list[list[int]],
    writebacks: list[int],
) -> Problem:
    size_at = [trace.sizes[key] for key, _ in trace.accesses]
    first_held = len(intervals) + len(runs)
    entries: list[tuple[int, int, int]] = []  # row, column, value
    for position in range(len(size_at)):  # held[t] == held[t - 1] + (intervals begun at t - 1) - (intervals ended at t)
        entries.append((position, first_held + position, 1))
        if position:
            entries.append((position, first_held + position - 1, -1))
    for column, (start, stop) in enumerate(intervals):
        if start + 1 < stop:
            entries.append((start + 1, column, -size_at[start]))
            if stop < len(size_at):
                entries.append((stop, column, size_at[start]))
    rows = [(len(intervals) + r, interval) for r, run in enumerate(runs) for interval in run]
    coupling = [(row, column, 1) for row, pair in enumerate(rows) for column in pair]
    width = first_held + len(size_at)
    return Problem(
        base=base,
        cost=[-size for size in saving] + writebacks + [0] * len(size_at),
        upper=[1] * first_held + [budget - size for size in size_at],
        binary=len(intervals),
        equal=_sparse(entries, (len(size_at), width)),
        at_least=_sparse(coupling, (len(rows), width)),
    )


def _sparse(entries: list[tuple[int, int, int]], shape: tuple[int, int]) -> csc_array:
    rows, columns, values = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    return csc_array((values.astype(float), (rows, columns)), shape=shape)


def lower_bound(trace: Trace, budget: int, *, final_writeback: bool = True) -> float:
    """Bytes that every way to serve ``trace`` in ``budget`` bytes moves at least, by the linear relaxation.

    By interior points: on the steps of a training, 8,000 accesses, in one second, where simplex takes more than ten minutes."""
    p = problem(trace, budget, final_writeback=final_writeback)
    if not p.binary:
        return float(p.base)
    ones = -np.ones(p.at_least.shape[0])
    zeros = np.zeros(p.equal.shape[0])
    bounds = np.column_stack([np.zeros(len(p.upper)), p.upper])
    solved = linprog(p.cost, A_ub=-p.at_least, b_ub=ones, A_eq=p.equal, b_eq=zeros, bounds=bounds, method="highs-ipm")
    if solved.status != 0:
        raise RuntimeError(f"HiGHS: {solved.message}")
    return p.base + float(solved.fun)


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
