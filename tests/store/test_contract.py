"""The public contract of the store, sentence by sentence, over every chain of tiers. Each test quotes what it tests.

What is promised and belongs to parts that are still to come, hence is not tested here:

- ``paths=[...]`` (several drives);
- ``zero.commit``, ``zero.resume``, ``zero.export``, ``zero.initialize``; of "A second page" the half about ``zero.resume``;
- "With torch.distributed initialised the default is stage 3 over the world (mesh=, policy= say otherwise), gradients averaged";
- of "Any DRAM budget ... works": the files in ``tests/zero`` train in the smallest budget; here such a model is paged and run.

"Paging." is in ``tests/zero/test_contract.py``, gradients and updates have their tests beside it; the command line has its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import tiered
import tiered.errors
import tiered.system
from tests.store.chains import CHAINS, MIB, Chain, kib, nothing_is_held, numbers, push_out, same
from tiered import CapacityError, Eviction, KeyNotFound, LeaseConflict, MisuseError, TensorSpec, TieredError, TieredStore, zero
from tiered.system import CgroupRoom

WITH_DISK = [chain for chain in CHAINS if chain.disk]
WITH_COMMITS = [chain for chain in CHAINS if chain.durable]
SCRATCH = [chain for chain in CHAINS if chain.disk and not chain.durable]


def over(chains: list[Chain] | tuple[Chain, ...]) -> Any:
    return pytest.mark.parametrize("chain", chains, ids=lambda chain: chain.name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def chain() -> Chain:
    return CHAINS[0]


@pytest.fixture
def store(chain: Chain, folder: Path) -> Iterator[TieredStore]:
    opened = chain.open(folder)
    yield opened
    opened.close()


# -- the block of code -------------------------------------------------------------------------------------------------------


@over(WITH_COMMITS)
def test_open_creates_or_reopens(chain: Chain, folder: Path) -> None:
    """``with TieredStore.open("state/", dram="1GiB") as store:  # create or reopen; also hbm=, device=, nvme= (sizes)``"""
    with chain.open(folder, dram="2MiB", nvme="16MB") as store:
        store.put("w", numbers(100))
        assert [tier.capacity for tier in store.statistics().tiers if tier.name == "dram"] == [2 * MIB]
    assert folder.is_dir()
    with chain.open(folder, dram=MIB) as store:
        same(store.get("w"), numbers(100))


def test_open_at_an_older_generation(folder: Path) -> None:
    """``generation=``: the state is that of then; the next commit has a number of its own, and what was newest stays."""
    with TieredStore.open(folder, dram=MIB, keep=5) as store:
        for value in range(1, 4):
            store.put("w", torch.tensor(value))
            store.commit({"value": value})
        store.delete("w")
        store.commit()
    for value in (2, 1, 3):
        with TieredStore.open(folder, dram=MIB, keep=5, generation=value) as store:
            assert (store.generation, store.meta, store.get("w").item()) == (value, {"value": value}, value)
    with TieredStore.open(folder, dram=MIB, keep=5, generation=2) as store:
        store.put("v", torch.tensor(7))
        assert store.commit() == 5
    with TieredStore.open(folder, dram=MIB, keep=5) as store:
        assert (store.generation, sorted(store)) == (5, ["v", "w"])
    with TieredStore.open(folder, dram=MIB, keep=5, generation=4) as store:
        assert list(store) == []
    with pytest.raises(tiered.ManifestError, match=r"no generation 9 .* there are: 1, 2, 3, 4, 5"):
        TieredStore.open(folder, dram=MIB, generation=9)


@over(CHAINS)
def test_put_replaces_and_accepts_anything(chain: Chain, folder: Path) -> None:
    """``store.put("w", tensor)  # replaces; accepts any dtype, 0-d, empty, non-contiguous``"""
    base = torch.arange(48, dtype=torch.int16).view(6, 8)
    odd = [
        torch.tensor(3.5),
        torch.empty(3, 0, 2),
        base.t(),
        base[::2, 1:],
        base[:1].expand(5, 8),
        base[0, ::2][:1],  # a single element whose stride is not 1
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, requires_grad=True),
        nn.Parameter(torch.randn(2, 2)),
        torch.randn(4).to(torch.float8_e4m3fn),
    ]
    with chain.open(folder) as store:
        for tensor in odd:
            store.put("w", tensor)
            same(store.get("w"), tensor)
            with store.lease("w") as w:
                same(w, tensor)
            del w
        assert len(store) == 1


@over(CHAINS)
def test_a_lease_is_of_the_top_tier_to_read(store: TieredStore, chain: Chain) -> None:
    """``with store.lease("w") as w: ...  # top tier, read; a list of keys gives a tuple``"""
    store.put("w", numbers(10))
    store.put("v", numbers(20))
    with store.trace() as order, store.lease("w") as w, store.lease(["v", "w"]) as both:
        same(w, numbers(10))
        assert isinstance(both, tuple)
        same(both[0], numbers(20))
        assert both[1].data_ptr() == w.data_ptr()
    assert {touch.tier for touch in order} == {chain.memories[0]}
    del w, both
    with pytest.raises(MisuseError, match="access='write'"), store.lease("w") as w:
        w.zero_()


@over(CHAINS)
def test_a_write_lease_in_a_tier_by_name(store: TieredStore, chain: Chain) -> None:
    """``with store.lease("w", access="write", tier="dram") as w: w.mul_(2)``"""
    store.put("w", torch.ones(1000))
    for tier in (*chain.memories, *chain.memories):
        with store.lease("w", access="write", tier=tier) as w:
            w.mul_(2)
        del w
    assert store.get("w").eq(2 ** (2 * len(chain.memories))).all()
    with pytest.raises(MisuseError, match=f"this store has {', '.join(chain.memories)}"):
        store.lease("w", tier="vram")


@over(CHAINS)
def test_names(store: TieredStore) -> None:
    """``store.get("w"); store.delete("w"); "w" in store; list(store); len(store); store.spec("w")     # get returns a copy``"""
    store.put("w", torch.ones(2, 3, dtype=torch.bfloat16))
    store.put("v", torch.tensor(1))
    assert "w" in store
    assert "x" not in store
    assert 3 not in store
    assert ["w"] not in store
    assert sorted(store) == ["v", "w"]
    assert len(store) == 2
    assert store.spec("w") == TensorSpec("bfloat16", (2, 3), 2)
    copy = store.get("w")
    copy.zero_()
    assert store.get("w").eq(1).all()
    store.delete("w")
    assert list(store) == ["v"]
    for missing in (store.get, store.delete, store.spec):
        with pytest.raises(KeyNotFound, match="no tensor 'w'"):
            missing("w")


@over(CHAINS)
def test_prefetch_is_a_hint(store: TieredStore, chain: Chain) -> None:
    """``store.prefetch(["a", "b"])  # a hint; never raises on full``"""
    for number in range(5):
        store.put(f"t{number}", kib(100, number))
    keys = [f"t{number}" for number in range(5)]
    with store.lease(["t0", "t1"], tier="dram"):
        for tier in (None, *chain.memories):
            store.prefetch([*keys, "nobody"], tier=tier)
            store.prefetch("t3", tier=tier)
    store.prefetch([])
    assert store.statistics().unknown_hints == 1 + len(chain.memories)
    assert "hints named" in str(store.statistics())
    for number, key in enumerate(keys):
        assert store.get(key).eq(number).all()


@over(CHAINS)
def test_trace_and_follow(store: TieredStore) -> None:
    """``with store.trace() as order: ...  # what one iteration touches, in order``; ``store.follow(order)``"""
    keys = [f"t{number}" for number in range(5)]
    for number, key in enumerate(keys):
        store.put(key, kib(50, number))

    def iteration() -> None:
        for number, key in enumerate(keys):
            with store.lease(key, access="write" if number % 2 else "read") as tensor:
                assert tensor.eq(number).all()
            del tensor

    with store.trace() as order:
        iteration()
    assert [(touch.key, touch.use.value) for touch in order] == list(zip(keys, ["read", "write"] * 3, strict=False))
    before = list(order)
    assert store.follow(order) == len(order)
    for _ in range(3):
        iteration()
    assert order == before, "what is leased after the block is not written down"
    store.delete("t2")
    for key in ("t4", "t1", "t0", "t3"):  # it strays, and one is gone
        with store.lease(key) as tensor:
            assert tensor.eq(int(key[1])).all()
    assert store.statistics().unknown_hints == 0
    assert store.follow([*keys, "t2"]) > 0, "keys by hand"
    assert store.statistics().unknown_hints == 1, "t2; a trace may name what comes and goes"
    assert store.follow([]) == 0
    store.put("t2", kib(50, 2))
    for _ in range(2):
        assert store.follow(order, then="end") == len(order), "once, and then it is over"
        iteration()
    iteration()


@over(CHAINS)
def test_fetch(store: TieredStore) -> None:
    """``w = await store.fetch("w")  # asyncio; a copy``"""
    store.put("w", numbers(100))
    same(asyncio.run(store.fetch("w")), numbers(100))


@over(WITH_COMMITS)
def test_commit(chain: Chain, folder: Path) -> None:
    """``generation = store.commit(meta={"step": 7})  # durable from here on; store.generation, store.meta``"""
    meta = {"step": 7, "nested": {"list": [1]}}
    store = chain.open(folder)
    assert (store.generation, store.meta) == (0, {})
    store.put("w", numbers(100))
    generation = store.commit(meta=meta)
    meta["nested"]["list"].append(2)  # type: ignore[index]
    store.meta["nested"]["list"].append(3)
    assert generation == store.generation == 1
    assert store.meta == {"step": 7, "nested": {"list": [1]}}, "nobody's to change"
    assert store.commit({"pair": (1, 2)}) == 2
    assert store.meta == {"pair": [1, 2]}, "as it will come back"
    store.close()
    with chain.open(folder) as again:
        assert (again.generation, again.meta) == (2, {"pair": [1, 2]})
        same(again.get("w"), numbers(100))


@over(CHAINS)
def test_statistics(store: TieredStore, chain: Chain) -> None:
    """``store.statistics()  # frozen: bytes and time per link and direction, hits, stalls, per tier use and peak``"""
    for number in range(4):
        store.put(f"t{number}", kib(100))
        with store.lease(f"t{number}"):
            pass
    if chain.below:
        push_out(store)
        store.get("t0")
    found = store.statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.hits = 0  # type: ignore[misc]
    names = [tier.name for tier in found.tiers]
    assert names == [*chain.memories, "nvme"][: len(chain.memories) + chain.disk]
    assert [(link.src, link.dst) for link in found.links] == list(itertools.pairwise(names))
    assert found.hits + found.misses == found.leases > 3
    for tier in found.tiers:
        assert 0 <= tier.used <= tier.peak <= tier.capacity
    for link in found.links:
        assert link.up.bytes + link.down.bytes > 0
        assert link.up.busy_seconds + link.down.busy_seconds > 0
    assert found.stalled == found.stalled_for_reads + found.stalled_for_room


def test_planning_an_order_is_no_wait_for_bytes(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram="1MiB", durability="none") as store:
        keys = [f"t{number}" for number in range(64)]
        for key in keys:
            store.put(key, torch.ones(8))
        store.follow(keys)
        for key in keys:
            with store.lease(key):
                pass
        store.follow(keys[::-1])
        found = store.statistics()
    assert (found.misses, found.links[-1].up.transfers) == (0, 0)
    assert found.stalled_for_reads == 0


@pytest.mark.parametrize(("written", "nbytes"), [("1GiB", 1 << 30), ("500MB", 500_000_000), (123, 123), ("1.5KiB", 1536)])
def test_sizes(written: int | str, nbytes: int) -> None:
    """"Sizes are accepted as "1GiB", "500MB" or ints (bytes)." """
    assert tiered.types.parse_size(written) == nbytes


# -- "Store." ----------------------------------------------------------------------------------------------------------------


@over(WITH_COMMITS)
def test_leaving_the_block(chain: Chain, folder: Path) -> None:
    """"Leaving the with block normally commits; leaving it by an exception does not, nor does close(): what was not committed
    is gone at the next open." """
    with chain.open(folder) as store:
        store.put("w", torch.tensor(1))

    def failing() -> None:
        with chain.open(folder) as store:
            store.put("w", torch.tensor(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    store = chain.open(folder)
    assert store.get("w").item() == 1
    store.put("w", torch.tensor(3))
    store.put("v", torch.tensor(3))
    store.close()
    with chain.open(folder) as store:
        assert list(store) == ["w"]
        assert store.get("w").item() == 1


@over([chain for chain in CHAINS if not chain.disk])
def test_a_store_without_a_disk(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """"TieredStore.open(None, dram=...) has no disk at all (ZeRO-Offload: DRAM alone, or HBM-DRAM)." """
    monkeypatch.chdir(tmp_path)
    with chain.open(tmp_path / "never") as store:
        store.put("w", numbers(1000))
        with store.lease("w", access="write") as w:
            w.copy_(numbers(1000, 1))
        same(store.get("w"), numbers(1000, 1))
        assert (store.generation, store.meta, store.free_on_device()) == (0, {}, 0)
        with pytest.raises(MisuseError, match="without a disk"):
            store.commit()
        with pytest.raises(MisuseError, match="no disk"):
            _ = store.folder
    assert os.listdir(tmp_path) == []
    for options in ({"nvme": "1GiB"}, {"generation": 1}):
        with pytest.raises(MisuseError, match="without a disk"):
            chain.open(tmp_path, **options)


@over([chain for chain in CHAINS if not chain.disk])
def test_a_full_store_without_a_disk_says_so_at_once(chain: Chain, folder: Path) -> None:
    """"A request that can never fit fails at once": nothing leaves the bottom by itself, so nobody waits for that."""
    with chain.open(folder) as store:  # with the deadline of a minute
        for number in range(5):
            store.put(f"t{number}", kib(200, number))
        with pytest.raises(CapacityError, match=r"for tensor 't5' \(204,800 bytes\): 5 tensors have 1,024,000 of .*delete"):
            store.put("t5", kib(200))
        store.delete("t1")
        store.put("t5", kib(200, 5))
        assert sorted(store) == ["t0", "t2", "t3", "t4", "t5"]
        for key in store:
            assert store.get(key).eq(int(key[1])).all()


@over(SCRATCH)
def test_scratch(chain: Chain, folder: Path) -> None:
    """"durability="none" is scratch: no copy-on-write, files removed at close." """
    with chain.open(folder) as store:
        for _ in range(20):
            for number in range(4):
                store.put(f"t{number}", kib(200, number))
            push_out(store)
        assert store.statistics().tiers[-1].peak <= 2 * MIB, "what is written again is written over"
        with pytest.raises(MisuseError, match="durability='none'"):
            store.commit()
        for number in range(4):
            assert store.get(f"t{number}").eq(number).all()
    assert not folder.exists()


@over(SCRATCH)
def test_scratch_leaves_what_it_did_not_make(chain: Chain, folder: Path) -> None:
    """A folder that was there stays, and a store with commits is not written over."""
    folder.mkdir(mode=0o700)
    chain.open(folder).close()
    assert os.listdir(folder) == []
    with TieredStore.open(folder, dram=MIB) as store:
        store.put("w", torch.tensor(1))
    with pytest.raises(MisuseError, match="holds a store with commits"):
        chain.open(folder)
    with TieredStore.open(folder, dram=MIB) as store:
        assert store.get("w").item() == 1


@over(CHAINS)
def test_conflicts(store: TieredStore, chain: Chain) -> None:
    """"Leases that conflict raise LeaseConflict": at once, and in whatever tiers they are."""
    store.put("w", kib(100))
    for tier in chain.memories:
        for other in chain.memories:
            with store.lease("w", access="write", tier=tier):
                for refused in (
                    lambda other=other: store.lease("w", tier=other).__enter__(),
                    lambda other=other: store.lease(["w"], access="write", tier=other).__enter__(),
                    lambda: store.get("w"),
                    lambda: store.put("w", torch.zeros(1)),
                    lambda: store.delete("w"),
                ):
                    with pytest.raises(LeaseConflict, match="'w'"):
                        refused()
            with store.lease("w", tier=tier), store.lease("w", tier=other):
                with pytest.raises(LeaseConflict, match="'w'"):
                    store.lease("w", access="write", tier=other).__enter__()
                store.get("w")
    nothing_is_held(store)


@over(WITH_DISK)
def test_transfers_in_flight_are_waited_for(store: TieredStore) -> None:
    """"transfers in flight are waited for": a WRITE lease, a put, a delete of what is being written back are no conflict."""
    for _ in range(10):
        for number in range(8):
            store.put(f"t{number}", kib(150, number))
        for number in range(8):
            if number % 3 == 0:
                store.put(f"t{number}", kib(150, 100 + number))
            elif number % 3 == 1:
                with store.lease(f"t{number}", access="write") as tensor:
                    tensor.add_(100)
                del tensor
            else:
                store.delete(f"t{number}")
        for number in range(8):
            if number % 3 < 2:
                assert store.get(f"t{number}").eq(100 + number).all()


@over(CHAINS)
@pytest.mark.parametrize("following", [False, True], ids=["", "following"])
def test_a_resident_lease_has_no_hop(store: TieredStore, following: bool) -> None:
    """"a resident lease is granted in the caller's thread, without a hop": the engine is woken for none of a thousand."""
    keys = [f"t{size}" for size in (4, 16, 64)]
    for key in keys:
        store.put(key, kib(int(key[1:])))
        with store.lease(key, access="write"):  # in the top tier from here on
            pass
    if following:
        store.follow([*keys, *keys])
    before = store.statistics()
    for number in range(1000):
        with store.lease(keys[number % 3], access="write" if number % 7 == 0 else "read"):
            pass
    after = store.statistics()
    assert after.leases - before.leases == after.hits - before.hits == 1000
    assert after.wakes == before.wakes


@over(WITH_COMMITS)
def test_commit_under_a_write_lease(chain: Chain, store: TieredStore) -> None:
    """"commit under an open WRITE lease raises." """
    store.put("w", numbers(100))
    for tier in chain.memories:
        with store.lease("w", access="write", tier=tier), pytest.raises(LeaseConflict, match="'w' has an open WRITE lease"):
            store.commit()
        with store.lease("w", tier=tier):
            store.commit()


@over(WITH_DISK)
def test_write_back_waits_for_the_last_alias(store: TieredStore) -> None:
    """"A lease ends when its last alias dies: write-back waits for that." """
    store.put("w", kib(100, 1))
    with store.lease("w", access="write") as w:
        w.fill_(2)
    alias = w[5:]
    del w
    assert store.statistics().tiers[0].held == 1
    for number in range(20):
        store.put(f"t{number}", kib(100))
        with store.lease(f"t{number}", access="write"):
            pass
    alias.fill_(3)  # nobody else has this memory
    assert alias.eq(3).all()
    del alias
    assert store.statistics().tiers[0].held == 0


@over(CHAINS)
def test_a_read_lease_that_was_written_to(store: TieredStore) -> None:
    """"a READ lease whose tensor was written to (_version) raises at its end." """
    store.put("w", torch.zeros(3))
    with pytest.raises(MisuseError, match="'w' was written to under a READ lease"), store.lease("w") as w:
        w[1:].add_(1)


@over(CHAINS)
def test_threads(store: TieredStore, chain: Chain) -> None:
    """"Thread-safe.": each thread has tensors of its own and reads one that all share."""
    failures: list[BaseException] = []
    store.put("shared", kib(40, 9))

    def work(mine: int) -> None:
        try:
            for turn in range(25):
                store.put(f"t{mine}", kib(20 + mine, turn))
                with store.lease(f"t{mine}", access="write", tier=chain.memories[turn % len(chain.memories)]) as tensor:
                    assert tensor.eq(turn).all()
                    tensor.add_(1)
                del tensor
                with store.lease("shared") as shared:
                    assert shared.eq(9).all()
                del shared
                assert store.get(f"t{mine}").eq(turn + 1).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    nothing_is_held(store)


def test_errors_are_exported() -> None:
    """"All errors are exported from tiered." """
    for name in tiered.errors.__all__:
        error = getattr(tiered, name)
        assert issubclass(error, TieredError)
        assert name in tiered.__all__


@pytest.mark.parametrize("width", [64, 128, 256])
def test_any_budget_that_is_large_enough_works(folder: Path, width: int) -> None:
    """"Any DRAM budget >= 1 MiB and >= 3 x the largest unit works ...; below, CapacityError names the number." """
    model = nn.Sequential(*(nn.Linear(width, 4 * width) if n % 2 == 0 else nn.Linear(4 * width, width) for n in range(4)))
    x = torch.randn(2, width)
    expected = model(x)
    largest = 4 * (4 * width * width)
    wanted = max(MIB, 3 * largest)
    with TieredStore.open(folder, dram=wanted, eviction=Eviction(deadline=20)) as store:
        assert torch.equal(zero.page(model, store)(x), expected)
    if wanted > MIB:
        other = nn.Sequential(nn.Conv1d(width, 4 * width, 1))  # a linear layer would be divided into rows
        with (
            TieredStore.open(folder, dram=wanted - 4096, eviction=Eviction(deadline=20)) as store,
            pytest.raises(CapacityError, match=rf"the smallest that works is {wanted:,} bytes"),
        ):
            zero.page(other, store, name="other")
    with pytest.raises(CapacityError, match="the smallest is 1,048,576 bytes"):
        TieredStore.open(folder, dram=MIB - 1)


@pytest.mark.parametrize(("available", "headroom", "budget"), [(8, 64, 4), (64, 8, 4), (1, 64, 1)])
def test_the_default_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch, available: int, headroom: int, budget: int
) -> None:
    """"Default budget: half of the smaller of available memory and cgroup headroom"; at least what a store opens with."""

    class Memory:
        def __init__(self) -> None:
            self.available = available * MIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    monkeypatch.setattr(tiered.system, "cgroup_room", lambda: CgroupRoom("limited", 99 * MIB, headroom * MIB))
    with TieredStore.open(folder) as store:
        assert store.statistics().tiers[0].capacity == budget * MIB
