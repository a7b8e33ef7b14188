"""Fetching along a known order: just in time, over every hop, and never at the cost of what is needed sooner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tiered.errors import TieredError
from tiered.prefetch import Plan, Touch
from tiered.requests import Request
from tiered.residency import Entry, Standing
from tiered.types import Then, Urgency, Use

if TYPE_CHECKING:
    from tiered.admission import Admission

__all__ = ["Ahead"]

MARGIN = 1.5
"""A fetch begins when this many times the seconds that it takes are left."""
LATENCY = 0.005
"""Seconds that a fetch takes at least, however small."""
PIPELINE = 4 << 20
"""Bytes under way at once that keep a link busy; less where the tier has less than 16 times as much, but always two tensors."""
SHARE = 4
"""What was fetched ahead and is not used yet takes at most one in this many bytes of a tier."""
HORIZON = 128
"""Touches to look ahead for a burst that has to be prepared for."""


class Ahead(Request):
    """A request that is done when the order has ended: whenever something changed it brings what the plan needs next.

    ``tiers`` are the names of the tiers, from the top; ``costs()`` gives the seconds per byte of each link up and down.
    ``needed`` is the position for which something is being fetched; ``hops`` are the links, from the top, that it fetches over.
    """

    def __init__(
        self, plan: Plan, tiers: Sequence[str], costs: Callable[[], Sequence[tuple[float, float]]]
    ) -> None:
        super().__init__(Urgency.PREFETCH)
        self.plan = plan
        self._since: tuple[int, float] | None = None  # where the loop computes, and since when
        self.hops = len(tiers) - 1
        self._index: dict[str | None, int] = {name: index for index, name in enumerate(tiers)} | {None: 0}
        self._reached = [0] * (len(tiers) - 1)  # by tier: all before is there, or on its way
        self._calm = [(0, 0.0)] * (len(tiers) - 1)  # by tier: up to which position, and seconds of computing, nothing is due
        self._costs = costs

    def __str__(self) -> str:
        return "fetching ahead"

    def replan(self, order: Sequence[Touch], then: Then) -> int:
        """Follow another order; how many touches had to be planned anew."""
        self._reached, self._since = [0] * len(self._reached), None
        self._calm = [(0, 0.0)] * len(self._calm)
        return self.plan.replace(order, then)

    def touched(self, asked: float, granted: float) -> None:
        """The loop asked for what it was to touch at the time ``asked``, and computes with it since ``granted``."""
        if self._since is not None:
            position, since = self._since
            self.plan.took(position, max(0.0, asked - since))
        self._since = (self.plan.cursor - 1, granted)

    def attempt(self, admission: Admission) -> bool:
        for tier in reversed(range(self.hops)):  # the lowest hop feeds those above
            self._fetch(admission, tier)
        return self.plan.over

    def _fetch(self, admission: Admission, tier: int) -> None:
        at = max(self._reached[tier], self.plan.cursor)
        while at < self.plan.until:
            entry = self._missing_at(admission, tier, at)
            if entry is not None:
                if not (self._has_room(admission, tier, entry.nbytes) and self._due(admission, tier, at)):
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

    def _missing_at(self, admission: Admission, tier: int, position: int) -> Entry | None:
        """What has to come to ``tier``, from the one below, for the touch at ``position``."""
        touch = self.plan.at(position)
        entry = admission.directory.find(touch.key)
        if entry is None or touch.use is Use.PUT or tier < self._index[touch.tier] or entry.written:
            return None
        return entry if all(copy is None for copy in entry.copies[: tier + 1]) else None

    def _has_room(self, admission: Admission, tier: int, nbytes: int) -> bool:
        """More under way than keeps the link busy brings nothing, and what waits for its use takes room from what was kept."""
        place, rising = admission.places[tier], admission.traffic.rising[tier]
        if rising.transfers >= 2 and rising.nbytes + nbytes > min(PIPELINE, place.tier.capacity // 16):
            return False
        waiting = place.bytes_of[Standing.FRESH] + rising.nbytes
        return waiting == 0 or waiting + nbytes <= place.tier.capacity // SHARE

    def _due(self, admission: Admission, tier: int, position: int) -> bool:
        """Whether the next occasion, the next touch, could be too late for this, or for something after it: one link brings it
        all, one after the other, and a burst has to be prepared for."""
        plan = self.plan
        until, seconds = self._calm[tier]
        now = plan.seconds_before(plan.cursor)
        if plan.cursor < until and now < seconds:
            return False
        costs = self._costs()
        place, rising = admission.places[tier], admission.traffic.rising[tier]
        each = sum(up for up, _ in costs[: tier + 1])
        takes = LATENCY + rising.nbytes * costs[tier][0]
        limit, spare = place.tier.capacity // SHARE, math.inf
        for at in range(position, min(position + HORIZON, plan.until)):
            entry = self._missing_at(admission, tier, at)
            if entry is None:
                continue
            takes += entry.nbytes * each
            limit -= entry.nbytes
            if place.free < entry.nbytes:
                takes += entry.nbytes * costs[tier][1]  # somebody may have to be written back first
            spare = min(spare, plan.seconds_before(at) - now - MARGIN * takes)
            if spare <= 0:
                return True
            if limit < 0:
                break
        self._calm[tier] = (plan.cursor + HORIZON // 4, now + spare)  # no need to look again before
        return False
