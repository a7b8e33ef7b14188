from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import select
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.tier import OpenTier, TierContract
from tests.fakes import in_child
from tests.filesystems import mounted, root, small_ext4
from tiered.errors import CapacityError, ManifestError, MisuseError, StoreLocked
from tiered.format.data_file import DataFile
from tiered.tiers.nvme import NvmeConfig, NvmeTier
from tiered.types import Slot

MIB = 1 << 20


def take(tier: NvmeTier, nbytes: int) -> Slot:
    slot = tier.allocate(nbytes)
    assert slot is not None, tier.refusal
    return slot


class TestNvmeContract(TierContract):
    @pytest.fixture
    def open_tier(self, tmp_path: Path) -> Iterator[OpenTier]:
        opened: list[NvmeTier] = []

        def open_tier(capacity: int) -> NvmeTier:
            opened.append(NvmeTier.open(NvmeConfig(tmp_path / str(len(opened)), capacity, growth=256 << 10)))
            return opened[-1]

        yield open_tier
        for tier in opened:
            tier.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def tier(folder: Path) -> Iterator[NvmeTier]:
    tier = NvmeTier.open(NvmeConfig(folder, 8 * MIB, growth=MIB))
    yield tier
    tier.close()


class TestOpening:
    def test_creates_folder_and_file_for_the_owner_alone(self, tmp_path: Path) -> None:
        folder = tmp_path / "some" / "where"
        tier = NvmeTier.open(NvmeConfig(folder))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "data.0").stat().st_mode) == 0o600
        assert (tier.folder, tier.files[0].path) == (str(folder), str(folder / "data.0"))
        assert tier.created
        assert len(tier.uuid) == 16
        tier.close()

    def test_reopening_finds_the_same_store(self, folder: Path) -> None:
        first = NvmeTier.open(NvmeConfig(folder, MIB))
        uuid = first.uuid
        slot = take(first, 5000)
        os.pwrite(first.files[0].fd, mmap.mmap(-1, 8192), slot.offset)
        first.close()
        first.close()
        again = NvmeTier.open(NvmeConfig(folder, MIB))
        assert (again.created, again.uuid, again.used) == (False, uuid, 0)
        again.claim(slot)
        assert again.used == 8192
        assert take(again, 1).offset != slot.offset
        again.close()

    def test_two_stores_differ(self, tmp_path: Path) -> None:
        one, other = (NvmeTier.open(NvmeConfig(tmp_path / name)) for name in "ab")
        assert one.uuid != other.uuid
        one.close()
        other.close()

    def test_an_empty_folder_will_do_and_keeps_its_mode(self, folder: Path) -> None:
        folder.mkdir(mode=0o755)
        (folder / "lost+found").mkdir()
        NvmeTier.open(NvmeConfig(folder)).close()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755

    @pytest.mark.parametrize("names", [("notes.txt",), ("data.0", "notes.txt"), ("data.1",)])
    def test_a_foreign_folder_is_left_alone(self, folder: Path, names: tuple[str, ...]) -> None:
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"")
        before = {entry.name: entry.stat().st_mtime_ns for entry in folder.iterdir()}
        with pytest.raises(MisuseError, match="is not a tiered store; name an empty or new folder"):
            NvmeTier.open(NvmeConfig(folder))
        assert {entry.name: entry.stat().st_mtime_ns for entry in folder.iterdir()} == before

    def test_a_foreign_data_file_is_left_alone(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "data.0").write_bytes(b"a,b\n1,2\n")
        with pytest.raises(ManifestError, match="damaged, or another file"):
            NvmeTier.open(NvmeConfig(folder))
        assert (folder / "data.0").read_bytes() == b"a,b\n1,2\n"

    def test_a_creation_that_was_killed_is_taken_up(self, folder: Path) -> None:
        folder.mkdir()
        for left in (b"", bytes(4096)):
            (folder / "data.0").write_bytes(left)
            tier = NvmeTier.open(NvmeConfig(folder))
            assert tier.created
            tier.close()

    def test_a_manifest_without_its_data_file(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "manifest.7").write_bytes(b"x")
        with pytest.raises(ManifestError, match="missing or empty"):
            NvmeTier.open(NvmeConfig(folder))
        (folder / "data.0").write_bytes(b"")
        with pytest.raises(ManifestError, match="missing or empty"):
            NvmeTier.open(NvmeConfig(folder))
        assert (folder / "data.0").stat().st_size == 0

    @pytest.mark.parametrize("slash", ["", "/"])
    def test_a_symlink_to_a_folder_is_refused(self, tmp_path: Path, slash: str) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(MisuseError, match="symbolic link"):
            NvmeTier.open(NvmeConfig(f"{tmp_path}/link{slash}"))
        assert list((tmp_path / "real").iterdir()) == []

    def test_a_symlink_for_the_data_file_is_refused(self, folder: Path, tmp_path: Path) -> None:
        folder.mkdir()
        (tmp_path / "precious").write_bytes(b"")
        (folder / "data.0").symlink_to(tmp_path / "precious")
        with pytest.raises(MisuseError, match="symbolic link"):
            NvmeTier.open(NvmeConfig(folder))
        assert (tmp_path / "precious").read_bytes() == b""

    def test_not_a_regular_file(self, folder: Path) -> None:
        folder.mkdir()
        os.mkfifo(folder / "data.0")
        with pytest.raises(MisuseError, match="regular file"):
            NvmeTier.open(NvmeConfig(folder))

    def test_a_file_in_place_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x")
        with pytest.raises(MisuseError, match="not a folder"):
            NvmeTier.open(NvmeConfig(tmp_path / "file"))
        with pytest.raises(MisuseError, match="a part of the path is a file"):
            NvmeTier.open(NvmeConfig(tmp_path / "file" / "below"))

    def test_not_writable(self, tmp_path: Path) -> None:
        """As another user, since root may write anywhere."""
        if os.geteuid() != 0:
            pytest.skip("becoming another user needs root")
        shut = tmp_path / "shut"
        shut.mkdir(mode=0o755)
        os.chmod(tmp_path, 0o755)
        for parent in tmp_path.parents:
            if parent.name.startswith("pytest-"):
                os.chmod(parent, 0o755)

        def body() -> str:
            os.setresuid(65534, 65534, 65534)
            for path in (shut, shut / "new"):
                with pytest.raises(MisuseError, match="Permission denied; user 65534 has no permission"):
                    NvmeTier.open(NvmeConfig(path))
            return "refused"

        assert in_child(body) == "refused"
        assert list(shut.iterdir()) == []

    @pytest.mark.parametrize("capacity", [4095, 0, -1])
    def test_a_capacity_below_one_extent(self, folder: Path, capacity: int) -> None:
        with pytest.raises(CapacityError, match="minimum is 4096"):
            NvmeTier.open(NvmeConfig(folder, capacity))
        assert not folder.exists()

    def test_a_new_store_that_could_not_have_its_capacity_is_refused_and_leaves_nothing(self, folder: Path) -> None:
        found = os.statvfs(folder.parent)
        more = found.f_bavail * found.f_frsize + (1 << 40)
        with pytest.raises(CapacityError, match="has free: give nvme= less, make room, or name another folder") as refused:
            NvmeTier.open(NvmeConfig(folder, more))
        assert str(folder) in str(refused.value)
        assert not folder.exists()

    def test_a_store_that_is_there_opens_on_a_disk_that_others_filled(self, folder: Path) -> None:
        NvmeTier.open(NvmeConfig(folder, MIB)).close()
        found = os.statvfs(folder)
        tier = NvmeTier.open(NvmeConfig(folder, found.f_bavail * found.f_frsize + (1 << 40)))
        assert tier.capacity > found.f_bavail * found.f_frsize
        tier.close()

    @pytest.mark.parametrize("several", [False, True])
    @pytest.mark.parametrize("created", [False, True])
    def test_an_opening_that_is_interrupted_leaves_nothing_open(
        self, folder: Path, created: bool, several: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = NvmeConfig(folder, MIB, paths=[folder.parent / "a", folder.parent / "b"] if several else ())
        if not created:
            NvmeTier.open(config).close()
        before, descriptors = set(folder.parent.rglob("*")), len(os.listdir("/proc/self/fd"))

        def interrupted(self: DataFile) -> int:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(DataFile, "free_on_device", interrupted)
            with pytest.raises(KeyboardInterrupt):
                NvmeTier.open(config)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert set(folder.parent.rglob("*")) == before
        NvmeTier.open(config).close()

    def test_a_filesystem_that_does_not_say_what_it_has_is_written_to(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(fd: int) -> os.statvfs_result:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fstatvfs", failing)
        tier = NvmeTier.open(NvmeConfig(folder))
        take(tier, MIB)
        assert tier.reserve(MIB)
        tier.close()

    def test_a_larger_file_than_the_capacity_stays_usable(self, folder: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, 4 * MIB, growth=MIB))
        slots = [take(tier, MIB) for _ in range(4)]
        tier.close()
        tier = NvmeTier.open(NvmeConfig(folder, MIB))
        for slot in slots:
            tier.claim(slot)
        assert tier.capacity == tier.used == 4 * MIB
        tier.close()


class TestHeader:
    @pytest.fixture
    def data(self, tier: NvmeTier, folder: Path) -> Path:
        take(tier, MIB)
        tier.close()
        return folder / "data.0"

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(at=st.one_of(st.integers(0, 60), st.integers(0, 4095)), bit=st.integers(0, 7))
    def test_any_flipped_bit_is_found(self, data: Path, at: int, bit: int) -> None:
        with data.open("r+b") as file:
            whole = file.read(4096)
            try:
                file.seek(at)
                file.write(bytes([whole[at] ^ 1 << bit]))
                file.flush()
                with pytest.raises(ManifestError, match=str(data)):
                    NvmeTier.open(NvmeConfig(data.parent))
            finally:
                file.seek(at)
                file.write(whole[at : at + 1])
        NvmeTier.open(NvmeConfig(data.parent)).close()

    @pytest.mark.parametrize("left", [1, 40, 59, 4095])
    def test_truncated(self, data: Path, left: int) -> None:
        os.truncate(data, left)
        with pytest.raises(ManifestError):
            NvmeTier.open(NvmeConfig(data.parent))
        assert data.stat().st_size == left

    def test_another_version_is_named(self, data: Path) -> None:
        with data.open("r+b") as file:
            file.seek(8)
            file.write(b"\7")
        with pytest.raises(ManifestError, match="format version 7"):
            NvmeTier.open(NvmeConfig(data.parent))


class TestLock:
    def test_a_second_process_is_refused_and_the_holder_named(self, folder: Path) -> None:
        NvmeTier.open(NvmeConfig(folder)).close()
        ready, opened = os.pipe()
        holder = os.fork()
        if holder == 0:
            try:
                tier = NvmeTier.open(NvmeConfig(folder))
                os.write(opened, b"x")
                signal.pause()
                tier.close()
            finally:
                os._exit(1)
        os.close(opened)
        try:
            assert os.read(ready, 1) == b"x"
            before = (folder / "data.0").read_bytes()
            with pytest.raises(StoreLocked, match=str(folder)) as caught:
                NvmeTier.open(NvmeConfig(folder))
            if os.path.exists("/proc/locks"):
                assert f"process {holder}" in str(caught.value)
            assert (folder / "data.0").read_bytes() == before
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
            os.close(ready)
        NvmeTier.open(NvmeConfig(folder)).close()

    def test_a_forked_child_that_holds_it_alone_is_named(self, folder: Path) -> None:
        """Who took the lock was killed; its child has the descriptor still."""
        if not os.path.exists("/proc/locks"):
            pytest.skip("needs /proc/locks")
        NvmeTier.open(NvmeConfig(folder)).close()
        ready, opened = os.pipe()
        owner = os.fork()
        if owner == 0:
            NvmeTier.open(NvmeConfig(folder))
            child = os.fork()
            if child:
                os.write(opened, child.to_bytes(4, "little"))
            signal.pause()
            os._exit(1)
        child = int.from_bytes(os.read(ready, 4), "little")
        try:
            with pytest.raises(StoreLocked, match=f"in use by process {owner};"):
                NvmeTier.open(NvmeConfig(folder))
            os.kill(owner, signal.SIGKILL)
            os.waitpid(owner, 0)
            says = f"in use by process {child}, which was forked from process {owner}, which opened it and has ended;"
            with pytest.raises(StoreLocked, match=says):
                NvmeTier.open(NvmeConfig(folder))
            gone = os.pidfd_open(child)
        finally:
            os.kill(child, signal.SIGKILL)
            os.close(ready)
            os.close(opened)
        assert select.select([gone], [], [], 60)[0]
        os.close(gone)
        NvmeTier.open(NvmeConfig(folder)).close()

    def test_the_same_process_is_refused_too(self, tier: NvmeTier, folder: Path) -> None:
        with pytest.raises(StoreLocked):
            NvmeTier.open(NvmeConfig(folder))
        take(tier, 1)

    def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last owner, a scratch store, ends between our open and our lock."""
        flock = fcntl.flock
        removed: list[int] = []

        def flock_after_removal(fd: int, operation: int) -> None:
            if not removed:
                removed.append(os.fstat(fd).st_ino)
                (folder / "data.0").unlink()
            flock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", flock_after_removal)
        tier = NvmeTier.open(NvmeConfig(folder))
        assert os.path.samestat(os.fstat(tier.files[0].fd), os.stat(tier.files[0].path))
        tier.close()

    def test_a_forked_child_does_not_keep_the_lock_after_close(self, tier: NvmeTier, folder: Path) -> None:
        held, release = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(held, 1)
            os._exit(0)
        try:
            tier.close()
            NvmeTier.open(NvmeConfig(folder)).close()
        finally:
            os.write(release, b"x")
            os.waitpid(child, 0)
            os.close(held)
            os.close(release)

    def test_a_forked_child_that_closes_does_not_release_it(self, tier: NvmeTier, folder: Path) -> None:
        child = os.fork()
        if child == 0:
            tier.close()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(StoreLocked):
            NvmeTier.open(NvmeConfig(folder))


class TestExtents:
    def test_aligned_and_behind_the_header(self, tier: NvmeTier) -> None:
        assert tier.alignment >= 4096
        for nbytes in (1, 4096, 5000):
            slot = take(tier, nbytes)
            assert slot.offset % tier.alignment == slot.nbytes % tier.alignment == 0
            assert slot.offset >= tier.alignment

    def test_the_file_grows_in_steps_and_never_beyond_capacity(self, tier: NvmeTier, folder: Path) -> None:
        sizes = []
        while tier.allocate(700_000) is not None:
            sizes.append((folder / "data.0").stat().st_size)
            assert sizes[-1] == tier.file_bytes
        assert sizes[-1] <= tier.capacity + tier.alignment == 8 * MIB + tier.alignment
        assert len(set(sizes)) < len(sizes)
        assert tier.refusal is not None
        assert "capacity of 8.0 MiB" in tier.refusal
        assert str(folder) in tier.refusal
        take(tier, 4096)
        assert tier.refusal is None

    def test_growing_uses_what_is_free_at_the_end(self, tier: NvmeTier) -> None:
        first = take(tier, MIB // 2)
        second = take(tier, 2 * MIB)
        assert second.offset == first.offset + first.nbytes

    def test_extents_that_were_written_before_come_first(self, tier: NvmeTier) -> None:
        first = take(tier, 8192)
        take(tier, 8192)
        tier.free(first)
        assert take(tier, 8192) == first

    def test_what_is_reserved_is_there_beside_what_is_used(self, tier: NvmeTier) -> None:
        limit, before = tier.capacity, tier.file_bytes
        first, second = take(tier, 3 * 4096), take(tier, 4096)
        assert tier.reserve(limit - 4 * 4096)
        assert tier.file_bytes > before
        assert not tier.reserve(limit - 3 * 4096)
        assert f"{limit - 4 * 4096:,} bytes of it are left" in str(tier.refusal)
        tier.retain(1, [first])
        tier.free(first)
        tier.free(second)
        assert tier.reserve(limit - 3 * 4096)
        assert not tier.reserve(limit), "what a generation needs is not free"
        tier.release(1)
        assert tier.reserve(limit)
        assert tier.reserve(-4096)

    def test_without_a_capacity_the_device_is_the_limit(self, tmp_path: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(tmp_path / "s"))
        assert MIB < tier.free_on_device() <= tier.capacity
        tier.close()
        assert tier.free_on_device() == 0

    def test_sync(self, tier: NvmeTier) -> None:
        tier.sync()
        tier.close()
        with pytest.raises(AssertionError):
            tier.sync()

    def test_direct_io_is_aligned(self, tier: NvmeTier) -> None:
        slot = take(tier, 4096)
        if not tier.direct:
            pytest.skip("no direct I/O on this filesystem")
        with pytest.raises(OSError, match="Invalid argument") as caught:
            os.pwrite(tier.files[0].fd, b"x", slot.offset + 1)
        assert caught.value.errno == errno.EINVAL


class TestGenerations:
    def test_a_kept_generation_keeps_its_extents(self, tier: NvmeTier) -> None:
        shared, dropped = take(tier, 4096), take(tier, 4096)
        tier.retain(1, [shared, dropped])
        tier.free(dropped)
        assert tier.used == 8192
        new = take(tier, 4096)
        assert new not in (shared, dropped)
        tier.retain(2, [shared, new])
        assert tier.generations == (1, 2)
        tier.release(1)
        assert tier.used == 8192
        assert take(tier, 4096) == dropped
        tier.free(shared)
        tier.release(2)
        assert take(tier, 4096) == shared

    def test_the_last_of_several_generations_frees(self, tier: NvmeTier) -> None:
        slot = take(tier, 4096)
        for generation in (1, 2, 3):
            tier.retain(generation, [slot])
        tier.free(slot)
        for generation in (2, 1):
            tier.release(generation)
            assert tier.used == 4096
        tier.release(3)
        assert tier.used == 0

    def test_release_leaves_what_the_store_still_holds(self, tier: NvmeTier) -> None:
        slot = take(tier, 4096)
        tier.retain(1, [slot])
        tier.release(1)
        assert tier.used == 4096
        tier.free(slot)
        assert tier.used == 0

    def test_misuse_is_our_bug(self, tier: NvmeTier) -> None:
        slot = take(tier, 4096)
        tier.retain(1, [slot])
        for wrong in ((1, []), (2, [Slot(slot.offset + 8192, 4096)]), (2, [slot, slot])):
            with pytest.raises(AssertionError):
                tier.retain(*wrong)
        with pytest.raises(AssertionError):
            tier.release(2)
        tier.free(slot)
        with pytest.raises(AssertionError):
            tier.free(slot)

    def test_reopening_with_two_generations(self, folder: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, MIB))
        shared, old, new = (take(tier, 4096) for _ in range(3))
        tier.close()
        tier = NvmeTier.open(NvmeConfig(folder, MIB))
        for generation, slots in ((1, [shared, old]), (2, [shared, new])):
            for slot in slots:
                tier.claim(slot)
            tier.retain(generation, slots)
            if generation == 1:
                for slot in slots:
                    tier.free(slot)
        assert tier.used == 3 * 4096
        tier.release(1)
        assert tier.used == 2 * 4096
        assert take(tier, 4096) == old
        tier.free(shared)
        tier.free(new)
        tier.release(2)
        assert tier.used == 4096
        tier.close()

    @pytest.mark.parametrize("wrong", [(0, 4096), (4096, 100), (4097, 4096), (1 << 40, 4096), (8192, 4096), (4096, -1)])
    def test_a_manifest_that_names_impossible_extents(self, tier: NvmeTier, wrong: tuple[int, int]) -> None:
        tier.free(take(tier, 65536))
        tier.claim(Slot(8192, 8192))
        with pytest.raises(ManifestError, match=tier.files[0].path):
            tier.claim(Slot(*wrong))
        with pytest.raises(ManifestError):
            tier.claim(Slot(8192, 8192))
        assert tier.used == 8192

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from(["allocate", "allocate", "free", "commit", "release"]), st.integers(0, 99)),
            max_size=60,
        )
    )
    def test_random_histories(self, tier: NvmeTier, steps: list[tuple[str, int]]) -> None:
        """The oracle: an extent is in use while the store's list or any kept generation's has it."""
        live: list[Slot] = []
        kept: dict[int, list[Slot]] = {}
        for number, (step, pick) in enumerate(steps):
            in_use = {slot for slots in (live, *kept.values()) for slot in slots}
            if step == "allocate":
                slot = take(tier, 1 + pick * 300)
                assert not any(
                    slot.offset < other.offset + other.nbytes and other.offset < slot.offset + slot.nbytes
                    for other in in_use
                )
                live.append(slot)
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
        for slot in live:
            tier.free(slot)
        for generation in kept:
            tier.release(generation)
        assert tier.used == 0


class TestRemove:
    def test_removes_what_it_made(self, folder: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(folder))
        tier.remove()
        assert not folder.exists()
        with pytest.raises(AssertionError):
            tier.remove()

    def test_leaves_what_it_did_not_make(self, folder: Path) -> None:
        folder.mkdir()
        NvmeTier.open(NvmeConfig(folder)).remove()
        assert list(folder.iterdir()) == []
        folder.rmdir()
        tier = NvmeTier.open(NvmeConfig(folder))
        (folder / "notes.txt").write_text("mine")
        tier.remove()
        assert [entry.name for entry in folder.iterdir()] == ["notes.txt"]

    def test_leaves_a_file_that_took_its_place(self, folder: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(folder))
        (folder / "data.0").unlink()
        (folder / "data.0").write_text("another's")
        tier.remove()
        assert (folder / "data.0").read_text() == "another's"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 filesystem of 16 MiB."""
    with small_ext4(tmp_path, 16 * MIB) as disk:
        yield disk


@root
class TestFullDisk:
    def test_full_is_an_answer_and_says_why(self, small_disk: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(small_disk, growth=5 * MIB))
        slots = [take(tier, MIB)]
        while (slot := tier.allocate(MIB)) is not None:
            slots.append(slot)
        assert tier.refusal is not None
        assert tier.refusal.startswith(f"no space left on device: {small_disk} has ")
        assert "1.0 MiB needed" in tier.refusal or "KiB needed" in tier.refusal
        size = os.stat(tier.files[0].path).st_size
        assert size == tier.file_bytes, "a fallocate that failed leaves the file as it was"
        assert os.stat(tier.files[0].path).st_blocks * 512 <= size + 64 * 1024
        assert tier.free_on_device() < 2 * MIB, "the last step took only what was needed"
        tier.free(slots.pop())
        slots.append(take(tier, MIB))
        assert tier.refusal is None
        for slot in slots:
            assert os.pwrite(tier.files[0].fd, mmap.mmap(-1, slot.nbytes), slot.offset) == slot.nbytes, "reserved is reserved"
        tier.sync()
        tier.close()

    def test_space_that_a_neighbour_gives_back_is_found(self, small_disk: Path) -> None:
        neighbour = small_disk.parent / "disk" / "lost+found" / "neighbour"
        with neighbour.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 8 * MIB)
        tier = NvmeTier.open(NvmeConfig(small_disk))
        assert tier.allocate(8 * MIB) is None
        before = tier.capacity
        neighbour.unlink()
        assert tier.capacity >= before + 8 * MIB
        take(tier, 8 * MIB)
        tier.close()

    def test_no_room_for_a_header(self, small_disk: Path) -> None:
        with (small_disk / "lost+found" / "neighbour").open("wb") as file:
            try:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            except OSError:
                pass
            with pytest.raises(MisuseError, match=r"cannot hold a store: No space left|cannot create"):
                NvmeTier.open(NvmeConfig(small_disk))
            file.truncate(0)
        NvmeTier.open(NvmeConfig(small_disk)).close()


@root
def test_without_direct_io_it_is_buffered(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "-t", "ramfs", "none") as memory:
        tier = NvmeTier.open(NvmeConfig(memory / "store", 4 * MIB, growth=MIB))
        assert not tier.direct
        slot = take(tier, MIB)
        assert os.pwrite(tier.files[0].fd, b"x", slot.offset + 1) == 1
        tier.sync()
        uuid = tier.uuid
        tier.close()
        tier = NvmeTier.open(NvmeConfig(memory / "store"))
        assert tier.uuid == uuid
        take(tier, 2 * MIB)
        tier.close()


def test_a_file_size_limit_is_an_answer(folder: Path) -> None:
    def body() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
        tier = NvmeTier.open(NvmeConfig(folder, growth=2 << 20))
        return f"{tier.allocate(2 << 20) is not None} {tier.allocate(2 << 20)} {tier.refusal}"

    assert in_child(body).startswith("True None file too large: ")
