"""Training for a comparison: the same steps for a paged model and for its twin in memory, and whether both are equal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zero.models import SIZES, Mixed, Tied, parameter_groups

__all__ = ["STEPS", "Twin", "clipping", "equal", "in_memory", "train"]

STEPS = 6
"""From the fourth on an order of units is followed."""
Clip = Callable[[float], torch.Tensor]


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    clip: Clip | None = None,
    between: Callable[[int], object] = int,
    *,
    steps: int = STEPS,
    batches: int = 2,
    loss: Callable[[int], torch.Tensor] | None = None,
) -> list[float]:
    """Return losses, and norms where gradients are clipped, of ``steps`` steps with a schedule.

    ``batches``: backward passes of a step, numbered through; ``loss`` of each by its number (default: the model's own).
    ``between`` is called after each step.
    """
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    numbers = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(batches * step, batches * (step + 1)):
            found = (loss or model.loss)(number)
            (found / batches).backward()
            numbers.append(found.item())
        if clip is not None:
            numbers.append(clip(0.5).item())
        optimizer.step()
        scheduler.step()
        between(step)
    return numbers


def clipping(model: nn.Module) -> Clip:
    """What clips the gradients of a model in memory."""
    return partial(nn.utils.clip_grad_norm_, list(model.parameters()))


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same tensors, types included."""
    return left.keys() == right.keys() and all(
        torch.equal(a, right[k]) and a.dtype == right[k].dtype for k, a in left.items()
    )


class Deterministic(Mixed):
    """Batch norm's running statistics would notice an extra forward, in memory too."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.BatchNorm2d(16, track_running_stats=False)  # type: ignore[assignment]


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{mode: partial(Tied, *sizes, mode=mode) for mode, sizes in SIZES.items()},
    "tied": Tied,
    "mixed": Mixed,
    "deterministic": Deterministic,
}


@dataclass(frozen=True)
class Twin:
    """Of a model of ``MODELS``, in memory: ``numbers``, ``model`` and ``state`` are those after ``train``. Never changed."""

    untrained: nn.Module
    numbers: list[float]
    model: dict[str, torch.Tensor]
    state: dict[int, dict[str, torch.Tensor]]


@functools.cache
def in_memory(kind: str) -> Twin:
    """Train with torch's own AdamW, clipped; once a run."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    untrained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3, fused=True)
    numbers = train(model, optimizer, clipping(model))
    return Twin(untrained, numbers, model.state_dict(), optimizer.state_dict()["state"])
