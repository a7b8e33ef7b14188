"""The fakes run the contracts too: a test against them then says something about the real parts."""

from __future__ import annotations

import pytest

from tests.contracts.link import LinkContract
from tests.contracts.memory import MemoryContract, MovableContract, OpenMemory
from tests.contracts.tier import OpenTier, TierContract
from tests.fakes import FakeTier, ManualLink, MovableTier, fake_checksums, readable
from tiered.errors import CorruptionError, ReadError
from tiered.types import Direction, Slot, Transfer, Urgency

MIB = 1 << 20


class TestFakeTier(TierContract):
    @pytest.fixture
    def open_tier(self) -> OpenTier:
        return lambda capacity: FakeTier("fake", capacity)


class TestFakeMemory(MemoryContract):
    @pytest.fixture
    def open_memory(self) -> OpenMemory:
        return lambda capacity: FakeTier("fake", capacity, alignment=512)


class TestFakeMovable(MovableContract):
    @pytest.fixture
    def open_memory(self) -> OpenMemory:
        return lambda capacity: MovableTier("fake", capacity, alignment=512)


class Rig:
    def __init__(self, limit: int = 3) -> None:
        self.upper, self.lower = FakeTier("hbm", 32 * MIB), FakeTier("dram", 32 * MIB, alignment=4096)
        self.link = ManualLink(self.upper, self.lower, limit, fake_checksums)
        self.write_upper, self.read_upper = self.upper.write, self.upper.read

    def advance(self) -> None:
        self.link.complete_all(reversed)


class TestManualLink(LinkContract):
    @pytest.fixture
    def rig(self) -> Rig:
        return Rig()


def transfer(tag: int, direction: Direction, slot: Slot, checksums: bytes = b"") -> Transfer:
    return Transfer(tag, f"t{tag}", direction, slot, slot, slot.nbytes, Urgency.DEMAND, checksums=checksums)


def test_nothing_ends_before_the_test_says_so_and_in_the_order_it_says() -> None:
    rig = Rig()
    for tag in range(3):
        assert rig.link.start(transfer(tag, Direction.DOWN, Slot(tag * 4096, 4096)))
    assert not rig.link.start(transfer(3, Direction.DOWN, Slot(1 << 20, 4096)))
    assert rig.link.refused == 1
    assert rig.link.poll(0) == []
    assert not readable(rig.link.fileno())
    rig.link.complete(2)
    rig.link.complete(0)
    assert readable(rig.link.fileno())
    assert [completion.tag for completion in rig.link.poll(0)] == [2, 0]
    assert not readable(rig.link.fileno())
    assert list(rig.link.pending) == [1]


def test_errors_and_checksums() -> None:
    rig = Rig()
    slot = Slot(0, 4096)
    rig.upper.write(slot, b"x" * 4096)
    assert rig.link.start(transfer(1, Direction.DOWN, slot))
    rig.link.complete(1)
    (down,) = rig.link.poll(0)
    assert len(down.checksums) == 16
    rig.lower.write(slot, b"y")
    assert rig.link.start(transfer(2, Direction.UP, slot, down.checksums))
    rig.link.complete(2)
    (up,) = rig.link.poll(0)
    assert isinstance(up.error, CorruptionError)
    error = ReadError("cannot read", key="t3", tier="dram", path=None, offset=0, errno=5)
    assert rig.link.start(transfer(3, Direction.UP, slot))
    rig.link.complete(3, error)
    assert rig.link.poll(0)[0].error is error
    assert rig.upper.read(slot, 1) == b"x"


def test_slots_in_flight_may_not_be_shared() -> None:
    rig = Rig()
    assert rig.link.start(transfer(1, Direction.DOWN, Slot(0, 4096)))
    with pytest.raises(AssertionError, match="in flight"):
        rig.link.start(transfer(2, Direction.UP, Slot(4000, 4096)))
