"""What the tests share that draw from torch's own databases of operations, modules and optimizers: the same code in memory and
in a store, what it gave, and how it ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tiered import TieredError, TieredStore, zero

__all__ = ["SHARE", "InMemory", "InStore", "Outcome", "copied", "outcome", "seeded", "seen", "tensors", "total"]

SHARE = 25
"""One entry in so many is in every run."""
Outcome = tuple[str, Any]
"""How it ended ("value", "refused" by ``tiered``, "error"), and the value, the message, or the name of the error."""
Model = TypeVar("Model", bound=nn.Module)


class InMemory:
    def page(self, model: Model, **options: Any) -> Model:
        return model

    def push_out(self, model: nn.Module) -> None: ...


class InStore:
    def __init__(self, store: TieredStore) -> None:
        assert len(store.statistics().tiers) > 1, "without a disk nothing is pushed out"
        self.store = store
        self.model: nn.Module | None = None
        """The last one that was paged."""
        self._other = torch.full((1 << 16,), float("nan"))

    def page(self, model: Model, **options: Any) -> Model:
        zero.page(model, self.store, existing="overwrite", **options)
        self.model = model
        self.push_out(model)
        return model

    def push_out(self, model: nn.Module) -> None:
        zero.offload(model)
        self.store.put("other", self._other)  # on the memory that is free now
        self.store.delete("other")


def seeded(seed: int) -> None:
    """Seed torch's generator, and the random module: ``torch.manual_seed`` asks other devices, too, which takes 2 ms."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(tree) if isinstance(value, torch.Tensor)]


def copied(tree: Any) -> Any:
    return pytree.tree_map(lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, tree)


def seen(tree: Any) -> list[Any]:
    """Types, shapes and bytes, and other values as they are written."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
        value = value.detach()
        value = value.to_dense() if value.layout is not torch.strided else value
        whole = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        return value.dtype, tuple(value.shape), whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""

    return [one(value) for value in pytree.tree_leaves(tree)]


def total(tree: Any) -> Any:
    """A sum over all results that tells their elements apart."""
    found: Any = 0
    for result in tensors(tree):
        if result.requires_grad:
            real = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
            found = found + (real * torch.linspace(0.5, 1.5, real.numel()).view(real.shape)).sum()
    return found


def outcome(call: Callable[[], list[Any]]) -> Outcome:
    try:
        return "value", call()
    except TieredError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", type(error).__name__
