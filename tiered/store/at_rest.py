"""Stores as they are on the disk: tensors, read and verified from the files of one generation, and lists of their contents.

``StoreAtRest`` pins a generation, opens the files for reading, and compares every piece that is read with its checksum. A job
may have the store open meanwhile; only where no pin can be made, in a folder that cannot be written to, a shared lock keeps
jobs out. ``listing`` reads the manifests only, without a pin.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from msgspec import structs

from tiered.errors import KeyNotFound, ManifestError, MisuseError, StoreClosed, StoreLocked, TieredError
from tiered.format import generations
from tiered.format.data_file import FileAtRest
from tiered.format.drives import LIST_FILE, folders_of
from tiered.format.folder import OpenFolder
from tiered.format.generations import Taken
from tiered.format.manifest import Manifest, TensorRecord
from tiered.store.pieces import Arriving, PieceReader, aligned
from tiered.tensors.specs import dtype_of
from tiered.tiers.disk import Disk
from tiered.types import PIECE_BYTES, Key, TensorSpec

__all__ = ["ListedGeneration", "ListedTensor", "StoreAtRest", "StoreListing", "listing"]

PIECES_AHEAD = 3
"""Pieces that are read ahead of the one that is used."""


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
        self.files: list[FileAtRest] = []  # by index
        self._reader: PieceReader | None = None
        self._read_by = 0  # the process whose ring that has
        self._opened = generations.folder_of(self.folder)  # all is read in this folder, wherever its path leads meanwhile
        self._taken: Taken | None = None
        try:
            self._taken = generations.take(self._opened, generation)
            self._open(self._taken, paths)
            if self._taken.pin is None:
                # Again, now that the lock keeps commits out.
                self._taken = Taken(generations.existing(self._opened, generation))
            self.adopt(self._taken)
            alignment = max(file.wants for file in self.files)
            store = bytes.fromhex(self.manifest.store)
            self.disk = Disk(str(self.folder.absolute()), store, alignment, self.files)
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
            raise MisuseError(f"{self.folder} keeps its tensors in its own folder: leave paths= out")
        places = [self.folder] if paths is None else [Path(os.path.expanduser(place)) for place in paths]
        for file in taken.manifest.files:
            own = self._opened.fd if paths is None else None
            place = next((place for place in places if own is not None or (place / file.name).exists()), None)
            if place is None or (own is not None and file.name not in there):
                raise ManifestError(f"the data file {file.name} of {self.folder} is missing in {', '.join(map(str, places))}")
            try:
                found = FileAtRest(place, file.name, own, lock=taken.pin is None)
            except StoreLocked as error:
                raise StoreLocked(f"{error}. (A reader beside it makes a file in {self.folder}: {taken.why})") from error
            self.files.append(found)
            if found.damage is not None:
                raise found.damage
            if found.uuid.hex() != file.uuid:
                raise ManifestError(f"{found.path} is not the file that was committed to: its UUID is another")

    def newest(self) -> Taken | None:
        """Take the newest generation, to ``adopt`` or to close it; None where this is it. Raises as opening the store does."""
        if generations.present(self._opened, None)[-1] == self.manifest.generation:
            return None
        try:
            locked = self._taken is not None and self._taken.pin is None
            found = Taken(generations.existing(self._opened, None)) if locked else generations.pinned(self._opened, None)
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
            said = f"{self} has no tensor named {key!r} in generation {self.manifest.generation}"
            raise KeyNotFound(said, key, self.records)
        return self.records[key]

    def spec(self, key: Key) -> TensorSpec:
        """Return the shape and element type of a tensor. Raises KeyNotFound."""
        return self.record(key).spec

    def written(self, key: Key) -> int:
        """Return the generation in which a tensor was written. Raises KeyNotFound."""
        return self.record(key).generation

    def get(self, key: Key) -> torch.Tensor:
        """Return the whole tensor, of its dtype and shape, in ordinary memory. Raises as ``read``, and KeyNotFound."""
        record = self.record(key)
        spec = record.spec
        data = torch.empty(0, dtype=torch.uint8, device="cpu") if record.extent is None else self._arrived(self._begin(record))
        return data.view(dtype_of(spec)).view(spec.shape)

    def read(self, key: Key, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield bytes ``start`` to ``stop`` of a tensor, as consecutive uint8 tensors of at most PIECE_BYTES.

        While one is used, the next PIECES_AHEAD are read. Raises ReadError, ShortTransfer where a file ends too early, and
        CorruptionError for a piece with a wrong checksum.
        """
        record, coming = self.record(key), deque[Arriving | tuple[Key, int, torch.Tensor]]()
        begins = iter(range(start // PIECE_BYTES * PIECE_BYTES, stop, PIECE_BYTES))
        while True:
            while len(coming) <= PIECES_AHEAD and (begin := next(begins, None)) is not None:
                read_last = self._last is not None and self._last[:2] == (key, begin)
                coming.append(self._last if read_last and self._last else self._begin(record, begin, PIECE_BYTES))
            if not coming:
                return
            one = coming.popleft()
            self._last = (key, one.begin, self._arrived(one)) if isinstance(one, Arriving) else one
            yield self._last[2][max(0, start - self._last[1]) : stop - self._last[1]]

    def _begin(self, record: TensorRecord, begin: int = 0, nbytes: int | None = None) -> Arriving:
        """Begin to read a tensor, or ``nbytes`` of it from ``begin`` on, into memory of its own."""
        nbytes = record.spec.nbytes if nbytes is None else min(nbytes, record.spec.nbytes - begin)
        if self.disk.closed:
            raise StoreClosed(f"{self} was closed")
        if self._reader is None or self._reader.closed or self._read_by != os.getpid():  # a ring is not a forked child's
            self._reader, self._read_by = PieceReader(self.disk), os.getpid()
        memory = aligned(self._reader.room(nbytes), self.disk.alignment)
        return self._reader.begin(record, begin, nbytes, memory.data_ptr(), memory)

    def _arrived(self, one: Arriving) -> torch.Tensor:
        """Wait for what is read, and return it. Raises what is wrong with it."""
        while not one.ended:
            assert self._reader is not None
            self._reader.wait()
        if one.error is not None:
            raise one.error
        assert isinstance(one.memory, torch.Tensor)
        return one.memory[: one.nbytes]

    def __enter__(self) -> StoreAtRest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and let the generation go. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        for file in self.files:
            file.close()
        if self._taken is not None:
            self._taken.close()
        self._opened.close()


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
class StoreListing:
    """The contents of a store: ``generations``, oldest first; ``tensors`` of generation ``number``, by key; ``nbytes`` of the
    tensors of all generations, shared ones counted once."""

    folder: str
    generations: tuple[ListedGeneration, ...]
    number: int
    tensors: tuple[ListedTensor, ...]
    nbytes: int


def listing(path: str | os.PathLike[str], generation: int | None = None) -> StoreListing:
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


def _listed(folder: OpenFolder, generation: int | None) -> StoreListing | None:
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
    return StoreListing(str(folder), tuple(reversed(listed)), chosen.generation, ordered, sum(different.values()))


def _sizes(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Return the bytes of each tensor by its id and the generation in which it was written."""
    return {(record.tensor_id, record.generation): record.spec.nbytes for record in manifest.tensors}
