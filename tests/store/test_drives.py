"""``TieredStore`` over several drives: folders of one filesystem, and two small filesystems of which one is full."""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests import programs
from tests.filesystems import fill, root, two_ext4
from tests.store.chains import MIB, numbers, same
from tiered import CapacityError, CommitError, CorruptionError, ManifestError, MisuseError, StoreLocked, TieredStore
from tiered.format.generations import generations, load
from tiered.format.manifest import encode

Open = Callable[..., TieredStore]


@pytest.fixture
def open_store(open_on_drives: Open) -> Open:
    return open_on_drives


def put_some(store: TieredStore, count: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    tensors = {f"t{number}": numbers(50_000, seed + number) for number in range(count)}
    for key, tensor in tensors.items():
        store.put(key, tensor)
    return tensors


def check(store: TieredStore, tensors: dict[str, torch.Tensor]) -> None:
    assert sorted(store) == sorted(tensors)
    for key, tensor in tensors.items():
        same(store.get(key), tensor)


def allocated(path: Path) -> int:
    return sum(os.stat(entry).st_blocks * 512 for entry in path.iterdir())


def test_all_drives_are_used_and_the_store_comes_back(open_store: Open, folder: Path, paths: list[Path]) -> None:
    store = open_store()
    tensors = put_some(store)
    store.commit(meta={"step": 1})
    check(store, tensors)
    store.close()
    assert sorted(os.listdir(folder)) == ["drives", "manifest.1"]
    manifest = load(folder)
    assert manifest is not None
    extents = [record.extent for record in manifest.tensors if record.extent]
    counts = [sum(extent.file == index for extent in extents) for index in range(len(paths))]
    assert counts == [len(tensors) // len(paths)] * len(paths)
    assert [file.name for file in manifest.files] == [f"drive.{index}" for index in range(len(paths))]
    for index, path in enumerate(paths):
        data = (path / f"drive.{index}").read_bytes()
        assert allocated(path) >= counts[index] * 200_000
        for record in manifest.tensors:
            if record.extent and record.extent.file == index:
                found = data[record.extent.offset : record.extent.offset + record.spec.nbytes]
                assert found == tensors[record.key].view(torch.uint8).numpy().tobytes()
    again = open_store(paths=[str(path) for path in reversed(paths)])
    assert again.meta == {"step": 1}
    check(again, tensors)
    assert again.free_on_device() > 0
    assert again.statistics().direct == store_is_direct(folder)


def store_is_direct(folder: Path) -> bool:
    with TieredStore.open(folder.parent / "other", dram=MIB) as other:
        return other.statistics().direct


def test_a_random_history_with_kept_generations(open_store: Open, folder: Path, paths: list[Path]) -> None:
    chance = random.Random(len(paths))
    now: dict[str, torch.Tensor] = {}
    kept: dict[int, dict[str, torch.Tensor]] = {}
    store = open_store(keep=3)
    for step in range(250):
        key = f"t{chance.randrange(12)}"
        what = chance.choice(["put", "put", "put", "get", "write", "delete", "commit", "reopen"])
        if what == "put":
            now[key] = numbers(chance.randrange(60_000), step)
            store.put(key, now[key])
        elif what == "get" and key in now:
            same(store.get(key), now[key])
        elif what == "write" and key in now:
            now[key] = numbers(now[key].numel(), step)
            with store.lease(key, access="write") as tensor:
                tensor.copy_(now[key])
            del tensor
        elif what == "delete" and key in now:
            store.delete(key)
            del now[key]
        elif what == "commit" and chance.random() < 0.4:
            kept[store.commit()] = dict(now)
        elif what == "reopen" and chance.random() < 0.3:
            store.close()
            chance.shuffle(paths)
            store = open_store(keep=3)
            now = dict(kept[max(kept)]) if kept else {}
            check(store, now)
    kept[store.commit()] = now
    store.close()
    there = generations(folder)
    assert there == sorted(kept)[-3:]
    for generation in there:
        with open_store(keep=3, generation=generation) as old:
            check(old, kept[generation])
            old.close()


def test_corruption_names_the_file_of_its_drive(open_store: Open, folder: Path, paths: list[Path]) -> None:
    store = open_store()
    tensors = put_some(store)
    store.commit()
    store.close()
    manifest = load(folder)
    assert manifest is not None
    damaged = {}
    for record in manifest.tensors:
        if record.extent and record.extent.file == 1:
            name = paths[1] / "drive.1"
            with name.open("r+b") as file:
                file.seek(record.extent.offset + 777)
                was = file.read(1)[0]
                file.seek(record.extent.offset + 777)
                file.write(bytes([was ^ 1]))
            damaged[record.key] = (str(name), record.extent.offset)
    assert len(damaged) == len(tensors) // len(paths)
    again = open_store()
    for key, tensor in tensors.items():
        if key in damaged:
            with pytest.raises(CorruptionError) as raised:
                again.get(key)
            assert (raised.value.path, raised.value.offset) == damaged[key]
        else:
            same(again.get(key), tensor)


def test_a_missing_or_foreign_drive_is_named_and_nothing_is_touched(
    open_store: Open, folder: Path, paths: list[Path], tmp_path: Path
) -> None:
    store = open_store()
    tensors = put_some(store)
    store.commit()
    store.close()
    away = paths[1].rename(tmp_path / "away")
    names = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(ManifestError, match=f"{paths[1]} has no data file of the store in {folder}; is the drive mounted"):
        open_store()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == names
    with TieredStore.open(tmp_path / "other", dram=MIB, paths=[tmp_path / "x", paths[1]]) as other:
        other.put("theirs", torch.ones(5))
    with pytest.raises(ManifestError, match=str(paths[1])):
        open_store()
    with pytest.raises(MisuseError, match=f"on {len(paths)} drives, not 1"):
        open_store(paths=paths[:1])
    with TieredStore.open(tmp_path / "other", dram=MIB, paths=[paths[1], tmp_path / "x"]) as other:
        assert other.get("theirs").eq(1).all()
    check(open_store(paths=[paths[0], away, *paths[2:]]), tensors)


def test_a_manifest_that_names_other_data_files(open_store: Open, folder: Path, paths: list[Path]) -> None:
    store = open_store()
    tensors = put_some(store, 3)
    store.commit()
    store.close()
    right = load(folder)
    assert right is not None
    swapped = msgspec.structs.replace(right.files[1], uuid=right.files[0].uuid)
    swapped = (msgspec.structs.replace(right.files[0], uuid=right.files[1].uuid), swapped, *right.files[2:])
    more = (*right.files, msgspec.structs.replace(right.files[0], name="drive.9", uuid="0" * 32, index=len(paths)))
    for files, says in ((swapped, f"names another data file than {paths[0]}"), (more, f"{len(more)} data files")):
        (folder / "manifest.1").write_bytes(encode(msgspec.structs.replace(right, files=files)))
        with pytest.raises(ManifestError, match=says):
            open_store()
    (folder / "manifest.1").write_bytes(encode(right))
    check(open_store(), tensors)


def test_an_older_copy_of_a_drive_is_noticed(open_store: Open, folder: Path, paths: list[Path]) -> None:
    """Its header is the right one: what is missing is beyond its end, and what is stale fails its checksum."""
    store = open_store()
    put_some(store, 3)
    store.commit()
    store.close()
    name = paths[0] / "drive.0"
    old = name.read_bytes()
    store = open_store()
    tensors = put_some(store, 3, seed=50)
    store.commit()
    store.close()
    name.write_bytes(old)
    again = open_store()
    failures = []
    for key, tensor in tensors.items():
        try:
            same(again.get(key), tensor)
        except CorruptionError as error:
            failures.append(error.path)
    assert set(failures) == {str(name)}


def test_without_paths_it_says_which(open_store: Open, folder: Path, paths: list[Path]) -> None:
    with open_store() as store:
        store.put("a", torch.ones(3))
    with pytest.raises(MisuseError, match=rf"{folder} keeps its tensors in other folders: open it with paths=\['{paths[0]}', "):
        open_store(paths=None)
    assert open_store().get("a").eq(1).all()


def test_paths_for_a_store_without(open_store: Open, folder: Path, paths: list[Path]) -> None:
    with open_store(paths=None) as store:
        store.put("a", torch.ones(3))
    with pytest.raises(MisuseError, match="open it without paths="):
        open_store()
    assert open_store(paths=None).get("a").eq(1).all()


@pytest.mark.parametrize("wrong", [[], (), "a", Path("a"), [1], [b"a"], {"a"}, [None]])
def test_what_paths_cannot_be(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(MisuseError, match=r"paths is a list of folders|each of paths is a str or"):
        TieredStore.open(tmp_path / "state", dram=MIB, paths=wrong)
    assert list(tmp_path.iterdir()) == []


def test_paths_without_a_disk(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="no paths="):
        TieredStore.open(None, dram=MIB, paths=[tmp_path])


def test_scratch_leaves_nothing(open_store: Open, tmp_path: Path) -> None:
    for _ in range(2):
        with open_store(durability="none") as store:
            tensors = put_some(store)
            assert len(list(tmp_path.rglob("drive.*"))) >= 2
            check(store, tensors)
        assert list(tmp_path.iterdir()) == []


def test_scratch_over_a_store_with_commits_is_refused(open_store: Open) -> None:
    with open_store() as store:
        tensors = put_some(store, 2)
    with pytest.raises(MisuseError, match="holds a store with commits"):
        open_store(durability="none")
    check(open_store(), tensors)


def test_a_second_process_is_refused(open_store: Open, folder: Path, paths: list[Path], tmp_path: Path) -> None:
    with open_store() as store:
        store.put("a", torch.tensor(1))
        program = (
            "import sys, tiered\n"
            "for folder, *paths in eval(sys.argv[1]):\n"
            "    try:\n        tiered.TieredStore.open(folder, dram='1MiB', paths=paths)\n"
            "    except tiered.StoreLocked as error:\n        print(error)"
        )
        tries = [[str(folder), *map(str, paths)], [str(folder), str(tmp_path / "x")]]
        found = programs.run(
            [sys.executable, "-c", program, repr(tries)], capture_output=True, text=True, timeout=300, check=True
        )
        assert [line.split(" is in use by")[0] for line in found.stdout.splitlines()] == [str(folder)] * 2, found.stderr
        with pytest.raises(StoreLocked):
            open_store()
    assert open_store().get("a").item() == 1


# Commits


def test_every_drive_is_synced_before_the_manifest_has_its_name(
    open_store: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    put_some(store)
    seen: list[str] = []
    fdatasync, rename = os.fdatasync, os.rename

    def note_sync(fd: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{fd}"))
        fdatasync(fd)

    def note_rename(old: str, new: str, **more: int) -> None:
        seen.append(new)
        rename(old, new, **more)

    monkeypatch.setattr(os, "fdatasync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    store.commit()
    assert seen == [*(str(path / f"drive.{index}") for index, path in enumerate(paths)), "manifest.1"]


def test_a_drive_that_cannot_sync_is_named_and_the_commit_before_holds(
    open_store: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    tensors = put_some(store, 4)
    store.commit()
    put_some(store, 6, seed=100)
    fdatasync = os.fdatasync

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("drive.1"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fdatasync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(CommitError, match=rf"{paths[1]}/drive\.1: the disk did not take a commit"):
            store.commit()
    with pytest.raises(CommitError, match=str(paths[1])):
        store.commit()
    store.close()
    again = open_store()
    assert again.generation == 1
    check(again, tensors)


KILLED = """
import os, sys, torch, tiered
folder, call, number, *paths = sys.argv[1:]
store = tiered.TieredStore.open(folder, dram="1MiB", paths=paths)
for n in range(12):
    store.put(f"t{n}", torch.full((50_000,), 1.0))
store.commit(meta={"step": 1})
for n in range(12):
    store.put(f"t{n}", torch.full((50_000,), 2.0))
left = int(number)
real = getattr(os, call)
def killed(*args, **more):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)
    return real(*args, **more)
setattr(os, call, killed)
store.commit(meta={"step": 2})
"""


@pytest.mark.parametrize(("call", "number"), [("fdatasync", 1), ("fdatasync", 2), ("rename", 1)])
def test_killed_in_a_commit(tmp_path: Path, call: str, number: int) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    words = [sys.executable, "-c", KILLED, str(tmp_path / "state"), call, str(number), *map(str, paths)]
    done = programs.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -9, done.stderr
    with TieredStore.open(tmp_path / "state", dram=MIB, paths=paths) as store:
        assert store.meta == {"step": 1}
        for n in range(12):
            assert store.get(f"t{n}").eq(1).all()


# Full


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Two ext4 filesystems of 16 MiB."""
    with two_ext4(tmp_path, 16 * MIB, 16 * MIB) as found:
        yield found


@root
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_drive_full_the_other_goes_on(disks: list[Path], folder: Path, order: tuple[int, int]) -> None:
    paths = [disks[index] for index in order]
    with TieredStore.open(folder, dram=MIB, paths=paths) as store:
        tensors = put_some(store, 10)
        store.commit()
        fill(disks[0])
        tensors |= {f"more {number}": numbers(50_000, 500 + number) for number in range(30)}  # 6 MB
        for key, tensor in list(tensors.items())[10:]:
            store.put(key, tensor)
        store.commit()
        check(store, tensors)
    with TieredStore.open(folder, dram=MIB, paths=disks) as store:
        check(store, tensors)
        assert store.generation == 2


@root
def test_all_drives_full_names_them_and_what_was_committed_stays(disks: list[Path], folder: Path) -> None:
    with TieredStore.open(folder, dram=MIB, paths=disks) as store:
        tensors = put_some(store, 10)
        store.commit()

        def put_more() -> None:
            for number in range(1000):
                store.put(f"more {number}", numbers(50_000, number))

        with pytest.raises(CapacityError) as raised:
            put_more()
        for disk in disks:
            assert f"{disk} has " in str(raised.value)
        for key in [key for key in store if key not in tensors]:
            store.delete(key)
        check(store, tensors)
        for disk in disks:
            assert allocated(disk) > 8 * MIB, "both are used to the end"
        store.commit()
        tensors |= put_some(store, 20, seed=70)
        store.commit()
    with TieredStore.open(folder, dram=MIB, paths=disks) as store:
        check(store, tensors)


@root
def test_a_tensor_that_no_single_drive_can_take(disks: list[Path], folder: Path) -> None:
    with TieredStore.open(folder, dram="24MiB", paths=disks) as store:
        store.put("small", torch.ones(5))
        store.put("large", torch.zeros(20 * MIB, dtype=torch.uint8))  # both together have more
        with pytest.raises(CapacityError, match="'large'") as raised:
            store.commit()
        for disk in disks:
            assert f"{disk} has " in str(raised.value)
        store.delete("large")
    with TieredStore.open(folder, dram=MIB, paths=disks) as store:
        assert list(store) == ["small"]
