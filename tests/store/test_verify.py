"""``tiered.verify``: what is damaged is named, nothing else is, and nothing is changed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.backends import HERE
from tests.filesystems import root
from tests.store.chains import numbers
from tiered import Damage, ManifestError, MisuseError, StoreLocked, TieredStore, Verification, verify
from tiered.format.generations import generations, load
from tiered.format.manifest import TensorRecord
from tiered.types import PIECE_BYTES, BackendName

MIB = 1 << 20
LARGE = 2 * PIECE_BYTES + 12_345
"""Bytes: three pieces, the last of them short."""


def made(folder: Path, paths: list[Path] | None = None) -> Path:
    """A store with generations 1 and 2, which share "large" and "kept"."""
    with TieredStore.open(folder, dram="32MiB", paths=paths) as store:
        store.put("large", torch.arange(LARGE, dtype=torch.int32).to(torch.uint8))
        store.put("kept", numbers(3_000, 1))
        store.put("old", numbers(5_000, 2))
        store.put("empty", torch.empty(0, 3))
        store.commit()
        store.put("new", numbers(7_000, 3))
        store.put("old", numbers(5_000, 4))
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "store"))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "abc"]


def record(folder: Path, key: str, generation: int | None = None) -> TensorRecord:
    manifest = load(folder, generation)
    assert manifest is not None
    return next(record for record in manifest.tensors if record.key == key)


def place(folder: Path, key: str, generation: int | None = None) -> int:
    """Where a tensor begins in its file."""
    extent = record(folder, key, generation).extent
    assert extent is not None
    return extent.offset


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {name: ((folder / name).read_bytes(), (folder / name).stat().st_mtime_ns) for name in os.listdir(folder)}


@pytest.fixture(autouse=True)
def nothing_changes(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob("*.tmp"))


class TestSound:
    @pytest.mark.parametrize("backend", HERE)
    def test_everything_is_counted_and_read_once(self, folder: Path, backend: BackendName) -> None:
        before = contents(folder)
        found = verify(folder, backend=backend)
        assert found.sound
        assert found.damages == ()
        assert [(one.number, one.tensors, one.damaged) for one in found.generations] == [(2, 5, 0), (1, 4, 0)]
        assert found.tensors == 5  # large, kept, old twice, new; an empty one has no bytes
        assert found.read == LARGE + 4 * (3_000 + 5_000 + 5_000 + 7_000)
        assert [one.nbytes for one in found.generations] == [LARGE + 4 * 15_000, LARGE + 4 * 8_000]
        assert contents(folder) == before

    def test_one_generation(self, folder: Path) -> None:
        found = verify(str(folder), generation=1)
        assert [one.number for one in found.generations] == [1]
        assert found.read == LARGE + 4 * 8_000

    def test_progress(self, folder: Path) -> None:
        seen: list[tuple[int, int]] = []
        total = verify(folder, progress=lambda done, all_: seen.append((done, all_))).read
        assert len(seen) == 7  # pieces
        assert seen == sorted(seen)
        assert seen[-1] == (total, total)
        assert {all_ for _, all_ in seen} == {total}

    def test_it_can_be_stopped(self, folder: Path) -> None:
        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(KeyboardInterrupt):
            verify(folder, progress=stop)
        assert len(os.listdir("/proc/self/fd")) == before
        TieredStore.open(folder, dram="32MiB").close()

    def test_nothing_committed(self, tmp_path: Path) -> None:
        with contextlib.closing(TieredStore.open(tmp_path / "new", dram=MIB)):
            shutil.copytree(tmp_path / "new", tmp_path / "left")  # as a killed process leaves it
        found = verify(tmp_path / "left")
        assert found.sound
        assert (found.generations, found.tensors, found.read) == ((), 0, 0)

    def test_after_a_kill(self, tmp_path: Path) -> None:
        """Without a repair; an unfinished manifest is left where it is."""
        program = f"""if True:
            import os, signal, torch
            from tiered import TieredStore
            store = TieredStore.open({str(tmp_path / "dead")!r}, dram=1 << 20)
            store.put("x", torch.arange(1000))
            store.commit()
            store.put("x", torch.arange(2000))
            open({str(tmp_path / "dead" / "manifest.2.part")!r}, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        """
        programs.run([sys.executable, "-c", program])
        before = contents(tmp_path / "dead")
        found = verify(tmp_path / "dead")
        assert found.sound
        assert found.read == 8_000
        assert contents(tmp_path / "dead") == before

    @root
    def test_on_a_filesystem_mounted_read_only(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        made(tmp_path / "there" / "store")
        words = ["mount", "--bind", str(tmp_path / "there"), str(tmp_path / "there")]
        if subprocess.run(words, capture_output=True).returncode:
            pytest.skip("cannot mount")
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path / "there")], check=True)
            assert verify(tmp_path / "there" / "store").sound
        finally:
            subprocess.run(["umount", "--lazy", str(tmp_path / "there")], check=True)

    def test_memory_does_not_grow_with_the_store(self, tmp_path: Path) -> None:
        """In an address space that holds the program and half of the store."""
        with TieredStore.open(tmp_path / "big", dram="64MiB") as store:
            for index in range(8):
                store.put(f"t{index}", torch.zeros(48 * MIB, dtype=torch.uint8))
        program = f"""if True:
            import resource, tiered
            from tiered import verify, TieredStore
            with open("/proc/self/statm") as file:
                now = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + (192 << 20), now + (192 << 20)))
            assert verify({str(tmp_path / "big")!r}).read == 384 << 20
        """
        done = programs.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def only(found: Verification) -> Damage:
    assert not found.sound
    assert len(found.damages) == 1, found.damages
    return found.damages[0]


class TestDamagedBytes:
    @pytest.mark.parametrize(
        ("key", "byte", "piece", "nbytes"),
        [
            ("large", 0, 0, PIECE_BYTES),
            ("large", PIECE_BYTES - 1, 0, PIECE_BYTES),
            ("large", PIECE_BYTES, PIECE_BYTES, PIECE_BYTES),
            ("large", LARGE - 1, 2 * PIECE_BYTES, 12_345),
            ("kept", 11_999, 0, 12_000),
        ],
    )
    def test_a_flipped_bit(self, folder: Path, key: str, byte: int, piece: int, nbytes: int) -> None:
        flip(folder / "data.0", place(folder, key) + byte)
        found = verify(folder)
        where = place(folder, key) + piece
        assert only(found) == Damage("wrong checksum", str(folder / "data.0"), where, nbytes, key, (1, 2), 1)
        assert [one.damaged for one in found.generations] == [1, 1]

    def test_only_the_generation_that_has_it(self, folder: Path) -> None:
        flip(folder / "data.0", place(folder, "old", 1))
        damage = only(verify(folder))
        assert (damage.key, damage.generations, damage.written) == ("old", (1,), 1)
        assert verify(folder, generation=2).sound
        assert [one.damaged for one in verify(folder).generations] == [0, 1]

    def test_every_one_of_several(self, folder: Path) -> None:
        places = [("large", 5), ("large", LARGE - 1), ("kept", 0), ("new", 27_999)]
        for key, byte in places:
            flip(folder / "data.0", place(folder, key) + byte)
        found = verify(folder)
        assert sorted((one.key, one.generations) for one in found.damages) == [
            ("kept", (1, 2)),
            ("large", (1, 2)),
            ("large", (1, 2)),
            ("new", (2,)),
        ]
        assert [one.damaged for one in found.generations] == [3, 2]

    def test_anywhere(self, folder: Path) -> None:
        """Every byte that counts is checked: flips at random, each named or in padding that nothing refers to."""
        chance = random.Random(4)
        manifest = load(folder)
        assert manifest is not None
        records = [record for record in manifest.tensors if record.extent]
        for _ in range(40):
            one = chance.choice(records)
            byte = chance.randrange(one.spec.nbytes)
            offset = place(folder, one.key) + byte
            flip(folder / "data.0", offset)
            damage = only(verify(folder))
            assert damage.key == one.key
            assert damage.offset is not None
            assert damage.offset <= offset < damage.offset + damage.nbytes
            flip(folder / "data.0", offset)
        assert verify(folder).sound

    def test_padding_holds_nothing(self, folder: Path) -> None:
        flip(folder / "data.0", place(folder, "kept") + 12_000)
        assert verify(folder).sound

    def test_swapped(self, tmp_path: Path) -> None:
        """Each holds what was written, and it is the other's."""
        with TieredStore.open(tmp_path / "store", dram=MIB) as store:
            for key in "ab":
                store.put(key, numbers(2_000, ord(key)))
        one, other = (place(tmp_path / "store", key) for key in "ab")
        with (tmp_path / "store" / "data.0").open("r+b") as file:
            parts = []
            for at in one, other:
                file.seek(at)
                parts.append(file.read(8_000))
            for at, part in zip((other, one), parts, strict=True):
                file.seek(at)
                file.write(part)
        found = verify(tmp_path / "store")
        assert [(one.key, one.what) for one in found.damages] == [("a", "wrong checksum"), ("b", "wrong checksum")]

    def test_zeros_are_said(self, folder: Path) -> None:
        with (folder / "data.0").open("r+b") as file:
            file.seek(place(folder, "kept"))
            file.write(bytes(12_000))
        assert only(verify(folder)).what == "wrong checksum: zeros, as if it had never been written"


class TestDamagedFiles:
    @pytest.mark.parametrize("backend", HERE)
    def test_cut_off(self, folder: Path, backend: BackendName) -> None:
        end = place(folder, "large") + PIECE_BYTES + 4096
        size = (folder / "data.0").stat().st_size
        os.truncate(folder / "data.0", end)
        file, *rest = verify(folder, backend=backend).damages
        assert (file.key, file.offset, file.nbytes) == (None, end, size - end)
        assert file.what == f"ends at byte {end}; it had {size} bytes"
        large = next(one for one in rest if one.key == "large")
        assert large.what == "the file ends before"
        assert (large.offset, large.nbytes) == (place(folder, "large") + PIECE_BYTES, LARGE - PIECE_BYTES)  # two pieces in one
        behind = {key for key in ("kept", "old", "new") if place(folder, key) >= end}
        assert {one.key for one in rest} - {"large", "old"} == behind - {"old"}

    def test_missing(self, folder: Path) -> None:
        (folder / "data.0").unlink()
        found = verify(folder)
        file, *rest = found.damages
        assert str(file) == f"a file of generations 2, 1: {folder / 'data.0'}: is missing"
        assert {one.key for one in rest} == {"large", "kept", "old", "new"}
        assert {one.what for one in rest} == {"the file is missing"}
        assert [one.damaged for one in found.generations] == [4, 3]
        assert found.read == 0

    def test_not_a_file(self, folder: Path) -> None:
        (folder / "data.0").rename(folder / "elsewhere")
        (folder / "data.0").symlink_to(folder / "elsewhere")
        file, *rest = verify(folder).damages
        assert file.what.startswith("cannot be opened: Too many levels of symbolic links")
        assert len(rest) == 5

    def test_header(self, folder: Path) -> None:
        """Tensors are read all the same."""
        flip(folder / "data.0", 20)
        found = verify(folder)
        damage = only(found)
        assert (damage.key, damage.offset) == (None, 0)
        assert damage.what == "the header is damaged (its checksum does not match)"
        assert [(one.sound, one.damaged, one.obstacle) for one in found.generations] == [
            (False, 0, f"{folder / 'data.0'}: the header is damaged (its checksum does not match)")
        ] * 2

    def test_only_spare_room_is_cut_off(self, folder: Path) -> None:
        """That is damage, but in nobody's way; a page less is."""
        manifest = load(folder)
        assert manifest is not None
        end = max(one.extent.offset + one.extent.nbytes for one in manifest.tensors if one.extent)
        os.truncate(folder / "data.0", end)
        found = verify(folder)
        assert only(found).offset == end
        assert found.generations[0].sound
        TieredStore.open(folder, dram="32MiB").close()
        os.truncate(folder / "data.0", end - 4096)
        assert not verify(folder).generations[0].sound
        with pytest.raises(ManifestError, match="beyond its end"):
            TieredStore.open(folder, dram="32MiB")

    def test_of_another_store(self, folder: Path, tmp_path: Path) -> None:
        other = made(tmp_path / "other")
        shutil.copy(other / "data.0", folder / "data.0")
        damage = only(verify(folder))  # the tensors are the same, and lie at the same places
        assert damage.what == "is not the file that was committed to (its UUID is another)"

    def test_the_drive_answers_with_an_error(self, folder: Path) -> None:
        if shutil.which("strace") is None:
            pytest.skip("needs strace")
        program = f"import tiered; [print(one) for one in tiered.verify({str(folder)!r}, backend='posix').damages]"
        # After two reads of the header, and one that tries direct I/O.
        fourth = ["-P", str(folder / "data.0"), "-e", "inject=preadv,preadv2:error=EIO:when=4"]
        words = ["strace", "-f", "-o", "/dev/null", *fourth, sys.executable, "-c", program]
        done = subprocess.run(words, capture_output=True, text=True)
        if "ptrace" in done.stderr:
            pytest.skip(done.stderr)
        assert done.stdout.startswith("tensor "), done.stderr
        assert done.stdout.endswith(": cannot be read: Input/output error (errno 5)\n")
        assert done.stdout.count("\n") == 1


class TestDamagedManifests:
    def test_the_newest(self, folder: Path) -> None:
        flip(folder / "manifest.2", 300)
        found = verify(folder)
        damage = only(found)
        assert (damage.path, damage.offset, damage.generations) == (str(folder / "manifest.2"), None, (2,))
        assert "checksum" in damage.what
        assert "to go back to generation 1, open with generation=1, or move manifest.2 out of the folder" in damage.what
        assert [(one.number, one.tensors, one.sound) for one in found.generations] == [(2, None, False), (1, 4, True)]
        assert verify(folder, generation=1).sound

    def test_the_oldest_and_a_tensor_of_the_newest(self, folder: Path) -> None:
        (folder / "manifest.1").write_bytes(b"")
        flip(folder / "data.0", place(folder, "new"))
        found = verify(folder)
        assert [(one.key, one.generations) for one in found.damages] == [(None, (1,)), ("new", (2,))]

    def test_all(self, folder: Path) -> None:
        for number in 1, 2:
            flip(folder / f"manifest.{number}", 0)
        assert [one.generations for one in verify(folder).damages] == [(2,), (1,)]

    def test_of_another_store(self, folder: Path, tmp_path: Path) -> None:
        shutil.copy(made(tmp_path / "other") / "manifest.2", folder / "manifest.2")
        assert {one.generations for one in verify(folder).damages} == {(2,)}


class TestDrives:
    def test_sound_in_any_order(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths)
        assert verify(folder, paths=[str(path) for path in reversed(paths)]).sound

    def test_a_flipped_bit(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths)
        for key in "large", "kept", "new":
            extent = record(folder, key).extent
            assert extent is not None
            path = paths[extent.file] / f"drive.{extent.file}"
            flip(path, extent.offset)
            damage = only(verify(folder, paths=paths))
            assert (damage.key, damage.path, damage.offset) == (key, str(path), extent.offset)
            flip(path, extent.offset)

    def test_one_is_missing(self, tmp_path: Path, paths: list[Path]) -> None:
        """Whether it is not named, not mounted, or empty; the others are checked."""
        folder = made(tmp_path / "store", paths)
        manifest = load(folder)
        assert manifest is not None
        gone = {(one.key, one.generation) for one in manifest.tensors if one.extent and one.extent.file == 1}
        (paths[1] / "drive.1").rename(tmp_path / "drive.1")
        for given in (paths, [paths[0], paths[2]], [paths[0], tmp_path / "nowhere", paths[2]]):
            file, *rest = verify(folder, paths=given, generation=2).damages
            assert str(file) == "a file of generation 2: drive.1: is missing: none of the folders has it"
            assert {(one.key, one.written) for one in rest} == gone
            assert {one.what for one in rest} == {"the file is missing"}

    def test_the_list_is_damaged(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths)
        flip(folder / "drives", 40)
        damage = only(verify(folder, paths=paths))
        assert (damage.path, damage.what) == (str(folder / "drives"), "is damaged (its checksum does not match)")
        (folder / "drives").unlink()
        assert only(verify(folder, paths=paths)).what == "is missing"

    def test_the_list_is_empty(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths)
        os.truncate(folder / "drives", 0)
        with pytest.raises(ManifestError, match="missing or empty"):
            TieredStore.open(folder, dram="32MiB", paths=paths)
        assert only(verify(folder, paths=paths)) == Damage("is empty", str(folder / "drives"))
        assert not any(one.sound for one in verify(folder, paths=paths).generations)

    def test_two_in_one_folder(self, tmp_path: Path) -> None:
        paths = [tmp_path / name for name in "ab"]
        folder = made(tmp_path / "store", paths)
        (paths[1] / "drive.1").rename(paths[0] / "drive.1")
        with pytest.raises(ManifestError, match="data files of several drives"):
            TieredStore.open(folder, dram="32MiB", paths=paths)
        damage = only(verify(folder, paths=paths))
        assert (damage.path, damage.what[:32]) == (str(paths[0]), "has data files of several drives")

    def test_more_folders_than_drives(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths[:2])
        for check in (verify, TieredStore.open):
            with pytest.raises(MisuseError, match="on 2 drives, not 3"):
                check(folder, paths=paths)

    def test_a_link_to_one(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths[:2])
        paths[2].symlink_to(paths[1])
        for check in (verify, TieredStore.open):
            with pytest.raises(MisuseError, match="is a symbolic link; name the folder"):
                check(folder, paths=[paths[0], paths[2]])

    def test_they_have_to_be_named(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths)
        with pytest.raises(MisuseError, match=f"have to be named: paths=.*{paths[0]}"):
            verify(folder)

    def test_two_of_one_number(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths)
        shutil.copytree(paths[1], tmp_path / "copy")
        with pytest.raises(MisuseError, match=r"both have a drive\.1"):
            verify(folder, paths=[*paths, tmp_path / "copy"])

    def test_locked(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = tmp_path / "new"  # without a commit
        with TieredStore.open(folder, dram="32MiB", paths=paths), pytest.raises(StoreLocked, match="is in use by process"):
            verify(folder, paths=paths)

    def test_beside_a_job(self, tmp_path: Path, paths: list[Path]) -> None:
        folder = made(tmp_path / "store", paths)
        with TieredStore.open(folder, dram="32MiB", paths=paths) as store:
            store.put("x", numbers(10, 1))
            assert verify(folder, paths=paths).sound


class TestRefused:
    def test_locked(self, folder: Path) -> None:
        new, mine = folder.with_name("new"), f"in use by process {os.getpid()}"  # without a commit
        with TieredStore.open(new, dram="32MiB"), pytest.raises(StoreLocked, match=mine):
            verify(new)

    def test_a_job_goes_on_meanwhile(self, folder: Path) -> None:
        """It commits and drops what is verified, whose bytes stay until they are read."""
        before = verify(folder)

        def meanwhile(done: int, total: int) -> None:
            for key in list(store):
                store.put(key, numbers(3 * PIECE_BYTES // 4, store.generation))
            store.commit()
            if done < 2 * PIECE_BYTES:
                assert verify(folder, generation=1).sound  # and others may verify

        with TieredStore.open(folder, dram="64MiB", keep=1) as store:
            assert verify(folder, progress=meanwhile) == before
            assert generations(folder)[:2] == [1, 2]
            store.commit()
            assert generations(folder) == [store.generation], "nothing is kept for it afterwards"
            store.close()
        assert not [name for name in os.listdir(folder) if name.startswith("reader.")]

    def test_not_a_store(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        for where in tmp_path, tmp_path / "none", tmp_path / "thesis.txt":
            with pytest.raises(MisuseError, match=f"{where} is not a tiered store"):
                verify(where)
        assert os.listdir(tmp_path) == ["thesis.txt"]

    def test_a_link_to_a_store(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(folder)
        for check in (verify, TieredStore.open):
            for name in "link", "link/":
                with pytest.raises(MisuseError, match="link is a symbolic link; name the folder that it points to"):
                    check(f"{tmp_path}/{name}")

    def test_no_name(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        with pytest.raises(MisuseError, match=r"'', which is not the name of a file or folder; '\.' is the current one"):
            verify("")
        assert verify(".").sound

    def test_no_such_generation(self, folder: Path) -> None:
        with pytest.raises(MisuseError, match=r"has no generation 7; there are: 1, 2"):
            verify(folder, generation=7)

    def test_paths_of_a_store_without(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(MisuseError, match="in its own folder: verify it without paths"):
            verify(folder, paths=[tmp_path])
