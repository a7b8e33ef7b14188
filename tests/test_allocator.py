from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiered import allocator
from tiered.allocator import FreeSpace, SlotMap
from tiered.types import Slot


def slides(
    slots: Sequence[Slot], capacity: int, wanted: int, movable: Container[int], most: float, gone: Container[int]
) -> bool:
    """What ``SlotMap.slides`` answers, by a walk over the slots."""
    free = moved = hole = end = 0
    window: deque[tuple[int, int]] = deque()  # each hole, with the bytes of the slot above it
    for slot in (*slots, Slot(capacity, 0)):
        hole, end = hole + slot.offset - end, slot.offset + slot.nbytes
        if slot.offset in gone:
            hole += slot.nbytes
            continue
        if free + hole >= wanted:
            return True
        window.append((hole, slot.nbytes))
        free, moved, hole = free + hole, moved + slot.nbytes, 0
        if slot.offset not in movable:
            window.clear()
            free = moved = 0
        while moved > most:
            before, nbytes = window.popleft()
            free, moved = free - before, moved - nbytes
    return False


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Slot], int]:
    """Slots, and the capacity of the space that they are in."""
    slots: list[Slot] = []
    end = 0
    for gap, nbytes in draw(st.lists(st.tuples(st.sampled_from([0, 0, 1, 3]), st.integers(1, 9)), max_size=14)):
        slots.append(Slot(end + gap, nbytes))
        end += gap + nbytes
    return slots, end + draw(st.sampled_from([0, 0, 2, 5]))


@pytest.mark.parametrize("walked", [0, 200])
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.integers(1, 20), st.sampled_from([0, 3, 20, 320, float("inf")]), st.data())
def test_sliding_finds_room_where_there_is_some(
    monkeypatch: pytest.MonkeyPatch, walked: int, layout: tuple[list[Slot], int], wanted: int, most: float, data: st.DataObject
) -> None:
    monkeypatch.setattr(allocator, "WALKED", walked)
    slots, capacity = layout
    offsets = [slot.offset for slot in slots]
    movable = set(data.draw(st.lists(st.sampled_from(offsets), unique=True))) if offsets else set()
    gone = data.draw(st.lists(st.sampled_from(offsets), unique=True)) if offsets else []
    found = SlotMap(slots, capacity, set(offsets) - movable).slides(wanted, most, gone)
    assert (found is not None) == slides(slots, capacity, wanted, movable, most, gone)
    if found is not None:  # the room is in there, and so is what slides
        staying = [slot for slot in slots if slot.offset in found and slot.offset not in gone]
        moved = sum(slot.nbytes for slot in staying)
        assert all(slot.offset in movable and slot.offset + slot.nbytes <= found.stop for slot in staying)
        assert moved <= most
        assert len(found) - moved >= wanted


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.integers(1, 20), st.sampled_from([0, 3, 20, 320, float("inf")]), st.booleans(), st.data())
def test_holes_that_promise_nothing_are_passed_over_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
    layout: tuple[list[Slot], int],
    wanted: int,
    most: float,
    any_way: bool,
    data: st.DataObject,
) -> None:
    """Of many slots, arrays say first whether any hole may be widened: the plan is that of a search among few."""
    slots, capacity = layout
    offsets = [slot.offset for slot in slots]
    movable = set(data.draw(st.lists(st.sampled_from(offsets), unique=True))) if offsets else set()
    gone = data.draw(st.lists(st.sampled_from(offsets), unique=True)) if offsets else []
    found = []
    for walked in (0, 200):
        monkeypatch.setattr(allocator, "WALKED", walked)
        found.append(SlotMap(slots, capacity, set(offsets) - movable).moves(wanted, most, gone, any_way=any_way))
        staying = [slot for slot in slots if slot.offset not in gone]
        fixed = {slot.offset for slot in staying} - movable
        found.append(SlotMap(staying, capacity, fixed).moves(wanted, most, any_way=any_way))
    assert found[1:] == found[:-1]


def test_best_fit_and_the_lowest_address_among_equals() -> None:
    space = FreeSpace(100, 1)
    ranges = [space.allocate(size) for size in (10, 5, 20, 5, 10, 5)]
    for found in (ranges[0], ranges[2], ranges[4]):  # holes of 10, 20 and 10 bytes, and 45 at the end
        assert found is not None
        space.free(*found)
    assert space.allocate(10) == (0, 10)
    assert space.allocate(9) == (40, 9)
    assert space.allocate(11) == (15, 11)
    assert space.allocate(10) == (55, 10)  # the hole at 26 has 9 left


def test_sizes_are_rounded() -> None:
    space = FreeSpace(10_000, 4096)
    assert space.capacity == space.free_bytes == space.largest == 8192
    assert space.allocate(1) == (0, 4096)
    assert space.allocate(4097) is None
    assert (space.used_bytes, space.free_bytes) == (4096, 4096)


def test_growing_extends_the_last_range() -> None:
    space = FreeSpace(10, 1)
    assert space.allocate(6) == (0, 6)
    assert space.free_at_end == 4
    space.grow(20)
    assert space.free_at_end == space.largest == 14
    assert space.allocate(14) == (6, 14)
    assert space.free_at_end == space.largest == 0


def test_an_empty_space() -> None:
    space = FreeSpace(0, 4096)
    assert space.allocate(1) is None
    assert (space.largest, space.free_at_end) == (0, 0)
    space.grow(4096)
    assert space.allocate(1) == (0, 4096)


@pytest.mark.parametrize("wrong", [(0, 0), (0, 8), (4, 4), (8, 16), (16, 8), (1 << 60, 8)])
def test_free_must_match_what_was_handed_out(wrong: tuple[int, int]) -> None:
    space = FreeSpace(64, 4)
    space.allocate(16)
    space.allocate(8)
    space.free(16, 8)
    with pytest.raises(AssertionError):
        space.free(*wrong)
    assert (space.used_bytes, space.largest) == (16, 48)


@pytest.mark.parametrize("wrong", [(0, 8), (8, 16), (60, 8), (-4, 4), (18, 4), (20, 3), (20, 0), (64, 4)])
def test_claim_must_be_wholly_free_and_aligned(wrong: tuple[int, int]) -> None:
    space = FreeSpace(64, 4)
    space.allocate(16)
    with pytest.raises(AssertionError):
        space.claim(*wrong)
    assert (space.used_bytes, space.largest) == (16, 48)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_request_has_a_size(nbytes: int) -> None:
    with pytest.raises(AssertionError):
        FreeSpace(64, 4).allocate(nbytes)


def test_a_space_does_not_shrink() -> None:
    with pytest.raises(AssertionError):
        FreeSpace(64, 4).grow(63)


UNITS = 40
ALIGNMENT = 8


class SpaceAgainstABitmap(RuleBasedStateMachine):
    """The oracle is a list with one flag for each aligned unit, searched from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.space = FreeSpace(UNITS // 2 * ALIGNMENT, ALIGNMENT)
        self.used = [False] * (UNITS // 2)
        self.held: list[tuple[int, int]] = []

    def holes(self) -> list[tuple[int, int]]:
        """Free runs as (units, first unit)."""
        runs, start = [], None
        for unit, used in enumerate([*self.used, True]):
            if not used and start is None:
                start = unit
            elif used and start is not None:
                runs.append((unit - start, start))
                start = None
        return runs

    def mark(self, offset: int, size: int, flag: bool) -> None:
        for unit in range(offset // ALIGNMENT, (offset + size) // ALIGNMENT):
            assert self.used[unit] is not flag
            self.used[unit] = flag

    @rule(nbytes=st.integers(1, UNITS * ALIGNMENT))
    def allocate(self, nbytes: int) -> None:
        units = -(-nbytes // ALIGNMENT)
        fitting = [hole for hole in self.holes() if hole[0] >= units]
        found = self.space.allocate(nbytes)
        if not fitting:
            assert found is None
            return
        assert found == (min(fitting)[1] * ALIGNMENT, units * ALIGNMENT)
        self.mark(*found, True)
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        found = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.space.free(*found)
        self.mark(*found, False)
        with pytest.raises(AssertionError):
            self.space.free(*found)

    @rule(data=st.data())
    def free_all(self, data: st.DataObject) -> None:
        found = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        self.space.free_all(dict(found))
        for offset, size in found:
            self.held.remove((offset, size))
            self.mark(offset, size, False)
            with pytest.raises(AssertionError):
                self.space.free_all({offset: size})

    @rule(unit=st.integers(0, UNITS), units=st.integers(1, 6))
    def claim(self, unit: int, units: int) -> None:
        found = unit * ALIGNMENT, units * ALIGNMENT
        possible = unit + units <= len(self.used) and not any(self.used[unit : unit + units])
        assert self.space.is_free(*found) is possible
        if not possible:
            with pytest.raises(AssertionError):
                self.space.claim(*found)
            return
        self.space.claim(*found)
        self.mark(*found, True)
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), unit=st.integers(0, UNITS))
    def move(self, data: st.DataObject, unit: int) -> None:
        offset, size = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.mark(offset, size, False)
        to = unit * ALIGNMENT
        possible = to + size <= len(self.used) * ALIGNMENT and not any(self.used[unit : unit + size // ALIGNMENT])
        if possible:
            self.space.move(offset, size, to)
        else:
            with pytest.raises(AssertionError):
                self.space.move(offset, size, to)
            to = offset
        self.mark(to, size, True)
        self.held.append((to, size))

    @precondition(lambda self: len(self.used) < UNITS)
    @rule(units=st.integers(0, 3))
    def grow(self, units: int) -> None:
        self.used += [False] * units
        self.space.grow(len(self.used) * ALIGNMENT)

    @invariant()
    def counts_agree(self) -> None:
        holes = self.holes()
        assert self.space.capacity == len(self.used) * ALIGNMENT
        assert self.space.used_bytes == sum(self.used) * ALIGNMENT == sum(size for _, size in self.held)
        assert self.space.free_bytes + self.space.used_bytes == self.space.capacity
        assert self.space.largest == max(holes, default=(0, 0))[0] * ALIGNMENT
        at_end = next((units for units, start in holes if start + units == len(self.used)), 0)
        assert self.space.free_at_end == at_end * ALIGNMENT

    def teardown(self) -> None:
        for found in self.held:
            self.space.free(*found)
        assert self.space.largest == self.space.capacity


TestSpaceAgainstABitmap = SpaceAgainstABitmap.TestCase
TestSpaceAgainstABitmap.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
