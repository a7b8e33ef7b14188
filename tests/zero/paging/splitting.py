"""The same split in memory: what ``zero.page(..., micro_batch=k)`` has to equal, in twenty lines of torch and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zero.models import Block


def split_in_memory(model: nn.Module, names: Iterable[str], parts: int) -> nn.Module:
    """Every named module runs on one part of its first argument after the other, each checkpointed. Returns ``model``."""
    for name in names:
        module = model.get_submodule(name)
        module.forward = in_parts(module.forward, parts)
    return model


def in_parts(original: Callable[..., Any], parts: int) -> Callable[..., Any]:
    def forward(x: torch.Tensor, *shared: Any) -> Any:
        outputs = [
            checkpoint(original, piece, *shared, use_reentrant=False)
            for piece in torch.tensor_split(x, min(parts, x.shape[0]))
        ]
        if isinstance(outputs[0], tuple):
            return tuple(torch.cat(same) for same in zip(*outputs, strict=True))
        return torch.cat(outputs)

    return forward


class Dropped(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.dropout(super().forward(x)) * scale


class Language(nn.Module):
    """A GPT with dropout and a tied embedding, which is used by two units and directly; the loss is computed inside.

    ``gate`` is a parameter of the model's own that is given to every block.
    """

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        self.gate = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Dropped(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.blocks[1].norm.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.gate[: x.shape[-1]])
        x = self.norm(x)
        x = self.head(x) + 0.5 * (x @ self.embedding.weight.t())
        return x if targets is None else F.cross_entropy(x.flatten(0, 1), targets.flatten())

    def loss(self, seed: int, batch: int = 7) -> torch.Tensor:
        """Of ``batch`` samples; inside the model for even seeds, outside for odd ones."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 64, (batch, 16), generator=generator)
        if seed % 2 == 0:
            return self(tokens, tokens.roll(-1, 1))
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
