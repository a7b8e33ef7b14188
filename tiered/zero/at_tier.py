"""In which tier parameters compute, and in which one they are updated.

Parameters come to the top tier. Gradients and optimizer states go no further up than where updates are computed: with a device
that is host memory (Ren et al., 2021, ZeRO-Offload, https://arxiv.org/abs/2101.06840), or the device. Where something lies
meanwhile is the store's business.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, overload

import torch

from tiered import Access, MisuseError, Span, TensorSpec, TieredStore
from tiered.zero.leases import Leases

__all__ = ["AtTier", "Tensors", "UpdateTier", "dram_of", "host", "top_of", "updates_of"]

UpdateTier = Literal["dram", "hbm"]


class Tensors(Protocol):
    """What gradients and states use of a store. See there."""

    def __contains__(self, key: object, /) -> bool: ...

    def spec(self, key: str) -> TensorSpec: ...

    def get(self, key: str) -> torch.Tensor: ...

    def put(self, key: str, tensor: torch.Tensor) -> None: ...

    def create(self, key: str, spec: TensorSpec) -> None: ...

    def delete(self, key: str) -> None: ...

    @overload
    def lease(self, key: str, *, access: Access = ...) -> AbstractContextManager[torch.Tensor]: ...
    @overload
    def lease(self, key: list[str], *, access: Access = ...) -> AbstractContextManager[tuple[torch.Tensor, ...]]: ...

    def span(self, kind: str, name: str) -> AbstractContextManager[Any]: ...


class AtTier:
    """A store whose tensors are made and leased in ``tier`` (None: the top one), and whose leases are in the books."""

    def __init__(self, store: TieredStore, tier: str | None) -> None:
        self._store, self._tier = store, tier
        self._leases = Leases.of(store)

    def __contains__(self, key: object) -> bool:
        return key in self._store

    def spec(self, key: str) -> TensorSpec:
        return self._store.spec(key)

    def get(self, key: str) -> torch.Tensor:
        return self._store.get(key)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._store.put(key, tensor)

    def create(self, key: str, spec: TensorSpec) -> None:
        self._store.create(key, spec, tier=self._tier)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def lease(self, key: Any, *, access: Access = Access.READ) -> Any:
        return self._leases.registered(self._store.lease(key, access=access, tier=self._tier), key)

    def span(self, kind: str, name: str) -> Span:
        return self._store.span(kind, name)


def top_of(store: TieredStore) -> Tensors:
    """``store``, where parameters compute."""
    return AtTier(store, None)


def dram_of(store: TieredStore) -> Tensors:
    """``store``, in host memory."""
    return AtTier(store, "dram")


def updates_of(store: TieredStore, tier: UpdateTier) -> Tensors:
    """``store``, where updates are computed. Raises MisuseError for a tier that it has not."""
    names = [one.name for one in store.statistics().tiers]
    if tier not in ("dram", "hbm"):
        raise MisuseError(f"update_tier is 'dram' or 'hbm', not {tier!r}")
    if tier not in names:
        raise MisuseError(f"update_tier={tier!r}: this store has no such tier; open it with hbm=, or leave update_tier out")
    return AtTier(store, tier)


def host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy of it in host memory."""
    return tensor.to("cpu")
