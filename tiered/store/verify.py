"""``tiered.verify``: reads back every byte that a store's commits reference and compares it with its checksum.

No store is opened: the files are opened for reading, and the generations are pinned as readers pin them, so a job may have the
store open meanwhile. Where no pin can be made, a lock keeps jobs out. Bytes that several generations share are read once, in
the order of their offsets on the drives, through a few buffers of one piece each.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiered.errors import ManifestError, MisuseError, path_of
from tiered.format import generations, stripes
from tiered.format.data_file import MINIMUM_ALIGNMENT, digest, read_header
from tiered.format.drives import DATA_FILE, DRIVE, LIST_FILE, Record, folders_of, read_record
from tiered.format.folder import NO_DAMAGE, OpenFolder, cannot_open
from tiered.format.locked_file import make_direct, open_to_lock, open_to_read
from tiered.format.manifest import Extent, Manifest, TensorRecord
from tiered.format.pins import Pin
from tiered.io.backends import open_backend
from tiered.store.at_rest import take
from tiered.system import direct_io_alignment
from tiered.tiers.dram import DramConfig, DramTier
from tiered.types import CHECKSUM_BYTES, PIECE_BYTES, BackendName, IORequest, Operation

__all__ = ["CheckedGeneration", "Damage", "Verification", "verify"]

DEPTH = 8
"""Buffers of PIECE_BYTES: pieces in flight while one is verified."""


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
        manifests, checked, problems, pins = _load(opened, generation)
        stack.callback(_close, pins)
        opening = open_to_read if manifests and len(pins) == len(manifests) else open_to_lock
        files, listed, damages = _open_files(opened, paths, stack, opening)
        if opening is open_to_lock:  # again, now that the lock keeps commits out
            manifests, checked, problems, more = _load(opened, generation)
            stack.callback(_close, more)
        damages += problems
        if not files and not checked:
            raise MisuseError(f"{folder} is not a tiered store: it has neither a data file nor a manifest")
        damages += _compare(folder, files, listed, manifests)
        tensors = _stored_tensors(manifests)
        reader = _Reader(files, tensors, progress or (lambda done, total: None))
        found = _joined(reader.damages(backend))
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


_Opening = Callable[[Path, str, int | None], int]


def _named(path: str | os.PathLike[str]) -> Path:
    """Return the folder that a store would open by this name. Raises MisuseError where it would refuse."""
    if not path_of(path, "the path of a store's folder"):
        raise MisuseError("a store's folder has a name; '.' is the current one")
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


@dataclass(frozen=True)
class _File:
    """A data file, open for reading, or the ``problem`` because of which it is not."""

    path: str
    fd: int = -1
    size: int = 0
    uuid: bytes | None = None
    problem: str | None = None


def _open_files(
    opened: OpenFolder, paths: Sequence[str | os.PathLike[str]] | None, stack: contextlib.ExitStack, opening: _Opening
) -> tuple[dict[int, _File], Record | None, list[Damage]]:
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
        file, damages = _open_file(folder, DATA_FILE, 0, stack, opening, opened.fd)
        return {0: file}, None, damages
    if DATA_FILE in names:
        raise MisuseError(f"{folder} keeps its tensors in its own folder: verify it without paths")
    found: dict[int, _File] = {}
    damages = []
    record = None
    if LIST_FILE in names:
        try:
            stack.callback(os.close, opening(folder, LIST_FILE, opened.fd))
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
            found[index], more = _open_file(place, f"drive.{index}", index, stack, opening)
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
    folder: Path, name: str, index: int, stack: contextlib.ExitStack, opening: _Opening, at: int | None = None
) -> tuple[_File, list[Damage]]:
    path = str(folder / name)
    try:
        fd = opening(folder, name, at)
    except OSError as error:
        if error.errno in NO_DAMAGE:
            raise cannot_open(path, error) from error
        what = _cannot("open", error)
        return _File(path, problem=what), [Damage(what, path)]
    stack.callback(os.close, fd)
    size = os.fstat(fd).st_size
    direct = make_direct(fd)
    uuid, damages = None, []
    try:
        alignment, uuid, says = read_header(fd, path, direct=direct)
        if says != index:
            damages.append(Damage(f"the header names file index {says}, not {index}", path, 0, alignment))
    except ManifestError as error:
        alignment = MINIMUM_ALIGNMENT
        damages.append(Damage(_without(str(error), path), path, 0, min(alignment, size)))
    except OSError as error:
        alignment = MINIMUM_ALIGNMENT
        damages.append(Damage(_cannot("read", error), path, 0, min(alignment, size)))
    if direct and alignment % max(1, direct_io_alignment(fd)):  # the file came from a drive with smaller sectors
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        direct = False
    if not direct:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the bytes to verify must come from the drive
    return _File(path, fd, size, uuid), damages


def _cannot(do: str, error: OSError) -> str:
    number = f" (errno {error.errno})" if error.errno else ""
    return f"cannot be {'opened' if do == 'open' else 'read'}: {error.strerror}{number}"


def _without(message: str, path: object) -> str:
    """Return the message without the path, which is reported beside it."""
    return message.removeprefix(str(path)).lstrip(": ")


# Manifests


def _close(pins: Sequence[Pin]) -> None:
    for pin in pins:
        pin.close()


def _load(
    opened: OpenFolder, generation: int | None
) -> tuple[list[Manifest], list[CheckedGeneration], list[Damage], list[Pin]]:
    """Return the manifests that can be read, newest first; the entry of each that exists; what is wrong with the others; and
    the pins of the generations, as far as they can be made."""
    folder = opened.path
    there = generations.generations(opened)
    if generation is not None:
        if generation not in there:
            raise MisuseError(f"{folder} has no generation {generation}; there are: {', '.join(map(str, there)) or 'none'}")
        there = [generation]
    manifests, checked, damages = [], [], []
    pins: list[Pin] = []
    try:
        for number in reversed(there):
            path = str(folder / f"manifest.{number}")
            try:
                taken = take(opened, number)
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
            if taken.pin is not None:
                pins.append(taken.pin)
            manifests.append(taken.manifest)
            nbytes = sum(record.spec.nbytes for record in taken.manifest.tensors)
            checked.append(CheckedGeneration(number, len(taken.manifest.tensors), nbytes, 0))
    except BaseException:
        _close(pins)
        raise
    return manifests, checked, damages, pins


def _compare(folder: Path, files: Mapping[int, _File], listed: Record | None, manifests: Sequence[Manifest]) -> list[Damage]:
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
        elif file.uuid is not None and file.uuid.hex() != uuid:
            what = "is not the file that was committed to (its UUID is another)"
            damages.append(Damage(what, file.path, generations=numbers))
        most = max(manifest.files[index].nbytes for manifest in needing)
        if file is not None and file.problem is None and file.size < most:
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


def _ends(files: Mapping[int, _File], tensors: Sequence[_StoredTensor]) -> dict[tuple[str, int], int]:
    """Return where the last extent of each generation ends in each data file, by its path and the generation's number."""
    ends: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        for file, end in tensor.ends():
            for number in tensor.numbers if file in files else ():
                where = files[file].path, number
                ends[where] = max(ends.get(where, 0), end)
    return ends


# Reading


@dataclass(frozen=True)
class _Piece:
    """A piece of a tensor: ``nbytes`` at ``offset`` in it, and at ``where`` in its file; ``expected``: their checksum."""

    tensor: _StoredTensor
    offset: int
    nbytes: int
    expected: bytes
    file: int
    where: int

    def damage(self, path: str, what: str) -> Damage:
        record = self.tensor.record
        return Damage(what, path, self.where, self.nbytes, record.key, tuple(sorted(self.tensor.numbers)), record.generation)


def _pieces_of(tensor: _StoredTensor) -> Iterator[_Piece]:
    nbytes, checksums = tensor.record.spec.nbytes, tensor.record.checksums
    for place, offset in enumerate(range(0, nbytes, PIECE_BYTES)):
        expected = checksums[place * CHECKSUM_BYTES : (place + 1) * CHECKSUM_BYTES]
        yield _Piece(tensor, offset, min(PIECE_BYTES, nbytes - offset), expected, *tensor.place(offset))


class _Reader:
    """A reader that verifies all pieces, DEPTH of them in flight. ``read``: bytes that were read."""

    def __init__(
        self, files: Mapping[int, _File], tensors: Sequence[_StoredTensor], progress: Callable[[int, int], None]
    ) -> None:
        self._files, self._progress = files, progress
        by_offset = sorted(tensors, key=lambda tensor: (tensor.extent.offset, tensor.extent.file))  # all drives at once
        self._tensors = by_offset
        self._total = sum(tensor.record.spec.nbytes for tensor in tensors)
        self._done = self.read = 0

    def damages(self, backend: BackendName) -> Iterator[Damage]:
        """Yield a damage for each damaged piece, as it is found."""
        dram = DramTier(DramConfig(DEPTH * PIECE_BYTES))
        try:
            with contextlib.closing(open_backend(backend, DEPTH)) as ring:
                free = [dram.address + place * PIECE_BYTES for place in range(DEPTH)]
                under_way: dict[int, tuple[_Piece, int]] = {}
                waiting = (piece for tensor in self._tensors for piece in _pieces_of(tensor))
                while True:
                    while free and (piece := next(waiting, None)) is not None:
                        file = self._files.get(piece.file)
                        if file is None or file.problem is not None:
                            path = file.path if file else f"drive.{piece.file}"
                            yield piece.damage(path, "the file is missing" if file is None else f"the file {file.problem}")
                            self._tell(piece, 0)
                            continue
                        address = free.pop()
                        under_way[address] = piece, _length(piece)
                        request = IORequest(Operation.READ, file.fd, piece.where, address, _length(piece), address)
                        assert ring.submit([request]) == 1, "no more are submitted than the ring holds"
                    if not under_way:
                        return
                    for completion in ring.reap(1, math.inf):
                        piece, length = under_way.pop(completion.tag)
                        what = _wrong(piece, length, completion.result, completion.tag)
                        free.append(completion.tag)
                        if what is not None:
                            yield piece.damage(self._files[piece.file].path, what)
                        self._tell(piece, max(0, min(piece.nbytes, completion.result)))
        finally:
            dram.close()

    def _tell(self, piece: _Piece, read: int) -> None:
        self.read += read
        self._done += piece.nbytes
        self._progress(self._done, self._total)


def _length(piece: _Piece) -> int:
    """Return the bytes to read for a piece: extents are padded to the alignment."""
    return min(PIECE_BYTES, piece.tensor.extent.nbytes - piece.offset)


def _wrong(piece: _Piece, length: int, result: int, address: int) -> str | None:
    if result < 0:
        return f"cannot be read: {os.strerror(-result)} (errno {-result})"
    if result < piece.nbytes:
        return "the file ends before"
    record = piece.tensor.record
    found = (ctypes.c_char * piece.nbytes).from_address(address)
    if digest(piece.tensor.store, record.tensor_id, record.generation, piece.offset, found) == piece.expected:
        return None
    return "wrong checksum" if any(found.raw) else "wrong checksum: zeros, as if it had never been written"


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
