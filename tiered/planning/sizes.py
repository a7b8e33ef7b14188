"""The tensors that a paged model has in its store between two steps, and their bytes, as far as its units alone say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from tiered.zero.paging.storage import TensorStore
from tiered.zero.paging.units import ModelPlan, UnitPlan, even_chunks
from tiered.zero.paging.update import States
from tiered.zero.rules.forms import forms_of
from tiered.zero.rules.rule import UpdateRule

__all__ = ["UnitSizes", "sizes_of"]


@dataclass
class UnitSizes:
    """The tensors that a store has of one unit, in bytes: parameters, gradient (0: nothing is trained), and the states of each
    chunk by key. Of one of several ranks they are its share."""

    key: str
    nbytes: int
    gradient: int
    chunks: list[dict[str, int]]

    @property
    def states(self) -> int:
        return sum(sum(sizes.values()) for sizes in self.chunks)


def sizes_of(plan: ModelPlan, name: str, rule: UpdateRule) -> list[UnitSizes]:
    """Return the tensors of each unit of a model that ``name`` is the name of, with the states that ``rule`` keeps."""
    return [_unit_sizes(unit, f"{name}/param/{unit.name}", plan.limits.chunk, rule) for unit in plan.units]


def _unit_sizes(unit: UnitPlan, key: str, chunk: int, rule: UpdateRule) -> UnitSizes:
    parts = list(unit.parts(0).values())
    kinds = {placement.stored for placement in unit.placements}
    states = States(cast(TensorStore, None), key, parts, even_chunks(unit.elements, chunk), kinds)
    trained = [part for part in parts if part.parameter.requires_grad and part.dtype.is_floating_point]
    for part in trained:
        states.use(part.name, forms_of(rule, states.wide))
    chunks = [
        {one: max(states.sizes(one)) * states.form_of(one).dtype.itemsize for one in keys} for _, keys in states.chunks(trained)
    ]
    gradient = max((part.offset + part.nbytes for part in trained), default=0)
    return UnitSizes(key, unit.share_nbytes, gradient, chunks)
