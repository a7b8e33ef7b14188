"""``tiered.verify``: reads back every byte that a store's commits reference and compares it with its checksum.

No store is opened: the files are opened for reading, and the generations are pinned as readers pin them, so a job may have the
store open meanwhile. Where no pin can be made, a lock keeps jobs out. Bytes that several generations share are read once, in
the order of their offsets on the drives, through a few buffers of one piece each.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiered.errors import CorruptionError, ManifestError, MisuseError, ReadError, ShortTransfer, path_of
from tiered.format import generations, stripes
from tiered.format.data_file import MINIMUM_ALIGNMENT, FileAtRest
from tiered.format.drives import DATA_FILE, DRIVE, LIST_FILE, DrivesRecord, folders_of, read_record
from tiered.format.folder import NO_DAMAGE, OpenFolder, cannot_open
from tiered.format.generations import Taken
from tiered.format.locked_file import open_to_lock, open_to_read
from tiered.format.manifest import Extent, Manifest, TensorRecord
from tiered.store.pieces import DEPTH, Arriving, PieceReader
from tiered.tiers.disk import Disk
from tiered.tiers.dram import DramConfig, DramTier
from tiered.types import PIECE_BYTES, BackendName, Location

__all__ = ["CheckedGeneration", "Damage", "Verification", "verify"]


@dataclass(frozen=True)
class Damage:
    """A difference between the files and what was committed.

    ``what`` is wrong, in ``nbytes`` bytes at ``offset`` of the file ``path``, or (offset None) with the file as a whole.
    ``key`` is the tensor whose bytes these are, None where a file is damaged; ``generations`` are those that need the bytes,
    and ``written`` is the one in which the tensor was written.
    """

    what: str
    path: str
    offset: int | None = None
    nbytes: int = 0
    key: str | None = None
    generations: tuple[int, ...] = ()
    written: int | None = None

    def __str__(self) -> str:
        where = self.path if self.offset is None else f"{self.path} at byte {self.offset}, {self.nbytes} bytes"
        numbers = ", ".join(map(str, self.generations))
        of = f" of generation{'s' if len(self.generations) > 1 else ''} {numbers}" if numbers else ""
        whose = f"tensor {self.key!r}{of} (written in {self.written})" if self.key is not None else f"a file{of}"
        return f"{whose}: {where}: {self.what}"


@dataclass(frozen=True)
class CheckedGeneration:
    """A commit: its number of ``tensors``, their ``nbytes``, and how many of them are ``damaged``; None where its manifest
    cannot be read. ``obstacle``: the damaged file because of which it cannot be opened, even if its tensors are intact."""

    number: int
    tensors: int | None
    nbytes: int | None
    damaged: int | None
    obstacle: str | None = None

    @property
    def sound(self) -> bool:
        return self.damaged == 0 and self.obstacle is None


@dataclass(frozen=True)
class Verification:
    """The result of ``verify``. ``read``: bytes of tensors that were read, each once; ``tensors``: number of different ones."""

    folder: str
    generations: tuple[CheckedGeneration, ...]
    damages: tuple[Damage, ...]
    tensors: int
    read: int

    @property
    def sound(self) -> bool:
        return not self.damages


def verify(
    path: str | os.PathLike[str],
    *,
    paths: Sequence[str | os.PathLike[str]] | None = None,
    generation: int | None = None,
    backend: BackendName = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Read back all that the store in folder ``path`` has committed, or what ``generation`` needs, and return what is damaged.

    A job may have the store open: what it has committed by now is verified, and kept until the end. No tensor is changed, and
    the store of a process that died needs no repair before. ``paths`` are the folders of its data files where it has several
    drives; one that is left out counts as missing. ``progress`` is called with the bytes read so far and in all, after each
    piece; it may raise, to stop. Memory: 32 MiB, and the manifests.

    Damage, of a manifest too, is part of the result and no error. Raises MisuseError (no store there, no such generation, other
    paths than the store's), StoreLocked (a job has the store open, and has no sound commit yet, or the folder cannot be written
    to), and TieredError where the process has no descriptor, thread or memory left.
    """
    folder = _named(path)
    with contextlib.ExitStack() as stack:
        opened = _open_folder(folder)  # all files are opened in this folder, wherever its path leads meanwhile
        stack.callback(opened.close)
        taken, checked, problems = _load(opened, generation, stack)
        lock = not taken or any(one.pin is None for one in taken)
        files, listed, damages = _open_files(opened, paths, stack, lock=lock)
        if lock:  # again, now that the lock keeps commits out
            taken, checked, problems = _load(opened, generation, stack)
        manifests = [one.manifest for one in taken]
        damages += problems
        if not files and not checked:
            raise MisuseError(f"{folder} is not a tiered store: it has neither a data file nor a manifest")
        damages += _compare(folder, files, listed, manifests)
        tensors = _stored_tensors(manifests)
        reader = _Reader(files, tensors, progress or (lambda done, total: None))
        found = _joined(reader.damages(folder, backend))
    broken = Counter(number for _, number in {(damage.key, number) for damage in found for number in damage.generations})
    ends = _ends(files, tensors)
    counted = [
        one if one.tensors is None else replace(one, damaged=broken[one.number], obstacle=_obstacle(one.number, damages, ends))
        for one in checked
    ]
    return Verification(str(folder), tuple(counted), (*damages, *found), len(tensors), reader.read)


def _obstacle(number: int, damages: Sequence[Damage], ends: Mapping[tuple[str, int], int]) -> str | None:
    """Return the first damage to a file that generation ``number`` needs; damage that belongs to no generation affects all."""
    for one in damages:
        needed = not one.generations or number in one.generations
        if needed and (not one.offset or one.offset < ends.get((one.path, number), 0)):  # unused space at the end is not needed
            return f"{one.path}: {one.what}"
    return None


# Files


def _named(path: str | os.PathLike[str]) -> Path:
    """Return the folder that a store would open by this name. Raises MisuseError where it would refuse."""
    path_of(path, "the path of a store's folder")
    folder = Path(os.path.expanduser(path)).absolute()
    try:
        if folder.is_symlink():
            raise MisuseError(f"{folder} is a symbolic link; name the folder that it points to")
    except OSError as error:
        raise cannot_open(folder, error) from error
    return folder


def _open_folder(folder: Path) -> OpenFolder:
    try:
        return OpenFolder(folder, os.O_NOFOLLOW)
    except (FileNotFoundError, MisuseError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        why = cause.strerror if isinstance(cause, OSError) else error
        raise MisuseError(f"{folder} is not a tiered store: {why}") from error


def _open_files(
    opened: OpenFolder, paths: Sequence[str | os.PathLike[str]] | None, stack: contextlib.ExitStack, *, lock: bool
) -> tuple[dict[int, FileAtRest], DrivesRecord | None, list[Damage]]:
    """Return the data files that exist, by index, the list of drives, and what is wrong with these files."""
    folder = opened.path
    try:
        names = set(opened.names())
    except OSError as error:
        raise cannot_open(folder, error) from error
    if paths is None:
        if LIST_FILE in names:
            raise MisuseError(f"{folder} keeps its tensors in other folders, which have to be named: {folders_of(folder)}")
        if DATA_FILE not in names:
            return {}, None, []
        file, damages = _open_file(folder, DATA_FILE, 0, stack, opened.fd, lock=lock)
        return {0: file}, None, damages
    if DATA_FILE in names:
        raise MisuseError(f"{folder} keeps its tensors in its own folder: verify it without paths=")
    found: dict[int, FileAtRest] = {}
    damages = []
    record = None
    if LIST_FILE in names:
        try:
            stack.callback(os.close, (open_to_lock if lock else open_to_read)(folder, LIST_FILE, opened.fd))
            record = read_record(folder, opened.fd)
            if record is None:
                damages.append(Damage("is empty", str(folder / LIST_FILE)))
        except ManifestError as error:
            damages.append(Damage(_without(str(error), folder / LIST_FILE), str(folder / LIST_FILE)))
        except OSError as error:
            if error.errno in NO_DAMAGE:
                raise cannot_open(folder / LIST_FILE, error) from error
            damages.append(Damage(_cannot("open", error), str(folder / LIST_FILE)))
    else:
        damages.append(Damage("is missing", str(folder / LIST_FILE)))
    for place in map(_named, paths):
        indices = _indices(place)
        if len(indices) > 1:
            damages.append(Damage("has data files of several drives; each drive needs a folder of its own", str(place)))
        for index in indices:
            if index in found:
                raise MisuseError(f"{place} and {os.path.dirname(found[index].path)} both have a drive.{index}")
            found[index], more = _open_file(place, f"drive.{index}", index, stack, lock=lock)
            damages += more
    if record is not None and len(paths) > len(record.folders):
        raise MisuseError(f"{folder} keeps its tensors on {len(record.folders)} drives, not {len(paths)}: {folders_of(folder)}")
    return found, record, damages


def _indices(place: Path) -> list[int]:
    """Return the indices of the data files in the folder ``place``; none where it cannot be listed: its drive is missing."""
    try:
        return sorted(int(match[1]) for match in map(DRIVE.fullmatch, os.listdir(place)) if match)
    except OSError as error:
        if error.errno in NO_DAMAGE:
            raise cannot_open(place, error) from error
        return []


def _open_file(
    folder: Path, name: str, index: int, stack: contextlib.ExitStack, at: int | None = None, *, lock: bool
) -> tuple[FileAtRest, list[Damage]]:
    file = FileAtRest(folder, name, at, lock=lock)
    stack.callback(file.close)
    wrong = file.damage
    if file.fd < 0 and isinstance(wrong, OSError):
        if wrong.errno in NO_DAMAGE:
            raise cannot_open(file.path, wrong) from wrong
        return file, [Damage(_cannot("open", wrong), file.path)]
    if wrong is None and file.index == index:
        return file, []
    what = f"the header names file index {file.index}, not {index}"
    if wrong is not None:
        what = _cannot("read", wrong) if isinstance(wrong, OSError) else _without(str(wrong), file.path)
    return file, [Damage(what, file.path, 0, min(file.alignment, file.size))]


def _cannot(do: str, error: OSError) -> str:
    number = f" (errno {error.errno})" if error.errno else ""
    return f"cannot be {'opened' if do == 'open' else 'read'}: {error.strerror}{number}"


def _without(message: str, path: object) -> str:
    """Return the message without the path, which is reported beside it."""
    return message.removeprefix(str(path)).lstrip(": ")


# Manifests


def _load(
    opened: OpenFolder, generation: int | None, stack: contextlib.ExitStack
) -> tuple[list[Taken], list[CheckedGeneration], list[Damage]]:
    """Take the generations whose manifests can be read, newest first, until ``stack`` ends. Return them, the entry of each
    generation that exists, and what is wrong with the others."""
    folder = opened.path
    there = generations.generations(opened)
    if generation is not None:
        if generation not in there:
            raise MisuseError(f"{folder} has no generation {generation}; there are: {', '.join(map(str, there)) or 'none'}")
        there = [generation]
    found, checked, damages = [], [], []
    for number in reversed(there):
        path = str(folder / f"manifest.{number}")
        try:
            taken = generations.take(opened, number)
        except ManifestError as error:
            damages.append(Damage(_without(str(error), path), path, generations=(number,)))
            checked.append(CheckedGeneration(number, None, None, None))
            continue
        except MisuseError:
            if generation is None and number not in generations.generations(opened):  # a job has dropped it meanwhile
                continue
            raise
        except OSError as error:
            raise cannot_open(folder, error) from error
        stack.callback(taken.close)
        found.append(taken)
        sizes = [record.spec.nbytes for record in taken.manifest.tensors]
        checked.append(CheckedGeneration(number, len(sizes), sum(sizes), 0))
    return found, checked, damages


def _compare(
    folder: Path, files: Mapping[int, FileAtRest], listed: DrivesRecord | None, manifests: Sequence[Manifest]
) -> list[Damage]:
    """Return the differences between manifests and files: missing files, those of other stores, those that are too short."""
    damages = []
    for manifest in manifests:
        path = str(folder / f"manifest.{manifest.generation}")
        if listed is not None and manifest.store != listed.store:
            what = f"belongs to another store than {folder / LIST_FILE}"
            damages.append(Damage(what, path, generations=(manifest.generation,)))
    wanted: dict[tuple[int, str, str], list[Manifest]] = {}
    for manifest in manifests:
        for named in manifest.files:
            wanted.setdefault((named.index, named.name, named.uuid), []).append(manifest)
    for (index, name, uuid), needing in wanted.items():
        numbers = tuple(manifest.generation for manifest in needing)
        file = files.get(index)
        if file is None:
            where = str(folder / name) if name == DATA_FILE else name
            what = "is missing" if name == DATA_FILE else "is missing: none of the folders has it"
            damages.append(Damage(what, where, generations=numbers))
        elif file.damage is None and file.uuid.hex() != uuid:
            what = "is not the file that was committed to (its UUID is another)"
            damages.append(Damage(what, file.path, generations=numbers))
        most = max(manifest.files[index].nbytes for manifest in needing)
        if file is not None and file.fd >= 0 and file.size < most:
            short = f"ends at byte {file.size}; it had {most} bytes"
            damages.append(Damage(short, file.path, file.size, most - file.size, generations=numbers))
    return damages


@dataclass
class _StoredTensor:
    """A tensor with bytes as manifests describe it, in a store with that many data ``files``, and the generations whose
    manifests do so."""

    store: bytes
    record: TensorRecord
    files: int
    numbers: list[int]

    @property
    def extent(self) -> Extent:
        assert self.record.extent is not None
        return self.record.extent

    def place(self, at: int) -> tuple[int, int]:
        """Return the file of the tensor's byte ``at``, and its offset there."""
        if not stripes.is_striped(self.extent.file, self.files):
            return self.extent.file, self.extent.offset + at
        file, within = stripes.place(at, self.files)
        return file, self.extent.offset + within

    def ends(self) -> Iterator[tuple[int, int]]:
        """Yield where the extent ends in each file that has a part of it."""
        extent = self.extent
        for file, offset, nbytes in stripes.ranges(extent.file, extent.offset, extent.nbytes, self.files):
            yield file, offset + nbytes


def _stored_tensors(manifests: Sequence[Manifest]) -> list[_StoredTensor]:
    """Return each stored tensor once, whichever generations share it."""
    found: dict[tuple[str, int, TensorRecord], _StoredTensor] = {}
    for manifest in manifests:
        files = len(manifest.files)
        for record in manifest.tensors:
            if record.extent is not None:
                tensor = _StoredTensor(bytes.fromhex(manifest.store), record, files, [])
                found.setdefault((manifest.store, files, record), tensor).numbers.append(manifest.generation)
    return list(found.values())


def _ends(files: Mapping[int, FileAtRest], tensors: Sequence[_StoredTensor]) -> dict[tuple[str, int], int]:
    """Return where the last extent of each generation ends in each data file, by its path and the generation's number."""
    ends: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        for file, end in tensor.ends():
            for number in tensor.numbers if file in files else ():
                where = files[file].path, number
                ends[where] = max(ends.get(where, 0), end)
    return ends


# Reading


class _Reader:
    """A reader that verifies all pieces of ``tensors``, DEPTH of them in flight. ``read``: bytes that were read."""

    def __init__(
        self, files: Mapping[int, FileAtRest], tensors: Sequence[_StoredTensor], progress: Callable[[int, int], None]
    ) -> None:
        self._files, self._progress = files, progress
        self._tensors = sorted(tensors, key=lambda tensor: (tensor.extent.offset, tensor.extent.file))  # all drives at once
        self._total = sum(tensor.record.spec.nbytes for tensor in tensors)
        self._done = self.read = 0

    def damages(self, folder: Path, backend: BackendName) -> Iterator[Damage]:
        """Yield a damage for each damaged piece, as it is found."""
        dram, files = DramTier(DramConfig(DEPTH * PIECE_BYTES)), self._files
        alignment = max((file.wants for file in files.values()), default=MINIMUM_ALIGNMENT)
        try:
            for store, count in {(tensor.store, tensor.files) for tensor in self._tensors}:  # one, unless manifests are foreign
                there = [files.get(index, Location(-1, 0, f"drive.{index}")) for index in range(count)]
                with contextlib.closing(PieceReader(Disk(str(folder), store, alignment, there), backend)) as reader:
                    mine = (tensor for tensor in self._tensors if (tensor.store, tensor.files) == (store, count))
                    yield from self._read(reader, mine, [dram.address + place * PIECE_BYTES for place in range(DEPTH)])
        finally:
            dram.close()

    def _read(self, reader: PieceReader, tensors: Iterator[_StoredTensor], free: list[int]) -> Iterator[Damage]:
        waiting = ((tensor, begin) for tensor in tensors for begin in range(0, tensor.record.spec.nbytes, PIECE_BYTES))
        under_way: dict[Arriving, _StoredTensor] = {}
        while True:
            while free and (piece := next(waiting, None)) is not None:
                tensor, begin = piece
                nbytes, file = min(PIECE_BYTES, tensor.record.spec.nbytes - begin), self._files.get(tensor.place(begin)[0])
                if file is None or file.fd < 0:
                    why = _cannot("open", file.damage) if file and isinstance(file.damage, OSError) else "is missing"
                    yield self._damage(tensor, begin, nbytes, f"the file {why}")
                    self._tell(nbytes, 0)
                else:
                    under_way[reader.begin(tensor.record, begin, nbytes, free.pop())] = tensor
            if not under_way:
                return
            for one in reader.wait():
                tensor = under_way.pop(one)
                if one.error is not None:
                    yield self._damage(tensor, one.begin, one.nbytes, _wrong(one))
                free.append(one.address)
                self._tell(one.nbytes, one.nbytes if one.error is None or isinstance(one.error, CorruptionError) else 0)

    def _damage(self, tensor: _StoredTensor, begin: int, nbytes: int, what: str) -> Damage:
        (index, where), record = tensor.place(begin), tensor.record
        path = self._files[index].path if index in self._files else f"drive.{index}"
        return Damage(what, path, where, nbytes, record.key, tuple(sorted(tensor.numbers)), record.generation)

    def _tell(self, nbytes: int, read: int) -> None:
        self.read += read
        self._done += nbytes
        self._progress(self._done, self._total)


def _wrong(one: Arriving) -> str:
    """Return what is wrong with a piece that did not arrive as it was committed."""
    error = one.error
    if isinstance(error, CorruptionError):
        found = (ctypes.c_char * one.nbytes).from_address(one.address)
        return "wrong checksum" if any(found.raw) else "wrong checksum: zeros, as if it had never been written"
    if isinstance(error, ReadError):
        return f"cannot be read: {os.strerror(error.errno or 0)} (errno {error.errno})"
    return "the file ends before" if isinstance(error, ShortTransfer) else str(error)


def _joined(damages: Iterator[Damage]) -> list[Damage]:
    """Sort damages by place, and join adjacent pieces with the same damage."""
    found: list[Damage] = []
    for damage in sorted(damages, key=lambda one: (one.path, one.offset or 0, one.key or "")):
        last = found[-1] if found else None
        if last is not None and last.offset is not None and damage.offset == last.offset + last.nbytes:
            joined = replace(damage, offset=last.offset, nbytes=last.nbytes + damage.nbytes)
            if joined == replace(last, nbytes=joined.nbytes):
                found[-1] = joined
                continue
        found.append(damage)
    return found
