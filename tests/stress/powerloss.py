"""Power loss: what a drive may have of the writes that it was given, at any moment, and what becomes of a filesystem on it.

Each drive is a file in the FUSE filesystem of ``fusefs.py``, under a loop device, under ext4. The file's server notes every
write, and every fsync, which is what the loop device makes of a FLUSH or FUA of the block layer. What was written before the
last flush is there after a power loss; of what came later any part may be: none, some writes and not others, some sectors of a
write. Images are made of such parts and mounted, so that the journal recovers what it can.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from tests.stress.fusefs import RECORD, FaultyDisk, faulty_disk, why_not

__all__ = ["KINDS", "Log", "Machine", "State", "machine", "mounted"]

SECTOR = 512
SUPERBLOCK_END = 2048
"""ext4 has one checksum for the two sectors of its superblock, and cannot be mounted where only one of them was written."""
Kind = Literal["whole", "lost", "reordered", "torn"]
KINDS: tuple[Kind, ...] = ("whole", "lost", "reordered", "torn")


class Entry(NamedTuple):
    """What happened: W(rite), F(lush), E (a flush that failed) or M(ark), of the drive with this index, at ``offset``; a mark's
    words are its data."""

    what: str
    drive: int
    offset: int
    data: bytes


class State(NamedTuple):
    """The power goes before entry ``cut``. "whole": all before it is there; "lost": all that was flushed; "reordered": besides
    some of the later writes; "torn": some of their pieces of ``unit`` bytes, as ``seed`` has it. What a flush was to bring that
    failed is like what was not flushed, even if a later one succeeds."""

    kind: Kind
    cut: int
    unit: int = SECTOR
    seed: int = 0


@dataclass
class Machine:
    """``folders``: where the drives are mounted. ``disk`` has them as files, drive0 and so on. Also for a forked child, while
    the test waits for it."""

    folders: list[Path]
    disk: FaultyDisk

    def mark(self, words: str) -> None:
        self.disk.mark(words)


@dataclass
class Log:
    """What the drives were given, from the moment when each was the image ``base``."""

    base: bytes
    drives: int
    entries: list[Entry] = field(default_factory=list)

    def marks(self, cut: int, first_word: str) -> list[int]:
        """The numbers in marks like "committed 3" before ``cut``."""
        words = (entry.data.decode().split() for entry in self.entries[:cut] if entry.what == "M")
        return [int(number) for word, number in words if word == first_word]

    def moments(self) -> list[int]:
        """Just before and just after every flush, and after every mark."""
        found = {len(self.entries)}
        for index, entry in enumerate(self.entries):
            if entry.what == "F":
                found.add(index)
            if entry.what != "W":
                found.add(index + 1)
        return sorted(found)

    def states(self, count: int, seed: int) -> Iterator[State]:
        """Endless; about ``count`` of them cover every moment as evenly as may be, each kind in turn."""
        source, moments = random.Random(seed), self.moments()
        step = max(1, 4 * len(moments) // count)
        while True:
            for first in source.sample(range(step), step):
                for moment in moments[first::step]:
                    for kind in KINDS:
                        between = kind == "torn" or source.random() < 0.3
                        cut = min(len(self.entries), moment + source.randrange(8)) if between else moment
                        yield State(kind, cut, source.choice((SECTOR, 4096)), source.getrandbits(32))

    def build(self, state: State, images: list[Path]) -> bool:
        """Write what each drive has; whether the power loss took anything from it."""
        source = random.Random(state.seed)
        took = state.kind == "whole" and state.cut < len(self.entries)
        for drive, image in enumerate(images):
            with image.open("w+b", buffering=0) as file:
                file.truncate(len(self.base))
                _fill(file.fileno(), self.base)
                pending: list[Entry] = []  # until it is flushed
                for entry in self.entries[: state.cut]:
                    if entry.drive != drive or entry.what == "M":
                        continue
                    if entry.what == "W":
                        pending.append(entry)
                        continue
                    there = pending if entry.what == "F" else _some(pending, state, source)
                    _write(file.fileno(), there)
                    took |= entry.what == "E" and state.kind != "whole" and bool(pending)
                    pending = []
                _write(file.fileno(), _some(pending, state, source))
                took |= _lacks(file.fileno(), pending)
        return took


def _fill(fd: int, base: bytes) -> None:
    empty = bytes(1 << 16)
    for offset in range(0, len(base), len(empty)):
        piece = base[offset : offset + len(empty)]
        if piece != empty:
            os.pwrite(fd, piece, offset)


def _write(fd: int, writes: Iterable[Entry]) -> None:
    for entry in writes:
        os.pwrite(fd, entry.data, entry.offset)


def _some(pending: list[Entry], state: State, source: random.Random) -> Iterator[Entry]:
    """What a state keeps of writes that were not flushed."""
    if state.kind == "whole":
        yield from pending
    if state.kind in ("whole", "lost"):
        return
    for entry in pending:
        unit = state.unit if state.kind == "torn" else max(1, len(entry.data))
        if entry.offset < SUPERBLOCK_END:
            unit = max(unit, 4096)
        for at in range(0, len(entry.data), unit):
            if source.random() < 0.5:
                yield entry._replace(offset=entry.offset + at, data=entry.data[at : at + unit])


def _lacks(fd: int, pending: list[Entry]) -> bool:
    """Whether the image is another one than all of ``pending`` would have made."""
    wanted: dict[int, bytes] = {}
    for entry in pending:
        for at in range(0, len(entry.data), SECTOR):
            wanted[entry.offset + at] = entry.data[at : at + SECTOR]
    return any(os.pread(fd, len(data), offset) != data for offset, data in wanted.items())


@contextmanager
def machine(folder: Path, drives: int, nbytes: int) -> Iterator[tuple[Machine, Log]]:
    """One with so many drives of ``nbytes``, in ``folder``, a new one. The log is filled when the block ends: everything is
    unmounted then."""
    if why_not():
        pytest.skip(why_not())
    folder.mkdir()
    base, record = folder / "base", folder / "record"
    with base.open("wb") as file:
        file.truncate(nbytes)
    words = ["mkfs.ext4", "-q", "-b", "4096", "-J", "size=4", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0"]
    try:
        subprocess.run([*words, str(base)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs mkfs.ext4")
    log = Log(base.read_bytes(), drives)
    with faulty_disk(folder / "fuse") as disk:
        for drive in range(drives):
            (disk.folder / f"drive{drive}").write_bytes(log.base)
        disk.record(record)
        with ExitStack() as stack:
            folders = [stack.enter_context(mounted(disk.folder / f"drive{d}", folder / f"on{d}", [])) for d in range(drives)]
            yield Machine(folders, disk), log
            disk.mark("over 0")
        disk.mark("unmounted 0")
        log.entries.extend(_read(record))
    record.unlink()


def _read(path: Path) -> Iterator[Entry]:
    data = memoryview(path.read_bytes())
    while data:
        what, named, nbytes, offset = RECORD.unpack_from(data)
        name = bytes(data[RECORD.size : RECORD.size + named]).decode()
        at = RECORD.size + named
        yield Entry(what.decode(), int(name.removeprefix("drive") or 0), offset, bytes(data[at : at + nbytes]))
        data = data[at + nbytes :]


@contextmanager
def mounted(image: Path, folder: Path, options: list[str]) -> Iterator[Path]:
    """ext4 on a loop device on ``image``. Where that cannot be mounted: AssertionError; without loop devices it skips."""
    folder.mkdir()
    words = ["mount", "-t", "ext4", "-o", ",".join(["loop", *options]), str(image), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True)
    if "loop device" in done.stderr:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    assert done.returncode == 0, f"the filesystem is lost: {done.stderr.strip()}"
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()
