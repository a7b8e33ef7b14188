"""Promise 21: a commit publishes into, and deletes from, only the folder that was opened.

An old process has a store open while its folder is moved, deleted, replaced, or switched by a symbolic link above it; a new one
makes a store by the same name, before the old one commits again or after. Whatever was acknowledged is there to be opened, byte
for byte, and nothing of the other's folder is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.quick import quick
from tests.stress.children import Running, forked
from tests.stress.contents import content, holds
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tiered import CommitError, MisuseError, StoreLocked, TieredError, TieredStore, verify
from tiered.tiers.nvme import NvmeTier

PROMISE = "21 (a store is its folder)"
MIB = 1 << 20
SIZES = {f"t{number}": 50_000 * number + 1 for number in range(4)}


@dataclass
class Place:
    """A store's folder, and those of its drives if it has several."""

    folder: Path
    drives: list[Path] = field(default_factory=list)

    def open(self, access: str = "write") -> TieredStore:
        return TieredStore.open(self.folder, dram=MIB, backend="posix", paths=self.drives or None, access=access)

    def names(self) -> dict[str, tuple[int, int]]:
        """All that is there."""
        every = [path for place in (self.folder, *self.drives) for path in place.rglob("*")]
        return {str(path): (path.lstat().st_ino, path.lstat().st_nlink) for path in every}


def is_whole(place: Place, who: str, version: int) -> None:
    """``version`` is the newest commit, whole, and its maker's."""
    found = verify(place.folder, paths=place.drives or None, backend="posix")
    assert found.sound, found.damages
    with place.open("read") as store:
        assert store.meta == {"who": who, "version": version}
        for key, nbytes in SIZES.items():
            holds(store, key, version, nbytes)


class Process:
    """One with a store open, which commits when it is told to. ``version``: its last acknowledged commit."""

    def __init__(self, who: str, place: Place, running: Running, orders: int) -> None:
        self.who, self.place, self.version = who, place, 0
        self._running, self._orders, self._tried = running, orders, 0

    def commit(self) -> str:
        """What came of it: "committed", or the error."""
        os.write(self._orders, b"c")
        self._tried += 1
        said = self._running.hear()
        if said == "committed":
            self.version = self._tried
        return said

    def close(self) -> None:
        os.write(self._orders, b"q")
        assert self._running.wait_end() == 0, self._running.said


@contextlib.contextmanager
def process(who: str, place: Place) -> Iterator[Process]:
    def body(child: Child) -> None:
        try:
            store = place.open()
        except TieredError as error:
            child.say(f"{type(error).__name__}: {error}")
            return
        child.say("opened")
        offset = 0 if who == "old" else 100  # so no version is both's
        version = offset
        while os.read(orders, 1) == b"c":
            version += 1
            for key, nbytes in SIZES.items():
                store.put(key, content(key, version, nbytes))
            try:
                store.commit({"who": who, "version": version})
                child.say("committed")
            except TieredError as error:
                child.say(f"{type(error).__name__}: {error}")
        store.close()

    orders, ours = os.pipe()
    try:
        with forked(body) as running:
            found = Process(who, place, running, ours)
            said = running.hear()
            found._tried = 0 if who == "old" else 100
            if said != "opened":
                raise CouldNotOpen(said)
            yield found
    finally:
        os.close(orders)
        os.close(ours)


class CouldNotOpen(Exception):
    """Says why."""


# What becomes of a folder: each is given where the store was opened, and says where it is afterwards, if anywhere


def moved(at: Place) -> Place | None:
    at.folder.rename(at.folder.with_name("old"))
    return Place(at.folder.with_name("old"))


def moved_and_an_empty_one_made(at: Place) -> Place | None:
    found = moved(at)
    at.folder.mkdir(mode=0o700)
    return found


def deleted(at: Place) -> Place | None:
    shutil.rmtree(at.folder)
    return None


def deleted_and_an_empty_one_made(at: Place) -> Place | None:
    shutil.rmtree(at.folder)
    at.folder.mkdir(mode=0o700)
    return None


def parent_moved(at: Place) -> Place | None:
    parent = at.folder.parent
    parent.rename(parent.with_name("old parent"))
    parent.mkdir()
    return Place(parent.with_name("old parent") / at.folder.name)


def switched(at: Place) -> Place | None:
    """The symbolic link above it."""
    link = at.folder.parent
    real = link.resolve()
    other = real.with_name("other")
    other.mkdir()
    link.with_name("link.new").symlink_to(other)
    link.with_name("link.new").rename(link)
    return Place(real / at.folder.name)


def replaced_by_a_link(at: Place) -> Place | None:
    """The folder by a symbolic link to another one."""
    found = moved(at)
    at.folder.with_name("elsewhere").mkdir()
    at.folder.symlink_to(at.folder.with_name("elsewhere"))
    return found


def replaced_by_a_file(at: Place) -> Place | None:
    found = moved(at)
    at.folder.write_text("not a folder")
    return found


def replaced_by_a_copy(at: Place) -> Place | None:
    found = moved(at)
    shutil.copytree(at.folder.with_name("old"), at.folder)
    return found


def data_file_replaced(at: Place) -> Place | None:
    """By a copy: what it is a copy of is nowhere by name."""
    (data,) = [at.folder / "data.0"]
    shutil.copyfile(data, data.with_name("copy"))
    data.with_name("copy").replace(data)
    return at


def data_file_moved(at: Place) -> Place | None:
    (at.folder / "data.0").rename(at.folder / "elsewhere.0")
    return None


def data_file_deleted(at: Place) -> Place | None:
    (at.folder / "data.0").unlink()
    return None


def all_moved(at: Place) -> Place | None:
    for folder in (at.folder, *at.drives):
        folder.rename(folder.with_name(f"old {folder.name}"))
    return Place(at.folder.with_name("old state"), [drive.with_name(f"old {drive.name}") for drive in at.drives])


def drive_moved(at: Place) -> Place | None:
    at.drives[1].rename(at.drives[1].with_name("old"))
    return Place(at.folder, [at.drives[0], at.drives[1].with_name("old")])


def drive_moved_and_an_empty_one_made(at: Place) -> Place | None:
    found = drive_moved(at)
    at.drives[1].mkdir(mode=0o700)
    return found


def drive_deleted(at: Place) -> Place | None:
    shutil.rmtree(at.drives[1])
    return None


def drive_replaced_by_a_copy(at: Place) -> Place | None:
    found = drive_moved(at)
    shutil.copytree(at.drives[1].with_name("old"), at.drives[1])
    return found


def drive_switched(at: Place) -> Place | None:
    link = at.drives[1].parent
    real = link.resolve()
    switched(Place(at.drives[1]))
    return Place(at.folder, [at.drives[0], real / at.drives[1].name])


def drives_file_replaced(at: Place) -> Place | None:
    listed = at.folder / "drives"
    shutil.copyfile(listed, listed.with_name("copy"))
    listed.with_name("copy").replace(listed)
    return at


def own_folder_moved(at: Place) -> Place | None:
    """The one with the manifests; the drives stay."""
    at.folder.rename(at.folder.with_name("old"))
    return Place(at.folder.with_name("old"), at.drives)


Layout = Callable[[Place], Place | None]
ONE: list[Layout] = [
    *(moved, moved_and_an_empty_one_made, deleted, deleted_and_an_empty_one_made, parent_moved, switched, replaced_by_a_link),
    *(replaced_by_a_file, replaced_by_a_copy, data_file_replaced, data_file_moved, data_file_deleted),
]
SEVERAL: list[Layout] = [
    *(all_moved, drive_moved, drive_moved_and_an_empty_one_made, drive_deleted, drive_replaced_by_a_copy, drive_switched),
    *(drives_file_replaced, own_folder_moved),
]
NO_OTHER = [
    *(replaced_by_a_link, replaced_by_a_file, data_file_moved, data_file_deleted, drive_moved, drive_deleted, drive_switched),
    *(drive_moved_and_an_empty_one_made, drive_replaced_by_a_copy, drives_file_replaced, own_folder_moved),
]
"""Where nobody else can open a store by the name: what is there is none, or the old process has a part of it."""


def made(root: Path, several: bool) -> Place:
    """Names for a store, each below a symbolic link."""
    (root / "real").mkdir(parents=True)
    (root / "link").symlink_to(root / "real")
    if not several:
        return Place(root / "link" / "state")
    for name in ("a", "b"):
        (root / f"real {name}").mkdir()
        (root / name).symlink_to(root / f"real {name}")
    return Place(root / "link" / "state", [root / "a" / "drive", root / "b" / "drive"])


@counts(1, 10)
@pytest.mark.parametrize(
    ("layout", "first"),
    quick(
        [(layout, first) for layout in (*ONE, *SEVERAL) for first in ("old", "new")],
        [(layout, ("old", "new")[number % 2]) for number, layout in enumerate((*ONE, *SEVERAL))],
    ),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_who_commits_first(tmp_path: Path, layout: Layout, first: str, count: int, tally: Tally) -> None:
    for trial in range(count):
        at = made(tmp_path / f"{trial}", layout in SEVERAL)
        with process("old", at) as old:
            for _ in range(1 + trial % 4):  # also one that has dropped generations already
                assert old.commit() == "committed"
            acknowledged = old.version
            there = layout(at)
            refused = 0

            def refuse(old: Process = old) -> int:
                said = old.commit()
                assert said.startswith(f"CommitError: generation {acknowledged} is the last commit: "), said  # noqa: B023
                return 1

            if first == "old":
                refused += refuse() + refuse() + refuse()
            new_version = 0
            try:
                with process("new", Place(at.folder, at.drives)) as new:
                    for _ in range(3):
                        assert new.commit() == "committed"
                        before = Place(at.folder, at.drives).names()
                        refused += refuse()
                        assert Place(at.folder, at.drives).names() == before, "the old process was in the new one's folder"
                    assert new.commit() == "committed"
                    new_version = new.version
                    new.close()
            except CouldNotOpen:
                assert layout in NO_OTHER
                refused += refuse()
            else:
                assert layout not in NO_OTHER
            old.close()
        tally.count(layout.__name__, refused)
        if new_version:
            is_whole(at, "new", new_version)
        if there is not None and not (new_version and there.folder.samefile(at.folder) and there.drives == at.drives):
            is_whole(there, "old", acknowledged)
            with there.open() as again:  # and goes on
                again.put("t0", content("t0", 7, 10))
            with there.open("read") as again:
                holds(again, "t0", 7, 10)
        shutil.rmtree(tmp_path / f"{trial}")


@counts(2, 10)
@pytest.mark.parametrize("first", ["left", "right"])
def test_two_stores_that_are_exchanged(tmp_path: Path, first: str, count: int, tally: Tally) -> None:
    """Both are open; each name leads to the other's folder by then."""
    for trial in range(count):
        left, right = Place(tmp_path / f"{trial} left"), Place(tmp_path / f"{trial} right")
        with process("old", left) as old, process("new", right) as new:
            for _ in range(3):
                assert old.commit() == new.commit() == "committed"
            versions = old.version, new.version
            left.folder.rename(tmp_path / "between")
            right.folder.rename(left.folder)
            (tmp_path / "between").rename(right.folder)
            before = left.names(), right.names()
            for one in [old, new] if first == "left" else [new, old]:
                said = one.commit()
                assert said.startswith("CommitError"), said
                assert str(left.folder) in said
                assert str(right.folder) in said
                assert (left.names(), right.names()) == before
                tally.count("exchanged", 1)
            old.close()
            new.close()
        is_whole(right, "old", versions[0])
        is_whole(left, "new", versions[1])


@counts(1, 10)
@pytest.mark.parametrize("layout", [moved, switched, parent_moved, own_folder_moved, drive_moved])
def test_the_mend_that_the_error_names(tmp_path: Path, layout: Layout, count: int, tally: Tally) -> None:
    """What is moved back commits again; nothing that was put meanwhile is lost."""
    for trial in range(count):
        at = made(tmp_path / f"{trial}", layout in SEVERAL)
        with process("old", at) as old:
            assert old.commit() == "committed"
            layout(at)
            said = old.commit()
            tally.count(layout.__name__, said.startswith("CommitError"))
            (command,) = re.findall(r"\((mv -T .*?)\)", said)
            if layout is parent_moved:
                at.folder.parent.mkdir(exist_ok=True)
            subprocess.run(shlex.split(command), check=True)
            assert old.commit() == "committed"
            version = old.version
            old.close()
        is_whole(at, "old", version)


# Hard links


def linked(folder: Path, to: Path) -> None:
    subprocess.run(["cp", "-al", folder, to], check=True)


@counts(2, 10)
@pytest.mark.parametrize("several", [False, True], ids=["one drive", "several"])
@pytest.mark.parametrize("which", ["the original", "the snapshot"])
def test_a_snapshot_of_hard_links_is_not_opened_to_be_written(
    tmp_path: Path, which: str, several: bool, count: int, tally: Tally
) -> None:
    for trial in range(count):
        at = made(tmp_path / f"{trial}", several)
        with process("old", at) as old:
            for _ in range(1 + trial % 3):
                assert old.commit() == "committed"
            version = old.version
            old.close()
        snapshot = Place(tmp_path / f"{trial} snapshot", [tmp_path / f"{trial} {drive.parent.name}" for drive in at.drives])
        for source, target in zip((at.folder, *at.drives), (snapshot.folder, *snapshot.drives), strict=True):
            linked(source, target)
        chosen = at if which == "the original" else snapshot
        before = at.names(), snapshot.names()
        with pytest.raises(MisuseError, match=r"has 2 names: others are hard links") as refused:
            chosen.open()
        tally.count(which, 1)
        assert (at.names(), snapshot.names()) == before
        for place in (at, snapshot):
            is_whole(place, "old", version)  # to read them goes on
        (command,) = re.findall(r"\((cp -a .*?)\)", str(refused.value))
        subprocess.run(shlex.split(command), check=True)
        copy = Place(chosen.folder.with_name(f"{chosen.folder.name}.copy"), [])
        for drive in chosen.drives:
            copy.drives.append(drive.with_name(f"{drive.name}.copy"))
            subprocess.run(["cp", "-a", "--reflink=auto", drive, copy.drives[-1]], check=True)
        with process("new", copy) as new:
            for _ in range(4):
                assert new.commit() == "committed"
            new.close()
        for place in (at, snapshot):
            is_whole(place, "old", version)
        is_whole(copy, "new", 104)
        for folder in (snapshot.folder, *snapshot.drives):
            shutil.rmtree(folder)
        with at.open() as store:  # the only name again
            holds(store, "t1", version, SIZES["t1"])


@counts(2, 10)
@pytest.mark.parametrize("what", ["state", "the whole of several drives", "one of several drives", "the list of drives"])
def test_a_snapshot_of_hard_links_under_an_open_store(tmp_path: Path, what: str, count: int, tally: Tally) -> None:
    """What the snapshot holds stays as it was; when it is gone, commits go on."""
    for trial in range(count):
        at = made(tmp_path / f"{trial}", what != "state")
        snapshot = Place(tmp_path / f"{trial} snapshot", list(at.drives))
        with process("old", at) as old:
            for _ in range(1 + trial % 3):
                assert old.commit() == "committed"
            version = old.version
            if what != "one of several drives":
                linked(at.folder, snapshot.folder)
            if what == "the whole of several drives":
                snapshot.drives = [tmp_path / f"{trial} {drive.parent.name}" for drive in at.drives]
                for source, target in zip(at.drives, snapshot.drives, strict=True):
                    linked(source, target)
            if what == "one of several drives":
                linked(at.drives[1], snapshot.folder)
            for _ in range(4):
                said = old.commit()
                assert said.startswith(f"CommitError: generation {version} is the last commit: "), said
                assert "has 2 names by now" in said
                assert "cp -a --reflink=auto" in said
                tally.count(what, 1)
            if what != "one of several drives":
                with pytest.raises((StoreLocked, MisuseError)):
                    snapshot.open()
            old.close()
        for place in [at] if what == "one of several drives" else [at, snapshot]:
            is_whole(place, "old", version)
        shutil.rmtree(snapshot.folder)
        for drive in snapshot.drives:
            if drive not in at.drives:
                shutil.rmtree(drive)
        with process("new", at) as new:
            assert new.commit() == new.commit() == new.commit() == "committed"
            linked(at.folder / ("data.0" if what == "state" else "drives"), tmp_path / f"{trial} link")
            assert "has 2 names by now" in new.commit()
            (tmp_path / f"{trial} link").unlink()
            assert new.commit() == "committed"
            version = new.version
            new.close()
        is_whole(at, "new", version)


# Between the steps of one commit, and other ways into the folder


@counts(1, 10)
@pytest.mark.parametrize("layout", [moved, switched, parent_moved, deleted, own_folder_moved, all_moved])
@pytest.mark.parametrize("look", [1, 2, 3])
def test_between_the_steps_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: int, layout: Layout, count: int, tally: Tally
) -> None:
    """The name goes to another store with the same generations, right after each look at it. What comes after the last look
    before the manifest has its name is done in the folder that was opened, and nothing is removed from the other."""
    looks = [0]
    strayed = NvmeTier.strayed
    for trial in range(count):
        at = made(tmp_path / f"{trial}", layout in SEVERAL)
        other = Place(at.folder, [tmp_path / f"{trial} {drive.parent.name}" for drive in at.drives])
        with at.open() as store, monkeypatch.context() as patch:
            for version in (1, 2):
                store.put("t1", content("t1", version, SIZES["t1"]))
                store.commit({"who": "old", "version": version})
            there: list[Place | None] = [at]
            before = [other.names()]

            def looked(tier: NvmeTier, at: Place = at, other: Place = other, store: TieredStore = store) -> str | None:
                why = strayed(tier)
                looks[0] += tier is store._parts.nvme
                if looks[0] == look and tier is store._parts.nvme:
                    there[0] = layout(at)  # noqa: B023
                    with other.open() as new:
                        for version in (1, 2, 3):
                            new.put("t1", content("other", version, SIZES["t1"]))
                            new.commit({"who": "new", "version": version})
                    before[0] = other.names()  # noqa: B023
                return why

            patch.setattr(NvmeTier, "strayed", looked)
            looks[0] = 0
            store.put("t1", content("t1", 3, SIZES["t1"]))
            if look == 1 or (look == 2 and layout is deleted):
                with pytest.raises(CommitError, match="errno 2" if layout is deleted else "generation 2 is the last commit"):
                    store.commit({"who": "old", "version": 3})
            else:
                assert store.commit({"who": "old", "version": 3}) == 3
            tally.count(layout.__name__, looks[0] >= look)
            assert other.names() == before[0], "something was done in the other folder"
            if layout is not deleted:
                store.rollback(2)
                holds(store, "t1", 2, SIZES["t1"])
            with pytest.raises(CommitError):
                store.commit({"who": "old", "version": 4})
            assert other.names() == before[0]
            store.close()
        with other.open("read") as store:
            assert (store.generation, store.meta) == (3, {"who": "new", "version": 3})
            assert store.get("t1").equal(content("other", 3, SIZES["t1"]))
        found = there[0]
        if found is not None:
            with found.open() as store:
                version = 2 if look == 1 else 3
                assert (store.generation, store.meta) == (version, {"who": "old", "version": version})
                holds(store, "t1", version, SIZES["t1"])


@counts(1, 10)
@pytest.mark.parametrize("layout", [moved, switched, moved_and_an_empty_one_made, all_moved])
def test_a_scratch_store_removes_what_is_its_own(tmp_path: Path, layout: Layout, count: int, tally: Tally) -> None:
    """Closing it deletes its files, wherever they are, and nothing that took their names."""
    for trial in range(count):
        at = made(tmp_path / f"{trial}", layout in SEVERAL)
        scratch = TieredStore.open(at.folder, dram=MIB, paths=at.drives or None, durability="none")
        scratch.put("t0", content("t0", 1, 10))
        there = layout(at)
        assert there is not None
        with at.open() as store:
            store.put("t1", content("t1", 1, SIZES["t1"]))
        before = at.names()
        scratch.close()
        tally.count(layout.__name__, 1)
        assert at.names() == before
        assert there.names() == {}
        with at.open() as store:
            holds(store, "t1", 1, SIZES["t1"])
