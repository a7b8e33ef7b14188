"""Run test suites of clients as they are, and with their tensors in a store: ``python -m tests.clients``.

Each option names the folder of a checkout, of which nothing is kept here; a suite without one is skipped. A suite runs twice,
in processes of its own: in memory, and with a shim of ``tests/clients/plugins`` that has the client use a store. The exit code
is 1 when a test passes in memory, does not pass here, and has no reason in ``tests/clients/differences.py``.

    python -m tests.clients --accelerate DIR --lightning DIR --deepspeed DIR --transformers DIR --peft DIR
    python -m tests.clients --deepspeed DIR --suite deepspeed-ds_initialize --write bench/results/clients_2026-11-27.md

The suites import, beside what ``make test`` installs: parameterized (accelerate, transformers), scikit-learn and cloudpickle
(Lightning), einops, hjson, ninja, py-cpuinfo and msgpack (DeepSpeed, which runs from its checkout), diffusers (peft). Sources
of the client are those of the checkout, not of the environment. Source distributions of transformers have no ``tests/trainer``,
and those of peft no ``tests/conftest.py``: checkouts have.
Python's own suite for mappings runs in ``tests/store/test_mapping.py``.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.clients.suites import SUITES, Result, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n")[0])
    for client in dict.fromkeys(suite.client for suite in SUITES):
        parser.add_argument(f"--{client}", type=Path, metavar="DIR", help=f"a checkout of {client}")
    parser.add_argument("--suite", action="append", choices=[suite.name for suite in SUITES], help="only this one")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of each run of a suite (default: 1800)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table to a file, too")
    given = parser.parse_args(arguments)
    chosen = [suite for suite in SUITES if not given.suite or suite.name in given.suite]
    for suite in chosen:
        folder = getattr(given, suite.client)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{suite.client}: there is no folder {folder}")
    results = []
    for suite in chosen:
        folder = getattr(given, suite.client)
        results.append(run(suite, None if folder is None else folder.absolute(), limit=given.limit))
        print(line(results[-1]), flush=True)
    text = page(results)
    print(text)
    if given.write is not None:
        given.write.write_text(text)
    return 1 if any(result.unexplained for result in results) else 0


def line(result: Result) -> str:
    """Return what a suite showed, in one line."""
    if result.skipped:
        return f"{result.suite}: skipped: {result.skipped}"
    stored = sum(result.here[test].engaged for test in result.same)
    return (
        f"{result.suite} {result.version}: {len(result.passed)} pass in memory, {len(result.same)} of these here "
        f"({stored} with a store), {len(result.differ) - len(result.unexplained)} differ with a reason, "
        f"{len(result.unexplained)} without"
    )


def page(results: Sequence[Result]) -> str:
    """Return the tables in Markdown."""
    rows = []
    for result in results:
        if result.skipped:
            rows.append(f"| {result.suite} | {result.version} | not run: {result.skipped} | | | |")
            continue
        stored = sum(result.here[test].engaged for test in result.same)
        others = Counter(found.outcome for found in result.in_memory.values() if found.outcome != "passed")
        rest = ", ".join(f"{count} {outcome}" for outcome, count in sorted(others.items())) or "none"
        rows.append(f"| {result.suite} | {result.version} | {len(result.passed)} | {rest} | {len(result.same)} | {stored} |")
    parts = [
        "# Test suites of clients",
        f"Made by `python -m tests.clients` with Python {platform.python_version()}, torch {version('torch')}.",
        "| Suite | Version | Pass in memory | Others in memory | Of those that pass, pass here | Of these, with a store |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(rows),
    ]
    for result in results:
        if result.stopped:
            runs = " and ".join(f"the run {run}" for run in result.stopped)
            parts.append(f"{result.suite}: the limit of time ended {runs}; tests that it did not come to are not run.")
        if result.differ:
            reasons: dict[str, list[str]] = {}
            for test, (what, reason) in result.differ.items():
                reasons.setdefault(reason or f"NO REASON: {_cell(what)}", []).append(test.rpartition("/")[2])
            listed = "\n".join(f"| {reason} | {len(found)} | {_tests(found)} |" for reason, found in reasons.items())
            parts.append(
                f"## {result.suite} {result.version}: what differs\n\n| Reason | Tests | Which |\n|---|---|---|\n{listed}"
            )
        failed = {test: found for test, found in result.in_memory.items() if found.outcome in ("failed", "ended")}
        if failed:
            kinds = Counter(_cell(found.what) for found in failed.values())
            listed = "\n".join(f"| {what} | {count} |" for what, count in kinds.most_common())
            parts.append(f"## {result.suite} {result.version}: what fails in memory\n\n| Shows | Tests |\n|---|---|\n{listed}")
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """Return a message as part of a row."""
    first = next((one for one in text.splitlines() if one.strip()), "")
    return first.replace("|", "\\|")[:200]


def _tests(tests: Sequence[str]) -> str:
    return ", ".join(f"`{test}`".replace("|", "\\|") for test in tests)


if __name__ == "__main__":
    sys.exit(main())
