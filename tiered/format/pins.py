"""Pins: the files by which readers keep a generation from being dropped.

A reader makes ``reader.R`` in the store's folder, locks it with flock(2), and writes into it which generation it takes. The
file is alive while it is locked, which the kernel ends with the reader; whoever can lock it removes it. The protocol, with an
argument for each crash point, is in docs/decisions/0041-several-processes.md. Needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import xxhash

from tiered.errors import StoreLocked
from tiered.format.folder import SHORTAGES, OpenFolder
from tiered.format.locked_file import holder
from tiered.format.manifest import LAST_GENERATION
from tiered.system import Once

__all__ = ["CANNOT_LOOK", "Pin", "Pins", "Reader", "look"]

_NAME = re.compile(r"reader\.[0-9a-f]{16}", re.ASCII)
_MAGIC = b"TIEREDRD"
_VERSION = 1
_FIELDS = struct.Struct("<8sIQQ")  # magic, version, process, generation
_SEAL = struct.Struct("<Q")  # xxh3-64 of the fields
_BYTES = _FIELDS.size + _SEAL.size
ATTEMPTS = 100
"""Names that are tried, where each file is taken for a dead reader's before it is locked."""
CANNOT_LOOK = "cannot look which generations readers need"


class Pin:
    """A file that keeps ``generation`` while it is open. ``name``: in the folder that was opened."""

    def __init__(self, folder: OpenFolder, generation: int) -> None:
        """Make the file. Then look whether the manifest is there: only a generation that still has its manifest is pinned.

        ``folder`` stays open longer than the pin. Raises OSError, where no file can be made or locked there.
        """
        self.generation = generation
        self._pid = os.getpid()
        self._unlinking = self._closing = Once()
        for _ in range(ATTEMPTS):
            self.name = f"reader.{secrets.token_hex(8)}"
            fd = os.open(self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder.fd)
            self._unlinking, self._closing = Once(partial(os.unlink, self.name, dir_fd=folder.fd)), Once(partial(os.close, fd))
            try:
                if not _lock(fd) or not folder.holds(self.name, fd):  # it was taken for a dead reader's
                    self.close()
                    continue
                _give_to_owner(fd, folder.fd)
                fields = _FIELDS.pack(_MAGIC, _VERSION, self._pid, generation)
                if os.pwrite(fd, fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields)), 0) != _BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return
            except BaseException:
                self.close()
                raise
        raise StoreLocked(f"{folder}: the files that a reader makes there are removed by other processes; open it again")

    def close(self) -> None:
        """Remove the file: the generation may be dropped from now on. In a forked child, only close the descriptor.
        Idempotent."""
        if os.getpid() == self._pid:
            self._unlinking.run()
        self._closing.run()


@dataclass(frozen=True)
class Reader:
    """A pin of a living reader. ``generation`` is None where it cannot be read: it may be any. ``process``: the one that made
    the pin, 0 where that cannot be read."""

    name: str
    generation: int | None
    process: int


@dataclass(frozen=True)
class Pins:
    """The pins of living readers in a folder."""

    readers: tuple[Reader, ...] = ()

    def needs(self, generation: int) -> bool:
        """Return whether a reader has, or may have, ``generation``."""
        for reader in self.readers:  # noqa: SIM110 - a commit asks of each generation that it drops, and most have no reader
            if reader.generation in (generation, None):
                return True
        return False

    @property
    def newest(self) -> int:
        """Largest number of a pinned generation; 0 where there is none."""
        return max((reader.generation or 0 for reader in self.readers), default=0)

    def told(self, folder: OpenFolder, generations: Collection[int]) -> str:
        """Return who needs ``generations``, in words; empty where nobody does."""
        found = []
        for reader in self.readers:
            if reader.generation is None or reader.generation in generations:
                what = "every generation" if reader.generation is None else f"generation {reader.generation}"
                found.append(f"{_process(folder, reader)} reads {what} ({folder.path / reader.name})")
        return "; ".join(found)


def look(folder: OpenFolder) -> Pins:
    """Return the pins of living readers, and remove those of dead ones. Raises OSError where the folder cannot be read now."""
    found = []
    for name in filter(_NAME.fullmatch, folder.names()):
        reader = _look_at(folder, name)
        if reader is not None:
            found.append(reader)
    return Pins(tuple(found))


def _look_at(folder: OpenFolder, name: str) -> Reader | None:
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd)
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        gone = error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR)  # removed, or no file that a reader makes
        return None if gone else Reader(name, None, 0)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        data = os.pread(fd, _BYTES + 1, 0)
        if not _lock(fd):
            data = os.pread(fd, _BYTES + 1, 0)
            return None if len(data) < _BYTES else _decoded(name, data)  # shorter: it has not looked for a manifest yet
        if (len(data) < _BYTES or _decoded(name, data).generation is not None) and folder.holds(name, fd):
            os.unlink(name, dir_fd=folder.fd)
        return None
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return Reader(name, None, 0)
    finally:
        os.close(fd)


def _decoded(name: str, data: bytes) -> Reader:
    if len(data) == _BYTES and data[_FIELDS.size :] == _SEAL.pack(xxhash.xxh3_64_intdigest(data[: _FIELDS.size])):
        magic, version, process, generation = _FIELDS.unpack_from(data)
        if (magic, version) == (_MAGIC, _VERSION) and generation <= LAST_GENERATION:
            return Reader(name, generation, process)
    return Reader(name, None, 0)


def _lock(fd: int) -> bool:
    """Lock the file; return False where another descriptor has the lock. Raises OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _give_to_owner(fd: int, folder: int) -> None:
    """Let the folder's owner open a pin that root makes there."""
    owner = os.fstat(folder)
    if os.geteuid() != owner.st_uid:
        with contextlib.suppress(OSError):
            os.fchown(fd, owner.st_uid, owner.st_gid)


def _process(folder: OpenFolder, reader: Reader) -> str:
    """Return which process has the pin locked. The number in the pin counts where the system does not say who has the lock."""
    named = f"process {reader.process}" if reader.process else "another process"
    try:
        fd = os.open(reader.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd)
    except OSError:
        return named
    try:
        found = holder(fd)
    finally:
        os.close(fd)
    return named if found == "another process" else found
