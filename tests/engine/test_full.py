"""Who holds the room: aliases that outlive their leases are counted, and named in the tier that is really full."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import threading
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from tests.store.chains import CHAINS, MIB, hurried, kib, nothing_is_held, push_out
from tiered import CapacityError, Eviction, KeyNotFound, StoreClosed, TensorSpec, TieredStore, UncommittedWarning

DEADLINE = 0.05
THREE = next(chain for chain in CHAINS if chain.name == "hbm-dram-nvme")


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """A deadlock fails with every thread's traceback instead of hanging."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    """With a device of 512 KiB, a host of 1 MiB and a disk."""
    opened = THREE.open(tmp_path / "state", eviction=Eviction(deadline=60.0))  # the disk may be slow
    yield opened
    opened.close()


def soon(store: TieredStore) -> AbstractContextManager[None]:
    """Requests give up soon within the block. Elsewhere none does because the machine is slow."""
    return hurried(store, DEADLINE)


def hold(store: TieredStore, tier: str, count: int, name: str, size: int = 160) -> list[torch.Tensor]:
    """Aliases that stay after their leases; what is held in the device has no copy in the host."""
    held = []
    for number in range(count):
        store.put(f"{name} {number}", kib(size, number))
        with store.lease(f"{name} {number}", access="write", tier=tier) as tensor:
            held.append(tensor)
    return held


def held_in(store: TieredStore) -> dict[str, int]:
    return {tier.name: tier.held for tier in store.statistics().tiers}


async def leasing(store: TieredStore, key: str) -> None:
    async with store.lease(key):
        pass


def enter(store: TieredStore, **options: str) -> None:
    with store.lease("w", **options):  # type: ignore[call-overload]
        pass


# -- aliases -----------------------------------------------------------------------------------------------------------------


def test_aliases_are_counted_in_their_tier(store: TieredStore) -> None:
    device, host = hold(store, "hbm", 2, "device"), hold(store, "dram", 3, "host")
    assert held_in(store) == {"hbm": 2, "dram": 3, "nvme": 0}
    with store.lease("host 0", tier="dram"):
        assert held_in(store)["dram"] == 2, "what is leased is not held beyond its lease"
    view = device[0][3:].view(torch.int8)
    del device[0]
    assert held_in(store)["hbm"] == 2, "any alias counts"
    del view
    assert held_in(store)["hbm"] == 1
    store.delete("host 1")
    assert held_in(store)["dram"] == 3, "its memory is still somebody's"
    host.clear()
    device.clear()
    assert held_in(store) == {"hbm": 0, "dram": 0, "nvme": 0}
    nothing_is_held(store)


# -- the tier that is full ---------------------------------------------------------------------------------------------------

FULL_HOST: dict[str, Callable[[TieredStore], object]] = {
    "put": lambda store: store.put("v", kib(200)),
    "get": lambda store: store.get("w"),
    "lease in the host": lambda store: enter(store, tier="dram"),
    "lease in the device": lambda store: enter(store),
    "write lease": lambda store: enter(store, access="write"),
    "lease of several": lambda store: store.lease(["w", "small"]).__enter__(),
    "fetch": lambda store: asyncio.run(store.fetch("w")),
    "async lease": lambda store: asyncio.run(leasing(store, "w")),
}


@pytest.mark.parametrize("asking", FULL_HOST)
def test_a_full_host_is_named_whatever_the_request_is_for(store: TieredStore, asking: str) -> None:
    """The device has room: a lease there waits for the host, through which the bytes come."""
    store.put("w", kib(200, 7))
    store.put("small", kib(4))
    push_out(store)
    held = hold(store, "dram", 6, "host")
    with pytest.raises(CapacityError) as raised, soon(store):
        FULL_HOST[asking](store)
    text = str(raised.value)
    assert "waited 0." in text
    assert "for room in tier dram: " in text
    assert "of 1,048,576 bytes are in use, held by 'host 0' (163,840 bytes, still referenced after its lease)" in text
    assert "tier hbm" not in text
    assert "Release leases and the tensors they gave, also what autograd saved of them for backward, or open" in text
    held.clear()
    assert store.get("w").eq(7).all()
    del raised
    gc.collect()
    nothing_is_held(store)


def test_what_is_leased_is_named_as_leased(store: TieredStore) -> None:
    store.put("w", kib(200))
    held = hold(store, "dram", 6, "host")
    leased = r"'host 3' \(163,840 bytes, leased\)"
    with store.lease("host 3", tier="dram"), pytest.raises(CapacityError, match=leased), soon(store):
        store.put("v", kib(200))
    held.clear()


def test_room_that_lies_apart_is_said_to(store: TieredStore) -> None:
    held: list[torch.Tensor | None] = list(hold(store, "dram", 6, "host"))
    for number in (1, 3):
        held[number] = None
        store.delete(f"host {number}")
    apart = "655,360 of 1,048,576 bytes are in use, the largest free piece has 163,840 bytes, held by 'host 0'"
    with pytest.raises(CapacityError, match=apart), soon(store):
        store.put("v", kib(200))
    held.clear()
    store.put("v", kib(200))


FULL_DEVICE: dict[str, Callable[[TieredStore], object]] = {
    "lease": enter,
    "create": lambda store: store.create("v", TensorSpec("uint8", (200 << 10,), 1)),
    "async lease": lambda store: asyncio.run(leasing(store, "w")),
}


@pytest.mark.parametrize("asking", FULL_DEVICE)
def test_a_full_device_is_named(store: TieredStore, asking: str) -> None:
    store.put("w", kib(200, 7))
    held = hold(store, "hbm", 3, "device")
    with pytest.raises(CapacityError) as raised, soon(store):
        FULL_DEVICE[asking](store)
    text = str(raised.value)
    assert "for room in tier hbm: 491,520 of 524,288 bytes are in use, held by 'device 0' (163,840 bytes, still" in text
    assert "tier dram" not in text
    assert store.get("w").eq(7).all(), "the host has room"
    held.clear()
    enter(store)


def test_what_the_device_holds_goes_through_a_host_that_is_full(store: TieredStore) -> None:
    """The device is full of tensors that nobody holds; they could leave it if the host had room for them."""
    store.put("w", kib(200, 7))
    for number in range(3):
        store.put(f"device {number}", kib(160, number))
        with store.lease(f"device {number}", access="write"):
            pass
    held = hold(store, "dram", 6, "host")
    with pytest.raises(CapacityError, match=r"room in tier dram: .*'host \d' \(163,840 bytes, still") as raised, soon(store):
        enter(store)
    assert "tier hbm" not in str(raised.value), "nobody can help it there"
    held.clear()
    enter(store)
    for number in range(3):
        assert store.get(f"device {number}").eq(number).all()


def test_both_are_named_when_both_are_full(store: TieredStore) -> None:
    store.put("w", kib(200, 7))
    store.put("v", kib(200, 8))
    push_out(store)
    store.put("v2", kib(200, 8))
    device = hold(store, "hbm", 3, "device")
    host = hold(store, "dram", 5, "host")
    with pytest.raises(CapacityError) as raised, hurried(store, 1.0), store.lease(["v2", "w"]):  # both have to be tried
        pass
    text = str(raised.value)
    assert "tier dram: " in text
    assert "'host 0'" in text
    assert "tier hbm: " in text
    assert "'device 0'" in text
    device.clear()
    host.clear()


def test_a_commit_that_cannot_copy_names_who_holds_the_host(store: TieredStore) -> None:
    """What is still referenced is copied before it is written, for it may change; there is no room for the copy."""
    held = hold(store, "dram", 6, "host")
    with pytest.raises(CapacityError, match=r"a flush waited 0\.\d s for room in tier dram: .*'host 0'"), soon(store):
        store.commit()
    assert store.generation == 0
    held.clear()
    assert store.commit() == 1


def test_a_commit_that_cannot_copy_names_who_holds_the_device(store: TieredStore) -> None:
    held = hold(store, "hbm", 3, "device")
    with pytest.raises(CapacityError, match=r"a flush waited 0\.\d s for room in tier hbm: .*'device 0'"), soon(store):
        store.commit()
    held.clear()
    assert store.commit() == 1


def test_a_lease_below_what_somebody_still_refers_to_above(store: TieredStore) -> None:
    """There is room; but bytes that may change are not written back."""
    (w,) = hold(store, "hbm", 1, "device")
    with pytest.raises(CapacityError) as raised, soon(store), store.lease("device 0", tier="dram"):
        pass
    assert "'device 0' (163,840 bytes, still referenced after its lease) in tier hbm" in str(raised.value)
    del w
    with store.lease("device 0", tier="dram") as found:
        assert found.eq(0).all()


def test_host_memory_alone_waits_for_what_is_still_referenced(tmp_path: Path) -> None:
    with TieredStore.open(None, dram=MIB, eviction=Eviction(deadline=DEADLINE)) as store:
        store.put("w", kib(600))
        with store.lease("w") as w:
            pass
        store.delete("w")
        with pytest.raises(CapacityError, match=r"room in tier dram: .*'w' \(614,400 bytes, still referenced"):
            store.put("v", kib(600))
        del w
        store.put("v", kib(600))


# -- errors let go -----------------------------------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[TieredStore], object]] = {
    "get": lambda store: store.get("nobody"),
    "lease": enter,
    "put": lambda store: store.put("v", kib(200)),
}


@pytest.mark.parametrize("asking", REFUSED)
def test_an_error_that_was_handled_keeps_nobodys_tensors(store: TieredStore, asking: str) -> None:
    """A traceback refers to all callers' frames, hence to their tensors; it goes with the error, not with a collection."""
    blocker = hold(store, "dram", 6, "host") if asking == "put" else []

    def failing() -> weakref.ref[torch.Tensor]:
        mine = torch.ones(3)
        with pytest.raises((KeyNotFound, CapacityError)), soon(store):
            REFUSED[asking](store)
        return weakref.ref(mine)

    gc.collect()
    gc.disable()
    try:
        assert failing()() is None
    finally:
        gc.enable()
    blocker.clear()


# -- closed meanwhile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asking", ["put", "get", "lease in the host", "fetch"])
def test_closed_by_another_thread_in_the_middle(store: TieredStore, monkeypatch: pytest.MonkeyPatch, asking: str) -> None:
    """After the grant, before there is a tensor: the store says that it is closed, as at any other time."""
    store.put("w", kib(4))
    memory = store._parts.memories[store._parts.dram]
    tensor = memory.tensor

    def closing(*args: object) -> object:
        thread = threading.Thread(target=store.close)
        thread.start()
        thread.join()
        return tensor(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "tensor", closing)
    with pytest.raises(StoreClosed):
        FULL_HOST[asking](store)


def test_a_store_in_a_cycle_may_be_collected_by_its_own_engine(tmp_path: Path) -> None:
    """Collectors run wherever memory is asked for, and the engine's thread cannot wait for its own end."""
    store = TieredStore.open(tmp_path / "state", dram=MIB)
    store.put("a", torch.ones(3))
    engine, cycle = store._engine, [store]
    cycle.append(cycle)  # type: ignore[arg-type]
    turn, collected = engine.turn, threading.Event()

    def turning() -> bool:
        gc.collect()
        collected.set()
        return turn()

    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UncommittedWarning)
            engine.turn = turning  # type: ignore[method-assign]
            del store, cycle
            engine._wake.set()
            assert collected.wait(300)
            assert engine._thread is not None
            engine._thread.join(300)
            assert not engine._thread.is_alive()
            for thread in threading.enumerate():
                if thread.name == "tiered-close":
                    thread.join(300)
    finally:
        gc.enable()
    assert ["changes of 1 tensor that" in str(warning.message) for warning in found] == [True]
    TieredStore.open(tmp_path / "state", dram=MIB).close()  # the lock is free


# -- what a tensor costs -----------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_ten_thousand_tensors(tmp_path: Path) -> None:
    """At most 2 KiB of Python's memory each, after a put, a lease and a commit."""
    count = 10_000
    value = torch.ones(16)
    with TieredStore.open(tmp_path / "state", dram="64MiB") as store:
        store.put("warm", value)
        store.commit()
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            store.put(f"tensor {number}", value)
        for number in range(count):
            with store.lease(f"tensor {number}", tier="dram"):
                pass
        store.commit()
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / count
        tracemalloc.stop()
        print(f"{each:.0f} bytes")
        assert each <= 2048


def test_one_tensor_takes_the_room_of_thousands_that_changed(tmp_path: Path) -> None:
    """Choosing them anew at the end of each write-back took longer than the deadline."""
    with TieredStore.open(tmp_path / "state", dram=3000 * 4096, durability="none") as store:
        for number in range(3000):
            store.put(f"t{number}", torch.full((1024,), float(number)))
        store.put("all", torch.ones(2900 * 1024))
        assert store.statistics().tiers[0].used >= 2900 * 4096
        for number in (0, 1500, 2999):
            assert bool((store.get(f"t{number}") == number).all())


@pytest.mark.parametrize("wanted", [["k1", "k2", "x"], ["x", "k2", "k1"]])
def test_all_that_is_there_is_wanted_and_the_room_lies_apart(tmp_path: Path, wanted: list[str]) -> None:
    """Nothing may leave for it, and nothing has to: what is there is moved, however far."""
    large = (2 * MIB - 8 * 1024) // 4
    with TieredStore.open(tmp_path / "state", dram=4 * MIB) as store:
        store.put("x", torch.full((4096,), 1.0))
        store.commit()
    with TieredStore.open(tmp_path / "state", dram=4 * MIB, eviction=Eviction(deadline=5)) as store:
        for key, count in (("h1", 2048), ("k1", large), ("h2", 2048), ("k2", large)):
            store.put(key, torch.full((count,), 2.0))
        store.commit()
        store.delete("h1")
        store.delete("h2")
        with store.lease(wanted) as found:
            assert sorted(float(tensor[0]) for tensor in found) == [1.0, 2.0, 2.0]
        del found
        assert store.get("x")[0] == 1.0
