"""What may move where, and in which order: evictions, transfers, write-backs. Decides; touches no link and no thread.

Everything here runs under the engine's lock. Admitting a transfer means: its slot is allocated, the residency edge is taken,
and it stands in its link's queue, from which the engine starts it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from tiered.ahead import Ahead
from tiered.background import Background
from tiered.claims import Claims, Holder, View
from tiered.errors import CapacityError, CorruptionError, TieredError
from tiered.flush import Flush, came_down
from tiered.interfaces import EvictionPolicy, Tier
from tiered.leaving import Leaving
from tiered.occupancy import MOVED, Occupancy
from tiered.prefetch import Record, Touch
from tiered.requests import Lease, Request, Room
from tiered.residency import Copy, Directory, Entry, Standing, State
from tiered.stats import TierStatistics
from tiered.traffic import Traffic
from tiered.types import Access, Completion, Direction, Fence, Key, Slot, Transfer, Urgency, Use

__all__ = ["Admission"]


class Admission:
    """Tiers from the top (0) to the bottom; ``places[i]`` is what is in tier i, ``policies[i]`` chooses who leaves it.

    ``reserve`` is the share of each tier that background write-backs keep free or clean, so that what comes finds room. While
    the order of what comes is known, only what has to leave is written back. ``policy`` makes one for a tier, should what
    one knows be lost; without it there is no ``recount``.

    ``changing`` is true while somebody changes what is kept here. An exception of a signal handler may strike a caller's thread
    then; so who finds it true, with the lock just taken, must have the engine ``recount`` before anything else is done.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        policies: Sequence[EvictionPolicy],
        reserve: float,
        policy: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        self.bottom = len(tiers) - 1
        self.background = Background(reserve, len(tiers))
        pairs = enumerate(zip(tiers, policies, strict=True))
        self.places = [Occupancy(tier, policy, bottom=index == self.bottom) for index, (tier, policy) in pairs]
        self.own = list(policies)  # while no order is followed
        self._policy = policy
        self.changing = False
        self.claims = Claims()
        self.directory = Directory(len(tiers), self.changed)
        self.generation = 1  # of the commit that is open
        self.requests: list[Request] = []  # those that wait
        self.flush: Flush | None = None  # the one that is under way
        self.ahead: Ahead | None = None  # the order that is followed
        self.traffic = Traffic(self.bottom)
        self.leaving = Leaving(self)
        self.unsaved: dict[Key, Copy] = {}  # copies that no tier below has got yet
        self.records: list[Record] = []  # what is leased is written down in each
        self.fence: Callable[[int, object], Fence | None] | None = None  # of a tier, when all has run that a stream has by now
        self.arrived: Callable[[Entry], None] | None = None  # called when all of a tensor is at the bottom
        self.evictions = self.prefetched = self.prefetched_unused = 0
        self.spoils = 0  # tensors that were written to under a READ lease, and have no right bytes any more
        self.disturbances = 0  # write-backs that failed, WRITE leases that began
        self._sequence = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def number(self, request: Request) -> None:
        """Give ``request`` its place in the order of arrival."""
        self._sequence += 1
        request.sequence = self._sequence

    def attempt(self, request: Request) -> bool:
        """Whether ``request`` is done, now at the latest; its error, if any, is kept in it."""
        if request.done:
            return True
        request.lacks = ()
        try:
            request.done = request.attempt(self)
        except TieredError as error:
            request.error, request.done = error, True
        request.tried = True
        request.short = request.short or bool(request.lacks)
        return request.done

    def attempt_here(self, request: Request) -> bool:
        """``attempt``, in the caller's thread: only what needs no transfer, no eviction and no wait."""
        try:
            request.done = request.done or request.attempt_here(self)
        except TieredError as error:
            request.error, request.done = error, True
        return request.done

    def advance(self) -> bool:
        """Attempt every waiting request, the urgent and the old first; whether one got done."""
        finished = False
        for request in sorted(self.requests, key=lambda r: (r.urgency, r.sequence)):
            if request.unwanted:
                self.requests.remove(request)
                request.abandon(self)
                finished = True  # others may have what it was waiting for
            elif self.attempt(request):
                finished = True
                self.requests.remove(request)  # at once: the engine must not turn and turn until the caller has woken
                request.notify()
        self.look_ahead()
        return finished

    @property
    def anything_to_do(self) -> bool:
        """Whether the engine's thread would find something to decide or to start."""
        return bool(self.requests) or self.traffic.waits or (self.background.unsettled and self.background.due(self))

    # -- admission (called by requests) ------------------------------------------------------------------------------------

    def bring(self, entry: Entry, tier: int, request: Request) -> bool:
        """Whether ``entry`` has a valid copy in ``tier``; if not, admit the next transfer on its way there."""
        copy = entry.copies[tier]
        if copy is not None:
            if copy.state is State.FILLING:
                self.traffic.hurry(entry.key, request.urgency)
            return copy.valid
        for below in range(tier + 1, len(self.places)):
            source = entry.copies[below]
            if source is None:
                continue
            if source.valid:
                self.refuse_spoiled(source)
                if not entry.written:
                    self._admit_fill(entry, below - 1, request)
            else:
                self.traffic.hurry(entry.key, request.urgency)
            return False
        for above in range(tier - 1, -1, -1):
            source = entry.copies[above]
            if source is not None and source.state is State.DIRTY and source.still:
                if source.failure is not None:
                    error, source.failure = source.failure, None  # a later request tries again
                    raise error
                self.admit_writeback(entry, above, request)
                return False
        self.traffic.hurry(entry.key, request.urgency)
        return False

    def _admit_fill(self, entry: Entry, tier: int, request: Request) -> None:
        if (slot := self.room(tier, entry.nbytes, request)) is None:
            return
        if (source := entry.copies[tier + 1]) is None:  # room below, for what left here, was made of it
            self.places[tier].give_back(slot)
            return
        copy = self.directory.begin_fill(entry, tier, slot)
        if request.urgency is Urgency.PREFETCH:
            copy.prefetched = True
            self.prefetched += 1
        self._enqueue(entry, tier, Direction.UP, slot, source.slot, request.urgency, source)

    def admit_writeback(self, entry: Entry, tier: int, request: Request, snapshot: Slot | None = None) -> bool:
        """Queue a write-back of ``entry`` from ``tier`` to the one below, if that has room; of ``snapshot``, a slot with the
        same bytes that is given back after it, where somebody could change the copy meanwhile."""
        below = tier + 1
        lower = None
        source = entry.copies[tier]
        assert source is not None
        try:
            self.refuse_spoiled(source)
            lower = self.room(below, entry.nbytes, request)
            if lower is None and below == self.bottom:
                why = getattr(self.places[below].tier, "refusal", None) or f"tier {self.places[below].tier.name} is full"
                raise CapacityError(f"no room for tensor {entry.key!r} ({entry.nbytes:,} bytes): {why}")
        finally:
            if lower is None and snapshot is not None:
                self.give_back(tier, snapshot)
        if lower is None:
            return False
        self.directory.begin_writeback(entry, tier, lower)
        tag = self._enqueue(entry, tier, Direction.DOWN, snapshot or source.slot, lower, request.urgency, None)
        if snapshot is not None:
            self.traffic.snapshots[tag] = (tier, snapshot)
        return True

    def _enqueue(
        self, entry: Entry, index: int, way: Direction, upper: Slot, lower: Slot, urgency: Urgency, source: Copy | None
    ) -> int:
        self._sequence += 1
        generation = source.generation if source is not None else self.generation
        checksums = source.checksums if source is not None else b""
        transfer = Transfer(
            self._sequence, entry.key, way, upper, lower, entry.nbytes, urgency, entry.tensor_id, generation, checksums
        )
        self.traffic.add(index, entry, transfer)
        return transfer.tag

    def busy(self, entry: Entry, request: Request) -> bool:
        """Whether transfers of ``entry`` are under way, or have to be, which ``request`` has to wait for."""
        if self.flush is not None and self.flush.keeps(self, entry, request):
            return True
        if entry.in_flight:
            self.traffic.hurry(entry.key, request.urgency)
        return entry.in_flight

    def room(self, tier: int, nbytes: int, request: Request) -> Slot | None:
        """A slot in ``tier``; None: not yet, but on the way to it as far as ``request`` may push others.

        Raises CapacityError when it could never fit, and the error of a failed write-back when only that stands in the way.
        """
        place = self.places[tier]
        if nbytes > place.tier.capacity:
            return self._beyond_capacity(tier, nbytes)
        if request.urgency is Urgency.PREFETCH and not self._may_prefetch(tier, nbytes, request):
            return None
        slot = place.allocate(nbytes, 0) or self.leaving.in_its_place(tier, nbytes, request)
        slot = slot or place.allocate(nbytes, MOVED if tier < self.bottom else math.inf)
        self.background.unsettled = True  # there is less room
        if slot is None and tier < self.bottom:
            slot = self.leaving.make_room(tier, nbytes, request)
        if slot is None:
            request.lacks = (*request.lacks, tier)
        return slot

    def refuse_full(self, tier: int, nbytes: int) -> None:
        """Raise CapacityError where waiting brings no room: nothing leaves the bottom, unless somebody still looks at it."""
        place = self.places[tier]
        if tier == self.bottom and not place.orphans:
            raise CapacityError(place.why_full(nbytes))

    def _beyond_capacity(self, tier: int, nbytes: int) -> Slot:
        slot = self.places[tier].allocate(nbytes) if tier == self.bottom else None
        if slot is None:
            raise CapacityError(self.places[tier].why_never(nbytes))
        return slot

    def _may_prefetch(self, tier: int, nbytes: int, request: Request) -> bool:
        """Not while the link is busy, and not where a demand waits for room, or would then find none."""
        if tier < self.bottom and self.traffic.queues[tier].reads:
            return False
        if any(tier in other.lacks for other in self.requests if other.urgency < request.urgency):
            return False
        place = self.places[tier]
        ready = place.free + place.bytes_of[Standing.CLEAN]
        if request.needed is None:
            for key in self.leaving.wanted(tier, self.leaving.before(request)):
                copy = place.leaves.get(key)
                ready -= copy.slot.nbytes if copy is not None and copy.standing is Standing.CLEAN else 0
        else:  # along a known order dirty copies are written back for it
            ready += place.bytes_of[Standing.FRESH] + place.bytes_of[Standing.DIRTY] + place.bytes_of[Standing.LEAVING]
        return ready - nbytes >= place.largest

    def refuse_spoiled(self, copy: Copy) -> None:
        """Raise CorruptionError where ``copy`` was written to under a READ lease."""
        if copy.unsealed:
            raise self._why_spoiled(copy)

    def _why_spoiled(self, copy: Copy) -> CorruptionError:
        what, name = "written to under a READ lease (put it anew, delete it, or roll back):", self.places[copy.tier].tier.name
        return CorruptionError(what, key=copy.key, tier=name, path=None, offset=copy.slot.offset, errno=None)

    # -- slots -----------------------------------------------------------------------------------------------------------

    def install(self, copy: Copy) -> None:
        """A copy that did not come by a transfer (put, restore, move) is resident from here on."""
        self.places[copy.tier].policy.touched(copy.key)

    def give_back(self, tier: int, slot: Slot, fences: tuple[Fence, ...] = ()) -> None:
        """Free a slot that ``room`` gave and that became no tensor; ``fences`` guard what was put into it."""
        self.places[tier].give_back(slot, fences)

    def changed(self, copy: Copy) -> None:
        """Called by the directory."""
        self.places[copy.tier].note(copy)
        if copy.dirty:
            self.unsaved[copy.key] = copy
        elif self.unsaved.get(copy.key) is copy:
            del self.unsaved[copy.key]
        self.background.changed(self, copy)

    def later(self, work: Callable[[], None]) -> None:
        """Leave ``work``, which may be done twice, to whoever has the lock next. Takes no lock, as a finalizer must not."""
        self.claims.ended.append(work)

    def bury(self) -> None:
        """Apply the ends of leases, views and rooms since; do what was left for later."""
        ended = self.claims.ended
        if not ended:
            return
        assert not self.changing
        self.changing = True
        while ended:
            found = ended[0]
            if isinstance(found, weakref.ref):
                self._end(found)
            else:
                found()
            ended.popleft()
        self.changing = False

    def _end(self, holder: Holder) -> None:
        hold = self.claims.take(holder)
        if isinstance(hold, tuple):
            self._view_ended(hold)
        elif isinstance(hold, Lease):
            self.lease_ended(hold)
        elif isinstance(hold, Room):
            self._room_ended(hold)

    def _view_ended(self, view: View) -> None:
        _, copy, stream = view
        if self.fence is not None:
            self._fenced(copy, stream)
        copy.aliases -= 1
        if copy.state is not State.EMPTY:
            self.changed(copy)
        elif copy.aliases == 0:
            place = self.places[copy.tier]
            place.orphans.remove(copy)
            place.give_back(copy.slot, copy.fences)

    def lease_ended(self, lease: Lease) -> None:
        """By the engine, or where what was left half done is counted anew."""
        for copy in lease.copies:
            if self.fence is not None:
                self._fenced(copy, lease.stream)
            if lease.access is Access.READ and copy.unsealed:
                copy.spoiled, lease.misused = True, copy.key
            self.directory.release(copy, lease.access)
            if copy.spoiled:
                self._spoil(copy)

    def _spoil(self, copy: Copy) -> None:
        """``copy`` was written to under a READ lease. The tensor is what it was where a tier below had its bytes before that
        lease began; else nobody has them, and all but a new put, a deletion or a rollback refuses it."""
        if copy.state is State.EMPTY or copy.leased or copy.in_flight:
            return
        if copy.state is State.CLEAN and copy.tier < self.bottom and copy.lent_clean:
            self.directory.discard(copy)
            return
        self.spoils += 1
        for other in self.directory.entry(copy.key).copies:
            if other is not None:
                other.spoiled = True

    def _room_ended(self, room: Room) -> None:
        assert room.slot is not None
        fence = None if self.fence is None else self.fence(room.tier, room.stream)
        self.give_back(room.tier, room.slot, () if fence is None else (fence,))

    def _fenced(self, copy: Copy, stream: object) -> None:
        """What ``stream`` has by now may still use ``copy``'s slot. A fence made after it was let go is late enough."""
        if self.fence is not None and (fence := self.fence(copy.tier, stream)) is not None:
            copy.fences = (*(f for f in copy.fences if not f.query()), fence)

    # -- after an exception -------------------------------------------------------------------------------------------------

    def recount(self) -> None:
        """Count anew all that is kept beside the directory, the claims and the transfers, and complete what was left half done
        there: an exception struck a caller's thread within a change. Raises AssertionError where that does not come out.

        What may be lost: the order in which an eviction policy remembers uses.
        """
        claims = self.claims
        misused = [copy for copy in self._all_copies() if copy.unsealed]
        for copy in misused:
            copy.spoiled = True
        for hold in claims:
            if isinstance(hold, Lease) and (found := next((copy for copy in hold.copies if copy.spoiled), None)) is not None:
                hold.misused = found.key
        claims.drop_dead()
        taken = {(copy.tier, copy.slot) for copy in self._all_copies()}
        for hold in claims:
            if isinstance(hold, Room) and (hold.tier, hold.slot) in taken:  # it had just been installed
                claims.take(hold.holder)
        leases = [(copy, hold.access) for hold in claims if isinstance(hold, Lease) for copy in hold.copies]
        views = [hold[1] for hold in claims if isinstance(hold, tuple)]
        rooms = [hold for hold in claims if isinstance(hold, Room)]
        self.directory.recount(leases, self.traffic.read())
        copies = self._all_copies()
        mine = {id(copy): copy for copy in copies}
        for copy in (*copies, *views):
            copy.aliases = 0
        for copy in views:
            copy.aliases += 1
        orphans = {id(copy): copy for copy in views if id(copy) not in mine}
        for copy in orphans.values():
            if copy.state is not State.EMPTY:
                copy.become(State.EMPTY)
        self.unsaved = {copy.key: copy for copy in copies if copy.dirty}
        assert self._policy is not None, "nobody makes eviction policies anew"
        self.own = [self._policy() for _ in self.places]
        policies = self.own if self.ahead is None else [*self.ahead.policies(), self.own[-1]]
        others = [*((room.tier, room.slot) for room in rooms), *self.traffic.snapshots.values()]
        for index, (place, policy) in enumerate(zip(self.places, policies, strict=True)):
            place.recount(
                [copy for copy in copies if copy.tier == index],
                [copy for copy in orphans.values() if copy.tier == index],
                [slot for tier, slot in others if tier == index and slot is not None],
                policy,
            )
        if self.ahead is not None:
            self.ahead.follow(policies)
        self.background.follow(self)
        self.background.unsettled = True
        self.disturbances += 1
        for copy in misused:
            self._spoil(copy)
        self.directory.check()
        for place in self.places:
            place.check()
        self.changing = False

    def _all_copies(self) -> list[Copy]:
        return [copy for entry in self.directory.all_entries() for copy in entry.copies if copy is not None]

    # -- what happened -----------------------------------------------------------------------------------------------------

    def used(self, entry: Entry, tier: int, use: Use) -> None:
        """A lease of ``entry`` in ``tier`` begins, or it was put there."""
        if self.ahead is not None:
            self.ahead.plan.happened(entry.key)
        for place, copy in zip(self.places, entry.copies, strict=True):
            if copy is not None and not place.bottom:
                place.policy.touched(entry.key)
        for record in self.records:
            if len(record.touches) < record.most and record.wanted() is not None:
                record.touches.append(Touch(entry.key, self.places[tier].tier.name, use, entry.nbytes))

    def look_ahead(self) -> None:
        if self.ahead is not None and self.ahead.attempt(self):
            self.follow(None, self.own)

    def follow(self, ahead: Ahead | None, policies: Sequence[EvictionPolicy]) -> None:
        """Fetch along an order from here on, or no longer; new policies learn who is there."""
        self.ahead = ahead
        if ahead is not None:
            ahead.follow(policies)
        for place, policy in zip(self.places[: self.bottom], policies, strict=False):
            place.adopt(policy)
        self.background.follow(self)

    def complete(self, index: int, completion: Completion) -> Transfer:
        """Apply what link ``index`` reported."""
        entry, transfer = self.traffic.end(index, completion.tag)
        self.background.unsettled = True
        if transfer.direction is Direction.UP:
            source = entry.copies[index + 1]
            if completion.error is None and source is not None and source.unsealed:
                completion = replace(completion, error=self._why_spoiled(source))
            self.directory.end_fill(entry, index, completion.error)
            if completion.error is None:
                self.places[index].policy.touched(entry.key)
            else:
                for request in self.requests:
                    request.failed(entry.key, completion.error)
        else:
            self._end_writeback(index, entry, transfer, completion)
        return transfer

    def _end_writeback(self, index: int, entry: Entry, transfer: Transfer, completion: Completion) -> None:
        source, snapshot = entry.copies[index], self.traffic.snapshots.pop(transfer.tag, None)
        assert source is not None
        if snapshot is not None:
            self.give_back(*snapshot)
        if completion.error is None and (source.unsealed or (snapshot is None and source.written)):
            # The bytes below are of before and after, or may be.
            self.directory.repeat_writeback(entry, index)
            self.disturbances += 1
            return
        self.directory.end_writeback(entry, index, completion.error, completion.checksums, transfer.generation)
        if completion.error is None:
            self.places[index + 1].policy.touched(entry.key)
            below = entry.copies[index + 1]
            if below is not None:
                self.background.changed(self, below)
        else:
            self.disturbances += 1
        came_down(self, entry)

    # -- looking in -------------------------------------------------------------------------------------------------------

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        return tuple(place.statistics() for place in self.places)
