"""Tensors that are encoded one by one, long before the manifest that they stand in."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings

from tests.format.test_manifest import manifests, sample
from tiered import TensorSpec, TieredStore
from tiered.errors import ManifestError
from tiered.format.manifest import (
    Extent,
    Head,
    Manifest,
    assemble,
    decode,
    decode_meta,
    decode_tensor,
    encode,
    encode_again,
    encode_meta,
    encode_tensor,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": ""},
        {"dtype": "no name"},
        {"shape": (1,) * 65},
        {"shape": (-1,)},
        {"itemsize": 257},
        {"generation": 0},
        {"tensor_id": 2**63},
        {"tensor_id": 1.0},
        {"key": b"w"},
        {"extent": None},
        {"extent": Extent(0, 512, 4096)},
        {"checksums": b""},
    ],
)
def test_a_tensor_that_could_not_be_read_is_not_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        encode_tensor(msgspec.structs.replace(sample().tensors[0], **wrong))


@given(manifests())
@settings(max_examples=100, deadline=None)
def test_tensors_may_be_encoded_long_before(manifest: Manifest) -> None:
    tensors = [encode_tensor(tensor) for tensor in manifest.tensors]
    assert [decode_tensor(data) for data in tensors] == list(manifest.tensors)
    meta = msgspec.Raw(encode_meta(manifest.meta))
    head = Head(manifest.store, manifest.generation, meta, manifest.files, manifest.next_tensor_id)
    data = assemble(head, iter(tensors))
    assert data == encode(manifest)
    assert decode(data) == manifest
    assert list(encode_again(decode(data)).values()) == tensors
    assert decode_meta(bytes(meta)) == decode(data).meta


MIB = 1 << 20


def filled(value: float) -> torch.Tensor:
    return torch.full((3000,), value)


def test_what_a_commit_writes_is_what_encoding_all_at_once_gives(tmp_path: Path) -> None:
    """It is decoded, which looks at everything, and encoded again."""
    folder = tmp_path / "state"

    def committed(store: TieredStore) -> Manifest:
        generation = store.commit({"tensors": len(store)})
        data = (folder / f"manifest.{generation}").read_bytes()
        found = decode(data, generation=generation)
        assert encode(found) == data
        assert [record.key for record in found.tensors] == list(store)
        return found

    with TieredStore.open(folder, dram=MIB) as store:
        for number in range(9):
            store.put(f"t{number}", filled(number))
        store.put("none", torch.zeros(0, 7))
        store.put("scalar", torch.tensor(3))
        committed(store)
        store.put("t3", filled(-3))
        store.delete("t4")
        with store.lease("t5", access="write") as tensor:
            tensor.fill_(-5)
        del tensor
        second = committed(store)
        store.put("t6", filled(-6))
        store.delete("t0")
        store.rollback()
        third = committed(store)
        assert {r.key: r for r in third.tensors} == {r.key: r for r in second.tensors}
        store.close()
    with TieredStore.open(folder, dram=MIB) as store:
        assert store.generation == 3
        store.put("t7", filled(-7))
        assert len(committed(store).tensors) == len(third.tensors)
        for number in (1, 2, 3, 5, 6, 7, 8):
            sign = -1 if number in (3, 5, 7) else 1
            assert store.get(f"t{number}").eq(sign * number).all()


def test_a_commit_encodes_nothing_that_has_arrived_before(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        for number in range(9):
            store.put(f"t{number}", filled(number))
        store.commit()
        store.put("t3", filled(-3))
        with mock.patch("tiered.format.manifest.encode_tensor", wraps=encode_tensor) as encoded:
            store.commit({"step": 2})
            store.commit({"step": 3})
        assert encoded.call_count == 1


def test_what_cannot_be_written_down_is_an_error_of_the_commit_alone(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", filled(1))
        store.create("w", TensorSpec("uint8", (1,) * 65, 1))
        for _ in range(2):  # as it arrives, and when it is there
            with pytest.raises(ManifestError, match="64"):
                store.commit()
        store.delete("w")
        assert store.commit() == 1
        assert list(store) == ["a"]
