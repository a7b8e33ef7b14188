"""Compare what people do with a torch model: in memory, and on the same model paged.

Each row is run twice, with the same seed: in memory, with ``torch.optim.AdamW(fused=True)`` where something is trained, and on
a model that went through ``zero.page`` with the smallest budget that it allows, with ``zero.AdamW``. All that a row shows
(losses, norms, outputs, parameters, texts) is compared bit for bit:

    identical       equal bits
    clear error     the paged run raised a ``TieredError``, which says what to do (or NumPy's, of a read-only array)
    stated limit    no numbers, but a kind of object differs, as docs/limits.md says
    wrong           anything else: other values, another exception, a crash, a hang

A row runs in a process of its own, with at most 2 GiB. The exit code is 1 when a row is wrong or not valid (its side in memory
fails), and when a row was identical according to the file of ``--json`` and is so no longer. ``--check``
examines the rows instead: in memory twice a row must show the same, and with other values of the parameters something else.

    python -m bench.compatibility
    python -m bench.compatibility --group gradients --row 'clip_grad_norm_*'
    python -m bench.compatibility --write docs/compatibility.md --json compatibility.json
    python -m bench.compatibility --tier hbm --json hbm.json

With ``--tier hbm`` the store has HBM, for which host memory stands; with ``--tier "fake device"`` both sides are on a device
that torch takes for another one than the CPU, and with ``--tier cuda`` on a CUDA device, where parameters are updated, too,
and a row may have 8 GiB of host memory. What the file of ``--json`` has of other rows stays in it, and comes into the page of
``--write``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from textwrap import indent

os.environ.setdefault("OMP_NUM_THREADS", "1")  # rows are forked: no pool of threads may exist before

import numpy.random  # noqa: F401  # here and the next one: else each row would import them
import torch
import torch._dynamo

from bench.compatible.judge import CLEAR, IDENTICAL, INVALID, LIMIT, MISSING, WRONG, Outcome, judge
from bench.compatible.side import ROWS, TIERS, Row

__all__ = ["main"]

NAMES = {"hugging_face": "Hugging Face", "peft": "PEFT", "trl": "TRL"}
GROUPS = {
    "families": "Model families of transformers, three steps of training, with dropout",
    "reads": "Parameters read outside forward",
    "writes": "Parameters written, and trained on",
    "gradients": "Gradients between backward and step",
    "optimizers": "Arguments of the optimizer, schedulers, other optimizers",
    "hugging_face": "Trainer, accelerate, generate, save_pretrained",
    "generation": "generate() with a model that was imported, in a store that is open for reading",
    "peft": "PEFT",
    "trl": "TRL",
    "tracing": "torch.compile, torch.export, torch.func",
    "lightning": "Lightning",
}
"""Each is a module of ``bench.compatible``."""

VERDICTS = (IDENTICAL, CLEAR, LIMIT, WRONG, INVALID, MISSING)
DEVICE_GROUPS = ("reads", "writes", "gradients", "optimizers", "generation")
"""Those that are run where parameters compute elsewhere."""
ELSEWHERE = {
    "hbm": ("HBM", "The same rows, in a store with `hbm=` for which host memory stands (`--tier hbm`)."),
    "fake device": (
        "A device of its own",
        "The same rows on a device that torch takes for another one than the CPU, both sides (`--tier 'fake device'`). "
        "A row that is not valid fails there in memory, too.",
    ),
    "cuda": (
        "A CUDA device",
        "The same rows on a GPU, both sides (`--tier cuda`), with `update_tier=\"hbm\"` and torch's deterministic algorithms. "
        "A row that is not valid fails there in memory, too.",
    ),
}
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "lightning")


def rows_of(groups: Iterable[str], pattern: str) -> list[Row]:
    """Return the rows of ``groups`` whose name matches ``pattern``, in order."""
    for group in groups:
        importlib.import_module(f"bench.compatible.{group}")
    wanted = set(groups)
    return [row for row in ROWS if row.group in wanted and fnmatchcase(row.name, pattern)]


def missing(row: Row) -> str:
    """Import what ``row`` needs, before anything is forked, and return what cannot be imported."""
    for name in row.needs:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name}: {error}"
    return ""


def run(rows: Sequence[Row], options: argparse.Namespace) -> list[Outcome]:
    """Judge each of ``rows``, with a line of progress. Prints those that fail, or all."""
    found: list[Outcome] = []
    start = time.perf_counter()
    for number, row in enumerate(rows, 1):
        progress(f"{number}/{len(rows)}  {time.perf_counter() - start:.0f} s  {row.group}: {row.name}")
        lacking = missing(row)
        if lacking:
            found.append(Outcome(row.group, row.name, MISSING, lacking, 0.0, tier=options.tier))
            if options.verbose:
                print(line(found[-1], options.verbose), flush=True)
            continue
        judged = partial(judge, row, check=options.check, folder=options.dir, tier=options.tier)
        outcome = judged(timeout=options.timeout)
        if outcome.verdict == INVALID and outcome.detail.startswith("no result"):  # in memory: the machine is busy
            outcome = judged(timeout=2 * options.timeout)
        found.append(outcome)
        if options.verbose or found[-1].verdict not in (IDENTICAL, CLEAR, LIMIT):
            progress("")
            print(line(found[-1], options.verbose), flush=True)
    progress("")
    return found


def earlier_in(file: Path) -> list[Outcome]:
    """Return the outcomes that a run before has written into ``file``."""
    return [Outcome(**{"detail": "", **one}) for one in json.loads(file.read_text())["rows"]] if file.exists() else []


def lost(found: Sequence[Outcome], earlier: Sequence[Outcome]) -> list[str]:
    """Return a line for each row that was identical ``earlier`` and now is not."""
    identical = {(one.tier, one.group, one.name) for one in earlier if one.verdict == IDENTICAL}
    return [
        f"no longer identical: {one.group}: {one.name}: {one.verdict}: {one.detail}"
        for one in found
        if (one.tier, one.group, one.name) in identical and one.verdict not in (IDENTICAL, MISSING)
    ]


def with_earlier(found: Sequence[Outcome], earlier: Sequence[Outcome]) -> list[Outcome]:
    """Return ``found`` with what ``earlier`` has of other rows that there still are, in the order of the rows."""
    rows_of(GROUPS, "*")
    order = {(row.group, row.name): number for number, row in enumerate(ROWS)}
    every: dict[tuple[str, str, str], Outcome] = {}
    for one in (*earlier, *found):
        if (one.group, one.name) in order:
            every[one.tier, one.group, one.name] = one
    groups = list(GROUPS)
    return sorted(every.values(), key=lambda one: (TIERS.index(one.tier), groups.index(one.group), order[one.group, one.name]))


def line(found: Outcome, verbose: bool) -> str:
    """Return what is printed of an outcome."""
    if not verbose:
        return f"{found.verdict}: {found.group}: {found.name}: {found.detail}"
    text = (
        f"{found.verdict:12} {found.seconds:6.1f} s  {found.read >> 10:6} KiB read  {found.group}: {found.name}  {found.detail}"
    )
    return text + (f"\n{indent(found.trace.rstrip(), '    ')}" if found.trace else "")


def progress(text: str) -> None:
    """Show ``text`` in place of the last such line, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:120]}", end="", file=sys.stderr, flush=True)


def counts(found: Sequence[Outcome]) -> str:
    """Return a table of how many rows of each group came out how."""
    shown = [verdict for verdict in VERDICTS if any(one.verdict == verdict for one in found)]
    lines = [f"{'':14}" + "".join(f"{verdict:>14}" for verdict in shown)]
    for group in (*dict.fromkeys(one.group for one in found), None):
        tally = Counter(one.verdict for one in found if group in (one.group, None))
        lines.append(f"{group or 'all':14}" + "".join(f"{tally[verdict]:14}" for verdict in shown))
    return "\n".join(lines)


def versions() -> str:
    """Return the versions of the packages that rows use."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"Python {sys.version.split()[0]}, {', '.join(found)}"


@cache
def commit() -> str:
    """Return the commit that is checked out, or an empty text where there is none."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


def as_json(found: Sequence[Outcome]) -> str:
    """Return what ``--json`` writes, a line for each outcome. Only those that failed have their traces."""
    rows = [asdict(one) | ({} if one.verdict in (WRONG, INVALID) else {"trace": ""}) for one in found]
    lines = ",\n".join(json.dumps({key: value for key, value in row.items() if value != ""}) for row in rows)
    return f'{{"versions": {json.dumps(versions())}, "rows": [\n{lines}\n]}}\n'


def document(found: Sequence[Outcome]) -> str:
    """Return the page of documentation: a table for each group, with its counts, and what is otherwise in other tiers."""
    here = [one for one in found if one.tier == TIERS[0]]
    tally = Counter(one.verdict for one in here)
    lines = [
        "# Compatibility",
        "",
        "What people do with a torch model, on a paged one. Each row is run twice: in memory, with",
        "`torch.optim.AdamW(fused=True)` where something is trained, and on the same model after `zero.page`, in the smallest",
        "budget that it allows, with `zero.AdamW`. What the row computes is compared bit for bit.",
        "",
        "- **identical**: equal bits.",
        "- **clear error**: a `TieredError`, whose text is shown; or NumPy's own where an array is read-only.",
        "- **stated limit**: no numbers differ, but what kind of object something is; [limits](limits.md) has it.",
        "- **wrong**: anything else: other values, another exception, a crash, a hang.",
        "",
        f"Made by `python -m bench.compatibility --write docs/compatibility.md` with {versions()}, on a CPU.",
        "",
        f"{len(here)} rows: {_counted(tally)}. Commits of the rows: {', '.join(sorted({one.commit for one in found} - {''}))}.",
    ]
    lines += ["", "| | rows | " + " | ".join(VERDICTS[:4]) + " |", "|---|---|---|---|---|---|"]
    for group in dict.fromkeys(one.group for one in here):
        part = Counter(one.verdict for one in here if one.group == group)
        numbers = " | ".join(str(part[verdict]) for verdict in VERDICTS[:4])
        lines.append(f"| [{GROUPS[group]}](#{group.replace('_', '-')}) | {part.total()} | {numbers} |")
    lines += ["", "torch's own databases of operations, modules and optimizers, run the same way:", "", *_databases()]
    for group in dict.fromkeys(one.group for one in here):
        lines += ["", f"## {NAMES.get(group, group.capitalize())}", "", f"{GROUPS[group]}.", ""]
        lines += _table(one for one in here if one.group == group)
    return "\n".join(lines + _elsewhere(found)) + "\n"


def _databases() -> list[str]:
    """Return the first table of the newest page of results of torch's databases, and where that is."""
    page = max((Path(__file__).parent / "results").glob("torch_databases_*.md"))
    lines = page.read_text().splitlines()
    table = itertools.takewhile(lambda line: line, itertools.dropwhile(lambda line: not line.startswith("|"), lines))
    return [*table, "", f"[How it was made](../bench/results/{page.name})."]


def _elsewhere(found: Sequence[Outcome]) -> list[str]:
    """Return what became of rows in other tiers: counts, and the rows that came out otherwise than in DRAM."""
    before = {(one.group, one.name): one.verdict for one in found if one.tier == TIERS[0]}
    lines: list[str] = []
    for tier, what in ELSEWHERE.items():
        there = [one for one in found if one.tier == tier]
        if there:
            lines += ["", f"## {what[0]}", "", f"{what[1]} {len(there)} rows: {_counted(Counter(o.verdict for o in there))}."]
            others = [one for one in there if one.verdict != before.get((one.group, one.name))]
            if others:
                lines += ["", "Those that came out otherwise than above:", "", *_table(others, groups=True)]
    return lines


def _counted(tally: Counter[str]) -> str:
    return ", ".join(f"{tally[verdict]} {verdict}" for verdict in VERDICTS if tally[verdict] or verdict == WRONG)


def _table(found: Iterable[Outcome], *, groups: bool = False) -> list[str]:
    lines = ["| row | verdict | |", "|---|---|---|"]
    for one in found:
        verdict = one.verdict if one.verdict == IDENTICAL else f"**{one.verdict}**"
        name = f"{one.group}: {one.name}" if groups else one.name
        lines.append(f"| {_cell(name)} | {verdict} | {_cell(one.detail)} |")
    return lines


def _cell(text: str) -> str:
    for special in "\\|_*`<[":
        text = text.replace(special, "\\" + special)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parsed(arguments)
    torch.set_num_threads(1)
    on_device = options.tier in ("fake device", "cuda")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of products that are the same each time
    rows = rows_of(options.group or (GROUPS if options.tier == TIERS[0] else DEVICE_GROUPS), options.row)
    part, parts = options.part
    rows = rows[part - 1 :: parts]
    if options.list:
        print("\n".join(f"{row.group}: {row.name}" for row in rows))
        return 0
    if not rows:
        print("no row has such a name: --list shows them", file=sys.stderr)
        return 2
    commit()  # as it is now
    with fake_device() if options.tier == "fake device" else nullcontext():
        found = run(rows, options)
    print(counts(found))
    print(versions())
    found = [replace(one, commit=commit()) for one in found]
    earlier = earlier_in(Path(options.json)) if options.json else []
    every, worse = with_earlier(found, earlier), lost(found, earlier)
    print("".join(f"{row}\n" for row in worse), end="")
    if options.json:
        Path(options.json).write_text(as_json(every))
    if options.write:
        Path(options.write).write_text(document(every))
    return int(bool(worse) or any(one.verdict == WRONG or (one.verdict == INVALID and not on_device) for one in found))


@contextmanager
def fake_device() -> Iterator[None]:
    """Have a device that torch takes for another one than the CPU: built on demand, of the tests."""
    import pytest

    from tests import fake_device

    with pytest.MonkeyPatch.context() as patch:
        fake_device.installed(patch)
        yield


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compatibility", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", action="append", choices=GROUPS, help="rows of this group only; may be given several times")
    parser.add_argument("--row", default="*", metavar="GLOB", help="rows whose name matches, as a shell does")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth of the rows, from the Kth on: for N processes")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and run none")
    parser.add_argument("--check", action="store_true", help="examine the rows themselves, in memory")
    parser.add_argument("--tier", choices=TIERS, default=TIERS[0], help="where paged parameters compute (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds that a row may take (default: 60)")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where stores are made (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes into it, with traces of those that failed")
    parser.add_argument("--write", metavar="FILE", help="write the page of documentation")
    parser.add_argument("--verbose", action="store_true", help="print a line for each row as it ends, and traces")
    options = parser.parse_args(arguments)
    try:
        part, parts = map(int, options.part.split("/"))
    except ValueError:
        part = parts = 0
    if not 1 <= part <= parts:
        parser.error(f"--part {options.part} is no part: --part 2/8 is the second of eight")
    options.part = part, parts
    return options


if __name__ == "__main__":
    sys.exit(main())
