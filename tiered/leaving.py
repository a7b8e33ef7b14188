"""Who leaves a tier, so that something else finds room there. Everything here runs under the engine's lock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tiered.errors import CapacityError
from tiered.requests import Request
from tiered.residency import Copy, Standing, State
from tiered.types import Direction, Key, Slot, Urgency

if TYPE_CHECKING:
    from tiered.admission import Admission

__all__ = ["Leaving"]

PACKINGS = 4
"""How often a request may evict what it has itself, to fit better among the same neighbours."""


class Leaving:
    """Chooses for ``admission``: by the tier's policy, by a plan where one is followed, and by who waits for what."""

    def __init__(self, admission: Admission) -> None:
        self._of = admission

    def make_room(self, tier: int, nbytes: int, request: Request) -> Slot | None:
        """Evict the policy's first victims once they are all clean, and none before: to evict in vain would be worse than
        waste, two requests could take turns at it for ever."""
        place = self._of.places[tier]
        if self._nothing_new(tier, nbytes, request):
            return None
        acceptable = self._acceptable(tier, request)
        planned = self._of.ahead is not None and self._of.ahead.plans(tier)
        chosen = None
        if planned:
            chosen = place.enough(nbytes, [copy for copy in self._of.background.gone(tier) if acceptable(copy)])
        if chosen is None and not (planned and request.needed is not None):
            chosen = place.victims(nbytes, lambda copy: copy.standing is not Standing.FRESH and acceptable(copy))
        if chosen is None and request.urgency is not Urgency.PREFETCH:
            chosen = place.victims(nbytes, acceptable)
            chosen = chosen or place.victims(nbytes, acceptable, math.inf)
        if chosen is None:
            chosen = self._packed(tier, nbytes, request)
        if chosen is None:
            self._push_out(tier, request)
            return None
        if self._of.ahead is not None:
            for copy in chosen:
                place.condemn(copy)
        unsaved = [copy for copy in chosen if copy.dirty]
        try:
            for copy in unsaved:
                self._write_out(copy, request)
        except CapacityError:  # what is below is full: then something clean, even if it is needed sooner
            clean = place.victims(nbytes, lambda copy: not copy.dirty and acceptable(copy))
            if clean is None and not (self._of.traffic.rising[tier].transfers or place.bytes_of[Standing.LEAVING]):
                raise
            if clean is None:
                return None  # what moves will be clean
            chosen, unsaved = clean, []
        if unsaved:
            request.push(tier, unsaved, place.tier.capacity)
            return None
        slot = place.allocate(nbytes)
        while chosen and slot is None:
            self.evict(chosen.pop(0))
            slot = place.allocate(nbytes)
        slot = slot or place.allocate(nbytes, math.inf)
        assert slot is not None
        return slot

    def _nothing_new(self, tier: int, nbytes: int, request: Request) -> bool:
        """What was pushed out for it is under way, and it would find too little. (To choose among ten thousand at the end of
        each one's transfer would take longer than the transfers.)"""
        place = self._of.places[tier]
        return request.pushes(tier) and place.free + place.bytes_of[Standing.CLEAN] + place.bytes_of[Standing.FRESH] < nbytes

    def in_its_place(self, tier: int, nbytes: int, request: Request) -> Slot | None:
        """The room of some that a plan gave up and that lie together: nothing is moved."""
        if self._of.ahead is None or not self._of.ahead.plans(tier):
            return None
        place, acceptable = self._of.places[tier], self._acceptable(tier, request)
        size, gone = place.rounded(nbytes), self._of.background.gone(tier)
        same = next((copy for copy in gone if copy.nbytes == size and acceptable(copy)), None)
        found = [same] if same is not None else place.together(size, [copy for copy in gone if acceptable(copy)])
        for copy in found or ():
            self.evict(copy)
        return place.allocate(nbytes, 0) if found else None

    def _write_out(self, copy: Copy, request: Request) -> None:
        """Have ``copy`` written back, so that it can leave for ``request``."""
        if copy.state is State.DIRTY:
            background = request
            if request.urgency is Urgency.PREFETCH:
                background = Request(Urgency.WRITEBACK)
                self._of.number(background)
            self._of.admit_writeback(self._of.directory.entry(copy.key), copy.tier, background)
        else:
            self._of.traffic.hurry(copy.key, request.urgency)

    def _push_out(self, tier: int, request: Request) -> None:
        """All that may leave is too little: what is on its way out should go quickly. Raises what keeps others from going."""
        place = self._of.places[tier]
        if request.urgency is Urgency.PREFETCH:
            return
        for transfer in [t for t in self._of.traffic.queues[tier] if t.direction is Direction.DOWN]:
            self._of.traffic.hurry(transfer.key, request.urgency)
        failed = [copy for copy in place.leaves.values() if copy.stuck and copy.failure is not None]
        if failed and not place.bytes_of[Standing.LEAVING]:
            failure = failed[0].failure
            assert failure is not None
            for copy in failed:
                copy.failure = None  # a later request tries again
            raise failure

    def _acceptable(self, tier: int, request: Request) -> Callable[[Copy], bool]:
        """Which copies may leave for ``request``: not what it or one before it still wants, not what cannot be written back;
        for a hint, nothing that costs a write; for what is fetched along a known order, nothing that is needed sooner."""
        wanted = self.wanted(tier, [request, *self.before(request)])
        hint = request.urgency is Urgency.PREFETCH and request.needed is None

        def acceptable(copy: Copy) -> bool:
            if copy.key in wanted or copy.stuck:
                return False
            if request.needed is not None and self._of.ahead is not None:
                return self._of.ahead.may_go(copy.key, tier) and self._of.ahead.plan.next_use(copy.key) > request.needed
            return not (hint and copy.dirty)

        return acceptable

    def _packed(self, tier: int, nbytes: int, request: Request) -> list[Copy] | None:
        """What the request has here already may lie in the middle: then that leaves, too, and comes back; PACKINGS times."""
        place = self._of.places[tier]
        others = self.wanted(tier, self.before(request))
        own = [place.copies[key] for key in request.wants() if key in place.copies and key not in others]
        if not own or any(copy.standing is Standing.USED or copy.stuck for copy in own):
            return None
        acceptable = self._acceptable(tier, request)
        others_too = [copy for copy in place.leaves.values() if acceptable(copy) and copy not in own]
        if not place.would_fit(nbytes, [*others_too, *own]):
            return None
        if any(copy.dirty for copy in (*others_too, *own)):
            return [*others_too, *own]  # they are written back first
        neighbours = place.neighbours([*others_too, *own])
        tried = request.packed.count(neighbours)
        if tried >= PACKINGS:
            return None
        request.packed = [neighbours] * (tried + 1)
        for copy in own:
            self.evict(copy)
        if tried == 0:
            return others_too
        for copy in others_too:  # as few of them as make way for this tensor were too few for the next
            self.evict(copy)
        return []

    def before(self, request: Request) -> list[Request]:
        """Those that go before it: the more urgent ones, whenever they came, and its equals that came earlier."""
        mine = (request.urgency, request.sequence)
        return [r for r in self._of.requests if (r.urgency, r.sequence) < mine]

    def wanted(self, tier: int, requests: Sequence[Request]) -> set[Key]:
        return {key for r in requests for key in r.wants() if self._on_its_way(key, tier, r.tier)}

    def _on_its_way(self, key: Key, tier: int, target: int) -> bool:
        """Whether a copy in ``tier`` has still to serve a request for ``target``: none between them has the bytes yet."""
        entry = self._of.directory.find(key)
        return entry is not None and not any(copy is not None and copy.valid for copy in entry.copies[target:tier])

    def evict(self, copy: Copy) -> None:
        self._of.evictions += 1
        if copy.prefetched:
            self._of.prefetched_unused += 1
        self._of.directory.evict(copy)
