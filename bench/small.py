"""Measure small tensors: a million of them in ``store.small``, beside tensors of the store itself.

    .venv/bin/python -m bench.small --dir /mnt/nvme                   1,000,000 tensors of 256 numbers, some minutes
    .venv/bin/python -m bench.small --dir /mnt/nvme --count 100000 --nbytes 64

Each row is a process of its own. "put" puts tensors one by one, "update" 1,000 at a time. "memory" is what the process takes
with all names known, beyond what it took before the first tensor and beyond the pool, for each tensor. "commit of one" is the
median of the commits after one tensor was changed, "open" the time from opening the store for reading to the first tensor, with
the files dropped from the page cache. "get" and "batch of 256" read tensors at random places. "files" is the bytes of the
store's folder, by those of the tensors. The tensors themselves (``--plain`` of them) go through the same calls, but for
``update`` and batches. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tiered import TieredStore
from tiered.cli.output import told_environment
from tiered.measuring.meters import environment
from tiered.system import memory_of_process
from tiered.types import format_size, parse_size

__all__ = ["main"]

SAMPLES, BATCHES, BATCH, COMMITS, TOGETHER = 2000, 50, 256, 7, 1000


def resident() -> int:
    return memory_of_process().process


def fill(folder: Path, count: int, nbytes: int, dram: int, way: str, page: str | None) -> dict[str, float]:
    values = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    with TieredStore.open(folder, dram=dram) as store:
        store.put("all of the pool", torch.zeros(dram - (1 << 20), dtype=torch.uint8))  # so that it does not count
        store.delete("all of the pool")
        before = resident()
        names: Any = store if way == "store" else store.small("s", page=page)
        began = time.perf_counter()
        if way == "update":
            for first in range(0, count, TOGETHER):
                names.update({f"tensor {number}": values for number in range(first, min(count, first + TOGETHER))})
        else:
            for number in range(count):
                names.put(f"tensor {number}", values)
        put = (time.perf_counter() - began) / count
        memory = (resident() - before) / count
        began = time.perf_counter()
        store.commit()
        whole = time.perf_counter() - began
        one = []
        for number in range(COMMITS):
            names.put(f"tensor {number}", values)
            began = time.perf_counter()
            store.commit()
            one.append(time.perf_counter() - began)
        places = random.Random(1).choices(range(count), k=SAMPLES)
        began = time.perf_counter()
        for number in places:
            names.get(f"tensor {number}")
        got = (time.perf_counter() - began) / SAMPLES
        found = {"put": put, "memory": memory, "commit": whole, "one": statistics.median(one), "get": got}
        if way != "store":
            source = random.Random(2)
            began = time.perf_counter()
            for _ in range(BATCHES):
                names.stack([f"tensor {number}" for number in source.choices(range(count), k=BATCH)])
            found["batch"] = (time.perf_counter() - began) / BATCHES
    found["files"] = sum(path.stat().st_blocks * 512 for path in folder.iterdir()) / (count * nbytes)
    return found


def opening(folder: Path, count: int, nbytes: int, dram: int, way: str) -> float:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    with TieredStore.open(folder, dram=dram, access="read") as store:
        names = store if way == "store" else store.small("s")
        assert names.get(f"tensor {count - 1}").nbytes == nbytes
        assert len(names) == count
    return time.perf_counter() - began


def row(folder: Path, count: int, nbytes: int, dram: int, way: str, page: str | None) -> dict[str, float]:
    """Measure in processes of their own."""
    arguments = [f"{folder}", f"{count}", f"{nbytes}", f"{dram}", way, page or ""]
    found: dict[str, float] = {}
    for what in ("fill", "open"):
        said = subprocess.run(
            [sys.executable, "-m", "bench.small", "--child", what, *arguments], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        found |= json.loads(said)
    return found


def child(what: str, folder: str, count: str, nbytes: str, dram: str, way: str, page: str) -> dict[str, float]:
    if what == "fill":
        return fill(Path(folder), int(count), int(nbytes), int(dram), way, page or None)
    return {"open": opening(Path(folder), int(count), int(nbytes), int(dram), way)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive to measure (default: here)")
    parser.add_argument("--count", type=int, default=1_000_000, help="small tensors (default: 1,000,000)")
    parser.add_argument("--plain", type=int, default=20_000, help="tensors of the store itself (default: 20,000)")
    parser.add_argument("--nbytes", type=int, default=1024, help="bytes of each (default: 1024)")
    parser.add_argument("--dram", default="256MiB")
    parser.add_argument("--page", default=None, help="bytes of a page (default: the store's)")
    parser.add_argument("--child", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(child(*options.child)))
        return 0
    if min(options.count, options.plain, options.nbytes) < COMMITS:
        parser.error(f"--count, --plain and --nbytes are at least {COMMITS}")
    dram = parse_size(options.dram)
    print(told_environment(environment()))
    print(f"\n{options.count:,} tensors of {options.nbytes:,} bytes; {format_size(dram)} of memory.\n")
    print("| tensors | put µs | memory bytes | commit s | commit of one ms | open s | get µs | batch of 256 ms | files |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for way, count in (("put", options.count), ("update", options.count), ("store", options.plain)):
        folder = Path(tempfile.mkdtemp(prefix="small-", dir=options.dir))
        try:
            found = row(folder / "state", count, options.nbytes, dram, way, options.page)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        batch = f"{found['batch'] * 1e3:.2f}" if "batch" in found else ""
        which = f"{count:,} of the store itself" if way == "store" else f"{count:,} small ones, by {way}"
        print(
            f"| {which} | {found['put'] * 1e6:.1f} | {found['memory']:.0f} | {found['commit']:.2f} "
            f"| {found['one'] * 1e3:.1f} | {found['open']:.2f} | {found['get'] * 1e6:.0f} | {batch} | {found['files']:.2f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    sys.exit(main())
