"""Promise 5: a failed fsync condemns the generation that it was for, and is never retried.

A sync that fails may have lost what it was to make durable, and a later one that succeeds says nothing of that (fsync(2)).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from tests.backends import EACH
from tests.stress import syscalls
from tests.stress.children import forked
from tests.stress.contents import content, evict_all, holds
from tests.stress.fusefs import Rule
from tests.stress.powerloss import KINDS, Log, Machine, State, machine, mounted
from tests.stress.syscalls import Answer, Call, Child, Ended
from tests.stress.tally import Tally, counts
from tiered import CommitError, MisuseError, TieredError, TieredStore
from tiered.format.generations import generations

PROMISE = "5 (a failed fsync)"
MIB = 1 << 20
SIZES = [0, 5000, 70_001, 200_000]
ROUNDS = 5


def of(number: int, version: int) -> int:
    """Of which version the tensor with this number is in generation ``version``; each is rewritten every second time."""
    return version if version == 1 or (version + number) % 2 == 0 else version - 1


def job(folder: Path, backend: str) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        try:
            store = TieredStore.open(folder, dram=MIB, backend=backend, keep=2)  # type: ignore[arg-type]
        except TieredError as error:
            child.say(f"unopened {error}")
            return
        for version in range(1, 1 + ROUNDS):
            for number, nbytes in enumerate(SIZES):
                if of(number, version) == version:
                    store.put(f"t{number}", content(f"t{number}", version, nbytes))
            before = store.generation
            child.say(f"committing {version}")
            try:
                if version % 2:
                    assert store.commit({"version": version}) == version
                else:
                    assert store.commit_async({"version": version}).result() == version
            except CommitError as error:
                assert store.generation == before
                if "cannot be trusted" in str(error):
                    child.say(f"condemned {version}")
                    stays_condemned(store, str(error))
                    return
                child.say(f"refused {version}")
            else:
                child.say(f"committed {version}")
        store.close()

    return body


def stays_condemned(store: TieredStore, why: str) -> None:
    """What is written and committed later is not acknowledged either, for older extents are part of it."""
    for again in range(3):
        store.put("t1", content("t1", 100 + again, SIZES[1]))
        try:
            store.commit() if again % 2 else store.commit_async().result()
        except CommitError as error:
            assert str(error) == why
        else:
            raise AssertionError("a commit after a failed sync of data")
    for number in (0, 2, 3):  # what is in memory is there
        store.get(f"t{number}")
    store.close()


class Drill:
    """Fails the ``number``-th sync with ``error``, and remembers every one: "data", "manifest" or "names", in order."""

    def __init__(self, number: int, error: int) -> None:
        self.number, self.error = number, error
        self.synced: list[str] = []
        self.dropping = False

    def decide(self, call: Call) -> Answer:
        path = call.path()
        name = os.path.basename(path)
        what = "data" if name.startswith("data.") else "manifest" if name.endswith(".tmp") else "names"
        self.synced.append(what)
        return syscalls.fail(self.error) if len(self.synced) == self.number else syscalls.go_on

    @property
    def failed(self) -> str:
        """What the one that failed was to sync; "removals" are names that went."""
        what, before = self.synced[self.number - 1], self.synced[: self.number - 1][-1:]
        return "removals" if what == "names" and before == ["names"] and "manifest" in self.synced[: self.number] else what


def trial(folder: Path, backend: str, drill: Drill) -> Ended:
    return syscalls.run(job(folder, backend), ("fsync", "fdatasync"), drill.decide)


def check(folder: Path, ended: Ended, drill: Drill) -> None:
    what = f"sync {drill.number} of {drill.synced}: {ended.said}"
    assert ended.status == 0, ended.error
    said = dict.fromkeys(words.split()[0] for words in ended.said)
    acknowledged = max((int(words.split()[1]) for words in ended.said if words.startswith("committed")), default=0)
    if "unopened" in said:
        assert list(said) == ["unopened"], what
        assert len(drill.synced) == drill.number, f"it went on syncing: {what}"
    elif drill.failed == "data":
        assert "condemned" in said, what
        assert "refused" not in said, what
        assert len(drill.synced) == drill.number, f"it went on syncing: {what}"
    elif drill.failed == "removals":  # the commit holds; what it would have dropped goes later
        assert list(said) == ["committing", "committed"], what
        assert acknowledged == ROUNDS, what
    else:
        (refused,) = [int(words.split()[1]) for words in ended.said if words.startswith("refused")]
        assert "condemned" not in said, what
        assert acknowledged == ROUNDS or refused == ROUNDS, what
        assert refused not in generations(folder), what
        assert drill.synced[drill.number :].count("data") == ROUNDS - refused, f"the data of each later one is synced: {what}"
    with TieredStore.open(folder, dram=MIB) as store:
        assert store.generation == acknowledged, what
        kept = generations(folder)
        assert max(kept, default=0) == acknowledged, what
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")], what
        for version in reversed(kept):
            store.rollback(version)
            assert store.meta == {"version": version}
            for number, nbytes in enumerate(SIZES):
                holds(store, f"t{number}", of(number, version), nbytes)
        store.close()


@syscalls.needs_notifications
@counts(1, 2)
def test_every_sync_fails_once(tmp_path: Path, backend: str, count: int, tally: Tally) -> None:
    """``count``: of errors."""
    dry = Drill(0, 0)
    TieredStore.open(tmp_path / "other", dram=MIB, backend=backend).close()  # type: ignore[arg-type]
    assert trial(tmp_path / "dry", backend, dry).status == 0
    assert {"data", "manifest", "names"} == set(dry.synced)
    step = 1 if count > 1 else len(EACH)
    first = EACH.index(backend) if step > 1 else 0
    for error in (errno.EIO, errno.EDQUOT)[:count]:
        for number in range(1 + first, 1 + len(dry.synced), step):
            folder, drill = tmp_path / f"{error}" / f"{number}", Drill(number, error)
            ended = trial(folder, backend, drill)
            check(folder, ended, drill)
            tally.count(drill.failed, len(drill.synced) >= number)


@syscalls.needs_notifications
def test_a_first_sync_that_failed_leaves_no_store(tmp_path: Path, tally: Tally) -> None:
    """That of the header: nothing is left in the way of another try."""
    drill = Drill(1, errno.EIO)
    ended = trial(tmp_path / "new", "posix", drill)
    assert [words.split()[0] for words in ended.said] == ["unopened"]
    tally.count("header", len(drill.synced))
    try:
        TieredStore.open(tmp_path / "new", dram=MIB, backend="posix").close()
    except MisuseError as error:
        raise AssertionError(f"what was left is in the way: {error}") from error


# A drive that fails to flush, and has lost what it was to flush


def stubborn(machine: Machine) -> Callable[[Child], None]:
    """A job that goes on after a commit that failed. What each one commits is written while the one before is being made, so
    that a sync which fails may be all that said something of it."""

    def body(child: Child) -> None:
        with contextlib.suppress(TieredError), TieredStore.open(machine.folders[0] / "state", dram=MIB, nvme="8MiB") as store:
            rewrite(store, 1)
            for version in range(1, 1 + ROUNDS):
                machine.mark(f"committing {version}")
                try:
                    future = store.commit_async({"version": version})
                    rewrite(store, version + 1)
                    future.result()
                    machine.mark(f"committed {version}")
                except CommitError:
                    child.say(f"refused {version}")
            store.close()

    return body


def rewrite(store: TieredStore, version: int) -> None:
    for number, nbytes in enumerate(SIZES):
        if of(number, version) == version:
            store.put(f"t{number}", content(f"t{number}", version, nbytes))
    evict_all(store)


def recorded(tmp_path: Path, flush: int) -> tuple[Log, int]:
    """With the flush that fails (from 0; -1: none does), and how often one did."""
    with machine(tmp_path, 1, 24 * MIB) as (ours, log):
        if flush >= 0:
            ours.disk.add(Rule("fsync", "error", errno=errno.EIO, skip=flush))
        with forked(stubborn(ours)) as running:
            assert running.wait_end() == 0, running.said
        fired = ours.disk.clear()
    return log, sum(fired)


@counts(3, 60)
def test_a_drive_that_fails_to_flush(tmp_path: Path, count: int, tally: Tally) -> None:
    """One flush ends in EIO, and what it was to keep is gone, in whole or in part; later flushes succeed."""
    dry, _ = recorded(tmp_path / "dry", -1)
    first = next(index for index, entry in enumerate(dry.entries) if entry.what == "M")
    last = max(index for index, entry in enumerate(dry.entries) if entry.data == f"committed {ROUNDS}".encode())
    flushes = [sum(entry.what == "F" for entry in dry.entries[:index]) for index in (first, last)]
    went_on = 0
    for number in range(count):
        flush = flushes[0] + number * (flushes[1] - flushes[0]) // count
        log, fired = recorded(tmp_path / f"{number}", flush)
        while not fired:  # it came with fewer this time: how often the journal is committed is a matter of time, too
            flush -= 1
            shutil.rmtree(tmp_path / f"{number}")
            log, fired = recorded(tmp_path / f"{number}", flush)
        tally.count("flush", fired)
        failed = next(index for index, entry in enumerate(log.entries) if entry.what == "E")
        went_on += log.marks(failed, "committed") != log.marks(len(log.entries), "committed")
        cut = next(index for index, entry in enumerate(log.entries) if entry.data == b"over 0")
        for kind in KINDS:
            log.build(State(kind, cut, seed=number), [tmp_path / "image"])
            with mounted(tmp_path / "image", tmp_path / "at", ["nobarrier"]) as folder:
                survived(folder / "state", log, f"flush {flush} failed, {kind}")
    print(f"after {went_on} of {count} failed flushes another commit was acknowledged")


def survived(folder: Path, log: Log, what: str) -> None:
    acknowledged = max(log.marks(len(log.entries), "committed"), default=0)
    tried = max(log.marks(len(log.entries), "committing"), default=0)
    with TieredStore.open(folder, dram=MIB) as store:
        version = store.meta.get("version", 0)
        assert acknowledged <= version <= tried, f"{what}: {acknowledged} was acknowledged, there is {version}"
        for number, nbytes in enumerate(SIZES if version else []):
            key, wanted = f"t{number}", content(f"t{number}", of(number, version), nbytes)
            assert torch.equal(store.get(key), wanted), f"{what}: {key} is not as it was in version {version}"
        store.close()
