"""Promise 9: a tensor's name never becomes a path; files are 0600 in a 0700 folder; symbolic links are refused."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stress.contents import content, holds
from tests.stress.tally import Tally, counts
from tiered import MisuseError, TieredError, TieredStore

PROMISE = "9 (names are no paths, modes, links)"
MIB = 1 << 20

PARTS = [
    "..", ".", "/", "\\", "~", "\0", "\n", "\r\n", "%2e%2e%2f", "data.0", "manifest.1", "manifest.2.tmp", "drives", "drive.0",
    "etc/passwd", "C:", "CON", "$HOME", "`id`", ";rm -rf", "*", "?", "\u202e", "\u00e9", "e\u0301", "\U0001f600", " ", "-",
    "a" * 300, "proc/self/mem", "file://", "{0}", "%s", "\x7f", "\ufeff", "NUL", "lost+found",
]  # fmt: skip


def names(count: int) -> list[str]:
    """Nasty ones by themselves, as absolute and as relative paths, then put together."""
    source = random.Random(1)
    found = dict.fromkeys([*PARTS, *("/" + part for part in PARTS), *("../" * 5 + part for part in PARTS), ""])
    while len(found) < count:
        found["".join(source.choice(PARTS) for _ in range(source.randint(2, 6)))] = None
    return list(found)[:count]


def everything(folder: Path) -> set[str]:
    return {os.path.join(where, name) for where, folders, files in os.walk(folder) for name in (*folders, *files)}


@counts(150, 2000)
@pytest.mark.parametrize("umask", [0, 0o022, 0o077], ids=oct)
def test_names_never_become_paths(tmp_path: Path, umask: int, count: int, tally: Tally) -> None:
    wanted = {name: content(name, 1, 10 + len(name)) for name in names(count)}
    old = os.umask(umask)
    try:
        with TieredStore.open(tmp_path / "home" / "state", dram=MIB) as store:
            for name, tensor in wanted.items():
                store.put(name, tensor)
                assert name in store
                tally.ran()
    finally:
        os.umask(old)
    folder = tmp_path / "home" / "state"
    assert everything(tmp_path) == {str(tmp_path / "home"), str(folder), str(folder / "data.0"), str(folder / "manifest.1")}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 & ~umask, path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 & ~umask
    with TieredStore.open(folder, dram=MIB) as store:
        assert set(store) == set(wanted)
        for name in wanted:
            holds(store, name, 1, 10 + len(name))
        store.close()


def _symlink(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def _dangling(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere.parent / "nowhere")


def _loop(path: Path, elsewhere: Path) -> None:
    path.symlink_to(path)


def _relative(path: Path, elsewhere: Path) -> None:
    path.symlink_to(os.path.relpath(elsewhere, path.parent))


def _folder(path: Path, elsewhere: Path) -> None:
    path.mkdir()


def _fifo(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, elsewhere: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        old = os.getcwd()
        os.chdir(path.parent)  # the address may have 108 bytes
        server.bind(path.name)
        os.chdir(old)


LAYS: list[Callable[[Path, Path], None]] = [_symlink, _dangling, _loop, _relative, _folder, _fifo, _socket]
PLACES = ["data.0", "manifest.1", "manifest.2", "manifest.2.tmp"]
SEVERAL = ["drives", "drive.0", "drive.1", "manifest.1", "manifest.2", "drives.tmp"]


@pytest.mark.parametrize("replaced", [*PLACES, *(f"several: {name}" for name in SEVERAL)])
def test_what_is_not_a_file_of_ours_is_refused(tmp_path: Path, replaced: str, tally: Tally) -> None:
    """In the place of each file of a store, whichever else it is; what it points to is as it was."""
    name = replaced.removeprefix("several: ")
    for number, lay in enumerate(LAYS):
        home = tmp_path / f"{number}"
        home.mkdir()
        paths = [home / "one", home / "two"] if "several" in replaced else None
        folder, elsewhere = home / "state", home / "elsewhere"
        with TieredStore.open(folder, dram=MIB, paths=paths) as store:
            store.put("t", content("t", 1, 1000))
        place = (paths[int(name[-1])] if paths else folder) / name if name.startswith("drive.") else folder / name
        elsewhere.write_bytes(place.read_bytes() if place.is_file() else b"somebody else's")
        before = elsewhere.read_bytes()
        place.unlink(missing_ok=True)
        lay(place, elsewhere)
        seen = os.lstat(place)
        refused = 0
        try:
            with TieredStore.open(folder, dram=MIB, paths=paths) as store:
                holds(store, "t", 1, 1000)
                store.put("t", content("t", 2, 1000))
                store.commit()
        except TieredError as error:
            refused = 1
            assert str(home) in str(error)
        tally.count(f"{lay.__name__[1:]} for {name}", 1)
        assert refused or name in ("manifest.2.tmp", "drives.tmp"), f"{lay.__name__} for {name} was taken"
        assert elsewhere.read_bytes() == before, f"{lay.__name__} for {name} was followed"
        if os.path.lexists(place):
            assert stat.S_IFMT(os.lstat(place).st_mode) == stat.S_IFMT(seen.st_mode)
        assert not (home / "nowhere").exists()
        shutil.rmtree(home)  # every store has reserved space


@pytest.mark.parametrize("lay", LAYS, ids=lambda lay: lay.__name__[1:])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, lay: Callable[[Path, Path], None], tally: Tally) -> None:
    if lay is _folder:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "notes.txt").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        lay(tmp_path / "state", tmp_path / "elsewhere")
    before = everything(tmp_path)
    for path in ("state", "state/"):
        with pytest.raises(MisuseError, match="state"):
            TieredStore.open(f"{tmp_path}/{path}", dram=MIB)
        tally.count(f"{lay.__name__[1:]} for the folder", 1)
    assert everything(tmp_path) == before
