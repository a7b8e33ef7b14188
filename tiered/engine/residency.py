"""The residency table: a state per copy, that is per (tensor, tier), and the only code that changes a state.

No threads, no torch, no I/O. Tiers are numbered from the top (0, next to the compute) to the bottom (the last one).

==================================  ==============================================================
edge                                taken by
==================================  ==============================================================
EMPTY -> FILLING                    ``begin_fill`` / ``begin_writeback``: a transfer into it is admitted
FILLING -> CLEAN                    filled from below, or it is the bottom
FILLING -> DIRTY                    filled from above, and a tier below does not have the bytes yet
FILLING -> EMPTY                    the transfer failed
EMPTY -> DIRTY                      ``put``
CLEAN -> DIRTY                      a WRITE lease is granted: every other copy is superseded at once, not at its release
CLEAN -> EMPTY                      evicted, superseded, deleted
DIRTY -> EMPTY                      superseded, deleted
DIRTY -> WRITEBACK                  ``begin_writeback``: a transfer down is admitted
WRITEBACK -> CLEAN / DIRTY          the transfer succeeded / failed
==================================  ==============================================================

CLEAN means: this is the bottom, or some tier below holds the same bytes. So a CLEAN copy above the bottom that is not leased
may be evicted without moving a byte.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tiered.errors import CapacityError, KeyNotFound, LeaseConflict, MisuseError, TieredError
from tiered.types import Access, Fence, Key, Owner, Slot, TensorSpec

__all__ = ["EDGES", "Copy", "Directory", "Entry", "Evictability", "State"]


class State(enum.Enum):
    EMPTY = "empty"
    FILLING = "filling"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITEBACK = "writeback"

    __hash__ = object.__hash__  # that of Enum is slow, and each change of a state looks up its edge


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
    """The copy is referenced, a transfer uses it, or it has no bytes: it cannot leave."""
    CLEAN = 1
    """The copy can leave at once."""
    FRESH = 2
    """The copy can leave at once, but was prefetched and has not been used yet."""
    DIRTY = 3
    """The copy can leave after a write-back."""
    WRITING_BACK = 4
    """The copy is being written back and can leave after that."""


# What is looked up with each change of a copy: before Python 3.12 a member of an enum takes ten times as long as a global.
_EMPTY, _FILLING, _CLEAN, _DIRTY, _WRITEBACK = State
_USED, _FRESH, _READ, _WRITE = Evictability.USED, Evictability.FRESH, Access.READ, Access.WRITE

_VALID = frozenset({State.CLEAN, State.DIRTY, State.WRITEBACK})
_UNSAVED = frozenset({State.DIRTY, State.WRITEBACK})
_IN_FLIGHT = frozenset({State.FILLING, State.WRITEBACK})
_LEAVES = (Evictability.CLEAN, Evictability.FRESH)
_UNUSED = dict(zip(State, (_USED, _USED, Evictability.CLEAN, Evictability.DIRTY, Evictability.WRITING_BACK), strict=True))
"""What a copy of which there is no lease, alias or reading transfer means to a search for room, by its state."""
_WRITERS = operator.attrgetter("writers")


@dataclass(slots=True, eq=False)
class Copy:
    """A tensor's bytes in one slot of one tier. A copy exists from its slot's allocation until it is EMPTY; then a new one is
    made.

    ``state`` changes by ``become`` alone, and with it ``valid``, whether the copy holds the tensor's bytes, and ``dirty``,
    whether no tier below has these. They are attributes because each lease reads them several times.

    ``aliases`` counts views of the slot's memory that are still reachable outside; a slot is given back only when the copy is
    EMPTY *and* no alias is left. ``reads_from`` counts transfers up that read this slot. ``checksums`` and ``generation``
    describe the bytes of a bottom copy; ``speculated``: it was fetched without anybody knowing that it will be used, and was
    not used yet; ``record`` is its encoded manifest entry, once known. ``fences`` guard the slot (the engine's). ``witness`` is
    the store's: it shares torch's version counter between leases; None where nobody had one. ``version`` is that counter when
    the write-back began, ``sealed`` when the first of its READ leases began, and ``lent_clean`` whether the copy was CLEAN
    then. ``spoiled``: it was written to under a READ lease, so it does not hold the tensor's bytes any more. ``evictability``
    is the value under which the pool counts it, ``last_use`` the number of the last lease of the tensor.
    """

    key: Key
    tier: int
    slot: Slot
    state: State = State.EMPTY
    valid: bool = False
    dirty: bool = False
    readers: int = 0
    writers: int = 0
    reads_from: int = 0
    aliases: int = 0
    checksums: bytes = b""
    generation: int = 0
    record: bytes = b""
    prefetched: bool = False
    speculated: bool = False
    last_use: int = 0
    failure: TieredError | None = None
    fences: tuple[Fence, ...] = ()
    witness: object = None
    version: int = 0
    sealed: int = 0
    spoiled: bool = False
    lent_clean: bool = False
    evictability: Evictability = Evictability.USED

    def become(self, state: State) -> None:
        """Take an edge of the table; nothing else changes ``state``."""
        assert (self.state, state) in EDGES, f"{self.key!r}: illegal edge {self.state.name} -> {state.name}"
        self.state, self.valid, self.dirty = state, state in _VALID, state in _UNSAVED

    @property
    def nbytes(self) -> int:
        """Bytes of the copy's slot."""
        return self.slot.nbytes

    @property
    def in_flight(self) -> bool:
        """Whether a transfer uses the copy's slot."""
        return self.state in _IN_FLIGHT or self.reads_from > 0

    @property
    def leased(self) -> bool:
        return self.readers > 0 or self.writers > 0

    @property
    def idle(self) -> bool:
        """Whether no lease, alias or transfer uses the copy."""
        return not (self.leased or self.in_flight or self.aliases)

    @property
    def still(self) -> bool:
        """Whether the bytes are stable: no WRITE lease, no transfer, and no alias from an ended lease unless READ leases are
        open."""
        return not (self.writers or self.in_flight or (self.aliases and not self.readers))

    @property
    def written(self) -> bool:
        """Whether the copy was written to, under any lease or none, since its write-back began."""
        return getattr(self.witness, "_version", 0) != self.version

    @property
    def unsealed(self) -> bool:
        """Whether the copy was written to under a READ lease."""
        return self.spoiled or (self.readers > 0 and getattr(self.witness, "_version", 0) != self.sealed)

    def note_version(self) -> None:
        self.version = getattr(self.witness, "_version", 0)

    @property
    def stuck(self) -> bool:
        """Whether the copy cannot be written back: a write-back failed, not for lack of room (there may be room by now), or the
        copy does not hold the tensor's bytes."""
        return self.spoiled or (self.failure is not None and not isinstance(self.failure, CapacityError))

    def classify(self) -> Evictability:
        """Return what the copy means now to a search for room in its tier."""
        if self.readers or self.writers or self.aliases or self.reads_from:
            return _USED
        return _FRESH if self.prefetched and self.state is _CLEAN else _UNUSED[self.state]


@dataclass(slots=True, eq=False)
class Entry:
    """A tensor: its spec and its copies, one per tier (None is EMPTY).

    ``name`` is the caller's key for it; ``key`` differs once the tensor was set aside.
    """

    key: Key
    spec: TensorSpec
    tensor_id: int
    copies: list[Copy | None] = field(default_factory=list)
    nbytes: int = field(init=False)
    """Bytes that a slot must have; a tensor without bytes still takes one."""
    empty: bool = field(init=False)
    """Whether the tensor has no bytes."""
    name: Key = field(init=False)
    writers: int = 0
    """Number of open WRITE leases: 0 or 1."""
    temporary: bool = False
    """Whether the tensor is in no commit, and is deleted when its holder dies."""
    owner: Owner | None = None
    """Who alone may replace or delete the tensor; None: the user."""

    def __post_init__(self) -> None:
        nbytes = self.spec.nbytes
        self.nbytes, self.empty = max(1, nbytes), not nbytes
        self.name = self.key

    @property
    def aside(self) -> bool:
        """Whether the tensor was set aside: no caller can ask for it any more."""
        return self.key != self.name

    @property
    def in_flight(self) -> bool:
        for copy in self.copies:  # noqa: SIM110 - a generator takes thrice as long, and this is on the path of every lease
            if copy is not None and (copy.state in _IN_FLIGHT or copy.reads_from):
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
        """The copy that no tier below has yet (DIRTY or WRITEBACK); None where there is none."""
        for copy in self.copies:
            if copy is not None and copy.dirty:
                return copy
        return None


class Directory:
    """All tensors of a store.

    ``changed(copy)`` is called when a copy has come or gone, or its state has changed; ``used[tier](copy)`` when a lease of a
    copy in that tier, or a transfer that reads it, has begun or ended, and its state is the same. Of a copy at the bottom,
    which is never evicted and never unsaved, only that it has come or gone is told.
    """

    def __init__(
        self, depth: int, changed: Callable[[Copy], None], used: Sequence[Callable[[Copy], None]] | None = None
    ) -> None:
        assert depth >= 1
        self.depth = depth
        self.next_id = 1
        self._tell = changed
        self._used = [changed] * depth if used is None else used
        self._entries: dict[Key, Entry] = {}
        self.named = self._entries.get
        """Returns the tensor of that name; None where there is none, or it was set aside."""
        self._aside: dict[Key, Entry] = {}
        self._admitted: set[Owner] = set()  # owners that were compared with all others of the tensors that there are
        self.watched: dict[str, int] = {}  # how often a tensor with this key, or this and a number, changes

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
        """Yield all tensors, those that were set aside too."""
        yield from self._entries.values()
        yield from self._aside.values()

    def set_aside_entries(self) -> Iterator[Entry]:
        """Yield the tensors that were set aside: their names are free for others."""
        return iter(self._aside.values())

    def find(self, key: Key) -> Entry | None:
        return self._entries.get(key) or self._aside.get(key)

    def entry(self, key: Key) -> Entry:
        """Return the tensor ``key``. Raises KeyNotFound."""
        found = self._entries.get(key) or self._aside.get(key)
        if found is None:
            raise KeyNotFound(f"no tensor {key!r} in the store", key, self._entries)
        return found

    def leasable(self, keys: Sequence[Key], access: Access) -> list[Entry]:
        """Return the tensors ``keys``. Raises KeyNotFound, and LeaseConflict where an open lease of one excludes ``access``."""
        entries: list[Entry] = list(filter(None, map(self.named, keys)))
        if len(entries) < len(keys):
            entries = [self.entry(key) for key in keys]
        if access is _WRITE or any(map(_WRITERS, entries)):
            for entry in entries:
                if entry.writers or (access is _WRITE and entry.leased):
                    self.refuse_conflict(entry, access)
        return entries

    # -- who owns what ---------------------------------------------------------------------------------------------------

    def owners(self) -> set[Owner]:
        """Return who owns tensors, beside the user."""
        return {entry.owner for entry in self._entries.values() if entry.owner is not None}

    def owned(self, owner: Owner) -> list[Key]:
        """Return the keys of the tensors that ``owner`` owns."""
        return [key for key, entry in self._entries.items() if entry.owner == owner]

    def refuse_foreign(self, key: Key, owner: Owner | None) -> None:
        """Raise MisuseError where ``key`` is a tensor of somebody else than ``owner`` (None: the user)."""
        entry = self._entries.get(key)
        if entry is None or entry.owner == owner:
            return
        if owner is None:
            raise MisuseError(
                f"tensor {key!r} belongs to {entry.owner}, which alone replaces and deletes it: give another key, or do it "
                f"through its owner (store.delete_owned deletes all that one has)"
            )
        whose = "was put under that key by its user" if entry.owner is None else f"belongs to {entry.owner}"
        raise MisuseError(f"tensor {key!r} {whose}, and {owner} would replace or delete it: give {owner} another name")

    def admit(self, owner: Owner) -> None:
        """Raise MisuseError where ``owner`` owns nothing yet, and somebody's name lies within its name, or around it."""
        if not isinstance(owner, Owner):
            raise MisuseError(f"an owner is an Owner(kind, name), not {owner!r:.100}")
        if owner in self._admitted:
            return
        there = self.owners()
        for other in there if owner not in there else ():
            if not owner.apart(other):
                raise MisuseError(
                    f"the store has {other}, and {owner} would lie within that name, or around it, so that their "
                    "tensors have keys of both: give another name"
                )
        # Of those that were admitted before, some may have no tensors any more: they are compared again when they come back.
        self._admitted = {other for other in self._admitted if owner.apart(other)} | {owner}

    # -- coming and going ------------------------------------------------------------------------------------------------

    def put(
        self,
        key: Key,
        spec: TensorSpec,
        tier: int,
        slot: Slot,
        fences: tuple[Fence, ...] = (),
        *,
        temporary: bool = False,
        owner: Owner | None = None,
    ) -> Entry:
        """Replace the tensor ``key`` by the bytes in ``slot``, ready after ``fences``. Raises LeaseConflict while it is leased,
        MisuseError where it is not ``owner``'s.

        One store into the dict is the change: before it the directory has the old tensor, after it the new one.
        """
        self.refuse_put(key, owner)
        self._count(key)
        entry = Entry(key, spec, self.next_id, [None] * self.depth, temporary=temporary, owner=owner)
        copy = Copy(key, tier, slot, fences=fences)
        if tier == self.depth - 1:  # a chain of one tier: nothing below could be newer or older
            copy.become(_FILLING)
            copy.become(_CLEAN)
        else:
            copy.become(_DIRTY)
        entry.copies[tier] = copy
        self.next_id += 1
        old = self._entries.get(key)
        assert old is None or not old.in_flight
        self._entries[key] = entry
        if old is not None:
            self._vacate_all(old)
        self._tell(copy)
        return entry

    def add(self, key: Key, spec: TensorSpec, tensor_id: int, owner: Owner | None = None) -> Entry:
        """Add a tensor without copies."""
        assert key not in self._entries
        self._count(key)
        entry = Entry(key, spec, tensor_id, [None] * self.depth, owner=owner)
        self._entries[key] = entry
        self.next_id = max(self.next_id, tensor_id + 1)
        return entry

    def restore(
        self,
        key: Key,
        spec: TensorSpec,
        tensor_id: int,
        slot: Slot,
        checksums: bytes,
        generation: int,
        owner: Owner | None = None,
    ) -> Entry:
        """Add a tensor whose bytes are at the bottom, according to a manifest."""
        entry = self.add(key, spec, tensor_id, owner)
        copy = Copy(key, self.depth - 1, slot, checksums=checksums, generation=generation)
        copy.become(_FILLING)
        copy.become(_CLEAN)
        entry.copies[-1] = copy
        self._tell(copy)
        return entry

    def forget(self, key: Key) -> None:
        """Delete a tensor. Raises KeyNotFound, LeaseConflict. No transfer of the tensor may be in flight."""
        entry = self.entry(key)
        self.refuse_leased(key)
        assert not entry.in_flight
        self._count(key)
        del (self._aside if entry.aside else self._entries)[key]
        self._vacate_all(entry)

    def set_aside(self, entry: Entry) -> None:
        """Free the tensor's name for another tensor; it keeps existing under a key that is nobody's name, until it is
        forgotten."""
        assert not entry.in_flight and not entry.leased
        self._count(entry.key)
        del self._entries[entry.key]
        entry.key = f"{entry.name}\0replaced\0{entry.tensor_id}"
        self._aside[entry.key] = entry

    def rename(self, entry: Entry, key: Key, owner: Owner | None) -> None:
        """Give the tensor another key, which is nobody's, and another owner."""
        assert key not in self._entries and not entry.aside and not entry.in_flight and not entry.leased
        self._count(entry.key)
        self._count(key)
        del self._entries[entry.key]
        entry.key = entry.name = key
        entry.owner = owner
        self._entries[key] = entry

    def refuse_put(self, key: Key, owner: Owner | None) -> None:
        """Raise LeaseConflict while ``key`` cannot be replaced, MisuseError where ``owner`` may not make it."""
        self.refuse_leased(key)
        self.refuse_foreign(key, owner)
        if owner is not None:
            self.admit(owner)

    def refuse_leased(self, key: Key) -> None:
        """Raise LeaseConflict while ``key`` cannot be replaced or deleted."""
        entry = self._entries.get(key)
        if entry is not None and entry.leased:
            raise LeaseConflict(f"tensor {key!r} is leased: it can be replaced or deleted after its leases have ended")

    def evict(self, copy: Copy) -> None:
        assert copy.classify() in _LEAVES and copy.tier < self.depth - 1
        self._vacate(self.entry(copy.key), copy)

    def discard(self, copy: Copy) -> None:
        """Drop a CLEAN copy that does not hold the tensor's bytes; the copies below do."""
        assert copy.state is _CLEAN and not copy.leased and not copy.in_flight and copy.tier < self.depth - 1
        self._vacate(self.entry(copy.key), copy)

    def move(self, copy: Copy, slot: Slot) -> Copy:
        """Record that ``copy``'s bytes were copied to ``slot`` of the same tier; the old slot stays until its last alias is
        gone."""
        entry = self.entry(copy.key)
        assert copy.state is _DIRTY and not copy.leased and not copy.in_flight
        fresh = Copy(copy.key, copy.tier, slot, fences=copy.fences)
        fresh.become(_DIRTY)
        self._vacate(entry, copy)
        entry.copies[copy.tier] = fresh
        self._tell(fresh)
        return fresh

    # -- leases ----------------------------------------------------------------------------------------------------------

    def grant(self, entry: Entry, tier: int, access: Access) -> Copy:
        """Open a lease on a valid copy. Raises LeaseConflict; WRITE also requires that no transfer is in flight."""
        copy = entry.copies[tier]
        assert copy is not None and copy.valid
        self.refuse_conflict(entry, access)
        return self.lend(entry, tier, access)

    def lend(self, entry: Entry, tier: int, access: Access) -> Copy:
        """Open a lease as ``grant`` does, of a tensor that ``leasable`` returned."""
        copy = entry.copies[tier]
        assert copy is not None and copy.valid
        if access is _WRITE:
            assert not entry.in_flight
            if self.watched:
                self._count(entry.key)
            for other in entry.copies:
                if other is not None and other is not copy:
                    self._vacate(entry, other)
            if copy.state is _CLEAN and tier < self.depth - 1:
                copy.become(_DIRTY)
            copy.checksums = copy.record = b""
            copy.writers += 1
            entry.writers += 1
        else:
            if not copy.readers:
                copy.sealed, copy.lent_clean = getattr(copy.witness, "_version", 0), copy.state is _CLEAN
            copy.readers += 1
        copy.prefetched = False
        copy.failure = None
        if tier < self.depth - 1:
            (self._tell if access is _WRITE else self._used[tier])(copy)
        return copy

    def refuse_conflict(self, entry: Entry, access: Access) -> None:
        """Raise LeaseConflict where an open lease excludes another one."""
        if entry.writers or (access is _WRITE and entry.leased):
            held = "WRITE" if entry.writers else "READ"
            raise LeaseConflict(
                f"tensor {entry.key!r} has an open {held} lease: end it, by its with block or release(), before a "
                f"{access.name} lease begins"
            )

    def release(self, copy: Copy, access: Access) -> None:
        if access is _WRITE:
            entry = self.entry(copy.key)
            assert copy.writers == entry.writers == 1
            copy.writers = entry.writers = 0
        else:
            assert copy.readers > 0
            copy.readers -= 1
        if copy.tier < self.depth - 1:
            self._used[copy.tier](copy)

    # -- transfers -------------------------------------------------------------------------------------------------------

    def begin_fill(self, entry: Entry, tier: int, slot: Slot) -> Copy:
        """Record that a transfer up, from the tier below, into ``slot`` was admitted."""
        source = entry.copies[tier + 1]
        assert source is not None and source.valid and entry.copies[tier] is None and not entry.writers
        source.reads_from += 1
        source.prefetched = False  # the prefetch was of use
        copy = Copy(entry.key, tier, slot)
        copy.become(_FILLING)
        entry.copies[tier] = copy
        if tier + 1 < self.depth - 1:
            self._used[tier + 1](source)
        self._tell(copy)
        return copy

    def end_fill(self, entry: Entry, tier: int, error: TieredError | None) -> None:
        source, copy = entry.copies[tier + 1], entry.copies[tier]
        assert source is not None and copy is not None
        source.reads_from -= 1
        if tier + 1 < self.depth - 1:
            self._used[tier + 1](source)
        if error is None:
            copy.become(_CLEAN)
            self._tell(copy)
        else:
            self._vacate(entry, copy)

    def begin_writeback(self, entry: Entry, tier: int, slot: Slot) -> Copy:
        """Record that a transfer down, into the tier below, was admitted."""
        source = entry.copies[tier]
        assert source is not None and not source.writers and not source.in_flight and entry.copies[tier + 1] is None
        source.become(_WRITEBACK)
        source.note_version()
        copy = Copy(entry.key, tier + 1, slot)
        copy.become(_FILLING)
        entry.copies[tier + 1] = copy
        self._tell(source)
        self._tell(copy)
        return copy

    def end_writeback(
        self, entry: Entry, tier: int, error: TieredError | None, checksums: bytes = b"", generation: int = 0
    ) -> None:
        source, copy = entry.copies[tier], entry.copies[tier + 1]
        assert source is not None and copy is not None
        if error is None:
            copy.checksums, copy.generation = checksums, generation
            copy.become(_CLEAN if copy.tier == self.depth - 1 else _DIRTY)
            source.become(_CLEAN)
            source.failure = None
            if copy.tier < self.depth - 1:
                self._tell(copy)
        else:
            source.become(_DIRTY)
            source.failure = error
            self._vacate(entry, copy)
        self._tell(source)

    def repeat_writeback(self, entry: Entry, tier: int) -> None:
        """Record that a transfer down succeeded, but its source was written to meanwhile, so that the bytes are old and new
        ones."""
        source, copy = entry.copies[tier], entry.copies[tier + 1]
        assert source is not None and copy is not None
        source.become(_DIRTY)
        self._vacate(entry, copy)
        self._tell(source)

    # -- within ----------------------------------------------------------------------------------------------------------

    def _count(self, key: Key) -> None:
        if self.watched and (stem := key.rstrip("0123456789")) in self.watched:
            self.watched[stem] += 1

    def _vacate_all(self, entry: Entry) -> None:
        for copy in entry.copies:
            if copy is not None:
                self._vacate(entry, copy)

    def _vacate(self, entry: Entry, copy: Copy) -> None:
        copy.become(_EMPTY)
        entry.copies[copy.tier] = None
        self._tell(copy)

    def recount(self, claims: Iterable[tuple[Copy, Access]], reads: Iterable[Copy]) -> None:
        """Restore the table's invariants after an exception struck within a change: ``claims`` are the existing leases,
        ``reads`` the copies that transfers up read. No observer is called.

        A change in a caller's thread removes first and records last. So an unfinished change is completed: an EMPTY copy is
        removed, so are copies that a WRITE lease supersedes, and a CLEAN copy with nothing below becomes the only one.
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
            unsaved = [copy for copy in entry.copies if copy is not None and copy.dirty]
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
                if copy.dirty:
                    assert tier < self.depth - 1 and not below, f"{entry.key!r}: unsaved in tier {tier}, a copy below"
                if copy.writers:
                    assert copy.writers == 1 and copy.readers == 0 and not entry.in_flight
                    assert sum(c is not None for c in entry.copies) == 1, f"{entry.key!r}: WRITE lease beside copies"
                if copy.state is State.FILLING:
                    assert not copy.leased
