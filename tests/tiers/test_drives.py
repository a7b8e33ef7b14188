"""``NvmeTier`` over several folders, with one data file in each."""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.tier import OpenTier, TierContract
from tests.fakes import in_child
from tests.filesystems import fill, root, two_ext4
from tiered.errors import ManifestError, MisuseError, StoreLocked, TieredError
from tiered.tiers.nvme import NvmeConfig, NvmeTier
from tiered.types import Slot

MIB = 1 << 20


def take(tier: NvmeTier, nbytes: int) -> Slot:
    slot = tier.allocate(nbytes)
    assert slot is not None, tier.refusal
    return slot


class TestDrivesContract(TierContract):
    pieces = 2

    @pytest.fixture
    def open_tier(self, tmp_path: Path) -> Iterator[OpenTier]:
        opened: list[NvmeTier] = []

        def open_tier(capacity: int) -> NvmeTier:
            where = tmp_path / str(len(opened))
            paths = [where / "a", where / "b"]
            opened.append(NvmeTier.open(NvmeConfig(where / "store", capacity, growth=256 << 10, paths=paths)))
            return opened[-1]

        yield open_tier
        for tier in opened:
            tier.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "abc"]


@pytest.fixture
def config(folder: Path, paths: list[Path]) -> NvmeConfig:
    return NvmeConfig(folder, 24 * MIB, growth=MIB, paths=paths)


@pytest.fixture
def tier(config: NvmeConfig) -> Iterator[NvmeTier]:
    tier = NvmeTier.open(config)
    yield tier
    tier.close()


def commit(folder: Path) -> None:
    """As far as the tier looks."""
    (folder / "manifest.1").write_bytes(b"x")


def everything(tmp_path: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that is on the disk: inode, time of change, contents."""
    found = {}
    for path in sorted(tmp_path.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_ino, status.st_mtime_ns, data)
    return found


class TestOpening:
    def test_creates_a_file_in_each_folder_for_the_owner_alone(self, tier: NvmeTier, folder: Path, paths: list[Path]) -> None:
        assert [file.path for file in tier.files] == [str(path / f"drive.{n}") for n, path in enumerate(paths)]
        for name in (folder / "drives", *(file.path for file in tier.files)):
            assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
        for each in (folder, *paths):
            assert stat.S_IMODE(each.stat().st_mode) == 0o700
            assert len(list(each.iterdir())) == 1
        assert tier.created
        assert len({tier.uuid, *(file.uuid for file in tier.files)}) == 4

    def test_reopening_in_any_order_finds_the_same_files(self, config: NvmeConfig, folder: Path, paths: list[Path]) -> None:
        first = NvmeTier.open(config)
        slots = [take(first, 5000) for _ in range(6)]
        places = [first.locate(slot)[1:] for slot in slots]
        uuid = first.uuid
        first.close()
        commit(folder)
        for number in range(4):
            random.Random(number).shuffle(paths)
            again = NvmeTier.open(NvmeConfig(folder, paths=paths))
            assert (again.created, again.uuid, again.used) == (False, uuid, 0)
            for slot in slots:
                again.claim(slot)
            assert [again.locate(slot)[1:] for slot in slots] == places
            again.close()

    def test_a_drive_that_moved_is_found_there(self, config: NvmeConfig, folder: Path, paths: list[Path]) -> None:
        NvmeTier.open(config).close()
        commit(folder)
        moved = paths[1].rename(paths[1].parent / "moved")
        tier = NvmeTier.open(NvmeConfig(folder, paths=[moved, paths[0], paths[2]]))
        assert tier.files[1].folder == str(moved)
        tier.close()
        with pytest.raises(MisuseError, match=f"'{paths[0]}', '{moved}', '{paths[2]}'"):
            NvmeTier.open(NvmeConfig(folder))

    def test_a_missing_drive_is_named(self, config: NvmeConfig, folder: Path, paths: list[Path], tmp_path: Path) -> None:
        NvmeTier.open(config).close()
        commit(folder)
        away = paths[1].rename(tmp_path / "away")
        before = everything(tmp_path)
        with pytest.raises(ManifestError, match=rf"{paths[1]} has no data file of .*mounted\? .* last in paths=\['{paths[0]}"):
            NvmeTier.open(config)
        assert everything(tmp_path) == before
        paths[1].mkdir()  # where it is mounted
        with pytest.raises(ManifestError, match=f"{paths[1]} has no data file of"):
            NvmeTier.open(config)
        assert list(paths[1].iterdir()) == []
        (paths[1] / "drive.1").touch()
        with pytest.raises(ManifestError, match=f"{paths[1]}/drive.1 is empty"):
            NvmeTier.open(config)
        (paths[1] / "drive.1").unlink()
        paths[1].rmdir()
        away.rename(paths[1])
        NvmeTier.open(config).close()

    def test_a_foreign_drive_is_named_and_left_alone(self, folder: Path, paths: list[Path], tmp_path: Path) -> None:
        """Of another store, of a copy of it under another number, or not a drive at all."""
        one, other = (NvmeConfig(tmp_path / name, paths=[tmp_path / f"{name}-{n}" for n in range(2)]) for name in ("x", "y"))
        for config in (one, other):
            NvmeTier.open(config).close()
            commit(Path(config.path))
        mixed = [(one.paths[0], other.paths[1]), (other.paths[0], one.paths[1]), (one.paths[0], other.paths[0])]
        for chosen in mixed:
            before = everything(tmp_path)
            with pytest.raises(ManifestError, match=r"y-[01]"):
                NvmeTier.open(NvmeConfig(one.path, paths=chosen))
            assert everything(tmp_path) == before
        files = [Path(path) / f"drive.{n}" for n, path in enumerate(one.paths)]
        data = [file.read_bytes() for file in files]
        files[0].write_bytes(data[1])
        files[1].write_bytes(data[0])
        with pytest.raises(ManifestError, match=r"x-0/drive\.0 is not drive 0"):
            NvmeTier.open(one)
        files[0].write_bytes(data[0])
        with pytest.raises(ManifestError, match=r"x-1/drive\.1 is not drive 1"):
            NvmeTier.open(one)
        files[1].write_bytes(data[1])
        NvmeTier.open(one).close()
        (Path(one.paths[1]) / "notes.txt").touch()  # a neighbour's
        NvmeTier.open(one).close()
        (Path(one.paths[1]) / "drive.0").touch()
        with pytest.raises(ManifestError, match="x-1 has data files of several drives"):
            NvmeTier.open(one)

    @pytest.mark.parametrize("at", [0, 9, 13, 40, 45, 60])
    def test_a_damaged_header_is_named(self, config: NvmeConfig, paths: list[Path], at: int) -> None:
        NvmeTier.open(config).close()
        with (paths[2] / "drive.2").open("r+b") as file:
            file.seek(at)
            was = file.read(1)[0]
            file.seek(at)
            file.write(bytes([was ^ 8]))
        with pytest.raises(ManifestError, match=str(paths[2])):
            NvmeTier.open(config)

    def test_drives_of_a_store_are_no_place_for_another(self, config: NvmeConfig, paths: list[Path], tmp_path: Path) -> None:
        NvmeTier.open(config).close()
        before = everything(tmp_path)
        for wrong in ([tmp_path / "new", paths[1]], [paths[0], tmp_path / "new"]):
            with pytest.raises(MisuseError, match=r"another store|other things"):
                NvmeTier.open(NvmeConfig(tmp_path / "other", paths=wrong))
        with pytest.raises(MisuseError, match="not a tiered store"):
            NvmeTier.open(NvmeConfig(paths[0]))
        assert everything(tmp_path) == before, "and what was made is gone again"

    @pytest.mark.parametrize("count", [1, 2, 4])
    def test_another_number_of_folders(self, config: NvmeConfig, folder: Path, paths: list[Path], count: int) -> None:
        NvmeTier.open(config).close()
        chosen = [*paths, paths[0].parent / "d"][:count]
        with pytest.raises(MisuseError, match=rf"on 3 drives, not {count}: paths=\['{paths[0]}', '{paths[1]}', "):
            NvmeTier.open(NvmeConfig(folder, paths=chosen))

    def test_without_paths_it_says_which(self, config: NvmeConfig, folder: Path, paths: list[Path], tmp_path: Path) -> None:
        NvmeTier.open(config).close()
        before = everything(tmp_path)
        with pytest.raises(MisuseError, match=rf"open it with paths=\['{paths[0]}', '{paths[1]}', '{paths[2]}'\]"):
            NvmeTier.open(NvmeConfig(folder))
        assert everything(tmp_path) == before

    def test_paths_for_a_store_that_has_one_file(self, folder: Path, paths: list[Path], config: NvmeConfig) -> None:
        NvmeTier.open(NvmeConfig(folder)).close()
        with pytest.raises(MisuseError, match=f"{folder} keeps its tensors in its own folder: open it without paths="):
            NvmeTier.open(config)
        assert not any(path.exists() for path in paths)
        NvmeTier.open(NvmeConfig(folder)).close()

    def test_the_same_folder_twice(self, folder: Path, tmp_path: Path) -> None:
        for wrong in ([tmp_path / "a", tmp_path / "a"], [tmp_path / "a", tmp_path / "." / "b" / ".." / "a"], [folder]):
            with pytest.raises(MisuseError, match="named twice"):
                NvmeTier.open(NvmeConfig(folder, paths=wrong))
        assert list(tmp_path.iterdir()) == []

    def test_folders_inside_the_stores_own(self, folder: Path) -> None:
        config = NvmeConfig(folder, paths=[folder / "a", folder / "b"])
        for _ in range(2):
            NvmeTier.open(config).close()

    def test_folders_whose_names_are_no_text(self, folder: Path, tmp_path: Path) -> None:
        config = NvmeConfig(folder, paths=[tmp_path / os.fsdecode(b"\xff"), tmp_path / "new\nline"])
        for _ in range(2):
            NvmeTier.open(config).close()
        with pytest.raises(MisuseError, match=r"udcff', .*new\\nline'\]$"):
            NvmeTier.open(NvmeConfig(folder))

    def test_a_foreign_folder_is_left_alone(self, config: NvmeConfig, paths: list[Path], tmp_path: Path) -> None:
        paths[1].mkdir()
        (paths[1] / "notes.txt").write_text("mine")
        before = everything(tmp_path)
        with pytest.raises(MisuseError, match=f"{paths[1]} holds other things"):
            NvmeTier.open(config)
        assert everything(tmp_path) == before

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_symlinks_are_refused(
        self, config: NvmeConfig, folder: Path, paths: list[Path], tmp_path: Path, which: int
    ) -> None:
        (tmp_path / "real").mkdir()
        link = [paths[1], paths[1] / "drive.1", folder / "drives"][which]
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "real")
        with pytest.raises(MisuseError, match=f"{link} is a symbolic link"):
            NvmeTier.open(config)
        assert list((tmp_path / "real").iterdir()) == []

    def test_a_list_that_is_missing(self, config: NvmeConfig, folder: Path) -> None:
        NvmeTier.open(config).close()
        commit(folder)
        listed = (folder / "drives").read_bytes()
        (folder / "drives").unlink()
        with pytest.raises(ManifestError, match=f"{folder} has a manifest, but its file drives is missing"):
            NvmeTier.open(config)
        assert not (folder / "drives").exists()
        (folder / "drives").touch()
        with pytest.raises(ManifestError, match="missing or empty"):
            NvmeTier.open(config)
        (folder / "drives").write_bytes(listed)
        NvmeTier.open(config).close()

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
    @given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.integers(0, 10_000), what=st.sampled_from(["flip", "cut"]))
    def test_a_damaged_list_is_found(self, config: NvmeConfig, folder: Path, at: int, bit: int, cut: int, what: str) -> None:
        NvmeTier.open(config).close()
        whole = (folder / "drives").read_bytes()
        damaged = bytearray(whole)
        if what == "flip":
            damaged[at % len(whole)] ^= 1 << bit
        else:
            del damaged[1 + cut % (len(whole) - 1) :]
        (folder / "drives").write_bytes(damaged)
        try:
            with pytest.raises(ManifestError, match=str(folder / "drives")):
                NvmeTier.open(config)
            with pytest.raises(MisuseError, match=r"open it with paths=\[\.\.\.\]"):
                NvmeTier.open(NvmeConfig(folder))
        finally:
            (folder / "drives").write_bytes(whole)

    @pytest.mark.parametrize("left", range(8))
    def test_a_killed_creation_is_taken_up(self, config: NvmeConfig, folder: Path, paths: list[Path], left: int) -> None:
        """After any number of its steps: the list, empty; three files, empty; the list; three headers."""
        tier = NvmeTier.open(config)
        tier.close()
        names = [folder / "drives", *(path / f"drive.{n}" for n, path in enumerate(paths))]
        for number, name in reversed(list(enumerate(names))):
            if number >= left:
                name.unlink()
                name.parent.rmdir()
            elif (number == 0 and left <= 4) or left <= 4 + number:
                os.truncate(name, 0)
        again = NvmeTier.open(config)
        assert [file.index for file in again.files] == [0, 1, 2]
        take(again, MIB)
        again.close()
        NvmeTier.open(config).close()


class TestLock:
    def test_another_process_is_refused_and_the_path_named(
        self, tier: NvmeTier, config: NvmeConfig, folder: Path, paths: list[Path], tmp_path: Path
    ) -> None:
        def body() -> str:
            said = []
            for other in (config, NvmeConfig(tmp_path / "other", paths=[paths[1]])):
                try:
                    NvmeTier.open(other)
                except TieredError as error:
                    said.append(f"{type(error).__name__}: {error}")
            return "\n".join(said)

        first, second = in_child(body).splitlines()
        assert first.startswith(f"StoreLocked: {folder} is in use by ")
        assert str(paths[1]) in second
        assert not (tmp_path / "other").exists()
        take(tier, MIB)

    def test_a_drive_that_is_in_use_is_named(self, config: NvmeConfig, folder: Path, paths: list[Path]) -> None:
        """The list is not locked, since it was copied, but a file is."""
        tier = NvmeTier.open(config)
        listed = (folder / "drives").read_bytes()
        (folder / "drives").unlink()
        (folder / "drives").write_bytes(listed)
        with pytest.raises(StoreLocked, match=f"{paths[0]} is in use by "):
            NvmeTier.open(config)
        tier.close()

    def test_nothing_stays_open(self, config: NvmeConfig, paths: list[Path]) -> None:
        NvmeTier.open(config).close()
        name = paths[2] / "drive.2"
        whole = name.read_bytes()
        name.write_bytes(b"x" + whole[1:])
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(ManifestError):
                NvmeTier.open(config)
        assert sorted(os.listdir("/proc/self/fd")) == before
        name.write_bytes(whole)
        NvmeTier.open(config).close()


class TestExtents:
    def test_consecutive_ones_lie_on_different_drives(self, tier: NvmeTier) -> None:
        slots = [take(tier, 300_000) for _ in range(9)]
        assert [tier.extent(slot)[0] for slot in slots] == [0, 1, 2] * 3
        for slot in slots[3:6]:
            tier.free(slot)
        assert sorted(tier.extent(take(tier, 300_000))[0] for _ in range(3)) == [0, 1, 2]

    def test_what_lives_is_balanced_though_every_other_one_goes(self, tier: NvmeTier) -> None:
        kept = []
        for _ in range(12):
            kept.append(take(tier, 100_000))
            tier.free(take(tier, 100_000))
        assert [sum(tier.extent(slot)[0] == drive for slot in kept) for drive in range(3)] == [4, 4, 4]

    def test_a_budget_of_one_step_is_shared_too(self, folder: Path, paths: list[Path]) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, 30 * MIB, paths=paths))
        assert [tier.extent(take(tier, MIB))[0] for _ in range(30)] == [0, 1, 2] * 10
        assert tier.allocate(1) is None
        tier.close()

    def test_one_tensor_may_take_more_than_its_drives_share(self, folder: Path, paths: list[Path]) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, 30 * MIB, paths=paths))
        assert [tier.extent(take(tier, size * MIB))[0] for size in (25, 3, 2)] == [0, 1, 1]
        assert tier.allocate(1) is None
        tier.close()

    def test_a_budget_is_for_all_together(self, tier: NvmeTier) -> None:
        slots = []
        while (slot := tier.allocate(700_000)) is not None:
            slots.append(slot)
        assert tier.refusal is not None
        assert tier.refusal.startswith("the capacity of 24.0 MiB in ")
        assert tier.file_bytes <= 24 * MIB + 3 * tier.alignment
        assert tier.used == sum(slot.nbytes for slot in slots) > 22 * MIB
        for slot in slots:
            tier.free(slot)
        assert tier.used == 0

    def test_a_filesystem_that_two_folders_share_counts_once(self, folder: Path, paths: list[Path]) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, paths=paths))
        assert tier.free_on_device() == pytest.approx(tier.files[0].free_on_device(), rel=0.05)
        assert tier.capacity < 2 * tier.free_on_device()
        tier.close()
        assert tier.free_on_device() == 0

    @pytest.mark.parametrize("wrong", [(3, 4096), (1, 1 << 40), (0, 0), (-1, 4096)])
    def test_a_manifest_that_names_impossible_extents(self, tier: NvmeTier, wrong: tuple[int, int]) -> None:
        index, offset = wrong
        with pytest.raises(ManifestError):
            tier.claim(Slot((index << 48) + offset, 4096))
        with pytest.raises(ManifestError, match="beyond"):
            tier.slot(0, 1 << 48, 4096)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from(["allocate", "allocate", "free", "commit", "release"]), st.integers(0, 99)),
            max_size=60,
        )
    )
    def test_random_histories_with_generations(self, tier: NvmeTier, steps: list[tuple[str, int]]) -> None:
        live: list[Slot] = []
        kept: dict[int, list[Slot]] = {}
        for number, (step, pick) in enumerate(steps):
            if step == "allocate":
                live.append(take(tier, 1 + pick * 300))
            elif step == "free" and live:
                tier.free(live.pop(pick % len(live)))
            elif step == "commit":
                tier.retain(number, live)
                kept[number] = list(live)
            elif step == "release" and kept:
                generation = sorted(kept)[pick % len(kept)]
                tier.release(generation)
                del kept[generation]
            in_use = {slot for slots in (live, *kept.values()) for slot in slots}
            assert tier.used == sum(slot.nbytes for slot in in_use)
            for index, file in enumerate(tier.files):
                mine = sorted((tier.locate(s).offset, s.nbytes) for s in in_use if tier.extent(s)[0] == index)
                assert file.used == sum(nbytes for _, nbytes in mine)
                assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(mine))
        for slot in live:
            tier.free(slot)
        for generation in kept:
            tier.release(generation)
        assert tier.used == 0


class TestRemove:
    def test_removes_what_it_made(self, config: NvmeConfig, tmp_path: Path, paths: list[Path]) -> None:
        paths[1].mkdir()
        NvmeTier.open(config).remove()
        assert list(tmp_path.iterdir()) == [paths[1]]
        assert list(paths[1].iterdir()) == []

    def test_folders_inside_the_stores_own(self, folder: Path) -> None:
        NvmeTier.open(NvmeConfig(folder, paths=[folder / "a", folder / "b"])).remove()
        assert not folder.exists()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Two ext4 filesystems of 16 MiB."""
    with two_ext4(tmp_path, 16 * MIB, 16 * MIB) as found:
        yield found


@root
class TestFullDisks:
    def test_one_full_the_others_go_on(self, disks: list[Path], folder: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, growth=MIB, paths=disks))
        take(tier, MIB)
        fill(disks[0])
        slots = [take(tier, MIB) for _ in range(6)]
        assert sum(tier.extent(slot)[0] for slot in slots) >= 5
        while (slot := tier.allocate(MIB)) is not None:
            assert tier.extent(slot)[0] == 1
            slots.append(slot)
        assert tier.refusal is not None
        for disk in disks:
            assert f"{disk} has " in tier.refusal
        (disks[0] / "neighbour").unlink()
        assert [tier.extent(take(tier, MIB))[0] for _ in range(3)] == [0, 0, 0], "space that comes back is found"
        for file in tier.files:
            assert os.stat(file.path).st_size == file.nbytes
        tier.close()

    def test_capacity_is_that_of_both(self, disks: list[Path], folder: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, paths=disks))
        assert tier.capacity == sum(file.extents + file.free_on_device() for file in tier.files)
        assert tier.capacity > max(file.extents + file.free_on_device() for file in tier.files)
        tier.close()

    def test_no_room_for_a_header(self, disks: list[Path], folder: Path) -> None:
        with (disks[1] / "lost+found" / "neighbour").open("wb") as file:
            try:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            except OSError:
                pass
            with pytest.raises(MisuseError, match=f"{disks[1]} cannot hold a store|cannot create|cannot open {disks[1]}"):
                NvmeTier.open(NvmeConfig(folder, paths=disks))
            file.truncate(0)
        assert not folder.exists()
        assert [entry.name for disk in disks for entry in disk.iterdir()] == ["lost+found"] * 2
        NvmeTier.open(NvmeConfig(folder, paths=disks)).close()
