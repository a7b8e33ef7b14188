"""What every Tier must do. Subclass ``TierContract`` in a test file and provide the fixture ``open_tier``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered.interfaces import Memory, Tier
from tiered.types import Slot

OpenTier = Callable[[int], Tier]
CAPACITY = 1 << 20
# A shared test runs under several classes, and its fixture only hands out a function: each example starts afresh.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]


def overlap(one: Slot, other: Slot) -> bool:
    return one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes


class TierContract:
    pieces = 1
    """In how many pieces all of its space may lie: a tier over several files has one in each."""

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        """A function that opens a fresh, empty tier of so many bytes (a multiple of 64 KiB)."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, open_tier: OpenTier) -> Tier:
        return open_tier(CAPACITY)

    def test_is_a_tier(self, tier: Tier) -> None:
        assert isinstance(tier, Tier)
        assert tier.name
        assert tier.capacity == CAPACITY

    def test_slots_have_at_least_what_was_asked_for(self, tier: Tier) -> None:
        for nbytes in (1, 511, 4096, 4097, 70_000):
            slot = tier.allocate(nbytes)
            assert slot is not None
            assert slot.nbytes >= nbytes

    def test_the_whole_capacity_can_be_had_in_one_piece(self, tier: Tier) -> None:
        slot = tier.allocate(CAPACITY)
        assert slot is not None
        assert slot.nbytes == CAPACITY

    def test_full_is_an_answer(self, tier: Tier) -> None:
        assert tier.allocate(CAPACITY + 1) is None
        slot = tier.allocate(CAPACITY)
        assert slot is not None
        assert tier.allocate(1) is None
        tier.free(slot)
        assert tier.allocate(1) is not None

    def test_memory_tells_its_slots(self, tier: Tier) -> None:
        if not isinstance(tier, Memory):
            pytest.skip("nobody asks a disk where its slots are")
        slots = [tier.allocate(nbytes) for nbytes in (5000, 1, 70_000)]
        assert list(tier.slots) == slots
        one = slots.pop(1)
        assert one is not None
        tier.free(one)
        assert list(tier.slots) == slots
        slots.insert(1, tier.allocate(1))
        assert list(tier.slots) == slots

    def test_freeing_twice_is_our_bug(self, tier: Tier) -> None:
        slot = tier.allocate(1)
        assert slot is not None
        tier.free(slot)
        with pytest.raises(AssertionError):
            tier.free(slot)

    def test_freeing_what_was_not_allocated_is_our_bug(self, tier: Tier) -> None:
        slot = tier.allocate(100_000)
        assert slot is not None
        for wrong in (Slot(slot.offset, slot.nbytes // 2), Slot(slot.offset + slot.nbytes, 4096), Slot(1 << 40, 4096)):
            with pytest.raises(AssertionError):
                tier.free(wrong)
        tier.free(slot)

    @settings(suppress_health_check=SHARED, deadline=None)
    @given(steps=st.lists(st.one_of(st.integers(1, CAPACITY // 2), st.floats(0, 1, exclude_max=True)), max_size=60))
    def test_random_histories(self, open_tier: OpenTier, steps: list[int | float]) -> None:
        """An int allocates so many bytes, a float frees the slot at that fraction of those held."""
        tier = open_tier(CAPACITY)
        held: list[Slot] = []
        for step in steps:
            if isinstance(step, int):
                slot = tier.allocate(step)
                if slot is None:
                    continue
                assert slot.nbytes >= step
                assert not any(overlap(slot, other) for other in held)
                held.append(slot)
                assert sum(slot.nbytes for slot in held) <= tier.capacity
            elif held:
                tier.free(held.pop(int(step * len(held))))
        for slot in held:
            tier.free(slot)
        assert tier.allocate(CAPACITY // self.pieces) is not None, "freeing everything must restore one range"
