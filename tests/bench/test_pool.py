"""The pool of ``bench/pool.py`` against its bound, and against itself where nothing may be moved."""

from __future__ import annotations

import math

from bench.optimum import lower_bound
from bench.pool import Run, decision_for
from bench.traces import TRACES


def test_moving_saves_bytes_of_the_link() -> None:
    trace = TRACES["zipf_write"]()
    budget = trace.total // 4
    decision = decision_for(trace, budget)
    fixed, some, free = (Run(trace, budget, most, decision) for most in (0, 8, math.inf))
    assert fixed.moved == 0 < some.moved <= free.moved
    assert fixed.linked > 1.05 * free.linked
    assert fixed.linked > 1.03 * some.linked
    assert free.linked >= lower_bound(trace, budget)


def test_tensors_of_one_size_are_never_moved() -> None:
    trace = TRACES["training"]()
    budget = trace.total // 64 * 32
    run = Run(trace, budget, math.inf, decision_for(trace, budget))
    assert run.moved == 0
    assert run.linked > 0
