"""Updates within backward: which units may be updated already, and which have to wait.

A parameter's gradient is final when autograd accumulates it, once per backward pass. Its old value may still be needed: by what
autograd saved (of this parameter, or of another one in its unit), and by aliases that ``torch.utils.checkpoint`` keeps. So a
unit is updated when none of these is left and as many gradients have arrived as last time; what is left at the end of backward
is updated there.

Reentrant checkpointing runs backward passes inside of backward, each of which accumulates by itself. Units that take part in it
wait for the end.
"""

from __future__ import annotations

from tiered.zero.unit import Unit
from tiered.zero.units import Placement

__all__ = ["BackwardUpdates"]


class BackwardUpdates:
    """Units whose optimizer was made with ``update="in_backward"`` and that got gradients in the running backward pass."""

    def __init__(self) -> None:
        self._arrived: dict[Unit, set[Placement]] = {}
        self._waiting: dict[Unit, set[Placement]] = {}  # of these, what was not used yet
        self._last_time: dict[Unit, set[Placement]] = {}
        self._deferred: set[Unit] = set()

    def arrived(self, unit: Unit, placement: Placement) -> None:
        """A gradient was stored."""
        if unit.stepper(placement) is not None:
            self._arrived.setdefault(unit, set()).add(placement)
            self._waiting.setdefault(unit, set()).add(placement)

    @property
    def waiting(self) -> bool:
        """Whether a unit is to be updated in this backward pass yet."""
        return bool(self._waiting)

    def defer(self, unit: Unit) -> None:
        """More gradients may come that add up with those that have arrived, at any time until the end of backward."""
        self._deferred.add(unit)

    def apply_ready(self) -> None:
        """Backward moves on: update the units that it is done with. Raises what ``Unit.update`` raises."""
        for unit in [unit for unit in self._waiting if self._ready(unit)]:
            self._apply(unit)

    def finish(self) -> None:
        """Backward is over: update all that got a gradient. Raises what ``Unit.update`` raises; what is left then is left to
        ``optimizer.step()``."""
        for unit in list(self._waiting):
            if not unit.held:
                self._apply(unit)
        self._last_time.update(self._arrived)
        self.abandon()

    def abandon(self) -> None:
        """Backward ended by an exception: gradients stay as they are."""
        self._arrived.clear()
        self._waiting.clear()
        self._deferred.clear()

    def _ready(self, unit: Unit) -> bool:
        if unit.held or unit in self._deferred or unit.in_use():
            return False
        expected = self._last_time.get(unit)
        if expected is None:
            expected = {p for p in unit.gradients.states if p.parameter.requires_grad and unit.stepper(p) is not None}
        return expected <= self._arrived[unit]

    def _apply(self, unit: Unit) -> None:
        waiting = self._waiting.pop(unit)
        unit.update([placement for placement in unit.gradients.states if placement in waiting])
