"""The CUDA link. With a device, the contract over it. Without one, the same code over a namespace that stands in for
``torch.cuda``: stand-in streams run what the link queues, so that its order, its threads and its errors are seen anywhere.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from tests import programs
from tests.contracts.link import DeviceLinkContract, Loop
from tests.fakes import in_child, wait_readable
from tests.links.test_stand_in import ORDERS, Choose
from tiered.errors import MisuseError, ReadError, TieredError, WriteError
from tiered.links import cuda
from tiered.links.cuda import CudaConfig, CudaLink
from tiered.links.stand_in import StandInStreams
from tiered.tiers.dram import DramConfig, DramTier
from tiered.tiers.hbm import HbmConfig, HbmTier
from tiered.types import Completion, Direction, Fence, Slot, Transfer, Urgency

MIB = 1 << 20
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# With a device


class CudaRig:
    def __init__(self) -> None:
        self.upper = HbmTier(HbmConfig(32 * MIB, "cuda"))
        self.lower = DramTier(DramConfig(32 * MIB))
        self.link = CudaLink(self.upper, self.lower, config=CudaConfig(4 * MIB))
        self.compute = [torch.cuda.Stream(self.upper.device) for _ in range(2)]

    def write_upper(self, slot: Slot, data: bytes) -> None:
        self.upper.tensor(slot, len(data))[0].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        torch.cuda.synchronize()

    def read_upper(self, slot: Slot, nbytes: int) -> bytes:
        torch.cuda.synchronize()
        return self.upper.tensor(slot, nbytes)[0].cpu().numpy().tobytes()

    def advance(self) -> None:
        pass

    def kernel(self, source: Slot, target: Slot, nbytes: int, stream: int) -> Fence:
        assert self.upper.streams
        with torch.cuda.stream(self.compute[stream]):
            torch.cuda._sleep(50_000_000)  # some 30 ms: a copy that does not wait is seen
            self.upper.tensor(target, nbytes)[0].copy_(self.upper.tensor(source, nbytes)[0])
            return self.upper.streams.record(self.upper.streams.current())


@NO_CUDA
class TestCuda(DeviceLinkContract):
    @pytest.fixture
    def rig(self) -> Iterator[CudaRig]:
        rig = CudaRig()
        yield rig
        rig.link.close()
        torch.cuda.synchronize()
        rig.upper.close()
        rig.lower.close()


@NO_CUDA
def test_the_host_memory_is_pinned_until_close() -> None:
    rig = CudaRig()
    slot = rig.lower.allocate(5000)
    assert slot is not None
    assert rig.lower.tensor(slot, 5000)[0].is_pinned()
    rig.link.close()
    assert not rig.lower.tensor(slot, 5000)[0].is_pinned()


@NO_CUDA
def test_memory_that_cuda_does_not_pin_is_no_error_of_the_next_kernel() -> None:
    rig = CudaRig()
    slot = rig.lower.allocate(5000)
    assert slot is not None
    with pytest.raises(TieredError, match="does not pin"):
        CudaLink(rig.upper, rig.lower)  # it is pinned already
    assert torch.ones(3, device=rig.upper.device).sum().item() == 3
    assert rig.lower.tensor(slot, 5000)[0].is_pinned()
    rig.link.close()


# Without one


class FakeCuda:
    """``torch.cuda`` as far as the link uses it. Each wait for an event lets the device run, unless ``by_hand``."""

    def __init__(self, choose: Choose = lambda ready: ready[0]) -> None:
        self.streams = StandInStreams()
        self.choose = choose
        self.by_hand = False
        self.pinned: dict[int, int] = {}
        self.ever_pinned: dict[int, int] = {}
        self.pinning_gives = 0
        self.broken: str | None = None  # the message of every event from now on
        self.made = 0

    def is_available(self) -> bool:
        return True

    def Stream(self, device: torch.device) -> Hashable:
        self.made += 1
        return f"side{self.made}"

    def stream(self, stream: Hashable) -> AbstractContextManager[None]:
        return self.streams.use(stream)

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def Event(self, blocking: bool) -> FakeEvent:
        assert blocking, "others spin"
        return FakeEvent(self)

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.pinning_gives:
            self.pinned[address] = self.ever_pinned[address] = nbytes
        return self.pinning_gives

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"text of {code}"

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.broken == "at once":
            raise RuntimeError("CUDA error: sticky\nmore")
        self.streams.launch(lambda: target.copy_(source))


class FakeEvent:
    def __init__(self, owner: FakeCuda) -> None:
        self.owner = owner
        self.passed = threading.Event()

    def record(self, stream: Hashable) -> None:
        self.owner.streams.launch(self.passed.set, stream)

    def synchronize(self) -> None:
        if not self.owner.by_hand:
            self.owner.streams.run_all(self.owner.choose)
        assert self.passed.wait(60)
        if self.owner.broken:
            raise RuntimeError(self.owner.broken)


class FakeRig:
    def __init__(self, fake: FakeCuda, config: CudaConfig) -> None:
        self.fake = fake
        self.upper = HbmTier(HbmConfig(32 * MIB, "cpu"), streams=fake.streams)
        self.lower = DramTier(DramConfig(32 * MIB))
        self.link = CudaLink(self.upper, self.lower, config=config)
        self.loop = Loop(self)

    def write_upper(self, slot: Slot, data: bytes) -> None:
        ctypes.memmove(self.upper.tensor(slot, len(data))[0].data_ptr(), data, len(data))

    def read_upper(self, slot: Slot, nbytes: int) -> bytes:
        return ctypes.string_at(self.upper.tensor(slot, nbytes)[0].data_ptr(), nbytes)

    def advance(self) -> None:
        pass

    def kernel(self, source: Slot, target: Slot, nbytes: int, stream: int = 0) -> Fence:
        into, what = self.upper.tensor(target, nbytes)[0], self.upper.tensor(source, nbytes)[0]
        self.fake.streams.launch(lambda: into.copy_(what), f"compute{stream}")
        return self.fake.streams.record(f"compute{stream}")

    def transfer(self, direction: Direction, nbytes: int = 1000, urgency: Urgency = Urgency.DEMAND) -> Transfer:
        return self.loop.transfer(direction, *self.loop.slots(nbytes), nbytes, urgency)

    def next(self) -> Completion:
        wait_readable(self.link.fileno())
        (completion,) = self.link.poll(0)
        return completion


Open = Callable[..., FakeRig]


@pytest.fixture
def open_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    rigs: list[FakeRig] = []

    def make(choose: Choose = lambda ready: ready[0], window: int = 4 * MIB, by_hand: bool = False) -> FakeRig:
        fake = FakeCuda(choose)
        fake.by_hand = by_hand
        monkeypatch.setattr(cuda, "cuda", fake)
        monkeypatch.setattr(cuda, "_copy", fake.copy)
        rigs.append(FakeRig(fake, CudaConfig(window)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.fake.by_hand = False
        rig.fake.streams.run_all()
        rig.link.close()


class TestWithoutDevice(DeviceLinkContract):
    @pytest.fixture(params=ORDERS)
    def rig(self, request: pytest.FixtureRequest, open_rig: Open) -> FakeRig:
        return open_rig(ORDERS[request.param]())


def test_importing_it_needs_no_device_and_making_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    upper, lower = HbmTier(HbmConfig(MIB, "cpu")), DramTier(DramConfig(MIB))
    with pytest.raises(MisuseError, match="no CUDA device"):
        CudaLink(upper, lower)


def test_the_host_memory_is_one_pinned_region_until_close(open_rig: Open) -> None:
    rig = open_rig()
    assert rig.fake.pinned == {rig.lower.address: rig.lower.capacity}
    rig.link.close()
    assert rig.fake.pinned == {}
    rig.link.close()


def test_whole_pages_are_pinned(open_rig: Open) -> None:
    """A pool that no disk is behind need not end with a page, and CUDA pins nothing less."""
    rig = open_rig()
    lower = DramTier(DramConfig(MIB + 64, alignment=64))
    CudaLink(rig.upper, lower).close()
    assert rig.fake.ever_pinned[lower.address] == MIB + mmap.PAGESIZE


def test_memory_that_cannot_be_pinned_names_number_and_mend(open_rig: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig()
    rig.fake.pinning_gives = 2
    with pytest.raises(TieredError, match=r"33554432 bytes.*error 2 \(text of 2\).*give DRAM less"):
        CudaLink(rig.upper, rig.lower)


def test_nothing_is_reported_before_its_event_has_passed(open_rig: Open) -> None:
    rig = open_rig(by_hand=True)
    transfer = rig.transfer(Direction.UP)
    assert rig.link.start(transfer)
    assert rig.link.poll(0) == []
    assert rig.fake.streams.step("side1"), "the copy"
    assert rig.link.poll(0) == []
    assert rig.fake.streams.step("side1"), "the event"
    assert rig.next() == Completion(transfer.tag)


def test_the_directions_do_not_wait_for_each_other(open_rig: Open) -> None:
    rig = open_rig(by_hand=True)
    down, up = rig.transfer(Direction.DOWN), rig.transfer(Direction.UP)
    assert rig.link.start(down)
    assert rig.link.start(up)
    rig.fake.streams.run("side1")
    assert rig.next() == Completion(up.tag)
    rig.fake.streams.run("side2")
    assert rig.next() == Completion(down.tag)


def test_the_window_counts_what_is_as_urgent_in_the_same_direction(open_rig: Open) -> None:
    rig = open_rig(by_hand=True, window=2500)
    prefetches = [rig.transfer(Direction.UP, 1000, Urgency.PREFETCH) for _ in range(3)]
    assert [rig.link.start(transfer) for transfer in prefetches] == [True, True, False]
    assert rig.link.start(rig.transfer(Direction.DOWN, 1000, Urgency.WRITEBACK)), "another direction"
    assert rig.link.start(rig.transfer(Direction.UP, 2500)), "a demand does not count prefetches"
    rig.fake.streams.run("side1")
    ended: list[Completion] = []
    while len(ended) < 3:
        ended += rig.link.poll(60)
    assert [completion.tag for completion in ended][:2] == [transfer.tag for transfer in prefetches[:2]]


def test_two_are_taken_however_large_they_are(open_rig: Open) -> None:
    """Or the bus would idle between them."""
    rig = open_rig(by_hand=True, window=2500)
    assert [rig.link.start(rig.transfer(Direction.UP, 5000)) for _ in range(3)] == [True, True, False]
    assert not rig.link.start(rig.transfer(Direction.UP, 1))
    rig.fake.streams.run("side1")
    ended: list[Completion] = []
    while len(ended) < 2:
        ended += rig.link.poll(60)
    assert rig.link.start(rig.transfer(Direction.UP, 5000))


def test_what_was_promoted_counts_as_what_it_is(open_rig: Open) -> None:
    rig = open_rig(by_hand=True, window=2500)
    prefetch = rig.transfer(Direction.UP, 2000, Urgency.PREFETCH)
    assert rig.link.start(prefetch)
    rig.link.promote(prefetch.tag, Urgency.WRITEBACK)
    assert prefetch.urgency is Urgency.PREFETCH, "never less urgent"
    assert rig.link.start(rig.transfer(Direction.UP, 500))
    assert rig.link.start(rig.transfer(Direction.UP, 2000)), "there is one demand before it"
    rig.link.promote(prefetch.tag, Urgency.DEMAND)
    assert not rig.link.start(rig.transfer(Direction.UP, 1))


@pytest.mark.parametrize("when", ["at once", "CUDA error: an illegal memory access\nCompile with ..."])
@pytest.mark.parametrize(("direction", "kind"), [(Direction.UP, ReadError), (Direction.DOWN, WriteError)])
def test_a_device_that_fails_ends_the_transfer(
    open_rig: Open, when: str, direction: Direction, kind: type[TieredError]
) -> None:
    rig = open_rig()
    rig.fake.broken = when
    transfer = rig.transfer(direction)
    assert rig.link.start(transfer)
    completion = rig.next()
    assert completion.tag == transfer.tag
    assert isinstance(completion.error, kind)
    assert "cannot copy (CUDA error: " in str(completion.error)
    assert "\n" not in str(completion.error)
    assert transfer.key in str(completion.error)


def test_the_memory_is_kept_until_the_end_and_not_longer(open_rig: Open) -> None:
    """Also the lane's thread, which waits for more, holds nothing of the last transfer."""
    rig = open_rig()
    made: list[int] = []
    gone: list[int] = []
    tensor = rig.upper.tensor

    def watched(slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        found, owner = tensor(slot, nbytes)
        made.append(slot.offset)
        weakref.finalize(owner, gone.append, slot.offset)
        return found, owner

    rig.upper.tensor = watched  # type: ignore[method-assign]
    for _ in range(3):
        assert rig.link.start(rig.transfer(Direction.DOWN))
        assert rig.next().error is None
    rig.link.close()
    assert gone == made
    assert len(made) == 3


def test_close_ends_every_thread(open_rig: Open) -> None:
    before = set(threading.enumerate())
    rig = open_rig()
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"tiered-cuda-up", "tiered-cuda-down"}
    rig.link.close()
    assert set(threading.enumerate()) == before


def test_a_forked_child_closes_nothing_of_its_parents(open_rig: Open) -> None:
    rig = open_rig()

    def body() -> int:
        rig.link.close()
        return len(rig.fake.pinned)

    assert in_child(body) == "1"
    assert rig.link.start(rig.transfer(Direction.UP))
    assert rig.next().error is None


def test_a_window_of_nothing_is_refused(open_rig: Open) -> None:
    with pytest.raises(MisuseError, match=r"the window of a link .*not 0"):
        open_rig(window=0)


def test_it_imports_where_torch_has_no_cuda() -> None:
    program = "import tiered.links.cuda, torch; assert not torch.cuda.is_initialized()"
    child = programs.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
