"""Bytes that change on the disk, or under a lease that only reads, are found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.store.chains import MIB, numbers, same
from tests.store.opened import Open, push_out
from tiered import (
    CorruptionError,
    MisuseError,
    TieredError,
    TieredStore,
)
from tiered.format.generations import load
from tiered.types import PIECE_BYTES


def test_a_flipped_byte_is_never_returned_as_data(open_store: Open, folder: Path) -> None:
    tensors = {f"t{number}": numbers(5000 + number, number) for number in range(6)}
    with open_store() as store:
        for key, tensor in tensors.items():
            store.put(key, tensor)
    manifest = load(folder)
    assert manifest is not None
    (record,) = [record for record in manifest.tensors if record.key == "t3"]
    assert record.extent is not None
    for at in (0, 1, 4095, 4096, record.spec.nbytes - 1):
        with open(folder / "data.0", "r+b") as file:
            file.seek(record.extent.offset + at)
            before = file.read(1)[0]
            file.seek(record.extent.offset + at)
            file.write(bytes([before ^ 1 << at % 8]))
        store = open_store()
        for _ in range(2):  # it does not become right by asking again
            for lease in (store.lease("t3"), store.lease(["t1", "t3"], access="write")):
                with pytest.raises(CorruptionError) as raised:
                    lease.__enter__()
                assert (raised.value.key, raised.value.offset) == ("t3", record.extent.offset)
                assert raised.value.path == str(folder / "data.0")
                assert "run tiered verify on the store's folder" in str(raised.value)
        for key, tensor in tensors.items():
            if key != "t3":
                same(store.get(key), tensor)
        assert store.statistics().links[0].up.failed >= 2
        store.put("t3", tensors["t3"])  # a new one is fine
        push_out(store)
        same(store.get("t3"), tensors["t3"])
        store.close()
        with open(folder / "data.0", "r+b") as file:
            file.seek(record.extent.offset + at)
            file.write(bytes([before]))
    same(open_store().get("t3"), tensors["t3"])


def test_swapped_and_stale_extents_are_corruption(open_store: Open, folder: Path) -> None:
    """Each has a checksum that was right once, for another tensor or another generation."""
    store = open_store(keep=1)
    for key, value in (("a", 1.0), ("b", 2.0)):
        store.put(key, torch.full((1024,), value))
    store.commit()
    store.close()
    manifest = load(folder)
    assert manifest is not None
    places = [record.extent.offset for record in manifest.tensors if record.extent]
    with open(folder / "data.0", "r+b") as file:
        contents = []
        for place in places:
            file.seek(place)
            contents.append(file.read(4096))
        for place, content in zip(places, reversed(contents), strict=True):
            file.seek(place)
            file.write(content)
    store = open_store()
    for key in "ab":
        with pytest.raises(CorruptionError):
            store.get(key)


def test_the_piece_that_is_damaged_is_named(open_store: Open, folder: Path) -> None:
    tensor = numbers(9 * MIB, dtype=torch.uint8)
    with open_store(dram="16MiB") as store:
        store.put("large", tensor)
    manifest = load(folder)
    assert manifest is not None
    extent = manifest.tensors[0].extent
    assert extent is not None
    with open(folder / "data.0", "r+b") as file:
        file.seek(extent.offset + 2 * PIECE_BYTES + 5)
        file.write(bytes([int(tensor[2 * PIECE_BYTES + 5]) ^ 255]))
    with open_store(dram="16MiB") as store, pytest.raises(CorruptionError) as raised:
        store.get("large")
    assert raised.value.offset == extent.offset + 2 * PIECE_BYTES


def test_a_truncated_data_file(open_store: Open, folder: Path) -> None:
    with open_store() as store:
        store.put("a", numbers(1000))
        store.put("b", numbers(30_000))
    os.truncate(folder / "data.0", 8192)
    with pytest.raises(TieredError):
        open_store().get("b")


def written_under_read(store: TieredStore, key: str) -> None:
    with pytest.raises(MisuseError, match=f"{key!r} was written to under a READ lease"), store.lease(key) as tensor:
        tensor.fill_(7)


def test_what_is_written_under_a_read_lease_is_not_stored(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.ones(1000))
        store.commit()
        written_under_read(store, "a")
        assert store.get("a").eq(1).all(), "the disk had its bytes"
        store.commit()
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        assert store.get("a").eq(1).all()


@pytest.mark.parametrize("mend", ["put", "delete", "rollback", "write lease of another"])
def test_a_tensor_whose_only_bytes_were_written_over_is_refused(tmp_path: Path, mend: str) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.ones(1000))
        store.put("b", torch.ones(1000))
        store.commit()
        with store.lease("a", access="write") as tensor:
            tensor.fill_(2)
        del tensor
        written_under_read(store, "a")
        for access in ("read", "write"):
            with pytest.raises(CorruptionError, match="READ lease"), store.lease("a", access=access):
                pass
        with pytest.raises(CorruptionError, match="READ lease"):
            store.get("a")
        with pytest.raises(CorruptionError, match="READ lease"):
            store.commit()
        with store.lease("b", access="write") as tensor:
            tensor.fill_(3)
        del tensor
        if mend == "put":
            store.put("a", torch.full((1000,), 4.0))
        elif mend == "delete":
            store.delete("a")
        else:
            store.rollback()
        if mend != "delete":
            assert store.get("a").eq(4 if mend == "put" else 1).all()
        store.commit()


def test_another_reader_keeps_what_was_written_over_from_being_read_anew(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.ones(1000))
        store.commit()
        outer = store.lease("a")
        outer.__enter__()
        written_under_read(store, "a")
        with pytest.raises(CorruptionError, match="READ lease"):
            store.get("a")
        with pytest.raises(MisuseError, match="READ lease"):  # it has seen the wrong bytes, too
            outer.__exit__(None, None, None)
        assert store.get("a").eq(1).all()
