"""What every Link must do. Subclass ``LinkContract`` and provide the fixture ``rig``."""

from __future__ import annotations

import random
from typing import Protocol

import pytest

from tests.fakes import wait_readable
from tiered.interfaces import Link, Tier
from tiered.types import Completion, Direction, Slot, Transfer, Urgency

SIZES = (1, 511, 4095, 4096, 4097, 65_536, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 9 << 20)


class Rig(Protocol):
    """A link with its two tiers (of at least 32 MiB each), and a way to look into them."""

    link: Link
    upper: Tier
    lower: Tier

    def write_upper(self, slot: Slot, data: bytes) -> None: ...
    def read_upper(self, slot: Slot, nbytes: int) -> bytes: ...

    def advance(self) -> None:
        """Let the device finish what is in flight; nothing to do where it does by itself."""
        ...


class Loop:
    """Drives a rig's link as an engine would."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.tag = 0

    def slots(self, nbytes: int) -> tuple[Slot, Slot]:
        upper, lower = self.rig.upper.allocate(nbytes), self.rig.lower.allocate(nbytes)
        assert upper is not None
        assert lower is not None
        return upper, lower

    def transfer(
        self,
        direction: Direction,
        upper: Slot,
        lower: Slot,
        nbytes: int,
        urgency: Urgency = Urgency.DEMAND,
        checksums: bytes = b"",
        tensor_id: int = 1,
    ) -> Transfer:
        self.tag += 1
        return Transfer(self.tag, f"t{self.tag}", direction, upper, lower, nbytes, urgency, tensor_id, 3, checksums)

    def finish(self, wanted: set[int]) -> dict[int, Completion]:
        """Poll until all ``wanted`` tags have ended; each must end once."""
        ended: dict[int, Completion] = {}
        while wanted - set(ended):
            self.rig.advance()
            wait_readable(self.rig.link.fileno())
            for completion in self.rig.link.poll(0):
                assert completion.tag not in ended, "a transfer ended twice"
                ended[completion.tag] = completion
        assert set(ended) == wanted
        return ended

    def run(self, transfer: Transfer) -> Completion:
        assert self.rig.link.start(transfer)
        return self.finish({transfer.tag})[transfer.tag]


class LinkContract:
    @pytest.fixture
    def rig(self) -> Rig:
        raise NotImplementedError

    @pytest.fixture
    def loop(self, rig: Rig) -> Loop:
        return Loop(rig)

    def test_is_a_link(self, rig: Rig) -> None:
        assert isinstance(rig.link, Link)
        assert (rig.link.src, rig.link.dst) == (rig.upper.name, rig.lower.name)

    def test_idle_has_nothing_to_say(self, rig: Rig) -> None:
        assert rig.link.poll(0) == []
        assert rig.link.poll(60) == [], "with nothing in flight there is nothing to wait for"

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_down_and_up_again(self, rig: Rig, loop: Loop, nbytes: int) -> None:
        data = random.Random(nbytes).randbytes(nbytes)
        upper, lower = loop.slots(nbytes)
        rig.write_upper(upper, data)
        down = loop.run(loop.transfer(Direction.DOWN, upper, lower, nbytes))
        assert down.error is None
        assert rig.read_upper(upper, nbytes) == data, "writing back leaves the upper copy as it was"
        rig.write_upper(upper, bytes(nbytes))
        up = loop.run(loop.transfer(Direction.UP, upper, lower, nbytes, checksums=down.checksums))
        assert up.error is None
        assert rig.read_upper(upper, nbytes) == data

    def test_neighbours_are_left_alone(self, rig: Rig, loop: Loop) -> None:
        nbytes = 5000
        slots = [loop.slots(nbytes) for _ in range(3)]
        for number, (upper, lower) in enumerate(slots):
            rig.write_upper(upper, bytes([number + 1]) * nbytes)
            assert loop.run(loop.transfer(Direction.DOWN, upper, lower, nbytes)).error is None
        middle = slots[1]
        rig.write_upper(middle[0], b"\xff" * nbytes)
        assert loop.run(loop.transfer(Direction.DOWN, *middle, nbytes)).error is None
        assert loop.run(loop.transfer(Direction.UP, *middle, nbytes)).error is None
        for number in (0, 2):
            upper, lower = slots[number]
            assert rig.read_upper(upper, nbytes) == bytes([number + 1]) * nbytes
            rig.write_upper(upper, bytes(nbytes))
            assert loop.run(loop.transfer(Direction.UP, upper, lower, nbytes)).error is None
            assert rig.read_upper(upper, nbytes) == bytes([number + 1]) * nbytes

    def test_many_at_once_each_end_once_and_right(self, rig: Rig, loop: Loop) -> None:
        """Writes and reads of all urgencies together, with back-pressure: what is refused is offered again."""
        chance = random.Random(7)
        tensors = {}
        for number in range(24):
            nbytes = chance.randrange(1, 600_000)
            data = chance.randbytes(nbytes)
            upper, lower = loop.slots(nbytes)
            rig.write_upper(upper, data)
            tensors[number] = (upper, lower, nbytes, data)
        checksums: dict[int, bytes] = {}
        for direction in (Direction.DOWN, Direction.UP):
            waiting = []
            for number, (upper, lower, nbytes, _) in tensors.items():
                if direction is Direction.UP:
                    rig.write_upper(upper, bytes(nbytes))
                urgency = chance.choice(list(Urgency))
                waiting.append(
                    (number, loop.transfer(direction, upper, lower, nbytes, urgency, checksums.get(number, b"")))
                )
            owner = {transfer.tag: number for number, transfer in waiting}
            started: set[int] = set()
            while owner:
                while waiting and rig.link.start(waiting[0][1]):
                    started.add(waiting.pop(0)[1].tag)
                assert started, "an idle link must take a transfer"
                rig.advance()
                wait_readable(rig.link.fileno())
                for completion in rig.link.poll(0):
                    assert completion.error is None
                    started.remove(completion.tag)
                    checksums[owner.pop(completion.tag)] = completion.checksums
        for upper, _, nbytes, data in tensors.values():
            assert rig.read_upper(upper, nbytes) == data

    def test_close_waits_and_is_idempotent(self, rig: Rig, loop: Loop) -> None:
        upper, lower = loop.slots(100_000)
        assert rig.link.start(loop.transfer(Direction.DOWN, upper, lower, 100_000))
        rig.link.close()
        rig.link.close()
