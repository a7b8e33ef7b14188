"""Promises 1 and 3: an acknowledged commit survives SIGKILL at any system call, and swapping after it never damages it.

A child opens a store, changes it, commits, goes on changing it without a commit, again and again. It is killed at the N-th call
that changes a file or wakes a thread. Which tensors a generation has, and with which bytes, follows from its number.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stress import syscalls
from tests.stress.contents import content, evict_all, holds
from tests.stress.syscalls import Child, Ended
from tests.stress.tally import Tally, counts
from tests.striping import lower_stripes
from tiered import TieredStore
from tiered.format.generations import generations

PROMISE = "1, 3 (a commit survives SIGKILL, and what follows it)"
MIB = 1 << 20
SIZES = [0, 1, 4096, 5000, 70_001, 200_000, 300_000, 450_000]
ROUNDS = 3
DRIVES: list[str] = []
"""Folders of the data files, within the store's; none: the data file is in the store's own."""
pytestmark = syscalls.needs_notifications


@pytest.fixture(autouse=True, params=["whole", "striped"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store on one drive, and of one on two with tensors that are striped over both."""
    if request.param == "striped":
        monkeypatch.setattr("tests.stress.test_kill.DRIVES", ["one", "two"])
        lower_stripes(monkeypatch, 32 << 10, 100_000)


def opened(folder: Path, **options: Any) -> TieredStore:
    return TieredStore.open(folder, dram=MIB, paths=[folder / name for name in DRIVES] or None, **options)


def of(number: int, version: int) -> int | None:
    """Of which version the tensor with this number is in generation ``version``; None: there is none."""
    changed = next((at for at in range(version, max(0, version - 3), -1) if (at + number) % 3 == 0), None)
    return None if changed is None or (changed * 7 + number) % 11 == 0 else changed


def job(folder: Path, backend: str) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        with opened(folder, backend=backend) as store:
            for version in range(store.generation + 1, store.generation + 1 + ROUNDS):
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
                child.say(f"committing {version}")
                assert store.commit({"version": version}) == version
                child.say(f"committed {version}")
                for number, nbytes in enumerate(SIZES):  # what the next generation changes is changed twice
                    if (version + 1 + number) % 3 == 0:
                        store.put(f"t{number}", content("scribble", version, nbytes))
                evict_all(store)
            store.close()

    return body


def check(folder: Path, ended: Ended, before: int, what: str) -> int:
    """The store has the last acknowledged generation or the one that was being committed; which."""
    assert not ended.error, f"{what}: {ended.error}"
    acknowledged = max([before, *(int(words.split()[1]) for words in ended.said if words.startswith("committed"))])
    tried = max([acknowledged, *(int(words.split()[1]) for words in ended.said if words.startswith("committing"))])
    with opened(folder) as store:
        assert acknowledged <= store.generation <= tried, f"{what}: generation {store.generation} after {ended.said}"
        whole(store, store.generation, what)
        kept = generations(folder)
        assert max(kept, default=0) == store.generation
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")], what
        store.close()
    if len(kept) > 1:
        with opened(folder, generation=kept[0]) as store:
            whole(store, kept[0], what)
            store.close()
    return kept[-1] if kept else 0


def whole(store: TieredStore, version: int, what: str) -> None:
    assert store.meta == ({"version": version} if version else {}), what
    there = {f"t{number}": of(number, version) for number in range(len(SIZES))} if version else {}
    assert sorted(store) == sorted(key for key, of_version in there.items() if of_version is not None), what
    for number, nbytes in enumerate(SIZES):
        wanted = there.get(f"t{number}")
        if wanted is not None:
            holds(store, f"t{number}", wanted, nbytes)


def killed_at(folder: Path, backend: str, number: int) -> Ended:
    return syscalls.run(
        job(folder, backend), syscalls.CHANGING, lambda call: syscalls.kill if call.number == number else syscalls.go_on
    )


@counts(8, 400)
def test_killed_at_any_call(tmp_path: Path, backend: str, count: int, tally: Tally) -> None:
    """One store throughout: each trial begins with what the one before left."""
    folder, source = tmp_path / "state", random.Random(count)
    TieredStore.open(tmp_path / "other", dram=MIB, backend=backend).close()  # type: ignore[arg-type]
    dry = killed_at(folder, backend, 0)
    assert dry.status == 0
    generation = check(folder, dry, 0, "not killed")
    most, number, done = dry.calls, 0, 0
    while done < count:
        number = number % most + (1 if count > most else source.randint(1, 2 * most // count))
        ended = killed_at(folder, backend, number)
        generation = check(folder, ended, generation, f"killed at call {number}")
        if ended.status == 0:  # it needed fewer calls this time
            most = number = min(most, ended.calls)
            continue
        assert ended.status == -9
        tally.count("SIGKILL", 1)
        done += 1


@counts(4, 60)
def test_killed_while_it_is_made(tmp_path: Path, backend: str, count: int, tally: Tally) -> None:
    """In the first calls of a new store's life; what is left is a store, perhaps an empty one."""
    TieredStore.open(tmp_path / "other", dram=MIB, backend=backend).close()  # type: ignore[arg-type]
    for number in range(1, count + 1):
        folder = tmp_path / "new" / f"{number}"
        ended = killed_at(folder, backend, number)
        assert ended.status == -9
        check(folder, ended, 0, f"killed at call {number}")
        tally.count("SIGKILL of a new store", 1)
        if folder.exists():  # an empty store that is closed before it has a commit leaves nothing
            shutil.rmtree(folder)
