"""Activations that wait in a store, in a dry run: the code that decides what waits is the pager's own, and the store only notes
what that code asks of it.

``SavedTensors`` decides for ``activations="store"``, ``Splitter`` for ``activations="recompute"`` and ``micro_batch=``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from tiered.planning.simulated import DriveRates, SimulatedStore
from tiered.store.activations import SavedTensors, piece_of
from tiered.tensors.specs import spec_of
from tiered.types import TensorSpec
from tiered.zero.paging.pager import LEAST, NEWEST
from tiered.zero.paging.recompute.micro_batch import LARGEST_PART, SAVED_SHARE, Splitter
from tiered.zero.paging.saved_tensors import ParameterReferences
from tiered.zero.paging.units import ModelPlan

__all__ = ["DrySplitter", "Notes", "NotingStore", "Waiting", "saved_tensors"]


@dataclass(frozen=True)
class Waiting:
    """How activations wait for backward, in a model of the units ``plan`` with a pool of so many bytes: "store": as with
    ``activations="store"``; "split": as with ``activations="recompute"``, or with ``micro_batch=parts``."""

    way: Literal["store", "split"]
    pool: int
    plan: ModelPlan
    parts: int = 1
    name: str = "model"

    @property
    def settings(self) -> tuple[object, ...]:
        """What a dry run depends on: two pools that give the same have the same dry run."""
        if self.way == "store":
            kept, least = min(NEWEST, self.pool // 8), min(LEAST, self.pool // 64)
            return self.way, kept, least, piece_of(self.pool), self.pool // 4
        return self.way, self.parts, min(LARGEST_PART, self.pool // SAVED_SHARE)


class Notes(Protocol):
    """What a store of activations is asked for, in order."""

    def made(self, key: str, nbytes: int) -> None: ...

    def asked(self, key: str) -> None: ...

    def ended(self, keys: Sequence[str]) -> None: ...

    def ahead(self, keys: Sequence[str]) -> None: ...


class NotingStore(SimulatedStore):
    """A store of ``pool`` bytes that holds nothing, and tells ``notes`` what it is asked for."""

    def __init__(self, pool: int, notes: Notes) -> None:
        super().__init__(pool, DriveRates(1.0, 1.0))
        self._notes = notes
        self._there: dict[str, TensorSpec] = {}

    def put(self, key: str, tensor: torch.Tensor, **_: Any) -> None:
        self._there[key] = spec_of(tensor)
        self._notes.made(key, tensor.nbytes)

    @contextmanager
    def _leased(self, key: str) -> Iterator[torch.Tensor]:
        self._notes.asked(key)
        spec = self._there[key]
        with torch._C._DisableTorchDispatch():  # memory of the pool
            found = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        yield found

    def lease(self, key: Any, **_: Any) -> Any:
        return self._leased(key)

    def delete(self, key: str, **_: Any) -> None:
        del self._there[key]
        self._notes.ended([key])

    def __contains__(self, key: object) -> bool:
        return key in self._there

    def _put_temporary(self, key: str, contents: torch.Tensor, lifetime: Any) -> None:
        self._notes.made(key, contents.nbytes)
        weakref.finalize(lifetime, self._notes.ended, [key]).atexit = False

    def _copy_into(self, target: torch.Tensor, key: str) -> bool:
        self._notes.asked(key)
        return True

    def fetch_ahead(self, keys: Sequence[str], device: torch.device) -> None:
        self._notes.ahead(keys)

    def _waited(self) -> float:
        return 0.0


def saved_tensors(store: NotingStore, pool: int) -> SavedTensors:
    """Return what packs as a model does that is paged into ``pool`` bytes with ``activations="store"``."""
    return SavedTensors(store, min(NEWEST, pool // 8), min(LEAST, pool // 64))


class DrySplitter(Splitter):
    """Splits modules of a model on the meta device, where tensors have no address to be known by; ``end`` gives the modules
    their forward back."""

    def __init__(self, model: nn.Module, store: NotingStore, waiting: Waiting, references: ParameterReferences) -> None:
        self._given_back: list[Callable[[], None]] = []
        super().__init__(model, store, waiting.name, waiting.plan, waiting.pool, waiting.parts, references)
        self.anywhere = torch.empty(0, dtype=torch.float32, device="cpu")  # on the CPU: the meta device draws no random numbers

    def _wrap(self, module: nn.Module, run: Callable[[Any, Any, Any], Any]) -> None:
        before = module.__dict__.get("forward")

        def give_back() -> None:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before

        self._given_back.append(give_back)
        super()._wrap(module, run)

    def end(self) -> None:
        """Give the modules their forward back."""
        while self._given_back:
            self._given_back.pop()()

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad:
            return False
        storage = tensor.untyped_storage()._cdata
        return any(
            storage == buffer.untyped_storage()._cdata for buffer in self._model.buffers() if buffer.layout is torch.strided
        )
