"""Leases, aliases of what they gave, and hints."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.store.chains import MIB, hurried, numbers, raw, same
from tests.store.opened import Open, push_out
from tiered import (
    Access,
    CapacityError,
    KeyNotFound,
    LeaseConflict,
    MisuseError,
    TieredError,
    TieredStore,
)
from tiered.tensors import specs as tensors


def test_a_key_gives_a_tensor_and_a_list_a_tuple(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    store.put("b", torch.tensor(2))
    with store.lease("a") as a:
        assert isinstance(a, torch.Tensor)
    with store.lease(["b", "a"]) as found:
        assert isinstance(found, tuple)
        assert [t.item() for t in found] == [2, 1]
    with store.lease(("a",)) as found:
        assert isinstance(found, tuple)
    with store.lease([]) as found:
        assert found == ()


def test_bad_leases(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    with pytest.raises(MisuseError, match="twice"):
        store.lease(["a", "b", "a"], access="write")
    with pytest.raises(MisuseError, match="'exclusive'"):
        store.lease("a", access="exclusive")
    with pytest.raises(MisuseError, match="nvme"):
        store.lease("a", tier="nvme")
    with pytest.raises(KeyNotFound, match="'b'"), store.lease(["a", "b"]):
        pass
    with store.lease("a", access=Access.WRITE, tier="dram"):  # none of these left a lease behind
        pass
    lease = store.lease("a")
    with lease, pytest.raises(MisuseError, match="open already"), lease:
        pass
    with lease:  # again, one after the other
        pass


def test_conflicts(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    store.put("b", torch.tensor(1))
    with store.lease("a"), store.lease("a"):
        for refused in (
            lambda: store.lease("a", access="write").__enter__(),
            lambda: store.lease(["b", "a"], access="write").__enter__(),
            lambda: store.put("a", torch.tensor(2)),
            lambda: store.delete("a"),
        ):
            with pytest.raises(LeaseConflict, match="'a'"):
                refused()
    with store.lease("a", access="write"):
        for refused in (
            lambda: store.lease("a").__enter__(),
            lambda: store.lease("a", access="write").__enter__(),
            lambda: store.get("a"),
            lambda: store.put("a", torch.tensor(2)),
            lambda: store.delete("a"),
        ):
            with pytest.raises(LeaseConflict, match="'a'"):
                refused()
    used = store.statistics().tiers[0].used
    with store.lease(["a", "b"], access="write") as (a, b):
        a.fill_(5)
        b.fill_(6)
    assert (store.get("a").item(), store.get("b").item()) == (5, 6)
    assert store.statistics().tiers[0].used == used, "refused puts gave their room back"


def test_an_exception_in_a_lease_ends_it(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    for access in ("read", "write"):
        with pytest.raises(ZeroDivisionError), store.lease("a", access=access):
            raise ZeroDivisionError
    store.delete("a")


@pytest.mark.parametrize("keys", ["a", ["b", "a"]])
@pytest.mark.parametrize("gives", ["data", "set_"])
def test_other_memory_in_place_of_a_write_is_refused(store: TieredStore, keys: str | list[str], gives: str) -> None:
    """What the tensor has then is not in the store, and nobody would notice."""
    for key in "ab":
        store.put(key, torch.zeros(4))

    def give() -> None:
        with store.lease(keys, access="write") as held:
            tensor = held if isinstance(held, torch.Tensor) else held[-1]
            if gives == "data":
                tensor.data = torch.ones(4)
            else:
                tensor.set_(torch.ones(4))

    with pytest.raises(MisuseError, match=r"the tensor of 'a' was given other memory .* write in place, as with tensor\.copy_"):
        give()
    assert store.get("a").tolist() == [0.0] * 4
    with store.lease(keys, access="write") as held:
        (held if isinstance(held, torch.Tensor) else held[-1]).copy_(torch.ones(4))
    assert store.get("a").tolist() == [1.0] * 4


def test_writing_under_a_read_lease_raises_at_its_end(store: TieredStore) -> None:
    store.put("a", torch.zeros(3))
    with pytest.raises(MisuseError, match="'a' was written to under a READ lease"), store.lease("a") as a:
        a[1:].add_(1)
    del a
    store.put("a", torch.zeros(3))

    def failing() -> None:
        with store.lease("a") as a:
            a.add_(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # the first error is the one that counts
        failing()
    store.put("a", torch.zeros(3))
    with store.lease("a", access="write"):  # and it ended
        pass


def test_each_lease_has_its_own_shape_and_no_history(store: TieredStore) -> None:
    store.put("a", torch.ones(4, 3))
    with store.lease("a") as one, store.lease("a") as other:
        one.requires_grad_()
        assert not other.requires_grad
        assert one.data_ptr() == other.data_ptr()
    with store.lease("a") as again:
        assert not again.requires_grad
    del one, other, again
    with torch.inference_mode(), store.lease("a", access="write") as a:
        a.mul_(2)
    with store.lease("a") as a:
        assert not a.is_inference()
        assert a.eq(2).all()


@pytest.mark.parametrize("fate", ["evicted", "replaced", "deleted", "closed"])
def test_an_alias_keeps_its_bytes(store: TieredStore, fate: str) -> None:
    store.put("a", numbers(1000))
    with store.lease("a") as a:
        alias = a.view(10, 100)[3:].t()
    del a
    expected = raw(numbers(1000).view(10, 100)[3:].t())
    if fate == "replaced":
        store.put("a", torch.zeros(1000))
    elif fate == "deleted":
        store.delete("a")
    elif fate == "closed":
        store.close()
    if fate != "closed":
        assert store.statistics().tiers[0].held == 1
        push_out(store)
        push_out(store)
        assert raw(alias) == expected
        del alias
        gc.collect()
        push_out(store)
        pool = store.statistics().tiers[0]
        assert pool.held == 0
        assert pool.used <= (8192 if fate != "deleted" else 0)
        return
    del store
    gc.collect()
    junk = [torch.randn(1 << 18) for _ in range(8)]
    assert raw(alias) == expected
    del junk


def test_a_store_that_nobody_closed_goes_with_its_last_reference(folder: Path) -> None:
    store = TieredStore.open(folder, dram=MIB)
    store.put("a", numbers(10))
    with store.lease("a") as a:
        pass
    del store
    gc.collect()
    same(a, numbers(10))
    with TieredStore.open(folder, dram=MIB) as again:  # the lock is free
        assert len(again) == 0


def test_open_stores_leave_nothing_open(folder: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    for warm in range(2):
        TieredStore.open(folder, dram=MIB).close()
        before = descriptors() if warm else 0
    threads = threading.active_count()
    for _ in range(10):
        with TieredStore.open(folder, dram=MIB) as store:
            store.put("a", torch.ones(1000))
            with store.lease("a"):
                pass
    del store
    assert descriptors() == before
    assert threading.active_count() == threads


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_a_lease_whose_view_cannot_be_made_is_none(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", torch.ones(4))
    store.put("b", torch.ones(4, dtype=torch.complex32))
    with monkeypatch.context() as patch:
        patch.delitem(tensors._TYPES, "complex32")  # a store that a newer torch has written
        with pytest.raises(TieredError, match="complex32"), store.lease(["a", "b"], access="write"):
            pass
    assert store.statistics().tiers[0].held == 0
    store.delete("a")
    store.delete("b")
    assert store.statistics().tiers[0].used == 0


def test_autograd_notices_a_change_after_the_lease(store: TieredStore) -> None:
    store.put("w", torch.randn(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with store.lease("w") as w:
        y = x @ w
    del w
    with store.lease("w", access="write") as w:
        w.mul_(2)
    del w
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("between", ["nothing", "eviction", "replacement", "deletion"])
def test_autograd_is_right_whatever_happens_to_the_tensor(store: TieredStore, between: str) -> None:
    weight = torch.randn(4, 4)
    store.put("w", weight)
    x = torch.randn(2, 4, requires_grad=True)
    with store.lease("w") as w:
        y = x @ w
    del w
    if between == "replacement":
        store.put("w", torch.zeros(4, 4))
    elif between == "deletion":
        store.delete("w")
    if between != "nothing":
        push_out(store)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4) @ weight.t())


def test_a_pool_full_of_aliases_says_who_holds_it(open_store: Open) -> None:
    store = open_store()
    kept = []
    for key in "abc":
        store.put(key, torch.zeros(300 << 10, dtype=torch.uint8))
        with store.lease(key) as t:
            kept.append(t)
    with store.lease("a"), pytest.raises(CapacityError) as raised, hurried(store, 0.2):
        store.put("d", torch.zeros(300 << 10, dtype=torch.uint8))
    assert "'a' (307,200 bytes, leased)" in str(raised.value)
    assert "'b' (307,200 bytes, still referenced after its lease)" in str(raised.value)
    del kept, t
    store.put("d", torch.zeros(300 << 10, dtype=torch.uint8))
    assert store.statistics().stalled_for_room > 0


def test_ctrl_c_in_a_waiting_lease_leaves_no_lease_behind(store: TieredStore) -> None:
    store.put("a", torch.ones(200 << 10))
    push_out(store)
    store.put("b", torch.ones(200 << 10))
    with store.lease("b") as b:
        pass  # b keeps its room
    waiting = store._engine.requests.waiting

    def interrupt() -> None:
        while not waiting:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background has none
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt), store.lease("a", access="write"):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    helper.join()
    assert not waiting
    del b
    with store.lease("a", access="write") as a:
        assert a.eq(1).all()
    store.delete("a")
    store.delete("b")


def test_prefetch_is_a_hint(store: TieredStore) -> None:
    for number in range(20):
        store.put(f"t{number}", torch.full((25 << 10,), float(number)))
    store.prefetch([f"t{number}" for number in range(20)] + ["nobody"])
    store.prefetch("t3")
    store.prefetch([])
    with store.lease("t3", access="write"):
        store.prefetch(["t3"])
    for number in range(20):
        store.prefetch([f"t{other}" for other in range(number, 20)])
        assert store.get(f"t{number}").eq(number).all()
    statistics = store.statistics()
    assert statistics.hits + statistics.misses == statistics.leases == 21
    assert statistics.prefetched > 0
