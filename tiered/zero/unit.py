"""One unit at run time: holding it, its gradients, its pending update."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from tiered import Access, MisuseError, TensorSpec, TieredStore
from tiered.zero.gradients import StoredGradient
from tiered.zero.placeholder import Placeholder
from tiered.zero.rules import UpdateRule
from tiered.zero.units import Placement, UnitPlan

__all__ = ["Pending", "Unit", "Update"]


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


@dataclass(eq=False)
class GradientState:
    """``scales``: factors that the stored gradient has yet to be multiplied by. ``norms``: those known of it, by order.
    ``orders``: those that somebody asked for before, worth computing while a gradient is at hand."""

    marker: StoredGradient
    scales: list[torch.Tensor] = field(default_factory=list)
    norms: dict[float, torch.Tensor] = field(default_factory=dict)
    orders: set[float] = field(default_factory=set)
    accumulate: bool = False


class Unit:
    """Parameters that are paged together.

    While nobody holds the unit its parameters are NaN without memory (a stale read is loud); while somebody does, they
    are views of the store's own memory. ``version`` counts optimizer steps: what a graph saved before one cannot be used
    after it.
    """

    def __init__(self, store: TieredStore, prefix: str, plan: UnitPlan, chunk_elements: int) -> None:
        self.store, self.plan = store, plan
        self.key = f"{prefix}/param/{plan.name}"
        self.gradient_key = f"{self.key}/grad"
        self.chunk_elements = chunk_elements
        self.version = 0
        self.updates = 0
        self.update_seconds = 0.0
        self.pending: Pending | None = None
        self.base: torch.Tensor | None = None
        self.gradients = {
            p: GradientState(StoredGradient(p.parameter, p.name)) for p in plan.placements if p.dtype.is_floating_point
        }
        self._holders = 0
        self._access = Access.READ
        self._lease = ExitStack()
        self._versions: list[int] = []
        self._gradient: torch.Tensor | None = None
        self._gradient_lease = ExitStack()
        self._placeholders = {p: Placeholder(p.shape, p.dtype) for p in plan.placements}
        self.stale_masters = set(plan.placements)  # whose fp32 master does not yet have the parameter's value

    # -- parameters --------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        return self._holders > 0

    def hold(self, access: Access = Access.READ) -> None:
        """Give the parameters their memory, with any pending update applied first. Nests."""
        if self._holders == 0:
            for placement in self.plan.placements:
                self.refuse_written(placement)
            self.settle()
            self.base = self._lease.enter_context(self.store.lease(self.key, access=access))
            self._access = access
            for placement in self.plan.placements:
                placement.parameter.data = placement.view(self.base)
            self._versions = [p.parameter._version for p in self.plan.placements]
        elif access is Access.WRITE and self._access is not Access.WRITE:
            raise MisuseError(f"the parameters of {self.plan.name!r} are in use: write to them outside forward and backward")
        self._holders += 1

    def drop(self) -> None:
        """Undo one ``hold``; the last one takes the parameters' memory away again."""
        self._holders -= 1
        if self._holders:
            return
        written = None
        if self._access is Access.READ:
            assert self.base is not None
            here = _address(self.base)
            for placement, version in zip(self.plan.placements, self._versions, strict=True):
                if placement.parameter._version != version or _address(placement.parameter) != here:
                    written = placement.name
        else:
            self.stale_masters.update(self.plan.placements)
            self.version += 1
        self.release_parameters()
        self.base = None
        self._lease.close()
        if written is not None:
            raise MisuseError(
                f"parameter {written!r} was changed in place while it was paged in for reading, and the change is lost; "
                "change parameters through the optimizer or load_state_dict"
            )

    def release_parameters(self) -> None:
        for placement, placeholder in self._placeholders.items():
            placement.parameter.data = placeholder.tensor

    def refuse_written(self, placement: Placement) -> None:
        """Raise MisuseError if a parameter that nobody holds was written to, or given other data; its values are as before."""
        placeholder = self._placeholders[placement]
        if placeholder.intact and _address(placement.parameter) == placeholder.address:
            return
        self._placeholders[placement] = fresh = Placeholder(placement.shape, placement.dtype)
        placement.parameter.data = fresh.tensor
        raise MisuseError(
            f"parameter {placement.name!r} was written to, or given other data or another dtype, while its values were in the "
            "store, and the change is lost: change paged parameters with load_state_dict, and others before zero.page"
        )

    # -- gradients ---------------------------------------------------------------------------------------------------------

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient copy: the unit as far as its last parameter that needs one, or was given one."""
        graded = (p for p in self.plan.placements if p.parameter.requires_grad or p.parameter.grad is not None)
        return max((placement.offset + placement.nbytes for placement in graded), default=0)

    def has_gradient(self, placement: Placement) -> bool:
        return placement.parameter.grad is not None

    @property
    def any_gradient(self) -> bool:
        return any(self.has_gradient(placement) for placement in self.plan.placements)

    def before_gradient(self, placement: Placement) -> None:
        """Autograd is about to accumulate into ``parameter.grad``: clear what stands there, remembering what it meant."""
        grad = placement.parameter.grad
        state = self.gradients[placement]
        if grad is None:
            state.accumulate = False
        else:
            if not isinstance(grad, StoredGradient):
                self.take_gradient(placement, grad)
            state.accumulate = True
        placement.parameter.grad = None

    def take_gradient(self, placement: Placement, grad: torch.Tensor) -> None:
        """Overwrite the stored gradient of one parameter."""
        self.gradients[placement].accumulate = False
        self.add_gradient(placement, grad)

    @torch.no_grad()  # also where backward records itself (create_graph)
    def add_gradient(self, placement: Placement, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            raise MisuseError(f"the gradient of {placement.name!r} is {grad.layout}: use sparse=False")
        state = self.gradients[placement]
        target = placement.view(self._open_gradient())
        if state.accumulate:
            for scale in state.scales:
                target.mul_(scale)
            target.add_(grad)
        else:
            target.copy_(grad)
        state.scales.clear()
        state.norms = {order: torch.linalg.vector_norm(target, order) for order in state.orders}
        placement.parameter.grad = state.marker

    def _open_gradient(self) -> torch.Tensor:
        if self._gradient is None:
            self.settle()
            needed = self.gradient_bytes
            if self.gradient_key not in self.store:
                self.store.create(self.gradient_key, TensorSpec("uint8", (needed,), 1))
            elif self.store.spec(self.gradient_key).nbytes < needed:  # a parameter was unfrozen between two backward passes
                old = self.store.get(self.gradient_key)
                grown = torch.zeros(needed, dtype=torch.uint8)
                grown[: old.numel()] = old
                self.store.put(self.gradient_key, grown)
            self._gradient = self._gradient_lease.enter_context(self.store.lease(self.gradient_key, access=Access.WRITE))
        return self._gradient

    def close_gradient(self) -> None:
        self._gradient = None
        self._gradient_lease.close()

    def gradient(self, placement: Placement) -> torch.Tensor | None:
        """A copy of the gradient as torch would have it in ``parameter.grad``, or None."""
        grad = placement.parameter.grad
        if grad is None or not isinstance(grad, StoredGradient):
            return grad
        self.close_gradient()
        with self.store.lease(self.gradient_key) as stored:
            copy = placement.view(stored).clone()
        for scale in self.gradients[placement].scales:
            copy.mul_(scale)
        return copy

    def gradient_norm(self, placement: Placement, order: float) -> torch.Tensor:
        """``vector_norm`` of the whole gradient, from when it arrived where that is known already."""
        state = self.gradients[placement]
        grad = placement.parameter.grad
        assert grad is not None
        state.orders.add(order)
        if not isinstance(grad, StoredGradient):
            self.take_gradient(placement, grad)
        if order not in state.norms:
            self.close_gradient()
            with self.store.lease(self.gradient_key) as stored:
                whole = placement.view(stored)
                for scale in state.scales:
                    whole = whole.mul(scale)
                state.norms[order] = torch.linalg.vector_norm(whole, order)
            del stored, whole
        return state.norms[order]

    def scale_gradient(self, placement: Placement, factor: torch.Tensor) -> None:
        """Multiply the gradient by ``factor`` (0-d), when it is next used."""
        if factor == 1:
            return
        state = self.gradients[placement]
        state.scales.append(factor)
        state.norms.clear()

    def forget_gradients(self) -> None:
        """Delete the stored gradients when neither a parameter nor a pending update refers to them any more."""
        if self.pending is None and not self.any_gradient:
            self.close_gradient()
            if self.gradient_key in self.store:
                self.store.delete(self.gradient_key)
            for state in self.gradients.values():
                state.scales.clear()

    # -- updates -----------------------------------------------------------------------------------------------------------

    def chunk_keys(self, updates: Iterable[Placement]) -> list[tuple[int, list[str]]]:
        """Chunks of the state that ``updates`` touch: index and keys, in order."""
        indices: set[int] = set()
        for placement in updates:
            first = placement.element // self.chunk_elements
            last = (placement.element + max(1, placement.numel) - 1) // self.chunk_elements
            indices.update(range(first, last + 1))
        return [(index, [f"{self.key}/{name}#{index}" for name in self._state_names]) for index in sorted(indices)]

    @property
    def _state_names(self) -> Sequence[str]:
        mixed = any(p.dtype in (torch.bfloat16, torch.float16) for p in self.gradients)
        return ("m", "v", "master") if mixed else ("m", "v")

    @property
    def _state_dtype(self) -> torch.dtype:
        wide = any(p.dtype is torch.float64 for p in self.gradients)
        return torch.float64 if wide else torch.float32

    def upcoming_keys(self) -> list[str]:
        """What the next ``hold`` will lease, in order."""
        if self.pending is None:
            return [self.key]
        chunks = self.chunk_keys(self.pending.updates)[self.pending.chunks_done :]
        return [self.key, self.gradient_key, *(key for _, keys in chunks for key in keys)]

    def settle(self) -> None:
        """Apply the pending update, chunk by chunk. An error leaves what is not yet updated pending."""
        pending = self.pending
        if pending is None:
            return
        if self.held:
            raise MisuseError(f"the parameters of {self.plan.name!r} are in use: their update has to wait for the end of it")
        self.close_gradient()
        chunks = self.chunk_keys(pending.updates)
        scratch: dict[torch.dtype, torch.Tensor] = {}
        with (
            self.store.lease(self.key, access=Access.WRITE) as unit,
            self.store.lease(self.gradient_key) as gradient,
        ):
            for index, keys in chunks[pending.chunks_done :]:
                self._update_chunk(index, keys, pending, unit, gradient, scratch)
                pending.chunks_done += 1
            del unit, gradient
        self.stale_masters.difference_update(pending.updates)
        self.updates += 1
        self.pending = None
        self.forget_gradients()

    def _update_chunk(
        self,
        index: int,
        keys: list[str],
        pending: Pending,
        unit: torch.Tensor,
        gradient: torch.Tensor,
        scratch: dict[torch.dtype, torch.Tensor],
    ) -> None:
        self._create_chunk(keys)
        with self.store.lease(keys, access=Access.WRITE) as states, torch.no_grad():
            began = time.perf_counter()
            self._update_slices(index * self.chunk_elements, states, pending, unit, gradient, scratch)
            self.update_seconds += time.perf_counter() - began
            del states  # the last alias: the chunk may go to disk as soon as the lease ends

    def _update_slices(
        self,
        begin: int,
        states: Sequence[torch.Tensor],
        pending: Pending,
        unit: torch.Tensor,
        gradient: torch.Tensor,
        scratch: dict[torch.dtype, torch.Tensor],
    ) -> None:
        """Update what lies in one chunk, which covers the state's elements from ``begin`` on."""
        for placement, update in pending.updates.items():
            start, stop, at = self._within_chunk(placement, begin)
            if start >= stop:
                continue
            state = {name: whole[at] for name, whole in zip(self._state_names, states, strict=True)}
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

    def _within_chunk(self, placement: Placement, begin: int) -> tuple[int, int, slice]:
        """Which elements of a parameter, and where in the chunk that covers the state from element ``begin`` on."""
        start = max(0, begin - placement.element)
        stop = min(placement.numel, begin + self.chunk_elements - placement.element)
        return start, stop, slice(placement.element + start - begin, placement.element + stop - begin)

    # -- optimizer state by parameter --------------------------------------------------------------------------------------

    def state_copies(self, placement: Placement) -> dict[str, torch.Tensor]:
        """Copies of ``m`` and ``v`` of one parameter, in its shape and strides."""
        self.settle()
        copies = {
            name: torch.empty_strided(placement.shape, placement.stride, dtype=self._state_dtype) for name in ("m", "v")
        }
        for index, _ in self.chunk_keys([placement]):
            start, stop, at = self._within_chunk(placement, index * self.chunk_elements)
            for name, copy in copies.items():
                with self.store.lease(f"{self.key}/{name}#{index}") as chunk:
                    _flat(copy)[start:stop] = chunk[at]
                del chunk
        return copies

    def load_state(self, placement: Placement, moments: dict[str, torch.Tensor]) -> None:
        """The opposite of ``state_copies``; the fp32 master of a narrower parameter starts from the parameter again."""
        self.settle()
        self.stale_masters.add(placement)
        arranged = {}
        for name, value in moments.items():
            arranged[name] = torch.empty_strided(placement.shape, placement.stride, dtype=self._state_dtype)
            arranged[name].copy_(value)
        for index, keys in self.chunk_keys([placement]):
            self._create_chunk(keys)
            start, stop, at = self._within_chunk(placement, index * self.chunk_elements)
            for name, value in arranged.items():
                with self.store.lease(f"{self.key}/{name}#{index}", access=Access.WRITE) as chunk:
                    chunk[at] = _flat(value)[start:stop]
                del chunk

    def _create_chunk(self, keys: list[str]) -> None:
        """Zeros, where a chunk does not exist yet."""
        if keys[0] in self.store:
            return
        dtype = self._state_dtype
        spec = TensorSpec(str(dtype).removeprefix("torch."), (self.chunk_elements,), dtype.itemsize)
        for key in reversed(keys):  # the first key tells that all are there
            self.store.create(key, spec)
            with self.store.lease(key, access=Access.WRITE) as chunk:
                chunk.zero_()
            del chunk


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in memory order, without a copy; ``tensor`` is dense."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
