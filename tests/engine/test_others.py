"""Tensors outside an order that some rounds touch: their next use is estimated from how often rounds touch them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rig import Rig
from tiered import MisuseError, TieredStore
from tiered.engine.policy import DECAY, LEAST, NEVER, OTHERS, NextUse, OrderPlan, Touch

ORDER = "abcd"


def plan_of(rounds: list[str]) -> OrderPlan:
    """A plan along ORDER after ``rounds``, each of which makes its touches after "b"."""
    plan = OrderPlan(map(Touch, ORDER))
    NextUse.along(plan, 0.0, None, "frequency")
    for others in rounds:
        for key in "ab" + others + "cd":
            plan.happened(key)
    return plan


@given(st.lists(st.text(alphabet="xyz", max_size=3), min_size=1, max_size=60))
def test_the_expected_next_use(rounds: list[str]) -> None:
    """Beside the definition: the decayed share of rounds, and the place of the round at which a tensor is touched."""
    plan = plan_of(rounds)
    for key in "xyz":
        used = [number for number, others in enumerate(rounds) if key in others]
        if not used:
            assert plan.expected(key) == NEVER
            continue
        weights = [DECAY ** (len(rounds) - number) for number in range(len(rounds) + 1)]
        share = sum(weights[number] for number in used) / sum(weights)
        # ``happened`` decays by rounds since the last touch of the tensor, of which the first is none
        last = max(used)
        counted = 0.0
        for before, number in zip([None, *used], used, strict=False):
            counted = counted * DECAY ** (1 if before is None else number - before) + 1
        made = 4 * len(rounds)
        ago, into = divmod(made - (4 * last + 2), 4)
        said = counted * DECAY**ago * (1 - DECAY) / (1 - DECAY ** (1 + made // 4))
        assert plan.expected(key) == pytest.approx(plan.cursor + 4 - into + 4 * (1 / max(LEAST, min(1.0, said)) - 1))
        assert said == pytest.approx(share, abs=0.06 + 0.6 / len(rounds))
        assert plan.expected(key) > plan.cursor


def test_what_rounds_use_more_often_is_expected_sooner() -> None:
    plan = plan_of([("x" if number % 2 else "") + ("y" if number % 5 == 1 else "") + "z" for number in range(100)])
    z, x, y = (plan.expected(key) - plan.cursor for key in "zxy")
    assert z < x < y
    assert z == pytest.approx(2, abs=0.5)  # each round, two touches on
    assert 4 < x < 12
    assert 12 < y < 30
    assert plan.expected("a") == plan.next_use("a")


def test_another_order_keeps_what_is_known() -> None:
    plan = plan_of(["x"] * 20)
    assert plan.replace(map(Touch, "abef")) == 2
    assert plan.expected("x") < plan.cursor + 6
    assert plan.expected("c") == NEVER


def test_not_more_tensors_are_counted_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OTHERS > 10_000
    monkeypatch.setattr("tiered.engine.policy.OTHERS", 100)
    plan = plan_of([])
    for number in range(1000):
        for key in ("a", "b", f"other{number}", "c", "d"):
            plan.happened(key)
        assert len(plan._others) <= 100
    assert plan.expected("other999") < NEVER
    assert plan.expected("other0") == NEVER


def read(folder: Path, others: Literal["recency", "frequency"]) -> tuple[int, int]:
    """Bytes read in 150 rounds, of which each uses six of forty tensors beside the order; and of those in the order."""
    nbytes, draw = 64 << 10, random.Random(0)
    weights = [1 / (rank + 1) ** 1.1 for rank in range(40)]
    with TieredStore.open(folder, dram=20 * nbytes) as store:
        for key in [*ORDER, *(f"e{number}" for number in range(40))]:
            store.put(key, torch.zeros(nbytes, dtype=torch.uint8))
        store.commit()
        store.follow(list(ORDER), others=others)
        begun = total = 0
        for number in range(200):
            before = store.statistics().links[-1].up.bytes
            for key in "ab":
                with store.lease(key):
                    pass
            for expert in {*draw.choices(range(40), weights, k=6)}:
                with store.lease(f"e{expert}"):
                    pass
            for key in "cd":
                with store.lease(key):
                    pass
            total += store.statistics().links[-1].up.bytes - before if number >= 50 else 0
        begun = store.statistics().links[-1].up.bytes
        for key in ORDER:
            with store.lease(key):
                pass
        return total, store.statistics().links[-1].up.bytes - begun


def test_the_frequent_ones_stay(tmp_path: Path) -> None:
    recency, _ = read(tmp_path / "recency", "recency")
    frequency, order = read(tmp_path / "frequency", "frequency")
    assert frequency < 0.9 * recency
    assert order == 0


def test_another_word_is_refused(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store, pytest.raises(MisuseError, match="'recency' or 'freq"):
        store.follow(["a"], others="size")  # type: ignore[arg-type]


def test_what_is_computed_between_touches_of_the_order_is_added_up() -> None:
    """Also where tensors outside the order are touched in between."""
    rig = Rig(40, 400)
    rig.engine.follow([Touch("a"), Touch("b")], lambda plan: [NextUse.along(plan, 0.0, None, "frequency")], [8])
    ahead = rig.engine.read_ahead
    assert ahead is not None
    plan = ahead.order.plan
    for key, asked, granted in (("a", 0, 1), ("x", 3, 4), ("y", 8, 8), ("b", 9, 10), ("z", 12, 13), ("a", 16, 16)):
        plan.happened(key)
        ahead.touched(asked, granted)
    assert [plan.seconds_before(position) for position in range(3)] == [0, 2 + 4 + 1, 7 + 2 + 3]
    rig.wind_down()
