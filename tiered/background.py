"""Write-backs that nobody waits for yet, so that what comes finds room that is free or CLEAN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.errors import TieredError
from tiered.occupancy import Occupancy
from tiered.requests import Request
from tiered.residency import Copy, Standing, State
from tiered.types import Key, Urgency

if TYPE_CHECKING:
    from tiered.admission import Admission

__all__ = ["Background"]


class Background:
    """``reserve``: the share of each tier that is kept free or CLEAN while nothing is known of what comes. Along a known order
    only what has to leave is written back: what a plan gave up, at once.

    ``unsettled``: something became DIRTY, or room shrank, since it last looked.
    """

    def __init__(self, reserve: float) -> None:
        self.reserve, self.unsettled = reserve, False
        self._spent: dict[Key, Copy] = {}

    def changed(self, admission: Admission, copy: Copy) -> None:
        """Something about a dirty copy changed."""
        self.unsettled = True
        if admission.ahead is not None and self._is_spent(admission, copy):
            self._spent[copy.key] = copy

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
        for copy in spent.values():
            if admission.ahead is not None and self._is_spent(admission, copy):
                self._admit(admission, copy, background)
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
        ahead = admission.ahead
        dirty = copy.state is State.DIRTY and copy.standing is Standing.DIRTY and copy.failure is None
        return dirty and ahead is not None and ahead.is_spent(copy.key, copy.tier)
