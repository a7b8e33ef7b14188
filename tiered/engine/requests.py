"""What callers hold of the store: leases, views of slots, and room for a put. Each lasts as long as its token lives.

A Python signal handler runs in the main thread, between two bytecodes of whatever runs there, and may raise (Ctrl-C). So the
end of what a caller holds must not depend on code that has yet to run. It is the death of a token: dropping the last reference
deallocates the token, its weak reference calls ``deque.append``, and all of that happens inside the interpreter, where no
handler can enter. Whoever has the engine's lock next applies what ended. The same holds for finalizers in the garbage
collector, which may run in a thread that has the lock: they append, and take none.

What a caller may ask of the engine, each a small object that is attempted under the engine's lock until it is done.

Why a request waited in vain, in one line that says what would help.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from tiered.engine.residency import Copy, Entry, Standing
from tiered.errors import CapacityError, TieredError
from tiered.types import Access, Fence, Key, Slot, TensorSpec, Urgency, Use

if TYPE_CHECKING:
    from tiered.engine.scheduler import Admission

__all__ = [
    "Claims",
    "Delete",
    "Ended",
    "Hold",
    "Holder",
    "Install",
    "Lease",
    "Prefetch",
    "Request",
    "Room",
    "Token",
    "View",
    "Work",
    "why_stuck",
]

class Token:
    """Held by whoever has a lease, a view or room. Nothing is in it."""

    __slots__ = ("__weakref__",)


Holder = weakref.ref[Token]
Ended = Holder | Callable[[], None]
"""A token that died, or work that was left for whoever has the lock next; the work may be done twice."""

View = tuple[Holder, Copy, object]
"""Somebody can reach the memory of the copy's slot, and last used it on the stream that comes third. (A plain tuple, for one
is made with every lease.)"""


class LeaseHold(Protocol):
    """A granted lease; ``stream`` is the one that its holder computes on."""

    holder: Holder | None
    copies: list[Copy]
    access: Access
    stream: object


class RoomHold(Protocol):
    """A slot of ``tier`` that a put fills; ``stream`` is the one that it is filled on."""

    holder: Holder | None
    tier: int
    slot: Slot | None
    stream: object


Hold = LeaseHold | RoomHold | View


class Claims:
    """All holds, by the identity of their weak references. What is kept elsewhere of them (readers, writers, aliases, used
    slots) can be counted anew from here.

    ``ended`` is filled by dying tokens, in any thread; everything else is called under the engine's lock.
    """

    def __init__(self) -> None:
        self.ended: deque[Ended] = deque()
        self._holds: dict[int, Hold] = {}

    def watch(self, token: Token) -> Holder:
        """A reference that tells of the death of ``token``, whatever it comes to stand for."""
        return weakref.ref(token, self.ended.append)

    def grant(self, hold: LeaseHold | RoomHold) -> None:
        """It is its holder's from here on."""
        if hold.holder is not None:
            self._holds[id(hold.holder)] = hold

    def view(self, copy: Copy, stream: object = None) -> Token:
        """The token of a view that somebody is about to make of ``copy``'s slot."""
        token = Token()
        holder = weakref.ref(token, self.ended.append)
        self._holds[id(holder)] = (holder, copy, stream)
        copy.aliases += 1
        return token

    def used_on(self, token: Token, stream: object) -> None:
        """The view of ``token`` is used on ``stream``. May be called without the lock."""
        for holder in weakref.getweakrefs(token):
            found = self._holds.get(id(holder))
            if isinstance(found, tuple):
                self._holds[id(holder)] = (holder, found[1], stream)

    def has(self, hold: RoomHold) -> bool:
        """Whether its slot is still its own."""
        return hold.holder is None or id(hold.holder) in self._holds

    def take(self, holder: Holder | None) -> Hold | None:
        """What ``holder`` stood for, which is over; None where that was never granted, or was taken before."""
        return self._holds.pop(id(holder), None)

    def drop_dead(self) -> None:
        """Forget all whose token has died."""
        for hold in self:
            holder = hold[0] if isinstance(hold, tuple) else hold.holder
            if holder is not None and holder() is None:
                self.take(holder)

    def __iter__(self) -> Iterator[Hold]:
        return iter(list(self._holds.values()))


class Request:
    """``attempt`` returns True when done; it may raise a TieredError, which ends the request and reaches the caller.

    ``attempt`` runs in the engine's thread, which no signal handler enters. What can be done at once ``attempt_here`` does in
    the caller's thread, where an exception may strike at any bytecode: it may only do what ``Admission.recount`` can mend.

    ``holder`` refers to the token of whoever waits for it, where something is granted: when that is dead, nobody wants it.
    """

    deferred = False
    """``attempt`` takes long, or has more than one step: it is abandoned by the engine's thread, too."""

    def __init__(
        self, urgency: Urgency = Urgency.DEMAND, tier: int = 0, holder: Holder | None = None
    ) -> None:
        self.urgency, self.tier, self.holder = urgency, tier, holder
        self.sequence = 0
        self.done = False
        self.error: TieredError | None = None
        self.abandoned = False  # the caller gave up, or was struck
        self.tried = False  # by the engine
        self.lacks: tuple[int, ...] = ()  # the tiers in which its last attempt found no room
        self.short = False  # whether any attempt found no room, since the waiting caller looked last
        self.left = 0  # whenever this changes it has come closer, and the deadline counts anew
        self._pushed: dict[int, list[Copy]] = {}  # by tier, what is on its way out for it, the first last
        self._pushed_bytes, self._least = 0, math.inf
        self.packed: list[frozenset[Slot]] = []  # among which slots it packed what it had anew, once for each time
        self.replaces = False  # whether it does away with the tensor that it waits for
        self.needed: int | None = None  # the position in a known order for which it fetches
        self.on_done: Callable[[], None] | None = None

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.abandoned or (self.holder is not None and self.holder() is None)

    def attempt_here(self, admission: Admission) -> bool:
        """Whether it is done without a transfer, an eviction or a wait."""
        return False

    def attempt(self, admission: Admission) -> bool:
        raise NotImplementedError

    def push(self, tier: int, copies: Sequence[Copy], capacity: int) -> None:
        """``copies`` are on their way out of ``tier`` for it, and each that goes brings it closer; but not for ever, where
        others take the room: until it has pushed twice what the tier holds."""
        self._pushed[tier] = list(reversed(copies))
        self._pushed_bytes += sum(copy.slot.nbytes for copy in copies)
        if self._pushed_bytes <= 2 * capacity:
            self._least = math.inf

    def pushes(self, tier: int) -> bool:
        """Whether any of these are still under way."""
        pushed = self._pushed.get(tier)
        if not pushed:
            return False
        while pushed and pushed[-1].standing is not Standing.LEAVING:
            pushed.pop()
        if (count := sum(map(len, self._pushed.values()))) < self._least:
            self._least = count
            self.left -= 1
        return bool(pushed)

    def wants(self) -> Sequence[Key]:
        """Tensors that must not be evicted to make room for this request or for a later one."""
        return ()

    def failed(self, key: Key, error: TieredError) -> None:
        """``key`` could not be brought up."""

    def notify(self) -> None:
        """It is done, and whoever waits for it is not blocked in a thread. Under the lock."""
        on_done, self.on_done = self.on_done, None  # which refers to who waits, and must not outlive that
        if on_done is not None:
            on_done()

    def raise_error(self) -> None:
        """Raise its error, if it has one. That has every caller's frame in its traceback: a reference from there back to it
        would keep their tensors till a collection."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def abandon(self, admission: Admission) -> None:
        """Nobody waits for it any more: undo what it began. By the engine, under the lock."""


class Lease(Request):
    """All of ``keys`` in ``tier`` at once, or none. ``copies`` are those granted, ``specs`` theirs and ``views`` the tokens of
    the views that the caller makes of them, as ``keys`` are. It ends with the token of ``holder``."""

    def __init__(
        self, keys: Sequence[Key], tier: int, access: Access, holder: Holder | None = None
    ) -> None:
        super().__init__(Urgency.DEMAND, tier, holder)
        self.keys, self.access = tuple(keys), access
        self.copies: list[Copy] = []
        self.specs: list[TensorSpec] = []
        self.views: list[Token] = []
        self.misused: Key | None = None  # written to under it, though it is for READ
        self.stream: object = None

    def __str__(self) -> str:
        return f"a {self.access.name} lease of {', '.join(map(repr, self.keys[:3]))}{'…' if len(self.keys) > 3 else ''}"

    def wants(self) -> Sequence[Key]:
        return () if self.done else self.keys

    def attempt_here(self, admission: Admission) -> bool:
        directory, write = admission.directory, self.access is Access.WRITE
        entries = [directory.entry(key) for key in self.keys]
        for entry in entries:
            directory.refuse_conflict(entry, self.access)
        if not self._resident(admission, entries):
            return False
        if write and (admission.flush is not None or any(entry.in_flight for entry in entries)):
            return False
        self._grant(admission, entries)
        return True

    def attempt(self, admission: Admission) -> bool:
        entries = [admission.directory.entry(key) for key in self.keys]
        for entry in entries:
            admission.directory.refuse_conflict(entry, self.access)
        if not self._resident(admission, entries):
            self._refuse_impossible(admission, [entry.nbytes for entry in entries])
            arrived = [admission.bring(entry, self.tier, self) for entry in entries]  # each starts, not only the first
            if not all(arrived):
                return False
        if self.access is Access.WRITE and sum(admission.busy(entry, self) for entry in entries):  # each hurries
            return False
        self._grant(admission, entries)
        return True

    def _grant(self, admission: Admission, entries: Sequence[Entry]) -> None:
        write = self.access is Access.WRITE
        admission.changing = True
        admission.disturbances += write
        for entry in entries:
            copy = admission.directory.lend(entry, self.tier, self.access)
            self.views.append(admission.claims.view(copy))
            self.copies.append(copy)
            self.specs.append(entry.spec)
            admission.used(entry, self.tier, Use.WRITE if write else Use.READ)
        admission.claims.grant(self)
        admission.changing = False

    def _resident(self, admission: Admission, entries: Sequence[Entry]) -> bool:
        for entry in entries:
            copy = entry.copies[self.tier]
            if copy is None or not copy.valid:
                return False
            if copy.spoiled:
                admission.refuse_spoiled(copy)
        return True

    def abandon(self, admission: Admission) -> None:
        if self.holder is not None and admission.claims.take(self.holder) is not None:
            admission.lease_ended(self)
        self.views.clear()

    def _refuse_impossible(self, admission: Admission, sizes: Sequence[int]) -> None:
        space = admission.places[self.tier].tier
        alignment = getattr(space, "alignment", 1)
        total = sum(-(-nbytes // alignment) * alignment for nbytes in sizes)
        if total > space.capacity:
            raise CapacityError(
                f"{self} needs {total:,} bytes, which can never be in tier {space.name} together ({space.capacity:,} bytes): "
                f"lease fewer at once, or open the store with more room there"
            )

    def failed(self, key: Key, error: TieredError) -> None:
        if key in self.keys and not self.done:
            self.error, self.done = error, True


class Room(Request):
    """``nbytes`` contiguous bytes in ``tier`` for a put of ``key``; ``slot`` is the caller's until it is installed, or until
    the token of ``holder`` dies. Raises LeaseConflict, which it makes no sense to wait for."""

    def __init__(self, tier: int, nbytes: int, key: Key | None = None, holder: Holder | None = None) -> None:
        super().__init__(Urgency.DEMAND, tier, holder)
        self.nbytes, self.key = nbytes, key
        self.slot: Slot | None = None
        self.stream: object = None

    def __str__(self) -> str:
        return f"a put of {self.nbytes:,} bytes"

    def attempt_here(self, admission: Admission) -> bool:
        if self.key is not None:
            admission.directory.refuse_leased(self.key)
        admission.changing = True
        self._granted(admission, admission.places[self.tier].take(self.nbytes))
        admission.changing = False
        return self.slot is not None

    def attempt(self, admission: Admission) -> bool:
        if self.key is not None:
            admission.directory.refuse_leased(self.key)
        self._granted(admission, admission.room(self.tier, self.nbytes, self))
        if self.slot is None:
            admission.refuse_full(self.tier, self.nbytes)
        return self.slot is not None

    def _granted(self, admission: Admission, slot: Slot | None) -> None:
        self.slot = slot
        if slot is not None:
            admission.claims.grant(self)
            admission.background.unsettled = True  # there is less room


class Install(Request):
    """What the caller filled ``room`` with becomes tensor ``key``; replaces what was there once its transfers have ended.

    ``fences`` pass when what fills it has run. Where the room was given up meanwhile, nothing happens.
    """

    def __init__(self, key: Key, spec: TensorSpec, room: Room, fences: tuple[Fence, ...] = ()) -> None:
        super().__init__(Urgency.DEMAND, room.tier, room.holder)
        self.key, self.spec, self.room, self.fences = key, spec, room, fences
        self.replaces = True

    def __str__(self) -> str:
        return f"a put of {self.key!r}"

    def attempt_here(self, admission: Admission) -> bool:
        admission.directory.refuse_leased(self.key)
        old = admission.directory.find(self.key)
        if old is not None and (admission.flush is not None or old.in_flight):
            return False
        self._install(admission)
        return True

    def attempt(self, admission: Admission) -> bool:
        old = admission.directory.find(self.key)
        if old is not None and not old.leased and admission.busy(old, self):
            return False
        admission.directory.refuse_leased(self.key)
        self._install(admission)
        return True

    def _install(self, admission: Admission) -> None:
        slot = self.room.slot
        if slot is None or not admission.claims.has(self.room):
            return
        admission.changing = True
        entry = admission.directory.put(self.key, self.spec, self.tier, slot, self.fences)
        admission.claims.take(self.room.holder)
        copy = entry.copies[self.tier]
        assert copy is not None
        admission.install(copy)
        admission.used(entry, self.tier, Use.PUT)
        admission.background.changed(admission, copy)  # a plan says more of it from now on
        admission.changing = False


class Delete(Request):
    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key = key
        self.replaces = True

    def __str__(self) -> str:
        return f"the deletion of {self.key!r}"

    def attempt_here(self, admission: Admission) -> bool:
        entry = admission.directory.entry(self.key)
        admission.directory.refuse_leased(self.key)
        if admission.flush is not None or entry.in_flight or entry.aside:
            return False
        admission.changing = True
        admission.directory.forget(self.key)
        admission.changing = False
        return True

    def attempt(self, admission: Admission) -> bool:
        entry = admission.directory.entry(self.key)
        if not entry.leased and admission.busy(entry, self):
            return False
        if not entry.aside:  # else it is gone already, for all who ask
            admission.directory.forget(self.key)
        return True


class Work(Request):
    """Something that has to be done whole, by the engine's thread."""

    def __init__(self, what: str, work: Callable[[], None]) -> None:
        super().__init__()
        self._what, self._work = what, work
        self._failure: BaseException | None = None

    def __str__(self) -> str:
        return self._what

    def attempt(self, admission: Admission) -> bool:
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
    """A hint: done when each tensor is there, on its way on the last hop, gone, or cannot come. They start in order."""

    def __init__(self, keys: Iterable[Key], tier: int) -> None:
        super().__init__(Urgency.PREFETCH, tier)
        self._waiting = deque(keys)
        self._moving: list[Key] = []

    def __str__(self) -> str:
        return f"a prefetch of {len(self._waiting) + len(self._moving)} tensors"

    def wants(self) -> Sequence[Key]:
        return self._moving

    def attempt(self, admission: Admission) -> bool:
        self._moving = [key for key in self._moving if self._goes_on(admission, key) is not _There.ARRIVED]
        while self._waiting:
            there = self._goes_on(admission, self._waiting[0])
            if there is _There.NOT_YET:
                return False
            key = self._waiting.popleft()
            if there is _There.COMING:
                self._moving.append(key)
        return not self._moving

    def _goes_on(self, admission: Admission, key: Key) -> _There:
        entry = admission.directory.find(key)
        if entry is None or entry.written:
            return _There.ARRIVED
        try:
            if admission.bring(entry, self.tier, self) or entry.copies[self.tier] is not None:
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


def why_stuck(admission: Admission, request: Request, waited: float) -> str:
    """Names the tiers that have no room for ``request``, which need not be the one it is for, and who holds them."""
    lacking = [admission.places[tier] for tier in sorted(set(request.lacks), reverse=True)]
    if not lacking:
        return f"{request} waited {waited:.1f} s for {_awaited(admission, request)}"
    held = [place for place in lacking if place.holders()]
    rooms = "; ".join(
        f"tier {place.tier.name}: {place.used:,} of {place.tier.capacity:,} bytes are in use, held by {_names(place.holders())}"
        for place in held or lacking[:1]
    )
    return (
        f"{request} waited {waited:.1f} s for room in {rooms}. Release leases and the tensors they gave, "
        f"or open the store with more room"
    )


def _awaited(admission: Admission, request: Request) -> str:
    """What keeps ``request`` where there is room enough."""
    entries = [entry for entry in map(admission.directory.find, request.wants()) if entry is not None]
    copies = [copy for entry in entries for copy in entry.copies if copy is not None and copy.dirty]
    held = [copy for copy in copies if copy.tier != request.tier and (copy.leased or copy.aliases)]
    if not held:
        return "transfers in flight: what the store lies on is too slow, or does not answer"
    return (
        f"{_names(held)} in tier {admission.places[held[0].tier].tier.name}, which can be written back after that. "
        f"Release leases and the tensors they gave"
    )


def _names(held: Sequence[Copy]) -> str:
    names = ", ".join(
        f"{c.key!r} ({c.slot.nbytes:,} bytes, {'leased' if c.leased else 'still referenced after its lease'})" for c in held[:8]
    )
    more = f" and {len(held) - 8} more" if len(held) > 8 else ""
    return f"{names or 'nobody: what is there is on its way, or lies too far apart'}{more}"
