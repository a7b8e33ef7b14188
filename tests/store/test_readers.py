"""Readers beside a writer: what they see, what stays for them, what a crash at each step leaves, and what it costs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.filesystems import fill, mounted, root, small_ext4
from tests.stress.children import forked
from tests.stress.contents import content, evict_all, holds
from tests.stress.syscalls import Child
from tiered import (
    CapacityError,
    CommitError,
    Generation,
    LeaseConflict,
    MisuseError,
    StoreLocked,
    TieredError,
    TieredStore,
    verify,
)
from tiered.format import generations as protocol
from tiered.format.folder import OpenFolder
from tiered.format.generations import dropped, generations
from tiered.format.pins import Pin

MIB = 1 << 20
SIZES = {"a": 300_000, "b": 5000, "c": 0, "d": 200_000}


def commit(store: TieredStore, version: int, *keys: str) -> int:
    """``keys`` (default: all) become that version."""
    for key in keys or SIZES:
        store.put(key, content(key, version, SIZES[key]))
    return store.commit({"version": version})


def is_at(store: TieredStore, version: int, **others: int) -> None:
    """Every key is of ``version``, or of what ``others`` say, as read from the disk."""
    assert sorted(store) == sorted(SIZES)
    for key, nbytes in SIZES.items():
        holds(store, key, others.get(key, version), nbytes)


def read(folder: Path, **options: Any) -> TieredStore:
    return TieredStore.open(folder, **{"dram": MIB, "access": "read", **options})


def pins(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith("reader.")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        commit(store, 1)
    return tmp_path / "state"


def test_a_generation_stays_as_it_is(folder: Path) -> None:
    with TieredStore.open(folder, dram=MIB, keep=1) as store, read(folder) as reader:
        for version in (2, 3, 4, 5):
            commit(store, version)
            is_at(reader, 1)
            assert (reader.generation, reader.meta) == (1, {"version": 1})
            assert generations(folder) == [1, version]
        assert reader.refresh() == 5
        assert (reader.generation, reader.meta) == (5, {"version": 5})
        is_at(reader, 5)
        assert reader.refresh() == 5
        commit(store, 6)
        assert generations(folder) == [5, 6]
        reader.close()
        commit(store, 7)
        assert generations(folder) == [7]
        assert pins(folder) == []


def test_several_at_several_generations(folder: Path) -> None:
    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        readers = [read(folder)]
        for version in (2, 3, 4):
            commit(store, version, "a", "b")
            readers.append(read(folder))
        for version, reader in enumerate(readers, 1):
            is_at(reader, 1, a=version, b=version)
        assert generations(folder) == [1, 2, 3, 4]
        readers[1].close()
        commit(store, 5)
        assert generations(folder) == [1, 3, 4, 5]
        for reader in readers[2:]:
            assert reader.refresh() == 5
        commit(store, 6)
        assert generations(folder) == [1, 5, 6]
        is_at(readers[0], 1)
        for reader in readers:
            reader.close()


def test_space_comes_back(folder: Path) -> None:
    """(kept + pinned + 1) times what changes, and no more once readers have moved on."""
    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        assert store._parts.nvme is not None
        state = store._parts.nvme.used
        reader = read(folder)
        for version in range(2, 8):
            commit(store, version)
            assert store._parts.nvme.used <= 2 * state + 4096, "the kept one and the pinned one"
        reader.close()
        commit(store, 8)
        assert store._parts.nvme.used <= state + 4096


def test_refresh_exchanges_what_differs(folder: Path) -> None:
    with TieredStore.open(folder, dram=4 * MIB) as store, read(folder, dram=4 * MIB) as reader:
        is_at(reader, 1)
        commit(store, 2, "a")
        store.delete("b")
        store.put("new", content("new", 3, 7000))
        store.put("c", torch.ones(3))
        store.commit({"version": 3})
        before = reader.statistics().links[0].up.transfers
        with reader.lease("d") as same:  # leases of what does not differ stay
            assert reader.refresh() == 3
            assert torch.equal(same, content("d", 1, SIZES["d"]))
        assert sorted(reader) == ["a", "c", "d", "new"]
        assert reader.get("b", None) is None
        holds(reader, "d", 1, SIZES["d"])
        assert reader.statistics().links[0].up.transfers == before, "it was in memory, and stays there"
        holds(reader, "a", 2, SIZES["a"])
        holds(reader, "new", 3, 7000)
        assert torch.equal(reader.get("c"), torch.ones(3))
        store.delete("c")
        store.put("c", torch.empty(0))
        store.commit()
        assert reader.refresh() == 4
        assert reader.spec("c").shape == (0,)


def test_refresh_takes_no_lease_away(folder: Path) -> None:
    with TieredStore.open(folder, dram=MIB, keep=1) as store, read(folder) as reader:
        commit(store, 2, "a")
        with reader.lease(["a", "d"]):
            with pytest.raises(LeaseConflict, match="'a' is leased, and differs in the newest commit"):
                reader.refresh()
            commit(store, 3, "a")
        assert reader.generation == 1
        is_at(reader, 1)
        with reader.lease("a") as tensor:
            alias = tensor[1:]
        del tensor
        assert reader.refresh() == 3
        assert torch.equal(alias, content("a", 1, SIZES["a"])[1:]), "memory under a tensor is never given to another"
        is_at(reader, 1, a=3)
        assert len(pins(folder)) == 1


def test_refresh_of_a_writer_and_of_a_closed_reader(folder: Path) -> None:
    with TieredStore.open(folder, dram=MIB) as store, pytest.raises(MisuseError, match="open for writing, and has the newest"):
        store.refresh()
    reader = read(folder)
    reader.close()
    with pytest.raises(MisuseError, match="is closed"):
        reader.refresh()
    assert pins(folder) == []


def test_a_chosen_generation_and_back_to_the_newest(folder: Path) -> None:
    with TieredStore.open(folder, dram=MIB, keep=2) as store:
        commit(store, 2)
        with read(folder, generation=1) as reader:
            is_at(reader, 1)
            commit(store, 3)
            with read(folder, generation=1) as another:  # one that is pinned can be opened, also where it is not kept
                is_at(another, 1)
            assert reader.refresh() == 3
            is_at(reader, 3)
        commit(store, 4)
        with pytest.raises(MisuseError, match="no generation 1; there are: 3, 4"):
            read(folder, generation=1)
        assert pins(folder) == []


@pytest.mark.parametrize("drives", [2, 3])
def test_on_several_drives(tmp_path: Path, drives: int) -> None:
    options: dict[str, Any] = {"dram": MIB, "paths": [tmp_path / f"drive {number}" for number in range(drives)]}
    with TieredStore.open(tmp_path / "state", keep=1, **options) as store:
        commit(store, 1)
        with read(tmp_path / "state", **options) as reader, reader.reader() as handle:
            commit(store, 2)
            is_at(reader, 1)
            with handle.open(dram=MIB) as other:
                is_at(other, 1)
            assert verify(tmp_path / "state", paths=options["paths"]).sound
            reader.refresh()
            is_at(reader, 2)


# Both sides at the same moment


def test_a_reader_that_comes_between_the_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has found the manifest, and its pin is seen only after the manifest has lost its name: the name comes back."""
    readers: list[TieredStore] = []
    real = protocol.set_aside

    def aside(where: OpenFolder, number: int) -> None:
        readers.append(read(folder, generation=number))
        real(where, number)

    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        monkeypatch.setattr(protocol, "set_aside", aside)
        commit(store, 2)
        monkeypatch.setattr(protocol, "set_aside", real)
        assert (generations(folder), dropped(folder)) == ([1, 2], [])
        commit(store, 3)
        is_at(readers[0], 1)
        readers[0].close()
        commit(store, 4)
        assert generations(folder) == [4]


def test_a_reader_that_comes_after_the_name_went(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pin is too late: it finds no manifest and takes the newest one."""
    found: list[object] = []
    real = protocol.drop

    def drop(where: OpenFolder, number: int) -> None:
        with read(folder) as reader:
            found.append(reader.generation)
            is_at(reader, 2)
        with pytest.raises(MisuseError, match="no generation 1; there are: 2"):
            read(folder, generation=1)
        real(where, number)

    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        monkeypatch.setattr(protocol, "drop", drop)
        commit(store, 2)
    assert found == [2]
    assert pins(folder) == []


def test_a_manifest_that_goes_while_a_reader_takes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its listing and its pin: the reader takes the next one."""
    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        made: list[int] = []

        class Late(Pin):
            def __init__(self, where: OpenFolder, number: int) -> None:
                made.append(number)
                if len(made) < 4:
                    commit(store, len(made) + 1)
                super().__init__(where, number)

        monkeypatch.setattr(protocol, "Pin", Late)
        with read(folder) as reader:
            assert (made, reader.generation) == ([1, 2, 3, 4], 4)
            assert len(pins(folder)) == 1
            is_at(reader, 4)


# Crashes


@pytest.mark.parametrize(
    ("where", "pinned"),
    [("set_aside", ""), ("set_aside", "pinned"), ("_rename", ""), ("_rename", "pinned"), ("drop", ""), ("sync", "")],
)
def test_a_writer_that_is_killed_while_it_drops(
    folder: Path, where: str, pinned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's pin appears between the looks; whatever the next writer finds, the reader has its generation."""
    readers: list[TieredStore] = []
    real = protocol.set_aside

    def job(child: Child) -> None:
        store = TieredStore.open(folder, dram=MIB, keep=1)

        def aside(opened: OpenFolder, number: int) -> None:
            if pinned:
                child.say("now")
                os.read(wait, 1)
            if where == "_rename" and pinned:
                real(opened, number)
                monkeypatch.setattr(protocol, "_rename", die)
            elif where == "set_aside":
                if pinned:
                    real(opened, number)
                die()
            else:
                real(opened, number)

        def die(*given: object) -> None:
            os.kill(os.getpid(), 9)

        monkeypatch.setattr(protocol, "set_aside", aside)
        if where in ("drop", "sync"):
            monkeypatch.setattr(protocol, where, die)
        if where == "_rename" and not pinned:
            monkeypatch.setattr(protocol, "_rename", die)
        commit(store, 2)

    wait, go = os.pipe()
    with forked(job) as running:
        if pinned:
            running.wait_for("now")
            readers.append(read(folder, generation=1))
            os.write(go, b"x")
        assert running.wait_end() == -9, running.said
    os.close(wait)
    os.close(go)
    assert dropped(folder) == ([1] if pinned or where == "drop" else [])
    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        assert store.generation == 2
        assert dropped(folder) == ([1] if pinned else [])
        for version in (3, 4, 5):
            commit(store, version)
            for reader in readers:
                is_at(reader, 1)
        is_at(store, 5)
        assert generations(folder) == [5]
        for reader in readers:
            reader.close()
        commit(store, 6)
        assert dropped(folder) == []
        assert store._parts.nvme is not None
        assert store._parts.nvme.generations == (6,)
    assert verify(folder).sound


def test_readers_that_are_killed_leave_nothing(folder: Path) -> None:
    def job(child: Child) -> None:
        reader = read(folder)
        is_at(reader, 1)
        os.kill(os.getpid(), 9)

    for _ in range(2):
        with forked(job) as running:
            assert running.wait_end() == -9, running.said
    assert len(pins(folder)) == 1, "each reader removes those of the dead, where nobody writes"
    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        assert pins(folder) == []
        with forked(job) as running:
            assert running.wait_end() == -9, running.said
        assert len(pins(folder)) == 1
        commit(store, 2)
        assert pins(folder) == []
        assert generations(folder) == [2]


def test_the_newest_ones_are_dropped_while_readers_have_them(folder: Path) -> None:
    """A job that goes back writes other bytes; who reads what it went back from keeps it, and no number is used twice."""
    with TieredStore.open(folder, dram=MIB, keep=2) as store:
        commit(store, 2)
    reader = read(folder)
    for _ in range(2):
        with TieredStore.open(folder, dram=MIB, generation=Generation(1, newer="drop"), keep=1) as store:
            assert (store.generation, generations(folder), dropped(folder)) == (1, [1], [2])
            is_at(store, 1)
            store.close()
    with pytest.raises(MisuseError, match="no generation 2"):
        read(folder, generation=2)
    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        assert commit(store, 9) == 3
        for _ in range(3):
            commit(store, 9)
        is_at(reader, 2)
        assert reader.refresh() == 6
        is_at(reader, 9)
        commit(store, 10)
        assert dropped(folder) == []
    reader.close()


def test_all_are_dropped_while_readers_have_them(folder: Path) -> None:
    with read(folder) as reader:
        with TieredStore.open(folder, dram=MIB, generation=Generation(0, newer="drop")) as store:
            assert (len(store), generations(folder), dropped(folder)) == (0, [], [1])
            assert commit(store, 5) == 2
            is_at(reader, 1)
        is_at(reader, 1)
    with TieredStore.open(folder, dram=MIB) as store:
        assert dropped(folder) == []
        is_at(store, 5)


@pytest.mark.parametrize("pinned", [False, True], ids=["", "pinned"])
def test_a_commit_that_fails_after_a_reader_took_it(folder: Path, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[TieredStore] = []
    real = os.fsync

    def sync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            if pinned:
                readers.append(read(folder))
            raise OSError(5, "failed")
        real(fd)

    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", sync)
            with pytest.raises(CommitError, match="cannot sync"):
                commit(store, 2)
        assert (generations(folder), dropped(folder)) == ([1], [2] if pinned else [])
        store.close()
    with TieredStore.open(folder, dram=MIB, keep=1) as store:
        is_at(store, 1)
        for version in (3, 4):
            commit(store, version)
            for reader in readers:
                is_at(reader, 2)
        for reader in readers:
            assert reader.refresh() == store.generation
            is_at(reader, 4)
            reader.close()
        commit(store, 5)
        assert (dropped(folder), pins(folder)) == ([], [])


def test_a_dropped_manifest_that_is_damaged_is_not_in_the_way(folder: Path) -> None:
    with read(folder):
        with TieredStore.open(folder, dram=MIB, generation=Generation(0, newer="drop")) as store:
            commit(store, 2)
        os.truncate(folder / "manifest.1.dropped", 50)
        with pytest.warns(UserWarning, match="generation 1 is damaged"):
            store = TieredStore.open(folder, dram=MIB, keep=1)
        with store:
            is_at(store, 2)
            commit(store, 3)
    with TieredStore.open(folder, dram=MIB) as store:
        assert dropped(folder) == []


# Folders that cannot be written to, and full ones


def as_nobody(body: Callable[[Child], object]) -> list[str]:
    """What a process of another user says, which may read, and write nowhere."""

    def job(child: Child) -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        body(child)

    with forked(job) as running:
        assert running.wait_end() == 0, running.said
    return running.said


@root
def test_without_permission_to_write_a_lock_takes_the_place_of_a_pin(folder: Path) -> None:
    for path in [folder, *folder.iterdir()]:
        path.chmod(path.stat().st_mode | 0o055)
    parent = folder.parent
    while parent != parent.parent:
        parent.chmod(parent.stat().st_mode | 0o055)
        parent = parent.parent

    def alone(child: Child) -> None:
        with read(folder) as reader, reader.reader() as handle:
            is_at(reader, 1)
            assert reader.refresh() == 1
            with handle.open(dram=MIB) as other:
                is_at(other, 1)
            child.say(str(pins(folder)))

    def beside(child: Child) -> None:
        for reading in (read, verify):
            try:
                reading(folder)
            except StoreLocked as error:
                child.say(str(error))

    assert as_nobody(alone) == ["[]"]
    with TieredStore.open(folder, dram=MIB) as store:
        said = as_nobody(beside)
        assert len(said) == 2
        assert str(os.getpid()) in said[0]
        assert "A reader beside it makes a file in" in said[0]
        assert "permission denied" in said[0]
        commit(store, 2)


@root
def test_on_a_filesystem_that_is_mounted_read_only(folder: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "mounted", "--bind", str(folder)) as there:
        os.system(f"mount -o remount,bind,ro {there}")
        if os.statvfs(there).f_flag & os.ST_RDONLY == 0:
            pytest.skip("cannot mount read-only")
        with read(there) as one, read(there) as other:
            is_at(one, 1)
            is_at(other, 1)
            assert verify(there).sound
            assert pins(folder) == []
            with pytest.raises(StoreLocked, match="in use by process"):
                TieredStore.open(folder, dram=MIB)
        with TieredStore.open(folder, dram=MIB), pytest.raises(StoreLocked, match="read-only file system"):
            read(there)


@root
def test_a_pin_of_root_in_a_users_folder(folder: Path) -> None:
    """The owner can look at it."""
    os.chown(folder, 65534, 65534)
    with read(folder):
        (name,) = pins(folder)
        found = (folder / name).stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (65534, 65534, 0o600)


@root
def test_a_full_disk_names_who_needs_the_room(tmp_path: Path) -> None:
    with small_ext4(tmp_path, 24 * MIB) as disk:
        folder = disk / "state"
        with TieredStore.open(folder, dram=8 * MIB, keep=1) as store:
            store.put("large", content("large", 1, 6 * MIB))
            store.commit()
            wait, go = os.pipe()

            def job(child: Child) -> None:
                reader = read(folder, dram=8 * MIB)
                child.say(pins(folder)[0])
                os.read(wait, 1)
                holds(reader, "large", 1, 6 * MIB)
                reader.close()

            with forked(job) as running:
                name = running.hear()
                store.put("large", content("large", 2, 6 * MIB))
                store.commit()
                fill(disk)

                def until_it_is_full() -> None:
                    for version in (3, 4):
                        store.put("large", content("large", version, 6 * MIB))
                        store.commit()

                with pytest.raises((CapacityError, TieredError)) as caught:
                    until_it_is_full()
                told = str(caught.value)
                assert f"process {running.pid} reads generation 1 ({folder / name})" in told, told
                assert "close or refresh those, and commit" in told
                os.write(go, b"x")
                assert running.wait_end() == 0, running.said
            assert pins(folder) == []
            evicted = store.commit()
            assert generations(folder) == [evicted], "the room of the pinned one is there before the commit needs it"
            assert store.get("large").numel() == 6 * MIB
            os.close(wait)
            os.close(go)
            store.close()


def test_a_copy_of_a_folder_that_is_read_is_a_store(folder: Path, tmp_path: Path) -> None:
    with read(folder):
        shutil.copytree(folder, tmp_path / "copy")
        assert len(pins(tmp_path / "copy")) == 1
        with TieredStore.open(tmp_path / "copy", dram=MIB, keep=1) as store:
            assert pins(tmp_path / "copy") == []
            is_at(store, 1)
            commit(store, 2)
    assert generations(tmp_path / "copy") == [2]


def test_evicted_copies_come_from_the_pinned_bytes(folder: Path) -> None:
    with TieredStore.open(folder, dram=MIB, keep=1) as store, read(folder) as reader:
        for version in range(2, 12):
            commit(store, version)
            evict_all(store)
            is_at(store, version)
            is_at(reader, 1)
