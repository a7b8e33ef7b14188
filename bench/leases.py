"""Measure resident leases from one thread: per second, CPU time for each, and whether any needed the engine's thread.

    .venv/bin/python -m bench.leases                          Markdown, some seconds
    .venv/bin/python -m bench.leases --against CHECKOUT       this checkout beside another one; three minutes

Each is ``with store.lease(key) as tensor: pass`` over 1,000 tensors that are in memory; "followed" is the same along an order
that is followed; "256 together" is ``with store.lease([key, ...])``, where each key counts. A round is 5,000 keys. The CPU time
is that of the calling thread; it scatters less than the rate where other programs run. ``--against`` gives the rounds to a
process of each checkout in turn, and takes ratios of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tiered import TieredStore

__all__ = ["main"]

TENSORS, LEASES, ROUNDS, PAIRED_ROUNDS = 1000, 5000, 7, 41
SIZES = (4 << 10, 16 << 10, 64 << 10)
KINDS = ("read", "write", "read, 256 together", "read, followed")


def one_round(store: TieredStore, kind: str) -> tuple[float, float]:
    """Leases of 5,000 keys: their rate per second, and the CPU microseconds of one."""
    keys, access = [f"t{number % TENSORS}" for number in range(LEASES)], kind.split(",")[0]
    asked = [keys[begin : begin + 256] for begin in range(0, LEASES, 256)] if kind.endswith("256 together") else keys
    began, used = time.perf_counter(), time.thread_time()
    for some in asked:
        with store.lease(some, access=access):
            pass
    return LEASES / (time.perf_counter() - began), (time.thread_time() - used) / LEASES * 1e6


def filled(folder: str, nbytes: int) -> TieredStore:
    store = TieredStore.open(f"{folder}/store", dram="512MiB")
    for number in range(TENSORS):
        store.put(f"t{number}", torch.zeros(nbytes, dtype=torch.uint8))
    store.commit()
    return store


def follow(store: TieredStore) -> None:
    store.follow([f"t{number}" for number in range(TENSORS)])


def alone() -> None:
    from tiered.measuring.meters import Spread  # not above: --serve runs this file on other checkouts, older ones too

    print("| tensor | access | keys/s, median [least, most] | CPU microseconds each | wakes of the engine |")
    print("|---|---|---:|---:|---:|")
    for nbytes in SIZES:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, filled(folder, nbytes) as store:
            for kind in KINDS:
                if kind == "read, followed":
                    follow(store)
                before = store.statistics().wakes
                found = [one_round(store, kind) for _ in range(ROUNDS)]
                wakes = store.statistics().wakes - before
                rates, used = (list(values) for values in zip(*found, strict=True))
                cells = Spread.of(rates).shown(digits=0), Spread.of(used).shown(digits=1)
                print(f"| {nbytes >> 10} KiB | {kind} | {' | '.join(cells)} | {wakes} |", flush=True)


def serve() -> None:
    """Answer each line ``NBYTES KIND`` with the CPU microseconds of a round; a store is kept while the size stays."""
    store, size, followed = None, 0, False
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for line in sys.stdin:
            nbytes, kind = line.rstrip("\n").split(" ", 1)
            if store is None or int(nbytes) != size or (followed and kind != "read, followed"):
                if store is not None:
                    store.commit()
                    store.close()
                size, followed = int(nbytes), False
                store = filled(f"{folder}/{time.monotonic_ns()}", size)
            if kind == "read, followed" and not followed:
                follow(store)
                followed = True
            print(one_round(store, kind)[1], flush=True)
        if store is not None:
            store.commit()
            store.close()


def against(other: Path) -> None:
    from bench.checkouts import beside, in_turn, ratio  # not above: --serve runs this file on other checkouts, older ones too

    print("| tensor | access | CPU microseconds each, there | here | there / here, median [quartiles] |")
    print("|---|---|---:|---:|---:|")
    with beside(other, __file__) as pair:
        for nbytes in SIZES:
            for kind in KINDS:
                before, after = in_turn(pair, f"{nbytes} {kind}", PAIRED_ROUNDS)
                medians = f"{statistics.median(before):.1f} | {statistics.median(after):.1f}"
                print(f"| {nbytes >> 10} KiB | {kind} | {medians} | {ratio(before, after)} |", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.leases", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with this other checkout, round by round")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.serve:
        serve()
    elif chosen.against:
        against(chosen.against)
    else:
        alone()
    return 0


if __name__ == "__main__":
    sys.exit(main())
