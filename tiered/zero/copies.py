"""States over a store that is only read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tiered import Access, TensorSpec
from tiered.zero.checkpoint import Readable
from tiered.zero.record import type_named

__all__ = ["Copies"]


class Copies:
    """``Tensors`` over ``store``: what is leased are copies. ``kept``: as they leave them, for what is asked for next; else
    they are gone with the lease."""

    def __init__(self, store: Readable, *, kept: bool) -> None:
        self._store: Any = store
        self._kept = kept
        self._made: dict[str, torch.Tensor] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._made or key in self._store

    def spec(self, key: str) -> TensorSpec:
        made = self._made.get(key)
        if made is None:
            found: TensorSpec = self._store.spec(key)
            return found
        return TensorSpec(str(made.dtype).removeprefix("torch."), tuple(made.shape), made.element_size())

    def get(self, key: str) -> torch.Tensor:
        if key not in self._made:
            found: torch.Tensor = self._store.get(key)
            if not self._kept:
                return found
            self._made[key] = found
        return self._made[key]

    def create(self, key: str, spec: TensorSpec) -> None:
        self._made[key] = torch.empty(spec.shape, dtype=type_named(spec.dtype), device="cpu")

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._made[key] = tensor

    def delete(self, key: str) -> None:
        raise AssertionError("nobody deletes what is only read")

    @contextlib.contextmanager
    def lease(self, key: Any, *, access: Access = Access.READ) -> Iterator[Any]:
        if isinstance(key, str):
            yield self.get(key)
            return
        yield tuple(self.get(one) for one in key)
        for one in key if not self._kept else ():
            self._made.pop(one, None)

    def span(self, kind: str, name: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()
