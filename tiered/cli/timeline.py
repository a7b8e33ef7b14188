"""A store's timeline as a trace that ui.perfetto.dev and chrome://tracing show, and as shares of the time.

The format is Google's Trace Event Format: a complete event ("X") has its beginning ``ts`` and its length ``dur`` in
microseconds, and lies on the line that ``pid`` (here: a group of lines) and ``tid`` (one line of it) name.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tiered import Timeline, __version__
from tiered.cli.report import MADE_BY
from tiered.types import Direction

__all__ = ["COMPUTE", "Part", "activity", "as_trace", "describe", "lanes", "shares", "ways", "write_timeline"]

COMPUTE = ("forward", "recompute", "backward", "update")
"""Kinds of spans that are computing, as ``tiered.zero`` tells them."""
MARGIN = 1
"""Nanoseconds: what is shorter is drawn as long as this, or it could not be seen at all."""

Item = TypeVar("Item")


class Part(NamedTuple):
    """From ``began`` to ``ended`` the caller did ``kind`` and nothing within it."""

    kind: str
    began: float
    ended: float


@dataclass(frozen=True)
class _Slice:
    """Nanoseconds since the recording began."""

    name: str
    began: int
    ended: int
    args: dict[str, Any]


def ways(timeline: Timeline) -> list[tuple[str, str, Direction]]:
    """Links and directions with transfers, as (src, dst, direction); the lowest link last, what comes up first."""
    found = {(transfer.src, transfer.dst, transfer.direction) for transfer in timeline.transfers}
    order = list(timeline.capacity)
    return sorted(found, key=lambda way: (order.index(way[0]), way[2] is Direction.DOWN))


def lanes(items: Iterable[Item], ends: Callable[[Item], tuple[float, float]], nested: str = "apart") -> list[list[Item]]:
    """As few lines as it takes that no two items of one line are at the same time; ``nested="together"``: unless one of them
    lies within the other. Each line is in the order of beginnings."""
    found: list[list[Item]] = []
    open_until: list[list[float]] = []  # by line: ends of those that others could lie in, the outermost first
    for item in sorted(items, key=lambda item: (ends(item)[0], -ends(item)[1])):
        began, ended = ends(item)
        for line, until in zip(found, open_until, strict=True):
            while until and until[-1] <= began:
                until.pop()
            if not until or (nested == "together" and ended <= until[-1]):
                line.append(item)
                until.append(ended)
                break
        else:
            found.append([item])
            open_until.append([ended])
    return found


def as_trace(timeline: Timeline) -> dict[str, Any]:
    """What the viewers load. Groups of lines: spans, stalls, each link and direction, leases; and counters of each tier."""

    def slice_of(name: str, began: float, ended: float, **args: Any) -> _Slice:
        first = round((began - timeline.began) * 1e9)
        return _Slice(name, first, max(first + MARGIN, round((ended - timeline.began) * 1e9)), args)

    def line(began: float, ended: float) -> float:
        return round((ended - began) * 1e6, 3)

    over = timeline.ended if timeline.ended is not None else timeline.began
    groups: list[tuple[str, list[_Slice], str]] = []
    compute = [span for span in timeline.spans if span.kind in COMPUTE]
    groups.append(("compute", [slice_of(f"{s.kind} {s.name}", s.began, s.ended) for s in compute], "together"))
    for kind in dict.fromkeys(span.kind for span in timeline.spans if span.kind not in COMPUTE):
        own = [slice_of(span.name, span.began, span.ended) for span in timeline.spans if span.kind == kind]
        groups.insert(0, (kind, own, "together"))
    stalls = [slice_of(f"waits for {stall.reason}", stall.began, stall.ended, request=stall.what) for stall in timeline.stalls]
    groups.append(("stalls", stalls, "apart"))
    for way in ways(timeline):
        moved = [
            slice_of(
                t.key,
                t.started,
                t.ended,
                bytes=t.nbytes,
                urgency=t.urgency.name.lower(),
                queued_us=line(t.queued, t.started),
                **({} if t.error is None else {"error": t.error}),
            )
            for t in timeline.transfers
            if (t.src, t.dst, t.direction) == way
        ]
        groups.append((_told_way(way), moved, "apart"))
    leases = [
        slice_of(
            ", ".join(lease.keys),
            lease.granted,
            over if lease.released is None else lease.released,
            tier=lease.tier,
            access=lease.access.value,
            waited_us=line(lease.asked, lease.granted),
        )
        for lease in timeline.leases
    ]
    groups.append(("leases", leases, "apart"))
    events: list[dict[str, Any]] = []
    named: list[dict[str, Any]] = []
    for pid, (group, slices, nested) in enumerate(groups, 1):
        named.append({"ph": "M", "name": "process_name", "ts": 0, "pid": pid, "tid": 0, "args": {"name": group}})
        named.append({"ph": "M", "name": "process_sort_index", "ts": 0, "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for tid, lane in enumerate(lanes(slices, lambda s: (s.began, s.ended), nested), 1):
            named.append({"ph": "M", "name": "thread_name", "ts": 0, "pid": pid, "tid": tid, "args": {"name": group}})
            for s in lane:
                times = {"ts": s.began / 1000, "dur": (s.ended - s.began) / 1000}
                events.append({"ph": "X", "name": s.name, "cat": group, **times, "pid": pid, "tid": tid, "args": s.args})
    pool = len(groups) + 1
    named.append({"ph": "M", "name": "process_name", "ts": 0, "pid": pool, "tid": 0, "args": {"name": "bytes in use"}})
    named.append({"ph": "M", "name": "process_sort_index", "ts": 0, "pid": pool, "tid": 0, "args": {"sort_index": pool}})
    for sample in timeline.pool:
        at = round((sample.at - timeline.began) * 1e9) / 1000
        used = {"used": sample.used}
        events.append({"ph": "C", "name": sample.tier, "cat": "pool", "ts": at, "pid": pool, "tid": 0, "args": used})
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"seconds": over - timeline.began, "dropped_events": timeline.dropped, **shares(timeline)},
        "traceEvents": [*named, *events],
    }


def write_timeline(path: str, timeline: Timeline) -> None:
    """Compact: a line for each event."""
    trace = as_trace(timeline)
    events = trace.pop("traceEvents")
    head = json.dumps({MADE_BY: __version__, **trace})
    with Path(path).open("w", encoding="utf-8") as file:
        file.write(f'{head[:-1]}, "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in events))
        file.write("\n]}\n")


def activity(timeline: Timeline) -> list[Part]:
    """What the caller did, moment by moment: of several spans that go on the innermost counts, and waiting before any. Other
    kinds than ``COMPUTE`` do not count. For a store that one thread uses."""
    spans = [Part(span.kind, span.began, span.ended) for span in timeline.spans if span.kind in COMPUTE]
    spans += [Part(stall.reason, stall.began, stall.ended) for stall in timeline.stalls]
    spans = sorted((span for span in spans if span.ended > span.began), key=lambda span: span.began)
    moments = sorted({moment for span in spans for moment in (span.began, span.ended)})
    found: list[Part] = []
    running: list[tuple[float, float, str]] = []  # the one that began last is on top
    waiting = iter([*spans, None])
    coming = next(waiting)
    for moment, following in itertools.pairwise(moments):
        while coming is not None and coming.began <= moment:
            heapq.heappush(running, (-coming.began, coming.ended, coming.kind))
            coming = next(waiting)
        while running and running[0][1] <= moment:
            heapq.heappop(running)
        if not running:
            continue
        kind = running[0][2]
        if found and found[-1].kind == kind and found[-1].ended == moment:
            found[-1] = found[-1]._replace(ended=following)
        else:
            found.append(Part(kind, moment, following))
    return found


def shares(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Seconds of each activity, and those in which each link moved something in each direction; ``idle``: in none."""
    spent = dict.fromkeys((*COMPUTE, "reads", "room"), 0.0)
    for part in activity(timeline):
        spent[part.kind] += part.ended - part.began
    over = timeline.ended if timeline.ended is not None else timeline.began
    spent["other"] = over - timeline.began - sum(spent.values())
    busy = {}
    for way in ways(timeline):
        own = [(t.started, t.ended) for t in timeline.transfers if (t.src, t.dst, t.direction) == way]
        busy[_told_way(way)] = _covered(own)
    busy["none of them"] = over - timeline.began - _covered([(t.started, t.ended) for t in timeline.transfers])
    return {"activity_seconds": spent, "link_seconds": busy}


def describe(timeline: Timeline, steps: int) -> str:
    """A few lines."""
    found = shares(timeline)
    whole = max(sum(found["activity_seconds"].values()), 1e-9)
    told = {"reads": "waiting for reads", "room": "waiting for room"}

    def listed(seconds: dict[str, float]) -> str:
        return ", ".join(f"{told.get(name, name)} {value / whole:.0%}" for name, value in seconds.items() if value)

    lines = [f"timeline  {steps} steps, {whole:.2f} s: {listed(found['activity_seconds'])}"]
    lines.append(f"          transfers under way: {listed(found['link_seconds'])}")
    if timeline.dropped:
        lines.append(f"          the first {timeline.limit:,} events are in it, {timeline.dropped:,} are not")
    return "\n".join(lines)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in at least one of ``spans``."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def _told_way(way: tuple[str, str, Direction]) -> str:
    src, dst, direction = way
    return f"{dst} to {src}" if direction is Direction.UP else f"{src} to {dst}"
