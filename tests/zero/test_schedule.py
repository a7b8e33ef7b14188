"""The prediction of what comes next."""

from __future__ import annotations

from itertools import islice

from tiered.zero.schedule import Successors


def after(events: str, count: int = 8) -> str:
    schedule: Successors[str] = Successors()
    for event in events:
        schedule.happened(event)
    return "".join(islice(schedule.coming(), count))


def test_nothing_is_known_at_first() -> None:
    assert after("") == ""
    assert after("abc") == ""


def test_a_round_is_predicted_after_one() -> None:
    assert after("abcda") == "bcda"
    assert after("abcdabc", 5) == "dabc"


def test_an_event_in_two_places_is_told_apart_by_what_came_before() -> None:
    assert after("eabceCBAEeab", 3) == "ceC"
    assert after("eabceCBAEeabce", 3) == "CBA"


def test_a_changed_order_is_followed_from_the_next_round_on() -> None:
    assert after("abcabcacb" + "a", 1) == "c"


def test_circles_end() -> None:
    assert len(after("abababab", 100)) <= 3
    assert len(after("aaaa", 100)) <= 2
