"""Sums up what tests of faults counted, wherever they ran (pytest -n runs them in processes of their own); and what is there
before the first test, garbage collections leave out."""

from __future__ import annotations

import gc
import re
from collections import Counter

import pytest

from tests.stress.tally import TALLY


def pytest_collection_finish() -> None:
    """Most of a collection is otherwise going through all that torch has made: a tenth of a second, in hundreds of tests."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counted: dict[str, Counter[str]] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "teardown":
            for tally in (value for name, value in report.user_properties if name == TALLY):
                counted.setdefault(tally["what"], Counter()).update({n: tally[n] for n in ("injected", "fired", "runs")})
    for what in sorted(counted, key=lambda what: (int(re.split(r"\D", what)[0]), what)):
        found = counted[what]
        if found["injected"]:
            terminalreporter.write_line(
                f"faults: promise {what}: {found['injected']:,} injected, {found['fired']:,} fired"
            )
        if found["runs"]:
            terminalreporter.write_line(f"runs: promise {what}: {found['runs']:,} passed")
