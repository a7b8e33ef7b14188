"""Refuse steps of optimizers that cannot update parameters whose values are in a store."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from tiered.errors import MisuseError

__all__ = ["refusing"]


def refusing(
    ours: type[Optimizer], stored: Callable[[torch.Tensor], bool], refusal: Callable[[Optimizer], str]
) -> Callable[[Optimizer, object, object], None]:
    """Return a hook for ``register_optimizer_step_pre_hook``: where an optimizer that is none of ``ours`` is about to update a
    parameter of which ``stored`` is true, it raises MisuseError with what ``refusal`` says."""

    def refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if isinstance(optimizer, ours):
            return
        if any(stored(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise MisuseError(refusal(optimizer))

    return refuse
