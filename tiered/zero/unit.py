"""One unit at run time: holding it, and its pending update."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiered import Access, MisuseError, TieredStore
from tiered.zero.at_tier import Tensors, host
from tiered.zero.placeholder import Placeholder
from tiered.zero.sharding import Partition
from tiered.zero.states import Pending, States, Update
from tiered.zero.stored import Converted, Stored
from tiered.zero.unit_gradients import UnitGradients
from tiered.zero.units import Placement, UnitPlan, even_chunks
from tiered.zero.validity import Validity

__all__ = ["Stepper", "Unit"]


Stepper = Callable[[Placement], Update]
"""A method of an optimizer that updates within backward: counts one step of a parameter and returns it, with the
hyper-parameters that there are now."""


class Unit:
    """Parameters that are paged together.

    While nobody holds the unit its parameters are NaN without memory (a stale read is loud); while somebody does, they
    are views of the store's own memory, in the top tier. ``updates``: the store, where gradients and states are leased.
    ``version`` counts optimizer steps: what a graph saved before one cannot be used after it.
    """

    def __init__(
        self,
        store: TieredStore,
        updates: Tensors,
        prefix: str,
        plan: UnitPlan,
        chunk: int,
        validity: Validity,
        partition: Partition,
    ) -> None:
        self._updates = updates
        self.store, self.plan, self._validity, self._partition = store, plan, validity, partition
        self.key = f"{prefix}/param/{plan.name}"
        self.version = 0
        self.updates = 0
        self.pending: Pending | None = None
        self.base: torch.Tensor | None = None
        self.parts = plan.parts(partition.rank)
        stored = partition.stored(store, updates, self.key, plan, validity)
        self.stored: Stored = Converted(stored, store, self.key, plan) if plan.converted else stored
        self.gradients = UnitGradients(updates, f"{self.key}/grad", plan.placements, self.parts, validity, self.settle)
        self.arriving = partition.arriving(store, self.key, plan, self.gradients)
        self._holders = 0
        self._access = Access.READ
        self._versions: list[int] = []
        self._placeholders = {p: Placeholder.on(store.device, p.shape, p.dtype) for p in plan.placements}
        self._steppers: dict[Placement, weakref.WeakMethod[Stepper]] = {}
        self._lent: list[StorageWeakRef] = []
        self.references: weakref.WeakSet[object] = weakref.WeakSet()  # what graphs saved of it, which has no memory of its own
        kinds = {placement.stored for placement in plan.placements}
        self.states = States(updates, self.key, list(self.parts.values()), even_chunks(plan.elements, chunk), kinds)

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
            self.base = self.stored.open(access)
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
            self.stored.write_back(self.base)
            self.states.stale_masters.update(self.parts.values())
            self.version += 1
        self.release_parameters()
        self.base = None
        self.stored.close()
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
        self._placeholders[placement] = fresh = Placeholder.on(self.store.device, placement.shape, placement.dtype)
        placement.parameter.data = fresh.tensor
        raise MisuseError(
            f"parameter {placement.name!r} was written to, or given other data or another dtype, while its values were in the "
            "store, and the change is lost: change paged parameters with load_state_dict, and others before zero.page"
        )

    def forget_gradients(self) -> None:
        """Delete the stored gradients when neither a parameter nor a pending update refers to them any more."""
        if self.pending is None and not self.gradients.any:
            self.arriving.delete()

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
            self.gradients.refuse_infinite(placement)
        updates = {}
        for placement in placements:
            stepper = self.stepper(placement)
            if stepper is not None:
                updates[placement] = stepper(placement)
                self.gradients.spend(placement)
        self.mark(updates)
        self.settle()

    # -- updates -----------------------------------------------------------------------------------------------------------

    def mark(self, updates: dict[Placement, Update]) -> None:
        """These are pending from here on."""
        self.stored.give_up()
        self.pending = Pending({self.parts[p]: update for p, update in updates.items() if p in self.parts})
        self.version += 1

    def upcoming_keys(self) -> list[str]:
        """What the next ``hold`` will lease, in order."""
        if self.pending is None:
            return [self.key]
        chunks = self.states.chunks(self.pending.updates)[self.pending.chunks_done :]
        return [self.key, self.gradients.key, *(key for _, keys in chunks for key in keys)]

    def settle(self) -> None:
        """Apply the pending update, chunk by chunk. An error leaves what is not yet updated pending."""
        pending = self.pending
        if pending is None:
            return
        if self.held:
            raise MisuseError(f"the parameters of {self.plan.name!r} are in use: their update has to wait for the end of it")
        self._validity.end()
        with ExitStack() as leases:
            gradient = self.gradients.opened  # from within backward: so it stays in memory until it is deleted
            if gradient is None:
                gradient = leases.enter_context(self._updates.lease(self.gradients.key))
            unit = leases.enter_context(self.stored.own(Access.WRITE))
            self.states.apply(pending, unit, gradient)
            del unit, gradient
        self.updates += 1
        self.pending = None
        self.forget_gradients()

    def state_copies(self, placement: Placement) -> dict[str, torch.Tensor]:
        """``States.copies``, with the pending update applied."""
        self.settle()
        part, copies = self.parts.get(placement), self.states.blank(placement)
        if part is not None:
            with self.stored.own(Access.READ) as unit:
                param = host(part.stored_flat(unit, 0, part.numel))
                copies = self.states.copies(part, param)
                del unit, param
        return {name: self._partition.whole(self.plan, placement, copy, name) for name, copy in copies.items()}

    def gradient(self, placement: Placement) -> torch.Tensor | None:
        """A copy of the gradient as torch would have it in ``parameter.grad``, or None."""
        part = self.gradients.copy(placement)
        if part is None:
            return None
        return self._partition.whole(self.plan, placement, part, "the gradient").to(placement.parameter.device)

    def load_state(self, placement: Placement, state: dict[str, torch.Tensor]) -> None:
        """``States.load``, after the pending update."""
        self._validity.end()
        self.settle()
        part = self.parts.get(placement)
        if part is None:
            return
        with self.stored.own(Access.READ) as unit:
            param = host(part.stored_flat(unit, 0, part.numel))
            self.states.load(part, param, {name: part.cut(value) for name, value in state.items()})
            del unit, param


def _living(storages: list[StorageWeakRef]) -> list[StorageWeakRef]:
    return [storage for storage in storages if not storage.expired()]  # type: ignore[no-untyped-call]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
