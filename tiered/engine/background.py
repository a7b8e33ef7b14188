"""What is done so that what comes finds room that is free or CLEAN: write-backs that nobody waits for yet, and a list of what a
plan gave up.

Fetching along a known order: just in time, over every hop, and never at the cost of what is needed sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tiered.engine.policy import NEVER, Plan, Touch
from tiered.engine.pool import Occupancy
from tiered.engine.requests import Request
from tiered.engine.residency import Copy, Entry, Standing, State
from tiered.errors import TieredError
from tiered.interfaces import EvictionPolicy, Planned
from tiered.types import Key, Then, Urgency, Use

if TYPE_CHECKING:
    from tiered.engine.scheduler import Admission

__all__ = ["Ahead", "Background", "room_for"]

LOOKED_AT = 256
"""Of those that a plan gave up; with more of them, small ones, looking at all would take longer than a lease."""


class Background:
    """``reserve``: the share of each tier that is kept free or CLEAN while nothing is known of what comes. Along a known order
    only what has to leave is written back: what a plan gave up, at once.

    ``unsettled``: something became DIRTY, or room shrank, since it last looked.
    """

    def __init__(self, reserve: float, tiers: int) -> None:
        self.reserve, self.unsettled = reserve, False
        self._spent: dict[tuple[int, Key], Copy] = {}  # DIRTY ones that a plan gave up, by tier
        self._gone: list[dict[Key, Copy]] = [{} for _ in range(tiers)]  # and CLEAN ones, the last that came to it last

    def changed(self, admission: Admission, copy: Copy) -> None:
        """Something about ``copy`` changed, or about what is planned with it."""
        self.unsettled |= copy.dirty
        ahead = admission.ahead
        if ahead is None or not ahead.plans(copy.tier):
            return
        if self._is_spent(admission, copy):
            self._spent[copy.tier, copy.key] = copy
        if copy.standing is Standing.CLEAN and copy.state is not State.EMPTY and ahead.may_go(copy.key, copy.tier):
            self._gone[copy.tier][copy.key] = copy
        else:
            self._gone[copy.tier].pop(copy.key, None)

    def forget(self, copy: Copy) -> None:
        """It will have another key."""
        self._spent.pop((copy.tier, copy.key), None)
        self._gone[copy.tier].pop(copy.key, None)

    def follow(self, admission: Admission) -> None:
        """Another plan, or none."""
        self._spent.clear()
        for place, gone in zip(admission.places, self._gone, strict=True):
            gone.clear()
            for copy in place.copies.values() if not place.bottom else ():
                self.changed(admission, copy)

    def gone(self, tier: int) -> list[Copy]:
        """CLEAN copies that a plan gave up: they cost nothing, and no wait. The last that came to it first, ``LOOKED_AT`` at
        most."""
        return list(islice(reversed(self._gone[tier].values()), LOOKED_AT))

    def due(self, admission: Admission) -> bool:
        """Whether there is something to do; where not, only another change can bring it."""
        tiers = range(admission.bottom)
        self.unsettled = bool(self._spent) or any(
            admission.places[tier].bytes_of[Standing.DIRTY] and self._shortage(admission, tier) > 0 for tier in tiers
        )
        return self.unsettled

    def start(self, admission: Admission) -> None:
        """Admit them."""
        if not self.unsettled:
            return
        self.unsettled = False
        background = Request(Urgency.WRITEBACK)
        admission.number(background)
        spent, self._spent = self._spent, {}
        for found, copy in spent.items():
            if self._is_spent(admission, copy) and not self._admit(admission, copy, background):
                self._spent[found] = copy  # no room below yet
        for tier in range(admission.bottom):
            place = admission.places[tier]
            shortage = self._shortage(admission, tier)
            if shortage <= 0 or not place.bytes_of[Standing.DIRTY]:
                continue
            for copy in self._next(place, shortage):
                if not self._admit(admission, copy, background):
                    break

    def _admit(self, admission: Admission, copy: Copy, background: Request) -> bool:
        try:
            return admission.admit_writeback(admission.directory.entry(copy.key), copy.tier, background)
        except TieredError as error:  # a request that needs the room will meet it
            copy.failure = error
            return True

    def _shortage(self, admission: Admission, tier: int) -> int:
        """Bytes missing to the reserve of free or clean room in ``tier``, counting what write-backs will bring."""
        place = admission.places[tier]
        if admission.ahead is not None:
            return 0  # it knows what will have to leave
        return int(place.tier.capacity * self.reserve) - place.ready

    def _next(self, place: Occupancy, nbytes: int) -> list[Copy]:
        """The dirty ones among the policy's first victims that free ``nbytes`` together, and some more for the next time."""
        batch = max(nbytes, int(place.tier.capacity * self.reserve) // 16)
        return place.first(batch, lambda copy: copy.failure is None and copy.standing is Standing.DIRTY)

    def _is_spent(self, admission: Admission, copy: Copy) -> bool:
        """Whether it should be written behind; not while a fill from it is under way, or was made for the next use."""
        ahead = admission.ahead
        dirty = copy.state is State.DIRTY and copy.standing is Standing.DIRTY and copy.failure is None
        if not dirty or ahead is None or not ahead.is_spent(copy.key, copy.tier):
            return False
        entry = admission.directory.find(copy.key)
        return entry is not None and all(upper is None for upper in entry.copies[: copy.tier])


MARGIN = 1.5
"""A fetch begins when this many times the seconds that it takes are left."""
LATENCY = 0.005
"""Seconds that a fetch takes at least, however small."""
ROOM = 64 << 20
"""Bytes that keep a link busy both ways: what arrives, what waits for its use, what is written behind."""
SHARE_OF_TIER, SHARE_OF_MISSING = 8, 64
"""That room is at most one in so many bytes of the tier, for so much less is kept; and one in so many of what does not fit, for
where little has to move there is little to hide."""
MOST = 4
"""What was fetched ahead and is not used yet takes at most one in this many bytes of a tier. What is larger comes on demand: it
would lie where nothing else as large has room beside it."""
HORIZON = 128
"""Touches to look ahead for a burst that has to be prepared for."""


def room_for(capacity: int, missing: int, largest: int) -> int:
    """Bytes of a tier that a plan should leave to what comes and goes, where ``missing`` do not fit and the largest tensor has
    ``largest``."""
    return min(max(min(ROOM, capacity // SHARE_OF_TIER, missing // SHARE_OF_MISSING), largest), capacity // MOST)


class Ahead(Request):
    """A request that is done when the order has ended: whenever something changed it brings what the plan needs next.

    ``tiers`` are the names of the tiers, from the top; ``costs()`` gives the seconds per byte of each link up and down.
    ``needed`` is the position for which something is being fetched. ``rooms`` are the bytes that it may take of each tier, from
    the top, and so the tiers that it fetches to; ``choose`` makes the policies for a plan, ``planned`` are those of them that
    know who will be gone.
    """

    def __init__(self, plan: Plan, tiers: Sequence[str], costs: Callable[[], Sequence[tuple[float, float]]]) -> None:
        super().__init__(Urgency.PREFETCH)
        self.plan = plan
        self._since: tuple[int, float] | None = None  # where the loop computes, and since when
        self.rooms: Sequence[int] = ()
        self.choose: Callable[[Plan], Sequence[EvictionPolicy]] = lambda plan: ()
        self.planned: Sequence[Planned | None] = ()
        self._index: dict[str | None, int] = {name: index for index, name in enumerate(tiers)} | {None: 0}
        self._reached = [0] * (len(tiers) - 1)  # by tier: all before is there, or on its way
        self._calm = [(0, 0.0)] * (len(tiers) - 1)  # by tier: up to which position, and seconds of computing, nothing is due
        self._vain = [(-1, -1, -1)] * (len(tiers) - 1)  # by tier: what found no room, and when, as changes there count time
        self._costs = costs

    def __str__(self) -> str:
        return "fetching ahead"

    def replan(self, order: Sequence[Touch], then: Then) -> int:
        """Follow another order; how many touches had to be planned anew."""
        self._reached, self._since = [0] * len(self._reached), None
        self._calm = [(0, 0.0)] * len(self._calm)
        self._vain = [(-1, -1, -1)] * len(self._vain)
        return self.plan.replace(order, then)

    def touched(self, asked: float, granted: float) -> None:
        """The loop asked for what it was to touch at the time ``asked``, and computes with it since ``granted``."""
        if self._since is not None:
            position, since = self._since
            self.plan.took(position, max(0.0, asked - since))
        self._since = (self.plan.cursor - 1, granted)

    def follow(self, policies: Sequence[EvictionPolicy]) -> None:
        """``policies`` choose who leaves, from the top."""
        self.planned = [policy if isinstance(policy, Planned) and policy.plans else None for policy in policies]

    def policies(self) -> Sequence[EvictionPolicy]:
        """New ones, that have seen nothing yet."""
        return self.choose(self.plan)

    def due(self, admission: Admission) -> bool:
        """Whether the engine would find something to bring now, or the end."""
        if self.plan.over:
            return True
        for tier in range(len(self.rooms)):  # noqa: SIM110 - a generator takes longer, and this is on the path of every lease
            if self._next(admission, tier) is not None:
                return True
        return False

    def attempt(self, admission: Admission) -> bool:
        for tier in reversed(range(len(self.rooms))):  # the lowest hop feeds those above
            self._fetch(admission, tier)
        return self.plan.over

    def _fetch(self, admission: Admission, tier: int) -> None:
        while (entry := self._next(admission, tier)) is not None:
            at = self._reached[tier]
            self.needed, self.tier, self.lacks = at, tier, ()
            try:
                admission.bring(entry, tier, self)
            except TieredError:
                pass  # who really needs it will meet this
            else:
                if entry.copies[tier] is None:
                    if tier in self.lacks:
                        self._vain[tier] = (at, self.plan.cursor, admission.places[tier].changes)
                    return
            self._reached[tier] = at + 1

    def _next(self, admission: Admission, tier: int) -> Entry | None:
        """What is to be brought to ``tier`` now, for the touch that ``_reached`` says; None: nothing yet."""
        found, at = None, max(self._reached[tier], self.plan.cursor)
        while at < self.plan.until:
            entry = self._missing_at(admission, tier, at)
            if entry is not None and entry.nbytes <= admission.places[tier].tier.capacity // MOST:  # larger ones on demand
                if self._has_room(admission, tier, entry.nbytes) and self._due(admission, tier, at):
                    found = entry if self._vain[tier] != (at, self.plan.cursor, admission.places[tier].changes) else None
                break
            at += 1
        self._reached[tier] = at
        return found

    def _missing_at(self, admission: Admission, tier: int, position: int) -> Entry | None:
        """What has to come to ``tier``, from the one below, for the touch at ``position``."""
        touch = self.plan.at(position)
        entry = admission.directory.find(touch.key)
        if entry is None:
            return None
        for copy in entry.copies[: tier + 1]:
            if copy is not None:
                return None
        return None if touch.use is Use.PUT or tier < self._index[touch.tier] or entry.written else entry

    def plans(self, tier: int) -> bool:
        """Whether what is fetched ahead to ``tier`` takes the room of those that a plan gives up there, without a search. On
        demand a search finds better ones."""
        return tier < len(self.rooms) and self.planned[tier] is not None

    def may_go(self, key: Key, tier: int) -> bool:
        """Whether fetching ahead may take the room of ``key`` in ``tier``, as far as the plan there tells."""
        policy = self.planned[tier] if tier < len(self.planned) else None
        return policy is None or policy.gives_up(key) or self.plan.next_use(key) == NEVER

    def is_spent(self, key: Key, tier: int) -> bool:
        """Whether ``key`` leaves ``tier`` before it is needed again, by a plan, and with bytes that are needed then."""
        if tier >= len(self.rooms) or (policy := self.planned[tier]) is None or not policy.gives_up(key):
            return False
        needed = self.plan.next_use(key)
        return needed == NEVER or self.plan.at(int(needed)).use is not Use.PUT

    def _has_room(self, admission: Admission, tier: int, nbytes: int) -> bool:
        """More under way than keeps the link busy brings nothing, and what waits for its use takes room from what was kept."""
        place, rising, room = admission.places[tier], admission.traffic.rising[tier], self.rooms[tier]
        if rising.transfers >= 2 and rising.nbytes + nbytes > room // 2:
            return False
        return place.bytes_of[Standing.FRESH] + rising.nbytes + nbytes <= max(room, place.tier.capacity // MOST)

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
        limit, spare = place.tier.capacity // MOST, math.inf
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
