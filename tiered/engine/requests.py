"""What a caller may ask of the engine, and the queue of those requests that wait.

A request is attempted under the engine's lock until it is done: at first in the caller's thread, where only what needs no
transfer, no eviction and no wait is done, then by the engine's thread after every change.
"""

from __future__ import annotations

import enum
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from tiered.engine.claims import Holder, LeaseHold, RoomHold, TensorHold, Token
from tiered.engine.pool import Pool
from tiered.engine.residency import Copy, Entry, State
from tiered.engine.scheduler import QUEUED, Scheduler
from tiered.engine.state import EngineState, Ticket
from tiered.errors import CapacityError, MisuseError, TieredError
from tiered.types import AHEAD, Access, Fence, Key, Owner, Slot, TensorSpec, Urgency, Use

__all__ = [
    *("Delete", "Install", "Lease", "Offload", "Prefetch", "Rename", "Request", "RequestQueue", "Room", "Work", "why_stuck"),
]


_NBYTES, _IN_FLIGHT = operator.attrgetter("nbytes"), operator.attrgetter("in_flight")
_ORDER = operator.attrgetter("urgency", "sequence")

AT_A_TIME = 256
"""Tensors of an offload that are looked at in each attempt: a look at all of thousands would take longer than a transfer."""


class Request(Ticket):
    """``attempt`` returns True when done; it may raise a TieredError, which ends the request and reaches the caller.

    ``attempt`` runs in the engine's thread, which no signal handler enters. What can be done at once ``attempt_here`` does in
    the caller's thread, where an exception may strike at any bytecode: it may only do what ``EngineState.recount`` can mend.
    """

    deferred = False
    """``attempt`` takes long, or has more than one step: the request is abandoned by the engine's thread, too."""

    moves = True
    """Whether the caller waits for bytes, or for room, and not for what the engine's thread computes."""

    on_done: Callable[[], None] | None = None

    def attempt_here(self, state: EngineState) -> bool:
        """Return whether the request is done without a transfer, an eviction or a wait."""
        return False

    def attempt(self, scheduler: Scheduler) -> bool:
        raise NotImplementedError

    def abandon(self, state: EngineState) -> None:
        """Undo what the request began: nobody waits for it any more. Called under the lock."""

    def notify(self) -> None:
        """Tell whoever waits for the request, and is not blocked in a thread, that it is done. Called under the lock."""
        on_done, self.on_done = self.on_done, None  # which refers to who waits, and must not outlive that
        if on_done is not None:
            on_done()

    def raise_error(self) -> None:
        """Raise the request's error, if it has one.

        The error has every caller's frame in its traceback: a reference from there back to the error would keep the callers'
        tensors till a collection.
        """
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


class Lease(Request, LeaseHold):
    """Grants all of ``keys`` in ``tier`` at once, or none of them.

    ``copies`` are the granted copies, ``entries`` their tensors and ``views`` the tokens of the views that the caller makes of
    them, in the order of ``keys``; where the lease is not ``viewed`` the caller makes none. The lease ends with the token of
    ``holder``.
    """

    def __init__(
        self, keys: Sequence[Key], tier: int, access: Access, holder: Holder | None = None, *, viewed: bool = True
    ) -> None:
        super().__init__(Urgency.DEMAND, tier, holder)
        self.keys, self.access, self._viewed = tuple(keys), access, viewed
        self.copies: list[Copy] = []
        self.entries: Sequence[Entry] = ()
        self.views: list[Token] = []

    def __str__(self) -> str:
        return f"a {self.access.name} lease of {', '.join(map(repr, self.keys[:3]))}{'…' if len(self.keys) > 3 else ''}"

    def wants(self) -> Sequence[Key]:
        return () if self.done else self.keys

    def attempt_here(self, state: EngineState) -> bool:
        entries = state.directory.leasable(self.keys, self.access)
        if self._missing(state, entries):
            return False
        if self.access is Access.WRITE and (state.snapshot is not None or any(map(_IN_FLIGHT, entries))):
            return False
        self._grant(state, entries)
        return True

    def attempt(self, scheduler: Scheduler) -> bool:
        state = scheduler.state
        entries = state.directory.leasable(self.keys, self.access)
        if missing := self._missing(state, entries):
            pool = state.pools[self.tier]
            if sum(map(_NBYTES, entries)) + len(entries) * pool.alignment > pool.tier.capacity:  # with all of them rounded up
                self._refuse_impossible(pool, entries)
            self.lacking = 0
            for entry in missing:
                if entry.copies[self.tier] is None:
                    self.lacking += entry.nbytes
            for entry in missing:  # each of them starts, and not only the first
                scheduler.bring(entry, self.tier, self)
            return False
        if self.access is Access.WRITE and sum(scheduler.busy(entry, self) for entry in entries):  # each hurries
            return False
        self._grant(state, entries)
        return True

    def _grant(self, state: EngineState, entries: Sequence[Entry]) -> None:
        write = self.access is Access.WRITE
        state.changing = True
        state.disturbances += write
        for entry in entries:
            copy = state.directory.lend(entry, self.tier, self.access)
            if self._viewed:
                self.views.append(state.claims.view(copy))
            self.copies.append(copy)
        self.entries = entries
        state.used(entries, self.tier, Use.WRITE if write else Use.READ)
        state.claims.grant(self)
        state.changing = False

    def _missing(self, state: EngineState, entries: Sequence[Entry]) -> list[Entry]:
        """Return those of ``entries`` of which the tier does not have the bytes."""
        tier, missing = self.tier, []
        for entry in entries:
            copy = entry.copies[tier]
            if copy is None or not copy.valid:
                missing.append(entry)
            elif copy.spoiled:
                state.refuse_spoiled(copy)
        return missing

    def abandon(self, state: EngineState) -> None:
        if self.holder is not None and state.claims.take(self.holder) is not None:
            state.lease_ended(self)
        self.views.clear()

    def _refuse_impossible(self, pool: Pool, entries: Sequence[Entry]) -> None:
        space = pool.tier
        total = sum(pool.rounded(entry.nbytes) for entry in entries)
        if total > space.capacity:
            together, fewer = (" together", "lease fewer at once, or ") if len(entries) > 1 else ("", "")
            raise CapacityError(
                f"{self} needs {total:,} bytes, which can never be in tier {space.name}{together} ({space.capacity:,} bytes): "
                f"{fewer}open the store with more room there"
            )

    def failed(self, key: Key, error: TieredError) -> None:
        if key in self.keys and not self.done:
            self.error, self.done = error, True


class Room(Request, RoomHold):
    """Reserves ``nbytes`` contiguous bytes in ``tier`` for a put of ``key`` by ``owner`` (None: the user).

    ``slot`` is the caller's until it is installed, or until the token of ``holder`` dies. Raises LeaseConflict at once: to wait
    for the end of a lease of the caller's would be a deadlock. So it raises MisuseError where ``key`` is somebody else's.
    """

    def __init__(
        self, tier: int, nbytes: int, key: Key | None = None, holder: Holder | None = None, owner: Owner | None = None
    ) -> None:
        super().__init__(Urgency.DEMAND, tier, holder)
        self.nbytes, self.key, self.owner = nbytes, key, owner

    def __str__(self) -> str:
        return f"a put of {self.nbytes:,} bytes"

    def attempt_here(self, state: EngineState) -> bool:
        if self.key is not None:
            state.directory.refuse_put(self.key, self.owner)
        state.changing = True
        self._granted(state, state.pools[self.tier].take(self.nbytes))
        state.changing = False
        return self.slot is not None

    def attempt(self, scheduler: Scheduler) -> bool:
        state = scheduler.state
        if self.key is not None:
            state.directory.refuse_put(self.key, self.owner)
        self._granted(state, scheduler.room(self.tier, self.nbytes, self, self.key))
        if self.slot is None:
            scheduler.refuse_full(self.tier, self.nbytes, self.key)
        return self.slot is not None

    def _granted(self, state: EngineState, slot: Slot | None) -> None:
        self.slot = slot
        if slot is not None:
            state.claims.grant(self)
            state.writeback_due = True  # there is less room


class Install(Request):
    """Makes tensor ``key`` of what the caller filled ``room`` with, once transfers of the replaced tensor have ended.

    ``fences`` pass when the work that fills the room has run. Where the room was given up meanwhile, nothing happens. With
    ``lifetime``, a reference to a token that ``Claims.watch`` gave, the tensor is temporary: in no commit, and deleted when
    that token dies. ``owner``: who owns the tensor from then on (None: the user).
    """

    def __init__(
        self,
        key: Key,
        spec: TensorSpec,
        room: Room,
        fences: tuple[Fence, ...] = (),
        lifetime: Holder | None = None,
        owner: Owner | None = None,
    ) -> None:
        super().__init__(Urgency.DEMAND, room.tier, room.holder)
        self.key, self.spec, self.room, self.fences, self._lifetime = key, spec, room, fences, lifetime
        self.owner = owner
        self.replaces = True

    def __str__(self) -> str:
        return f"a put of {self.key!r}"

    def attempt_here(self, state: EngineState) -> bool:
        state.directory.refuse_put(self.key, self.owner)
        old = state.directory.find(self.key)
        if old is not None and (state.snapshot is not None or old.in_flight):
            return False
        self._install(state)
        return True

    def attempt(self, scheduler: Scheduler) -> bool:
        state = scheduler.state
        old = state.directory.find(self.key)
        if old is not None and not old.leased and scheduler.busy(old, self):
            return False
        state.directory.refuse_put(self.key, self.owner)
        self._install(state)
        return True

    def _install(self, state: EngineState) -> None:
        slot = self.room.slot
        if slot is None or not state.claims.has(self.room):
            return
        state.changing = True
        temporary = self._lifetime is not None
        entry = state.directory.put(self.key, self.spec, self.tier, slot, self.fences, temporary=temporary, owner=self.owner)
        if self._lifetime is not None:
            state.claims.grant(TensorHold(self._lifetime, self.key, entry.tensor_id))
        state.claims.take(self.room.holder)
        copy = entry.copies[self.tier]
        assert copy is not None
        if entry.temporary:
            state.write_at_once(copy)
        state.used((entry,), self.tier, Use.PUT)
        if self.tier < state.bottom:
            state.pools[self.tier].plan(copy)  # a plan says more of it from now on
        state.changing = False


class Delete(Request):
    """Deletes tensor ``key`` of ``owner`` (None: of the user), once its transfers have ended."""

    def __init__(self, key: Key, owner: Owner | None = None) -> None:
        super().__init__()
        self.key, self.owner = key, owner
        self.replaces = True

    def __str__(self) -> str:
        return f"the deletion of {self.key!r}"

    def attempt_here(self, state: EngineState) -> bool:
        entry = state.directory.entry(self.key)
        state.directory.refuse_foreign(self.key, self.owner)
        state.directory.refuse_leased(self.key)
        if state.snapshot is not None or entry.in_flight or entry.aside:
            return False
        state.changing = True
        state.directory.forget(self.key)
        state.changing = False
        return True

    def attempt(self, scheduler: Scheduler) -> bool:
        state = scheduler.state
        entry = state.directory.entry(self.key)
        state.directory.refuse_foreign(self.key, self.owner)
        if not entry.leased and scheduler.busy(entry, self):
            return False
        if not entry.aside:  # else it is gone already, for all who ask
            state.directory.forget(self.key)
        return True


class Rename(Request):
    """Gives tensors other keys and owners, all at once: of each the key and the owner that it has, and those that it gets.

    Keys may be exchanged. A key that is free afterwards is free for others. No byte moves. Waits for transfers of the tensors,
    and for a commit that is under way, whose manifest has the keys of before.
    """

    def __init__(self, moves: Sequence[tuple[Key, Owner | None, Key, Owner | None]]) -> None:
        super().__init__()
        self._moves = moves

    def __str__(self) -> str:
        return f"a renaming of {len(self._moves)} tensors"

    def attempt(self, scheduler: Scheduler) -> bool:
        state, directory = scheduler.state, scheduler.state.directory
        entries = [directory.entry(key) for key, *_ in self._moves]
        leaving = {key for key, *_ in self._moves}
        for key, owner, new, new_owner in self._moves:
            directory.refuse_leased(key)
            directory.refuse_foreign(key, owner)
            if new not in leaving and new in directory:
                raise MisuseError(f"there is a tensor {new!r} already: delete it, or give {key!r} another name")
            if new_owner is not None:
                directory.admit(new_owner)
        if sum(scheduler.busy(entry, self) for entry in entries) or state.snapshot is not None:
            return False
        # Each goes by way of a key that nobody has, so that two may exchange theirs.
        for entry in entries:
            state.rename(entry, f"{entry.key}\0renamed\0{entry.tensor_id}", entry.owner)
        for entry, (_, _, new, new_owner) in zip(entries, self._moves, strict=True):
            state.rename(entry, new, new_owner)
        return True


class Offload(Request):
    """Moves ``keys`` down until no tier above ``tier`` has a copy of them: what no tier below has is written back first.

    A tensor stays where somebody has leased it, or still refers to its memory; ``stayed`` are those tensors. Raises the error
    of a write-back that failed, and CapacityError where the tier is full and nothing can leave it.
    """

    def __init__(self, keys: Iterable[Key], tier: int) -> None:
        super().__init__(Urgency.DEMAND, tier)
        self._waiting = dict.fromkeys(keys)
        self.stayed: list[Key] = []

    def __str__(self) -> str:
        return f"an offload of {len(self._waiting)} tensors"

    def attempt(self, scheduler: Scheduler) -> bool:
        for key in list(islice(self._waiting, AT_A_TIME)):
            entry = scheduler.state.directory.find(key)
            if entry is None or self._is_down(scheduler, entry):
                del self._waiting[key]
        self.progress = len(self._waiting)
        return not self._waiting

    def _is_down(self, scheduler: Scheduler, entry: Entry) -> bool:
        """Whether nothing is left to do for ``entry``; if not, admit the next transfer on its way down."""
        for tier in range(self.tier):
            copy = entry.copies[tier]
            if copy is None:
                continue
            if copy.failure is not None:
                failure, copy.failure = copy.failure, None  # a later request tries again
                raise failure
            if scheduler.busy(entry, self):
                return False
            if not copy.idle:
                self.stayed.append(entry.key)
                return True
            if copy.state is State.DIRTY:
                scheduler.admit_writeback(entry, tier, self)
                return False
            scheduler.evict(copy)
        return True


class Work(Request):
    """Runs ``work`` whole in the engine's thread; ``what`` names it in errors."""

    moves = False

    def __init__(self, what: str, work: Callable[[], None]) -> None:
        super().__init__()
        self._what, self._work = what, work
        self._failure: BaseException | None = None

    def __str__(self) -> str:
        return self._what

    def attempt(self, scheduler: Scheduler) -> bool:
        try:
            self._work()
        except BaseException as error:  # it is the caller's, and no reason for the engine to stop
            self._failure = error
        return True

    def raise_failure(self) -> None:
        """Raise what the work raised."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure


class Prefetch(Request):
    """Brings ``keys`` to ``tier`` in order, as a hint; ``urgency`` is PREFETCH, or SPECULATIVE where nobody knows whether they
    will be used: then it ends at the first for which there is no room. ``thread``: a token that dies with the thread whose next
    hint takes its place.

    Done when each tensor is there, on its way on the last hop, deleted, or cannot come.
    """

    def __init__(
        self, keys: Iterable[Key], tier: int, urgency: Urgency = Urgency.PREFETCH, thread: Holder | None = None
    ) -> None:
        super().__init__(urgency, tier)
        self.thread = thread
        self.lacking = QUEUED
        self._waiting = deque(keys)
        self._moving: list[Key] = []

    def __str__(self) -> str:
        return f"a prefetch of {len(self._waiting) + len(self._moving)} tensors"

    def wants(self) -> Sequence[Key]:
        return self._moving

    def attempt(self, scheduler: Scheduler) -> bool:
        self._moving = [key for key in self._moving if self._goes_on(scheduler, key) is not _There.ARRIVED]
        while self._waiting:
            there = self._goes_on(scheduler, self._waiting[0])
            if there is _There.NOT_YET and self.urgency is Urgency.SPECULATIVE and self.full_tiers:
                self._waiting.clear()  # to look again after each change would cost more than it brings
                break
            if there is _There.NOT_YET:
                return False
            key = self._waiting.popleft()
            if there is _There.COMING:
                self._moving.append(key)
        return not self._moving

    def _goes_on(self, scheduler: Scheduler, key: Key) -> _There:
        state = scheduler.state
        entry = state.directory.find(key)
        if entry is None or entry.writers:
            return _There.ARRIVED
        if self.urgency is Urgency.SPECULATIVE and state.order is not None:
            self.expected_at = state.order.plan.expected(key)
        try:
            if scheduler.bring(entry, self.tier, self) or entry.copies[self.tier] is not None:
                return _There.ARRIVED
        except TieredError:
            return _There.ARRIVED  # a hint is not tried twice
        return _There.COMING if entry.in_flight else _There.NOT_YET

    def failed(self, key: Key, error: TieredError) -> None:
        self._moving = [other for other in self._moving if other != key]


class _There(enum.Enum):
    ARRIVED = "nothing is left to do"
    COMING = "on its way"
    NOT_YET = "it could not start"


class RequestQueue:
    """The requests that wait. All calls are made under the engine's lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.waiting: list[Request] = []
        self._scheduler, self._state = scheduler, scheduler.state
        self._state.waiting = self.waiting

    def attempt(self, request: Request) -> bool:
        """Attempt ``request``; return whether it is done, now at the latest. Its error, if any, is kept in it."""
        if request.done:
            return True
        request.full_tiers = ()
        self._state.asked = request
        if request.search is not None:
            request.search.begin()
        try:
            request.done = request.attempt(self._scheduler)
        except TieredError as error:
            request.error, request.done = error, True
        finally:
            self._state.asked = None
        request.tried = True
        request.short = request.short or bool(request.full_tiers)
        return request.done

    @property
    def any_ahead(self) -> bool:
        """Whether a hint waits."""
        for request in self.waiting:  # noqa: SIM110 - a generator takes thrice as long; this is on the path of every transfer
            if request.urgency in AHEAD:
                return True
        return False

    def advance(self) -> bool:
        """Attempt every waiting request, the urgent and the old first; return whether one got done."""
        self._scheduler.exhausted = {}
        left = False
        try:
            for request in sorted(self.waiting, key=_ORDER):
                if request.unwanted:
                    self.waiting.remove(request)
                    request.abandon(self._state)
                    left = True  # others may have what it was waiting for
                elif self.attempt(request):
                    self.waiting.remove(request)  # at once: the engine must not turn and turn until the caller has woken
                    request.notify()
                    left = True
            return left
        finally:
            self._scheduler.exhausted = None


def why_stuck(state: EngineState, request: Request, waited: float) -> str:
    """Say why ``request`` waited in vain, in one line: the tiers that have no room, and who holds their room."""
    lacking = [state.pools[tier] for tier in sorted(set(request.full_tiers), reverse=True)]
    if not lacking:
        return f"{request} waited {waited:.1f} s for {_awaited(state, request)}"
    held = [pool for pool in lacking if pool.holders()]
    rooms = "; ".join(
        f"tier {pool.tier.name}: {pool.in_use()}, held by {_names(pool.holders())}"
        for pool in held or lacking[:1]
    )
    saved = any(not copy.leased for pool in held for copy in pool.holders())
    gave = "the tensors they gave, also what autograd saved of them for backward" if saved else "the tensors they gave"
    return f"{request} waited {waited:.1f} s for room in {rooms}. Release leases and {gave}, or open the store with more room"


def _awaited(state: EngineState, request: Request) -> str:
    """Say what keeps ``request`` where there is room enough."""
    entries = [entry for entry in map(state.directory.find, request.wants()) if entry is not None]
    copies = [copy for entry in entries for copy in entry.copies if copy is not None and copy.dirty]
    held = [copy for copy in copies if copy.tier != request.tier and (copy.leased or copy.aliases)]
    if not held:
        return "transfers in flight: what the store lies on is too slow, or does not answer"
    return (
        f"{_names(held)} in tier {state.pools[held[0].tier].tier.name}, which can be written back after that. "
        f"Release leases and the tensors they gave"
    )


def _names(held: Sequence[Copy]) -> str:
    names = ", ".join(
        f"{c.key!r} ({c.slot.nbytes:,} bytes, {'leased' if c.leased else 'still referenced after its lease'})" for c in held[:8]
    )
    more = f" and {len(held) - 8} more" if len(held) > 8 else ""
    return f"{names or 'nobody: what is there is on its way, or lies too far apart'}{more}"
