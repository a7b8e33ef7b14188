"""What a caller may ask of the engine, each a small object that is attempted under the engine's lock until it is done."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tiered.claims import Holder, Token
from tiered.errors import CapacityError, TieredError
from tiered.residency import Copy, Entry, Standing
from tiered.types import Access, Fence, Key, Slot, TensorSpec, Urgency, Use

if TYPE_CHECKING:
    from tiered.admission import Admission

__all__ = ["Delete", "Install", "Lease", "Prefetch", "Request", "Room", "Work"]


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
