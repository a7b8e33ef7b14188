"""Promise 6: the disk is full, by us or by a neighbour: the last commit loads, and the space comes back.

On an ext4 filesystem of 64 MiB, at every fill level that there is between nothing and all of it.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends import EACH
from tests.filesystems import root, small_ext4
from tests.stress.contents import content, evict_all, holds
from tests.stress.tally import Tally, counts
from tiered import CapacityError, CommitError, MisuseError, TieredError, TieredStore, WriteError

PROMISE = "6 (a full disk)"
MIB = 1 << 20
DISK = 64 * MIB
KEYS = [f"t{number}" for number in range(8)]
pytestmark = root


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_ext4(tmp_path_factory.mktemp("full"), DISK) as mounted:
        yield mounted


def size(number: int) -> int:
    return 150_000 + 50_001 * number


def leave(small: Path, nbytes: int) -> None:
    """A neighbour takes all but so many bytes."""
    found = os.statvfs(small)
    take = found.f_bfree * found.f_frsize - nbytes  # root may have the reserved blocks; 1.3 MiB more are for metadata
    fd = os.open(small / "neighbour", os.O_RDWR | os.O_CREAT)
    try:
        while take > 0:
            try:
                os.posix_fallocate(fd, 0, take)
                break
            except OSError as error:
                assert error.errno == errno.ENOSPC
                take -= 64 << 10
    finally:
        os.close(fd)


def whole(store: TieredStore, version: int) -> None:
    assert sorted(store) == sorted(KEYS)
    for number, key in enumerate(KEYS):
        holds(store, key, version, size(number))


@counts(3, 60)
def test_at_every_fill_level(small: Path, backend: str, count: int, tally: Tally) -> None:
    """With ``count`` levels for all backends together: one generation fits, and less than two more, with which two are kept."""
    source = random.Random(backend)
    state = sum(-(-size(number) // 4096) * 4096 for number in range(len(KEYS)))
    levels = [int(1.6 * state * level / count) for level in range(count)]
    for number, level in enumerate(levels[EACH.index(backend) :: len(EACH)]):
        by_us = number % 2 == 1
        folder = small / "store"
        leave(small, state + 2 * MIB + level)
        store = TieredStore.open(folder, dram=MIB, backend=backend, keep=2)  # type: ignore[arg-type]
        for index, key in enumerate(KEYS):
            store.put(key, content(key, 1, size(index)))
        assert store.commit({"version": 1}) == 1
        refused: list[TieredError] = []
        version = committed = 1
        while len(refused) < 2 and version < 30:
            version += 1
            try:
                if by_us:  # more and more
                    store.put(f"more {version}", content("more", version, 400_000))
                    evict_all(store)
                for index, key in enumerate(KEYS):
                    store.put(key, content(key, version, size(index)))
                store.commit({"version": version})
                committed = version
            except (CapacityError, WriteError, CommitError) as error:
                assert str(folder) in str(error) or "tier dram" in str(error) or "nvme" in str(error), error
                refused.append(error)
        tally.count("by us" if by_us else "by a neighbour", len(refused))
        for _ in range(3):  # what is in memory or on the disk can still be had, if not all of it at once
            key = source.choice(KEYS)
            try:
                store.get(key)
            except (CapacityError, WriteError):
                continue
        generation = store.generation
        store.close()
        with TieredStore.open(folder, dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
            assert (store.generation, store.meta) == (generation, {"version": committed})
            for index, key in enumerate(KEYS):
                holds(store, key, committed, size(index))
            store.close()
        (small / "neighbour").unlink()
        comes_back(folder, backend, committed)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def comes_back(folder: Path, backend: str, version: int) -> None:
    """With the neighbour gone, the store commits; with its own tensors gone, their room is used again."""
    with TieredStore.open(folder, dram=MIB, backend=backend, keep=1) as store:  # type: ignore[arg-type]
        for key in list(store):
            if key not in KEYS:
                store.delete(key)
        for again in (1, 2):
            for index, key in enumerate(KEYS):
                store.put(key, content(key, version + again, size(index)))
            store.commit({"version": version + again})
        whole(store, version + 2)
        grown = os.path.getsize(folder / "data.0")
        for again in (3, 4, 5):
            for index, key in enumerate(KEYS):
                store.put(key, content(key, version + again, size(index)))
            store.commit({"version": version + again})
        assert os.path.getsize(folder / "data.0") == grown, "what older generations had is used again"
        store.close()
    with TieredStore.open(folder, dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
        whole(store, version + 5)
        store.close()


def test_no_room_for_a_new_store(small: Path, backend: str, tally: Tally) -> None:
    """It says so, leaves nothing behind, and what is there already opens."""
    with TieredStore.open(small / "old", dram=MIB) as store:
        store.put("t", content("t", 1, 100_000))
    for level in (0, 4096):
        leave(small, level)
        fill_up(small)
        with pytest.raises((MisuseError, CapacityError), match=r"[Nn]o space left"):
            TieredStore.open(small / "new", dram=MIB, backend=backend)  # type: ignore[arg-type]
        tally.count("a new store", 1)
        assert not (small / "new").exists()
        with TieredStore.open(small / "old", dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
            holds(store, "t", 1, 100_000)
            store.close()
        (small / "neighbour").unlink()
        (small / "neighbour 2").unlink()
    with TieredStore.open(small / "new", dram=MIB) as store:
        store.put("t", content("t", 1, 100_000))
    for folder in ("old", "new"):
        for path in (small / folder).iterdir():
            path.unlink()
        (small / folder).rmdir()


def fill_up(small: Path) -> None:
    """The last blocks, too."""
    with (small / "neighbour 2").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError as error:
            assert error.errno == errno.ENOSPC
