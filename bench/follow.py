"""Bytes that a store moves for ten traces at five budgets, beside the offline optimum: the real engine on a real disk.

    .venv/bin/python -m bench.follow                      Markdown, some minutes
    .venv/bin/python -m bench.follow --trace training     one of them

Every access is a lease (or a put) of the store; what is dead is deleted. Bytes are counted by the disk link, the final commit
included, and divided by the bound of ``bench/optimum.py``. LRU is the store without ``follow``; "on demand" follows with
``prefetch="off"``. Draws at random (uniform, Zipf, experts) are followed with ``then="end"``, for they come once; rounds that
are the same (cyclic, zigzag, training) as a cycle, for no such program ends with the trace. The loop computes nothing, so
that fetching ahead keeps as much under way as it ever does: what that takes of the budget is what it costs in bytes. So it is
divided, too, by the bound at the budget less ``under_way``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.optimum import budget_of, exact_bound, lower_bound
from bench.traces import TRACES, Access, Trace, next_positions
from tiered import TieredStore
from tiered.engine.policy import Touch
from tiered.engine.retention import room_for
from tiered.types import Then

__all__ = ["Row", "main", "run", "under_way"]

SCALE = 4096
"""Bytes of the store for each of a trace's, so that slots need no padding."""
BUDGETS = ("5%", "10%", "25%", "50%", "90%")

Following = Callable[[TieredStore, list[Touch], Then], object]

VARIANTS: dict[str, Following] = {
    "LRU": lambda store, order, then: None,
    "on demand": lambda store, order, then: store.follow(order, then=then, prefetch="off"),
    "fetching ahead": lambda store, order, then: store.follow(order, then=then),
}

Row = tuple[int, int, int, int]
"""Bytes read and written, tensors prefetched, and of these evicted unused."""


def run(trace: Trace, budget: int, follow: Following) -> Row:
    """Run ``trace`` once over a store whose tensors are all on disk."""
    following, end = next_positions(trace), len(trace.accesses)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        with TieredStore.open(Path(folder, "store"), dram=max(1 << 20, budget * SCALE)) as store:
            seen: set[str] = set()
            for key, access in trace.accesses:
                if key not in seen and access is not Access.PUT:
                    store.put(key, torch.zeros(trace.sizes[key] * SCALE, dtype=torch.uint8))
                seen.add(key)
        with TieredStore.open(Path(folder, "store"), dram=budget * SCALE, keep=1) as store:
            order = [Touch(key, None, access, trace.sizes[key] * SCALE) for key, access in trace.accesses]  # as traced
            follow(store, order, trace.then)
            for position, (key, access) in enumerate(trace.accesses):
                if access is Access.PUT:
                    store.put(key, torch.zeros(trace.sizes[key] * SCALE, dtype=torch.uint8))
                else:
                    with store.lease(key, access=access.value):
                        pass
                after = following[position]
                if after < end and trace.accesses[after][1] is Access.PUT:
                    store.delete(key)
            store.commit()
            found = store.statistics()
            flow = found.links[0]
            return flow.up.bytes, flow.down.bytes, found.prefetched, found.prefetched_unused


def under_way(trace: Trace, budget: int) -> int:
    """The room that a plan leaves to what is fetched ahead and written behind."""
    missing = sum(trace.sizes.values()) - budget
    return room_for(budget * SCALE, missing * SCALE, trace.largest * SCALE) // SCALE


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.follow",
        description="Bytes that a store moves along known orders, as ratios to the offline optimum's lower bound.",
        epilog="example: python -m bench.follow --trace training --trace zipf_write",
    )
    parser.add_argument("--trace", action="append", choices=TRACES, help="only this one (may be repeated)")
    parser.add_argument(
        "--exact",
        type=float,
        metavar="SECONDS",
        help="where that is more than 2 % above the bound, search this long for the bound of whole keys (marked *)",
    )
    args = parser.parse_args(arguments)
    print("| trace | budget | bound, MB | " + " | ".join(VARIANTS) + " | its working set apart | prefetched, unused |")
    print("|---|" + "---:|" * (4 + len(VARIANTS)))
    for name in args.trace or TRACES:
        trace = TRACES[name]()
        for share in BUDGETS:
            budget = max(budget_of(trace, share), (1 << 20) // SCALE)
            bound = lower_bound(trace, budget)
            rows = [run(trace, budget, follow) for follow in VARIANTS.values()]
            best, mark = min(up + down for up, down, *_ in rows) / SCALE, ""
            if args.exact is not None and best > 1.02 * bound:
                bound, mark = exact_bound(trace, budget, seconds=args.exact)[0], "*"
            ratios = " | ".join(f"{(up + down) / SCALE / bound:.3f}" for up, down, *_ in rows)
            apart = lower_bound(trace, max(trace.largest, budget - under_way(trace, budget)))
            ratios += f" | {sum(rows[-1][:2]) / SCALE / apart:.3f}"
            fetched = f"{sum(row[2] for row in rows):,}, {sum(row[3] for row in rows):,}"
            print(f"| {name} | {share} | {bound * SCALE / 1e6:,.0f}{mark} | {ratios} | {fetched} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
