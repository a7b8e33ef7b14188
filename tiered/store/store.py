"""``TieredStore``: named tensors in HBM, DRAM and NVMe, moved to where they are needed."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import torch

from tiered.engine.claims import Token
from tiered.engine.engine import Engine
from tiered.engine.policy import NextUse, OrderPlan, Recording, Touch, touch_of
from tiered.engine.requests import Delete, Install, Rename, Room, Work
from tiered.engine.residency import Entry
from tiered.engine.retention import affordable, largest_streamed, plan_retention, room_for
from tiered.errors import (
    ForkedStore,
    KeyNotFound,
    MisuseError,
    StoreClosed,
    UncommittedWarning,
    expect_type,
    from_here,
    one_of,
    quoted,
    shown,
    whole_number,
)
from tiered.errors import listed as items_of
from tiered.interfaces import IOBackend, Returnable
from tiered.small.tensors import SmallTensors, open_small
from tiered.store.commit import Commits, Generations
from tiered.store.lease import Holder, LeaseOfAddresses, LeaseOfMany, LeaseOfOne, Made, clear_ended, end_struck, without_ended
from tiered.store.opening import Eviction, Existing, Generation, OpenOptions, Parts, access_of, assemble
from tiered.store.readers import StoreReader
from tiered.system import memory_of_process
from tiered.tables.cache import RowCache
from tiered.tables.layout import Pattern, TableOptions
from tiered.tables.table import Table, open_table
from tiered.telemetry import NO_SPAN, Offloaded, Span, StoreStatistics, Timeline
from tiered.tensors.copies import Copies
from tiered.tensors.mapping import MISSING, Default, TensorMapping
from tiered.tensors.specs import (
    copied,
    copied_in_thread,
    copy_bytes,
    copy_into,
    listed,
    refuse_keys,
    refuse_name,
    refuse_out,
    refuse_spec,
    refuse_unstorable,
    spec_of,
    specified,
)
from tiered.tiers.dram import DramTier
from tiered.tiers.nvme import NvmeTier
from tiered.types import Access, BackendName, Key, Owner, TensorSpec, Urgency, format_size

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["TieredStore", "in_store_memory"]

USUAL = Eviction()
COPIED_TOGETHER = 32 << 20
"""Bytes of tensors that are leased together to be copied."""
RUN = 1024
"""Of these tensors, at most."""
AT_ONCE = 4 << 20
"""Bytes up to which a coroutine copies a tensor itself; a larger one is copied in a thread, so that the event loop goes on."""


Kind = TypeVar("Kind")


class Attached:
    """What clients keep with a store, at most one object of each class. All who have the store find the same, and it ends with
    the store."""

    def __init__(self) -> None:
        self._there: dict[type, Any] = {}

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the object of that class; None where there is none."""
        return self._there.get(kind)

    def made(self, kind: type[Kind], make: Callable[[], Kind]) -> Kind:
        """Return the object of that class, which is made where there is none."""
        found: Kind | None = self._there.get(kind)
        return self._there.setdefault(kind, make()) if found is None else found

    def put(self, kind: type[Kind], one: Kind | None) -> None:
        """Have ``one`` for the object of that class, or none."""
        self._there[kind] = one


class TieredStore(TensorMapping):
    """Tensors by name, in HBM and DRAM up to the budgets, and in extents of one large file for the rest.

    Open a store with ``TieredStore.open``. All methods may be called from any thread of the process that opened it. Leaving a
    ``with`` block normally commits; leaving it by an exception does not, nor does ``close``: changes that were not committed
    are lost at the next open.
    """

    def __new__(cls, *given: object, **options: object) -> TieredStore:
        """Refuse what ``TieredStore.open`` takes, before Python says that ``__init__`` takes something else."""
        if cls is TieredStore and (len(given) < 2 or not isinstance(given[1], Engine)):
            raise MisuseError("TieredStore.open(path, dram=) opens a store; its constructor is given the parts of one")
        return super().__new__(cls)

    def __init__(self, parts: Parts, engine: Engine, known: Generations, *, scratch: bool) -> None:
        self._parts, self._engine, self._generations = parts, engine, known
        engine.end_struck = end_struck
        self._pid = os.getpid()
        self._closed = False
        self._name = f"the store in {parts.nvme.folder}" if parts.nvme else "the store without a disk"
        self._rest = (engine, parts, self._pid, scratch)
        self._shutdown = weakref.finalize(self, _collected, self._name, known, *self._rest)
        _close_at_exit()  # after the first finalizer: what is registered last is called first
        self._tables: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()
        self._row_cache = RowCache(parts.tiers[parts.dram].capacity)
        self.rollbacks = 0
        """How often ``rollback`` was called."""
        self._copies = Copies()
        self._small: weakref.WeakValueDictionary[str, SmallTensors] = weakref.WeakValueDictionary()
        self._before_commits: dict[str, Callable[[bool], str | None]] = {}
        self._unchanged = set[Owner]()
        self._within = False
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.attached = Attached()
        """What those who use this store keep with it."""
        _open.add(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle."""
        raise MisuseError(
            f"{self._name} cannot be copied or pickled: give other processes store.reader(), or DataLoader a "
            "TieredDataset(store), with which each process opens a store of its own"
        )

    # -- opening and closing ----------------------------------------------------------------------------------------------

    @classmethod
    @from_here
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        dram: int | str | None = None,
        hbm: int | str | None = None,
        device: str | torch.device | None = None,
        nvme: int | str | None = None,
        generation: int | Generation | None = None,
        access: Access | str = Access.WRITE,
        durability: Literal["commit", "none"] = "commit",
        backend: BackendName | Callable[[], IOBackend] = "auto",
        eviction: Eviction = USUAL,
        keep: int = 2,
        paths: Sequence[str | os.PathLike[str]] | None = None,
        existing: Existing = "may",
    ) -> TieredStore:
        """Create the store in folder ``path``, or reopen it at its newest commit, or at ``generation``.

        Sizes are bytes or "256MiB". ``dram`` is the hard budget of the pool (default: half of what is available), ``hbm`` that
        on ``device`` (default: no such tier; one of ``hbm`` bytes is on "cuda", device="cpu" is a stand-in), ``nvme`` that of
        the disk (default: its free space). ``path`` None is a store without a disk. ``durability="none"`` is scratch: nothing
        can be committed, and the files are removed at close. ``keep`` is the number of generations that stay on disk; a
        ``tiered.Generation`` also says whether those after it are removed. ``existing`` is "must" where a folder without a
        commit is an error, and "must-not" where one with a commit is. ``eviction`` says who leaves a tier that is full, and how
        long a call waits for room, see ``tiered.Eviction``. ``access="read"`` opens a commit for reading, in any number of
        processes, beside one that has the store open for writing. The commit stays as it is until ``refresh`` or ``close``;
        calls that would change a tensor raise. In a folder that cannot be written to, nothing is created, and readers and a
        writer exclude each other.

        ``paths`` are for several drives: a list of folders, one on each, which get one data file each; ``path`` then has the
        manifests only. A tensor is stored whole on the drive with the fewest bytes in use, one of more than 64 MiB in stripes
        over all of them. To reopen, give the same folders, in any order; the data files identify themselves, so the drives may
        be mounted elsewhere. Without ``paths`` the error names the folders: no folder is opened because a file names it.

        ``backend`` is "auto" (libaio, else posix), "libaio", "aiofiles", "posix", or makes an ``IOBackend``. Warns where the
        filesystem has no O_DIRECT.

        Raises MisuseError (an argument, not a folder, foreign, not writable, no such device or backend), StoreLocked,
        CapacityError (a budget too small, or more than there is), ManifestError (damaged, no such generation, a drive that is
        missing or another store's).
        """
        options = OpenOptions(
            path, dram, hbm, device, nvme, generation, durability, backend, eviction, keep, paths, access_of(access), existing
        )
        parts, engine, known = assemble(options)
        store = cls(parts, engine, known, scratch=options.scratch)
        try:
            engine.start()
        except BaseException:
            store.close()
            raise
        return store

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        if self._closed or os.getpid() != self._pid:
            return f"<TieredStore: {self._name}, {'closed' if self._closed else 'of another process'}>"
        tiers = [f"{tier.name} {format_size(tier.capacity)}" for tier in self._parts.tiers[: self._parts.dram + 1]]
        return f"<TieredStore: {self._name}, {len(self)} tensors, generation {self.generation}, {', '.join(tiers)}>"

    def __enter__(self) -> TieredStore:
        self._running()
        self._within = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and not self._closed and self._generations.commits_at_exit:
                self._running()
                why = self._prepare_commit(leaving=True)
                if why is None:
                    self._generations.settle()  # a commit that is under way has a meta, too
                    before, later = self.generation, bool(self.meta) and self._changed()
                    self._generations.committing(self).commit(None, self, always=False)
                    if later and self.generation != before:
                        warnings.warn(
                            f"the commit at the end of the with block of {self._name} has the meta of commit {before}, and "
                            "tensors changed after that: if meta says how far they are, commit with it as the last line of "
                            "the block",
                            UncommittedWarning,
                            stacklevel=2,
                        )
                else:
                    users = [key for key in self if self.owner_of(key) is None]
                    kept = self._generations.committed(users)
                    lost = [shown(key) for key in users if key not in kept]
                    count = self._generations.uncommitted()
                    what = f"{count} tensors, or what models have in memory" if count else "what models have in memory"
                    warnings.warn(
                        f"{self._name} was left without a commit of what changed since commit {self.generation} ({what}"
                        f"{', among them ' + ', '.join(lost[:3]) if lost else ''}): {why}",
                        UncommittedWarning,
                        stacklevel=2,
                    )
        finally:
            self._close()

    def close(self) -> None:
        """Wait for transfers in flight and release everything. Commits nothing. Idempotent.

        Warns of changes that were not committed (``UncommittedWarning``). Tensors that leases gave stay valid. Afterwards every
        other call raises StoreClosed; in a forked child, ForkedStore.
        """
        self._engine.refuse_nested()
        dropped = 0 if self._closed or os.getpid() != self._pid else self._generations.uncommitted()
        changed = bool(dropped) and self._changed_but({one.as_committed() for one in list(self._holders)})
        self._close()
        if changed:
            warnings.warn(_dropped(f"{self._name} was closed", dropped), UncommittedWarning, stacklevel=2)

    def _close(self) -> None:
        self._engine.refuse_nested()
        self._closed = True
        self._before_commits.clear()
        if self._shutdown.alive and os.getpid() == self._pid:
            self._generations.settle()
        if os.getpid() == self._pid:
            self._row_cache.close()
            self._copies.clear()
        if self._shutdown.alive:
            _shut_down(*self._rest)
            self._shutdown.detach()  # last, so that the next call, or the collector, completes what Ctrl-C interrupted

    # -- tensors by name --------------------------------------------------------------------------------------------------

    @from_here
    def put(self, key: Key, tensor: torch.Tensor, *, owner: Owner | None = None) -> None:
        """Store a copy of ``tensor`` (any strided dtype, shape, device) as ``key``, replacing the tensor of that name.

        The copy goes to DRAM from the CPU, to the top tier from elsewhere; the call may wait for room. ``owner`` owns the
        tensor: nobody else replaces or deletes it. By default it is the user, whose tensors no model, cache or table takes.

        Raises LeaseConflict while ``key`` is leased, CapacityError when the tensor cannot fit or no room is free in time,
        MisuseError for a tensor without dense contents (sparse, quantized, nested, meta), where ``key`` is somebody else's, and
        where the name of a new owner lies within another's; WriteError when a failed write-back blocks the room.
        """
        refuse_name(key)
        refuse_unstorable(key, tensor)
        source = tensor.detach().resolve_conj().resolve_neg()
        tier = self._tier_for(source.device)
        fill: Callable[[torch.Tensor], None] = lambda target: copy_bytes(target, source, queued=self._queued(tier))  # noqa: E731
        self._put(key, spec_of(source), tier, fill, owner=owner)

    async def put_async(self, key: Key, tensor: torch.Tensor, *, owner: Owner | None = None) -> None:
        """Store a copy of ``tensor`` as ``put`` does, for a coroutine: waits for room without blocking a thread.

        ``tensor`` must not change until that is done. Cancelled, the call has stored the tensor or left what there was. Raises
        as ``put``.
        """
        refuse_name(key)
        refuse_unstorable(key, tensor)
        source = tensor.detach().resolve_conj().resolve_neg()
        engine, tier = self._running(), self._tier_for(source.device)
        self._generations.refuse_change(self)
        spec = spec_of(source)
        tier = self._tier_that_holds(spec, tier)
        token = Token()
        room = Room(tier, max(1, spec.nbytes), key, engine.state.claims.watch(token), owner)
        queued = self._queued(tier)
        try:
            await engine.arrive(room)
            assert room.slot is not None
            room.stream = engine.guard(tier, room.slot)
            if spec.nbytes:
                target = self._parts.memories[tier].tensor(room.slot, spec.nbytes)[0]
                if spec.nbytes > AT_ONCE and source.device.type == "cpu" and not queued:
                    await asyncio.to_thread(_filled, target, source, token)
                else:
                    copy_bytes(target, source, queued=queued)
                del target
            await engine.arrive(Install(key, spec, room, engine.fences(tier), owner=owner))
        except GeneratorExit:  # from the garbage collector, perhaps in a thread that holds the lock
            raise
        except BaseException:
            del token  # gives the room back, unless the tensor was installed, or a thread still fills it
            engine.released()
            self._running()
            raise

    async def delete_async(self, key: Key, *, owner: Owner | None = None) -> None:
        """Delete ``key`` as ``delete`` does, for a coroutine. Raises as that."""
        refuse_keys([key])
        self._generations.refuse_change(self)
        await self._running().arrive(Delete(key, owner))

    @from_here
    def create(
        self,
        key: Key,
        spec: TensorSpec | Sequence[int],
        *,
        dtype: torch.dtype | str | None = None,
        tier: str | None = None,
        owner: Owner | None = None,
    ) -> None:
        """Create a tensor with undefined contents, to be filled under a WRITE lease; in ``tier`` (default: the top one), or in
        DRAM where that tier cannot hold it.

        ``spec`` is its shape and element type, or its shape alone; then ``dtype`` is the type (default: torch's). ``owner``: as
        in ``put``. Replaces, waits and raises as ``put``; MisuseError for a tier that the store does not have.
        """
        refuse_name(key)
        spec = specified(key, spec, dtype)
        refuse_spec(key, spec)
        self._put(key, spec, self._tier_index(tier), None, owner=owner)

    def _put(
        self,
        key: Key,
        spec: TensorSpec,
        tier: int,
        fill: Callable[[torch.Tensor], None] | None,
        lifetime: Token | None = None,
        owner: Owner | None = None,
    ) -> None:
        engine = self._running()
        self._generations.refuse_change(self)
        tier = self._tier_that_holds(spec, tier)
        token = Token()
        room = Room(tier, max(1, spec.nbytes), key, engine.state.claims.watch(token), owner)
        try:
            engine.wait(room)
            assert room.slot is not None
            room.stream = engine.guard(tier, room.slot)
            if fill is not None and spec.nbytes:
                fill(self._parts.memories[tier].tensor(room.slot, spec.nbytes)[0])
            watched = None if lifetime is None else engine.state.claims.watch(lifetime)
            engine.wait(Install(key, spec, room, engine.fences(tier), watched, owner))
        except BaseException:
            del token  # gives the room back, unless the tensor was installed
            engine.released()
            self._running()  # raises StoreClosed if another thread closed the store meanwhile
            raise

    @overload
    def get(self, key: Key, *, out: torch.Tensor | None = None) -> torch.Tensor: ...
    @overload
    def get(self, key: Key, default: Default, *, out: torch.Tensor | None = None) -> torch.Tensor | Default: ...
    @from_here
    def get(self, key: Key, default: Any = MISSING, *, out: torch.Tensor | None = None) -> Any:
        """Return a contiguous copy of ``key``, of its dtype and shape, on the CPU, outside the budget; or ``default``, where
        one is given and there is no such tensor. Waits as ``lease`` does.

        ``out``: a tensor of the same dtype and shape, on any device and with any strides, that takes the copy and is returned:
        a loop that gives the same one again takes no memory.

        Raises KeyNotFound without a default, LeaseConflict under an open WRITE lease, TransferError, CapacityError after the
        deadline, MisuseError for an ``out`` of another dtype or shape.
        """
        lease = self._lease_to_copy(key)
        try:
            if out is not None:
                return self._copy_out(key, lease.__enter__(), out)
            return copied(lease.__enter__(), queued=self._queued(lease.tier), memory=self._copies)
        except KeyNotFound:
            if default is MISSING:
                raise
            return default
        finally:
            lease.token = None  # not __exit__: Ctrl-C may strike a call before its first line
            self._engine.released()

    async def fetch(self, key: Key) -> torch.Tensor:
        """Return the same as ``get``, for a coroutine: waits without blocking a thread, and may be cancelled at any time.
        Raises as ``get``."""
        lease = self._lease_to_copy(key)
        queued = self._queued(lease.tier)
        async with lease as tensor:
            if tensor.nbytes <= AT_ONCE:
                return copied(tensor, queued=queued, memory=self._copies)
            return await copied_in_thread(tensor, queued=queued, memory=self._copies)

    @from_here
    def get_many(
        self, keys: Iterable[Key], *, out: torch.Tensor | Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return copies as ``get`` does, in the order of ``keys``, which may have a key more than once.

        ``out``: the tensors that take the copies, one for each key, or one tensor whose first dimension counts the keys; they
        are returned. Tensors are leased together, 32 MiB or an eighth of the DRAM budget at a time, and the next ones are
        fetched meanwhile. Raises as ``get``: after an exception some of ``out`` may have been filled.
        """
        if out is None:
            return list(self.in_order(keys))
        wanted = listed(keys)
        targets = list(out)
        if len(targets) != len(wanted):
            raise MisuseError(f"out has {len(targets)} tensors for {len(wanted)} keys: give one for each")
        into = iter(zip(wanted, targets, strict=True))
        for group, tier in self._ahead(wanted):
            lease = LeaseOfMany(self._running, self._parts.memories[tier], group, Access.READ, tier)
            try:
                for tensor in lease.__enter__():
                    key, target = next(into)
                    self._copy_out(key, tensor, target)
                    del tensor
            finally:
                lease.token = None
                self._engine.released()
        return targets

    def _copy_out(self, key: Key, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy a leased tensor into ``out``, and return that."""
        refuse_out(key, spec_of(tensor), out)
        copy_into(out, tensor)
        return out

    async def fetch_many(self, keys: Iterable[Key]) -> list[torch.Tensor]:
        """Return the same as ``get_many``, for a coroutine: waits without blocking a thread, and may be cancelled at any time.
        Raises as ``get``."""
        found: list[torch.Tensor] = []
        for group, tier in self._ahead(keys):
            queued, memory = self._queued(tier), self._copies
            async with LeaseOfMany(self._running, self._parts.memories[tier], group, Access.READ, tier) as tensors:
                small = sum(tensor.nbytes for tensor in tensors) <= AT_ONCE
                for tensor in tensors:
                    if small:
                        found.append(copied(tensor, queued=queued, memory=memory))
                    else:
                        found.append(await copied_in_thread(tensor, queued=queued, memory=memory))
                    del tensor
                del tensors
        return found

    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]:
        """Return an iterator over copies of ``keys``, in their order, that reads as ``get_many`` does, as it is asked. No lease
        is open between two of them. Raises as ``get``, when it comes to the key."""
        for group, tier in self._ahead(keys):
            lease = LeaseOfMany(self._running, self._parts.memories[tier], group, Access.READ, tier)
            try:
                queued = self._queued(tier)
                copies = [copied(tensor, queued=queued, memory=self._copies) for tensor in lease.__enter__()]
            finally:
                lease.token = None
                self._engine.released()
            copies.reverse()
            while copies:
                yield copies.pop()

    def _ahead(self, keys: Iterable[Key]) -> Iterator[tuple[list[Key], int]]:
        """Divide ``keys`` into runs that are leased together, each in one tier; while one is used, fetch the next one."""
        wanted = listed(keys)
        refuse_keys(wanted)
        engine, at, dram = self._running(), 0, self._parts.dram
        most = min(COPIED_TOGETHER, self._parts.tiers[dram].capacity // 8)
        run = self._run(wanted, at, most)
        while run[0]:
            at += len(run[0])
            following = self._run(wanted, at, most)
            if following[0]:
                engine.ahead(following[0], following[1])
            yield run
            run = following

    def _run(self, keys: Sequence[Key], at: int, most: int) -> tuple[list[Key], int]:
        """Return the keys from ``at`` on that have ``most`` bytes together, at least one, and whose copies are cheapest from
        the same tier; and that tier. A key that is not there ends them, or is alone."""
        engine, found, nbytes, where = self._running(), list[Key](), 0, self._parts.dram
        with engine.lock:
            for key in keys[at : at + RUN]:
                entry = engine.state.directory.find(key)
                tier = self._nearest(entry)
                nbytes += 0 if entry is None else entry.nbytes
                if found and (entry is None or tier != where or nbytes > most):
                    break
                found.append(key)
                where = tier
                if entry is None:
                    break
        return found, where

    def _queued(self, tier: int) -> bool:
        """Return whether work of torch may be queued for the memory of this tier."""
        return self._parts.memories[tier].streams is not None

    def _nearest(self, entry: Entry | None) -> int:
        """Return the tier from which a copy is cheapest: the device's when the tensor is there, else DRAM."""
        tier = self._parts.dram
        for index, copy in enumerate(entry.copies[:tier] if entry is not None else ()):
            tier = index if copy is not None and copy.valid else tier
        return tier

    def _lease_to_copy(self, key: Key) -> LeaseOfOne:
        """Return a lease in the tier from which the copy is cheapest."""
        engine = self._running()
        refuse_keys([key])
        with engine.lock:
            tier = self._nearest(engine.state.directory.find(key))
        return LeaseOfOne(self._running, self._parts.memories[tier], [key], Access.READ, tier)

    @overload
    def lease(self, key: Key, *, access: Access | str = ..., tier: str | None = ...) -> LeaseOfOne: ...
    @overload
    def lease(self, key: list[Key] | tuple[Key, ...], *, access: Access | str = ..., tier: str | None = ...) -> LeaseOfMany: ...
    def lease(
        self, key: Key | list[Key] | tuple[Key, ...], *, access: Access | str = Access.READ, tier: str | None = None
    ) -> LeaseOfOne | LeaseOfMany:
        """Return a context manager that gives the tensor itself, in ``tier`` (default: the top one), without a copy.

        READ leases may be shared, a WRITE lease excludes every other. A list of keys is granted all at once and gives a tuple;
        for reading it may have a key more than once. The tensor's memory is not reused until the last reference to it is gone,
        even after the lease; but only what is written before the end of a WRITE lease is stored.

        Entering raises KeyNotFound, LeaseConflict, TransferError, and CapacityError after the deadline. Leaving a READ lease
        whose tensor was written to raises MisuseError, and so does leaving a WRITE lease whose tensor was given other memory
        (``tensor.data = values``), which is not stored.
        """
        wanted = access if isinstance(access, Access) else access_of(access)
        if wanted is Access.WRITE:
            self._generations.refuse_change(self)
        index = 0 if tier is None else self._tier_index(tier)
        memory = self._parts.memories[index]
        if isinstance(key, str):
            return LeaseOfOne(self._running, memory, [key], wanted, index)
        if not isinstance(key, list | tuple):
            raise MisuseError(f"a lease is of a key or of a list of keys, not of {key!r}")
        keys = list(key)
        refuse_keys(keys)
        if wanted is Access.WRITE and len(set(keys)) != len(keys):
            raise MisuseError(f"the same tensor twice in one WRITE lease: {keys}")
        return LeaseOfMany(self._running, memory, keys, wanted, index)

    def _tier_index(self, tier: str | None) -> int:
        if tier is None:
            return 0
        names = [memory.name for memory in self._parts.memories]
        if tier not in names:
            raise MisuseError(f"there are no leases in tier {tier!r}; this store has {', '.join(names)}")
        return names.index(tier)

    @from_here
    def prefetch(self, keys: Sequence[Key], *, tier: str | None = None) -> None:
        """Fetch ``keys`` to ``tier`` (default: the top one), in this order, when there is room and bandwidth.

        A hint: a newer one of the same thread replaces fetches that have not begun. Never waits; a full tier, an unknown key
        (``statistics().unknown_hints`` counts these) or a failed read is not an error. Raises MisuseError for a tier that the
        store does not have.
        """
        wanted = listed(keys)
        refuse_keys(wanted)
        self._running().hint(wanted, self._tier_index(tier))

    @from_here
    def speculate(self, keys: Sequence[Key], *, tier: str | None = None) -> None:
        """Fetch ``keys``, which may be needed or not, to ``tier`` (default: the top one), in this order, while nothing else is
        fetched.

        A hint like ``prefetch``, beside which it may be given: a newer one replaces fetches that have not begun. One tensor at
        a time is on its way, and what somebody needs overtakes it. Nothing is evicted for it that is expected to be needed
        sooner (``follow``), and the rest of ``keys`` is left out at the first one for which there is no room.
        ``statistics()`` counts what was fetched so: of it, what was used, and what was evicted unused. Never waits, and raises
        as ``prefetch``.
        """
        wanted = listed(keys)
        refuse_keys(wanted)
        self._running().hint(wanted, self._tier_index(tier), Urgency.SPECULATIVE)

    @from_here
    def present(self, keys: Iterable[Key], *, tier: str | None = None) -> set[Key]:
        """Return those of ``keys`` whose bytes are in ``tier`` (default: the top one) now. Nothing is moved, or waited for.

        Others are further down, on their way, or not in the store. Raises MisuseError for a tier that the store does not have.
        """
        wanted = listed(keys)
        refuse_keys(wanted)
        return self._running().present(wanted, self._tier_index(tier))

    @from_here
    def offload(self, keys: Iterable[Key] | None = None, *, tier: str | None = None) -> Offloaded:
        """Move ``keys`` (None: all tensors) down to ``tier``, and give memory that is free then back to the system.

        ``tier``: the lowest one by default, the disk where there is one. What is used next comes back by itself; ``prefetch``
        brings it earlier. Tensors that are leased, or whose memory something still refers to, stay, and the result names them.
        The DRAM budget is the same as before; the process uses less of it until tensors come back. Memory that is pinned for a
        GPU is not given back, and neither is memory on the device.

        Raises MisuseError for a tier that the store does not have, KeyNotFound, CapacityError where the tier below is full, and
        the error of a write that failed.
        """
        engine = self._running()
        names = [one.name for one in self._parts.tiers]
        if tier is not None and tier not in names:
            raise MisuseError(f"there is no tier {tier!r} in this store, which has {', '.join(names)}")
        target = len(names) - 1 if tier is None else names.index(tier)
        wanted = list(self) if keys is None else listed(keys)
        refuse_keys(wanted)
        began = time.monotonic()
        if keys is not None:
            for key in wanted:
                self.spec(key)
        request = engine.offload(wanted, target)
        dram = self._parts.memories[self._parts.dram]
        given: list[int] = []
        if isinstance(dram, Returnable) and not any(memory.streams for memory in self._parts.memories):
            work = Work("giving memory back", lambda: given.append(dram.give_back()))
            engine.wait(work)
            work.raise_failure()
        return Offloaded(tuple(dict.fromkeys(request.stayed)), sum(given), time.monotonic() - began)

    @contextlib.contextmanager
    def trace(self, *, most: int | None = None) -> Iterator[list[Touch]]:
        """Record what is leased or put, by any thread, as a list of touches: ``with store.trace() as order:``.

        Each touch is a (key, tier, use); ``get`` and ``fetch`` are READ. Traces may overlap. The list is the caller's.
        ``most``: while the list has so many touches, none are added; the caller may remove some.
        """
        engine = self._running()
        token = Token()
        record = Recording([], math.inf if most is None else most, weakref.ref(token))
        try:
            with engine.lock:
                engine.state.records.append(record)
            yield record.touches
        finally:
            del token  # ends the recording, whatever exception strikes now
            records = engine.state.records
            engine.later(lambda: records.__setitem__(slice(None), [other for other in records if other is not record]))

    @from_here
    def follow(
        self,
        order: Iterable[Touch | Key],
        *,
        then: Literal["again", "end"] = "again",
        prefetch: Literal["on", "off"] = "on",
        others: Literal["recency", "frequency"] = "recency",
    ) -> int:
        """Follow ``order`` from here on, again and again: evict what it needs last, and read ahead what it needs next.

        ``order`` is the list of a ``trace``, or keys, all of which are read. A loop may deviate from it, which costs time and
        nothing else. With ``then="end"`` the order comes once: tensors that its rest does not touch leave first, nothing beyond
        it is read ahead, and after its last touch nothing is followed. A new order keeps the plan for the beginning that it
        shares with the old one. An empty order ends following. ``prefetch="off"`` evicts by the order and reads nothing ahead.
        ``others``: which tensors outside the order leave first, those that were used least recently, or those that the fewest
        rounds use ("frequency", for tensors of which each round uses some, such as experts of a mixture).
        Returns the number of touches that were planned anew. Raises MisuseError for a tier that the store does not have.
        Results never depend on the order.
        """
        one_of("prefetch", prefetch, ("on", "off"))
        one_of("then", then, ("again", "end"))
        one_of("others", others, ("recency", "frequency"))
        engine = self._running()
        touches = [touch_of(touch) for touch in listed(order)]
        keys, uses = [touch.key for touch in touches], [touch.use for touch in touches]
        found = {touch.key: touch.nbytes for touch in touches} | engine.sizes(keys)
        goals = [self._tier_index(touch.tier) for touch in touches]

        def sizes(index: int) -> list[int]:
            """Return the bytes, in whole slots, that each touch takes of tier ``index``; 1 where the touch is for a lower tier,
            or larger than the tier."""
            most, alignment = self._parts.tiers[index].capacity, getattr(self._parts.tiers[index], "alignment", 1)
            wanted = [found[key] if goal <= index else 0 for key, goal in zip(keys, goals, strict=True)]
            return [-(-nbytes // alignment) * alignment if 0 < nbytes <= most else 1 for nbytes in wanted]

        rooms, decisions = [], []
        for index, memory in enumerate(self._parts.memories[: len(self._parts.links)]):
            needed, spare = sizes(index), 0
            if prefetch == "on":
                missing = sum(dict(zip(keys, needed, strict=True)).values()) - memory.capacity
                spare = room_for(memory.capacity, missing, largest_streamed(keys, uses, needed, memory.capacity))
                spare = affordable(keys, uses, needed, memory.capacity, spare, then)
                rooms.append(spare)
            decisions.append(plan_retention(keys, uses, needed, memory.capacity, then=then, spare=spare))

        def policies(plan: OrderPlan) -> list[NextUse]:
            return [NextUse.along(plan, decision.price, decision.keep, others) for decision in decisions]

        return engine.follow(touches, policies, rooms, then)

    @from_here
    def delete(self, key: Key, *, owner: Owner | None = None) -> None:
        """Delete ``key``, which ``owner`` put (default: the user); its room is free once nothing refers to it.

        Raises KeyNotFound, LeaseConflict while it is leased, MisuseError where it is somebody else's.
        """
        refuse_keys([key])
        self._generations.refuse_change(self)
        self._without_ended(lambda: self._running().wait(Delete(key, owner)))

    # -- who owns what ----------------------------------------------------------------------------------------------------

    @from_here
    def claim(self, owner: Owner) -> None:
        """Raise MisuseError where ``owner`` cannot own tensors here, because another one has that name, or one of both names
        lies within the other, at a slash. Whoever owns tensors already may go on."""
        engine = self._running()
        engine.look()
        with engine.lock:
            engine.state.directory.admit(owner)

    def owners(self) -> list[Owner]:
        """Return who owns tensors beside the user: models, optimizers, caches, tables, small tensors, by name."""
        engine = self._running()
        engine.look()
        with engine.lock:
            return sorted(engine.state.directory.owners(), key=lambda owner: (owner.name, owner.kind))

    def owner_of(self, key: Key) -> Owner | None:
        """Return who owns the tensor ``key``; None is the user. Raises KeyNotFound."""
        engine = self._running()
        refuse_keys([key])
        with engine.lock:
            return engine.state.directory.entry(key).owner

    def owned(self, owner: Owner) -> list[Key]:
        """Return the keys of all tensors that ``owner`` owns, in no particular order. What others have under its name is not
        among them."""
        expect_type(owner, Owner, "an owner is an Owner(kind, name)")
        engine = self._running()
        engine.look()
        with engine.lock:
            return engine.state.directory.owned(owner)

    @from_here
    def delete_owned(self, owner: Owner) -> int:
        """Delete all tensors that ``owner`` owns, and return how many these were: a model that is not paged any more, say.

        One after the other; a call that was cut off is completed by another one. Raises as ``delete``.
        """
        keys = self.owned(owner)
        for key in keys:
            self.delete(key, owner=owner)
        return len(keys)

    @from_here
    def clear(self) -> None:
        """Delete all tensors, one after the other, as ``delete`` does. Raises MisuseError, with nothing changed, where some are
        not the user's; and what ``delete`` raises."""
        for owner in self.owners():
            raise MisuseError(
                f"{self} has tensors of {owner}, and clear() is for those of its user: call "
                f"delete_owned(Owner({owner.kind!r}, {owner.name!r})) first"
            )
        super().clear()

    def _any_key(self) -> Key | None:
        """Return a key of the user; None where there is none."""
        engine = self._running()
        with engine.lock:
            return next((entry.key for entry in engine.state.directory.entries() if entry.owner is None), None)

    @from_here
    def rename(
        self, keys: Mapping[Key, Key], *others: Key, owner: Owner | None = None, to: Owner | None = None
    ) -> None:
        """Give tensors of ``owner`` (default: the user) the keys that ``keys`` maps theirs to, and the owner ``to`` (default:
        the same), all at once. No byte moves.

        Waits for their transfers, and for a commit that is under way. Raises KeyNotFound, LeaseConflict while one is leased,
        MisuseError for a key that is taken, or given twice, and what ``put`` raises.
        """
        if others or not isinstance(keys, Mapping):
            old, new = (keys, others[0]) if isinstance(keys, str) and others else ("old", "new")
            raise MisuseError(f"rename is given a mapping from keys to keys: store.rename({{{quoted(old)}: {quoted(new)}}})")
        self.rename_many([(key, owner, new, owner if to is None else to) for key, new in keys.items()])

    @from_here
    def rename_many(self, moves: Sequence[tuple[Key, Owner | None, Key, Owner | None]]) -> None:
        """Rename tensors of several owners, all at once: of each the key and the owner that it has, and those that it gets. Two
        may exchange their keys. Waits and raises as ``rename``."""
        engine = self._running()
        self._generations.refuse_change(self)
        refuse_keys([key for key, *_ in moves])
        for _, _, new, _ in moves:
            refuse_name(new)
        if len({new for _, _, new, _ in moves}) < len(moves):
            raise MisuseError("rename gives two tensors the same key: give each its own")
        self._without_ended(lambda: engine.wait(Rename(moves)))

    # -- which tensors there are ------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Return True, also for a store without tensors: ``if store:`` asks whether one was given."""
        return True

    def __contains__(self, key: object) -> bool:
        """Return whether there is a tensor of that name."""
        directory = self._running().state.directory
        return isinstance(key, str) and key in directory

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys as of now, in no particular order."""
        engine = self._running()
        engine.look()
        with engine.lock:
            return iter(list(engine.state.directory))

    def __len__(self) -> int:
        """Return the number of tensors."""
        engine = self._running()
        engine.look()
        return len(engine.state.directory)

    @from_here
    def spec(self, key: Key) -> TensorSpec:
        """Return the shape and element type of ``key``; moves nothing. Raises KeyNotFound."""
        engine = self._running()
        refuse_keys([key])
        with engine.lock:
            return engine.state.directory.entry(key).spec

    @from_here
    def specs(self, keys: Iterable[Key]) -> list[TensorSpec | None]:
        """Return the shape and element type of each of ``keys``, None for one that is no tensor's; moves nothing."""
        engine, wanted = self._running(), listed(keys)
        refuse_keys(wanted)
        with engine.lock:
            found = list(map(engine.state.directory.named, wanted))
        return [None if entry is None else entry.spec for entry in found]

    # -- commits ----------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the newest commit, or of the opened one; 0 before the first, and where nothing can be committed."""
        return self._generations.generation

    @property
    def begun(self) -> int:
        """Number of the newest commit that was begun, by ``commit_async`` too: what changes from now on is not in that."""
        return self._generations.begun

    @property
    def meta(self) -> dict[str, Any]:
        """User data of the commit numbered ``generation``, as JSON returns it; empty before the first."""
        return self._generations.meta

    @property
    def generations(self) -> tuple[int, ...]:
        """Numbers of the commits that ``rollback`` and ``open(generation=)`` can go back to, oldest first; empty where nothing
        can be committed."""
        return self._generations.kept

    @from_here
    def committed(self, keys: Iterable[Key]) -> dict[Key, str]:
        """Return of each of ``keys`` a digest of what the commit numbered ``generation`` says of its bytes, 32 hex digits.

        Those that are not there, or have changed since that commit, are left out. Reads no tensor. Where a store, or a copy of
        its folder, says the same of a tensor at two times, its bytes are the same. Of a tensor that was written again, with the
        same bytes too, it says something else.
        """
        self._running()
        return self._generations.committed(listed(keys))

    @from_here
    def retain(
        self,
        newest: int | None = None,
        *,
        also: Collection[int] = (),
        drop: Collection[int] = (),
        owner: Owner | None = None,
    ) -> None:
        """Keep, from the next commit on, that many of the newest generations (None: as many as now, at first ``keep=``), and
        those of ``also``, however old they are. Call it again after reopening.

        ``owner``: who asks: something that makes commits of its own; by default the user. It replaces what the same owner asked
        before, and nothing that others asked: ``newest`` is for the user, and left out with it.
        ``drop``: generations that are not needed any more, however new: those that the owner made. The newest commit stays, and
        what another owner keeps.

        Raises MisuseError for a number below 1, for a generation of ``also`` that is not there, for ``newest`` with ``owner``,
        and where nothing can be committed.
        """
        commits = self._committing(None)
        if newest is not None:
            whole_number("newest is how many generations stay", newest)
        asked = items_of(also, "also= has numbers of generations")
        for one in (*asked, *items_of(drop, "drop= has numbers of generations")):
            whole_number("also= and drop= have numbers of generations, each of them", one)
        wanted = sorted(set(asked))
        gone = [number for number in wanted if number not in commits.kept]
        if gone:
            raise MisuseError(f"generation {gone[0]} is not there any more: of {self}, {list(commits.kept)} are")
        expect_type(owner, Owner | None, "an owner is an Owner(kind, name)")
        if owner is not None and newest is not None:
            raise MisuseError(f"newest={newest} holds for all generations: {owner} names its own (also=, drop=)")
        commits.retain(newest, owner, wanted, drop)

    @property
    def device(self) -> torch.device:
        """Device of the tensors in the top tier."""
        return getattr(self._parts.memories[0], "device", torch.device("cpu"))

    @property
    def access(self) -> Access:
        """Whether the store was opened for reading only (``access="read"``), or for writing."""
        return self._generations.access

    @property
    def folder(self) -> str:
        """Absolute path of the store's folder. Raises MisuseError where there is no disk."""
        if self._parts.nvme is None:
            raise MisuseError("this store has no disk")
        return self._parts.nvme.folder

    @from_here
    def commit(self, meta: Mapping[str, object] | None = None) -> int:
        """Make the state of the store durable, with ``meta`` (JSON values; default: the last one), and return the generation.

        When this returns, a crash or power loss leaves at least this state; when it raises, the commit before holds. Raises
        LeaseConflict under an open WRITE lease, CapacityError where the disk has no room for the changes, CommitError when it
        fails, MisuseError without a disk, with durability "none" or a ``meta`` that is not JSON, or the error of a failed
        write.
        """
        commits = self._committing(meta)
        self._prepare_commit()
        return self._without_ended(lambda: commits.commit(meta, self))

    @property
    def ends_with_commit(self) -> bool:
        """Whether the caller is within a ``with`` block whose end commits."""
        return self._within and not self._closed and self._generations.commits_at_exit

    def before_commits(
        self, name: str, call: Callable[[bool], str | None] | None
    ) -> Callable[[bool], str | None] | None:
        """Have ``call(leaving)`` called before each commit, in the thread that commits, to put what the commit is to have;
        ``leaving`` tells that it is the one at the end of a ``with`` block, which is not made where ``call`` returns why.

        It replaces what was given for ``name`` before, which is returned. None: nothing is called any more. What it raises, the
        commit raises.
        """
        before = self._before_commits.pop(name, None)
        if call is not None:
            self._before_commits[name] = call
        return before

    def _prepare_commit(self, *, leaving: bool = False) -> str | None:
        self._unchanged.clear()
        found = [call(leaving) for call in list(self._before_commits.values())]
        return next((why for why in found if why is not None), None)

    def note_unchanged(self, owner: Owner) -> None:
        """Have the commit at the end of a ``with`` block know that no value of the owner's is another one than in the last
        commit, also where its tensors are: what is called before that commit says so."""
        self._unchanged.add(owner)

    def _changed(self) -> bool:
        """Whether any value may be another one than in the last commit."""
        return self._changed_but(self._unchanged)

    def _changed_but(self, unchanged: Collection[Owner | None]) -> bool:
        """Whether any value may be another one than in the last commit, but for those of owners that say otherwise."""
        owners = [owner for owner in unchanged if owner is not None]
        if not owners:
            return self._generations.uncommitted() > 0
        gone = [key for key in self._generations.gone() if not any(key.startswith(f"{one.name}/") for one in owners)]
        keys = [key for key in self if self.owner_of(key) not in owners]
        return bool(gone) or len(self._generations.committed(keys)) < len(keys)

    def refuse_commits(self, why: str | None) -> None:
        """Make commits raise MisuseError with ``why``, and ``with`` blocks end without one. None allows commits again."""
        self._generations.refused = why

    @from_here
    def commit_async(self, meta: Mapping[str, object] | None = None) -> Future[int]:
        """Commit the state as of now while the caller goes on; the future gives the generation, or raises, when the commit has
        ended.

        Leases go on, too: only one that would change a tensor which is not on the disk yet waits, for that tensor alone, and so
        do ``put`` and ``delete`` of it. Waits for an open commit; ``close`` waits for this one. Raises LeaseConflict and
        MisuseError as ``commit``, at once, and CapacityError where there certainly is no room.
        """
        commits = self._committing(meta)
        self._prepare_commit()
        return self._without_ended(lambda: commits.commit_async(meta, self))

    @from_here
    def refresh(self) -> int:
        """Go to the newest commit, in a store that is open with ``access="read"``; return its generation.

        Tensors that the two commits share stay in memory. The generation before is let go. Raises LeaseConflict under a lease
        of a tensor that differs, and MisuseError where the store is open for writing, or a model is paged from it.
        """
        self._running()
        return self._without_ended(lambda: self._generations.refresh(self))

    @from_here
    def reader(self) -> StoreReader[TieredStore]:
        """Return a handle on the newest commit (with ``access="read"``: on the one that is open) for other processes.

        It can be pickled, and ``reader().open(dram=...)`` opens that generation for reading, in whichever process; the handle
        keeps it until it is closed. ``TieredDataset`` reads with one from DataLoader workers. Raises MisuseError where nothing
        is committed, or nothing can be.
        """
        self._running()
        nvme = self._parts.nvme
        if nvme is None or not self.generation:
            raise MisuseError(f"{self._name} has no commit, and other processes see only what is committed: commit first")
        while True:
            generation = self.generation
            try:
                return StoreReader(TieredStore.open, nvme.folder, nvme.drive_folders, generation).pin()
            except MisuseError:
                if generation == self.generation:  # otherwise another thread has committed meanwhile, and that one is dropped
                    raise

    def refuse_refresh(self, why: str) -> None:
        """Make ``refresh`` raise MisuseError with ``why`` from now on."""
        self._generations.stay(why)

    @from_here
    def rollback(self, generation: int | None = None, *, needs: Sequence[Key] = ()) -> int:
        """Restore all tensors as of the newest commit, or of ``generation``, if that is kept; return its number.

        No tensor is read or written: changes since are discarded, unchanged tensors stay where they are. ``meta`` becomes that
        commit's. The next commit gets a new number. A paged model that has other values than the commit raises InterruptedStep
        until it has followed (``zero.rollback``); of one that was paged since that commit, tensors are read to find that out.
        Raises LeaseConflict under any open lease, MisuseError where nothing was committed or the commit lacks a tensor of
        ``needs``, ManifestError for a generation that does not exist.

        The exception that is being handled, or was shown last, may be kept, as a notebook does. What the calls that it ended
        refer to is let go of where a tensor of the store is among it: a debugger does not show their variables afterwards.
        """
        commits = self._committing(None)
        clear_ended(in_store_memory)
        with contextlib.ExitStack() as stack:
            for holder in list(self._holders):
                stack.enter_context(holder.going_back(self.generation if generation is None else generation))
            self.rollbacks += 1  # before anything changes: see tiered/tables
            return self._without_ended(lambda: commits.rollback(generation, needs))

    def held_by(self, holder: Holder) -> None:
        """Have ``holder.let_go_of_ended()`` called where leases of calls that an exception ended are in the way: of a commit, a
        rollback, a deletion. It ends those leases. ``holder.going_back(generation)`` surrounds each rollback. ``holder`` is
        referred to weakly."""
        self._holders.add(holder)

    def _without_ended(self, call: Callable[[], Made]) -> Made:
        return without_ended(call, self._holders)

    def _committing(self, meta: object) -> Commits:
        self._running()
        commits = self._generations.committing(self)
        expect_type(meta, Mapping | None, "meta is a dict of JSON values")
        return commits

    # -- tables, and small tensors ----------------------------------------------------------------------------------------

    @from_here
    def table(
        self,
        name: str,
        rows: int | None = None,
        columns: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        block: int | str | None = None,
        pattern: Pattern | None = None,
        fill: float | None = None,
        owner: Owner | None = None,
    ) -> Table:
        """Open table ``name``, or make it: ``rows`` rows of ``columns`` elements (or of that shape; None: of one number each).

        A row that nobody has written yet is ``fill`` (by default 0), and takes no room. Rows lie in blocks, which are tensors
        of the store (``NAME/block0``, …) and move whole: ``block`` is their size in bytes; by default 32 KiB for rows that are
        used in ``pattern="random"`` order, as by default, 1 MiB for "sequential", and more where a table would have more than
        65,536 of them. ``dtype`` is torch's default type by default. To open a table its name is enough. Where a table of that
        name is open already, that is returned. ``owner``: who owns the tensors of a new table that is a part of something else;
        by default the table itself.

        Raises KeyNotFound where there is no table and ``rows`` is None; MisuseError for arguments that are wrong, or other than
        those of the table that there is; ManifestError for a record that is damaged; and as ``put``.
        """
        engine = self._running()
        budget = self._parts.tiers[self._parts.dram].capacity
        options = TableOptions(name, rows, columns, dtype, block, pattern, fill)
        found = open_table(self, options, budget, self._row_cache, owner)
        with engine.lock:
            known = self._tables.get(name)
            if known is not None and known.layout == found.layout:
                return known
            self._tables[name] = found
        return found

    @from_here
    def small(self, name: str, *, page: int | str | None = None) -> SmallTensors:
        """Open the small tensors ``name``, or make them: a mapping of tensors that lie together in pages.

        A tensor of the store itself takes some KiB of memory and a multiple of 4 KiB, and an entry in every commit; one of
        these takes its bytes, its key and some hundred bytes of memory. ``page`` is the size of a page in bytes, by default 64
        KiB: a tensor that is not in memory costs the transfer of its page. Pages and names are tensors of the store
        (``NAME/page0``, ``NAME/names0``, …). Where small tensors of that name are open already, these are returned.

        Raises MisuseError for a name or a size that is wrong, KeyNotFound where the store is open for reading and has none,
        ManifestError for a record that is damaged; and as ``put``.
        """
        engine = self._running()
        capacity = self._parts.tiers[self._parts.dram].capacity
        found = open_small(self, name, page, capacity, may_make=self.access is Access.WRITE)
        with engine.lock:
            return self._small.setdefault(name, found)  # one of each name, whose calls take turns

    # -- what those need who lay tensors out themselves ----------------------------------------------------------------------

    def lease_addresses(self, keys: Sequence[Key], access: Access) -> LeaseOfAddresses:
        """Return a lease of ``keys``, each there once, that gives the address and the spec of each in host memory, for copies
        that are made within the lease. Waits and raises as ``lease``."""
        self._running()
        if access is Access.WRITE:
            self._generations.refuse_change(self)
        dram = self._parts.dram
        memory = self._parts.memories[dram]
        assert isinstance(memory, DramTier)
        return LeaseOfAddresses(self._running, memory, keys, access, dram)

    def watch_changes(self, stems: Sequence[str]) -> Callable[[], int]:
        """Return a function that says how many changes were begun of tensors whose key is one of ``stems``, or that and a
        number, since somebody watched them first."""
        engine = self._running()
        with engine.lock:
            watched = engine.state.directory.watched
            for stem in stems:
                watched.setdefault(stem, 0)
        return lambda: sum(watched[stem] for stem in stems)

    def fetch_ahead(self, keys: Sequence[Key], device: torch.device) -> None:
        """Prefetch ``keys``, which were put from ``device``, beside other hints; where an order is followed, it says what is
        fetched, and when."""
        engine = self._running()
        if engine.read_ahead is None:
            engine.ahead(keys, self._tier_for(device))

    def refuse_closed(self) -> None:
        """Raise StoreClosed where the store was closed, ForkedStore in a child of the process that opened it."""
        self._running()

    # -- looking in -------------------------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """Return a frozen snapshot of the counters since ``open``. The difference of two is the cost of the program between
        them."""
        engine = self._running()
        engine.look()
        memory = memory_of_process()
        with engine.lock:
            tiers = engine.state.tier_statistics()
            dram = next(tier for tier in tiers if tier.name == "dram")
            return StoreStatistics(
                backend=self._parts.backend.name if self._parts.backend else "none",
                direct=self._parts.nvme is not None and self._parts.nvme.direct,
                tensors=len(engine.state.directory),
                generation=self.generation,
                leases=engine.leases,
                hits=engine.hits,
                misses=engine.misses,
                stalled_for_reads=engine.stalled_for_reads,
                stalled_for_room=engine.stalled_for_room,
                prefetched=engine.state.prefetched,
                prefetched_unused=engine.state.prefetched_unused,
                speculated=engine.state.speculated,
                speculated_used=engine.state.speculated_used,
                speculated_unused=engine.state.speculated_unused,
                unknown_hints=engine.state.unknown_hints,
                wakes=engine.wakes,
                evictions=engine.state.evictions,
                tiers=tiers,
                links=engine.link_statistics(),
                memory=replace(memory, budget=dram.capacity, pool=dram.used, touched=dram.peak),
            )

    @contextlib.contextmanager
    def timeline(self, *, limit: int = 1_000_000) -> Iterator[Timeline]:
        """Record every transfer, lease, stall and ``span``: ``with store.timeline() as timeline:``.

        At most ``limit`` events, of about 200 bytes each. Only one timeline may be recorded at a time: MisuseError. Changes no
        result.
        """
        engine = self._running()
        token = Token()
        recorder = engine.record(limit, token)
        if recorder is None:
            raise MisuseError(f"{self._name} records a timeline already")
        try:
            yield recorder.timeline
        finally:
            del token  # ends the recording, whatever exception strikes now
            engine.later(engine.stop_recording)
            recorder.stop()

    def span(self, kind: str, name: str) -> Span:
        """Mark a part of the caller's own work for a timeline: ``with store.span("evaluation", "after epoch 3"):``.

        Costs next to nothing while no timeline is recorded. Ends with the block, or by ``end()``.
        """
        recorder = self._engine.recorder
        return NO_SPAN if recorder is None else recorder.begin(kind, name)

    def free_on_device(self) -> int:
        """Return the bytes that are free on the filesystems of the store's data files; 0 for a store without a disk."""
        self._running()
        return self._parts.nvme.free_on_device() if self._parts.nvme else 0

    # -- within -----------------------------------------------------------------------------------------------------------

    def _put_temporary(self, key: Key, contents: torch.Tensor, lifetime: Token) -> None:
        """Store a copy of ``contents``, uint8 of one dimension, as a temporary tensor: it is in no commit, its write-back
        begins at once unless an order is followed, and it is deleted when ``lifetime`` dies. Waits and raises as ``put``."""
        tier = self._tier_for(contents.device)
        copy: Callable[[torch.Tensor], None] = lambda target: copy_bytes(target, contents, queued=self._queued(tier))  # noqa: E731
        self._put(key, spec_of(contents), tier, copy, lifetime)

    def _copy_into(self, target: torch.Tensor, key: Key) -> bool:
        """Copy ``key`` into ``target``, contiguous and of its dtype and shape, on any device; return whether its bytes were in
        memory already. Waits and raises as ``get``."""
        lease = self._lease_to_copy(key)
        engine = self._running()
        try:
            there = key in engine.present([key], lease.tier)
            target.copy_(lease.__enter__())
            return there
        finally:
            lease.token = None  # not __exit__: Ctrl-C may strike a call before its first line
            engine.released()

    def _tier_that_holds(self, spec: TensorSpec, tier: int) -> int:
        """Return ``tier``, or DRAM where that cannot hold the tensor. One larger than DRAM could never leave the tiers above:
        DRAM refuses it."""
        dram = self._parts.dram
        return dram if spec.nbytes > min(self._parts.tiers[tier].capacity, self._parts.tiers[dram].capacity) else tier

    def _tier_for(self, device: torch.device) -> int:
        """Return the tier to which ``put`` copies a tensor on ``device``."""
        return self._parts.dram if device.type == "cpu" else 0

    def _waited(self) -> float:
        """Return the seconds that callers have waited so far."""
        engine = self._running()
        return engine.stalled_for_reads + engine.stalled_for_room

    def _has_memory(self, address: int) -> bool:
        """Return whether memory at ``address`` is of this store, as far as its tiers say where they are."""
        if self._closed:
            return False
        spans = ((getattr(memory, "address", 0), memory.capacity) for memory in self._parts.memories)
        return any(begin <= address < begin + nbytes for begin, nbytes in spans if begin)

    def _running(self) -> Engine:
        if os.getpid() != self._pid:
            raise ForkedStore(
                f"{self._name} was opened by process {self._pid} and cannot be used in its forked child; give workers "
                "store.reader(), or DataLoader a TieredDataset(store), with which each process opens a store of its own"
            )
        if self._closed:
            raise StoreClosed(
                f"{self._name} is closed: its with block has ended, or close() was called; use it before, or open it again"
            )
        return self._engine


def _filled(target: torch.Tensor, source: torch.Tensor, room: Token) -> None:
    """Copy ``source`` into ``target``, in a thread: ``room`` keeps the memory until then, also where nobody waits any more."""
    copy_bytes(target, source, queued=False)


_open: weakref.WeakSet[TieredStore] = weakref.WeakSet()
"""The stores of this process."""


def _close_all() -> None:
    for store in list(_open):
        store.close()


@functools.cache
def _close_at_exit() -> None:
    """Have stores that are open when the program ends closed, so that ``close`` warns of what nobody committed."""
    atexit.register(_close_all)


def in_store_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` lies in the memory of a store that is open."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass, or within a transform
        return False
    return any(store._has_memory(address) for store in list(_open))


def _dropped(end: str, tensors: int) -> str:
    return (
        f"{end} with changes of {tensors} tensor{'' if tensors == 1 else 's'} that were not committed: call commit() first, or "
        "leave a with block, which commits"
    )


def _collected(name: str, known: Generations, engine: Engine, parts: Parts, pid: int, scratch: bool) -> None:
    """Shut down a store that nobody closed and nothing refers to any more, and warn of what nobody committed."""
    if os.getpid() != pid:
        return
    if engine.stop_elsewhere(lambda: _collected(name, known, engine, parts, pid, scratch)):
        return
    dropped = known.unsaved()
    _shut_down(engine, parts, pid, scratch)
    if dropped:
        said = _dropped(f"{name} was left without close(), and nothing refers to it any more,", dropped)
        try:
            warnings.warn(said, UncommittedWarning, stacklevel=3)  # where the last reference went, or the collector ran
        except UncommittedWarning as error:  # a filter makes it an error, which nobody can catch here
            warnings.showwarning(error, UncommittedWarning, __file__, 0)


def _shut_down(engine: Engine, parts: Parts, pid: int, scratch: bool) -> None:
    if os.getpid() != pid:
        return  # a forked child: the thread, the ring and the lock are its parent's
    if engine.stop_elsewhere(lambda: _shut_down(engine, parts, pid, scratch)):
        return
    engine.stop()
    if scratch and isinstance(parts.nvme, NvmeTier) and not parts.nvme.closed:
        parts.nvme.remove()
    parts.close()
