"""A store's timeline as a picture: what was computed, when that waited, what moved meanwhile, how full the pool was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered import Timeline, __version__
from tiered.cli.timeline import COMPUTE, Part, activity, lanes, ways
from tiered.sizes import format_size
from tiered.types import Direction, Urgency

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_timeline"]

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
    Urgency.WRITEBACK: ("in the background", "#888888"),
}
THIN = 0.3
"""Points around what is drawn, so that what is very short can be seen."""
MOST_LANES = 6
"""More lines than these are drawn over each other: they would be too thin."""


def plot_timeline(path: str, timeline: Timeline, title: str) -> None:
    """Write a PNG. Rows over one axis of time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    over = timeline.ended if timeline.ended is not None else timeline.began
    unit, factor = ("ms", 1e3) if over - timeline.began < 2 else ("s", 1.0)
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
    for axes, way in zip(rows[2:-1], links, strict=True):
        _transfers(axes, timeline, way, at)
    if links:
        rows[2].legend(handles=[Patch(color=colour, label=name) for name, colour in URGENCIES.values()], **_BESIDE)
    _pool(rows[-1], timeline, at, over)
    for step in (span for span in timeline.spans if span.kind == "step"):
        for axes in rows:
            axes.axvline(at(step.began), color="black", linewidth=0.6, linestyle=":")
        rows[0].annotate(step.name, (at(step.began), 1.0), xycoords=("data", "axes fraction"), fontsize="small", va="bottom")
    rows[-1].set_xlim(0, at(over))
    rows[-1].set_xlabel(unit)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, format="png", dpi=120, metadata={"Software": f"tiered train {__version__}"})


_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": "small", "frameon": False}


def _name(axes: Axes, name: str) -> None:
    axes.set_ylabel(name, rotation=0, ha="right", va="center")
    axes.set_yticks([])
    axes.set_ylim(0, 1)


def _bars(axes: Axes, name: str, colours: dict[str, list[Part]], at: Any) -> None:
    _name(axes, name)
    for colour, parts in colours.items():
        places = [(at(part.began), at(part.ended) - at(part.began)) for part in parts]
        axes.broken_barh(places, (0.05, 0.9), facecolors=colour, linewidth=THIN)


def _transfers(axes: Axes, timeline: Timeline, way: tuple[str, str, Direction], at: Any) -> None:
    src, dst, direction = way
    name = f"reads\n{dst} to {src}" if direction is Direction.UP else f"writes\n{src} to {dst}"
    own = [t for t in timeline.transfers if (t.src, t.dst, t.direction) == way]
    lines = lanes(own, lambda t: (t.started, t.ended))
    _name(axes, f"{name}\n{format_size(sum(t.nbytes for t in own))}")
    count = min(MOST_LANES, len(lines))
    for number, line in enumerate(lines):
        bottom = (number % count) / count
        axes.broken_barh(
            [(at(t.started), at(t.ended) - at(t.started)) for t in line],
            (bottom + 0.05 / count, 0.9 / count),
            facecolors=[URGENCIES[t.urgency][1] for t in line],
            linewidth=THIN,
        )


def _pool(axes: Axes, timeline: Timeline, at: Any, over: float) -> None:
    """Of the top tier, in which training computes."""
    tier = next(iter(timeline.capacity))
    samples = [sample for sample in timeline.pool if sample.tier == tier]
    capacity = timeline.capacity[tier]
    times = [*(at(sample.at) for sample in samples), at(over)]
    shares = [sample.used / capacity for sample in samples]
    _name(axes, f"{tier} used\nof {format_size(capacity)}")
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize="small")
    axes.stairs(shares, times, fill=True, color="#bbccee")
    axes.set_ylim(0, 1.05)
