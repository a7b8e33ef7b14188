"""``bench/peers.py``: our side of it, and what it makes of answers. The peer itself is not installed here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import peers
from tests import programs


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers; one under strace has an interpreter of its own all the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # they are given an environment
    begin = {"run": programs.run, "Popen": programs.Popen}
    own = {name: getattr(subprocess, name) for name in ("PIPE", "CompletedProcess", "TimeoutExpired")}
    monkeypatch.setattr(peers, "subprocess", SimpleNamespace(**begin, **own))


def suffered(name: str, tmp_path: Path) -> str:
    fault = next(fault for fault in peers.FAULTS if name in fault.name)
    if fault.inject and shutil.which("strace") is None:
        pytest.skip("needs strace")
    told = peers.suffer(peers.ours(), fault, str(tmp_path))
    assert not list(tmp_path.iterdir())
    return told


def test_without_a_fault(tmp_path: Path) -> None:
    assert suffered("no fault", tmp_path) == "the right bytes (get: a tensor)"


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    told = suffered("flipped", tmp_path)
    assert told.startswith("CorruptionError: wrong checksum in tensor 'it', DIR/")
    assert told.endswith("Another tensor then: right")


@pytest.mark.soak
def test_a_short_read_is_found(tmp_path: Path) -> None:
    told = suffered("short read", tmp_path)
    assert told == "the fault did not fire" or told.startswith("ShortTransfer: "), told


@pytest.mark.parametrize(
    ("code", "out", "errors", "told"),
    [
        (0, 'noise\n{"returned": "x", "wrong_bytes": 0, "bytes": 9}\n', "", "the right bytes (x)"),
        (0, '{"returned": "x", "wrong_bytes": 7, "bytes": 9}\n', "", "SUCCESS, and 7 of 9 bytes are wrong (x)"),
        (0, '{"raised": "ReadError", "says": "/d/it", "other": "right"}', "", "ReadError: DIR/it. Another tensor then: right"),
        (134, "", "x\n/a/b.c:1: Assertion `no' failed.\n", "the process ended with signal 6: b.c:1: Assertion `no' failed."),
        (-11, "", "", "the process ended with signal 11: "),
        (1, "", "cannot\n", "the process ended with 1: cannot"),
    ],
)
def test_what_is_told(code: int, out: str, errors: str, told: str) -> None:
    assert peers._told(subprocess.CompletedProcess([], code, out, errors), "/d") == told


def test_a_folder_that_is_something_else_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(peers.Unavailable, match="is no virtual environment and not empty"):
        peers.peer(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
