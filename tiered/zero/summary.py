"""What paging a model took."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tiered import MisuseError
from tiered.zero.home import placement_of

__all__ = ["PagingStatistics", "statistics"]


@dataclass(frozen=True, slots=True)
class PagingStatistics:
    """Of one paged model, since ``page``.

    ``units``: how many there are. ``largest_unit``: bytes of the largest one's parameters. ``updates``: how many updates of a
    unit were applied, ``update_seconds``: what they took, without the time that they waited for the store. ``split``: names of
    the modules that divide the batch (``micro_batch=``).
    """

    units: int
    largest_unit: int
    updates: int
    update_seconds: float
    split: tuple[str, ...]


def statistics(model: nn.Module) -> PagingStatistics:
    """What paging ``model`` took so far. Raises MisuseError for a model that is not paged."""
    for parameter in model.parameters():
        pager = placement_of(parameter)[0]
        units = pager.units
        return PagingStatistics(
            units=len(units),
            largest_unit=max(unit.plan.nbytes for unit in units),
            updates=sum(unit.updates for unit in units),
            update_seconds=sum(unit.states.update_seconds for unit in units),
            split=pager.splitter.split if pager.splitter is not None else (),
        )
    raise MisuseError("this model has no parameters")
