"""What was found by trying to break the promises: writers under READ leases, a tier below that is full, interruptions."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import random
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from bench.rehearsal import MovablePlaces, Places
from tests.rig import WRITE, Rig, evicted, fill, where
from tiered import (
    CapacityError,
    CommitError,
    CorruptionError,
    Eviction,
    LeaseConflict,
    MisuseError,
    ReadError,
    TieredError,
    TieredStore,
)
from tiered.allocator import SlotMap
from tiered.engine.background import ReadAhead
from tiered.engine.policy import LRU, Candidate, FollowedOrder, NextUse, OrderPlan, Touch
from tiered.engine.pool import Pool
from tiered.engine.requests import Lease
from tiered.engine.residency import Copy, Entry, State
from tiered.engine.scheduler import Scheduler
from tiered.engine.state import EngineState
from tiered.format.generations import generations
from tiered.types import TensorSpec

MIB = 1 << 20


def filled(letter: str, nbytes: int = MIB) -> torch.Tensor:
    return torch.full((nbytes,), ord(letter), dtype=torch.uint8)


@pytest.mark.parametrize("writer", ["the reader itself", "an alias of an earlier lease"])
def test_a_commit_is_whole_whoever_writes_under_a_read_lease(tmp_path: Path, writer: str) -> None:
    """That is not allowed: the commit has the bytes of before, or there is none."""
    with TieredStore.open(tmp_path / "state", dram=64 * MIB, eviction=Eviction(deadline=30)) as store:
        store.put("w", filled("a", 12 * MIB))
        with store.lease("w", access="write") as alias:
            alias.add_(1)
        over = threading.Event()

        def write(tensor: torch.Tensor) -> None:
            while not over.is_set():
                tensor.add_(1)

        with pytest.raises(MisuseError, match="READ lease"), store.lease("w") as reader:  # noqa: PT012 - at its end
            thread = threading.Thread(target=write, args=(reader if writer == "the reader itself" else alias,))
            thread.start()
            try:
                with contextlib.suppress(CorruptionError):
                    store.commit()
            finally:
                over.set()
                thread.join()
        del alias, reader, thread, write
        store.close()
    with TieredStore.open(tmp_path / "state", dram=64 * MIB) as store:
        if store.generation:
            assert store.get("w").eq(ord("a") + 1).all()
        assert store.statistics().tiers[0].held == 0


def test_errors_travel_between_processes() -> None:
    error = ReadError("cannot read", key="w", tier="nvme", path="/data.0", offset=4096, errno=5)
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is ReadError
    assert str(found) == str(error)
    assert (found.key, found.tier, found.path, found.offset, found.errno) == ("w", "nvme", "/data.0", 4096, 5)


def test_a_snapshot_is_given_back(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=4 * MIB) as store:
        store.put("w", filled("a"))
        with store.lease("w"):
            store.commit()
        assert store.statistics().tiers[0].used == MIB


@pytest.mark.parametrize("chain", ["disk", "no disk"])
def test_an_order_that_is_followed_changes_no_result_when_the_tier_below_is_full(tmp_path: Path, chain: str) -> None:
    if chain == "disk":
        patient = Eviction(deadline=30)
        store = TieredStore.open(tmp_path / "state", dram=4 * MIB, nvme=6 * MIB, durability="none", eviction=patient)
    else:
        store = TieredStore.open(None, hbm=4 * MIB, device="cpu", dram=8 * MIB, eviction=Eviction(deadline=30))
    with store:
        for letter in "abcdefgh":
            store.put(letter, filled(letter))
        if chain == "no disk":
            with store.lease("a", access="write"):  # it is nowhere but in HBM from here on
                pass
            store.put("i", filled("i"))
        order = "bcdefgbcdefg"
        store.follow(order[:6])
        for letter in order:
            with store.lease(letter) as found:
                assert found.eq(ord(letter)).all()
            del found


def test_a_put_under_a_lease_says_so_at_once_also_when_the_pool_is_full(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", filled("a"))
        with store.lease("a") as held:
            with pytest.raises(LeaseConflict, match="'a'"):
                store.put("a", filled("b"))
            del held


def test_a_lease_that_cannot_fit_by_its_slots_is_refused_at_once() -> None:
    with TieredStore.open(None, hbm=1024, device="cpu", dram=MIB) as store:
        for letter in "abc":
            store.put(letter, filled(letter, 300))
        with pytest.raises(CapacityError, match="never"), store.lease(list("abc")):
            pass


def test_ctrl_c_while_an_order_is_planned_ends_following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        for letter in "abcdef":
            store.put(letter, filled(letter, MIB // 4))
        store.follow("abc")

        def interrupted(plan: OrderPlan) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(OrderPlan, "_sum_up", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.follow(list("defab"))
        for order in ("abcdef", "fed"):
            for letter in order:
                with store.lease(letter) as found:
                    assert found.eq(ord(letter)).all()
                del found
            assert store.follow(list(order)) == len(order)


def test_a_commit_that_failed_is_not_one_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state"
    with TieredStore.open(folder, dram=MIB, keep=2) as store:
        store.put("w", filled("a", 100))
        for _ in range(2):
            store.commit(meta={})

        def full(*_: object) -> None:
            raise CommitError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr("tiered.format.generations.publish", full)
            for _ in range(2):
                with pytest.raises(CommitError):
                    store.commit(meta={})
        newest = store.commit(meta={})
        assert generations(folder) == [2, newest]
        store.commit(meta={})
        assert generations(folder) == [newest, newest + 1]


def test_a_system_without_descriptors_refuses_an_engine_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", none_left)
        with pytest.raises(TieredError, match="Too many open files"):
            TieredStore.open(tmp_path / "state", dram=MIB, backend="libaio")
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before
    TieredStore.open(tmp_path / "state", dram=MIB).close()


def test_one_large_tensor_that_is_gone_keeps_no_room_from_hints() -> None:
    rig = Rig(40, 400, reserve=0.0)
    fill(rig, "a", "b", "c", "d", nbytes=4)
    evicted(rig, *[key for key in "abcd" if where(rig, key)[0]])
    rig.put("large", bytes(38))
    rig.settle()
    rig.delete("large")
    rig.settle()
    for key in "abcd":
        rig.hint(key)
        rig.settle()
    assert [where(rig, key)[0] for key in "abcd"] == [State.CLEAN] * 4
    rig.wind_down()


@pytest.mark.parametrize("together", [1, 2])
def test_a_victim_passes_its_slot_to_a_copy_of_its_size(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier is not asked: the slot is the same, and never free."""
    rig = Rig(8, 400, reserve=0.0)
    fill(rig, "a", "b", "c", "d", nbytes=4)
    assert [where(rig, key)[0] for key in "abcd"] == [None, None, State.CLEAN, State.CLEAN]
    before, freed = {copy.slot for copy in rig.state.pools[0].copies.values()}, []
    monkeypatch.setattr(rig.tiers[0], "free", freed.append)
    leases = [rig.lease(*"ab"[at : at + together]) for at in range(0, 2, together)]
    rig.settle()
    assert all(lease.done for lease in leases)
    assert {copy.slot for lease in leases for copy in lease.copies} == before
    assert not freed
    for lease in leases:
        rig.release(lease)
    monkeypatch.undo()
    rig.wind_down()


def test_a_trace_of_at_most_so_many_touches(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store, store.trace(most=3) as order:
        store.put("w", filled("w", 4096))
        for _ in range(9):
            store.get("w")
        assert len(order) == 3
        order.clear()
        store.get("w")
        assert [touch.key for touch in order] == ["w"]


def test_what_is_fetched_ahead_may_lose_its_source_to_what_leaves_for_it() -> None:
    """Three full tiers: "x" goes up to the top, two dirty tensors leave there for it, and room for the first is made of "x" in
    the middle. The second finds the bottom full, so a clean one leaves instead, and there is a slot but no source."""
    top, middle, bottom = MovablePlaces(110), MovablePlaces(100), Places(100)
    state = EngineState([top, middle, bottom], [LRU(), LRU(), LRU()])
    scheduler = Scheduler(state)

    def below(key: str, nbytes: int) -> Entry:
        slot = bottom.allocate(nbytes)
        assert slot is not None
        state.pools[2].account(slot)
        number = state.directory.next_id
        entry = state.directory.restore(key, TensorSpec("uint8", (nbytes,), 1), number, slot, b"", 1)
        assert entry.copies[2] is not None
        state.install(entry.copies[2])
        return entry

    def up(entry: Entry, tier: int) -> None:
        slot = state.pools[tier].allocate(entry.nbytes)
        assert slot is not None
        state.directory.begin_fill(entry, tier, slot)
        state.directory.end_fill(entry, tier, None)
        state.pools[tier].policy.touched(entry.key)

    def put(key: str, nbytes: int, tier: int) -> None:
        slot = state.pools[tier].allocate(nbytes)
        assert slot is not None
        copy = state.directory.put(key, TensorSpec("uint8", (nbytes,), 1), tier, slot).copies[tier]
        assert copy is not None
        state.install(copy)

    x, clean = below("x", 50), below("clean", 50)
    up(clean, 1)
    up(clean, 0)
    assert clean.copies[1] is not None
    state.directory.evict(clean.copies[1])
    up(x, 1)
    for key, nbytes, tier in (("first", 30, 0), ("second", 30, 0), ("y", 50, 1)):
        put(key, nbytes, tier)
    plan = OrderPlan([Touch("x"), Touch("clean")])
    rule = NextUse(plan.next_use, lambda: plan.cursor)
    drops = NextUse(plan.next_use, lambda: plan.cursor, dropped=lambda key: key == "x")
    order = FollowedOrder(plan, [110, 100], lambda plan: [rule, drops])
    ahead = ReadAhead(scheduler, order, lambda: [(0.0, 0.0)] * 2)
    state.follow(order, [rule, drops])
    ahead.needed_at, ahead.tier = 0, 0
    scheduler.bring(x, 0, ahead)
    assert x.copies[:2] == [None, None]
    assert x.copies[2] is not None
    for pool in state.pools:
        pool.check()


def test_what_is_not_in_the_order_leaves_by_its_last_use(tmp_path: Path) -> None:
    """Whatever its name, when it arrived, and however often the order is replaced."""
    with TieredStore.open(tmp_path / "state", dram=8 * MIB) as store:
        for name in "abcdef":
            store.put(name, filled(name))
        for name in "bfadce":
            with store.lease(name) as tensor:
                del tensor
        store.commit()  # all are clean
        for order in (["x", "y"], ["y", "x"]):
            store.follow(order)
        for name in "xyz":
            store.put(name, filled(name))
        misses = store.statistics().misses
        for name in "ecdaf":
            with store.lease(name) as tensor:
                del tensor
        assert store.statistics().misses == misses
        with store.lease("b") as tensor:
            assert tensor.eq(ord("b")).all()
            del tensor
        assert store.statistics().misses == misses + 1


@pytest.mark.parametrize("sizes", [(10,), (10, 7, 12)])
def test_what_leaves_for_many_is_chosen_once(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """All that is in memory has to be written first. Each choice looks at every copy: for each tensor and each transfer that
    ended, that took a second for a hundred tensors."""
    asked, victims = [0], LRU.victims

    def counted(self: LRU, among: Mapping[str, Candidate]) -> Iterator[str]:
        asked[0] += 1
        return victims(self, among)

    rig = Rig(640, 1 << 20, reserve=0.0)
    wanted = [f"w{number}" for number in range(40)]
    for number, key in enumerate(wanted):
        fill(rig, key, nbytes=sizes[number % len(sizes)])
    for number in range(56):
        rig.put(f"dirty {number}", bytes([number]) * 10)
        rig.settle()
    rig.turn()
    evicted(rig, *[key for key in wanted if where(rig, key)[0] is not None])
    monkeypatch.setattr(LRU, "victims", counted)
    lease = rig.lease(*wanted, access=WRITE)
    for _ in range(1000):
        while rig.turn():
            pass
        if lease.done:
            break
        link = rig.links[0]
        link.complete(next(iter(link.pending)))
    assert lease.done
    assert lease.error is None
    assert asked[0] < 2 * len(wanted)


def one_by_one(rig: Rig) -> None:
    """Transfers end one at a time, the oldest first, until nothing is left to move."""
    for _ in range(100):
        rig.run()
        pending = rig.links[0].pending
        if not pending:
            return
        rig.complete(0, next(iter(pending)))
    raise AssertionError("transfers without end")


def test_many_small_copies_leave_for_a_large_one_after_few_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies that were used long ago lie all over the tier; which of them leave is not asked one by one."""
    with TieredStore.open(tmp_path / "state", dram=4 * MIB) as store:
        order = list(range(1024))
        for number in order:
            store.put(f"w{number}", torch.full((4096,), number % 251, dtype=torch.uint8))
        store.commit()
        random.Random(0).shuffle(order)
        for number in order:  # the order of use is not that of the slots
            store.get(f"w{number}")
        asked, slides = [0], SlotMap.slides

        def counted(self: SlotMap, nbytes: int, most: float, gone: Collection[int] = ()) -> range | None:
            asked[0] += 1
            return slides(self, nbytes, most, gone)

        monkeypatch.setattr(SlotMap, "slides", counted)
        store.put("large", torch.ones(160 << 10, dtype=torch.uint8))
        gone = {number for number in order if not store.present([f"w{number}"])}
        assert 40 <= len(gone) <= 48
        assert gone <= set(order[:200])
        assert 0 < asked[0] < 20


@pytest.mark.parametrize(
    ("sizes", "order", "written_back", "nbytes", "leave"),
    [
        ([2, 3], [0, 1], [0], 3, [1]),  # the first is beside the room, and cannot slide
        ([100] * 26, [0, 25], [], 150, [25]),  # it would slide, were not as many bytes to be moved as may be
    ],
)
def test_a_copy_beside_the_room_of_others_stays(
    sizes: list[int], order: list[int], written_back: list[int], nbytes: int, leave: list[int]
) -> None:
    pool = Pool(MovablePlaces(sum(sizes) + nbytes // 100 * 50), LRU(), bottom=False)
    copies = []
    for number, size in enumerate(sizes):
        slot = pool.allocate(size)
        assert slot is not None
        copies.append(Copy(f"w{number}", 0, slot, State.WRITEBACK if number in written_back else State.CLEAN))
        pool.note(copies[-1])
    assert pool.enough(nbytes, [copies[number] for number in order]) == [copies[number] for number in leave]


def granted_in_turn(rig: Rig, first: Lease, second: Lease) -> None:
    assert first.done
    assert first.error is None
    rig.end(first)
    rig.wind_down()
    assert second.done
    assert second.error is None


def test_nothing_leaves_in_vain_for_many() -> None:
    """Neither lease can be granted before a third one ends. What the second one has fetched is too little for the first one,
    which had it evicted all the same, and the second one fetched it again: for ever."""
    rig = Rig(20, 4000, reserve=0.0)
    for key, nbytes in (("a", 10), ("b", 9), ("small", 1), ("c", 9), ("held", 12)):
        fill(rig, key, nbytes=nbytes)
    held = rig.lease("held")
    rig.settle()
    evicted(rig, *[key for key in ("a", "b", "small", "c") if where(rig, key)[0] is not None])
    for number in range(8):
        rig.put(f"dirty {number}", b"-")
        rig.settle()
    first, second = rig.lease("a", "b"), rig.lease("small", "c")
    one_by_one(rig)
    assert where(rig, "small")[0] is State.CLEAN
    rig.end(held)
    one_by_one(rig)
    granted_in_turn(rig, first, second)


def test_two_leases_do_not_take_turns_at_evicting_what_they_have() -> None:
    """Neither can be granted before a third one ends. The first one evicts its own copies to fit better; what the second one
    fetches into the room lies at another place each time."""
    rig = Rig(19, 4000, reserve=0.0)
    for key, nbytes in (("a", 5), ("b", 5), ("c", 4), ("d", 9), ("held", 10)):
        fill(rig, key, nbytes=nbytes)
    held = rig.lease("held")
    rig.settle()
    evicted(rig, *[key for key in "abcd" if where(rig, key)[0] is not None])
    first, second = rig.lease("a", "b"), rig.lease("c", "d")
    one_by_one(rig)
    rig.end(held)
    one_by_one(rig)
    granted_in_turn(rig, first, second)


def test_what_was_to_leave_for_many_is_deleted_by_a_call_that_is_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine counts anew after it, and the lease that waits must not evict the copy that is no more."""
    rig = Rig(40, 4000, reserve=0.0)
    fill(rig, "a", "b", nbytes=18)
    evicted(rig, *[key for key in "ab" if where(rig, key)[0] is not None])
    for number in range(40):
        rig.put(f"dirty {number}", b"-")
        rig.settle()
    lease = rig.lease("a", "b")
    rig.run()
    tag, transfer = next(iter(rig.links[0].pending.items()))
    rig.complete(0, tag)
    rig.turn()
    assert where(rig, transfer.key)[0] is State.CLEAN

    def struck(copy: Copy) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as strike:
        strike.setattr(rig.state.directory, "_tell", struck)
        with pytest.raises(KeyboardInterrupt):
            rig.delete(transfer.key)
    assert rig.state.changing
    del rig.newest[transfer.key]
    one_by_one(rig)
    assert lease.done
    assert lease.error is None
    rig.wind_down()


def test_a_small_tensor_on_the_device_stays_where_copies_in_dram_are_written_back() -> None:
    """A copy as large as what comes leaves instead."""
    rig = Rig(41, 60, 4000, reserve=0.0)
    for key, nbytes in (("a", 10), ("b", 10), ("small", 1), ("c", 10), ("d", 10), ("e", 10), ("f", 10)):
        fill(rig, key, nbytes=nbytes)
        for copy in rig.state.directory.entry(key).copies[int(key not in "ab") : 2]:
            if copy is not None:
                rig.engine.scheduler.evict(copy)
    for number in range(12):
        rig.put(f"dirty {number}", b"-----", tier=1)
        rig.settle()
    assert [pool.free for pool in rig.state.pools[:2]] == [0, 0]
    lease = rig.lease("a", "b")
    rig.settle()
    assert lease.done
    assert where(rig, "small")[0] is State.CLEAN
    rig.wind_down()
