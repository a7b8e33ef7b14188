"""Update rules: mathematics on flat tensors that moves nothing, by torch's own kernels.

A rule is a frozen value with the hyper-parameters of one step. ``States`` in ``update.py`` gives it pieces of parameters, which
begin and end at multiples of 16 elements of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from tiered import TensorSpec

__all__ = ["AdamWRule", "UpdateRule"]


class UpdateRule(Protocol):
    """Update of one parameter, elementwise, so that any slice may be updated by itself. A rule is a frozen value: its
    hyper-parameters are those of one step."""

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        """Return what has to be kept for a (flat slice of a) parameter: a spec by name, of as many elements; states start as
        zeros."""
        ...

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], step: int
    ) -> None:
        """Change ``param`` and ``state`` in place. All are flat, of equal length; ``step`` counts from 1.

        ``param`` is the fp32 master (fp64 for fp64 parameters), ``grad`` is of the same dtype.
        """
        ...


@dataclass(frozen=True)
class AdamWRule:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101), by torch's own fused
    kernel: bit-identical to ``torch.optim.AdamW(fused=True)`` wherever a tensor is cut at multiples of 16 elements. (What is
    left over at the end of a tensor, it computes in another way, with other roundings.)"""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"m": param, "v": param}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], step: int
    ) -> None:
        adamw(
            [param],
            [grad],
            [state["m"]],
            [state["v"]],
            [],
            [torch.tensor(float(step - 1), device=param.device)],  # torch's kernel counts it up itself
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
        )
