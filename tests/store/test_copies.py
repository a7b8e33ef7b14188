"""Copies of tensors: the memory that they lie in, into a caller's tensor, and several threads that read ahead."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.rig import Rig, evicted, fill
from tiered import Eviction, KeyNotFound, MisuseError, TieredStore
from tiered.engine.requests import Prefetch
from tiered.system import anonymous
from tiered.tensors.copies import LEAST, UNUSED, Copies

MIB = 1 << 20


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with TieredStore.open(None, dram="32MiB") as store:
        yield store


def test_what_a_caller_lets_go_of_returns_to_the_system(store: TieredStore) -> None:
    """Also from between what it keeps, where malloc keeps holes."""
    for key, nbytes in (("warm", 16 * MIB), ("a", 3 * MIB // 2), ("b", 3 * MIB)):
        store.put(key, torch.ones(nbytes // 4))
    store.get("warm")
    gc.collect()
    before = anonymous()
    kept = [store.get("a") for _ in range(96)][::2]
    more = [store.get("b") for _ in range(24)]
    callers = sum(tensor.nbytes for tensor in [*kept, *more])
    beyond = anonymous() - before - callers
    assert beyond <= UNUSED + 8 * MIB, f"{beyond / MIB:.1f} MiB beside those that the caller has"
    kept.clear()
    more.clear()
    assert anonymous() - before <= UNUSED + 8 * MIB


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    copies = Copies()
    first = copies.empty((LEAST,), torch.uint8)
    view, where = first[5:], first.data_ptr()
    del first
    assert copies.empty((LEAST,), torch.uint8).data_ptr() != where
    del view
    found = {copies.empty((LEAST // 4,), torch.float32).data_ptr() for _ in range(3)}
    assert len(found) == 1, "one is let go of before the next one is asked for"
    assert copies.empty((2 * LEAST,), torch.uint8).data_ptr() not in {where, *found}, "it is too small"


def test_what_is_unused_is_bounded() -> None:
    copies = Copies()
    several = [copies.empty((size * MIB,), torch.uint8) for size in (1, 2, 9, 3, 8, 16, 1)]
    several.append(copies.empty((17 * MIB,), torch.uint8))
    while several:
        several.pop()
        assert copies.unused <= UNUSED
    assert copies.unused
    copies.clear()
    assert copies.unused == 0


def test_many_threads_get_memory_of_their_own() -> None:
    copies = Copies()

    def loop(number: int) -> bool:
        right = True
        for _ in range(100):
            tensor = copies.empty((LEAST + number,), torch.uint8)
            tensor.fill_(number)
            right = right and bool((tensor[::4096] == number).all())
            del tensor
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(loop, range(4)))
    assert copies.unused <= UNUSED


def test_a_copy_is_an_ordinary_tensor(store: TieredStore) -> None:
    store.put("a", torch.arange(MIB, dtype=torch.float32).view(4, -1))
    found = store.get("a")
    assert found.shape == (4, MIB // 4)
    assert found.is_contiguous()
    found.requires_grad_().sum().backward()
    assert torch.equal(copy.deepcopy(found).detach(), store.get("a"))
    assert found.detach().numpy().flags.writeable
    shared = store.get("a").share_memory_()
    assert torch.equal(shared, store.get("a"))
    store.close()
    assert found[3, -1] == MIB - 1


# -- into a caller's tensor --------------------------------------------------------------------------------------------


def put_three(store: TieredStore) -> list[str]:
    for number, key in enumerate("abc"):
        store.put(key, torch.full((3, 1000), float(number)))
    return list("abc")


def test_out_takes_the_copy(store: TieredStore) -> None:
    keys = put_three(store)
    out = torch.empty(3, 1000)
    assert store.get("b", out=out) is out
    assert torch.equal(out, torch.ones(3, 1000))
    batch = torch.empty(4, 3, 1000)
    rows = store.get_many([*keys, "a"], out=batch)
    assert [row.data_ptr() for row in rows] == [row.data_ptr() for row in batch]
    assert batch[:, 2, 999].tolist() == [0, 1, 2, 0]
    strided = torch.empty(1000, 3).t()
    weight = torch.nn.Parameter(torch.empty(3, 1000))
    version = weight._version
    assert store.get_many(["c", "b"], out=[strided, weight])[0] is strided
    assert strided.unique().tolist() == [2]
    assert weight._version > version, "autograd is told"
    assert weight.grad_fn is None
    with torch.inference_mode():
        inferred = torch.empty(3, 1000)
    assert store.get("c", out=inferred)[0, 0] == 2


def test_out_takes_every_element_type(store: TieredStore) -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64, torch.uint16):
        bits = torch.arange(64, dtype=torch.uint8) % 2
        store.put("t", bits.view(dtype))
        out = store.get("t", out=torch.empty_like(bits.view(dtype)))
        assert torch.equal(out.view(torch.uint8), bits), dtype


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(1000, 3), r"'a' is float32 of shape \(3, 1000\), and out is float32 of shape \(1000, 3\)"),
        (torch.empty(3, 1000, dtype=torch.float64), "out is float64"),
        (torch.empty(3, 1000, device="meta"), "'a' is a meta tensor"),
        (torch.empty(1).expand(3, 1000), "was expanded"),
        ([0.0], "not list"),
    ],
)
def test_out_of_another_kind_is_refused(store: TieredStore, out: object, message: str) -> None:
    put_three(store)
    with pytest.raises(MisuseError, match=message):
        store.get("a", out=out)  # type: ignore[call-overload]
    with pytest.raises(MisuseError, match=message):
        store.get_many(["a"], out=[out])  # type: ignore[list-item]
    store.put("a", torch.zeros(3, 1000))  # no lease is left


def test_out_for_what_is_not_there(store: TieredStore) -> None:
    keys = put_three(store)
    out = torch.full((3, 1000), 7.0)
    assert store.get("x", None, out=out) is None
    with pytest.raises(KeyNotFound):
        store.get("x", out=out)
    assert out.unique().tolist() == [7]
    with pytest.raises(MisuseError, match="out has 2 tensors for 3 keys"):
        store.get_many(keys, out=[out, out])


# -- several threads ---------------------------------------------------------------------------------------------------


def test_hints_of_another_thread_stay() -> None:
    rig = Rig(64, 400, reserve=0.0)
    engine, waiting = rig.engine, rig.engine.requests.waiting

    def asked() -> list[list[str]]:
        return [list(one._waiting) for one in waiting if isinstance(one, Prefetch)]

    fill(rig, *"abcdef", nbytes=4)
    evicted(rig, *"abcdef")
    ended = threading.Thread(target=engine.hint, args=(["f"], 0))
    with ThreadPoolExecutor(1) as other:
        ended.start()
        ended.join()
        other.submit(engine.hint, ["a", "b"], 0).result()
        assert asked() == [["a", "b"]], "one of a thread that has ended is replaced"
        engine.hint(["c"], 0)
        engine.ahead(["d"], 0)
        engine.hint(["e"], 0)
        assert asked() == [["a", "b"], ["d"], ["e"]]
        other.submit(engine.hint, ["c"], 0).result()
        assert asked() == [["d"], ["e"], ["c"]]
    rig.settle()
    rig.wind_down()


def test_a_hint_keeps_nothing_of_its_caller() -> None:
    rig = Rig(64, 400, reserve=0.0)
    found = []

    def called() -> None:
        local = torch.zeros(1)
        found.append(weakref.ref(local))
        rig.engine.hint(["a"], 0)

    gc.disable()  # what lies in a cycle stays
    try:
        called()
        assert found[0]() is None
    finally:
        gc.enable()
    rig.wind_down()


def test_two_threads_that_read_many_are_both_read_ahead(tmp_path: str) -> None:
    """They take turns, run by run; each run but the first ones has been asked for before it is waited for."""
    with TieredStore.open(tmp_path / "store", dram="8MiB", eviction=Eviction(deadline=20)) as store:  # type: ignore[operator]
        names = {which: [f"{which}{number}" for number in range(8)] for which in "xy"}
        for keys in names.values():
            for number, key in enumerate(keys):
                store.put(key, torch.full((MIB // 4,), float(number)))
        store.offload()
        before = store.statistics()
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
            loops = {pool: store.in_order(names[which]) for which, pool in (("x", one), ("y", two))}
            for number in range(8):
                for pool, loop in loops.items():
                    assert pool.submit(next, loop).result()[-1] == number
                    pool.submit(store.prefetch, []).result()  # replaces its own hints, of which there are none
        after = store.statistics()
        assert after.prefetched - before.prefetched > 7, "of 14 that come after the first of each: one thread alone has 7"


def test_coroutines_copy_into_memory_of_the_store(store: TieredStore) -> None:
    store.put("a", torch.full((2 * MIB,), 3.0))

    async def fetched() -> torch.Tensor:
        return (await store.fetch_many(["a", "a"]))[1]

    assert asyncio.run(store.fetch("a"))[-1] == asyncio.run(fetched())[-1] == 3
