"""The form of each state of an optimizer in the store: the type of its values, and how many of them which elements have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from tiered.errors import MisuseError
from tiered.types import TensorSpec
from tiered.zero.rules.rule import LARGEST_BLOCK, SMALLEST_BLOCK, WHOLE, UpdateRule, block_of, rounds_by_chance

__all__ = ["StateForm", "are_of_whole", "form_named", "forms_of", "updates_whole"]

UNMASTERED = "unmastered"
"""The name, but for its number, of what is no state and says that a narrow parameter has no master."""

MOST_VALUES = 16
"""Largest number of values of a state, by the elements of their block."""


@dataclass(frozen=True)
class StateForm:
    """Form of a state in the store: values of type ``dtype``, one ``per`` element, row (all dimensions but the last), column
    (all but the last but one) or element of a vector, a parameter of fewer than two dimensions; or ``values`` per block.

    ``block``: elements that are updated together, ``WHOLE`` for a whole parameter, as of rows, columns and vectors. Per
    "nothing" there are no values: it is no state, and says that a narrow parameter has no master.
    """

    dtype: torch.dtype
    per: str = "element"
    block: int = SMALLEST_BLOCK
    values: int = 1

    @property
    def elementwise(self) -> bool:
        """Return whether there is one value for each element."""
        return self.per == "element"

    @property
    def unmastered(self) -> bool:
        """Return whether this is no state, and says that a narrow parameter has no master."""
        return self.per == "nothing"

    @property
    def of_whole(self) -> bool:
        """Return whether the values are those of a whole parameter, and not of its elements or blocks."""
        return self.per in _REDUCED

    def span(self, start: int, stop: int, shape: torch.Size) -> slice:
        """Return which values are those of elements ``start``, where a block begins, to ``stop`` of a parameter of ``shape``.
        """
        if self.per == "block":
            return slice(start // self.block * self.values, -(-stop // self.block) * self.values)
        return slice(start, stop) if self.elementwise else slice(0, self.count(stop, shape))

    def count(self, elements: int, shape: torch.Size) -> int:
        """Return how many values so many elements of a parameter of ``shape`` have."""
        if self.of_whole:
            return prod(self._reduced(shape))
        per_block = self.values if self.per == "block" else 0
        return elements if self.elementwise else -(-elements // self.block) * per_block

    def fitting(self, shape: torch.Size) -> torch.Size:
        """Return the shape of this state, in ``state_dict()``, of a whole parameter of ``shape``."""
        if self.elementwise:
            return shape
        return torch.Size(self._reduced(shape) if self.of_whole else (self.count(shape.numel(), shape),))

    def shaped(self, flat: torch.Tensor, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        """Return the values, flat, of a whole parameter of ``shape`` and ``stride`` in the shape that they have in
        ``state_dict()``."""
        return flat.as_strided(shape, stride) if self.elementwise else flat.view(self.fitting(shape))

    def _reduced(self, shape: torch.Size) -> tuple[int, ...]:
        if (self.per == "vector") == (len(shape) > 1):
            return (0,)
        if self.per == "vector":
            return tuple(shape)
        return (*shape[:-1], 1) if self.per == "row" else (*shape[:-2], 1, shape[-1])

    def __str__(self) -> str:
        """Return the form as commits have it."""
        name = str(self.dtype).removeprefix("torch.")
        if self.block == WHOLE:
            return f"{name}, {'whole' if self.elementwise else _WORDS[self.per]}"
        if self.elementwise and self.block == SMALLEST_BLOCK:
            return name
        values = {"element": self.block, "block": self.values, "nothing": 0}[self.per]
        return f"{name}, {values} for {self.block}"


_WORDS = {"row": "rows", "column": "columns", "vector": "vector"}


def form_named(shown: str) -> StateForm:
    """Return the form that ``str`` gave. Raises ValueError for anything else."""
    name, _, numbers = shown.partition(", ")
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type")
    if not numbers:
        return StateForm(dtype)
    for per, word in {"element": "whole", **_WORDS}.items():
        if numbers == word:
            return StateForm(dtype, per, WHOLE)
    values, _, block = numbers.partition(" for ")
    found = _of_block(dtype, int(block), int(values))
    wrong = found.block % SMALLEST_BLOCK or not SMALLEST_BLOCK <= found.block <= LARGEST_BLOCK
    few = found.block == SMALLEST_BLOCK and not found.unmastered
    if wrong or few or not 0 <= int(values) <= MOST_VALUES * found.block or str(found) != shown:
        raise ValueError(f"{shown!r} is no form of a state")
    return found


def _of_block(dtype: torch.dtype, block: int, values: int) -> StateForm:
    """Return the form of ``values`` for each ``block`` elements."""
    per = "element" if values == block else "block" if values else "nothing"
    return StateForm(dtype, per, block, values if per == "block" else 1)


def forms_of(rule: UpdateRule, wide: torch.dtype) -> dict[str, StateForm]:
    """Return the forms of a rule's states, by name, for parameters that are updated in type ``wide``. Raises MisuseError for a
    state that has not one value for each element, where it does not belong to blocks."""
    block = block_of(rule)
    found: dict[str, StateForm] = {}
    if block == WHOLE:
        tried = [(4, 4)] if rule.granularity == "matrix" else list(_TRIED)  # type: ignore[attr-defined]  # it has one
        made = {shape: rule.state_specs(_spec(shape, wide)) for shape in tried}
        for name in dict.fromkeys(name for specs in made.values() for name in specs):
            specs = [made[shape].get(name) for shape in tried]
            shapes = tuple(None if spec is None else tuple(spec.shape) for spec in specs)
            per = "element" if shapes == tuple(tried) else next((p for p, like in _REDUCED.items() if like == shapes), None)
            dtypes = {vars(torch).get(spec.dtype) for spec in specs if spec is not None}
            dtype = dtypes.pop()
            if per is None or dtypes or not isinstance(dtype, torch.dtype):
                raise MisuseError(
                    f"{type(rule).__name__} keeps {name!r} of shape {shapes} for parameters of shape {tuple(tried)}: a state "
                    "has one value for each element, or (of a rule of granularity 'tensor') for each row or column of two "
                    "dimensions or more, or for each element of fewer"
                )
            found[name] = StateForm(dtype, per, block)
    else:
        for name, spec in rule.state_specs(_spec((block,), wide)).items():
            dtype = vars(torch).get(spec.dtype)
            some = block > SMALLEST_BLOCK and len(spec.shape) == 1 and 1 <= spec.shape[0] <= MOST_VALUES * block
            fits = tuple(spec.shape) == (block,) or some
            if not fits or not isinstance(dtype, torch.dtype):
                raise MisuseError(
                    f"{type(rule).__name__} keeps {name!r} as {spec.dtype} of shape {list(spec.shape)} for a parameter of "
                    f"shape {[block]}: a state has one value for each element (of a rule with a number for granularity: up to "
                    f"{MOST_VALUES} times as many for each block); what is the same for all can be computed from the number of "
                    "the step"
                )
            found[name] = _of_block(dtype, block, spec.shape[0])
    if not found and block != SMALLEST_BLOCK:
        raise MisuseError(f"{type(rule).__name__} updates more than {SMALLEST_BLOCK} elements together: keep a state of them")
    if any(name.startswith(UNMASTERED) for name in found):
        raise MisuseError(f"{type(rule).__name__} keeps a state whose name begins with {UNMASTERED!r}: give it another one")
    if rounds_by_chance(rule):
        if block == WHOLE:
            raise MisuseError(f"{type(rule).__name__} rounds by chance, which rules of elements or blocks do: keep masters")
        found[f"{UNMASTERED}{block}"] = StateForm(torch.uint8, "nothing", block)
    return found


_TRIED = ((2, 3, 5), (7,))
"""Shapes that a rule for whole parameters is asked about."""
_REDUCED: Mapping[str, tuple[tuple[int, ...] | None, ...]] = {
    "row": ((2, 3, 1), None),
    "column": ((2, 1, 5), None),
    "vector": (None, (7,)),
}
"""The shapes of what a state has per row, and so on, of parameters of these shapes."""


def are_of_whole(forms: Mapping[str, StateForm]) -> bool:
    """Return whether states of these forms, by name, are of whole parameters: so is the update that computes them."""
    return any(form.block == WHOLE for form in forms.values())


def updates_whole(rule: UpdateRule) -> bool:
    """Return whether a rule updates whole parameters."""
    return are_of_whole(forms_of(rule, torch.float32))


def _spec(shape: tuple[int, ...], wide: torch.dtype) -> TensorSpec:
    return TensorSpec(str(wide).removeprefix("torch."), shape, wide.itemsize)
