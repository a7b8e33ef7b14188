"""The form of each state of an optimizer in the store: the type of its values, and how many of them which elements have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from tiered import MisuseError, TensorSpec
from tiered.zero.rules.rule import (
    COLUMNS,
    LARGEST_BLOCK,
    ROWS,
    SMALLEST_BLOCK,
    VECTOR,
    WHOLE,
    UpdateRule,
    block_of,
    rounds_by_chance,
)  # fmt: skip

__all__ = ["Kept", "as_kept", "kept_by"]

UNMASTERED = "unmastered"
"""The name, but for its number, of what is no state and says that a narrow parameter has no master."""

MOST_VALUES = 16
"""Largest number of values of a state, by the elements of their block."""


@dataclass(frozen=True)
class Kept:
    """Form of a state in the store: ``values`` of type ``dtype`` for each ``block`` elements of a parameter. A block of 0 is a
    whole parameter (``WHOLE``), with one value for each element, or as ``ROWS``, ``COLUMNS`` and ``VECTOR`` say."""

    dtype: torch.dtype
    block: int = SMALLEST_BLOCK
    values: int = SMALLEST_BLOCK

    @property
    def elementwise(self) -> bool:
        """Return whether there is one value for each element."""
        return self.values == self.block

    @property
    def unmastered(self) -> bool:
        """Return whether this is no state, and says that a narrow parameter has no master."""
        return self.block != WHOLE and self.values == 0

    @property
    def of_whole(self) -> bool:
        """Return whether the values are those of a whole parameter, and not of its elements or blocks."""
        return self.block == WHOLE and not self.elementwise

    def span(self, start: int, stop: int, shape: torch.Size) -> slice:
        """Return which values are those of elements ``start``, where a block begins, to ``stop`` of a parameter of ``shape``.
        """
        if self.elementwise:
            return slice(start, stop)
        if self.block == WHOLE:
            return slice(0, self.count(stop, shape))
        return slice(start // self.block * self.values, -(-stop // self.block) * self.values)

    def count(self, elements: int, shape: torch.Size) -> int:
        """Return how many values so many elements of a parameter of ``shape`` have."""
        if self.of_whole:
            return prod(self._reduced(shape))
        return elements if self.elementwise else -(-elements // self.block) * self.values

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
        if self.values == VECTOR:
            return (0,) if len(shape) > 1 else tuple(shape)
        if len(shape) < 2:
            return (0,)
        return (*shape[:-1], 1) if self.values == ROWS else (*shape[:-2], 1, shape[-1])

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if self.block == WHOLE:
            return f"{name}, {_WHOLES[self.values]}"
        usual = self.block == SMALLEST_BLOCK == self.values
        return name if usual else f"{name}, {self.values} for {self.block}"


_WHOLES = {WHOLE: "whole", ROWS: "rows", COLUMNS: "columns", VECTOR: "vector"}


def as_kept(shown: str) -> Kept:
    """Return the form that ``str`` gave. Raises ValueError for anything else."""
    name, _, numbers = shown.partition(", ")
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type")
    if not numbers:
        return Kept(dtype)
    for whole, word in _WHOLES.items():
        if numbers == word:
            return Kept(dtype, WHOLE, whole)
    values, _, block = numbers.partition(" for ")
    found = Kept(dtype, int(block), int(values))
    wrong = found.block % SMALLEST_BLOCK or not SMALLEST_BLOCK <= found.block <= LARGEST_BLOCK
    few = found.block == SMALLEST_BLOCK and found.values
    if wrong or few or not 0 <= found.values <= MOST_VALUES * found.block or str(found) != shown:
        raise ValueError(f"{shown!r} is no form of a state")
    return found


def kept_by(rule: UpdateRule, wide: torch.dtype) -> dict[str, Kept]:
    """Return the forms of a rule's states, by name, for parameters that are updated in type ``wide``. Raises MisuseError for a
    state that has not one value for each element, where it does not belong to blocks."""
    block = block_of(rule)
    found: dict[str, Kept] = {}
    if block == WHOLE:
        tried = [(4, 4)] if rule.granularity == "matrix" else list(_TRIED)  # type: ignore[attr-defined]  # it has one
        made = {shape: rule.state_specs(_spec(shape, wide)) for shape in tried}
        for name in dict.fromkeys(name for specs in made.values() for name in specs):
            specs = [made[shape].get(name) for shape in tried]
            shapes = tuple(None if spec is None else tuple(spec.shape) for spec in specs)
            values = WHOLE if shapes == tuple(tried) else _REDUCED.get(shapes)
            dtypes = {vars(torch).get(spec.dtype) for spec in specs if spec is not None}
            dtype = dtypes.pop()
            if values is None or dtypes or not isinstance(dtype, torch.dtype):
                raise MisuseError(
                    f"{type(rule).__name__} keeps {name!r} of shape {shapes} for parameters of shape {tuple(tried)}: a state "
                    "has one value for each element, or (of a rule of granularity 'tensor') for each row or column of two "
                    "dimensions or more, or for each element of fewer"
                )
            found[name] = Kept(dtype, block, values)
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
            found[name] = Kept(dtype, block, spec.shape[0])
    if not found and block != SMALLEST_BLOCK:
        raise MisuseError(f"{type(rule).__name__} updates more than {SMALLEST_BLOCK} elements together: keep a state of them")
    if any(name.startswith(UNMASTERED) for name in found):
        raise MisuseError(f"{type(rule).__name__} keeps a state whose name begins with {UNMASTERED!r}: give it another one")
    if rounds_by_chance(rule):
        found[f"{UNMASTERED}{block}"] = Kept(torch.uint8, block, 0)
    return found


_TRIED = ((2, 3, 5), (7,))
"""Shapes that a rule for whole parameters is asked about."""
_REDUCED: Mapping[tuple[tuple[int, ...] | None, ...], int] = {
    ((2, 3, 1), None): ROWS,
    ((2, 1, 5), None): COLUMNS,
    (None, (7,)): VECTOR,
}


def _spec(shape: tuple[int, ...], wide: torch.dtype) -> TensorSpec:
    return TensorSpec(str(wide).removeprefix("torch."), shape, wide.itemsize)
