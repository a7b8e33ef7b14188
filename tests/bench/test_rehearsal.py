"""What a rehearsal counts, by the store's own choice of victims, beside the plain count of ``keep.bytes_moved``."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.rehearsal import MovablePlaces, Places, Rehearsal
from tiered.engine.retention import RetentionPlan, bytes_moved
from tiered.types import Key, Then, Use

THEN = st.sampled_from(["again", "end"])
ORDER = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(Use)), min_size=1, max_size=30)
Touched = tuple[Sequence[Key], Sequence[Use], Sequence[int]]


def moved(touched: Touched, memory: Places, decision: RetentionPlan, then: Then) -> int:
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
        found = moved(touched, places(8 * room), RetentionPlan(price), then)
        assert found == bytes_moved(*touched, 8 * room, RetentionPlan(price), then)


def test_what_the_next_round_puts_anew_is_dead_when_this_one_is_through() -> None:
    """As kept inputs and gradients are, when training goes round."""
    order = [(f"g{i}", use) for i in range(4) for use in (Use.PUT, Use.READ)]
    keys, uses = [key for key, _ in order], [use for _, use in order]
    touched = (keys, uses, [8] * len(keys))
    for places in (Places, MovablePlaces):
        assert moved(touched, places(8), RetentionPlan(), "again") == bytes_moved(*touched, 8, RetentionPlan()) == 0
