"""Stores that are used at the wrong time or by the wrong process; and by many threads, which is right."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests import programs
from tests.fakes import in_child
from tests.store.chains import MIB
from tests.store.opened import Open
from tiered import (
    CapacityError,
    Eviction,
    ForkedStore,
    KeyNotFound,
    LeaseConflict,
    StoreClosed,
    StoreLocked,
    TieredStore,
    UncommittedWarning,
)
from tiered.types import TensorSpec


def test_use_after_close(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    lease = store.lease("a")
    store.close()
    store.close()
    for use in (
        lambda: store.put("a", torch.tensor(1)),
        lambda: store.get("a"),
        lambda: lease.__enter__(),
        lambda: store.lease("a").__enter__(),
        lambda: store.delete("a"),
        lambda: store.prefetch(["a"]),
        lambda: store.speculate(["a"]),
        lambda: store.present(["a"]),
        lambda: "a" in store,
        lambda: list(store),
        lambda: len(store),
        lambda: store.spec("a"),
        lambda: store.commit(),
        lambda: store.statistics(),
        lambda: store.free_on_device(),
        lambda: store.__enter__(),
        lambda: store.create("b", TensorSpec("float32", (1,), 4)),
    ):
        with pytest.raises(StoreClosed, match="is closed"):
            use()


def test_closing_under_a_lease(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    with store.lease("a") as a:
        store.close()
        assert a.item() == 1


def test_closing_wakes_who_waits(store: TieredStore) -> None:
    store.put("a", torch.ones(200 << 10))
    with store.lease("a") as a:
        pass
    raised: list[BaseException] = []

    def put() -> None:
        try:
            store.put("b", torch.ones(200 << 10))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    while not store._engine.requests.waiting:
        os.sched_yield()
    store.close()
    thread.join()
    assert isinstance(raised[0], StoreClosed)
    assert a.eq(1).all()


def test_a_forked_child_is_refused(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.tensor(1))

    def child() -> str:
        refused = []
        for use in (
            lambda: store.get("a"),
            lambda: store.put("a", torch.tensor(2)),
            lambda: len(store),
            lambda: store.commit(),
            lambda: store.__enter__(),
        ):
            try:
                use()
            except ForkedStore:
                refused.append("ForkedStore")
        store.close()
        return " ".join(refused)

    assert in_child(child) == " ".join(["ForkedStore"] * 5)
    store.put("b", torch.tensor(2))  # the parent's is none the worse
    assert (store.get("a").item(), store.get("b").item()) == (1, 2)
    store.commit()
    store.close()
    assert sorted(open_store()) == ["a", "b"]


def test_a_second_process_is_refused(open_store: Open, folder: Path) -> None:
    with open_store() as store:
        store.put("a", torch.tensor(1))
        program = (
            f"import tiered\ntry:\n    tiered.TieredStore.open({str(folder)!r}, dram='1MiB')\n"
            "except tiered.StoreLocked as error:\n    print(error)"
        )
        found = programs.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert str(os.getpid()) in found.stdout, found.stdout + found.stderr
        with pytest.raises(StoreLocked):
            open_store()
        assert store.get("a").item() == 1
    assert open_store().get("a").item() == 1


@pytest.mark.parametrize("dram", [0, 1, MIB - 1, "1023KiB"])
def test_too_small_a_budget_names_the_smallest(open_store: Open, folder: Path, dram: int | str) -> None:
    with pytest.raises(CapacityError, match="the smallest is 1,048,576 bytes"):
        open_store(dram=dram)
    assert not folder.exists()


def test_many_threads(store: TieredStore) -> None:
    """Every tensor is uniform at all times: a torn or foreign one would show."""
    keys = [f"t{number}" for number in range(12)]
    sizes = [1000, 10_000, 40_000]
    failures: list[BaseException] = []
    counts = {"done": 0, "refused": 0}

    def uniform(key: str, tensor: torch.Tensor) -> None:
        low, high = int(tensor.min()), int(tensor.max())
        assert low == high, f"{key} is torn: {low} to {high}"
        assert low % len(keys) == keys.index(key), f"{key} has the bytes of {keys[low % len(keys)]}"

    def work(seed: int) -> None:
        source = random.Random(seed)
        done = refused = 0
        try:
            for _ in range(250):
                chosen = source.sample(keys, source.choice([1, 1, 2]))
                key, index = chosen[0], keys.index(chosen[0])
                value = index + len(keys) * source.randrange(1000)
                what = source.randrange(12)
                try:
                    if what < 3:
                        store.put(key, torch.full((source.choice(sizes),), value))
                    elif what < 6:
                        with store.lease(chosen) as leased:
                            for name, tensor in zip(chosen, leased, strict=True):
                                uniform(name, tensor)
                        del leased, tensor
                    elif what < 8:
                        with store.lease(key, access="write") as tensor:
                            uniform(key, tensor)
                            tensor.fill_(value)
                        del tensor
                    elif what < 10:
                        uniform(key, store.get(key))
                    elif what == 10:
                        store.prefetch(source.sample(keys, 4))
                    elif source.random() < 0.4:
                        store.delete(key)
                    elif source.random() < 0.2:
                        store.commit({"by": seed})
                    done += 1
                except (LeaseConflict, KeyNotFound):
                    refused += 1
        except BaseException as error:
            failures.append(error)
        counts["done"] += done
        counts["refused"] += refused

    for key in keys:
        store.put(key, torch.full((40_000,), keys.index(key)))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert counts["done"] > 1000, counts
    for key in list(store):
        uniform(key, store.get(key))
        store.delete(key)
    pool = store.statistics().tiers[0]
    assert (pool.used, pool.held, pool.copies) == (0, 0, 0)
    assert store.statistics().evictions > 50


def test_the_end_of_a_block_says_where_meta_is_of_an_earlier_commit(tmp_path: Path) -> None:
    def ended(*commits: dict[str, int] | None) -> list[str]:
        """Warnings of a block in which a tensor is put before each of the commits, of meta or of none, and after them."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with TieredStore.open(tmp_path / str(len(list(tmp_path.iterdir()))), dram="1MiB") as store:
                for number, meta in enumerate(commits):
                    store.put("n", torch.tensor(number))
                    if meta is not None:
                        store.commit(meta)
        assert all(warning.category is UncommittedWarning and warning.filename == __file__ for warning in found)
        return [str(warning.message) for warning in found]

    with warnings.catch_warnings(record=True) as found:  # a commit that is under way has a meta, too
        warnings.simplefilter("always")
        with TieredStore.open(tmp_path / "async", dram="1MiB") as store:
            store.put("n", torch.tensor(0))
            store.commit_async({"done": 1})
            store.put("n", torch.tensor(1))
    assert ["has the meta of commit 1" in str(warning.message) for warning in found] == [True]
    (said,) = ended({"done": 1}, None)
    assert "has the meta of commit 1, and tensors changed after that: if meta says how far they are, commit with it" in said
    assert ended({"done": 1}, {"done": 2}) == ended({}, None) == ended(None) == ended() == []
    with TieredStore.open(tmp_path / "1", dram="1MiB") as store:
        assert (store.generation, store.meta, store.get("n").item()) == (2, {"done": 1}, 1)


def test_who_waits_for_room_says_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tiered.engine.engine.LATE", 0.05)
    waiting = Eviction(deadline=0.3)
    with TieredStore.open(tmp_path / "store", dram="1MiB", durability="none", eviction=waiting) as store:
        for key in "abc":
            store.put(key, torch.zeros(100_000))
        with store.lease("a") as first, store.lease("b") as second:
            del first, second
            with pytest.raises(CapacityError, match=r"waited .* held by 'a'"), store.lease("c"):
                pass

            async def asked() -> None:
                async with store.lease("c"):
                    pass

            with pytest.raises(CapacityError, match=r"waited .* held by 'a'"):
                asyncio.run(asked())
        said = [record.getMessage() for record in caplog.records if record.name == "tiered"]
        assert len(said) == 2
        wanted = re.compile(r"'c' waited .* for room in tier dram: .* held by 'a' \(.*leased\).*at most\)$")
        assert all(wanted.search(one) for one in said)
        with store.lease("c") as third:  # and the store goes on
            assert third.sum() == 0


def test_an_empty_store_is_a_store(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        assert bool(store)
        assert len(store) == 0


@pytest.mark.parametrize("found_by", ["caller", "collector"])
def test_a_store_that_is_collected_says_what_it_drops(tmp_path: Path, found_by: str) -> None:
    def left(change: Callable[[TieredStore], object], action: Literal["always", "error"] = "always") -> list[str]:
        store = TieredStore.open(tmp_path / "state", dram="1MiB")
        gone = weakref.ref(store)
        change(store)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter(action, UncommittedWarning)
            ring: list[object] = [store]
            if found_by == "collector":
                ring.append(ring)
            del store, ring
            if found_by == "collector":
                gc.collect()
            else:
                assert action == "error" or all(warning.filename == __file__ for warning in found)
        assert gone() is None
        assert all(warning.category is UncommittedWarning for warning in found)
        return [str(warning.message) for warning in found]

    def changed(store: TieredStore) -> None:
        store.commit()
        store.update({"a": torch.ones(3), "b": torch.ones(3)})

    said = [
        f"the store in {tmp_path / 'state'} was left without close(), and nothing refers to it any more, with changes of 2 "
        "tensors that were not committed: call commit() first, or leave a with block, which commits"
    ]
    assert left(changed) == said
    assert left(changed, "error") == said
    assert left(lambda store: (changed(store), store.commit())) == []
    assert left(lambda store: store.get("a")) == []
    assert left(lambda store: (store.put("c", torch.ones(3)), store.rollback())) == []
    with pytest.warns(UncommittedWarning, match="was closed with changes of 1 tensor "):
        assert left(lambda store: (store.put("c", torch.ones(3)), store.close())) == []


def test_a_store_that_is_collected_in_a_child_says_nothing(tmp_path: Path) -> None:
    store: list[TieredStore] = [TieredStore.open(tmp_path / "state", dram="1MiB")]
    store[0].put("a", torch.ones(3))

    def collected() -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UncommittedWarning)
            store.clear()
            gc.collect()
        return [str(warning.message) for warning in found]

    assert in_child(collected) == "[]"
    store[0].commit()
    store[0].close()


def test_the_nearest_key_may_be_one_of_a_model(store: TieredStore) -> None:
    store.update({"model/param/0.weight": torch.ones(3), "model/param/0.bias": torch.ones(3), "wide": torch.ones(3)})
    for sought, near in (("0.weigth", "model/param/0.weight"), ("wode", "wide"), ("model/param/0.bia", "model/param/0.bias")):
        with pytest.raises(KeyNotFound, match=f"no tensor '{sought}' in the store; did you mean '{near}'"):
            store.get(sought)
    with pytest.raises(KeyNotFound, match=r"no tensor 'momentum' in the store$"):
        store.get("momentum")


def test_close_says_what_it_drops(tmp_path: Path) -> None:
    def closed(store: TieredStore) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            store.close()
            store.close()
        assert all(warning.filename == __file__ for warning in found)
        assert all(warning.category is UncommittedWarning for warning in found)
        return [str(warning.message) for warning in found]

    def opened(**options: Any) -> TieredStore:
        return TieredStore.open(tmp_path / "state", dram="1MiB", **options)

    store = opened()
    store.update({"a": torch.ones(3), "b": torch.ones(3), "c": torch.zeros(0)})
    assert closed(store) == [
        f"the store in {tmp_path / 'state'} was closed with changes of 3 tensors that were not committed: call commit() first, "
        "or leave a with block, which commits"
    ]
    with opened() as store:
        store.update({"a": torch.ones(3), "b": torch.ones(3), "c": torch.zeros(0)})
    store = opened()
    store.get("a")
    store.offload()
    assert closed(store) == []
    store = opened()
    store.delete("a")
    store["b"] = torch.zeros(9)
    store["d"] = torch.zeros(9)
    store.offload()
    assert "of 3 tensors" in closed(store)[0]
    store = opened()
    store.delete("a")
    store.rollback()
    assert closed(store) == []
    store = opened()
    store["b"] = torch.zeros(9)
    store.commit_async()
    assert closed(store) == []
    for options in ({"access": "read"}, {"durability": "none"}):
        store = TieredStore.open(tmp_path / ("state" if "access" in options else "scratch"), dram="1MiB", **options)  # type: ignore[arg-type]
        if "durability" in options:
            store["x"] = torch.ones(3)
        assert closed(store) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with suppress(ZeroDivisionError), opened() as store:
            store["b"] = torch.zeros(7)
            raise ZeroDivisionError
