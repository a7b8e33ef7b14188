"""The data files of a store with several drives: one in each of the folders that the caller names.

The store's own folder has a file ``drives``: the store's UUID, and where the data files were when it was last opened. Errors
quote these folders, and nothing opens them: a folder is opened only because the caller named it. The data file with index i is
called ``drive.i`` and carries a UUID derived from the store's UUID and i, so each file identifies itself, and the folders may
be named in any order.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from tiered.errors import ManifestError, MisuseError
from tiered.format.data_file import MINIMUM_ALIGNMENT, DataFile
from tiered.format.folder import NO_DAMAGE, cannot_open
from tiered.format.locked_file import LockedFile
from tiered.system import LARGEST_ALIGNMENT

__all__ = [
    "DATA_FILE",
    "DRIVE",
    "IGNORED",
    "LIST_FILE",
    "MANIFEST",
    "MOST_DRIVES",
    "Drives",
    "DrivesRecord",
    "folders_of",
    "of_store",
    "open_drives",
    "read_record",
]

DATA_FILE = "data.0"
"""The data file of a store without a list of drives."""
LIST_FILE = "drives"
"""The list of drives."""
MOST_DRIVES = 64
MANIFEST = re.compile(r"manifest\.\d+")
IGNORED = {"lost+found"}
"""Names in a folder that do not count: it may be the root of a drive's filesystem."""
DRIVE = re.compile(r"drive\.(0|[1-9][0-9]?)", re.ASCII)
_MAGIC = b"TIEREDDR"
_VERSION = 1
_HEAD = struct.Struct("<8sI16s")  # magic, version, checksum of the payload
_MAX_BYTES = 1 << 20


def of_store(names: Iterable[str]) -> bool:
    """Return whether a folder with these names is that of a store, or of one of its drives."""
    return any(name in (DATA_FILE, LIST_FILE) or MANIFEST.fullmatch(name) or DRIVE.fullmatch(name) for name in names)


class DrivesRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file ``drives``: ``folders[i]`` is where the data file with index i was last, ``alignment`` that of
    all data files."""

    store: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    alignment: Annotated[int, msgspec.Meta(ge=MINIMUM_ALIGNMENT, le=LARGEST_ALIGNMENT)]
    folders: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MOST_DRIVES)]

    def uuid_of(self, index: int) -> bytes:
        """Return the UUID of the data file with that index."""
        return xxhash.xxh3_128_digest(bytes.fromhex(self.store) + struct.pack("<I", index))


class Drives:
    """The list of drives, locked, and the data files in order of their index. ``created``: whether the store is new."""

    def __init__(self, listed: LockedFile, record: DrivesRecord, files: tuple[DataFile, ...], *, created: bool) -> None:
        self.files, self.created = files, created
        self.uuid = bytes.fromhex(record.store)
        self.alignment = record.alignment
        self.open_folder = listed.folder
        self._listed = listed

    def strayed(self) -> str | None:
        """Return why the list's or a data file's path does not lead to it any more, with advice; None where all do."""
        found = [self._listed.strayed(), *(file.strayed() for file in self.files)]
        return next((why for why in found if why is not None), None)

    def close(self) -> None:
        self._listed.close()

    def remove(self) -> None:
        self._listed.remove()


def folders_of(folder: Path) -> str:
    """Return the folders in which a store's data files were last, as an error message quotes them."""
    try:
        record = read_record(folder)
    except (OSError, ManifestError):
        record = None
    return _named(record.folders) if record else "paths=[...]"


def read_record(folder: Path, at: int | None = None) -> DrivesRecord | None:
    """Return the list of drives of a store; None where the file is empty. ``at``: a descriptor of the folder.

    Raises OSError, ManifestError.
    """
    name = folder / LIST_FILE if at is None else LIST_FILE
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    with open(fd, "rb") as file:
        return _decode(file.read(_MAX_BYTES + 1), folder)


def open_drives(folder: Path, paths: Sequence[Path], growth: int) -> Drives:
    """Make or reopen the data files of the store in ``folder``, one in each of ``paths``.

    Raises MisuseError (folders that are not the store's, or are foreign), StoreLocked, ManifestError (a drive that is missing,
    damaged, or another store's). Then nothing was changed, and new files and folders are removed.
    """
    _refuse_paths(folder, paths)
    inside = {path.name for path in paths if path.parent == folder}
    with contextlib.ExitStack() as undo:
        listed = LockedFile(folder, LIST_FILE, lambda names: _refuse_folder(folder, set(names) - inside), os.O_CREAT)
        undo.callback(listed.discard)
        record = _decode(os.pread(listed.fd, _MAX_BYTES + 1, 0), folder)
        committed = any(MANIFEST.fullmatch(name) for name in listed.folder.names())
        if record is None and committed:
            raise ManifestError(f"{folder} has a manifest, but its file {LIST_FILE} is missing or empty")
        if record is not None and len(record.folders) != len(paths):
            raise MisuseError(
                f"{folder} keeps its tensors on {len(record.folders)} drives, not {len(paths)}: {_named(record.folders)}"
            )
        where = dict(enumerate(paths)) if record is None else _by_index(folder, record, paths, committed)
        files = {}
        for index in sorted(where):
            files[index] = _open_file(folder, where[index], index, record, committed, growth)
            undo.callback(files[index].discard)
        now = tuple(_shown(where[index]) for index in sorted(where))
        created = record is None
        if record is None:
            record = DrivesRecord(uuid.uuid4().hex, max(file.wants for file in files.values()), now)
            try:
                listed.replace(_encode(record))
            except OSError as error:
                raise MisuseError(f"{folder} cannot hold a store: {error.strerror}; make room there") from error
        for index, file in files.items():
            if file.blank:
                file.begin(record.alignment, record.uuid_of(index), index)
            else:
                file.look()
        if record.folders != now:
            with contextlib.suppress(OSError):  # only errors quote it
                listed.replace(_encode(DrivesRecord(record.store, record.alignment, now)))
        undo.pop_all()
    return Drives(listed, record, tuple(files[index] for index in sorted(files)), created=created)


def _refuse_paths(folder: Path, paths: Sequence[Path]) -> None:
    if len(paths) > MOST_DRIVES:
        raise MisuseError(f"a store has at most {MOST_DRIVES} drives, not {len(paths)}")
    seen = {os.path.realpath(folder)}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise MisuseError(f"{path} is named twice, or is the store's own folder; each drive needs a folder of its own")
        seen.add(real)


def _refuse_folder(folder: Path, names: set[str]) -> None:
    """Raise MisuseError unless the folder is empty or that of a store with several drives, ManifestError without its list."""
    if LIST_FILE in names:
        return
    if DATA_FILE in names:
        raise MisuseError(f"{folder} keeps its tensors in its own folder: open it without paths=")
    if any(MANIFEST.fullmatch(name) for name in names):
        raise ManifestError(f"{folder} has a manifest, but its file {LIST_FILE} is missing or empty")
    if names - IGNORED:
        raise MisuseError(f"{folder} is not a tiered store; name an empty or new folder")


def _by_index(folder: Path, record: DrivesRecord, paths: Sequence[Path], committed: bool) -> dict[int, Path]:
    """Return which of ``paths`` has the data file of each index, by file names; paths without one get the indices that are
    left."""
    found: dict[int, Path] = {}
    without = []
    for path in paths:
        try:
            numbers = [int(match[1]) for match in map(DRIVE.fullmatch, os.listdir(path)) if match]
        except OSError as error:
            if error.errno in NO_DAMAGE:
                raise cannot_open(path, error) from error
            numbers = []
        if len(numbers) > 1:
            raise ManifestError(f"{path} has data files of several drives; each drive needs a folder of its own")
        if not numbers:
            without.append(path)
        for number in numbers:
            if number >= len(paths):
                raise ManifestError(f"{path} has drive.{number} of another store than {folder}")
            if number in found:
                raise ManifestError(f"{path} and {found[number]} both have a drive.{number}; those of {folder} differ")
            found[number] = path
    if without and committed:
        raise ManifestError(
            f"{without[0]} has no data file of the store in {folder}; is the drive mounted? "
            f"Its drives were last in {_named(record.folders)}"
        )
    left = iter(sorted(set(range(len(paths))) - set(found)))
    return found | dict(zip(left, without, strict=True))


def _open_file(folder: Path, path: Path, index: int, record: DrivesRecord | None, committed: bool, growth: int) -> DataFile:
    name = f"drive.{index}"

    def accept(names: list[str]) -> None:
        if name not in names:
            refuse_others(names)

    def refuse_others(names: list[str]) -> None:
        if set(names) - {name} - IGNORED:
            raise MisuseError(f"{path} holds other things than {name} of the store in {folder}; name an empty or new folder")

    try:
        file = DataFile(path, name, accept, growth, flags=0 if committed else os.O_CREAT)
    except FileNotFoundError as error:
        raise ManifestError(f"{path} has no data file of the store in {folder}") from error
    try:
        if file.blank:
            if committed:
                raise ManifestError(f"{file.path} is empty; it was a data file of the store in {folder}")
            refuse_others(file.open_folder.names())
            return file
        file.adopt()
        if record is None:
            raise MisuseError(f"{file.path} belongs to another store than {folder}; name an empty or new folder")
        if (file.uuid, file.index, file.alignment) != (record.uuid_of(index), index, record.alignment):
            raise ManifestError(f"{file.path} is not drive {index} of the store in {folder}, but of another store or place")
    except BaseException:
        file.discard()
        raise
    return file


def _shown(path: Path) -> str:
    """Return a path as text; names may hold bytes that are not valid text."""
    return str(path).encode(errors="backslashreplace").decode()


def _named(folders: Sequence[str]) -> str:
    return "paths=[" + ", ".join(map(repr, folders)) + "]"


# The list, as bytes


def _encode(record: DrivesRecord) -> bytes:
    body = msgspec.json.encode(record)
    return _HEAD.pack(_MAGIC, _VERSION, xxhash.xxh3_128_digest(body)) + body


def _decode(data: bytes, folder: Path) -> DrivesRecord | None:
    """Decode the list; None for an empty file, which an interrupted creation leaves. Raises ManifestError for any damage."""
    path = folder / LIST_FILE
    if not data:
        return None
    if len(data) > _MAX_BYTES or len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise ManifestError(f"{path} is not a list of drives, or is damaged")
    _, version, digest = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise ManifestError(f"{path} has format version {version}; this program reads version {_VERSION}")
    body = data[_HEAD.size :]
    if xxhash.xxh3_128_digest(body) != digest:
        raise ManifestError(f"{path} is damaged (its checksum does not match)")
    try:
        record = msgspec.json.decode(body, type=DrivesRecord)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not what a list of drives holds: {error}") from None
    if record.alignment & (record.alignment - 1):
        raise ManifestError(f"{path} names an alignment of {record.alignment}")
    return record
