"""Neither the pool nor the process grows with the model. In child processes, whose peaks are their own."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.zero.models import Tied
from tiered import TieredStore, zero

BUDGET = 8 << 20
WIDTH = 192


def child(folder: str, layers: int) -> None:
    """Three steps with checkpointing; prints the pool's and the process's peaks."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Tied(width=WIDTH, layers=layers, mode="checkpoint")
        model.scale = torch.tensor(0.5, device="cpu")

    def init(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter, std=0.02)

    with TieredStore.open(folder, dram=BUDGET) as store:
        zero.page(model, store, param_init_fn=init)
        optimizer = zero.AdamW(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            model.loss(step).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        pool = store.statistics().tiers[0]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(json.dumps({"pool": pool.peak, "capacity": pool.capacity, "rss": peak, "parameters": parameters}))
        store.close()


def run(folder: Path, layers: int) -> dict[str, Any]:
    code = f"from tests.zero.test_memory import child; child({str(folder)!r}, {layers})"
    done = programs.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
def test_ten_times_the_layers_need_no_more_memory(tmp_path: Path) -> None:
    few, many = run(tmp_path / "few", 3), run(tmp_path / "many", 30)
    for peaks in (few, many):
        assert peaks["pool"] <= peaks["capacity"] <= BUDGET
    state = 16 * (many["parameters"] - few["parameters"])
    grown = many["rss"] - few["rss"]
    # 27 more layers bring modules, hooks and kept inputs, and what the heap holds between two trims; their parameters,
    # gradients and moments alone would be this much:
    assert state > 160 << 20
    assert grown < state / 4, f"{grown:,} more bytes at the peak, for {state:,} more bytes of training state"
