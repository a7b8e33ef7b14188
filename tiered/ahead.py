"""Fetching along a known order: just in time, over every hop, and never at the cost of what is needed sooner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import TieredError
from tiered.prefetch import Plan, Touch
from tiered.requests import Request
from tiered.residency import Entry, Standing
from tiered.types import Key, Urgency, Use

if TYPE_CHECKING:
    from tiered.admission import Admission

__all__ = ["Ahead", "Pace"]

MARGIN = 2.0
"""A fetch begins when this many times the seconds that it takes are left."""
LATENCY = 0.005
"""Seconds that a fetch takes at least, however small."""
SHARE = 4
"""What was fetched ahead and is not used yet takes at most one in this many bytes of a tier."""
MEMORY = 0.98
"""How much of what was measured before a touch still counts after it."""


@dataclass(slots=True)
class Pace:
    """Seconds that the loop computes per byte that it touches; what it waits for the store is not in it."""

    seconds: float = 0.0
    nbytes: float = 0.0
    since: float | None = None

    def touched(self, nbytes: int, asked: float, granted: float) -> None:
        """A tensor was asked for at the time ``asked`` and could be used from ``granted`` on."""
        if self.since is not None:
            self.seconds = MEMORY * self.seconds + max(0.0, asked - self.since)
        self.nbytes = MEMORY * self.nbytes + nbytes
        self.since = granted

    @property
    def seconds_per_byte(self) -> float:
        return self.seconds / self.nbytes if self.nbytes else 0.0


class Ahead(Request):
    """A request that is never done: whenever something changed it brings what the plan needs next.

    ``tiers`` are the names of the tiers, from the top; ``costs()`` gives the seconds per byte of each link up and down.
    ``needed`` is the position for which something is being fetched.
    """

    def __init__(
        self, plan: Plan, tiers: Sequence[str], costs: Callable[[], Sequence[tuple[float, float]]]
    ) -> None:
        super().__init__(Urgency.PREFETCH)
        self.plan, self.pace = plan, Pace()
        self._index: dict[str | None, int] = {name: index for index, name in enumerate(tiers)} | {None: 0}
        self._reached = [0] * (len(tiers) - 1)  # by tier: all before is there, or on its way
        self._costs = costs

    def __str__(self) -> str:
        return "fetching ahead"

    def replan(self, order: Sequence[Touch], sizes: Mapping[Key, int]) -> int:
        """Follow another order; how many touches had to be planned anew."""
        self._reached = [0] * len(self._reached)
        return self.plan.replace(order, sizes)

    def attempt(self, admission: Admission) -> bool:
        for tier in reversed(range(admission.bottom)):  # the lowest hop feeds those above
            self._fetch(admission, tier)
        return False

    def _fetch(self, admission: Admission, tier: int) -> None:
        at = max(self._reached[tier], self.plan.cursor)
        end = self.plan.cursor + len(self.plan)
        while at < end:
            touch = self.plan.at(at)
            entry = admission.directory.find(touch.key)
            if entry is not None and touch.use is not Use.PUT and self._missing(entry, self._index[touch.tier], tier):
                if not self._in_time(admission, tier, at, entry.nbytes):
                    break
                self.needed, self.tier = at, tier
                try:
                    admission.bring(entry, tier, self)
                except TieredError:
                    pass  # who really needs it will meet this
                else:
                    if entry.copies[tier] is None:
                        break
            at += 1
        self._reached[tier] = at

    @staticmethod
    def _missing(entry: Entry, target: int, tier: int) -> bool:
        """Whether it is to come to ``tier``, from the one below, on its way to ``target``."""
        if tier < target or entry.written:
            return False
        return all(copy is None for copy in entry.copies[: tier + 1])

    def _in_time(self, admission: Admission, tier: int, position: int, nbytes: int) -> bool:
        """Whether to begin now: the next occasion, the next touch, could be too late; and there is room for more."""
        place = admission.places[tier]
        ahead = place.bytes_of[Standing.FRESH] + admission.traffic.rising[tier]
        if ahead and ahead + nbytes > place.tier.capacity // SHARE:
            return False
        left = self.plan.bytes_until(position) * self.pace.seconds_per_byte
        costs = self._costs()
        takes = LATENCY + (admission.traffic.rising[tier] + nbytes) * costs[tier][0]
        takes += sum(nbytes * up for up, _ in costs[:tier])
        if place.free < nbytes:
            takes += nbytes * costs[tier][1]  # somebody may have to be written back first
        return left <= MARGIN * takes
