"""The optimizers of ``tiered train --optimizer``: each in a store, and as torch has it in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiered import zero
from tiered.cli.train.model import GRADIENT_BYTES
from tiered.cli.train.options import Options
from tiered.zero.rules.forms import forms_of
from tiered.zero.rules.known import CHOICES, KnownOptimizer

__all__ = ["OptimizerKind", "decayed", "kind_named", "kind_of"]

FP32_BYTES = 4
MATRIX = torch.Size((1024, 1024))
"""Shape of the parameter by which bytes of states are counted: these are matrices, but for a few vectors."""


@dataclass(frozen=True)
class OptimizerKind:
    """Optimizer of ``tiered train``, as it is made for a paged model and for one in memory, and the bytes that it needs."""

    known: KnownOptimizer

    @property
    def bytes_kept(self) -> float:
        """Return the bytes of a parameter and its states."""
        elements = MATRIX.numel()
        forms = forms_of(self.known.usual, torch.float32).values()
        return FP32_BYTES + sum(form.count(elements, MATRIX) * form.dtype.itemsize for form in forms) / elements

    @property
    def bytes_in_memory(self) -> float:
        """Return the bytes of a parameter, its states and its gradient, as training in memory has them."""
        return self.bytes_kept + GRADIENT_BYTES

    def ours(self, params: Any, **given: Any) -> zero.Optimizer:
        """Make the optimizer of parameters that are paged, with its usual settings beside what is ``given``."""
        made: zero.Optimizer = getattr(zero, self.known.optimizer)(
            params, **{**self.known.settings, **self.known.arguments, **given}
        )
        return made

    def in_store(self, model: nn.Module, options: Options) -> zero.Optimizer:
        """Make the optimizer of a paged model."""
        return self.ours(decayed(model, options.weight_decay), lr=options.lr, update=options.update)

    def in_memory(self, model: nn.Module, options: Options) -> torch.optim.Optimizer:
        """Make torch's optimizer, which torch has, of a model in memory, by the kernels whose bits the one in a store has."""
        assert self.known.in_torch is not None, "a check is refused for what torch does not have"
        make: Any = self.known.in_torch
        kernel = {"fused": True} if getattr(self.known.usual, "fused", False) else {"foreach": False}
        made: torch.optim.Optimizer = make(
            decayed(model, options.weight_decay), lr=options.lr, **self.known.settings, **kernel
        )
        return made


def kind_of(options: Options) -> OptimizerKind:
    """Return the optimizer that the options name."""
    return kind_named(options.optimizer)


def kind_named(name: str) -> OptimizerKind:
    """Return one of ``OPTIMIZERS``."""
    return OptimizerKind(CHOICES[name])


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Make parameter groups in which only matrices decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
    ]
