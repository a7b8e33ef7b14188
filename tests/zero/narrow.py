"""bf16 and fp16 training in memory, to compare with: fp32 masters beside the model, rounded into it after each step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["MasterAdamW", "Narrow", "half_up"]


def half_up(master: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, ties away from zero."""
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)  # a sum that wraps has the same upper half


class MasterAdamW(torch.optim.AdamW):
    """torch's fused AdamW on fp32 copies of the narrow parameters (others are their own masters).

    ``storage``: fp32 parameters are narrow, too, for they are stored so; their values are rounded at once. Without it, a value
    that somebody wrote to a narrow parameter since the last step is the master that the next one begins with.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], storage: torch.dtype | None = None, **options: Any) -> None:
        self._storage = storage
        self._widened = False
        self.pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        mine = []
        for group in groups:
            masters = []
            for parameter in group["params"]:
                narrow = storage is not None or parameter.dtype in (torch.bfloat16, torch.float16)
                if storage is not None:
                    parameter.data = parameter.data.to(storage).float()
                masters.append(nn.Parameter(parameter.detach().float().clone()) if narrow else parameter)
                if narrow:
                    self.pairs.append((parameter, masters[-1]))
            mine.append({**group, "params": masters})
        super().__init__(mine, **options, fused=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        self._widened = False
        for parameter, _ in self.pairs:
            parameter.grad = None

    def widen(self) -> None:
        """Give the masters the gradients of their parameters, to be unscaled and clipped there before ``step``."""
        self._widened = True
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._widened:
            self.widen()
        self._widened = False
        for parameter, master in self.pairs if self._storage is None else ():
            kept = half_up(master) if parameter.dtype is torch.bfloat16 else master.to(parameter.dtype)
            written = kept.view(torch.int16) != parameter.view(torch.int16)
            master.copy_(torch.where(written, parameter.float(), master))
        super().step()
        for parameter, master in self.pairs:
            if master.grad is not None:
                storage = self._storage or parameter.dtype
                parameter.copy_(half_up(master) if storage is torch.bfloat16 else master.to(storage))


class Narrow(nn.Module):
    """Parameters of three element types in the same unit; some frozen, some unused, a matrix with strides of its own."""

    def __init__(self, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "up": nn.Linear(width, 2 * width).to(torch.bfloat16),
                    "down": nn.Linear(2 * width, width).to(torch.bfloat16),
                    "narrow": nn.Linear(width, width).half(),
                    "unused": nn.Linear(3, 3).to(torch.bfloat16),
                }
            )
            layer.up.bias.requires_grad_(False)
            layer.down.weight = nn.Parameter(layer.down.weight.detach().t().contiguous().t())
            self.layers.append(_Block(layer))
        self.out = nn.Linear(width, 5)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self(torch.randn(2, self.width, generator=generator)).square().mean()


class _Block(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts
        y = parts["norm"](x).to(torch.bfloat16)
        y = parts["down"](torch.relu(parts["up"](y))).half()
        return x + parts["narrow"](y).float()
