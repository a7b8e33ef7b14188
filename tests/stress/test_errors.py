"""Promise 4: an I/O error is a typed exception with tensor, file, offset and errno; every other tensor stays readable.

Errors at exact bytes come from a filesystem of ours; errors of every single system call of a session, one at a time, from the
notifications of seccomp.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import EACH, NATIVE
from tests.quick import quick
from tests.stress import syscalls
from tests.stress.contents import content, evict_all, extent, holds
from tests.stress.fusefs import FaultyDisk, Rule
from tests.stress.syscalls import Call, Child
from tests.stress.tally import Tally, counts
from tiered import CommitError, ReadError, ShortTransfer, TieredError, TieredStore, TransferError, WriteError

PROMISE = "4 (errors are typed, the rest stays readable)"
MIB = 1 << 20
SIZES = {"empty": 0, "tiny": 3, "page": 4096, "odd": 70_001, "block": MIB, "large": 3 * MIB // 2 + 5}
DRAM = 2 * MIB

# -- a filesystem with faults ------------------------------------------------------------------------------------------------


async def _leased(store: TieredStore, key: str) -> None:
    async with store.lease(key):
        pass


def _lease(store: TieredStore, key: str, access: str) -> None:
    with store.lease(key, access=access):
        pass


def _lease_many(store: TieredStore, key: str) -> None:
    with store.lease(["empty", key]):
        pass


def _prefetch_and_get(store: TieredStore, key: str) -> None:
    store.prefetch([key])
    store.get(key)


READS: dict[str, Callable[[TieredStore, str], object]] = {
    "get": TieredStore.get,
    "read lease": lambda store, key: _lease(store, key, "read"),
    "write lease": lambda store, key: _lease(store, key, "write"),
    "lease of many": _lease_many,
    "fetch": lambda store, key: asyncio.run(store.fetch(key)),
    "async lease": lambda store, key: asyncio.run(_leased(store, key)),
    "prefetch": _prefetch_and_get,
}
WRITES: dict[str, Callable[[TieredStore], object]] = {
    "commit": TieredStore.commit,
    "put": evict_all,
    "lease": lambda store: [store.get(key) for key in ("large", "block")] and evict_all(store),
    "block's end": lambda store: store.__exit__(None, None, None),
}
FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"effect": "error", "errno": errno.EIO, "times": -1},
    "EIO once": {"effect": "error", "errno": errno.EIO},
    "ENOSPC": {"effect": "error", "errno": errno.ENOSPC, "times": -1},
    "EAGAIN": {"effect": "error", "errno": errno.EAGAIN, "times": -1},
    "EINTR": {"effect": "error", "errno": errno.EINTR, "times": 3},
    "short": {"effect": "short", "moves": 2048},
    "cut": {"effect": "short", "moves": 0, "times": -1},
    "odd": {"effect": "short", "moves": 777, "times": -1},
}
RESUMED = ("EINTR", "short")


@contextmanager
def filled(disk: FaultyDisk, backend: str) -> Any:
    folder = disk.folder / backend
    shutil.rmtree(folder, ignore_errors=True)
    store = TieredStore.open(folder, dram=DRAM, backend=backend)  # type: ignore[arg-type]
    try:
        for key, nbytes in SIZES.items():
            store.put(key, content(key, 0, nbytes))
        store.commit()
        yield store
    finally:
        disk.clear()
        store.close()


def all_but(store: TieredStore, damaged: str) -> None:
    for key, nbytes in SIZES.items():
        if key != damaged:
            holds(store, key, 0, nbytes)


def named(error: TransferError, key: str, fault: str, path: str) -> None:
    """All that a person needs to find the place. (A write of no bytes is EIO by the time that FUSE has passed it on.)"""
    assert (error.key, error.path, error.tier) == (key, path, "nvme")
    assert repr(key) in str(error)
    assert path in str(error)
    wanted = errno.EIO if fault == "cut" and isinstance(error, WriteError) else FAULTS[fault].get("errno")
    assert error.errno == wanted
    assert isinstance(error, ShortTransfer) == (wanted is None)


def fail_a_read(disk: FaultyDisk, store: TieredStore, source: random.Random, how: str, fault: str, tally: Tally) -> None:
    key = source.choice(["tiny", "page", "odd", "block", "large"])
    evict_all(store)
    place = extent(store, key)
    at = place.offset + source.randrange(SIZES[key])
    options = dict(FAULTS[fault])
    if fault == "short" and SIZES[key] <= options["moves"]:
        options["moves"] = 512
    elif fault == "odd":  # a tensor's own bytes are enough
        options["moves"] = min(options["moves"], SIZES[key] - 1)
    disk.add(Rule("read", start=at, stop=at + 1, name=r"data\.0", **options))
    try:
        READS[how](store, key)
    except TransferError as error:
        assert fault not in RESUMED, error
        assert isinstance(error, ReadError | ShortTransfer)
        named(error, key, fault, place.path)
        assert place.offset <= error.offset <= at
    else:
        assert fault in RESUMED or (how == "prefetch" and "once" in fault), f"{how} of {key} met {fault} and said nothing"
    all_but(store, key)
    tally.count(f"{how}: {fault}", disk.clear()[0])
    holds(store, key, 0, SIZES[key])


def still_holds(store: TieredStore, key: str, version: int) -> None:
    """Where memory is full of what could not be written, whoever needs room is told so once; then it is tried again."""
    for _ in range(4):
        try:
            return holds(store, key, version, SIZES[key])
        except TransferError as error:
            assert isinstance(error, WriteError | ShortTransfer)
            assert error.key != key
    return holds(store, key, version, SIZES[key])


def fail_a_write(disk: FaultyDisk, store: TieredStore, source: random.Random, how: str, fault: str, tally: Tally) -> None:
    """New bytes of some tensors meet a disk that takes no writes; all of them stay readable while memory holds them."""
    changed = source.sample(["tiny", "page", "odd"], source.randint(1, 3)) + source.sample(["block"], 1)
    disk.add(Rule("write", name=r"data\.0", **FAULTS[fault]))
    raised: TieredError | None = None
    try:
        for key in changed:
            store.put(key, content(key, 1, SIZES[key]))
        WRITES[how](store)
    except TransferError as error:
        raised = error
        assert fault not in RESUMED, error
        assert isinstance(error, WriteError | ShortTransfer)
        named(error, error.key, fault, extent(store, "large").path)
        assert error.key in changed
    if raised is None:
        assert fault in RESUMED or "once" in fault, f"{how} met {fault} and said nothing"
    fired = disk.clear()[0]
    tally.count(f"{how}: {fault}", fired)
    if how == "block's end":  # closed, committed or not
        return
    for key in SIZES:
        if key not in changed:
            still_holds(store, key, 0)
    for key in changed:
        try:
            still_holds(store, key, 1)
        except AssertionError:  # its put is what raised
            assert raised is not None
            still_holds(store, key, 0)
    store.commit()


@counts(1, 4)
@pytest.mark.parametrize("fault", quick(FAULTS, ["EIO", "ENOSPC", "EINTR", "short", "odd"]))
def test_errors_of_transfers(
    disk: FaultyDisk, sync_disk: FaultyDisk, backend: str, fault: str, count: int, tally: Tally
) -> None:
    disk = sync_disk if FAULTS[fault]["effect"] == "short" else disk
    source = random.Random(f"{backend} {fault} {count}")
    with filled(disk, backend) as store:
        for _ in range(count):
            for how in READS:
                fail_a_read(disk, store, source, how, fault, tally)
    for how, _ in itertools.product(WRITES, range(count)):
        with filled(disk, backend) as store:
            fail_a_write(disk, store, source, how, fault, tally)
            folder = store.folder
        with TieredStore.open(folder, dram=DRAM, backend=backend) as store:
            assert sorted(store) == sorted(SIZES)
            for key in store:
                assert store.get(key).numel() == SIZES[key]


# -- every system call of a session --------------------------------------------------------------------------------------------

ERRORS = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EINTR", "EAGAIN")}
CALLS = [name for name in syscalls.NUMBERS if name not in ("read", "close", "io_destroy")]
SMALL = {"tiny": 3, "odd": 70_001, "block": MIB}


def session(folder: Path, backend: str) -> Callable[[Child], None]:
    """Open, change, read, commit, close. Says which commits were acknowledged, and of which type an error was."""

    def body(child: Child) -> None:
        try:
            with TieredStore.open(folder, dram=MIB, backend=backend, keep=1) as store:  # type: ignore[arg-type]
                child.say(f"opened {store.generation}")
                version = store.generation + 1
                for key, nbytes in SMALL.items():
                    store.put(key, content(key, version, nbytes))
                for key, nbytes in SMALL.items():
                    holds(store, key, version, nbytes)
                try:
                    child.say(f"commit {store.commit({'version': version})}")
                except TransferError as error:
                    assert error.key in SMALL
                    child.say(f"raised {type(error).__name__}")
                except TieredError as error:
                    child.say(f"raised {type(error).__name__}")
                for key, nbytes in SMALL.items():
                    try:
                        holds(store, key, version, nbytes)
                    except TransferError as error:  # the fault was in here
                        assert error.key == key
                        child.say(f"raised {type(error).__name__}")
                        holds(store, key, version, nbytes)
                store.close()
        except TieredError as error:
            child.say(f"raised {type(error).__name__}: {error}")

    return body


def is_io(call: Call) -> bool:
    """On files, and not the wake-ups between threads."""
    return call.name not in ("write", "preadv", "pwritev") or call.path().startswith("/")


def one_error(folder: Path, backend: str, number: int, code: int) -> tuple[str, syscalls.Ended]:
    """A session whose ``number``-th call on files fails; which call that was (empty: there were not so many)."""
    seen, met = 0, ""

    def decide(call: Call) -> syscalls.Answer:
        nonlocal seen, met
        seen += is_io(call)
        if met or seen < number:
            return syscalls.go_on
        met = call.name
        return syscalls.fail(code)

    ended = syscalls.run(session(folder, backend), CALLS, decide)
    return met, ended


def check_after(folder: Path, ended: syscalls.Ended, before: int, what: str) -> int:
    """The last acknowledged commit is there, whole, and the store goes on. The generation then."""
    assert (ended.status, ended.error) == (0, ""), f"{what}: {ended.status} {ended.said} {ended.error}"
    acknowledged = max([before, *(int(words.split()[1]) for words in ended.said if words.startswith("commit"))])
    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        assert acknowledged <= store.generation <= acknowledged + 1, f"{what}: {ended.said}"
        for key, nbytes in SMALL.items() if store.generation else ():
            holds(store, key, store.meta["version"], nbytes)
        return store.commit(store.meta) if store.generation else 0


@syscalls.needs_notifications
@pytest.mark.parametrize("name", ERRORS)
@counts(25, 1)
def test_the_error_of_every_system_call(tmp_path: Path, backend: str, name: str, count: int, tally: Tally) -> None:
    """``count``: of how many calls one is tried."""
    folder = tmp_path / "state"
    generation, source = 0, random.Random(name)
    TieredStore.open(tmp_path / "other", dram=MIB, backend=backend).close()  # what the child would import is there
    generation = check_after(folder, one_error(folder, backend, 1 << 60, 0)[1], 0, "no fault")
    for fresh in (False, True):
        number = source.randint(1, count)
        while True:
            where = tmp_path / f"new {number}" if fresh else folder
            met, ended = one_error(where, backend, number, ERRORS[name])
            if not met:
                break
            tally.count(f"{name} at {met}", 1)
            what = f"{name} at call {number}, {met}"
            after = check_after(where, ended, 0 if fresh else generation, what)
            if fresh:
                shutil.rmtree(where)
            else:
                generation = after
            number += source.randint(1, 2 * count - 1) if count > 1 else 1
    assert not [entry for entry in os.listdir(folder) if entry.endswith(".tmp")]


@pytest.mark.parametrize("backend", quick(EACH, NATIVE), indirect=True)
@counts(1, 2)
def test_errors_of_a_commit_are_commit_errors(disk: FaultyDisk, backend: str, count: int, tally: Tally) -> None:
    """What the manifest's own writes, syncs and names meet; the commit before holds, and the data's sync is never repeated."""
    rules = [("fsync", r"data\.0"), ("create", r"manifest.*"), ("write", r"manifest.*"), ("fsync", r"manifest.*")]
    rules += [("rename", r"manifest.*"), ("fsyncdir", ".*")]
    for (operation, name), code in itertools.product(rules, (errno.EIO, errno.ENOSPC)[:count]):
        with filled(disk, backend) as store:
            store.put("tiny", torch.ones(3, dtype=torch.uint8))
            disk.add(Rule(operation, "error", errno=code, name=name))
            with pytest.raises(CommitError) as raised:
                store.commit()
            assert store.folder in str(raised.value)
            tally.count(f"{operation} of {name}", disk.clear()[0])
            assert store.generation == 1
            all_but(store, "tiny")
            assert store.get("tiny").eq(1).all()
            if name == r"data\.0":
                with pytest.raises(CommitError, match="cannot be trusted"):
                    store.commit()
            else:
                assert store.commit() == 3
            folder = store.folder
        with TieredStore.open(folder, dram=DRAM, backend=backend) as store:
            all_but(store, "tiny")
