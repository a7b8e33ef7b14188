from __future__ import annotations

import ctypes
import errno
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.link import SIZES, LinkContract, Loop
from tests.fakes import InstantBackend, ManualBackend, NativeOver
from tiered.errors import CorruptionError, MisuseError, ReadError, ShortTransfer, StoreClosed, TransferError, WriteError
from tiered.format import stripes
from tiered.interfaces import IOBackend, NativeBackend
from tiered.io.aiofiles import AiofilesBackend
from tiered.io.posix import PosixBackend
from tiered.links.disk import DiskConfig, DiskLink
from tiered.links.native import NativeDiskLink, native_link_unavailable
from tiered.links.stand_in import StandInFence
from tiered.tiers.dram import DramConfig, DramTier
from tiered.tiers.nvme import NvmeConfig, NvmeTier
from tiered.types import Direction, IORequest, Location, Operation, Slot, Transfer, Urgency

MIB = 1 << 20
PIECE = 4 * MIB
UUID = bytes(range(16))
FD = 77
ALIGNMENT = 4096


needs_native = pytest.mark.skipif(native_link_unavailable() is not None, reason=f"no native link: {native_link_unavailable()}")


@pytest.fixture(params=["python", pytest.param("native", marks=needs_native)], scope="module", autouse=True)
def kind(request: pytest.FixtureRequest) -> str:
    """Which link the fakes of a test have: each test is of both."""
    Fake.kind = request.param
    return str(request.param)


def link_over(backend: IOBackend, kind: str, **more: Any) -> DiskLink | NativeDiskLink:
    if kind == "python":
        return DiskLink(backend, **more)
    return NativeDiskLink(backend if isinstance(backend, NativeBackend) else NativeOver(backend), **more)


@dataclass
class Desk:
    """A DRAM arena, an NVMe tier or a stand-in, and the link between them."""

    link: DiskLink | NativeDiskLink
    upper: DramTier
    lower: NvmeTier | DramTier

    def write_upper(self, slot: Slot, data: bytes) -> None:
        ctypes.memmove(self.upper.address + slot.offset, data, len(data))

    def read_upper(self, slot: Slot, nbytes: int) -> bytes:
        return ctypes.string_at(self.upper.address + slot.offset, nbytes)

    def advance(self) -> None:
        pass


class Fake(Desk):
    """The same over a backend whose completions the test releases."""

    backend: ManualBackend
    kind = "python"

    def __init__(
        self,
        backend: ManualBackend,
        config: DiskConfig,
        alignment: int = ALIGNMENT,
        room: int = 64 * MIB,
        locate: Callable[[Slot], Location] = lambda slot: Location(FD, slot.offset, "/s/data.0"),
    ):
        self.backend = backend
        link_to = DramTier(DramConfig(room))
        lower = DramTier(DramConfig(room))  # only its offsets are used: the bytes are in backend.files
        lower.name = "nvme"
        link = link_over(
            backend, self.kind, address=link_to.address, locate=locate, uuid=UUID, alignment=alignment, config=config
        )
        super().__init__(link, link_to, lower)
        self.loop = Loop(self)

    @property
    def file(self) -> bytearray:
        return self.backend.files.setdefault(FD, bytearray())

    def pair(self, nbytes: int, data: bytes = b"") -> tuple[Slot, Slot]:
        upper, lower = self.loop.slots(nbytes)
        self.write_upper(upper, data)
        return upper, lower

    def store(self, nbytes: int) -> tuple[Slot, Slot, bytes, bytes]:
        """Write random bytes down; both slots, the bytes and their checksums."""
        data = random.Random(nbytes).randbytes(nbytes)
        upper, lower = self.pair(nbytes, data)
        ended = self.drive(self.loop.transfer(Direction.DOWN, upper, lower, nbytes))
        self.write_upper(upper, bytes(nbytes))
        return upper, lower, data, ended

    def drive(self, transfer: Transfer) -> bytes:
        """Run one transfer without faults; its checksums."""
        assert self.link.start(transfer)
        while True:
            self.backend.complete_all()
            for completion in self.link.poll(0):
                assert completion.tag == transfer.tag
                assert completion.error is None
                return completion.checksums

    def in_flight(self) -> list[tuple[str, int, int]]:
        return [(r.operation.value, r.offset, r.nbytes) for r in self.backend.pending.values()]


def manual(depth: int = 16, block: int = MIB, window: int = 32 * MIB, together: int = 1, **more: Any) -> Fake:
    """By default each transfer is submitted when it is started."""
    return Fake(ManualBackend(depth), DiskConfig(block, window=window, together=together), **more)


# The contract, over files in memory and over real ones


class TestContractInMemory(LinkContract):
    @pytest.fixture(params=[(MIB, 16), (4096, 3), (3 * MIB, 2), (5 * MIB + 4096, 16)], ids=lambda p: f"{p[0]}x{p[1]}")
    def rig(self, request: pytest.FixtureRequest) -> Iterator[Fake]:
        block, depth = request.param
        fake = Fake(InstantBackend(depth), DiskConfig(block, window=4 * MIB))
        yield fake
        fake.link.close()


def backends() -> list[object]:
    found: list[object] = [pytest.param(PosixBackend, id="posix"), pytest.param(AiofilesBackend, id="aiofiles")]
    try:
        from tiered.io.libaio import LibaioBackend
    except ImportError as error:  # it needs a compiler
        return [*found, pytest.param(None, id="libaio", marks=pytest.mark.skip(f"no libaio: {error}"))]
    return [*found, pytest.param(LibaioBackend, id="libaio")]


class TestContractOnDisk(LinkContract):
    drives = 0
    """Folders beside the store's own; none: the data file is in that."""

    @pytest.fixture(params=backends())
    def rig(self, request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Iterator[Desk]:
        paths = [tmp_path / f"drive{index}" for index in range(self.drives)]
        lower = NvmeTier.open(NvmeConfig(tmp_path / "store", 64 * MIB, paths=paths))
        upper = DramTier(DramConfig(64 * MIB, lower.alignment))
        link = link_over(
            open_backend(request.param),
            kind,
            address=upper.address,
            locate=lower.locate,
            uuid=lower.uuid,
            alignment=lower.alignment,
            config=DiskConfig(window=8 * MIB),
        )
        yield Desk(link, upper, lower)
        link.close()
        lower.close()
        upper.close()

    def test_a_flipped_bit_on_the_disk_is_found(self, rig: Desk) -> None:
        loop = Loop(rig)
        nbytes = 5 * MIB + 123
        upper, lower = loop.slots(nbytes)
        rig.write_upper(upper, random.Random(1).randbytes(nbytes))
        down = loop.run(loop.transfer(Direction.DOWN, upper, lower, nbytes))
        assert isinstance(rig.lower, NvmeTier)
        rig.lower.sync()
        place = stripes.located(rig.lower.locate(lower), PIECE)
        with open(place.path, "r+b") as file:
            file.seek(place.offset + 5)
            was = file.read(1)[0]
            file.seek(place.offset + 5)
            file.write(bytes([was ^ 4]))
        up = loop.run(loop.transfer(Direction.UP, upper, lower, nbytes, checksums=down.checksums))
        assert isinstance(up.error, CorruptionError)
        assert (up.error.path, up.error.offset) == (place.path, place.offset)

    def test_a_file_that_was_cut_is_a_short_transfer(self, rig: Desk) -> None:
        loop = Loop(rig)
        nbytes = 3 * MIB
        upper, lower = loop.slots(nbytes)
        down = loop.run(loop.transfer(Direction.DOWN, upper, lower, nbytes))
        assert isinstance(rig.lower, NvmeTier)
        place = rig.lower.locate(lower)
        with open(place.path, "r+b") as file:
            file.truncate(place.offset + MIB + 8192)
        up = loop.run(loop.transfer(Direction.UP, upper, lower, nbytes, checksums=down.checksums))
        assert isinstance(up.error, ShortTransfer)
        assert up.error.path == place.path
        assert up.error.offset == place.offset, "where its block begins"


class TestContractOnTwoDrives(TestContractOnDisk):
    drives = 2

    def test_each_slot_is_written_to_its_own_file(self, rig: Desk) -> None:
        loop = Loop(rig)
        assert isinstance(rig.lower, NvmeTier)
        written = []
        for number in range(4):
            upper, lower = loop.slots(8192)
            rig.write_upper(upper, bytes([number + 1]) * 8192)
            assert loop.run(loop.transfer(Direction.DOWN, upper, lower, 8192)).error is None
            written.append(rig.lower.locate(lower))
        rig.lower.sync()
        assert {place.path for place in written} == {file.path for file in rig.lower.files}
        for number, place in enumerate(written):
            with open(place.path, "rb") as file:
                file.seek(place.offset)
                assert file.read(8192) == bytes([number + 1]) * 8192


class TestContractOnStripes(TestContractOnDisk):
    """With every slot striped over the drives."""

    drives = 3

    @pytest.fixture(autouse=True)
    def lowered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stripes, "LARGEST_WHOLE", 0)

    def test_each_stripe_is_written_to_its_own_file(self, rig: Desk) -> None:
        loop = Loop(rig)
        assert isinstance(rig.lower, NvmeTier)
        data = random.Random(5).randbytes(13 * MIB + 5)
        upper, lower = loop.slots(len(data))
        rig.write_upper(upper, data)
        assert loop.run(loop.transfer(Direction.DOWN, upper, lower, len(data))).error is None
        rig.lower.sync()
        for stripe, begin in enumerate(range(0, len(data), PIECE)):
            part = rig.lower.locate(lower).parts[stripe % 3]
            with open(part.path, "rb") as file:
                file.seek(part.offset + stripe // 3 * PIECE)
                piece = data[begin : begin + PIECE]
                assert file.read(len(piece)) == piece


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("block", [65536, 3 * MIB, PIECE, 5 * MIB + 5000])
def test_blocks_of_a_striped_slot_end_where_stripes_do(nbytes: int, block: int) -> None:
    def locate(slot: Slot) -> Location:
        return stripes.striped([Location(FD + index, slot.offset, f"/{index}") for index in range(2)])

    fake = Fake(InstantBackend(64), DiskConfig(block), locate=locate)
    upper, lower, data, checksums = fake.store(nbytes)
    at = 0
    for request in fake.backend.submitted:
        assert request.address == fake.upper.address + upper.offset + at
        stripe, within = divmod(at, PIECE)
        assert request.fd == FD + stripe % 2
        assert request.offset == lower.offset + stripe // 2 * PIECE + within
        assert request.nbytes <= min(block, PIECE - within)
        at += request.nbytes
    assert at == -(-nbytes // ALIGNMENT) * ALIGNMENT
    fake.drive(fake.loop.transfer(Direction.UP, upper, lower, nbytes, checksums=checksums))
    assert fake.read_upper(upper, nbytes) == data


@pytest.mark.parametrize("stripe", range(3))
@pytest.mark.parametrize("result", [-errno.EIO, 4096])
def test_errors_name_the_file_of_the_block(stripe: int, result: int) -> None:
    def locate(slot: Slot) -> Location:
        return stripes.striped([Location(FD + index, slot.offset, f"/{index}") for index in range(2)])

    fake = Fake(ManualBackend(16), DiskConfig(2 * MIB, together=1), locate=locate)
    upper, lower = fake.pair(9 * MIB)
    assert fake.link.start(fake.loop.transfer(Direction.UP, upper, lower, 9 * MIB))
    where = (FD + stripe % 2, lower.offset + stripe // 2 * PIECE)
    (tag,) = [tag for tag, request in fake.backend.pending.items() if (request.fd, request.offset) == where]
    fake.backend.complete(tag, result)
    fake.backend.complete_all()
    (ended,) = fake.link.poll(0)
    assert isinstance(ended.error, ReadError if result < 0 else ShortTransfer)
    assert (ended.error.path, ended.error.offset) == (f"/{stripe % 2}", where[1])


def test_a_fence_that_has_not_passed_is_our_bug() -> None:
    fake = manual()
    transfer = fake.loop.transfer(Direction.UP, *fake.pair(100), 100, after=(StandInFence(),))
    with pytest.raises(AssertionError, match="fence"):
        fake.link.start(transfer)


def open_backend(backend: Callable[..., IOBackend]) -> IOBackend:
    return backend()


# Blocks


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("block", [4096, 65536, MIB, 3 * MIB, PIECE, 5 * MIB + 5000])
def test_every_byte_moves_once_in_aligned_blocks(nbytes: int, block: int) -> None:
    fake = Fake(InstantBackend(64), DiskConfig(block))
    upper, lower, data, checksums = fake.store(nbytes)
    rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    at = 0
    for request in fake.backend.submitted:
        assert request.operation is Operation.WRITE
        assert request.fd == FD
        assert (request.offset - lower.offset, request.address - fake.upper.address - upper.offset) == (at, at)
        at += request.nbytes
        assert request.nbytes == block - block % ALIGNMENT or at == rounded
    assert at == rounded
    assert bytes(fake.file[lower.offset : lower.offset + nbytes]) == data
    assert not any(fake.file[lower.offset + nbytes : lower.offset + rounded])
    fake.drive(fake.loop.transfer(Direction.UP, upper, lower, nbytes, checksums=checksums))
    assert fake.read_upper(upper, nbytes) == data


def test_padding_is_zeroed_before_a_write() -> None:
    fake = manual()
    upper, lower = fake.pair(4096, b"\xee" * 4096)
    fake.drive(fake.loop.transfer(Direction.DOWN, upper, lower, 100))
    assert fake.read_upper(upper, 4096) == b"\xee" * 100 + bytes(3996)
    assert bytes(fake.file[lower.offset : lower.offset + 4096]) == b"\xee" * 100 + bytes(3996)


def test_a_block_smaller_than_the_alignment_becomes_one_alignment() -> None:
    fake = Fake(InstantBackend(), DiskConfig(block=100), alignment=8192)
    upper, lower = fake.pair(20_000)
    fake.drive(fake.loop.transfer(Direction.DOWN, upper, lower, 10_000))
    assert [request.nbytes for request in fake.backend.submitted] == [8192, 8192]


@pytest.mark.parametrize(("name", "size"), [("block", 0), ("window", 0), ("flight", 0), ("block", -1)])
def test_sizes_that_move_nothing_are_refused(name: str, size: int) -> None:
    with pytest.raises(MisuseError, match=f"{name} of a link to a disk is a number of bytes, .* not {size}"):
        DiskConfig(**{name: size})


def test_a_backend_that_needs_more_alignment_is_refused() -> None:
    with pytest.raises(MisuseError, match="8192 bytes"):
        Fake(ManualBackend(alignment=8192), DiskConfig())


# The ring and the window


def test_the_ring_stays_full_across_transfers() -> None:
    fake = manual(depth=4, block=65536)
    for _ in range(3):
        nbytes = 2 * 65536 + 1  # two blocks and a small one
        assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(nbytes), nbytes))
    ended = 0
    for left in range(9, 0, -1):
        assert len(fake.backend.pending) == min(4, left)
        fake.backend.complete(next(iter(fake.backend.pending)))
        ended += len(fake.link.poll(0))
    assert ended == 3


def test_small_transfers_are_submitted_together_while_others_are_in_flight() -> None:
    fake = manual(together=3 * 4096)
    sizes = []
    submit = fake.backend.submit

    def counted(batch: list[IORequest]) -> int:
        sizes.append(len(batch))
        return submit(batch)

    fake.backend.submit = counted  # type: ignore[method-assign]
    for _ in range(6):
        upper, lower = fake.pair(4096)
        fake.file.extend(bytes(max(0, lower.offset + 4096 - len(fake.file))))
        assert fake.link.start(fake.loop.transfer(Direction.UP, upper, lower, 4096))
    assert sizes == [1, 3], "at once where nothing is in flight, then when there are enough"
    assert fake.link.poll(0) == []
    assert sizes == [1, 3, 2], "and the rest before anything is looked for"
    fake.backend.complete_all()
    assert len(fake.link.poll(0)) == 6


def test_urgent_blocks_go_first_and_equals_in_order_of_arrival() -> None:
    fake = manual(depth=2)
    names = {}
    for name, urgency in (
        ("w1", Urgency.WRITEBACK),
        ("w2", Urgency.WRITEBACK),
        ("p1", Urgency.PREFETCH),
        ("d1", Urgency.DEMAND),
        ("d2", Urgency.DEMAND),
    ):
        upper, lower = fake.pair(3 * MIB)
        names[lower.offset] = name
        direction = Direction.DOWN if urgency is Urgency.WRITEBACK else Direction.UP
        fake.file.extend(bytes(max(0, lower.offset + lower.nbytes - len(fake.file))))
        assert fake.link.start(fake.loop.transfer(direction, upper, lower, 3 * MIB, urgency))
    while fake.backend.pending:
        fake.backend.complete_all()
        fake.link.poll(0)
    order = [names[r.offset - r.offset % (3 * MIB)] for r in fake.backend.submitted]
    assert order == ["w1"] * 2 + ["d1"] * 3 + ["d2"] * 3 + ["p1"] * 3 + ["w1"] + ["w2"] * 3


def test_a_speculative_read_has_one_block_in_flight_and_none_beside_others() -> None:
    fake = manual(depth=8)

    def start(urgency: Urgency) -> int:
        upper, lower = fake.pair(3 * MIB)
        fake.file.extend(bytes(max(0, lower.offset + lower.nbytes - len(fake.file))))
        transfer = fake.loop.transfer(Direction.UP, upper, lower, 3 * MIB, urgency)
        assert fake.link.start(transfer)
        return transfer.tag

    def step() -> list[int]:
        fake.backend.complete(next(iter(fake.backend.pending)))
        return [completion.tag for completion in fake.link.poll(0)]

    speculative = start(Urgency.SPECULATIVE)
    assert len(fake.backend.pending) == 1
    assert not step()
    assert len(fake.backend.pending) == 1
    demand = start(Urgency.DEMAND)
    assert len(fake.backend.pending) == 4, "the demand finds one block before it"
    assert not step()
    assert len(fake.backend.pending) == 3, "and no other begins beside it"
    assert [tag for _ in range(3) for tag in step()] == [demand]
    assert len(fake.backend.pending) == 1
    assert step() == [speculative]
    other = start(Urgency.SPECULATIVE)
    assert len(fake.backend.pending) == 1
    fake.link.promote(other, Urgency.DEMAND)
    assert len(fake.backend.pending) == 3, "who waits for it has all of the link"
    assert [tag for _ in range(3) for tag in step()] == [other]


def test_promotion_overtakes() -> None:
    fake = manual(depth=1)
    slots = [fake.pair(2 * MIB) for _ in range(3)]
    tags = []
    for upper, lower in slots:
        transfer = fake.loop.transfer(Direction.DOWN, upper, lower, 2 * MIB, Urgency.WRITEBACK)
        tags.append(transfer.tag)
        assert fake.link.start(transfer)
    fake.link.promote(tags[2], Urgency.DEMAND)
    fake.link.promote(tags[2], Urgency.PREFETCH)  # not downwards
    fake.link.promote(12345, Urgency.DEMAND)  # long gone
    ended = []
    while fake.backend.pending:
        fake.backend.complete_all()
        ended += [completion.tag for completion in fake.link.poll(0)]
    assert ended == [tags[2], tags[0], tags[1]]
    upper, lower = slots[0]
    assert fake.link.start(fake.loop.transfer(Direction.DOWN, upper, lower, MIB)), "the window's accounts are even"


def test_the_window_refuses_and_an_idle_link_accepts() -> None:
    fake = manual(window=2 * MIB)
    big = fake.loop.transfer(Direction.DOWN, *fake.pair(9 * MIB), 9 * MIB, Urgency.WRITEBACK)
    assert fake.link.start(big), "one of any size when idle"
    small = fake.loop.transfer(Direction.DOWN, *fake.pair(1), 1, Urgency.WRITEBACK)
    assert not fake.link.start(small)
    fake.backend.complete_all()
    assert [completion.tag for completion in fake.link.poll(0)] == [big.tag]
    assert fake.link.start(small)


def test_a_window_full_of_write_backs_does_not_refuse_demand() -> None:
    fake = manual(depth=2, window=2 * MIB)

    def start(urgency: Urgency) -> bool:
        return fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(2 * MIB), 2 * MIB, urgency))

    assert start(Urgency.WRITEBACK)
    assert not start(Urgency.WRITEBACK)
    assert start(Urgency.PREFETCH)
    assert not start(Urgency.PREFETCH)
    assert start(Urgency.DEMAND)
    assert not start(Urgency.DEMAND)


def test_a_window_full_of_writes_takes_reads() -> None:
    fake = manual(window=2 * MIB)
    upper, lower, _, checksums = fake.store(2 * MIB)
    assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(2 * MIB), 2 * MIB))
    assert not fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(2 * MIB), 2 * MIB))
    assert fake.link.start(fake.loop.transfer(Direction.UP, upper, lower, 2 * MIB, Urgency.PREFETCH, checksums))


def test_promotion_moves_the_bytes_to_the_other_window() -> None:
    fake = manual(window=2 * MIB)

    def start(urgency: Urgency) -> int:
        transfer = fake.loop.transfer(Direction.DOWN, *fake.pair(2 * MIB), 2 * MIB, urgency)
        return transfer.tag if fake.link.start(transfer) else 0

    for _ in range(2):
        tag = start(Urgency.WRITEBACK)
        assert tag
        fake.link.promote(tag, Urgency.DEMAND)
        assert not start(Urgency.DEMAND)
        fake.backend.complete_all()
        assert [completion.tag for completion in fake.link.poll(0)] == [tag]


def test_what_the_backend_does_not_take_is_offered_again() -> None:
    fake = manual(depth=8)
    upper, lower = fake.pair(6 * MIB, random.Random(3).randbytes(6 * MIB))
    fake.backend.refuse_after(1)
    transfer = fake.loop.transfer(Direction.DOWN, upper, lower, 6 * MIB)
    assert fake.link.start(transfer)
    assert len(fake.backend.pending) == 1
    while not (ended := fake.link.poll(0)):
        fake.backend.complete_all()
    assert ended[0].error is None
    assert bytes(fake.file[lower.offset : lower.offset + 6 * MIB]) == fake.read_upper(upper, 6 * MIB)
    assert sorted(request.offset for request in fake.backend.submitted) == [lower.offset + i * MIB for i in range(6)]


def test_the_first_blocks_are_on_their_way_before_later_pieces_are_hashed() -> None:
    fake = manual(depth=16)
    assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(9 * MIB), 9 * MIB))
    assert fake.backend.batches == [4, 4, 1]
    fake = manual(depth=6)
    assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(9 * MIB), 9 * MIB))
    assert fake.backend.offered == [4, 2], "no more than the ring has room for"


def test_what_will_be_written_next_is_hashed_while_the_ring_is_full() -> None:
    fake = manual(depth=4)
    tensors = [fake.pair(8 * MIB) for _ in range(2)]
    for upper, lower in tensors:
        assert fake.link.start(fake.loop.transfer(Direction.DOWN, upper, lower, 8 * MIB))
    assert fake.backend.batches == [4]
    assert fake.link.poll(0) == []
    for _ in range(3):  # each time the ring is filled at one go: nothing has to be hashed before
        fake.backend.complete_all()
        fake.link.poll(0)
    assert fake.backend.batches == [4, 4, 4, 4]


def test_no_more_bytes_are_in_flight_than_was_said() -> None:
    fake = Fake(ManualBackend(64), DiskConfig(block=MIB, flight=6 * MIB))
    for _ in range(3):
        assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(4 * MIB), 4 * MIB))
    assert len(fake.backend.pending) == 6
    fake = Fake(ManualBackend(64), DiskConfig(block=4 * MIB, flight=MIB))
    assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(4 * MIB), 4 * MIB))
    assert len(fake.backend.pending) == 1, "a block that is larger goes alone"


@pytest.mark.parametrize(("rate", "share"), [(100e6, 4), (0.8e9, 4), (0.9e9, 5), (2e9, 8)])
def test_write_backs_have_half_of_the_ring_and_more_on_a_quick_drive(
    rate: float, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = 0
    monkeypatch.setattr("tiered.links.disk.time.monotonic", lambda: moved / rate)
    fake = Fake(ManualBackend(64), DiskConfig(block=MIB, flight=8 * MIB, window=16 * MIB))
    pairs, waiting, seen = [fake.pair(4 * MIB) for _ in range(5)], 0, []
    while moved < 40 * MIB:
        while fake.link.start(fake.loop.transfer(Direction.DOWN, *pairs[waiting % 5], 4 * MIB, Urgency.WRITEBACK)):
            waiting += 1
        seen.append(len(fake.backend.pending))
        moved += seen[-1] * MIB
        fake.backend.complete_all()
        while fake.link.poll(0):
            pass
    assert seen[:4] == [4] * 4, "nothing is known yet"
    assert set(seen[5:]) == {share}


def test_a_read_finds_half_of_the_ring_free_of_write_backs() -> None:
    fake = Fake(ManualBackend(64), DiskConfig(block=MIB, flight=8 * MIB))
    upper, lower, _, checksums = fake.store(4 * MIB)
    for _ in range(3):
        assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(4 * MIB), 4 * MIB, Urgency.WRITEBACK))
    assert len(fake.backend.pending) == 4
    assert fake.link.start(fake.loop.transfer(Direction.UP, upper, lower, 4 * MIB, checksums=checksums))
    assert len(fake.backend.pending) == 8


def test_of_equal_urgency_reads_go_first_and_writes_keep_a_quarter() -> None:
    fake = Fake(ManualBackend(64), DiskConfig(block=MIB, flight=8 * MIB))
    upper, lower, _, checksums = fake.store(4 * MIB)
    for _ in range(4):
        assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(4 * MIB), 4 * MIB))
    for _ in range(3):
        assert fake.link.start(fake.loop.transfer(Direction.UP, upper, lower, 4 * MIB, checksums=checksums))
    assert [what for what, *_ in fake.in_flight()] == ["write"] * 8, "what is in flight stays"
    fake.backend.complete_all()
    fake.link.poll(0)
    assert sorted(what for what, *_ in fake.in_flight()) == ["read"] * 6 + ["write"] * 2


def test_poll_waits_for_a_whole_transfer() -> None:
    fake = Fake(InstantBackend(1), DiskConfig())
    transfer = fake.loop.transfer(Direction.DOWN, *fake.pair(5 * MIB), 5 * MIB)
    assert fake.link.start(transfer)
    assert [completion.tag for completion in fake.link.poll(60)] == [transfer.tag]


# Checksums


@pytest.mark.parametrize("nbytes", [1, 4097, PIECE, PIECE + 1, 9 * MIB])
def test_checksums_cover_store_tensor_generation_and_offset(nbytes: int) -> None:
    fake = manual(depth=64)
    data = random.Random(nbytes).randbytes(nbytes)
    upper, lower = fake.pair(nbytes, data)
    transfer = fake.loop.transfer(Direction.DOWN, upper, lower, nbytes, tensor_id=2**63)
    transfer.generation = 2**64 - 1
    expected = b"".join(
        xxhash.xxh3_128_digest(struct.pack("<16sQQQ", UUID, 2**63, 2**64 - 1, at) + data[at : at + PIECE])
        for at in range(0, nbytes, PIECE)
    )
    assert fake.drive(transfer) == expected


@pytest.mark.parametrize("nbytes", [1, 4096, PIECE - 1, PIECE, PIECE + 1, 9 * MIB])
@pytest.mark.parametrize("block", [MIB, 3 * MIB])
def test_a_flipped_bit_anywhere_is_found(nbytes: int, block: int) -> None:
    fake = Fake(InstantBackend(), DiskConfig(block))
    upper, lower, data, checksums = fake.store(nbytes)
    chance = random.Random(nbytes)
    for at in {0, nbytes - 1, nbytes // 2, min(nbytes - 1, PIECE), min(nbytes, PIECE) - 1, chance.randrange(nbytes)}:
        fake.file[lower.offset + at] ^= 1 << chance.randrange(8)
        transfer = fake.loop.transfer(Direction.UP, upper, lower, nbytes, checksums=checksums)
        error = fake.loop.run(transfer).error
        assert isinstance(error, CorruptionError)
        where = lower.offset + at // PIECE * PIECE
        assert (error.key, error.tier, error.path, error.offset) == (transfer.key, "nvme", "/s/data.0", where)
        fake.file[lower.offset + at] = data[at]
    assert fake.loop.run(fake.loop.transfer(Direction.UP, upper, lower, nbytes, checksums=checksums)).error is None


def test_stale_swapped_and_misdirected_bytes_are_found() -> None:
    fake = Fake(InstantBackend(), DiskConfig())
    upper, lower, _, checksums = fake.store(2 * PIECE)

    def read(**changes: int) -> TransferError | None:
        transfer = fake.loop.transfer(Direction.UP, upper, lower, 2 * PIECE, checksums=checksums)
        for name, value in changes.items():
            setattr(transfer, name, value)
        error = fake.loop.run(transfer).error
        assert error is None or isinstance(error, TransferError)
        return error

    assert read() is None
    assert isinstance(read(generation=4), CorruptionError)
    assert isinstance(read(tensor_id=2), CorruptionError)
    first, second = fake.file[lower.offset : lower.offset + PIECE], fake.file[lower.offset + PIECE :]
    fake.file[lower.offset :] = second + first
    assert isinstance(read(), CorruptionError)


def test_without_checksums_nothing_is_checked() -> None:
    fake = Fake(InstantBackend(), DiskConfig())
    upper, lower, _data, _ = fake.store(5000)
    fake.file[lower.offset] ^= 1
    assert fake.loop.run(fake.loop.transfer(Direction.UP, upper, lower, 5000)).error is None


def test_padding_is_not_part_of_the_checksum() -> None:
    fake = Fake(InstantBackend(), DiskConfig())
    upper, lower, _data, checksums = fake.store(5000)
    fake.file[lower.offset + 6000] ^= 1
    assert fake.loop.run(fake.loop.transfer(Direction.UP, upper, lower, 5000, checksums=checksums)).error is None


# Faults


BLOCK = 65536


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("fault", [-errno.EIO, -errno.ENOSPC, -errno.EBADF, 0, 512, BLOCK - 512, BLOCK + 512])
@pytest.mark.parametrize("block", [0, 2, 4])
def test_a_fault_in_one_block(direction: Direction, fault: int, block: int) -> None:
    """The transfer ends once, with an error that names the block, and not while blocks of it are in flight."""
    fake = manual(depth=3, block=BLOCK, room=MIB)
    upper, lower, _data, _checksums = fake.store(5 * BLOCK)
    other = fake.loop.transfer(Direction.DOWN, *fake.pair(BLOCK), BLOCK)
    transfer = fake.loop.transfer(direction, upper, lower, 5 * BLOCK)
    before = len(fake.backend.submitted)
    assert fake.link.start(transfer)
    assert fake.link.start(other)
    failed_at = lower.offset + block * BLOCK
    tag = None
    while tag is None:
        tag = next((r.tag for r in fake.backend.pending.values() if r.offset == failed_at), None)
        if tag is None:
            fake.backend.complete(next(iter(fake.backend.pending)))
            assert fake.link.poll(0) == []
    if fault > BLOCK:
        fake.backend._move = lambda request, nbytes: nbytes  # type: ignore[method-assign]
    fake.backend.complete(tag, fault)
    mine = [r for r in fake.backend.pending.values() if lower.offset <= r.offset < lower.offset + lower.nbytes]
    ended = fake.link.poll(0)
    while not ended:
        assert mine, "ended at the last block in flight, and not before"
        fake.backend.complete(mine.pop().tag)
        ended = fake.link.poll(0)
    assert not mine
    assert [completion.tag for completion in ended] == [transfer.tag]
    error = ended[0].error
    expected = ShortTransfer if fault >= 0 else ReadError if direction is Direction.UP else WriteError
    assert type(error) is expected
    assert (error.key, error.tier, error.path, error.offset) == (transfer.key, "nvme", "/s/data.0", failed_at)
    assert error.errno == (None if fault >= 0 else -fault)
    assert ended[0].checksums == b""
    mine_ever = [r.offset for r in fake.backend.submitted[before:] if 0 <= r.offset - lower.offset < lower.nbytes]
    assert max(mine_ever) < failed_at + 3 * BLOCK, "the rest of it is dropped"
    fake.backend.complete_all()
    assert [(completion.tag, completion.error) for completion in fake.link.poll(0)] == [(other.tag, None)]
    again = fake.loop.transfer(Direction.DOWN, upper, lower, 5 * BLOCK)
    fake.drive(again)


def test_the_first_of_several_errors_is_reported() -> None:
    fake = manual()
    upper, lower = fake.pair(3 * MIB)
    assert fake.link.start(fake.loop.transfer(Direction.DOWN, upper, lower, 3 * MIB))
    first, second, third = fake.backend.pending
    fake.backend.complete(second, -errno.EIO)
    fake.backend.complete(first, -errno.ENOSPC)
    assert fake.link.poll(0) == []
    fake.backend.complete(third)
    (ended,) = fake.link.poll(0)
    assert isinstance(ended.error, WriteError)
    assert (ended.error.errno, ended.error.offset) == (errno.EIO, lower.offset + MIB)


def test_corruption_drops_the_rest() -> None:
    fake = manual(depth=4)
    upper, lower, _data, checksums = fake.store(16 * MIB)
    fake.file[lower.offset] ^= 1
    before = len(fake.backend.submitted)
    assert fake.link.start(fake.loop.transfer(Direction.UP, upper, lower, 16 * MIB, checksums=checksums))
    fake.backend.complete_all()
    assert fake.link.poll(0) == [], "the next blocks were handed over before the piece was hashed"
    assert len(fake.backend.submitted) - before == 8
    fake.backend.complete_all()
    (ended,) = fake.link.poll(0)
    assert isinstance(ended.error, CorruptionError)
    assert not fake.backend.pending
    assert len(fake.backend.submitted) - before == 8


def test_an_unknown_completion_is_our_bug() -> None:
    fake = manual()
    address = fake.upper.address
    fake.backend.submit([IORequest(Operation.WRITE, FD, 0, address, 4096, tag=1 << 40)])
    fake.backend.complete_all()
    with pytest.raises(KeyError):
        fake.link.poll(0)


def test_slots_without_room_for_the_padding_are_our_bug() -> None:
    fake = manual()
    for upper, lower in ((Slot(0, 4095), Slot(0, 4096)), (Slot(0, 4096), Slot(0, 4095))):
        with pytest.raises(AssertionError):
            fake.link.start(fake.loop.transfer(Direction.DOWN, upper, lower, 4095))


def test_close_in_the_middle_leaves_nothing_in_flight() -> None:
    fake = manual(depth=2)
    assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(9 * MIB), 9 * MIB))
    fake.link.close()
    assert not fake.backend.pending
    assert fake.backend.closed
    assert len(fake.backend.submitted) == 2, "what was not handed over is dropped"


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=10),
    block=st.sampled_from([4096, 12288, 65536]),
    depth=st.integers(1, 9),
    data=st.data(),
)
def test_any_order_of_completions_and_faults(sizes: list[int], block: int, depth: int, data: st.DataObject) -> None:
    """Each transfer ends once, with an error if and only if one of its blocks failed, and then none is in flight."""
    fake = manual(depth=depth, block=block, room=4 * MIB)
    live: dict[int, Transfer] = {}
    contents: dict[int, tuple[Slot, Slot, bytes]] = {}
    for nbytes in sizes:
        content = random.Random(nbytes).randbytes(nbytes)
        upper, lower = fake.pair(nbytes, content)
        urgency = data.draw(st.sampled_from(list(Urgency)))
        transfer = fake.loop.transfer(Direction.DOWN, upper, lower, nbytes, urgency)
        live[transfer.tag] = transfer
        contents[transfer.tag] = (upper, lower, content)
        assert fake.link.start(transfer)
    failed: set[int] = set()
    ended: dict[int, bool] = {}

    def owner(offset: int) -> int:
        return next(t.tag for t in live.values() if 0 <= offset - t.lower.offset < t.lower.nbytes)

    while fake.backend.pending:
        tag = data.draw(st.sampled_from(sorted(fake.backend.pending)))
        request = fake.backend.pending[tag]
        if data.draw(st.integers(0, 9)) == 0:
            failed.add(owner(request.offset))
            fake.backend.complete(tag, data.draw(st.sampled_from([-errno.EIO, 0, 512])))
        else:
            fake.backend.complete(tag)
        if data.draw(st.booleans()) or not fake.backend.pending:
            for completion in fake.link.poll(0):
                assert completion.tag not in ended
                ended[completion.tag] = completion.error is None
                transfer = live[completion.tag]
                assert not any(
                    0 <= r.offset - transfer.lower.offset < transfer.lower.nbytes for r in fake.backend.pending.values()
                )
    assert set(ended) == set(live)
    assert {tag for tag, well in ended.items() if not well} == failed
    for tag in set(live) - failed:
        _, lower, content = contents[tag]
        assert bytes(fake.file[lower.offset : lower.offset + len(content)]) == content


def test_a_demand_of_large_blocks_is_not_kept_from_the_ring_by_small_ones() -> None:
    """Whatever comes free is less than it needs, and whoever needs less than that would take it."""
    fake = Fake(ManualBackend(64), DiskConfig(block=4 * MIB, flight=8 * MIB, window=64 * MIB), room=96 * MIB)
    for _ in range(40):
        upper, lower = fake.pair(MIB)
        assert fake.link.start(fake.loop.transfer(Direction.UP, upper, lower, MIB, Urgency.PREFETCH))
    upper, lower = fake.pair(4 * MIB)
    assert fake.link.start(fake.loop.transfer(Direction.UP, upper, lower, 4 * MIB))
    for _ in range(4):
        assert 4 * MIB not in [nbytes for *_, nbytes in fake.in_flight()]
        fake.backend.complete(next(iter(fake.backend.pending)))
        fake.link.poll(0)
    assert 4 * MIB in [nbytes for *_, nbytes in fake.in_flight()]


def test_what_has_ended_is_told_before_all_that_will_be_written_is_hashed() -> None:
    fake = Fake(ManualBackend(64), DiskConfig(block=MIB, flight=8 * MIB, window=64 * MIB), room=96 * MIB)
    upper, lower, _, checksums = fake.store(MIB)
    read = fake.loop.transfer(Direction.UP, upper, lower, MIB, checksums=checksums)
    assert fake.link.start(read)
    assert fake.link.start(fake.loop.transfer(Direction.DOWN, *fake.pair(48 * MIB), 48 * MIB, Urgency.WRITEBACK))
    before = fake.link.hashed
    fake.backend.complete(next(tag for tag, request in fake.backend.pending.items() if request.operation.value == "read"))
    assert [done.tag for done in fake.link.poll(0)] == [read.tag]
    assert fake.link.hashed - before <= 2, "the piece that was read, and perhaps one more"
    while fake.link.poll(0):
        pass
    assert fake.link.hashed - before <= 5, "and of a large one no more ahead of its turn than the ring takes"


def test_what_is_promoted_while_it_waits_for_others_goes_first() -> None:
    fake = manual(depth=6, together=4 * MIB)
    offsets = []
    for urgency in (Urgency.DEMAND, Urgency.PREFETCH, Urgency.WRITEBACK):
        upper, lower = fake.pair(4096)
        transfer = fake.loop.transfer(Direction.DOWN, upper, lower, 4096, urgency)
        offsets.append(lower.offset)
        assert fake.link.start(transfer)
    assert len(fake.backend.submitted) == 1
    fake.link.promote(transfer.tag, Urgency.DEMAND)
    assert [request.offset for request in fake.backend.submitted] == [offsets[0], offsets[2], offsets[1]]


# Both links, beside each other


@needs_native
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=120)
@given(
    block=st.sampled_from([4096, 65536, MIB, PIECE, 5 * MIB]),
    depth=st.integers(1, 6),
    flight=st.sampled_from([65536, MIB, 6 * MIB, 24 * MIB]),
    together=st.sampled_from([1, 300_000, 4 * MIB]),
    files=st.sampled_from([0, 3]),
    data=st.data(),
)
def test_both_links_decide_the_same(
    kind: str, block: int, depth: int, flight: int, together: int, files: int, data: st.DataObject
) -> None:
    """The same transfers, promotions, completions and faults: the same requests in the same order, ends, digests and errors."""
    if kind == "python":  # the test has both
        return

    def locate(slot: Slot) -> Location:
        parts = [Location(FD + index, slot.offset, f"/{index}") for index in range(files)]
        return stripes.striped(parts) if parts else Location(FD, slot.offset, "/0")

    def fake(kind: str) -> Fake:
        Fake.kind = kind
        return Fake(ManualBackend(depth), DiskConfig(block, flight=flight, window=8 * MIB, together=together), locate=locate)

    pair = [fake("python"), fake("native")]
    known: list[tuple[int, Slot, Slot, bytes]] = []  # what was written, with its digests

    def requests(one: Fake) -> list[tuple[Operation, int, int, int, int]]:
        return [(r.operation, r.fd, r.offset, r.address - one.upper.address, r.nbytes) for r in one.backend.submitted]

    def ended(one: Fake) -> list[tuple[int, bytes, str]]:
        return [(done.tag, done.checksums, str(done.error)) for done in one.link.poll(0)]

    written: dict[int, tuple[int, Slot, Slot]] = {}
    whats = ["write", "write", "read", "promote", "complete", "complete", "fault", "refuse", "poll"]
    for step in range(data.draw(st.integers(3, 25))):
        what = data.draw(st.sampled_from(whats))
        polls = data.draw(st.booleans())
        if what == "write":
            nbytes = data.draw(st.sampled_from([1, 4096, 70_001, MIB, PIECE, PIECE + 1, 9 * MIB]))
            urgency = data.draw(st.sampled_from(list(Urgency)))
            content = random.Random(step).randbytes(nbytes)
            took = []
            for one in pair:
                upper, lower = one.pair(nbytes, content)
                transfer = one.loop.transfer(Direction.DOWN, upper, lower, nbytes, urgency, tensor_id=step)
                took.append(one.link.start(transfer))
                written[transfer.tag] = nbytes, upper, lower
            assert took[0] == took[1]
        elif what == "read" and known:
            nbytes, upper, lower, checksums = data.draw(st.sampled_from(known))
            expected = data.draw(st.sampled_from([b"", bytes(len(checksums)), checksums]))
            urgency = data.draw(st.sampled_from(list(Urgency)))
            took = [one.link.start(one.loop.transfer(Direction.UP, upper, lower, nbytes, urgency, expected)) for one in pair]
            assert took[0] == took[1]
        elif what == "promote" and pair[0].loop.tag:
            tag, urgency = data.draw(st.integers(1, pair[0].loop.tag)), data.draw(st.sampled_from(list(Urgency)))
            for one in pair:
                one.link.promote(tag, urgency)
        elif what in ("complete", "fault") and pair[0].backend.pending:
            place = data.draw(st.integers(0, len(pair[0].backend.pending) - 1))
            result = data.draw(st.sampled_from([-errno.EIO, 0, 512])) if what == "fault" else None
            for one in pair:
                one.backend.complete(list(one.backend.pending)[place], result)
        elif what == "refuse":
            most = data.draw(st.integers(0, 2))
            for one in pair:
                one.backend.refuse_after(most)
        ends = [ended(one) for one in pair] if polls else [[], []]
        assert ends[0] == ends[1]
        known += [(*written[tag], digests) for tag, digests, error in ends[0] if tag in written and error == "None"]
        assert requests(pair[0]) == requests(pair[1])
        assert pair[0].backend.batches == pair[1].backend.batches
        assert pair[0].link.hashed == pair[1].link.hashed
    for one in pair:
        one.link.close()


@needs_native
def test_a_link_that_a_signal_handler_closes(kind: str) -> None:
    """While a poll waits: the poll does not go on with memory that was freed."""
    if kind == "python":
        return

    class Interrupted(NativeOver):
        link: NativeDiskLink

        def _reaped(self, *_: object) -> int:
            self.link.close()
            return -errno.EINTR

    fake, interrupted = manual(), Interrupted(ManualBackend())
    where = {"address": fake.upper.address, "locate": lambda slot: Location(FD, 0, "/0"), "uuid": UUID, "alignment": ALIGNMENT}
    link = interrupted.link = NativeDiskLink(interrupted, **where, config=DiskConfig())
    transfer = fake.loop.transfer(Direction.UP, *fake.pair(MIB), MIB)
    assert link.start(transfer)
    with pytest.raises(StoreClosed):
        link.poll(60)
    assert link.hashed == 0
    with pytest.raises(AssertionError, match="after close"):
        link.start(fake.loop.transfer(Direction.UP, *fake.pair(MIB), MIB))
