"""What goes in comes out, whichever side it came from and wherever it lay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Open
from tests.gpu.device import KIB, MIB, Device, numbers, raw, require_device, same
from tests.store.test_tensors import DTYPES
from tiered import KeyNotFound, MisuseError, TieredStore
from tiered.types import TensorSpec

require_device()


def push_out(store: TieredStore) -> None:
    """Through HBM and DRAM go other tensors, so that all that nobody holds leaves HBM, and DRAM where there is a disk."""
    for number in range(16):
        store.put(f"ballast {number}", torch.zeros(200 * KIB, dtype=torch.uint8))
        with store.lease(f"ballast {number}"):
            pass
    for number in range(16):
        store.delete(f"ballast {number}")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about what is experimental or going away
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_from_both_sides(open_store: Open, path: Path | None, gpu: Device, dtype: torch.dtype) -> None:
    try:
        host = torch.empty(24, dtype=dtype)
        if dtype is torch.bool:
            host = torch.arange(24) % 3 == 0
            there = host.to(gpu.device)
        elif not host.is_quantized:
            host = numbers(24, dtype=dtype)
            there = numbers(24 * dtype.itemsize, dtype=torch.uint8).to(gpu.device).view(dtype)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        pytest.skip(f"torch cannot allocate it: {error}")
    if host.is_quantized:
        pytest.skip("quantized: refused wherever it lies")
    store = open_store(path)
    for side, tensor in (("host", host), ("device", there)):
        shaped = tensor.view(2, 3, 4)
        inputs = {
            "flat": tensor,
            "shaped": shaped,
            "scalar": shaped[1, 2, 3],
            "none": tensor[:0],
            "transposed": shaped.transpose(0, 2),
            "sliced": shaped[:, 1:, ::2],
            "expanded": shaped[:, :1].expand(2, 5, 4),
        }
        expected = {}
        for name, view in inputs.items():
            try:
                expected[f"{side} {name}"] = raw(view)
            except (RuntimeError, NotImplementedError):
                continue  # torch cannot gather it at all
            store.put(f"{side} {name}", view)
        for moved in (False, True):
            if moved:
                push_out(store)
            for key, data in expected.items():
                view = inputs[key.split(" ")[1]]
                found = store.get(key)
                assert (found.device.type, found.dtype, found.shape, raw(found)) == ("cpu", dtype, view.shape, data)
                with store.lease(key) as leased:
                    assert (leased.device, leased.dtype, leased.shape, raw(leased)) == (gpu.device, dtype, view.shape, data)


def test_views_of_all_kinds(open_store: Open, path: Path | None, gpu: Device) -> None:
    base = torch.randn(6, 8, dtype=torch.complex64, device=gpu.device)
    inputs = {
        "transposed": base.t(),
        "sliced": base[1:5:2, 2:7],
        "expanded": base[:1].expand(7, 8),
        "flipped": base.flip(0),
        "conj": base.conj(),
        "conj transposed": base.mH,
        "neg": base.conj().imag,
        "diagonal": torch.randn(5, 5, device=gpu.device).diagonal(),
        "overlapping": torch.arange(10, device=gpu.device).unfold(0, 4, 1),
        "channels last": torch.randn(2, 3, 4, 5, device=gpu.device).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(2, 2, device=gpu.device)),
        "of a graph": torch.randn(3, requires_grad=True, device=gpu.device) * 2,
        "empty middle": torch.empty(3, 0, 2, device=gpu.device),
        "0-d": torch.tensor(7, device=gpu.device),
        "0-d bool": torch.tensor(True, device=gpu.device),
        "offset": torch.arange(9, dtype=torch.int8, device=gpu.device)[1:],
        "of the host": torch.arange(12).view(3, 4).t(),
    }
    store = open_store(path)
    for key, tensor in inputs.items():
        store.put(key, tensor)
    for _ in range(2):
        for key, tensor in inputs.items():
            same(store.get(key), tensor)
            with store.lease(key) as leased:
                same(leased, tensor)
                assert leased.device == gpu.device
                assert leased.is_contiguous()
                assert (leased.requires_grad, leased.is_conj(), leased.is_neg()) == (False, False, False)
        push_out(store)


def test_put_copies_and_replaces(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    tensor = torch.ones(1000, device=gpu.device)
    store.put("t", tensor)
    tensor.zero_()
    assert store.get("t").eq(1).all()
    for number, where in enumerate(("cpu", gpu.device, "cpu", gpu.device, gpu.device)):
        store.put("t", torch.full((100 + number,), number, device=where))
        assert store.get("t").tolist() == [number] * (100 + number)
        with store.lease("t") as leased:
            assert leased.tolist() == [number] * (100 + number)
    store.delete("t")
    with pytest.raises(KeyNotFound):
        store.get("t")


def test_create_and_write_on_the_device(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    store.create("t", TensorSpec("bfloat16", (300, 5), 2))
    with store.lease("t", access="write") as t:
        t.copy_(torch.arange(1500, device=gpu.device).view(300, 5) % 256)
    del t
    push_out(store)
    expected = (torch.arange(1500).view(300, 5) % 256).to(torch.bfloat16)
    assert torch.equal(store.get("t"), expected)
    with store.lease("t", access="write", tier="dram") as t:
        assert t.device.type == "cpu"
        t.mul_(2)
    del t
    with store.lease("t") as t:
        assert torch.equal(t.cpu(), expected * 2)


def test_writing_under_a_read_lease_raises_at_its_end(open_store: Open, path: Path | None) -> None:
    store = open_store(path)
    store.put("t", torch.zeros(10))

    def failing() -> None:
        with store.lease("t") as t:
            t.add_(1)

    with pytest.raises(MisuseError, match="written to under a READ lease"):
        failing()


def test_several_in_one_lease(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    inputs = {f"t{number}": numbers(50 * KIB, number) for number in range(9)}  # 200 KiB each; five fit
    for key, tensor in inputs.items():
        store.put(key, tensor)
    for first in range(0, 9, 3):
        keys = [f"t{number}" for number in range(first, first + 3)]
        with store.lease(keys) as leased:
            for key, tensor in zip(keys, leased, strict=True):
                same(tensor, inputs[key])
        with store.lease(keys, access="write") as leased:
            for key, tensor in zip(keys, leased, strict=True):
                inputs[key] = numbers(50 * KIB, 100 + int(key[1:]))
                tensor.copy_(inputs[key])
        del leased, tensor
    for key, tensor in inputs.items():
        same(store.get(key), tensor)


def test_autograd_is_right_after_the_lease(open_store: Open, path: Path | None, gpu: Device) -> None:
    """What autograd saved keeps its slot, whatever happens to the tensor."""
    store = open_store(path)
    weight = torch.randn(1000)
    store.put("w", weight)
    x = torch.randn(1000, device=gpu.device, requires_grad=True)
    with store.lease("w") as w:
        loss = (x * w).sum()
    del w
    store.put("w", torch.zeros(1000))
    push_out(store)
    loss.backward()
    assert x.grad is not None
    same(x.grad, weight)


def test_autograd_notices_a_change_after_the_lease(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    store.put("w", torch.ones(10))
    x = torch.ones(10, device=gpu.device, requires_grad=True)
    with store.lease("w") as w:
        loss = (x * w).sum()
    del w
    with store.lease("w", access="write") as w:
        w.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("count", [1000, 3 * MIB // 2])  # the second is copied in a thread
def test_fetch(open_store: Open, gpu: Device, count: int) -> None:
    store = open_store(None, hbm="16MiB", dram="32MiB")
    host, there = numbers(count, 1), numbers(count, 2)
    store.put("host", host)
    store.put("device", there.to(gpu.device))

    async def both() -> tuple[torch.Tensor, torch.Tensor]:
        return await asyncio.gather(store.fetch("host"), store.fetch("device"))

    for _ in range(2):
        for found, expected in zip(asyncio.run(both()), (host, there), strict=True):
            same(found, expected)
        with store.lease(["host", "device"]):
            pass


def test_an_async_lease(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    store.put("t", numbers(1000))

    async def one() -> bytes:
        async with store.lease("t") as t:
            assert t.device == gpu.device
            return raw(t)

    assert asyncio.run(one()) == raw(numbers(1000))
