"""The bound against an exhaustive search that knows nothing of intervals, and the rules against the bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

pytest.importorskip("scipy", reason="bench/optimum.py needs the dev extra")

from hypothesis import given, settings
from hypothesis import strategies as st

from bench import optimum
from bench.optimum import exact_bound, lower_bound
from bench.simulate import belady, lru, priced, simulate
from bench.traces import TRACES, Access, Trace, next_positions, training
from tiered.engine.retention import RetentionPlan, bytes_moved

READ, WRITE, PUT = Access.READ, Access.WRITE, Access.PUT
State = frozenset[tuple[str, bool]]  # what is resident, and whether it is dirty


def _let_go(state: State, key: str, dead: set[str], sizes: dict[str, int]) -> Iterator[tuple[State, int]]:
    """Everything that may be done with the other residents before ``key`` is accessed, and what it costs."""
    others = sorted(entry for entry in state if entry[0] != key)
    choices = []
    for other, dirty in others:
        paid = sizes[other] if dirty and other not in dead else 0
        choices.append([((other, dirty), 0), ((other, False), paid), (None, paid)])
    for chosen in itertools.product(*choices):
        kept = frozenset(entry for entry, _ in chosen if entry) | {entry for entry in state if entry[0] == key}
        yield kept, sum(paid for _, paid in chosen)


def exhaustive(trace: Trace, budget: int, *, final_writeback: bool) -> int:
    """The optimum by dynamic programming over all states of the memory."""
    sizes, following = dict(trace.sizes), next_positions(trace)
    costs: dict[State, int] = {frozenset(): 0}
    dead: set[str] = set()  # the next access replaces the bytes
    for position, (key, access) in enumerate(trace.accesses):
        after: dict[State, int] = {}
        for state, cost in costs.items():
            for kept, paid in _let_go(state, key, dead, sizes):
                here = {entry for entry in kept if entry[0] == key}
                if sum(sizes[other] for other, _ in kept - here) + sizes[key] > budget:
                    continue
                fetched = 0 if here or access is PUT else sizes[key]
                new = (kept - here) | {(key, access is not READ or (key, True) in here)}
                after[new] = min(after.get(new, 10**9), cost + paid + fetched)
        costs = after
        dead.discard(key)
        if following[position] < len(trace.accesses) and trace.accesses[following[position]][1] is PUT:
            dead.add(key)
    left = {state: sum(sizes[key] for key, dirty in state if dirty) if final_writeback else 0 for state in costs}
    return min(cost + left[state] for state, cost in costs.items())


def traces(sizes: st.SearchStrategy[int], kinds: tuple[Access, ...]) -> st.SearchStrategy[Trace]:
    accesses = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(kinds)), min_size=1, max_size=10)
    return st.builds(Trace, st.fixed_dictionaries(dict.fromkeys("abcd", sizes)), accesses)


ANY = traces(st.integers(1, 6), (READ, WRITE, PUT))


@settings(deadline=None, max_examples=40)
@given(trace=ANY, more=st.integers(0, 8), final_writeback=st.booleans())
def test_never_above_the_optimum_and_the_same_for_whole_keys(trace: Trace, more: int, final_writeback: bool) -> None:
    budget = trace.largest + more
    best = exhaustive(trace, budget, final_writeback=final_writeback)
    assert lower_bound(trace, budget, final_writeback=final_writeback) <= best + 1e-6
    low, high = exact_bound(trace, budget, seconds=10, final_writeback=final_writeback)
    assert low == pytest.approx(best, abs=1e-4)
    assert high == pytest.approx(best, abs=1e-4)


@settings(deadline=None, max_examples=40)
@given(trace=traces(st.just(3), (READ,)), fit=st.integers(1, 4))
def test_equal_sizes_and_only_reads_give_the_optimum_which_is_beladys(trace: Trace, fit: int) -> None:
    best = exhaustive(trace, 3 * fit, final_writeback=True)
    assert lower_bound(trace, 3 * fit) == pytest.approx(best)
    assert simulate(trace, 3 * fit, belady) == best


def test_fractions_of_keys_are_not_attainable() -> None:
    trace = Trace(dict.fromkeys("abc", 2), [(key, READ) for key in "abcab"])
    assert lower_bound(trace, 5) == 7, "half of a or b is kept across c"
    assert exhaustive(trace, 5, final_writeback=True) == 8


def test_a_key_that_never_fits() -> None:
    with pytest.raises(ValueError, match="the largest key has 9 bytes, the budget is 8"):
        lower_bound(Trace({"a": 9}, [("a", READ)]), 8)


def test_dead_bytes_cost_nothing() -> None:
    accesses = [("g", PUT), ("a", READ), ("g", READ), ("b", READ), ("g", PUT)]
    assert lower_bound(Trace({"g": 5, "a": 5, "b": 5}, accesses), 10) == 5 + 5 + 5, "a, b, and g's bytes at the end"
    assert lower_bound(Trace({"g": 5, "a": 5, "b": 5}, accesses), 5) == 5 + 5 + 5 + 10, "g goes down and comes back once"


@pytest.mark.parametrize("share", [1.0, 2.0, 4.0])
def test_training_moves_36_less_3b_bytes_per_parameter(share: float) -> None:
    """Adam in fp32, gradients written and read: with b <= 4 bytes of memory for each parameter (16 bytes of state)."""
    layers, budget = 32, int(share * 32 * 16)
    step = lower_bound(training(layers, 6), budget) - lower_bound(training(layers, 5), budget)
    assert step / (layers * 16) == pytest.approx(36 - 3 * share, rel=0.04)


@settings(deadline=None, max_examples=50)
@given(trace=ANY, more=st.integers(0, 8))
def test_no_rule_is_below_the_bound(trace: Trace, more: int) -> None:
    budget = trace.largest + more
    bound = lower_bound(trace, budget)
    for rule in (lru, belady, priced(3)):
        assert simulate(trace, budget, rule) >= bound - 1e-6


@settings(deadline=None, max_examples=50)
@given(trace=ANY, more=st.integers(0, 8), price=st.sampled_from([0.0, 0.5, 2.5]))
def test_what_a_decision_moves_up_to_the_end_is_what_its_rule_moves(trace: Trace, more: int, price: float) -> None:
    budget = trace.largest + more
    keys, uses = [key for key, _ in trace.accesses], [use for _, use in trace.accesses]
    sizes = [trace.sizes[key] for key in keys]
    assert bytes_moved(keys, uses, sizes, budget, RetentionPlan(price), "end") == simulate(trace, budget, priced(price))


def test_traces_are_reproducible_and_of_moderate_length() -> None:
    for make in TRACES.values():
        trace = make()
        assert trace == make()
        assert 1000 <= len(trace.accesses) <= 3000
        assert {key for key, _ in trace.accesses} <= set(trace.sizes)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimum.main(["zigzag", "--budget", "640", "--exact", "1"]) == 0
    assert "at least 92800 bytes" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        optimum.main(["zigzag", "--budget", "1"])
    assert "the largest key has 64 bytes" in capsys.readouterr().err
