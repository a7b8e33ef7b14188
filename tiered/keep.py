"""Which tensors to keep until their next use: a plan for a known order of accesses. Pure, and without dependencies.

Between two accesses of a key lies an *interval*, and the plan says of each whether the copy stays. An interval that is kept
saves a fetch; a *run*, the intervals from one write to the next, saves a write-back when all of them are kept. What is kept
across an access must fit beside the key accessed. Finding the best plan is NP-hard; ``bench/optimum.py`` gives the sources
and a bound.

First a sweep through time, which drops what is needed furthest in the future (Belady, "A study of replacement algorithms",
1966), a dirty copy counting as nearer by a price. Then a local search: intervals by area (bytes times time held), the
smallest first; one that was dropped, or all that a run lacks, is kept if that saves more than what must go for it, or as
much in less area.

The time grows with accesses times what is kept at once: a fifth of a second for a cycle of 200 accesses and 128 keys, half a
minute for 2,400 and 1,600. The sweep alone takes a fiftieth of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tiered.types import Key, Then, Use

__all__ = ["Decision", "bytes_moved", "decide", "dying", "plan", "planned", "ranked", "settled"]

PRICES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)  # of a write-back, in mean interval lengths; the best one is kept
PASSES = 8  # of the local search; most end by themselves after three
BLOCK = 32  # positions that share one set of the intervals kept across them
SIMULATED = 20_000  # touches of a cycle up to which prices are tried; beyond, what is needed last goes first
SEARCHED = 2_500  # touches up to which the local search is worth its time


class Decision(NamedTuple):
    """What leaves first: what is not ``kept`` after its last touch (None: all is), then what is needed last, where a copy that
    must be written back counts as needed sooner by ``price`` touches."""

    price: float = 0.0
    kept: tuple[bool, ...] | None = None

    def rank(self, position: int, next_use: float, dirty: bool) -> tuple[bool, float]:
        """Of a copy that was touched at ``position`` of the cycle; the largest leaves first."""
        return self.kept is not None and not self.kept[position], next_use - (self.price if dirty else 0.0)


def decide(
    keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], budget: int, *, thorough: bool, then: Then = "again"
) -> Decision:
    """Of those tried, the decision that moves the fewest bytes for these touches; ``thorough`` tries ``plan`` too."""
    return ranked(keys, uses, sizes, budget, thorough=thorough, then=then)[0]


def ranked(
    keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], budget: int, *, thorough: bool, then: Then = "again"
) -> list[Decision]:
    """The rules that are tried, and with ``thorough`` a plan, the one that moves the fewest bytes first; one where it makes no
    difference."""
    if not 0 < len(keys) <= SIMULATED or budget >= sum(dict(zip(keys, sizes, strict=True)).values()):
        return [Decision()]
    sizes = [max(1, size) for size in sizes]
    following = _following(keys, then)
    lengths = [j - i for i, j in enumerate(following) if j is not None]
    mean = sum(lengths) / max(1, len(lengths))
    prices = PRICES if any(use is not Use.READ for use in uses) else (0.0,)
    decisions = [Decision(price * mean) for price in prices]
    if thorough and len(keys) <= SEARCHED:
        decisions.append(planned(keys, uses, sizes, budget, then))
    return sorted(decisions, key=lambda decision: bytes_moved(keys, uses, sizes, budget, decision, then))


def planned(keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], room: int, then: Then = "again") -> Decision:
    """What to keep in ``room`` bytes, searched for."""
    return Decision(0.0, tuple(plan([max(1, size) for size in sizes], uses, _following(keys, then), room)))


def bytes_moved(
    keys: Sequence[Key],
    uses: Sequence[Use],
    sizes: Sequence[int],
    budget: int,
    decision: Decision,
    then: Then = "again",
) -> int:
    """Bytes read and written on demand, in ``budget`` bytes that never lie apart, in the second round of a cycle; where the
    order ends, in its only one: from an empty memory, and what is dirty at the end has still to be written."""
    return _on_demand(keys, uses, sizes, budget, decision, then, rounds=2 if then == "again" else 1)[0]


def settled(
    keys: Sequence[Key], uses: Sequence[Use], sizes: Sequence[int], budget: int, decision: Decision, then: Then = "again"
) -> Decision:
    """``decision``, with all that it keeps written out as it comes about on demand in ``budget`` bytes that never lie apart;
    and spread over time: a stretch of what is kept is one in which a disk has nothing to do."""
    if budget >= sum(dict(zip(keys, sizes, strict=True)).values()):
        return decision
    rounds, begin = (3, len(keys)) if then == "again" else (1, 0)

    def staying(decision: Decision) -> tuple[bool, ...]:
        left = _on_demand(keys, uses, sizes, budget, decision, then, rounds)[1]
        return tuple(position + begin not in left for position in range(len(keys)))

    kept = decision.kept or staying(decision)
    if then == "again":
        kept = _spread(kept, uses, sizes, _following(keys, then))
    fits = staying(Decision(decision.price, kept))  # a round is not quite like the next one
    dead = dying(keys, uses, then)
    return Decision(decision.price, tuple(a and b and not c for a, b, c in zip(kept, fits, dead, strict=True)))


def _spread(
    kept: Sequence[bool], uses: Sequence[Use], sizes: Sequence[int], following: Sequence[int | None]
) -> tuple[bool, ...]:
    """As many of each kind kept, evenly far apart. Of a kind are intervals that take a whole round: whichever of them are kept,
    they take the same room at all times, and moving the others costs the same."""
    spread, end = list(kept), len(kept)
    kinds: dict[tuple[int, Use], list[int]] = {}
    for i, j in enumerate(following):
        if j == i + end and uses[i] is not Use.PUT:
            kinds.setdefault((sizes[i], uses[i]), []).append(i)
    for positions in kinds.values():
        count, among = sum(kept[i] for i in positions), len(positions)
        for number, i in enumerate(positions):
            spread[i] = (number + 1) * count // among > number * count // among
    return tuple(spread)


def _on_demand(
    keys: Sequence[Key],
    uses: Sequence[Use],
    sizes: Sequence[int],
    budget: int,
    decision: Decision,
    then: Then,
    rounds: int,
) -> tuple[int, set[int]]:
    """The bytes moved in the second round, or in the only one, and the positions after which a copy left before its next
    use."""
    following, dead, end = _following(keys, then), dying(keys, uses, then), len(keys)
    resident: dict[Key, tuple[int, bool, int]] = {}  # bytes, dirty, position of the last touch
    order: list[tuple[bool, float, int, Key]] = []  # a heap, the next to leave first; what was touched since is stale
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
        if dead[into]:  # and deleted
            free += size
            continue
        after = following[into]
        dirty = use is not Use.READ or (held is not None and held[1])
        resident[key] = (size, dirty, position)
        dropped, needed = decision.rank(into, math.inf if after is None else position + after - into, dirty)
        heapq.heappush(order, (not dropped, -needed, position, key))
    return moved + (sum(nbytes for nbytes, dirty, _ in resident.values() if dirty) if then == "end" else 0), left


def dying(keys: Sequence[Key], uses: Sequence[Use], then: Then) -> list[bool]:
    """For each touch whether the bytes are dead after it: the next one, of the next round too, puts others. What is touched
    once a round is only replaced."""
    end = len(keys)
    following = enumerate(_following(keys, then))
    return [after is not None and after != i + end and uses[after % end] is Use.PUT for i, after in following]


def _following(keys: Sequence[Key], then: Then) -> list[int | None]:
    """For each touch the position of the same key's next one, i < following[i] <= i + len(keys); None: there is none."""
    end = len(keys)
    following = [0] * end
    seen: dict[Key, int] = {}
    for position in range(2 * end - 1, -1, -1):
        if position < end:
            following[position] = seen[keys[position]]
        seen[keys[position % end]] = position
    return [after if then == "again" or after < end else None for after in following]


def plan(sizes: Sequence[int], kinds: Sequence[Use], following: Sequence[int | None], budget: int) -> list[bool]:
    """For each access whether its key is kept until the next one. What is not kept may go as soon as the access has ended.

    ``sizes[i]`` (bytes) and ``kinds[i]`` belong to access i; ``following[i]`` is the same key's next access, None when
    there is none. In a cycle of n accesses i < following[i] <= i + n, and the plan holds for every round. At the end of a
    trace that is no cycle, dirty copies are written back in any case.
    """
    plans = [_Plan(sizes, kinds, following, budget) for _ in PRICES]
    for candidate, price in zip(plans, PRICES, strict=True):
        candidate.sweep(price)
    best = max(plans, key=_Plan.saved)
    for _ in range(PASSES):
        if not best.improve():
            break
    return best.kept


class _Plan:
    """Starts with everything kept, fit or not."""

    def __init__(self, sizes: Sequence[int], kinds: Sequence[Use], following: Sequence[int | None], budget: int) -> None:
        self.sizes = sizes
        self.end = end = len(sizes)
        self.until = [i + 1 if j is None or kinds[j % end] is Use.PUT else j for i, j in enumerate(following)]
        self.kept = [False] * end
        self.room = [budget - size for size in sizes]  # beside the key accessed and what is kept
        self.across: list[set[int]] = [set() for _ in range(end // BLOCK + 1)]
        self.runs: list[list[int]] = [[]]  # the first one stands for none, and its count below means nothing
        self.run_of = [0] * end
        for i, kind in enumerate(kinds):
            if kind is not Use.READ:
                self._follow_run(i, kinds, following)
        self.missing = [len(run) for run in self.runs]  # how many intervals of each run are not kept
        self.intervals = [i for i, j in enumerate(following) if j is not None and kinds[j % end] is not Use.PUT]
        self.intervals.sort(key=self._area)
        for i in self.intervals:
            self._flip(i)

    def _follow_run(self, i: int, kinds: Sequence[Use], following: Sequence[int | None]) -> None:
        run: list[int] = []
        while (stop := following[i]) is not None:
            stop %= self.end
            if kinds[stop] is not Use.PUT:
                run.append(i)
            if kinds[stop] is not Use.READ:
                break
            i = stop
        else:
            return  # dirty at the end
        for member in run:
            self.run_of[member] = len(self.runs)
        self.runs.append(run)

    def _area(self, i: int) -> int:
        return self.sizes[i] * (self.until[i] - i - 1)

    def _spans(self, i: int) -> list[tuple[int, int]]:
        """The positions strictly between access ``i`` and the next, as one range, or two around the end of a cycle."""
        start, stop = i + 1, self.until[i]
        spans = [(start, stop)] if stop <= self.end else [(start, self.end), (0, stop - self.end)]
        return [(start, stop) for start, stop in spans if start < stop]

    def _kept_across(self, position: int) -> Iterator[tuple[int, int]]:
        """Each interval kept across ``position``, and its end, counted from the round of ``position``."""
        for i in self.across[position // BLOCK]:
            until = self.until[i] - (self.end if i >= position else 0)
            if until > position:
                yield i, until

    def _worth(self, i: int) -> int:
        """The bytes that a kept interval saves, given the others."""
        run = self.run_of[i]
        return self.sizes[i] * (2 if run and not self.missing[run] else 1)

    def _flip(self, i: int) -> tuple[int, int]:
        """Keep what was dropped, or drop what was kept; the bytes and the area which that saves."""
        sign = -1 if self.kept[i] else 1
        worth = self._worth(i) if self.kept[i] else 0
        self.kept[i] = not self.kept[i]
        self.missing[self.run_of[i]] -= sign
        change = sign * self.sizes[i]
        for start, stop in self._spans(i):
            self.room[start:stop] = [room - change for room in self.room[start:stop]]
            for block in self.across[start // BLOCK : (stop - 1) // BLOCK + 1]:
                block.add(i) if self.kept[i] else block.discard(i)
        return sign * (worth or self._worth(i)), -sign * self._area(i)

    def saved(self) -> int:
        runs = sum(self.sizes[run[0]] for run, missing in zip(self.runs, self.missing, strict=True) if run and not missing)
        return runs + sum(self.sizes[i] for i in self.intervals if self.kept[i])

    def sweep(self, price: float) -> None:
        """Drop until everything fits."""
        price *= sum(self.until[i] - i for i in self.intervals) / max(1, len(self.intervals))
        for position in range(self.end):
            while self.room[position] < 0:
                found = self._kept_across(position)
                self._flip(max((until - price * self._worth(i) / self.sizes[i], i) for i, until in found)[1])

    def improve(self) -> bool:
        """One pass of the local search; whether anything changed."""
        changed = False
        for i in self.intervals:
            if not self.kept[i]:
                rest = [member for member in self.runs[self.run_of[i]] if not self.kept[member]]
                wishes = [rest, [i]] if len(rest) > 1 else [[i]]
                changed |= any(self._move(wish, rank) for wish in wishes for rank in (self._alone_first, self._for_its_room))
        return changed

    def _move(self, wanted: list[int], rank: Callable[[int, int, _Lack], tuple[float, ...]]) -> bool:
        """Keep all of ``wanted`` in place of what is worth less; when nothing is won, all is as before, and False."""
        changes = [(i, *self._flip(i)) for i in wanted]
        for start, stop in (span for i in wanted for span in self._spans(i)):
            while sum(saved for _, saved, _ in changes) >= 0 and (most := -min(self.room[start:stop])) > 0:
                first = next(position for position in range(start, stop) if self.room[position] < 0)
                last = next(position for position in range(stop - 1, start - 1, -1) if self.room[position] < 0)
                lack = _Lack(first, last, most)
                ranks = [(rank(i, until, lack), i) for i, until in self._kept_across(lack.first) if i not in wanted]
                if not ranks:  # it does not fit, not even by itself
                    return self._undo(changes)
                victim = min(ranks)[1]
                changes.append((victim, *self._flip(victim)))
        won = (sum(saved for _, saved, _ in changes), sum(area for *_, area in changes)) > (0, 0)
        return won or self._undo(changes)

    def _undo(self, changes: list[tuple[int, int, int]]) -> bool:
        for i, *_ in reversed(changes):
            self._flip(i)
        return False

    def _for_its_room(self, i: int, until: int, lack: _Lack) -> tuple[float, ...]:
        """The least worth for the room that it makes where some lacks."""
        made = min(self.sizes[i], lack.most) * (min(until, lack.last + 1) - lack.first)
        return self._worth(i) / made, -self._area(i)

    def _alone_first(self, i: int, until: int, lack: _Lack) -> tuple[float, ...]:
        """The least worth among those that make enough room alone, if there are any."""
        if until > lack.last and self.sizes[i] >= lack.most:
            return 0, self._worth(i), -self._area(i)
        return 1, *self._for_its_room(i, until, lack)


class _Lack(NamedTuple):
    """From the first to the last position where room lacks, and how many bytes at most."""

    first: int
    last: int
    most: int
