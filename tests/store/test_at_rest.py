"""``StoreAtRest``: what is read of a commit without an open store, a piece at a time and ahead of its use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from tests.store.chains import numbers
from tests.stress.children import forked
from tests.stress.syscalls import Child
from tiered import CorruptionError, ManifestError, ShortTransfer, StoreClosed, TieredStore
from tiered.links import disk, native
from tiered.store import pieces as pieces_module
from tiered.store.at_rest import PIECES_AHEAD, StoreAtRest
from tiered.store.pieces import PieceReader, aligned
from tiered.tiers.disk import Disk
from tiered.types import PIECE_BYTES

LARGE = (PIECES_AHEAD + 3) * PIECE_BYTES + 12_345
"""Bytes: more pieces than are read ahead, the last of them short."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("made") / "store"
    tensors = {"large": numbers(LARGE, 1, torch.uint8), "other": numbers(LARGE, 2, torch.uint8)}
    tensors |= {"small": numbers(3_000, 3, torch.int32), "empty": torch.empty(0, 3)}
    with TieredStore.open(folder, dram="80MiB") as store:
        for key, tensor in tensors.items():
            store.put(key, tensor)
    return folder, tensors


@pytest.fixture
def rest(made: tuple[Path, dict[str, torch.Tensor]]) -> Iterator[StoreAtRest]:
    with StoreAtRest(made[0]) as found:
        yield found


def test_whole_tensors(rest: StoreAtRest, made: tuple[Path, dict[str, torch.Tensor]]) -> None:
    for key, tensor in made[1].items():
        found = rest.get(key)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 0), (0, 1), (PIECE_BYTES - 1, PIECE_BYTES + 1), (5, LARGE - 5), (LARGE - 1, LARGE), (LARGE, LARGE), (0, LARGE)],
)
def test_parts(rest: StoreAtRest, made: tuple[Path, dict[str, torch.Tensor]], start: int, stop: int) -> None:
    pieces = list(rest.read("large", start, stop))
    assert all(piece.numel() <= PIECE_BYTES for piece in pieces)
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.uint8), *pieces]), made[1]["large"][start:stop])


def test_reads_that_take_turns_and_one_that_is_left(rest: StoreAtRest, made: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """What is read ahead for one is not another's."""
    left = rest.read("large", 0, LARGE)
    next(left)
    found: dict[str, list[torch.Tensor]] = {"large": [], "other": []}
    for one, other in zip_longest(rest.read("large", 7, LARGE), rest.read("other", 0, LARGE - 7)):
        found["large"].append(one)
        found["other"].append(other)
        assert torch.equal(rest.get("small"), made[1]["small"])
    left.close()
    assert torch.equal(torch.cat(found["large"]), made[1]["large"][7:])
    assert torch.equal(torch.cat(found["other"]), made[1]["other"][: LARGE - 7])


@pytest.mark.parametrize("link", ["python", "native"])
def test_an_exception_within_a_read(
    rest: StoreAtRest, made: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """The next one begins anew."""
    if link == "native" and native.native_link_unavailable() is not None:
        pytest.skip(f"no native link: {native.native_link_unavailable()}")
    place, name = (disk, "digest") if link == "python" else (native.NativeDiskLink, "_ended")
    with monkeypatch.context() as patch:
        if link == "python":
            patch.setattr(pieces_module, "open_disk_link", disk.DiskLink)
        patch.setattr(place, name, lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        pieces = rest.read("large", 0, LARGE)
        with pytest.raises(KeyboardInterrupt):
            rest.get("other")
        with pytest.raises(KeyboardInterrupt):
            next(pieces)
    for key in ("other", "large"):
        assert torch.equal(rest.get(key), made[1][key])


def test_a_forked_child_has_a_ring_of_its_own(rest: StoreAtRest, made: tuple[Path, dict[str, torch.Tensor]]) -> None:
    assert torch.equal(rest.get("small"), made[1]["small"])

    def child(child: Child) -> None:
        child.say(f"equal {torch.equal(rest.get('small'), made[1]['small'])}")

    with forked(child) as running:
        assert running.wait_end() == 0, running.said
    assert running.said == ["equal True"]
    assert torch.equal(rest.get("large"), made[1]["large"])


def test_damage(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with TieredStore.open(folder, dram="80MiB") as store:
        store.put("large", numbers(LARGE, 1, torch.uint8))
    with StoreAtRest(folder) as rest:
        extent = rest.record("large").extent
    assert extent is not None
    with (folder / "data.0").open("r+b") as file:
        file.seek(extent.offset + PIECE_BYTES + 5)
        byte = file.read(1)
        file.seek(extent.offset + PIECE_BYTES + 5)
        file.write(bytes([byte[0] ^ 1]))
    with StoreAtRest(folder) as rest:
        pieces = rest.read("large", 0, LARGE)
        next(pieces)
        with pytest.raises(CorruptionError, match="wrong checksum in tensor 'large'") as caught:
            next(pieces)
        assert (caught.value.path, caught.value.offset) == (str(folder / "data.0"), extent.offset + PIECE_BYTES)
        assert list(rest.read("large", 2 * PIECE_BYTES, LARGE)), "what is not damaged can be read"
        os.truncate(folder / "data.0", extent.offset + 3 * PIECE_BYTES)
        with pytest.raises(ShortTransfer, match="read 0 instead of"):
            list(rest.read("large", 3 * PIECE_BYTES, LARGE))


def test_an_extent_that_is_cut_off_within_its_padding(tmp_path: Path) -> None:
    """Nothing of the tensor is lost."""
    folder = tmp_path / "store"
    with TieredStore.open(folder, dram="8MiB") as store:
        store.put("last", numbers(5_000, 1, torch.uint8))
    with StoreAtRest(folder) as rest:
        extent = rest.record("last").extent
        assert extent is not None
        os.truncate(folder / "data.0", extent.offset + 5_000)
        assert torch.equal(rest.get("last"), numbers(5_000, 1, torch.uint8))


def test_an_extent_that_the_drive_cannot_read_is_an_error_of_its_own(rest: StoreAtRest) -> None:
    """As manifests may name them that nobody wrote. All that is begun ends once."""
    wider = 2 * rest.disk.alignment
    records = [rest.record(key) for key in ("large", "other", "small")]
    fit = {one.key for one in records if one.extent and one.extent.offset % wider == one.extent.nbytes % wider == 0}
    with closing(PieceReader(Disk(rest.disk.folder, rest.disk.uuid, wider, rest.files))) as reader:
        memory = {one.key: aligned(reader.room(5_000), wider) for one in records}
        begun = {reader.begin(one, 0, 5_000, memory[one.key].data_ptr()) for one in records if one.spec.nbytes >= 5_000}
        ended = []
        while len(ended) < len(begun):
            ended += reader.wait()
    assert set(ended) == begun
    assert len(fit) < len(begun)
    for one in ended:
        assert isinstance(one.error, ManifestError | CorruptionError)  # 5,000 bytes are no piece
        assert isinstance(one.error, CorruptionError) == (one.record.key in fit)


def test_closed(made: tuple[Path, dict[str, torch.Tensor]]) -> None:
    rest = StoreAtRest(made[0])
    pieces = rest.read("large", 0, LARGE)
    next(pieces)
    before = len(os.listdir("/proc/self/fd"))
    rest.close()
    rest.close()
    assert len(os.listdir("/proc/self/fd")) < before
    for read in (lambda: list(pieces), lambda: rest.get("small")):
        with pytest.raises(StoreClosed, match="was closed"):
            read()
