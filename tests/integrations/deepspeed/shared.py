"""A small model and its training, as DeepSpeed and this project both run it. Imports neither."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["AFTER", "BEFORE", "CASES", "Case", "Small", "batch", "config_of", "groups_of", "unpacked"]

FOLDER = Path(__file__).parent / "theirs"
BEFORE, AFTER = 3, 4
"""Steps before a checkpoint was written, and steps after it whose losses are compared."""


@dataclass(frozen=True)
class Case:
    """Training by DeepSpeed of which a checkpoint was written."""

    stage: int
    dtype: str = "fp32"
    offload: str = "none"
    optimizer: str = "AdamW"
    ranks: int = 2
    width: int = 6


CASES = {
    "stage1-bf16": Case(1, "bf16"),
    "stage2-fp32": Case(2),
    "stage2-fp16": Case(2, "fp16"),
    "stage2-cpu": Case(2, offload="cpu"),
    "stage2-adagrad": Case(2, offload="cpu", optimizer="Adagrad"),
    "stage1-lion": Case(1, offload="cpu", optimizer="Lion"),
    "stage3-fp32": Case(3),
    "stage3-bf16": Case(3, "bf16", ranks=3),
    "stage3-nvme": Case(3, offload="nvme", width=12),
}


class Small(nn.Module):
    """A head that is tied to the embedding, a frozen parameter, a buffer, and sizes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.a, self.b = nn.Linear(width, 9), nn.Linear(9, width, bias=False)
        self.deep = nn.ModuleList(nn.Linear(width, width) for _ in range(width // 6))
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        self.seen += 1
        x = x + self.b(torch.tanh(self.a(x))) + self.frozen.sum()
        for layer in self.deep:
            x = x + torch.tanh(layer(x))
        found: torch.Tensor = self.head(self.norm(x))[:, :-1]
        return nn.functional.cross_entropy(found.flatten(0, 1).float(), tokens[:, 1:].flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Param groups: decay for matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (2, 7), generator=generator)


def config_of(case: Case, nvme: str = "nvme") -> dict[str, Any]:
    """The configuration of DeepSpeed."""
    params: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if case.optimizer != "Adagrad":
        params["betas"] = [0.9, 0.95]
    zero: dict[str, Any] = {"stage": case.stage}
    if case.offload != "none":
        zero["offload_optimizer"] = {"device": case.offload, "nvme_path": nvme}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": case.optimizer, "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **({case.dtype: {"enabled": True}} if case.dtype == "bf16" else {}),
        **({"fp16": {"enabled": True, "initial_scale_power": 6}} if case.dtype == "fp16" else {}),
    }


def unpacked(name: str, folder: Path) -> Path:
    """Unpack the checkpoint of a case, with ``losses.json`` beside it, and return the folder that has them."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name
