"""Resident leases per second from one thread, and whether any of them needed the engine's thread.

    .venv/bin/python -m bench.leases          Markdown, some seconds

Each is ``with store.lease(key) as tensor: pass`` over 1,000 tensors that are in memory; "followed" is the same along an order
that is followed. Medians of seven rounds of 5,000, with the least and the most.
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


def rates(store: TieredStore, access: str) -> list[float]:
    keys = [f"t{number % TENSORS}" for number in range(LEASES)]
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for key in keys:
            with store.lease(key, access=access):
                pass
        found.append(LEASES / (time.perf_counter() - began))
    return found


def main() -> int:
    torch.set_num_threads(1)
    print("| tensor | access | leases/s, median [least, most] | wakes of the engine |\n|---|---|---:|---:|")
    for nbytes in (4 << 10, 16 << 10, 64 << 10):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, TieredStore.open(f"{folder}/store", dram="512MiB") as store:
            for number in range(TENSORS):
                store.put(f"t{number}", torch.zeros(nbytes, dtype=torch.uint8))
            store.commit()
            for name in ("read", "write", "read, followed"):
                if name == "read, followed":
                    store.follow([f"t{number}" for number in range(TENSORS)])
                before = store.statistics().wakes
                found = rates(store, name.split(",")[0])
                wakes = store.statistics().wakes - before
                spread = f"{statistics.median(found):,.0f} [{min(found):,.0f}, {max(found):,.0f}]"
                print(f"| {nbytes >> 10} KiB | {name} | {spread} | {wakes} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
