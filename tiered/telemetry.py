"""Statistics of a store since it was opened, and the timeline of what happened while somebody records.

``StoreStatistics`` and its parts are frozen snapshots. ``Recorder`` fills a ``Timeline`` with events: transfers, leases,
stalls, spans of the caller's own work, and the use of each tier. Sizes are bytes; times are seconds of one monotonic clock,
comparable only with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, TypeVar

from tiered.errors import TieredError
from tiered.types import Access, Direction, Key, Transfer, Urgency, format_size

__all__ = [
    "NO_SPAN",
    "ActivationStatistics",
    "FlowStatistics",
    "LeaseEvent",
    "LinkStatistics",
    "MemoryStatistics",
    "Offloaded",
    "PoolEvent",
    "Recorder",
    "Span",
    "SpanEvent",
    "StallEvent",
    "StoreStatistics",
    "TierStatistics",
    "Timeline",
    "TransferEvent",
]


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """Counters of one direction of a link.

    ``transfers`` that succeeded moved ``bytes`` (of tensors, without padding); ``failed`` others ended with an error.
    ``busy_seconds`` is the time during which at least one was in flight, so ``bytes / busy_seconds`` is the link's rate.
    """

    transfers: int
    bytes: int
    failed: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class ActivationStatistics:
    """Counters of what autograd saved in one ``offload_activations``, or in one paged model.

    ``saved``: tensors that autograd saved, of which ``left`` were left where they are. In bytes: ``shared`` is what other saved
    tensors show as well, ``offloaded`` went into the store, ``restored`` came back, and ``hidden`` of these were in memory when
    backward asked for them. ``in_memory`` and ``in_store`` are bytes at present. ``waited_in_forward`` is the time, in seconds,
    that forward waited for room, ``waited_in_backward`` that backward waited for bytes.
    """

    saved: int
    left: int
    shared: int
    offloaded: int
    restored: int
    hidden: int
    in_memory: int
    in_store: int
    waited_in_forward: float
    waited_in_backward: float


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Counters of the link between the tiers named ``src`` (the upper) and ``dst``. ``up`` is towards the compute (reads, for
    the disk), ``down`` is away from it (write-backs)."""

    src: str
    dst: str
    up: FlowStatistics
    down: FlowStatistics


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Counters of one tier: ``name`` is "hbm", "dram" or "nvme". ``capacity``, ``used`` and ``peak`` are bytes of slots,
    padding included.

    ``copies`` counts tensors that have a copy here. ``held`` counts the copies, those of replaced and deleted tensors included,
    that are pinned by aliases which outlived their lease. ``moved`` counts the bytes that defragmentation moved within the tier
    since ``open``.
    """

    name: str
    capacity: int
    used: int
    peak: int
    copies: int
    held: int
    moved: int


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Memory of the process, in bytes, at one moment.

    ``budget``: what the store may use of DRAM. ``pool``: what tensors use of that now, ``touched``: at most so far, which the
    system has given. ``process``: anonymous memory of the process (the pool, the heap, stacks), ``beyond``: of that, what is
    not the pool's. ``headroom``: what the process may still take; ``limit``: that of its tightest memory cgroup, None where
    there is none."""

    budget: int
    pool: int
    touched: int
    process: int
    headroom: int
    limit: int | None

    @property
    def beyond(self) -> int:
        """Bytes of the process that are not the pool's."""
        return max(0, self.process - self.touched)

    @property
    def unused(self) -> int:
        """Bytes of the budget that were never used, and that the system has yet to give."""
        return max(0, self.budget - self.touched)


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counters since ``open``; ``tensors``, ``generation`` and ``tiers`` are the present state.

    ``backend``: name of the I/O backend, "none" without a disk. ``direct``: whether I/O bypasses the page cache (O_DIRECT).
    ``leases`` counts requests: ``hits`` were granted at once, ``misses`` after waiting. ``stalled_for_reads`` is the time that
    callers (threads and coroutines) waited for bytes to arrive, ``stalled_for_room`` the time that they waited for space, that
    is for write-backs or for the end of other leases; the times of several callers add up. ``wakes`` counts how often a call
    woke the engine's thread. ``prefetched`` counts fetches that no caller waited for when they began, one per link;
    ``prefetched_unused`` those that were evicted before their first use. ``speculated`` counts fetches for ``speculate``, one
    per link; of these ``speculated_used`` were used, and ``speculated_unused`` evicted before that. ``unknown_hints`` counts
    the keys in ``prefetch``, ``speculate`` and orders of keys that the store did not have: mistyped ones, say. ``evictions``
    counts copies that left a tier to make room. ``tiers`` are from the top; ``links[i]`` joins ``tiers[i]`` and
    ``tiers[i + 1]``. ``memory``: that of the process.
    """

    backend: str
    direct: bool
    tensors: int
    generation: int
    leases: int
    hits: int
    misses: int
    stalled_for_reads: float
    stalled_for_room: float
    wakes: int
    prefetched: int
    prefetched_unused: int
    speculated: int
    speculated_used: int
    speculated_unused: int
    unknown_hints: int
    evictions: int
    tiers: tuple[TierStatistics, ...]
    links: tuple[LinkStatistics, ...]
    memory: MemoryStatistics

    def tier(self, name: str) -> TierStatistics:
        """Return the statistics of the tier of that name. Raises KeyError where there is none."""
        return {tier.name: tier for tier in self.tiers}[name]

    @property
    def stalled(self) -> float:
        """Seconds that callers waited, for bytes or for room."""
        return self.stalled_for_reads + self.stalled_for_room

    def __str__(self) -> str:
        """Return some lines for people, whose wording may change."""
        direct = "" if self.backend == "none" else f", {'' if self.direct else 'not '}past the page cache"
        lines = [f"{self.tensors:,} tensors, generation {self.generation}; I/O backend: {self.backend}{direct}"]
        for tier in self.tiers:
            held = f", {tier.held:,} of them held by references that outlived a lease" if tier.held else ""
            used = f"{format_size(tier.used)} of {format_size(tier.capacity)} in use, at most {format_size(tier.peak)}"
            lines.append(f"{tier.name}: {used}; {tier.copies:,} copies{held}")
        for link in self.links:
            for src, dst, flow in (link.dst, link.src, link.up), (link.src, link.dst, link.down):
                rate = f", {flow.bytes / flow.busy_seconds / 1e9:.2f} GB/s" if flow.busy_seconds > 0 and flow.bytes else ""
                failed = f"; {flow.failed:,} failed" if flow.failed else ""
                lines.append(f"{src} to {dst}: {format_size(flow.bytes)} in {flow.transfers:,} transfers{rate}{failed}")
        waits = f"{self.stalled_for_reads:.3g} s for reads, {self.stalled_for_room:.3g} s for room"
        lines.append(f"{self.leases:,} leases, {self.hits:,} granted at once; callers waited {waits}")
        if self.unknown_hints:
            lines.append(f"hints named {self.unknown_hints:,} keys that the store did not have")
        memory = self.memory
        limit = "" if memory.limit is None else f" of the cgroup's {format_size(memory.limit)}"
        lines.append(
            f"process: {format_size(memory.process)}, {format_size(memory.beyond)} of it beyond the pool; "
            f"{format_size(memory.headroom)} left{limit}"
        )
        return "\n".join(lines)


Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What ``TieredStore.offload`` did: ``stayed`` are the tensors that are leased, or whose memory something still refers to.
    ``given_back``: bytes of the DRAM budget that the process does not use now. ``seconds``: how long it took."""

    stayed: tuple[str, ...]
    given_back: int
    seconds: float


class _Space(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int: ...


class _Tier(Protocol):
    """The part of a tier's pool that a recorder samples."""

    @property
    def tier(self) -> _Space: ...
    @property
    def used(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """A tensor's way over the link from ``src`` (the upper tier) to ``dst``, ``nbytes`` long.

    ``queued``, ``started``, ``ended``: when it was decided on, given to the link, and found to be complete; times before the
    recording are those of its beginning. ``urgency`` is the final one. ``error``: None when the transfer succeeded.
    """

    src: str
    dst: str
    direction: Direction
    key: Key
    nbytes: int
    urgency: Urgency
    queued: float
    started: float
    ended: float
    error: str | None


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """A lease: when it was ``asked`` for, ``granted``, and ``released`` (None when that was after the recording)."""

    keys: tuple[Key, ...]
    tier: str
    access: Access
    asked: float
    granted: float
    released: float | None


@dataclass(frozen=True, slots=True)
class StallEvent:
    """A wait of a caller: ``reason`` is "reads" (for bytes to arrive) or "room" (for space); ``what`` names the request."""

    reason: str
    what: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A span of the caller's own work. ``tiered.zero`` has the kinds "forward", "backward", "recompute" and "update"."""

    kind: str
    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """A change in the use of a tier: from ``at`` on, ``used`` bytes of ``tier`` were in use, padding included."""

    at: float
    tier: str
    used: int


class Timeline:
    """A recording of ``TieredStore.timeline``: lists of the events ``transfers``, ``leases``, ``stalls``, ``spans``, ``pool``.

    Each list has the events in the order in which they ended; ``leases`` also has those that are open when the recording ends.
    At most ``limit`` events are kept; ``dropped`` counts later ones. ``began`` and ``ended`` are the recording's own (``ended``
    is None while it runs), ``capacity`` is bytes by tier, from the top.
    """

    def __init__(self, capacity: Mapping[str, int], began: float, limit: int) -> None:
        self.capacity, self.began, self.limit = dict(capacity), began, limit
        self.ended: float | None = None
        self.dropped = 0
        self.transfers: list[TransferEvent] = []
        self.leases: list[LeaseEvent] = []
        self.stalls: list[StallEvent] = []
        self.spans: list[SpanEvent] = []
        self.pool: list[PoolEvent] = []

    @property
    def over(self) -> float:
        """When the recording ended; when it began, while it runs."""
        return self.began if self.ended is None else self.ended


class Recorder:
    """The writer of a timeline. Transfers, grants and stalls are reported under the engine's lock; spans and the ends of leases
    from any thread, also from the garbage collector."""

    def __init__(self, tiers: Sequence[_Tier], clock: Callable[[], float], limit: int) -> None:
        self._tiers, self._clock = tiers, clock
        self.timeline = Timeline({tier.tier.name: tier.tier.capacity for tier in tiers}, clock(), limit)
        self._used = [-1 for _ in tiers]
        self._queued: dict[int, float] = {}  # transfers that have not ended, by tag
        self._started: dict[int, float] = {}
        self._leases: dict[int, LeaseEvent] = {}  # open ones, by the number of their request
        self._stall = -1  # number of the request that the newest stall belongs to
        self._left = limit
        self._sample()

    def stop(self) -> None:
        """End the recording; later reports are ignored."""
        timeline = self.timeline
        while self._leases:
            self._add(timeline.leases, self._leases.popitem()[1])
        timeline.ended = self._clock()

    def _add(self, events: list[Event], event: Event) -> None:
        timeline = self.timeline
        if timeline.ended is not None:
            return
        if self._left > 0:
            self._left -= 1
            events.append(event)
        else:
            timeline.dropped += 1

    def _sample(self) -> None:
        """Record the use of each tier that has changed."""
        for place, tier in enumerate(self._tiers):
            if tier.used != self._used[place]:
                self._used[place] = tier.used
                self._add(self.timeline.pool, PoolEvent(self._clock(), tier.tier.name, tier.used))

    def queued(self, tag: int) -> None:
        self._queued[tag] = self._clock()

    def started(self, tag: int) -> None:
        """Record the start of a transfer; called again when the link was full the first time."""
        self._started[tag] = self._clock()
        self._sample()

    def transferred(self, src: str, dst: str, transfer: Transfer, error: TieredError | None) -> None:
        began = self.timeline.began
        queued, started = self._queued.pop(transfer.tag, began), self._started.pop(transfer.tag, began)
        told = None if error is None else str(error)
        event = TransferEvent(
            src, dst, transfer.direction, transfer.key, transfer.nbytes, transfer.urgency, queued, started, self._clock(), told
        )
        self._add(self.timeline.transfers, event)
        self._sample()

    def granted(self, number: int, keys: tuple[Key, ...], tier: int, access: Access, asked: float) -> None:
        asked = max(asked, self.timeline.began)
        if self.timeline.ended is None:
            self._leases[number] = LeaseEvent(keys, self._tiers[tier].tier.name, access, asked, self._clock(), None)
        self._sample()

    def released(self, number: int) -> None:
        held = self._leases.pop(number, None)
        if held is not None:
            self._add(self.timeline.leases, replace(held, released=self._clock()))

    def stalled(self, number: int, what: str, seconds: float, for_room: bool) -> None:
        """Record a stall. A caller that is woken in between and waits on for the same reason has one stall."""
        now, stalls, reason = self._clock(), self.timeline.stalls, "room" if for_room else "reads"
        if stalls and self._stall == number and stalls[-1].reason == reason and self.timeline.ended is None:
            stalls[-1] = replace(stalls[-1], ended=now)
        else:
            self._stall = number
            self._add(stalls, StallEvent(reason, what, max(now - seconds, self.timeline.began), now))

    def begin(self, kind: str, name: str) -> Span:
        return Span(self, kind, name, self._clock())

    def end(self, span: Span) -> None:
        self._add(self.timeline.spans, SpanEvent(span.kind, span.name, span.began, self._clock()))


class Span:
    """A span that ends with its ``with`` block, or by ``end``, which is idempotent. Made by ``TieredStore.span``."""

    def __init__(self, recorder: Recorder | None, kind: str, name: str, began: float) -> None:
        self._recorder, self.kind, self.name, self.began = recorder, kind, name, began

    def end(self) -> None:
        recorder = self._recorder
        if recorder is not None:
            self._recorder = None
            recorder.end(self)

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


NO_SPAN = Span(None, "", "", 0.0)
"""The span that is returned while nobody records."""
