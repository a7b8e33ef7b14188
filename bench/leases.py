"""Measure resident leases from one thread: per second, CPU time for each, and whether any needed the engine's thread.

    .venv/bin/python -m bench.leases          Markdown, some seconds

Each is ``with store.lease(key) as tensor: pass`` over 1,000 tensors that are in memory; "followed" is the same along an order
that is followed. Medians of seven rounds of 5,000, with the least and the most. The CPU time is that of the calling thread; it
scatters less than the rate where other programs run. To measure another checkout: PYTHONPATH=CHECKOUT python bench/leases.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch

from tiered import TieredStore

__all__ = ["main"]

TENSORS, LEASES, ROUNDS = 1000, 5000, 7


def rates(store: TieredStore, access: str) -> tuple[list[float], list[float]]:
    keys = [f"t{number % TENSORS}" for number in range(LEASES)]
    found, cpu = [], []
    for _ in range(ROUNDS):
        began, used = time.perf_counter(), time.thread_time()
        for key in keys:
            with store.lease(key, access=access):
                pass
        cpu.append((time.thread_time() - used) / LEASES * 1e6)
        found.append(LEASES / (time.perf_counter() - began))
    return found, cpu


def main() -> int:
    torch.set_num_threads(1)
    print("| tensor | access | leases/s, median [least, most] | CPU microseconds each | wakes of the engine |")
    print("|---|---|---:|---:|---:|")
    for nbytes in (4 << 10, 16 << 10, 64 << 10):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, TieredStore.open(f"{folder}/store", dram="512MiB") as store:
            for number in range(TENSORS):
                store.put(f"t{number}", torch.zeros(nbytes, dtype=torch.uint8))
            store.commit()
            for name in ("read", "write", "read, followed"):
                if name == "read, followed":
                    store.follow([f"t{number}" for number in range(TENSORS)])
                before = store.statistics().wakes
                found, cpu = rates(store, name.split(",")[0])
                wakes = store.statistics().wakes - before
                spread = f"{statistics.median(found):,.0f} [{min(found):,.0f}, {max(found):,.0f}]"
                used = f"{statistics.median(cpu):.1f} [{min(cpu):.1f}, {max(cpu):.1f}]"
                print(f"| {nbytes >> 10} KiB | {name} | {spread} | {used} | {wakes} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
