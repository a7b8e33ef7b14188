"""``bench/published.py`` computes its ratios from the planner's own numbers, and its rows hold together."""

from __future__ import annotations

import pytest

from bench.published import ROWS, Row, plan_of, seconds_of, table, tflops_of
from tiered.planning.machine import Machine
from tiered.planning.plan import Choice, Planner
from tiered.planning.sources import Numbers, Workload, subject_of
from tiered.zero import Policy
from tiered.zero.rules.exact import AdamWRule

SLOW = Machine(read=1e8, write=1e8, flops=1e9, network=1e9, ranks_per_node=2)


def small(**published: float) -> Row:
    shape = Numbers(layers=3, width=64, heads=4, vocabulary=256)
    return Row(
        "small", "small", shape, batch=2, ranks=2, machine=SLOW, dram=2 << 20, source="none", found="nothing", assumed="all",
        sequence=32, **published,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_published_numbers_of_the_issue_agree_with_one_another() -> None:
    row = ROWS["dgx2-50b"]
    assert row.seconds is not None
    assert tflops_of(row.seconds, 50_356_000_000, row.tokens) == pytest.approx(35.88, abs=0.01)
    assert row.shape.parameters == pytest.approx(50.356e9, rel=1e-3)


def test_the_ratio_is_that_of_the_planners_seconds() -> None:
    planned = plan_of(small(seconds=0.5))
    assert planned.ratio == planned.ranks.seconds / 0.5
    assert 0 < planned.computing < planned.ranks.seconds
    text = table([planned])[-1]
    assert f"| {planned.ranks.seconds:.1f} | {planned.ranks.seconds / 0.5:.2f} |" in text


def test_seconds_follow_from_published_rates() -> None:
    planned = plan_of(small(tflops=1e-3))
    assert planned.published == seconds_of(1e-3, planned.parameters, 64)
    assert tflops_of(planned.published, planned.parameters, 64) == pytest.approx(1e-3)


def test_blocks_are_computed_again() -> None:
    row = small(seconds=1.0)
    subject = subject_of(row.shape, Workload(row.batch, row.sequence))
    planner = Planner(subject, SLOW, AdamWRule(1e-3, (0.9, 0.999), 1e-8, 0.01, False), Policy(), 1)
    once = planner.with_ranks(Choice("on_fetch", "memory", row.dram), 2, 64)
    assert plan_of(row).ranks.seconds > once.seconds


def test_a_row_has_one_published_number() -> None:
    for published in ({}, {"seconds": 1.0, "tflops": 1.0}):
        with pytest.raises(ValueError, match="not both"):
            small(**published)
