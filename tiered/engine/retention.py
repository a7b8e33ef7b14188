"""The retention plan: which tensors to keep until their next use, along a known order of touches. Pure, no dependencies.

Finding the best choice is NP-hard; ``tiered/planning/optimum.py`` gives the sources and a bound. The plan drops the tensor
that is needed furthest in the future (Belady, "A study of replacement algorithms", 1966), where a dirty copy counts as nearer
by a price. Or the tensors that are touched most often stay for good, and the streaming working set uses the rest. Of a few
prices, and of a few shares of memory for tensors that stay, it takes the one that moves the fewest bytes, counted along the
order as if free room were never fragmented. Takes tenths of a second for 2,000 touches.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tiered.types import Key, Then, Use

__all__ = ["RetentionPlan", "affordable", "bytes_moved", "dead_after", "largest_streamed", "plan_retention", "room_for"]

PRICES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)  # of a write-back, in mean interval lengths; the best one is taken
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the room, for tensors that stay for good
SIMULATED = 20_000
"""Longest order, in touches, for which prices are tried; along a longer one the furthest next use leaves first."""
SETTLED = 50_000
"""Longest order, in touches, for which the plan says of each touch whether the tensor stays (up to a second); along a longer
one the furthest next use leaves first."""
STAYING = 0.99
"""Most bytes that a plan in which tensors stay for good may move, as a factor of what the best price moves: such a plan reads
what does not stay in long stretches, which costs more time than it saves where the bytes are nearly the same."""
DEAR = 1.02
"""Factor of bytes moved that room for read-ahead may cost at most."""

_Touched = tuple[tuple[Key, Use, int], ...]
"""The key, the use and the size of each touch."""


ROOM = 64 << 20
"""Bytes that keep a link busy in both directions: arrivals, tensors that wait for their use, write-behind."""
SHARE_OF_TIER, SHARE_OF_MISSING = 8, 64
"""Bounds of that room: one SHARE_OF_TIERth of the tier, because so much less is kept, and one SHARE_OF_MISSINGth of the bytes
that do not fit, because a small transfer volume needs little overlap."""
MOST = 4
"""Bound of that room: one MOSTth of the tier, however large one tensor is."""


def room_for(capacity: int, missing: int, largest: int) -> int:
    """Return the bytes of a tier that a plan should leave to read-ahead and write-behind, where ``missing`` bytes do not fit
    and the largest tensor has ``largest``."""
    return min(max(min(ROOM, capacity // SHARE_OF_TIER, missing // SHARE_OF_MISSING), largest), capacity // MOST)


class RetentionPlan(NamedTuple):
    """The order of eviction: first tensors that are not in ``keep`` after their last touch (None: all are), then the furthest
    next use, where a copy that must be written back counts as needed sooner by ``price`` touches."""

    price: float = 0.0
    keep: tuple[bool, ...] | None = None

    def rank(self, position: int, next_use: float, dirty: bool) -> tuple[bool, float]:
        """Return the rank of a copy that was touched at ``position`` of the cycle; the largest leaves first."""
        return self.keep is not None and not self.keep[position], next_use - (self.price if dirty else 0.0)


def plan_retention(
    keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], capacity: int, *, then: Then = "again", spare: int = 0
) -> RetentionPlan:
    """Return the plan for ``capacity`` bytes along this order.

    ``spare`` bytes are left to read-ahead and write-behind. If there are some, the plan says of each touch whether the tensor
    stays.
    """
    return _decision(tuple(zip(keys, uses, sizes, strict=True)), capacity, spare, then)


@lru_cache(maxsize=8)  # training and evaluation alternate
def _decision(touches: _Touched, capacity: int, spare: int, then: Then) -> RetentionPlan:
    if sum({key: nbytes for key, _, nbytes in touches}.values()) <= capacity:
        return RetentionPlan()
    keys, uses, sizes = zip(*touches, strict=True)
    budget = max(capacity - spare, *sizes)
    best = _cheapest(keys, uses, sizes, budget, then)[1] if len(keys) <= SIMULATED else RetentionPlan()
    return _materialise(keys, uses, sizes, budget, best, then) if spare and len(keys) <= SETTLED else best


def largest_streamed(keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], capacity: int) -> int:
    """Return the bytes of the largest tensor that will not stay in ``capacity`` bytes, by what ``plan_retention`` keeps; of an
    order that does more than read each tensor once a round, the largest of all."""
    largest = max(sizes, default=0)
    if any(use is not Use.READ for use in uses) or len(set(keys)) < len(keys):
        return largest
    of_size, missing = Counter(sizes), sum(sizes) - capacity
    streamed = 0
    for size, count in sorted(of_size.items(), key=lambda found: found[0] * found[1], reverse=True):
        streamed = max(streamed, size)
        missing -= size * count
        if missing + room_for(capacity, max(0, sum(sizes) - capacity), streamed) <= 0:
            break
    return streamed


def affordable(
    keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], capacity: int, room: int, then: Then
) -> int:
    """Return ``room``, or the largest smaller value, down to the largest tensor, with which at most DEAR times the bytes move:
    where the frequently used tensors just fit, each byte of room is moved at each use."""
    return _affordable(tuple(zip(keys, uses, sizes, strict=True)), capacity, room, then)


@lru_cache(maxsize=8)
def _affordable(touches: _Touched, capacity: int, room: int, then: Then) -> int:
    least = max((nbytes for _, _, nbytes in touches), default=0)
    if not touches or room <= least or len(touches) > SIMULATED:
        return room
    keys, uses, sizes = zip(*touches, strict=True)

    def moved(room: int) -> int:
        return _cheapest(keys, uses, sizes, max(capacity - room, least), then)[0]

    fewest = moved(least)
    while room > least and moved(room) > DEAR * fewest:
        room = max(least, room // 2)
    return room


def _cheapest(
    keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], budget: int, then: Then
) -> tuple[int, RetentionPlan]:
    """Return the bytes moved by the best of the plans that are tried, and that plan."""
    tried, staying = [RetentionPlan()], list[RetentionPlan]()
    if any(use is not Use.READ for use in uses):
        lengths = [after - i for i, after in enumerate(_following(keys, then)) if after is not None]
        mean = sum(lengths) / max(1, len(lengths))
        tried = [RetentionPlan(price * mean) for price in PRICES]
        if then == "again":
            staying = [_staying(keys, uses, sizes, int(budget * share)) for share in SHARES]

    def cheapest(plans: Sequence[RetentionPlan]) -> tuple[int, RetentionPlan]:
        counted = [(bytes_moved(keys, uses, sizes, budget, plan, then), plan) for plan in plans]
        return min(counted, key=lambda found: found[0])

    best = cheapest(tried)
    other = cheapest(staying) if staying else best
    return other if other[0] < STAYING * best[0] else best


def _staying(keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], room: int) -> RetentionPlan:
    """Return the plan in which the tensors touched most often stay for good in ``room`` bytes. A write-back counts as a touch;
    tensors that are put never stay."""
    size, touches = dict(zip(keys, sizes, strict=True)), Counter(keys)
    put = {key for key, use in zip(keys, uses, strict=True) if use is Use.PUT}
    touches.update({key for key, use in zip(keys, uses, strict=True) if use is Use.WRITE})
    staying = set[Key]()
    for key, _ in touches.most_common():
        if key not in put and size[key] <= room:
            staying.add(key)
            room -= size[key]
    return RetentionPlan(0.0, tuple(key in staying for key in keys))


def bytes_moved(
    keys: Sequence[Key],
    uses: Sequence[Use],
    sizes: Sequence[int],
    budget: int,
    decision: RetentionPlan,
    then: Then = "again",
) -> int:
    """Return the bytes read and written on demand, in ``budget`` bytes without fragmentation: in the second round of a cycle;
    or, where the order ends, in its only one, from an empty memory, including the final write of all dirty tensors."""
    return _on_demand(keys, uses, sizes, budget, decision, then, rounds=2 if then == "again" else 1)[0]


def _materialise(
    keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], budget: int, decision: RetentionPlan, then: Then
) -> RetentionPlan:
    """Return ``decision`` with ``keep`` set for each touch by a simulation on demand in ``budget`` bytes without fragmentation,
    and spread over time: a stretch of tensors that are all kept would leave the disk idle."""
    rounds, begin = (3, len(keys)) if then == "again" else (1, 0)

    def staying(decision: RetentionPlan) -> tuple[bool, ...]:
        left = _on_demand(keys, uses, sizes, budget, decision, then, rounds)[1]
        return tuple(position + begin not in left for position in range(len(keys)))

    kept = staying(decision)
    if then == "again":
        kept = _spread(kept, uses, sizes, _following(keys, then))
    fits = staying(RetentionPlan(decision.price, kept))  # rounds differ slightly
    dead = dead_after(keys, uses, then)
    return RetentionPlan(decision.price, tuple(a and b and not c for a, b, c in zip(kept, fits, dead, strict=True)))


def _spread(
    kept: Sequence[bool], uses: Sequence[Use], sizes: Sequence[int], following: Sequence[int | None]
) -> tuple[bool, ...]:
    """Return ``kept`` with as many tensors of each kind kept, evenly spaced. A kind is the intervals of one size and use
    that span a whole round: whichever of them are kept, they take the same room at all times, and moving the others costs
    the same.

    Where an order only reads, so many bytes are kept, of the kinds with the fewest bytes first: the few largest tensors (an
    embedding) would each be waited for, and the smallest are not worth a transfer. The kind with the most bytes is streamed."""
    spread, end = list(kept), len(kept)
    kinds: dict[tuple[int, Use], list[int]] = {}
    for i, j in enumerate(following):
        if j == i + end and uses[i] is not Use.PUT:
            kinds.setdefault((sizes[i], uses[i]), []).append(i)
    counts = {kind: sum(kept[i] for i in positions) for kind, positions in kinds.items()}
    if all(use is Use.READ for use in uses):
        left = sum(counts[kind] * kind[0] for kind in kinds)
        for kind, positions in sorted(kinds.items(), key=lambda found: found[0][0] * len(found[1])):
            counts[kind] = min(len(positions), left // kind[0])
            left -= counts[kind] * kind[0]
    for kind, positions in kinds.items():
        count, among = counts[kind], len(positions)
        for number, i in enumerate(positions):
            spread[i] = (number + 1) * count // among > number * count // among
    return tuple(spread)


def _on_demand(
    keys: Sequence[Key],
    uses: Sequence[Use],
    sizes: Sequence[int],
    budget: int,
    decision: RetentionPlan,
    then: Then,
    rounds: int,
) -> tuple[int, set[int]]:
    """Return the bytes moved in the second round, or the only one, and the positions after which a copy left before its next
    use."""
    following, dead, end = _following(keys, then), dead_after(keys, uses, then), len(keys)
    resident: dict[Key, tuple[int, bool, int]] = {}  # bytes, dirty, position of the last touch
    order: list[tuple[bool, float, int, Key]] = []  # a heap, the next to leave first; entries that were touched since are stale
    free, moved, left = budget, 0, set[int]()
    for position in range(rounds * end):
        into = position % end
        key, size, use = keys[into], sizes[into], uses[into]
        moved = 0 if position == end else moved
        held = resident.pop(key, None)
        if held is None:
            moved += 0 if use is Use.PUT else size
            free -= size
            while free < 0 and order:
                *_, touched, victim = heapq.heappop(order)
                if victim in resident and resident[victim][2] == touched:
                    nbytes, dirty, _ = resident.pop(victim)
                    left.add(touched)
                    free += nbytes
                    moved += nbytes if dirty else 0
        if dead[into]:  # the tensor is deleted after this touch
            free += size
            continue
        after = following[into]
        dirty = use is not Use.READ or (held is not None and held[1])
        resident[key] = (size, dirty, position)
        dropped, needed = decision.rank(into, math.inf if after is None else position + after - into, dirty)
        heapq.heappush(order, (not dropped, -needed, position, key))
    return moved + (sum(nbytes for nbytes, dirty, _ in resident.values() if dirty) if then == "end" else 0), left


def dead_after(keys: Sequence[Key], uses: Sequence[Use], then: Then) -> list[bool]:
    """Return for each touch whether the bytes are dead after it: the next touch, of the next round too, puts others. A tensor
    that is touched once a round is replaced, and not dead."""
    end = len(keys)
    following = enumerate(_following(keys, then))
    return [after is not None and after != i + end and uses[after % end] is Use.PUT for i, after in following]


def _following(keys: Sequence[Key], then: Then) -> list[int | None]:
    """Return for each touch the position of the same key's next one, i < following[i] <= i + len(keys); None: there is none."""
    end = len(keys)
    following = [0] * end
    seen: dict[Key, int] = {}
    for position in range(2 * end - 1, -1, -1):
        if position < end:
            following[position] = seen[keys[position]]
        seen[keys[position % end]] = position
    return [after if then == "again" or after < end else None for after in following]
