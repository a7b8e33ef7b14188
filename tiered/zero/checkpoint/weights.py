"""Say which weights something was computed with, so that what is kept beside a model opens with these weights only.

Weights are all parameters and buffers. Each has a digest of its values. What is in a store has, besides, what the store's last
commit says of it (``TieredStore.committed``): where that is the same, so are the values, and nothing is read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import msgspec
import torch
from torch import nn

from tiered.errors import MisuseError
from tiered.store import TieredStore
from tiered.tensors.digests import digest_of
from tiered.zero.paging.pager import Pager, placements_of
from tiered.zero.paging.unit import Unit
from tiered.zero.paging.units import Placement

__all__ = ["Weight", "Weights"]


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter or buffer: a digest of its type, shape and values, and what commits say of it. Each may be empty: values
    that were not read, and weights that no commit has as they are."""

    values: str
    committed: str

    def may_be(self, other: Weight) -> bool:
        """Return whether both are known to be the same weight."""
        return bool(self.committed and self.committed == other.committed) or bool(self.values and self.values == other.values)


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of a model at one moment, by name."""

    named: dict[str, Weight]

    @classmethod
    def noted(cls, model: nn.Module) -> Weights:
        """Note the weights of ``model`` now. Reads those that no commit has as they are, and applies updates that are pending.

        Raises MisuseError for weights on the meta device.
        """
        return cls({name: _read(one) if not one.committed else Weight("", one.committed) for name, one in _weights(model)})

    @classmethod
    def whole(cls, model: nn.Module, known: Weights) -> Weights:
        """Return the weights of ``model`` with all values. Reads what is not known from ``known``: once per commit of the
        weights where they are in a store. Raises as ``noted``."""
        return cls({name: _whole(one, known.named.get(name)) for name, one in _weights(model)})

    def opened(self, model: nn.Module) -> Weights | str:
        """Return the weights of ``model``, with all values, where they are these; otherwise the name of the first that is
        another, or is missing. Raises as ``noted``."""
        found: dict[str, Weight] = {}
        for name, one in _weights(model):
            kept = self.named.get(name)
            if kept is None:
                return name
            found[name] = _whole(one, kept)
            if not kept.may_be(found[name]):
                return name
        return next((name for name in self.named if name not in found), Weights(found))

    def other(self, now: Weights) -> str | None:
        """Return the name of the first weight that ``now`` has not as it is here; None where both are the same."""
        for name, one in self.named.items():
            if name not in now.named or not one.may_be(now.named[name]):
                return name
        return next((name for name in now.named if name not in self.named), None)


class _Weighed:
    """A weight of a model, and where its values are: ``tensor``, or the ``placements`` of a paged parameter."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        paged = hasattr(tensor, "_tiered")
        self.placements: list[tuple[Pager, Unit, Placement]] = placements_of(tensor) if paged else []
        self.committed = ""

    def pieces(self) -> Generator[torch.Tensor, None, None]:
        """Yield the values, from the first to the last, a slice at a time where a parameter has slices."""
        for pager, unit, placement in self.placements:
            pager.start()
            pager.take(unit)
            try:
                yield placement.parameter.detach()
            finally:
                unit.drop()
        if not self.placements:
            table: Any = getattr(self.tensor, "table", None)  # of a TieredEmbedding, whose weight has no memory
            if table is None:
                yield self.tensor.detach()
            else:
                yield from (rows for _, rows in table.blocks())


def _weights(model: nn.Module) -> Iterator[tuple[str, _Weighed]]:
    """Yield the weights of ``model``, with what commits say of those that are in a store."""
    said: dict[tuple[TieredStore, str], str | None] = {}
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name not in _moving(model))
    for name, tensor in (*model.named_parameters(), *buffers):
        one = _Weighed(name, tensor)
        marks: list[str | None] = []
        for pager, unit, _ in one.placements:
            if unit.upcoming_keys() != [unit.used_key] or pager.partition.shares > 1:
                marks.append(None)  # the values are others than the store's, or all ranks have to read them together
                continue
            where = pager.store, unit.used_key
            if where not in said:
                said[where] = pager.store.committed([unit.used_key]).get(unit.used_key)
            marks.append(said[where])
        if marks and None not in marks:
            one.committed = " ".join(dict.fromkeys(mark for mark in marks if mark))
        yield name, one


def _moving(model: nn.Module) -> set[str]:
    """Return the names of buffers that forwards change, and that follow from the configuration and the length of the context:
    the frequencies of rotary embeddings that are scaled with it."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if any(kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope"))
        for name in module._non_persistent_buffers_set
    }


def _read(one: _Weighed) -> Weight:
    if one.tensor.is_meta:
        raise MisuseError(f"weight {one.name!r} is on the meta device, and nothing tells its values: load the model whole")
    with closing(one.pieces()) as pieces:
        return Weight(digest_of(one.tensor, pieces), one.committed)


def _whole(one: _Weighed, known: Weight | None) -> Weight:
    if known is not None and known.values and one.committed and known.committed == one.committed:
        return known
    return _read(one)
