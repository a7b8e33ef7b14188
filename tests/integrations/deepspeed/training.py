"""A small model trained by an engine and by a plain loop of torch's, on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zero.harness import equal
from tiered import zero

__all__ = ["Net", "batch", "config_for", "engine_of", "equal", "plain", "train"]


class Net(nn.Module):
    """An embedding that is tied to the head, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        self.head = nn.Linear(32, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.body[2].bias.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.seen += 1
        found: torch.Tensor = self.head(self.body(self.embed(x)))
        return found if y is None else F.cross_entropy(found.flatten(0, 1), y.flatten())

    def greeting(self) -> str:
        return "of the model"


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(number: int, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(0, 17, (samples, 6), generator=generator)
    return x, x.roll(-1, 1)


def config_for(folder: Path, **more: Any) -> dict[str, Any]:
    """Two passes a step, clipped, with AdamW; a budget that is too small for the state of ``Net``."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **more,
        "tiered": {"path": str(folder / "store"), "dram": "1MiB", **more.get("tiered", {})},
    }


def engine_of(folder: Path, model: nn.Module | None = None, **more: Any) -> zero.Engine:
    options = {name: more.pop(name) for name in ("optimizer_", "lr_scheduler_") if name in more}
    given = {name.rstrip("_"): value for name, value in options.items()}
    engine, *_ = zero.initialize(model=model or made(), config=config_for(folder, **more), **given)
    return engine


def train(engine: zero.Engine, first: int = 0, passes: int = 8) -> list[float]:
    """Losses of passes, and the norm and learning rate of each step."""
    seen = []
    for number in range(first, first + passes):
        loss = engine(*batch(number))
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        seen.append(loss.item())
        if boundary:
            seen += [engine.get_global_grad_norm() or 0.0, float(engine.get_lr()[0])]
    return seen


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    *,
    passes: int = 8,
    accumulation: int = 2,
    clip: float = 0.5,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """What ``train`` returns, of the same loop without an engine."""
    seen = []
    for number in range(passes):
        loss = model(*batch(number))
        (loss / accumulation).backward()
        seen.append(loss.item())
        if (number + 1) % accumulation == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else 0.0
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            seen += [float(norm), float(optimizer.param_groups[0]["lr"])]
            after()
    return seen
