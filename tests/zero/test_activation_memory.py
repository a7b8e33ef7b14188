"""A model whose activations are four times the budget trains within the promised memory. In a process of its own."""

from __future__ import annotations

import json
import resource
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import programs
from tests.zero.models import Block
from tiered import TieredStore, zero
from tiered.cli.train.model import GPT, Shape

MIB = 1 << 20
BUDGET = 64 * MIB
WIDTH, LAYERS, LENGTH = 256, 10, 1024
BATCH = 2


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def saved_by(module: nn.Module, given: torch.Tensor) -> int:
    """Bytes of memory that autograd keeps of one forward, parameters apart."""
    kept: dict[int, int] = {}
    mine = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(given)
    return sum(kept.values())


def child(folder: str, activations: str) -> None:
    """Three steps; prints peaks, and what activations take of one unit and of all."""
    torch.set_num_threads(1)
    import_module("torch._dynamo")  # which torch imports with its first optimizer
    imports = peak()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Stack()

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)

    with TieredStore.open(folder, dram=BUDGET, durability="none") as store:
        zero.page(model, store, param_init_fn=init, activations=activations)  # type: ignore[arg-type]
        optimizer = zero.AdamW(model.parameters())
        for step in range(3):
            torch.manual_seed(step)
            tokens = torch.randint(0, 256, (BATCH, LENGTH))
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        reached, said, pool = peak(), zero.statistics(model).activations, store.statistics().tier("dram").peak
    one = saved_by(Block(WIDTH), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True))
    print(
        json.dumps(
            {
                "imports": imports, "peak": reached, "pool": pool, "unit": one, "all": one * LAYERS,
                "offloaded": 0 if said is None else said.offloaded // 3,
            }
        )
    )  # fmt: skip


def run(folder: Path, activations: str) -> dict[str, Any]:
    code = f"from tests.zero.test_activation_memory import child; child({str(folder)!r}, {activations!r})"
    done = programs.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
def test_activations_of_four_budgets_train_within_the_promised_memory(tmp_path: Path) -> None:
    stored, memory = run(tmp_path / "store", "store"), run(tmp_path / "memory", "memory")
    assert stored["all"] >= 4 * BUDGET
    allowed = stored["imports"] + 1.1 * BUDGET + 128 * MIB + stored["unit"]
    print({name: f"{value / MIB:.0f} MiB" for name, value in stored.items()}, f"allowed {allowed / MIB:.0f} MiB")
    print("in memory", {name: f"{value / MIB:.0f} MiB" for name, value in memory.items()})
    assert stored["peak"] <= allowed
    assert memory["peak"] > allowed, "what is offloaded would have fitted"


LONG, SHORT = 4096, 1024
"""Tokens: a sequence, and one of a quarter of its length."""


def longer(folder: str, length: int) -> None:
    """Two steps of a GPT on one sequence, in a store (its activations, too) or, without ``folder``, in memory; prints the peak,
    and the losses."""
    torch.manual_seed(0)
    model = GPT(Shape(12, 384, 6, LONG))  # positions for the long one, so that both have as many parameters
    losses = []

    def step(optimizer: torch.optim.Optimizer) -> None:
        tokens = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(len(losses)))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if folder:
        with TieredStore.open(folder, dram=96 * MIB, durability="none") as store:
            zero.page(model, store, activations="store")
            paged = zero.AdamW(model.parameters(), lr=1e-3)
            for _ in range(2):
                step(paged)
    else:
        in_memory = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(2):
            step(in_memory)
    print(json.dumps({"peak": peak(), "losses": losses}))


def run_longer(folder: Path | None, length: int) -> dict[str, Any]:
    code = f"from tests.zero.test_activation_memory import longer; longer({str(folder or '')!r}, {length})"
    done = programs.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
def test_a_sequence_four_times_as_long_fits_in_the_peak_of_memory(tmp_path: Path) -> None:
    stored, memory, too_long = run_longer(tmp_path / "store", LONG), run_longer(None, SHORT), run_longer(None, LONG)
    for name, one in ("stored, long", stored), ("in memory, short", memory), ("in memory, long", too_long):
        print(f"{name}: {one['peak'] / MIB:.0f} MiB")
    assert stored["losses"] == too_long["losses"]
    assert stored["peak"] <= memory["peak"]
    assert too_long["peak"] > memory["peak"]
