"""Training with parameters on the device, a tenth of which it has room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu.device import MIB, NAME, Device, require_device
from tests.zero.models import Tied
from tiered import TieredStore, zero
from tiered.zero.paging.storage import UpdateTier

require_device()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> list[float]:
    losses = []
    for step in range(6):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("tier", "update", "mode"),
    [("dram", "on_fetch", "plain"), ("dram", "in_backward", "plain"), ("hbm", "on_fetch", "checkpoint")],
)
def test_as_in_the_devices_memory(tmp_path: Path, gpu: Device, tier: UpdateTier, update: str, mode: str) -> None:
    torch.manual_seed(0)
    plain = Tied(width=128, layers=6, mode=mode).to(gpu.device)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True), gpu.device)
    torch.manual_seed(0)
    model = Tied(width=128, layers=6, mode=mode)
    with TieredStore.open(tmp_path / "store", hbm=3 * MIB, device=NAME, dram=4 * MIB) as store:
        zero.page(model, store, update_tier=tier)
        assert next(model.parameters()).device == gpu.device
        numbers = train(model, zero.AdamW(model.parameters(), lr=1e-3, update=update), gpu.device)
        assert store.statistics().evictions > 20
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.cpu(), plain.state_dict()[name].cpu(), rtol=1e-3, atol=1e-4, msg=name)
