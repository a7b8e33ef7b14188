"""The fewest bytes that could be moved: the offline optimum of an order and a budget, from below.

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
scipy's HiGHS solves it (the extra ``plan``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered.errors import MisuseError
from tiered.types import Key, Use

__all__ = ["Problem", "lower_bound", "problem"]


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
    equal: Any
    at_least: Any


def problem(
    accesses: Sequence[tuple[Key, Use]], sizes: Mapping[Key, int], budget: int, *, final_writeback: bool = True
) -> Problem:
    """Return the relaxation as described above. Raises ValueError where a key is larger than ``budget``."""
    largest = max((sizes[key] for key, _ in accesses), default=0)
    if largest > budget:
        raise ValueError(f"the largest key has {largest} bytes, the budget is {budget}")
    following, end = next_positions(accesses), len(accesses)
    intervals: list[tuple[int, int]] = []  # first and next position; the same bytes are held strictly between them
    runs: list[list[int]] = []  # the intervals of each
    run_of: dict[str, list[int]] = {}  # the run that is open for a key
    base = 0
    saving: list[int] = []
    writebacks: list[int] = []
    seen: set[str] = set()
    for position, (key, access) in enumerate(accesses):
        size = sizes[key]
        if key not in seen and access is not Use.PUT:
            base += size
        seen.add(key)
        if access is not Use.READ:
            run_of[key] = []
        after = following[position]
        successor = accesses[after][1] if after < end else None
        if successor is Use.PUT:  # the bytes are dead; what a run saved so far is all it can
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
        if successor is not Use.READ:
            _close(run_of.pop(key, None), size, runs, writebacks)
    return _matrices([sizes[key] for key, _ in accesses], budget, base, intervals, saving, runs, writebacks)


def _close(run: list[int] | None, size: int, runs: list[list[int]], writebacks: list[int]) -> None:
    if run:
        runs.append(run)
        writebacks.append(size)


def next_positions(accesses: Sequence[tuple[Key, Use]]) -> list[int]:
    """Return for each access the position of the same key's next one; ``len(accesses)`` where there is none."""
    end = len(accesses)
    following = [end] * end
    seen: dict[Key, int] = {}
    for position in range(end - 1, -1, -1):
        following[position] = seen.get(accesses[position][0], end)
        seen[accesses[position][0]] = position
    return following


def _matrices(
    size_at: Sequence[int],
    budget: int,
    base: int,
    intervals: list[tuple[int, int]],
    saving: list[int],
    runs: list[list[int]],
    writebacks: list[int],
) -> Problem:
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


def _sparse(entries: list[tuple[int, int, int]], shape: tuple[int, int]) -> Any:
    import numpy as np
    from scipy.sparse import csc_array

    rows, columns, values = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    return csc_array((values.astype(float), (rows, columns)), shape=shape)


def lower_bound(
    accesses: Sequence[tuple[Key, Use]], sizes: Mapping[Key, int], budget: int, *, final_writeback: bool = True
) -> float:
    """Return the bytes that every way to serve ``accesses`` in ``budget`` bytes moves at least, by the linear relaxation.

    By interior points: on the steps of a training, 8,000 accesses, in one second, where simplex takes more than ten minutes.
    Raises MisuseError without scipy, ValueError where a key is larger than ``budget``.
    """
    try:
        import numpy as np
        from scipy.optimize import linprog
    except ImportError as error:
        raise MisuseError(
            "the least bytes of any plan are a linear program of scipy: pip install '.[plan]' in a clone, or pip install scipy"
        ) from error
    p = problem(accesses, sizes, budget, final_writeback=final_writeback)
    if not p.binary:
        return float(p.base)
    ones = -np.ones(p.at_least.shape[0])
    zeros = np.zeros(p.equal.shape[0])
    bounds = np.column_stack([np.zeros(len(p.upper)), p.upper])
    solved = linprog(p.cost, A_ub=-p.at_least, b_ub=ones, A_eq=p.equal, b_eq=zeros, bounds=bounds, method="highs-ipm")
    if solved.status != 0:
        raise RuntimeError(f"HiGHS: {solved.message}")
    return p.base + float(solved.fun)
