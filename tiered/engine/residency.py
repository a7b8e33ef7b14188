"""Where every tensor is: a state per copy, that is per (tensor, tier), and the only code that changes one.

No threads, no torch, no I/O. Tiers are numbered from the top (0, next to the compute) to the bottom (the last one).

==================================  ==============================================================
edge                                fired by
==================================  ==============================================================
EMPTY -> FILLING                    ``begin_fill`` / ``begin_writeback``: a transfer into it is admitted
FILLING -> CLEAN                    filled from below, or it is the bottom
FILLING -> DIRTY                    filled from above, and there is a tier below that has not got the bytes yet
FILLING -> EMPTY                    the transfer failed
EMPTY -> DIRTY                      ``put``
CLEAN -> DIRTY                      a WRITE lease is granted: every other copy is superseded at once, not at its release
CLEAN -> EMPTY                      evicted, superseded, deleted
DIRTY -> EMPTY                      superseded, deleted
DIRTY -> WRITEBACK                  ``begin_writeback``: a transfer down is admitted
WRITEBACK -> CLEAN / DIRTY          the transfer is done / failed
==================================  ==============================================================

CLEAN means: this is the bottom, or some tier below holds the same bytes. So a CLEAN copy above the bottom that nobody leases
may be evicted without moving a byte.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tiered.errors import CapacityError, KeyNotFound, LeaseConflict, TieredError
from tiered.types import Access, Fence, Key, Slot, TensorSpec

__all__ = ["EDGES", "Copy", "Directory", "Entry", "Evictability", "State"]

class State(enum.Enum):
    EMPTY = "empty"
    FILLING = "filling"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITEBACK = "writeback"


EDGES: frozenset[tuple[State, State]] = frozenset(
    {
        (State.EMPTY, State.FILLING),
        (State.EMPTY, State.DIRTY),
        (State.FILLING, State.CLEAN),
        (State.FILLING, State.DIRTY),
        (State.FILLING, State.EMPTY),
        (State.CLEAN, State.DIRTY),
        (State.CLEAN, State.EMPTY),
        (State.DIRTY, State.EMPTY),
        (State.DIRTY, State.WRITEBACK),
        (State.WRITEBACK, State.CLEAN),
        (State.WRITEBACK, State.DIRTY),
    }
)

class Evictability(enum.IntEnum):
    """What a copy means to a search for room in its tier."""

    USED = 0
    """Somebody looks at it, something moves it, or it is gone: it cannot leave."""
    CLEAN = 1
    """It can leave at once."""
    FRESH = 2
    """It can leave at once, but was prefetched and nobody has used it yet."""
    DIRTY = 3
    """It can leave after it was written back."""
    WRITING_BACK = 4
    """It is being written back and can leave after that."""


_VALID = frozenset({State.CLEAN, State.DIRTY, State.WRITEBACK})
_IN_FLIGHT = frozenset({State.FILLING, State.WRITEBACK})


@dataclass(slots=True, eq=False)
class Copy:
    """One tensor in one slot of one tier. It lives from its slot's allocation until EMPTY; then a new one is made.

    ``aliases`` counts views of the slot's memory that are still reachable outside; a slot is given back only when the copy is
    EMPTY *and* none is left. ``reads_from`` counts transfers up that read this slot. ``checksums`` and ``generation`` describe
    the bytes of a bottom copy; ``record`` is what a manifest says of it, once that is known. ``fences`` guard the slot (the
    engine's). ``witness`` is the store's (it shares torch's version counter between leases), ``version`` that counter when its
    write-back began, and ``sealed`` the counter when the first of its READ leases began. ``lent_clean`` is whether it was
    CLEAN then. ``spoiled``: it was written to under one, so it does not hold the tensor's bytes any more. ``evictability`` is
    what the pool has counted it as.
    """

    key: Key
    tier: int
    slot: Slot
    _state: State = State.EMPTY
    readers: int = 0
    writers: int = 0
    reads_from: int = 0
    aliases: int = 0
    checksums: bytes = b""
    generation: int = 0
    record: bytes = b""
    prefetched: bool = False
    failure: TieredError | None = None
    fences: tuple[Fence, ...] = ()
    witness: object = None
    version: int = 0
    sealed: int = 0
    spoiled: bool = False
    lent_clean: bool = False
    evictability: Evictability = Evictability.USED

    @property
    def state(self) -> State:
        return self._state

    def become(self, state: State) -> None:
        """Take an edge of the table. Nothing else changes ``state``."""
        assert (self._state, state) in EDGES, f"{self.key!r}: illegal edge {self._state.name} -> {state.name}"
        self._state = state

    @property
    def nbytes(self) -> int:
        """Bytes of its slot."""
        return self.slot.nbytes

    @property
    def dirty(self) -> bool:
        """No tier below has its bytes yet."""
        return self._state is State.DIRTY or self._state is State.WRITEBACK

    @property
    def valid(self) -> bool:
        """It holds the tensor's bytes."""
        return self._state in _VALID

    @property
    def in_flight(self) -> bool:
        """A transfer uses its slot."""
        return self._state in _IN_FLIGHT or self.reads_from > 0

    @property
    def leased(self) -> bool:
        return self.readers > 0 or self.writers > 0

    @property
    def idle(self) -> bool:
        """Nobody looks at it and nothing moves it."""
        return not (self.leased or self.in_flight or self.aliases)

    @property
    def still(self) -> bool:
        """Its bytes do not change: a lease, if there is one, is for READ, and nobody looks at it from one that ended."""
        return not (self.writers or self.in_flight or (self.aliases and not self.readers))

    @property
    def written(self) -> bool:
        """Somebody wrote to it, under whatever lease or none, since its write-back began."""
        return self._witnessed() != self.version

    @property
    def unsealed(self) -> bool:
        """It was written to under a READ lease."""
        return self.spoiled or (self.readers > 0 and self._witnessed() != self.sealed)

    def note_version(self) -> None:
        self.version = self._witnessed()

    def _witnessed(self) -> int:
        return getattr(self.witness, "_version", 0)

    @property
    def stuck(self) -> bool:
        """It cannot be written back: that failed, for another reason than want of room, which there may be by now; or it does
        not hold the tensor's bytes."""
        return self.spoiled or (self.failure is not None and not isinstance(self.failure, CapacityError))

    def classify(self) -> Evictability:
        """Return what the copy means now to a search for room in its tier."""
        state = self._state
        if self.readers or self.writers or self.aliases or self.reads_from:
            return Evictability.USED
        if state is State.CLEAN:
            return Evictability.FRESH if self.prefetched else Evictability.CLEAN
        if state is State.DIRTY:
            return Evictability.DIRTY
        return Evictability.WRITING_BACK if state is State.WRITEBACK else Evictability.USED


@dataclass(slots=True, eq=False)
class Entry:
    """A tensor: what it is, and its copies, one place per tier (None is EMPTY).

    ``name`` is its key for the caller; ``key`` is another one once it was set aside.
    """

    key: Key
    spec: TensorSpec
    tensor_id: int
    copies: list[Copy | None] = field(default_factory=list)
    nbytes: int = field(init=False)
    """Bytes a slot must have; an empty tensor still takes one."""
    empty: bool = field(init=False)
    """It has no bytes."""
    name: Key = field(init=False)
    writers: int = 0
    """Open WRITE leases: 0 or 1."""

    def __post_init__(self) -> None:
        nbytes = self.spec.nbytes
        self.nbytes, self.empty = max(1, nbytes), not nbytes
        self.name = self.key

    @property
    def aside(self) -> bool:
        """Nobody can ask for it any more."""
        return self.key != self.name

    @property
    def in_flight(self) -> bool:
        for copy in self.copies:  # noqa: SIM110 - a generator takes thrice as long, and this is on the path of every lease
            if copy is not None and copy.in_flight:
                return True
        return False

    @property
    def leased(self) -> bool:
        for copy in self.copies:  # noqa: SIM110 - likewise
            if copy is not None and (copy.readers or copy.writers):
                return True
        return False

    @property
    def unsaved(self) -> Copy | None:
        """The copy that some tier below has not got yet (DIRTY or WRITEBACK), if there is one."""
        for copy in self.copies:
            if copy is not None and copy.state in (State.DIRTY, State.WRITEBACK):
                return copy
        return None


class Directory:
    """All tensors of a store.

    ``changed(copy, evictability)`` is called after each change of a copy: its state, its leases, who reads it.
    """

    def __init__(self, depth: int, changed: Callable[[Copy, Evictability], None]) -> None:
        assert depth >= 1
        self.depth = depth
        self.next_id = 1
        self._tell = changed
        self._entries: dict[Key, Entry] = {}
        self._aside: dict[Key, Entry] = {}

    # -- looking ---------------------------------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def all_entries(self) -> Iterator[Entry]:
        """Also those whose name is free for another tensor."""
        yield from self._entries.values()
        yield from self._aside.values()

    def set_aside_entries(self) -> Iterator[Entry]:
        """Those whose name is free for another tensor."""
        return iter(self._aside.values())

    def find(self, key: Key) -> Entry | None:
        return self._entries.get(key) or self._aside.get(key)

    def entry(self, key: Key) -> Entry:
        """Raises KeyNotFound."""
        found = self.find(key)
        if found is None:
            raise KeyNotFound(f"no tensor {key!r} in the store")
        return found

    # -- coming and going ------------------------------------------------------------------------------------------------

    def put(self, key: Key, spec: TensorSpec, tier: int, slot: Slot, fences: tuple[Fence, ...] = ()) -> Entry:
        """New bytes in ``slot``, ready after ``fences``, replace whatever ``key`` was. Raises LeaseConflict while it is leased.

        One store into the dict makes it so: before it the old tensor is there, after it the new one is.
        """
        self.refuse_leased(key)
        entry = Entry(key, spec, self.next_id, [None] * self.depth)
        copy = Copy(key, tier, slot, fences=fences)
        if tier == self.depth - 1:  # a chain of one tier: nothing below could be newer or older
            copy.become(State.FILLING)
            copy.become(State.CLEAN)
        else:
            copy.become(State.DIRTY)
        entry.copies[tier] = copy
        self.next_id += 1
        old = self._entries.get(key)
        assert old is None or not old.in_flight
        self._entries[key] = entry
        if old is not None:
            self._vacate_all(old)
        self._changed(copy)
        return entry

    def add(self, key: Key, spec: TensorSpec, tensor_id: int) -> Entry:
        """A tensor without any copy yet."""
        assert key not in self._entries
        entry = Entry(key, spec, tensor_id, [None] * self.depth)
        self._entries[key] = entry
        self.next_id = max(self.next_id, tensor_id + 1)
        return entry

    def restore(self, key: Key, spec: TensorSpec, tensor_id: int, slot: Slot, checksums: bytes, generation: int) -> Entry:
        """A tensor that a manifest says is at the bottom."""
        entry = self.add(key, spec, tensor_id)
        copy = Copy(key, self.depth - 1, slot, checksums=checksums, generation=generation)
        copy.become(State.FILLING)
        copy.become(State.CLEAN)
        entry.copies[-1] = copy
        self._changed(copy)
        return entry

    def forget(self, key: Key) -> None:
        """Delete. Raises KeyNotFound, LeaseConflict; the caller has waited for transfers in flight."""
        entry = self.entry(key)
        self.refuse_leased(key)
        assert not entry.in_flight
        del (self._aside if entry.aside else self._entries)[key]
        self._vacate_all(entry)

    def set_aside(self, entry: Entry) -> None:
        """Its name is free for another tensor; it goes on under a key that no name is, until it is forgotten."""
        assert not entry.in_flight and not entry.leased
        del self._entries[entry.key]
        entry.key = f"{entry.name}\0replaced\0{entry.tensor_id}"
        self._aside[entry.key] = entry

    def refuse_leased(self, key: Key) -> None:
        """Raises LeaseConflict while ``key`` cannot be replaced or deleted."""
        entry = self._entries.get(key)
        if entry is not None and entry.leased:
            raise LeaseConflict(f"tensor {key!r} is leased: it can be replaced or deleted after its leases have ended")

    def evict(self, copy: Copy) -> None:
        assert copy.state is State.CLEAN and copy.idle and copy.tier < self.depth - 1
        self._vacate(self.entry(copy.key), copy)

    def discard(self, copy: Copy) -> None:
        """A CLEAN copy that does not hold the tensor's bytes: those below do."""
        assert copy.state is State.CLEAN and not copy.leased and not copy.in_flight and copy.tier < self.depth - 1
        self._vacate(self.entry(copy.key), copy)

    def move(self, copy: Copy, slot: Slot) -> Copy:
        """``copy``'s bytes were copied to ``slot`` of the same tier; the old slot goes to whoever still has aliases of it."""
        entry = self.entry(copy.key)
        assert copy.state is State.DIRTY and not copy.leased and not copy.in_flight
        fresh = Copy(copy.key, copy.tier, slot, fences=copy.fences)
        fresh.become(State.DIRTY)
        self._vacate(entry, copy)
        entry.copies[copy.tier] = fresh
        self._changed(fresh)
        return fresh

    # -- leases ----------------------------------------------------------------------------------------------------------

    def grant(self, entry: Entry, tier: int, access: Access) -> Copy:
        """Open a lease on a valid copy. Raises LeaseConflict; WRITE also needs that no transfer is in flight."""
        copy = entry.copies[tier]
        assert copy is not None and copy.valid
        self.refuse_conflict(entry, access)
        return self.lend(entry, tier, access)

    def lend(self, entry: Entry, tier: int, access: Access) -> Copy:
        """``grant`` for who has asked ``refuse_conflict`` already."""
        copy = entry.copies[tier]
        assert copy is not None and copy.valid
        if access is Access.WRITE:
            assert not entry.in_flight
            for other in entry.copies:
                if other is not None and other is not copy:
                    self._vacate(entry, other)
            if copy.state is State.CLEAN and tier < self.depth - 1:
                copy.become(State.DIRTY)
            copy.checksums = copy.record = b""
            copy.writers += 1
            entry.writers += 1
        else:
            if not copy.readers:
                copy.sealed, copy.lent_clean = copy._witnessed(), copy.state is State.CLEAN
            copy.readers += 1
        copy.prefetched = False
        copy.failure = None
        self._changed(copy)
        return copy

    def to_lease(self, key: Key, access: Access) -> Entry:
        """Return the tensor ``key``. Raises KeyNotFound, and LeaseConflict where an open lease is in the way."""
        entry = self.find(key)
        if entry is None:
            raise KeyNotFound(f"no tensor {key!r} in the store")
        if entry.writers or access is Access.WRITE:
            self.refuse_conflict(entry, access)
        return entry

    def refuse_conflict(self, entry: Entry, access: Access) -> None:
        """Raise LeaseConflict where an open lease is in the way of another one."""
        if entry.writers or (access is Access.WRITE and entry.leased):
            held = "WRITE" if entry.writers else "READ"
            raise LeaseConflict(f"tensor {entry.key!r} has an open {held} lease; a {access.name} lease must wait for its end")

    def release(self, copy: Copy, access: Access) -> None:
        if access is Access.WRITE:
            entry = self.entry(copy.key)
            assert copy.writers == entry.writers == 1
            copy.writers = entry.writers = 0
        else:
            assert copy.readers > 0
            copy.readers -= 1
        self._changed(copy)

    # -- transfers -------------------------------------------------------------------------------------------------------

    def begin_fill(self, entry: Entry, tier: int, slot: Slot) -> Copy:
        """A transfer up, from the tier below, is admitted into ``slot``."""
        source = entry.copies[tier + 1]
        assert source is not None and source.valid and entry.copies[tier] is None and not entry.writers
        source.reads_from += 1
        source.prefetched = False  # it was of use
        copy = Copy(entry.key, tier, slot)
        copy.become(State.FILLING)
        entry.copies[tier] = copy
        self._changed(source)
        self._changed(copy)
        return copy

    def end_fill(self, entry: Entry, tier: int, error: TieredError | None) -> None:
        source, copy = entry.copies[tier + 1], entry.copies[tier]
        assert source is not None and copy is not None
        source.reads_from -= 1
        self._changed(source)
        if error is None:
            copy.become(State.CLEAN)
            self._changed(copy)
        else:
            self._vacate(entry, copy)

    def begin_writeback(self, entry: Entry, tier: int, slot: Slot) -> Copy:
        """A transfer down, into the tier below, is admitted."""
        source = entry.copies[tier]
        assert source is not None and not source.writers and not source.in_flight and entry.copies[tier + 1] is None
        source.become(State.WRITEBACK)
        source.note_version()
        copy = Copy(entry.key, tier + 1, slot)
        copy.become(State.FILLING)
        entry.copies[tier + 1] = copy
        self._changed(source)
        self._changed(copy)
        return copy

    def end_writeback(
        self, entry: Entry, tier: int, error: TieredError | None, checksums: bytes = b"", generation: int = 0
    ) -> None:
        source, copy = entry.copies[tier], entry.copies[tier + 1]
        assert source is not None and copy is not None
        if error is None:
            copy.checksums, copy.generation = checksums, generation
            copy.become(State.CLEAN if copy.tier == self.depth - 1 else State.DIRTY)
            source.become(State.CLEAN)
            source.failure = None
            self._changed(copy)
        else:
            source.become(State.DIRTY)
            source.failure = error
            self._vacate(entry, copy)
        self._changed(source)

    def repeat_writeback(self, entry: Entry, tier: int) -> None:
        """A transfer down ended well, but what it read was written to meanwhile: some of it is old and some is new."""
        source, copy = entry.copies[tier], entry.copies[tier + 1]
        assert source is not None and copy is not None
        source.become(State.DIRTY)
        self._vacate(entry, copy)
        self._changed(source)

    # -- within ----------------------------------------------------------------------------------------------------------

    def _changed(self, copy: Copy) -> None:
        self._tell(copy, copy.classify())

    def _vacate_all(self, entry: Entry) -> None:
        for copy in entry.copies:
            if copy is not None:
                self._vacate(entry, copy)

    def _vacate(self, entry: Entry, copy: Copy) -> None:
        copy.become(State.EMPTY)
        entry.copies[copy.tier] = None
        self._changed(copy)

    def recount(self, claims: Iterable[tuple[Copy, Access]], reads: Iterable[Copy]) -> None:
        """Make every copy what the table says, after an exception struck within a change of it: ``claims`` are the leases that
        there are, ``reads`` the copies that transfers up read. Calls nobody.

        A change of a caller's thread takes away first and says what stays last. So what it left half done is completed: a copy
        that is EMPTY is gone, what a WRITE lease supersedes is, and a CLEAN copy with nothing below has become the only one.
        """
        leased = list(claims)
        for entry in self.all_entries():
            entry.writers = 0
            for tier, copy in enumerate(entry.copies):
                if copy is not None:
                    copy.readers = copy.writers = copy.reads_from = 0
                    if copy.state is State.EMPTY:
                        entry.copies[tier] = None
        for copy, access in leased:
            if access is Access.WRITE:
                copy.writers += 1
                copy.checksums = copy.record = b""
                held = self.entry(copy.key)
                held.writers += 1
                for other in held.copies:
                    if other is not None and other is not copy:
                        held.copies[other.tier] = None
            else:
                copy.readers += 1
        for copy in reads:
            copy.reads_from += 1
        for entry in self.all_entries():
            for tier, copy in enumerate(entry.copies[:-1]):
                below = any(other is not None and other.valid for other in entry.copies[tier + 1 :])
                if copy is not None and copy.state is State.CLEAN and not below:
                    copy.become(State.DIRTY)

    def check(self) -> None:
        """Assert every invariant of the state table (for tests)."""
        for entry in self.all_entries():
            unsaved = [copy for copy in entry.copies if copy is not None and copy.state in (State.DIRTY, State.WRITEBACK)]
            valid = [copy for copy in entry.copies if copy is not None and copy.valid]
            assert entry.writers == sum(copy.writers for copy in entry.copies if copy is not None)
            assert len(unsaved) <= 1, f"{entry.key!r}: two copies claim to be the newest"
            assert valid, f"{entry.key!r}: no copy has its bytes"
            for tier, copy in enumerate(entry.copies):
                if copy is None:
                    continue
                assert copy.tier == tier and copy.key == entry.key and copy.state is not State.EMPTY
                below = [c for c in entry.copies[tier + 1 :] if c is not None and c.valid]
                if copy.state is State.CLEAN:
                    assert tier == self.depth - 1 or below, f"{entry.key!r}: CLEAN in tier {tier}, nothing below"
                if copy.state in (State.DIRTY, State.WRITEBACK):
                    assert tier < self.depth - 1 and not below, f"{entry.key!r}: unsaved in tier {tier}, a copy below"
                if copy.writers:
                    assert copy.writers == 1 and copy.readers == 0 and not entry.in_flight
                    assert sum(c is not None for c in entry.copies) == 1, f"{entry.key!r}: WRITE lease beside copies"
                if copy.state is State.FILLING:
                    assert not copy.leased
