"""The generations of an open store: commits, rollbacks, and recovery when the store is opened.

``Commits`` runs a commit: it drafts the next generation, waits for the flush of all changed tensors, syncs the data files,
publishes the manifest, and drops generations that are no longer kept. ``Encoding`` encodes what a manifest says of each tensor
when the tensor arrives on the disk, so that a commit only joins the parts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import xxhash

from tiered.engine.engine import Engine
from tiered.engine.requests import Request
from tiered.engine.residency import Copy, Entry, State
from tiered.engine.scheduler import Scheduler
from tiered.engine.snapshot import Flush
from tiered.engine.state import EngineState
from tiered.errors import CapacityError, CommitError, LeaseConflict, ManifestError, MisuseError, TieredError
from tiered.format import generations
from tiered.format import manifest as manifests
from tiered.tiers.nvme import NvmeTier
from tiered.types import CHECKSUM_BYTES, PIECE_BYTES, Access, Key, Owner, Slot, Urgency, owner_decoded
from tiered.workers import Worker

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Commits", "Encoding", "Exchange", "Generations", "OnDisk", "said_of"]


class Encoding:
    """Encodes the ``record`` of copies at the bottom; a copy there never changes. All calls are made under the engine's
    lock."""

    def __init__(self, nvme: NvmeTier) -> None:
        self._nvme = nvme

    def arrived(self, entry: Entry) -> None:
        """Encode a tensor that arrived on the disk. Errors are ignored here: the tensor may be deleted before a commit needs
        it."""
        try:
            self.of(entry)
        except (ManifestError, MisuseError):
            return

    def of(self, entry: Entry) -> bytes:
        """Return the encoded record of a tensor. Raises MisuseError for a key, ManifestError for a shape or an element type
        that cannot be encoded."""
        copy, spec, extent = entry.copies[-1], entry.spec, None
        assert copy is not None
        assert copy.state is State.CLEAN
        if not copy.record:
            if not entry.empty:
                extent = manifests.Extent(*self._nvme.extent(copy.slot), copy.slot.nbytes)
            checksums = copy.checksums if extent else b""
            copy.record = manifests.encode_tensor(
                manifests.TensorRecord(
                    *(entry.name, entry.tensor_id, spec.dtype, spec.shape, spec.itemsize, copy.generation, extent, checksums),
                    owner=entry.owner.encoded if entry.owner is not None else "",
                )
            )
        return copy.record


def said_of(uuid: bytes, entry: Entry, copy: Copy) -> str:
    """Return a digest of what a manifest says of the bytes of ``copy``, at the bottom, wherever they lie: 32 hex digits. Where
    it is the same the bytes are; a tensor that is written again, with the same bytes too, has another one."""
    written = f"{uuid.hex()} {entry.tensor_id} {copy.generation} {entry.spec}".encode()
    return xxhash.xxh3_128_hexdigest(written + copy.checksums)


MANIFEST_BYTES = 16 << 10
TENSOR_BYTES = 448
"""Bytes of a manifest without its tensors, and of each tensor in it without names and checksums; upper estimates."""


@dataclass(frozen=True)
class _Generation:
    """A durable generation, with the encoded parts of its manifest."""

    number: int
    meta: bytes
    tensors: Mapping[Key, bytes]

    @classmethod
    def of(cls, manifest: manifests.Manifest) -> _Generation:
        """Return the generation of a manifest that was read."""
        return cls(manifest.generation, manifests.encode_meta(manifest.meta), manifests.encode_again(manifest))


@dataclass(frozen=True)
class _Wish:
    """What one owner of generations asked for: those that stay however old they are, and those that go however new."""

    also: frozenset[int] = frozenset()
    drop: frozenset[int] = frozenset()


class Generations:
    """The commits of a store that can make none: without a disk, or with durability "none".

    ``refused`` is why commits are refused, or None.
    """

    def __init__(self) -> None:
        self.refused: str | None = None

    @property
    def generation(self) -> int:
        """Number of the newest commit, or of the opened one; 0 where there is none."""
        return 0

    @property
    def begun(self) -> int:
        """Number of the newest commit that was begun; what changes from now on is not in it."""
        return self.generation

    @property
    def meta(self) -> dict[str, Any]:
        """User data of that commit."""
        return {}

    @property
    def commits_at_exit(self) -> bool:
        """Whether leaving a ``with`` block commits."""
        return False

    def uncommitted(self) -> int:
        """Return how many tensors differ from the newest commit; 0 where nothing can be committed."""
        self.settle()
        return self.unsaved()

    def unsaved(self) -> int:
        """Return the same without a wait for a commit that is open, as a finalizer has to."""
        return 0

    def committed(self, keys: Iterable[Key]) -> dict[Key, str]:
        """Return of those of ``keys`` whose bytes are as the generation has them a digest of what it says of them."""
        return {}

    def gone(self) -> set[Key]:
        """Return the keys of the newest generation that are not there any more."""
        return set()

    def committing(self, store: object) -> Commits:
        """Return the part that commits. Raises MisuseError where nothing can be committed."""
        raise MisuseError("nothing can be made durable without a disk, or with durability='none'")

    def refuse_change(self, store: object) -> None:
        """Raise MisuseError where no tensor may be changed."""

    @property
    def access(self) -> Access:
        """What may be done with tensors."""
        return Access.WRITE

    @property
    def kept(self) -> tuple[int, ...]:
        """Numbers of the generations that ``rollback`` can go back to, oldest first."""
        return ()

    def settle(self) -> None:
        """Wait until no commit or refresh is open."""

    def refresh(self, store: object) -> int:
        """Go to the newest generation, and return its number."""
        raise MisuseError(f"{store} is open for writing, and has the newest state; what access='read' opens can be refreshed")

    def stay(self, why: str) -> None:
        """Make ``refresh`` raise MisuseError with ``why`` from now on."""


class OnDisk(Generations):
    """The commits of a store on a disk, open for reading or for writing."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def settle(self) -> None:
        with self._engine.commits:
            return

    def _run(self, name: str, work: Callable[[Worker], int], wait: Callable[[Worker], None] = Worker.wait) -> Worker:
        """Run ``work`` in a thread of its own, which no signal handler enters, and ``wait`` for it.

        An exception that strikes the waiting caller cancels the work.
        """
        self._engine.refuse_nested()
        self._engine.end_struck()
        worker = Worker(name, lambda: work(worker))
        try:
            self._engine.launch(worker)
            wait(worker)
        except BaseException:
            worker.cancelled = True
            self._engine.released()
            raise
        return worker


class Commits(OnDisk):
    """The generations of a store that commits. ``newest`` is the one that the store began from or made last; ``keep`` of them
    stay on disk.

    ``duplicate(copy, slot, nbytes)`` copies bytes within a tier; see ``Flush``.
    """

    def __init__(self, engine: Engine, nvme: NvmeTier, keep: int, duplicate: Callable[[Copy, Slot, int], None]) -> None:
        super().__init__(engine)
        self.newest: _Generation | None = None
        self._nvme, self._keep, self._duplicate = nvme, keep, duplicate
        self._encoding = Encoding(nvme)
        self._meta_bytes = 0
        self._kept: list[int] = []
        self._dropped: list[int] = []  # they have no manifest that anybody opens, and stay for readers that have them
        self._held: list[int] = []  # kept and dropped ones that would be gone without readers
        self._wishes: dict[Owner | None, _Wish] = {}  # by the owner who asked; None is the user
        self.unreadable: dict[int, str] = {}
        """Generations that exist and cannot be opened, with the reason."""
        self._sync_failure: str | None = None
        self._went_back = False  # the newest generation on the disk is not the state of the store

    @property
    def generation(self) -> int:
        return self.newest.number if self.newest else 0

    @property
    def begun(self) -> int:
        return max(self._nvme.generations, default=0)

    @property
    def commits_at_exit(self) -> bool:
        return self.refused is None

    def unsaved(self) -> int:
        engine, committed = self._engine, self.newest.tensors if self.newest else {}
        if self.refused is not None:
            return 0
        with engine.lock:
            state = engine.state
            if state.changing:  # an exception struck a call, and nobody has counted since
                return 0
            there = same = 0
            for key in state.directory:
                entry = state.directory.entry(key)
                if not entry.temporary:
                    there += 1
                    copy = entry.copies[-1]
                    same += entry.unsaved is None and copy is not None and copy.record == committed.get(key, b"none")
            return there - same + len([key for key in committed if key not in state.directory])

    def committed(self, keys: Iterable[Key]) -> dict[Key, str]:
        engine, committed = self._engine, self.newest.tensors if self.newest else {}
        found: dict[Key, str] = {}
        with engine.lock:
            directory = engine.state.directory
            for key in keys:
                entry = directory.entry(key) if key in directory and key in committed else None
                copy = None if entry is None or entry.unsaved is not None else entry.copies[-1]
                if entry is not None and copy is not None and copy.record == committed[key]:
                    found[key] = said_of(self._nvme.uuid, entry, copy)
        return found

    def gone(self) -> set[Key]:
        with self._engine.lock:
            directory = self._engine.state.directory
            return {key for key in (self.newest.tensors if self.newest else {}) if key not in directory}

    def committing(self, store: object) -> Commits:
        return self

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(number for number in self._kept if number not in self.unreadable)

    def retain(self, newest: int | None, owner: Owner | None, also: Collection[int], drop: Collection[int]) -> None:
        """Keep that many of the newest generations from the next commit on (None: as many as now), those of ``also``, and none
        of ``drop`` that nobody else asked for. Replaces what ``owner`` asked before, and nothing that others did."""
        self._keep = self._keep if newest is None else newest
        self._wishes = {**self._wishes, owner: _Wish(frozenset(also), frozenset(drop))}

    def _also(self) -> frozenset[int]:
        """Return the generations that somebody asked to keep however old they are."""
        return frozenset[int]().union(*(wish.also for wish in self._wishes.values()))

    @property
    def meta(self) -> dict[str, Any]:
        return manifests.decode_meta(self.newest.meta) if self.newest else {}

    def encode_early(self) -> None:
        """Have each tensor encoded as it arrives on the disk, so that a commit only joins the parts, and have the data files
        leave room for manifests."""
        self._engine.state.arrived = self._encoding.arrived
        self._nvme.keep_free(self._for_manifests)
        self._nvme.why_besides = self._told_readers

    def _for_manifests(self) -> int:
        """Return an upper estimate of the bytes of all manifests that may exist at once, the next one included."""
        directory = self._engine.state.directory
        words = sum(map(len, directory))  # an owner's name is written, too: its keys begin with it
        pieces = self._nvme.used // PIECE_BYTES
        each = MANIFEST_BYTES + self._meta_bytes + TENSOR_BYTES * len(directory) + 8 * words + 4 * CHECKSUM_BYTES * pieces
        return (self._keep + len(self._also()) + len(self._held) + 1) * each

    def _told_readers(self) -> str:
        """Return which readers keep extents from being used again, in words; empty where none do."""
        if not self._held:
            return ""
        folder = self._nvme.open_folder
        try:
            told = generations.pins_in(folder).told(folder, self._held)
        except TieredError as error:
            return f"; {error}"
        return told and f". Older commits are kept for readers: {told}; close or refresh those, and commit"

    # -- opening ---------------------------------------------------------------------------------------------------------

    def restore(self, generation: int | None, *, drop_newer: bool = False) -> None:
        """Fill the directory from ``generation`` (None: the newest) and pin the extents of the other generations on disk.

        ``drop_newer`` removes the generations after it, durably; with generation 0, all of them. Older generations with a
        damaged manifest are skipped (``unreadable``): nobody can go back to them, so their extents are not pinned. Extents of
        dropped generations that readers have stay pinned.

        Raises ManifestError, also where there is no such generation.
        """
        folder, nvme = self._nvme.open_folder, self._nvme
        generations.clean(folder)
        there = generations.generations(folder)
        newer = [number for number in there if drop_newer and generation is not None and number > generation]
        chosen = None if drop_newer and generation == 0 else generations.load(folder, generation)
        for number in reversed(newer):  # the newest first: what is left is always the state after a commit
            generations.set_aside(folder, number)
        if newer:
            generations.sync(folder)
        pins, aside = generations.pins_in(folder), generations.dropped(folder)
        # A number that a reader has is not used again: it would not be known which one is meant.
        self._engine.state.generation = max([*there, *aside, pins.newest], default=0) + 1
        if aside:
            with contextlib.suppress(ManifestError):  # what cannot be removed stays pinned until the next commit
                generations.retire(folder, aside)
            for number in generations.dropped(folder):
                self._pin_dropped(number)
        if chosen is None:
            if not there:
                nvme.leave_nothing()  # in case nothing is ever committed
            return
        there = [number for number in there if number not in newer]
        for number in [*(other for other in there if other != chosen.generation), chosen.generation]:
            try:
                manifest = chosen if number == chosen.generation else generations.load(folder, number)
            except ManifestError as error:
                self.unreadable[number] = str(error)
                continue
            assert manifest is not None
            slots = self._pin_extents(manifest)
            if manifest is not chosen:
                for slot in slots:
                    nvme.free(slot)
        newest = _Generation.of(chosen)
        empty = self.empty_slots(chosen.tensors)
        assert empty is not None
        for record in chosen.tensors:
            self.restore_tensor(record, newest.tensors[record.key], empty, claim=False)
        state = self._engine.state
        state.directory.next_id = max(state.directory.next_id, chosen.next_tensor_id)
        self._kept, self.newest, self._meta_bytes = there, newest, len(newest.meta)
        self._held = [number for number in there[: -self._keep] if pins.needs(number)]

    def _pin_extents(self, manifest: manifests.Manifest) -> list[Slot]:
        """Pin the extents of a generation and return them; the store has a reference to each, too. Raises ManifestError."""
        nvme, name = self._nvme, f"{self._nvme.folder}: manifest.{manifest.generation}"
        if manifest.store != nvme.uuid.hex():
            raise ManifestError(f"{name} belongs to another store than {nvme.files[0].path}")
        for named, file in zip(manifest.files, nvme.files, strict=False):
            if (named.name, named.uuid) != (file.name, file.uuid.hex()):
                raise ManifestError(f"{name} names another data file than {file.path}")
        if len(manifest.files) != len(nvme.files):
            raise ManifestError(f"{name} names {len(manifest.files)} data files; there are {len(nvme.files)}")
        slots = [self._slot(record.extent) for record in manifest.tensors if record.extent]
        for slot in slots:
            nvme.claim(slot)
        nvme.retain(manifest.generation, slots)
        return slots

    def _pin_dropped(self, number: int) -> None:
        """Pin the extents of a generation that was dropped, and that a reader has."""
        try:
            manifest = generations.load_dropped(self._nvme.open_folder, number)
        except ManifestError as error:  # its reader finds out by checksums
            self.unreadable[number] = str(error)
            return
        for slot in self._pin_extents(manifest):
            self._nvme.free(slot)
        self._dropped.append(number)

    def empty_slots(self, records: Iterable[manifests.TensorRecord], going: Sequence[Slot] = ()) -> dict[Key, Slot] | None:
        """Allocate a slot for each tensor without bytes, which has no extent in the manifest. All of them or none.

        None: there will be room as soon as the slots in ``going`` are free. Raises CapacityError.
        """
        found: dict[Key, Slot] = {}
        named = [record.key for record in records if record.extent is None]
        for key in named:
            slot = self._nvme.allocate(1)
            if slot is None:
                for taken in found.values():
                    self._nvme.free(taken)
                freed = sum(slot.nbytes // self._nvme.alignment for slot in going if not self._nvme.pinned(slot))
                if len(found) + freed >= len(named):
                    return None
                raise CapacityError(f"{self._nvme.folder}: {self._nvme.refusal}")
            found[key] = slot
        return found

    def restore_tensor(
        self, record: manifests.TensorRecord, encoded: bytes, empty: Mapping[Key, Slot], *, claim: bool = True
    ) -> None:
        state = self._engine.state
        if record.extent is None:
            slot = empty[record.key]
        else:
            slot = self._slot(record.extent)
            if claim:
                self._nvme.claim(slot)
        state.pools[-1].account(slot)
        entry = state.directory.restore(
            *(record.key, record.spec, record.tensor_id, slot, record.checksums, record.generation),
            owner=owner_decoded(record.owner),
        )
        copy = entry.copies[-1]
        assert copy is not None
        copy.record = encoded

    def rollback(self, generation: int | None, needs: Sequence[Key]) -> int:
        """Restore the state of ``generation`` (None: the newest) and return its number. Tensors that did not change since stay
        where they are."""

        def work(worker: Worker) -> int:
            with self._engine.commits:
                chosen = self.newest
                if generation is not None or self._went_back:
                    chosen = self._load(generation)
                if chosen is None:
                    raise MisuseError(
                        f"{self._nvme.folder} has no commit to go back to: store.close(), and open the store again, which is "
                        "then empty, as nothing was committed"
                    )
                for key in needs:
                    if key not in chosen.tensors:
                        raise MisuseError(
                            f"generation {chosen.number} has no {key!r}: nothing was rolled back (zero.commit makes "
                            "checkpoints of models; store.rollback goes back without one, and the model is paged anew then)"
                        )
                self._engine.wait(_Rollback(chosen, self, worker))
                return chosen.number

        return self._run("tiered-rollback", work).future.result()

    def rolled_back_to(self, chosen: _Generation) -> None:
        """Record that the store has the state of ``chosen``."""
        self.newest, self._went_back = chosen, chosen.number != self._kept[-1]

    def _load(self, generation: int | None) -> _Generation | None:
        folder, nvme = self._nvme.open_folder, self._nvme
        found = generations.load(folder, generation)
        if found is None:
            return None
        if found.store != nvme.uuid.hex() or found.generation not in self._kept:
            raise ManifestError(f"{folder}: manifest.{found.generation} is not one of this store's generations")
        if found.generation in self.unreadable:  # it can be read by now, but its extents were not pinned
            raise ManifestError(self.unreadable[found.generation])
        return _Generation.of(found)

    # -- committing ------------------------------------------------------------------------------------------------------

    def commit(self, meta: Mapping[str, object] | None, owner: object, *, always: bool = True) -> int:
        """Commit the state of the store and return the generation. ``meta`` None keeps the last one. ``always`` commits even if
        nothing changed. ``owner`` is referred to until the end.

        The commit runs in a thread of its own, which no signal handler enters. An exception that strikes the waiting caller
        cancels the commit, unless its manifest is being written already.
        """
        encoded = self._encoded(meta)

        def work(worker: Worker) -> int:
            with self._engine.commits:
                draft = self._draft(encoded, None if always or self._went_back else self.newest)
                flush = Flush(draft, self._duplicate, cancelled=lambda: worker.cancelled)
                return self._complete(flush, draft, owner, worker)

        return self._run("tiered-commit", work).future.result()

    def commit_async(self, meta: Mapping[str, object] | None, owner: object) -> Future[int]:
        """Commit the state as of now while the caller goes on; ``owner`` is referred to until the end. Waits for an open
        commit."""
        encoded, engine = self._encoded(meta), self._engine

        def work(worker: Worker) -> int:
            with engine.commits:
                draft = self._draft(encoded, None)
                flush = Flush(draft, self._duplicate, Urgency.WRITEBACK, lambda: worker.cancelled)
                engine.begin(flush)
                if not flush.begun:
                    flush.raise_error()
                worker.reached()
                return self._complete(flush, draft, owner, worker)

        worker = self._run("tiered-commit", work, Worker.wait_reached)
        if not worker.has_reached:  # later errors are the future's
            worker.future.result()
        return worker.future

    def _complete(self, flush: Flush, draft: _Draft, owner: object, worker: Worker) -> int:
        """Wait for the flush, then publish the draft. The call keeps a reference to ``owner``, so that the garbage collector
        cannot take ``owner`` during the commit."""
        self._engine.wait(flush)  # a flush that fails drops the draft
        try:
            return self._publish(draft, worker)
        except BaseException:
            with self._engine.lock:
                draft.drop()
            raise

    def _encoded(self, meta: Mapping[str, object] | None) -> bytes | None:
        return None if meta is None else manifests.encode_meta(dict(meta))

    def _draft(self, meta: bytes | None, since: _Generation | None) -> _Draft:
        if self._sync_failure:
            raise CommitError(self._sync_failure)
        if self.refused is not None:
            raise MisuseError(self.refused)
        if (self._held or self._dropped) and self._nvme.strayed() is None:
            self._drop_old()  # what readers have let go since makes room for this commit
        before = self.newest.meta if self.newest else manifests.encode_meta({})
        encoded = before if meta is None else meta
        if len(encoded) > self._meta_bytes + MANIFEST_BYTES:  # more than the room that was left for manifests
            self._refuse_meta(len(encoded))
        self._meta_bytes = max(len(before), len(encoded))
        return _Draft(self._engine, self._nvme, self._encoding, encoded, since)

    def _refuse_meta(self, nbytes: int) -> None:
        """Raise CapacityError, before anything is written, where a manifest with ``nbytes`` of meta certainly has no room."""
        if self.refused is not None:
            raise MisuseError(self.refused)
        try:
            found = os.fstatvfs(self._nvme.open_folder.fd)
        except OSError:  # writing the manifest will report the error
            return
        free = found.f_bfree * found.f_frsize  # root may have the reserved blocks
        if found.f_blocks and nbytes > free:  # ramfs reports no block counts
            raise CapacityError(
                f"the meta of this commit takes {nbytes:,} bytes of its manifest, and {self._nvme.folder} has {free:,} free: "
                "give it less, or make room on that filesystem; the last commit holds, and no memory is lost"
            )

    def _publish(self, draft: _Draft, worker: Worker) -> int:
        """Make a draft durable whose tensors are all on the disk; return its generation."""
        nvme, made = self._nvme, draft.made
        if made is None:
            return self.generation
        self._refuse_strayed()  # before the costly steps
        try:
            nvme.sync()
        except OSError as error:
            self._sync_failure = (
                f"{error.filename or nvme.folder}: the disk did not take a commit ({error.strerror}); what was written "
                f"since generation {self.generation} cannot be trusted: close the store and reopen that generation"
            )
            raise CommitError(self._sync_failure) from error
        nvme.leave_everything()
        if worker.cancelled:
            raise CommitError("this commit was cancelled: an exception struck the waiting caller")
        generations.prepare(nvme.open_folder, made.number, draft.data)
        try:
            self._refuse_strayed()  # the last moment: a move after this is one after the commit
        except BaseException:
            generations.abandon(nvme.open_folder, made.number)
            raise
        self._kept.append(made.number)  # also when publishing fails: a power loss may still reveal the generation
        draft.keep()
        generations.publish(nvme.open_folder, made.number)
        self.newest, self._went_back = made, False
        if nvme.strayed() is None:  # else a new copy made of hard links needs the old generations too
            self._drop_old()
        return made.number

    def _refuse_strayed(self) -> None:
        """Raise CommitError where the opened path would not lead to the commit."""
        why = self._nvme.strayed()
        if why is not None:
            raise CommitError(f"generation {self.generation} is the last commit: {why}")

    def _slot(self, extent: manifests.Extent) -> Slot:
        return self._nvme.slot(extent.file, extent.offset, extent.nbytes)

    def _drop_old(self) -> None:
        """Drop the generations that are no longer kept and that no reader has: first their manifests, durably; only then may
        their extents be reused."""
        folder = self._nvme.open_folder
        try:
            there = generations.generations(folder)
            also, newest = self._also(), there[-1:]
            given_up = frozenset[int]().union(*(wish.drop for wish in self._wishes.values())).difference(also, newest)
            # A commit that failed left no manifest, and one that is unreadable is no fallback.
            usable = [one for one in self._kept if one in there and one not in self.unreadable and one not in given_up]
            retained = usable[-self._keep :]
            old = [one for one in self._kept if retained and (one in given_up or (one < retained[0] and one not in also))]
            self._held = [*old, *self._dropped]
            if not self._held:
                generations.pins_in(folder)  # removes those of dead readers
                return
            gone = set(generations.retire(folder, self._held))
        except TieredError:  # the commit holds nevertheless; they stay pinned and are dropped with the next one
            return
        with self._engine.lock:
            for generation in gone:
                if generation in self._nvme.generations:  # Ctrl-C may have struck between this line and the next
                    self._nvme.release(generation)
        self._kept = list(filterfalse(gone.__contains__, self._kept))
        self._dropped = list(filterfalse(gone.__contains__, self._dropped))
        self._held = list(filterfalse(gone.__contains__, self._held))


class _Draft:
    """A generation in the making: ``data`` is its manifest, ``made`` its parts; None where nothing changed since ``since``."""

    def __init__(self, engine: Engine, nvme: NvmeTier, encoding: Encoding, meta: bytes, since: _Generation | None) -> None:
        self.made: _Generation | None = None
        self.data = bytearray()
        self._engine, self._nvme, self._encoding, self._meta, self._since = engine, nvme, encoding, meta, since
        self._tensors: dict[Key, bytes] = {}  # b"" for tensors that are not at the bottom yet
        self._refused: ManifestError | MisuseError | None = None
        self._generation = 0  # number of the generation while its extents are pinned by the draft

    def begin(self, entries: Iterator[Entry], frozen: dict[Key, None]) -> None:
        if frozen:
            self._refuse_without_room(frozen)
        tensors, slots, encoded = self._tensors, list[Slot](), self._encoding.of
        for entry in entries:
            if entry.key in frozen:
                tensors[entry.key] = b""
                continue
            copy = entry.copies[-1]
            assert copy is not None
            tensors[entry.key] = copy.record or encoded(entry)
            if not entry.empty:
                slots.append(copy.slot)
        self._generation = self._engine.state.generation
        self._nvme.retain(self._generation, slots)

    def _refuse_without_room(self, frozen: Iterable[Key]) -> None:
        """Raise CapacityError where the changed tensors certainly have no room. Write-backs in flight have room already."""
        nvme, state, needed = self._nvme, self._engine.state, 0
        for key in frozen:
            needed += -(-state.directory.entry(key).nbytes // nvme.alignment) * nvme.alignment
        if not nvme.reserve(needed - state.transfers.going_down(state.bottom - 1)):
            raise CapacityError(
                f"a commit has to write {needed:,} bytes that changed, beside what kept generations need: {nvme.refusal}. Make "
                "room there, give nvme= more if it is the limit, or roll back; the last commit holds, and no memory is lost"
            )

    def add(self, entry: Entry) -> None:
        copy = entry.copies[-1]
        assert copy is not None
        try:
            self._tensors[entry.name] = copy.record or self._encoding.of(entry)
        except (ManifestError, MisuseError) as error:  # the transfer succeeded: the error is the commit's, raised at its end
            self._refused = error
        if not entry.empty:
            self._nvme.pin(self._generation, copy.slot)

    def end(self) -> None:
        if self._refused is not None:
            raise self._refused
        assert all(self._tensors.values())
        if self._since is not None and self._tensors == self._since.tensors:
            self.drop()
            return
        state, uuid = self._engine.state, self._nvme.uuid.hex()
        files = tuple(manifests.RecordedFile(f.name, f.uuid.hex(), f.index, f.nbytes) for f in self._nvme.files)
        head = manifests.Head(uuid, self._generation, msgspec.Raw(self._meta), files, state.directory.next_id)
        self.data = manifests.assemble(head, self._tensors.values())  # what is refused becomes no generation
        self.made = _Generation(self._generation, self._meta, self._tensors)
        state.generation += 1

    def keep(self) -> None:
        """Leave the draft's extents pinned."""
        self._generation = 0

    def drop(self) -> None:
        if self._generation in self._nvme.generations:
            self._nvme.release(self._generation)
        self._generation = 0


Said = TypeVar("Said", bytes, manifests.TensorRecord)


class Exchange(Request, Generic[Said]):
    """A request to have the tensors that a generation has, of which it ``says`` something each, by key. Those that differ are
    exchanged. All others stay, and their copies in memory."""

    deferred = True

    def __init__(self, what: str, says: Mapping[Key, Said], worker: Worker) -> None:
        super().__init__()
        self._what, self._worker = what, worker
        self._says: Mapping[Key, Said] = says

    @property
    def unwanted(self) -> bool:
        return super().unwanted or self._worker.cancelled

    def abandon(self, state: EngineState) -> None:
        if not self.done:
            what = f"this {self._what} was cancelled: an exception struck the waiting caller"
            self.error, self.done = TieredError(what), True

    def __str__(self) -> str:
        return f"a {self._what}"

    def same(self, entry: Entry, said: Said) -> bool:
        """Return whether a tensor is what the generation says of it."""
        raise NotImplementedError

    def refuse_leased(self, entries: Sequence[Entry], changed: Sequence[Entry]) -> None:
        """Raise LeaseConflict where a lease is in the way."""
        raise NotImplementedError

    def place(self, arriving: Collection[Said], leaving: Sequence[Entry]) -> Callable[[], None]:
        """Find room for tensors, the last step that may be refused. Return what puts them there once the others are gone."""
        raise NotImplementedError

    def attempt(self, scheduler: Scheduler) -> bool:
        entries, missing, changed = list(scheduler.state.directory.entries()), dict(self._says), list[Entry]()
        for entry in entries:
            if entry.key in missing and self.same(entry, missing[entry.key]):
                del missing[entry.key]
            else:
                changed.append(entry)
        self.refuse_leased(entries, changed)
        if sum(scheduler.busy(entry, self) for entry in changed):  # all of them: busy() raises the urgency of transfers
            return False
        put = self.place(missing.values(), changed)
        for entry in changed:
            scheduler.state.directory.forget(entry.key)
        put()
        return True


class _Rollback(Exchange[bytes]):
    def __init__(self, chosen: _Generation, commits: Commits, worker: Worker) -> None:
        super().__init__("rollback", chosen.tensors, worker)
        self._chosen, self._commits = chosen, commits

    def same(self, entry: Entry, said: bytes) -> bool:
        copy = entry.copies[-1]
        return copy is not None and entry.unsaved is None and copy.record == said

    def refuse_leased(self, entries: Sequence[Entry], changed: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.leased:
                raise LeaseConflict(f"tensor {entry.key!r} is leased: end every lease before a rollback")

    def place(self, arriving: Collection[bytes], leaving: Sequence[Entry]) -> Callable[[], None]:
        records = [manifests.decode_tensor(encoded) for encoded in arriving]
        there: list[Slot] = [copy.slot for copy in (entry.copies[-1] for entry in leaving) if copy is not None]
        room = self._commits.empty_slots(records, there)

        def put() -> None:
            empty = room if room is not None else self._commits.empty_slots(records)
            assert empty is not None
            for record, encoded in zip(records, arriving, strict=True):
                self._commits.restore_tensor(record, encoded, empty)
            self._commits.rolled_back_to(self._chosen)

        return put
