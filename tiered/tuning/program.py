"""Decide where activations of each segment wait, and which states stay in DRAM.

A *segment* is a module whose inside can be computed again: its activations stay in memory, are computed again from its inputs,
or go into the store. The drive is shared with parameters, gradients and optimizer states, of which DRAM keeps a part, so both
are decided together. The objective is the time of a pass, as a machine that overlaps its drive with computing takes it:

    C = compute + seconds of what is computed again + copying of what goes into the store
    D = seconds of the drive for all bytes that DRAM does not hold
    T = max(C + exposed * D, D + exposed * C)

``exposed`` is the share of the drive's work that was not hidden where it could have been. Pure: numbers in, an assignment out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Assignment", "Profile", "Segment", "UnitTraffic", "Way", "assign", "evaluate"]

Way = Literal["memory", "recompute", "store"]

WAYS: tuple[Way, ...] = ("memory", "recompute", "store")
PREFERENCE = 1e-6
"""Of the time of a pass: what decides between ways that take as long. Memory first, and the newest stay there, because backward
needs these first."""


@dataclass(frozen=True)
class Segment:
    """A module whose activations have a way of their own. ``saved``: bytes that autograd saves within it, ``given``: bytes of
    its inputs, ``seconds``: what its forward computes. ``again``: whether it can be computed again."""

    name: str
    saved: int
    given: int
    seconds: float
    again: bool = True


@dataclass(frozen=True)
class UnitTraffic:
    """What the store has of a unit, ``nbytes`` in all; a pass reads and writes so many bytes of it where DRAM has none."""

    name: str
    nbytes: int
    read: int
    written: int


@dataclass(frozen=True)
class Profile:
    """What a warm-up measured. ``segments`` in the order of forward; ``rest``: bytes that autograd saves outside of them.
    ``compute``: seconds of a pass without waiting, copying, and computing again. ``copying``: seconds for a byte that goes into
    the store and comes back. ``read``, ``write``: bytes per second of the drive. ``exposed``: see the module."""

    segments: tuple[Segment, ...]
    rest: int
    states: tuple[UnitTraffic, ...]
    compute: float
    copying: float
    read: float
    write: float
    exposed: float


@dataclass(frozen=True)
class Assignment:
    """A way for each segment, and for what lies outside of segments. ``seconds``: of a pass, of which ``compute`` are the
    processor's and ``drive`` the drive's, which overlap. ``memory``: bytes of activations in memory at a time, at most.
    ``stays``: the share of each state that stays in DRAM; ``written``: bytes of activations that the drive writes in a pass."""

    ways: Mapping[str, Way]
    rest: Way
    seconds: float
    compute: float
    drive: float
    memory: int
    written: float
    stays: Mapping[str, float] = field(default_factory=dict)


def evaluate(profile: Profile, ways: Mapping[str, Way], rest: Way, pool: int) -> Assignment:
    """Return what these ways take, with the best that DRAM can hold: what saves most of the drive for each byte stays."""
    compute, offered, stored = profile.compute, list[tuple[float, int, str | None, float]](), 0
    per_byte = 1 / profile.read + 1 / profile.write
    for segment in profile.segments:
        way = ways[segment.name]
        if way == "recompute":
            compute += segment.seconds
        stored += 0 if way == "memory" else segment.given if way == "recompute" else segment.saved
    stored += profile.rest if rest == "store" else 0
    compute += profile.copying * stored
    for state in profile.states:
        if state.nbytes:
            gain = state.read / profile.read + state.written / profile.write
            offered.append((gain / state.nbytes, state.nbytes, state.name, gain))
    offered.append((per_byte, stored, None, per_byte * stored))
    drive, left, stays, written = sum(one[3] for one in offered), float(pool), dict[str, float](), 0.0
    for density, nbytes, name, _ in sorted(offered, key=lambda one: (-one[0], str(one[2]))):
        kept = min(left, float(nbytes))
        left, drive = left - kept, drive - density * kept
        if name is None:
            written = nbytes - kept
        else:
            stays[name] = kept / nbytes
    exposed = profile.exposed
    seconds = max(compute + exposed * drive, drive + exposed * compute)
    memory = _memory(profile, ways, rest)
    return Assignment(dict(ways), rest, seconds, compute, max(0.0, drive), memory, written, stays)


def _memory(profile: Profile, ways: Mapping[str, Way], rest: Way) -> int:
    """Return the most bytes of activations at a time: what stayed of the segments before, and all of the one that backward
    computes again."""
    kept = most = profile.rest if rest == "memory" else 0
    for segment in profile.segments:
        if ways[segment.name] != "store":
            most = max(most, kept + segment.saved)
        kept += segment.saved if ways[segment.name] == "memory" else 0
    return max(most, kept)


def assign(profile: Profile, memory: int, pool: int, allowed: Sequence[Way] = ("memory", "recompute", "store")) -> Assignment:
    """Return the fastest assignment found whose activations take at most ``memory`` bytes, with ``pool`` bytes of DRAM for the
    rest.

    From everything in the store, everything computed again, and as much in memory as fits, from the newest on, the change of
    one way, or of two, that saves most is made until none saves anything. Everything goes into the store where nothing better
    is found, which takes the least memory.
    """
    choice = _Choice(profile, memory, pool, allowed)
    return evaluate(profile, *min((choice.improved(start) for start in choice.starts()), key=choice.cost), pool)


Ways = tuple[dict[str, Way], Way]
"""The way of each segment, and of the rest."""


class _Choice:
    """What may be chosen for ``profile``, and what it costs."""

    def __init__(self, profile: Profile, memory: int, pool: int, allowed: Sequence[Way]) -> None:
        self.profile, self._memory, self._pool = profile, memory, pool
        self._rest: list[Way] = ["memory", "store"] if "memory" in allowed else ["store"]
        self._ways: dict[str, list[Way]] = {
            one.name: [way for way in WAYS if way == "store" or (way in allowed and (way == "memory" or one.again))]
            for one in profile.segments
        }
        self._at = {one.name: at for at, one in enumerate(profile.segments)}

    def starts(self) -> Iterator[Ways]:
        stored: dict[str, Way] = dict.fromkeys(self._ways, "store")
        yield stored, "store"
        for else_ in WAYS:
            ways = {name: else_ if else_ in known else "store" for name, known in self._ways.items()}
            for rest in self._rest:
                yield self._filled(ways, rest)

    def _filled(self, ways: dict[str, Way], rest: Way) -> Ways:
        """Return ``ways`` with as much in memory as fits, from the newest on, and the rest in the store."""
        found: Ways = ({name: "store" if way == "memory" else way for name, way in ways.items()}, rest)
        for name, known in reversed(self._ways.items()):
            changed: Ways = ({**found[0], name: "memory"}, rest)
            if "memory" in known and self._fits(changed):
                found = changed
        return found if self._fits(found) else (dict.fromkeys(self._ways, "store"), "store")

    def _fits(self, ways: Ways) -> bool:
        return _memory(self.profile, *ways) <= self._memory

    def cost(self, ways: Ways) -> float:
        """Return the seconds of a pass, and what decides between ways that take as long."""
        (named, rest), count = ways, len(self._at)
        preference = 3.0 if rest == "store" else 0.0
        for name, way in named.items():
            at = self._at[name]
            preference += {"memory": (count - at) / (count + 1), "recompute": 2.0, "store": 3 + at / (count + 1)}[way]
        found = evaluate(self.profile, named, rest, self._pool)
        return found.seconds + PREFERENCE * max(1e-9, self.profile.compute) * preference

    def improved(self, ways: Ways) -> Ways:
        """Return what the best change of one way, or else of two, leads to, as often as one saves something."""
        cost = self.cost(ways)
        while True:
            one = list(self._changed(ways))
            best = min(filter(self._fits, one), key=self.cost, default=ways)
            if self.cost(best) >= cost:
                best = min(filter(self._fits, self._swapped(ways, one)), key=self.cost, default=ways)
            if self.cost(best) >= cost:
                return ways
            ways, cost = best, self.cost(best)

    def _swapped(self, ways: Ways, changed: Sequence[Ways]) -> Iterator[Ways]:
        """Yield ``ways`` with each change that takes one out of memory, and one more that puts another one there."""
        before = _kept(ways)
        for first in changed:
            if len(_kept(first)) < len(before):
                yield from (other for other in self._changed(first) if not _kept(other) <= before)

    def _changed(self, ways: Ways) -> Iterator[Ways]:
        """Yield ``ways`` with each single change. Of segments that are alike and go the same way, the first and the last one's
        are enough."""
        named, rest = ways
        for other in self._rest:
            if other != rest:
                yield named, other
        alike: dict[tuple[object, ...], list[str]] = {}
        for one in self.profile.segments:
            alike.setdefault((one.saved, one.given, one.seconds, one.again, named[one.name]), []).append(one.name)
        for names in alike.values():
            for name in dict.fromkeys((names[0], names[-1])):
                for way in self._ways[name]:
                    if way != named[name]:
                        yield {**named, name: way}, rest


def _kept(ways: Ways) -> set[str | None]:
    """Return what stays in memory: names, and None for the rest."""
    named, rest = ways
    return {name for name, way in named.items() if way == "memory"} | ({None} if rest == "memory" else set())
