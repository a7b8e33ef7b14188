"""Measure resident leases from one thread: per second, CPU time for each, and whether any needed the engine's thread.

    .venv/bin/python -m bench.leases                          Markdown, some seconds
    .venv/bin/python -m bench.leases --against CHECKOUT       this checkout beside another one; three minutes

Each is ``with store.lease(key) as tensor: pass`` over 1,000 tensors that are in memory; "followed" is the same along an order
that is followed; "256 together" is ``with store.lease([key, ...])``, where each key counts. A round is 5,000 keys. The CPU time
is that of the calling thread; it scatters less than the rate where other programs run. ``--against`` runs a process for each
checkout and gives the rounds to them in turn, so that what else the machine does falls upon both; the ratio is taken between
neighbouring rounds. The other checkout needs its built ``tiered/io/_aio*.so``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
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
    """Answers each line ``NBYTES KIND`` with a round; a store is kept while the size stays."""
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
            rate, used = one_round(store, kind)
            print(rate, used, flush=True)
        if store is not None:
            store.commit()
            store.close()


def child_of(checkout: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")


def against(other: Path) -> None:
    here = Path(__file__).resolve().parents[1]
    if not (other / "tiered" / "__init__.py").exists():
        raise SystemExit(f"{other} is not a checkout of this project: it has no tiered/__init__.py")

    def asked(child: subprocess.Popen[str], nbytes: int, kind: str) -> float:
        assert child.stdin is not None
        assert child.stdout is not None
        print(nbytes, kind, file=child.stdin, flush=True)
        said = child.stdout.readline()
        if not said:
            raise SystemExit("a process that measures ended early; its message stands above")
        return float(said.split()[1])

    print("| tensor | access | CPU microseconds each, there | here | there / here, median [quartiles] |")
    print("|---|---|---:|---:|---:|")
    with child_of(other) as there, child_of(here) as this:
        for nbytes in SIZES:
            for kind in KINDS:
                for child in (there, this):
                    asked(child, nbytes, kind)  # the store is made, and the first round is not counted
                pairs = []
                for number in range(PAIRED_ROUNDS):
                    if number % 2:
                        second = asked(this, nbytes, kind)
                        pairs.append((asked(there, nbytes, kind), second))
                    else:
                        first = asked(there, nbytes, kind)
                        pairs.append((first, asked(this, nbytes, kind)))
                low, middle, high = statistics.quantiles([before / after for before, after in pairs], n=4)
                before, after = (statistics.median(values) for values in zip(*pairs, strict=True))
                row = f"| {nbytes >> 10} KiB | {kind} | {before:.1f} | {after:.1f} | {middle:.2f} [{low:.2f}, {high:.2f}] |"
                print(row, flush=True)
        for child in (there, this):
            child.communicate()


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
