"""One unit at run time: holding it, its gradients, its pending update."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiered import Access, MisuseError, TensorSpec, TieredStore
from tiered.zero.gradients import SpentGradient, StoredGradient
from tiered.zero.master import all_finite
from tiered.zero.placeholder import Placeholder
from tiered.zero.states import Pending, States, Update
from tiered.zero.units import Placement, UnitPlan
from tiered.zero.validity import Validity

__all__ = ["Stepper", "Unit"]


Stepper = Callable[[Placement], Update]
"""A method of an optimizer that updates within backward: counts one step of a parameter and returns it, with the
hyper-parameters that there are now."""


@dataclass(eq=False)
class GradientState:
    """``scales``: factors that the stored gradient has yet to be multiplied by; and then, as fp32 where its type is narrower,
    ``wide_scales``, of which there are some once a scaled loss was undone. ``norms``: those known of it, by order. ``orders``:
    those that somebody asked for before, worth computing while a gradient is at hand; they will be asked for when it has been
    multiplied by ``expected``, if it is as last time. ``finite``: whether the stored gradient, as it is, has neither NaN nor
    infinity. ``spent``: it was used up by an update within backward, and ``optimizer.step()`` was not called since."""

    marker: StoredGradient
    scales: list[torch.Tensor] = field(default_factory=list)
    wide_scales: list[torch.Tensor] = field(default_factory=list)
    expected: torch.Tensor | None = None
    norms: dict[float, torch.Tensor] = field(default_factory=dict)
    orders: set[float] = field(default_factory=set)
    accumulate: bool = False
    finite: bool = True
    spent: bool = False


class Unit:
    """Parameters that are paged together.

    While nobody holds the unit its parameters are NaN without memory (a stale read is loud); while somebody does, they
    are views of the store's own memory. ``version`` counts optimizer steps: what a graph saved before one cannot be used
    after it.
    """

    def __init__(
        self, store: TieredStore, prefix: str, plan: UnitPlan, chunk_elements: int, validity: Validity
    ) -> None:
        self.store, self.plan, self._validity = store, plan, validity
        self.key = f"{prefix}/param/{plan.name}"
        self.gradient_key = f"{self.key}/grad"
        self.version = 0
        self.updates = 0
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
        self._steppers: dict[Placement, weakref.WeakMethod[Stepper]] = {}
        self._lent: list[StorageWeakRef] = []
        self.references: weakref.WeakSet[object] = weakref.WeakSet()  # what graphs saved of it, which has no memory of its own
        self.states = States(store, self.key, plan.placements, chunk_elements)

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
            self.base = self._open_converted() if self.plan.converted else self._open(access)
            self._access = access
            for placement in self.plan.placements:
                placement.parameter.data = placement.view(self.base)
            self._versions = [p.parameter._version for p in self.plan.placements]
        elif access is Access.WRITE and self._access is not Access.WRITE:
            raise MisuseError(f"the parameters of {self.plan.name!r} are in use: write to them outside forward and backward")
        self._holders += 1

    def _open(self, access: Access) -> torch.Tensor:
        if access is Access.WRITE:
            self._validity.end()
        return self._lease.enter_context(self.store.lease(self.key, access=access))

    def _open_converted(self) -> torch.Tensor:
        """A tensor of its own in the pool, which is deleted before it could be written back."""
        key = f"{self.key}/converted"
        with ExitStack() as leases:
            self.store.create(key, TensorSpec("uint8", (self.plan.nbytes,), 1))
            leases.callback(self.store.delete, key)
            converted = leases.enter_context(self.store.lease(key, access=Access.WRITE))
            with self.store.lease(self.key) as stored:
                for placement in self.plan.placements:
                    placement.view(converted).copy_(placement.stored_view(stored))
                del stored
            self._lease = leases.pop_all()
        return converted

    def _store_converted(self) -> None:
        assert self.base is not None
        self._validity.end()
        with self.store.lease(self.key, access=Access.WRITE) as stored:
            for placement in self.plan.placements:
                placement.stored_view(stored).copy_(placement.view(self.base))
            del stored

    def drop(self) -> None:
        """Undo one ``hold``; the last one takes the parameters' memory away again."""
        self._holders -= 1
        if self._holders:
            return
        assert self.base is not None
        if self._steppers:
            self._lent = _living(self._lent)
            self._lent.append(StorageWeakRef(self.base.untyped_storage()))  # type: ignore[no-untyped-call]
        written = None
        if self._access is Access.READ:
            here = _address(self.base)
            for placement, version in zip(self.plan.placements, self._versions, strict=True):
                if placement.parameter._version != version or _address(placement.parameter) != here:
                    written = placement.name
        else:
            if self.plan.converted:
                self._store_converted()
            self.states.stale_masters.update(self.plan.placements)
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
        grad = placement.parameter.grad
        return grad is not None and not isinstance(grad, SpentGradient)

    @property
    def any_gradient(self) -> bool:
        return any(self.has_gradient(placement) for placement in self.plan.placements)

    def before_gradient(self, placement: Placement) -> None:
        """Autograd is about to accumulate into ``parameter.grad``: clear what stands there, remembering what it meant."""
        grad = placement.parameter.grad
        state = self.gradients[placement]
        if state.spent:
            raise MisuseError(
                f"another gradient of {placement.name!r} arrived after its update, without optimizer.step() in between: to "
                'accumulate, or to share parameters with a reentrant checkpoint, make the optimizer with update="on_fetch"'
            )
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

    def collect_gradient(self, placement: Placement) -> None:
        """Store a gradient that somebody assigned to ``parameter.grad``."""
        grad = placement.parameter.grad
        assert grad is not None
        if not isinstance(grad, StoredGradient):
            self.take_gradient(placement, grad)

    @torch.no_grad()  # also where backward records itself (create_graph)
    def add_gradient(self, placement: Placement, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            raise MisuseError(f"the gradient of {placement.name!r} is {grad.layout}: use sparse=False")
        state = self.gradients[placement]
        target = placement.view(self._open_gradient())
        if state.accumulate:
            if state.scales or state.wide_scales:
                target.copy_(_scaled(target, state))
            target.add_(grad)
        else:
            target.copy_(grad)
        state.scales.clear()
        state.wide_scales.clear()
        if state.orders:
            ready = target if state.expected is None else _widened(target).mul(state.expected)
            state.norms = {order: torch.linalg.vector_norm(ready, order) for order in state.orders}
        state.finite = _has_finite_norm(state) or all_finite(target)
        placement.parameter.grad = state.marker

    def _open_gradient(self) -> torch.Tensor:
        if self._gradient is None:
            self._validity.end()
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
        if isinstance(grad, SpentGradient):
            raise MisuseError(
                f"{placement.name!r} was updated during backward, and its gradient is gone: to look at gradients, make the "
                'optimizer with update="on_fetch"'
            )
        if grad is None or not isinstance(grad, StoredGradient):
            return grad
        self.close_gradient()
        with self.store.lease(self.gradient_key) as stored:
            copy = placement.view(stored).clone()
        return _scaled(copy, self.gradients[placement]).to(placement.dtype)

    def gradient_norm(self, placement: Placement, order: float) -> torch.Tensor:
        """``vector_norm`` of the whole gradient, from when it arrived where that is known already."""
        state = self.gradients[placement]
        state.orders.add(order)
        self.collect_gradient(placement)
        self.close_gradient()
        if state.expected is not None and not state.wide_scales:
            state.norms.clear()  # this loss was not scaled, or it was not undone
            state.expected = None
        if order not in state.norms:
            with self.store.lease(self.gradient_key) as stored:
                whole = _scaled(placement.view(stored), state)
                state.norms[order] = torch.linalg.vector_norm(whole, order)
            del stored, whole
        return state.norms[order]

    def scale_gradient(self, placement: Placement, factor: torch.Tensor) -> None:
        """Multiply the gradient by ``factor`` (0-d), when it is next used."""
        if factor == 1:
            return
        state = self.gradients[placement]
        (state.wide_scales or state.scales).append(factor)
        state.norms.clear()

    def unscale_gradient(self, placement: Placement, factor: torch.Tensor) -> bool:
        """Multiply the gradient by ``factor`` (0-d), as fp32 where its type is narrower, when it is next used. Returns whether
        it was finite before."""
        self.collect_gradient(placement)
        self.close_gradient()
        state = self.gradients[placement]
        finite = _is_finite(state)
        if state.scales or state.wide_scales or state.expected is None or not torch.equal(state.expected, factor):
            state.norms.clear()
        state.expected = factor
        state.wide_scales.append(factor)
        return finite

    def refuse_infinite(self, placement: Placement) -> None:
        """Raise MisuseError if the gradient has NaN or infinity, or is to be multiplied by such a factor."""
        self.collect_gradient(placement)
        if not _is_finite(self.gradients[placement]):
            self.close_gradient()
            raise MisuseError(
                f"the gradient of {placement.name!r} is not finite, and would make the parameter NaN: leave this step out "
                "(optimizer.zero_grad()), or scale the loss with tiered.zero.GradScaler, which does so by itself"
            )

    def forget_gradients(self) -> None:
        """Delete the stored gradients when neither a parameter nor a pending update refers to them any more."""
        if self.pending is None and not self.any_gradient:
            self.close_gradient()
            if self.gradient_key in self.store:
                self._validity.end()
                self.store.delete(self.gradient_key)
            for state in self.gradients.values():
                state.scales.clear()
                state.wide_scales.clear()

    # -- updates within backward ---------------------------------------------------------------------------------------------

    def claim(self, placement: Placement, stepper: Stepper | None) -> None:
        """``stepper`` updates the parameter within backward (None: nobody does). The last claim counts, while its object lives.
        """
        self._steppers.pop(placement, None)
        if stepper is not None:
            self._steppers[placement] = weakref.WeakMethod(stepper)

    def stepper(self, placement: Placement) -> Stepper | None:
        found = self._steppers.get(placement)
        return None if found is None else found()

    def in_use(self) -> bool:
        """Whether something will look at the parameters' present values that does not hold the unit: a graph, or an alias."""
        return bool(self.references or _living(self._lent))

    def update(self, placements: Sequence[Placement]) -> None:
        """Update these with the gradients that have arrived, which are gone then; nobody holds the unit.

        Raises MisuseError, with nothing changed, where a gradient is not finite; what ``settle`` raises.
        """
        self.settle()
        for placement in placements:
            self.refuse_infinite(placement)
        updates = {}
        for placement in placements:
            stepper = self.stepper(placement)
            if stepper is not None:
                updates[placement] = stepper(placement)
                self.gradients[placement].spent = True
                placement.parameter.grad = SpentGradient(placement.parameter, placement.name)
        self.pending = Pending(updates)
        self.version += 1
        self.settle()

    def refuse_spent(self, placement: Placement) -> None:
        """Raise MisuseError if the parameter was updated within this backward pass."""
        state = self.gradients.get(placement)
        if state is not None and state.spent:
            raise MisuseError(
                f"a checkpointed segment reads {placement.name!r} again after its update during this backward pass, because it "
                'uses it without a gradient there: make the optimizer with update="on_fetch"'
            )

    def close_step(self, placement: Placement) -> None:
        """The gradient that an update within backward used up counts as none from now on."""
        state = self.gradients.get(placement)
        if state is not None and state.spent:
            state.spent = False
            if isinstance(placement.parameter.grad, SpentGradient):
                placement.parameter.grad = None

    # -- updates -----------------------------------------------------------------------------------------------------------

    def upcoming_keys(self) -> list[str]:
        """What the next ``hold`` will lease, in order."""
        if self.pending is None:
            return [self.key]
        chunks = self.states.chunks(self.pending.updates)[self.pending.chunks_done :]
        return [self.key, self.gradient_key, *(key for _, keys in chunks for key in keys)]

    def settle(self) -> None:
        """Apply the pending update, chunk by chunk. An error leaves what is not yet updated pending."""
        pending = self.pending
        if pending is None:
            return
        if self.held:
            raise MisuseError(f"the parameters of {self.plan.name!r} are in use: their update has to wait for the end of it")
        self._validity.end()
        with ExitStack() as leases:
            gradient = self._gradient  # from within backward: so it stays in memory until it is deleted
            if gradient is None:
                gradient = leases.enter_context(self.store.lease(self.gradient_key))
            unit = leases.enter_context(self.store.lease(self.key, access=Access.WRITE))
            self.states.apply(pending, unit, gradient)
            del unit, gradient
        self.updates += 1
        self.pending = None
        self.forget_gradients()

    def state_copies(self, placement: Placement) -> dict[str, torch.Tensor]:
        """``States.copies``, with the pending update applied."""
        self.settle()
        with self.store.lease(self.key) as unit:
            param = placement.stored_flat(unit, 0, placement.numel)
            copies = self.states.copies(placement, param)
            del unit, param
        return copies

    def load_state(self, placement: Placement, state: dict[str, torch.Tensor]) -> None:
        """``States.load``, after the pending update."""
        self._validity.end()
        self.settle()
        with self.store.lease(self.key) as unit:
            param = placement.stored_flat(unit, 0, placement.numel)
            self.states.load(placement, param, state)
            del unit, param


def _living(storages: list[StorageWeakRef]) -> list[StorageWeakRef]:
    return [storage for storage in storages if not storage.expired()]  # type: ignore[no-untyped-call]


def _has_finite_norm(state: GradientState) -> bool:
    """Then it is known of all elements. From order 1 on: one NaN or infinity makes these NaN or infinite."""
    return any(order >= 1 and math.isfinite(norm) for order, norm in state.norms.items())


def _is_finite(state: GradientState) -> bool:
    return state.finite and all(bool(torch.isfinite(scale)) for scale in (*state.scales, *state.wide_scales))


def _widened(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient


def _scaled(gradient: torch.Tensor, state: GradientState) -> torch.Tensor:
    """``gradient`` times all its factors; the same tensor where there are none."""
    for scale in state.scales:
        gradient = gradient.mul(scale)
    if state.wide_scales:
        gradient = _widened(gradient)
        for scale in state.wide_scales:
            gradient = gradient.mul(scale)
    return gradient


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
