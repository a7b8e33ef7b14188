"""``offload``: tensors leave memory, the memory goes back to the system, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from tiered import KeyNotFound, MisuseError, TieredStore

MIB = 1 << 20


def used(store: TieredStore, tier: str = "dram") -> int:
    return next(one.used for one in store.statistics().tiers if one.name == tier)


def test_all_tensors_leave_and_the_memory_goes_back(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram=64 * MIB) as store:
        for index in range(12):
            store.put(f"t{index}", torch.full((MIB,), float(index)))
        before = psutil.Process().memory_info().rss
        found = store.offload()
        assert found.stayed == ()
        assert found.given_back >= 63 * MIB
        assert used(store) == 0
        assert before - psutil.Process().memory_info().rss > 40 * MIB
        for index in range(12):
            assert torch.equal(store.get(f"t{index}"), torch.full((MIB,), float(index)))
        store.close()


def test_only_what_is_named_leaves(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="8MiB") as store:
        for name in "abc":
            store.put(name, torch.ones(1000))
        store.offload(["a", "c"])
        assert used(store) == 4096
        with pytest.raises(KeyNotFound):
            store.offload(["a", "d"])
        with pytest.raises(MisuseError, match="no tier 'tape'"):
            store.offload(tier="tape")


def test_what_is_in_use_stays_and_is_named(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="8MiB") as store:
        for name in "abc":
            store.put(name, torch.arange(1000))
        with store.lease("a") as a, store.lease("b", access="write") as b:
            assert set(store.offload().stayed) == {"a", "b"}
            b.add_(1)
            alias = a[3:]
            del a, b
        assert store.offload().stayed == ("a",), "a view is left"
        assert torch.equal(alias, torch.arange(3, 1000))
        del alias
        assert store.offload().stayed == ()
        assert used(store) == 0
        assert torch.equal(store.get("b"), torch.arange(1000) + 1)


def test_from_the_device_to_memory(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="8MiB", hbm="2MiB", device="cpu") as store:
        for name in "abc":
            store.put(name, torch.arange(1000))
        store.offload(tier="dram")
        assert (used(store, "hbm"), used(store) > 0) == (0, True)
        store.offload()
        assert (used(store, "hbm"), used(store)) == (0, 0)
        assert torch.equal(store.get("b"), torch.arange(1000))


def test_nothing_comes_back_before_the_next_touch(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        names = [f"t{index}" for index in range(40)]
        for name in names:
            store.put(name, torch.ones(16384))
        store.follow(names)
        for name in names:
            with store.lease(name):
                pass
        store.offload()
        store.statistics()
        assert used(store) == 0
        for name in names:
            assert torch.equal(store.get(name), torch.ones(16384))


def test_a_store_without_a_disk_keeps_all() -> None:
    with TieredStore.open(None, dram="8MiB") as store:
        store.put("a", torch.ones(1000))
        store.offload()
        assert torch.equal(store.get("a"), torch.ones(1000))
        store.close()
