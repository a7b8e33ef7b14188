"""Make a report's page: one HTML file without anything from elsewhere, from the JSON of a training.

Whatever stands in the JSON is data: it is checked against a schema, written with every character escaped that could end a
script, and shown by the page as text, never as markup. The page's own rule (Content-Security-Policy) forbids it to load
anything.
"""

from __future__ import annotations

import html
import json
import math
import os
import statistics
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tiered.errors import MisuseError, shown
from tiered.format.foreign.documents import json_of, problem_of
from tiered.types import VERSION, format_size

__all__ = ["MARK", "page", "read_run", "refuse_foreign", "write_page"]

MARK = "<!-- tiered report "
"""What a page of this begins with, after the document type: other files are never replaced."""


_Amount = Annotated[float, msgspec.Meta(ge=0, le=2.0**80)]
"""Bytes, seconds or tokens: sums of them are finite."""
_Value = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class _Loss(msgspec.Struct):
    all: list[_Value | None] = []


class _Losses(msgspec.Struct):
    steps: list[int] = []
    values: list[_Value | None] = []


class _Series(msgspec.Struct, omit_defaults=True):
    step: list[int]
    seconds: list[_Amount]
    read: list[_Amount]
    written: list[_Amount]
    waited_reads: list[_Amount]
    waited_room: list[_Amount]
    update: list[_Amount]
    compute: list[_Amount]
    memory_base: list[_Amount]
    memory_pool: list[_Amount]
    memory_beyond: list[_Amount]
    tokens: list[_Amount] | None = None


class _Row(msgspec.Struct, omit_defaults=True):
    name: str
    lanes: int
    items: list[tuple[int, float, float, str, str, int]] | None = None
    level: list[tuple[float, float]] | None = None


class _Timeline(msgspec.Struct):
    seconds: float
    steps: list[tuple[str, float, float]]
    rows: list[_Row]
    left_out: int = 0


class _ShownPlan(msgspec.Struct):
    ways: dict[str, str]
    why: str
    predicted: float = 0.0
    measured: float = 0.0
    memory: int = 0
    planned: int = 0


class _Predicted(msgspec.Struct):
    """What ``tiered.plan`` said: bytes and seconds of a step, bytes of memory. ``by`` is in words."""

    seconds: float | None = None
    read: float | None = None
    written: float | None = None
    process: float | None = None
    activations: float | None = None
    waiting: float | None = None
    by: str = ""


class _Run(msgspec.Struct):
    """The parts of a training's JSON that the page looks into; all may be absent but for the losses."""

    loss: _Loss | None = None
    losses: _Losses | None = None
    series: _Series | None = None
    timeline: _Timeline | None = None
    plan: _ShownPlan | None = None
    predicted: _Predicted | None = None
    memory_limit: int | None = None
    peak_rss_bytes: int | None = None
    model: str = ""
    tiered: str = ""


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON of a training. Raises MisuseError for a file that cannot be read, or is none."""
    try:
        found = json_of(path)
    except MisuseError as error:
        raise MisuseError(f"{error}; write a report with tiered train --json FILE") from None
    if not isinstance(found, dict) or "tiered" not in found or not ({"loss", "losses"} & found.keys()):
        raise MisuseError(f"{shown(str(path), 1000)} is no report of tiered train: write one with tiered train --json FILE")
    return found


def page(run: Mapping[str, Any], name: str = "the report") -> str:
    """Return the page of a training as HTML. ``run`` is what ``tiered train --json`` writes, or ``RunRecord.as_json``, with
    what else the page is to list; ``name`` is said in errors. Raises MisuseError for values that are not those of a training.
    """
    name = shown(str(name), 1000)
    given = dict(run) if isinstance(run, Mapping) else run
    problem = problem_of(given) if isinstance(given, dict) else f"a {type(run).__name__} in place of a dict"
    if problem:
        raise MisuseError(f"{name} is not what a training writes: it has {problem}")
    clean = _finite(given)
    try:
        found = msgspec.convert(clean, _Run)
    except msgspec.ValidationError as error:
        raise MisuseError(f"{name} is not what a training writes: {shown(str(error), 300)}") from error
    _refuse_uneven(found, name)
    losses = found.losses
    if losses is None or not losses.steps:
        values = found.loss.all if found.loss is not None else []
        losses = _Losses(list(range(1, len(values) + 1)), values)
    title = found.model or "A training"
    listed = {key: value for key, value in clean.items() if key not in ("series", "timeline", "losses")}
    if isinstance(listed.get("loss"), dict):
        listed["loss"] = {key: value for key, value in listed["loss"].items() if key != "all"}
    data = {
        "title": title,
        "about": _about(found, losses),
        "tiles": _tiles(found, losses, clean),
        "losses": msgspec.to_builtins(losses),
        "series": None if found.series is None else msgspec.to_builtins(found.series),
        "timeline": None if found.timeline is None else msgspec.to_builtins(found.timeline),
        "plan": None if found.plan is None or not found.plan.why else msgspec.to_builtins(found.plan),
        "compared": _compared(found, clean),
        "predicted_by": found.predicted.by if found.predicted is not None else "",
        "run": listed,
        "footer": f"Made by tiered {VERSION}" + (f" from a training with {found.tiered}." if found.tiered else "."),
    }
    template = (files("tiered.data") / "report.html").read_text(encoding="utf-8")
    texts = {"__VERSION__": VERSION, "__TITLE__": html.escape(f"{title} - tiered"), "__DATA__": _escaped(data)}
    parts: list[str] = []
    for place, text in texts.items():
        before, mark, template = template.partition(place)
        assert mark, "the template has each place once, in this order"
        parts += before, text  # what is put in is not looked through: a model may be named as a place is
    return "".join((*parts, template))


def _finite(value: Any) -> Any:
    """Return ``value`` with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _escaped(value: Any) -> str:
    """Return JSON without a character that could end the script around it, or that a parser of HTML looks at."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _refuse_uneven(found: _Run, name: str) -> None:
    """Raise MisuseError where lists that belong together differ in length."""
    series, losses = found.series, found.losses
    if series is not None:
        columns = [getattr(series, field) for field in series.__struct_fields__]
        if not series.step or any(column is not None and len(column) != len(series.step) for column in columns):
            raise MisuseError(f"{name} is not what a training writes: its series have different lengths, or none")
    if losses is not None and len(losses.steps) != len(losses.values):
        values, steps = len(losses.values), len(losses.steps)
        raise MisuseError(f"{name} is not what a training writes: it has {values} losses of {steps} steps")
    for row in found.timeline.rows if found.timeline is not None else ():
        if row.lanes < 1 or (row.items is None) == (row.level is None):
            raise MisuseError(f"{name} is not what a training writes: the row {shown(row.name)!r} of its timeline is none")
    if found.timeline is not None and not found.timeline.seconds > 0:
        raise MisuseError(f"{name} is not what a training writes: its timeline has no length")


def _about(found: _Run, losses: _Losses) -> str:
    series = found.series
    parts = [f"{len(losses.steps):,} steps"]
    if series is not None:
        parts.append(f"{sum(series.seconds):,.0f} s recorded")
    return ", ".join(parts)


def _tiles(found: _Run, losses: _Losses, run: Mapping[str, Any]) -> list[list[str]]:
    """Return the figures at the top: name, value, unit, note."""
    tiles = []
    known = [value for value in losses.values if value is not None]
    if known:
        last = known[-5:]
        tiles.append(["Loss", f"{statistics.fmean(last):.4g}", "", f"mean of {len(last)}; {known[0]:.4g} at first"])
    series = found.series
    if series is not None:
        seconds = statistics.median(series.seconds)
        tiles.append(["A step", f"{seconds:.3g}", "s", f"median; {min(series.seconds):.3g} to {max(series.seconds):.3g}"])
        if series.tokens:
            rate = statistics.median(a / max(b, 1e-9) for a, b in zip(series.tokens, series.seconds, strict=True))
            tiles.append(["Throughput", f"{rate:,.3g}" if rate < 1000 else f"{rate:,.0f}", "tokens/s", "median of steps"])
        waited = sum(series.waited_reads) + sum(series.waited_room)
        share = waited / max(1e-9, sum(series.seconds))
        tiles.append(["Waiting", f"{share:.0%}".replace("%", " %"), "", "of the time, for the drive"])
        moved = statistics.median(a + b for a, b in zip(series.read, series.written, strict=True))
        tiles.append(["Drive", *format_size(round(moved)).split(" "), "a step, both ways"])
        most = max(a + b + c for a, b, c in zip(series.memory_base, series.memory_pool, series.memory_beyond, strict=True))
        limit = "" if found.memory_limit is None else f" of {format_size(found.memory_limit)}"
        tiles.append(["Memory", *format_size(round(most)).split(" "), f"at most{limit}"])
    elif found.peak_rss_bytes is not None:
        tiles.append(["Memory", *format_size(found.peak_rss_bytes).split(" "), "at most"])
        average = run.get("tokens_per_second")
        if isinstance(average, float | int):
            tiles.append(["Throughput", f"{average:,.0f}", "tokens/s", "on average"])
    return tiles


def _compared(found: _Run, run: Mapping[str, Any]) -> list[list[Any]]:
    """Return rows of what was predicted and measured: name, kind, predicted, measured."""
    rows: list[list[Any]] = []
    series, predicted, plan = found.series, found.predicted, found.plan
    if predicted is not None and series is not None:
        half = len(series.step) // 2  # later steps, whose order the store knows
        measured = {
            "a step": ("seconds", predicted.seconds, statistics.median(series.seconds[half:])),
            "of that, waiting": (
                "seconds",
                predicted.waiting,
                statistics.median(a + b for a, b in zip(series.waited_reads[half:], series.waited_room[half:], strict=True)),
            ),
            "read in a step": ("bytes", predicted.read, statistics.median(series.read[half:])),
            "written in a step": ("bytes", predicted.written, statistics.median(series.written[half:])),
            "memory of the process": ("bytes", predicted.process, found.peak_rss_bytes),
        }
        rows += [[name, *values] for name, values in measured.items() if values[1] is not None]
    if plan is not None and plan.predicted:
        rows.append(["a forward and backward, when activations were chosen", "seconds", plan.predicted, plan.measured or None])
    return rows


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Write a page. Raises MisuseError where that cannot be, or would replace a file that is no report of tiered."""
    refuse_foreign(path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def refuse_foreign(path: str | os.PathLike[str]) -> None:
    """Raise MisuseError where ``path`` is a file that is no report of tiered."""
    try:
        with Path(path).open("rb") as file:
            beginning = file.read(256)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise _unwritable(path, error) from error
    if beginning and MARK.encode() not in beginning:
        told = shown(str(path), 1000)
        raise MisuseError(f"{told} exists already and is no report of tiered, so it stays: name another file")


def _unwritable(path: str | os.PathLike[str], error: OSError | ValueError) -> MisuseError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return MisuseError(f"cannot write {shown(str(path), 1000)}: {why}; name another file")

