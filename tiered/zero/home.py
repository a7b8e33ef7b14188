"""Whose a paged parameter is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiered import MisuseError
from tiered.zero.unit import Unit
from tiered.zero.units import Placement

if TYPE_CHECKING:
    from tiered.zero.paging import Pager

__all__ = ["Home", "no_copy", "placement_of", "told"]


class Home:
    """Whose a parameter is. Weakly: the collector does not see through autograd's node, which keeps the parameter, so a model
    that its parameters referred to would never be collected."""

    def __init__(self, pager: Pager, unit: Unit, placement: Placement) -> None:
        self._pager, self._unit, self._placement = weakref.ref(pager), weakref.ref(unit), weakref.ref(placement)

    def found(self) -> tuple[Pager, Unit, Placement] | None:
        """None: the model is gone."""
        pager, unit, placement = self._pager(), self._unit(), self._placement()
        return None if pager is None or unit is None or placement is None else (pager, unit, placement)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        raise no_copy()


def no_copy() -> MisuseError:
    return MisuseError("a paged model cannot be copied or pickled: copy or save model.state_dict() instead")


def placement_of(parameter: torch.Tensor) -> tuple[Pager, Unit, Placement]:
    """Raises MisuseError for a parameter that was not paged, or whose model is gone."""
    home = getattr(parameter, "_tiered", None)
    if home is None:
        raise MisuseError(
            "this parameter is not paged: call tiered.zero.page(model, store) before making the optimizer, or make it with "
            "store= to keep only the states there"
        )
    found: tuple[Pager, Unit, Placement] | None = home.found()
    if found is None:
        raise MisuseError("the model of this parameter is gone: keep it as long as its parameters are used")
    return found


def told(parameter: nn.Parameter, what: Callable[[Pager, Unit, Placement], None]) -> Callable[[Any], None]:
    """A hook. It must not keep the model: neither does it refer to the parameter."""
    home: Home = parameter._tiered  # type: ignore[attr-defined]

    def hook(_: Any) -> None:
        found = home.found()
        assert found is not None, "what computes a gradient still has the model"
        what(*found)

    return hook


