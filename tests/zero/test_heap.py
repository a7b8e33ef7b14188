"""When memory that was freed goes back to the system."""

from __future__ import annotations

import pytest

from tiered.zero import heap
from tiered.zero.heap import MOST, Trimmer

MIB = 1 << 20


class Process:
    """What a process has, and what trimming would give back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
        self.resident, self.kept, self.trims = resident, 0, 0
        self.left = 100 * MOST  # what it could still take
        monkeypatch.setattr(Trimmer, "_resident", lambda trimmer: self.resident + self.kept)
        monkeypatch.setattr(heap, "headroom", lambda: self.left)

    def trimmer(self, every: int) -> Trimmer:
        made = Trimmer(every)
        made._trim = self.trim
        return made

    def trim(self, pad: int) -> None:
        self.trims += 1
        self.kept = 0


def test_what_comes_and_goes_within_what_is_kept_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 400 * MIB)
    trimmer = process.trimmer(8 * MIB)
    process.kept = 100 * MIB  # a quarter
    for _ in range(100):
        trimmer.passed(8 * MIB)
    assert process.trims == 0
    process.kept += 1
    trimmer.passed(7 * MIB)
    assert process.trims == 0, "it looks after 8 MiB"
    trimmer.passed(MIB)
    assert (process.trims, process.kept) == (1, 0)


def test_what_grew_for_good_is_trimmed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 400 * MIB)
    trimmer = process.trimmer(8 * MIB)
    process.resident = 1000 * MIB
    for _ in range(10):
        trimmer.passed(8 * MIB)
    assert process.trims == 1
    process.resident = 400 * MIB  # and comes back to where it was
    process.kept = 800 * MIB
    trimmer.passed(8 * MIB)
    assert process.trims == 1
    process.kept = 900 * MIB
    trimmer.passed(8 * MIB)
    assert process.trims == 2


def test_what_a_step_takes_again_is_trimmed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its activations, which are there in the middle of each step."""
    process = Process(monkeypatch, 400 * MIB)
    trimmer = process.trimmer(8 * MIB)
    for _ in range(10):
        process.kept = 600 * MIB
        trimmer.passed(8 * MIB)
        process.kept = 100 * MIB
        trimmer.passed(8 * MIB)
    assert process.trims == 1
    process.kept = 600 * MIB + 250 * MIB
    trimmer.passed(8 * MIB)
    assert process.trims == 1, "a quarter more than that"
    process.kept += MIB
    trimmer.passed(8 * MIB)
    assert process.trims == 2


def test_what_a_step_takes_again_is_trimmed_each_time_where_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 400 * MIB)
    trimmer = process.trimmer(8 * MIB)
    process.left = 10 * MIB
    for turn in range(3):
        process.kept = 390 * MIB
        trimmer.passed(8 * MIB)
        assert (process.trims, process.kept) == (turn + 1, 0)


def test_a_large_process_keeps_no_more_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MOST)
    trimmer = process.trimmer(8 * MIB)
    process.kept = MOST
    trimmer.passed(8 * MIB)
    assert process.trims == 0
    process.kept += 1
    trimmer.passed(8 * MIB)
    assert process.trims == 1


def test_a_process_that_has_little_left_keeps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 400 * MIB)
    trimmer = process.trimmer(8 * MIB)
    process.kept, process.left = 20 * MIB, 60 * MIB  # of the 80 MiB that it had left
    trimmer.passed(8 * MIB)
    assert process.trims == 0
    process.kept, process.left = 21 * MIB, 59 * MIB
    trimmer.passed(8 * MIB)
    assert process.trims == 1


def test_a_large_share_is_looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 40 * MIB)
    trimmer = process.trimmer(64 * MIB)
    process.kept = 65 * MIB
    trimmer.passed(63 * MIB)
    assert process.trims == 0
    trimmer.passed(MIB)
    assert process.trims == 1


def test_it_asks_the_system() -> None:
    trimmer = Trimmer(0)
    trimmer.trim()
    assert trimmer._trim is None or trimmer._most > 0
