"""Promise 2: an acknowledged commit survives power loss, at any moment, whatever the drives lose of what they had not flushed.

A child commits again and again, at once and behind its back, and changes, deletes and swaps in between, on one drive or with
manifests and data on two. Then the power is lost: ``powerloss.py`` makes what the drives may have, and each time the store has
the last generation that was acknowledged, or the one that was being committed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from tests.backends import NATIVE
from tests.stress.children import forked
from tests.stress.contents import content, evict_all, holds
from tests.stress.powerloss import KINDS, Log, Machine, State, machine, mounted
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tests.striping import lower_stripes
from tiered import TieredError, TieredStore
from tiered.format import generations, stripes
from tiered.format.data_file import DataFile
from tiered.tiers.nvme import NvmeTier

PROMISE = "2 (a commit survives power loss)"
MIB = 1 << 20
DRIVE = 24 * MIB
SIZES = [0, 1, 4096, 5000, 70_001, 200_000, 300_000, 450_000]
KEEP = 2
STRIPE, WHOLE = 32 << 10, 100_000
"""Bytes of a stripe, and of the largest tensor that is not striped, where some are."""
Mutation = Callable[[], contextlib.AbstractContextManager[object]]


def of(number: int, version: int) -> int | None:
    """Of which version the tensor with this number is in generation ``version``; None: there is none."""
    changed = next((at for at in range(version, max(0, version - 3), -1) if (at + number) % 3 == 0), None)
    return None if changed is None or (changed * 7 + number) % 11 == 0 else changed


def opened(folders: list[Path], backend: str = "posix") -> TieredStore:
    """With two drives the second has the data, and the first the manifests and some."""
    paths = [folder / f"data{drive}" for drive, folder in enumerate(folders)] if len(folders) > 1 else None
    return TieredStore.open(folders[0] / "state", dram=MIB, nvme="8MiB", keep=KEEP, paths=paths, backend=backend)  # type: ignore[arg-type]


def job(machine: Machine, backend: str, rounds: int) -> None:
    talking = threading.Lock()

    def mark(words: str) -> None:
        with talking:
            machine.mark(words)

    with opened(machine.folders, backend) as store:
        for version in range(1, 1 + rounds):
            for number, nbytes in enumerate(SIZES):
                key, wanted = f"t{number}", of(number, version)
                if wanted is None and key in store:
                    store.delete(key)
                elif wanted == version and number % 2 and key in store and store.spec(key).nbytes == nbytes:
                    with store.lease(key, access="write") as tensor:
                        tensor.copy_(content(key, version, nbytes))
                    del tensor
                elif wanted == version:
                    store.put(key, content(key, version, nbytes))
            mark(f"committing {version}")
            if version % 3 == 0:
                future, marked = store.commit_async({"version": version}), threading.Event()

                def acknowledge(done: Future[int], marked: threading.Event = marked) -> None:
                    mark(f"committed {done.result()}")
                    marked.set()

                future.add_done_callback(acknowledge)
                scribble(store, version)
                assert future.result() == version
                assert marked.wait(60), "callbacks come after the result"
            else:
                assert store.commit({"version": version}) == version
                mark(f"committed {version}")
                scribble(store, version)
            evict_all(store)
        assert store._parts.nvme is not None
        lowered = stripes.LARGEST_WHOLE == WHOLE
        assert store._parts.nvme.striped(store.generation) == (lowered and len(machine.folders) > 1)
        store.close()


def scribble(store: TieredStore, version: int) -> None:
    """What the next generation changes is changed twice."""
    for number, nbytes in enumerate(SIZES):
        if (version + 1 + number) % 3 == 0:
            store.put(f"t{number}", content("scribble", version, nbytes))


def recorded(folder: Path, drives: int, backend: str, rounds: int, mutation: Mutation) -> Log:
    with machine(folder, drives, DRIVE) as (ours, log):

        def body(child: Child) -> None:
            with mutation():
                job(ours, backend, rounds)

        with forked(body) as running:
            assert running.wait_end() == 0, running.said
    assert log.marks(len(log.entries), "committed") == list(range(1, rounds + 1))
    return log


def check(log: Log, state: State, folders: list[Path]) -> None:
    acknowledged = max(log.marks(state.cut, "committed"), default=0)
    tried = max(log.marks(state.cut, "committing"), default=0)
    with opened(folders) as store:
        newest = store.generation
        assert acknowledged <= newest <= tried, f"generation {newest}; {acknowledged} was acknowledged"
        whole(store, newest)
        kept = generations.generations(store.folder)
        assert max(kept, default=0) == newest
        left = [name for folder in folders for _, _, names in os.walk(folder) for name in names if name.endswith(".tmp")]
        assert not left, left
        for older in reversed(kept[:-1]):
            store.rollback(older)
            whole(store, older)
        store.put("t1", content("afterwards", 1, SIZES[-1]))
        store.commit({"version": "afterwards"})
        store.close()
    with opened(folders) as store:
        assert store.meta == {"version": "afterwards"}
        holds_afterwards(store)
        store.close()


def holds_afterwards(store: TieredStore) -> None:
    assert store.get("t1").equal(content("afterwards", 1, SIZES[-1]))


def whole(store: TieredStore, version: int) -> None:
    assert store.meta == ({"version": version} if version else {})
    there = {f"t{number}": of(number, version) for number in range(len(SIZES))} if version else {}
    assert sorted(store) == sorted(key for key, of_version in there.items() if of_version is not None)
    for number, nbytes in enumerate(SIZES):
        wanted = there.get(f"t{number}")
        if wanted is not None:
            holds(store, f"t{number}", wanted, nbytes)


def survives(log: Log, state: State, tmp_path: Path, images: list[Path]) -> str:
    """Mount and look; what is wrong, or nothing."""
    with ExitStack() as stack:
        where = [(image, tmp_path / f"at{drive}") for drive, image in enumerate(images)]
        folders = [stack.enter_context(mounted(image, at, ["nobarrier"])) for image, at in where]
        try:
            check(log, state, folders)
        except (AssertionError, TieredError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def tried(log: Log, tmp_path: Path, seed: int, count: int) -> Iterator[tuple[State, str]]:
    """So many states in which the power loss took something, as many of each kind, and what is wrong with each."""
    images = [tmp_path / f"image{drive}" for drive in range(log.drives)]
    left = dict.fromkeys(KINDS, count // len(KINDS))
    states = log.states(count, seed)
    while any(left.values()):
        state = next(states)
        if left[state.kind] and log.build(state, images):
            left[state.kind] -= 1
            yield state, survives(log, state, tmp_path, images)


@pytest.fixture
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of drives that the parameter says, "striped" for two with tensors that are striped over them."""
    if request.param != "striped":
        return int(request.param)
    lower_stripes(monkeypatch, STRIPE, WHOLE)
    return 2


@pytest.mark.parametrize("layout", [1, 2, "striped"], indirect=True)
@counts(16, 640)
def test_power_is_lost_at_any_moment(tmp_path: Path, layout: int, count: int, tally: Tally) -> None:
    for part, backend in enumerate(NATIVE):
        log = recorded(tmp_path / backend, layout, backend, 12, contextlib.nullcontext)
        for state, wrong in tried(log, tmp_path, part, count // len(NATIVE)):
            assert not wrong, f"{state}: {wrong}"
            tally.count(state.kind, 1)
    assert set(tally.kinds.values()) == {count // len(KINDS)}


# Stores that are wrong, which those states must show


@contextlib.contextmanager
def no_sync_of_the_folder() -> Iterator[None]:
    """After the rename."""
    publish, fsync, renamed = generations.publish, os.fsync, threading.local()

    def skipping(fd: int) -> None:
        if not (getattr(renamed, "to", False) and os.path.isdir(f"/proc/self/fd/{fd}")):
            fsync(fd)

    def mutated(folder: str, generation: int) -> None:
        renamed.to = True
        try:
            publish(folder, generation)
        finally:
            renamed.to = False

    with mock.patch.object(os, "fsync", skipping), mock.patch.object(generations, "publish", mutated):
        yield


@contextlib.contextmanager
def no_sync_of_data() -> Iterator[None]:
    with mock.patch.object(NvmeTier, "sync"):
        yield


@contextlib.contextmanager
def no_sync_of_the_second_drive() -> Iterator[None]:
    sync = DataFile.sync

    def first(file: DataFile) -> None:
        if file.index == 0:
            sync(file)

    with mock.patch.object(DataFile, "sync", first):
        yield


@contextlib.contextmanager
def old_manifest_unlinked_first() -> Iterator[None]:
    prepare = generations.prepare

    def mutated(folder: str, generation: int, data: bytes) -> None:
        for older in generations.generations(folder):
            generations.drop(folder, older)
        prepare(folder, generation, data)

    with mock.patch.object(generations, "prepare", mutated):
        yield


@contextlib.contextmanager
def written_in_place() -> Iterator[None]:
    """No generation keeps an extent from being used again."""
    with mock.patch.object(NvmeTier, "retain"), mock.patch.object(NvmeTier, "pin"), mock.patch.object(NvmeTier, "release"):
        yield


@contextlib.contextmanager
def manifest_before_data() -> Iterator[None]:
    publish, sync, tiers = generations.publish, NvmeTier.sync, list[NvmeTier]()

    def later(tier: NvmeTier) -> None:
        tiers.append(tier)

    def mutated(folder: str, generation: int) -> None:
        publish(folder, generation)
        sync(tiers[-1])

    with mock.patch.object(NvmeTier, "sync", later), mock.patch.object(generations, "publish", mutated):
        yield


@pytest.mark.parametrize(
    ("mutation", "layout"),
    [
        (no_sync_of_the_folder, 1),
        (no_sync_of_data, 2),  # with direct I/O on one drive, the flush that makes the manifest durable does it for the data
        (no_sync_of_the_second_drive, "striped"),
        (old_manifest_unlinked_first, 1),
        (written_in_place, 1),
        (manifest_before_data, 2),  # as above
    ],
    indirect=["layout"],
)
@counts(1, 100)
def test_a_wrong_order_is_caught(tmp_path: Path, mutation: Mutation, layout: int, count: int, tally: Tally) -> None:
    """``count``: after so many states in which it is caught it is enough, or 4 times as many in all."""
    name = getattr(mutation, "__name__", "")
    seen = caught = 0
    example = ""
    log = recorded(tmp_path / "machine", layout, "posix", 6, mutation)
    for _, wrong in tried(log, tmp_path, 1, max(60, 4 * count)):
        seen, caught, example = seen + 1, caught + bool(wrong), wrong or example
        if caught == count:
            break
    print(f"{name}: caught in {caught} of {seen} states, as in: {example}")
    tally.count(name, caught)
