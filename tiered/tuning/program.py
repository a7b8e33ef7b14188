"""Decide where activations of each segment wait, and which states stay in DRAM, by a mixed-integer linear program.

A *segment* is a module whose inside can be computed again: its activations stay in memory, are computed again from its inputs,
or go into the store. The drive is shared with parameters, gradients and optimizer states, of which DRAM keeps a part, so one
program decides both. The objective is the time of a pass, as a machine that overlaps its drive with computing takes it:

    C = compute + seconds of what is computed again + copying of what goes into the store
    D = seconds of the drive for all bytes that DRAM does not hold
    T = max(C + exposed * D, D + exposed * C)

``exposed`` is the share of the drive's work that was not hidden where it could have been. Variables that decide are 0 or 1;
scipy's HiGHS solves the program (https://highs.dev). Pure: numbers in, an assignment out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tiered.errors import MisuseError

__all__ = ["Assignment", "Profile", "Segment", "State", "Way", "assign", "evaluate", "refuse_without_solver"]

Way = Literal["memory", "recompute", "store"]

SECONDS = 2.0
"""The solver's time at most; the best assignment found by then is taken."""
GAP = 1e-3
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
class State:
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
    states: tuple[State, ...]
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


def refuse_without_solver() -> None:
    """Raise MisuseError where scipy is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise MisuseError(
            "activations='auto' and plan='auto' solve a linear program with scipy: pip install '.[plan]' in a clone, or pip "
            "install scipy"
        ) from error


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
    """Return the fastest assignment whose activations take at most ``memory`` bytes, with ``pool`` bytes of DRAM for the rest.

    Everything goes into the store where nothing better is found, which takes the least memory. Raises MisuseError without
    scipy.
    """
    refuse_without_solver()
    ways = _solved(profile, memory, pool, allowed)
    everything: dict[str, Way] = {segment.name: "store" for segment in profile.segments}
    found = [evaluate(profile, everything, "store", pool)]
    if ways is not None:
        found.append(evaluate(profile, *ways, pool))
    plain: dict[str, Way] = {segment.name: "memory" for segment in profile.segments}
    if "memory" in allowed and _memory(profile, plain, "memory") <= memory:
        found.append(evaluate(profile, plain, "memory", pool))
    return min(found, key=lambda one: (one.seconds * (1 + PREFERENCE * (one.rest == "store")), one.written))


def _solved(
    profile: Profile, memory: int, pool: int, allowed: Sequence[Way]
) -> tuple[dict[str, Way], Way] | None:
    """Solve the program. Columns: for each segment memory, recompute, store (0 or 1) and the bytes that stayed up to it; memory
    and store of the rest; the share of each state in DRAM; bytes of activations in DRAM; T."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    segments, states, count = profile.segments, profile.states, len(profile.segments)
    rest = 4 * count
    state, cached = rest + 2, rest + 2 + len(states)
    time, columns = cached + 1, cached + 2
    per_byte = 1 / profile.read + 1 / profile.write
    unit = max(1.0, float(max((profile.rest, *(one.saved for one in segments)), default=1)))  # bytes, scaled to about 1

    compute, drive = [0.0] * columns, [0.0] * columns  # linear in the columns; constants beside
    constant_drive = 0.0
    room = [0.0] * columns  # of DRAM, in units
    for at, one in enumerate(segments):
        compute[4 * at + 1] = one.seconds + profile.copying * one.given
        compute[4 * at + 2] = profile.copying * one.saved
        drive[4 * at + 1], drive[4 * at + 2] = one.given * per_byte, one.saved * per_byte
    compute[rest + 1], drive[rest + 1] = profile.copying * profile.rest, profile.rest * per_byte
    for at, held in enumerate(states):
        gain = held.read / profile.read + held.written / profile.write
        constant_drive += gain
        drive[state + at], room[state + at] = -gain, held.nbytes / unit
    drive[cached], room[cached] = -per_byte * unit, 1.0

    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def row(entries: dict[int, float], least: float, most: float) -> None:
        rows.append(entries)
        low.append(least)
        high.append(most)

    endless = float("inf")
    limit = memory / unit
    for at, one in enumerate(segments):
        row({4 * at: 1.0, 4 * at + 1: 1.0, 4 * at + 2: 1.0}, 1.0, 1.0)
        before = {4 * (at - 1) + 3: -1.0} if at else {rest: -profile.rest / unit}
        row({4 * at + 3: 1.0, 4 * at: -one.saved / unit, **before}, 0.0, endless)  # what stayed grows by what stays here
        earlier = {place: -value for place, value in before.items()}
        row({**earlier, 4 * at: one.saved / unit, 4 * at + 1: one.saved / unit}, -endless, limit)
    row({rest: 1.0, rest + 1: 1.0}, 1.0, 1.0)
    row({rest: profile.rest / unit}, -endless, limit)
    row({place: value for place, value in enumerate(room) if value}, -endless, pool / unit)
    stored = {cached: 1.0, rest + 1: -profile.rest / unit}
    for at, one in enumerate(segments):
        stored |= {4 * at + 1: -one.given / unit, 4 * at + 2: -one.saved / unit}
    row(stored, -endless, 0.0)  # DRAM holds no more of activations than there is
    for first, second, fixed in (
        (compute, drive, profile.compute + profile.exposed * constant_drive),
        (drive, compute, constant_drive + profile.exposed * profile.compute),
    ):
        entries = {at: a + profile.exposed * b for at, (a, b) in enumerate(zip(first, second, strict=True)) if a or b}
        row({time: 1.0, **{at: -value for at, value in entries.items()}}, fixed, endless)

    scale = max(1e-9, profile.compute)
    objective = np.zeros(columns)
    objective[time] = 1.0
    for at in range(count):
        objective[4 * at] = PREFERENCE * scale * (count - at) / (count + 1)
        objective[4 * at + 1] = PREFERENCE * scale * 2
        objective[4 * at + 2] = PREFERENCE * scale * (3 + at / (count + 1))
    objective[rest + 1] = PREFERENCE * scale * 3
    upper = np.full(columns, np.inf)
    upper[: 4 * count] = np.tile([1.0, 1.0, 1.0, np.inf], count)
    upper[rest : rest + 2 + len(states)] = 1.0
    for place, way in enumerate(("memory", "recompute", "store")):
        if way not in allowed and way != "store":
            upper[place : 4 * count : 4] = 0.0
    if "memory" not in allowed:
        upper[rest] = 0.0
    for at, one in enumerate(segments):
        if not one.again:
            upper[4 * at + 1] = 0.0
    whole = np.zeros(columns)
    whole[: 4 * count] = np.tile([1, 1, 1, 0], count)
    whole[rest : rest + 2] = 1
    places = [(number, at, value) for number, entries in enumerate(rows) for at, value in entries.items()]
    numbers, ats, values = zip(*places, strict=True)
    matrix = coo_matrix((values, (numbers, ats)), shape=(len(rows), columns)).tocsr()
    found: Any = milp(
        objective,
        integrality=whole,
        bounds=Bounds(np.zeros(columns), upper),
        constraints=LinearConstraint(matrix, np.array(low), np.array(high)),
        options={"time_limit": SECONDS, "mip_rel_gap": GAP},
    )
    if found.x is None:
        return None
    names: tuple[Way, ...] = ("memory", "recompute", "store")
    ways = {one.name: names[int(np.argmax(found.x[4 * at : 4 * at + 3]))] for at, one in enumerate(segments)}
    return ways, "memory" if found.x[rest] > 0.5 else "store"
