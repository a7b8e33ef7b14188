"""What a plan says of trainings that others published, beside what they measured: seconds of a step, and TFlop/s of a GPU.

    .venv/bin/python -m bench.published > bench/results/plan_published_<date>.md
    .venv/bin/python -m bench.published --row dgx2-50b        one row; --list names them

Each row has the published number, where it was found, and the hardware as the parameters of a machine: the numbers that were
published with it, and assumptions where there was none, both named in the row. Nothing is measured here, and no row is fitted.
The plan is of the schedule of ``tiered.zero``, not of DeepSpeed's: where the two differ, the row differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from tiered.planning.machine import Machine
from tiered.planning.plan import Choice, PlannedRanks, Planner
from tiered.planning.sources import Numbers, Subject, Workload, subject_of
from tiered.planning.timing import Timing
from tiered.zero import Policy
from tiered.zero.rules.exact import AdamWRule

__all__ = ["ROWS", "Planned", "Row", "plan_of", "seconds_of", "table", "tflops_of"]

REHEARSED = 100
"""Touches of a step that are played as they are: states of billions of elements in a few large chunks, which takes seconds."""
PASSES = 4
"""Of a forward, with activations computed again in backward: forward, forward again, and a backward of two. The published
TFlop/s count 2 floating point operations for each parameter, token and pass. Issue 1776 shows that: 8 x 50.356e9 parameters x
26 x 1,024 tokens in 298.9 s are its 35.88 TFlop/s."""

DGX2 = "https://raw.githubusercontent.com/microsoft/DeepSpeed/master/docs/assets/files/SC21-ZeRO-Infinity.pdf"
OFFLOAD = "https://github.com/deepspeedai/DeepSpeed/blob/master/docs/_posts/2021-03-08-zero3-offload.md"
AZURE = "https://github.com/deepspeedai/DeepSpeed/blob/master/docs/_posts/2022-07-26-deepspeed-azure.md"
ISSUE = "https://github.com/deepspeedai/DeepSpeed/issues/1776"

HOST = 1_500_000_000_000
"""Bytes of memory of a DGX-2 node, 16 GPUs (OFFLOAD: "1.5TB CPU memory")."""
NODE = 16
RESERVED = 6 << 30
"""Bytes of a rank's part of the host's memory that its pool does not take: an assumption."""

V100_NODE = Machine(  # the part of a node that one of its 16 ranks has, because their GPUs are linked to one another
    name="DGX-2",
    read=28e9 / NODE,  # DGX2: NVMe to GPU, 28 GB/s with one node, 1.8 TB/s with 64
    write=28e9 / NODE,  # assumed: as reading; nothing was found
    dram=HOST // NODE,
    flops_half=63e12,  # ISSUE: 10 B parameters, which need no offloading, on the same kind of machine: about 63 TFlop/s
    memory=900e9,  # assumed: HBM2 of a V100, by its data sheet; operations that compute little take a few percent
    update=64e9 / 28 / NODE,  # assumed: Adam moves 28 bytes for each element; DGX2 has 64 GB/s of a node's memory to its GPUs
    network=70e9,  # DGX2: between GPUs 70 GB/s, which it says is the limit of a gather
    cores=6,  # assumed: a core is left for the thread of the store
)

A100_NODE = Machine(
    name="a node with an A100",
    read=3.5e9,  # Samsung 980, 1 TB: https://www.guru3d.com/articles-pages/samsung-980-1tb-nvme-ssd-review,2.html
    write=3e9,
    flops_half=165e12,  # AZURE: a model of 1 T parameters on A100, ZeRO-3: 165.36 TFlop/s a GPU
    memory=1.5e12,  # assumed: HBM2 of an A100
    update=5e8,  # assumed, as the network
    network=1.25e9,
    cores=6,
)


@dataclass(frozen=True)
class Row:
    """A published training step. ``seconds`` or ``tflops`` (of a GPU, counted as ``PASSES`` says) was published; the other one
    follows from it. ``dram``: bytes of a rank's pool. ``found`` and ``assumed`` say where the numbers are from."""

    name: str
    title: str
    shape: Numbers
    batch: int
    ranks: int
    machine: Machine
    dram: int
    source: str
    found: str
    assumed: str
    seconds: float | None = None
    tflops: float | None = None
    sequence: int = 1024

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.tflops is None):
            raise ValueError(f"row {self.name} has seconds or TFlop/s that were published, and not both")

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class Planned:
    """A row with its plan. ``computing``: seconds that the plan has for forward and backward alone, beside its ``ranks``."""

    row: Row
    ranks: PlannedRanks
    parameters: int
    computing: float

    @property
    def published(self) -> float:
        """Return the published seconds of a step."""
        row = self.row
        if row.seconds is not None:
            return row.seconds
        assert row.tflops is not None
        return seconds_of(row.tflops, self.parameters, row.tokens)

    @property
    def ratio(self) -> float:
        """Return the planned seconds for each published one: below 1 the plan is faster than what was measured."""
        return self.ranks.seconds / self.published

    @property
    def unhidden(self) -> float:
        """Return the seconds of the step if the drive worked while nothing else did: an upper bound by the plan's own bytes."""
        machine, found = self.row.machine, self.ranks
        return found.seconds - found.waiting + found.read / machine.read + found.written / machine.write


def seconds_of(tflops: float, parameters: int, tokens: int) -> float:
    """Return the seconds of a step that a rank with so many tokens computes at so many TFlop/s."""
    return 2 * PASSES * parameters * tokens / (tflops * 1e12)


def tflops_of(seconds: float, parameters: int, tokens: int) -> float:
    """Return the TFlop/s of a rank with so many tokens in a step of so many seconds."""
    return 2 * PASSES * parameters * tokens / seconds / 1e12


def _one_trillion(ranks: int, tflops: float) -> Row:
    return Row(
        f"dgx2-1t-{ranks}", f"ZeRO-Infinity, 1 T parameters, {ranks} V100", Numbers(128, 25_600, 160, 50_304, dtype="bfloat16"),
        batch=2, ranks=ranks, machine=V100_NODE, dram=HOST // NODE - RESERVED, tflops=tflops, source=DGX2,
        found="TFlop/s by the height of the point in the graph of the slides (PFlop/s by GPUs; at 512 the bar of 1 T says the "
        "same); 128 layers and 160 heads: the 1 T model of " + AZURE + ", from which the width of 25,600 follows",
        assumed="2,048 tokens a GPU (the batch of the slides' analysis of bandwidth); what the run kept where is not known, "
        "the plan keeps what fits the memory of the host",
    )  # fmt: skip


def _fifty_billion(name: str, dram: int, title: str, assumed: str) -> Row:
    return Row(
        name, f"ZeRO-Infinity, 50 B parameters, one DGX-2, {title}", Numbers(62, 8192, 64, 50_304, dtype="bfloat16"), batch=26,
        ranks=16, machine=V100_NODE, dram=dram, seconds=298.91, source=ISSUE,
        found="298.9 s a step: forward 53.6, backward 152.7, optimizer 92.6; 35.88 TFlop/s a GPU, 50.356 B parameters, batch "
        "26 (the name of the log)",
        assumed="62 layers of width 8,192 and 1,024 tokens: they give the published numbers of parameters and of TFlop/s; "
        + assumed,
    )  # fmt: skip


ROWS = {
    row.name: row
    for row in (
        _fifty_billion("dgx2-50b", HOST // NODE - RESERVED, "all memory of the host", "a pool that holds all states"),
        _fifty_billion("dgx2-50b-drive", 28 << 30, "pools of 28 GiB", "a pool a GPU that leaves states on the drive"),
        _one_trillion(512, 49.0),
        _one_trillion(256, 46.3),
        Row(
            "a100-10b", "ZeRO-Infinity, 10 B parameters, two nodes with an A100",
            Numbers(50, 4096, 16, 50_304, dtype="bfloat16"), batch=8, ranks=2, dram=16 << 30, tflops=1.5, machine=A100_NODE,
            source="https://github.com/deepspeedai/DeepSpeedExamples/issues/192",
            found="1.5 TFlop/s a GPU; 50 layers of width 4,096, 16 heads, batch 8; A100 PCIe of 40 GB, a Samsung 980 of "
            "1 TB, 60 GB of memory that is free, 80 GB on the drive of each node",
            assumed="1,024 tokens; batch of a GPU; a pool of 16 GiB, which leaves as much on the drive; a network of 10 Gb/s",
        ),
    )
}


@cache
def _again(kind: Any) -> Any:
    class Again(kind):  # a class, so that copies of a block compute with their own parameters
        def forward(self, *args: Any) -> Any:
            return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False)

    return Again


def checkpointed(subject: Subject) -> Subject:
    """Have each block of the model compute its activations again in backward, as the published runs do."""
    blocks = subject.model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        block.__class__ = _again(type(block))
    return subject


def plan_of(row: Row) -> Planned:
    """Return the plan of a row. Raises CapacityError where it does not fit the pool."""
    subject = checkpointed(subject_of(row.shape, Workload(row.batch, row.sequence)))
    rule = AdamWRule(1e-3, (0.9, 0.999), 1e-8, 0.01, False)
    planner = Planner(subject, row.machine, rule, Policy(), 1, rehearsed=REHEARSED)
    choice = Choice("on_fetch", "memory", row.dram)
    found = planner.with_ranks(choice, row.ranks, row.tokens)
    return Planned(row, found, subject.parameters, sum(Timing(row.machine).compute(planner.step(choice, row.ranks))))


def table(rows: Sequence[Planned]) -> list[str]:
    """Return a Markdown table of rows, a line each."""
    lines = [
        "| row | GPUs | s published | s planned | ratio | s planned, drive not hidden | ratio | TFlop/s a GPU published "
        "| planned | s of computing | GB read, written by a GPU | s waiting for the drive, the network |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in rows:
        found, row = one.ranks, one.row
        rates = (tflops_of(seconds, one.parameters, row.tokens) for seconds in (one.published, found.seconds))
        cells = [
            row.title, str(row.ranks), f"{one.published:.1f}", f"{found.seconds:.1f}", f"{one.ratio:.2f}",
            f"{one.unhidden:.1f}", f"{one.unhidden / one.published:.2f}", *(f"{rate:.1f}" for rate in rates),
            f"{one.computing:.1f}", f"{found.read / 1e9:.1f}, {found.written / 1e9:.1f}",
            f"{found.waiting:.1f}, {found.network:.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=ROWS, help="a row (default: all)")
    parser.add_argument("--list", action="store_true", help="name the rows, and where they are from")
    options = parser.parse_args(arguments)
    chosen = [ROWS[name] for name in options.row or ROWS]
    if options.list:
        for row in chosen:
            print(f"{row.name}: {row.title}\n  source: {row.source}\n  found: {row.found}\n  assumed: {row.assumed}")
        return 0
    began = time.monotonic()
    planned = []
    for row in chosen:
        planned.append(plan_of(row))
        print(f"{row.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print("\n".join(table(planned)))
    print("\nWhere the numbers are from:\n")
    for row in chosen:
        print(f"- {row.title}: {row.source}. Found: {row.found}. Assumed: {row.assumed}.")
    machines = dict.fromkeys(row.machine for row in chosen)
    print("\n" + "\n".join(f"Machine: {machine}" for machine in machines))
    print(f"\n{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
