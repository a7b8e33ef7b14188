"""The tensors that a paged model has in its store between two steps, and their bytes, as far as its units alone say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from tiered.types import TensorSpec
from tiered.zero.paging.storage import TensorStore
from tiered.zero.paging.units import ModelPlan, UnitPlan, even_chunks
from tiered.zero.paging.update import States
from tiered.zero.rules.forms import forms_of
from tiered.zero.rules.rule import UpdateRule

__all__ = ["UnitSizes", "sizes_of"]


@dataclass
class UnitSizes:
    """The tensors that a store has of one unit: bytes of the parameters and of the gradient (0: nothing is trained), and the
    states of each chunk by key. Of one of several ranks they are its share."""

    key: str
    nbytes: int
    gradient: int
    chunks: list[dict[str, TensorSpec]]

    @property
    def states(self) -> int:
        return sum(spec.nbytes for chunk in self.chunks for spec in chunk.values())


def sizes_of(plan: ModelPlan, name: str, rule: UpdateRule) -> list[UnitSizes]:
    """Return the tensors of each unit of a model that ``name`` is the name of, with the states that ``rule`` keeps."""
    known: dict[tuple[object, ...], UnitSizes] = {}  # of units whose parameters are alike, as layers' are
    found = []
    for unit in plan.units:
        key = f"{name}/param/{unit.name}"
        alike = _alike(unit)
        if alike not in known:
            known[alike] = _unit_sizes(unit, key, plan.limits.chunk, rule)
        first = known[alike]
        chunks = [{key + one[len(first.key) :]: spec for one, spec in chunk.items()} for chunk in first.chunks]
        found.append(replace(first, key=key, chunks=chunks))
    return found


def _alike(unit: UnitPlan) -> tuple[object, ...]:
    """Return what the sizes of a unit depend on."""
    parameters = [
        (one.full_shape, one.dtype, one.stored, one.parameter.requires_grad, one.element, one.offset, one.nbytes)
        for one in (*unit.placements, *unit.parts(0).values())
    ]
    return unit.share_nbytes, unit.elements, tuple(parameters)


def _unit_sizes(unit: UnitPlan, key: str, chunk: int, rule: UpdateRule) -> UnitSizes:
    parts = list(unit.parts(0).values())
    kinds = {placement.stored for placement in unit.placements}
    states = States(cast(TensorStore, None), key, parts, even_chunks(unit.elements, chunk), kinds)
    trained = [part for part in parts if part.parameter.requires_grad and part.dtype.is_floating_point]
    for part in trained:
        states.use(part.name, forms_of(rule, states.wide))

    def spec(key: str) -> TensorSpec:
        count, dtype = max(states.sizes(key)), states.form_of(key).dtype
        return TensorSpec(str(dtype).removeprefix("torch."), (count,), dtype.itemsize)

    chunks = [{one: spec(one) for one in keys} for _, keys in states.chunks(trained)]
    gradient = max((part.offset + part.nbytes for part in trained), default=0)
    return UnitSizes(key, unit.share_nbytes, gradient, chunks)
