"""Who leaves a tier, so that something else finds room there. Everything here runs under the engine's lock.

What may move where, and in which order: evictions, transfers, write-backs. Decides; touches no link and no thread.

Everything here runs under the engine's lock. Admitting a transfer means: its slot is allocated, the residency edge is taken,
and it stands in its link's queue, from which the engine starts it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from tiered.engine.background import Ahead, Background
from tiered.engine.policy import Record, Touch
from tiered.engine.pool import MOVED, Occupancy
from tiered.engine.requests import Claims, Holder, Lease, Request, Room, View
from tiered.engine.residency import Copy, Directory, Entry, Standing, State
from tiered.engine.snapshot import Flush, came_down
from tiered.engine.state import Traffic
from tiered.errors import CapacityError, CorruptionError, TieredError
from tiered.interfaces import EvictionPolicy, Tier
from tiered.telemetry import TierStatistics
from tiered.types import Access, Completion, Direction, Fence, Key, Slot, Transfer, Urgency, Use

__all__ = ["Admission", "Leaving"]

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
