"""The protocol that makes a manifest durable: one file ``manifest.G`` per generation G, in the store's folder.

A generation exists from the moment its manifest has its name and the folder is synced. One that is dropped has the name
``manifest.G.dropped`` first, under which nobody opens it, until no reader has it pinned (see ``pins``). Opening never follows a
symbolic link in the last part of a name and never waits on a FIFO. Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tiered.errors import CommitError, ManifestError, MisuseError, TieredError
from tiered.format.drives import DATA_FILE
from tiered.format.folder import NO_DAMAGE, SHORTAGES, OpenFolder, cannot_open, names_in
from tiered.format.manifest import HEADER_BYTES, MAX_BYTES, Manifest, decode
from tiered.format.pins import CANNOT_LOOK, Pin, Pins, look

__all__ = [
    "Folder",
    "Taken",
    "abandon",
    "clean",
    "drop",
    "dropped",
    "existing",
    "fingerprint",
    "folder_of",
    "generations",
    "load",
    "load_dropped",
    "pinned",
    "pins_in",
    "prepare",
    "present",
    "publish",
    "retire",
    "set_aside",
    "sync",
    "take",
]

Folder = OpenFolder | int | str | os.PathLike[str]
"""A store's folder: held open, its descriptor, or its path."""


LISTINGS = 100
"""Attempts to read the newest generation before it is an error that each was dropped between its listing and its reading."""
_NAME = re.compile(r"manifest\.([1-9][0-9]{0,17})(\.dropped)?", re.ASCII)
_TMP_NAME = re.compile(r"manifest\.[1-9][0-9]{0,17}\.tmp", re.ASCII)


def prepare(folder: Folder, generation: int, data: bytes | bytearray) -> None:
    """Make ``data``, a manifest, durable in ``folder`` under a temporary name; older generations are not touched.

    The data files that it names must have been synced before. Raises ``CommitError``; then nothing of it is left, as far as the
    file system allows its removal.
    """
    temporary = _temporary(generation)
    with _opened(folder, CommitError) as at:
        doing, made = "create", False
        try:
            file = _create(at, temporary)
            made = True
            try:
                doing = "write"
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(file, rest) :]
                doing = "sync"
                os.fsync(file)
            finally:
                os.close(file)
        except BaseException as error:
            if made:
                _remove(at, temporary)
            if isinstance(error, OSError):
                _fail(CommitError, f"cannot {doing}", folder, temporary, error)
            raise


def abandon(folder: Folder, generation: int) -> None:
    """Remove a prepared manifest that is not to be published, as far as the file system allows."""
    with _opened(folder, CommitError) as at:
        _remove(at, _temporary(generation))


def publish(folder: Folder, generation: int) -> None:
    """Rename the prepared manifest to ``manifest.G``; when this returns, the generation is durable.

    Raises ``CommitError``; then G must not be tried again: its name is removed as far as the file system allows, but after a
    failed sync of the folder the result of a power loss is unknown. Its extents must be treated as in use until a later
    generation is durable; where a reader has taken G already, its manifest stays as a dropped one.

    Order (rename(2), fsync(2)): a name must never appear before the bytes that it names, and a rename is durable only with the
    folder that holds it.
    """
    name, temporary = f"manifest.{generation}", _temporary(generation)
    with _opened(folder, CommitError) as at:
        doing, ours = "rename", temporary
        try:
            if _exists(at, name):
                raise CommitError(f"{_where(folder, name)} exists already; a generation is written once")
            os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
            doing, ours = "sync the folder of", name
            os.fsync(at)
        except BaseException as error:
            if ours == name and isinstance(folder, OpenFolder):
                _withdraw(folder, generation)
            else:
                _remove(at, ours)
            if isinstance(error, OSError):
                _fail(CommitError, f"cannot {doing}", folder, ours, error)
            raise


def _withdraw(folder: OpenFolder, generation: int) -> None:
    """Take the name from a generation that is not acknowledged, as far as the file system allows."""
    try:
        set_aside(folder, generation)
        if not pins_in(folder).needs(generation):
            drop(folder, generation)
    except TieredError:
        _remove(folder.fd, f"manifest.{generation}")


def generations(folder: Folder) -> list[int]:
    """Return the generations whose manifest is in ``folder``, oldest first. Other names are ignored."""
    return _numbered(folder)[0]


def dropped(folder: Folder) -> list[int]:
    """Return the generations that were dropped while readers had them, or whose drop was interrupted; oldest first."""
    return _numbered(folder)[1]


def _numbered(folder: Folder) -> tuple[list[int], list[int]]:
    """Return the generations in ``folder``, and the dropped ones, by one listing; each oldest first."""
    there: list[int] = []
    aside: list[int] = []
    with _opened(folder, ManifestError) as at:
        try:
            names = names_in(at)
        except OSError as error:
            _fail(ManifestError, "cannot list", folder, "", error)
    for name in names:
        if match := _NAME.fullmatch(name):
            (aside if match[2] else there).append(int(match[1]))
    return sorted(there), sorted(aside)


def pins_in(folder: OpenFolder) -> Pins:
    """Return the pins of living readers, and remove those of dead ones. Raises ManifestError, TieredError."""
    try:
        return look(folder)
    except OSError as error:
        _fail(ManifestError, CANNOT_LOOK, folder, "", error)


def pinned(folder: OpenFolder, generation: int | None) -> Taken:
    """Take ``generation``, or the newest one, with a pin that keeps it until it is closed.

    Pins of dead readers are removed before. Raises MisuseError where there is no such store or generation, ManifestError for
    damage, and OSError where no pin can be made in the folder.
    """
    present(folder, generation)  # before anything is made or removed
    pins_in(folder)
    for _ in range(LISTINGS):
        there = present(folder, generation)
        number = there[-1] if generation is None else generation
        pin = Pin(folder, number)
        try:
            manifest = load(folder, number)
            assert manifest is not None
            return Taken(manifest, pin)
        except BaseException as error:
            pin.close()
            if not isinstance(error, ManifestError) or number in generations(folder):
                raise
    raise ManifestError(f"{_where(folder, '')} changes too fast to be read: a job commits there; try again")


@dataclass
class Taken:
    """A generation that a reader has: its manifest, and the pin that keeps it.

    Where no pin can be made, ``pin`` is None and ``why`` the system's reason: a lock on the data files has to keep writers out.
    """

    manifest: Manifest
    pin: Pin | None = None
    why: str = ""

    def close(self) -> None:
        """Let the generation go. Idempotent."""
        if self.pin is not None:
            self.pin.close()


def take(folder: OpenFolder, generation: int | None) -> Taken:
    """Take ``generation``, or the newest one. Raises MisuseError where there is none, ManifestError for damage."""
    try:
        return pinned(folder, generation)
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return Taken(existing(folder, generation), why=os.strerror(error.errno or 0).lower())


def existing(folder: Folder, generation: int | None) -> Manifest:
    """Return the manifest of ``generation``, or of the newest one. Raises MisuseError where there is none, ManifestError for
    damage."""
    present(folder, generation)
    manifest = load(folder, generation)
    assert manifest is not None
    return manifest


def folder_of(path: Path) -> OpenFolder:
    """Open the folder of an existing store. Raises ``MisuseError``, and ``TieredError`` where the process has no descriptor
    left."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            return OpenFolder(path)
    raise MisuseError(f"{path} is not a folder: name that of a store")


def present(folder: Folder, generation: int | None) -> list[int]:
    """Return the generations of the store in ``folder``, oldest first: at least one, and ``generation`` among them if given.

    Raises ``MisuseError`` where there is no such store or generation. The manifests are not read.
    """
    there = generations(folder) or generations(folder)  # a commit may have replaced the only one during the listing
    if not there:
        with _opened(folder, ManifestError) as at:
            begun = DATA_FILE in names_in(at)
        why = (
            "an import, or another program, has begun it, and is at work or was stopped early: to run the same command again "
            "finishes it"
            if begun
            else "it has no manifest"
        )
        raise MisuseError(f"{_where(folder, '')} is not a tiered store with a commit: {why}")
    if generation is not None and generation not in there:
        raise MisuseError(f"{_where(folder, '')} has no generation {generation}; there are: {', '.join(map(str, there))}")
    return there


def load(folder: Folder, generation: int | None = None, *, limit: int = MAX_BYTES) -> Manifest | None:
    """Return the manifest of ``generation``, or of the newest one; None when the folder has no generation at all.

    A manifest that has its name was complete when it got it. So an invalid newest one is damage, not an unfinished commit, and
    raises ``ManifestError``: whether to go back to older tensors is the caller's decision. Raises ``TieredError`` where the
    process or the machine lacks the resources to read it now, ``MisuseError`` where it has no permission: neither is damage.
    """
    with _opened(folder, ManifestError) as at:
        for _ in range(LISTINGS):
            there = generations(at)
            if generation is None and not there:
                return None
            number = there[-1] if generation is None else generation
            if number not in there:
                held = ", ".join(map(str, there)) or "none"
                raise ManifestError(f"no generation {number} in {_where(folder, '')}; there are: {held}")
            name = f"manifest.{number}"
            try:
                return decode(_read(at, name, limit), generation=number, limit=limit)
            except OSError as error:
                why = f"cannot be read: {os.strerror(error.errno or 0)} (errno {error.errno})"
                if error.errno in NO_DAMAGE:
                    raise cannot_open(_where(folder, name), error, "read") from error
                if generation is None and isinstance(error, FileNotFoundError):
                    continue  # a running job has committed newer ones and dropped it meanwhile
            except MemoryError:
                raise TieredError(f"{_where(folder, name)} cannot be read: there is not enough memory") from None
            except ManifestError as error:
                why = str(error)
            break
        others = [str(other) for other in there if other != number]
        advice = f"; generations here: {', '.join(map(str, there))}"
        if others:
            back = f"open with generation={others[-1]}, or move manifest.{number} out of the folder"
            advice += f"; to go back to generation {others[-1]}, {back}"
        else:
            advice += ", and no other one to go back to"
        raise ManifestError(f"{_where(folder, name)}: {why}{advice}")


def retire(folder: OpenFolder, numbers: Iterable[int]) -> list[int]:
    """Drop those of the generations ``numbers`` that no reader has pinned, durably, and return them. Only after a newer one is
    durable.

    A manifest loses its name before the second look at the pins: a reader that took it before is seen then, and none can take
    it later. Raises ManifestError, TieredError; then nothing may be used again that these generations reference.
    """
    there, aside = map(set, _numbered(folder))
    first = pins_in(folder)
    going = [number for number in numbers if not first.needs(number)]
    renamed = [number for number in going if number in there]
    for number in renamed:
        set_aside(folder, number)
    second = pins_in(folder) if renamed else first
    gone = []
    for number in going:
        if not second.needs(number):
            if number in there or number in aside:
                drop(folder, number)
            gone.append(number)
        elif number in there:
            _rename(folder, _dropped_name(number), f"manifest.{number}")
    if gone:
        sync(folder)
    return gone


def set_aside(folder: Folder, generation: int) -> None:
    """Rename the manifest of ``generation``, so that nobody takes it from now on. Raises ManifestError, also for a
    folder."""
    name = f"manifest.{generation}"
    with _opened(folder, ManifestError) as at, contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            raise ManifestError(f"cannot remove {_where(folder, name)}: it is a folder")
    _rename(folder, name, _dropped_name(generation))


def _rename(folder: Folder, name: str, other: str) -> None:
    with _opened(folder, ManifestError) as at:
        try:
            os.rename(name, other, src_dir_fd=at, dst_dir_fd=at)
        except OSError as error:
            _fail(ManifestError, "cannot rename", folder, name, error)


def load_dropped(folder: Folder, generation: int) -> Manifest:
    """Return the manifest of a generation that was dropped, for the extents that its readers need. Raises ManifestError, and
    TieredError as ``load``."""
    name = _dropped_name(generation)
    with _opened(folder, ManifestError) as at:
        try:
            return decode(_read(at, name, MAX_BYTES), generation=generation)
        except OSError as error:
            _fail(ManifestError, "cannot read", folder, name, error)
        except MemoryError:
            raise TieredError(f"{_where(folder, name)} cannot be read: there is not enough memory") from None
        except ManifestError as error:
            raise ManifestError(f"{_where(folder, name)}: {error}") from None


def fingerprint(folder: Folder, generation: int) -> str:
    """Return what tells ``generation`` from any other that has, or had, its number or its folder; empty where it is absent."""
    with _opened(folder, ManifestError) as at:
        try:
            fd = os.open(f"manifest.{generation}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        except OSError:
            return ""
        try:
            return os.read(fd, HEADER_BYTES).hex()  # it has the checksum of all that follows
        finally:
            os.close(fd)


def drop(folder: Folder, generation: int) -> None:
    """Remove the manifest of ``generation``, set aside or not, and nothing else. Only after a newer one is durable.

    Not synced: should a power loss bring the name back, the newer generation still wins, and the extents that were reused since
    fail their checksums.
    """
    with _opened(folder, ManifestError) as at:
        name = f"manifest.{generation}"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_dropped_name(generation), dir_fd=at)
                return
            os.unlink(name, dir_fd=at)
        except OSError as error:
            _fail(ManifestError, "cannot remove", folder, name, error)


def sync(folder: Folder) -> None:
    """Make removals durable. Raises ManifestError."""
    with _opened(folder, ManifestError) as at:
        try:
            os.fsync(at)
        except OSError as error:
            _fail(ManifestError, "cannot sync", folder, "", error)


def clean(folder: Folder) -> list[str]:
    """Remove what an interrupted ``prepare`` left behind, and return the removed names."""
    removed = []
    with _opened(folder, ManifestError) as at:
        name = ""
        try:
            for name in sorted(filter(_TMP_NAME.fullmatch, names_in(at))):
                if stat.S_ISREG(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=at)
                    removed.append(name)
        except OSError as error:
            _fail(ManifestError, "cannot remove", folder, name, error)
    return removed


def _opened(folder: Folder, kind: type[CommitError | ManifestError]) -> contextlib.AbstractContextManager[int]:
    """Return what gives the descriptor of a folder: one that is open stays open, a path's is closed again."""
    if isinstance(folder, OpenFolder):
        return contextlib.nullcontext(folder.fd)
    return contextlib.nullcontext(folder) if isinstance(folder, int) else _opened_by_path(folder, kind)


@contextlib.contextmanager
def _opened_by_path(folder: str | os.PathLike[str], kind: type[CommitError | ManifestError]) -> Iterator[int]:
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        _fail(kind, "cannot open", folder, "", error)
    try:
        yield at
    finally:
        os.close(at)


def _temporary(generation: int) -> str:
    return f"manifest.{generation}.tmp"


def _dropped_name(generation: int) -> str:
    return f"manifest.{generation}.dropped"


def _remove(at: int, name: str) -> None:
    """Remove the name if possible."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=at)


def _create(at: int, name: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, 0o600, dir_fd=at)
    except FileExistsError:
        # A regular file is from an interrupted commit; anything else is not ours.
        if not stat.S_ISREG(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            raise
    os.unlink(name, dir_fd=at)
    return os.open(name, flags, 0o600, dir_fd=at)


def _read(at: int, name: str, limit: int) -> bytes:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ManifestError("not a regular file")
        if status.st_size > limit:
            raise ManifestError(f"{status.st_size} bytes are more than the limit of {limit}")
        data = bytearray()
        while len(data) < status.st_size:
            some = os.read(file, status.st_size - len(data))
            if not some:
                break
            data += some
        return bytes(data)
    finally:
        os.close(file)


def _exists(at: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _where(folder: Folder, name: str) -> str:
    if isinstance(folder, OpenFolder):
        folder = folder.path
    if isinstance(folder, int):
        try:
            folder = os.readlink(f"/proc/self/fd/{folder}")
        except OSError:
            folder = f"(folder {folder})"
    return os.path.join(os.fspath(folder), name) if name else os.fspath(folder)


_READING = {"cannot open", "cannot list", "cannot read"}


def _fail(kind: type[CommitError | ManifestError], what: str, folder: Folder, name: str, error: OSError) -> NoReturn:
    number = error.errno or 0
    if kind is ManifestError and number in (NO_DAMAGE if what in _READING else SHORTAGES):
        raise cannot_open(_where(folder, name), error, what.removeprefix("cannot ")) from error
    raise kind(f"{what} {_where(folder, name)}: {os.strerror(number)} (errno {number})") from error
