"""Training steps of one GPT with several optimizers in a store, beside torch's AdamW in memory: seconds, bytes and memory.

    .venv/bin/python -m bench.optimizers --dir /mnt/nvme                          168 million parameters, 32 tokens a step
    .venv/bin/python -m bench.optimizers --optimizer adamw --optimizer adamw8bit --layers 12

Each trains in a process of its own. The processes take turns, one step each, so that all of them see the same drive and the
same other programs. In stores the memory is a share (``--share``) of parameters and fp32 moments, the same for all, and updates
are made within backward. "state": the bytes of a parameter and its states. The bound is the larger of the seconds of the step
in memory and of its bytes at the rate of the drive, which is measured between the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tiered import TieredStore, zero
from tiered.cli.output import Progress, told_environment
from tiered.cli.train.model import GPT, STATE_BYTES, Shape, build, seeded_initialiser
from tiered.cli.train.optimizers import decayed, kind_named
from tiered.cli.train.options import OPTIMIZERS
from tiered.measuring.drive import read_rate, write_rate
from tiered.measuring.meters import Meter, Spread, environment, peak_memory
from tiered.types import format_size

MEMORY = "in memory: torch's AdamW"
STORED = ("adamw", "adamw_bf16", "adamw8bit", "adamw4bit")
WARM_UP = 4
"""Steps until the order is known and all states are there."""


def work(way: str, folder: str, shape: Shape, batch: int, dram: int) -> None:
    """Train a step for each line of stdin; print a line of JSON for each."""
    tokens = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        store = None
        if way == MEMORY:
            model = GPT(shape)
            initialise = seeded_initialiser(model, shape)
            for module in (module for module in model.modules() if module._parameters):
                initialise(module)
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(decayed(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)
        else:
            store = stack.enter_context(TieredStore.open(folder, dram=dram, durability="none"))
            model = build(shape)
            zero.page(model, store, param_init_fn=seeded_initialiser(model, shape))
            kind = kind_named(way)
            optimizer = kind.ours(decayed(model, 0.1), lr=1e-4, update="in_backward", **kind.settings)
        meter = Meter(store)
        for _ in sys.stdin:
            inputs = torch.randint(0, 256, (batch, shape.context), generator=tokens)
            meter.lap()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            used = meter.lap()
            updating = zero.statistics(model).update_seconds if store else 0.0
            answer = {"loss": loss.item(), "seconds": used.seconds, "moved": used.bytes or 0, "waited": used.stalled or 0.0}
            print(json.dumps({**answer, "updating": updating, "peak": peak_memory()}), flush=True)


class Child:
    """A training in a process of its own."""

    def __init__(self, way: str, folder: Path, shape: Shape, batch: int, dram: int) -> None:
        given = json.dumps([way, str(folder), [shape.layers, shape.width, shape.heads, shape.context], batch, dram])
        self.way, self.steps = way, list[dict[str, Any]]()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.optimizers", "--worker", given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def step(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"training with {self.way} failed ({self.process.wait()})")
        self.steps.append(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace, shape: Shape, dram: int) -> tuple[list[Child], list[float]]:
    """Return the trainings with their steps, and the seconds that the drive took for a byte after each round."""
    with ExitStack() as stack:
        at = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        progress = stack.enter_context(Progress(sys.stderr))
        ways = [MEMORY, *(options.optimizer or STORED)]
        children = [Child(way, at / str(number), shape, options.batch, dram) for number, way in enumerate(ways)]
        for child in children:
            stack.callback(child.close)
        costs = []
        total = WARM_UP + options.steps
        for number in range(total):
            for place, child in enumerate(children[number % len(children) :] + children[: number % len(children)]):
                progress.working(f"step {number + 1} of {total}, {child.way}", (number + place / len(children)) / total)
                child.step()
            if number >= WARM_UP:
                data = max((at / "1").rglob("data.*"), key=lambda path: path.stat().st_size)
                costs.append(0.5 / read_rate([data], 1 << 30) + 0.5 / write_rate(at / "probe", 1 << 30))
        progress.working("done", 1.0)
        return children, costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=32, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=1, help="texts of a step")
    parser.add_argument("--share", type=float, default=0.1, help="of parameters and fp32 moments that memory has room for")
    parser.add_argument("--steps", type=int, default=7, help="that count")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help=f"default: {', '.join(STORED)}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        way, folder, sizes, batch, dram = json.loads(options.worker)
        work(way, folder, Shape(*sizes), batch, dram)
        return 0
    shape = Shape(options.layers, options.width, options.heads, options.context)
    dram = int(options.share * STATE_BYTES * shape.parameters)
    print(told_environment(environment()))
    children, costs = measure(options, shape, dram)
    print(
        f"\nGPT of {shape.parameters / 1e6:.1f} M parameters, {options.batch} x {options.context} tokens a step, in stores "
        f"with {format_size(dram)} of memory; {options.steps} steps after {WARM_UP}. The drive moves "
        f"{1e-9 / statistics.median(costs):.2f} GB/s.\n"
    )
    print("| optimizer | state, bytes | seconds a step | by memory | by adamw | by the bound | bytes a step and parameter "
          "| update | waiting | peak MiB | loss |\n|---|---:|" + "---:|" * 9)  # fmt: skip
    memory = [one["seconds"] for one in children[0].steps[WARM_UP:]]
    usual = [one["seconds"] for one in children[1].steps[WARM_UP:]]
    for child in children:
        found = child.steps[WARM_UP:]
        taken = [one["seconds"] for one in found]
        bound = [max(beside, one["moved"] * cost) for beside, one, cost in zip(memory, found, costs, strict=True)]
        by = [Spread.of([a / b for a, b in zip(taken, other, strict=True)]).shown() for other in (memory, usual, bound)]
        moved = statistics.fmean(one["moved"] for one in found) / shape.parameters
        updating = [b["updating"] - a["updating"] for a, b in zip(child.steps[WARM_UP - 1 :], found, strict=False)]
        state = 12.0 if child.way == MEMORY else kind_named(child.way).bytes_kept
        print(
            f"| {child.way} | {state:.2f} | {Spread.of(taken).shown()} | {' | '.join(by)} | {moved:.2f} "
            f"| {statistics.median(updating):.2f} | {statistics.median(one['waited'] for one in found):.2f} "
            f"| {found[-1]['peak'] / 2**20:.0f} | {found[-1]['loss']:.4f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
