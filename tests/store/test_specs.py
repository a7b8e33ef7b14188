"""What a file says of a tensor's shape and element type, and no tensor can have, is refused by an error of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forged import change_manifest
from tiered import ManifestError, MisuseError, TensorSpec, TieredStore
from tiered.store.at_rest import StoreAtRest
from tiered.zero.checkpoint.safetensors import export_at_rest

OVERFLOWING = [(2**40, 2**40, 0), (0, 2**62, 2), (2**31, 0, 2**31, 2**31)]
NO_TYPES = ["nn", "Tensor", "float33", "quint8", "__name__", "_dynamo"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with TieredStore.open(tmp_path / "state", dram="1MiB") as store:
        store.put("bad", torch.zeros(4, dtype=torch.uint8))
        store.put("empty", torch.zeros(0, 3))
        store.put("good", torch.ones(5))
    return tmp_path / "state"


def changed(folder: Path, key: str, **fields: Any) -> None:
    def change(document: Any) -> None:
        next(one for one in document["tensors"] if one["key"] == key).update(fields)

    change_manifest(folder, change)


@pytest.mark.parametrize("shape", OVERFLOWING)
def test_a_shape_that_overflows_opens_no_store(folder: Path, shape: tuple[int, ...]) -> None:
    changed(folder, "empty", shape=shape)
    with pytest.raises(ManifestError, match=r"'empty' has the shape .* strides overflow"):
        TieredStore.open(folder, dram="1MiB")
    with pytest.raises(ManifestError, match=r"'empty' has the shape .* strides overflow"):
        StoreAtRest(folder)


@pytest.mark.parametrize("dtype", NO_TYPES)
def test_a_type_that_there_is_not(folder: Path, tmp_path: Path, dtype: str) -> None:
    """It may be one of a newer torch: the other tensors can be read."""
    changed(folder, "bad", dtype=dtype)
    with TieredStore.open(folder, dram="1MiB") as store:
        for read in (store.get, lambda key: store.lease(key).__enter__()):
            with pytest.raises(ManifestError, match=f"no element type '{dtype}' of 1 bytes"):
                read("bad")
        assert store.get("good").sum() == 5
        store.close()
    with StoreAtRest(folder) as rest:
        with pytest.raises(ManifestError, match=f"no element type '{dtype}'"):
            rest.get("bad")
        with pytest.raises(ManifestError, match=f"no element type '{dtype}'"):
            export_at_rest(rest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_type_of_another_size(folder: Path) -> None:
    changed(folder, "bad", dtype="int16", shape=[4], itemsize=1)
    with TieredStore.open(folder, dram="1MiB") as store:
        with pytest.raises(ManifestError, match="no element type 'int16' of 1 bytes"):
            store.get("bad")
        store.close()


@pytest.mark.parametrize("shape", OVERFLOWING)
def test_none_is_made(shape: tuple[int, ...]) -> None:
    with TieredStore.open(None, dram="1MiB") as store:
        with pytest.raises(MisuseError, match=r"'x' has the shape .* strides overflow"):
            store.create("x", TensorSpec("float32", shape, 4))
        if shape != OVERFLOWING[0]:  # which torch cannot make either
            with pytest.raises(MisuseError, match=r"'x' has the shape .* strides overflow"):
                store.put("x", torch.zeros([1 if size else 0 for size in shape]).expand(shape))
        assert "x" not in store


@pytest.mark.parametrize("dtype", NO_TYPES)
def test_no_tensor_of_such_a_type_is_made(dtype: str) -> None:
    with TieredStore.open(None, dram="1MiB") as store, pytest.raises(MisuseError, match="not an element type"):
        store.create("x", TensorSpec(dtype, (1,), 1))
