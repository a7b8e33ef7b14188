"""The assignment that is found, against every one there is, and what it says of memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.tuning.program import Assignment, Profile, Segment, UnitTraffic, Way, assign, evaluate

MIB = 1 << 20
WAYS: tuple[Way, ...] = ("memory", "recompute", "store")


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    size, rate = st.integers(0, 100), st.sampled_from([2e8, 3e9])
    segments = tuple(
        Segment(f"s{at}", draw(size) * MIB, draw(size) * MIB // 5, draw(st.floats(0, 0.2)), draw(st.booleans()))
        for at in range(draw(st.integers(1, 4)))
    )
    states = tuple(
        UnitTraffic(f"u{at}", draw(size) * MIB, draw(size) * MIB, draw(size) * MIB) for at in range(draw(st.integers(0, 3)))
    )
    return Profile(
        segments, draw(size) * MIB, states, draw(st.floats(0.001, 1)), draw(st.floats(0, 1e-9)), draw(rate), draw(rate),
        draw(st.floats(0, 1)),
    )  # fmt: skip


def every(profile: Profile, memory: int, pool: int) -> list[Assignment]:
    found = []
    for ways in itertools.product(WAYS, repeat=len(profile.segments)):
        if any(way == "recompute" and not one.again for way, one in zip(ways, profile.segments, strict=True)):
            continue
        for rest in ("memory", "store"):
            named = {one.name: way for one, way in zip(profile.segments, ways, strict=True)}
            one = evaluate(profile, named, rest, pool)  # type: ignore[arg-type]
            if one.memory <= memory:
                found.append(one)
    return found


@settings(max_examples=40, deadline=None)
@given(profiles(), st.integers(0, 300), st.integers(0, 200))
def test_nothing_is_much_faster_than_what_is_assigned(profile: Profile, memory: int, pool: int) -> None:
    found = assign(profile, memory * MIB, pool * MIB)
    candidates = every(profile, memory * MIB, pool * MIB)
    stored = evaluate(profile, {one.name: "store" for one in profile.segments}, "store", pool * MIB)
    best = min((one.seconds for one in candidates), default=stored.seconds)
    assert found.seconds <= best * 1.05
    assert found.memory <= memory * MIB or found.ways == stored.ways


def test_memory_comes_first_and_the_newest_stay() -> None:
    segments = tuple(Segment(f"s{at}", 10 * MIB, MIB, 0.01) for at in range(8))
    profile = Profile(segments, 0, (), 1.0, 1e-10, 3e9, 5e9, 0.0)
    assert set(assign(profile, 80 * MIB, 0).ways.values()) == {"memory"}
    half = assign(profile, 40 * MIB, 0)
    assert [half.ways[f"s{at}"] for at in range(8)] == ["store"] * 4 + ["memory"] * 4
    assert half.memory == 40 * MIB


def test_a_slow_drive_computes_again_and_a_fast_one_stores() -> None:
    segments = tuple(Segment(f"s{at}", 10 * MIB, MIB, 0.01) for at in range(8))
    slow = Profile(segments, 0, (), 0.05, 1e-10, 1e8, 1e8, 0.0)
    fast = Profile(segments, 0, (), 1.0, 1e-12, 1e10, 1e10, 0.0)
    assert list(assign(slow, 20 * MIB, 0).ways.values()).count("recompute") >= 6
    assert set(assign(fast, 0, 0).ways.values()) == {"store"}
    only = assign(slow, 20 * MIB, 0, ("memory", "store"))
    assert "recompute" not in only.ways.values()


def test_what_saves_most_for_its_bytes_stays_in_dram() -> None:
    states = UnitTraffic("often", 10 * MIB, 40 * MIB, 10 * MIB), UnitTraffic("seldom", 10 * MIB, 10 * MIB, 10 * MIB)
    profile = Profile((Segment("s", 10 * MIB, MIB, 1.0),), 0, states, 0.01, 0.0, 1e9, 1e9, 0.0)
    found = assign(profile, 0, 15 * MIB)
    assert found.stays["often"] == 1.0
    assert found.ways == {"s": "store"}
    assert found.written == pytest.approx(10 * MIB - 5 * MIB * (1 - found.stays["seldom"] * 2))
