"""Stores as they are on the disk: tensors, read and verified from the files of one generation, and lists of their contents.

``StoreAtRest`` pins a generation, opens the files for reading, and compares every piece that is read with its checksum. A job
may have the store open meanwhile; only where no pin can be made, in a folder that cannot be written to, a shared lock keeps
jobs out. ``listing`` reads the manifests only, without a pin.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from msgspec import structs

from tiered.errors import CorruptionError, KeyNotFound, ManifestError, MisuseError, ReadError, StoreLocked, TieredError
from tiered.format import generations, stripes
from tiered.format.data_file import digest, read_header
from tiered.format.drives import LIST_FILE, folders_of
from tiered.format.folder import SHORTAGES, OpenFolder
from tiered.format.locked_file import open_to_lock, open_to_read
from tiered.format.manifest import Manifest, TensorRecord
from tiered.format.pins import Pin
from tiered.tensors.specs import dtype_of
from tiered.types import CHECKSUM_BYTES, PIECE_BYTES, Key, TensorSpec

__all__ = ["ListedGeneration", "ListedTensor", "Listing", "StoreAtRest", "Taken", "listing", "take"]


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
        return Taken(*generations.pinned(folder, generation))
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return Taken(_manifest_of(folder, generation), why=os.strerror(error.errno or 0).lower())


def _manifest_of(folder: generations.Folder, generation: int | None) -> Manifest:
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

        Raises MisuseError (no such store or generation, other paths), ManifestError, OSError, and StoreLocked where the folder
        cannot be written to and a job has the store open.
        """
        self.folder = Path(os.path.expanduser(path))
        self.paths = None if paths is None else tuple(os.path.abspath(os.path.expanduser(place)) for place in paths)
        """Absolute folders of the data files of a store on several drives."""
        self.descriptors: list[int] = []  # of the data files, by index; empty once closed
        self.places: list[str] = []
        self._opened = generations.folder_of(self.folder)  # all is read in this folder, wherever its path leads meanwhile
        self._taken: Taken | None = None
        try:
            self._taken = take(self._opened, generation)
            self._open(self._taken, paths)
            if self._taken.pin is None:
                self._taken = Taken(_manifest_of(self._opened, generation))  # again, now that the lock keeps commits out
            self.adopt(self._taken)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return f"the store in {self.folder}"

    def _open(self, taken: Taken, paths: Sequence[str | os.PathLike[str]] | None) -> None:
        there = set(self._opened.names())
        if paths is None and LIST_FILE in there:
            where = folders_of(self.folder)
            raise MisuseError(f"{self.folder} keeps its tensors in other folders, which have to be named: {where}")
        if paths is not None and LIST_FILE not in there:
            raise MisuseError(f"{self.folder} keeps its tensors in its own folder: leave paths out")
        places = [self.folder] if paths is None else [Path(os.path.expanduser(place)) for place in paths]
        opening = open_to_read if taken.pin is not None else open_to_lock
        for file in taken.manifest.files:
            own = self._opened.fd if paths is None else None
            place = next((place for place in places if own is not None or (place / file.name).exists()), None)
            if place is None or (own is not None and file.name not in there):
                raise ManifestError(f"the data file {file.name} of {self.folder} is missing in {', '.join(map(str, places))}")
            self.places.append(str(place / file.name))
            try:
                self.descriptors.append(opening(place, file.name, own))
            except OSError as error:
                error.filename = self.places[-1]
                raise
            except StoreLocked as error:
                raise StoreLocked(f"{error}. (A reader beside it makes a file in {self.folder}: {taken.why})") from error
            uuid = read_header(self.descriptors[-1], self.places[-1], direct=False)[1]
            if uuid.hex() != file.uuid:
                raise ManifestError(f"{self.places[-1]} is not the file that was committed to: its UUID is another")

    def newest(self) -> Taken | None:
        """Take the newest generation, to ``adopt`` or to close it; None where this is it. Raises as opening the store does."""
        if generations.present(self._opened, None)[-1] == self.manifest.generation:
            return None
        try:
            locked = self._taken is not None and self._taken.pin is None
            found = Taken(_manifest_of(self._opened, None)) if locked else Taken(*generations.pinned(self._opened, None))
        except OSError as error:
            raise TieredError(
                f"{self.folder} stays open at generation {self.manifest.generation}: a reader's file cannot be made there "
                f"({error.strerror}, errno {error.errno}); mend that, and refresh again"
            ) from error
        if found.manifest.generation == self.manifest.generation:  # newer ones were dropped meanwhile
            found.close()
            return None
        if [(file.name, file.uuid) for file in found.manifest.files] != [(one.name, one.uuid) for one in self.manifest.files]:
            found.close()
            raise ManifestError(f"{self.folder}: manifest.{found.manifest.generation} names other data files than before")
        return found

    def adopt(self, taken: Taken) -> Taken | None:
        """Read ``taken`` from now on; return the generation before, to be closed when nothing of it is read any more."""
        before, self._taken = self._taken, taken
        self.manifest = taken.manifest
        self.records = {record.key: record for record in taken.manifest.tensors}
        self._store = bytes.fromhex(taken.manifest.store)
        self._last: tuple[Key, int, torch.Tensor] | None = None  # piece that was read last: adjacent ranges read it once
        return before

    def forget_records(self) -> None:
        """Give the memory of the records back: the generation stays pinned, and no tensor of it can be read here any more."""
        self.records = {}
        self.manifest = structs.replace(self.manifest, tensors=())
        if self._taken is not None:
            self._taken.manifest = self.manifest

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
        file, where = record.extent.file, record.extent.offset + begin
        if stripes.is_striped(file, len(self.descriptors)):
            file, within = stripes.place(begin, len(self.descriptors))
            where = record.extent.offset + within
        fd, path = self.descriptors[file], self.places[file]
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        view, done = data.numpy().data, 0
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
        """Close the files, and let the generation go. Idempotent."""
        while self.descriptors:
            os.close(self.descriptors.pop())
        if self._taken is not None:
            self._taken.close()
        self._opened.close()


def _failed(
    kind: type[ReadError] | type[CorruptionError], what: str, record: TensorRecord, path: str, offset: int, errno: int | None
) -> ReadError | CorruptionError:
    return kind(what, key=record.key, tier="nvme", path=path, offset=offset, errno=errno)


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
