"""Which decision is best where sizes that differ leave holes: some are rehearsed, and the one that moved least is taken.

``keep.py`` counts bytes as if free room never lay apart. Here the order runs through an ``Occupancy`` with its own choice of
victims and of what is moved, over a memory that has places and no bytes. A tenth of a second for 1,000 touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from tiered.ahead import room_for
from tiered.eviction import NextUse
from tiered.interfaces import Memory, Movable, Streams
from tiered.keep import SEARCHED, SIMULATED, Decision, bytes_moved, dying, planned, ranked, settled
from tiered.occupancy import MOVED, Occupancy
from tiered.prefetch import Plan, Touch
from tiered.residency import Copy, Directory
from tiered.space import FreeSpace
from tiered.types import Access, Key, Slot, TensorSpec, Then, Use

if TYPE_CHECKING:
    import torch

__all__ = ["MovablePlaces", "Places", "Rehearsal", "affordable", "choose", "policy_of", "room_of"]

SETTLED = 50_000
"""Touches of an order up to which it is worth a second to know what stays; beyond, what is needed last leaves first."""
REHEARSED = 4
"""Decisions, the most promising ones."""
SLACKS = (0.998, 0.995, 0.993, 0.97)
"""Of the room, for plans that may do where holes upset the one for all of it."""
DEAR = 1.02
"""Times the bytes that move without it: what room for fetching ahead may cost."""
UPSET = 1.005
"""Times what was counted; holes cost a plan at least that much where others are tried."""


def room_of(keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], capacity: int, then: Then) -> int:
    """Bytes of a memory that are left to what comes and goes while it is touched in this order."""
    missing = sum(dict(zip(keys, sizes, strict=True)).values()) - capacity
    return affordable(keys, uses, sizes, capacity, room_for(capacity, missing, max(sizes, default=0)), then)


def affordable(
    keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], capacity: int, room: int, then: Then
) -> int:
    """``room``, or so much less of it, down to the largest tensor, that leaving it free moves at most DEAR times the bytes:
    where what is used often just fits, each byte of room is moved as often."""
    return _affordable(tuple(zip(keys, uses, sizes, strict=True)), capacity, room, then)


@lru_cache(maxsize=8)
def _affordable(touches: tuple[tuple[Key, Use, int], ...], capacity: int, room: int, then: Then) -> int:
    least = max((nbytes for _, _, nbytes in touches), default=0)
    if not touches or room <= least or len(touches) > SIMULATED:
        return room
    keys, uses, sizes = zip(*touches, strict=True)

    def moved(room: int) -> int:
        budget = max(capacity - room, least)
        return bytes_moved(keys, uses, sizes, budget, ranked(keys, uses, sizes, budget, thorough=False, then=then)[0], then)

    cheapest = moved(least)
    while room > least and moved(room) > DEAR * cheapest:
        room = max(least, room // 2)
    return room


def choose(
    keys: Sequence[Key],
    uses: Sequence[Use],
    sizes: Sequence[int],
    memory: Memory,
    *,
    thorough: bool,
    then: Then,
    spare: int = 0,
) -> Decision:
    """What to keep in ``memory`` while it is touched in this order; ``thorough`` plans, and rehearses.

    ``spare`` bytes of it are left to what is fetched ahead and written behind. With some, the decision says of each touch
    whether what was touched stays.
    """
    touches = tuple(zip(keys, uses, sizes, strict=True))
    return _choice(touches, memory.capacity, spare, isinstance(memory, Movable), thorough, then)


@lru_cache(maxsize=8)  # training and evaluation take turns, and a search takes seconds
def _choice(
    touches: tuple[tuple[Key, Use, int], ...], capacity: int, spare: int, movable: bool, thorough: bool, then: Then
) -> Decision:
    if sum({key: nbytes for key, _, nbytes in touches}.values()) <= capacity:
        return Decision()
    keys, uses, sizes = zip(*touches, strict=True)
    budget = max(capacity - spare, *sizes)
    found = ranked(keys, uses, sizes, budget, thorough=thorough, then=then)
    best = found[0]

    def moved(decision: Decision) -> int:
        pretended = (MovablePlaces if movable else Places)(budget)
        rehearsal = Rehearsal(keys, uses, sizes, pretended, decision, then)
        first = rehearsal.round()
        return first + rehearsal.rest() if then == "end" else rehearsal.round()  # in the first round all is new

    if thorough and len(found) > 1 and len(keys) <= SEARCHED:
        tried = {decision: moved(decision) for decision in found[:REHEARSED]}
        whole = next((decision for decision in tried if decision.kept is not None), None)
        if whole is not None and tried[whole] > UPSET * bytes_moved(keys, uses, sizes, budget, whole, then):
            rooms = [max(*sizes, int(budget * slack)) for slack in SLACKS]
            tried |= {decision: moved(decision) for decision in (planned(keys, uses, sizes, room, then) for room in rooms)}
        # Where a plan is not better a rule is taken: leases that last longer than a touch upset it less.
        best = min(tried, key=lambda decision: (tried[decision], decision.kept is not None))
    return settled(keys, uses, sizes, budget, best, then) if spare and len(keys) <= SETTLED else best


def policy_of(plan: Plan, decision: Decision) -> NextUse:
    """Who leaves first, by ``decision``, while a loop follows ``plan``."""
    if decision.kept is None:
        return NextUse(plan.next_use, lambda: plan.cursor, price=decision.price)
    kept = list(decision.kept)

    def given_up(key: Key) -> bool:
        touched = plan.last_use(key)
        return touched is not None and touched < len(kept) and not kept[touched]

    def swap(key: Key, position: int) -> bool:
        touched, into = plan.last_use(key), position % len(plan)
        if touched is None or max(touched, into) >= len(kept) or not kept[touched] or kept[into]:
            return False
        if plan.at(touched).use is not plan.at(into).use:
            return False
        kept[touched], kept[into] = False, True
        return True

    return NextUse(plan.next_use, lambda: plan.cursor, price=decision.price, given_up=given_up, swap=swap)


class Places:
    """A memory of which only the places are kept."""

    name = "places"
    streams: Streams | None = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._space = FreeSpace(capacity, 1)

    def allocate(self, nbytes: int) -> Slot | None:
        found = self._space.allocate(nbytes)
        return Slot(*found) if found else None

    def free(self, slot: Slot) -> None:
        self._space.free(slot.offset, slot.nbytes)

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        raise NotImplementedError

    def close(self) -> None:
        pass


class MovablePlaces(Places):
    """One whose slots can be moved."""

    def move(self, slot: Slot, offset: int) -> Slot:
        self._space.move(slot.offset, slot.nbytes, offset)
        return Slot(offset, slot.nbytes)


class Rehearsal:
    """An order in ``memory``, on demand; for a request ``most`` times its own bytes may be moved. What is dead is deleted."""

    def __init__(
        self,
        keys: Sequence[Key],
        uses: Sequence[Use],
        sizes: Sequence[int],
        memory: Memory,
        decision: Decision,
        then: Then,
        most: float = MOVED,
    ) -> None:
        self._touches, self._most = list(zip(keys, uses, sizes, strict=True)), most
        self._plan = Plan([Touch(key, None, use) for key, use, _ in self._touches], then)
        self.place = Occupancy(memory, policy_of(self._plan, decision), bottom=False)
        self._directory = Directory(2, lambda copy: self.place.note(copy) if copy.tier == 0 else None)
        self._dying = dying(keys, uses, then)
        self._linked = 0

    def round(self) -> int:
        """All touches, once; the bytes that went over the link."""
        before = self._linked
        for (key, use, nbytes), dies in zip(self._touches, self._dying, strict=True):
            copy = self._resident(key, use, nbytes)
            self._plan.happened(key)
            if use is Use.WRITE:
                self._directory.grant(self._directory.entry(key), 0, Access.WRITE)
                self._directory.release(copy, Access.WRITE)
            self.place.policy.touched(key)
            if dies:
                self._directory.forget(key)
        return self._linked - before

    def rest(self) -> int:
        """Write back what is dirty; the bytes of it."""
        before = self._linked
        for copy in list(self.place.copies.values()):
            self._clean(copy)
        return self._linked - before

    def _resident(self, key: Key, use: Use, nbytes: int) -> Copy:
        entry = self._directory.find(key)
        if use is Use.PUT:
            if entry is not None:
                self._directory.forget(key)
            entry = self._directory.put(key, TensorSpec("uint8", (nbytes,), 1), 0, self._room(nbytes))
        elif entry is None:
            spec, fresh = TensorSpec("uint8", (nbytes,), 1), self._directory.next_id
            entry = self._directory.restore(key, spec, fresh, Slot(0, nbytes), b"", 0)
        if entry.copies[0] is None:
            self._linked += entry.nbytes
            self._directory.begin_fill(entry, 0, self._room(entry.nbytes))
            self._directory.end_fill(entry, 0, None)
        copy = entry.copies[0]
        assert copy is not None
        return copy

    def _room(self, nbytes: int) -> Slot:
        slot = self.place.allocate(nbytes, self._most)
        if slot is None:
            for copy in self.place.victims(nbytes, lambda copy: True, self._most) or ():
                self._clean(copy)
                self._directory.evict(copy)
            slot = self.place.allocate(nbytes, self._most)
        assert slot is not None
        return slot

    def _clean(self, copy: Copy) -> None:
        if copy.dirty:
            entry = self._directory.entry(copy.key)
            self._linked += copy.nbytes
            self._directory.begin_writeback(entry, 0, Slot(0, copy.nbytes))
            self._directory.end_writeback(entry, 0, None)
