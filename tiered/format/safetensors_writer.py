"""The writer of safetensors files with their index, and of small files beside them: all of them, durable, or none.

Files have temporary names until the last byte of the last one is on the disk. Their blocks are allocated first, so a full disk
is found before anything is computed. Existing files are replaced only on request, and only where their index says that they are
of an earlier export. While they are replaced, a hidden file says of which ones this is true, so that who kills the process can
have it done again; and what is beside the weights has changed before the first of them, so weights never have another's
configuration.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tiered.errors import CapacityError, MisuseError, TieredError, one_of
from tiered.format.drives import of_store
from tiered.format.safetensors import INDEX, MAX_HEADER, SINGLE, SafetensorsEntry, encode_header
from tiered.types import format_size, parse_size, with_unit

__all__ = ["Existing", "Shards"]

MADE_BY = "tiered"
SMALLEST_SHARD = 1 << 10
"""Bytes: less would be a file for each tensor."""
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors", re.ASCII)
_PART = re.compile(r"\..+\.tiered-part")
_REPLACED = ".model.safetensors.replaced.json"
"""Names the files that are being replaced, and those that replace them, as an index does."""
_HEADER_SHARE = 50_000_000
"""Estimated bytes of header at which a file gets no more tensors."""
_WRITTEN = 64 << 20
"""Bytes after which they are synced to the disk, so that they do not fill the page cache."""

Existing = str
"""Handling of files that an earlier export left: "refuse" or "overwrite"."""


class Shards:
    """The files of an export: ``entries``, in their order, divided into as few as ``limit`` (bytes of tensors, or "5GB")
    allows, and the contents of files ``beside`` them, by name, which replace what is there of that name."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        entries: Sequence[SafetensorsEntry],
        limit: int | str,
        existing: Existing,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        """Divide the entries. Raises MisuseError for bad arguments, two tensors of one name, files that exist already, and the
        folder of a store."""
        one_of("existing", existing, ("refuse", "overwrite"))
        most = parse_size(limit, "shard")
        if most < SMALLEST_SHARD:
            raise MisuseError(f"a file has at least 1 KiB, which shard={limit!r} is not{with_unit(limit)}")
        self.folder = Path(os.path.expanduser(folder))
        self.total = sum(entry.spec.nbytes for entry in entries)
        names = [entry.name for entry in entries]
        if not names:
            raise MisuseError("there is no tensor to write")
        if len(set(names)) != len(names) or "__metadata__" in names:
            twice = next((name for name in names if names.count(name) > 1), "__metadata__")
            raise MisuseError(f"{twice!r} cannot be the name of a tensor in these files, or is that of two")
        self._shards = [encode_header(shard) for shard in _divided(entries, most)]
        self._names = _names(len(self._shards))
        self._place = {
            entry.name: (number, entry.offset) for number, (_, placed) in enumerate(self._shards) for entry in placed
        }
        self._entries = entries
        self._existing, self._beside = existing, dict(beside or {})
        self._old = self._refuse_others()

    @property
    def files(self) -> list[str]:
        """Names of the files in the folder, without the index."""
        return list(self._names)

    def write(self, contents: Iterator[memoryview], progress: Callable[[int, int], None] | None = None) -> None:
        """Write ``contents``: the bytes of the entries in their order, in pieces that end where an entry does.

        ``progress`` is called with the bytes so far and in all; it may raise, to stop. After an error nothing of the new export
        stays; an export to be overwritten is lost only if the error strikes the final renames. Raises CapacityError (no room),
        TieredError, and what ``contents`` raises.
        """
        try:
            _make_folder(self.folder)
            with contextlib.closing(_Folder(self.folder)) as folder:
                self._old = self._refuse_others()
                try:
                    for name, (header, placed) in zip(self._names, self._shards, strict=True):
                        folder.reserve(name, max(len(header), *(entry.offset + entry.spec.nbytes for entry in placed)))
                    self._write_all(folder, contents, progress or (lambda done, total: None))
                    for name, contained in self._beside.items():
                        folder.write_small(name, contained)
                    weights = {entry.name: self._names[self._place[entry.name][0]] for entry in self._entries}
                    folder.write_small(INDEX, self._index(weights))
                    folder.write_small(_REPLACED, self._index({name: name for name in {*self._names, *self._old}}))
                    folder.publish([*self._beside, *self._names, INDEX], sorted(self._old))
                except BaseException:
                    folder.discard()
                    raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise CapacityError(
                    f"no room for {format_size(self.total)} of tensors in {self.folder} ({error.strerror}); nothing was left "
                    "there: make room, or name a folder on another drive"
                ) from error
            where = error.filename or self.folder
            raise TieredError(f"cannot write {where}: {error.strerror} (errno {error.errno}); name another folder") from error
        finally:
            close = getattr(contents, "close", None)
            if close is not None:
                close()  # a generator may hold resources

    def _write_all(self, folder: _Folder, contents: Iterator[memoryview], progress: Callable[[int, int], None]) -> None:
        done, current, fd, unsent = 0, -1, -1, 0
        try:
            for entry in self._entries:
                number, at = self._place[entry.name]
                if number != current:
                    if fd >= 0:
                        _finish(fd)
                    current, fd, unsent = number, folder.open(self._names[number]), 0
                    _pwrite(fd, memoryview(self._shards[number][0]), 0)
                rest = entry.spec.nbytes
                while rest:
                    piece = next(contents)
                    nbytes = piece.nbytes
                    assert 0 < nbytes <= rest, "a piece ends where its tensor does"
                    _pwrite(fd, piece, at)
                    del piece  # it may be memory of a store
                    at, rest, done, unsent = at + nbytes, rest - nbytes, done + nbytes, unsent + nbytes
                    if unsent >= _WRITTEN:
                        os.fdatasync(fd)
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                        unsent = 0
                    progress(done, self.total)
            _finish(fd)
        finally:
            folder.close_files()

    def _index(self, weights: Mapping[str, str]) -> bytes:
        index = {"metadata": {"total_size": self.total, "made_by": MADE_BY}, "weight_map": weights}
        return (json.dumps(index, indent=2) + "\n").encode()

    def _refuse_others(self) -> set[str]:
        """Return the files of an earlier export, to be replaced. Raises MisuseError for foreign files, or where none may be
        replaced."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise MisuseError(f"cannot write to {self.folder}: {error.strerror}; name another folder") from error
        if of_store(names):
            raise MisuseError(f"{self.folder} is the folder of a store, which has files of its own: name another folder")
        there = {name for name in names if _WEIGHTS.fullmatch(name) or name == INDEX}
        if not there:
            return set()
        ours, replaced = _ours(self.folder / INDEX), _ours(self.folder / _REPLACED)
        foreign = sorted(there - (ours or set()) - (replaced or set()) - (set() if ours is None else {INDEX}))
        if foreign:
            what = self.folder / foreign[0]
            raise MisuseError(f"{what} exists already and is not of an export, so it is kept: name another folder")
        if self._existing == "refuse":
            raise MisuseError(f"{self.folder} holds an earlier export: name another folder, or existing='overwrite'")
        return there - {INDEX}


class _Folder:
    """The folder that an export writes to. Files are named by their final names, which ``publish`` gives them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._made: list[str] = []
        self._old: Collection[str] = ()
        self._files: list[int] = []
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in filter(_PART.fullmatch, os.listdir(self._fd)):  # of a killed export: nobody else has the lock
                os.unlink(name, dir_fd=self._fd)
        except BlockingIOError:
            os.close(self._fd)
            raise MisuseError(f"another export is writing to {folder}: name another folder") from None
        except BaseException:
            os.close(self._fd)
            raise

    def reserve(self, name: str, nbytes: int) -> None:
        self._made.append(_part(name))
        fd = os.open(_part(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=self._fd)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, nbytes)
        finally:
            os.close(fd)

    def open(self, name: str) -> int:
        self.close_files()
        self._files.append(os.open(_part(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd))
        return self._files[0]

    def close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def write_small(self, name: str, contents: bytes) -> None:
        self.reserve(name, max(len(contents), 1))  # an empty file has no blocks
        fd = self.open(name)
        os.ftruncate(fd, len(contents))
        _pwrite(fd, memoryview(contents), 0)
        _finish(fd)
        self.close_files()

    def publish(self, names: Sequence[str], old: Collection[str]) -> None:
        """Remove the ``old`` files, their index first; then give the new ones their names, in order."""
        there, self._old = set(os.listdir(self._fd)), old
        self._rename(_REPLACED)
        os.fsync(self._fd)
        for name in (INDEX, *old):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)
        for name in names:
            if name == names[-1]:
                os.fsync(self._fd)  # an index never exists without its files
            if name not in there or name in old or name == INDEX:
                self._made.append(name)
            self._rename(name)
        os.fsync(self._fd)
        os.unlink(_REPLACED, dir_fd=self._fd)

    def _rename(self, name: str) -> None:
        os.rename(_part(name), name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def discard(self) -> None:
        self.close_files()
        for name in reversed(self._made):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
        with contextlib.suppress(OSError):
            if not {*os.listdir(self._fd)} & {*self._old}:
                os.unlink(_REPLACED, dir_fd=self._fd)

    def close(self) -> None:
        self.close_files()
        os.close(self._fd)


def _divided(entries: Sequence[SafetensorsEntry], most: int) -> list[list[SafetensorsEntry]]:
    shards: list[list[SafetensorsEntry]] = [[]]
    held = header = 0
    for entry in entries:
        names = 6 * len(entry.name) + 200
        if shards[-1] and (held + entry.spec.nbytes > most or header + names > _HEADER_SHARE):
            shards.append([])
            held = header = 0
        shards[-1].append(entry)
        held, header = held + entry.spec.nbytes, header + names
    return shards


def _names(count: int) -> list[str]:
    """Return the names that Hugging Face's libraries use for ``count`` files."""
    return [SINGLE] if count == 1 else [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _ours(index: Path) -> set[str] | None:
    """Return the files of the export that this index is of; None where it is not an index of ours."""
    try:
        status = index.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_HEADER:
            return None
        found = json.loads(index.read_bytes())
        return set(found["weight_map"].values()) if found["metadata"]["made_by"] == MADE_BY else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        return None


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _part(name: str) -> str:
    return f".{name}.tiered-part"


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _finish(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
