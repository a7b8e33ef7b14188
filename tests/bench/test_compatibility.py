"""What the comparison of a row's two sides notices, and what becomes of a row that fails, hangs or crashes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.compatible.judge import CLEAR, IDENTICAL, INVALID, WRONG, Outcome, difference, judge
from bench.compatible.side import Row, Side, frozen
from tiered import MisuseError

Function = Callable[[Side], object]


def judged(function: Function, folder: Path, *, timeout: float = 30.0, check: bool = False) -> Outcome:
    return judge(Row("group", "row", function), timeout=timeout, check=check, folder=str(folder))


def differing(left: object, right: object) -> str:
    return difference([("it", frozen(left))], [("it", frozen(right))])


def test_equal_bits_are_identical() -> None:
    for value in (torch.randn(3, 4), torch.tensor(2.5, dtype=torch.bfloat16), {"a": [1, "text", None, math.nan]}):
        assert differing(value, value) == ""


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        (torch.zeros(3), torch.tensor([0.0, 1e-45, 0.0]), "1 of 3 elements differ"),
        (torch.zeros(3), -torch.zeros(3), "differ"),
        (torch.zeros(3), torch.full((3,), math.nan), "3 of 3 elements are NaN"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64), "float64"),
        (torch.zeros(3), torch.zeros(1, 3), "(1, 3)"),
        (1.0, 1.0 + 2**-52, "in memory 1.0"),
        (1.0, 1, "int"),
        ("a", "b", "'b'"),
        ([1, 2], [1], "1 elements, in memory 2"),
        ({"a": 1}, {"b": 1}, "other keys"),
    ],
)
def test_a_planted_difference_is_noticed(left: object, right: object, text: str) -> None:
    assert text in differing(left, right)


def test_a_result_that_one_side_lacks_is_noticed() -> None:
    assert difference([("a", 1), ("b", 2)], [("a", 1)]) == "shows 1 results, in memory 2"


def test_what_is_shown_is_a_copy() -> None:
    value = torch.zeros(2)
    kept = frozen(value)
    value.add_(1)
    assert torch.equal(kept, torch.zeros(2))  # type: ignore[arg-type]


def test_each_verdict(tmp_path: Path) -> None:
    def same(side: Side) -> None:
        side.show("x", torch.rand(3))

    def other(side: Side) -> None:
        side.show("x", torch.rand(3) + side.paged)

    def clear(side: Side) -> None:
        side.show("x", 1)
        if side.paged:
            raise MisuseError("do it so")

    def late(side: Side) -> None:
        side.show("x", 1 + side.paged)
        if side.paged:
            raise MisuseError("do it so")

    def broken(side: Side) -> None:
        raise ValueError("in both")

    def undefined(side: Side) -> None:
        side.show("x", torch.full((2,), math.nan))

    def crash(side: Side) -> None:
        side.show("x", 1)
        if side.paged:
            os.abort()

    found = {function.__name__: judged(function, tmp_path) for function in (same, other, clear, late, broken, undefined, crash)}
    verdicts = {name: outcome.verdict for name, outcome in found.items()}
    assert verdicts == {
        "same": IDENTICAL,
        "other": WRONG,
        "clear": CLEAR,
        "late": WRONG,
        "broken": INVALID,
        "undefined": INVALID,
        "crash": WRONG,
    }
    assert found["clear"].detail == "MisuseError: do it so"
    assert found["crash"].detail == "the process ended by signal 6"
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_hang_is_reported(tmp_path: Path) -> None:
    def hang(side: Side) -> None:
        side.show("x", 1)
        if side.paged:
            time.sleep(60)

    found = judged(hang, tmp_path, timeout=0.5)
    assert (found.verdict, found.detail) == (WRONG, "no result after 0.5 s")
    assert "in hang" in found.trace, "where it hung"
    assert found.seconds < 5


def test_a_row_that_notices_nothing_is_not_valid(tmp_path: Path) -> None:
    def model(side: Side) -> torch.nn.Module:
        return side.page(torch.nn.Linear(4, 4))  # type: ignore[no-any-return]

    def reads(side: Side) -> None:
        side.show("norm", model(side).weight.norm())

    def counts(side: Side) -> None:
        side.show("numel", model(side).weight.numel())

    assert judged(reads, tmp_path, check=True).verdict == IDENTICAL
    assert judged(counts, tmp_path, check=True).detail == "other values of parameters make no difference"
