"""Bring a unit's parameters out of the store to be used, and write them back: ``ParameterStorage`` and its implementations.

Parameters come to the top tier. Gradients and optimizer states go no further up than where updates are computed: with a device
that is host memory (Ren et al., 2021, ZeRO-Offload, https://arxiv.org/abs/2101.06840), or the device (``in_update_tier``). The
store decides where each tensor lies between two uses.

``CheckpointRecord`` is here because whoever writes to a tensor of a model has to invalidate the record of its last commit
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, overload

import torch

from tiered.errors import MisuseError, TieredError
from tiered.store import TieredStore
from tiered.store.activations import users_of
from tiered.telemetry import Span
from tiered.tensors.digests import digest_of
from tiered.types import Access, Owner, TensorSpec
from tiered.zero.collectives import Ranks, Under
from tiered.zero.leases import Leases, Opened
from tiered.zero.paging.units import UnitPlan

__all__ = [
    "AllGathered",
    "Cast",
    "CheckpointRecord",
    "Local",
    "ParameterStorage",
    "Replicated",
    "TensorStore",
    "TierView",
    "UpdateTier",
    "host",
    "in_dram",
    "in_top_tier",
    "in_update_tier",
    "model_named",
]

UpdateTier = Literal["dram", "hbm"]
READ_TOGETHER, READ_BYTES = 64, 1 << 18
"""So many tensors, or bytes, are read by one lease, where tensors are compared with what they were before a rollback."""


class TensorStore(Protocol):
    """The methods of a store that gradients, states and storages use, with the meaning that they have in ``TieredStore``."""

    def __contains__(self, key: object, /) -> bool: ...

    def specs(self, keys: list[str]) -> list[TensorSpec | None]: ...

    def get(self, key: str) -> torch.Tensor: ...

    def put(self, key: str, tensor: torch.Tensor) -> None: ...

    def create(self, key: str, spec: TensorSpec) -> None: ...

    def delete(self, key: str) -> None: ...

    @overload
    def lease(self, key: str, *, access: Access = ...) -> AbstractContextManager[torch.Tensor]: ...
    @overload
    def lease(self, key: list[str], *, access: Access = ...) -> AbstractContextManager[tuple[torch.Tensor, ...]]: ...

    def span(self, kind: str, name: str) -> AbstractContextManager[Any]: ...


def model_named(name: str) -> Owner:
    """Return the owner of all tensors of the model ``name`` in its store."""
    return Owner("model", name)


class TierView:
    """View of a store whose tensors are ``owner``'s, and are created and leased in ``tier`` (None: the top one). ``Leases``
    registers each lease."""

    def __init__(self, store: TieredStore, tier: str | None, owner: Owner) -> None:
        self._store, self._tier, self._owner = store, tier, owner
        self._leases = Leases.of(store, owner)

    def __contains__(self, key: object) -> bool:
        return key in self._store

    def specs(self, keys: list[str]) -> list[TensorSpec | None]:
        return self._store.specs(keys)

    def get(self, key: str) -> torch.Tensor:
        return self._store.get(key)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._store.put(key, tensor, owner=self._owner)

    def create(self, key: str, spec: TensorSpec) -> None:
        self._store.create(key, spec, tier=self._tier, owner=self._owner)

    def delete(self, key: str) -> None:
        self._store.delete(key, owner=self._owner)

    def lease(self, key: Any, *, access: Access = Access.READ) -> Any:
        return self._leases.registered(self._store.lease(key, access=access, tier=self._tier))

    def span(self, kind: str, name: str) -> Span:
        return self._store.span(kind, name)


def in_top_tier(store: TieredStore, owner: Owner) -> TensorStore:
    """Return a view of ``store`` in the tier where parameters compute."""
    return TierView(store, None, owner)


def in_dram(store: TieredStore, owner: Owner) -> TensorStore:
    """Return a view of ``store`` in host memory."""
    return TierView(store, "dram", owner)


def in_update_tier(store: TieredStore, tier: UpdateTier, owner: Owner) -> TensorStore:
    """Return a view of ``store`` in the tier where updates are computed. Raises MisuseError for a tier that the store does not
    have."""
    names = [one.name for one in store.statistics().tiers]
    if tier not in names:
        raise MisuseError(f"update_tier={tier!r}: this store has no such tier; open it with hbm=, or leave update_tier out")
    return TierView(store, tier, owner)


def pair(store: TensorStore, first: str, second: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
    """Lease two tensors for WRITE, at once."""
    return cast(AbstractContextManager[tuple[torch.Tensor, torch.Tensor]], store.lease([first, second], access=Access.WRITE))


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a copy of it in host memory."""
    return tensor.to("cpu")


@dataclass(frozen=True)
class _Remembered:
    """What a model's tensors are before a rollback. ``said``: of each what the commit says of its bytes, None where that is
    nothing; ``read``: digests of the bytes of those that were read, None where they could not be. ``record``: what the commit
    says of the record, None where there is none. ``changed``: see ``CheckpointRecord.remember``."""

    said: Mapping[str, str | None] = field(default_factory=dict)
    read: Mapping[str, str | None] = field(default_factory=dict)
    record: str | None = None
    changed: bool = False


class CheckpointRecord:
    """Record of a model's last commit, which is deleted before any tensor of the model changes.

    So a commit of the store that knows nothing of the model never pairs an old record with newer tensors.
    """

    def __init__(self, store: TieredStore, owner: Owner) -> None:
        self.key, self.owner = f"{owner.name}/checkpoint", owner
        self._store = store
        self.current = self.begun = self.was = False
        """Whether the record is in the store, and of what there is now; whether the model began in this process, and nothing of
        it has changed since; whether there has been a record in this process."""
        self.refuse: Callable[[], None] | None = None
        """Raises where a tensor of the model must not change yet."""
        self.changing: Callable[[], None] | None = None
        """Called when the record stops being ``current``."""
        self._changed_in: int | None = None
        self._remembered: _Remembered | None = None
        self.awaited = self._applying = False
        self.before: torch.Tensor | None = None
        """The record, which is not in the store any more because updates of its commit were applied, or gradients deleted that
        it does not need; nothing else has changed since. Where it is ``awaited``, it is loaded from here."""

    def note(self) -> None:
        """Note that something outside of the tensors is about to change."""
        self._changed_in, self.begun = self._store.begun, False
        if not self._applying and not self.awaited:
            self.before = None
        if self.current:
            self.current = False
            if self.changing is not None:
                self.changing()

    def unchanged(self) -> None:
        """Note that everything is as in the last commit, or in one to which the store went back."""
        self._changed_in = self._remembered = None

    def remember(self, generation: int, *, changed: bool) -> None:
        """Remember what the model's tensors are, before the store goes back to a commit; what was remembered before an earlier
        rollback stays, until the model has followed. ``changed``: more than tensors has changed, and has to go back, too."""
        if self._remembered is not None:
            return
        if changed or (self._changed_in is not None and self._changed_in >= generation):
            self._remembered = _Remembered(changed=True)
            return
        said, record = self._said()
        # Two commits say different things of bytes that were written twice; a model without a record could not follow.
        whole = record is None and generation != self._store.generation
        keys = [key for key, found in said.items() if whole or found is None]
        self._remembered = _Remembered(said, dict(self._digests(keys)), record)

    def forget(self) -> None:
        """Forget what was remembered, because the store did not go back."""
        self._remembered = None

    def is_as_remembered(self) -> bool:
        """Return whether the model's tensors are what was remembered."""
        before = self._remembered
        if before is None or before.changed or None in before.read.values():
            return False
        said, record = self._said()
        if said.keys() != before.said.keys() or (record != before.record and None not in (record, before.record)):
            return False
        others = [key for key, found in said.items() if found is None or found != before.said[key]]
        if any(key not in before.read for key in others):
            return False
        return all(found == before.read[key] for key, found in self._digests(others))

    def _said(self) -> tuple[dict[str, str | None], str | None]:
        """Return what the commit says of each tensor of the model, and of the record."""
        keys = self._store.owned(self.owner)
        said = self._store.committed(keys)
        record = said.get(self.key, "not committed") if self.key in keys else None
        return {key: said.get(key) for key in keys if key != self.key and not key.startswith(f"{self.key}/")}, record

    def _digests(self, keys: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """Yield each key with a digest of its bytes, None where they cannot be read; many small tensors by one lease."""
        specs = dict(zip(keys, self._store.specs(keys), strict=True))
        together: list[str] = []
        for number, key in enumerate(keys, 1):
            together.append(key)
            nbytes = sum(spec.nbytes for one in together if (spec := specs[one]) is not None)
            if number == len(keys) or len(together) == READ_TOGETHER or nbytes >= READ_BYTES:
                yield from zip(together, self._read(together), strict=True)
                together = []

    def _read(self, keys: list[str]) -> list[str | None]:
        try:
            with self._store.lease(keys) as tensors:
                found: list[str | None] = [digest_of(tensor) for tensor in tensors]
                del tensors
            return found
        except TieredError:  # the values of one that cannot be read are like no others
            return [None] if len(keys) == 1 else [one for key in keys for one in self._read([key])]

    def await_resume(self) -> None:
        """Note that the optimizer and others still have to be loaded from the record: see ``before``."""
        self.awaited, self.before = True, None

    def resumed(self) -> None:
        """End ``await_resume``."""
        self.awaited, self.before = False, None

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Delete the record within a block that applies a pending update, or deletes what the record does not need."""
        if (self.awaited or self.current) and self.before is None and self.key in self._store:
            self.before = self._store.get(self.key)
        self._applying = True
        try:
            self.invalidate()
            yield
        finally:
            self._applying = False

    def invalidate(self) -> None:
        """Delete the record, because a tensor of the model is about to change."""
        if not self._applying:
            if self.refuse is not None:
                self.refuse()
            self.resumed()
        self.note()
        if self.key in self._store:
            self._store.delete(self.key, owner=self.owner)


class ParameterStorage(Protocol):
    """Where one unit's parameters come from. ``materialize`` and ``close`` are called in turn."""

    def prefetch(self) -> None:
        """Begin what ``materialize(Access.READ)`` will need, because it is called soon."""
        ...

    def give_up(self) -> None:
        """Undo ``prefetch``, because ``materialize`` will not be called, or would return values that are not right any more."""
        ...

    def restored(self) -> None:
        """Drop every note about stale values, because the store was rolled back to a commit."""
        ...

    def refresh(self) -> None:
        """Fetch the parts of the unit that other processes updated. All processes call it."""
        ...

    def materialize(self, access: Access) -> torch.Tensor:
        """Return all of the unit in the top tier, as uint8. What is written to it under WRITE is taken over by ``write_back``.
        """
        ...

    def write_back(self, unit: torch.Tensor) -> None:
        """Take over ``unit``, which ``materialize`` returned for WRITE."""
        ...

    @property
    def unsaved(self) -> bool:
        """Whether what ``materialize`` returned is the store's own memory, and no tier below has its bytes, or is being given
        them: what is written to it now reaches the store, whatever writes."""
        ...

    @property
    def saving(self) -> bool:
        """Whether that memory is what a commit that is under way has yet to write."""
        ...

    def close(self) -> None:
        """Give back what ``materialize`` took. Idempotent, also where ``materialize`` was interrupted."""
        ...

    def shard(self, access: Access) -> AbstractContextManager[torch.Tensor]:
        """Lease what this process updates of the unit, as it is in the store (uint8), where updates are computed."""
        ...

    def shard_beside(self, gradient: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        """Lease, at once, the stored gradient of that key and what is updated with it, which ``shard`` leases for WRITE. One
        after the other, the first could lie where neither side of it has room for the second."""
        ...

    def beside(self, key: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        """Lease, at once, the tensor of that key, to write to it, and what ``shard`` leases, to read it."""
        ...


class Local:
    """Parameters that are in the store as they are used: materializing them is a lease without a copy. ``updates``: the store,
    where updates are computed."""

    def __init__(self, store: TieredStore, key: str, checkpoint: CheckpointRecord, updates: TensorStore) -> None:
        self._store, self._top, self._key = store, in_top_tier(store, checkpoint.owner), key
        self._checkpoint, self._updates = checkpoint, updates
        self._lease = Opened()

    def prefetch(self) -> None:
        """Do nothing: the store prefetches by itself."""

    def give_up(self) -> None:
        """Do nothing: ``prefetch`` began nothing."""

    def restored(self) -> None:
        """Do nothing: all is in the store."""

    def refresh(self) -> None:
        """Do nothing: no other process updates the unit."""

    def materialize(self, access: Access) -> torch.Tensor:
        return self._lease.open(self._leased(self._top, access))

    def write_back(self, unit: torch.Tensor) -> None:
        """Do nothing: ``unit`` is the store's own memory."""

    @property
    def unsaved(self) -> bool:
        return self._lease.unsaved

    @property
    def saving(self) -> bool:
        return self._lease.saving

    def close(self) -> None:
        self._lease.close()

    def shard(self, access: Access) -> AbstractContextManager[torch.Tensor]:
        return self._leased(self._updates, access)

    def shard_beside(self, gradient: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        self._checkpoint.invalidate()
        return self.beside(gradient)

    def beside(self, key: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        return pair(self._updates, key, self._key)

    def _leased(self, store: TensorStore, access: Access) -> AbstractContextManager[torch.Tensor]:
        if access is Access.WRITE:
            self._checkpoint.invalidate()
        return store.lease(self._key, access=access)


class Replicated(Local):
    """Parameters that each rank's store has all of, while each rank updates its share. The updated shares are gathered, in host
    memory, before the parameters are used again."""

    def __init__(
        self, store: TieredStore, key: str, checkpoint: CheckpointRecord, updates: TensorStore, plan: UnitPlan, ranks: Ranks
    ) -> None:
        super().__init__(store, key, checkpoint, updates)
        self._ranks = ranks
        share = plan.share_nbytes
        self._share = slice(ranks.rank * share, (ranks.rank + 1) * share)
        self._stale = False

    def restored(self) -> None:
        self._stale = False

    def refresh(self) -> None:
        if self._stale:
            with self._leased(in_dram(self._store, self._checkpoint.owner), Access.WRITE) as unit:
                self._ranks.gather(unit, unit[self._share], f"the updated parameters of {self._key!r}").wait()
                del unit
            self._stale = False

    def materialize(self, access: Access) -> torch.Tensor:
        assert not self._stale
        return super().materialize(access)

    @contextmanager
    def shard(self, access: Access) -> Iterator[torch.Tensor]:
        with super().shard(access) as unit:
            self._stale |= access is Access.WRITE
            share = unit[self._share]
            del unit
            yield share
            del share

    @contextmanager
    def shard_beside(self, gradient: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with super().shard_beside(gradient) as both:
            self._stale = True
            yield both
            del both

    @contextmanager
    def beside(self, key: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with super().beside(key) as both:
            found = both[0], both[1][self._share]
            del both
            yield found
            del found


class AllGathered:
    """Parameters of which each rank's store has its share. All shares are gathered into a tensor in host memory, which goes to
    the top tier and is deleted after use: where DRAM is the top tier, before it could be written to the disk."""

    def __init__(
        self, store: TieredStore, key: str, checkpoint: CheckpointRecord, updates: TensorStore, plan: UnitPlan, ranks: Ranks
    ) -> None:
        self._top, self._key, self._checkpoint, self._ranks = in_top_tier(store, checkpoint.owner), key, checkpoint, ranks
        self._updates, self._host = updates, in_dram(store, checkpoint.owner)
        self._gathered = f"{key}/gathered"
        self._nbytes = plan.stored_nbytes
        share = plan.share_nbytes
        self._share = slice(ranks.rank * share, (ranks.rank + 1) * share)
        self._on_top = store.statistics().tiers[0].name == "dram"
        self._room = ExitStack()
        self._lease = ExitStack()  # of that room
        self._sources = ExitStack()
        self._begun: tuple[torch.Tensor, Under] | None = None

    def prefetch(self) -> None:
        self._begin_gather(ahead=True)

    def _begin_gather(self, ahead: bool) -> None:
        if self._begun is not None:
            return
        with ExitStack() as room, ExitStack() as lease, ExitStack() as sources:
            room.enter_context(self._made())
            whole = lease.enter_context(self._host.lease(self._gathered, access=Access.WRITE))
            own = sources.enter_context(self._host.lease(self._key))
            what = f"parameters of {self._key!r}{self._ranks.phase}"
            self._begun = whole, self._ranks.gather(whole, own, what, ahead=ahead)
            del whole, own
            self._room, self._lease, self._sources = room.pop_all(), lease.pop_all(), sources.pop_all()

    def give_up(self) -> None:
        if self._begun is not None:
            _, under = self._begun
            try:
                under.wait()  # it writes to the pool
            finally:
                self._begun = None
                self._sources.close()
                self.close()

    def restored(self) -> None:
        """Do nothing: nothing is known that is not in the store."""

    def refresh(self) -> None:
        """Do nothing: the shares are gathered at each use."""

    def materialize(self, access: Access) -> torch.Tensor:
        self._begin_gather(ahead=False)
        assert self._begun is not None
        whole, under = self._begun
        try:
            under.wait()
        except BaseException:
            self._begun = None
            self.close()
            raise
        finally:
            self._begun = None
            self._sources.close()
        if self._on_top:
            return whole
        del whole, under  # its memory may move
        try:
            self._lease.close()
            return self._lease.enter_context(self._top.lease(self._gathered, access=Access.WRITE))
        except BaseException:
            self.close()
            raise

    def write_back(self, unit: torch.Tensor) -> None:
        with self.shard(Access.WRITE) as own:
            own.copy_(unit[self._share])
            del own

    unsaved = saving = False
    """What is gathered is a copy."""

    def close(self) -> None:
        self._lease.close()
        self._room.close()

    def shard(self, access: Access) -> AbstractContextManager[torch.Tensor]:
        if access is Access.WRITE:
            self._checkpoint.invalidate()
        return self._updates.lease(self._key, access=access)

    def shard_beside(self, gradient: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        self._checkpoint.invalidate()
        return self.beside(gradient)

    def beside(self, key: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        return pair(self._updates, key, self._key)

    @contextmanager
    def room(self) -> Iterator[torch.Tensor]:
        """Give memory for all of the unit in host memory."""
        with self._made(), self._host.lease(self._gathered, access=Access.WRITE) as whole:
            yield whole
            del whole

    @contextmanager
    def _made(self) -> Iterator[None]:
        self._host.create(self._gathered, TensorSpec("uint8", (self._nbytes,), 1))
        try:
            yield
        finally:
            self._host.delete(self._gathered)


class _Beside:
    """Memory of torch's beside the budget of a store that is open for reading. The largest piece that was given back is used
    again: of new memory the operating system clears each page when it is first written to, which takes as long as to unpack
    what is written there."""

    LEAST = 1 << 20
    """Bytes: smaller pieces come from torch each time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[torch.Tensor] = []

    @staticmethod
    def of(store: TieredStore) -> _Beside:
        return store.attached.made(_Beside, lambda: _Beside(store.device))

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory, uint8, with at least ``nbytes``."""
        if nbytes >= self.LEAST and self._spare:
            spare = self._spare.pop()
            if spare.numel() >= nbytes:
                return spare
        with torch.inference_mode(False):  # else nobody could write to it once inference mode has ended
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give(self, memory: torch.Tensor) -> None:
        """Take back what ``take`` returned, unless another tensor shows it still, or it is the smaller one."""
        if memory.device.type != "cpu" or memory.numel() < self.LEAST or any(count > 0 for count in users_of(memory)):
            return
        if not self._spare or self._spare[-1].numel() < memory.numel():
            self._spare[:] = [memory]


class Cast:
    """Parameters that have other types in the store, where ``source`` finds them, or are quantised there. They are cast into a
    tensor in the top tier, which is deleted after use. In a store that is open for reading, which makes no tensors, they are
    cast into memory of torch's, beside the store's budget: as much as the units that are in use at a time."""

    def __init__(self, source: ParameterStorage, store: TieredStore, owner: Owner, key: str, plan: UnitPlan) -> None:
        self._source, self._store, self._plan = source, in_top_tier(store, owner), plan
        self._key = f"{key}/converted"
        self._lease = Opened()
        self._beside = _Beside.of(store) if store.access is Access.READ else None
        self._memory: torch.Tensor | None = None
        self._reading = False  # ``source`` is materialized, or was when an interruption came

    def prefetch(self) -> None:
        self._source.prefetch()

    def give_up(self) -> None:
        self._source.give_up()

    def restored(self) -> None:
        self._source.restored()

    def refresh(self) -> None:
        self._source.refresh()

    def materialize(self, access: Access) -> torch.Tensor:
        self.close()
        try:
            converted = self._room()
            stored = self._open_source(Access.READ)
            for placement in self._plan.placements:
                placement.load(stored, placement.view(converted))
            del stored
            self._close_source()
        except BaseException:
            self.close()
            raise
        return converted

    def _room(self) -> torch.Tensor:
        if self._beside is not None:
            self._memory = self._beside.take(self._plan.nbytes)
            return self._memory[: self._plan.nbytes]
        self._store.create(self._key, TensorSpec("uint8", (self._plan.nbytes,), 1))
        return self._lease.open(self._store.lease(self._key, access=Access.WRITE))

    def write_back(self, unit: torch.Tensor) -> None:
        self._plan.refuse_writing()
        stored = self._open_source(Access.WRITE)
        try:
            for placement in self._plan.placements:
                placement.stored_view(stored).copy_(placement.view(unit))
            self._source.write_back(stored)
        finally:
            del stored
            self._close_source()

    def _open_source(self, access: Access) -> torch.Tensor:
        self._close_source()
        self._reading = True
        return self._source.materialize(access)

    def _close_source(self) -> None:
        if self._reading:
            self._source.close()
            self._reading = False

    unsaved = saving = False
    """What is cast is a copy."""

    def close(self) -> None:
        self._close_source()
        self._lease.close()
        if self._beside is not None:
            memory, self._memory = self._memory, None
            if memory is not None:
                self._beside.give(memory)
            return
        if self._key in self._store:
            self._store.delete(self._key)

    def shard(self, access: Access) -> AbstractContextManager[torch.Tensor]:
        if access is Access.WRITE:
            self._plan.refuse_writing()
        return self._source.shard(access)

    def shard_beside(self, gradient: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        self._plan.refuse_writing()
        return self._source.shard_beside(gradient)

    def beside(self, key: str) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        return self._source.beside(key)
