"""What every Link must do. Subclass ``LinkContract`` and provide the fixture ``rig``.

Where the upper tier's device has streams, subclass ``DeviceLinkContract``: it adds what fences are for.
"""

from __future__ import annotations

import random
from typing import Protocol

import pytest

from tests.fakes import wait_readable
from tiered.interfaces import Link, Tier
from tiered.types import Completion, Direction, Fence, Slot, Transfer, Urgency

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


class DeviceRig(Rig, Protocol):
    """A rig whose upper tier is a device's memory."""

    def kernel(self, source: Slot, target: Slot, nbytes: int, stream: int) -> Fence:
        """Queue work on a compute stream (0 or 1): copy upper slots. The fence behind it."""
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
        after: tuple[Fence, ...] = (),
    ) -> Transfer:
        self.tag += 1
        key = f"t{self.tag}"
        return Transfer(self.tag, key, direction, upper, lower, nbytes, urgency, tensor_id, 3, checksums, after)

    def poll(self) -> list[Completion]:
        """What has ended; waits as an engine does, only when there is nothing to be had without."""
        self.rig.advance()
        ended = self.rig.link.poll(0)
        if not ended:
            wait_readable(self.rig.link.fileno())
            ended = self.rig.link.poll(0)
        return ended

    def finish(self, wanted: set[int]) -> dict[int, Completion]:
        """Poll until all ``wanted`` tags have ended; each must end once."""
        ended: dict[int, Completion] = {}
        while wanted - set(ended):
            for completion in self.poll():
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
                for completion in loop.poll():
                    assert completion.error is None
                    started.remove(completion.tag)
                    checksums[owner.pop(completion.tag)] = completion.checksums
        for upper, _, nbytes, data in tensors.values():
            assert rig.read_upper(upper, nbytes) == data

    def test_promoting_what_is_under_way(self, rig: Rig, loop: Loop) -> None:
        """To any urgency, several times: each still ends once, and right."""
        sizes = {number: 100_000 + number for number in range(3)}
        slots = {number: loop.slots(nbytes) for number, nbytes in sizes.items()}
        transfers = []
        for number, (upper, lower) in slots.items():
            rig.write_upper(upper, bytes([number + 1]) * sizes[number])
            transfers.append(loop.transfer(Direction.DOWN, upper, lower, sizes[number], Urgency.WRITEBACK))
            assert rig.link.start(transfers[-1])
        for urgency in (Urgency.PREFETCH, Urgency.DEMAND, Urgency.WRITEBACK):
            rig.link.promote(transfers[1].tag, urgency)
        ended = loop.finish({transfer.tag for transfer in transfers})
        assert [completion.error for completion in ended.values()] == [None] * 3
        for number, (upper, lower) in slots.items():
            rig.write_upper(upper, bytes(sizes[number]))
            assert loop.run(loop.transfer(Direction.UP, upper, lower, sizes[number])).error is None
            assert rig.read_upper(upper, sizes[number]) == bytes([number + 1]) * sizes[number]

    def test_promoting_what_has_ended_or_never_was_is_passed_over(self, rig: Rig, loop: Loop) -> None:
        upper, lower = loop.slots(5000)
        transfer = loop.transfer(Direction.DOWN, upper, lower, 5000, Urgency.WRITEBACK)
        assert loop.run(transfer).error is None
        for tag in (transfer.tag, 12345, -1):
            rig.link.promote(tag, Urgency.DEMAND)
        assert rig.link.poll(0) == []
        assert loop.run(loop.transfer(Direction.UP, upper, lower, 5000)).error is None

    def test_close_waits_and_is_idempotent(self, rig: Rig, loop: Loop) -> None:
        upper, lower = loop.slots(100_000)
        assert rig.link.start(loop.transfer(Direction.DOWN, upper, lower, 100_000))
        rig.link.close()
        rig.link.close()


class DeviceLinkContract(LinkContract):
    @pytest.fixture
    def rig(self) -> DeviceRig:
        raise NotImplementedError

    def upper(self, rig: DeviceRig, data: bytes) -> Slot:
        slot = rig.upper.allocate(len(data))
        assert slot is not None
        rig.write_upper(slot, data)
        return slot

    def test_down_takes_what_the_kernels_before_its_fences_wrote(self, rig: DeviceRig, loop: Loop) -> None:
        nbytes = 300_000
        whole = random.Random(1).randbytes(nbytes)
        half = nbytes // 2
        source = self.upper(rig, whole)
        target, lower = loop.slots(nbytes)
        rig.write_upper(target, bytes(nbytes))
        second = Slot(source.offset + half, nbytes - half), Slot(target.offset + half, nbytes - half)
        fences = (rig.kernel(source, target, half, 0), rig.kernel(*second, nbytes - half, 1))
        assert loop.run(loop.transfer(Direction.DOWN, target, lower, nbytes, after=fences)).error is None
        back = self.upper(rig, bytes(nbytes))
        assert loop.run(loop.transfer(Direction.UP, back, lower, nbytes)).error is None
        assert rig.read_upper(back, nbytes) == whole

    def test_up_overwrites_only_what_the_kernels_before_its_fences_have_read(self, rig: DeviceRig, loop: Loop) -> None:
        nbytes = 300_000
        old, new = random.Random(2).randbytes(nbytes), random.Random(3).randbytes(nbytes)
        slot, lower = loop.slots(nbytes)
        rig.write_upper(slot, new)
        assert loop.run(loop.transfer(Direction.DOWN, slot, lower, nbytes)).error is None
        rig.write_upper(slot, old)
        readers = [self.upper(rig, bytes(nbytes)) for _ in range(2)]
        fences = tuple(rig.kernel(slot, reader, nbytes, stream) for stream, reader in enumerate(readers))
        assert loop.run(loop.transfer(Direction.UP, slot, lower, nbytes, after=fences)).error is None
        assert rig.read_upper(slot, nbytes) == new
        assert [rig.read_upper(reader, nbytes) == old for reader in readers] == [True, True]

    def test_a_kernel_queued_after_the_end_finds_the_bytes(self, rig: DeviceRig, loop: Loop) -> None:
        nbytes = 300_000
        data = random.Random(4).randbytes(nbytes)
        slot, lower = loop.slots(nbytes)
        rig.write_upper(slot, data)
        assert loop.run(loop.transfer(Direction.DOWN, slot, lower, nbytes)).error is None
        rig.write_upper(slot, bytes(nbytes))
        assert loop.run(loop.transfer(Direction.UP, slot, lower, nbytes)).error is None
        copied, other = self.upper(rig, bytes(nbytes)), rig.lower.allocate(nbytes)
        assert other is not None
        fence = rig.kernel(slot, copied, nbytes, 0)
        assert loop.run(loop.transfer(Direction.DOWN, copied, other, nbytes, after=(fence,))).error is None
        assert rig.read_upper(copied, nbytes) == data

    def test_fences_that_have_passed_hold_nothing_up(self, rig: DeviceRig, loop: Loop) -> None:
        slot, lower = loop.slots(1000)
        copied, other = loop.slots(1000)
        rig.write_upper(slot, b"x" * 1000)
        fence = rig.kernel(slot, copied, 1000, 0)
        assert loop.run(loop.transfer(Direction.DOWN, copied, lower, 1000, after=(fence,))).error is None
        assert fence.query()
        assert loop.run(loop.transfer(Direction.DOWN, copied, other, 1000, after=(fence, fence))).error is None

    def test_close_waits_for_what_waits_for_a_fence(self, rig: DeviceRig, loop: Loop) -> None:
        slot, lower = loop.slots(100_000)
        copied = self.upper(rig, bytes(100_000))
        rig.write_upper(slot, b"y" * 100_000)
        fence = rig.kernel(slot, copied, 100_000, 1)
        assert rig.link.start(loop.transfer(Direction.DOWN, copied, lower, 100_000, after=(fence,)))
        rig.link.close()
        assert fence.query()
