"""A store that is open for reading: its data files as a tier, and the generation that it shows, which ``refresh`` exchanges."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from typing import Any

from tiered.engine.engine import Engine
from tiered.engine.residency import Entry
from tiered.errors import LeaseConflict, ManifestError, MisuseError
from tiered.format import stripes
from tiered.format.data_file import FileAtRest
from tiered.format.generations import Taken
from tiered.format.manifest import TensorRecord
from tiered.store.at_rest import StoreAtRest
from tiered.store.commit import Commits, Exchange, OnDisk, said_of
from tiered.tiers.disk import Disk
from tiered.types import Access, Key, Location, Slot, owner_decoded
from tiered.workers import Worker

__all__ = ["DiskAtRest", "OneGeneration"]

NOWHERE = 1 << 62
"""First offset of the slots of tensors without bytes. Reading one gives the header of the first file, which is ignored."""


class DiskAtRest(Disk[FileAtRest]):
    """The data files of the generation that ``rest`` has, as a tier. Its slots are those of commits, which other processes make
    and free: it is always full. Closing it closes ``rest``."""

    def __init__(self, rest: StoreAtRest) -> None:
        disk = rest.disk
        alignment = max(file.alignment for file in rest.files)
        super().__init__(disk.folder, disk.uuid, alignment, rest.files)
        self.drive_folders = rest.paths
        self.direct = all(file.direct for file in rest.files)
        self.close = rest.close
        """Close the files, and let the generation go."""

    @property
    def capacity(self) -> int:
        """Bytes of the data files, which a writer may extend meanwhile."""
        return sum(os.fstat(file.fd).st_size for file in self.files)

    @property
    def refusal(self) -> str:
        return f"{self.folder} is open for reading"

    def free_on_device(self) -> int:
        return 0

    def allocate(self, nbytes: int) -> Slot | None:
        return None

    def free(self, slot: Slot) -> None:
        """Do nothing: the bytes are another process's to free."""

    def restore(self, slots: Iterable[Slot]) -> None:
        """Do nothing: no slot is ever allocated."""

    def slot_of(self, record: TensorRecord) -> Slot:
        """Return the slot of a tensor, one of its own where it has no bytes. Raises ManifestError for a range outside its
        file."""
        if record.extent is None:
            return Slot(NOWHERE + record.tensor_id * self.alignment, self.alignment)
        index, offset, nbytes = record.extent.file, record.extent.offset, record.extent.nbytes
        for file, at, size in stripes.ranges(index, offset, nbytes, self.drive_count):
            end = os.fstat(self.files[file].fd).st_size if file < self.drive_count else 0
            if at % self.alignment or size % self.alignment or at + size > end:
                raise ManifestError(f"{self.folder}: the manifest names {size} bytes at {at} of data file {file}: not there")
        return self.coded(index, offset, nbytes)

    def locate(self, slot: Slot) -> Location:
        return super().locate(slot if slot.offset < NOWHERE else self.coded(0, 0, slot.nbytes))


class OneGeneration(OnDisk):
    """The one generation at which a store is open for reading. Nothing may be changed.

    The engine's directory is filled from it when this is made.
    """

    def __init__(self, engine: Engine, nvme: DiskAtRest, rest: StoreAtRest) -> None:
        """Raises ManifestError where the manifest names bytes that no data file has."""
        super().__init__(engine)
        self._nvme, self._rest = nvme, rest
        self._fixed: str | None = None
        for record in rest.manifest.tensors:
            self.restore_tensor(record, nvme.slot_of(record))

    @property
    def generation(self) -> int:
        return self._rest.manifest.generation

    @property
    def meta(self) -> dict[str, Any]:
        return deepcopy(dict(self._rest.manifest.meta))

    def committed(self, keys: Iterable[Key]) -> dict[Key, str]:
        with self._engine.lock:
            directory = self._engine.state.directory
            entries = [directory.entry(key) for key in keys if key in directory]
            return {one.key: said_of(self._nvme.uuid, one, copy) for one in entries if (copy := one.copies[-1]) is not None}

    def committing(self, store: object) -> Commits:
        raise self._why(store)

    @property
    def access(self) -> Access:
        return Access.READ

    def refuse_change(self, store: object) -> None:
        raise self._why(store)

    def _why(self, store: object) -> MisuseError:
        return MisuseError(
            f"{store} is open for reading, at generation {self.generation}, and cannot be changed: open it without "
            "access='read'"
        )

    def restore_tensor(self, record: TensorRecord, slot: Slot) -> None:
        state = self._engine.state
        state.pools[-1].account(slot)
        state.directory.restore(
            *(record.key, record.spec, record.tensor_id, slot, record.checksums, record.generation),
            owner=owner_decoded(record.owner),
        )

    def show(self, taken: Taken) -> Taken | None:
        """Record that the directory has the tensors of ``taken``; return what it had before."""
        return self._rest.adopt(taken)

    def stay(self, why: str) -> None:
        """Make ``refresh`` raise MisuseError with ``why`` from now on."""
        self._fixed = why

    def refresh(self, store: object) -> int:
        """Go to the newest generation, and return its number.

        The generation before stays pinned until its last tensor is gone from the directory.
        """
        if self._fixed is not None:
            raise MisuseError(self._fixed)

        def work(worker: Worker) -> int:
            with self._engine.commits:
                taken = self._rest.newest()
                if taken is None:
                    return self.generation
                request = _Refresh(taken, self, self._nvme, worker)
                try:
                    self._engine.wait(request)
                except BaseException:
                    taken.close()
                    raise
                if request.before is not None:
                    request.before.close()
                return taken.manifest.generation

        return self._run("tiered-refresh", work).future.result()


class _Refresh(Exchange[TensorRecord]):
    """``before``: the generation that was shown until then."""

    def __init__(self, taken: Taken, shown: OneGeneration, nvme: DiskAtRest, worker: Worker) -> None:
        super().__init__("refresh", {record.key: record for record in taken.manifest.tensors}, worker)
        self.before: Taken | None = None
        self._taken, self._shown, self._nvme = taken, shown, nvme

    def same(self, entry: Entry, said: TensorRecord) -> bool:
        copy, extent = entry.copies[-1], said.extent
        assert copy is not None
        if (entry.tensor_id, copy.generation, entry.spec) != (said.tensor_id, said.generation, said.spec):
            return False
        if entry.owner != owner_decoded(said.owner):
            return False
        if extent is None:
            return True
        return copy.checksums == said.checksums and copy.slot == self._nvme.coded(extent.file, extent.offset, extent.nbytes)

    def refuse_leased(self, entries: Sequence[Entry], changed: Sequence[Entry]) -> None:
        for entry in changed:
            if entry.leased:
                raise LeaseConflict(f"tensor {entry.key!r} is leased, and differs in the newest commit: end its leases first")

    def place(self, arriving: Collection[TensorRecord], leaving: Sequence[Entry]) -> Callable[[], None]:
        slots = [(record, self._nvme.slot_of(record)) for record in arriving]

        def put() -> None:
            for record, slot in slots:
                self._shown.restore_tensor(record, slot)
            self.before = self._shown.show(self._taken)

        return put
