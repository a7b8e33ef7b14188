"""The pool of one tier: its slots, the copies in them, and which of the copies may be evicted.

All counts are updated with each change, so a query costs the same with ten copies and with a hundred thousand.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from tiered.allocator import SlotMap
from tiered.engine.policy import FollowedOrder
from tiered.engine.residency import Copy, Evictability, State
from tiered.errors import shown
from tiered.interfaces import EvictionPolicy, Memory, Movable, Restorable, Tier
from tiered.telemetry import TierStatistics
from tiered.types import Fence, Key, Slot

__all__ = ["MOVED", "Pool", "sized"]

MOVED = 16
"""Most bytes, as a multiple of its own, that a request may have moved within the tier: no lease is granted meanwhile."""

SMALL = 2
"""Most bytes of small copies, as a multiple of what is needed, that stay although a larger one that leaves was used later."""

WEIGHED = 256
"""Most copies, or groups of them, that are weighed one by one to find which have to leave."""

LOOKED_AT = 256
"""Copies dropped by the plan that are offered at most: to look at thousands of small ones takes longer than a lease."""

FEW = 16
"""Most copies that leave for one request of which each is asked about once more, whether it has to leave; and that are looked
at for neighbours before anybody asks whether they have room at all."""


_EMPTY = State.EMPTY  # see residency
_USED, _CLEAN, _FRESH, _DIRTY, _WRITING_BACK = Evictability


class Pool:
    """The slots of ``tier`` and the copies in them; ``policy`` chooses victims.

    ``evictable`` are the copies that may leave, now or after a write-back; ``bytes_of[evictability]`` are the bytes of their
    slots; ``marked`` are victims that were chosen and have not left yet. ``order`` is the one that is followed, where it plans
    what this tier drops; ``behind`` are DIRTY copies that are to be written back before their room is needed. ``note`` keeps
    all of these, and nobody else. ``aliased_evicted`` are EMPTY copies whose memory still has aliases. ``largest`` is the
    largest allocated slot, ``alignment`` that of all sizes; ``memory`` is the tier where its slots can be moved. Nothing leaves
    the ``bottom``, and its policy is told nothing.
    """

    def __init__(self, tier: Tier, policy: EvictionPolicy, *, bottom: bool) -> None:
        self.tier, self.policy, self.bottom = tier, policy, bottom
        self.alignment: int = getattr(tier, "alignment", 1)
        self.copies: dict[Key, Copy] = {}
        self.evictable: dict[Key, Copy] = {}
        self.marked: dict[Key, Copy] = {}
        self.order: FollowedOrder | None = None
        self.behind: dict[Key, Copy] = {}
        self._dropped: dict[Key, Copy] = {}  # CLEAN copies that the plan dropped, the newest last
        self.bytes_of = [0 for _ in Evictability]
        self.aliased_evicted: set[Copy] = set()
        self.used = self.peak = self.moved = self.largest = 0
        self._sizes: Counter[int] = Counter()  # of allocated slots
        self.memory = tier if isinstance(tier, Movable) else None
        self._where = tier if isinstance(tier, Memory) else None  # knows its slots by offset; those of a disk matter to nobody
        self.changes = 0  # number of changes to the pool
        self._movable: dict[int, Copy] = {}  # above the bottom: copies whose bytes may be moved, by the offset of their slots
        self._fixed: set[int] = set()  # and the offsets of all other slots
        self._read: tuple[int, SlotMap] | None = None  # the number of changes when it was read, and the map
        self._guards: list[tuple[Slot, Fence]] = []
        self._passed_on: Copy | None = None  # evicted next; its slot stays allocated

    # -- slots -----------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Bytes that are in no slot; they may be fragmented."""
        return self.tier.capacity - self.used

    @property
    def ready(self) -> int:
        """Bytes that are free, or will be without another write-back."""
        counts = self.bytes_of
        return self.tier.capacity - self.used + counts[_CLEAN] + counts[_FRESH] + counts[_WRITING_BACK]

    def allocate(self, nbytes: int, most: float = MOVED) -> Slot | None:
        """Allocate a slot, moving other slots out of its way where that takes at most ``most`` times ``nbytes``."""
        memory = self.memory
        if memory is not None and nbytes > memory.capacity - self.used:
            return None
        slot = self.tier.allocate(nbytes)
        if slot is None and memory is not None and most:
            slot = self._after_moves(memory, nbytes, most * nbytes)
        if slot is not None:
            self.account(slot)
        return slot

    def take(self, nbytes: int) -> Slot | None:
        """Allocate a slot where the room is free in one piece; nothing is moved."""
        slot = self.tier.allocate(nbytes)
        if slot is not None:
            self.account(slot)
        return slot

    def rounded(self, nbytes: int) -> int:
        """Return the bytes of a slot for ``nbytes``."""
        return -(-nbytes // self.alignment) * self.alignment

    def _can_move(self) -> dict[int, Copy]:
        """Return, by offset, the copies whose bytes may be moved: no alias refers to them, and no transfer uses their slot."""
        if self.memory is None:
            return {}
        if self.bottom:
            return {copy.slot.offset: copy for copy in self.copies.values() if copy.idle}
        return self._movable

    @property
    def _map(self) -> SlotMap:
        """The slots, and which of them can be moved; above the bottom they are read once for all questions until the next
        change."""
        slots = self._slots
        if self.memory is None or self.bottom:
            movable = self._can_move()
            return SlotMap(slots, self.tier.capacity, {slot.offset for slot in slots if slot.offset not in movable})
        if self._read is None or self._read[0] != self.changes:
            self._read = self.changes, SlotMap(slots, self.tier.capacity, self._fixed)
        return self._read[1]

    def _after_moves(self, memory: Movable, nbytes: int, most: float) -> Slot | None:
        """Move idle copies until ``nbytes`` free bytes lie in one piece, and allocate them. Return None where more than
        ``most`` bytes would have to move."""
        plan = self._map.moves(nbytes, most)
        movable = self._can_move() if plan else {}
        for old, to in plan or ():
            copy = movable.pop(old.offset)
            assert copy.slot == old and copy.idle and not copy.fences
            copy.slot = memory.move(old, to)
            self.changes += 1
            self.moved += old.nbytes
            movable[to] = copy
        return None if plan is None else self.tier.allocate(nbytes)

    def account(self, slot: Slot) -> None:
        """Count ``slot``, which was taken from the tier."""
        self.changes += 1
        self.used += slot.nbytes
        self.peak = max(self.peak, self.used)
        self._sizes[slot.nbytes] += 1
        if not self.bottom:
            self._fixed.add(slot.offset)
        self.largest = max(self.largest, slot.nbytes)

    def pass_on(self, copy: Copy) -> Slot:
        """Return the slot of ``copy``, which is evicted next: the slot stays allocated, and is the caller's from then on."""
        self._passed_on = copy
        return copy.slot

    def give_back(self, slot: Slot, fences: Sequence[Fence] = ()) -> None:
        """Free a slot; its next owner must wait for ``fences``."""
        self.changes += 1
        if fences:
            self._guard(slot, fences)
        self.tier.free(slot)
        self.used -= slot.nbytes
        self._fixed.discard(slot.offset)
        self._sizes[slot.nbytes] -= 1
        if not self._sizes[slot.nbytes]:
            del self._sizes[slot.nbytes]
            if slot.nbytes == self.largest:
                self.largest = max(self._sizes, default=0)

    @property
    def _slots(self) -> Sequence[Slot]:
        """The allocated slots of a memory, by offset."""
        return self._where.slots if self._where is not None else ()

    def _guard(self, slot: Slot, fences: Sequence[Fence]) -> None:
        """Have the next owner of ``slot`` wait for ``fences``."""
        self._guards += [(slot, fence) for fence in fences if not fence.query()]

    def guards(self, slot: Slot) -> tuple[Fence, ...]:
        """Return fences of earlier slots in the same memory that have not passed."""
        if not self._guards:
            return ()
        self._guards = [(held, fence) for held, fence in self._guards if not fence.query()]
        return tuple(
            fence
            for held, fence in self._guards
            if held.offset < slot.offset + slot.nbytes and slot.offset < held.offset + held.nbytes
        )

    # -- copies ----------------------------------------------------------------------------------------------------------

    def note(self, copy: Copy) -> None:
        """Bring all that is known of ``copy`` for eviction up to date: it has come or gone, or its state or its use has
        changed."""
        gone = copy.state is _EMPTY
        if not gone:
            self.copies[copy.key] = copy
        elif self.copies.get(copy.key) is copy:
            del self.copies[copy.key]
            if not self.bottom:
                self.policy.forgotten(copy.key)
        if not self.bottom and (now := copy.classify()) is not (before := copy.evictability):
            self.changes += 1
            copy.evictability, nbytes = now, copy.slot.nbytes
            self.bytes_of[before] -= nbytes
            self.bytes_of[now] += nbytes
            if now is _USED or now is _WRITING_BACK:
                self._movable.pop(copy.slot.offset, None)
                self._fixed.add(copy.slot.offset)
            else:
                self._movable[copy.slot.offset] = copy
                self._fixed.discard(copy.slot.offset)
            if now is _USED:
                del self.evictable[copy.key]
                self.marked.pop(copy.key, None)
            elif before is _USED:
                self.evictable[copy.key] = copy
            if self.order is not None:
                if now is _CLEAN or now is _DIRTY:
                    self.plan(copy)
                else:
                    self._dropped.pop(copy.key, None)
        if gone:
            if copy.aliases:
                self.aliased_evicted.add(copy)
            elif copy is self._passed_on:
                self._passed_on = None
                if copy.fences:
                    self._guard(copy.slot, copy.fences)
            else:
                self.give_back(copy.slot, copy.fences)

    def plan(self, copy: Copy) -> None:
        """Record whether the order that is followed, if any is, drops ``copy`` before its next use."""
        order, kind, key = self.order, copy.evictability, copy.key
        if order is not None and kind is _CLEAN and order.may_take_room_of(key, copy.tier):
            self._dropped[key] = copy
            return
        self._dropped.pop(key, None)
        if order is not None and kind is _DIRTY and order.writes_behind(key, copy.tier):
            self.behind[key] = copy

    def plan_by(self, order: FollowedOrder | None) -> None:
        """Know of all copies what ``order`` says of them, from now on; None: no order says anything."""
        self.order = order
        self.behind.clear()
        self._dropped.clear()
        if order is not None:
            for copy in self.copies.values():
                self.plan(copy)

    def dropped(self) -> list[Copy]:
        """Return CLEAN copies that the plan dropped, the newest first, ``LOOKED_AT`` at most: they cost nothing."""
        return list(islice(reversed(self._dropped.values()), LOOKED_AT))

    def reap_dead_alias(self, copy: Copy) -> None:
        """Free the slot of ``copy``, which is EMPTY and has lost its last alias."""
        self.aliased_evicted.remove(copy)
        self.give_back(copy.slot, copy.fences)

    def rename(self, copy: Copy, key: Key) -> None:
        """Record that the copy belongs to ``key`` from now on, of which no plan has said anything yet."""
        old, copy.key = copy.key, key
        self.copies[key] = self.copies.pop(old)
        for known in (self.evictable, self.marked):
            if old in known:
                known[key] = known.pop(old)
        for known in (self.behind, self._dropped):
            known.pop(old, None)
        if not self.bottom:
            self.policy.forgotten(old)
            self.policy.touched(key)

    def adopt(self, policy: EvictionPolicy) -> None:
        """Let ``policy`` choose victims from now on, and report every present copy to ``policy``, the one used last at the end.
        """
        for key in self.copies:  # else the old policy would remember copies that leave meanwhile
            self.policy.forgotten(key)
        self.policy = policy
        self.marked.clear()
        for copy in sorted(self.copies.values(), key=lambda copy: copy.last_use):
            policy.touched(copy.key)

    def mark_victim(self, copy: Copy) -> None:
        """Prefer ``copy``, which was chosen as a victim, until it is used."""
        self.marked[copy.key] = copy

    def victims(self, nbytes: int, accept: Callable[[Copy], bool], most: float = MOVED) -> list[Copy] | None:
        """Return copies that free ``nbytes`` in one piece: marked ones, then the policy's first; None when all are too little.

        The remaining slots may have to be moved, at most ``most`` times ``nbytes``.
        """
        chosen = [copy for copy in self.marked.values() if accept(copy)]
        more = (self.evictable[key] for key in self.policy.victims(self.evictable) if key not in self.marked)
        have = kept = sum(copy.slot.nbytes for copy in chosen)
        wanted = nbytes - min(self.free, nbytes // 2)
        while True:
            for copy in more if have < wanted else ():
                if accept(copy):
                    chosen.append(copy)
                    have += copy.slot.nbytes
                    if have >= wanted:
                        break
            found = self.enough(nbytes, chosen, most)
            if found is not None or have < wanted:
                return found
            wanted = 2 * max(wanted, kept)

    def first(self, nbytes: int, accept: Callable[[Copy], bool]) -> list[Copy]:
        """Return the policy's first victims that together have ``nbytes``, in its order, anywhere in the tier; all of them
        where that is less."""
        found: list[Copy] = []
        for key in self.policy.victims(self.evictable) if nbytes > 0 else ():
            copy = self.evictable[key]
            if accept(copy):
                found.append(copy)
                nbytes -= copy.slot.nbytes
                if nbytes <= 0:
                    break
        return found

    def enough(self, nbytes: int, copies: list[Copy], most: float = MOVED) -> list[Copy] | None:
        """Return the copies that must leave so that ``nbytes`` fit in one piece, out of the shortest sufficient prefix of
        ``copies``; with very many copies, some of their neighbours in that order, too."""
        before = 0
        if self.free + sum(copy.slot.nbytes for copy in copies) < nbytes:
            return None
        for copy in copies:  # small ones that were used long ago must not make every search a plan of moves
            if copy.slot.nbytes >= nbytes:
                return [copy]
            before += copy.slot.nbytes
            if before > nbytes // 2:
                break
        each = max(1, -(-len(copies) // WEIGHED))
        slot_map = self._map

        def slides(going: list[Copy]) -> range | None:
            return slot_map.slides(nbytes, most * nbytes, [copy.slot.offset for copy in going])

        def moves_any(going: list[Copy]) -> bool:
            gone = [copy.slot.offset for copy in going]
            return slot_map.moves(nbytes, most * nbytes, gone, any_way=True) is not None

        def shortest(enough: Callable[[list[Copy]], object], needed: list[Copy], most: int) -> int:
            """Return how many groups of the prefix are sufficient beside those ``needed``; ``most`` are."""
            low = 0
            while low + 1 < most:
                middle = (low + most) // 2
                if enough([*copies[: middle * each], *needed]):
                    most = middle
                else:
                    low = middle
            return most

        # Plans that slide slots are found ten times sooner; those that are missed make no difference to what is evicted.
        groups = -(-len(copies) // each)
        if slides(copies) is not None:
            if slides([]) is not None:
                return []
            going = copies[: shortest(slides, [], groups) * each]
            room = slides(going)
            assert room is not None
            leaving = self._least(nbytes, [copy for copy in going if copy.slot.offset in room], room, most * nbytes)
            if len(leaving) <= FEW:  # another stretch, or a part of this one, may do without some of them
                for copy in leaving[-2::-1]:
                    fewer = [other for other in leaving if other is not copy]
                    leaving = leaving if slides(fewer) is None else fewer
            return leaving
        if not moves_any(copies):
            return None
        needed: list[Copy] = []
        while not moves_any(needed):
            groups = shortest(moves_any, needed, groups) - 1
            needed = copies[groups * each : (groups + 1) * each] + needed
        return needed

    def _least(self, nbytes: int, copies: list[Copy], room: range, most: float) -> list[Copy]:
        """Return ``copies``, all that leave within ``room``, without those, the last ones first, that can slide as well."""
        slots, movable = self._slots, self._can_move()
        inside = slots[bisect_left(slots, (room.start,)) : bisect_left(slots, (room.stop,))]
        moved = sum(slot.nbytes for slot in inside) - sum(copy.slot.nbytes for copy in copies)
        spare = len(room) - moved - nbytes
        leaving = []
        for copy in reversed(copies):
            size = copy.slot.nbytes
            if size <= spare and moved + size <= most and copy.slot.offset in movable:
                spare, moved = spare - size, moved + size
            else:
                leaving.append(copy)
        return leaving[::-1]

    def suffice(self, nbytes: int, copies: Sequence[Copy]) -> bool:
        """Whether ``nbytes`` fit in one piece once all of ``copies`` have left."""
        if self.free + sum(copy.slot.nbytes for copy in copies) < nbytes:
            return False
        gone, slot_map, most = [copy.slot.offset for copy in copies], self._map, MOVED * nbytes
        return slot_map.slides(nbytes, most, gone) is not None or slot_map.moves(nbytes, most, gone, any_way=True) is not None

    def large_victim(self, nbytes: int, accept: Callable[[Copy], bool]) -> Copy | None:
        """Return the policy's first victim whose slot has ``nbytes``, if those before it have at most ``SMALL`` times as many
        together: they stay, because to look for moves takes a hundred times as long."""
        before = 0
        for key in self.policy.victims(self.evictable):
            copy = self.evictable[key]
            if accept(copy):
                if copy.slot.nbytes >= nbytes:
                    return copy
                before += copy.slot.nbytes
                if before > SMALL * nbytes:
                    return None
        return None

    def together(self, nbytes: int, copies: Iterable[Copy]) -> list[Copy] | None:
        """Return neighbouring copies of ``copies`` (equally good victims) that leave ``nbytes`` in one piece, with the fewest
        bytes. None: nowhere do enough of them lie together. Nothing is moved."""
        copies = sorted(copies, key=lambda copy: copy.slot.offset)
        if len(copies) > FEW and self._map.slides(nbytes, 0, [copy.slot.offset for copy in copies]) is None:
            return None
        best: list[Copy] | None = None
        least = math.inf
        run: deque[Copy] = deque()  # adjacent copies
        going = start = last = 0  # their bytes, the start of the room that they leave, and the index of the last one's slot
        slots = self._slots
        for copy in copies:
            at = bisect_left(slots, copy.slot)
            if not run or at != last + 1:
                run.clear()
                going, start = 0, sum(slots[at - 1]) if at else 0
            run.append(copy)
            going += copy.slot.nbytes
            last = at
            stop = slots[at + 1].offset if at + 1 < len(slots) else self.tier.capacity
            while run and stop - start >= nbytes:
                if going < least:
                    best, least = list(run), going
                first = run.popleft()
                going -= first.slot.nbytes
                start = first.slot.offset + first.slot.nbytes
        return best

    def would_fit(self, nbytes: int, without: Iterable[Copy]) -> bool:
        """Return whether ``nbytes`` would fit in one piece, without moves, if the copies ``without`` were gone."""
        gone = [copy.slot.offset for copy in without]
        return self._map.moves(nbytes, 0, gone) is not None

    def neighbours(self, without: Iterable[Copy]) -> frozenset[Slot]:
        """Return the slots that stay when ``without`` leave."""
        return frozenset(self._slots).difference(copy.slot for copy in without)

    def recount(
        self, copies: Iterable[Copy], aliased: Iterable[Copy], others: Iterable[Slot], policy: EvictionPolicy
    ) -> None:
        """Count everything anew, after an exception struck within a change.

        ``copies`` are those that the directory has in this tier, ``aliased`` the evicted ones that still have aliases,
        ``others`` the slots that are in use otherwise. ``policy`` has seen none of them.

        Raises AssertionError where two slots overlap, or the tier cannot restore its set of slots.
        """
        assert isinstance(self.tier, Restorable), f"tier {self.tier.name} cannot tell anew which of its slots are given"
        self.copies = {copy.key: copy for copy in copies}
        self.aliased_evicted = set(aliased)
        self.evictable, self.marked, self.policy, self.order, self._movable = {}, {}, policy, None, {}
        self.bytes_of = [0 for _ in Evictability]
        slots = {copy.slot for copy in (*self.copies.values(), *self.aliased_evicted)} | set(others)
        self._sizes = Counter(slot.nbytes for slot in slots)
        self._fixed = set() if self.bottom else {slot.offset for slot in slots}
        self._read = None
        self.used = sum(slot.nbytes for slot in slots)
        self.largest = max(self._sizes, default=0)
        self._passed_on = None
        self.changes += 1
        self.tier.restore(slots)
        for copy in (*self.copies.values(), *self.aliased_evicted):
            copy.evictability = _USED
        for copy in self.copies.values():
            self.note(copy)
            if not self.bottom:
                policy.touched(copy.key)

    # -- looking in ------------------------------------------------------------------------------------------------------

    def in_use(self) -> str:
        """Say how many bytes are in use, and where the free ones of a memory lie apart, how many lie in one piece."""
        text = f"{self.used:,} of {self.tier.capacity:,} bytes are in use"
        if self._where is None:
            return text
        begins = [*(slot.offset for slot in self._slots), self.tier.capacity]
        ends = [0, *(slot.offset + slot.nbytes for slot in self._slots)]
        piece = max(begin - end for begin, end in zip(begins, ends, strict=True))
        return text if piece == self.free else f"{text}, the largest free piece has {piece:,} bytes"

    def why_full(self, nbytes: int, key: Key | None) -> str:
        """Return the error text of a full tier without a tier below."""
        return (
            f"no room for {sized(nbytes, key)}: {len(self.copies):,} tensors have {self.used:,} of the "
            f"{self.tier.capacity:,} bytes in tier {self.tier.name}, and there is no tier below: delete some, "
            f"or open the store with more room"
        )

    def why_never(self, nbytes: int, key: Key | None) -> str:
        """Return why ``nbytes`` never fit. A disk's capacity is what it has now: when others filled it, the tier's own answer
        says more."""
        why = getattr(self.tier, "refusal", None)
        if why:
            return f"no room for {sized(nbytes, key)}: {why}"
        return (
            f"{sized(nbytes, key)} can never fit into tier {self.tier.name} ({self.tier.capacity:,} bytes): "
            f"open the store with at least {nbytes:,} bytes there, or split the tensor"
        )

    def holders(self) -> list[Copy]:
        """Return the copies that are leased, or have aliases after a lease; the largest first."""
        held = [copy for copy in (*self.copies.values(), *self.aliased_evicted) if copy.leased or copy.aliases]
        return sorted(held, key=lambda copy: -copy.slot.nbytes)

    def statistics(self) -> TierStatistics:
        held = sum(bool(copy.aliases) and not copy.leased for copy in self.copies.values()) + len(self.aliased_evicted)
        return TierStatistics(self.tier.name, self.tier.capacity, self.used, self.peak, len(self.copies), held, self.moved)

    def check(self) -> None:
        """Assert that the counts are those of counting anew (for tests)."""
        counted = [0 for _ in Evictability]
        for copy in self.copies.values():
            kind, now = copy.evictability, copy.classify()
            assert self.bottom or kind is now, f"{copy.key!r}: {kind}, not {now}"
            assert (copy.key in self.evictable) == (kind is not _USED)
            counted[kind] += copy.slot.nbytes
        for kind in set(Evictability) - {_USED}:
            assert counted[kind] == self.bytes_of[kind], f"{kind}: {counted} counted, {self.bytes_of} kept"
        assert set(self.evictable) <= set(self.copies)
        assert set(self.marked) <= set(self.evictable)
        movable = {copy.slot.offset: copy for copy in self.evictable.values() if copy.evictability is not _WRITING_BACK}
        assert self._movable == movable
        if self.bottom:
            assert not self._fixed
        elif self.memory is not None:
            assert self._fixed == {slot.offset for slot in self._slots} - movable.keys()
        assert self._passed_on is None
        assert self._where is None or self._sizes == Counter(slot.nbytes for slot in self._slots)
        assert self.used == sum(size * count for size, count in self._sizes.items())
        assert self.largest == max(self._sizes, default=0)


def sized(nbytes: int, key: Key | None) -> str:
    """Name what needs room in an error: a tensor, or room for no tensor in particular (None)."""
    return f"{nbytes:,} bytes" if key is None else f"tensor {shown(repr(key))} ({nbytes:,} bytes)"
