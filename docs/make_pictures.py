"""Makes the pictures of docs/concepts.md: ``python docs/make_pictures.py``; ``--check`` says whether one is out of date.

Pictures of numbers read them from bench/results/, so that a picture shows what a committed file says. Each picture has colours
for light and for dark pages. The terminal recording is made by docs/make_recording.py, because it has to run the program.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
STYLE = """
  .page { fill: #ffffff; } .card { fill: #f3f5f9; stroke: #c5cbd6; }
  .axis, .grid { stroke: #c5cbd6; } .grid { stroke-dasharray: 2 4; }
  text { fill: #1d2430; } .soft { fill: #566070; }
  .a { fill: #2f6db5; stroke: #2f6db5; } .b { fill: #c8640a; stroke: #c8640a; } .c { fill: #2f8f5b; stroke: #2f8f5b; }
  .d { fill: #8a5fb0; stroke: #8a5fb0; } text.a, text.b, text.c, text.d { stroke: none; } .on { fill: #ffffff; }
  .line { fill: none !important; stroke-width: 2.5; } .thin { fill: none !important; stroke-width: 1.5; }
  .dash { stroke-dasharray: 6 4; }
  .pale { fill-opacity: 0.16; stroke-width: 1.5; } .ink { stroke: #566070; fill: #566070; } .none { fill: none !important; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1e2129; } .card { fill: #2a2f3a; stroke: #4a5261; } .axis, .grid { stroke: #4a5261; }
    text { fill: #e8ebf0; } .soft { fill: #aab3c2; } .on { fill: #12151b; }
    .a { fill: #74aef0; stroke: #74aef0; } .b { fill: #f0a354; stroke: #f0a354; } .c { fill: #6cc795; stroke: #6cc795; }
    .d { fill: #c3a1e6; stroke: #c3a1e6; } .ink { stroke: #aab3c2; fill: #aab3c2; }
  }
"""


class Picture:
    """Puts together an SVG of one size; x goes right and y down, in pixels."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="14" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>\n<desc id="desc">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="ink" d="M0 0 L10 5 L0 10 z"/></marker></defs>',
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(
        self, x: float, y: float, words: str, kind: str = "", *, size: int = 14, at: str = "start", bold: str = "normal"
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size}" text-anchor="{at}" font-weight="{bold}">'
            f"{escape(words)}</text>"
        )

    def code(self, x: float, y: float, words: str, kind: str = "", *, size: int = 13) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size}" font-family="Menlo, Consolas, monospace" '
            f'xml:space="preserve">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str = "card", *, label: str = "") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')
        if label:
            filled = "on" if kind in ("a", "b", "c", "d") else ""
            self.text(x + width / 2, y + height / 2 + 5, label, filled, at="middle", size=13)

    def line(self, points: Sequence[tuple[float, float]], kind: str, *, end: str = "") -> None:
        head = f' marker-end="url(#{end})"' if end else ""
        self.parts.append(f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" class="{kind}"{head}/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        self.line(points, "ink none thin", end="head")

    def dot(self, x: float, y: float, kind: str) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" class="{kind}"/>')

    def made(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


class Chart:
    """Draws axes into a rectangle of a picture, and points in their units."""

    def __init__(
        self,
        picture: Picture,
        where: tuple[float, float, float, float],
        across: tuple[Callable[[float], float], Sequence[tuple[float, str]], str],
        up: tuple[float, Sequence[tuple[float, str]], str],
    ) -> None:
        self.picture, (self.left, self.top, self.width, self.height) = picture, where
        self.share, ticks, name = across
        self.most, heights, height_name = up
        for value, label in heights:
            y = self.y(value)
            picture.line([(self.left, y), (self.left + self.width, y)], "grid")
            picture.text(self.left - 8, y + 5, label, "soft", at="end", size=13)
        for value, label in ticks:
            picture.text(self.x(value), self.top + self.height + 20, label, "soft", at="middle", size=13)
        bottom = self.top + self.height
        picture.line([(self.left, self.top), (self.left, bottom), (self.left + self.width, bottom)], "axis none")
        picture.text(self.left + self.width / 2, bottom + 42, name, at="middle")
        picture.text(self.left, self.top - 14, height_name)

    def x(self, value: float) -> float:
        return self.left + self.width * self.share(value)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.most)

    def curve(self, points: Sequence[tuple[float, float]], kind: str, *, dashed: str = "") -> None:
        placed = [(self.x(x), self.y(y)) for x, y in points]
        self.picture.line(placed, f"{kind} line {dashed}")
        for x, y in placed:
            self.picture.dot(x, y, kind)


def rows_of(file: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table from ``heading`` on in a page of bench/results/, without its head."""
    text = (RESULTS / file).read_text()
    found = heading in text and re.search(r"((?:^\|.*\|\n)+)", text[text.index(heading) :], re.MULTILINE)
    if not found:
        raise SystemExit(f"{file}: no table with {heading!r}")
    lines = [re.split(r"\s*\|\s*", line.strip().strip("|").strip()) for line in found[1].splitlines()]
    return lines[2:]


def number(cell: str) -> float:
    """Return the first number of a cell."""
    found = re.match(r"[\d,]+(?:\.\d+)?", cell)
    if found is None:
        raise SystemExit(f"no number: {cell!r}")
    return float(found[0].replace(",", ""))


def memory_by_size() -> str:
    """Peak memory of the process, over the number of parameters."""
    rows = rows_of("memory_by_size_2core-virtio_2026-11-24.md", "| parameters |")
    points = [(number(row[0]) / 1e6, number(row[1]) / 1024, number(row[2]) / 1024) for row in rows]
    picture = Picture(
        760,
        400,
        "Memory against model size",
        "In memory the process grows with the model; on disk it hardly does: " + "; ".join(
            f"{size:.0f} million parameters {inside:.2f} and {paged:.2f} GiB" for size, inside, paged in points
        ),
    )
    most = max(size for size, _, _ in points)
    chart = Chart(
        picture,
        (70, 50, 520, 280),
        (lambda x: x / most, [(x, f"{x:g}") for x in range(0, int(most) + 1, 25)], "million parameters, fp32"),
        (3.0, [(y, f"{y:g}") for y in (0, 0.5, 1, 1.5, 2, 2.5, 3)], "most memory of the process, GiB"),
    )
    chart.curve([(size, inside) for size, inside, _ in points], "b")
    chart.curve([(size, paged) for size, _, paged in points], "a")
    last = points[-1]
    picture.text(604, chart.y(last[1]) - 4, "in memory,", "b")
    picture.text(604, chart.y(last[1]) + 14, "torch's fused AdamW", "b")
    picture.text(604, chart.y(last[2]) - 22, "on disk,", "a")
    picture.text(604, chart.y(last[2]) - 4, "a pool of 32 MiB", "a")
    return picture.made()


def time_by_budget() -> str:
    """Left: a training step as tiered plan predicts it. Right: a token, measured."""
    rows = rows_of("plan_budgets_2026-11-24.md", "| budget |")
    picture = Picture(
        760,
        390,
        "Time against budget",
        "Left: seconds of a training step fall as the budget grows to the size of the state. Right: seconds a token, with "
        "tiered, accelerate and mapped files, for four budgets.",
    )
    training = Chart(
        picture,
        (60, 70, 280, 230),
        (lambda x: x / 100, [(x, f"{x} %") for x in (0, 25, 50, 75, 100)], "budget, of parameters and Adam states"),
        (0.4, [(y, f"{y:g}") for y in (0, 0.1, 0.2, 0.3, 0.4)], "seconds a step, as planned"),
    )
    picture.text(60, 30, "Training, tiered plan", bold="bold", size=16)
    for column, kind, name, beside in ((1, "a", "on_fetch", (12, 0)), (2, "c", "in_backward", (-4, 72))):
        points = [(number(row[0]), number(row[column])) for row in rows]
        training.curve(points, kind)
        picture.text(training.x(points[0][0]) + beside[0], training.y(points[0][1]) + beside[1], name, kind)
    tokens = rows_of("generate_2core-virtio_2026-11-25.md", "| C / W |")
    generating = Chart(
        picture,
        (450, 70, 270, 230),
        (lambda x: x / 100, [(x, f"{x} %") for x in (0, 25, 50, 75, 100)], "memory for weights, of all weights"),
        (4, [(y, f"{y:g}") for y in (0, 1, 2, 3, 4)], "seconds a token, measured"),
    )
    picture.text(450, 30, "Generating, 3.2 GiB of weights", bold="bold", size=16)
    labels = (("tiered", "a", 0, (-14, 34)), ("accelerate", "b", 1, (10, -2)), ("mapped", "d", 1, (-62, 24)))
    for way, kind, at, beside in labels:
        points = [(100 * number(row[0]), number(row[2])) for row in tokens if row[1] == way and row[2]]
        generating.curve(points, kind)
        picture.text(generating.x(points[at][0]) + beside[0], generating.y(points[at][1]) + beside[1], way, kind)
    return picture.made()


def throughput_by_size() -> str:
    """Bytes a second over the size of a tensor."""
    file = "store_2core-virtio_2026-11-24.md"
    rows = rows_of(file, "| tensor |")
    sizes = {"4 KiB": 0.0, "64 KiB": 4.0, "1 MiB": 8.0, "16 MiB": 12.0, "64 MiB": 14.0}
    picture = Picture(
        760,
        400,
        "Throughput against tensor size",
        "Rates rise with the size of a tensor: below some hundred KiB the cost of a call bounds them, above it the drive.",
    )
    most = 0.5 * math.ceil(2 * max(number(cell) for row in rows for cell in row[1:]))
    chart = Chart(
        picture,
        (70, 50, 480, 280),
        (lambda x: x / 14, [(place, name) for name, place in sizes.items()], "size of a tensor"),
        (most, [(half / 2, f"{half / 2:g}") for half in range(int(2 * most) + 1)], "GB/s, one caller"),
    )
    labels = [(1, "a", "lease, fetched ahead"), (2, "b", "lease, when it is asked for"), (3, "c", "put, memory is full")]
    lowest = 1000.0
    for column, kind, label in sorted(labels, key=lambda one: number(rows[-1][one[0]])):
        chart.curve([(sizes[row[0]], number(row[column])) for row in rows], kind)
        lowest = min(chart.y(number(rows[-1][column])), lowest - 20)  # labels do not overlap
        picture.text(562, lowest + 5, label, kind)
    return picture.made()


def training_step() -> str:
    """What computes, what is read and what is written in one step of four units."""
    picture = Picture(
        960,
        430,
        "A training step",
        "Four units. In forward each unit is read with its Adam states, updated with gradients of the step before, computed "
        "and written. In backward parameters are read again and gradients stay in memory.",
    )
    left, unit = 120, 100
    picture.text(left + 2 * unit, 32, "forward", bold="bold", at="middle", size=16)
    picture.text(left + 6 * unit, 32, "backward", bold="bold", at="middle", size=16)
    for x in (left, left + 4 * unit, left + 8 * unit):
        picture.line([(x, 44), (x, 352)], "grid")
    for name, y in (("compute", 84), ("read", 164), ("write", 224), ("gradients", 302)):
        picture.text(104, y, name, at="end", bold="bold")
    picture.text(104, 102, "(processor)", "soft", at="end", size=12)
    picture.text(104, 182, "(drive)", "soft", at="end", size=12)
    picture.text(104, 242, "(drive)", "soft", at="end", size=12)
    picture.text(104, 320, "(DRAM)", "soft", at="end", size=12)
    for at in range(4):
        x = left + at * unit
        picture.box(x, 64, 30, 44, "d", label=f"u{at + 1}")
        picture.box(x + 32, 64, 66, 44, "a", label=f"unit {at + 1}")
        if at:  # unit 1 is the one whose backward came last: it is there already
            picture.box(x - 92, 148, 80, 32, "b pale", label="p, m, v")
            picture.text(x - 52, 143, f"unit {at + 1}", "soft", at="middle", size=12)
            picture.line([(x - 12, 164), (x - 4, 164), (x - 4, 112)], "ink none thin", end="head")
        picture.box(x + 40, 214, 80, 32, "c pale", label="p, m, v")
        picture.text(x + 80, 209, f"unit {at + 1}", "soft", at="middle", size=12)
    for at in range(4):
        x, number_of_unit = left + (4 + at) * unit, 4 - at
        picture.box(x + 2, 64, 96, 44, "a", label=f"unit {number_of_unit}")
        if at:
            picture.box(x - 66, 148, 54, 32, "b pale", label="p")
            picture.text(x - 39, 143, f"unit {number_of_unit}", "soft", at="middle", size=12)
            picture.line([(x - 12, 164), (x - 4, 164), (x - 4, 112)], "ink none thin", end="head")
        picture.box(x + 2, 286, 38, 30, "d pale", label=f"g{number_of_unit}")
        picture.line([(x + 21, 110), (x + 21, 282)], "ink none thin", end="head")
    picture.box(left + 7 * unit + 34, 148, 60, 32, "b pale", label="m, v")
    picture.text(left + 7 * unit + 64, 143, "unit 1, next", "soft", at="middle", size=12)
    picture.box(left, 286, 4 * unit - 6, 30, "d pale", label="g1 … g4 of the step before; each update frees one")
    for y, words in (
        (376, "Reads begin ahead, so that they end before a unit computes. p of unit 1 is resident: its backward came last."),
        (396, "p: parameters, m, v: Adam's moments, u: update, g: gradients. With update='in_backward' m and v move later."),
    ):
        picture.text(left, y, words, "soft", size=13)
    return picture.made()


def lease_and_alias() -> str:
    """The life of a leased tensor's memory."""
    picture = Picture(
        960,
        345,
        "Lease and alias",
        "The memory of a leased tensor stays where it is while the lease is open and while any alias of the tensor exists. "
        "Only then is it evictable.",
    )
    picture.code(80, 40, 'with store.lease("w") as w:')
    picture.code(340, 40, "row = w[0]")
    picture.code(510, 40, "# end of the block")
    picture.code(740, 40, "del w, row")
    for x in (90, 350, 520, 750):
        picture.line([(x, 50), (x, 272)], "grid")
    rows = (
        ("lease", 96, 90, 520, "a", "open: nobody may write, nothing may move it"),
        ("w", 146, 90, 750, "b pale", "a tensor over the pool's memory"),
        ("row", 196, 350, 750, "b pale", "a view: the same memory"),
    )
    for name, y, start, end, kind, label in rows:
        picture.text(78, y + 5, name, at="end", bold="bold")
        picture.box(start, y - 17, end - start, 34, kind, label=label)
    picture.text(78, 251, "slot", at="end", bold="bold")
    picture.box(90, 229, 430, 34, "c", label="leased")
    picture.box(520, 229, 230, 34, "c pale", label="held by aliases")
    picture.box(750, 229, 180, 34, "card", label="evictable")
    picture.text(90, 300, "statistics().tiers[0].held counts slots that only aliases hold.", "soft", size=13)
    words = "A write through an alias after its WRITE lease may be lost: a lease is the right to write, an alias keeps memory."
    picture.text(90, 322, words, "soft", size=13)
    return picture.made()


def store_folder() -> str:
    """The files of a store, and what two commits refer to."""
    picture = Picture(
        960,
        416,
        "A store's folder and its commits",
        "manifest.6 and manifest.7 are commits. Both refer to the extent of a in data.0; b was changed between them and lies "
        "in two places. An extent that no kept commit refers to is used again.",
    )
    picture.text(30, 34, "state/", bold="bold", size=16)
    manifests = ((60, "manifest.6", "commit 6: names, places, checksums"), (160, "manifest.7", "commit 7, the newest"))
    for y, name, words in manifests:
        picture.box(30, y, 300, 76, "card")
        picture.code(46, y + 28, name, size=15)
        picture.text(46, y + 54, words, "soft", size=13)
    picture.box(30, 262, 300, 76, "card")
    picture.code(46, 290, "reader.03ba8c1a", size=15)
    picture.text(46, 316, "a pin: a process reads commit 7", "soft", size=13)
    picture.text(450, 34, "data.0", bold="bold", size=16)
    extents = (
        (60, "a", "a", "the same in both"),
        (112, "b", "b", "b as of commit 6"),
        (164, "card", "free", "of an older commit: used again next"),
        (216, "c", "b", "b as of commit 7"),
        (268, "d pale", "c", "put after commit 7: lost unless committed"),
        (320, "card", "free", "the file grows in steps"),
    )
    for y, kind, label, words in extents:
        picture.box(450, y, 130, 46, kind, label=label)
        picture.text(596, y + 28, words, "soft", size=13)
    for start, end in (((332, 90), (446, 80)), ((332, 104), (446, 132)), ((332, 186), (446, 92)), ((332, 204), (446, 236))):
        picture.arrow(start, end)
    words = "A commit writes to free extents, syncs data.0, and renames its manifest into place. keep=2 keeps two commits."
    picture.text(30, 396, words, "soft", size=13)
    return picture.made()


PICTURES: dict[str, Callable[[], str]] = {
    "memory-by-size": memory_by_size,
    "time-by-budget": time_by_budget,
    "training-step": training_step,
    "lease-and-alias": lease_and_alias,
    "store-folder": store_folder,
    "throughput-by-size": throughput_by_size,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a picture is out of date")
    parser.add_argument("names", nargs="*", help="pictures (default: all)")
    options = parser.parse_args()
    old = 0
    for name in options.names or PICTURES:
        path, made = ROOT / "docs" / "images" / f"{name}.svg", PICTURES[name]()
        if not options.check:
            path.write_text(made)
        elif not path.exists() or path.read_text() != made:
            print(f"{path.relative_to(ROOT)} is out of date: run .venv/bin/python docs/make_pictures.py, and commit it")
            old = 1
    return old


if __name__ == "__main__":
    sys.exit(main())
