"""Hold and drop one unit's parameters, apply its pending update, and update units within backward.

A unit that nobody holds shows placeholders, whose stale reads are loud. A held unit shows the store's own memory.
``optimizer.step()`` defers an update, and the next ``hold`` applies it.

Writes to a held unit are told by its bytes. torch counts the writes to a tensor, and misses many: to ``.data`` of it or of a
view, by NumPy, DLPack or a storage, by ``apply_``, by fused optimizers and code in C++. A unit that no tier below has yet needs
no telling: what is in memory is what the store will keep.

Updates within backward (``BackwardUpdates``): a parameter's gradient is final when autograd accumulates it, once per backward
pass. Its old value may still be needed: by what autograd saved (of this parameter, or of another one in its unit), and by
aliases that ``torch.utils.checkpoint`` keeps. So a unit is updated when none of these is left and as many gradients have
arrived as last time; what is left at the end of backward is updated there. Reentrant checkpointing runs backward passes inside
of backward, each of which accumulates by itself; units that take part in it wait for the end.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from tiered.errors import MisuseError
from tiered.store import TieredStore
from tiered.tensors.digests import digests
from tiered.types import Access
from tiered.zero.collectives import Term
from tiered.zero.intent import Intent, all_or_none
from tiered.zero.paging.gradients import UnitGradients
from tiered.zero.paging.saved_tensors import place_of, refuse_tracing, refuse_transforms
from tiered.zero.paging.sharding import Partition
from tiered.zero.paging.storage import Cast, CheckpointRecord, ParameterStorage, TensorStore, host
from tiered.zero.paging.tensors.compiling import traced
from tiered.zero.paging.tensors.parameters import give, paged_class
from tiered.zero.paging.tensors.stored import no_copy
from tiered.zero.paging.units import Placement, UnitPlan, even_chunks
from tiered.zero.paging.update import Pending, States, Update
from tiered.zero.rules.forms import StateForm, updates_whole
from tiered.zero.rules.rule import UpdateRule, terms_of

__all__ = ["BackwardUpdates", "DevicePlaceholder", "Held", "Placeholder", "Stepper", "Unit"]

NARROW = (torch.bfloat16, torch.float16)
"""Types of parameters that may have masters, which must not be used after a write to the parameter."""

APART = {"cpu", "cuda"}
"""Devices on which a parameter can have a storage of its own on memory that is another tensor's. On others the parameters of a
unit share its storage."""


class Placeholder:
    """Tensor of a given shape that takes the memory of one element: NaN (a stale read is loud), or 0.

    Its memory is its own, so what is written to it spoils nothing else, and ``intact`` tells. ``address`` identifies it among
    all that live: every tensor on it, however it was made, has ``untyped_storage().data_ptr() == address``.
    """

    @staticmethod
    def on(device: torch.device, shape: torch.Size, dtype: torch.dtype) -> Placeholder | DevicePlaceholder:
        return Placeholder(shape, dtype) if device.type == "cpu" else DevicePlaceholder(device, shape, dtype)

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            one = torch.zeros((), dtype=dtype, device="cpu")
            if dtype.is_floating_point or dtype.is_complex:
                one.fill_(float("nan"))
            self.pattern = bytes(one.view(1).view(torch.uint8).tolist())
            self._memory = (ctypes.c_char * dtype.itemsize).from_buffer_copy(self.pattern)
            self.address = ctypes.addressof(self._memory)
            self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(dtype).view(()).expand(shape)

    @property
    def intact(self) -> bool:
        """Return whether nobody wrote to the placeholder."""
        return self._memory.raw == self.pattern

    def when_unused(self, call: Callable[..., object], *args: object) -> None:
        """Call ``call`` once this object and the last tensor on its memory are gone, perhaps in the garbage collector: it must
        not block."""
        weakref.finalize(self._memory, call, *args).atexit = False

    def memory(self) -> weakref.ref[ctypes.Array[ctypes.c_char]]:
        """Return a reference that is dead once nobody uses the memory any more."""
        return weakref.ref(self._memory)


class DevicePlaceholder:
    """Placeholder in a device's memory. Whether it was written to is checked only where it has one element, because that waits
    for the device; torch itself refuses writes to a tensor whose elements share their memory. On the meta device there is
    nothing to write to."""

    def __init__(self, device: torch.device, shape: torch.Size, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            empty = not (dtype.is_floating_point or dtype.is_complex)
            one = torch.full((), 0 if empty else float("nan"), dtype=dtype, device=device)
            self.address = place_of(one.untyped_storage())
            self.tensor = one.expand(shape)
            self._first = None if empty or one.is_meta else one  # of whole numbers any could be meant

    @property
    def intact(self) -> bool:
        return self._first is None or self.tensor.numel() != 1 or bool(self._first.isnan())


Stepper = Callable[[Placement], tuple[Update, Callable[[], None]]]
"""A method of an optimizer that updates within backward: the next step of a parameter, with the hyper-parameters that there are
now, and what counts it when it is called, once or twice."""


class Average(Protocol):
    """The average of a unit's parameters, a tensor of the store."""

    key: str

    @property
    def made(self) -> int:
        """How many updates are in the average."""
        ...

    @property
    def due(self) -> bool:
        """Whether values that the parameters have now are still to be taken into the average."""
        ...

    @property
    def halfway(self) -> bool:
        """Whether an exception struck while they were taken into it."""
        ...

    @property
    def applied(self) -> bool:
        """Whether the model computes with the average in place of its parameters."""
        ...

    @property
    def storage(self) -> ParameterStorage:
        """Where the average comes from, as long as it is ``applied``."""
        ...

    def is_idle(self, storage: ParameterStorage, updates_made: int) -> bool:
        """Return whether it stays as it is because the parameters have not changed; what is due is taken into it then."""
        ...

    def bring(self, storage: ParameterStorage, updates_made: int) -> None:
        """Take into it what is due."""
        ...

    def refuse_writing(self) -> None:
        """Raise MisuseError where it is ``applied``, because somebody would write to a parameter."""
        ...


class SavedReference(Protocol):
    """What a graph saved of the parameter at ``placement``: ``version`` of the unit, ``saved``: of the tensor."""

    placement: Placement
    saved: int
    version: int


class _Witness:
    """What tells of writes to a tensor that was got as ``parameter.data``: a tensor with its version, and without memory."""

    __slots__ = ("_tensor", "_version", "placement", "storage")

    def __init__(self, placement: Placement, values: torch.Tensor, version: int) -> None:
        self.placement, self._version = placement, version
        self.storage = StorageWeakRef(values.untyped_storage())  # type: ignore[no-untyped-call]
        self._tensor = values.detach()
        self._tensor.data = torch.empty(0, dtype=values.dtype, device=values.device)  # keeps the version counter

    @property
    def written(self) -> bool:
        return self._tensor._version != self._version

    def look_again(self) -> None:
        """Count as written what is written from here on."""
        self._version = self._tensor._version


class Held(Enum):
    """Who has the parameters of a unit, and what that costs. A unit is in a state from before the first parameter gets its
    memory until after the last one has lost it: where an exception strikes between, ``Unit.held`` is 0.

    Bytes, by the unit's ``UnitPlan``. In any state: ``stored_nbytes`` somewhere in the store (``share_nbytes`` where each rank
    has a share), what ``gradients.py`` stores of it, and one element of ordinary memory for each parameter. While it is
    held: these bytes are in use in the top tier, and nothing else may have their room:

    - ``Local`` (stored as used): ``nbytes``, where the store has them.
    - ``Cast``: ``nbytes`` more, and ``stored_nbytes`` until they are filled; beside the budget where the store is open for
      reading.
    - ``AllGathered``: ``stored_nbytes`` more, and this rank's share until all have arrived.

    In a backward of several ranks there are ``nbytes`` of gradients of this rank more (``LocalGradients``).
    """

    BY_STORE = auto()
    """Nobody but the store. Parameters are placeholders of one element. To hold the unit costs a lease, which reads it where
    the top tier has none, and the pending update."""
    FOR_READING = auto()
    """Parameters are on memory that is leased for READ. To drop the unit costs a digest of what a tier below has, too, and a
    write where somebody wrote."""
    FOR_LAYERS = auto()
    """As for reading, the whole unit is on memory that is leased for READ; but parameters that only layers of torch ask for
    show none of it, and have no digest. A parameter that somebody has then is one in the store to him, and may be written to:
    it is shown first, with a digest that tells."""
    FOR_WRITING = auto()
    """Parameters are on memory that is leased for WRITE: nobody else has it, no other tier keeps the bytes of before, and
    masters are made anew where bytes have changed."""


class Unit:
    """Parameters that are paged together.

    While nobody holds the unit its parameters are NaN without memory (a stale read is loud); while somebody does, they
    are on the store's own memory, in the top tier: each has a storage that begins and ends with it, as in memory, so that an
    offset counts from its first element and reaches no other parameter. ``update_store``: the store as updates have it, where
    gradients and states are leased. ``version`` counts optimizer steps: what a graph saved before one cannot be used after it.
    """

    def __init__(
        self,
        store: TieredStore,
        update_store: TensorStore,
        prefix: str,
        plan: UnitPlan,
        chunk: int,
        checkpoint: CheckpointRecord,
        partition: Partition,
        intent: Intent,
    ) -> None:
        self.store, self.plan, self._checkpoint, self._partition = store, plan, checkpoint, partition
        self.owner = checkpoint.owner
        self.key = f"{prefix}/param/{plan.name}"
        self.version = 0
        self.updates_made = 0
        self.intent = intent
        self.pending: Pending | None = None
        self.average: Average | None = None
        """The average of the parameters, which follows each update that is due before it."""
        self.base: torch.Tensor | None = None
        self.memory: dict[Placement, torch.Tensor] = {}
        """While the unit is held: the bytes of each parameter, a storage of its own on the memory of ``base``."""
        self.places: dict[int, Placement] = {}
        """By the address of that storage: the parameters that have elements."""
        self._apart = store.device.type in APART
        self._extents = [(p, p.offset, p.offset + p.nbytes) for p in plan.placements]
        self.parts = plan.parts(partition.rank)
        storage = partition.stored(store, update_store, self.key, plan, checkpoint)
        self.storage: ParameterStorage = Cast(storage, store, checkpoint.owner, self.key, plan) if plan.converted else storage
        self._source = self.storage
        """Where the values are from that the unit is held with, or was last: the average's, while that is applied."""
        self.gradients = UnitGradients(
            update_store, f"{self.key}/grad", plan.placements, self.parts, checkpoint, self.apply_update
        )
        self.arriving = partition.arriving(store, checkpoint.owner, self.key, plan, self.gradients)
        self.held = 0
        """The number of holds that are open."""
        self.state = Held.BY_STORE
        self._digests: dict[Placement, int] = {}
        """Of the bytes of parameters as the store has them, if ``_digested`` is the unit's version; within a hold for writing,
        of those whose masters had their values before."""
        self._digested = -1
        self._told: Collection[Placement] = plan.placements
        """While the unit is held: the parameters of which a write is told by a digest."""
        self._saving = False
        """Whether a commit had yet to write the memory of the unit when it was held."""
        self._narrow = [p for p in plan.placements if p.stored in NARROW]
        self.aside: dict[Placement, torch.Tensor | None] = {}
        """Parameters that show no memory although the unit is held, and what layers were given of them."""
        self._versions: list[int] = []
        self._left: list[int] | None = None
        """Versions of the parameters when the unit was last dropped, where somebody kept a tensor on their memory."""
        self._memories: dict[int, StorageWeakRef] = {}
        """What the parameters were views of when the unit was dropped, by its address, as far as anything still is."""
        self._placeholders = {p: Placeholder.on(store.device, p.shape, p.dtype) for p in plan.placements}
        self._kinds = {p: type(p.parameter) for p in plan.placements}
        """The class that each parameter has while it is held."""
        self._steppers: dict[Placement, weakref.WeakMethod[Stepper]] = {}
        self.counted_by: dict[Placement, weakref.ref[Any]] = {}
        """The optimizer that counts the steps of a parameter, once one has made a step or loaded a state."""
        self._lent: list[StorageWeakRef] = []
        self.references: set[weakref.ref[SavedReference]] = set()  # what graphs saved of it, which has no memory of its own
        self._data: list[tuple[Placement, torch.Tensor, int]] = []
        """What was given as ``parameter.data`` since the unit is held, with its version then."""
        self._witnesses: list[_Witness] = []
        """Of those that somebody kept when the unit was dropped."""
        kinds = {placement.stored for placement in plan.placements}
        self.states = States(update_store, self.key, list(self.parts.values()), even_chunks(plan.elements, chunk), kinds)
        self._cut = plan.cut if plan.shares > 1 else set()
        if self._cut:
            self.states.gather = partial(partition.whole, plan)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        raise no_copy()

    def kind(self, placement: Placement) -> type[nn.Parameter]:
        """Return the class that a parameter has while it is held."""
        return self._kinds[placement]

    # -- parameters --------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> ParameterStorage:
        """Where the values are from that the next ``hold`` gives: the parameters, or their average while that is applied."""
        return self.average.storage if self.average is not None and self.average.applied else self.storage

    @property
    def storages(self) -> list[ParameterStorage]:
        """Where values of the unit are from: the parameters, and their average where there is one."""
        return [self.storage] if self.average is None else [self.storage, self.average.storage]

    @property
    def used_key(self) -> str:
        """The key of these values."""
        return self.average.key if self.average is not None and self.average.applied else self.key

    @property
    def _source_key(self) -> str:
        return self.key if self._source is self.storage or self.average is None else self.average.key

    @property
    @traced
    def in_hand(self) -> bool:
        """Return whether all parameters of the unit have their memory, also where an interruption left them so."""
        return self.state is not Held.BY_STORE and not self.aside

    def hold_for_layers(self, placements: Iterable[Placement]) -> None:
        """Hold the unit for reading, and give parameters their memory, ``placements`` only when they are asked for: nobody can
        have written to one that was ``apart`` alone, which is for code that does not write."""
        if self.held:
            self.held += 1
        else:
            self._hold_anew(Held.FOR_LAYERS, placements)

    def apart(self, placement: Placement) -> torch.Tensor:
        """Return a tensor on the memory of one that has none itself yet, as long as the unit is held."""
        made = self.aside[placement]
        if made is None:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return self.apart(placement)
            made = self._values(placement).detach()  # else what is viewed of it needs no gradient, and products go another way
            with torch._C.DisableTorchFunctionSubclass():
                self.aside[placement] = made.requires_grad_(placement.parameter.requires_grad)
        return made

    def show(self, placements: Collection[Placement]) -> None:
        """Give parameters their memory that have none although the unit is held."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                self.show(placements)
            return
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                self.show(placements)
            return
        for placement in placements:
            if placement in self.aside:
                if placement in self._told and placement not in self._digests:
                    self._digests |= self._digests_of([placement])
                self._give(placement)
                del self.aside[placement]

    def hold(self, access: Access = Access.READ) -> None:
        """Give the parameters their memory, after applying any pending update. Calls nest."""
        if access is Access.WRITE:
            self.plan.refuse_writing()
        if not self.held:
            self._hold_anew(Held.FOR_WRITING if access is Access.WRITE else Held.FOR_READING)
            return
        # Not refused for layers: a function of torch that writes to a parameter which shows no memory asks for it here, in
        # forward. ``show`` takes the digest first, so ``drop`` finds the write and lands it, as any that is made in forward.
        if access is Access.WRITE and self.state is Held.FOR_READING:
            raise MisuseError(f"the parameters of {self.plan.name!r} are in use: write to them outside forward and backward")
        if self.aside:
            self.show(list(self.aside))
        self.held += 1

    def _hold_anew(self, state: Held, aside: Iterable[Placement] = ()) -> None:
        """Hold the unit, which nobody holds. ``aside``: the parameters that get no memory yet."""
        refuse_tracing()
        refuse_transforms()
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():  # of selective checkpointing, say, which counts what a module computes
                self._hold_anew(state, aside)
            return
        if self.state is not Held.BY_STORE:  # an interruption left it so
            self.let_go()
        if self.average is not None and state is Held.FOR_WRITING:
            self.average.refuse_writing()
        for placement in self.plan.placements:
            self.refuse_written(placement)
        self.apply_update()
        self._source = self.used
        self.state, self.aside = state, dict.fromkeys(aside)
        try:
            self._open()
            changed = self._changed_since()
        except BaseException:
            self.give_up()
            raise
        if not changed:
            self.held = 1
            return
        self._take_over(changed)
        self._hold_anew(state)

    def _open(self) -> None:
        if torch.is_inference_mode_enabled():  # as inference tensors, parameters would lead torch's products another way
            with torch.inference_mode(False), torch.no_grad():
                self._open()
            return
        access = Access.WRITE if self.state is Held.FOR_WRITING else Access.READ
        averaged = self._source is not self.storage
        known = self._digests if self._digested == self.version and not averaged else {}
        if access is Access.WRITE:  # what follows writes, whatever becomes of it
            kept = [p for p, part in self.parts.items() if part not in self.states.stale_masters and p.packing is None]
            self._told = [p for p in kept if p.stored in NARROW]
            self.states.stale_masters.update(self.parts.values())
            self.version += 1
        self._digested, self._digests = -1, {}
        self.base = self._source.materialize(access)
        if access is Access.READ:
            lands = not self.plan.read_only and not averaged and self._source.unsaved
            self._told, self._saving = self._narrow if lands else self.plan.placements, self._source.saving
        own = _storage_of_its_own if self._apart else torch.Tensor.detach
        self.memory = {placement: own(self.base[begin:end]) for placement, begin, end in self._extents}
        address = _address(self.base)
        self.places = {address + begin * self._apart: placement for placement, begin, end in self._extents if end > begin}
        for placement in self._kinds:
            if placement not in self.aside:
                self._give(placement)
        self._versions = self._versions_now()
        missing = [placement for placement in self._told if placement not in known and placement not in self.aside]
        self._digests = {p: known[p] for p in self._told if p in known} | self._digests_of(missing)
        if access is Access.READ and not averaged:
            self._digested = self.version

    def _versions_now(self) -> list[int]:
        """Return the versions of the parameters, in memory or not."""
        with torch._C.DisableTorchFunctionSubclass():
            return [placement.parameter._version for placement in self.plan.placements]

    def _values(self, placement: Placement) -> torch.Tensor:
        """Return a tensor on the memory of a parameter of the unit, which is held."""
        return self.memory[placement].view(placement.dtype).as_strided(placement.shape, placement.stride)

    def _give(self, placement: Placement) -> None:
        """Give a parameter its memory."""
        give(placement.parameter, self._kinds[placement], self._values(placement))

    def _digests_of(self, placements: Collection[Placement]) -> dict[Placement, int]:
        """Return digests of what is in memory now of parameters of the unit, which is held."""
        return dict(zip(placements, digests([self.memory[placement] for placement in placements]), strict=True))

    def _changed_since(self) -> list[Placement]:
        """Return the parameters that were written to since the unit was dropped, through tensors that somebody kept."""
        before = self._versions if self._left is None else self._left
        changed = [p for p, now, then in zip(self.plan.placements, self._versions, before, strict=True) if now != then]
        return changed + [one.placement for one in self._witnesses if one.written]

    def _take_over(self, changed: Collection[Placement]) -> None:
        """Have the store keep the memory as it is, into which a tensor that somebody kept was perhaps written. Raises
        MisuseError unless it surely was, because that tensor shows this very memory."""
        assert self.base is not None
        self.show(list(self.aside))
        shown = self._is_shown()
        values = {placement: placement.parameter.detach().clone() for placement in changed}
        for one in self._witnesses:
            one.look_again()
        self.give_up()
        self.plan.refuse_writing()
        self._land(values)
        if not shown:
            _refuse_kept(next(iter(values)))

    def _is_shown(self) -> bool:
        """Return whether all that somebody kept since an earlier hold is on the memory that the unit has now."""
        return self.base is not None and set(self._kept_memories()) == {_address(self.base)}

    def _kept_memories(self) -> list[int]:
        """Return the addresses of what somebody kept a tensor of."""
        self._memories = {at: one for at, one in self._memories.items() if not one.expired()}  # type: ignore[no-untyped-call]
        return list(self._memories)

    @property
    def is_kept(self) -> bool:
        """Whether nobody holds the unit, and a tensor that somebody kept since an earlier hold is on memory of it."""
        return not self.held and bool(self._kept_memories())

    def refuse_hidden(self) -> None:
        """Raise MisuseError where a tensor that somebody kept was written to since the unit was dropped, and an update that is
        computed in other memory (of another tier, of another form) would hide it."""
        now = self._versions_now()
        if self._left is None or self._left == now:
            return
        with self.storage.shard(Access.READ) as updated:
            hidden = _address(updated) not in self._memories
            del updated
        if hidden:
            _refuse_kept(next(p for p, was, then in zip(self.plan.placements, self._left, now, strict=True) if was != then))

    def shown_by(self, tensor: torch.Tensor, address: int) -> Placement | None:
        """Return the parameter whose memory ``tensor`` shows, if one's of this unit; its storage is at ``address``."""
        if self._apart or address not in self.places:
            return self.places.get(address)
        at = int(tensor.storage_offset()) * tensor.dtype.itemsize
        return next((placement for placement, begin, end in self._extents if begin <= at < end), None)

    def lend(self, placement: Placement, values: torch.Tensor) -> None:
        """Note that ``values``, which show a parameter's memory, can be written to without a trace in the parameter."""
        if self.held and self.state is not Held.FOR_WRITING and not values.is_inference():
            self._data.append((placement, values, values._version))

    def drop(self) -> None:
        """Undo one ``hold``; the last one takes the parameters' memory away again."""
        if self.held > 1:
            self.held -= 1
            return
        assert self.base is not None
        self.let_go()

    def let_go(self) -> None:
        """Drop the unit, however often it is held and whatever an interruption left of it."""
        if self.state is Held.BY_STORE:
            return
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                self.let_go()
            return
        written: dict[Placement, torch.Tensor] = {}
        if self.base is not None:
            if self._steppers:
                self._lent = [*_living(self._lent), StorageWeakRef(self.base.untyped_storage())]  # type: ignore[no-untyped-call]
            try:
                if self.state is Held.FOR_WRITING:
                    self._copy_replaced(self.base)
                    self._keep_masters()
                    self.storage.write_back(self.base)
                    self._outdate()
                elif self.held:
                    written = self._written()
            except MisuseError:
                self.give_up()
                raise
        if not written:
            self.give_up()
            return
        if self._source is not self.storage:
            self._refuse_for_average(next(iter(written)))
        if self.plan.read_only or self.store.access is Access.READ:
            self.give_up()
            self._refuse_for_reading(next(iter(written)))
        before, saving = self.intent.spoiled, self._saving or self.storage.saving
        self.intent.spoil(
            f"an exception struck while what was written to {self.plan.name!r} was being stored; call zero.rollback"
        )
        self.give_up()
        self._land(written)
        self.intent.spoil(before)
        if saving:
            raise MisuseError(
                f"parameter {next(iter(written)).name!r} was written to in forward or backward while commit_async had yet to "
                "save it, so that commit may have values of before or after the write; the store has those of now: wait for "
                "the future of commit_async before such a forward, and commit again"
            )

    def _refuse_for_average(self, written: Placement) -> NoReturn:
        """Raise MisuseError for a parameter that was written to while it had the values of its average, which are read anew
        when they are used next. What no tier below has is lost."""
        lost, key = self._source.unsaved, self._source_key
        self.give_up()
        if lost:
            self.intent.spoil(
                f"the average of {written.name!r} was written to while the model computed with it; call zero.rollback"
            )
        else:
            self.store.offload([key])
        raise MisuseError(
            f"parameter {written.name!r} was written to while the model computed with the average of its weights "
            f"(EMA.applied){'' if lost else ', and the average is as before'}: write to parameters outside of that block"
        )

    def _refuse_for_reading(self, written: Placement) -> None:
        """Raise MisuseError for a parameter of a model for reading only, and have the unit read anew when it is used next."""
        self.store.offload([self.key])
        why = "the store is open for reading: to write to the model, open it without access='read'"
        try:
            self.plan.refuse_writing()
        except MisuseError as error:
            why = str(error)
        raise MisuseError(f"parameter {written.name!r} was written to, and has its values of before: {why}")

    @torch.no_grad()
    def _copy_replaced(self, base: torch.Tensor) -> None:
        """Copy into ``base`` the values of parameters that were given other ``.data`` while they could be written to."""
        for placement in self.plan.placements:
            if self._is_replaced(placement):
                placement.view(base).copy_(placement.parameter.clone())  # it may be the same memory in another order

    def _is_replaced(self, placement: Placement) -> bool:
        """Return whether a parameter that is held was given other ``.data``: other memory, or its own with other strides.
        Raises MisuseError where that is of another shape or type, or memory of another one in its unit."""
        parameter, memory = placement.parameter, self.memory.get(placement)
        if memory is None:
            return False  # an exception struck before it was given any
        shape, stride, dtype = parameter.shape, parameter.stride(), parameter.dtype
        apart = parameter.data_ptr() != memory.data_ptr()
        if not apart and (shape, stride, dtype) == (placement.shape, placement.stride, placement.dtype):
            return False
        if self._is_released(placement):
            return False
        assert self.base is not None
        if apart and 0 <= parameter.data_ptr() - self.base.data_ptr() < self.base.nbytes:
            raise MisuseError(
                f"parameter {placement.name!r} was given the .data of another parameter, and they are apart in the store; its "
                "values are as before: give it a copy (.clone()), or tie the modules, with one Parameter object, before "
                "zero.page"
            )
        _refuse_other_kind(placement)
        return True

    def _is_released(self, placement: Placement) -> bool:
        """Return whether a parameter has no memory: an exception struck as it was given, or taken away."""
        return _address(placement.parameter) == self._placeholders[placement].address

    def _keep_masters(self) -> None:
        """Keep the masters of parameters that nobody wrote to while the unit could be written to."""
        for placement, digest in self._digests_of(self._digests).items():
            if self._digests[placement] == digest:
                self.states.stale_masters.discard(self.parts[placement])

    def _written(self) -> dict[Placement, torch.Tensor]:
        """Return copies of the parameters that were changed while their memory is leased for reading."""
        written = {}
        now = self._digests_of([placement for placement in self._digests if placement not in self.aside])
        saved = self._saved_meanwhile()
        for placement, version in zip(self.plan.placements, self._versions, strict=True):
            parameter = placement.parameter
            if placement in self.aside:
                continue
            told = now[placement] != self._digests[placement] if placement in now else saved
            # Of what nothing may be written to a digest tells alone: peft sets a parametrization, and takes it away again.
            changed = told or (parameter._version != version and not self.plan.read_only)
            replaced = self._is_replaced(placement)
            if replaced or (changed and not self._is_released(placement)):
                written[placement] = parameter.detach().clone()
            if replaced:  # graphs saved the memory before, which in memory they would keep; what is assigned has no version
                for one in self._references_of(placement):
                    one.saved = -1
        return written

    def remember(self) -> None:
        """Have writes from here on be told by digests, because a commit gives a tier below what is in memory now."""
        memory = self.memory  # of one hold: a commit may come in another thread
        if self.held and self.state is not Held.FOR_WRITING and len(self._told) < len(self.plan.placements) and memory:
            shown = [placement for placement in memory if placement not in self.aside]
            now = dict(zip(shown, digests([memory[placement] for placement in shown]), strict=True))
            self._digests, self._told = {**now, **self._digests}, self.plan.placements

    def _saved_meanwhile(self) -> bool:
        """Return whether a tier below got bytes of the unit since it is held, perhaps those before an unnoticed write."""
        return len(self._told) < len(self.plan.placements) and self.state is not Held.FOR_WRITING and not self.storage.unsaved

    @torch.no_grad()
    def _land(self, written: dict[Placement, torch.Tensor]) -> None:
        """Write the values to the store. What a graph saved of a parameter before the write raises in backward, as in memory;
        what it saved afterwards, or of another parameter, is as good as before, although the unit has a new version."""
        good = self._saved_since(written)
        self.hold(Access.WRITE)
        try:
            assert self.base is not None
            for placement, values in written.items():
                placement.view(self.base).copy_(values)  # the write itself has changed the version of the parameter, or has not
        finally:
            self.drop()
        for saved in good:
            saved.version = self.version

    def _outdate(self) -> None:
        """Have what a graph saved before a write within this hold raise in backward, as ``_land``."""
        written = self._changed()
        if written:
            good = self._saved_since(written)
            self.version += 1
            for saved in good:
                saved.version = self.version

    def _saved_since(self, written: Collection[Placement]) -> list[SavedReference]:
        """Return what graphs saved of the values of now, of which ``written`` were written."""
        there = [saved for saved in (one() for one in list(self.references)) if saved and saved.version == self.version]
        return [saved for saved in there if self._is_present(saved, written)]

    def _references_of(self, placement: Placement) -> list[SavedReference]:
        """Return what graphs saved of the memory of a parameter since the unit is as it is."""
        there = (one() for one in list(self.references))
        return [saved for saved in there if saved and saved.version == self.version and saved.placement is placement]

    def _is_present(self, saved: SavedReference, written: Collection[Placement]) -> bool:
        """Return whether what a graph saved shows the values of now, of which ``written`` were written."""
        return saved.placement not in written or saved.saved == saved.placement.parameter._version

    def give_up(self) -> None:
        """Drop the unit without writing it back, because all was rolled back or nothing came of it."""
        if self.state is not Held.BY_STORE:
            # First: torch goes on after an exception in a forward hook that it runs because of another one, and what
            # follows has to hold the unit anew.
            self.held = 0
            lent = [_Witness(*one) for one in self._data]
            self._data.clear()
            if self.base is not None:
                self._left = None
                address = _address(self.base)
                if address not in self._kept_memories():
                    self._memories[address] = StorageWeakRef(self.base.untyped_storage())  # type: ignore[no-untyped-call]
                self._left = self._versions_now()
            self.release_parameters()
            self.gradients.let_nodes_go()
            self.base = None
            self.memory, self.places = {}, {}
            self.aside = {}
            self._source.close()
            if not self._kept_memories():
                self._left = None  # nobody kept anything: no write to the memory can come
            if lent or self._witnesses:
                self._witnesses = [one for one in (*self._witnesses, *lent) if not one.storage.expired()]  # type: ignore[no-untyped-call]
            self.state = Held.BY_STORE

    def discard(self) -> None:
        """Drop the unit as ``give_up``, because the store goes back to a commit: what was written to it goes, too."""
        known = [p for p in self._digests if p not in self.aside] if self.held and self.state is not Held.FOR_WRITING else []
        written = self.base is not None and self._digests_of(known) != {p: self._digests[p] for p in known}
        written |= self.held > 0 and self._saved_meanwhile()
        self.give_up()
        if written:
            self.store.offload([self._source_key])  # the store takes it for what it was

    def release_parameters(self) -> None:
        for placement in self._placeholders:
            self._release(placement)

    def _release(self, placement: Placement) -> None:
        """Take a parameter's memory away. No signal handler comes between: a parameter of its own class, whose reads nobody
        answers, is never seen with a placeholder."""
        give(placement.parameter, paged_class(self._kinds[placement]), self._placeholders[placement].tensor)

    def refuse_written_since(self, saved: SavedReference) -> None:
        """Raise MisuseError where a parameter was written to since a graph saved it, within one hold, at whose end it would be
        noticed otherwise."""
        if self.held and not self._is_present(saved, self._changed()):
            raise MisuseError(
                f"parameter {saved.placement.name!r} was written to after this graph was made: call backward before"
            )

    def _changed(self) -> set[Placement]:
        """Return the parameters that torch wrote to since the unit is held."""
        found = zip(self.plan.placements, self._versions, self._versions_now(), strict=True)
        return {placement for placement, before, now in found if before != now}

    def refuse_written(self, placement: Placement) -> None:
        """Raise MisuseError if a parameter that nobody holds was written to, or given other data; its values are as before."""
        placeholder = self._placeholders[placement]
        if placeholder.intact and _address(placement.parameter) == placeholder.address:
            return
        self.intent.ready()  # zero.unpage, which was interrupted, may have given it its values
        self._placeholders[placement] = Placeholder.on(self.store.device, placement.shape, placement.dtype)
        self._release(placement)
        raise MisuseError(
            f"parameter {placement.name!r} was written to, or given other data or another dtype, while its values were in the "
            "store, and the change is lost: change paged parameters with load_state_dict, and others before zero.page"
        )

    def forget_gradients(self, *, kept: bool = True) -> None:
        """Delete the stored gradients when neither a parameter nor a pending update refers to them any more. ``kept``: the last
        commit may do so."""
        if self.pending is None and not self.gradients.any:
            self.arriving.delete(kept=kept)

    # -- updates within backward ---------------------------------------------------------------------------------------------

    def claim(self, placement: Placement, stepper: Stepper | None) -> None:
        """Have ``stepper`` update the parameter within backward (None: nobody does). The last claim counts, while its object
        lives."""
        self._steppers.pop(placement, None)
        if stepper is not None:
            self._steppers[placement] = weakref.WeakMethod(stepper)

    def stepper(self, placement: Placement) -> Stepper | None:
        found = self._steppers.get(placement)
        return None if found is None else found()

    def in_use(self) -> bool:
        """Return whether something that does not hold the unit will look at the parameters' present values: a graph, or an
        alias."""
        return bool(self.references or _living(self._lent))

    def update(self, placements: Sequence[Placement]) -> None:
        """Update ``placements`` with the gradients that have arrived, and delete these; nobody holds the unit.

        Raises MisuseError, with nothing changed, where a gradient is not finite; what ``refuse_hidden`` raises, and
        ``apply_update``.
        """
        self.refuse_hidden()
        self.apply_update()
        for placement in placements:
            self.gradients.refuse_infinite(placement)
        updates: dict[Placement, Update] = {}
        deeds: list[Callable[[], object]] = []
        for placement in placements:
            stepper = self.stepper(placement)
            if stepper is not None:
                updates[placement], count = stepper(placement)
                deeds += [count, partial(self.gradients.spend, placement)]
        self.storage.give_up()
        all_or_none([self.intent], [*deeds, self.defer_update(updates), self.intent.half_updated])
        self.apply_update()

    # -- updates -----------------------------------------------------------------------------------------------------------

    def defer_update(self, updates: dict[Placement, Update]) -> Callable[[], None]:
        """Return what makes ``updates`` pending when it is called, once or twice."""
        mine = {self.parts[p]: update for p, update in updates.items() if p in self.parts}
        elsewhere = [p for p in self._cut if p in updates and p not in self.parts and updates_whole(updates[p].rule)]
        return self._mark(Pending(mine, elsewhere=sorted(elsewhere, key=lambda placement: placement.element)))

    @property
    def updates_together(self) -> bool:
        """Return whether ranks gather parameters for the pending update."""
        if self.pending is None:
            return False
        mine = any(part.of in self._cut and updates_whole(update.rule) for part, update in self.pending.updates.items())
        return mine or bool(self.pending.elsewhere)

    def defer_missed(self, missed: Mapping[Placement, tuple[Update, Mapping[int, UpdateRule]]]) -> Callable[[], None]:
        """Return what has a step with zero gradients follow the pending update when it is called, once or twice. ``missed``:
        the step by slice, with the log that it is in. Nothing of the pending update was applied (``misses``)."""
        updates = {} if self.pending is None else dict(self.pending.updates)
        for placement, (update, log) in missed.items():
            part = self.parts[placement]
            before = updates.get(part)
            updates[part] = update if before is None else before.then(log, update.step)
        return self._mark(Pending(updates))

    def misses(self, placement: Placement, step: int) -> bool:
        """Return whether ``defer_missed`` can have step number ``step`` follow what is pending."""
        if self.average is not None and self.average.due:
            return False
        if self.pending is None:
            return True
        before = self.pending.updates.get(self.parts[placement])
        return not self.pending.started and (before is None or before.last + 1 == step)

    def waiting_since(self, placement: Placement, step: int) -> int:
        """Return the first step that a parameter has yet to make, ``step`` where it has made all before."""
        before = None if self.pending is None else self.pending.updates.get(self.parts[placement])
        return step if before is None else before.step

    def _mark(self, pending: Pending) -> Callable[[], None]:
        version = self.version + 1
        changed = [placement.parameter for placement in pending.updates]

        def mark() -> None:
            self.pending, self.version = pending, version
            kept, self._left = self._left is not None, None
            torch.autograd.graph.increment_version(changed)  # of what others saved
            if kept:
                self._left = self._versions_now()

        return mark

    def upcoming_keys(self) -> list[str]:
        """Return what the next ``hold`` will lease, in order."""
        average, pending = self.average, self.pending
        applied = average is not None and average.applied
        after = [average.key] if average is not None and (average.due or applied) else []
        if pending is None:
            return after if applied and not average.due else [self.key, *after]  # type: ignore[union-attr]
        chunks = self.states.plan(pending.updates)[pending.chunks_done :]
        gradients = [self.gradients.key] if pending.graded else []
        return [self.key, *gradients, *(key for chunk in chunks for key in chunk.keys), *after]

    def apply_update(self) -> None:
        """Apply the pending update, chunk by chunk, and take the result into the average where that is due. An error leaves
        what is not yet updated pending."""
        pending, average = self.pending, self.average
        reads = self.store.access is Access.READ
        due = average is not None and average.due and (not reads or average.applied)
        if self.held and (due or pending is not None):
            raise MisuseError(f"the parameters of {self.plan.name!r} are in use: their update has to wait for the end of it")
        if pending is not None:
            self._apply(pending)
        if due and reads:
            raise MisuseError(
                f"the commit has an average of {self.plan.name!r} that an update is still due in, and the store is open for "
                "reading: open it without access='read', or call optimizer.flush() before the commit"
            )
        if average is not None and due and not average.is_idle(self.storage, self.updates_made):
            with self._checkpoint.applying():
                average.bring(self.storage, self.updates_made)

    def _apply(self, pending: Pending) -> None:
        with ExitStack() as leases:
            leases.enter_context(self._checkpoint.applying())
            gradient = self.gradients.opened  # from within backward: so it stays in memory until it is deleted
            if gradient is None and pending.graded:
                gradient, unit = leases.enter_context(self.storage.shard_beside(self.gradients.key))
            else:
                unit = leases.enter_context(self.storage.shard(Access.WRITE))
            self.states.apply(pending, unit, gradient)
            del unit, gradient
        self.pending = None
        self.updates_made += 1
        with self._checkpoint.applying():
            self.forget_gradients()

    def keep_states(self, kept: Mapping[Placement, Mapping[str, StateForm]]) -> None:
        """Have parameters keep states: forms by name. A pending update that was made for others is applied first. Raises what
        that raises, and what ``States.use`` raises."""
        for placement, forms in self.states.others(kept):
            self.apply_update()
            self.states.use(placement.name, forms)

    def state_copies(self, placement: Placement) -> dict[str, torch.Tensor]:
        """Return ``States.copies``, after applying the pending update."""
        self.apply_update()
        part, copies = self.parts.get(placement), self.states.blank(placement)
        if part is not None:
            with self.storage.shard(Access.READ) as unit:
                param = host(part.stored_flat(unit, 0, part.numel))
                copies = self.states.copies(part, param)
                del unit, param
        forms = self.states.states_of(placement)
        return {
            name: self._partition.whole(self.plan, placement, copy, name, forms.get(name)) for name, copy in copies.items()
        }

    def gradient(self, placement: Placement) -> torch.Tensor | None:
        """Return a copy of the gradient as torch would have it in ``parameter.grad``, or None."""
        part = self.gradients.copy(placement)
        return None if part is None else self._whole_gradient(placement, part)

    def stored_gradient(self, placement: Placement) -> torch.Tensor:
        """Return a copy of the gradient that is stored, whatever ``parameter.grad`` shows. All ranks call it together."""
        return self._whole_gradient(placement, self.gradients.stored(placement))

    def _whole_gradient(self, placement: Placement, part: torch.Tensor) -> torch.Tensor:
        return self._partition.whole(self.plan, placement, part, "the gradient").to(placement.parameter.device)

    def load_state(self, placement: Placement, state: dict[str, torch.Tensor]) -> None:
        """Load a state of ``States.copies``, after applying the pending update."""
        self._checkpoint.invalidate()
        self.apply_update()
        part = self.parts.get(placement)
        if part is None:
            return
        with self.storage.shard(Access.READ) as unit:
            param = host(part.stored_flat(unit, 0, part.numel))
            forms = self.states.states_of(part)
            self.states.load(part, param, {name: _cut(part, value, forms.get(name)) for name, value in state.items()})
            del unit, param


def _cut(part: Placement, value: torch.Tensor, form: StateForm | None) -> torch.Tensor:
    """Return of a state of a whole parameter what belongs to ``part``."""
    if form is None or form.elementwise:
        return part.cut(value)
    begin = getattr(part, "begin", 0)
    return value.reshape(-1)[form.span(begin, begin + part.numel, part.full_shape)]


def _refuse_kept(placement: Placement) -> NoReturn:
    raise MisuseError(
        f"parameter {placement.name!r} was written to through a tensor that was taken of it in forward or backward (detach(), "
        ".data or a view) and kept until the memory of the parameter had been given back, and the change may be lost: write to "
        "the parameter itself"
    )


def _refuse_other_kind(placement: Placement) -> None:
    """Raise MisuseError where a parameter that is held was given ``.data`` of another shape or type."""
    parameter = placement.parameter
    if (parameter.shape, parameter.dtype) != (placement.shape, placement.dtype):
        raise MisuseError(
            f"parameter {placement.name!r} has shape {tuple(placement.shape)} of {placement.dtype} in the store and cannot be "
            f"given .data of {tuple(parameter.shape)} of {parameter.dtype}; its values are as before"
        )


def _living(storages: list[StorageWeakRef]) -> list[StorageWeakRef]:
    return [storage for storage in storages if not storage.expired()]  # type: ignore[no-untyped-call]


def _storage_of_its_own(memory: torch.Tensor) -> torch.Tensor:
    """Return ``memory`` as a tensor whose storage begins and ends with it, and keeps the storage of ``memory``."""
    return from_dlpack(to_dlpack(memory))


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # of a parameter that nobody holds: the placeholder's
        return place_of(tensor.untyped_storage())


class BackwardUpdates:
    """Units to be updated in the running backward pass, because their optimizer has ``update="in_backward"`` and gradients
    arrived."""

    def __init__(self) -> None:
        self._waiting: dict[Unit, None] = {}  # a set with an order: units that are to be updated in this pass yet
        self._arrived: set[Unit] = set()

    def arrived(self, unit: Unit, placement: Placement) -> None:
        """Note that a gradient is final, and that its unit is to be updated with it if the optimizer updates in backward."""
        if unit.stepper(placement) is not None:
            self._arrived.add(unit)
            unit.gradients.final.add(placement)
            unit.gradients.due.add(placement)
            self._waiting[unit] = None

    @property
    def waiting(self) -> bool:
        """Return whether a unit is still to be updated in this backward pass."""
        return bool(self._waiting)

    def apply_ready(self) -> None:
        """Update the units that backward has completed. Raises what ``Unit.update`` raises."""
        for unit in [unit for unit in self._waiting if self._ready(unit)]:
            self._apply(unit)

    def finish(self, partition: Partition) -> None:
        """Update all units that got a gradient, because backward is over, once the ranks of ``partition`` have the same steps.
        Raises what ``Unit.update`` raises; what is left then is left to ``optimizer.step()``."""
        if self._waiting:
            with partition.agreeing("make the updates of this backward pass") as agree:
                agree(self._terms())
        for unit in list(self._waiting):
            if not unit.held:
                self._apply(unit)
        for unit in self._arrived:
            unit.gradients.final_last_time = unit.gradients.final
        self.abandon()

    def _terms(self) -> Iterator[Term]:
        for unit in self._waiting:
            for placement in unit.gradients.states:
                stepper = unit.stepper(placement) if placement in unit.gradients.due else None
                if stepper is not None:
                    update, _ = stepper(placement)
                    yield from terms_of(update.rule, repr(placement.name))
                    yield from update.terms(placement.name)

    def abandon(self) -> None:
        """Forget which units are to be updated: gradients stay as they are."""
        self._arrived.clear()
        self._waiting.clear()

    def _ready(self, unit: Unit) -> bool:
        if unit.held or unit.gradients.deferred or unit.in_use():
            return False
        expected = unit.gradients.final_last_time
        if expected is None:
            expected = {p for p in unit.gradients.states if p.parameter.requires_grad and unit.stepper(p) is not None}
        return expected <= unit.gradients.final

    def _apply(self, unit: Unit) -> None:
        del self._waiting[unit]
        due, unit.gradients.due = unit.gradients.due, set()
        unit.update([placement for placement in unit.gradients.states if placement in due])
