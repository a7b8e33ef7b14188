"""Training with parameters on the device, a tenth of which it has room for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu.device import MIB, NAME, Device, require_device
from tests.zero.models import Tied
from tiered import TieredStore, zero
from tiered.zero.paging.storage import UpdateTier

require_device()


def train(model: nn.Module, step: Callable[[], object], clip: Callable[[], torch.Tensor] | None, device: Device) -> list[float]:
    """Losses, and norms where gradients are clipped."""
    numbers = []
    for number in range(6):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(number)).to(device.device)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        numbers.append(loss.item())
        if clip is not None:
            numbers.append(clip().item())
        step()
    return numbers


def in_memory(device: Device, mode: str, tier: UpdateTier, *, clips: bool) -> tuple[nn.Module, list[float]]:
    """Train on the device; ``tier``: where torch's fused AdamW updates, on the device or on copies of all in host memory."""
    torch.manual_seed(0)
    model = Tied(width=128, layers=6, mode=mode).to(device.device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    updated = parameters if tier == "hbm" else [nn.Parameter(parameter.detach().cpu()) for parameter in parameters]
    optimizer = torch.optim.AdamW(updated, lr=1e-3, fused=True)

    def step() -> None:
        if tier == "dram":
            for there, here in zip(parameters, updated, strict=True):
                here.grad = None if there.grad is None else there.grad.cpu()
        optimizer.step()
        if tier == "dram":
            with torch.no_grad():
                for there, here in zip(parameters, updated, strict=True):
                    there.copy_(here)

    return model, train(model, step, (lambda: nn.utils.clip_grad_norm_(parameters, 0.5)) if clips else None, device)


# Norms are sums, whose last bits depend on where they are computed: with updates in host memory nothing is clipped.
@pytest.mark.parametrize(
    ("tier", "update", "mode", "clip"),
    [
        ("dram", "on_fetch", "plain", "none"),
        ("dram", "in_backward", "plain", "none"),
        ("hbm", "in_backward", "plain", "none"),
        ("hbm", "on_fetch", "checkpoint", "none"),
        ("hbm", "on_fetch", "plain", "torch's"),
        ("hbm", "on_fetch", "plain", "tiered's"),
    ],
)
def test_bits_are_those_of_the_devices_memory(
    tmp_path: Path, gpu: Device, tier: UpdateTier, update: str, mode: str, clip: str
) -> None:
    plain, expected = in_memory(gpu, mode, tier, clips=clip != "none")
    torch.manual_seed(0)
    model = Tied(width=128, layers=6, mode=mode)
    with TieredStore.open(tmp_path / "store", hbm=3 * MIB, device=NAME, dram=4 * MIB) as store:
        zero.page(model, store, paging=zero.Paging(update_tier=tier))
        assert next(model.parameters()).device == gpu.device
        optimizer = zero.AdamW(model.parameters(), lr=1e-3, update=update)
        clips: dict[str, Callable[[], torch.Tensor] | None] = {
            "none": None,
            "torch's": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
            "tiered's": lambda: optimizer.clip_grad_norm_(0.5),
        }
        assert train(model, optimizer.step, clips[clip], gpu) == expected
        assert store.statistics().evictions > 20
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), plain.state_dict()[name].cpu()), name
