"""Pins: who is alive, who is dead, and what is not a reader's at all."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.children import forked
from tests.stress.syscalls import Child
from tiered import StoreLocked
from tiered.format.folder import OpenFolder
from tiered.format.generations import generations
from tiered.format.pins import Pin, Reader, look


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[OpenFolder]:
    opened = OpenFolder(tmp_path)
    yield opened
    opened.close()


def killed(body: Any) -> None:
    def job(child: Child) -> None:
        body()
        os.kill(os.getpid(), 9)

    with forked(job) as running:
        assert running.wait_end() == -9, running.said


def test_a_pin_is_seen_while_it_is_open(folder: OpenFolder) -> None:
    assert look(folder).readers == ()
    one, other = Pin(folder, 3), Pin(folder, 7)
    found = look(folder)
    assert set(found.readers) == {Reader(one.name, 3, os.getpid()), Reader(other.name, 7, os.getpid())}
    assert [number for number in range(10) if found.needs(number)] == [3, 7]
    assert found.newest == 7
    assert os.stat(Path(folder.path) / one.name).st_mode & 0o777 == 0o600
    one.close()
    one.close()
    assert look(folder).readers == (Reader(other.name, 7, os.getpid()),)
    other.close()
    assert folder.names() == []


def test_listings_at_once_miss_nothing(folder: OpenFolder) -> None:
    """A commit looks at the generations and the pins while the engine's thread looks who reads, and a forked child has the
    same descriptor."""
    for number in (1, 2, 3):
        (folder.path / f"manifest.{number}").touch()
    pin = Pin(folder, 2)
    stop, missed = threading.Event(), list[str]()

    def list_names() -> None:
        while not stop.is_set():
            folder.names()

    def in_child(child: Child) -> None:
        child.say("here")
        while True:
            os.listdir(folder.fd)

    other = threading.Thread(target=list_names)
    with forked(in_child) as running:
        running.hear()
        other.start()
        try:
            for _ in range(2000):
                there, pins = generations(folder), look(folder)
                if there != [1, 2, 3] or not pins.needs(2):
                    missed.append(f"{there} {pins}")
        finally:
            stop.set()
            other.join()
    pin.close()
    assert missed == []


def test_that_of_a_killed_process_goes(folder: OpenFolder) -> None:
    killed(lambda: Pin(folder, 3))
    assert len(folder.names()) == 1
    assert look(folder).readers == ()
    assert folder.names() == []


def test_one_that_was_killed_before_it_wrote(folder: OpenFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def job() -> None:
        monkeypatch.setattr(os, "pwrite", lambda *given: os.kill(os.getpid(), 9))
        Pin(folder, 3)

    killed(job)
    assert [os.path.getsize(Path(folder.path) / name) for name in folder.names()] == [0]
    assert look(folder).readers == ()
    assert folder.names() == []


def test_one_in_the_making_keeps_nothing_yet(folder: OpenFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not looked for a manifest."""
    real, seen = os.pwrite, []

    def write(fd: int, data: bytes, at: int) -> int:
        seen.append((look(folder).readers, len(folder.names())))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    pin = Pin(folder, 3)
    assert seen == [((), 1)]
    assert look(folder).needs(3)
    pin.close()


def test_one_that_is_taken_for_dead_before_it_is_locked(folder: OpenFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader begins anew, with another name."""
    real, removed = fcntl.flock, []

    def lock(fd: int, how: int) -> None:
        if len(removed) < 2:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            removed.append(name)
            other = os.open(Path(folder.path) / name, os.O_RDWR)
            real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(Path(folder.path) / name)
            if len(removed) == 1:
                os.close(other)  # before the reader asks for the lock; the second time after that
            else:
                others.append(other)
        real(fd, how)

    others: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lock)
    pin = Pin(folder, 3)
    assert len(removed) == 2
    assert pin.name not in removed
    assert folder.names() == [pin.name]
    assert look(folder).needs(3)
    pin.close()
    for fd in others:
        os.close(fd)


def test_names_that_are_always_taken(folder: OpenFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFolder, "holds", lambda *given: False)
    with pytest.raises(StoreLocked, match="open it again"):
        Pin(folder, 3)
    assert folder.names() == []


def test_a_forked_child_keeps_it_and_does_not_remove_it(folder: OpenFolder) -> None:
    pin = Pin(folder, 3)
    wait, go = os.pipe()

    def job(child: Child) -> None:
        if not os.fork():  # the child of a child outlives it
            os.read(wait, 1)
            os._exit(0)
        pin.close()
        child.say("closed")

    with forked(job) as running:
        assert running.wait_end() == 0, running.said
    assert look(folder).needs(3), "closing in the child is not closing"
    os.write(go, b"x")
    pin.close()
    assert folder.names() == []
    os.close(wait)
    os.close(go)


@pytest.mark.parametrize("data", [b"x" * 36, b"x" * 5000, b"TIEREDRD".ljust(36, b"\0")])
def test_damage_keeps_everything_while_it_is_locked(folder: OpenFolder, data: bytes) -> None:
    pin = Pin(folder, 3)
    (Path(folder.path) / pin.name).write_bytes(data)
    found = look(folder)
    assert found.readers == (Reader(pin.name, None, 0),)
    assert found.needs(99)
    assert f"process {os.getpid()} reads every generation" in found.told(folder, [1])
    pin.close()


def test_what_is_no_readers_stays(folder: OpenFolder) -> None:
    path = Path(folder.path)
    (path / "reader.0123456789abcdef").mkdir()
    (path / "reader.0123456789abcde0").symlink_to("target")
    (path / "target").write_bytes(b"")
    os.mkfifo(path / "reader.0123456789abcde1")
    (path / "reader.0123456789abcde2").write_bytes(b"a letter of somebody, who has the same taste in names")
    (path / "reader.xyz").write_bytes(b"")
    (path / "reader.0123456789ABCDEF").write_bytes(b"")
    before = sorted(folder.names())
    assert look(folder).readers == ()
    assert sorted(folder.names()) == before


def test_who_reads_is_told(folder: OpenFolder) -> None:
    pin = Pin(folder, 3)
    assert look(folder).told(folder, [1, 2]) == ""
    assert look(folder).told(folder, [3]) == f"process {os.getpid()} reads generation 3 ({folder.path / pin.name})"
    pin.close()


def test_a_number_that_was_used_again_is_not_believed(folder: OpenFolder) -> None:
    """The pin is locked by a child of the process that made it; that one's number may be anybody's by now."""
    wait, go = os.pipe()

    def job(child: Child) -> None:
        Pin(folder, 3)
        other = os.fork()
        if not other:
            os.close(go)
            os.read(wait, 1)
            os._exit(0)
        child.say(str(other))
        os.kill(os.getpid(), 9)

    with forked(job) as running:
        assert running.wait_end() == -9
        pin = look(folder)
        assert pin.needs(3)
        told = pin.told(folder, [3])
        assert told.startswith(f"process {running.said[0]}, which was forked from process {running.pid}"), told
    os.write(go, b"x")
    os.close(wait)
    os.close(go)


def test_where_no_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenFolder(tmp_path)
    monkeypatch.setattr(os, "pwrite", lambda *given: 7)
    with pytest.raises(OSError, match="No space") as caught:
        Pin(opened, 3)
    assert caught.value.errno == errno.ENOSPC
    assert opened.names() == []
    opened.close()


def test_a_number_that_no_generation_has(folder: OpenFolder) -> None:
    """It would become the number of the next commit."""
    pin = Pin(folder, 10**18)
    assert look(folder).readers == (Reader(pin.name, None, 0),)
    assert look(folder).newest == 0
    pin.close()
