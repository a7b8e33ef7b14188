"""A store's timeline as a trace for ui.perfetto.dev and chrome://tracing, as a picture, and as shares of the time.

The trace has Google's Trace Event Format: a complete event ("X") has its beginning ``ts`` and its length ``dur`` in
microseconds, and lies on the line that ``pid`` (here a group of lines) and ``tid`` (one line of the group) name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered import Timeline, __version__
from tiered.cli.output import MADE_BY, counted
from tiered.reporting.timeline import COMPUTE, TimelinePart, Way, activity, lanes, ways
from tiered.telemetry import TransferEvent
from tiered.types import Urgency, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["as_trace", "describe_timeline", "plot_timeline", "shares", "write_timeline"]

MARGIN = 1
"""Least length of a slice in nanoseconds, so that shorter ones remain visible."""

@dataclass(frozen=True)
class _Slice:
    """A slice of a line, in nanoseconds since the recording began."""

    name: str
    began: int
    ended: int
    args: dict[str, Any]


def as_trace(timeline: Timeline) -> dict[str, Any]:
    """Convert the timeline to a trace with groups of lines for spans, stalls, each link and direction, and leases, and with
    counters of each tier."""

    def slice_of(name: str, began: float, ended: float, **args: Any) -> _Slice:
        first = round((began - timeline.began) * 1e9)
        return _Slice(name, first, max(first + MARGIN, round((ended - timeline.began) * 1e9)), args)

    def line(began: float, ended: float) -> float:
        return round((ended - began) * 1e6, 3)

    groups: list[tuple[str, list[_Slice], str]] = []
    compute = [span for span in timeline.spans if span.kind in COMPUTE]
    groups.append(("compute", [slice_of(f"{s.kind} {s.name}", s.began, s.ended) for s in compute], "together"))
    for kind in dict.fromkeys(span.kind for span in timeline.spans if span.kind not in COMPUTE):
        others = [slice_of(span.name, span.began, span.ended) for span in timeline.spans if span.kind == kind]
        groups.insert(0, (kind, others, "together"))
    stalls = [slice_of(f"waits for {stall.reason}", stall.began, stall.ended, request=stall.what) for stall in timeline.stalls]
    groups.append(("stalls", stalls, "apart"))
    for way, own in ways(timeline).items():
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
            for t in own
        ]
        groups.append((str(way), moved, "apart"))
    leases = [
        slice_of(
            ", ".join(lease.keys),
            lease.granted,
            timeline.over if lease.released is None else lease.released,
            tier=lease.tier,
            access=lease.access.value,
            waited_us=line(lease.asked, lease.granted),
        )
        for lease in timeline.leases
    ]
    groups.append(("leases", leases, "apart"))
    events: list[dict[str, Any]] = []
    named: list[dict[str, Any]] = []

    def describe(what: str, pid: int, tid: int = 0, **args: Any) -> None:
        named.append({"ph": "M", "name": what, "ts": 0, "pid": pid, "tid": tid, "args": args})

    for pid, (group, slices, nested) in enumerate(groups, 1):
        describe("process_name", pid, name=group)
        describe("process_sort_index", pid, sort_index=pid)
        for tid, lane in enumerate(lanes(slices, lambda s: (s.began, s.ended), nested), 1):
            describe("thread_name", pid, tid, name=group)
            for s in lane:
                times = {"ts": s.began / 1000, "dur": (s.ended - s.began) / 1000}
                events.append({"ph": "X", "name": s.name, "cat": group, **times, "pid": pid, "tid": tid, "args": s.args})
    pool = len(groups) + 1
    describe("process_name", pool, name="bytes in use")
    describe("process_sort_index", pool, sort_index=pool)
    for sample in timeline.pool:
        at = round((sample.at - timeline.began) * 1e9) / 1000
        used = {"used": sample.used}
        events.append({"ph": "C", "name": sample.tier, "cat": "pool", "ts": at, "pid": pool, "tid": 0, "args": used})
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"seconds": timeline.over - timeline.began, "dropped_events": timeline.dropped, **shares(timeline)},
        "traceEvents": [*named, *events],
    }


def write_timeline(path: str, timeline: Timeline) -> None:
    """Write the trace as JSON with a line for each event."""
    trace = as_trace(timeline)
    events = trace.pop("traceEvents")
    head = json.dumps({MADE_BY: __version__, **trace})
    with Path(path).open("w", encoding="utf-8") as file:
        file.write(f'{head[:-1]}, "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in events))
        file.write("\n]}\n")


def shares(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Sum up the seconds of each activity, and the seconds in which each link moved bytes in each direction, and in none."""
    spent = dict.fromkeys((*COMPUTE, "reads", "room"), 0.0)
    for part in activity(timeline):
        spent[part.kind] += part.ended - part.began
    spent["other"] = timeline.over - timeline.began - sum(spent.values())
    busy = {str(way): _covered(own) for way, own in ways(timeline).items()}
    busy["none of them"] = timeline.over - timeline.began - _covered(timeline.transfers)
    return {"activity_seconds": spent, "link_seconds": busy}


def describe_timeline(timeline: Timeline, steps: int) -> str:
    """Describe the shares of time in a few lines."""
    found = shares(timeline)
    whole = max(sum(found["activity_seconds"].values()), 1e-9)
    told = {"reads": "waiting for reads", "room": "waiting for room"}

    def listed(seconds: dict[str, float]) -> str:
        return ", ".join(f"{told.get(name, name)} {value / whole:.0%}" for name, value in seconds.items() if value)

    lines = [f"timeline  {counted(steps, 'step')}, {whole:.2f} s: {listed(found['activity_seconds'])}"]
    lines.append(f"          transfers under way: {listed(found['link_seconds'])}")
    if timeline.dropped:
        lines.append(f"          recorded: the first {counted(timeline.limit, 'event')}; dropped: {timeline.dropped:,}")
    return "\n".join(lines)


def _covered(transfers: Sequence[TransferEvent]) -> float:
    """Sum up the seconds in which at least one of ``transfers`` was under way."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted((one.started, one.ended) for one in transfers):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


COLOURS = {
    "forward": "#4477aa",
    "recompute": "#66ccee",
    "backward": "#ee9944",
    "update": "#228833",
    "reads": "#cc3311",
    "room": "#aa3377",
}
URGENCIES = {
    Urgency.DEMAND: ("on demand", "#cc3311"),
    Urgency.PREFETCH: ("ahead", "#009988"),
    Urgency.SPECULATIVE: ("perhaps", "#ee7733"),
    Urgency.WRITEBACK: ("in the background", "#888888"),
}
THIN = 0.3
"""Width of outlines in points, so that very short items can be seen."""
MOST_LANES = 6
"""Most lines of a row; more would be too thin, so further lines are drawn over the first ones."""


def plot_timeline(path: str, timeline: Timeline, title: str) -> None:
    """Draw the timeline as a PNG: rows over one axis of time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    unit, factor = ("ms", 1e3) if timeline.over - timeline.began < 2 else ("s", 1.0)
    links = ways(timeline)
    heights = [1.0, 0.6, *(1.2 for _ in links), 1.0]
    figure = Figure(figsize=(14, 1.4 + sum(heights)), layout="constrained")
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]

    def at(moment: float) -> float:
        return (moment - timeline.began) * factor

    parts = activity(timeline)
    drawn = {kind: [part for part in parts if part.kind == kind] for kind in COLOURS}
    _bars(rows[0], "compute", {COLOURS[kind]: drawn[kind] for kind in COMPUTE}, at)
    _bars(rows[1], "stalls", {COLOURS[kind]: drawn[kind] for kind in ("reads", "room")}, at)
    shown = [kind for kind in COLOURS if drawn[kind]]
    told = {"reads": "waits for reads", "room": "waits for room"}
    rows[0].legend(handles=[Patch(color=COLOURS[kind], label=told.get(kind, kind)) for kind in shown], **_BESIDE)
    for axes, (way, own) in zip(rows[2:-1], links.items(), strict=True):
        _transfers(axes, way, own, at)
    if links:
        rows[2].legend(handles=[Patch(color=colour, label=name) for name, colour in URGENCIES.values()], **_BESIDE)
    _pool(rows[-1], timeline, at)
    for step in (span for span in timeline.spans if span.kind == "step"):
        for axes in rows:
            axes.axvline(at(step.began), color="black", linewidth=0.6, linestyle=":")
        rows[0].annotate(step.name, (at(step.began), 1.0), xycoords=("data", "axes fraction"), fontsize="small", va="bottom")
    rows[-1].set_xlim(0, at(timeline.over))
    rows[-1].set_xlabel(unit)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, format="png", dpi=120, metadata={"Software": f"tiered train {__version__}"})


_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": "small", "frameon": False}


def _name(axes: Axes, name: str) -> None:
    axes.set_ylabel(name, rotation=0, ha="right", va="center")
    axes.set_yticks([])
    axes.set_ylim(0, 1)


def _bars(axes: Axes, name: str, colours: dict[str, list[TimelinePart]], at: Any) -> None:
    _name(axes, name)
    for colour, parts in colours.items():
        places = [(at(part.began), at(part.ended) - at(part.began)) for part in parts]
        axes.broken_barh(places, (0.05, 0.9), facecolors=colour, linewidth=THIN)


def _transfers(axes: Axes, way: Way, own: list[TransferEvent], at: Any) -> None:
    lines = lanes(own, lambda t: (t.started, t.ended))
    _name(axes, f"{way.verb}\n{way}\n{format_size(sum(t.nbytes for t in own))}")
    count = min(MOST_LANES, len(lines))
    for number, line in enumerate(lines):
        bottom = (number % count) / count
        axes.broken_barh(
            [(at(t.started), at(t.ended) - at(t.started)) for t in line],
            (bottom + 0.05 / count, 0.9 / count),
            facecolors=[URGENCIES[t.urgency][1] for t in line],
            linewidth=THIN,
        )


def _pool(axes: Axes, timeline: Timeline, at: Any) -> None:
    """Draw how full the top tier is, in which training computes."""
    tier = next(iter(timeline.capacity))
    samples = [sample for sample in timeline.pool if sample.tier == tier]
    capacity = timeline.capacity[tier]
    times = [*(at(sample.at) for sample in samples), at(timeline.over)]
    shares = [sample.used / capacity for sample in samples]
    _name(axes, f"{tier} used\nof {format_size(capacity)}")
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize="small")
    axes.stairs(shares, times, fill=True, color="#bbccee")
    axes.set_ylim(0, 1.05)
