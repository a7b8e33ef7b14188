"""What the comparison of a row's two sides notices, and what becomes of a row that fails, hangs or crashes."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy
import pytest
import torch

from bench import compatibility
from bench.compatible.judge import CLEAR, IDENTICAL, INVALID, LIMIT, WRONG, Outcome, difference, judge
from bench.compatible.side import ROWS, TIERS, Row, Side, frozen
from tests import fake_device, programs
from tiered import MisuseError

Function = Callable[[Side], object]


PLACED = """if True:  # a device that has once been given a name keeps it until its process ends
    import sys
    from contextlib import nullcontext
    from pathlib import Path
    from bench import compatibility
    from bench.compatible.side import Side

    with compatibility.fake_device() if sys.argv[1] == "fake device" else nullcontext():
        side = Side(True, Path(sys.argv[2]), tier=sys.argv[1])
        model, _ = side.toy()
        print(model.head.weight.device.type == "cpu", *(one.name for one in side.store.statistics().tiers))
        side.close()
"""
"""Prints whether a parameter is on the CPU, and the store's tiers."""


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


def test_what_numpy_refuses_to_write_to_is_a_clear_error(tmp_path: Path) -> None:
    def writes(side: Side) -> None:
        array = numpy.zeros(2)
        array.flags.writeable = not side.paged
        array[0] = 1
        side.show("array", array)

    def other(side: Side) -> None:
        side.show("x", 1)
        if side.paged:
            raise ValueError("something else")

    assert judged(writes, tmp_path).verdict == CLEAR
    assert judged(other, tmp_path).verdict == WRONG


def test_a_stated_limit_is_no_excuse_for_numbers(tmp_path: Path) -> None:
    def kinds(side: Side) -> None:
        side.show("kind", "one" if side.paged else "other")

    def numbers(side: Side) -> None:
        side.show("kind", "one" if side.paged else "other")
        side.show("number", torch.ones(2))

    found = [judge(Row("group", "row", one, limit="it is so"), timeout=30, folder=str(tmp_path)) for one in (kinds, numbers)]
    assert [one.verdict for one in found] == [LIMIT, WRONG]
    assert found[0].detail == "it is so: kind is 'one', in memory 'other'"


def test_every_stated_limit_is_in_the_documentation() -> None:
    compatibility.rows_of(compatibility.GROUPS, "*")
    limits = Path(compatibility.__file__).parents[1].joinpath("docs", "limits.md").read_text()
    stated = [row.limit for row in ROWS if row.limit]
    assert stated
    assert [limit for limit in stated if limit not in limits] == []


@pytest.mark.parametrize("tier", TIERS)
def test_a_row_runs_on_each_tier(tmp_path: Path, tier: str) -> None:
    """By the command, because rows are forked, which a process that has computed something may not be."""
    if tier == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if tier == "fake device" and fake_device.UNUSABLE:
        pytest.skip(fake_device.UNUSABLE)
    file, root = tmp_path / "outcomes.json", Path(compatibility.__file__).parents[1]
    asked = ["--group", "writes", "--row", "init.ones_", "--tier", tier, "--json", str(file), "--dir", str(tmp_path)]
    programs.run([sys.executable, "-m", "bench.compatibility", *asked], cwd=root, check=True, capture_output=True)
    (found,) = json.loads(file.read_text())["rows"]
    assert (found["verdict"], found["tier"]) == (IDENTICAL, tier)
    words = [sys.executable, "-c", PLACED, tier, str(tmp_path / "side")]
    seen = programs.run(words, check=True, capture_output=True, text=True)
    assert seen.stdout.split() == [str(tier in ("dram", "hbm")), *["hbm"] * (tier != "dram"), "dram", "nvme"]


def test_outcomes_are_kept_in_the_file_and_shown_in_the_page(tmp_path: Path) -> None:
    rows = compatibility.rows_of(["writes"], "init.*")
    first, second = (Outcome("writes", row.name, IDENTICAL, "", 1.0) for row in rows[:2])
    file = tmp_path / "outcomes.json"
    gone = Outcome("writes", "a row that there is no more", WRONG, "", 1.0)
    before = [asdict(one) for one in (second, gone, Outcome("writes", rows[0].name, WRONG, "NaN", 1.0))]
    file.write_text(json.dumps({"rows": before}))
    elsewhere = Outcome("writes", rows[0].name, CLEAR, "MisuseError: no", 1.0, tier="hbm")
    every = compatibility.with_earlier([elsewhere, first], compatibility.earlier_in(file))
    assert every == [first, second, elsewhere]
    page = compatibility.document(every)
    assert "2 rows: 2 identical, 0 wrong." in page
    assert "1 rows: 1 clear error, 0 wrong." in page


def test_a_row_that_was_identical_and_is_an_error_now_is_told() -> None:
    before = [Outcome("writes", name, verdict, "", 1.0) for name, verdict in (("a", IDENTICAL), ("b", CLEAR), ("c", IDENTICAL))]
    now = [Outcome("writes", name, verdict, "why", 1.0) for name, verdict in (("a", CLEAR), ("b", IDENTICAL), ("c", IDENTICAL))]
    assert compatibility.lost(now, before) == ["no longer identical: writes: a: clear error: why"]
    assert not compatibility.lost([replace(one, tier="hbm") for one in now], before), "rows of another tier are others"


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
