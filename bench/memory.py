"""Does training stay within its memory, whatever the size of the model?

    .venv/bin/python bench/memory.py                   4 GiB of state under a limit of 1.5 GiB for the whole process
    .venv/bin/python bench/memory.py --growth          one layer count and ten times as many, both with --checkpoint
    .venv/bin/python -m bench.memory --beside          what a process takes beside its pool, step by step (docs/memory.md)

The limit is a memory cgroup (v2 or v1) where this user may make one; else the peak RSS is compared with it. Prints a Markdown
table and exits 1 when the limit, or the pool's budget, was exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiered.types import format_size, parse_size


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path | None]:
    """A fresh memory cgroup with ``limit`` bytes, or None where this user cannot make one."""
    v2, v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    base, knob = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = base / f"tiered-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / knob).write_text(str(limit))
    except OSError:
        group.rmdir() if group.is_dir() else None
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def limit_of(group: Path) -> Path:
    """Return the file of a memory cgroup that has its limit."""
    v1 = group / "memory.limit_in_bytes"
    return v1 if v1.exists() else group / "memory.max"


def usage(group: Path) -> int:
    """Bytes of anonymous and kernel memory in a cgroup: what cannot be dropped as the page cache can."""
    found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    if "rss" in found:  # v1, where a huge page counts in rss as well
        return int(found["rss"]) + int((group / "memory.kmem.usage_in_bytes").read_text())
    return int(found["anon"]) + int(found.get("kernel", 0))


def kills(group: Path) -> int:
    file = group / "memory.events"
    file = file if file.exists() else group / "memory.oom_control"
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))


READY = 256 << 20
"""Bytes of ready memory that are free beside what a cgroup has taken of it."""
HOLDER = """if True:
    import mmap, sys, time
    nbytes, piece, populate = int(sys.argv[1]), 2 << 20, 23  # MADV_POPULATE_WRITE
    memory = mmap.mmap(-1, nbytes + piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    began = time.perf_counter()
    memory.madvise(populate)
    print(nbytes / (time.perf_counter() - began), flush=True)
    freed = 0
    for line in sys.stdin:
        until = min(int(line) // piece * piece, nbytes)
        if until > freed:
            memory.madvise(mmap.MADV_DONTNEED, freed, until - freed)
            freed = until
"""


@contextmanager
def ready_memory(nbytes: int, group: Path) -> Iterator[float]:
    """Have ``nbytes`` of free memory ready for the processes of ``group`` within the block. Gives the bytes per second at which
    the system handed them out.

    A hypervisor takes free memory away from a virtual machine and has to find it again at its next use, which may take ten
    times as long as clearing it. What is measured then is the hypervisor. So a process outside of the cgroup has the memory
    first, and frees it as the cgroup takes it: what has been free for a second would be taken away again.
    """
    command = [sys.executable, "-c", HOLDER, str(nbytes)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    given, stop = holder.stdin, threading.Event()
    rate = float(holder.stdout.readline())
    before = _all_of(group)

    def free() -> None:
        freed = 0
        while freed < nbytes and not stop.is_set():
            wanted = min(nbytes, max(0, _all_of(group) - before) + READY)
            if wanted >= freed + READY // 8 or wanted == nbytes > freed:
                given.write(f"{wanted}\n")
                given.flush()
                freed = wanted
            stop.wait(0.005)

    freeing = threading.Thread(target=free)
    freeing.start()
    try:
        yield rate
    finally:
        stop.set()
        freeing.join()
        given.close()
        holder.wait()
        holder.stdout.close()


def _all_of(group: Path) -> int:
    """Bytes that a cgroup has, the page cache included."""
    v1 = group / "memory.usage_in_bytes"
    return int((v1 if v1.exists() else group / "memory.current").read_text())


def train(arguments: list[str], group: Path | None) -> dict[str, Any]:
    """Run ``tiered train`` (inside ``group``); its summary."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    with tempfile.TemporaryDirectory(dir=".", prefix="bench-memory-") as folder:
        out = Path(folder) / "summary.json"
        command = [sys.executable, "-m", "tiered.cli", "train", "--dir", f"{folder}/store", "--json", str(out), *arguments]
        done = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"tiered train failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
        summary: dict[str, Any] = json.loads(out.read_text())
        summary["command"] = " ".join(["tiered", "train", *arguments])
        return summary


def read_peak(group: Path | None) -> int | None:
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if group is not None and (group / name).exists():
            return int((group / name).read_text())
    return None


def row(summary: dict[str, Any], peak: int | None) -> str:
    cells = [
        f"`{summary['command']}`",
        f"{summary['parameters']:,}",
        format_size(summary["state_bytes"]),
        f"{format_size(summary['pool']['peak_bytes'])} of {format_size(summary['pool']['budget_bytes'])}",
        format_size(summary["peak_rss_bytes"]),
        format_size(peak) if peak is not None else "-",
        f"{summary['per_step']['seconds']:.2f} s",
    ]
    return "| " + " | ".join(cells) + " |"


# -- beside the pool ----------------------------------------------------------------------------------------------------------

BESIDE = """
import os, sys, tempfile
import torch
from torch import nn
from tiered import TieredStore, zero

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4096, 1024)
        self.layers = nn.ModuleList(
            nn.Linear(1024, 2048, bias=False) if n % 2 == 0 else nn.Linear(2048, 1024, bias=False) for n in range(24)
        )
        self.head = nn.Linear(1024, 4096, bias=False)
    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

folder, pool = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
def at(what):
    print(what, flush=True)
    sys.stdin.readline()

at("imports of torch and tiered")
import torch._dynamo
at("torch._dynamo, which torch imports with its first optimizer, or meta tensor")
torch.ones(512, 512) @ torch.ones(512, 512)
at("the first product: buffers of torch's libraries")
with TieredStore.open(folder + "/store", dram=pool) as store:
    at("open")
    with zero.init(store):
        model = Model()
    at("zero.init")
    zero.page(model, store)
    at("zero.page of that")
    zero.export(model, folder + "/weights", shard="100MB")
    at("zero.export")
    with torch.device("meta"):
        again = Model()
    zero.page(again, store, name="again", weights=folder + "/weights")
    at("zero.page from safetensors")
    optimizer = zero.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(16)).square().mean().backward()
        optimizer.step()
    at("two steps of training, 16 words")
    store.close()
"""


def anonymous_of(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def beside(pool: int) -> int:
    """A table of what a process has at the end of each step, and at most within it, beside its pool (all of it, once open);
    the imports are what it begins with. Looked at from outside, every millisecond or so."""
    said = pool // 10 + (128 << 20)
    print(f"A pool of {format_size(pool)}, a model of 224 MiB whose largest parameter has 16. Said: {format_size(said)}.\n")
    print("| step | at its end | at most | beside the pool |\n|---|---|---|---|")
    worst = imports = 0
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-memory-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-c", BESIDE, folder, str(pool)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        while True:
            most = 0
            while not select.select([child.stdout], [], [], 0.001)[0]:
                most = max(most, anonymous_of(child.pid))
            step = child.stdout.readline().strip()
            if not step:
                break
            now = anonymous_of(child.pid)
            most = max(most, now)
            if not imports or step.startswith("torch._dynamo"):
                imports = now
                print(f"| {step} | {format_size(now)} | {format_size(most)} | - |")
            else:
                extra = max(0, most - imports - pool)
                worst = max(worst, extra)
                print(f"| {step} | {format_size(now)} | {format_size(most)} | {format_size(extra)} |", flush=True)
            child.stdin.write("\n")
            child.stdin.flush()
        if child.wait():
            return 1
    print(f"\nat most {format_size(worst)} beside the pool")
    return int(worst > said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="1.5GiB", help="for the whole process (default: 1.5GiB)")
    parser.add_argument("--layers", type=int, default=51, help="of width 768: 51 have 4 GiB of parameters and Adam states")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="compare 4 and 40 small layers instead")
    parser.add_argument("--beside", action="store_true", help="what a process takes beside its pool, step by step")
    parser.add_argument("--dram", default="64MiB", help="the pool of --beside (default: 64MiB)")
    options = parser.parse_args()
    if options.beside:
        return beside(parse_size(options.dram))
    print("| command | parameters | state | pool peak | peak RSS | cgroup peak | per step |\n|---|---|---|---|---|---|---|")
    failed = False
    if options.growth:
        small = ["--width=256", "--heads=4", "--context=64", "--batch=1", "--dram=16MiB", "--checkpoint"]
        peaks = []
        for layers in (4, 40):
            summary = train([*small, f"--layers={layers}", f"--steps={options.steps}"], None)
            print(row(summary, None), flush=True)
            peaks.append(summary["peak_rss_bytes"])
            failed |= summary["pool"]["peak_bytes"] > summary["pool"]["budget_bytes"]
        print(f"\nten times the layers: {format_size(peaks[1] - peaks[0])} more RSS at the peak")
        return int(failed)
    limit = parse_size(options.limit)
    with memory_cgroup(limit) as group:
        shape = ["--batch=1", "--context=256", "--dram=256MiB", "--checkpoint"]
        summary = train([*shape, f"--layers={options.layers}", f"--steps={options.steps}"], group)
        print(row(summary, read_peak(group)))
        failed = summary["pool"]["peak_bytes"] > summary["pool"]["budget_bytes"] or summary["peak_rss_bytes"] > limit
        how = f"under a cgroup limit of {format_size(limit)}" if group else "no cgroup could be made: RSS only"
        print(f"\n{how}; losses {', '.join(f'{loss:.4f}' for loss in summary['loss']['all'])}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
