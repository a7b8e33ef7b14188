"""Tensors that are encoded one by one, long before the manifest that they stand in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from tests.test_manifest import manifests, sample
from tiered.errors import ManifestError
from tiered.manifest import (
    Extent,
    Head,
    Manifest,
    assemble,
    decode,
    decode_meta,
    decode_tensor,
    encode,
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
    assert decode_meta(bytes(meta)) == decode(data).meta
