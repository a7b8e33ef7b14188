from __future__ import annotations

import gc
import re
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.contracts.memory import MemoryContract, OpenMemory
from tests.contracts.streams import StreamsContract
from tests.contracts.tier import OpenTier, TierContract
from tiered.errors import CapacityError, MisuseError, TieredError
from tiered.interfaces import Movable, Streams
from tiered.tiers import hbm
from tiered.tiers.hbm import CudaStreams, HbmConfig, HbmTier
from tiered.types import Fence, format_size

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=NO_CUDA)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestHbmContract(TierContract):
    @pytest.fixture
    def open_tier(self, device: str) -> OpenTier:
        return lambda capacity: HbmTier(HbmConfig(capacity, device))


class TestHbmMemory(MemoryContract):
    @pytest.fixture
    def open_memory(self, device: str) -> OpenMemory:
        return lambda capacity: HbmTier(HbmConfig(capacity, device))


def test_its_slots_stay_where_they_are(device: str) -> None:
    """What moves bytes on a device is queued there, and fences would have to guard both places."""
    assert not isinstance(HbmTier(HbmConfig(1 << 20, device)), Movable)


class CudaDesk:
    """Cells on the device. Writing sleeps first, so that what does not wait is early."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.streams = CudaStreams(self.device)
        self.cells = torch.zeros(8, dtype=torch.int64, device=self.device)
        torch.cuda.synchronize()

    def stream(self) -> object:
        return torch.cuda.Stream(self.device)

    def use(self, stream: object) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def write(self, stream: object, cell: int, value: int) -> None:
        with self.use(stream):
            torch.cuda._sleep(10_000_000)
            self.cells[cell : cell + 1].fill_(value)

    def copy(self, stream: object, source: int, target: int) -> None:
        with self.use(stream):
            self.cells[target : target + 1].copy_(self.cells[source : source + 1])

    def finish(self) -> None:
        torch.cuda.synchronize()

    def read(self, cell: int) -> int:
        return int(self.cells[cell])


@NO_CUDA
class TestCudaStreams(StreamsContract):
    @pytest.fixture
    def desk(self) -> CudaDesk:
        return CudaDesk()


def test_slots_are_aligned_and_on_the_device(device: str) -> None:
    tier = HbmTier(HbmConfig(100_000, device))
    assert tier.capacity == 195 * 512
    assert tier.device.type == device
    for nbytes in (1, 513, 5000):
        slot = tier.allocate(nbytes)
        assert slot is not None
        assert slot.offset % 512 == slot.nbytes % 512 == 0
        tensor, _ = tier.tensor(slot, nbytes)
        assert tensor.data_ptr() % 512 == 0
        assert tensor.device == tier.device
    assert tier.used == 512 + 1024 + 5120
    assert tier.largest == tier.capacity - tier.used


@pytest.mark.parametrize("capacity", [511, 1, 0, -5])
def test_too_small_names_the_minimum(capacity: int) -> None:
    with pytest.raises(CapacityError, match="minimum is 512"):
        HbmTier(HbmConfig(capacity, "cpu"))


@pytest.mark.parametrize("capacity", [1 << 60, 1 << 70])
def test_more_than_the_system_gives_is_refused_with_the_number(capacity: int) -> None:
    with pytest.raises(CapacityError, match=f"{re.escape(format_size(capacity))} of memory for the HBM tier"):
        HbmTier(HbmConfig(capacity, "cpu"))


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", ""])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(MisuseError, match=f"'{name}' is not a device"):
        HbmTier(HbmConfig(4096, name))


def test_a_device_of_another_kind() -> None:
    with pytest.raises(MisuseError, match="device meta"):
        HbmTier(HbmConfig(4096, "meta"))


def test_the_arena_is_given_back_with_the_last_alias(device: str) -> None:
    """torch's allocators call it freed; on a CPU, the storage's own lifetime says so."""
    tier = HbmTier(HbmConfig(1 << 20, device))
    slot = tier.allocate(10)
    assert slot is not None
    tensor, owner = tier.tensor(slot, 10)
    arena = tier._arena
    assert arena is not None
    kept = arena.untyped_storage()._weak_ref()  # type: ignore[no-untyped-call]
    del arena
    tier.close()
    del tier, tensor
    gc.collect()
    assert not torch.UntypedStorage._expired(kept), "the owner alone keeps it"
    del owner
    gc.collect()
    assert torch.UntypedStorage._expired(kept)
    torch.UntypedStorage._free_weak_ref(kept)


def test_streams_may_be_given() -> None:
    class None_:
        def current(self) -> object:
            return 0

        def record(self, stream: object) -> Fence:
            raise NotImplementedError

        def wait(self, stream: object, fence: Fence) -> None:
            raise NotImplementedError

        def synchronize(self) -> None:
            raise NotImplementedError

    streams = None_()
    assert isinstance(streams, Streams)
    assert HbmTier(HbmConfig(4096, "cpu"), streams=streams).streams is streams
    assert HbmTier(HbmConfig(4096, "cpu")).streams is None


# Without a GPU: what is asked of torch.cuda, against a namespace that stands in for it


def test_no_cuda_device_is_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MisuseError, match="no CUDA device"):
        HbmTier(HbmConfig(4096))


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 20, 8 << 20))


@pytest.mark.usefixtures("two_devices")
def test_a_cuda_device_that_is_not_there_is_misuse() -> None:
    with pytest.raises(MisuseError, match="no CUDA device 2: this machine has 2"):
        HbmTier(HbmConfig(4096, "cuda:2"))


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("refusal", "kind", "message"),
    [
        (torch.OutOfMemoryError("no"), CapacityError, r"cuda:1 refuses 16777216 bytes \(16.0 MiB\).*3.0 MiB of 8.0 MiB"),
        (RuntimeError("CUDA error: unknown\nmore"), TieredError, "cuda:1 cannot give .*: CUDA error: unknown$"),
    ],
)
def test_a_device_that_refuses(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception, kind: type[Exception], message: str
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise refusal

    monkeypatch.setattr(hbm.torch, "empty", refuse)
    with pytest.raises(kind, match=message):
        HbmTier(HbmConfig(16 << 20, "cuda"))


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("fails", [False, True])
def test_close_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """torch would hand the arena on while a stream that it does not know of still reads there."""
    waited: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        waited.append(device)
        if fails:
            raise RuntimeError("CUDA error: unknown")

    monkeypatch.setattr(hbm, "_allocate", lambda nbytes, _: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    tier = HbmTier(HbmConfig(4096, "cuda"))
    tier.close()
    tier.close()
    assert waited == [torch.device("cuda", 1)]


def test_a_range_says_what_torch_wants_to_know() -> None:
    arena = torch.zeros(4096, dtype=torch.uint8)
    found: dict[str, Any] = hbm._Range(arena, 512, 100).__cuda_array_interface__
    assert found["data"] == (arena.data_ptr() + 512, False)
    assert (found["shape"], found["typestr"], found["strides"]) == ((100,), "|u1", None)


def test_cuda_streams_ask_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            calls.append(("record", self, stream))

    class Stream:
        def wait_event(self, event: object) -> None:
            calls.append(("wait", self, event))

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (stream, device))
    streams = CudaStreams(torch.device("cuda", 1))
    assert isinstance(streams, Streams)
    assert streams.current() == (stream, torch.device("cuda", 1))
    fence = streams.record(stream)
    streams.wait(stream, fence)
    assert calls == [("record", fence, stream), ("wait", stream, fence)]
