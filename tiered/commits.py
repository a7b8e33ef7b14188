"""Generations of one store: what a commit does step by step, and what opening finds again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from tiered import generations
from tiered import manifest as manifests
from tiered.engine import Engine
from tiered.errors import CapacityError, CommitError, ManifestError
from tiered.requests import Flush
from tiered.residency import Copy, State
from tiered.tiers.nvme import NvmeTier
from tiered.types import Slot

__all__ = ["Commits"]


class Commits:
    """``newest`` is the generation that the store began from or made last; ``keep`` of them stay on disk.

    ``duplicate(copy, slot, nbytes)`` copies bytes within a tier; see ``Flush``.
    """

    def __init__(
        self, engine: Engine, nvme: NvmeTier, keep: int, duplicate: Callable[[Copy, Slot, int], None]
    ) -> None:
        self.newest: manifests.Manifest | None = None
        self._engine, self._nvme, self._keep, self._duplicate = engine, nvme, keep, duplicate
        self._kept: list[int] = []
        self._condemned: str | None = None

    @property
    def generation(self) -> int:
        return self.newest.generation if self.newest else 0

    @property
    def meta(self) -> dict[str, Any]:
        return deepcopy(dict(self.newest.meta)) if self.newest else {}

    # -- opening ---------------------------------------------------------------------------------------------------------

    def restore(self, generation: int | None) -> None:
        """Fill the directory from ``generation`` (None: the newest); pin what the others that are kept reference.

        Raises ManifestError, also where there is no such generation.
        """
        folder, nvme = self._nvme.folder, self._nvme
        generations.clean(folder)
        chosen = generations.load(folder, generation)
        if chosen is None:
            return
        there = generations.generations(folder)
        for number in [*(other for other in there if other != chosen.generation), chosen.generation]:
            manifest = chosen if number == chosen.generation else generations.load(folder, number)
            assert manifest is not None
            if manifest.store != nvme.uuid.hex():
                raise ManifestError(f"{folder}: manifest.{number} belongs to another store than {nvme.files[0].path}")
            for named, file in zip(manifest.files, nvme.files, strict=False):
                if (named.name, named.uuid) != (file.name, file.uuid.hex()):
                    raise ManifestError(f"{folder}: manifest.{number} names another data file than {file.path}")
            if len(manifest.files) != len(nvme.files):
                raise ManifestError(
                    f"{folder}: manifest.{number} names {len(manifest.files)} data files; there are {len(nvme.files)}"
                )
            slots = [self._slot(record.extent) for record in manifest.tensors if record.extent]
            for slot in slots:
                nvme.claim(slot)
            nvme.retain(number, slots)
            if manifest is not chosen:
                for slot in slots:
                    nvme.free(slot)
        for record in chosen.tensors:
            self._restore_tensor(record)
        admission = self._engine.admission
        admission.directory.next_id = max(admission.directory.next_id, chosen.next_tensor_id)
        admission.generation = there[-1] + 1
        self._kept, self.newest = there, chosen

    def _restore_tensor(self, record: manifests.TensorRecord) -> None:
        admission = self._engine.admission
        if record.extent is None:
            found = self._nvme.allocate(1)  # an empty tensor has no extent in the manifest, but a slot like any other here
            if found is None:
                raise CapacityError(f"{self._nvme.folder}: {self._nvme.refusal}")
            slot = found
        else:
            slot = self._slot(record.extent)
        admission.places[-1].account(slot)
        entry = admission.directory.restore(
            record.key, record.spec, record.tensor_id, slot, record.checksums, record.generation
        )
        copy = entry.copies[-1]
        assert copy is not None
        admission.install(copy)

    # -- committing ------------------------------------------------------------------------------------------------------

    def commit(self, meta: Mapping[str, object] | None) -> int:
        """``meta`` None: with that of before, and only when something changed since."""
        engine, nvme = self._engine, self._nvme
        plain = None if meta is None else self._as_it_comes_back(meta)
        with engine.commits:
            if self._condemned:
                raise CommitError(self._condemned)
            drafts: list[manifests.Manifest] = []

            def snapshot() -> None:
                draft = self._draft(self.meta if plain is None else plain)
                if meta is None and self.newest is not None and draft.tensors == self.newest.tensors:
                    return
                manifests.encode(draft)  # what cannot be written down is refused before anything is pinned
                nvme.retain(draft.generation, [self._slot(r.extent) for r in draft.tensors if r.extent])
                engine.admission.generation += 1
                drafts.append(draft)

            engine.wait(Flush(snapshot, self._duplicate))
            if not drafts:
                return self.generation
            draft = drafts[0]
            try:
                nvme.sync()
            except OSError as error:
                self._condemned = (
                    f"{error.filename or nvme.folder}: the disk did not take a commit ({error.strerror}); what was written "
                    f"since generation {self.generation} cannot be trusted: close the store and reopen that generation"
                )
                raise CommitError(self._condemned) from error
            self._kept.append(draft.generation)  # also when the next line fails: a power loss may still show it
            generations.write(nvme.folder, draft)
            self.newest = draft
            self._drop_old()
            return draft.generation

    def _as_it_comes_back(self, meta: Mapping[str, object]) -> Mapping[str, object]:
        """A copy of its own: the caller may change what it gave. Raises MisuseError for what JSON cannot hold."""
        empty = manifests.Manifest(self._nvme.uuid.hex(), 1, meta, self._files(), 1, ())
        return manifests.decode(manifests.encode(empty)).meta

    def _files(self) -> tuple[manifests.DataFile, ...]:
        return tuple(manifests.DataFile(f.name, f.uuid.hex(), f.index, f.nbytes) for f in self._nvme.files)

    def _slot(self, extent: manifests.Extent) -> Slot:
        return self._nvme.slot(extent.file, extent.offset, extent.nbytes)

    def _draft(self, meta: Mapping[str, object]) -> manifests.Manifest:
        admission = self._engine.admission
        records = []
        for entry in admission.directory.entries():
            copy = entry.copies[-1]
            assert copy is not None
            assert copy.state is State.CLEAN
            extent = manifests.Extent(*self._nvme.extent(copy.slot), copy.slot.nbytes) if entry.spec.nbytes else None
            records.append(
                manifests.TensorRecord(
                    entry.key,
                    entry.tensor_id,
                    entry.spec.dtype,
                    entry.spec.shape,
                    entry.spec.itemsize,
                    copy.generation,
                    extent,
                    copy.checksums if extent else b"",
                )
            )
        next_id = admission.directory.next_id
        return manifests.Manifest(self._nvme.uuid.hex(), admission.generation, meta, self._files(), next_id, tuple(records))

    def _drop_old(self) -> None:
        """Older generations than are kept: their manifests go first, durably; only then their extents may be written over."""
        folder = self._nvme.folder
        try:
            there = generations.generations(folder)
        except ManifestError:  # as below
            return
        retained = [generation for generation in self._kept if generation in there][-self._keep :]  # a failed one is not there
        old = [generation for generation in self._kept if generation < retained[0]]
        if not old:
            return
        try:
            for generation in old:
                if generation in there:
                    generations.drop(folder, generation)
            generations.sync(folder)
        except ManifestError:  # the commit holds nevertheless; they stay pinned, and go with the next one
            return
        with self._engine.lock:
            for generation in old:
                self._nvme.release(generation)
        self._kept = [generation for generation in self._kept if generation >= retained[0]]
