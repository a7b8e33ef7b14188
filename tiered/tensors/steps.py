"""What writes to tensors that have no values of their own: steps of optimizers, which are refused, and functions of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tiered.errors import MisuseError

__all__ = ["refusing", "written_by"]


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


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a function of ATen writes to, by its schema, also those of a list."""
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((one, kwargs[one.name]) for one in arguments if one.name in kwargs)]
    written = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [one for one in tree_leaves(written) if isinstance(one, torch.Tensor)]
