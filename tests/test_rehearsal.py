"""What a rehearsal counts beside the plain count of ``keep.bytes_moved``, and that the choice by it is never a worse one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.traces import zipf_read
from tiered import rehearsal
from tiered.keep import Decision, bytes_moved, ranked
from tiered.rehearsal import MovablePlaces, Places, Rehearsal, affordable, choose
from tiered.types import Key, Then, Use

THEN = st.sampled_from(["again", "end"])
ORDER = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(Use)), min_size=1, max_size=30)
Touched = tuple[Sequence[Key], Sequence[Use], Sequence[int]]


def moved(touched: Touched, memory: Places, decision: Decision, then: Then) -> int:
    played = Rehearsal(*touched, memory, decision, then)
    first = played.round()
    found = first + played.rest() if then == "end" else played.round()
    played.place.check()
    return found


@settings(deadline=None)
@given(order=ORDER, room=st.integers(1, 6), price=st.sampled_from([0.0, 0.5, 2.5]), then=THEN)
def test_tensors_of_one_size_leave_no_holes(order: list[tuple[str, Use]], room: int, price: float, then: Then) -> None:
    keys = [key for key, _ in order]
    touched = (keys, [use for _, use in order], [8] * len(keys))
    for places in (Places, MovablePlaces):
        found = moved(touched, places(8 * room), Decision(price), then)
        assert found == bytes_moved(*touched, 8 * room, Decision(price), then)


@settings(deadline=None, max_examples=60)
@given(order=ORDER, sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6), more=st.integers(0, 20), then=THEN)
def test_thorough_is_never_worse_than_quick_and_takes_a_plan_only_where_it_is_better(
    order: list[tuple[str, Use]], sizes: list[int], more: int, then: Then
) -> None:
    size = dict(zip("abcdef", sizes, strict=True))
    keys = [key for key, _ in order]
    touched = (keys, [use for _, use in order], [size[key] for key in keys])
    for places in (Places, MovablePlaces):
        memory = places(max(sizes) + more)
        quick = choose(*touched, memory, thorough=False, then=then)
        thorough = choose(*touched, memory, thorough=True, then=then)
        assert quick == ranked(*touched, memory.capacity, thorough=False, then=then)[0]
        by_thorough, by_quick = (moved(touched, places(memory.capacity), each, then) for each in (thorough, quick))
        assert by_thorough < by_quick or (by_thorough == by_quick and thorough.kept is None)


def test_where_a_plan_is_as_good_the_rule_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, uses, sizes = "tie", [Use.READ] * 3, [8] * 3
    found = [Decision(0.0, (False,) * 3), Decision(1.0)]  # nothing can be kept in room for one
    monkeypatch.setattr(rehearsal, "ranked", lambda *args, **more: found)
    assert choose(keys, uses, sizes, Places(8), thorough=True, then="again") == found[1]


def test_a_plan_is_not_taken_where_holes_make_it_worse() -> None:
    """Counted as if free room never lay apart, the plan is better; where nothing can be moved, it is not."""
    trace = zipf_read()
    keys, uses = [key for key, _ in trace.accesses], [use for _, use in trace.accesses]
    sizes = [trace.sizes[key] for key in keys]
    budget = trace.total // 4
    best = ranked(keys, uses, sizes, budget, thorough=True, then="end")[0]
    assert best.kept is not None
    found = choose(keys, uses, sizes, Places(budget), thorough=True, then="end")
    fixed = [moved((keys, uses, sizes), Places(budget), decision, "end") for decision in (found, best)]
    assert fixed[0] < fixed[1]


def test_what_the_next_round_puts_anew_is_dead_when_this_one_is_through() -> None:
    """As kept inputs and gradients are, when training goes round."""
    order = [(f"g{i}", use) for i in range(4) for use in (Use.PUT, Use.READ)]
    keys, uses = [key for key, _ in order], [use for _, use in order]
    touched = (keys, uses, [8] * len(keys))
    for places in (Places, MovablePlaces):
        assert moved(touched, places(8), Decision(), "again") == bytes_moved(*touched, 8, Decision()) == 0


def test_room_that_would_move_what_is_used_often_is_not_left() -> None:
    """Ten tensors that are used a hundred times a round just fit, beside a thousand that are used once."""
    keys = [f"often{number}" for _ in range(100) for number in range(10)] + [f"once{number}" for number in range(1_000)]
    uses, sizes = [Use.READ] * len(keys), [100] * len(keys)
    tight, loose = 1_100, 2_600  # the ten, and one that comes and goes; and much more
    assert affordable(keys, uses, sizes, tight, 400, "again") == 100
    assert affordable(keys, uses, sizes, loose, 400, "again") == 400
    assert affordable(keys, uses, sizes, tight, 100, "again") == 100
    assert affordable([], [], [], tight, 100, "again") == 100
