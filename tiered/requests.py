"""What a caller may ask of the engine, each a small object that is attempted under the engine's lock until it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tiered.errors import CapacityError, LeaseConflict, MisuseError, TieredError
from tiered.residency import Copy, State
from tiered.types import Access, Key, Slot, TensorSpec, Urgency

if TYPE_CHECKING:
    from tiered.admission import Admission

__all__ = ["Delete", "Flush", "Install", "Lease", "Prefetch", "Request", "Room"]


class Request:
    """``attempt`` returns True when done; it may raise a TieredError, which ends the request and reaches the caller."""

    def __init__(self, urgency: Urgency = Urgency.DEMAND, tier: int = 0) -> None:
        self.urgency, self.tier = urgency, tier
        self.sequence = 0
        self.done = False
        self.error: TieredError | None = None
        self.waits_for_room = False
        self.left = 0  # whenever this changes it has come closer, and the deadline counts anew
        self.packed: list[frozenset[Slot]] = []  # among which slots it packed what it had anew, once for each time

    def attempt(self, admission: Admission) -> bool:
        raise NotImplementedError

    def wants(self) -> Sequence[Key]:
        """Tensors that must not be evicted to make room for this request or for a later one."""
        return ()

    def failed(self, key: Key, error: TieredError) -> None:
        """``key`` could not be brought up."""

    def abandon(self, admission: Admission) -> None:
        """The caller gave up (deadline, Ctrl-C): undo what was granted meanwhile. Under the lock."""


class Lease(Request):
    """All of ``keys`` in ``tier`` at once, or none. ``copies`` are the granted ones, in the order of ``keys``."""

    def __init__(self, keys: Sequence[Key], tier: int, access: Access) -> None:
        super().__init__(Urgency.DEMAND, tier)
        self.keys, self.access = tuple(keys), access
        self.copies: list[Copy] = []

    def __str__(self) -> str:
        return f"a {self.access.name} lease of {', '.join(map(repr, self.keys[:3]))}{'…' if len(self.keys) > 3 else ''}"

    def wants(self) -> Sequence[Key]:
        return () if self.done else self.keys

    def attempt(self, admission: Admission) -> bool:
        entries = [admission.directory.entry(key) for key in self.keys]
        for entry in entries:
            admission.directory.refuse_conflict(entry, self.access)
        space, total = admission.tiers[self.tier], sum(entry.nbytes for entry in entries)
        if total > space.capacity:
            raise CapacityError(
                f"{self} needs {total:,} bytes, which can never be in tier {space.name} together ({space.capacity:,} bytes): "
                f"lease fewer at once, or open the store with more room there"
            )
        arrived = [admission.bring(entry, self.tier, self) for entry in entries]  # each starts on its way, not only the first
        ready = all(arrived)
        busy = [self.access is Access.WRITE and admission.busy(entry, self) for entry in entries]
        if not ready or any(busy):
            return False
        for entry in entries:
            copy = admission.directory.grant(entry, self.tier, self.access)
            copy.aliases += 1  # the view that the caller makes of it
            self.copies.append(copy)
            admission.policies[self.tier].touched(entry.key)
        return True

    def failed(self, key: Key, error: TieredError) -> None:
        if key in self.keys and not self.done:
            self.error, self.done = error, True

    def abandon(self, admission: Admission) -> None:
        while self.copies:
            copy = self.copies.pop()
            admission.directory.release(copy, self.access)
            copy.aliases -= 1


class Room(Request):
    """``nbytes`` contiguous bytes in ``tier`` for a put; ``slot`` is the caller's until it is installed or given back."""

    def __init__(self, tier: int, nbytes: int) -> None:
        super().__init__(Urgency.DEMAND, tier)
        self.nbytes = nbytes
        self.slot: Slot | None = None

    def __str__(self) -> str:
        return f"a put of {self.nbytes:,} bytes"

    def attempt(self, admission: Admission) -> bool:
        self.slot = admission.room(self.tier, self.nbytes, self)
        return self.slot is not None

    def abandon(self, admission: Admission) -> None:
        if self.slot is not None:
            admission.give_back(self.tier, self.slot)


class Install(Request):
    """``slot``, filled by the caller, becomes tensor ``key``; replaces what was there once its transfers have ended."""

    def __init__(self, key: Key, spec: TensorSpec, tier: int, slot: Slot) -> None:
        super().__init__(Urgency.DEMAND, tier)
        self.key, self.spec, self.slot = key, spec, slot

    def __str__(self) -> str:
        return f"a put of {self.key!r}"

    def attempt(self, admission: Admission) -> bool:
        old = admission.directory.find(self.key)
        if old is not None and not old.leased and admission.busy(old, self):
            return False
        try:
            entry = admission.directory.put(self.key, self.spec, self.tier, self.slot)
        except LeaseConflict:
            admission.give_back(self.tier, self.slot)
            raise
        copy = entry.copies[self.tier]
        assert copy is not None
        admission.install(copy)
        return True

    def abandon(self, admission: Admission) -> None:
        if not self.done:
            admission.give_back(self.tier, self.slot)


class Delete(Request):
    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key = key

    def __str__(self) -> str:
        return f"the deletion of {self.key!r}"

    def attempt(self, admission: Admission) -> bool:
        entry = admission.directory.entry(self.key)
        if not entry.leased and admission.busy(entry, self):
            return False
        admission.directory.forget(self.key)
        return True


class Prefetch(Request):
    """A hint: done when the tensor is there, on its way on the last hop, gone, or cannot come."""

    def __init__(self, key: Key, tier: int) -> None:
        super().__init__(Urgency.PREFETCH, tier)
        self.key = key

    def __str__(self) -> str:
        return f"a prefetch of {self.key!r}"

    def wants(self) -> Sequence[Key]:
        return (self.key,)

    def attempt(self, admission: Admission) -> bool:
        entry = admission.directory.find(self.key)
        if entry is None or entry.written:
            return True
        return admission.bring(entry, self.tier, self) or entry.copies[self.tier] is not None

    def failed(self, key: Key, error: TieredError) -> None:
        if key == self.key:
            self.done = True  # a hint is not tried twice


class Flush(Request):
    """Every byte at the bottom; ``then`` runs at that moment, still under the lock.

    A tensor that is not leased but still referenced from an ended lease is first copied to a slot of its own: bytes on
    their way out must not change. An open WRITE lease is an error.
    """

    def __init__(self, then: Callable[[], None], duplicate: Callable[[int, Slot, Slot, int], None]) -> None:
        super().__init__(Urgency.DEMAND)
        self._then, self._duplicate = then, duplicate
        self._first = True

    def __str__(self) -> str:
        return "a flush"

    def attempt(self, admission: Admission) -> bool:
        unsaved = admission.unsaved()
        for copy in unsaved:
            if copy.writers:
                raise LeaseConflict(f"tensor {copy.key!r} has an open WRITE lease: end it before a commit")
            if self._first:
                copy.failure = None
            elif copy.failure is not None:
                raise copy.failure
        self._first = False
        for copy in unsaved:
            if copy.state is State.DIRTY and not copy.in_flight:
                self._write_back(admission, copy)
            else:
                admission.hurry(copy.key, self.urgency)
        self.left = len(unsaved)
        if unsaved:
            return False
        self._then()
        return True

    def _write_back(self, admission: Admission, copy: Copy) -> None:
        entry = admission.directory.entry(copy.key)
        self.tier = copy.tier
        if copy.aliases and not copy.leased:
            slot = admission.room(copy.tier, entry.nbytes, self)
            if slot is None:
                return
            self._duplicate(copy.tier, copy.slot, slot, entry.nbytes)
            admission.install(admission.directory.move(copy, slot))
        if admission.bottom == 0:
            raise MisuseError("this store has no tier below the first one")
        admission.admit_writeback(entry, copy.tier, self)
