"""Who leaves a tier when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tiered.types import Candidate, Key

__all__ = ["LRU"]


class LRU:
    """Least recently used first. A candidate that was never touched is older than all others."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # oldest first

    def touched(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def forgotten(self, key: Key) -> None:
        self._order.pop(key, None)

    def victims(self, nbytes: int, among: Sequence[Candidate]) -> list[Key] | None:
        """The oldest of ``among`` that together have ``nbytes``, oldest first; None when all of them are too little."""
        sizes = {candidate.key: candidate.nbytes for candidate in among}
        if sum(sizes.values()) < nbytes:
            return None
        chosen: list[Key] = []
        for keys in ((key for key in sizes if key not in self._order), self._order):
            for key in keys:
                if nbytes <= 0:
                    return chosen
                if key in sizes:
                    chosen.append(key)
                    nbytes -= sizes[key]
        return chosen
