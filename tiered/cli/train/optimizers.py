"""The optimizers of ``tiered train --optimizer``: each in a store, and as torch has it in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiered import MisuseError, zero
from tiered.cli.train.model import GRADIENT_BYTES
from tiered.cli.train.options import OPTIMIZERS, Options

__all__ = ["OptimizerKind", "decayed", "kind_named", "kind_of"]

FP32_BYTES = 4


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer. ``states`` of 4 bytes are kept for each parameter, and of fewer bytes as many as have these together;
    ``settings`` are those beside learning rate and decay; ``theirs`` is torch's class, None where it has none, with ``kernel``
    as what makes it the same to the bit."""

    ours: Callable[..., zero.Optimizer]
    theirs: type[torch.optim.Optimizer] | None
    states: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    kernel: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes_kept(self) -> float:
        """Return the bytes of a parameter and its states."""
        return FP32_BYTES * (1 + self.states)

    @property
    def bytes_in_memory(self) -> float:
        """Return the bytes of a parameter, its states and its gradient, as training in memory has them."""
        return self.bytes_kept + GRADIENT_BYTES

    def in_store(self, model: nn.Module, options: Options) -> zero.Optimizer:
        """Make the optimizer of a paged model."""
        return self.ours(decayed(model, options.weight_decay), lr=options.lr, update=options.update, **self.settings)

    def in_memory(self, model: nn.Module, options: Options) -> torch.optim.Optimizer:
        """Make torch's optimizer of a model in memory. Raises MisuseError where torch has none."""
        if self.theirs is None:
            raise MisuseError(f"torch has no {options.optimizer} to compare with: --check needs another --optimizer")
        make: Any = self.theirs
        made: torch.optim.Optimizer = make(
            decayed(model, options.weight_decay), lr=options.lr, **self.settings, **self.kernel
        )
        return made


_BETAS = {"betas": (0.9, 0.95)}
_FUSED, _SINGLE = {"fused": True}, {"foreach": False}
_KINDS = {
    "adamw": OptimizerKind(zero.AdamW, torch.optim.AdamW, 2, _BETAS, _FUSED),
    "adam": OptimizerKind(zero.Adam, torch.optim.Adam, 2, _BETAS, _FUSED),
    "nadam": OptimizerKind(zero.NAdam, torch.optim.NAdam, 2, _BETAS, _SINGLE),
    "radam": OptimizerKind(zero.RAdam, torch.optim.RAdam, 2, _BETAS, _SINGLE),
    "adamax": OptimizerKind(zero.Adamax, torch.optim.Adamax, 2, _BETAS, _SINGLE),
    "sgd": OptimizerKind(zero.SGD, torch.optim.SGD, 1, {"momentum": 0.9}, _FUSED),
    "adagrad": OptimizerKind(zero.Adagrad, torch.optim.Adagrad, 1, {}, _FUSED),
    "rmsprop": OptimizerKind(zero.RMSprop, torch.optim.RMSprop, 1, {}, _SINGLE),
    "lion": OptimizerKind(zero.Lion, None, 1),
    "adafactor": OptimizerKind(zero.Adafactor, torch.optim.Adafactor, 0, {}, _SINGLE),
    "adamw_bf16": OptimizerKind(zero.AdamW, None, 2 / 2, _BETAS | {"moments": torch.bfloat16}),
    "adamw8bit": OptimizerKind(zero.AdamW8bit, None, 2 / 4 + 2 / 256, _BETAS),
    "adamw4bit": OptimizerKind(zero.AdamW4bit, None, 1 / 4 + 2 / 128, _BETAS),
}
assert tuple(_KINDS) == OPTIMIZERS


def kind_of(options: Options) -> OptimizerKind:
    """Return the optimizer that the options name."""
    return kind_named(options.optimizer)


def kind_named(name: str) -> OptimizerKind:
    """Return one of ``OPTIMIZERS``."""
    return _KINDS[name]


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Make parameter groups in which only matrices decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
    ]
