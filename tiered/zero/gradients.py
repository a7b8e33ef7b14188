"""What ``parameter.grad`` shows while the gradient itself is in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiered.errors import MisuseError

__all__ = ["SpentGradient", "StoredGradient"]


class StoredGradient(torch.Tensor):
    """Has the gradient's shape and dtype and no memory. It says that there is a gradient; computing with it raises.

    ``optimizer.grad(parameter)`` gives the values, ``optimizer.clip_grad_norm_`` clips.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> StoredGradient:
        made: StoredGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.parameter_name = name
        return made

    parameter_name: str

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        return f"StoredGradient(of={self.parameter_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the classmethod
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = next((arg.parameter_name for arg in _flatten(args) if isinstance(arg, StoredGradient)), "?")
        raise MisuseError(
            f"the gradient of {name!r} is in the store, so {func} cannot compute with it: use "
            "optimizer.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_, optimizer.zero_grad() instead of "
            "grad.zero_(), optimizer.grad(parameter) to look at it, tiered.zero.GradScaler instead of torch.amp.GradScaler"
        )


class SpentGradient(StoredGradient):
    """There was a gradient; the parameter was updated with it during backward, and it is gone. Computing with it raises."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpentGradient(of={self.parameter_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = next((arg.parameter_name for arg in _flatten(args) if isinstance(arg, SpentGradient)), "?")
        raise MisuseError(
            f"{name!r} was updated during backward, and its gradient is gone, so {func} cannot compute with it: clipping, loss "
            'scaling and accumulation need update="on_fetch"'
        )


def _flatten(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat.extend(_flatten(value) if isinstance(value, list | tuple) else [value])
    return flat
