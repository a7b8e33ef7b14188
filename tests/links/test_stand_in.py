"""The stand-in device: the contracts over it, in every order of its streams that the fences allow."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest

from tests.contracts.link import DeviceLinkContract, LinkContract, Loop
from tests.contracts.streams import StreamsContract
from tests.fakes import readable
from tiered.errors import MisuseError
from tiered.links.stand_in import MemoryLink, StandInStreams
from tiered.tiers.dram import DramConfig, DramTier
from tiered.tiers.hbm import HbmConfig, HbmTier
from tiered.types import Direction, Fence, Slot, Urgency

MIB = 1 << 20
Choose = Callable[[Sequence[Hashable]], Hashable]

# Who goes first where several streams could.
ORDERS: dict[str, Callable[[], Choose]] = {
    "oldest": lambda: lambda ready: ready[0],
    "newest": lambda: lambda ready: ready[-1],
    "copies": lambda: lambda ready: min(ready, key=lambda stream: stream not in ("up", "down")),
    "kernels": lambda: lambda ready: max(ready, key=lambda stream: stream not in ("up", "down")),
    **{f"random{seed}": lambda seed=seed: random.Random(seed).choice for seed in range(4)},
}



class Rig:
    def __init__(self, streams: StandInStreams | None, choose: Choose = lambda ready: ready[0], depth: int = 4) -> None:
        self.streams = streams
        self.choose = choose
        self.upper = HbmTier(HbmConfig(32 * MIB, "cpu"), streams=streams)
        self.lower = DramTier(DramConfig(32 * MIB))
        self.link = MemoryLink(self.upper, self.lower, streams=streams, depth=depth)

    def write_upper(self, slot: Slot, data: bytes) -> None:
        memoryview(self.upper.tensor(slot, len(data))[0].numpy())[:] = data

    def read_upper(self, slot: Slot, nbytes: int) -> bytes:
        return self.upper.tensor(slot, nbytes)[0].numpy().tobytes()

    def advance(self) -> None:
        if self.streams:
            self.streams.run_all(self.choose)

    def kernel(self, source: Slot, target: Slot, nbytes: int, stream: int = 0) -> Fence:
        assert self.streams
        name = f"compute{stream}"
        into, what = self.upper.tensor(target, nbytes)[0], self.upper.tensor(source, nbytes)[0]
        self.streams.launch(lambda: into.copy_(what), name)
        return self.streams.record(name)

    def close(self) -> None:
        self.link.close()
        self.upper.close()
        self.lower.close()


class TestEager(LinkContract):
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        rig = Rig(None)
        yield rig
        rig.close()


class TestStandIn(DeviceLinkContract):
    @pytest.fixture(params=ORDERS)
    def rig(self, request: pytest.FixtureRequest) -> Iterator[Rig]:
        rig = Rig(StandInStreams(), ORDERS[request.param]())
        yield rig
        rig.close()


class Cells:
    def __init__(self, choose: Choose) -> None:
        self.streams = StandInStreams()
        self.choose = choose
        self.cells = [0] * 8
        self.made = 0

    def stream(self) -> object:
        self.made += 1
        return self.made

    def use(self, stream: object) -> AbstractContextManager[object]:
        assert isinstance(stream, Hashable)
        return self.streams.use(stream)

    def write(self, stream: object, cell: int, value: int) -> None:
        assert isinstance(stream, Hashable)
        self.streams.launch(lambda: self.cells.__setitem__(cell, value), stream)

    def copy(self, stream: object, source: int, target: int) -> None:
        assert isinstance(stream, Hashable)
        self.streams.launch(lambda: self.cells.__setitem__(target, self.cells[source]), stream)

    def finish(self) -> None:
        self.streams.run_all(self.choose)

    def read(self, cell: int) -> int:
        return self.cells[cell]


class TestStandInStreams(StreamsContract):
    @pytest.fixture(params=ORDERS)
    def desk(self, request: pytest.FixtureRequest) -> Cells:
        return Cells(ORDERS[request.param]())


def test_nothing_runs_before_the_test_says_so() -> None:
    streams, seen = StandInStreams(), list[str]()
    streams.launch(lambda: seen.append("a"))
    fence = streams.record("compute")
    streams.launch(lambda: seen.append("b"))
    assert (seen, fence.query(), streams.queued("compute")) == ([], False, 3)
    assert streams.step("compute")
    assert (seen, fence.query()) == (["a"], False)
    assert streams.step("compute")
    assert (seen, fence.query()) == (["a"], True)
    assert streams.step("compute")
    assert not streams.step("compute")
    assert seen == ["a", "b"]


def test_a_fence_on_an_idle_stream_has_passed() -> None:
    streams = StandInStreams()
    assert streams.record("compute").query()


def test_a_fence_recorded_by_running_work_waits_for_that_work() -> None:
    streams, fences = StandInStreams(), list[Fence]()
    streams.launch(lambda: fences.append(streams.record("compute")))
    streams.step("compute")
    assert not fences[0].query()
    streams.step("compute")
    assert fences[0].query()


def test_a_wait_keeps_back_what_is_behind_it_and_nothing_else() -> None:
    streams, seen = StandInStreams(), list[str]()
    streams.launch(lambda: seen.append("kernel"))
    streams.launch(lambda: seen.append("before"), "side")
    streams.wait("side", streams.record("compute"))
    streams.launch(lambda: seen.append("after"), "side")
    streams.run("side")
    assert seen == ["before"]
    assert streams.ready() == ["compute"]
    streams.run("compute")
    streams.run("side")
    assert seen == ["before", "kernel", "after"]
    assert streams.ready() == []


def test_work_that_fails_is_over() -> None:
    streams = StandInStreams()
    streams.launch(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        streams.run_all()
    assert streams.queued("compute") == 0


def test_the_copy_runs_after_the_fence_and_is_reported_after_the_copy() -> None:
    streams = StandInStreams()
    rig = Rig(streams)
    loop = Loop(rig)
    source, target = rig.upper.allocate(1000), rig.upper.allocate(1000)
    lower = rig.lower.allocate(1000)
    assert source
    assert target
    assert lower
    rig.write_upper(source, b"n" * 1000)
    rig.write_upper(target, b"o" * 1000)
    fence = rig.kernel(source, target, 1000)
    transfer = loop.transfer(Direction.DOWN, target, lower, 1000, after=(fence,))
    assert rig.link.start(transfer)
    assert not streams.step("down"), "the fence holds the copy"
    assert rig.link.poll(0) == []
    assert not readable(rig.link.fileno())
    streams.run("compute0")
    assert fence.query()
    assert rig.link.poll(0) == []
    streams.run("down")
    assert readable(rig.link.fileno())
    assert [completion.tag for completion in rig.link.poll(0)] == [transfer.tag]
    assert not readable(rig.link.fileno())
    assert rig.lower.tensor(lower, 1000)[0].numpy().tobytes() == b"n" * 1000
    rig.close()


def test_the_directions_do_not_hold_each_other_up() -> None:
    streams = StandInStreams()
    rig = Rig(streams, depth=1)
    loop = Loop(rig)
    down = loop.transfer(Direction.DOWN, *loop.slots(1000), 1000, Urgency.WRITEBACK)
    up = loop.transfer(Direction.UP, *loop.slots(1000), 1000)
    assert rig.link.start(down)
    assert not rig.link.start(loop.transfer(Direction.DOWN, *loop.slots(1000), 1000)), "full"
    assert rig.link.start(up)
    streams.run("up")
    assert [completion.tag for completion in rig.link.poll(0)] == [up.tag]
    rig.close()


def test_poll_wakes_when_another_thread_steps() -> None:
    streams = StandInStreams()
    rig = Rig(streams)
    loop = Loop(rig)
    transfer = loop.transfer(Direction.UP, *loop.slots(1000), 1000)
    assert rig.link.start(transfer)
    stepping = threading.Thread(target=lambda: streams.run("up"))
    stepping.start()
    assert [completion.tag for completion in rig.link.poll(60)] == [transfer.tag]
    stepping.join()
    rig.close()


def test_fences_without_streams_are_our_bug() -> None:
    streams = StandInStreams()
    streams.launch(lambda: None)
    rig = Rig(None)
    loop = Loop(rig)
    with pytest.raises(AssertionError, match="fence"):
        rig.link.start(loop.transfer(Direction.UP, *loop.slots(1000), 1000, after=(streams.record("compute"),)))


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"the depth of a link is .*not 0"):
        Rig(None, depth=0)
