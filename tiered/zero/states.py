"""A unit's optimizer states: moments and masters in chunks of a few MiB in the store, and the update of what lies in each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tiered import Access, TensorSpec, TieredStore
from tiered.zero.rules import UpdateRule
from tiered.zero.units import Placement

__all__ = ["Pending", "States", "Update"]


@dataclass(frozen=True)
class Update:
    """One parameter's share of an optimizer step, frozen when ``step()`` was called. ``scales`` multiply the gradient first."""

    rule: UpdateRule
    step: int
    scales: tuple[torch.Tensor, ...]


@dataclass
class Pending:
    """A unit's share of an optimizer step. ``chunks_done`` lets an update that was interrupted go on where it stopped."""

    updates: dict[Placement, Update]
    chunks_done: int = 0


class States:
    """The states of one unit's parameters. A chunk is a tensor per kind of state, over the same elements of the unit."""

    def __init__(self, store: TieredStore, key: str, placements: Sequence[Placement], chunk_elements: int) -> None:
        self.store, self.key, self.chunk_elements = store, key, chunk_elements
        self.update_seconds = 0.0
        self.stale_masters = set(placements)  # whose fp32 master does not yet have the parameter's value
        kinds = {placement.dtype for placement in placements}
        self._dtype = torch.float64 if torch.float64 in kinds else torch.float32
        self._names = ("m", "v", "master") if kinds & {torch.bfloat16, torch.float16} else ("m", "v")

    def chunks(self, placements: Iterable[Placement]) -> list[tuple[int, list[str]]]:
        """Chunks that ``placements`` lie in: index and keys, in order."""
        indices: set[int] = set()
        for placement in placements:
            first = placement.element // self.chunk_elements
            last = (placement.element + max(1, placement.numel) - 1) // self.chunk_elements
            indices.update(range(first, last + 1))
        return [(index, [f"{self.key}/{name}#{index}" for name in self._names]) for index in sorted(indices)]

    def _within(self, placement: Placement, begin: int) -> tuple[int, int, slice]:
        """Which elements of a parameter, and where in the chunk that covers the unit from element ``begin`` on."""
        start = max(0, begin - placement.element)
        stop = min(placement.numel, begin + self.chunk_elements - placement.element)
        return start, stop, slice(placement.element + start - begin, placement.element + stop - begin)

    def _create(self, keys: list[str]) -> None:
        """Zeros, where a chunk does not exist yet."""
        if keys[0] in self.store:
            return
        spec = TensorSpec(str(self._dtype).removeprefix("torch."), (self.chunk_elements,), self._dtype.itemsize)
        for key in reversed(keys):  # the first key tells that all are there
            self.store.create(key, spec)
            with self.store.lease(key, access=Access.WRITE) as chunk:
                chunk.zero_()
            del chunk

    # -- the update --------------------------------------------------------------------------------------------------------

    def apply(self, pending: Pending, unit: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update the parameters in ``unit``, whose gradients are in ``gradient`` (both uint8, of the unit's layout)."""
        scratch: dict[torch.dtype, torch.Tensor] = {}
        for index, keys in self.chunks(pending.updates)[pending.chunks_done :]:
            self._create(keys)
            with self.store.lease(keys, access=Access.WRITE) as states, torch.no_grad():
                began = time.perf_counter()
                self._update_slices(index * self.chunk_elements, states, pending, unit, gradient, scratch)
                self.update_seconds += time.perf_counter() - began
                del states  # the last alias: the chunk may go to disk as soon as the lease ends
            pending.chunks_done += 1
        self.stale_masters.difference_update(pending.updates)

    def _update_slices(
        self,
        begin: int,
        states: Sequence[torch.Tensor],
        pending: Pending,
        unit: torch.Tensor,
        gradient: torch.Tensor,
        scratch: dict[torch.dtype, torch.Tensor],
    ) -> None:
        """Update what lies in one chunk, which covers the unit from element ``begin`` on."""
        for placement, update in pending.updates.items():
            start, stop, at = self._within(placement, begin)
            if start >= stop:
                continue
            state = {name: whole[at] for name, whole in zip(self._names, states, strict=True)}
            if update.step == 1:  # of a fresh optimizer, whatever an earlier one left here
                for moment in state.values():
                    moment.zero_()
                self.stale_masters.add(placement)
            param, grad = placement.flat(unit, start, stop), placement.flat(gradient, start, stop)
            for scale in update.scales:
                if grad.dtype not in scratch:
                    scratch[grad.dtype] = torch.empty(self.chunk_elements, dtype=grad.dtype)
                grad = torch.mul(grad, scale, out=scratch[grad.dtype][: stop - start])
            master = state.pop("master", None)
            if master is None or param.dtype is master.dtype:
                update.rule.update(param, grad, state, update.step)
            else:
                if placement in self.stale_masters:
                    master.copy_(param)
                update.rule.update(master, grad.to(master.dtype), state, update.step)
                param.copy_(master)

    # -- by parameter ------------------------------------------------------------------------------------------------------

    def copies(self, placement: Placement) -> dict[str, torch.Tensor]:
        """Copies of ``m`` and ``v`` of one parameter, in its shape and strides."""
        copies = {name: torch.empty_strided(placement.shape, placement.stride, dtype=self._dtype) for name in ("m", "v")}
        for index, _ in self.chunks([placement]):
            start, stop, at = self._within(placement, index * self.chunk_elements)
            for name, copy in copies.items():
                with self.store.lease(f"{self.key}/{name}#{index}") as chunk:
                    _flat(copy)[start:stop] = chunk[at]
                del chunk
        return copies

    def load(self, placement: Placement, moments: dict[str, torch.Tensor]) -> None:
        """The opposite of ``copies``; the fp32 master of a narrower parameter starts from the parameter again."""
        self.stale_masters.add(placement)
        arranged = {}
        for name, value in moments.items():
            arranged[name] = torch.empty_strided(placement.shape, placement.stride, dtype=self._dtype)
            arranged[name].copy_(value)
        for index, keys in self.chunks([placement]):
            self._create(keys)
            start, stop, at = self._within(placement, index * self.chunk_elements)
            for name, value in arranged.items():
                with self.store.lease(f"{self.key}/{name}#{index}", access=Access.WRITE) as chunk:
                    chunk[at] = _flat(value)[start:stop]
                del chunk


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in memory order, without a copy; ``tensor`` is dense."""
    return tensor.as_strided((tensor.numel(),), (1,))
