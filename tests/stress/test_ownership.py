"""Promise 10: a second job gets StoreLocked and nothing is deleted; a dead owner's late writes land in no new owner's data.

The owner is killed while the filesystem holds its writes back; it is gone for its parent long before they have landed.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stress.children import forked
from tests.stress.contents import content, holds
from tests.stress.fusefs import FaultyDisk, Rule
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tiered import MisuseError, StoreLocked, TieredStore

PROMISE = "10 (one owner)"
MIB = 1 << 20
SIZES = {f"t{number}": 70_000 * number + 1 for number in range(6)}


def owner(folder: Path, backend: str, version: int, go: int) -> Callable[[Child], None]:
    """Commits ``version``, and when it may, goes on writing over what is free."""

    def body(child: Child) -> None:
        store = TieredStore.open(folder, dram=MIB, backend=backend)  # type: ignore[arg-type]
        for key, nbytes in SIZES.items():
            store.put(key, content(key, version, nbytes))
        store.commit({"version": version})
        child.say("committed")
        os.read(go, 1)
        for key, nbytes in SIZES.items():
            store.put(key, content("late", version, nbytes))
        store.commit()
        child.say("committed what is late")

    return body


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {name: (found.st_ino, found.st_size) for name in os.listdir(folder) if (found := os.stat(folder / name))}


@counts(2, 20)
@pytest.mark.parametrize("what", ["write", "fsync"])
def test_late_writes_of_a_killed_owner(disk: FaultyDisk, backend: str, what: str, count: int, tally: Tally) -> None:
    folder, source = disk.folder / f"{backend} {what} {count}", random.Random(backend)
    for version in range(1, count + 1):
        wait, go = os.pipe()
        with forked(owner(folder, backend, version, wait)) as running:
            running.wait_for("committed")
            before = listing(folder)
            with pytest.raises(StoreLocked, match=str(running.pid)):
                TieredStore.open(folder, dram=MIB)
            disk.add(Rule(what, "stall", name=r"data\.0", skip=source.randrange(3) if what == "write" else 0, times=-1))
            os.write(go, b"x")
            disk.wait_stalled()
            running.send(signal.SIGKILL)
            for _ in range(3):  # as long as its writes may land
                with pytest.raises(StoreLocked):
                    TieredStore.open(folder, dram=MIB)
            now = listing(folder)
            assert disk.stalled()
            assert {name: now[name] for name in before} == before, "the second job has deleted something"
            landed = len(disk.writes())
            fired = sum(disk.clear())
            assert running.wait_end() == -signal.SIGKILL
            assert "committed what is late" not in running.said
            landed_late = len(disk.writes()) - landed
            with TieredStore.open(folder, dram=MIB) as store:  # the new owner
                first = len(disk.writes())
                assert store.meta == {"version": version}
                for key, nbytes in SIZES.items():
                    holds(store, key, version, nbytes)
                    store.put(key, content("new owner", version, nbytes))
                store.commit({"version": version})
                for key, nbytes in SIZES.items():
                    assert store.get(key).equal(content("new owner", version, nbytes))
                foreign = [process for process, *_ in disk.writes()[first:] if process == running.pid]
                assert not foreign, "a dead owner's write landed in a new owner's data"
        os.close(wait)
        os.close(go)
        tally.count(f"SIGKILL during a {what}", fired)
        assert landed_late or what == "fsync"


def test_a_second_job_changes_nothing(tmp_path: Path, backend: str, tally: Tally) -> None:
    """However it asks, the owner goes on undisturbed."""
    folder = tmp_path / "state"
    with TieredStore.open(folder, dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
        for key, nbytes in SIZES.items():
            store.put(key, content(key, 1, nbytes))
        store.commit()
        before = listing(folder)
        asking = [
            {},
            {"durability": "none"},
            {"generation": 1},
            {"keep": 1},
            {"backend": "posix"},
            {"paths": [tmp_path / "other drive"]},
            {"nvme": "4MiB"},
        ]
        for options in asking:

            def second(child: Child, options: dict[str, object] = options) -> None:
                try:
                    TieredStore.open(folder, dram=MIB, **options)  # type: ignore[arg-type]
                except (StoreLocked, MisuseError) as error:
                    child.say(type(error).__name__)

            with forked(second) as running:
                assert running.wait_end() == 0, running.said
            assert running.said == ["StoreLocked" if "paths" not in options else "MisuseError"]
            assert listing(folder) == before
            tally.count("a second job", len(running.said))
        for key, nbytes in SIZES.items():
            store.put(key, content(key, 2, nbytes))
        store.commit()
    with TieredStore.open(folder, dram=MIB) as store:
        for key, nbytes in SIZES.items():
            holds(store, key, 2, nbytes)


@counts(2, 20)
def test_a_lock_lives_as_long_as_the_last_process_that_could_write(
    tmp_path: Path, backend: str, count: int, tally: Tally
) -> None:
    """A child that was forked from the owner may go on after it, without any right to the store; the store is free then."""
    for _ in range(count):
        with TieredStore.open(tmp_path / "state", dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
            store.put("t", content("t", 1, 1000))
            store.commit()
            wait, go = os.pipe()
            with forked(lambda child: [child.say("there"), os.read(wait, 1)]) as running:  # noqa: B023
                running.wait_for("there")
                store.close()
                with TieredStore.open(tmp_path / "state", dram=MIB) as again:
                    holds(again, "t", 1, 1000)
                    again.close()
                os.write(go, b"x")
                assert running.wait_end() == 0
            os.close(wait)
            os.close(go)
            tally.count("a child that outlives the owner's store", 1)
