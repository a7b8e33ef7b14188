"""Choose where activations wait while a model trains: a short measured warm-up, a choice, and a new one when memory or rates
have changed.

``AdaptiveActivations`` stands where ``SavedTensors`` stands for ``activations="store"``, and beside it tells who computes
segments which way each goes. In the warm-up all go into the store, which takes the least memory. A choice changes between two
passes; whatever autograd saved before knows by itself how it comes back, so results are the same, bit for bit.

A *pass* is a forward, or several, and the backward that ends it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

import torch

from tiered.errors import listed, number_between, one_of, whole_number
from tiered.store.activations import Left, SavedTensors
from tiered.system import free_in_heap, headroom
from tiered.telemetry import ActivationStatistics
from tiered.tuning.program import Assignment, Profile, Segment, UnitTraffic, Way, assign
from tiered.types import format_size, parse_size

__all__ = ["AdaptiveActivations", "AutoPlan", "AutoPlanStatistics"]

logger = logging.getLogger("tiered")

ACTIVATIONS_SHARE = 2
"""Activations take one in so many of the bytes that the process may still take, unless ``AutoPlan.memory`` says otherwise."""
LATELY = 5
"""Passes over which a rate is a median, so that a change has to last for most of them before a new choice is made."""
LEAST = 16 << 20
"""Bytes that a pass moves at least, for the rate of the drive to be that of this pass."""
LEAST_COPIED = 1 << 20
"""Bytes that the warm-up copies at least, for the seconds of a byte to be known."""
WORKING = 4
"""One in so many bytes of the pool is for units in use."""


@dataclass(frozen=True)
class AutoPlan:
    """How ``zero.page(activations="auto")`` chooses; given itself as ``activations``, it says more.

    ``memory``: bytes (or "2GiB") that activations may take beside the store's budget; None: half of what the process may still
    take when the choice is made. ``passes``: how many are measured, after a first one that is not. ``change``: by which share
    memory, rates or inputs have to change for a new choice. ``ways``: what may be chosen; "store" always may. Leave "recompute"
    out for modules whose forward does not give the same again (``torch.utils.checkpoint`` has the same limits): random numbers
    from generators of their own, counters in Python."""

    memory: int | str | None = None
    passes: int = 2
    change: float = 0.25
    ways: tuple[Way, ...] = ("memory", "recompute", "store")

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_size(self.memory, "memory")
        whole_number("AutoPlan: passes is how many are measured", self.passes)
        number_between("AutoPlan: change is a share", self.change, 0, 1)
        for way in listed(self.ways, f"AutoPlan: ways are several of {', '.join(map(repr, get_args(Way)))}"):
            one_of("AutoPlan: each of ways", way, get_args(Way))


@dataclass(frozen=True)
class AutoPlanStatistics:
    """What an ``AutoPlan`` chose. ``ways``: by the name of a module, where its activations wait; ``rest``: those of everything
    else. ``why``: in words. ``choices``: how often it chose; 0 while the warm-up runs. ``memory``: bytes that activations may
    take, ``planned``: bytes that they take at most. ``predicted``: seconds of a pass, with the rates at the time of the choice;
    ``measured``: the median of the last passes. ``stays``: the share of each unit's state that the best use of DRAM keeps
    there; the store itself keeps what is used next."""

    ways: Mapping[str, Way]
    rest: Way
    why: str
    choices: int
    memory: int
    planned: int
    predicted: float
    measured: float
    stays: Mapping[str, float]


@dataclass
class _Seen:
    """A segment, as the passes of a warm-up saw it."""

    saved: int = 0
    given: int = 0
    seconds: list[float] = field(default_factory=list)
    again: bool = True


@dataclass(frozen=True)
class _Reading:
    """Counters at one moment."""

    at: float
    waited: float
    read: int
    written: int
    reading: float
    writing: float

    def since(self, before: _Reading) -> _Reading:
        return _Reading(
            self.at - before.at, self.waited - before.waited, self.read - before.read, self.written - before.written,
            self.reading - before.reading, self.writing - before.writing,
        )  # fmt: skip


@dataclass(frozen=True)
class _Rates:
    """What a choice was made with, and is compared with later: bytes per second, and seconds of a pass that are not waiting."""

    read: float
    write: float
    compute: float


class AdaptiveActivations:
    """Where activations of one paged model wait, chosen while it trains.

    ``segments``: names of the modules that can be computed again. ``units``: keys of the units in the store, by whose names
    states are counted. ``updating``: seconds that updates took so far. Used by one thread, as the model is.
    """

    def __init__(
        self, saved: SavedTensors, segments: Sequence[str], units: Iterable[str], updating: Callable[[], float],
        pool: int, plan: AutoPlan,
    ) -> None:
        self._saved, self._names, self._units, self._updating = saved, tuple(segments), frozenset(units), updating
        self._store, self._pool, self.plan = saved.store, pool - pool // WORKING, plan
        self.ways: dict[str, Way] = {}
        """Of segments; one that is not here goes into the store."""
        self._rest: Way = "store"
        self._way: Way = "store"
        """Of what is saved now."""
        self._why = "measuring"
        self._assignment: Assignment | None = None
        self._rates = _Rates(0.0, 0.0, 0.0)
        self._profile: Profile | None = None
        self._memory = self._room_then = self._choices = 0
        self._lately: deque[_Reading] = deque(maxlen=LATELY)
        self._odd = 0
        self._begin_warm_up()
        self._began: _Reading | None = None
        self._inside: str | None = None

    def _begin_warm_up(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._passes: list[_Reading] = []
        self._left = self.plan.passes + 1
        self._packed = self._unpacked = 0.0
        self._made = self._rest_made = self._rest_most = self._offloaded = 0
        self.ways, self._rest, self._way = {}, "store", "store"

    @property
    def measuring(self) -> bool:
        """Whether the warm-up is under way."""
        return self._left > 0

    # -- where SavedTensors stands -----------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd is to keep instead of ``tensor``."""
        self._begin_pass()
        if self._way != "store":
            return Left(tensor)
        if not self._left:
            return self._saved.pack(tensor)
        began, waited, before = time.perf_counter(), self._store._waited(), self._saved.regions
        packed = self._saved.pack(tensor)
        self._packed += time.perf_counter() - began - (self._store._waited() - waited)
        made = self._saved.regions - before
        if self._inside is None:
            self._rest_made += made
        else:
            self._made += made
        return packed

    def unpack(self, packed: object) -> torch.Tensor:
        """Return the tensor that ``packed`` was made of."""
        if not self._left:
            return self._saved.unpack(packed)
        began, waited = time.perf_counter(), self._store._waited()
        tensor = self._saved.unpack(packed)
        self._unpacked += time.perf_counter() - began - (self._store._waited() - waited)
        return tensor

    def look_again(self) -> None:
        """Note that the outermost forward has ended."""
        self._saved.look_again()

    def sweep(self) -> None:
        """Note that nothing runs: a backward has ended, in whatever way, or a forward is about to begin."""
        self._saved.sweep()
        self._inside, self._way = None, self._rest

    def statistics(self) -> ActivationStatistics:
        return self._saved.statistics()

    # -- segments ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, name: str, given: int) -> Iterator[Way]:
        """Have what autograd saves in this block go the way of the segment ``name``, which is given. ``given``: bytes of its
        inputs."""
        self._begin_pass()
        self._refuse_larger(name, given)
        way = self.ways.get(name, "store")
        before, self._way, self._inside = self._way, way, name
        made, began = self._made, self._measured_now()
        try:
            yield way
            if self._left:
                seen = self._seen.setdefault(name, _Seen())
                seen.saved, seen.given = max(seen.saved, self._made - made), max(seen.given, given)
                seen.seconds.append(max(0.0, self._measured_now() - began))
        finally:
            self._way, self._inside = before, None

    def refuse_again(self, name: str) -> None:
        """Note that the segment ``name`` cannot be computed again: it changed a buffer, or was given nothing."""
        self._seen.setdefault(name, _Seen()).again = False

    def _measured_now(self) -> float:
        """Return a clock that stands still while the store is waited for, activations are copied, and updates are made."""
        return time.perf_counter() - self._store._waited() - self._packed - self._updating() if self._left else 0.0

    # -- passes ------------------------------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        if self._began is None:
            self._began = self._reading()
            self._look_at_memory()

    def _reading(self) -> _Reading:
        disk = self._store.statistics().links[-1]
        return _Reading(
            time.perf_counter(), self._store._waited(), disk.up.bytes, disk.down.bytes, disk.up.busy_seconds,
            disk.down.busy_seconds,
        )  # fmt: skip

    def pass_ended(self) -> None:
        """Note that a backward has ended as it should, and choose where it is time."""
        began, self._began = self._began, None
        if began is None:
            return
        found = self._reading().since(began)
        self._lately.append(found)
        if not self._left:
            self._look_at_rates()
            return
        self._left -= 1
        if self._left == self.plan.passes:  # the first pass has touched fresh memory, and no order was followed
            self._packed = self._unpacked = 0.0
            for seen in self._seen.values():
                seen.seconds.clear()
            self._offloaded = self._saved.statistics().offloaded
        else:
            self._passes.append(found)
        self._rest_most = max(self._rest_most, self._rest_made)
        self._made = self._rest_made = 0
        if not self._left:
            self._profile = self._measured()
            self._choose("after a warm-up", measured=True)

    def _measured(self) -> Profile:
        """Return what the warm-up has measured."""
        passes = self._passes
        wall = statistics.median(one.at for one in passes)
        waited = statistics.median(one.waited for one in passes)
        copied = self._saved.statistics().offloaded - self._offloaded
        copying = (self._packed + self._unpacked) / copied if copied >= LEAST_COPIED else 0.0
        per_pass = (self._packed + self._unpacked) / len(passes)
        compute = max(1e-6, wall - waited - per_pass)
        read, write = self._drive_rates(passes)
        drive = statistics.median(one.read / read + one.written / write for one in passes)
        processor = compute + per_pass
        # Reads and writes at the same time share the drive, so its rates look slower than they are: less of it was waited for.
        if drive - processor > waited:
            factor = (processor + waited) / drive
            read, write, drive = read / factor, write / factor, drive * factor
        exposed = (waited - max(0.0, drive - processor)) / max(1e-9, min(drive, processor))
        segments = tuple(
            Segment(name, seen.saved, seen.given, statistics.median(seen.seconds) if seen.seconds else 0.0, seen.again)
            for name in self._names
            if (seen := self._seen.get(name)) is not None
        )
        return Profile(segments, self._rest_most, self._states(), compute, copying, read, write, min(1.0, max(0.0, exposed)))

    def _drive_rates(self, passes: Iterable[_Reading]) -> tuple[float, float]:
        """Return bytes per second read and written, while each was under way; those of before where little was moved."""
        read, written = sum(one.read for one in passes), sum(one.written for one in passes)
        reading, writing = sum(one.reading for one in passes), sum(one.writing for one in passes)
        before = self._rates
        up = read / reading if reading and read >= LEAST else before.read
        down = written / writing if writing and written >= LEAST else before.write
        up, down = up or down, down or up
        return (up, down) if up else (1e9, 1e9)

    def _states(self) -> tuple[UnitTraffic, ...]:
        """Return what the store has of each unit. Forward and backward read parameters, the rest is read once."""
        parameters, rest = dict.fromkeys(self._units, 0), dict.fromkeys(self._units, 0)
        for key in self._store:
            base = key
            while base not in self._units and "/" in base:
                base = base.rpartition("/")[0]
            if base in self._units:
                (parameters if base == key else rest)[base] += self._store.spec(key).nbytes
        return tuple(
            UnitTraffic(key, parameters[key] + rest[key], 2 * parameters[key] + rest[key], parameters[key] + rest[key])
            for key in sorted(self._units)
            if parameters[key]
        )

    # -- choosing ----------------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Return the bytes that activations may take now, when there are none."""
        if self.plan.memory is not None:
            return parse_size(self.plan.memory)
        device = self._store.device
        if device.type == "cuda":  # where activations are
            cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return (torch.cuda.mem_get_info(device)[0] + cached) // ACTIVATIONS_SHARE
        return (headroom() + free_in_heap()) // ACTIVATIONS_SHARE

    def _choose(self, when: str, *, measured: bool = False) -> None:
        """Choose, and say so unless that changes nothing. ``measured``: after a warm-up, whose numbers are said in any case."""
        profile = self._profile
        assert profile is not None
        self._room_then = room = self._room()
        self._memory = max(0, room - self._saved.keep)
        found = assign(profile, self._memory, self._pool, self.plan.ways)
        same = self._assignment is not None and (found.ways, found.rest) == (self._assignment.ways, self._assignment.rest)
        self._assignment, self._rates = found, _Rates(profile.read, profile.write, found.compute)
        self.ways, self._rest = dict(found.ways), found.rest
        self._way = self._rest
        self._odd = 0
        self._lately.clear()
        if same and not measured:
            return
        self._choices += not same
        self._why = self._told(found, profile, when)
        logger.info("%s", self._why)

    def _told(self, found: Assignment, profile: Profile, when: str) -> str:
        saved = sum(segment.saved for segment in profile.segments) + profile.rest
        numbers = {way: sum(one == way for one in found.ways.values()) for way in get_args(Way)}
        told = {"memory": "in memory", "recompute": "computed again", "store": "in the store"}
        ways = ", ".join(f"{number} {told[way]}" for way, number in numbers.items() if number)
        again = sum(segment.seconds for segment in profile.segments)
        stays = sum(state.nbytes * found.stays.get(state.name, 0.0) for state in profile.states)
        states = sum(state.nbytes for state in profile.states)
        parts = [
            f"activations {when}: of {format_size(saved)} that a pass saves, {format_size(self._memory)} may stay in memory",
            f"modules: {ways or 'none'}; the rest {told[found.rest]}",
            f"a pass is predicted to take {found.seconds:.3g} s ({found.compute:.3g} s computing, {found.drive:.3g} s of the "
            f"drive at {profile.read / 1e9:.2f} and {profile.write / 1e9:.2f} GB/s)",
            f"all modules again would take {again:.3g} s",
        ]
        if states:
            parts.append(f"DRAM has room for {stays / states:.0%} of the state")
        return "; ".join(parts)

    def _look_at_memory(self) -> None:
        """Choose anew before a pass where memory has changed."""
        if self._left or self._assignment is None or self.plan.memory is not None:
            return
        now, then = self._room(), max(1, self._room_then)
        if abs(now / then - 1) <= self.plan.change:
            return
        if now < then or self._assignment.memory < self._wanted():  # more room is for those who want it
            word = "less" if now < then else "more"
            self._choose(f"with {word} memory than before ({format_size(now)} for {format_size(then)})")

    def _wanted(self) -> int:
        assert self._profile is not None
        return sum(segment.saved for segment in self._profile.segments) + self._profile.rest

    def _look_at_rates(self) -> None:
        """Choose anew after passes that all took other times than the choice was made with."""
        profile, rates = self._profile, self._rates
        if profile is None or len(self._lately) < LATELY:
            return
        compute = statistics.median(one.at - one.waited for one in self._lately)
        read, write = self._drive_rates(self._lately)
        moved = sum(one.read + one.written for one in self._lately) >= LEAST
        if not self._odd:  # the first passes of a choice say what is usual with it
            self._odd = 1
            self._rates = _Rates(read if moved else rates.read, write if moved else rates.write, compute)
            return
        changes = {
            "the processor": compute / rates.compute,
            "reading": rates.read / read if moved else 1.0,
            "writing": rates.write / write if moved else 1.0,
        }
        changed = {what: by for what, by in changes.items() if not 1 / (1 + self.plan.change) <= by <= 1 + self.plan.change}
        if not changed:
            return
        slower = changes["the processor"]
        self._profile = Profile(
            tuple(
                Segment(one.name, one.saved, one.given, one.seconds * slower, one.again) for one in profile.segments
            ),
            profile.rest, self._states(), profile.compute * slower, profile.copying * slower,
            profile.read / changes["reading"], profile.write / changes["writing"], profile.exposed,
        )  # fmt: skip
        told = ", ".join(f"{what} takes {by:.2g} x as long" for what, by in changed.items())
        self._choose(f"because {told}")

    def _refuse_larger(self, name: str, given: int) -> None:
        """Measure anew where a segment is given more than in the warm-up, because its activations are larger, too."""
        if self._left or self._profile is None:
            return
        known = next((one.given for one in self._profile.segments if one.name == name), None)
        if known is not None and given > (1 + self.plan.change) * known:
            self._begin_warm_up()
            self._why = f"measuring again, because {name!r} is given {given:,} bytes, and was given {known:,}"
            logger.info("%s", self._why)

    def chosen(self) -> AutoPlanStatistics:
        """Return what was chosen, and what came of it."""
        found = self._assignment
        lately = [one.at for one in self._lately]
        return AutoPlanStatistics(
            ways={name: self.ways.get(name, "store") for name in self._names},
            rest=self._rest,
            why=self._why,
            choices=self._choices,
            memory=self._memory,
            planned=0 if found is None else found.memory + self._saved.keep,
            predicted=0.0 if found is None else found.seconds,
            measured=statistics.median(lately) if lately else 0.0,
            stays={} if found is None else found.stays,
        )
