"""A store's timeline in parts that can be drawn: what the caller did when, lines without overlap, and the rows of a report."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from tiered.telemetry import Timeline, TransferEvent
from tiered.types import Direction, Urgency, format_size

__all__ = ["COMPUTE", "TimelinePart", "Way", "activity", "as_rows", "lanes", "ways"]

COMPUTE = ("forward", "recompute", "backward", "update")
"""Kinds of spans in which ``tiered.zero`` computes."""
MOST_LANES = 8
"""Lines of one link and direction; further transfers share them."""
MOST_ITEMS = 12_000
"""Items of a report's timeline. A browser draws so many in an instant."""

Item = TypeVar("Item")


class TimelinePart(NamedTuple):
    """A time from ``began`` to ``ended`` in which the caller did ``kind`` and nothing nested in it."""

    kind: str
    began: float
    ended: float


class Way(NamedTuple):
    """One direction of a link."""

    src: str
    dst: str
    direction: Direction

    @property
    def verb(self) -> str:
        return "reads" if self.direction is Direction.UP else "writes"

    def __str__(self) -> str:
        return f"{self.dst} to {self.src}" if self.direction is Direction.UP else f"{self.src} to {self.dst}"


def ways(timeline: Timeline) -> dict[Way, list[TransferEvent]]:
    """Return the transfers of each link and direction that has some: the lowest link last, upward first."""
    found: dict[Way, list[TransferEvent]] = {}
    for transfer in timeline.transfers:
        found.setdefault(Way(transfer.src, transfer.dst, transfer.direction), []).append(transfer)
    order = list(timeline.capacity)
    return {way: found[way] for way in sorted(found, key=lambda way: (order.index(way.src), way.direction is Direction.DOWN))}


def lanes(items: Iterable[Item], ends: Callable[[Item], tuple[float, float]], nested: str = "apart") -> list[list[Item]]:
    """Distribute ``items`` over as few lines as possible so that no two items of a line overlap, each line in order of time.

    ``nested="together"``: an item may lie within another one of its line."""
    found: list[list[Item]] = []
    open_until: list[list[float]] = []  # by line: ends of the items that can contain others, the outermost first
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


def activity(timeline: Timeline) -> list[TimelinePart]:
    """Divide the time of a caller into parts: of nested spans the innermost counts, and waiting counts before computing.

    Only spans of the kinds in ``COMPUTE`` count. Correct for a store that one thread uses."""
    spans = [TimelinePart(span.kind, span.began, span.ended) for span in timeline.spans if span.kind in COMPUTE]
    spans += [TimelinePart(stall.reason, stall.began, stall.ended) for stall in timeline.stalls]
    spans = sorted((span for span in spans if span.ended > span.began), key=lambda span: span.began)
    moments = sorted({moment for span in spans for moment in (span.began, span.ended)})
    found: list[TimelinePart] = []
    running: list[tuple[float, float, str]] = []  # the span that began last is on top
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
            found.append(TimelinePart(kind, moment, following))
    return found


def as_rows(timeline: Timeline, most: int = MOST_ITEMS) -> dict[str, Any]:
    """Return the timeline as a value for ``json.dumps``: seconds since it began, rows of items ``[lane, begins, ends, kind,
    name, bytes]`` and, for each tier, of levels ``[moment, share in use]``; ``left_out``: the shortest items beyond ``most``.
    """

    def at(moment: float) -> float:
        return round(moment - timeline.began, 6)

    rows: list[dict[str, Any]] = []
    parts = [[0, at(part.began), at(part.ended), part.kind, "", 0] for part in activity(timeline)]
    rows.append({"name": "training", "lanes": 1, "items": parts})
    names = [span for span in timeline.spans if span.kind in COMPUTE]
    nested = lanes(names, lambda span: (span.began, span.ended), "together")
    first = [one for line in nested[:1] for one in line if one.name]
    modules = [[0, at(one.began), at(one.ended), one.kind, one.name[:120], 0] for one in first]
    rows.append({"name": "modules, the innermost on top", "lanes": 1, "items": modules})
    urgency = {Urgency.DEMAND: "demand", Urgency.WRITEBACK: "writeback"}
    for way, own in ways(timeline).items():
        lines = lanes(own, lambda one: (one.started, one.ended))
        count = max(1, min(MOST_LANES, len(lines)))
        items = [
            [number % count, at(one.started), at(one.ended), urgency.get(one.urgency, "prefetch"), one.key[:120], one.nbytes]
            for number, line in enumerate(lines)
            for one in line
        ]
        name = f"{way.verb}, {way}: {format_size(sum(one.nbytes for one in own))}"
        rows.append({"name": name, "lanes": count, "items": items})
    sizes = sorted((item[2] - item[1] for row in rows for item in row["items"]), reverse=True)
    left_out = max(0, len(sizes) - most) + timeline.dropped
    if len(sizes) > most:
        shortest = sizes[most]
        for row in rows:
            row["items"] = [item for item in row["items"] if item[2] - item[1] > shortest]
        left_out = len(sizes) - sum(len(row["items"]) for row in rows) + timeline.dropped
    for tier, capacity in timeline.capacity.items():
        samples = [sample for sample in timeline.pool if sample.tier == tier] if tier != "nvme" else []
        levels = [[at(one.at), round(one.used / capacity, 4)] for one in samples[:: max(1, len(samples) // (most // 4))]]
        if levels:
            rows.append({"name": f"{tier} in use of {format_size(capacity)}", "lanes": 1, "level": levels})
    steps = [[span.name[:120], at(span.began), at(span.ended)] for span in timeline.spans if span.kind == "step"]
    return {"seconds": at(timeline.over), "steps": steps, "rows": rows, "left_out": left_out}
