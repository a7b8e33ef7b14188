"""How a parameter is divided along its first dimension: what its slices are, and which part of the whole each of them has."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from tiered.zero.paging.tensors.parameters import Function, ParameterOwner

__all__ = ["Handle", "Step", "device_of", "divided", "handle_of", "meta_of", "slices_of"]


class Handle(Protocol):
    """What leads from a sliced parameter to its slices."""

    name: str
    slices: list[nn.Parameter]
    rows: int | None
    """How many rows each slice has, but for the last; None: one, without that dimension."""

    def owner(self) -> ParameterOwner | None:
        """Return the pager, or None where the model is gone."""
        ...


class Step(NamedTuple):
    """Function that makes a view, its arguments but the first, and which of its results is meant (None: there is one)."""

    func: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    which: int | None = None

    def __call__(self, base: torch.Tensor) -> Any:
        made = self.func(base, *self.args, **self.kwargs)
        return made if self.which is None else made[self.which]


def handle_of(parameter: nn.Parameter) -> Handle:
    handle: Handle = parameter.__dict__["_tiered"]
    return handle


def slices_of(parameter: nn.Parameter) -> list[nn.Parameter]:
    return handle_of(parameter).slices


def device_of(parameter: nn.Parameter) -> torch.device:
    return slices_of(parameter)[0].device


def divided(parameter: nn.Parameter, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the views of ``whole`` that the slices have the values of."""
    rows = handle_of(parameter).rows
    return whole.unbind() if rows is None else torch.split(whole, rows)


def meta_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a tensor on the meta device with the size, strides and type of the whole parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
