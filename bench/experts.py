"""MiB that a mixture of experts moves per step, by the store's counters: experts as units, beside LRU, and whole.

    .venv/bin/python -m bench.experts            Markdown, some minutes
    .venv/bin/python -m bench.experts --budget 25% --routing changing

The model is a stack of layers of experts; the same number of experts of each layer gets tokens in each step. Routings:
"fixed", the same experts in each step; "drifting", one of them is another one in the next step; "changing", all are drawn anew,
by Zipf's law with exponent 1.1. LRU: what it moves on the same leases from the first step on, fetching only what is needed, and
writing back what was written to when it leaves. Nobody knows the routing of the next step, so the offline optimum is no bar.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from bench.traces import Access, Trace
from bench.watched import watch
from tiered import CapacityError, zero
from tiered.cli.bench.step import Stepper
from tiered.cli.output import told_environment
from tiered.measuring.meters import environment, scratch_store

__all__ = ["measure"]

Routing = Literal["fixed", "drifting", "changing"]
EXPERTS, USED, TOKENS = 32, 4, 16
WARM_UP, STEPS = 10, 10


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / width**0.5)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        made = []
        for expert, tokens in zip(used, x.chunk(len(used)), strict=True):
            made.append(F.linear(F.gelu(F.linear(tokens, self.up[expert])), self.down[expert]))
        return x + torch.cat(made)


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, used: list[list[int]]) -> torch.Tensor:
        for layer, mine in zip(self.layers, used, strict=True):
            x = layer(x, mine)
        result: torch.Tensor = self.head(x)
        return result


class Router:
    """Gives the experts that each layer uses in the next step."""

    def __init__(self, routing: Routing, layers: int) -> None:
        self._routing, self._generator = routing, torch.Generator().manual_seed(0)
        self._weights = 1.0 / torch.arange(1, EXPERTS + 1).float() ** 1.1
        self._used = [self._drawn() for _ in range(layers)]

    def _drawn(self) -> list[int]:
        return sorted(torch.multinomial(self._weights, USED, generator=self._generator).tolist())

    def step(self) -> list[list[int]]:
        if self._routing == "changing":
            self._used = [self._drawn() for _ in self._used]
        elif self._routing == "drifting":
            for used in self._used:
                others = [expert for expert in range(EXPERTS) if expert not in used]
                used[0] = others[int(torch.randint(len(others), (), generator=self._generator))]
                used.sort()
        return [list(used) for used in self._used]


def measure(
    routing: Routing, experts: Literal["sliced", "whole"], budget: float, layers: int, width: int, folder: str
) -> tuple[float, float, float]:
    """Return MiB per step: read and written by the store, and moved by LRU."""
    torch.manual_seed(0)
    model, router = Model(layers, width), Router(routing, layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dram = int(budget * 12 * parameters)
    generator = torch.Generator().manual_seed(0)

    def loss(model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(torch.randn(TOKENS, width, generator=generator), router.step())
        return found.square().mean()

    with scratch_store(folder, dram=dram) as store:
        stepper = Stepper(store, model, loss, paging=zero.Paging(experts=experts))
        used = []
        with watch(store) as seen:
            for _ in range(WARM_UP + STEPS):
                used.append(stepper.step())
                seen.cut()
        before, after = (lru(seen.trace(seen.rounds[:count]), dram) for count in (WARM_UP, WARM_UP + STEPS))
    moved = sum(one.read for one in used[WARM_UP:]), sum(one.written for one in used[WARM_UP:]), after - before
    read, written, other = (nbytes / STEPS / 2**20 for nbytes in moved)
    return read, written, other


def lru(trace: Trace, budget: int) -> int:
    """Return the bytes that move where the least recently used tensor leaves."""
    resident: OrderedDict[str, bool] = OrderedDict()  # whether it was written to
    free, moved = budget, 0
    for key, access in trace.accesses:
        dirty = resident.pop(key, None)
        if dirty is None:
            moved += 0 if access is Access.PUT else trace.sizes[key]
            free -= trace.sizes[key]
            while free < 0:
                other, written = resident.popitem(last=False)
                free += trace.sizes[other]
                moved += trace.sizes[other] if written else 0
        resident[key] = bool(dirty) or access is not Access.READ
    return moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--budget", action="append", help="share of the state, like 25%% (default: 8%%, 15%%, 40%%)")
    parser.add_argument("--routing", action="append", choices=get_args(Routing))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(told_environment(environment()) + "\n")
    print("| routing | budget | read | written | LRU moves | ratio | experts whole |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for routing in options.routing or get_args(Routing):
        for text in options.budget or ("8%", "15%", "40%"):
            budget = float(text.rstrip("%")) / 100
            shape = budget, options.layers, options.width, options.dir
            read, written, other = measure(routing, "sliced", *shape)
            try:
                whole = f"{sum(measure(routing, 'whole', *shape)[:2]):.1f}"
            except CapacityError:
                whole = "refused"
            ratio = f"{(read + written) / other:.2f}" if other else "none"
            print(f"| {routing} | {text} | {read:.1f} | {written:.1f} | {other:.1f} | {ratio} | {whole} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
