"""Plugin of pytest: write what became of each test as lines of JSON to the file that ``TIERED_OUTCOMES`` names.

``TIERED_ENGAGED`` names a file that a shim makes longer whenever a client put something into a store (``engaged``), also in
child processes; a test during which it grew has "engaged". The file is written as tests end, so that a crash loses nothing.
Of so many tests as ``TIERED_ONE_IN`` says one is run.
This module, and the others of this folder, stand for themselves: suites of clients have a package ``tests`` of their own.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import pytest

_before = 0


def engaged() -> None:
    """Say that the present test has something in a store."""
    with open(os.environ["TIERED_ENGAGED"], "ab") as file:
        file.write(b".")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    one_in = int(os.environ.get("TIERED_ONE_IN", "1"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.rpartition("/")[2].encode()) % one_in == 0]


def _size() -> int:
    path = os.environ.get("TIERED_ENGAGED", "")
    return os.path.getsize(path) if os.path.exists(path) else 0


def _write(line: dict[str, Any]) -> None:
    with open(os.environ["TIERED_OUTCOMES"], "a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    global _before
    _before = _size()
    _write({"test": nodeid, "outcome": "began"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        what = (
            report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", str(report.longrepr or ""))
        )
        _write({"test": report.nodeid, "outcome": report.outcome, "what": what, "engaged": _size() > _before})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed", "what": str(report.longrepr), "engaged": False})
