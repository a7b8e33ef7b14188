"""What can be stored, and how much: any type, strides and size, against what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.store.chains import MIB, numbers, raw, same
from tests.store.opened import Open, push_out
from tiered import (
    CapacityError,
    MisuseError,
    TieredError,
    TieredStore,
)
from tiered.types import TensorSpec

# What can be stored

DTYPES = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about what is experimental or going away
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(open_store: Open, dtype: torch.dtype) -> None:
    try:
        tensor = torch.empty(24, dtype=dtype)
        if dtype is torch.bool:
            tensor = torch.arange(24) % 3 == 0
        elif not tensor.is_quantized:
            tensor = numbers(24, dtype=dtype)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        pytest.skip(f"torch cannot allocate it: {error}")
    store = open_store()
    if tensor.is_quantized:
        with pytest.raises(MisuseError, match="quantized"):
            store.put("t", tensor)
        return
    shaped = tensor.view(2, 3, 4)
    store.put("flat", tensor)
    store.put("shaped", shaped)
    store.put("scalar", shaped[1, 2, 3])
    store.put("none", tensor[:0])
    views = {
        "transposed": shaped.transpose(0, 2),
        "sliced": shaped[:, 1:, ::2],
        "expanded": shaped[:, :1].expand(2, 5, 4),
    }
    for other, view in views.items():
        try:
            raw(view)
        except (RuntimeError, NotImplementedError):
            continue  # torch cannot gather it at all
        store.put(other, view)
        same(store.get(other), view)
    store.commit()
    store.close()
    again = open_store()
    same(again.get("flat"), tensor)
    same(again.get("shaped"), shaped)
    same(again.get("scalar"), shaped[1, 2, 3])
    same(again.get("none"), tensor[:0])
    with again.lease("shaped") as leased:
        same(leased, shaped)


def test_views_of_all_kinds(store: TieredStore) -> None:
    base = torch.randn(6, 8, dtype=torch.complex64)
    inputs = {
        "transposed": base.t(),
        "sliced": base[1:5:2, 2:7],
        "expanded": base[:1].expand(7, 8),
        "expanded 0-d": torch.tensor(3.5).expand(4, 5),
        "flipped": base.flip(0),
        "conj": base.conj(),
        "conj transposed": base.mH,
        "neg": base.conj().imag,
        "real": base.real,
        "diagonal": torch.randn(5, 5).diagonal(),
        "overlapping": torch.arange(10).unfold(0, 4, 1),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "grad": torch.randn(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "of a graph": torch.randn(3, requires_grad=True) * 2,
        "empty middle": torch.empty(3, 0, 2),
        "0-d": torch.tensor(7),
        "0-d bool": torch.tensor(True),
        "offset": torch.arange(9, dtype=torch.int8)[1:],
    }
    for key, tensor in inputs.items():
        store.put(key, tensor)
    push_out(store)
    for key, tensor in inputs.items():
        found = store.get(key)
        same(found, tensor)
        assert torch.equal(found, tensor.detach())
        assert found.is_contiguous()
        assert not found.requires_grad
        assert not found.is_conj()
        assert not found.is_neg()
        assert store.spec(key).shape == tuple(tensor.shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
        lambda: [1.0, 2.0],
        lambda: None,
    ],
    ids=["sparse", "csr", "meta", "quantized", "list", "None"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, about sparse and quantized
def test_what_cannot_be_stored_is_refused(store: TieredStore, make: Callable[[], Any]) -> None:
    with pytest.raises(MisuseError, match="'t'"):
        store.put("t", make())
    assert "t" not in store


@pytest.mark.parametrize("key", [1, b"bytes", None, ("a",)])
def test_keys_are_strings(store: TieredStore, key: Any) -> None:
    with pytest.raises(MisuseError):
        store.put(key, torch.zeros(1))
    assert store.statistics().tiers[0].used == 0


def test_any_string_is_a_key(open_store: Open) -> None:
    store = open_store()
    keys = ["", "a/b", "../../etc/passwd", "nul\0nul", "\N{SNOWMAN}" * 50, "x" * 5000, " ", "manifest.1", "data.0"]
    for number, key in enumerate(keys):
        store.put(key, torch.tensor(number))
    store.commit()
    store.close()
    again = open_store()
    assert sorted(again) == sorted(keys)
    for number, key in enumerate(keys):
        assert again.get(key).item() == number


def test_put_replaces(store: TieredStore) -> None:
    store.put("t", torch.randn(5))
    store.put("t", numbers(1000, 3, torch.int64).view(10, 100))
    assert store.spec("t") == TensorSpec("int64", (10, 100), 8)
    same(store.get("t"), numbers(1000, 3, torch.int64).view(10, 100))
    store.put("t", torch.tensor(1.5))
    push_out(store)
    assert store.get("t").item() == 1.5
    assert len(store) == 1


def test_put_copies(store: TieredStore) -> None:
    tensor = torch.ones(100)
    store.put("t", tensor)
    tensor.zero_()
    copy = store.get("t")
    copy.zero_()
    assert store.get("t").eq(1).all()


def test_create(store: TieredStore) -> None:
    store.create("t", TensorSpec("bfloat16", (3, 5), 2))
    with store.lease("t", access="write") as t:
        t.copy_(torch.arange(15).view(3, 5))
    del t
    push_out(store)
    assert torch.equal(store.get("t"), torch.arange(15, dtype=torch.bfloat16).view(3, 5))
    with pytest.raises(TieredError):
        store.create("u", TensorSpec("float33", (3,), 4))


# How much

def test_larger_than_the_pool(store: TieredStore) -> None:
    store.put("fits", torch.zeros(MIB, dtype=torch.uint8))
    with pytest.raises(CapacityError, match=r"tensor 't' \(1,048,577 bytes\) can never fit into tier dram \(1,048,576 bytes\)"):
        store.update({"fits": torch.zeros(MIB, dtype=torch.uint8), "t": torch.zeros(MIB + 1, dtype=torch.uint8)})
    with pytest.raises(CapacityError, match=r"^small tensor 'k': tensor 'few/page1' \(.* bytes\) can never fit"):
        store.small("few").update({"a": torch.zeros(3), "k": torch.zeros(MIB + 1, dtype=torch.uint8)})
    store.delete_owned(next(iter(store.owners())))
    assert list(store) == ["fits"]


def test_a_lease_larger_than_the_pool(store: TieredStore) -> None:
    for key in "abc":
        store.put(key, torch.zeros(400 << 10, dtype=torch.uint8))
    with pytest.raises(CapacityError, match="can never be"), store.lease(["a", "b", "c"]):
        pass
    with store.lease(["a", "c"]) as (a, c):
        assert a.shape == c.shape


def test_thousands_of_small_tensors_through_a_tiny_pool(open_store: Open) -> None:
    store = open_store()
    for number in range(2000):
        store.put(f"t{number}", torch.full((number % 50,), number))
    for number in range(0, 2000, 3):
        store.delete(f"t{number}")
    left = [number for number in range(2000) if number % 3]
    for number in random.Random(0).sample(left, 300):
        assert store.get(f"t{number}").tolist() == [number] * (number % 50)
    store.commit()
    store.close()
    again = open_store()
    assert len(again) == len(left)
    for number in random.Random(1).sample(left, 300):
        assert again.get(f"t{number}").tolist() == [number] * (number % 50)
    pool = again.statistics().tiers[0]
    assert pool.peak <= pool.capacity == MIB


def test_the_pool_is_a_hard_limit(store: TieredStore) -> None:
    for number in range(40):
        store.put(f"t{number}", torch.full((40 << 10,), float(number)))  # 160 KiB
        pool = store.statistics().tiers[0]
        assert pool.used <= pool.peak <= pool.capacity == MIB
    assert store.statistics().evictions > 30
    for number in range(40):
        with store.lease(f"t{number}") as t:
            assert t.eq(number).all()
    statistics = store.statistics()
    assert statistics.tiers[0].peak <= MIB
    assert statistics.links[0].down.bytes >= 34 * (160 << 10)
    assert statistics.links[0].up.bytes >= 34 * (160 << 10)
    assert statistics.links[0].up.failed == statistics.links[0].down.failed == 0


def test_a_disk_budget(open_store: Open) -> None:
    store = open_store(nvme="4MiB", keep=1)

    def fill() -> None:
        for number in range(100):
            store.put(f"t{number}", torch.full((50 << 10,), float(number)))

    with pytest.raises(CapacityError, match=r"is used up: .* is left: open the store with a larger nvme=, delete tensors"):
        fill()
    held = list(store)
    assert len(held) > 10
    for key in held:
        try:
            assert store.get(key).eq(int(key[1:])).all()
        except CapacityError:
            continue  # the pool is full of what the disk cannot take
    for key in held[: len(held) // 2]:
        store.delete(key)
    for key in held[len(held) // 2 :]:
        assert store.get(key).eq(int(key[1:])).all()
    store.commit()
