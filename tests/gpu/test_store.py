"""Budgets, pinned memory, following an order, reopening, and what is refused."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.fakes import in_child
from tests.gpu.conftest import Open
from tests.gpu.device import KIB, MIB, NAME, Device, numbers, raw, require_device, same
from tiered import CapacityError, Eviction, ForkedStore, MisuseError, TieredStore

require_device()
REAL = pytest.mark.skipif(NAME == "cpu", reason="the stand-in has no device's memory")


def test_down_to_the_disk_and_up_again(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    tensors = {f"t{number}": numbers(40 * KIB + number, number) for number in range(30)}  # 160 KiB each, 4.7 MiB
    for key, tensor in tensors.items():
        gpu.put(store, key, tensor)
    for tier in store.statistics().tiers:
        assert tier.used <= tier.peak <= tier.capacity
    for _ in range(2):
        for key, tensor in tensors.items():
            with store.lease(key) as leased:
                assert leased.device == gpu.device
                same(leased, tensor)
    statistics = store.statistics()
    assert [link.src for link in statistics.links] == (["hbm", "dram"] if path else ["hbm"])
    for link in statistics.links:
        assert link.up.bytes >= 40 * (160 * KIB)
        assert link.down.bytes >= 20 * (160 * KIB)
        assert link.up.failed == link.down.failed == 0
    for tier in statistics.tiers[: len(statistics.links)]:
        assert tier.peak <= tier.capacity


@REAL
def test_the_budget_is_all_that_is_taken_from_the_device(open_store: Open, path: Path | None, gpu: Device) -> None:
    gc.collect()
    before = gpu.allocated()
    store = open_store(path)
    assert gpu.allocated() == before + MIB
    for number in range(20):
        store.put(f"t{number}", numbers(50 * KIB, number))
    torch.cuda.reset_peak_memory_stats(gpu.device)
    for _ in range(2):
        for number in range(20):
            with store.lease(f"t{number}", access="write") as tensor:
                tensor.view(torch.int32).add_(1)
            del tensor
            store.get(f"t{number}")
        if path is not None:
            store.commit()
    gpu.finish()
    assert gpu.allocated() == before + MIB
    assert torch.cuda.max_memory_allocated(gpu.device) == before + MIB, "nothing in between, either"
    store.close()
    assert gpu.allocated() == before


@REAL
def test_the_host_pool_is_pinned_until_close(open_store: Open, path: Path | None) -> None:
    store = open_store(path)
    keys = [f"t{number}" for number in range(4)]
    for number, key in enumerate(keys):
        store.put(key, numbers(60 * KIB, number))
    with store.lease(keys, tier="dram") as leased:
        assert [tensor.is_pinned() for tensor in leased] == [True] * 4
        alias = leased[0]
    del leased
    store.close()
    assert not alias.is_pinned()
    same(alias, numbers(60 * KIB, 0))


@REAL
def test_a_host_pool_that_does_not_end_with_a_page(open_store: Open) -> None:
    store = open_store(None, dram=MIB + 64)
    last = numbers((MIB + 64) // 4, 3)
    store.put("t", last[: MIB // 4])
    with store.lease("t") as tensor:
        same(tensor, last[: MIB // 4])
    del tensor
    store.delete("t")
    store.put("t", last)
    with store.lease("t", tier="dram") as tensor:
        assert tensor[-1:].is_pinned()
        there = tensor.to("cuda")
    same(there, last)


def test_trace_and_follow(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    tensors = {f"t{number}": numbers(25 * KIB, number) for number in range(24)}  # 100 KiB each
    for key, tensor in tensors.items():
        store.put(key, tensor)

    def step() -> None:
        for number, (key, tensor) in enumerate(tensors.items()):
            if number % 4 == 3:
                with store.lease(key, access="write") as leased:
                    leased.view(torch.int32).add_(1)
                tensor.view(torch.int32).add_(1)
            else:
                with store.lease(key) as leased:
                    same(leased, tensor)

    with store.trace() as order:
        step()
    assert [touch.key for touch in order] == list(tensors)
    assert {touch.tier for touch in order} == {"hbm"}
    assert store.follow(order) == len(order)
    for _ in range(3):
        step()
    assert store.statistics().prefetched > 0
    store.follow([])
    for key, tensor in tensors.items():
        same(store.get(key), tensor)


def test_prefetch_brings_to_the_device(open_store: Open, path: Path | None) -> None:
    store = open_store(path)
    tensors = {f"t{number}": numbers(25 * KIB, number) for number in range(16)}
    for key, tensor in tensors.items():
        store.put(key, tensor)
    keys = list(tensors)
    for index, key in enumerate(keys):
        store.prefetch([*keys[index + 1 : index + 4], "no such tensor"])
        with store.lease(key) as leased:
            same(leased, tensors[key])
    assert store.statistics().prefetched > 0


def test_reopen(open_store: Open, tmp_path: Path, gpu: Device) -> None:
    path = tmp_path / "state"
    tensors = {f"t{number}": numbers(30 * KIB, number) for number in range(20)}
    with TieredStore.open(path, dram=MIB, hbm=MIB, device=NAME) as store:
        for number, (key, tensor) in enumerate(tensors.items()):
            store.put(key, tensor.to(gpu.device) if number % 2 else tensor)
    with TieredStore.open(path, dram=MIB) as store:  # what has no device reads it, too
        for key, tensor in tensors.items():
            same(store.get(key), tensor)
        store.put("t0", tensors["t1"])
    tensors["t0"] = tensors["t1"]
    again = open_store(path)
    assert again.generation == 2
    for key, tensor in tensors.items():
        with again.lease(key) as leased:
            same(leased, tensor)
    again.delete("t3")
    assert again.commit() == 3
    again.close()
    assert sorted(open_store(path, generation=3)) == sorted(set(tensors) - {"t3"})


def test_larger_than_the_device_budget(open_store: Open, path: Path | None, gpu: Device) -> None:
    """It is kept in host memory, and a lease on the device says what would fit."""
    store = open_store(path, hbm=MIB // 2)
    large = torch.arange(MIB // 4 - 1000, dtype=torch.int32)
    store.put("t", large.to(gpu.device))
    same(store.get("t"), large)
    with pytest.raises(CapacityError, match="hbm"), store.lease("t"):
        pass
    with store.lease("t", tier="dram") as leased:
        same(leased, large)


def test_a_full_device_says_who_holds_it(open_store: Open, path: Path | None) -> None:
    store = open_store(path, eviction=Eviction(deadline=0.2))
    for number in range(5):
        store.put(f"t{number}", numbers(64 * KIB, number))
    held = []
    for number in range(4):
        with store.lease(f"t{number}") as leased:
            held.append(leased)
    del leased
    with pytest.raises(CapacityError, match="still referenced after its lease"), store.lease("t4"):
        pass
    held.pop()
    with store.lease("t4") as leased:
        same(leased, numbers(64 * KIB, 4))


@REAL
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    for path in (None, tmp_path / "state"):
        with pytest.raises(MisuseError, match=f"no CUDA device {count}: this machine has {count}"):
            TieredStore.open(path, dram=MIB, hbm=MIB, device=f"cuda:{count}")
    with TieredStore.open(tmp_path / "state", dram=MIB, hbm=MIB) as store:  # nothing of the failed one is left
        store.put("t", torch.ones(1))


@REAL
def test_more_than_the_device_has(tmp_path: Path, gpu: Device) -> None:
    total = torch.cuda.mem_get_info(gpu.device)[1]
    gc.collect()
    before = gpu.allocated()
    for path in (None, tmp_path / "state"):
        with pytest.raises(CapacityError, match=f"refuses {2 * total} bytes"):
            TieredStore.open(path, dram=MIB, hbm=2 * total, device=NAME)
    assert gpu.allocated() == before
    with TieredStore.open(tmp_path / "state", dram=MIB, hbm=MIB, device=NAME) as store:
        store.put("t", torch.ones(1, device=gpu.device))
        assert store.get("t").item() == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_refused(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    store.put("a", torch.arange(10, device=gpu.device))
    with store.lease("a") as alias:
        pass

    def child() -> str:
        refused = []
        for use in (lambda: store.get("a"), lambda: store.put("a", torch.tensor(2)), lambda: store.lease("a").__enter__()):
            try:
                use()
            except ForkedStore:
                refused.append("ForkedStore")
        store.close()
        return " ".join(refused)

    assert in_child(child) == " ".join(["ForkedStore"] * 3)
    assert raw(alias) == raw(torch.arange(10))
    store.put("b", torch.ones(3, device=gpu.device))  # the parent's is none the worse
    with store.lease(["a", "b"]) as (a, b):
        assert a.tolist() == list(range(10))
        assert b.tolist() == [1.0] * 3
