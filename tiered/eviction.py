"""Who leaves a tier when room is needed."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from tiered.types import Candidate, Key

__all__ = ["LRU", "NextUse"]

_Rank = tuple[bool, float]
"""Given up or not, and the position of the next use; the largest leaves first."""


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
        if nbytes <= 0:
            return []
        chosen: list[Key] = []
        dirty: list[tuple[Key, int]] = []
        for key in chain(self._order, (key for key in among if key not in self._order)):
            candidate = among.get(key)
            if candidate is None:
                continue
            if candidate.dirty:
                dirty.append((key, candidate.nbytes))
                continue
            chosen.append(key)
            nbytes -= candidate.nbytes
            if nbytes <= 0:
                return chosen
        for key, size in dirty:
            chosen.append(key)
            nbytes -= size
            if nbytes <= 0:
                return chosen
        return None


class NextUse:
    """Furthest next use first (Belady 1966, "A study of replacement algorithms for a virtual-storage computer").

    ``next_use(key)`` is the position in a known order at which a tensor is needed next, infinite for never, and is asked
    whenever the tensor is touched; ``now()`` is the position that is reached. A dirty candidate counts as needed sooner by
    ``price`` positions, for it costs a write. A candidate that was never touched comes last.

    ``given_up(key)``, asked at the same time, is whether a plan does without it until then: such candidates leave before all
    others.
    """

    def __init__(
        self,
        next_use: Callable[[Key], float],
        now: Callable[[], float],
        *,
        price: float = 0.0,
        given_up: Callable[[Key], bool] | None = None,
    ) -> None:
        self._next_use, self._now, self._price, self._given_up = next_use, now, price, given_up
        self.plans = given_up is not None
        self._known: dict[Key, _Rank] = {}
        self._order: list[tuple[_Rank, Key]] = []  # who leaves last first

    def touched(self, key: Key) -> None:
        self.forgotten(key)
        self._known[key] = self._given_up is not None and self._given_up(key), self._next_use(key)
        insort(self._order, (self._known[key], key))

    def forgotten(self, key: Key) -> None:
        if key in self._known:
            del self._order[bisect_left(self._order, (self._known.pop(key), key))]

    def gives_up(self, key: Key) -> bool:
        """Whether it was given up when it was touched last."""
        return key in self._known and self._known[key][0]

    def victims(self, nbytes: int, among: Mapping[Key, Candidate]) -> list[Key] | None:
        """The first of ``among`` that together have ``nbytes``; None when all of them are too little."""
        while self._order and self._order[0][0] < (False, self._now()):  # they were not used when they should have been
            self.touched(self._order[0][1])
        if self._price:
            kinds = (self._ranked(among, False, 0.0), self._ranked(among, True, self._price))
            known: Iterable[tuple[_Rank, Key]] = heapq.merge(*kinds, reverse=True)
        else:
            known = self._ranked(among, None, 0.0)
        chosen: list[Key] = []
        for keys in ((key for _, key in known), (key for key in among if key not in self._known)):
            for key in keys:
                if nbytes <= 0:
                    return chosen
                chosen.append(key)
                nbytes -= among[key].nbytes
        return chosen if nbytes <= 0 else None

    def _ranked(self, among: Mapping[Key, Candidate], dirty: bool | None, price: float) -> Iterator[tuple[_Rank, Key]]:
        """Candidates of one kind, or of both, the furthest first."""
        for (given_up, position), key in reversed(self._order):
            candidate = among.get(key)
            if candidate is not None and (dirty is None or candidate.dirty is dirty):
                yield (given_up, position - price), key
