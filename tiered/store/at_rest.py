"""Stores that are not open: their tensors, read and verified from the files of one generation, and lists of their contents.

``StoreAtRest`` opens the files for reading, with a shared lock that keeps stores out meanwhile, and compares every piece that
is read with its checksum. ``listing`` reads the manifests only, without a lock, so it works while a job has the store open.
Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from tiered.errors import CorruptionError, KeyNotFound, ManifestError, MisuseError, ReadError
from tiered.format import generations
from tiered.format.data_file import digest, read_header
from tiered.format.drives import LIST_FILE, folders_of
from tiered.format.folder import OpenFolder
from tiered.format.locked_file import make_direct, open_to_read
from tiered.format.manifest import Manifest, TensorRecord
from tiered.store.lease import dtype_of
from tiered.system import direct_io_alignment
from tiered.tiers.nvme import FILE_BITS, NvmeTier
from tiered.types import CHECKSUM_BYTES, PIECE_BYTES, Key, Location, Slot, TensorSpec

__all__ = [
    "NOWHERE",
    "DiskAtRest",
    "ListedGeneration",
    "ListedTensor",
    "Listing",
    "StoreAtRest",
    "listing",
    "manifest_of",
]


def manifest_of(folder: generations.Folder, generation: int | None) -> Manifest:
    """Return the manifest of ``generation``, or of the newest one. Raises MisuseError where there is none, ManifestError for
    damage."""
    generations.present(folder, generation)
    manifest = generations.load(folder, generation)
    assert manifest is not None
    return manifest


class StoreAtRest:
    """A generation of a store, open for reading: ``in``, ``iter``, ``spec`` and ``get`` as of an open store, and ``read`` for
    parts of a tensor. A context manager."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        paths: Sequence[str | os.PathLike[str]] | None = None,
        generation: int | None = None,
    ) -> None:
        """Open ``generation``, or the newest commit. ``paths``: the folders of the data files, where the store has several
        drives.

        Raises MisuseError (no such store or generation, other paths), StoreLocked (it is open), ManifestError, and OSError.
        """
        self.folder = Path(os.path.expanduser(path))
        self.descriptors: list[int] = []  # of the data files, by index; empty once closed
        self.places: list[str] = []
        self._opened = generations.folder_of(self.folder)  # all is read in this folder, wherever its path leads meanwhile
        try:
            self.manifest = manifest_of(self._opened, generation)
            self._open(paths)
            self.manifest = manifest_of(self._opened, generation)  # again, now that the lock keeps commits out
        except BaseException:
            self.close()
            raise
        self.records = {record.key: record for record in self.manifest.tensors}
        self._store = bytes.fromhex(self.manifest.store)
        self._last: tuple[Key, int, torch.Tensor] | None = None  # piece that was read last: adjacent ranges read it once

    def __str__(self) -> str:
        return f"the store in {self.folder}"

    def _open(self, paths: Sequence[str | os.PathLike[str]] | None) -> None:
        there = set(self._opened.names())
        if paths is None and LIST_FILE in there:
            where = folders_of(self.folder)
            raise MisuseError(f"{self.folder} keeps its tensors in other folders, which have to be named: {where}")
        if paths is not None and LIST_FILE not in there:
            raise MisuseError(f"{self.folder} keeps its tensors in its own folder: leave paths out")
        places = [self.folder] if paths is None else [Path(os.path.expanduser(place)) for place in paths]
        for file in self.manifest.files:
            own = self._opened.fd if paths is None else None
            place = next((place for place in places if own is not None or (place / file.name).exists()), None)
            if place is None or (own is not None and file.name not in there):
                raise ManifestError(f"the data file {file.name} of {self.folder} is missing in {', '.join(map(str, places))}")
            self.places.append(str(place / file.name))
            self.descriptors.append(open_to_read(place, file.name, own))
            uuid = read_header(self.descriptors[-1], self.places[-1], direct=False)[1]
            if uuid.hex() != file.uuid:
                raise ManifestError(f"{self.places[-1]} is not the file that was committed to: its UUID is another")

    def __contains__(self, key: object) -> bool:
        return key in self.records

    def __iter__(self) -> Iterator[Key]:
        return iter(self.records)

    def record(self, key: Key) -> TensorRecord:
        """Return the record of a tensor. Raises KeyNotFound."""
        if key not in self.records:
            raise KeyNotFound(f"{self} has no tensor named {key!r} in generation {self.manifest.generation}")
        return self.records[key]

    def spec(self, key: Key) -> TensorSpec:
        """Return the shape and element type of a tensor. Raises KeyNotFound."""
        return self.record(key).spec

    def written(self, key: Key) -> int:
        """Return the generation in which a tensor was written. Raises KeyNotFound."""
        return self.record(key).generation

    def get(self, key: Key) -> torch.Tensor:
        """Return the whole tensor, of its dtype and shape, in ordinary memory. Raises as ``read``, and KeyNotFound."""
        spec = self.spec(key)
        data = torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu")
        at = 0
        for piece in self.read(key, 0, spec.nbytes):
            data[at : at + piece.numel()] = piece
            at += piece.numel()
        return data.view(dtype_of(spec)).view(spec.shape)

    def read(self, key: Key, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield bytes ``start`` to ``stop`` of a tensor, as consecutive uint8 tensors of at most PIECE_BYTES.

        Raises ReadError, and CorruptionError for a piece with a wrong checksum.
        """
        record = self.record(key)
        nbytes = record.spec.nbytes
        for begin in range(start // PIECE_BYTES * PIECE_BYTES, stop, PIECE_BYTES):
            if self._last is None or self._last[:2] != (key, begin):
                self._last = None
                self._last = key, begin, self._piece(record, begin, min(PIECE_BYTES, nbytes - begin))
            yield self._last[2][max(0, start - begin) : stop - begin]

    def _piece(self, record: TensorRecord, begin: int, nbytes: int) -> torch.Tensor:
        assert record.extent is not None
        fd, path = self.descriptors[record.extent.file], self.places[record.extent.file]
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        view, done = data.numpy().data, 0
        where = record.extent.offset + begin
        while done < nbytes:
            try:
                count = os.preadv(fd, [view[done:]], where + done)
            except OSError as error:
                raise _failed(ReadError, "cannot read", record, path, where + done, error.errno) from error
            if not count:
                raise _failed(ReadError, "the file ends within", record, path, where + done, None)
            done += count
        os.posix_fadvise(fd, where, nbytes, os.POSIX_FADV_DONTNEED)
        place = begin // PIECE_BYTES * CHECKSUM_BYTES
        expected = record.checksums[place : place + CHECKSUM_BYTES]
        if digest(self._store, record.tensor_id, record.generation, begin, view) != expected:
            raise _failed(CorruptionError, "wrong checksum in", record, path, where, None)
        return data

    def __enter__(self) -> StoreAtRest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._opened.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def _failed(
    kind: type[ReadError] | type[CorruptionError], what: str, record: TensorRecord, path: str, offset: int, errno: int | None
) -> ReadError | CorruptionError:
    return kind(what, key=record.key, tier="nvme", path=path, offset=offset, errno=errno)


NOWHERE = 1 << 62
"""First offset of the slots of tensors without bytes. Reading one gives the header of the first file, which is ignored."""


class DiskAtRest(NvmeTier):
    """The data files of one generation, as a tier that allocates nothing. Closing the tier closes ``rest``."""

    def __init__(self, rest: StoreAtRest) -> None:
        self._rest = rest
        self.folder = str(rest.folder.absolute())
        self.uuid = bytes.fromhex(rest.manifest.store)
        self.files, self.created = (), False
        opened = list(zip(rest.descriptors, rest.places, strict=True))
        self.alignment = max(read_header(fd, path, direct=False)[0] for fd, path in opened)
        self._direct = all(self.alignment % (direct_io_alignment(fd) or 1) == 0 and make_direct(fd) for fd, _ in opened)
        self._bytes = sum(os.fstat(fd).st_size for fd, _ in opened)

    @property
    def direct(self) -> bool:
        return self._direct

    @property
    def capacity(self) -> int:
        """Bytes of the data files."""
        return self._bytes

    @property
    def used(self) -> int:
        return sum(record.extent.nbytes for record in self._rest.manifest.tensors if record.extent)

    @property
    def file_bytes(self) -> int:
        return self._bytes

    @property
    def refusal(self) -> str:
        return f"{self.folder} is open for reading"

    @property
    def generations(self) -> tuple[int, ...]:
        return (self._rest.manifest.generation,)

    def free_on_device(self) -> int:
        return 0

    def allocate(self, nbytes: int) -> Slot | None:
        return None

    def restore(self, slots: Iterable[Slot]) -> None:
        """Do nothing: no slot is ever allocated or freed."""

    def slot(self, index: int, offset: int, nbytes: int) -> Slot:
        """Return the slot at ``offset`` of a data file. Raises ManifestError for a range outside the file."""
        size = os.fstat(self._rest.descriptors[index]).st_size if index < len(self._rest.descriptors) else 0
        if offset % self.alignment or nbytes % self.alignment or offset + nbytes > size:
            raise ManifestError(f"{self.folder}: the manifest names {nbytes} bytes at {offset} of data file {index}: not there")
        return Slot(index << FILE_BITS | offset, nbytes)

    def locate(self, slot: Slot) -> Location:
        index, offset = (0, 0) if slot.offset >= NOWHERE else self.extent(slot)
        return Location(self._rest.descriptors[index], offset, self._rest.places[index])

    @property
    def closed(self) -> bool:
        return not self._rest.descriptors

    def close(self) -> None:
        self._rest.close()


@dataclass(frozen=True)
class ListedTensor:
    """A tensor of a generation. ``written``: the generation in which its bytes were written."""

    key: Key
    spec: TensorSpec
    written: int


@dataclass(frozen=True)
class ListedGeneration:
    """A commit: its ``meta``, its number of ``tensors``, and their ``nbytes``. ``problem``: why its manifest cannot be read;
    then the others are empty."""

    number: int
    meta: Mapping[str, object]
    tensors: int
    nbytes: int
    problem: str | None = None


@dataclass(frozen=True)
class Listing:
    """The contents of a store: ``generations``, oldest first; ``tensors`` of generation ``number``, by key; ``nbytes`` of the
    tensors of all generations, shared ones counted once."""

    folder: str
    generations: tuple[ListedGeneration, ...]
    number: int
    tensors: tuple[ListedTensor, ...]
    nbytes: int


def listing(path: str | os.PathLike[str], generation: int | None = None) -> Listing:
    """Return the contents of the store in folder ``path``, with the tensors of ``generation`` (default: the newest readable
    one).

    Raises MisuseError (no store with a commit there, no such generation), ManifestError (that one is damaged, or all are).
    """
    folder = Path(os.path.expanduser(path))
    with contextlib.closing(generations.folder_of(folder)) as opened:
        for _ in range(generations.LISTINGS):
            found = _listed(opened, generation)
            if found is not None:
                return found
    raise ManifestError(f"{folder} changes too fast to be listed: a job commits there; try again")


def _listed(folder: OpenFolder, generation: int | None) -> Listing | None:
    """Return the contents; None where a running job has dropped the newest generation meanwhile, so that there is a newer one.

    The newest is read first. Older ones are dropped before it, so if it still exists afterwards, no newer one existed when the
    folder was listed: no listing is older than one that was made before.
    """
    there = generations.present(folder, generation)
    listed, chosen, different, error = [], None, {}, None
    for number in reversed(there):
        try:
            manifest = generations.load(folder, number)
        except ManifestError as problem:
            if number not in generations.generations(folder):
                if number == there[-1]:
                    return None
                continue
            listed.append(ListedGeneration(number, {}, 0, 0, str(problem)))
            error = error or problem
            if number == generation:
                raise
            continue
        assert manifest is not None
        sizes = _sizes(manifest)
        listed.append(ListedGeneration(number, manifest.meta, len(manifest.tensors), sum(sizes.values())))
        different.update(sizes)
        if generation == number or (generation is None and chosen is None):
            chosen = manifest
    if chosen is None:
        if error is not None and generation is None:
            raise error
        return None
    found = [ListedTensor(record.key, record.spec, record.generation) for record in chosen.tensors]
    ordered = tuple(sorted(found, key=lambda one: one.key))
    return Listing(str(folder), tuple(reversed(listed)), chosen.generation, ordered, sum(different.values()))


def _sizes(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Return the bytes of each tensor by its id and the generation in which it was written."""
    return {(record.tensor_id, record.generation): record.spec.nbytes for record in manifest.tensors}
