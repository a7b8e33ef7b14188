"""How far from the optimum are the rules? Each runs every trace of ``bench/traces.py`` at five budgets; ratios to the bound.

    .venv/bin/python -m bench.simulate                    Markdown, in a minute
    .venv/bin/python -m bench.simulate --exact 20         bounds for whole keys, 20 seconds of search for each

Only what is needed is fetched, and only when it is needed. Dead bytes (the next access is a PUT, or there is none) leave at
once under every rule; a real program deletes them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.optimum import budget_of, exact_bound, lower_bound
from bench.traces import TRACES, Access, Key, Trace, next_positions

__all__ = ["Resident", "Rule", "belady", "best_price", "lru", "priced", "simulate"]


@dataclass(frozen=True)
class Resident:
    """A key in memory: its last and its next access are positions in the trace."""

    key: Key
    nbytes: int
    dirty: bool
    last: int
    next: int


Rule = Callable[[Resident], tuple[float, ...]]
"""The order of leaving: the smallest first."""


def simulate(trace: Trace, budget: int, rule: Rule, *, final_writeback: bool = True) -> int:
    """Bytes read and written while ``trace`` runs in ``budget`` bytes and ``rule`` decides who leaves."""
    following, end = next_positions(trace), len(trace.accesses)
    residents: dict[Key, Resident] = {}
    free, moved = budget, 0
    for position, (key, access) in enumerate(trace.accesses):
        size, held = trace.sizes[key], residents.pop(key, None)
        if held is None:
            moved += 0 if access is Access.PUT else size
            free -= size
            for victim in _victims(residents.values(), -free, rule):
                del residents[victim.key]
                free += victim.nbytes
                moved += victim.nbytes if victim.dirty else 0
        dirty = access is not Access.READ or (held is not None and held.dirty)
        after = following[position]
        if after == end or trace.accesses[after][1] is Access.PUT:
            free += size
            moved += size if after == end and dirty and final_writeback else 0
        else:
            residents[key] = Resident(key, size, dirty, position, after)
    return moved


def _victims(among: Iterable[Resident], nbytes: int, rule: Rule) -> list[Resident]:
    chosen: list[Resident] = []
    for resident in sorted(among, key=rule) if nbytes > 0 else ():
        if nbytes <= 0:
            break
        chosen.append(resident)
        nbytes -= resident.nbytes
    return chosen


def lru(resident: Resident) -> tuple[float, ...]:
    """Clean ones first, each kind from the least recently used on."""
    return resident.dirty, resident.last


def belady(resident: Resident) -> tuple[float, ...]:
    """The furthest next use first."""
    return (-resident.next,)


def priced(price: float) -> Rule:
    """Belady's rule, a dirty copy counting as nearer by ``price`` accesses."""
    return lambda resident: (price * resident.dirty - resident.next,)


def best_price(trace: Trace, budget: int) -> int:
    """What ``priced`` moves at the best of a few prices, for one who tries them on the recorded trace."""
    return min(simulate(trace, budget, priced(price)) for price in (0, 10, 30, 100, 300, 1000))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description="Bytes moved by eviction rules, as ratios to the offline optimum's lower bound.",
        epilog="example: python -m bench.simulate --trace training --trace zipf_write",
    )
    parser.add_argument("--trace", action="append", choices=TRACES, help="only this one (may be repeated)")
    parser.add_argument("--exact", type=float, metavar="SECONDS", help="search for a bound of whole keys this long in each row")
    args = parser.parse_args(arguments)
    print("| trace | budget | bound, bytes | LRU | Belady | priced |" + "\n|---|" + "---:|" * 5)
    for name in args.trace or TRACES:
        trace = TRACES[name]()
        for share in ("5%", "10%", "25%", "50%", "90%"):
            budget = budget_of(trace, share)
            bound = lower_bound(trace, budget)
            if args.exact is not None:
                bound = max(bound, exact_bound(trace, budget, seconds=args.exact)[0])
            moved = simulate(trace, budget, lru), simulate(trace, budget, belady), best_price(trace, budget)
            ratios = " | ".join(f"{each / bound:.3f}" for each in moved)
            print(f"| {name} | {share} | {bound:.0f} | {ratios} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
