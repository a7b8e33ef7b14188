"""The tensors of one generation of a store that is not open: its own, or one of a job that died. Nothing is written.

Files are opened for reading, with a lock that keeps stores out meanwhile and that other readers share. Every piece that is read
is compared with its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

from tiered import generations
from tiered.checksum import digest
from tiered.datafile import read_header
from tiered.drives import LIST_FILE, folders_of
from tiered.errors import CorruptionError, KeyNotFound, ManifestError, MisuseError, ReadError
from tiered.locked import open_to_read
from tiered.manifest import Manifest, TensorRecord
from tiered.tensors import dtype_of
from tiered.types import CHECKSUM_BYTES, PIECE_BYTES, Key, TensorSpec

__all__ = ["StoreAtRest", "manifest_of"]


def manifest_of(folder: generations.Folder, generation: int | None) -> Manifest:
    """Of ``generation``, or of the newest one. Raises MisuseError where there is none, ManifestError where it is damaged."""
    generations.present(folder, generation)
    manifest = generations.load(folder, generation)
    assert manifest is not None
    return manifest


class StoreAtRest:
    """Reads as an open store does: ``in``, ``iter``, ``spec``, ``get``; and ``read`` parts of a tensor. A context manager."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        paths: Sequence[str | os.PathLike[str]] | None = None,
        generation: int | None = None,
    ) -> None:
        """As of ``generation``, or of the newest commit. ``paths``: the folders of its data files, where it has several drives.

        Raises MisuseError (no such store or generation, other paths), StoreLocked (it is open), ManifestError, and OSError.
        """
        self.folder = Path(os.path.expanduser(path))
        self.descriptors: list[int] = []  # of its data files, by their index; empty once closed
        self.places: list[str] = []
        self._opened = generations.folder_of(self.folder)  # all is read in this one, whatever its name leads to meanwhile
        try:
            self.manifest = manifest_of(self._opened, generation)
            self._open(paths)
            self.manifest = manifest_of(self._opened, generation)  # nobody commits any more
        except BaseException:
            self.close()
            raise
        self.records = {record.key: record for record in self.manifest.tensors}
        self._store = bytes.fromhex(self.manifest.store)
        self._last: tuple[Key, int, torch.Tensor] | None = None  # piece: what lies beside each other is read once

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
        """Raises KeyNotFound."""
        if key not in self.records:
            raise KeyNotFound(f"{self} has no tensor named {key!r} in generation {self.manifest.generation}")
        return self.records[key]

    def spec(self, key: Key) -> TensorSpec:
        """Shape and element type. Raises KeyNotFound."""
        return self.record(key).spec

    def written(self, key: Key) -> int:
        """The generation in which a tensor was written. Raises KeyNotFound."""
        return self.record(key).generation

    def get(self, key: Key) -> torch.Tensor:
        """The whole tensor, of its dtype and shape, in ordinary memory. Raises as ``read``, and KeyNotFound."""
        spec = self.spec(key)
        data = torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu")
        at = 0
        for piece in self.read(key, 0, spec.nbytes):
            data[at : at + piece.numel()] = piece
            at += piece.numel()
        return data.view(dtype_of(spec)).view(spec.shape)

    def read(self, key: Key, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Bytes ``start`` to ``stop`` of a tensor, as uint8 tensors of at most PIECE_BYTES, one after the other.

        Raises ReadError, and CorruptionError for a piece that is not as it was written.
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
        """Idempotent."""
        self._opened.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def _failed(
    kind: type[ReadError] | type[CorruptionError], what: str, record: TensorRecord, path: str, offset: int, errno: int | None
) -> ReadError | CorruptionError:
    return kind(what, key=record.key, tier="nvme", path=path, offset=offset, errno=errno)
