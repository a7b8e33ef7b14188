"""A commit that is open to be read: every part of a store but those that write.

The files are opened for reading, under a lock that keeps stores out and that other readers share, as ``StoreAtRest`` does; so a
filesystem that is mounted read-only will do. What lies where, the manifest says; the disk's tier gives no room and takes none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from tiered.engine.engine import Engine
from tiered.errors import ManifestError, MisuseError, TieredError
from tiered.format.data_file import read_header
from tiered.format.locked_file import make_direct
from tiered.format.manifest import Manifest
from tiered.store.at_rest import StoreAtRest
from tiered.store.opening import Parts, Wishes, begin, config_of, refuse, warn_buffered
from tiered.store.store import TieredStore
from tiered.system import direct_io_alignment
from tiered.tiers.nvme import FILE_BITS, NvmeTier
from tiered.types import Location, Slot

__all__ = ["ReadingStore", "open_to_read"]

NOWHERE = 1 << 62
"""Slots from here on are of tensors without bytes. Reading one gives the header of the first file, and nobody looks at it."""


class ReadingStore(TieredStore):
    """What ``TieredStore.open(path, access="read")`` gives."""

    def __init__(self, parts: Parts, engine: Engine, manifest: Manifest) -> None:
        super().__init__(parts, engine, None, scratch=False)
        self._manifest = manifest

    @property
    def generation(self) -> int:
        """That which was opened."""
        return self._manifest.generation

    @property
    def meta(self) -> dict[str, Any]:
        """What its commit was given."""
        return deepcopy(dict(self._manifest.meta))

    def _refuse_to_read_only(self) -> None:
        raise MisuseError(
            f"{self} is open to be read, at generation {self.generation}, and cannot be changed: open it without access='read'"
        )


def open_to_read(wishes: Wishes) -> ReadingStore:
    """What ``TieredStore.open`` does for ``access="read"``; raises as that."""
    refuse(wishes)
    if wishes.path is None or wishes.scratch or wishes.nvme is not None:
        raise MisuseError("access='read' opens a commit on a disk, and changes nothing: a folder, no durability, no nvme")
    try:
        rest = StoreAtRest(wishes.path, paths=wishes.paths, generation=wishes.generation)
    except OSError as error:
        where = error.filename or wishes.path
        raise TieredError(f"cannot open the store: {where}: {error.strerror} (errno {error.errno})") from error
    try:
        parts, engine = begin(wishes, replace(config_of(wishes), disk=lambda: _DiskAtRest(rest)))
    except BaseException:
        rest.close()
        raise
    try:
        _restore(parts, engine, rest.manifest)
        if parts.nvme is not None and not parts.nvme.direct:
            warn_buffered(parts.nvme.folder)
        store = ReadingStore(parts, engine, rest.manifest)
    except BaseException:  # a warning may be made an error
        engine.stop()
        parts.close()
        raise
    engine.start()
    return store


def _restore(parts: Parts, engine: Engine, manifest: Manifest) -> None:
    """Fill the directory."""
    nvme, state = parts.nvme, engine.state
    assert nvme is not None
    for number, record in enumerate(manifest.tensors):
        extent = record.extent
        slot = Slot(NOWHERE + number * nvme.alignment, nvme.alignment)
        if extent is not None:
            slot = nvme.slot(extent.file, extent.offset, extent.nbytes)
        state.pools[-1].account(slot)
        entry = state.directory.restore(
            record.key, record.spec, record.tensor_id, slot, record.checksums, record.generation
        )
        copy = entry.copies[-1]
        assert copy is not None
        state.install(copy)


class _DiskAtRest(NvmeTier):
    """The data files of one generation. It has ``rest`` from here on."""

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
        """Bytes of its files."""
        return self._bytes

    @property
    def used(self) -> int:
        return sum(record.extent.nbytes for record in self._rest.manifest.tensors if record.extent)

    @property
    def file_bytes(self) -> int:
        return self._bytes

    @property
    def refusal(self) -> str:
        return f"{self.folder} is open to be read"

    @property
    def generations(self) -> tuple[int, ...]:
        return (self._rest.manifest.generation,)

    def free_on_device(self) -> int:
        return 0

    def allocate(self, nbytes: int) -> Slot | None:
        return None

    def restore(self, slots: Iterable[Slot]) -> None:
        """Nothing there is ever given or taken back."""

    def slot(self, index: int, offset: int, nbytes: int) -> Slot:
        """Raises ManifestError for what no file has."""
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
