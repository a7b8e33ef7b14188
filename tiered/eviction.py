"""Who leaves a tier when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from tiered.types import Candidate, Key

__all__ = ["LRU"]


class LRU:
    """Least recently used first; but all that is clean before anything that is dirty, since that costs nothing and no wait.

    A candidate that was never touched comes last of its kind.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # oldest first

    def touched(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def forgotten(self, key: Key) -> None:
        self._order.pop(key, None)

    def victims(self, nbytes: int, among: Mapping[Key, Candidate]) -> list[Key] | None:
        """The first of ``among`` that together have ``nbytes``; None when all of them are too little."""
        chosen: list[Key] = []
        for dirty in (False, True):
            for keys in (self._order, (key for key in among if key not in self._order)):
                for key in keys:
                    if nbytes <= 0:
                        return chosen
                    candidate = among.get(key)
                    if candidate is not None and candidate.dirty is dirty:
                        chosen.append(key)
                        nbytes -= candidate.nbytes
        return chosen if nbytes <= 0 else None
