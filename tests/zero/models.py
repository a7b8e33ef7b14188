"""Small models that between them have everything that paging must get right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.unused = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Tied(nn.Module):
    """A GPT with a tied embedding, used through the module and through ``weight`` directly; some parameters are frozen."""

    def __init__(self, width: int = 32, layers: int = 3, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.embedding = nn.Embedding(64, width)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))
        for parameter in self.blocks[1].norm.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x) if self.mode == "plain" else checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        x = self.norm(x)
        return self.head(x) + self.scale * (x @ self.embedding.weight.t())

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 64, (2, 16), generator=generator)
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Mixed(nn.Module):
    """Convolution (channels-last), batch norm, LSTM and multi-head attention (whose ``out_proj`` is never called)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.normal = nn.BatchNorm2d(16)
        self.lstm = nn.LSTM(16, 24, num_layers=2)
        self.attention = nn.MultiheadAttention(24, 4)
        self.shared = nn.Linear(24, 24)
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(24))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.normal(self.convolution(x)))
        x, _ = self.lstm(x.mean(3).permute(2, 0, 1))
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.shared(torch.tanh(self.shared(x))) * self.extra[0]

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self(torch.randn(2, 3, 8, 8, generator=generator)).square().mean()


SIZES = {"plain": (64, 2), "checkpoint": (48, 3), "reentrant": (48, 3)}
"""Width and layers of ``Tied``, by mode: in a pool of 1 MiB the wide one has units in several chunks, and all are evicted."""


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Two groups, in an order other than ``model.parameters()``."""
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices[::-1], "weight_decay": 0.1, "lr": 2e-3}]


class Normed(nn.Module):
    """A model with buffers that change in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))
