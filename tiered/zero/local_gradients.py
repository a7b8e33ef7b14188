"""What one of several ranks has of a unit's gradients before they are reduced."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from tiered import Access, MisuseError, TensorSpec
from tiered.zero.at_tier import Tensors
from tiered.zero.gradients import StoredGradient
from tiered.zero.leases import Opened
from tiered.zero.unit_gradients import UnitGradients
from tiered.zero.units import Placement, UnitPlan

__all__ = ["Arriving", "LocalGradients"]


class Arriving(Protocol):
    """Where backward's gradients go."""

    def before(self, placement: Placement) -> None:
        """Autograd is about to accumulate into ``parameter.grad``: clear what stands there, remembering what it meant."""
        ...

    def add(self, placement: Placement, grad: torch.Tensor) -> None:
        """It has; ``parameter.grad`` shows from now on that there is a gradient."""
        ...

    def close(self) -> None:
        """None of this unit's comes next."""
        ...

    def delete(self) -> None:
        """Nothing refers to the unit's stored gradients any more."""
        ...

    def restored(self) -> None:
        """The store went back to a commit."""
        ...


class LocalGradients:
    """Sums over this rank's backward passes, in a tensor of the unit's layout that exists until they are reduced; the mean over
    all ranks is then added to ``gradients``, which has this rank's share."""

    def __init__(self, store: Tensors, key: str, plan: UnitPlan, gradients: UnitGradients) -> None:
        self.key, self._store, self._plan, self._gradients = key, store, plan, gradients
        self._arrived: set[Placement] = set()
        self._opened: torch.Tensor | None = None
        self._lease = Opened()

    def has(self, placement: Placement) -> bool:
        return placement in self._arrived

    def before(self, placement: Placement) -> None:
        grad = placement.parameter.grad
        self._gradients.refuse_another(placement)
        if grad is None:
            self._arrived.discard(placement)
            self._gradients.states[placement].accumulate = False
        else:
            self._collect(placement, grad)
        placement.parameter.grad = None

    def collect(self) -> None:
        """Store what somebody assigned to ``parameter.grad``."""
        for placement in self._gradients.states:
            if placement.parameter.grad is not None:
                self._collect(placement, placement.parameter.grad)
            else:
                self._arrived.discard(placement)

    def _collect(self, placement: Placement, grad: torch.Tensor) -> None:
        if not isinstance(grad, StoredGradient):  # it is taken for the mean, the same everywhere
            self._arrived.discard(placement)
            self._gradients.take(placement, grad)
            self._gradients.close()
            self._gradients.states[placement].accumulate = True

    @torch.no_grad()  # also where backward records itself (create_graph)
    def add(self, placement: Placement, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            raise MisuseError(f"the gradient of {placement.name!r} is {grad.layout}: use sparse=False")
        target = placement.view(self._open())
        if placement in self._arrived:
            target.add_(grad.to(target.device))
        else:
            target.copy_(grad)
            self._arrived.add(placement)
        placement.parameter.grad = self._gradients.states[placement].marker

    def _open(self) -> torch.Tensor:
        if self._opened is None:
            self._gradients.prepare()
            if self.key not in self._store:
                self._store.create(self.key, TensorSpec("uint8", (self._plan.nbytes,), 1))
            self._opened = self._lease.open(self._store.lease(self.key, access=Access.WRITE))
        return self._opened

    def close(self) -> None:
        self._opened = None
        self._lease.close()

    def delete(self) -> None:
        self.discard()
        self._gradients.delete()

    def restored(self) -> None:
        self.close()
        self._arrived.clear()

    # -- reduced -----------------------------------------------------------------------------------------------------------

    def complete(self) -> torch.Tensor:
        """This rank's sums of all parameters of the unit, zeros where it has none; leased until ``discard``."""
        whole = self._open()
        for placement, state in self._gradients.states.items():
            if placement.parameter.grad is None:  # somebody took it away since
                self._arrived.discard(placement)
                state.accumulate = False
            if placement not in self._arrived:
                placement.view(whole).zero_()
        return whole

    def discard(self, reduced: Collection[Placement] | None = None) -> None:
        """The sums of these (None: of all): others stay until they are reduced, too."""
        self.close()
        self._arrived = set() if reduced is None else self._arrived.difference(reduced)
        if not self._arrived and self.key in self._store:
            self._store.delete(self.key)
