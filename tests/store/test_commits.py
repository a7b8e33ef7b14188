"""Commits that go on behind the caller, and the way back to one."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.filesystems import mounted, root, small_ext4
from tests.quick import quick
from tests.store.chains import hurried
from tiered import (
    CapacityError,
    CommitError,
    LeaseConflict,
    ManifestError,
    MisuseError,
    Owner,
    TieredError,
    TieredStore,
    WriteError,
)
from tiered.format.generations import generations
from tiered.io.posix import PosixBackend, PosixConfig
from tiered.store import commit as commits
from tiered.tiers.nvme import NvmeTier
from tiered.types import IOCompletion, IORequest, Operation

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


class Failing(PosixBackend):
    """While ``fails``, every write ends in EIO."""

    fails = False

    def __init__(self) -> None:
        super().__init__(PosixConfig(depth=8))
        self._writes: set[int] = set()

    def submit(self, batch: Sequence[IORequest]) -> int:
        taken = super().submit(batch)
        self._writes.update(request.tag for request in batch[:taken] if request.operation is Operation.WRITE)
        return taken

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        ended = super().reap(min_events, timeout)
        return [done._replace(result=-errno.EIO) if self.fails and done.tag in self._writes else done for done in ended]


def filled(value: float) -> torch.Tensor:
    return torch.full((1000,), value)


def opened(folder: Path, **options: object) -> TieredStore:
    return TieredStore.open(folder, dram=MIB, **options)  # type: ignore[arg-type]


def test_it_has_what_there_was_when_it_began(folder: Path) -> None:
    with opened(folder) as store:
        for number in range(100):
            store.put(f"t{number}", filled(number))
        future = store.commit_async({"step": 1})
        for number in range(0, 100, 3):
            with store.lease(f"t{number}", access="write") as tensor:
                tensor.fill_(-1)
            del tensor
        for number in range(1, 100, 3):
            store.put(f"t{number}", filled(-2))
        for number in range(2, 100, 3):
            store.delete(f"t{number}")
        assert future.result() == 1
        assert (store.generation, store.meta) == (1, {"step": 1})
        assert store.get("t0").eq(-1).all()
        store.close()
    with opened(folder) as store:
        assert sorted(store) == sorted(f"t{number}" for number in range(100))
        for number in range(100):
            assert store.get(f"t{number}").eq(number).all()


def test_it_refuses_at_once(folder: Path) -> None:
    with opened(folder) as store:
        store.put("a", filled(1))
        with store.lease("a", access="write"), pytest.raises(LeaseConflict, match="'a'"):
            store.commit_async()
        with pytest.raises(MisuseError, match="meta"):
            store.commit_async({"a": object()})
        assert store.commit_async().result() == 1, "nothing of those is left open"


def test_another_commit_waits_for_it(folder: Path) -> None:
    with opened(folder) as store:
        futures = []
        for number in range(5):
            store.put("a", filled(number))
            futures.append(store.commit_async({"number": number}))
        assert store.commit({"number": 5}) == 6
        assert [future.result(0) for future in futures] == [1, 2, 3, 4, 5]
        assert store.meta == {"number": 5}


def test_close_waits_for_it(folder: Path) -> None:
    store = opened(folder)
    store.put("a", filled(1))
    future = store.commit_async()
    store.close()
    assert future.result(0) == 1
    with opened(folder) as store:
        assert store.get("a").eq(1).all()


def test_a_store_that_nobody_has_any_more_ends_it(folder: Path) -> None:
    store = opened(folder)
    store.put("a", filled(1))
    future = store.commit_async()
    del store
    assert future.result() == 1


def test_a_write_that_fails_is_its_error_and_the_commit_before_holds(folder: Path) -> None:
    with opened(folder) as store:
        store.put("a", filled(1))
        store.commit()
        store.close()
    backend = Failing()
    with opened(folder, backend=lambda: backend) as store:
        store.put("a", filled(2))
        store.put("b", filled(3))
        backend.fails = True
        future = store.commit_async()
        with pytest.raises(WriteError):
            future.result()
        backend.fails = False
        assert store.generation == 1
        assert generations(store.folder) == [1]
        assert store.get("a").eq(2).all(), "in memory all is as it was"
        assert store._parts.nvme is not None
        assert store._parts.nvme.generations == (1,), "nothing stays pinned for it"
        try:
            generation = store.commit()
        except WriteError:  # of the other tensor, whose write had failed, too, and was not over yet
            generation = store.commit()
        assert generation == 2
        store.close()
    with opened(folder) as store:
        assert store.get("a").eq(2).all()


def test_a_disk_that_does_not_take_it_is_its_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    store.put("a", filled(1))
    monkeypatch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(CommitError, match="cannot be trusted"):
        store.commit_async().result()
    store.close()


# The way back


def test_a_commit_without_room_is_refused_before_anything_is_written(folder: Path) -> None:
    with TieredStore.open(folder, dram=4 * MIB, nvme=MIB, keep=1) as store:
        for number in range(6):
            store.put(f"t{number}", torch.full((40_000,), float(number)))
        assert store.commit({"step": 1}) == 1
        for number in range(3):
            with store.lease(f"t{number}", access="write") as tensor:
                tensor.fill_(10.0 + number)
        written = store.statistics().links[-1].down
        with pytest.raises(CapacityError, match=r"has to write 491,520 bytes .* 65,536 bytes of it are left") as refused:
            store.commit({"step": 2})
        assert str(folder) in str(refused.value)
        with pytest.raises(CapacityError, match="has to write 491,520 bytes"):
            store.commit_async({"step": 2}).result()
        assert store.statistics().links[-1].down == written, "nothing was begun"
        assert (store.generation, store.meta) == (1, {"step": 1})
        with store.lease("t1") as tensor:
            assert bool((tensor == 11.0).all()), "what is in memory is as it was"
        for number in (1, 2):
            store.delete(f"t{number}")
        with pytest.raises(CapacityError, match=r"163,840 bytes .* 65,536 bytes of it are left"):
            store.commit({"step": 2})  # the first commit still needs what was deleted
        store.rollback()
        with store.lease("t1") as tensor:
            assert bool((tensor == 1.0).all())
        assert store.commit({"step": 3}) == 2


@root
@pytest.mark.filterwarnings("ignore:the filesystem of")
@pytest.mark.parametrize("limited", [False, True])
def test_a_disk_that_we_filled_takes_commits_again(tmp_path: Path, limited: bool) -> None:
    """What the data file takes leaves room for manifests, so that deleting brings a store that can be committed."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as disk:
        nvme = 32 * MIB if limited else None
        while True:
            try:
                store = TieredStore.open(disk / "state", dram=16 * MIB, nvme=nvme, keep=1)
            except CapacityError:
                assert nvme is not None
                nvme -= 4096
            else:
                break
        for number in range(1000):
            store.put(f"small {number}", torch.tensor([number]))
        for number in range(40):
            store.put(f"large {number}", torch.full((MIB // 4,), float(number)))
            try:
                store.commit({"large": number})
            except CapacityError:
                break
        else:
            raise AssertionError("the disk has room for more than it has")
        assert number > 20
        with store.lease("small 7", access="write") as small:
            small.fill_(-1)
        for other in range(number - 4, number + 1):
            store.delete(f"large {other}")
        store.commit({"large": "fewer"})
        store.close()
        with TieredStore.open(disk / "state", dram=16 * MIB) as again:
            assert again.meta == {"large": "fewer"}
            assert again.get("small 7").item() == -1
            assert len(again) == 1000 + number - 4


def fill(store: TieredStore) -> int:
    """Put until there is no more room; how many there are."""
    for number in range(100):
        try:
            store.put(f"large {number}", torch.full((MIB // 4,), float(number)))
        except CapacityError:
            return number
    raise AssertionError("the disk has room for more than it has")


@root
@pytest.mark.filterwarnings("ignore:the filesystem of")
def test_a_disk_that_we_filled_has_room_for_the_meta_that_was_there_before(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as disk:
        meta = {"cursor": "x" * MIB}
        with TieredStore.open(disk / "state", dram=16 * MIB, keep=1) as store:
            store.commit(meta)
            store.close()
        with TieredStore.open(disk / "state", dram=4 * MIB, keep=1) as store:
            number = fill(store)
            assert number > 20
            for other in range(10, number):
                store.delete(f"large {other}")
            store.commit()
            assert store.meta == meta
            store.close()


@root
@pytest.mark.filterwarnings("ignore:the filesystem of")
def test_a_meta_that_a_full_disk_has_no_room_for_is_refused_by_name(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as disk:
        with TieredStore.open(disk / "state", dram=4 * MIB, keep=1) as store:
            number = fill(store)
            for other in range(10, number):
                store.delete(f"large {other}")
            store.put("new", torch.ones(1000))
            before = store.statistics().links[-1].down.bytes
            with pytest.raises(CapacityError, match=r"the meta of this commit takes 4,194,3.. bytes of its manifest"):
                store.commit({"cursor": "x" * (4 * MIB)})
            assert store.statistics().links[-1].down.bytes == before, "nothing was written for it"
            store.commit({"cursor": "less"})
            store.close()
        with TieredStore.open(disk / "state", dram=16 * MIB) as store:
            assert (store.meta, "new" in store) == ({"cursor": "less"}, True)


@root
@pytest.mark.parametrize("reserves", [True, False])
def test_a_small_disk_that_one_commit_could_fill(
    tmp_path: Path, reserves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an ext4, of which not even root gets all that is said to be free; and where nothing can be reserved."""

    def refusing(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", refusing)
    with small_ext4(tmp_path, 32 * MIB) as disk, TieredStore.open(disk / "state", dram=64 * MIB, keep=1) as store:
        for number in range(200):
            store.put(f"small {number}", torch.tensor([number]))
        for number in range(40):
            store.put(f"large {number}", torch.full((MIB // 4,), float(number)))
        with pytest.raises(CapacityError, match="for manifests"):
            store.commit()
        for number in range(30):
            store.delete(f"large {number}")
        assert store.commit() == 1
        number = 40
        with pytest.raises(CapacityError):  # noqa: PT012 - some of them fit
            while number < 80:
                store.put(f"large {number}", torch.full((MIB // 4,), float(number)))
                store.commit()
                number += 1
        for other in range(30, number + 1):
            store.delete(f"large {other}")
        store.put("last", torch.ones(5))
        store.commit()


def test_a_filesystem_that_does_not_say_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with TieredStore.open(folder, dram=4 * MIB) as store:
        store.put("a", filled(1.0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstatvfs", failing)
            assert store.commit() == 1
        assert store.get("a")[0] == 1.0


def test_rollback_makes_room_for_what_it_brings_back(folder: Path) -> None:
    with TieredStore.open(folder, dram=MIB, nvme=MIB, keep=1) as store:
        store.put("none", torch.empty(0))
        store.put("a", filled(1.0))
        store.commit()
        store.delete("none")
        with contextlib.suppress(CapacityError):
            for number in range(1000):
                store.put(f"more {number}", torch.ones(1024))
        with pytest.raises(CapacityError, match="has to write"):
            store.commit()
        assert store.rollback() == 1
        assert sorted(store) == ["a", "none"]
        assert store.get("none").shape == (0,)
        store.commit()


def test_rollback_counts_the_bytes_of_what_goes(folder: Path) -> None:
    with TieredStore.open(folder, dram=4 * MIB, nvme=MIB, keep=1) as store:
        store.put("a", filled(1.0))
        for number in range(3):
            store.put(f"none {number}", torch.empty(0))
        store.commit()
        for number in range(3):
            store.delete(f"none {number}")
        store.put("b", torch.ones(1_044_480 // 4))
        store.put("c", torch.ones(3 * MIB // 4))  # b is written back for it
        assert store.rollback() == 1
        assert len(store) == 4


def test_rollback_moves_nothing(folder: Path) -> None:
    with opened(folder) as store:
        for number in range(50):
            store.put(f"t{number}", filled(number))
        store.commit({"step": 1})
        with store.lease("t1", access="write") as tensor:
            tensor.fill_(-1)
        del tensor
        store.put("t2", filled(-2))
        store.delete("t3")
        store.put("new", filled(7))
        before = store.statistics()
        assert store.rollback() == 1
        moved = store.statistics().links[0]
        assert moved.up.bytes == before.links[0].up.bytes
        assert moved.down.bytes == before.links[0].down.bytes
        assert sorted(store) == sorted(f"t{number}" for number in range(50))
        for number in range(50):
            assert store.get(f"t{number}").eq(number).all()
        assert store.commit() == 2


def test_rollback_to_an_older_generation(folder: Path) -> None:
    with opened(folder, keep=3) as store:
        for step in (1, 2, 3):
            store.put("a", filled(step))
            store.commit({"step": step})
        assert store.rollback(2) == 2
        assert (store.meta, store.generation) == ({"step": 2}, 2)
        assert store.get("a").eq(2).all()
        assert store.commit({"step": 4}) == 4
        with pytest.raises(ManifestError, match="no generation 9"):
            store.rollback(9)
        store.close()
    with opened(folder, keep=3) as store:
        assert store.get("a").eq(2).all()
    with opened(folder, keep=3, generation=3) as store:
        assert store.get("a").eq(3).all()
        store.close()


def test_an_old_generation_is_retained_as_long_as_it_is_named(folder: Path) -> None:
    with opened(folder, keep=1) as store:
        assert store.generations == ()
        for step in (1, 2, 3, 4):
            store.put("a", filled(step))
            store.commit()
            if step == 2:
                store.retain(1, also=[2])
        assert store.generations == (2, 4)
        store.rollback(2)
        assert store.get("a").eq(2).all()
        store.retain(2, also=[2])
        store.commit()
        assert store.generations == (2, 4, 5)
        store.close()
    with opened(folder, keep=1, generation=2) as store:
        assert store.get("a").eq(2).all()
        store.retain(1, also=[2])
        store.put("a", filled(6))
        store.commit()
        assert store.generations == (2, 6)
        store.retain(1)
        store.commit()
        assert store.generations == (7,)
        with pytest.raises(MisuseError, match="generation 2 is not there any more"):
            store.retain(1, also=[2])
        with pytest.raises(MisuseError, match="newest is how many generations stay, a whole number from 1 on, not 0"):
            store.retain(0)
        for wrong in ({"also": 5}, {"also": ["1"]}, {"also": [1, "1"]}, {"drop": None}, {"drop": "1"}):
            with pytest.raises(MisuseError, match="numbers of generations"):
                store.retain(**wrong)  # type: ignore[arg-type]


def test_what_one_owner_of_generations_asks_binds_no_other(folder: Path) -> None:
    with opened(folder, keep=3) as store:

        def commit() -> int:
            store.put("a", filled(store.generation))
            return store.commit()

        store.retain(also=[commit()])
        commit()
        store.retain(owner=Owner("test", "x"), also=[2])
        commit()
        store.retain(owner=Owner("test", "y"), also=[3], drop=[2, 3])  # x keeps the second one
        commit()
        commit()
        store.retain(owner=Owner("test", "x"), drop=[2, 4])  # asks for nothing to stay any more
        assert store.generations == (1, 2, 3, 4, 5)
        assert commit() == 6
        assert store.generations == (1, 3, 5, 6)  # x gave up two, and the user and y have one each beside the newest three
        store.retain(owner=Owner("test", "y"), drop=[3, 6, 7])  # the newest stays
        assert commit() == 7
        assert store.generations == (1, 5, 7)
        for _ in range(3):
            commit()
        assert store.generations == (1, 8, 9, 10)
        store.rollback(1)
        assert store.get("a").eq(0).all()
        with pytest.raises(MisuseError, match=r"newest=1 holds for all generations: the test 'x'"):
            store.retain(1, owner=Owner("test", "x"))
        with pytest.raises(MisuseError, match="generation 4 is not there any more"):
            store.retain(owner=Owner("test", "x"), also=[4])
        with pytest.raises(MisuseError, match="an owner is an Owner"):
            store.retain(owner="x")  # type: ignore[arg-type]
        with pytest.raises(MisuseError, match="drop= have numbers"):
            store.retain(owner=Owner("test", "x"), drop=["1"])  # type: ignore[list-item]
        store.close()


def test_rollback_under_a_lease_or_before_a_commit(folder: Path) -> None:
    with opened(folder) as store:
        store.put("a", filled(1))
        with pytest.raises(MisuseError, match=r"no commit to go back to: store.close\(\), and open the store again"):
            store.rollback()
        store.commit()
        with store.lease("a"), pytest.raises(LeaseConflict, match="'a'"):
            store.rollback()
        store.rollback()


@pytest.mark.parametrize("rollbacks", quick([40, 400], [40]))
def test_rollback_while_others_use_the_store(folder: Path, rollbacks: int) -> None:
    """What they lease is whole and of one time or the other."""
    with opened(folder) as store:
        for number in range(20):
            store.put(f"t{number}", filled(number))
        store.commit()
        stop, wrong = threading.Event(), []

        def use(seed: int) -> None:
            number = seed
            while not stop.is_set():
                number = (number * 7 + 3) % 20
                try:
                    with store.lease(f"t{number}", access="write" if seed % 2 else "read") as tensor:
                        if not (tensor.eq(number) | tensor.eq(-1)).all():
                            wrong.append(tensor.clone())
                        if seed % 2:
                            tensor.fill_(-1)
                    del tensor
                except LeaseConflict:
                    pass

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(rollbacks):
            with contextlib.suppress(LeaseConflict):
                store.rollback()
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        store.rollback()
        assert all(store.get(f"t{number}").eq(number).all() for number in range(20))


def test_what_was_rolled_back_to_is_committed_when_the_block_is_left(folder: Path) -> None:
    with opened(folder) as store:
        for step in (1, 2):
            store.put("a", filled(step))
            store.commit({"step": step})
        store.rollback(1)
    with opened(folder) as store:
        assert (store.generation, store.meta) == (3, {"step": 1})
        assert store.get("a").eq(1).all()
        store.rollback(2)
        assert store.rollback() == 3, "the newest commit, wherever it went back to before"
        store.close()


def test_a_rollback_that_finds_no_room_changes_nothing(folder: Path) -> None:
    def page(value: float) -> torch.Tensor:
        return torch.full((1024,), float(value))

    with opened(folder, nvme="32KiB") as store:
        for key in "abc":
            store.put(key, page(1))
        store.put("empty", torch.empty(0))
        store.commit({"g": 1})
        store.delete("empty")
        for key in "abcde":
            store.put(key, page(2))
        store.commit({"g": 2})
        store.put("f", page(3))
        with pytest.raises(CapacityError), hurried(store, 3):
            store.rollback(1)
        assert sorted(store) == list("abcdef")
        assert all(store.get(key).eq(2).all() for key in "abcde")
        assert store.get("f").eq(3).all()
        with pytest.raises(MisuseError, match="generation 2 has no 'x': nothing"):
            store.rollback(needs=["x"])
        assert sorted(store) == list("abcdef")
        store.close()


def test_a_thread_that_does_not_start_leaves_nothing_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put("a", filled(1))
        real = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "tiered-commit":
                raise RuntimeError("can't start new thread")
            real(thread)

        def late(thread: threading.Thread) -> None:
            real(thread)
            if thread.name == "tiered-commit":
                raise KeyboardInterrupt

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TieredError, match="the system starts no more threads"):
            store.commit_async()
        assert store._parts.nvme is not None
        assert not store._parts.nvme.generations
        monkeypatch.setattr(threading.Thread, "start", late)
        with pytest.raises(KeyboardInterrupt):
            store.commit_async()
        monkeypatch.undo()
        generation = store.commit()
        assert store._parts.nvme.generations[-1] == generation


@pytest.mark.parametrize("before", [True, False])
def test_ctrl_c_as_an_old_generation_is_dropped_costs_no_later_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    with TieredStore.open(folder, dram="1MiB", keep=1) as store:
        store.put("a", torch.ones(5))
        store.commit()
        ordinary = NvmeTier.release

        def struck(tier: NvmeTier, generation: int) -> None:
            monkeypatch.setattr(NvmeTier, "release", ordinary)
            if not before:
                ordinary(tier, generation)
            raise KeyboardInterrupt

        monkeypatch.setattr(NvmeTier, "release", struck)
        store.put("a", torch.ones(6))
        with pytest.raises(KeyboardInterrupt):
            store.commit()
        for size in (7, 8):
            store.put("a", torch.ones(size))
            store.commit()
        store.delete("a")
        store.commit()
        assert store.statistics().tiers[-1].used == 0, "nothing stays pinned"
        assert store.generation == 5


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_as_a_manifest_gets_its_name_costs_no_later_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    ordinary = commits._Draft.keep

    def struck(draft: commits._Draft) -> None:
        monkeypatch.setattr(commits._Draft, "keep", ordinary)
        if when == "after":
            ordinary(draft)
        raise KeyboardInterrupt

    with TieredStore.open(folder, dram="1MiB", keep=1) as store:
        store.put("a", torch.ones(5))
        store.commit()
        monkeypatch.setattr(commits._Draft, "keep", struck)
        store.put("a", torch.ones(6))
        with pytest.raises(KeyboardInterrupt):
            store.commit()
        for size in (7, 8):
            store.put("a", torch.ones(size))
            store.commit()
    with TieredStore.open(folder, dram="1MiB") as store:
        assert torch.equal(store.get("a"), torch.ones(8))
