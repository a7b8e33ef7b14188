"""From a trace to a plan: when is each tensor needed next, and what has to be brought by when. Pure; no clock, no I/O.

The order that is followed is a cycle, as a training step is, and positions count on for ever: position p is touch ``p % len``.
Or it ends after one round, and from there on nothing is needed that is known.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tiered.errors import MisuseError
from tiered.types import Key, Then, Use

__all__ = ["NEVER", "Plan", "Record", "Touch", "touch_of"]

NEVER = math.inf
"""The next use of what is not in the order, or not in the rest of one that ends."""


class Touch(NamedTuple):
    """One tensor is leased, or put. ``tier`` is the name of the tier, None for the top one; ``nbytes`` the tensor's, 0 where it
    is not known."""

    key: Key
    tier: str | None = None
    use: Use = Use.READ
    nbytes: int = 0


class Record(NamedTuple):
    """What is touched is written down here, up to ``most`` touches, as long as ``wanted()`` is something."""

    touches: list[Touch]
    most: float
    wanted: Callable[[], object]


class Plan:
    """Where in its order a loop is, and when it comes to what.

    A loop may stray: leave touches out, put others in. Where it goes on is told from two touches in a row that fit. How long
    it computes after each touch is learnt from round to round.

    ``end`` is the position from which on nothing is known: infinite in a cycle.
    """

    def __init__(self, order: Iterable[Touch], then: Then = "again") -> None:
        self.cursor = 0
        self.end = math.inf
        self._order: list[Touch] = []
        self._uses: dict[Key, list[int]] = {}
        self._next: dict[Key, float] = {}  # as last looked up; it stays until the cursor has passed it
        self._took: list[float] = []  # seconds of computing after each touch of the cycle
        self._before: list[float] = [0.0]  # the same, summed up to each touch, and over all
        self._elsewhere: int | None = None  # where the loop may be instead
        self.replace(order, then)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def over(self) -> bool:
        """Whether all touches have been made."""
        return self.cursor >= self.end

    @property
    def until(self) -> int:
        """Where to stop looking ahead: a round on from the cursor, or at the end."""
        return int(min(self.cursor + len(self._order), self.end))

    def at(self, position: int) -> Touch:
        return self._order[position % len(self._order)]

    def replace(self, order: Iterable[Touch], then: Then = "again") -> int:
        """Follow another order; how many touches had to be planned anew (the common beginning has not)."""
        fresh = list(order)
        pairs = zip(self._order, fresh, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][:3] == pair[1][:3], pairs))
        for key in {touch.key for touch in self._order[common:]}:
            uses = self._uses[key]
            del uses[bisect_left(uses, common) :]
            if not uses:
                del self._uses[key]
        for position, touch in enumerate(fresh[common:], common):
            self._uses.setdefault(touch.key, []).append(position)
        self._took[common:] = [0.0] * (len(fresh) - common)
        self._sum_up()
        if self._order:
            # As far into the cycle as before, where the beginning is the same; else at its beginning.
            into = self.cursor % len(self._order)
            self.cursor = into if into <= common and into < len(fresh) else 0
        self._order, self._elsewhere = fresh, None
        self._next.clear()
        self.end = len(fresh) if then == "end" else math.inf
        return len(fresh) - common

    def last_use(self, key: Key) -> int | None:
        """Where in the cycle ``key`` was touched last; None: not in the order, or not yet in one that ends."""
        uses = self._uses.get(key)
        if not uses:
            return None
        before = bisect_left(uses, self.cursor if self.end < math.inf else self.cursor % len(self._order)) - 1
        return uses[before] if before >= 0 or self.end == math.inf else None

    def next_use(self, key: Key) -> float:
        """Position at which ``key`` is touched next, the cursor's own included; ``NEVER`` where there is none."""
        known = self._next.get(key, -1.0)
        if known < self.cursor:
            uses = self._uses.get(key)
            known = self._next[key] = self._following(uses, self.cursor) if uses else NEVER
        return known

    def seconds_until(self, position: int) -> float:
        """What the loop computes from the touch at the cursor up to the one at ``position``, as far as that is known."""
        return self.seconds_before(position) - self.seconds_before(self.cursor)

    def seconds_before(self, position: int) -> float:
        """What it computes from position 0 up to the touch at ``position``."""
        cycles, into = divmod(position, len(self._order))
        return cycles * self._before[-1] + self._before[into]

    def took(self, position: int, seconds: float) -> None:
        """After the touch at ``position`` it computed this long before it asked for the next one."""
        into = position % len(self._order)
        known = self._took[into]
        self._took[into] = (known + seconds) / 2 if known else seconds
        if into == len(self._order) - 1:
            self._sum_up()

    def happened(self, key: Key) -> None:
        """``key`` was touched."""
        uses = self._uses.get(key)
        if not uses or self.over:
            return
        if self.at(self.cursor).key == key:
            self.cursor, self._elsewhere = self.cursor + 1, None
        elif self._elsewhere is not None and self.at(self._elsewhere).key == key:
            self.cursor, self._elsewhere = self._elsewhere + 1, None
        else:
            after = self._following(uses, self.cursor) + 1
            self._elsewhere = int(after) if after < self.end else None  # at the end no second touch could tell

    def _following(self, uses: Sequence[int], position: int) -> float:
        cycle, into = divmod(position, len(self._order))
        at = bisect_left(uses, into)
        found = cycle * len(self._order) + (uses[at] if at < len(uses) else uses[0] + len(self._order))
        return found if found < self.end else NEVER

    def _sum_up(self) -> None:
        self._before = [0.0, *itertools.accumulate(self._took)]


def touch_of(touch: object) -> Touch:
    """What an order may hold: a touch, or a key that is read. Raises MisuseError."""
    if isinstance(touch, str):
        return Touch(touch)
    if not (
        isinstance(touch, Touch)
        and isinstance(touch.key, str)
        and isinstance(touch.use, Use)
        and type(touch.nbytes) is int
        and touch.nbytes >= 0
    ):
        raise MisuseError(f"an order is what trace() wrote down, or a list of keys; {touch!r} is neither a touch nor a key")
    return touch
