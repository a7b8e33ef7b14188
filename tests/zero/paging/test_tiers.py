"""The same numbers whatever the tiers are: HBM on top (its stand-in), no disk below, or both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from tests.quick import quick
from tiered import TieredStore, zero

MIB = 1 << 20
Numbers = list[tuple[float, float]]


def blocks() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], torch.Tensor]) -> Numbers:
    numbers = []
    for step in range(4):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        numbers.append((loss.item(), clip(1.0).item()))
        optimizer.step()
    return numbers


@pytest.mark.parametrize(
    ("hbm", "updates", "disk"),
    quick(
        [(*chain, disk) for chain in ((None, "dram"), (MIB, "dram"), (MIB, "hbm")) for disk in ("disk", "no disk")],
        [(None, "dram", "no disk"), (MIB, "dram", "disk"), (MIB, "hbm", "disk")],
    ),
)
def test_training_is_identical_over_every_chain(
    tmp_path: Path, hbm: int | None, updates: Literal["dram", "hbm"], disk: str
) -> None:
    plain = blocks()
    expected = train(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True),
        lambda norm: nn.utils.clip_grad_norm_(plain.parameters(), norm),
    )
    path = tmp_path / "store" if disk == "disk" else None
    with TieredStore.open(path, dram=MIB if path else 64 * MIB, hbm=hbm, device="cpu") as store:
        model = blocks()
        zero.page(model, store, paging=zero.Paging(update_tier=updates))
        optimizer = zero.AdamW(model.parameters(), lr=1e-3)
        assert train(model, optimizer, optimizer.clip_grad_norm_) == expected
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
        for link in store.statistics().links:
            assert link.up.bytes > MIB
            if (link.src, updates) == ("hbm", "dram"):  # parameters are read there, and gradients go down as they arrive
                assert link.down.bytes == 0
            else:
                assert link.down.bytes > MIB
