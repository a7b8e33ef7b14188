"""``TieredStore``: named tensors that live where there is room and come where they are needed."""

from __future__ import annotations

import ctypes
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import torch

from tiered import generations
from tiered import manifest as manifests
from tiered.config import Parts, StoreConfig, build, default_dram
from tiered.engine import Engine, EngineConfig
from tiered.errors import CapacityError, CommitError, ForkedStore, ManifestError, MisuseError, StoreClosed
from tiered.lease import LeaseOfMany, LeaseOfOne, dtype_of, spec_of
from tiered.requests import Delete, Flush, Install, Room
from tiered.residency import State
from tiered.sizes import parse_size
from tiered.stats import StoreStatistics
from tiered.types import Access, Key, Slot, TensorSpec

__all__ = ["TieredStore"]


class TieredStore:
    """Tensors by name, in DRAM as far as the budget goes and in extents of one large file for the rest.

    Open one with ``TieredStore.open``. All methods may be called from any thread of the process that opened it. Leaving a
    ``with`` block normally commits; leaving it by an exception does not, nor does ``close``: what was not committed is gone at
    the next open.
    """

    def __init__(
        self, parts: Parts, engine: Engine, kept: list[int], newest: manifests.Manifest | None, keep: int
    ) -> None:
        self._parts, self._engine, self._keep = parts, engine, keep
        self._kept, self._newest = kept, newest
        self._pid = os.getpid()
        self._condemned: str | None = None
        self._closed = False
        self._shutdown = weakref.finalize(self, _shut_down, engine, parts, self._pid)

    # -- opening and closing ----------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        dram: int | str | None = None,
        nvme: int | str | None = None,
        backend: Literal["auto", "libaio", "posix"] = "auto",
        keep: int = 2,
        deadline: float = 60.0,
    ) -> TieredStore:
        """Create the store in folder ``path``, or reopen it as of its newest commit.

        ``dram`` is the hard budget of the pool ("256MiB" or bytes; default: half of what is available), ``nvme`` that of the
        disk (default: what it has). ``keep`` is how many generations stay on disk. ``deadline`` is how many seconds a call
        waits for room before it raises and names who holds it.

        Raises MisuseError (not a folder, foreign, not writable), StoreLocked, CapacityError, ManifestError.
        """
        if keep < 1:
            raise MisuseError(f"at least one generation must be kept, not {keep}")
        budget = default_dram() if dram is None else parse_size(dram)
        limit = None if nvme is None else parse_size(nvme)
        parts = build(StoreConfig(path, budget, limit, backend))
        engine = Engine(parts.tiers, parts.links, parts.policies, EngineConfig(deadline=deadline))
        try:
            kept, newest = _restore(parts, engine)
        except BaseException:
            engine.stop()
            parts.nvme.close()
            raise
        if not parts.nvme.direct:
            warnings.warn(
                f"the filesystem of {parts.nvme.folder} has no O_DIRECT: I/O goes through the page cache, "
                "slower and with memory that is not in the budget",
                stacklevel=2,
            )
        store = cls(parts, engine, kept, newest, keep)
        engine.start()
        return store

    def __enter__(self) -> TieredStore:
        self._running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._closed:
                self._commit(None)
        finally:
            self.close()

    def close(self) -> None:
        """Wait for transfers in flight and let go of everything. Commits nothing. Idempotent."""
        self._closed = True
        self._shutdown()

    # -- tensors by name --------------------------------------------------------------------------------------------------

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Store a copy of ``tensor`` (any strided dtype, shape, device) as ``key``, replacing what was there.

        Raises LeaseConflict while ``key`` is leased, CapacityError when the tensor cannot fit or no room comes in time.
        """
        _refuse_unstorable(key, tensor)
        source = tensor.detach().resolve_conj().resolve_neg()
        self._put(key, spec_of(source), lambda target: _copy_bytes(target, source))

    def create(self, key: Key, spec: TensorSpec) -> None:
        """A new tensor with undefined contents, to be filled under a WRITE lease. Replaces and raises as ``put``."""
        dtype_of(spec)
        self._put(key, spec, None)

    def _put(self, key: Key, spec: TensorSpec, fill: Callable[[torch.Tensor], None] | None) -> None:
        if not isinstance(key, str):
            raise MisuseError(f"a key is a str, not {type(key).__name__}")
        engine = self._running()
        room = Room(0, max(1, spec.nbytes))
        engine.wait(room)
        assert room.slot is not None
        try:
            if fill is not None and spec.nbytes:
                fill(_bytes_at(self._parts.dram.address + room.slot.offset, spec.nbytes))
        except BaseException:
            with engine.lock:
                engine.admission.give_back(0, room.slot)
            raise
        engine.wait(Install(key, spec, 0, room.slot))

    def get(self, key: Key) -> torch.Tensor:
        """A copy of ``key``, on the CPU. Raises KeyNotFound, TransferError, CapacityError."""
        with self.lease(key) as tensor:
            copy = torch.empty_like(tensor)
            _flat(copy).copy_(_flat(tensor))  # as bytes: there are element types that torch cannot clone
            return copy

    @overload
    def lease(self, key: Key, *, access: Access | str = ..., tier: str | None = ...) -> LeaseOfOne: ...
    @overload
    def lease(self, key: list[Key] | tuple[Key, ...], *, access: Access | str = ..., tier: str | None = ...) -> LeaseOfMany: ...
    def lease(
        self, key: Key | list[Key] | tuple[Key, ...], *, access: Access | str = Access.READ, tier: str | None = None
    ) -> LeaseOfOne | LeaseOfMany:
        """A context manager that gives the tensor itself, in ``tier`` (default: the top one), without a copy.

        READ leases may be shared, a WRITE lease excludes every other. A list of keys is granted all at once and gives a tuple.
        The tensor's memory stays its own until the last reference to it is gone, also after the lease; but only what is
        written before the end of a WRITE lease is stored.

        Entering raises KeyNotFound, LeaseConflict, TransferError, and CapacityError after the deadline. Leaving a READ lease
        whose tensor was written to raises MisuseError.
        """
        try:
            wanted = Access(access)
        except ValueError:
            raise MisuseError(f"access is 'read' or 'write', not {access!r}") from None
        names = [t.name for t in self._parts.tiers[:-1]]
        if tier is not None and tier not in names:
            raise MisuseError(f"there are no leases in tier {tier!r}; this store has {', '.join(names)}")
        index = 0 if tier is None else names.index(tier)
        if isinstance(key, str):
            return LeaseOfOne(self._running, self._parts.dram, [key], wanted, index)
        keys = list(key)
        if len(set(keys)) != len(keys):
            raise MisuseError(f"the same tensor twice in one lease: {keys}")
        return LeaseOfMany(self._running, self._parts.dram, keys, wanted, index)

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Bring ``keys`` up in this order when there is room and time. A hint: a newer one replaces what has not begun.

        Never waits; a full pool or an unknown key is not an error.
        """
        self._running().hint([keys] if isinstance(keys, str) else keys, 0)

    def delete(self, key: Key) -> None:
        """Raises KeyNotFound, LeaseConflict."""
        self._running().wait(Delete(key))

    def __contains__(self, key: object) -> bool:
        return key in self._running().admission.directory

    def __iter__(self) -> Iterator[Key]:
        engine = self._running()
        with engine.lock:
            return iter(list(engine.admission.directory))

    def __len__(self) -> int:
        return len(self._running().admission.directory)

    def spec(self, key: Key) -> TensorSpec:
        """Raises KeyNotFound."""
        engine = self._running()
        with engine.lock:
            return engine.admission.directory.entry(key).spec

    # -- commits ----------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the newest commit; 0 before the first."""
        return self._newest.generation if self._newest else 0

    @property
    def meta(self) -> dict[str, Any]:
        """What the newest commit was given."""
        return dict(self._newest.meta) if self._newest else {}

    @property
    def folder(self) -> str:
        return self._parts.nvme.folder

    def commit(self, meta: Mapping[str, object] | None = None) -> int:
        """Make everything durable, with ``meta`` (JSON values); returns the generation. Without ``meta`` the last one stays.

        When this returns, a crash or power loss leaves at least this state. Raises LeaseConflict under an open WRITE lease,
        CommitError when the disk does not take it (then the commit before still holds), and what a failed write raises.
        """
        return self._commit(dict(meta) if meta is not None else self.meta)

    def _commit(self, meta: dict[str, object] | None) -> int:
        """``meta`` None: only when something changed since the last commit."""
        engine = self._running()
        with engine.commits:
            if self._condemned:
                raise CommitError(self._condemned)
            nvme = self._parts.nvme
            drafts: list[manifests.Manifest] = []

            def snapshot() -> None:
                draft = self._draft(engine, self.meta if meta is None else meta)
                if meta is None and self._newest is not None and draft.tensors == self._newest.tensors:
                    return
                manifests.encode(draft)  # what cannot be written down is refused before anything is pinned
                nvme.retain(draft.generation, [r.extent.slot for r in draft.tensors if r.extent])
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
                    f"{nvme.path}: the disk did not take a commit ({error.strerror}); what was written since generation "
                    f"{self.generation} cannot be trusted: close the store and reopen that generation"
                )
                raise CommitError(self._condemned) from error
            self._kept.append(draft.generation)  # also when the next line fails: a power loss may still show it
            generations.write(nvme.folder, draft)
            self._newest = draft
            self._drop_old(engine)
            return draft.generation

    def _draft(self, engine: Engine, meta: Mapping[str, object]) -> manifests.Manifest:
        nvme = self._parts.nvme
        identity = nvme.uuid.hex()
        records = []
        for entry in engine.admission.directory.entries():
            copy = entry.copies[-1]
            assert copy is not None
            assert copy.state is State.CLEAN
            extent = manifests.Extent(0, copy.slot.offset, copy.slot.nbytes) if entry.spec.nbytes else None
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
        file = manifests.DataFile(Path(nvme.path).name, identity, 0, nvme.file_bytes)
        next_id = engine.admission.directory.next_id
        return manifests.Manifest(identity, engine.admission.generation, meta, (file,), next_id, tuple(records))

    def _drop_old(self, engine: Engine) -> None:
        """Older generations than are kept: their manifests go first, durably; only then their extents may be written over."""
        old = self._kept[: -self._keep]
        if not old:
            return
        there = generations.generations(self._parts.nvme.folder)
        for generation in old:
            if generation in there:
                generations.drop(self._parts.nvme.folder, generation)
        fd = os.open(self._parts.nvme.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        with engine.lock:
            for generation in old:
                self._parts.nvme.release(generation)
        self._kept = self._kept[-self._keep :]

    # -- looking in -------------------------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """What happened since ``open``: a frozen snapshot."""
        engine = self._running()
        with engine.lock:
            engine.admission.bury()
            return StoreStatistics(
                backend=self._parts.backend.name,
                direct=self._parts.nvme.direct,
                tensors=len(engine.admission.directory),
                generation=self.generation,
                leases=engine.leases,
                hits=engine.hits,
                misses=engine.misses,
                stalled_for_reads=engine.stalled_for_reads,
                stalled_for_room=engine.stalled_for_room,
                prefetched=engine.admission.prefetched,
                prefetched_unused=engine.admission.prefetched_unused,
                evictions=engine.admission.evictions,
                tiers=engine.admission.tier_statistics(),
                links=engine.link_statistics(),
            )

    def free_on_device(self) -> int:
        """Bytes that the store's filesystem still has."""
        self._running()
        return self._parts.nvme.free_on_device()

    # -- within -----------------------------------------------------------------------------------------------------------

    def _running(self) -> Engine:
        if os.getpid() != self._pid:
            raise ForkedStore(
                f"the store in {self._parts.nvme.folder} was opened by process {self._pid} and cannot be used in its forked "
                "child; open stores after forking, or start workers with 'spawn'"
            )
        if self._closed:
            raise StoreClosed(f"the store in {self._parts.nvme.folder} is closed")
        return self._engine

    def _duplicate(self, tier: int, source: Slot, target: Slot, nbytes: int) -> None:
        base = self._parts.dram.address
        ctypes.memmove(base + target.offset, base + source.offset, nbytes)


def _shut_down(engine: Engine, parts: Parts, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the thread, the ring and the lock are its parent's
    engine.stop()
    parts.nvme.close()
    parts.dram.close()


def _restore(parts: Parts, engine: Engine) -> tuple[list[int], manifests.Manifest | None]:
    """Fill the directory from the newest manifest; pin what the older ones that are kept reference."""
    folder, nvme = parts.nvme.folder, parts.nvme
    generations.clean(folder)
    newest = generations.load(folder)
    if newest is None:
        return [], None
    if newest.store != nvme.uuid.hex():
        raise ManifestError(f"{folder}: the manifest belongs to another store than {Path(nvme.path).name}")
    kept = []
    for generation in generations.generations(folder):
        manifest = newest if generation == newest.generation else generations.load(folder, generation)
        assert manifest is not None
        slots = [record.extent.slot for record in manifest.tensors if record.extent]
        for slot in slots:
            nvme.claim(slot)
        nvme.retain(generation, slots)
        if manifest is not newest:
            for slot in slots:
                nvme.free(slot)
        kept.append(generation)
    bottom = engine.admission.bottom
    for record in newest.tensors:
        if record.extent is None:
            found = nvme.allocate(1)  # an empty tensor has no extent in the manifest, but a slot like any other here
            if found is None:
                raise CapacityError(f"{folder}: {nvme.refusal}")
            slot = found
        else:
            slot = record.extent.slot
        engine.admission.account_restored(bottom, slot)
        entry = engine.admission.directory.restore(
            record.key, record.spec, record.tensor_id, slot, record.checksums, record.generation
        )
        copy = entry.copies[bottom]
        assert copy is not None
        engine.admission.install(copy)
    engine.admission.directory.next_id = max(engine.admission.directory.next_id, newest.next_tensor_id)
    engine.admission.generation = newest.generation + 1
    return kept, newest


def _refuse_unstorable(key: Key, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise MisuseError(f"{key!r}: a store holds tensors, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        what = "a meta tensor" if tensor.is_meta else f"a {tensor.layout} tensor" if not tensor.is_quantized else "quantized"
        raise MisuseError(f"{key!r} is {what}: a store holds dense tensors with contents; convert it first")


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """The memory itself, as a uint8 tensor of shape (nbytes,); valid while its slot is the caller's."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.is_contiguous():
        target.copy_(_flat(source))
        return
    try:
        target.view(source.dtype).view(source.shape).copy_(source)  # straight into the pool, without a second copy
    except (NotImplementedError, RuntimeError):  # element types that torch cannot gather: copy whole first
        target.copy_(_flat(source.contiguous()))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8 of shape (nbytes,)."""
    return tensor.reshape(-1).view(torch.uint8)

