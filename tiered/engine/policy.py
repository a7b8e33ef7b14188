"""Eviction policies, and the plan along a known order of touches: when each tensor is needed next. Pure; no clock, no I/O.

An order that is followed is a cycle, such as a training step, and positions count on for ever: position p is touch ``p % len``.
Or the order ends after one round, and nothing is known to be needed after it. ``LRU`` needs no order; ``NextUse`` is Belady's
rule along a plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, filterfalse
from typing import NamedTuple

from tiered.errors import MisuseError, expect_type
from tiered.interfaces import EvictionPolicy, Planned
from tiered.types import Candidate, Key, Others, Then, Use

__all__ = ["LRU", "NEVER", "FollowedOrder", "NextUse", "OrderPlan", "Recording", "Touch", "touch_of"]

DECAY = 0.95
"""Weight of a round beside the next one, in the share of rounds that touch a tensor outside the order."""
LEAST = 1e-6
"""Share of rounds at least."""
OTHERS = 100_000
"""Tensors outside the order that are counted, at most."""
NEVER = math.inf
"""Next use of a tensor that is not in the order, or not in the rest of one that ends."""


class Touch(NamedTuple):
    """A lease or put of one tensor. ``tier`` is the name of the tier, None for the top one; ``nbytes`` the tensor's size, 0
    where unknown."""

    key: Key
    tier: str | None = None
    use: Use = Use.READ
    nbytes: int = 0


class Recording(NamedTuple):
    """A recording of touches, up to ``most``, as long as ``wanted()`` is not None."""

    touches: list[Touch]
    most: float
    wanted: Callable[[], object]


class _Seen(NamedTuple):
    """A tensor outside the order: the decayed number of rounds that touched it, and when it was touched last, in touches of the
    order that were made by then."""

    rounds: float
    at: int


class OrderPlan:
    """The position of a loop in the order that it follows, and the next use of each tensor.

    A loop may deviate: leave touches out, or insert others. Two consecutive touches that match determine where it goes on. The
    seconds that it computes after each touch are learnt from round to round.

    ``touches`` are those of one round, ``sums`` the seconds that the loop computes in it before each, and at last in all of it;
    ``end`` is the position from which on nothing is known: infinite in a cycle.

    Where ``counts_others`` is set, it counts how often tensors outside the order are touched, and ``expected`` estimates their
    next use: each round touches such a tensor with a probability of its own, at one place of the round.
    """

    def __init__(self, order: Iterable[Touch], then: Then = "again") -> None:
        self.cursor = 0
        self.end = math.inf
        self.touches: list[Touch] = []
        self._uses: dict[Key, list[int]] = {}
        self._next: dict[Key, float] = {}  # by key, as last looked up; valid until the cursor has passed it
        self._took: list[float] = []  # seconds of computing after each touch of the cycle
        self.sums: list[float] = [0.0]
        self._elsewhere: int | None = None  # position that the loop may have jumped to
        self.counts_others = False
        self._others: dict[Key, _Seen] = {}
        self._made = 0  # touches of the order
        self.replace(order, then)

    def __len__(self) -> int:
        return len(self.touches)

    @property
    def over(self) -> bool:
        """Whether all touches were made."""
        return self.cursor >= self.end

    @property
    def until(self) -> int:
        """Position at which read-ahead stops: one round after the cursor, or the end."""
        return int(min(self.cursor + len(self.touches), self.end))

    def at(self, position: int) -> Touch:
        return self.touches[position % len(self.touches)]

    def replace(self, order: Iterable[Touch], then: Then = "again") -> int:
        """Follow another order; return the number of touches that were planned anew, those after the common beginning."""
        fresh = list(order)
        pairs = zip(self.touches, fresh, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][:3] == pair[1][:3], pairs))
        for key in {touch.key for touch in self.touches[common:]}:
            uses = self._uses[key]
            del uses[bisect_left(uses, common) :]
            if not uses:
                del self._uses[key]
        for position, touch in enumerate(fresh[common:], common):
            self._uses.setdefault(touch.key, []).append(position)
        self._took[common:] = [0.0] * (len(fresh) - common)
        self._sum_up()
        if self.touches:
            # Keep the position in the cycle where the beginning is the same; else start at the beginning.
            into = self.cursor % len(self.touches)
            self.cursor = into if into <= common and into < len(fresh) else 0
        self.touches, self._elsewhere = fresh, None
        self._next.clear()
        self.end = len(fresh) if then == "end" else math.inf
        return len(fresh) - common

    def drops(self, kept: Sequence[bool], key: Key) -> bool:
        """Return whether ``key`` is dropped after its last touch. ``kept`` says of each touch of the cycle whether the tensor
        stays until its next use."""
        uses = self._uses.get(key)
        if not uses:
            return False
        before = bisect_left(uses, self.cursor if self.end < math.inf else self.cursor % len(self.touches)) - 1
        if before < 0 and self.end < math.inf:  # not touched yet
            return False
        touched = uses[before]
        return touched < len(kept) and not kept[touched]

    def next_use(self, key: Key) -> float:
        """Return the position at which ``key`` is touched next, the cursor's own included; ``NEVER`` where there is none."""
        known = self._next.get(key, -1.0)
        if known < self.cursor:
            uses = self._uses.get(key)
            known = self._next[key] = self._following(uses, self.cursor) if uses else NEVER
        return known

    def expected(self, key: Key) -> float:
        """Return ``next_use``; of a tensor outside the order the position at which it is expected next, if it is known.

        A tensor that a round touches with probability p comes after 1 / p rounds on average, however long ago it was touched.
        To evict by these probabilities is optimal where rounds are independent (Aho, Denning and Ullman 1971, "Principles of
        optimal page replacement"). p is the decayed share of the rounds that touched it.
        """
        found = self.next_use(key)
        seen = self._others.get(key) if found == NEVER and self.counts_others else None
        if seen is None or not self.touches:
            return found
        length = len(self.touches)
        ago, into = divmod(self._made - seen.at, length)
        share = seen.rounds * DECAY**ago * (1 - DECAY) / (1 - DECAY ** (1 + self._made // length))
        return self.cursor + length - into + length * (1 / max(LEAST, min(1.0, share)) - 1)

    def _other(self, key: Key) -> None:
        """Count a touch of a tensor outside the order."""
        seen = self._others.get(key)
        rounds = 0.0 if seen is None else seen.rounds
        ago = 1 if seen is None else (self._made - seen.at + len(self.touches) // 2) // max(1, len(self.touches))
        self._others[key] = _Seen(rounds * DECAY**ago + (ago > 0), self._made)
        if len(self._others) > OTHERS:
            oldest = sorted(self._others, key=lambda one: self._others[one].at)[: OTHERS // 2]
            for one in oldest:
                del self._others[one]

    def seconds_until(self, position: int) -> float:
        """Return the seconds that the loop computes from the touch at the cursor to the one at ``position``, as far as
        known."""
        return self.seconds_before(position) - self.seconds_before(self.cursor)

    def seconds_before(self, position: int) -> float:
        """Return the seconds that the loop computes from position 0 to the touch at ``position``."""
        cycles, into = divmod(position, len(self.touches))
        return cycles * self.sums[-1] + self.sums[into]

    def took(self, position: int, seconds: float) -> None:
        """Learn that the loop computed ``seconds`` after the touch at ``position``, before it asked for the next one."""
        into = position % len(self.touches)
        known = self._took[into]
        self._took[into] = (known + seconds) / 2 if known else seconds
        if into == len(self.touches) - 1:
            self._sum_up()

    def happened(self, key: Key) -> None:
        """Advance the cursor by a touch of ``key``."""
        uses = self._uses.get(key)
        if self.counts_others and not uses:
            self._other(key)
        if not uses or self.cursor >= self.end:
            return
        before, length = self.cursor, len(self.touches)
        if self.touches[before % length].key == key:
            self.cursor, self._elsewhere = self.cursor + 1, None
            self._made += 1
        elif self._elsewhere is not None and self.touches[self._elsewhere % length].key == key:
            self.cursor, self._elsewhere = self._elsewhere + 1, None
            self._made += self.cursor - before
        else:
            after = self._following(uses, self.cursor) + 1
            self._elsewhere = int(after) if after < self.end else None  # at the end no second touch could confirm it

    def _following(self, uses: Sequence[int], position: int) -> float:
        cycle, into = divmod(position, len(self.touches))
        at = bisect_left(uses, into)
        found = cycle * len(self.touches) + (uses[at] if at < len(uses) else uses[0] + len(self.touches))
        return found if found < self.end else NEVER

    def _sum_up(self) -> None:
        self.sums = [0.0, *itertools.accumulate(self._took)]


def touch_of(touch: object) -> Touch:
    """Return the touch of an element of an order, which may be a key that is read. Raises MisuseError."""
    if isinstance(touch, str):
        return Touch(touch)
    if not (
        isinstance(touch, Touch)
        and isinstance(touch.key, str)
        and isinstance(touch.use, Use)
        and type(touch.nbytes) is int
        and touch.nbytes >= 0
    ):
        raise MisuseError(f"an order is what trace() wrote down, or a list of keys; {touch!r} is neither a touch nor a key")
    return touch


_Rank = tuple[bool, float, int]
"""Whether the plan drops a copy, the position of its next use, and minus the number of its last touch; the largest leaves
first."""


class LRU:
    """Least recently used first; but all clean copies before any dirty one, because they cost no write and no wait.

    A candidate that was never touched comes last of its kind.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # the oldest first

    def touched(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def forgotten(self, key: Key) -> None:
        self._order.pop(key, None)

    def victims(self, among: Mapping[Key, Candidate]) -> Iterator[Key]:
        """Yield the keys of ``among``, the first that leaves first."""
        dirty = []
        for key in chain(self._order, filterfalse(self._order.__contains__, among)):
            candidate = among.get(key)
            if candidate is not None and candidate.dirty:
                dirty.append(key)
            elif candidate is not None:
                yield key
        yield from dirty


class NextUse:
    """Furthest next use first (Belady 1966, "A study of replacement algorithms for a virtual-storage computer").

    ``next_use(key)`` is the position in a known order at which a tensor is needed next, infinite for never, and is called
    whenever the tensor is touched; ``now()`` is the present position. A dirty candidate counts as needed sooner by ``price``
    positions, because it costs a write. Of those with one position (never, that is) the least recently used leaves first. A
    candidate that was never touched comes last.

    ``dropped(key)``, called at the same time, is whether a plan drops the tensor until its next use: such candidates leave
    before all others.
    """

    def __init__(
        self,
        next_use: Callable[[Key], float],
        now: Callable[[], float],
        *,
        price: float = 0.0,
        dropped: Callable[[Key], bool] | None = None,
    ) -> None:
        self._next_use, self._now, self._price, self._dropped = next_use, now, price, dropped
        self.plans = dropped is not None
        self._touches = 0
        self._known: dict[Key, _Rank] = {}
        self._order: list[tuple[_Rank, Key]] = []  # the last one leaves first

    @classmethod
    def along(cls, plan: OrderPlan, price: float, kept: Sequence[bool] | None, others: Others = "recency") -> NextUse:
        """Return a policy for ``plan``; ``kept`` says of each of its touches whether the tensor stays until its next use.
        ``others``: how tensors outside the order leave, by "recency" of their last use, or by the "frequency" of uses."""
        expect_type(plan, OrderPlan, "a policy that goes along a plan is given one")
        plan.counts_others = others == "frequency"
        next_use = plan.expected if plan.counts_others else plan.next_use  # the same, and half the calls
        dropped = None if kept is None else partial(plan.drops, kept)
        return cls(next_use, lambda: plan.cursor, price=price, dropped=dropped)

    def touched(self, key: Key) -> None:
        if key in self._known:
            del self._order[bisect_left(self._order, (self._known.pop(key), key))]
        self._touches += 1
        self._known[key] = self._dropped is not None and self._dropped(key), self._next_use(key), -self._touches
        insort(self._order, (self._known[key], key))

    def forgotten(self, key: Key) -> None:
        if key in self._known:
            del self._order[bisect_left(self._order, (self._known.pop(key), key))]

    def drops(self, key: Key) -> bool:
        """Return whether the plan drops ``key`` after its last touch."""
        return key in self._known and self._known[key][0]

    def victims(self, among: Mapping[Key, Candidate]) -> Iterator[Key]:
        """Yield the keys of ``among``, the first that leaves first."""
        while self._order and self._order[0][0][:2] < (False, self._now()):  # not used when they should have been
            self.touched(self._order[0][1])
        if self._price:
            kinds = (self._ranked(among, False, 0.0), self._ranked(among, True, self._price))
            known: Iterable[tuple[_Rank, Key]] = heapq.merge(*kinds, reverse=True)
        else:
            known = self._ranked(among, None, 0.0)
        for _, key in known:
            yield key
        yield from filterfalse(self._known.__contains__, among)

    def _ranked(self, among: Mapping[Key, Candidate], dirty: bool | None, price: float) -> Iterator[tuple[_Rank, Key]]:
        """Yield candidates of one kind (or of both: None), the furthest first."""
        for (dropped, position, touch), key in reversed(self._order):
            candidate = among.get(key)
            if candidate is not None and (dirty is None or candidate.dirty is dirty):
                yield (dropped, position - price, touch), key


class FollowedOrder:
    """The order that is followed, and what its plan says of a tensor.

    ``rooms`` are the bytes that read-ahead may take of each tier, from the top, and so the tiers that it fetches to;
    ``choose`` makes the eviction policies for a plan; ``planned`` are those of them that know which tensors the plan drops.
    """

    def __init__(
        self, plan: OrderPlan, rooms: Sequence[int], choose: Callable[[OrderPlan], Sequence[EvictionPolicy]]
    ) -> None:
        self.plan, self.rooms, self.choose = plan, rooms, choose
        self.planned: Sequence[Planned | None] = ()

    def adopt(self, policies: Sequence[EvictionPolicy]) -> None:
        """Take ``policies``, from the top tier, as those that evict."""
        self.planned = [policy if isinstance(policy, Planned) and policy.plans else None for policy in policies]

    def policies(self) -> Sequence[EvictionPolicy]:
        """Return new policies, which have seen nothing yet."""
        return self.choose(self.plan)

    def plans(self, tier: int) -> bool:
        """Whether read-ahead to ``tier`` takes the room of the copies that a plan drops there, without a search."""
        return tier < len(self.rooms) and self.planned[tier] is not None

    def may_take_room_of(self, key: Key, tier: int) -> bool:
        """Whether read-ahead may take the room of ``key`` in ``tier``, as far as the plan says."""
        policy = self.planned[tier] if tier < len(self.planned) else None
        return policy is None or policy.drops(key) or self.plan.next_use(key) == NEVER

    def writes_behind(self, key: Key, tier: int) -> bool:
        """Whether the plan drops ``key`` from ``tier`` before its next use, and that use needs its bytes."""
        if tier >= len(self.rooms) or (policy := self.planned[tier]) is None or not policy.drops(key):
            return False
        plan = self.plan
        needed = plan.next_use(key)
        return needed == NEVER or plan.touches[int(needed) % len(plan.touches)].use is not Use.PUT
