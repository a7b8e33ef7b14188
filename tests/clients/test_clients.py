"""The harness of clients' suites, on a suite of three tests: what it counts, and when it fails. The suites need checkouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import __main__ as command
from tests.clients import suites
from tests.clients.differences import DIFFERENCES, Difference

SUITE = """import client

def test_passes():
    client.place = "used"

def test_fails_in_memory():
    assert client.VALUE == 2

def test_differs():
    assert client.WHERE == "memory", "elsewhere"

def test_crashes_there():
    client.leave()
"""
CLIENT = """import os

VALUE, WHERE = 1, "memory"

def leave():
    if WHERE != "memory":
        os._exit(3)
"""
SHIM = """import client
import pytest
from tiered_outcomes import engaged

client.WHERE = "store"

@pytest.fixture(autouse=True)
def _use(request):
    if request.node.name == "test_passes":
        engaged()
"""


def test_without_a_checkout_every_suite_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    said = capsys.readouterr().out
    for suite in suites.SUITES:
        assert f"{suite.name}: skipped: no checkout\n" in said


def test_what_it_counts_and_that_a_difference_without_a_reason_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "client.py").write_text(CLIENT)
    (tmp_path / "src" / "client_shim.py").write_text(SHIM)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(SUITE)
    (tmp_path / "VERSION").write_text("1.2.3\n")
    suite = suites.Suite("fake", "accelerate", ("tests/test_it.py",), "client_shim", version=("VERSION", r"(\S+)"))
    known = (
        Difference("fake", "::test_differs", "elsewhere", "it asks where values are"),
        Difference("fake", "::test_crashes_there", "another message", "not this"),
        Difference("other", "*", "", "not this"),
    )
    result = suites.run(suite, tmp_path, limit=300, known=known)
    assert result.version == "1.2.3"
    assert [test.rpartition("::")[2] for test in result.passed] == ["test_passes", "test_differs", "test_crashes_there"]
    assert [test.rpartition("::")[2] for test in result.same] == ["test_passes"]
    assert [result.here[test].engaged for test in result.same] == [True]
    assert result.differ["tests/test_it.py::test_differs"][1] == "it asks where values are"
    assert result.unexplained == {"tests/test_it.py::test_crashes_there": "ended: its process ended"}
    said = command.page([result])
    assert "| fake | 1.2.3 | 3 | 1 failed | 1 | 1 |" in said
    assert "NO REASON: ended: its process ended" in said
    assert "assert 1 == 2" in said, "what fails in memory is shown, and is no difference"

    monkeypatch.setattr(command, "SUITES", (suite,))
    monkeypatch.setattr(command, "run", lambda *given, **options: result)
    assert command.main(["--accelerate", str(tmp_path)]) == 1
    result.differ["tests/test_it.py::test_crashes_there"] = ("ended", "a reason")
    assert command.main(["--accelerate", str(tmp_path)]) == 0
    capsys.readouterr()


def test_every_difference_is_of_a_suite_and_has_a_reason() -> None:
    for one in DIFFERENCES:
        assert one.suite in [suite.name for suite in suites.SUITES]
        assert one.shows, f"{one.tests}: without a part of the message every failure of the test is explained"
        assert one.reason
