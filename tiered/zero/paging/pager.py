"""Page a model: hold each unit before the module that needs it computes, and drop it afterwards, in forward and backward.

Forward: a *frame* per running module holds its units from its pre-forward hook to its post-forward hook. A parameter that is
read from a module whose own forward is not running (``x @ self.embedding.weight.t()``) is held by the innermost frame, until
there is no room for others that it reads.

Backward: what autograd saves of a paged parameter is packed as a reference (unit, version, place), so that it does not keep the
unit in memory; unpacking it holds the unit until another one is unpacked. Gradients are moved into the store as they arrive.
``torch.utils.checkpoint`` works by the same hooks: only the innermost pair of saved-tensor hooks runs, so a pager's are pushed
only where no others are active, and the recomputation is an ordinary forward with frames.

An exception of a signal handler may strike between any two lines of this file. So nothing that frames or ``Backward`` say is
trusted when a model is used anew: ``reset`` throws them away, and takes from every unit what it may still have.

A parameter leads to its pager by a ``ParameterHandle``, which lies here because it names the pager.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling

from tiered.errors import (
    CapacityError,
    LeaseConflict,
    ManifestError,
    MisuseError,
    TieredError,
    expect_type,
    one_of,
    whole_number,
)
from tiered.store import TieredStore, Touch
from tiered.store.activations import Hooks, Left, SavedTensors, hooks_active, pop_hooks, push_hooks
from tiered.store.lease import drop_queued
from tiered.store.memory_watch import MemoryWatch
from tiered.system import Trimmer, refuse_little_room
from tiered.telemetry import Span
from tiered.tuning.adaptive import AdaptiveActivations, AutoPlan
from tiered.types import Access, Owner
from tiered.zero.intent import Intent
from tiered.zero.leases import Leases
from tiered.zero.paging.gradients import Announced, GradientState
from tiered.zero.paging.recompute.micro_batch import Splitter, split_modules
from tiered.zero.paging.reduction import gradient_sync
from tiered.zero.paging.saved_tensors import (
    OverHooks,
    SavedActivation,
    graph_task,
    in_backward,
    in_forward_mode,
    is_called_within,
    memory_of,
    of_checkpoint,
    refuse_tracing,
    refuse_transforms,
    restore_recording,
)
from tiered.zero.paging.sharding import Partition
from tiered.zero.paging.step_trace import Prefetch, StepTrace
from tiered.zero.paging.storage import CheckpointRecord, UpdateTier, in_update_tier, model_named
from tiered.zero.paging.tensors.compiling import (
    KEY,
    ForwardHooks,
    around,
    is_compiled,
    is_of_forward,
    refuse_constants,
    traced,
    uncompiled,
)
from tiered.zero.paging.tensors.copies import CopiedParameter, CopiedValues
from tiered.zero.paging.tensors.functions import OTHER
from tiered.zero.paging.tensors.parameters import Whole, unpage
from tiered.zero.paging.tensors.patches import in_force_for
from tiered.zero.paging.tensors.sliced import Divided, slice_up
from tiered.zero.paging.tensors.sources import UNITS_HELD
from tiered.zero.paging.tensors.stored import StoredTensor, no_copy
from tiered.zero.paging.unit import BackwardUpdates, Held, Unit
from tiered.zero.paging.units import ModelPlan, Placement, Sliced, is_called

__all__ = [
    "Activations",
    "Backward",
    "Frame",
    "Pager",
    "PagerConfig",
    "Paging",
    "ParameterHandle",
    "Pass",
    "Phase",
    "Reference",
    "SlicedHandle",
    "StateListing",
    "name_of",
    "pager_of",
    "pager_of_parameter",
    "pagers_in",
    "placement_of",
    "placements_of",
    "weak_hook",
]

Activations = Literal["memory", "recompute", "store", "auto"]
"""Where what backward needs of forward is meanwhile: in memory, nowhere (it is computed again), or in the store; "auto": each
module's where a plan says."""
NEWEST = 64 << 20
"""Bytes of saved activations that stay in memory with "store", at most, and at most an eighth of the memory budget."""
LEAST = 256 << 10
"""Bytes: smaller ones stay in memory, too; with a budget below 16 MiB, those smaller than a 64th of it."""

_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
LAYERS = "torch.nn.modules."
"""Modules of Python with the layers of torch."""
OURS = ("__reduce_ex__", "__prepare_scriptable__", "_apply")
"""Attributes that paging gives to each module, in place of those of its class."""
IN_ONE_THREAD = "another thread is computing with this model: use it in one thread at a time, or take a lock around it"
PIECES = 5
"""Of as many of the largest units as the memory has room for, so many are needed for what is in use and what comes next."""
LEAST_POOL = 1 << 20
"""Bytes of memory that are enough for a step, with three times the largest unit."""
HELD = 4
"""A part of forward holds one in this many bytes of the memory at most: as many as ``UNITS_HELD`` units of the largest size."""


class Reference:
    """Saved tensor that was a paged parameter, or a view of one."""

    __slots__ = (
        *("__weakref__", "conjugate", "dtype", "negative", "offset", "placement", "saved", "size", "stride", "unit", "version"),
    )

    def __init__(self, unit: Unit, placement: Placement, tensor: torch.Tensor) -> None:
        self.unit, self.placement, self.version = unit, placement, unit.version
        self.saved = -1 if tensor.is_inference() else tensor._version
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset, self.conjugate, self.negative = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        unit.references.add(weakref.ref(self, unit.references.discard))  # of C: no exception keeps it from being called


class Frame:
    """Units that one running forward holds. ``read``: those of them that it did not hold from its beginning, because they are
    other modules', in the order in which they were read, and their bytes. ``below``: the saved-tensor hooks that were in force
    when it began; ``hooks``: those that it puts in force, if any."""

    __slots__ = ("below", "hooks", "module", "read", "read_bytes", "recording", "span", "units")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.recording = torch.is_grad_enabled()
        self.below = hooks_active()
        self.hooks: Hooks | None = None
        self.units: list[Unit] = []
        self.read: dict[Unit, None] = {}
        self.read_bytes = 0
        self.span: Span | None = None

    def end_span(self) -> None:
        if self.span is not None:
            self.span.end()


class Pass:
    """End of a backward pass. Autograd alone keeps this object, and calls it: it is gone when the pass has ended in any way,
    and a weak reference tells."""

    __slots__ = ("__weakref__", "finish")

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish

    def __call__(self) -> None:
        self.finish()


class Phase(Enum):
    """What a paged model is doing."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    INTERRUPTED = auto()
    """A backward pass began, and ended before its end was called."""


class Backward:
    """A running backward pass, from its first hook on: its graph task, and the spans of it and of one visit in a timeline.

    ``units`` are held for what is computed now, ``graded`` is the unit whose gradients are leased.
    """

    __slots__ = ("end", "graded", "span", "task", "units", "visit")

    def __init__(self, end: Pass, task: int) -> None:
        self.end, self.task = weakref.ref(end), task
        self.span: Span | None = None
        self.visit: Span | None = None
        self.units: list[Unit] = []
        self.graded: Unit | None = None

    @property
    def goes_on(self) -> bool:
        return self.end() is not None


class Averaging(Protocol):
    """The average of a model's weights."""

    @property
    def applied(self) -> bool:
        """Whether the model computes with it now."""
        ...

    def refuse_applied(self, what: str) -> None:
        """Raise MisuseError where the model computes with it, and ``what`` is of the model that is trained."""
        ...

    def settle(self) -> None:
        """Have all be as before, where the block that computed with it has ended."""
        ...

    def record(self) -> dict[str, Any] | None:
        """Return what a commit has of it; None where there is nothing."""
        ...


class Gathering:
    """Units that a block of ``zero.gathered`` holds. The block alone keeps this object, and a weak reference tells whether it
    is still running."""

    __slots__ = ("__weakref__", "units")

    def __init__(self) -> None:
        self.units: list[Unit] = []


class StateListing(OrderedDict[str, Any]):
    """Dict for ``state_dict`` to fill where it is to have the parameters themselves."""


class _Watched(dict[str, Any]):
    """Parameters of a module, in a dict that tells the pager when one is read by name."""

    def __init__(self, module: nn.Module, pager: Pager) -> None:
        super().__init__(module._parameters)
        self.pager = pager
        self._of_torch = type(module).__module__.startswith(LAYERS)

    @traced
    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if is_dynamo_compiling():  # what is out is no tensor to dynamo, and breaks the graph
            return parameter
        return parameter if parameter is None else self.pager.read(parameter, self._for_layer)

    def _for_layer(self) -> bool:
        """Return whether the forward of a layer of torch itself reads, which writes to no parameter and gives none away."""
        if not self._of_torch:
            return False
        getter = sys._getframe(3)  # beyond this function, ``read`` and ``__getitem__``
        reader = getter.f_back
        if getter.f_code is not nn.Module.__getattr__.__code__ or reader is None or reader.f_code.co_name != "forward":
            return False
        return str(reader.f_globals.get("__name__", "")).startswith(LAYERS)


@dataclass(frozen=True)
class Paging:
    """Into what ``zero.page`` divides a model, and how that moves.

    ``prefetch``: "on", or "off" to fetch only on demand (to see what it brings).
    ``update_tier``: where a store with ``hbm=`` updates parameters: in "dram", to which gradients go down and from which
    parameters come up, or in "hbm", to which optimizer states come up as well. Ranks exchange through DRAM.

    ``experts``: a module with one parameter for all experts of a mixture (at least two parameters of three dimensions, with the
    same first one) is "sliced": each expert is a unit, and only the experts that are used are fetched. ``parameter[i]``, and
    ``torch.nn.functional.grouped_mm``, use one expert at a time; anything else gets a copy of all. An expert without tokens is
    updated with a gradient of zero, as torch does it, when it is next fetched. The norm of the gradient is that of the experts'
    norms, which may differ from torch's in the last bit. "whole": as any other parameter. With ``existing="resume"`` it is as
    it was committed; several processes have experts whole.
    ``largest_unit``: bytes; units are at most so large, where single parameters allow it (default: an eighth of the memory
    budget, 1 GiB at most). A later process needs room for three. With ``existing="resume"`` they are as they were committed.
    ``slice_weights``: with ``largest_unit``, weights of ``nn.Embedding`` and ``nn.Linear`` that are larger are sliced as well:
    some rows are a unit, 512 or a multiple, and the layer uses one slice after the other. (Without it they are sliced only
    where three of them are larger than the memory budget.) Whether products with some rows at a time have the same last bits
    is for the library that multiplies matrices to decide; MKL in fp32 gave the same with these numbers of rows.

    Raises MisuseError for values that there are not.
    """

    prefetch: Prefetch = "on"
    update_tier: UpdateTier = "dram"
    experts: Literal["sliced", "whole"] = "sliced"
    largest_unit: int | None = None
    slice_weights: bool = False

    def __post_init__(self) -> None:
        one_of("prefetch", self.prefetch, get_args(Prefetch))
        one_of("update_tier", self.update_tier, get_args(UpdateTier))
        one_of("experts", self.experts, ("sliced", "whole"))
        expect_type(self.slice_weights, bool, "slice_weights is True or False")
        if self.largest_unit is not None:
            whole_number("largest_unit is a number of bytes", self.largest_unit)
        elif self.slice_weights:
            raise MisuseError("slice_weights=True divides weights that are larger than largest_unit=: give that, too")


@dataclass(frozen=True)
class PagerConfig:
    """How a model is paged: the arguments of ``zero.page``, and ``pool``, the bytes of memory that its units have. An
    ``AutoPlan`` chooses where activations wait."""

    name: str
    pool: int
    partition: Partition
    micro_batch: int = 1
    activations: Activations | AutoPlan = "memory"
    paging: Paging = field(default_factory=Paging)


class Pager:
    """Model whose parameters live in a store. Used by one thread at a time, as a module is."""

    change: Callable[[Mapping[nn.Parameter, torch.dtype | torch.Tensor]], None] | None = None
    """Gives parameters another type, or the shape and the values of a tensor; None while the model is not yet paged."""

    def __init__(self, model: nn.Module, store: TieredStore, plan: ModelPlan, config: PagerConfig) -> None:
        name, pool, partition = config.name, config.pool, config.partition
        self._pool = pool
        self.model, self.store, self.name = model, store, name
        self.buffer_places: Mapping[str, tuple[nn.Module, str]] = buffer_places(model)
        """Where the buffers are that the model was paged with: each one's module, and its name in that."""
        self.not_loaded: Sequence[str] = ()
        """Names of what the checkpoint that the model was paged from has beside it, until ``zero.resume`` has loaded them."""
        self.limits = plan.limits
        self._room_to_read = pool - LEAST_POOL - 3 * plan.largest
        """Bytes of units of other modules that a forward holds, at most, unless it is one unit."""
        largest = max((unit.nbytes + unit.converted * unit.stored_nbytes for unit in plan.units), default=1)
        self._most_read = max(1, pool // max(1, largest) - PIECES)
        """How many units of other modules it holds, at most: each may lie where it cuts the memory in two, and one more of the
        largest has to find a piece beside two of these in use."""
        self.checkpoint, chunk = CheckpointRecord(store, model_named(name)), plan.limits.chunk
        self.owner = self.checkpoint.owner
        self.follows = False
        """Whether a rollback of the store that is under way is this model's: it restores all else afterwards."""
        self.intent, self._leases = Intent(), Leases.of(store, self.owner)
        self.update_tier = config.paging.update_tier
        updates = in_update_tier(store, self.update_tier, self.owner)
        packed = {placement.parameter for unit in plan.units if unit.read_only for placement in unit.placements}
        for parameter in (*packed, *(whole for whole, sliced in plan.sliced.items() if sliced.slices[0] in packed)):
            parameter.requires_grad = False
        self.units = [Unit(store, updates, name, u, chunk, self.checkpoint, partition, self.intent) for u in plan.units]
        partition.joins(store)
        self.partition, self.gradient_sync = partition, gradient_sync(
            partition, self.units, pool, plan.held_together(model)
        )
        self.placements = sorted((p for u in plan.units for p in u.placements), key=lambda p: p.index)
        self._home = {p.parameter: (u, p) for u in self.units for p in u.plan.placements}
        self.sliced = plan.sliced
        self._references = self._counted()
        self._held = {module: [self.units[i] for i in indices] for module, indices in plan.held.items()}
        self._titles = {module: _names(units) for module, units in self._held.items()}
        """What spans of these modules are called."""
        self._frames: list[Frame] = []
        self._shown: dict[int, Unit] = {}
        """By the address of the memory of each parameter: the units that are held for what computes."""
        self._accesses = 0  # functions of torch that use parameters, outside of modules whose forward holds them
        self._era = 0  # how often all was let go of
        self._loaded: list[Unit] = []  # units of the module that takes its values of a state
        self._thread = threading.get_ident()
        self._claimed: dict[str, tuple[int, nn.Module]] = {}
        """The thread that began the running forward, and with which module."""
        self._claiming = threading.RLock()
        self._gatherings: weakref.WeakSet[Gathering] = weakref.WeakSet()
        self._copied: dict[nn.Parameter, tuple[str, int, Callable[[], torch.Tensor | None]]] = {}
        self._hooks_of: dict[nn.Module, list[Any]] = {}
        """The handles of what was registered with each module."""
        self._before = {module: module.__dict__.get("forward") for module in model.modules()}
        """What each module had as ``forward`` of its own before it was paged."""
        self._since: dict[nn.Module, Any] = {}
        """And what it has since."""
        self._backward: Backward | None = None
        self._updates = BackwardUpdates()
        self.step_trace = StepTrace.of(store)
        self.step_trace.prefetch = self._prefetch = config.paging.prefetch
        self.step_trace.leave_out(unit.key for unit in self.units if unit.plan.of_expert)
        for tied, keys in self._sliced_embeddings():
            (self.step_trace.looked_up if tied else self.step_trace.leave_out)(keys)
        self._memory = MemoryWatch.of(store)
        self._trimmer = Trimmer(pool, max((placement.nbytes for placement in self.placements), default=0))
        self._watch()
        chosen = config.activations if isinstance(config.activations, AutoPlan) else None
        offloads = chosen is not None or config.activations == "store"
        saved = SavedTensors(store, min(NEWEST, pool // 8), min(LEAST, pool // 64)) if offloads else None
        self.adaptive = self._adapting(saved, plan, config, chosen) if saved is not None and chosen is not None else None
        self.saved = saved if self.adaptive is None else self.adaptive
        computes_again = config.micro_batch > 1 or config.activations == "recompute" or chosen is not None
        self.splitter = (
            Splitter(model, store, name, plan, pool, config.micro_batch, self, self.adaptive) if computes_again else None
        )
        for module in self._before:
            self._stand_in(module)
            if self._is_hooked(module):
                module.forward = self._guarded(module, module.forward)  # of this one object
            self._since[module] = module.__dict__.get("forward")
        _pagers.add(self)
        store.held_by(self)
        self.optimizer: object | None = None
        """The optimizer that made the last step of the model, or was given states since."""
        self.made: Callable[[], object | None] = lambda: None
        """Returns the optimizer that was made for parameters of the model last, while it lives."""
        self.average: Averaging | None = None
        """The average of the weights, if there is one."""
        self.in_commit: Callable[[bool], str | None] | None = None
        """Puts what makes a commit a checkpoint of the model into the store, for one that was not called for it: at the end of
        the store's ``with`` block (True), or for another model in it. Returns why the former must not be."""
        self.given: tuple[nn.Module, Any, bool] | None = None
        """What ``zero.commit``, ``resume`` or ``rollback`` was given last: the model, which may be one around this one, what
        else a training has, and whether it has an ``extra``, which only the program knows later."""
        self.moment = 0
        """Number of the commit whose record ``zero.resume`` loaded, where that says so."""
        self.must_resume = False
        """Whether ``zero.resume`` has to be called before the next step (``existing="continue"``)."""
        self._is_trained = self._is_kept = False
        self._before_commits(weakref.ref(self))
        self.checkpoint.changing = self._be_kept

    def optimizers(self) -> list[Any]:
        """Return the optimizers that count the steps of parameters, as far as somebody still refers to them, each once."""
        marks = {id(mark): mark for unit in self.units for mark in unit.counted_by.values()}  # one that is dead has no hash
        return [found for found in (mark() for mark in marks.values()) if found is not None]

    def stepped_by(self, optimizer: object) -> None:
        """Note that ``optimizer`` has made a step of the model, or was given states, and that it is trained from here on: until
        a commit has a checkpoint of it the store refers to it, where its ``with`` block ends with a commit. That one has it
        then, also of a model that nobody else refers to any more."""
        self.optimizer, self._is_trained = optimizer, True
        self._be_kept()

    def _be_kept(self) -> None:
        if self._is_trained and not self.checkpoint.current and self.store.ends_with_commit and not self._is_kept:
            self._is_kept = True
            self._before_commits(lambda: self)

    def is_recorded(self) -> None:
        """Note that the store has a checkpoint of the model as it is."""
        self.checkpoint.current, self.checkpoint.before, self._is_kept = True, None, False
        self.checkpoint.was = True
        self._before_commits(weakref.ref(self))

    def _before_commits(self, itself: Callable[[], Pager | None]) -> None:
        self.store.before_commits(f"model {self.name}", partial(_before_commit, itself))

    def refuse_unresumed(self) -> None:
        """Raise MisuseError where what the model goes on from was not loaded."""
        if self.must_resume:
            raise MisuseError(
                f"model {self.name!r} goes on from commit {self.store.generation} (existing='continue'), and its optimizer not "
                "yet: call zero.resume(model, optimizer) before the first step, with all that zero.commit was given (with a "
                "Trainer: resume_from_checkpoint=True), or begin anew with existing='overwrite'"
            )

    def refuse_averaged(self, what: str) -> None:
        """Raise MisuseError where the model computes with the average of its weights, and ``what`` is of these."""
        if self.average is not None:
            self.average.refuse_applied(what)

    def _settle(self) -> None:
        if self.average is not None:
            self.average.settle()

    # -- installing --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        in_force_for(self, partial(_untrained, weakref.ref(self)))
        for unit in self.units:
            for placement in unit.plan.placements:
                placement.parameter._tiered = ParameterHandle(self, unit, placement)  # type: ignore[attr-defined]
            unit.release_parameters()
        for sliced in self.sliced.values():
            slice_up(sliced.parameter, SlicedHandle(self, sliced), self.store.device)
        for module in self._before:
            if module._parameters:
                module._parameters = _Watched(module, self)
                after = partial(self._after_state_dict)  # torch marks the hook, which a bound method does not allow
                handles = self._hooks_of[module] = []
                handles.append(module.register_state_dict_post_hook(after))  # type: ignore[no-untyped-call]
                handles.append(module.register_load_state_dict_pre_hook(self._before_load))  # type: ignore[no-untyped-call]
                handles.append(module.register_load_state_dict_post_hook(self._after_load))  # type: ignore[no-untyped-call]
            if self._is_hooked(module):
                held = self._held.get(module, ())
                ForwardHooks(held, self._before_forward, self._after_forward).register(module)

    def _stand_in(self, module: nn.Module) -> None:
        """Give a module ``OURS``."""
        module.__dict__["__prepare_scriptable__"] = _refuse_scripting  # torch.jit.script calls it first
        # Not __deepcopy__, which a module around this one that lends its attributes, as peft's, would have, too.
        module.__dict__["__reduce_ex__"] = partial(self._reduce, module)
        module.__dict__["_apply"] = partial(self._apply, module)  # what .half(), .to() and the like call

    def enter_again(self) -> None:
        """Undo ``leaving``, after which nothing of the model has changed in the store."""
        for unit in self.units:
            unit.gradients.hook_anew()
        self._watch()
        for module, forward in self._since.items():
            self._stand_in(module)
            if forward is not None:
                module.__dict__["forward"] = forward
        _pagers.add(self)
        self.intent.spoil(None)

    def _counted(self) -> dict[nn.Parameter, int]:
        """Return how many references there are to each parameter where nobody but this model has it."""
        counted = SimpleNamespace(parameter=object())
        once = sys.getrefcount(counted.parameter)
        modules = Counter(id(one) for module in self.model.modules() for one in module._parameters.values())
        slices = {id(one) for sliced in self.sliced.values() for one in sliced.slices}
        here = 2  # as a key of ``_home``, and of this dict
        return {one: once + here + modules[id(one)] + (id(one) in slices) for one in self._home}

    def _adapting(
        self, saved: SavedTensors, plan: ModelPlan, config: PagerConfig, chosen: AutoPlan
    ) -> AdaptiveActivations:
        """Return what chooses where activations wait."""
        segments = tuple(split_modules(self.model, plan, config.micro_batch).values())
        keys, units = [unit.key for unit in self.units], self.units
        return AdaptiveActivations(
            saved, segments, keys, lambda: sum(unit.states.update_seconds for unit in units), config.pool, chosen
        )

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that the model was paged with, by the names that they had then."""
        there = {name: module._buffers.get(last) for name, (module, last) in self.buffer_places.items()}
        return {name: buffer for name, buffer in there.items() if buffer is not None}

    def _sliced_embeddings(self) -> Iterator[tuple[bool, list[str]]]:
        """Yield whether a layer of another kind uses the weights of a sliced embedding, and the keys of the slices."""
        for parameter, sliced in self.sliced.items():
            users = [m for m in self.model.modules() if any(one is parameter for one in m._parameters.values())]
            embeddings = sum(isinstance(module, nn.Embedding) for module in users)
            if embeddings:
                yield embeddings < len(users), [self._home[one][0].key for one in sliced.slices]

    def divided_products(self) -> tuple[str, ...]:
        """Return the names of weights of which a layer other than an embedding uses some rows at a time."""
        others = {id(one) for m in self._before if not isinstance(m, nn.Embedding) for one in m._parameters.values()}
        return tuple(one.name for whole, one in self.sliced.items() if one.rows is not None and id(whole) in others)

    def _is_hooked(self, module: nn.Module) -> bool:
        if any(one in self.sliced for one in module._parameters.values()):
            return True  # it holds nothing, but what autograd saves of slices is to be a reference there
        return module in self._held or (module is self.model and is_called(module))

    def _guarded(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` wrapped so that, whatever exception ends it, nothing of it stays in force in this thread."""

        @wraps(forward)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except Exception:  # torch calls ``_after_forward``
                self._restore_thread(module)
                raise
            except BaseException:  # and here it calls no hook
                self._restore_thread(module)
                self._after_forward(module, None, None)
                raise

        return around(module, guarded)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        raise no_copy()

    # -- forward -----------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        refuse_tracing()
        refuse_transforms()
        refuse_constants()
        with self._claiming:
            if in_backward():  # a recomputation
                self._begin_backward()
            elif self._claim(module) or module is self.model or not self._frames:
                self._begin_forward(module)
            frame = Frame(module)
            self._frames.append(frame)
        frame.hooks = self._hooks(of_module=True)
        if frame.hooks is not None:
            push_hooks(*frame.hooks)
        units = self._held.get(module, ())
        for unit in units:
            self._hold(frame, unit)
        kind = "recompute" if in_backward() else "forward"
        frame.span = self.store.span(kind, self._titles.get(module) or type(module).__name__)

    def _begin_forward(self, module: nn.Module) -> None:
        if self._gathered():
            self.start_anew()  # units of the block stay; what an exception left within it is not told from them
        else:
            self.reset()
        self._thread = threading.get_ident()
        self.intent.refuse_half_updated()
        self.gradient_sync.pass_begins()
        if module is self.model:
            self.step_trace.forward_begins("training" if torch.is_grad_enabled() else "inference", self._units_in_order)

    def _hold(self, frame: Frame, unit: Unit) -> None:
        if not unit.held:
            self._look_ahead(unit)
        if not _shows_arguments() and (unit.held or self._computes_alone()):
            unit.hold_for_layers(placement for placement in unit.plan.placements if self._is_alone(placement))
        else:
            self.take(unit)
        self._defer_hidden(unit)
        self._held_for(frame.units, unit)

    def _held_for(self, units: list[Unit], unit: Unit) -> None:
        """Have a unit that is held compute for those who hold ``units``, until ``_drop_all(units)``."""
        units.append(unit)
        self._hook_gradients(unit)
        self._show(unit)

    def _drop_all(self, units: list[Unit]) -> None:
        """Drop units that are held for somebody, the last one first."""
        while units:
            unit = units.pop()
            if unit.held:  # else a rollback let go of all
                self._drop(unit)

    def _hold_read(self, frame: Frame, unit: Unit) -> None:
        """Hold a unit of another module that a forward reads, or needs for a gradient, and no longer those that it read first
        where they are more than there is room for: who still has a parameter of these computes with one in the store. With
        several ranks all stay, because others may have more room, and would not gather them again."""
        frame.read_bytes += unit.plan.nbytes
        while (
            frame.read
            and (frame.read_bytes > self._room_to_read or len(frame.read) >= self._most_read)
            and not self.gradient_sync.several
        ):
            left = next(iter(frame.read))
            del frame.read[left]
            frame.read_bytes -= left.plan.nbytes
            frame.units.remove(left)
            self._drop(left)
        self._hold(frame, unit)
        frame.read[unit] = None

    def _is_alone(self, placement: Placement) -> bool:
        """Return whether nobody has a parameter but its modules, and this object."""
        more = placement.parameter in self._copied
        return sys.getrefcount(placement.parameter) <= self._references[placement.parameter] + more

    def _computes_alone(self) -> bool:
        """Return whether a layer of torch that computes now, and that shows its arguments to nobody, gives its parameters to
        nobody: not to an update that waits, nor to what is compiled."""
        return not (
            self._frames[0].recording
            or self.gradient_sync.several
            or torch.is_autocast_enabled(self.store.device.type)  # which keeps copies by the tensor
            or in_forward_mode()
            or is_compiled()
        )

    def take(self, unit: Unit, access: Access = Access.READ) -> None:
        """Hold a unit, and do what the other ranks expect with it."""
        if unit.held:
            unit.hold(access)
            return
        self.gradient_sync.before_hold(unit)
        unit.hold(access)
        self.gradient_sync.after_hold(unit)

    def _defer_hidden(self, unit: Unit) -> None:
        """Defer the update of a unit where a forward that records runs something that does not: reentrant checkpointing, whose
        gradients come apart. With ranks an update waits for the reduction anyway, and the reduction need not wait."""
        if not self.gradient_sync.several and self._frames[0].recording and not torch.is_grad_enabled():
            unit.gradients.deferred = True

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward() and self._claimed.get("by", (0,))[0] != threading.get_ident():
            return  # this thread's forward was refused
        if self._frames and self._frames[-1].module is module:
            self._leave(self._frames.pop())
        if not self._frames:
            self._claimed.pop("by", None)
            if output is not None and not in_backward():
                if self.saved is not None:
                    self.saved.look_again()  # what the modules had in their hands
                self._memory.look()

    def _leave(self, frame: Frame) -> None:
        frame.end_span()
        _pop(frame.hooks)
        self._drop_all(frame.units)

    def _restore_thread(self, module: nn.Module) -> None:
        """Restore hooks and recording of this thread to what they were before the outermost forward, which an exception ends.
        """
        while self._frames and self._frames[-1].module is not module and any(f.module is module for f in self._frames):
            self._leave(self._frames.pop())
        if len(self._frames) == 1 and self._frames[0].module is module:
            frame = self._frames[0]
            while hooks_active() and hooks_active() != frame.below:
                pop_hooks()
            torch._C._set_grad_enabled(frame.recording)

    def _drop(self, unit: Unit) -> None:
        places = unit.places
        try:
            unit.drop()
        finally:
            if not unit.held:
                for address in places:
                    self._shown.pop(address, None)

    def _show(self, unit: Unit) -> None:
        """Have ``reference`` know the parameters of a unit that is held, all at once: the first tells of all."""
        if self._shown.get(next(iter(unit.places), -1)) is not unit:
            self._shown.update(dict.fromkeys(unit.places, unit))

    def read(self, parameter: nn.Parameter, for_layer: Callable[[], bool] = bool) -> torch.Tensor:
        """Hold the unit of a parameter that was read as ``module.name``: in a forward, by the innermost frame; in backward,
        where a function that is no module is computed again, by the running pass. Return what the reader gets.

        torch.utils.checkpoint keeps what its recomputation saves: aliases of parameters that need a gradient, which stay right
        when the unit is let go, but frozen ones as the very object, which would turn to NaN. So there these are aliases, too.
        All are in the graph of a reentrant one, where no hooks of ours are in force.
        """
        found = self._home.get(parameter)
        if found is None:
            return parameter
        unit, placement = found
        if not unit.held:
            unit.refuse_written(placement)
        recomputed = in_backward() and torch.is_grad_enabled()
        if recomputed:
            unit.gradients.refuse_spent(placement)
        if self._frames:
            self._refuse_another_thread()
            if not unit.held:
                self._hold_read(self._frames[-1], unit)
            if placement in unit.aside:
                if for_layer() and not _shows_arguments():
                    return unit.apart(placement)
                unit.show([placement])
                self._hook_gradients(unit)
            elif placement in unit.gradients.unhooked:  # perhaps unfrozen since the unit is held
                self._hook_gradients(unit)
            self._defer_hidden(unit)
        elif recomputed:
            self._visit_backward((unit,))
            self._hook_gradients(unit)
            if parameter.requires_grad and not hooks_active():
                return parameter.view_as(parameter)
        else:
            return parameter
        if self._hooks() is not None:  # those of somebody else, within forward, may keep what they are given
            return parameter.view_as(parameter)
        return parameter.detach() if recomputed and not parameter.requires_grad else parameter

    # -- outside of modules that hold them -----------------------------------------------------------------------------------

    def show(self, parameter: torch.Tensor) -> None:
        """Give a parameter its memory, where its unit is held and nobody has asked for it: its address is asked for."""
        unit, placement = self._home[parameter]  # type: ignore[index]
        if unit.held and placement in unit.aside:
            unit.show([placement])
            self._hook_gradients(unit)

    def stride(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the strides that ``parameter`` has when it is held."""
        return self._home[parameter][1].stride  # type: ignore[index]

    def nbytes(self, parameters: Collection[torch.Tensor]) -> int:
        """Return the bytes of the units of ``parameters``."""
        return sum(unit.plan.nbytes for unit in self.units_of(parameters))

    @property
    def room(self) -> int:
        """Return how many bytes of units a function of torch may hold at a time."""
        return UNITS_HELD * self.limits.unit

    def version(self, parameter: torch.Tensor) -> int:
        """Return a number that changes when the values of ``parameter`` do."""
        sliced = self.sliced.get(parameter)  # type: ignore[call-overload]
        if sliced is not None:
            found = sum(self._home[one][0].version for one in sliced.slices)
        else:
            found = self._home[parameter][0].version  # type: ignore[index]
        return found if self.average is None or not self.average.applied else ~found

    def recomputes(self) -> bool:
        """Return whether a part of forward is being computed again within backward."""
        return in_backward() and torch.is_grad_enabled()

    def refuse_training(self, parameter: torch.Tensor) -> None:
        """Raise MisuseError for a parameter of a quantised model that is for reading only."""
        sliced = self.sliced.get(parameter)  # type: ignore[call-overload]
        unit, _ = self._home[parameter if sliced is None else sliced.slices[0]]  # type: ignore[index]
        unit.plan.refuse_writing()

    def accessing(
        self, parameters: Collection[torch.Tensor], access: Access
    ) -> AbstractContextManager[Callable[[torch.Tensor], bool]]:
        """Hold the units of ``parameters`` for a function of torch; what autograd saves of them is packed as in forward. Gives
        a function that tells whether a tensor shows memory of these units. Raises what ``hold`` raises."""
        return self._held_outside(parameters, access, Gathering())

    @contextmanager
    def _held_outside(
        self, parameters: Collection[torch.Tensor], access: Access, gathering: Gathering
    ) -> Iterator[Callable[[torch.Tensor], bool]]:
        """Hold the units of ``parameters`` for somebody who is no module; ``gathering`` has them meanwhile."""
        shown: set[int] = set()
        hooks, alone, era, entered = None, False, self._era, 0
        try:
            try:
                with self._claiming:
                    self._refuse_another_thread()
                    if not self._accesses:
                        self.start_anew()
                    self._thread = threading.get_ident()
                    hooks, alone, era = self._hooks(), not self._accesses, self._era
                    self._accesses, entered = self._accesses + 1, 1
                for unit in self.units_of(parameters):
                    self.take(unit, access)
                    self._held_for(gathering.units, unit)
                    shown.update(unit.places)
                if hooks is not None:
                    push_hooks(*hooks)
                yield lambda tensor: memory_of(tensor) in shown
            finally:
                _pop(hooks)
                self._gatherings.discard(gathering)
                if era == self._era:  # else all was let go of since, and others may hold the units
                    try:
                        self._drop_all(gathering.units)
                    finally:
                        self._accesses -= entered if era == self._era else 0
        except BaseException as error:
            if alone:
                self._let_go_struck(error, parameters, hooks)
            raise

    def _let_go_struck(self, error: BaseException, parameters: Collection[torch.Tensor], hooks: Hooks | None) -> None:
        """Let go of the units of ``parameters`` where a signal struck as somebody who held them alone dropped them. A parameter
        that is left in memory is read there, where what was written is not yet rounded; and who pops hooks would pop ours."""
        if not isinstance(error, TieredError | GeneratorExit) and not self.computing:
            _pop(hooks)
            for unit in self.units_of(parameters):
                unit.let_go()

    @contextmanager
    def holding(self, parameters: Collection[torch.Tensor]) -> Iterator[None]:
        """Hold the units of ``parameters`` for reading, all of which are fetched at the same time. Beyond a quarter of the
        memory they are left to be held one by one, as they are used, and beyond ``room`` where units in use are no memory of
        the store; so is what has an update to be applied.

        For a part of forward that uses some of a module's parameters and knows which. Raises what ``hold`` raises.
        """
        chosen: list[torch.Tensor] = []
        keys: list[str] = []
        left = self.room if any(unit.plan.converted for unit in self.units_of(parameters)) else self._pool // HELD
        for parameter in parameters:
            unit = self.units_of([parameter])[0]
            if unit.used_key in keys:
                continue
            size = max(unit.plan.nbytes, unit.plan.stored_nbytes)
            if not unit.held and unit.upcoming_keys() == [unit.used_key] and size <= left:
                left -= size
                chosen.append(parameter)
                keys.append(unit.used_key)
        if not chosen:
            yield
            return
        self._refuse_another_thread()
        if not self._accesses:
            self.start_anew()
        with ExitStack() as stack:
            with self._leases.registered(self.store.lease(keys)):  # each unit's own lease is granted at once then
                stack.enter_context(self.accessing(chosen, Access.READ))
            yield

    def coming(self, parameters: Collection[torch.Tensor]) -> None:
        """Have the store read the units of ``parameters`` at once that are used next, one after the other."""
        keys = [unit.used_key for unit in self.units_of(parameters) if not unit.held]
        if keys and self._prefetch == "on":
            self.store.prefetch(keys)

    def _refuse_another_thread(self) -> None:
        """Raise MisuseError where another thread computes with the model, or uses its parameters."""
        if self._thread == threading.get_ident() or in_backward():  # which runs in threads of its own for some devices
            return
        if self._accesses or self.phase is Phase.BACKWARD:
            running = not self.is_ours
        else:
            thread, outermost = self._claimed.get("by", (0, self.model))
            running = thread not in (0, threading.get_ident()) and is_called_within({outermost}, thread)
        if running:
            raise MisuseError(IN_ONE_THREAD)

    def _claim(self, module: nn.Module) -> bool:
        """Have this thread be the one whose forward may run; return whether frames are another one's, which has ended by an
        exception. Raises MisuseError where another thread computes."""
        mine, before = (threading.get_ident(), module), self._claimed.get("by")
        if before is not None and before[0] == mine[0]:
            if not self._frames:
                self._claimed["by"] = mine
            return False
        self._refuse_another_thread()
        self._claimed["by"] = mine
        return before is not None

    def units_of(self, parameters: Iterable[torch.Tensor]) -> list[Unit]:
        """Return the units of ``parameters``, which are this model's and not sliced, without repeats."""
        return list(dict.fromkeys(self._home[parameter][0] for parameter in parameters))  # type: ignore[index]

    def gathering(self, parameters: Collection[torch.Tensor], access: Access) -> AbstractContextManager[object]:
        """Hold the units of ``parameters`` for a block of code. Raises CapacityError where they do not fit."""
        self.start_anew()
        units = [unit for unit in self.units_of(parameters) if unit not in self._gathered()]
        needed = sum(unit.plan.nbytes for unit in [*units, *self._gathered()])
        if needed > self._pool - self.limits.unit:
            raise CapacityError(
                f"these parameters are {needed:,} bytes with the others of their units, and {self._pool - self.limits.unit:,} "
                "bytes of the memory budget can be gathered at a time: gather fewer, or open the store with a larger dram="
            )
        gathering = Gathering()
        self._gatherings.add(gathering)
        return self._held_outside(parameters, access, gathering)

    def _gathered(self) -> set[Unit]:
        return {unit for gathering in self._gatherings for unit in gathering.units}

    @property
    def phase(self) -> Phase:
        """What the model is doing, as far as its hooks have reported it."""
        if self._backward is not None:
            return Phase.BACKWARD if self._backward.goes_on else Phase.INTERRUPTED
        return Phase.FORWARD if self._frames else Phase.IDLE

    @property
    def computing(self) -> bool:
        """Return whether this is called from within forward or backward.

        A frame alone does not say so: after Ctrl-C torch calls no hook, not even with ``always_call``, which is for Exceptions.
        """
        return in_backward() or bool(self._frames and is_called_within({f.module for f in self._frames}))

    def start(self) -> None:
        """Reset what an interruption left, because somebody uses the model outside of forward and backward. Raises as
        ``reset``."""
        self._settle()
        if self.phase is not Phase.IDLE and not self.computing:
            self.reset()
        self.intent.ready()

    def start_anew(self) -> None:
        """Do as ``start``, and reset also where a unit is held, which nobody may do outside of forward and backward."""
        self._settle()
        if not self.computing:  # asked first: a model with many experts has thousands of units
            gathered = self._gathered()
            held = any(unit.state is not Held.BY_STORE and unit not in gathered for unit in self.units)
            if held or self.phase is not Phase.IDLE:
                self.reset()
        self.intent.ready()

    def reset(self) -> None:
        """Let go of everything, also what an exception or Ctrl-C left held. The next forward starts from nothing.

        Raises InterruptedStep where an exception left what cannot be gone on with, MisuseError where a parameter was written to
        while it could only be read, or another thread computes.
        """
        self._refuse_another_thread()
        self._settle()
        if self._gathered():
            gc.collect()  # a block that an exception left may be in a cycle with it
        if self._gathered():
            raise MisuseError(
                "the parameters are in use by zero.gathered: leave its block first; only forward and backward may run within it"
            )
        self.intent.finish()
        if self._backward is not None and not in_backward():
            drop_queued()
        self._let_go(Unit.let_go)
        self.intent.refuse()

    @property
    def is_ours(self) -> bool:
        """Whether no other thread that lives uses the model."""
        return self._thread == threading.get_ident() or self._thread not in {thread.ident for thread in threading.enumerate()}

    @property
    def rests(self) -> bool:
        """Whether nothing of the model is under way, or held."""
        return self.is_ours and self.phase is Phase.IDLE and not self._gathered() and not any(unit.held for unit in self.units)

    def let_go_of_ended(self) -> None:
        """Let go of everything where an exception ended what the model was doing, for a commit or the like of the store alone.
        What has become of the step is said when the model is used next. Several ranks can end a pass only together. Raises
        MisuseError where a parameter was written to while it could only be read."""
        alone = self.is_ours and not self.gradient_sync.several
        if alone and self.phase is not Phase.IDLE and not self.computing and not self._gathered():
            self._let_go(Unit.let_go)

    def as_committed(self) -> Owner | None:
        """Return the owner of the model's tensors where nothing of it has changed since the last commit but that updates were
        applied which were pending in it."""
        return self.owner if self.checkpoint.current or self.checkpoint.before is not None else None

    @contextmanager
    def going_back(self, generation: int) -> Iterator[None]:
        """Surround a rollback of the store, which the model has to follow unless all of its tensors stay as they are: by
        zero.rollback. Until then every use raises InterruptedStep."""
        before = self.intent.behind
        self.checkpoint.remember(generation, changed=self.intent.spoiled is not None)
        self.intent.behind = (
            f"the store went back to commit {generation}, and model {self.name!r} in it has not followed yet: call "
            f"zero.rollback for it with generation={generation} (again, with all that zero.commit was given), or page it anew"
        )
        try:
            yield
        except (LeaseConflict, MisuseError, ManifestError):  # nothing was changed
            self.intent.behind = before
            if before is None:
                self.checkpoint.forget()
            raise
        # What cannot be compared stays behind; others must not take its error for that of a rollback that changed nothing.
        with suppress(TieredError):
            if self.checkpoint.key not in self.store:
                self.intent.behind = (
                    f"the store went back to commit {generation}, which has no checkpoint of model {self.name!r} (zero.commit "
                    "makes one): page it anew"
                )
            if not self.follows and self.checkpoint.is_as_remembered():
                self.intent.behind = None
                self.checkpoint.forget()

    def replace_others(self) -> None:
        """Have other models of this name raise InterruptedStep, because this one has taken their place in the store."""
        for other in pagers_in(self.store):
            if other.name == self.name and other is not self:
                other.give_up()
                other.intent.spoil(
                    f"model {self.name!r} in {self.store} was replaced (existing='overwrite') or another one of this name was "
                    "rolled back, and this is the one that was there before: use the new one"
                )

    def end_leases(self) -> None:
        """End leases that an exception left open, where no unit is held."""
        if not any(unit.held for unit in self.units):
            self._leases.end()

    def give_up(self) -> None:
        """Let go of everything before all is rolled back. Raises nothing."""
        self._gatherings.clear()
        if not in_backward():
            drop_queued()
        self._let_go(Unit.discard)

    def _let_go(self, how: Callable[[Unit], None]) -> None:
        frames, self._frames, self._accesses, self._loaded = self._frames, [], 0, []
        self._era += 1
        for frame in frames:
            frame.end_span()
        if self._backward is not None:
            self._backward.units = []
        self._end_backward()
        self._withdraw_hooks()
        # Not as an exception passes: another rank may have none, and this one would wait for it.
        self.gradient_sync.abandon()
        error: TieredError | None = None
        for unit in self.units:
            unit.arriving.close()
            unit.gradients.close()
            try:
                how(unit)
            except TieredError as problem:
                error = problem
        self._shown.clear()
        self._leases.end()
        if self.splitter is not None:
            self.splitter.reset()
        if error is not None:
            raise error

    def _withdraw_hooks(self) -> None:
        """Pop saved-tensor hooks of models whose forward an exception left where nobody could pop them, whichever models these
        are."""
        while True:
            owner = _owner(hooks_active())
            if owner is None or owner.computing or owner._gathered():
                break
            pop_hooks()
        if not in_backward():
            restore_recording()

    # -- saved for backward ------------------------------------------------------------------------------------------------

    def reference(self, tensor: torch.Tensor) -> object | None:
        """Return what to remember instead of a tensor that shows memory of a held unit; None for any other."""
        if tensor.layout is torch.strided:
            address = memory_of(tensor)
            unit = self._shown.get(address)
            placement = None if unit is None else unit.shown_by(tensor, address)
            if unit is not None and placement is not None:  # else an exception kept the unit from being forgotten
                return Reference(unit, placement, tensor)
        return None

    def _hooks(self, *, of_module: bool = False) -> Hooks | None:
        """Return the hooks that must be put in force so that what is saved of a parameter does not keep it: None where nothing
        is recorded, or such are in force already.

        Hooks of others may keep the parameter itself, which shows NaN later; they get what is no parameter, and what they keep
        is looked through. Those of torch.utils.checkpoint count the tensors that they get, and a recomputation keeps them until
        it ends: aliases, which would pin all parameters of a block, and divide the memory. So within a module's forward, which
        is the same both times, they get no parameters. Where parts are gathered from other ranks they do: an alias is smaller
        than another gather.
        """
        if not torch.is_grad_enabled():
            return None
        self.refuse_averaged("what autograd records (torch.enable_grad)")
        below = hooks_active()
        if _owner(below) is self:
            return None
        if of_checkpoint(below) and not (of_module and not self.gradient_sync.several):
            return None
        if not below:
            return self.pack, self.unpack
        over = OverHooks(self, below)
        return over.pack, over.unpack

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd is to keep instead of ``tensor``."""
        if not (self._frames or self._accesses):  # an exception left these hooks behind, and this is another model's
            return Left(tensor)
        reference = self.reference(tensor)
        if reference is not None:
            return reference
        if self.saved is not None:
            return self.saved.pack(tensor)
        packed = tensor if self.splitter is None else self.splitter.pack(tensor)
        return Left(tensor) if packed is tensor else packed

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that ``pack``, or ``reference``, returned this for. Raises MisuseError where its parameter was
        updated, or written to, since; what ``hold`` raises."""
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, Left):
            return packed.tensor()
        if isinstance(packed, SavedActivation):
            return packed.restore()
        if not isinstance(packed, Reference):
            assert self.saved is not None
            return self.saved.unpack(packed)
        unit = packed.unit
        _refuse_updated(unit, packed.version)
        if self._gatherings:
            unit.refuse_written_since(packed)
        if not self._frames:
            self._visit_backward((unit,))
        elif not unit.held:
            self._hold_read(self._frames[-1], unit)
        memory, size = unit.memory[packed.placement], packed.dtype.itemsize
        if memory.numel() % size:  # a view of another type, of a part
            memory = memory[: memory.numel() // size * size]
        found = memory.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)
        found = torch._conj(found) if packed.conjugate else found
        return torch._neg_view(found) if packed.negative else found

    def _visit_backward(self, units: Iterable[Unit]) -> None:
        """Hold ``units`` from here on, and no longer those that were held for backward before."""
        backward, wanted = self._begin_backward(), tuple(units)
        if all(unit in backward.units for unit in wanted):
            return
        if backward.units:
            self._leave_backward()
            self._updates.apply_ready()
        for unit in wanted:
            self.take(unit)
            self._held_for(backward.units, unit)
        backward.visit = self.store.span("backward", _names(wanted))

    def _leave_backward(self) -> None:
        backward = self._backward
        if backward is None:
            return
        if backward.visit is not None:
            backward.visit.end()
        self._drop_all(backward.units)

    def versions(self, module: nn.Module) -> tuple[int, ...]:
        """Return the versions of the units of a split module."""
        return tuple(unit.version for unit in self._within(module))

    def _within(self, module: nn.Module) -> list[Unit]:
        """Return the units that a module, and those within it, hold."""
        return list(dict.fromkeys(unit for one in module.modules() for unit in self._held.get(one, ())))

    @contextmanager
    def recomputing(self, module: nn.Module, versions: tuple[int, ...]) -> Iterator[Callable[[Any], torch.Tensor]]:
        """Hold the units that a split module holds itself while a part of its forward is computed again within backward. They
        stay until others are needed, because all parts follow one another. Modules within it hold theirs as they run. Gives
        what turns a ``reference``, or a saved activation, into a tensor."""
        for unit, version in zip(self._within(module), versions, strict=True):
            _refuse_updated(unit, version)
        frame = Frame(module)
        units = self._held.get(module, ())
        if not self._frames:
            if units:
                self._visit_backward(units)
            else:
                self._begin_backward()  # modules within it, which hold its units, would begin it in the middle
        self._frames.append(frame)
        try:
            for unit in units:
                if not unit.held:
                    self._hold(frame, unit)
            frame.span = self.store.span("recompute", self._titles.get(module) or type(module).__name__)
            yield self.unpack
        finally:
            while frame in self._frames:
                self._leave(self._frames.pop())

    def _begin_backward(self) -> Backward:
        """Return the running backward pass, which begins with the first call."""
        backward = self._backward
        if backward is not None and backward.goes_on:
            return backward
        self.refuse_unresumed()  # before a gradient is in the store
        self.refuse_averaged("backward")
        if backward is not None or (self._frames and not is_called_within({f.module for f in self._frames})):
            self.reset()  # what was before was interrupted
        self.intent.ready()
        self._trimmer.look()
        self.gradient_sync.pass_begins(backward=True)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_pass())
        backward = self._backward
        assert backward is not None
        backward.span = self.store.span("backward", type(self.model).__name__)
        return backward

    def _end_of_pass(self) -> Pass:
        """Make the end of a new pass, which nobody keeps but autograd."""
        end = Pass(self._finish_backward)
        self._backward = Backward(end, graph_task())
        return end

    def _finish_backward(self) -> None:
        self._leave_backward()
        try:
            self._close_gradients()
            for unit, placement in self.gradient_sync.backward_ended():
                self._updates.arrived(unit, placement)
            self._updates.finish(self.partition)
            self.intent.updated = False
            if self.adaptive is not None:
                self.adaptive.pass_ended()
        finally:
            self._end_backward()

    def _close_gradients(self) -> None:
        backward = self._backward
        if backward is not None and backward.graded is not None:
            backward.graded.arriving.close()
            backward.graded = None

    def _end_backward(self) -> None:
        """Forget the backward pass, also after an exception."""
        self._leave_backward()
        if self._backward is not None and self._backward.span is not None:
            self._backward.span.end()
        self._updates.abandon()
        for unit in self.units:
            unit.gradients.end_pass()
        self._close_gradients()
        self._backward = None
        if self.splitter is not None:
            self.splitter.activations.sweep()
        if self.saved is not None:
            self.saved.sweep()

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def _hook_gradients(self, unit: Unit) -> None:
        """Hook the gradients of a unit that is held, also of a parameter that was unfrozen since. What is hooked stays so until
        the unit is dropped: a module within the unit looks at those that are not."""
        gradients = unit.gradients
        if not gradients.unhooked or not torch.is_grad_enabled() or _excluded(_AUTOGRAD):  # what is not recorded has no node
            return
        for placement in list(gradients.unhooked):
            parameter: Any = placement.parameter
            if not (parameter.requires_grad and parameter.is_leaf):  # one that was frozen may be the result of a write
                continue
            state = gradients.states.get(placement)
            if state is None or state.taker is None:
                self._hook_taking(unit, placement, state)
                state = gradients.states[placement]
            if state.node is None:
                self._hook_node(parameter, state)
            del gradients.unhooked[placement]

    def _hook_taking(self, unit: Unit, placement: Placement, state: GradientState | None) -> None:
        """Have a parameter give away what autograd has accumulated. Another such hook, where an exception strikes, finds
        nothing to take."""
        unit.plan.refuse_writing()
        if state is None:
            raise MisuseError(f"parameter {placement.name!r} is {placement.dtype}: only real floating point can be trained")
        parameter: Any = placement.parameter
        ours = parameter.register_post_accumulate_grad_hook(weak_hook(parameter, Pager._gradient_arrived)).id
        hooks = parameter._post_accumulate_grad_hooks
        for theirs in [number for number in hooks if number != ours]:
            hooks[theirs] = hooks.pop(theirs)  # after ours, which gives ``parameter.grad`` its values
        state.taker = ours

    def _hook_node(self, parameter: nn.Parameter, state: GradientState) -> None:
        """Hook the node that accumulates, and keep it: a hook on the parameter would run for torch.autograd.grad, too. The
        parameter holds its node weakly."""
        node = get_gradient_edge(parameter).node
        if state.announced is None or state.announced() is None:
            announced = Announced()
            node.register_prehook(weak_hook(parameter, partial(Pager._gradient_arrives, announced=announced)))
            state.announced = weakref.ref(announced)  # from here on it counts
        state.node = node

    def _gradient_arrives(self, unit: Unit, placement: Placement, grads: Any, *, announced: Announced) -> None:
        state = unit.gradients.states[placement]
        if state.announced is None or state.announced() is not announced:
            return
        state.defined = False
        if not placement.parameter.requires_grad:  # frozen since forward: torch does not accumulate, and calls the hooks
            return
        self._open_gradients(unit)
        if grads[0] is not None:  # as where a function returned None, and of the norm of order 0
            state.defined = True
            unit.arriving.before(placement)

    def _gradient_arrived(self, unit: Unit, placement: Placement, _: Any) -> None:
        state = unit.gradients.states[placement]
        if not state.defined or not placement.parameter.requires_grad:
            return
        state.defined = False
        grad = placement.grad
        assert grad is not None, "torch has accumulated it"
        unit.arriving.add(placement, grad)
        if not grad.is_meta:
            self._trimmer.passed(placement.nbytes)
        unit.gradients.arrived.add(placement)
        if not self.gradient_sync.several:  # else once all ranks' are there
            self._updates.arrived(unit, placement)
        if self._backward is None or graph_task() != self._backward.task:  # a backward pass within: more may come
            unit.gradients.deferred = True

    def _open_gradients(self, unit: Unit) -> None:
        """Make ``unit`` the one whose gradients are leased: one unit's are at a time."""
        backward = self._begin_backward()
        if backward.graded is not unit:
            if self._updates.waiting and not any(held.references for held in backward.units):
                self._leave_backward()
            self._updates.apply_ready()
            self._close_gradients()
            self.gradient_sync.moved_on()
            backward.graded = unit

    def _units_in_order(self) -> list[Touch]:
        """Return the units in the order of their modules: none where parts are gathered from other ranks."""
        if self.gradient_sync.several:
            return []
        return [Touch(unit.used_key, nbytes=self._used_nbytes(unit)) for unit in self.units]

    def _used_nbytes(self, unit: Unit) -> int:
        return unit.plan.stored_nbytes if unit.used_key == unit.key else unit.plan.nbytes

    def _look_ahead(self, unit: Unit) -> None:
        """Ask the store for all that this unit will need, while no order is known yet."""
        if self._prefetch == "on" and not self.step_trace.following:
            self.store.prefetch(unit.upcoming_keys(), tier=self.update_tier)

    # -- copies in memory ------------------------------------------------------------------------------------------------------

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a copy of a parameter in memory, which is not paged. Raises CapacityError where a memory cgroup leaves too
        little for it."""
        refuse_little_room(self.store, "a copy of this model in memory", more=parameter.numel() * parameter.itemsize)
        found = self._home.get(parameter)
        kind = nn.Parameter if found is None else found[0].kind(found[1])
        with torch.inference_mode(False):
            return kind(self.value(parameter).to(self.store.device), parameter.requires_grad)

    def _reduce(self, module: nn.Module, protocol: Any) -> Any:
        """Return what copy.deepcopy makes a copy of a module from, which is in memory. pickle comes here, too, and then to
        parameters, which refuse."""
        parts: Any = type(module).__reduce_ex__(module, protocol)
        make, given, state, *rest = parts
        if not isinstance(state, dict):
            raise no_copy()
        return make, given, self._unpaged(module, state), *rest

    @property
    def wholes(self) -> list[nn.Parameter]:
        """The parameters of the model: those that are sliced, too, and not their slices."""
        return [*self.sliced, *(one.parameter for one in self.placements if one.sliced is None)]

    def parts(self, parameter: nn.Parameter) -> list[tuple[Unit, Placement]]:
        """Return where the slices of a parameter are, in order; of one that is not sliced, where it is."""
        return [self._home[one] for one in (self.sliced[parameter].slices if parameter in self.sliced else [parameter])]

    def _unpaged(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of a module without what paging has added to them. Those of a deep copy have copies of the
        parameters; a shallow one has the parameters themselves."""
        state = {name: value for name, value in state.items() if name not in OURS}
        if state.get("forward") is self._since[module]:
            state |= {"forward": self._before[module]}
        if state.get("forward", self) is None:
            del state["forward"]
        ours = self._numbers(module)
        for name, hooks in _hooks_in(state):
            state[name] = type(hooks)((number, hook) for number, hook in hooks.items() if number not in ours)
        named = state["_parameters"].items()
        deep = {n: _ToCopy(self, p) if p in self._home or p in self.sliced else p for n, p in named}
        return _Attributes(state, state | {"_parameters": deep})

    def _numbers(self, module: nn.Module) -> set[int]:
        """Return the numbers of the hooks that paging has registered with a module."""
        there = [(number, hook) for _, hooks in _hooks_in(module.__dict__) for number, hook in hooks.items()]
        of_forward = [number for number, hook in there if is_of_forward(hook)]
        return {KEY, *of_forward, *(handle.id for handle in self._hooks_of.get(module, ()))}

    # -- other types, and out of the store ---------------------------------------------------------------------------------

    def _apply(self, module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Do as the method of ``nn.Module``. Parameters that ``function`` would give another type get that together, as the
        store has them, and are left to it then as they are."""
        within = {one for one in module.parameters(recurse) if one in self._home or one in self.sliced}
        kinds = {dtype: _type_of(function, dtype, self.store.device) for dtype in {one.dtype for one in within}}
        other = {one: kinds[one.dtype] for one in within if kinds[one.dtype] is not one.dtype}
        if torch.__future__.get_swap_module_params_on_conversion():
            other = {}  # what it calls refuses by name
        if other and self.change is not None:
            self.change(other)

        def left(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor in within and tensor in other else function(tensor)

        apply: Any = type(module)._apply
        found: nn.Module = apply(module, left if other else function, recurse)
        return found

    def give(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Have a parameter be of the shape and the type of ``values``, and have these. Raises as ``zero.page``."""
        assert self.change is not None, "it is set once a model is paged"
        self.change({parameter: values})  # type: ignore[dict-item]


    def call(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Have ``forward`` be called for a module as long as it is paged: a copy in memory does not have it."""
        module.forward = self._since[module] = forward

    def refuse_wrapped(self) -> None:
        """Raise MisuseError where somebody has put another forward around that of a module, which would call that of paging."""
        for module, since in self._since.items():
            if since is not None and module.__dict__.get("forward") is not since:
                raise MisuseError(
                    f"the forward of a {type(module).__name__} was replaced after zero.page, by something that may call that "
                    "of before: undo that first (accelerate.hooks.remove_hook_from_module, say)"
                )

    def leaving(self, values: Mapping[nn.Parameter, torch.Tensor], call: str) -> Iterator[Callable[[], object]]:
        """Yield what makes the model one that is not paged, step by step; each step may be done twice. ``values``: those of its
        parameters from then on, whose gradients stay what they are. ``call``: what users have called."""
        taken_over = partial(setattr, self, "in_commit", None), partial(self._before_commits, weakref.ref(self))
        yield from (*taken_over, partial(_pagers.discard, self))
        for parameter, value in values.items():
            grad: Any = parameter.grad
            placement = None if parameter in self.sliced else self._home[parameter][1]
            state = None if placement is None else self._home[parameter][0].gradients.states.get(placement)
            grad = grad.detach().clone() if isinstance(grad, StoredTensor) else grad
            yield partial(_give_back, parameter, value, grad, state)
        for module in reversed(self._before):  # inner ones first: the hooks of outer ones have this done, where it is cut off
            yield partial(self._leave_module, module)
        # Who used the model as this was interrupted, and had it done, has yet to find that it is another one now.
        yield partial(self.intent.spoil, f"{call} was interrupted, and is complete now: do again what was done")

    def leave_modules(self) -> None:
        """Take away from the modules what paging has added to them, as far as it has."""
        for module in reversed(self._before):
            self._leave_module(module)

    def _leave_module(self, module: nn.Module) -> None:
        own, before = module.__dict__, self._before[module]
        if isinstance(module._parameters, _Watched):
            module._parameters = dict(module._parameters)
        if own.get("forward") is self._since.get(module, own.get("forward")):
            own["forward"] = before
        if own.get("forward", self) is None:
            del own["forward"]
        numbers = self._numbers(module)
        for _, hooks in _hooks_in(own):
            for number in numbers & hooks.keys():  # in place: handles of others refer to these dicts
                del hooks[number]
        for name in OURS:
            own.pop(name, None)

    # -- state_dict --------------------------------------------------------------------------------------------------------

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put copies in the place of values; one copy of a parameter that has several names, as torch has one tensor. With
        ``keep_vars=True`` the parameters themselves stay."""
        for name, parameter in module._parameters.items() if not isinstance(state, StateListing) else ():
            found = state.get(prefix + name)
            if found is not None and found is not parameter and (parameter in self._home or parameter in self.sliced):
                state[prefix + name] = self._copy_for(state, prefix + name, parameter)

    def _copy_for(self, state: dict[str, Any], name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy of a parameter's value for ``state``: the one that it has already where modules share the parameter, so
        that a tied weight is one tensor, as in memory."""
        version = self.version(parameter)
        other, then, copied = self._copied.get(parameter, ("", version, _no_tensor))
        copy = copied()
        there = state.get(other) is copy
        if copy is not None and there and other != name and then == version:
            return copy
        with torch.inference_mode(False):  # else nothing would tell a write to it
            values = self.value(parameter)
        copy = CopiedValues.of(values, CopiedParameter(parameter, self.version(parameter)))
        self._copied[parameter] = name, self.version(parameter), weakref.ref(copy)
        return copy

    def listed(self) -> dict[str, Any]:
        """Return what ``state_dict`` has, with the parameters themselves in place of their values."""
        return self.model.state_dict(destination=StateListing(), keep_vars=True)

    def value(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy of a parameter's value in host memory, after applying pending updates."""
        if parameter in self.sliced:
            sliced = self.sliced[parameter]
            whole = torch.empty(sliced.shape, dtype=sliced.dtype, device="cpu")
            for number, one in enumerate(sliced.slices):
                whole[sliced.at(number)].copy_(self.value(one))
            return whole
        unit, placement = self._home[parameter]
        self.start()
        self.take(unit)
        try:
            return placement.parameter.detach().to("cpu", copy=True)
        finally:
            unit.drop()

    def _loading(self, module: nn.Module) -> list[Unit]:
        """Return the units that are held while a module takes its values of a state; none where some of its parameters are
        written to by functions of torch (divided ones, views of others), which hold what they need and nothing else."""
        parameters = [one for one in module._parameters.values() if one is not None]
        if not all(one in self._home for one in parameters):
            return []
        return list(dict.fromkeys(self._home[one][0] for one in parameters))

    def _before_load(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            for name, parameter in module._parameters.items():
                if prefix + name in state and (parameter in self._home or parameter in self.sliced):
                    raise MisuseError(
                        f"load_state_dict(assign=True) would replace the paged parameter {prefix + name!r}: load without assign"
                    )
        self._drop_all(self._loaded)  # those of the module around this one, which has its values: its children come after it
        self.start()
        for unit in self._loading(module):
            self.take(unit, Access.WRITE)
            self._loaded.append(unit)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        self._drop_all(self._loaded)


def _type_of(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return which type ``function`` gives to tensors of type ``dtype``: that type itself, where it does anything else."""
    if not dtype.is_floating_point:
        return dtype
    with torch.no_grad(), suppress(Exception):  # of tensors without elements, say: what it raises, it raises when it is called
        value = torch.tensor([1 / 3, -2.7182818], dtype=dtype, device=device)
        made = function(value)
        if made.dtype.is_floating_point and made.device == value.device and torch.equal(made, value.to(made.dtype)):
            return made.dtype
    return dtype


def _hooks_in(attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the dicts with hooks among the attributes of a module, by name."""
    return [(n, v) for n, v in attributes.items() if n.startswith("_") and "hooks" in n and isinstance(v, dict)]


def _give_back(parameter: Any, values: torch.Tensor, grad: torch.Tensor | None, state: GradientState | None) -> None:
    """Make a parameter an ordinary one; ``state``: that of its gradient."""
    unpage(parameter, values)
    parameter.grad = grad
    if state is not None:
        (parameter._post_accumulate_grad_hooks or {}).pop(state.taker, None)
        state.node = state.taker = None
    handle = parameter.__dict__.get("_tiered")
    if isinstance(handle, ParameterHandle):
        handle.ended = True
    for ours in ("_tiered", "_gradient"):
        parameter.__dict__.pop(ours, None)


class _Attributes(dict[str, Any]):
    """Attributes of a module, which a shallow copy takes as they are, and ``deep``, of which a deep copy takes copies."""

    def __init__(self, attributes: dict[str, Any], deep: dict[str, Any]) -> None:
        super().__init__(attributes)
        self._deep = deep

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        made: dict[str, Any] = deepcopy(self._deep, memo)
        return made


class _ToCopy:
    """Stand for a paged parameter in what copy.deepcopy copies."""

    def __init__(self, pager: Pager, parameter: nn.Parameter) -> None:
        self._pager, self._parameter = pager, parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        key = id(self._parameter)
        if key not in memo:  # else a tied one, whose first module was copied before
            memo[key] = self._pager.copied(self._parameter)
        return memo[key]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_copy()


class ParameterHandle:
    """What leads from a parameter to its pager, unit and placement. The references are weak: the collector does not see through
    autograd's node, which keeps the parameter, so a model that its parameters referred to would never be collected."""

    source = Whole
    """Where the values of the parameter are."""

    def __init__(self, pager: Pager, unit: Unit, placement: Placement) -> None:
        self._pager, self._unit, self._placement = weakref.ref(pager), weakref.ref(unit), weakref.ref(placement)
        self.views: MutableMapping[int, Any] = weakref.WeakValueDictionary()  # by number: tensors do not compare as keys
        self.name = placement.name
        """In its model, as errors say it."""
        self.ended = False
        """Whether the parameter is an ordinary one again; a graph may still have hooks on the node of its gradient."""

    def owner(self) -> Pager | None:
        """Return the pager, or None where the model is gone."""
        return self._pager()

    def resolve(self) -> tuple[Pager, Unit, Placement] | None:
        """Return pager, unit and placement, or None where the model is gone."""
        pager, unit, placement = self._pager(), self._unit(), self._placement()
        return None if pager is None or unit is None or placement is None else (pager, unit, placement)

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Return whether ``parameter`` is the one, and not another that was given its attributes; True where the model is gone.
        """
        placement = self._placement()
        return placement is None or placement.parameter is parameter

    def lend(self, values: torch.Tensor) -> None:
        """Have the unit look, when it is dropped, whether something was written to ``values``, which are ``.data`` of the
        parameter."""
        unit, placement = self._unit(), self._placement()
        if unit is not None and placement is not None:
            unit.lend(placement, values)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        raise no_copy()


class SlicedHandle:
    """What leads from a parameter that is sliced to its pager, and to the placements of its slices. Keeps the slices, which the
    parameter is made of, and not the model."""

    source = Divided

    def __init__(self, pager: Pager, sliced: Sliced) -> None:
        self._pager = weakref.ref(pager)
        self.name, self.slices, self.rows = sliced.name, sliced.slices, sliced.rows
        self.views: MutableMapping[int, Any] = weakref.WeakValueDictionary()  # by number: tensors do not compare as keys

    def lend(self, values: torch.Tensor) -> None:
        """Do nothing: ``.data`` of a sliced parameter writes to its slices."""

    def owner(self) -> Pager | None:
        """Return the pager, or None where the model is gone."""
        return self._pager()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        raise no_copy()


def placement_of(parameter: torch.Tensor) -> tuple[Pager, Unit, Placement]:
    """Return pager, unit and placement of a parameter. Raises MisuseError for one that was not paged, or whose model is gone.
    """
    handle = getattr(parameter, "_tiered", None)
    if handle is None:
        raise MisuseError(
            f"this parameter, of shape {tuple(parameter.shape)}, is not paged: call tiered.zero.page(model, store) before "
            "making the optimizer, or make it with store= to keep only the states there"
        )
    if isinstance(handle, SlicedHandle):
        raise MisuseError(f"parameter {handle.name!r} is divided into slices, of which each has a place of its own")
    found: tuple[Pager, Unit, Placement] | None = handle.resolve()
    if found is None:
        raise MisuseError(f"the model of parameter {handle.name!r} is gone: keep it as long as its parameters are used")
    if found[2].parameter is not parameter:
        raise MisuseError(OTHER)
    return found


def placements_of(parameter: torch.Tensor) -> list[tuple[Pager, Unit, Placement]]:
    """Return ``placement_of`` of each slice of a parameter; of a parameter that is not sliced, of it alone."""
    handle = getattr(parameter, "_tiered", None)
    return [placement_of(one) for one in (handle.slices if isinstance(handle, SlicedHandle) else [parameter])]


def pager_of_parameter(parameter: torch.Tensor) -> Pager:
    """Return the pager of a parameter. Raises as ``placement_of``."""
    handle = getattr(parameter, "_tiered", None)
    owner = handle.owner() if isinstance(handle, ParameterHandle) and handle.is_of(parameter) else None
    return placements_of(parameter)[0][0] if owner is None else owner


def name_of(parameter: torch.Tensor) -> str:
    """Return the name of a paged parameter in its model. Raises as ``placement_of``."""
    pager_of_parameter(parameter)
    return parameter._tiered.name  # type: ignore[attr-defined,no-any-return]


def pager_of(model: nn.Module) -> Pager:
    """Return the pager of ``model``, which may have parameters in memory, too. Raises MisuseError for a model that is not
    paged, or has no parameters."""
    expect_type(model, nn.Module, "a paged model is a torch.nn.Module")
    parameters = list(model.parameters())
    for parameter in parameters:
        if hasattr(parameter, "_tiered"):
            return pager_of_parameter(parameter)
    raise MisuseError(
        f"this {type(model).__name__} is not paged: call tiered.zero.page(model, store) first" if parameters else
        "this model has no parameters"
    )


def buffer_places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return where each buffer of a model is, by its name: its module, and its name in that. One of several names once."""
    modules = dict(model.named_modules())
    parts = {name: name.rpartition(".") for name, _ in model.named_buffers()}
    return {name: (modules[where], last) for name, (where, _, last) in parts.items()}


def _no_tensor() -> None:
    """Stand for a weak reference to nothing."""


def weak_hook(parameter: nn.Parameter, what: Callable[[Pager, Unit, Placement, Any], None]) -> Callable[[Any], None]:
    """Return a hook that calls ``what`` for a parameter and keeps neither the model nor the parameter."""
    handle: ParameterHandle = parameter._tiered  # type: ignore[attr-defined]

    @uncompiled
    def hook(given: Any) -> None:
        if handle.ended:
            return
        found = handle.resolve()
        assert found is not None, "what computes a gradient still has the model"
        what(*found, given)

    return hook


def _shows_arguments() -> bool:
    """Return whether a function of torch shows its arguments to somebody: autograd, or a mode."""
    return torch.is_grad_enabled() or torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0


def _refuse_scripting() -> None:
    """Raise MisuseError, because ``torch.jit.script`` is about to compile a paged model."""
    raise MisuseError(
        "torch.jit.script cannot look into a paged model, whose parameters are in memory only while they are used: give it a "
        "model that is not paged (one made anew, with load_state_dict(model.state_dict()))"
    )


def _owner(hooks: Hooks | None) -> Pager | None:
    """Return the pager that saved-tensor hooks are of, if one's."""
    owner = getattr((hooks or (None,))[0], "__self__", None)
    if isinstance(owner, OverHooks):
        owner = owner.model
    return owner if isinstance(owner, Pager) else None


def _pop(hooks: Hooks | None) -> None:
    """Take ``hooks`` out of force, where no exception has done so."""
    if hooks is not None and hooks_active() == hooks:
        pop_hooks()


def _names(units: Iterable[Unit]) -> str:
    return ", ".join(unit.plan.name for unit in units)


def _refuse_updated(unit: Unit, version: int) -> None:
    if unit.version != version:
        raise MisuseError(
            f"the parameters of {unit.plan.shown} were updated, or written to, after this graph was made: call backward "
            "before step() and before other writes"
        )


def _before_commit(pager: Callable[[], Pager | None], leaving: bool) -> str | None:
    """Note what is in memory of the units that are held, because a commit begins; ``leaving``: at the end of a block, whose
    commit is a checkpoint. Returns why there must be no such commit."""
    found = pager()
    if found is None:
        return None
    for unit in found.units:
        if unit.held:
            unit.remember()
    if found.in_commit is not None and (leaving or found.checkpoint.before is not None):
        return found.in_commit(leaving)
    return None


def _untrained(pager: Callable[[], Pager | None]) -> str | None:
    """Return why nothing of a model is trained, where it is quantised."""
    found = pager()
    if found is None or any(placement.parameter.requires_grad for placement in found.placements):
        return None
    return next((unit.plan.for_reading for unit in found.units if unit.plan.read_only), None)


def pagers_in(store: TieredStore) -> list[Pager]:
    """Return the pagers of all models in ``store``."""
    return [pager for pager in list(_pagers) if pager.store is store]


_pagers: weakref.WeakSet[Pager] = weakref.WeakSet()
