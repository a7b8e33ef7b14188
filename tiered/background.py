"""What is done so that what comes finds room that is free or CLEAN: write-backs that nobody waits for yet, and a list of what a
plan gave up."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tiered.errors import TieredError
from tiered.occupancy import Occupancy
from tiered.requests import Request
from tiered.residency import Copy, Standing, State
from tiered.types import Key, Urgency

if TYPE_CHECKING:
    from tiered.admission import Admission

__all__ = ["Background"]

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
