"""What a running forward, or a backward pass, is known by. All of it is thrown away when an exception ends one of them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiered import Span
from tiered.zero.autograd import hooks_active
from tiered.zero.unit import Unit

__all__ = ["Frame", "Listing", "Pass", "Reference"]


class Reference:
    """A saved tensor that was a paged parameter, or a view of one."""

    __slots__ = ("__weakref__", "dtype", "offset", "size", "stride", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit, self.version = unit, unit.version
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        unit.references.add(weakref.ref(self, unit.references.discard))  # of C: no exception keeps it from being called


class Frame:
    """What one running forward holds. ``below``: the saved-tensor hooks that were in force when it began."""

    __slots__ = ("below", "module", "recording", "span", "units")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.recording = torch.is_grad_enabled()
        self.below = hooks_active()
        self.units: list[Unit] = []
        self.span: Span | None = None

    def end_span(self) -> None:
        if self.span is not None:
            self.span.end()


class Pass:
    """A backward pass, from its first hook on. Autograd alone keeps it, and calls it at the end: it is gone when the pass has
    ended in any way, and a weak reference tells."""

    __slots__ = ("__weakref__", "finish")

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish

    def __call__(self) -> None:
        self.finish()


class Listing(OrderedDict[str, Any]):
    """What ``state_dict`` fills, where it is to have the parameters themselves."""
