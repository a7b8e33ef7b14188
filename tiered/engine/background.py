"""Work that nobody waits for: write-behind, so that room is there when it is needed, and read-ahead along a known order.

Both run under the engine's lock and use the scheduler. Read-ahead is just in time, over every hop, and never at the cost of
what is needed sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tiered.engine.policy import FollowedOrder, Touch
from tiered.engine.pool import Pool
from tiered.engine.residency import Copy, Entry, Evictability
from tiered.engine.scheduler import Scheduler
from tiered.engine.state import Ticket
from tiered.errors import TieredError
from tiered.types import Then, Urgency, Use

__all__ = ["ReadAhead", "WriteBehind"]

_DIRTY, _FRESH, _PUT = Evictability.DIRTY, Evictability.FRESH, Use.PUT  # see residency

MARGIN = 1.5
"""A fetch begins when this many times the seconds that it takes are left."""
LATENCY = 0.005
"""Seconds that a fetch takes at least, however small."""
MOST = 4
"""Tensors that were fetched ahead and are not used yet take at most one in this many bytes of a tier. Larger tensors come on
demand: nothing else as large would find room beside them."""
HORIZON = 128
"""Touches to look ahead for a burst that has to be prepared for."""


class WriteBehind:
    """Writes back DIRTY copies before their room is needed.

    ``reserve`` is the share of each tier that is kept free or CLEAN while no order is known. Along a known order only what has
    to leave is written back: what the plan dropped, at once.
    """

    def __init__(self, scheduler: Scheduler, reserve: float) -> None:
        self._scheduler, self._state, self._reserve = scheduler, scheduler.state, reserve
        self._ticket: Ticket | None = None

    @property
    def due(self) -> bool:
        """Whether there is something to do; where not, only another change can bring it."""
        state = self._state
        if state.writeback_due:
            for pool in state.pools:
                if pool.behind or (pool.bytes_of[_DIRTY] and not pool.bottom and self._shortage(pool) > 0):
                    return True
            state.writeback_due = False
        return False

    def start(self) -> None:
        """Admit the write-backs that are due; called where the state says that there may be some."""
        state = self._state
        state.writeback_due = False
        self._ticket = None
        for pool in state.pools:
            if not pool.behind:
                continue
            behind, pool.behind = pool.behind, {}
            for key, copy in behind.items():
                if state.writes_behind(copy) and not self._admit(copy):
                    pool.behind[key] = copy  # no room below yet
        for pool in state.pools[: state.bottom]:
            if not pool.bytes_of[_DIRTY] or (shortage := self._shortage(pool)) <= 0:
                continue
            for copy in self._next(pool, shortage):
                if not self._admit(copy):
                    break

    def _admit(self, copy: Copy) -> bool:
        if self._ticket is None:  # one for all of a round
            self._ticket = Ticket(Urgency.WRITEBACK)
            self._ticket.sequence = next(self._state.numbers)
        try:
            return self._scheduler.admit_writeback(self._state.directory.entry(copy.key), copy.tier, self._ticket)
        except TieredError as error:  # a request that needs the room will meet the error
            copy.failure = error
            return True

    def _shortage(self, pool: Pool) -> int:
        """Return the bytes missing to the reserve of free or clean room in ``pool``, counting what write-backs will bring."""
        if self._state.order is not None:
            return 0  # the plan says what will have to leave
        return int(pool.tier.capacity * self._reserve) - pool.ready

    def _next(self, pool: Pool, nbytes: int) -> list[Copy]:
        """Return the dirty ones among the policy's first victims that free ``nbytes`` together, and some more for next time."""
        batch = max(nbytes, int(pool.tier.capacity * self._reserve) // 16)
        return pool.first(batch, lambda copy: copy.failure is None and copy.evictability is _DIRTY)


class ReadAhead(Ticket):
    """Fetches what the plan of ``order`` needs next: a request that is done when the order has ended.

    ``costs()`` gives the seconds per byte of each link, up and down.
    """

    def __init__(
        self, scheduler: Scheduler, order: FollowedOrder, costs: Callable[[], Sequence[tuple[float, float]]]
    ) -> None:
        super().__init__(Urgency.PREFETCH)
        self.order = order
        self._scheduler, self._state = scheduler, scheduler.state
        self._since: tuple[int, float, float] | None = None  # where the loop computes, since when, and seconds before that
        self._index: dict[str | None, int] = {pool.tier.name: index for index, pool in enumerate(self._state.pools)}
        self._index[None] = 0
        hops = len(self._state.pools) - 1
        self._reached = [0] * hops  # by tier: all before is there, or on its way
        self._calm = [(0, 0.0)] * hops  # by tier: up to which position, and seconds of computing, nothing is due
        self._vain = [(-1, -1, -1)] * hops  # by tier: what found no room, and when, as changes there count time
        self._costs = costs
        self.link_is_busy = False
        """Whether a fetch that is due waits for the link to take those before it."""
        self.paused = False
        """Fetch nothing before the next touch: the loop has had its tensors moved down."""

    def __str__(self) -> str:
        return "fetching ahead"

    def replan(self, touches: Sequence[Touch], then: Then) -> int:
        """Follow other touches; return how many had to be planned anew."""
        self._reached, self._since = [0] * len(self._reached), None
        self._calm = [(0, 0.0)] * len(self._calm)
        self._vain = [(-1, -1, -1)] * len(self._vain)
        return self.order.plan.replace(touches, then)

    def touched(self, asked: float, granted: float) -> None:
        """Learn that the loop asked for its next touch at the time ``asked``, and computes with it since ``granted``."""
        plan, self.paused = self.order.plan, False
        if self._since is not None:
            position, since, before = self._since
            before += max(0.0, asked - since)
            if position == plan.cursor - 1:  # a touch that is not in the order
                self._since = position, granted, before
                return
            plan.took(position, before)
        self._since = plan.cursor - 1, granted, 0.0

    def due(self) -> bool:
        """Whether the engine would find something to bring now, or the end."""
        plan = self.order.plan
        if plan.cursor >= plan.end:
            return True
        if self.paused:
            return False
        for tier in range(len(self.order.rooms)):  # noqa: SIM110 - a generator takes longer, and this is on the path of a lease
            if self._next(tier) is not None:
                return True
        return False

    def attempt(self) -> bool:
        """Admit the fetches that are due; return whether the order has ended."""
        self.link_is_busy = False
        for tier in reversed(range(0 if self.paused else len(self.order.rooms))):  # the lowest hop feeds those above
            self._fetch(tier)
        return self.order.plan.over

    def _fetch(self, tier: int) -> None:
        while (entry := self._next(tier)) is not None:
            at = self._reached[tier]
            self.needed_at, self.tier, self.full_tiers = at, tier, ()
            try:
                self._scheduler.bring(entry, tier, self)
            except TieredError:
                pass  # a request that really needs the tensor will meet the error
            else:
                if entry.copies[tier] is None:
                    if tier in self.full_tiers:
                        self._vain[tier] = (at, self.order.plan.cursor, self._state.pools[tier].changes)
                    else:
                        self.link_is_busy = True
                    return
            self._reached[tier] = at + 1

    def _next(self, tier: int) -> Entry | None:
        """Return what to bring to ``tier`` now, for the touch that ``_reached`` says; None: nothing yet.

        That is the first tensor ahead which has to come from the tier below, once the next occasion, the next touch, could be
        too late for it or for one after it: one link brings them all, one after the other, and a burst has to be prepared for.
        """
        plan, pool, inbound = self.order.plan, self._state.pools[tier], self._state.transfers.inbound[tier]
        named, place, largest = self._state.directory.named, self._index, pool.tier.capacity // MOST
        touches, length, cursor = plan.touches, len(plan.touches), plan.cursor
        found: Entry | None = None
        at, until = max(self._reached[tier], cursor), min(cursor + length, plan.end)
        while at < until:
            touch = touches[at % length]
            entry = named(touch.key)
            if entry is not None:
                for copy in entry.copies[: tier + 1]:
                    if copy is not None:
                        entry = None
                        break
            if entry is None or entry.writers or touch.use is _PUT or tier < place[touch.tier]:
                at += 1
                continue
            if found is None:
                if entry.nbytes > largest:  # larger ones on demand
                    at += 1
                    continue
                self._reached[tier] = at
                if self._vain[tier] == (at, cursor, pool.changes):
                    return None
                # One more fetch than keeps the link busy does not help, and takes room from what is kept.
                coming, room = inbound.nbytes + entry.nbytes, self.order.rooms[tier]
                if (inbound.transfers >= 2 and coming > room // 2) or pool.bytes_of[_FRESH] + coming > max(room, largest):
                    return None
                calm, seconds = self._calm[tier]
                now = plan.seconds_before(cursor)
                if cursor < calm and now < seconds:
                    return None
                found, until, sums = entry, min(at + HORIZON, until), plan.sums
                costs, each = self._costs(), 0.0
                for up, _ in costs[: tier + 1]:
                    each += up
                takes, down = LATENCY + inbound.nbytes * costs[tier][0], costs[tier][1]
                left, spare, free = largest, math.inf, pool.free
            takes += entry.nbytes * each
            left -= entry.nbytes
            if free < entry.nbytes:
                takes += entry.nbytes * down  # a copy may have to be written back first
            spare = min(spare, at // length * sums[-1] + sums[at % length] - now - MARGIN * takes)
            if spare <= 0:
                return found
            if left < 0:
                break
            at += 1
        if found is None:
            self._reached[tier] = at
        else:
            self._calm[tier] = (cursor + HORIZON // 4, now + spare)  # no need to look again before
        return None
