"""Bytes that training moves per parameter and step, by the kernel's counters, beside the offline optimum of the traced step.

    .venv/bin/python -m bench.step            Markdown, some minutes
    .venv/bin/python -m bench.step --layers 8 --budget 50% --kind one
    .venv/bin/python -m bench.step --kind one --optimizer adamw_bf16 --optimizer adamw8bit --optimizer adamw4bit

The model is a stack of residual MLPs. Each line trains until the order of its steps is known, and counts some steps then. The
optimum is ``bench/optimum.py``'s bound for what was leased, for as long as it was, gradients and kept inputs included, in the
whole budget: room for what is on its way is not taken off.

Kinds: "one" pass a step; "accumulated", eight passes one after the other; "split", the same eight parts inside units.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from bench.watched import least_of_round, watch
from tiered import zero
from tiered.cli.bench.step import Dtype, Stepper, Update
from tiered.cli.output import told_environment
from tiered.cli.train.optimizers import kind_named
from tiered.cli.train.options import OPTIMIZERS, UPDATES
from tiered.measuring.meters import environment, scratch_store

__all__ = ["Case", "Measured", "NextTokens", "measure"]

Kind = Literal["one", "accumulated", "split"]
PARTS = 8
BATCH, TOKENS = 8, 32
WARM_UP, STEPS = 5, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + inner


class Model(nn.Module):
    """Tokens of shape (batch, TOKENS) to logits; the embedding is tied to the head."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


class NextTokens:
    """The loss of a model on the next batch of random tokens."""

    def __init__(self, batch: int, length: int) -> None:
        self._shape, self._generator = (batch, length), torch.Generator().manual_seed(0)

    def __call__(self, model: nn.Module) -> torch.Tensor:
        tokens = torch.randint(0, 256, self._shape, generator=self._generator)
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


@dataclass(frozen=True)
class Case:
    optimizer: str
    budget: float  # share of the state: parameters, and what the optimizer keeps for them
    kind: Kind
    dtype: Dtype
    update: Update
    prefetch: Literal["on", "off"]


@dataclass(frozen=True)
class Measured:
    """Bytes per parameter and step."""

    read: float
    written: float
    kernel: float | None
    optimum: float
    peak: float  # of the pool, as a share of the budget

    @property
    def ratio(self) -> float:
        return (self.read + self.written if self.kernel is None else self.kernel) / self.optimum


def measure(case: Case, layers: int, width: int, folder: str) -> Measured:
    torch.manual_seed(0)
    model = Model(layers, width)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dram = max(1 << 20, int(case.budget * kind_named(case.optimizer).bytes_kept * parameters))
    with scratch_store(folder, dram=dram) as store:
        stepper = Stepper(
            store, model, NextTokens(BATCH, TOKENS), optimizer=case.optimizer, update=case.update,
            passes=PARTS if case.kind == "accumulated" else 1, micro_batch=PARTS if case.kind == "split" else 1,
            paging=zero.Paging(prefetch=case.prefetch),
            policy=zero.Policy() if case.dtype == "float32" else zero.Policy(storage=getattr(torch, case.dtype)),
        )  # fmt: skip
        for _ in range(WARM_UP):
            stepper.step()
        with watch(store) as seen:
            used = []
            for _ in range(STEPS):
                used.append(stepper.step())
                seen.cut()
        peak = store.statistics().tiers[0].peak / dram
    per = parameters * STEPS
    kernel = [one.kernel_bytes for one in used if one.kernel_bytes is not None]
    return Measured(
        sum(one.read for one in used) / per,
        sum(one.written for one in used) / per,
        sum(kernel) / per if kernel else None,
        least_of_round(seen, dram) / parameters,
        peak,
    )


def cases(
    optimizers: Sequence[str], budgets: Sequence[float], kinds: Sequence[Kind], dtypes: Sequence[Any], updates: Sequence[Any]
) -> Iterator[tuple[Case, Case]]:
    """Each with fetching ahead, and without."""
    for optimizer, dtype, update, kind in itertools.product(optimizers, dtypes, updates, kinds):
        if update == "in_backward" and kind == "accumulated":
            continue  # each backward is a step
        for budget in budgets:
            ahead = Case(optimizer, budget, kind, dtype, update, "on")
            yield ahead, replace(ahead, prefetch="off")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--budget", action="append", help="share of the state, like 50%% (default: 10%%, 50%%, 90%%)")
    parser.add_argument("--kind", action="append", choices=("one", "accumulated", "split"))
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="in the store, not in modules")
    parser.add_argument("--update", action="append", choices=UPDATES)
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="(default: adamw)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    budgets = [float(text.rstrip("%")) / 100 for text in options.budget or ("10%", "50%", "90%")]
    print(told_environment(environment()) + "\n")
    columns = "optimizer | dtype | update | kind | budget | read | written | by the kernel | optimum | ratio | on demand"
    print(f"| {columns} | pool's peak |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    ratios = []
    for ahead, demand in cases(
        options.optimizer or ["adamw"],
        budgets,
        options.kind or get_args(Kind),
        options.dtype or ["float32", "bfloat16"],
        options.update or UPDATES,
    ):
        found, plain = (measure(case, options.layers, options.width, options.dir) for case in (ahead, demand))
        ratios.append(found.ratio)
        kernel = "?" if found.kernel is None else f"{found.kernel:.2f}"
        print(
            f"| {ahead.optimizer} | {ahead.dtype} | {ahead.update} | {ahead.kind} "
            f"| {ahead.budget:.0%} | {found.read:.2f} | {found.written:.2f} | {kernel} | {found.optimum:.2f} "
            f"| {found.ratio:.3f} | {plain.ratio:.3f} | {found.peak:.1%} |",
            flush=True,
        )
    print(f"\nratio: median {statistics.median(ratios):.3f}, most {max(ratios):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
