"""What the engine's lock guards: pools, the directory, holds, transfers, waiting requests, the order that is followed.

``EngineState`` keeps these consistent with each other. It decides nothing: ``scheduler`` does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from tiered.engine.claims import Claims, Holder, LeaseHold, RoomHold, TensorHold, View
from tiered.engine.policy import FollowedOrder, Recording, Touch
from tiered.engine.pool import Pool
from tiered.engine.residency import Copy, Directory, Entry, Evictability, State
from tiered.engine.transfers import TransferQueues
from tiered.errors import CorruptionError, TieredError
from tiered.interfaces import EvictionPolicy, Tier
from tiered.telemetry import TierStatistics
from tiered.types import Access, Direction, Fence, Key, Owner, Slot, Transfer, Urgency, Use

__all__ = ["ActiveSnapshot", "EngineState", "RoomSearch", "Ticket"]

_READ = Access.READ  # see residency


class RoomSearch:
    """What a request knows of its search for room, from its first attempt that needs some.

    From one attempt to the next: ``leaving`` are copies that were chosen to leave for all that the request lacks, while any of
    them is written back; ``wrote``: copies were written back for all of it; ``pack_attempts`` are the neighbours among which
    the request's own copies were evicted.

    In one attempt: ``wanted`` is what ``EngineState.wanted`` answered, until something is evicted; ``next`` are the clean
    copies of each tier that its policy evicts next for the rest of the request, the first of them last; ``vain`` the fewest
    bytes, by tier, for which they were too little.
    """

    def __init__(self) -> None:
        self.leaving: list[Copy] = []
        self.wrote = False
        self.pack_attempts: list[frozenset[Slot]] = []
        self._pushed: dict[int, list[Copy]] = {}  # by tier, the copies that are written back for the request, the first last
        self._pushed_bytes, self._least = 0, math.inf
        self.begin()

    def begin(self) -> None:
        """Forget what held for the last attempt."""
        self.wanted: dict[tuple[int, bool], set[Key]] = {}
        self.next: dict[int, list[Copy]] = {}
        self.vain: dict[int, int] = {}

    def push(self, tier: int, copies: Sequence[Copy], capacity: int) -> None:
        """Record that ``copies`` are being written back to make room in ``tier`` for the request.

        Each that ends brings the request closer, until the request has pushed out twice what the tier holds: beyond, others
        take the room.
        """
        self._pushed[tier] = list(reversed(copies))
        self._pushed_bytes += sum(copy.slot.nbytes for copy in copies)
        if self._pushed_bytes <= 2 * capacity:
            self._least = math.inf

    def pushes(self, tier: int, ticket: Ticket) -> bool:
        """Whether any of the copies pushed for ``ticket`` is still being written back."""
        pushed = self._pushed.get(tier)
        if not pushed:
            return False
        while pushed and pushed[-1].evictability is not Evictability.WRITING_BACK:
            pushed.pop()
        if (count := sum(map(len, self._pushed.values()))) < self._least:
            self._least = count
            ticket.progress -= 1
        return bool(pushed)


class Ticket:
    """A request as far as the engine's state and the scheduler know it: how urgent it is, what it wants, what it lacks.

    ``holder`` refers to the token of whoever waits for the request, where something is granted: when the token is dead, nobody
    wants the request any more. What a request does not set itself is as the class has it: most leases end with their first
    attempt.
    """

    sequence = 0
    done = False
    error: TieredError | None = None
    abandoned = False
    """The caller gave up, or was struck."""
    tried = False
    """Whether the engine has attempted the request."""
    full_tiers: tuple[int, ...] = ()
    """Tiers in which the last attempt found no room."""
    lacking = 0
    """Bytes of the tensors that the attempt may begin to bring to the tier."""
    short = False
    """Whether any attempt found no room, since the waiting caller looked last."""
    progress = 0
    """Whenever this changes the request has come closer, and the deadline counts anew."""
    replaces = False
    """Whether the request does away with the tensor that it waits for."""
    needed_at: int | None = None
    """The position in a known order that the request fetches for."""
    expected_at = math.inf
    """The position at which what it fetches is expected to be needed, where nobody knows."""
    search: RoomSearch | None = None

    def __init__(self, urgency: Urgency = Urgency.DEMAND, tier: int = 0, holder: Holder | None = None) -> None:
        self.urgency, self.tier, self.holder = urgency, tier, holder

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for the request any more."""
        return self.abandoned or (self.holder is not None and self.holder() is None)

    def wants(self) -> Sequence[Key]:
        """Return the tensors that must not be evicted to make room for this request or for a later one."""
        return ()

    def failed(self, key: Key, error: TieredError) -> None:
        """Learn that ``key`` could not be brought up."""


@dataclass(slots=True)
class ActiveSnapshot:
    """The snapshot that is being written to the bottom.

    ``frozen`` are the tensors that are not at the bottom yet as they were when the snapshot began. ``duplicate(copy, slot,
    nbytes)`` copies bytes within a tier, ``saved(entry)`` is called for each tensor that has arrived at the bottom.
    """

    frozen: dict[Key, None]
    duplicate: Callable[[Copy, Slot, int], None]
    saved: Callable[[Entry], None]


# -- everything --------------------------------------------------------------------------------------------------------------


class EngineState:
    """Tiers from the top (0) to the bottom (the last); ``pools[i]`` is what is in tier i, ``policies[i]`` chooses its victims.

    ``policy`` makes a policy for a tier, should what one knows be lost; without it there is no ``recount``.

    ``changing`` is true while somebody changes the state. An exception of a signal handler may strike a caller's thread then;
    so whoever takes the lock and finds it true must have the engine ``recount`` before anything else is done.

    ``writeback_due``: a copy became DIRTY and unused, or room shrank, since background write-back last looked.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        policies: Sequence[EvictionPolicy],
        policy: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        self.bottom = len(tiers) - 1
        pairs = enumerate(zip(tiers, policies, strict=True))
        self.pools = [Pool(tier, policy, bottom=index == self.bottom) for index, (tier, policy) in pairs]
        self.own_policies = list(policies)  # while no order is followed
        self._policy = policy
        self.changing = False
        self.claims = Claims()
        self.directory = Directory(len(tiers), self._changed, [pool.note for pool in self.pools])
        self.transfers = TransferQueues(self.bottom)
        self.waiting: Sequence[Ticket] = ()  # the request queue's
        self.order: FollowedOrder | None = None
        self.snapshot: ActiveSnapshot | None = None
        self._uses = 0
        self.generation = 1  # of the commit that is open
        self.unsaved: dict[Key, Copy] = {}  # copies that no tier below has got yet
        self.writeback_due = False
        self.records: list[Recording] = []  # what is leased is recorded in each
        self.fence: Callable[[int, object], Fence | None] | None = None  # of a tier: passes when a stream's work so far has run
        self.arrived: Callable[[Entry], None] | None = None  # called when all of a tensor is at the bottom
        self.evictions = self.prefetched = self.prefetched_unused = 0
        self.unknown_hints = 0
        self.speculated = self.speculated_used = self.speculated_unused = 0
        self.doomed: dict[tuple[Key, int], None] = {}  # temporary tensors whose holder died while something used them
        self.doomed_due = False  # perhaps nothing uses one of them any more
        self.spoiled = 0  # tensors that were written to under a READ lease, and have no right bytes any more
        self.asked: Ticket | None = None  # the request that is attempted now
        self.disturbances = 0  # write-backs that failed, WRITE leases that began
        self.numbers = count(1)
        """Of tickets and transfers, in the order in which they come."""

    def enqueue(
        self, entry: Entry, index: int, way: Direction, upper: Slot, lower: Slot, urgency: Urgency, source: Copy | None
    ) -> int:
        """Put a transfer of ``entry`` into the queue of link ``index``; return its tag. ``source`` is the copy to fill from."""
        generation = source.generation if source is not None else self.generation
        checksums = source.checksums if source is not None else b""
        transfer = Transfer(
            next(self.numbers), entry.key, way, upper, lower, entry.nbytes, urgency, entry.tensor_id, generation, checksums
        )
        self.transfers.add(index, entry, transfer)
        return transfer.tag

    # -- changes -----------------------------------------------------------------------------------------------------------

    def _changed(self, copy: Copy) -> None:
        """Bring everything that is kept beside the directory up to date: ``copy`` has come or gone, or its state has changed.
        Called by the directory."""
        self.pools[copy.tier].note(copy)
        if copy.dirty:
            self.unsaved[copy.key] = copy
            if copy.evictability is Evictability.DIRTY:  # else it is, once nobody uses it any more
                self.writeback_due = True
        elif self.unsaved.get(copy.key) is copy:
            del self.unsaved[copy.key]

    def write_at_once(self, copy: Copy) -> None:
        """Have ``copy``, which is new and of a temporary tensor, written behind, unless an order says what is."""
        if self.order is None and copy.tier < self.bottom:
            self.pools[copy.tier].behind[copy.key] = copy
            self.writeback_due = True

    def writes_behind(self, copy: Copy) -> bool:
        """Whether ``copy``, of which that was said, should still be written behind: not while a fill from it is under way, or
        was made for the next use."""
        if copy.evictability is not Evictability.DIRTY or copy.failure is not None:
            return False
        entry = self.directory.find(copy.key)
        if entry is None or entry.copies[copy.tier] is not copy:
            return False
        if self.order is None:
            return entry.temporary
        return self.order.writes_behind(copy.key, copy.tier) and all(upper is None for upper in entry.copies[: copy.tier])

    def follow(self, order: FollowedOrder | None, policies: Sequence[EvictionPolicy]) -> None:
        """Follow ``order`` from now on; None ends following. Each tier above the bottom adopts its policy of ``policies``, and
        each policy is told the copies of its tier."""
        self.order = order
        if order is not None:
            order.adopt(policies)
        for pool, policy in zip(self.pools[: self.bottom], policies, strict=False):
            pool.adopt(policy)
        self._plan_all_anew()

    def _plan_all_anew(self) -> None:
        for tier, pool in enumerate(self.pools[: self.bottom]):
            pool.plan_by(self.order if self.order is not None and self.order.plans(tier) else None)
        self.writeback_due = True

    def used(self, entries: Sequence[Entry], tier: int, use: Use) -> None:
        """Record that a lease of ``entries`` in ``tier`` begins, or that the tensors were put there."""
        order, upper = self.order, self.pools[: self.bottom]
        for entry in entries:
            if order is not None:
                order.plan.happened(entry.key)
            self._uses += 1
            for pool, copy in zip(upper, entry.copies, strict=False):
                if copy is not None:
                    copy.last_use = self._uses
                    pool.policy.touched(entry.key)
                    if copy.speculated:
                        copy.speculated = False
                        self.speculated_used += 1
            for record in self.records:
                if len(record.touches) < record.most and record.wanted() is not None:
                    record.touches.append(Touch(entry.key, self.pools[tier].tier.name, use, entry.nbytes))

    def install(self, copy: Copy) -> None:
        """Let the eviction policy of its tier know of ``copy``, which is new there and was not leased yet."""
        if copy.tier < self.bottom:
            self.pools[copy.tier].policy.touched(copy.key)

    def give_back(self, tier: int, slot: Slot, fences: tuple[Fence, ...] = ()) -> None:
        """Free a slot that became no tensor; ``fences`` guard what was put into it."""
        self.pools[tier].give_back(slot, fences)

    def set_aside(self, entry: Entry) -> None:
        """Free the name of a frozen tensor for another one; the tensor stays until its write-back has ended."""
        assert self.snapshot is not None
        frozen, copies = self.snapshot.frozen, [copy for copy in entry.copies if copy is not None]
        del frozen[entry.key]
        unsaved = self.unsaved.pop(entry.key)
        self.directory.set_aside(entry)
        for copy in copies:
            self.pools[copy.tier].rename(copy, entry.key)
        self.unsaved[entry.key] = unsaved
        frozen[entry.key] = None

    def rename(self, entry: Entry, key: Key, owner: Owner | None) -> None:
        """Give a tensor that nothing uses another key and another owner. What a manifest said of it holds no more."""
        copies = [copy for copy in entry.copies if copy is not None]
        unsaved = self.unsaved.pop(entry.key, None)
        self.directory.rename(entry, key, owner)
        for copy in copies:
            self.pools[copy.tier].rename(copy, key)
            copy.record = b""
            self.pools[copy.tier].plan(copy)  # what the plan says of the new key
        if unsaved is not None:
            self.unsaved[key] = unsaved

    # -- questions ---------------------------------------------------------------------------------------------------------

    def wanted(self, tier: int, ticket: Ticket, *, too: bool) -> set[Key]:
        """Return the tensors whose copy in ``tier`` is needed by the requests that go before ``ticket``: the more urgent ones,
        and its equals that came earlier. ``too``: also by ``ticket`` itself."""
        known = ticket.search.wanted if ticket.search is not None and self.asked is ticket else None
        if known is not None and (tier, too) in known:
            return known[tier, too]
        mine, found = (ticket.urgency, ticket.sequence), set[Key]()
        for other in (*self.waiting, ticket):
            if (not too) if other is ticket else (other.urgency, other.sequence) >= mine:
                continue
            keys = other.wants()
            found.update(keys if tier <= other.tier else (key for key in keys if self._on_its_way(key, tier, other.tier)))
        if known is not None:
            known[tier, too] = found
        return found

    def _on_its_way(self, key: Key, tier: int, target: int) -> bool:
        """Whether a copy in ``tier`` has still to serve a request for ``target``: no tier between has the bytes yet."""
        entry = self.directory.find(key)
        return entry is not None and not any(copy is not None and copy.valid for copy in entry.copies[target:tier])

    def refuse_spoiled(self, copy: Copy) -> None:
        """Raise CorruptionError where ``copy`` was written to under a READ lease."""
        if copy.unsealed:
            raise self.why_spoiled(copy)

    def why_spoiled(self, copy: Copy) -> CorruptionError:
        what, name = "written to under a READ lease (put it anew, delete it, or roll back):", self.pools[copy.tier].tier.name
        return CorruptionError(what, key=copy.key, tier=name, path=None, offset=copy.slot.offset, errno=None)

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        return tuple(pool.statistics() for pool in self.pools)

    # -- holds end ---------------------------------------------------------------------------------------------------------

    def later(self, work: Callable[[], None]) -> None:
        """Leave ``work``, which may be done twice, to whoever has the lock next. Takes no lock, as a finalizer must not."""
        self.claims.ended.append(work)

    def reap(self) -> None:
        """Apply the ends of leases, views and rooms since the last call; do the work that was left for later."""
        ended = self.claims.ended
        if not ended:
            return
        assert not self.changing
        self.changing = True
        holds = self.claims.holds
        while ended:
            found = ended[0]
            if not isinstance(found, weakref.ref):
                found()
            elif (hold := holds.get(id(found))) is not None:
                if isinstance(hold, TensorHold):
                    self._doom(hold)  # before it is taken: what strikes in between must not lose it
                    del holds[id(found)]
                else:
                    del holds[id(found)]
                    if isinstance(hold, tuple):
                        self._view_ended(hold)
                    elif isinstance(hold, LeaseHold):
                        self.lease_ended(hold)
                    else:
                        self._room_ended(hold)
            ended.popleft()
        self.changing = False

    def _doom(self, hold: TensorHold) -> None:
        """Delete a temporary tensor whose holder died: now, or once no lease and no transfer uses it."""
        entry = self.directory.find(hold.key)
        if entry is None or entry.tensor_id != hold.tensor_id:
            return
        if entry.in_flight or entry.leased:
            self.doomed[hold.key, hold.tensor_id] = None
            self.doomed_due = True
        else:
            self.directory.forget(hold.key)

    def delete_doomed(self) -> None:
        """Delete the doomed tensors that nothing uses any more. A write-back that was not started is withdrawn. Called by the
        engine's thread, because transfers change."""
        self.doomed_due = False
        doomed, self.doomed = self.doomed, {}
        for key, tensor_id in doomed:
            entry = self.directory.find(key)
            if entry is None or entry.tensor_id != tensor_id:
                continue
            if entry.in_flight and not entry.leased and (index := self.transfers.withdraw(key)) is not None:
                self.directory.repeat_writeback(entry, index)
            if entry.in_flight or entry.leased:
                self.doomed[key, tensor_id] = None
            else:
                self.directory.forget(key)

    def _view_ended(self, view: View) -> None:
        _, copy, stream = view
        if self.fence is not None:
            self._fenced(copy, stream)
        copy.aliases -= 1
        if copy.aliases or copy.readers or copy.writers:
            return
        if copy.state is State.EMPTY:
            self.pools[copy.tier].reap_dead_alias(copy)
        elif copy.tier < self.bottom:
            self.pools[copy.tier].note(copy)
            self.writeback_due = self.writeback_due or copy.dirty

    def lease_ended(self, lease: LeaseHold) -> None:
        """End ``lease``: by the engine, or where what was left half done is counted anew."""
        self.doomed_due = self.doomed_due or bool(self.doomed)
        for copy in lease.copies:
            if self.fence is not None:
                self._fenced(copy, lease.stream)
            if lease.access is _READ and copy.unsealed:
                copy.spoiled, lease.misused = True, copy.key
            self.directory.release(copy, lease.access)
            self.writeback_due = self.writeback_due or copy.dirty
            if copy.spoiled:
                self._spoil(copy)

    def _spoil(self, copy: Copy) -> None:
        """Discard the bytes of ``copy``, which was written to under a READ lease.

        The tensor is what it was where a tier below had its bytes before that lease began. Else nobody has them, and every call
        but a new put, a deletion or a rollback refuses the tensor.
        """
        if copy.state is State.EMPTY or copy.leased or copy.in_flight:
            return
        if copy.state is State.CLEAN and copy.tier < self.bottom and copy.lent_clean:
            self.directory.discard(copy)
            return
        self.spoiled += 1
        for other in self.directory.entry(copy.key).copies:
            if other is not None:
                other.spoiled = True

    def _room_ended(self, room: RoomHold) -> None:
        assert room.slot is not None
        fence = None if self.fence is None else self.fence(room.tier, room.stream)
        self.give_back(room.tier, room.slot, () if fence is None else (fence,))

    def _fenced(self, copy: Copy, stream: object) -> None:
        """Guard ``copy``'s slot by all that ``stream`` has by now. A fence made after the copy was let go is late enough."""
        if self.fence is not None and (fence := self.fence(copy.tier, stream)) is not None:
            copy.fences = (*(f for f in copy.fences if not f.query()), fence)

    # -- after an exception ------------------------------------------------------------------------------------------------

    def recount(self) -> None:
        """Count anew all that is kept beside the directory, the claims and the transfers, and complete what was left half done
        there: an exception struck a caller's thread within a change. Raises AssertionError where that fails.

        The order in which an eviction policy remembers uses may be lost.
        """
        claims = self.claims
        misused = [copy for copy in self._all_copies() if copy.unsealed]
        for copy in misused:
            copy.spoiled = True
        for hold in claims:
            found = next((copy for copy in hold.copies if copy.spoiled), None) if isinstance(hold, LeaseHold) else None
            if isinstance(hold, LeaseHold) and found is not None:
                hold.misused = found.key
        for hold in claims:
            if isinstance(hold, TensorHold) and hold.holder() is None:
                self.doomed[hold.key, hold.tensor_id] = None
                self.doomed_due = True
        claims.drop_dead()
        taken = {(copy.tier, copy.slot) for copy in self._all_copies()}
        for hold in claims:
            if isinstance(hold, RoomHold) and (hold.tier, hold.slot) in taken:  # the tensor had just been installed
                claims.take(hold.holder)
        leases = [(copy, hold.access) for hold in claims if isinstance(hold, LeaseHold) for copy in hold.copies]
        views = [hold[1] for hold in claims if isinstance(hold, tuple)]
        rooms = [hold for hold in claims if isinstance(hold, RoomHold)]
        self.directory.recount(leases, self.transfers.read())
        copies = self._all_copies()
        mine = {id(copy): copy for copy in copies}
        for copy in (*copies, *views):
            copy.aliases = 0
        for copy in views:
            copy.aliases += 1
        evicted = {id(copy): copy for copy in views if id(copy) not in mine}
        for copy in evicted.values():
            if copy.state is not State.EMPTY:
                copy.become(State.EMPTY)
        self.unsaved = {copy.key: copy for copy in copies if copy.dirty}
        assert self._policy is not None, "nobody makes eviction policies anew"
        self.own_policies = [self._policy() for _ in self.pools]
        policies = self.own_policies if self.order is None else [*self.order.policies(), self.own_policies[-1]]
        others = [*((room.tier, room.slot) for room in rooms), *self.transfers.snapshots.values()]
        for index, (pool, policy) in enumerate(zip(self.pools, policies, strict=True)):
            pool.recount(
                [copy for copy in copies if copy.tier == index],
                [copy for copy in evicted.values() if copy.tier == index],
                [slot for tier, slot in others if tier == index and slot is not None],
                policy,
            )
        if self.order is not None:
            self.order.adopt(policies)
        self._plan_all_anew()
        self.writeback_due = True
        self.disturbances += 1
        for copy in misused:
            self._spoil(copy)
        self.directory.check()
        for pool in self.pools:
            pool.check()
        self.changing = False

    def _all_copies(self) -> list[Copy]:
        return [copy for entry in self.directory.all_entries() for copy in entry.copies if copy is not None]
