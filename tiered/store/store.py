"""``TieredStore``: named tensors that live where there is room and come where they are needed."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch

from tiered.engine.engine import Engine
from tiered.engine.policy import LRU, NextUse, Plan, Record, Touch, touch_of
from tiered.engine.requests import Delete, Install, Room
from tiered.engine.retention import affordable, decide, room_for
from tiered.engine.state import Token
from tiered.errors import ForkedStore, MisuseError, StoreClosed, from_here
from tiered.interfaces import EvictionPolicy, IOBackend
from tiered.store.commit import Commits, Generations
from tiered.store.lease import (
    LeaseOfMany,
    LeaseOfOne,
    copied,
    copied_in_thread,
    copy_bytes,
    end_struck,
    listed,
    refuse_keys,
    refuse_name,
    refuse_spec,
    refuse_unstorable,
    spec_of,
)
from tiered.store.opening import Newer, OpenOptions, Parts, access_of, assemble
from tiered.telemetry import NO_SPAN, Span, StoreStatistics, Timeline
from tiered.types import Access, BackendName, Key, TensorSpec

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["TieredStore"]

AT_ONCE = 4 << 20
"""Bytes that a coroutine copies itself; more is copied in a thread, so that the event loop goes on."""


class TieredStore:
    """Tensors by name, in HBM and DRAM as far as the budgets go and in extents of one large file for the rest.

    Open one with ``TieredStore.open``. All methods may be called from any thread of the process that opened it. Leaving a
    ``with`` block normally commits; leaving it by an exception does not, nor does ``close``: what was not committed is gone at
    the next open.
    """

    def __init__(self, parts: Parts, engine: Engine, known: Generations, *, scratch: bool) -> None:
        self._parts, self._engine, self._generations = parts, engine, known
        engine.end_struck = end_struck
        self._pid = os.getpid()
        self._closed = False
        self._name = f"the store in {parts.nvme.folder}" if parts.nvme else "the store without a disk"
        self._rest = (engine, parts, self._pid, scratch)
        self._shutdown = weakref.finalize(self, _shut_down, *self._rest)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Called by copy and pickle."""
        raise MisuseError(f"{self._name} cannot be copied or pickled: open a store of its own in each process that needs one")

    # -- opening and closing ----------------------------------------------------------------------------------------------

    @classmethod
    @from_here
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        dram: int | str | None = None,
        hbm: int | str | None = None,
        device: str | torch.device = "cuda",
        nvme: int | str | None = None,
        generation: int | None = None,
        newer: Newer = "keep",
        access: Access | str = Access.WRITE,
        durability: Literal["commit", "none"] = "commit",
        backend: BackendName | Callable[[], IOBackend] = "auto",
        eviction: Callable[[], EvictionPolicy] = LRU,
        keep: int = 2,
        deadline: float = 60.0,
        paths: Sequence[str | os.PathLike[str]] | None = None,
    ) -> TieredStore:
        """Create the store in folder ``path``, or reopen it as of its newest commit, or as of ``generation``.

        Sizes are bytes or "256MiB". ``dram`` is the hard budget of the pool (default: half of what is available), ``hbm`` that
        on ``device`` (default: no such tier; device="cpu" stands in for one), ``nvme`` that of the disk (default: what it has).
        ``path`` None is a store without a disk. ``durability="none"`` is scratch: nothing can be committed, and the files are
        gone at close. ``keep`` is how many generations stay on disk; ``newer="drop"``: those after ``generation`` are given up
        (all, with 0). ``deadline`` is how many seconds a call waits for room
        before it raises and names who holds it. ``access="read"`` opens a commit to look at it, beside a job that died, or in a
        folder that cannot be written to: nothing there is created or changed, several may do so at once, and what would raises.

        ``paths`` are for several drives: a list of folders, one on each, and each gets one data file; ``path`` then has the
        manifests only. Whole tensors go to the drive with the fewest bytes in use. To reopen, give the same folders, in any
        order; the drives say themselves which they are, so they may be mounted elsewhere. Without ``paths`` the error says
        them: no folder is opened because a file names it.

        ``backend`` is "auto" (libaio, else posix), "libaio", "aiofiles", "posix", or makes an ``IOBackend``; ``eviction`` makes
        an ``EvictionPolicy`` and is called once for each tier. Warns where the filesystem has no O_DIRECT.

        Raises MisuseError (an argument, not a folder, foreign, not writable, no such device or backend), StoreLocked,
        CapacityError (a budget too small, or more than there is), ManifestError (damaged, no such generation, a drive that is
        missing or another store's).
        """
        options = OpenOptions(
            *(path, dram, hbm, device, nvme, generation, durability, backend, eviction, keep, deadline, paths, newer),
            access=access_of(access),
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

    def __enter__(self) -> TieredStore:
        self._running()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and not self._closed and self._generations.commits_at_exit:
                self._running()
                self._generations.committing(self).commit(None, self, always=False)
        finally:
            self.close()

    def close(self) -> None:
        """Wait for transfers in flight and let go of everything. Commits nothing. Idempotent.

        Tensors that leases gave stay valid. Afterwards every other call raises StoreClosed; in a forked child, ForkedStore.
        """
        self._engine.refuse_nested()
        self._closed = True
        if self._shutdown.alive and os.getpid() == self._pid:
            self._generations.settle()
        if self._shutdown.alive:
            _shut_down(*self._rest)
            self._shutdown.detach()  # not before: what Ctrl-C interrupts is done by the next call, or by the collector

    # -- tensors by name --------------------------------------------------------------------------------------------------

    @from_here
    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Store a copy of ``tensor`` (any strided dtype, shape, device) as ``key``, replacing what was there.

        It goes to DRAM from the CPU, to the top tier from elsewhere; may wait for room. Raises LeaseConflict while ``key`` is
        leased, CapacityError when the tensor cannot fit or no room comes in time, MisuseError for what has no dense contents
        (sparse, quantized, nested, meta), WriteError when only a failed write-back stands in the way.
        """
        refuse_name(key)
        refuse_unstorable(key, tensor)
        source = tensor.detach().resolve_conj().resolve_neg()
        tier = self._parts.dram if source.device.type == "cpu" else 0
        self._put(key, spec_of(source), tier, lambda target: copy_bytes(target, source))

    @from_here
    def create(self, key: Key, spec: TensorSpec, *, tier: str | None = None) -> None:
        """A new tensor with undefined contents, to be filled under a WRITE lease; in ``tier`` (default: the top one), or in
        DRAM where that cannot hold it.

        ``spec`` is its shape and element type. Replaces, waits and raises as ``put``; MisuseError for a tier that is not there.
        """
        refuse_name(key)
        refuse_spec(key, spec)
        self._put(key, spec, self._tier_index(tier), None)

    def _put(self, key: Key, spec: TensorSpec, tier: int, fill: Callable[[torch.Tensor], None] | None) -> None:
        engine = self._running()
        self._generations.refuse_change(self)
        if spec.nbytes > self._parts.tiers[tier].capacity or spec.nbytes > self._parts.tiers[self._parts.dram].capacity:
            tier = self._parts.dram  # what that cannot hold could never leave the tiers above it: refused
        token = Token()
        room = Room(tier, max(1, spec.nbytes), key, engine.state.claims.watch(token))
        try:
            engine.wait(room)
            assert room.slot is not None
            room.stream = engine.guard(tier, room.slot)
            if fill is not None and spec.nbytes:
                fill(self._parts.memories[tier].tensor(room.slot, spec.nbytes)[0])
            engine.wait(Install(key, spec, room, engine.fences(tier)))
        except BaseException:
            del token  # unless the tensor is there already, its room is given back
            engine.released()
            self._running()  # closed by another thread meanwhile: then that is the error
            raise

    @from_here
    def get(self, key: Key) -> torch.Tensor:
        """A contiguous copy of ``key``, of its dtype and shape, on the CPU, outside the budget. Waits as ``lease`` does.

        Raises KeyNotFound, LeaseConflict under an open WRITE lease, TransferError, CapacityError after the deadline.
        """
        lease = self._lease_to_copy(key)
        try:
            return copied(lease.__enter__())
        finally:
            lease.token = None  # not __exit__: Ctrl-C may strike a call before its first line
            self._engine.released()

    async def fetch(self, key: Key) -> torch.Tensor:
        """``get`` for a coroutine: it waits without blocking a thread, and may be cancelled at any time. Raises as ``get``."""
        async with self._lease_to_copy(key) as tensor:
            return copied(tensor) if tensor.nbytes <= AT_ONCE else await copied_in_thread(tensor)

    def _lease_to_copy(self, key: Key) -> LeaseOfOne:
        """Where it need not be moved more than it must: on the device when it is there, else in host memory."""
        engine = self._running()
        refuse_keys([key])
        tier = self._parts.dram
        with engine.lock:
            entry = engine.state.directory.find(key)
            for index, copy in enumerate(entry.copies[:tier] if entry is not None else ()):
                tier = index if copy is not None and copy.valid else tier
        return LeaseOfOne(self._running, self._parts.memories[tier], [key], Access.READ, tier)

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
        wanted = access_of(access)
        if wanted is Access.WRITE:
            self._generations.refuse_change(self)
        index = self._tier_index(tier)
        memory = self._parts.memories[index]
        if isinstance(key, str):
            return LeaseOfOne(self._running, memory, [key], wanted, index)
        if not isinstance(key, list | tuple):
            raise MisuseError(f"a lease is of a key or of a list of keys, not of {key!r}")
        keys = list(key)
        refuse_keys(keys)
        if len(set(keys)) != len(keys):
            raise MisuseError(f"the same tensor twice in one lease: {keys}")
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
        """Bring ``keys`` up to ``tier`` (default: the top one), in this order, when there is room and time.

        A hint: a newer one replaces what has not begun. Never waits; a full tier, an unknown key or a failed read is not an
        error. Raises MisuseError for a tier that is not there.
        """
        wanted = listed(keys)
        refuse_keys(wanted)
        self._running().hint(wanted, self._tier_index(tier))

    @contextlib.contextmanager
    def trace(self, *, most: int | None = None) -> Iterator[list[Touch]]:
        """``with store.trace() as order:`` writes down what is leased or put meanwhile, by any thread, as a list of touches.

        Each is a (key, tier, use); ``get`` and ``fetch`` are READ. Traces may overlap. The list is the caller's. ``most``:
        while it has so many touches, none are added; it is the caller's to take them out.
        """
        engine = self._running()
        token = Token()
        record = Record([], math.inf if most is None else most, weakref.ref(token))
        try:
            with engine.lock:
                engine.state.records.append(record)
            yield record.touches
        finally:
            del token  # nothing is written down any more, whatever strikes now
            records = engine.state.records
            engine.later(lambda: records.__setitem__(slice(None), [other for other in records if other is not record]))

    @from_here
    def follow(
        self,
        order: Iterable[Touch | Key],
        *,
        then: Literal["again", "end"] = "again",
        prefetch: Literal["on", "off"] = "on",
    ) -> int:
        """Expect ``order`` from here on, again and again: evict what it needs last, and fetch ahead what it needs next.

        ``order`` is what ``trace`` wrote down, or keys by hand, all of which are read. A loop may stray from it; that costs
        time, nothing else. With ``then="end"`` it comes once: what its rest does not touch leaves first, nothing is fetched
        beyond it, and after its last touch nothing is followed. Another order keeps what was planned for the beginning that
        both have in common. An empty one ends it. ``prefetch="off"`` only evicts by it. Returns how many touches were planned
        anew. Raises MisuseError for a tier that is not there. Results never depend on the order.
        """
        if prefetch not in ("on", "off") or then not in ("again", "end"):
            raise MisuseError("prefetch is 'on' or 'off', then is 'again' or 'end'")
        engine = self._running()
        touches = [touch_of(touch) for touch in listed(order)]
        keys, uses = [touch.key for touch in touches], [touch.use for touch in touches]
        found = {touch.key: touch.nbytes for touch in touches} | engine.sizes(keys)
        goals = [self._tier_index(touch.tier) for touch in touches]

        def sizes(index: int) -> list[int]:
            """What each touch takes of tier ``index``, in whole slots; a byte where it is for a tier below, or more than there
            could be."""
            most, alignment = self._parts.tiers[index].capacity, getattr(self._parts.tiers[index], "alignment", 1)
            wanted = [found[key] if goal <= index else 0 for key, goal in zip(keys, goals, strict=True)]
            return [-(-nbytes // alignment) * alignment if 0 < nbytes <= most else 1 for nbytes in wanted]

        rooms, decisions = [], []
        for index, memory in enumerate(self._parts.memories[: len(self._parts.links)]):
            needed, spare = sizes(index), 0
            if prefetch == "on":
                missing = sum(dict(zip(keys, needed, strict=True)).values()) - memory.capacity
                spare = room_for(memory.capacity, missing, max(needed, default=0))
                spare = affordable(keys, uses, needed, memory.capacity, spare, then)
                rooms.append(spare)
            decisions.append(decide(keys, uses, needed, memory.capacity, then=then, spare=spare))

        def policies(plan: Plan) -> list[NextUse]:
            return [NextUse.along(plan, decision.price, decision.keep) for decision in decisions]

        return engine.follow(touches, policies, rooms, then)

    @from_here
    def delete(self, key: Key) -> None:
        """Forget ``key``; its room is free once nothing refers to it. Raises KeyNotFound, LeaseConflict while it is leased."""
        refuse_keys([key])
        self._generations.refuse_change(self)
        self._running().wait(Delete(key))

    def __contains__(self, key: object) -> bool:
        """Whether there is a tensor of that name."""
        directory = self._running().state.directory
        return isinstance(key, str) and key in directory

    def __iter__(self) -> Iterator[Key]:
        """The keys as of now, in no particular order."""
        engine = self._running()
        with engine.lock:
            return iter(list(engine.state.directory))

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._running().state.directory)

    @from_here
    def spec(self, key: Key) -> TensorSpec:
        """Shape and element type of ``key``; moves nothing. Raises KeyNotFound."""
        engine = self._running()
        refuse_keys([key])
        with engine.lock:
            return engine.state.directory.entry(key).spec

    # -- commits ----------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the newest commit, or of the one opened; 0 before the first, and where nothing can be committed."""
        return self._generations.generation

    @property
    def meta(self) -> dict[str, Any]:
        """What the commit numbered ``generation`` was given, as JSON gives it back; empty before the first."""
        return self._generations.meta

    @property
    def device(self) -> torch.device:
        """Where the tensors of the top tier are."""
        return getattr(self._parts.memories[0], "device", torch.device("cpu"))

    @property
    def folder(self) -> str:
        """Absolute path of the store's folder. Raises MisuseError where there is no disk."""
        if self._parts.nvme is None:
            raise MisuseError("this store has no disk")
        return self._parts.nvme.folder

    @from_here
    def commit(self, meta: Mapping[str, object] | None = None) -> int:
        """Make everything durable, with ``meta`` (JSON values); returns the generation. Without ``meta`` the last one stays.

        When this returns, a crash or power loss leaves at least this state; when it raises, the commit before holds. Raises
        LeaseConflict under an open WRITE lease, CapacityError where the disk has no room for what changed, CommitError when it
        fails, MisuseError without a disk, with durability "none" or a ``meta`` that is not JSON, or what a failed write raises.
        """
        return self._committing(meta).commit(meta, self)

    def refuse_commits(self, why: str | None) -> None:
        """From here on commits raise MisuseError, and leaving a ``with`` block makes none. None: no longer."""
        self._generations.refused = why

    @from_here
    def commit_async(self, meta: Mapping[str, object] | None = None) -> Future[int]:
        """``commit`` all as it is now, and go on meanwhile; the future gives the generation, or raises, when it is durable.

        Leases go on, too: only one that would change a tensor which is not on the disk yet waits, for that tensor alone, and
        so do ``put`` and ``delete`` of it. Waits for a commit that is open; ``close`` waits for this one. Raises LeaseConflict
        and MisuseError as ``commit``, at once, and CapacityError where there plainly is no room.
        """
        return self._committing(meta).commit_behind(meta, self)

    @from_here
    def rollback(self, generation: int | None = None, *, needs: Sequence[Key] = ()) -> int:
        """All tensors as they were in the newest commit, or in ``generation``, if that is kept; returns its number.

        Reads and writes none of them: what changed since is given up, what did not stays where it is. ``meta`` is that
        commit's. The next commit gets a new number. Raises LeaseConflict under any open lease, MisuseError where nothing was
        committed or the commit has no tensor of ``needs``, ManifestError for a generation that is not there.
        """
        return self._committing(None).rollback(generation, needs)

    def _committing(self, meta: object) -> Commits:
        self._running()
        commits = self._generations.committing(self)
        if meta is not None and not isinstance(meta, Mapping):
            raise MisuseError(f"meta is a dict of JSON values, not {meta!r}")
        return commits

    # -- looking in -------------------------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """What happened since ``open``: a frozen snapshot. Subtract two of them to see what one part of a program took."""
        engine = self._running()
        engine.look()
        with engine.lock:
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
                wakes=engine.wakes,
                evictions=engine.state.evictions,
                tiers=engine.state.tier_statistics(),
                links=engine.link_statistics(),
            )

    @contextlib.contextmanager
    def timeline(self, *, limit: int = 1_000_000) -> Iterator[Timeline]:
        """``with store.timeline() as timeline:`` records every transfer, lease and stall meanwhile, and every ``span``.

        At most ``limit`` events, of about 200 bytes each. One timeline at a time: MisuseError. Changes no result.
        """
        engine = self._running()
        token = Token()
        recorder = engine.record(limit, token)
        if recorder is None:
            raise MisuseError(f"{self._name} records a timeline already")
        try:
            yield recorder.timeline
        finally:
            del token  # what is recorded is nobody's any more, whatever strikes now
            engine.later(engine.stop_recording)
            recorder.stop()

    def span(self, kind: str, name: str) -> Span:
        """``with store.span("evaluation", "after epoch 3"):`` a part of the caller's work, to be seen in a timeline.

        Costs next to nothing while none is recorded. Ends with the block, or by ``end()``.
        """
        recorder = self._engine.recorder
        return NO_SPAN if recorder is None else recorder.begin(kind, name)

    def free_on_device(self) -> int:
        """Bytes that are free on the filesystems of the store's data files; 0 for a store without a disk."""
        self._running()
        return self._parts.nvme.free_on_device() if self._parts.nvme else 0

    # -- within -----------------------------------------------------------------------------------------------------------

    def _running(self) -> Engine:
        if os.getpid() != self._pid:
            raise ForkedStore(
                f"{self._name} was opened by process {self._pid} and cannot be used in its forked child; open stores after "
                "forking, or start workers with 'spawn'"
            )
        if self._closed:
            raise StoreClosed(f"{self._name} is closed")
        return self._engine


def _shut_down(engine: Engine, parts: Parts, pid: int, scratch: bool) -> None:
    if os.getpid() != pid:
        return  # a forked child: the thread, the ring and the lock are its parent's
    if engine.stop_elsewhere(lambda: _shut_down(engine, parts, pid, scratch)):
        return
    engine.stop()
    if scratch and parts.nvme is not None and not parts.nvme.closed:
        parts.nvme.remove()
    parts.close()
