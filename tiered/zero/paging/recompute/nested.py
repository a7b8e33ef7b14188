"""Take nested values apart and put them together: tuples, lists, dicts and dataclasses around tensors and anything else, as
arguments and results of modules are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Structure", "flatten", "paths", "rebuild"]


@dataclass(frozen=True)
class Structure:
    """Containers around the leaves of a nested value: the kind of container, the names in it, and what is inside. A leaf's
    structure is None.

    ``empty`` is a dict of the same kind (and default factory) without its items; it does not count in comparisons.
    """

    kind: type
    names: tuple[Any, ...]
    inside: tuple[Structure | None, ...]
    empty: Any = field(default=None, compare=False)


def flatten(value: Any) -> tuple[list[Any], Structure | None]:
    """Return the leaves of ``value`` in order, and its structure. Whatever is no container of the four kinds is a leaf."""
    if isinstance(value, tuple | list):
        return _gather(value, range(len(value)), value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # before dicts: some are both
        names = [member.name for member in dataclasses.fields(value) if member.init]
        return _gather(value, names, [getattr(value, name) for name in names])
    if isinstance(value, dict):
        empty = copy.copy(value)
        empty.clear()
        return _gather(value, value, value.values(), empty)
    return [value], None


def _gather(value: Any, names: Iterable[Any], inside: Iterable[Any], empty: Any = None) -> tuple[list[Any], Structure]:
    leaves: list[Any] = []
    structures = []
    for child in inside:
        found, structure = flatten(child)
        leaves += found
        structures.append(structure)
    return leaves, Structure(type(value), tuple(names), tuple(structures), empty)


def rebuild(structure: Structure | None, leaves: Iterator[Any]) -> Any:
    """Build the nested value of ``structure`` around ``leaves``: the inverse of ``flatten``."""
    if structure is None:
        return next(leaves)
    inside = [rebuild(child, leaves) for child in structure.inside]
    if structure.empty is not None:
        filled = copy.copy(structure.empty)
        filled.update(zip(structure.names, inside, strict=True))
        return filled
    if dataclasses.is_dataclass(structure.kind):
        return structure.kind(**dict(zip(structure.names, inside, strict=True)))
    return structure.kind(*inside) if hasattr(structure.kind, "_fields") else structure.kind(inside)


def paths(structure: Structure | None, prefix: str = "") -> Iterator[str]:
    """Yield each leaf's place as text, in order: ``[1]['mask']``."""
    if structure is None:
        yield prefix
        return
    for name, child in zip(structure.names, structure.inside, strict=True):
        dotted = dataclasses.is_dataclass(structure.kind)
        yield from paths(child, prefix + (f".{name}" if dotted else f"[{name!r}]"))
