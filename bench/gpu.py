"""Copies between a CUDA device, host memory and a disk: what torch and the drive do alone, and what the link and the store
make of it, in rounds that are interleaved.

    .venv/bin/python -m bench.gpu --dir /mnt/nvme --out bench/results/gpu_MACHINE_DATE.md

First every path is checked: what arrives is what was sent. Then, by size of the tensors: pinned copies with torch alone, one
stream for each direction; the same bytes through the link alone; and through a store, which fetches ahead and writes back. Then
tensors come from the disk through host memory to the device along a known order, beside the drive alone; and matrix products
with tensors that come meanwhile. Prints Markdown. The rates of one round stand under the same conditions: ratios are medians
over rounds.

Exits 1 when something arrived wrong, or without a device. ``--device cpu`` rehearses on the stand-in; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.gpu_paths import (
    BLOCK,
    DEPTH,
    DOWN,
    MIB,
    REHEARSAL,
    UP,
    Compute,
    Device,
    OverLink,
    OverStore,
    Plain,
    Scale,
    TwoHops,
    Wrong,
)
from tiered.measuring.drive import Drive, Point
from tiered.measuring.meters import Noise, Spread, environment
from tiered.types import Direction, format_size

WAYS = {"DRAM to HBM": (UP,), "HBM to DRAM": (DOWN,), "both at once, sum": (UP, DOWN)}
BAR = 0.9
"""Of what torch or the drive does alone."""


@dataclass
class Report:
    """The page and the data, which are written to the files ``out`` and ``json`` as they grow."""

    out: str | None = None
    json: str | None = None
    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    below: list[str] = field(default_factory=list)

    def say(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)
        self.lines += lines
        self.keep()

    def keep(self, **more: Any) -> None:
        if self.out is not None:
            Path(self.out).write_text("\n".join(self.lines) + "\n")
        if self.json is not None:
            Path(self.json).write_text(json.dumps(self.data | {"below": self.below} | more, indent=1) + "\n")

    def ratio(self, name: str, found: Sequence[float], alone: Sequence[float]) -> str:
        spread = Spread.of([ours / theirs for ours, theirs in zip(found, alone, strict=True)])
        if spread.median < BAR:
            self.below.append(f"{name} {spread.median:.2f}")
        return spread.shown()


class Clock:
    def __init__(self, seconds: float) -> None:
        self._end, self._whole = time.monotonic() + seconds, seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def rounds(self, most: int, keep: float) -> Iterator[int]:
        """At least one round; no more than fit before ``keep``, a share of the whole time, is all that is left."""
        longest = 0.0
        for number in range(most):
            began = time.monotonic()
            yield number
            longest = max(longest, time.monotonic() - began)
            if self.left() - longest < keep * self._whole:
                return


def by_size(device: Device, scale: Scale, clock: Clock, report: Report) -> None:
    room = int(psutil.virtual_memory().available * 0.7)
    total = min(scale.moved, room // 12 // MIB * MIB)
    report.say("## By size", "", "GB/s, median [min - max]; ratios to torch alone in the same round.", "")
    report.say("| tensor | way | torch alone | link | of torch | store | of torch |", "|---|---|---|---|---|---|---|")
    rows = report.data["by_size"] = []
    plain = Plain(device, total)
    with closing(OverLink(device, total)) as link:
        for place, nbytes in enumerate(scale.sizes):
            moved = total // nbytes * nbytes
            if moved == 0 or OverStore.need(nbytes, scale) > room - 4 * total or clock.left() < 20:
                report.say(f"| {format_size(nbytes)} | left out: too little memory or time | | | | | |")
                continue
            link.check(nbytes)
            measured = OverStore(device, nbytes, scale)
            with closing(measured.store):
                measured.check()
                runs: dict[str, Callable[[Sequence[Direction], int, int], float]]
                runs = {"plain": plain.run, "link": link.run, "store": measured.run}
                found: dict[str, dict[str, list[float]]] = {way: {name: [] for name in runs} for way in WAYS}
                for run in runs.values():
                    run((UP, DOWN), nbytes, moved)
                for _ in clock.rounds(scale.rounds, 0.9 - 0.5 * (place + 1) / len(scale.sizes)):
                    for way, ways in WAYS.items():
                        for name, run in runs.items():
                            found[way][name].append(run(ways, nbytes, moved))
            del measured
            for way, rates in found.items():
                cells = [Spread.of(rates["plain"]).shown(1e-9, 1)]
                for name in ("link", "store"):
                    ratio = report.ratio(f"{name}, {format_size(nbytes)}, {way}:", rates[name], rates["plain"])
                    cells += [Spread.of(rates[name]).shown(1e-9, 1), ratio]
                report.say(f"| {format_size(nbytes)} | {way} | " + " | ".join(cells) + " |")
                rows.append({"tensor_bytes": nbytes, "way": way, **rates})


def from_disk(device: Device, scale: Scale, clock: Clock, report: Report, folder: Path) -> None:
    size = scale.hop * scale.hops
    report.say("", "## NVMe to DRAM to HBM", "")
    free = psutil.disk_usage(str(folder)).free
    if free < 3 * size or clock.left() < 30:
        report.say(f"Left out: {format_size(free)} free in the folder, {clock.left():.0f} s left.")
        return
    reads = Point("read", "sequential", BLOCK, DEPTH)
    with closing(Drive(folder / "alone", size, DEPTH * BLOCK)) as drive:
        drive.prepare()
        hops = TwoHops(device, folder / "store", scale)
        with closing(hops.store):
            hops.check()
            hops.walk()  # checking was slower than the walks to come, and the store has learnt that pace
            alone, found = [], []
            hops.delivered.clear()
            for _ in clock.rounds(scale.rounds, 0.15):
                alone.append(drive.run(reads).rate)
                found.append(hops.walk())
            statistics = hops.store.statistics()
            ratio = report.ratio("NVMe to HBM:", found, alone)
            report.say(
                f"{scale.hops} tensors of {format_size(scale.hop)} in a cycle, HBM {format_size(8 * scale.hop)}, DRAM "
                f"{format_size(16 * scale.hop)}; backend {statistics.backend}, O_DIRECT "
                f"{'yes' if statistics.direct else 'no'}.",
                "",
                "| drive alone, GB/s | from the disk to the device | of the drive | with what was still resident |",
                "|---|---|---|---|",
                f"| {Spread.of(alone).shown(1e-9)} | {Spread.of(found).shown(1e-9)} | {ratio} | "
                f"{Spread.of(hops.delivered).shown(1e-9)} |",
            )
            report.data["from_disk"] = {"alone": alone, "two_hops": found, "delivered": hops.delivered}


def beside_compute(device: Device, scale: Scale, clock: Clock, report: Report) -> None:
    report.say("", "## Copies beside compute", "")
    compute = Compute(device, scale)
    with closing(compute.store):
        times = [compute.run() for _ in clock.rounds(scale.rounds, 0.02)]
    longer = [max(copying, computing) / both for copying, computing, both in times]
    hidden = [(copying + computing - both) / min(copying, computing) for copying, computing, both in times]
    copies, products, together = (Spread.of([row[i] * 1e3 for row in times]).shown() for i in range(3))
    ratio = report.ratio("copies beside compute:", longer, [1.0] * len(longer))
    report.say(
        f"{compute.STEPS} tensors of {format_size(4 * scale.matrix**2)}, each the right side of {compute.products} products in "
        f"bfloat16, {scale.matrix} x {scale.matrix} by {scale.matrix} x {2 * scale.matrix}. Milliseconds.",
        "",
        "| copies alone | products alone | together | longer one / together | share hidden |",
        "|---|---|---|---|---|",
        f"| {copies} | {products} | {together} | {ratio} | {Spread.of(hidden).shown()} |",
    )
    report.data["beside_compute"] = {"products": compute.products, "seconds": times}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="folder on the drive to measure (default: here)")
    parser.add_argument("--seconds", type=float, default=230.0, help="how long it may take, about (default: 230)")
    parser.add_argument("--out", help="write the page there, too")
    parser.add_argument("--json", help="write every round there")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu rehearses")
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"bench-gpu: nothing was measured: torch {torch.__version__} finds no CUDA device")
        return 1
    device, noise, clock = Device(options.device), Noise(), Clock(options.seconds)
    scale = Scale() if device.cuda else REHEARSAL
    facts = environment() | device.facts()
    facts["commit"] = facts["commit"] or os.environ.get("COMMIT") or "unknown"
    report = Report(options.out, options.json, data={"facts": facts})
    report.say(f"# Copies to and from {facts['device']}", "", f"{time.strftime('%Y-%m-%d')}, commit {facts['commit']}.", "")
    report.say(*(f"- {name.replace('_', ' ')}: {value}" for name, value in facts.items() if name not in ("device", "commit")))
    report.say("", "```", f"python -m bench.gpu {' '.join(sys.argv[1:] if arguments is None else arguments)}", "```", "")
    code = 0
    try:
        by_size(device, scale, clock, report)
        with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=options.dir) as folder:
            from_disk(device, scale, clock, report, Path(folder))
        beside_compute(device, scale, clock, report)
    except Wrong as wrong:
        report.say("", f"WRONG: {wrong}")
        code = 1
    report.say("", f"Below {BAR}: {'; '.join(report.below) or 'nothing'}.")
    seen = noise.seen()
    report.say(f"Of the cores' time others had {seen['others']:.1%}, steal {seen['steal']:.1%}.")
    report.keep(noise=seen)
    return code


if __name__ == "__main__":
    sys.exit(main())
