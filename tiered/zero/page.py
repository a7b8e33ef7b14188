"""Page a model: move its parameters into the store, one module at a time, and have them paged from then on.

``page`` checks its arguments, divides the model, fills the units, and makes the pager; where it raises, the model is as before.
``statistics`` and ``no_sync`` ask the pager of a model that is paged.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import clear_frames
from typing import Any, Literal, Protocol, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from tiered.errors import (
    CapacityError,
    MisuseError,
    QuantizedWarning,
    TieredError,
    WriteError,
    expect_type,
    listed,
    one_of,
    path_of,
    quoted,
    whole_number,
)
from tiered.store import TieredStore
from tiered.store.activations import refuse_one_tier
from tiered.system import Trimmer, refuse_little_room, returned_at_once
from tiered.telemetry import ActivationStatistics
from tiered.tuning.adaptive import AutoPlan, AutoPlanStatistics
from tiered.types import Access, Owner
from tiered.zero.changing import change
from tiered.zero.checkpoint import checkpoint
from tiered.zero.checkpoint.ending import include_in_commits, record
from tiered.zero.checkpoint.reshard import CheckpointSource, opened, reshard
from tiered.zero.checkpoint.safetensors import Pretrained
from tiered.zero.collectives import Ranks, Term
from tiered.zero.construction.construct import unguard
from tiered.zero.construction.deferred import Deferred, expect
from tiered.zero.construction.shown import ShownParameters
from tiered.zero.construction.staging import PREFIX, Staged, Window, current, find
from tiered.zero.optimizers.optimizer import STARTS, Optimizer, refuse_others
from tiered.zero.paging.pager import (
    Activations,
    Pager,
    PagerConfig,
    Paging,
    pager_of,
    pager_of_parameter,
    placements_of,
)
from tiered.zero.paging.recompute.micro_batch import refuse_batch_dependent, split_modules
from tiered.zero.paging.saved_tensors import outside_inference
from tiered.zero.paging.sharding import FILLING, Partition, Sharded, Stage, Stage3, Unsharded
from tiered.zero.paging.storage import in_update_tier, model_named
from tiered.zero.paging.tensors.parameters import unpage
from tiered.zero.paging.units import ALL, SAVED_SHARE, Limits, ModelPlan, Placement, Policy, Slicing, UnitPlan, divide
from tiered.zero.rank_stores import newest_set, number_of

__all__ = [
    *("Filling", "Moved", "PageOptions", "PagingStatistics", "Replacement", "differing", "gathered", "no_sync", "offload"),
    *("onload", "page", "page_by", "page_filling", "smallest_pool", "statistics"),
]

@dataclass(frozen=True, slots=True)
class PagingStatistics:
    """Counters of one paged model, since ``page``.

    ``units``: how many there are. ``largest_unit``: bytes of the largest one's parameters. ``updates``: how many updates of a
    unit were applied, ``update_seconds``: what they took, without the time that they waited for the store. ``split``: names of
    the modules that divide the batch (``micro_batch=``), or whose inside backward computes again
    (``activations="recompute"``), or may (``"auto"``); ``computed_again``: how often forward came to one of these.
    ``activations``: what went into the store with ``activations="store"`` or "auto", else None. ``plan``: what "auto" chose,
    else None. ``divided``: weights of linear layers that are used some rows at a time, because three of them are larger than
    the memory budget: the gradient of such a layer's input may have other last bits than in memory.
    """

    units: int
    largest_unit: int
    updates: int
    update_seconds: float
    split: tuple[str, ...]
    computed_again: int = 0
    activations: ActivationStatistics | None = None
    plan: AutoPlanStatistics | None = None
    divided: tuple[str, ...] = ()


def statistics(model: nn.Module) -> PagingStatistics:
    """Return what paging ``model`` took so far. Raises MisuseError for a model that is not paged."""
    pager = pager_of(model)
    units = pager.units
    return PagingStatistics(
        units=len(units),
        largest_unit=max(unit.plan.nbytes for unit in units),
        updates=sum(unit.updates_made for unit in units),
        update_seconds=sum(unit.states.update_seconds for unit in units),
        split=pager.splitter.split if pager.splitter is not None else (),
        computed_again=pager.splitter.computed_again if pager.splitter is not None else 0,
        activations=None if pager.saved is None else pager.saved.statistics(),
        plan=None if pager.adaptive is None else pager.adaptive.chosen(),
        divided=pager.divided_products(),
    )


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Have backward passes in this block only add up their gradients in this rank's store. The next pass outside of it, or
    ``optimizer.step()``, reduces the sums: once, as in ``DistributedDataParallel.no_sync``. With one process, and with
    ``zero.Stage1``, that is how it is anyway. Raises MisuseError for a model that is not paged."""
    sync = pager_of(model).gradient_sync
    before, sync.paused = sync.paused, True
    try:
        yield
    finally:
        sync.paused = before


@contextmanager
def gathered(what: nn.Module | torch.Tensor | Iterable[torch.Tensor], *, write: bool = False) -> Iterator[None]:
    """Have parameters in memory, as real tensors, for a block of code.

    ``what``: a module (all of its parameters), a parameter, or several; those that are not paged are left out. A single read or
    write outside of forward needs no such block; it is for code that uses the same parameters many times, or that reads their
    memory without torch (``data_ptr``). A parameter that is divided into slices (experts) stays one without memory of its own;
    its slices are in memory. ``write=True`` says that the block writes to them: what it writes goes to the store,
    also what it writes without torch. Without, values that torch writes are found at the end of the block, and copied. Forward,
    backward and ``generate`` run within the block; ``optimizer.step`` is refused. With several processes all of them enter the
    block.

    Raises CapacityError where the memory budget cannot hold the parameters, with the number of bytes.
    """
    if isinstance(what, nn.Module):
        given: list[torch.Tensor] = list(what.parameters())
    else:
        given = [what] if isinstance(what, torch.Tensor) else listed(what, "what is gathered is a module, or parameters")
    pagers: dict[Pager, list[torch.Tensor]] = {}
    for parameter in given:
        if hasattr(parameter, "_tiered"):
            mine = pagers.setdefault(pager_of_parameter(parameter), [])
            mine += [placement.parameter for _, _, placement in placements_of(parameter)]
    with ExitStack() as stack:
        for pager, mine in pagers.items():
            stack.enter_context(pager.gathering(mine, Access.WRITE if write else Access.READ))
        yield


COMPONENTS = ("parameters", "gradients", "states")


@dataclass(frozen=True, slots=True)
class Moved:
    """What ``zero.offload`` or ``zero.onload`` moved: ``bytes`` of tensors by component, in ``seconds``.

    ``given_back``: bytes of the memory budget that the process stopped using. ``stayed``: keys of tensors that are still in
    use, or that did not fit.
    """

    bytes: Mapping[str, int]
    seconds: float
    given_back: int = 0
    stayed: tuple[str, ...] = ()


def offload(model: nn.Module, optimizer: Optimizer | None = None, *, components: Sequence[str] = COMPONENTS) -> Moved:
    """Move a paged model's ``components`` out of memory, to the lowest tier, while something else runs: an inference engine
    between two phases of reinforcement learning, for example. The process then uses less of its memory budget.

    ``components``: "parameters", "gradients", "states" (of the optimizer, masters included). Nothing is lost, and nothing needs
    to be brought back: the next step fetches what it uses. ``zero.onload`` brings it earlier. Pending updates stay pending.
    ``optimizer``: that of the model, whose states are beside the parameters in the store; it may be left out.

    Raises MisuseError for a model that is not paged, one that is computing, and a component that there is not; what the store
    raises.
    """
    pager, keys = _components(model, optimizer, components)
    found = pager.store.offload([key for mine in keys.values() for key in mine])
    stayed = set(found.stayed)
    moved = {name: _nbytes(pager.store, [key for key in mine if key not in stayed]) for name, mine in keys.items()}
    return Moved(moved, found.seconds, found.given_back, found.stayed)


def onload(model: nn.Module, optimizer: Optimizer | None = None, *, components: Sequence[str] = COMPONENTS) -> Moved:
    """Bring a paged model's ``components`` into memory, parameters first, as far as they fit. Raises as ``offload``."""
    pager, keys = _components(model, optimizer, components)
    store, began = pager.store, time.monotonic()
    room = min(tier.capacity for tier in store.statistics().tiers if tier.name != "nvme")
    moved, stayed = dict.fromkeys(keys, 0), []
    chosen: dict[str, str] = {}
    for name, mine in keys.items():
        for key in mine:
            nbytes = store.spec(key).nbytes
            if nbytes <= room:
                room, chosen[key] = room - nbytes, name
            else:
                stayed.append(key)
    for start in range(0, len(chosen), ONLOADED_TOGETHER):
        keys_now = list(chosen)[start : start + 2 * ONLOADED_TOGETHER]
        store.prefetch(keys_now, tier="dram")
        for key in keys_now[:ONLOADED_TOGETHER]:
            with store.lease(key, tier="dram") as tensor:
                moved[chosen[key]] += tensor.nbytes
                del tensor
    return Moved(moved, time.monotonic() - began, 0, tuple(stayed))


ONLOADED_TOGETHER = 32
"""Tensors that ``onload`` asks for at a time."""


def _components(
    model: nn.Module, optimizer: Optimizer | None, components: Sequence[str]
) -> tuple[Pager, dict[str, list[str]]]:
    """Return the pager of ``model`` and the keys of each component."""
    pager = pager_of(model)
    expect_type(optimizer, Optimizer | None, "the second argument is the model's zero.AdamW, and components are components=")
    if optimizer is not None and (optimizer.resident or set(optimizer.pagers()) != {pager}):
        raise MisuseError("this optimizer updates parameters of another model: give the one of this model, or leave it out")
    for name in listed(components, f"components are several of {', '.join(map(repr, COMPONENTS))}"):
        one_of("each of components", name, COMPONENTS)
    if pager.computing:
        raise MisuseError("the model is computing: move its tensors between steps")
    pager.reset()
    parameters, gradients = {unit.key for unit in pager.units}, {unit.gradients.key for unit in pager.units}
    found: dict[str, list[str]] = {name: [] for name in COMPONENTS if name in components}
    for key in pager.store.owned(pager.owner):
        if key.startswith(f"{pager.name}/param/"):
            kind = "parameters" if key in parameters else "gradients" if key in gradients else "states"
            found.get(kind, []).append(key)
    return pager, found


def _nbytes(store: TieredStore, keys: Iterable[str]) -> int:
    return sum(store.spec(key).nbytes for key in keys)


AS_IT_IS, USUAL = Policy(), Paging()

Init = Callable[[nn.Module], None]


def start(store: TieredStore, name: str, source: object = None) -> Literal["resume", "refuse"]:
    """Return what ``existing="continue"`` is for model ``name`` of ``store``. Raises MisuseError where the store has tensors of
    it and no checkpoint."""
    if source is not None or f"{name}/checkpoint" in store:
        return "resume"
    held = store.owned(model_named(name))
    if held:
        raise MisuseError(
            f"{store} has {len(held)} tensor{'' if len(held) == 1 else 's'} of a model named {name!r}, and no checkpoint to go "
            "on from, which zero.commit or the end of the store's with block makes: open an earlier generation that has one, "
            "or begin anew with existing='overwrite'"
        )
    return "refuse"


def page(
    model: nn.Module,
    store: TieredStore,
    *,
    name: str = "model",
    existing: str = "refuse",
    source: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    param_init_fn: Init | None = None,
    policy: Policy = AS_IT_IS,
    micro_batch: int = 1,
    activations: Activations | AutoPlan = "memory",
    stage: Stage | None = None,
    timeout: float | None = None,
    paging: Paging = USUAL,
) -> nn.Module:
    """Move ``model``'s parameters into ``store`` and page them around each module's forward and backward. Returns ``model``.

    Make the optimizer afterwards, with ``tiered.zero.AdamW``. A model that was built under ``zero.init(store)`` is adopted
    parameter by parameter. Parameters on the meta device are given memory module by module, initialised by
    ``param_init_fn(module)`` (default: the module's ``reset_parameters``), and stored at once. Either way a model may be built
    that never fits into memory. Modules compute where the store's top tier is (``store.device``): buffers are moved there and
    stay there, inputs have to be there.

    ``name``: their keys begin with it and a slash; several models in one store need different ones.
    ``existing``: what to do when the store already holds tensors under ``name``: "refuse", "overwrite" (what is there stays
    until all of ``model`` is in the store, so there has to be room for both; an object that had it raises InterruptedStep in
    every use from then on), "resume": take the parameters that ``zero.commit`` left there, and give up those of ``model``;
    ``zero.resume`` goes on from there; or "continue": as "resume" where the store has a checkpoint of ``name``, and begin where
    it has nothing of it. Then no step is made, and nothing committed, before ``zero.resume``, which a program may call in any
    case.
    ``weights``: a safetensors file, or a folder of them as Hugging Face has it, with the values of all parameters and of the
    buffers that ``state_dict`` has, by name (one is enough of a tied parameter's). They are read piece by piece and converted
    to the model's types; a model on the meta device, or built under ``zero.init``, is never whole in memory.
    ``policy``: element types in the store other than those that modules compute with, see ``zero.Policy``.
    ``paging``: into what the model is divided, and how that moves, see ``zero.Paging``.
    ``micro_batch``: into how many parts the batch is divided inside units (1: not at all). Parameters are then read twice a
    step however large the batch is, and only one part's inside is in memory; what backward needs of the rest is computed
    again, from inputs that wait in the store as ``tiered.saved/NAME/…``. The outermost modules whose parameters are all in
    memory while they run (``statistics(model).split``; never ``model`` itself when it has some) run on one part after the
    other. The batch is the leading size of the first tensor that ``model`` is given. Arguments of that leading size are split,
    others, parameters and buffers are shared, and a module without an argument to split runs whole. Parts differ by at most
    one sample. Outputs are put together along the first dimension; what has another leading size must be equal for all parts.
    Numbers are those of the same split with ``torch.utils.checkpoint`` in memory, bit for bit. MisuseError, then or when the
    model is called, names a module that computes across the batch (BatchNorm in training, one of yours with an attribute
    ``batch_dependent = True``, one that changes a buffer), has it in the second dimension, or cannot be split otherwise.

    ``activations``: where what backward needs of forward is meanwhile: in "memory"; "recompute": nowhere, the modules named in
    ``statistics(model).split`` (layers that repeat, up to a quarter of the pool, and other modules of one unit) are computed
    again from their inputs, which wait in the store; "store": in the store, but for the newest eighth of the budget (64 MiB at
    most) and small tensors, as with ``tiered.offload_activations``. Results are the same, bit for bit.
    ``statistics(model).activations`` says how much went there, and what backward waited for. "auto": each of these modules one
    of the three ways, chosen after a measured warm-up, and anew when memory, rates or inputs have changed by more than a
    quarter. ``statistics(model).plan`` says what was chosen, and why. It needs one process. A ``zero.AutoPlan`` is "auto", and
    says how much memory activations may take, and which ways there are.

    ``source``: with ``existing="resume"``, where the store has no checkpoint of ``name`` yet: the folder of another store, or
    of the stores of all ranks (``zero.open_store``), whose last checkpoint is taken over: of any number of ranks, with any
    stage, and any budget. It is not changed.
    ``stage``: where ``torch.distributed`` has several processes, each with a store of its own, what of the model each has only
    its share of: ``zero.Stage1()``, ``Stage2()`` or ``Stage3()`` (the default), which also says which processes these are. All
    of them call what concerns the model together and have the values of rank 0 to begin with; gradients are averaged.
    ``timeout``: seconds that a rank waits for the others, in place of those of the stage.

    Raises MisuseError (paged before, name taken, wrong device, built for another store, no way to initialise; weights that are
    missing, unexpected, or of another shape), SafetensorsError (damaged weights), CapacityError when the store's DRAM budget is
    below the smallest that works for this model, or a memory cgroup leaves less than this may take beside it (the message says
    how much that is), and what ``param_init_fn`` and the store raise. Then the model and the store are as before, and ``page``
    may be tried again; only (with several processes) the values of parameters may be gone, what a ``policy`` stores as another
    type, or quantises, may be rounded, and where reading ``weights`` failed in between, some parameters may have their values
    from there. What a module raises as it gets its hooks, when all units are filled, leaves ``model`` itself unusable.
    """
    expect_type(model, nn.Module, "what is paged is a torch.nn.Module")
    expect_type(store, TieredStore, "the store of a paged model is a TieredStore")
    options = PageOptions(
        name, existing, source, weights, param_init_fn, policy, micro_batch,
        AutoPlan() if activations == "auto" else activations, stage, timeout, paging,
    )  # fmt: skip
    with outside_inference():
        paged = page_by(model, store, options)
    store.refuse_refresh(f"a model is paged from {store}, and is of the commit that was opened: open the newest one anew")
    return paged


class Replacement:
    """A model ``name`` of a store, and the one that takes its place once that is whole: until then the new one's units are
    filled under ``owner``, and the old one is as it was.

    What is under way is told by who owns tensors, and kept nowhere else, so that what was cut off can be undone.
    """

    def __init__(self, store: TieredStore, name: str) -> None:
        self._store, self._model, self._replaced = store, model_named(name), Owner("import", f"{name}.replaced")
        self.owner = Owner("import", f"{name}.importing")

    def begin(self) -> None:
        """Delete what an earlier replacement left: one that was killed before it was whole, or after its commit."""
        for owner in (self._model, self.owner, self._replaced):
            self._store.claim(owner)
        self._store.delete_owned(self.owner)
        self._store.delete_owned(self._replaced)

    def exchange(self) -> None:
        """Give the new one the model's name, and the old one another, at once."""
        self._rename(self._replaced, self.owner)

    def exchange_back(self) -> None:
        """Give the old one its name again, where it lost that."""
        if self._store.owned(self._replaced):
            self._rename(self.owner, self._replaced)

    def undo(self) -> None:
        """Give the old one its name again, and delete the new one."""
        self.exchange_back()
        self._store.delete_owned(self.owner)

    def end(self) -> int:
        """Delete the old one. Returns how many tensors it had."""
        return self._store.delete_owned(self._replaced)

    def _rename(self, aside: Owner, taken: Owner) -> None:
        """Give what the model owns to ``aside``, and what ``taken`` owns to the model, under their names."""
        ways = ((self._model, aside), (taken, self._model))
        self._store.rename_many(
            [
                (key, one, other.name + key.removeprefix(one.name), other)
                for one, other in ways
                for key in self._store.owned(one)
            ]
        )


class Filling(Protocol):
    """What follows how the units of a model are filled, one after the other, and may have the first of them already."""

    owner: Owner
    """Who owns the units while they are filled: the model, or what takes its place when they are ``whole``."""

    def begin(self, plan: ModelPlan, deferred: Mapping[nn.Parameter, Deferred], held: Sequence[str]) -> int:
        """Return how many of the first units are in the store already. ``deferred``: parameters whose values are read as units
        are filled, ``held``: the keys of the model's name that the store has. What is not to stay of them is deleted."""
        ...

    def filled(self, unit: UnitPlan) -> None:
        """Note that a unit is in the store. What it raises ends the filling; units that are filled stay in the store."""
        ...

    def whole(self) -> None:
        """Note that all units are in the store, and have the model own them where it does not yet."""
        ...


def page_filling(model: nn.Module, store: TieredStore, filling: Filling, **options: Any) -> nn.Module:
    """Do as ``page`` with these ``options``, and have ``filling`` follow it. Where it raises, units that are filled stay in the
    store, whatever ``existing`` says, and the model is not as before."""
    return page_by(model, store, PageOptions(filling=filling, **options))


def differing(unit: UnitPlan, memory: torch.Tensor, deferred: Mapping[nn.Parameter, Deferred]) -> str | None:
    """Return the name of a parameter of ``unit`` whose values in ``memory``, which is as in the store, are not those that it
    was filled with; None where there is none. They are computed again. Parameters that are not ``deferred`` are left out."""
    scratch = torch.zeros_like(memory)
    for placement in unit.placements:
        _write_deferred(placement, scratch, deferred)
    for placement in unit.placements:
        if placement.whole in deferred:
            place = slice(placement.stored_offset, placement.stored_offset + placement.stored_nbytes)
            if not torch.equal(scratch[place], memory[place]):
                return placement.name
    return None


@dataclass(frozen=True)
class PageOptions:
    """The arguments of ``page``, and what follows the filling."""

    name: str = "model"
    existing: str = "refuse"
    source: str | os.PathLike[str] | None = None
    weights: str | os.PathLike[str] | None = None
    param_init_fn: Init | None = None
    policy: Policy = AS_IT_IS
    micro_batch: int = 1
    activations: Activations | AutoPlan = "memory"
    stage: Stage | None = None
    timeout: float | None = None
    paging: Paging = USUAL
    filling: Filling | None = None
    values: Mapping[nn.Parameter, Deferred] | None = None
    """Of parameters that have neither memory nor values elsewhere."""

    def __post_init__(self) -> None:
        """Raise MisuseError for values that there are not, or that do not go together."""
        one_of("existing", self.existing, STARTS)
        expect_type(self.policy, Policy, "policy is a zero.Policy")
        expect_type(self.paging, Paging, "paging is a zero.Paging")
        expect_type(self.stage, Stage | None, "stage is zero.Stage1(), zero.Stage2() or zero.Stage3()")
        if self.paging.slice_weights and self.existing == "resume":
            raise MisuseError("slice_weights=True divides a model anew, and existing='resume' has it as it was committed")
        whole_number("micro_batch is into how many parts units divide the batch", self.micro_batch)
        if not isinstance(self.activations, AutoPlan):
            one_of("activations, where it is no zero.AutoPlan,", self.activations, get_args(Activations))
        if self.offloads and self.micro_batch > 1:
            raise MisuseError(
                f"micro_batch computes the inside of units again, so that nothing of it is left for "
                f"activations={'store' if self.activations == 'store' else 'auto'!r}: leave one of them out"
            )
        if self.source is not None and self.existing not in ("resume", "continue"):
            raise MisuseError("source= is for existing='resume': where the checkpoint is that this model goes on from")
        if self.weights is not None and (self.existing == "resume" or self.param_init_fn is not None):
            raise MisuseError("weights= gives a model its values: leave out param_init_fn=, and existing='resume'")
        if self.weights is not None:
            path_of(self.weights, "weights=, a safetensors file or a folder of them,")
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise MisuseError(f"param_init_fn is called with a module, and {quoted(self.param_init_fn)} cannot be")
        if current.get() is not None:
            raise MisuseError("page the model after its zero.init block, not inside it")
        if not isinstance(self.name, str) or not self.name:
            raise MisuseError(f"name is what the model's keys begin with, a text that is not empty, not {quoted(self.name)}")
        if f"{self.name}/".startswith(PREFIX):
            raise MisuseError(f"names that begin with {PREFIX!r} belong to zero.init: give another name=")

    def decided(self, store: TieredStore) -> PageOptions:
        """Return these arguments with "resume" or "refuse" for "continue". Raises as ``start``."""
        if self.existing != "continue":
            return self
        if start(store, self.name, self.source) == "refuse":
            return replace(self, existing="refuse")
        paging = replace(self.paging, slice_weights=False)
        return replace(self, existing="resume", weights=None, param_init_fn=None, paging=paging)

    @property
    def saves(self) -> bool:
        """Return whether the store may get something that backward needs: activations, or what they are computed from."""
        return self.micro_batch > 1 or self.activations != "memory"

    def limits(self, pool: int, shares: int) -> Limits:
        """Return the limits by which a model is divided."""
        return Limits.of(pool, shares, saves=self.saves, converts=self.policy.converts)

    @property
    def offloads(self) -> bool:
        """Return whether activations may wait in the store."""
        return self.activations == "store" or isinstance(self.activations, AutoPlan)


def page_by(model: nn.Module, store: TieredStore, options: PageOptions) -> nn.Module:
    """Do as ``page``, whose arguments ``options`` are."""
    refuse_others()
    owner = model_named(options.name)
    partition = _partition(options.stage, options.timeout)
    with partition.agreeing("page this model") as agree:
        continues, options = options.existing == "continue", options.decided(store)
        window, held, staged = _found(model, store, options, owner)
        shown = _shown(model, staged.keys() | (options.values or {}).keys())
        if isinstance(options.activations, AutoPlan) and partition.shares > 1:
            raise MisuseError(
                "activations='auto' is for one process: several ranks would have to choose alike; choose 'memory', 'recompute' "
                "or 'store'"
            )
        agree(_asked(options, partition))
        agree(_described(model))
    strides = {parameter: found.stride for parameter, found in staged.items()}
    strides |= {parameter: values.stride() for parameter, values in (options.values or {}).items()}
    pool = partition.all_min(min(tier.capacity for tier in store.statistics().tiers if tier.name != "nvme"))
    limits = options.limits(pool, partition.shares)
    if options.existing == "resume":
        partition.refuse_apart(store)
    if options.existing == "resume" and options.source is not None and f"{options.name}/checkpoint" in store:
        _refuse_newer(options.source, store, partition)
    elif options.existing == "resume" and options.source is not None:
        _take_over(model, store, options, limits, partition, pool)
    with partition.agreeing("divide this model into units") as agree:
        limits, slicing, more = _ways(model, store, options, limits, strides)
        tentative = divide(model, limits, strides, options.policy, partition.shares, slicing, **more)
        _refuse_plan(tentative, model, store, pool, options, partition.shares)
        if options.existing != "resume" and options.filling is None:
            _refuse_taken(tentative, store, owner)
        agree(_divided(tentative, model))
    if options.policy.quantize is not None and options.existing != "resume" and options.filling is None:
        _warn_of_packed(tentative, model)
    config = PagerConfig(options.name, pool, partition, options.micro_batch, options.activations, options.paging)
    if options.existing == "resume":
        checkpoint.refuse_other(store, options.name, tentative, partition, model)
        strides |= {fresh: strides[meta] for fresh, meta in _replace_meta(model, store).items() if meta in strides}
        plan = divide(model, limits, strides, options.policy, partition.shares, slicing, **more)
        buffers = _buffers_for(model, store)
        _release(plan, store)
        window.sweep()
        _end_graphs(model)
        pager = Pager(model, store, plan, config)
        _place(buffers)
        checkpoint.recall(pager)
        unguard(model, window)
        for show in shown:
            show()
        pager.must_resume = continues
        pager.checkpoint.refuse = pager.refuse_unresumed
        pager.is_recorded()
        _follow(pager, options)
        return model
    if options.param_init_fn is None and options.weights is None:
        _refuse_without_reset(model)
    with ExitStack() as stack:
        stack.enter_context(returned_at_once())
        pretrained = None if options.weights is None else stack.enter_context(_opened(model, options.weights))
        meta = _replace_meta(model, store)
        deferred: dict[nn.Parameter, Deferred] = {fresh: old for fresh, old in meta.items() if isinstance(old, Deferred)}
        strides |= {fresh: old.stride() for fresh, old in deferred.items()}
        if pretrained is not None:
            deferred = pretrained.values(meta)
        deferred = {**deferred, **(options.values or {})}
        adoption = _Adoption(
            *(model, store, window, partition, staged, meta, deferred, options.param_init_fn), filling=options.filling
        )
        replacement = Replacement(store, options.name) if held and options.filling is None else None
        try:
            plan = divide(model, limits, strides, options.policy, partition.shares, slicing, **more)
            with partition.agreeing(FILLING):
                if options.filling is not None:
                    done = options.filling.begin(plan, deferred, held)
                    adoption.move(plan, options.filling.owner, Trimmer(pool), done)
                    options.filling.whole()
                elif replacement is not None:
                    replacement.begin()
                    adoption.move(plan, replacement.owner, Trimmer(pool), 0)
                    replacement.exchange()
                else:
                    adoption.move(plan, owner, Trimmer(pool), 0)
                if pretrained is not None:
                    pretrained.fill_buffers(model)
            partition.same_buffers(model)
            with partition.agreeing("page this model"):
                buffers = _buffers_for(model, store)
                _end_graphs(model)
                pager = Pager(model, store, plan, config)
                _place(buffers)
                unguard(model, window)
        except BaseException as error:
            clear_frames(error.__traceback__)  # which have the memory of the unit that was being filled
            if replacement is not None:
                replacement.exchange_back()  # before the undoing, which reads units by the keys that they were filled under
            adoption.undo()
            if isinstance(error, OSError):
                raise _unreadable(error, options.weights) from error
            raise
    pager.replace_others()
    for show in shown:
        show()
    _follow(pager, options)
    if continues:
        record(pager)  # the next start finds it, whatever becomes of the model until then
    pager.checkpoint.begun = True
    if replacement is not None:
        replacement.end()  # last: an interruption in it leaves the new model, and names that the next replacement deletes
    return model


def _warn_of_packed(plan: ModelPlan, model: nn.Module) -> None:
    """Warn where somebody has frozen some parameters, and others that he may want to train are packed."""
    packed = {one.whole for unit in plan.units if unit.read_only for one in unit.placements}
    trained = [name for name, one in model.named_parameters() if one in packed and one.requires_grad]
    frozen = [one for one in model.parameters() if not one.requires_grad]
    if trained and frozen:
        share = sum(one.numel() for one in frozen) / max(1, sum(one.numel() for one in model.parameters()))
        warnings.warn(
            f"{len(trained)} parameters that need a gradient ({trained[0]!r} first) are packed, and frozen from here on: "
            f"{100 * share:.0f} % of all elements are frozen, and others are trained over what is packed where most are. "
            "Freeze more (parameter.requires_grad_(False)), leave quantize out, or, for a model that is not to be trained, "
            "freeze all before zero.page",
            QuantizedWarning,
            stacklevel=4,
        )


def _follow(pager: Pager, options: PageOptions) -> None:
    """Have a pager do what this package does for it: take part in commits, and give parameters other types and shapes."""
    include_in_commits(pager)
    anew = replace(options, existing="overwrite", source=None, weights=None, param_init_fn=None, filling=None)

    def page_again(values: Mapping[nn.Parameter, Deferred]) -> nn.Module:
        return page_by(pager.model, pager.store, replace(anew, values=values))

    pager.change = partial(change, page_again, Replacement(pager.store, pager.name).exchange_back, pager)


def _shown(model: nn.Module, elsewhere: Collection[nn.Parameter]) -> list[Callable[[], None]]:
    """Return what makes attributes of the model that show parameters views of these, once it is paged. Raises as
    ``ShownParameters.within``."""
    parameters = [(name, one) for name, one in model.named_parameters() if one not in elsewhere and _has_memory(one)]
    tensors = [one for _, one in parameters] + [one for one in model.buffers() if _has_memory(one)]
    return ShownParameters(parameters, tensors).within(model)


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and type(tensor.data) is torch.Tensor
    return plain and not tensor.is_meta and bool(tensor.numel())


def _found(
    model: nn.Module, store: TieredStore, options: PageOptions, owner: Owner
) -> tuple[Window, list[str], dict[nn.Parameter, Staged]]:
    """Return the window that ``model`` may wait in, the keys that ``owner``, the model of its name, has in the store, and the
    parameters that wait. Raises MisuseError where the model cannot be paged into ``store``."""
    in_update_tier(store, options.paging.update_tier, owner)
    if options.existing != "resume":
        store.claim(owner)
    if options.offloads:
        refuse_one_tier(store)
    window = Window.of(store)
    held = store.owned(owner)
    _refuse_modules(model)
    for qualified, parameter in model.named_parameters():
        if hasattr(parameter, "_tiered"):
            raise MisuseError(
                f"parameter {qualified!r} is paged already, as {parameter._tiered.name!r} of another model or an earlier call: "
                "page a model once, and models that share parameters together, as zero.page(nn.ModuleList([one, other]), store)"
            )
        if parameter.device.type not in ("cpu", "meta") and parameter.device != store.device:
            raise MisuseError(
                f"parameter {qualified!r} is on {parameter.device}, and this store's top tier on {store.device}: move the "
                "model to the CPU first, or open the store with hbm= and that device="
            )
    if held and options.existing == "refuse" and options.filling is None:
        raise MisuseError(
            f"the store already holds a model named {options.name!r} ({len(held)} tensor{'' if len(held) == 1 else 's'}): give "
            "another name=, existing='overwrite' to begin anew, or existing='continue' to go on with it"
        )
    _refuse_kinds(model)
    staged = _staged(model, window)
    _refuse_shared_memory(model, staged.keys() | (options.values or {}).keys())
    return window, held, staged


def _refuse_modules(model: nn.Module) -> None:
    """Raise MisuseError for modules whose parameters cannot be found, or cannot be given hooks."""
    for name, module in model.named_modules():
        said = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise MisuseError(
                f"{said} is compiled by torch.jit, and paging cannot reach into it: page the module that it was made of, or "
                "keep it out of the model that is paged"
            )
        for method in ("parameters", "named_parameters"):
            if getattr(type(module), method) is getattr(nn.Module, method) and method not in vars(module):
                continue
            expected = {id(one) for within in _below(module, set()) for one in within._parameters.values() if one is not None}
            try:
                given = getattr(module, method)(*([] if method == "parameters" else [""]))
                found = {id(one[1] if method == "named_parameters" else one) for one in given}
            except TypeError:
                found = set()
            if found != expected:
                raise MisuseError(
                    f"{said} has a method {method}() of its own, which does not give all {len(expected)} parameters of its "
                    "modules, as paging and state_dict need them: give that method another name"
                )


def _below(module: nn.Module, seen: set[nn.Module]) -> set[nn.Module]:
    """Return ``module`` and all modules within it, whatever its methods say."""
    if module not in seen:
        seen.add(module)
        for child in module._modules.values():
            if child is not None:
                _below(child, seen)
    return seen


def _refuse_kinds(model: nn.Module) -> None:
    """Raise MisuseError for a parameter that is no dense tensor, or whose gradient would be complex, for those that cannot be
    given other memory, or would lose their class or their hooks, and for what a lazy module has not given a shape."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for qualified, tensor in named:
            if is_lazy(tensor):
                raise MisuseError(
                    f"{kind} {qualified!r} has no shape yet, as its module is a lazy one: call the model once before zero.page"
                )
    for qualified, parameter in model.named_parameters():
        what = "nested" if parameter.is_nested else "quantized" if parameter.is_quantized else str(parameter.layout)
        if what != str(torch.strided):
            raise MisuseError(
                f"parameter {qualified!r} is {what}, and a store has dense tensors: register it as a buffer, which stays in "
                "memory, or make it dense"
            )
        if parameter.is_complex() and parameter.requires_grad and torch.is_grad_enabled():
            raise MisuseError(
                f"parameter {qualified!r} is {parameter.dtype}: only real floating point can be trained; freeze it, or keep "
                "its real view (torch.view_as_real)"
            )
        if parameter.is_meta or isinstance(parameter, Deferred):
            _refuse_hooks(qualified, parameter, "has no memory yet, and is made anew as it is given some")
        elif getattr(parameter, "table", None) is not None:  # of a TieredEmbedding, as in checkpoint.weights
            raise MisuseError(
                f"parameter {qualified!r} is a table, whose rows are in a store already: page the modules beside it, as in "
                "zero.page(model.body, store), and have a second optimizer for the table (SparseAdamW)"
            )
        elif type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise MisuseError(
                f"parameter {qualified!r} is of the class {type(parameter).__name__}, which has its values in tensors within "
                "it, and would lose that class in the store: page the model before its parameters are converted "
                "(zero.Policy(quantize=) stores them in fewer bytes, zero.page(stage=) divides them among ranks)"
            )
        elif parameter.is_inference():
            raise MisuseError(
                f"parameter {qualified!r} was made in torch.inference_mode, which keeps it from being given other memory: make "
                "the model under torch.no_grad() instead, or within zero.init"
            )


def _refuse_hooks(name: str, parameter: nn.Parameter, why: str) -> None:
    """Raise MisuseError where hooks of a parameter would be lost."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise MisuseError(
            f"parameter {name!r} has hooks, and {why}, so that they would not be called: remove them before zero.page, and use "
            "parameter.grad after backward"
        )


def _end_graphs(model: nn.Module) -> None:
    """Have graphs that saved a parameter before it was paged raise in backward, as after a write: its memory is gone."""
    for parameter in model.parameters():
        if not parameter.is_inference():
            torch.autograd.graph.increment_version(parameter)


def _refuse_shared_memory(model: nn.Module, elsewhere: Collection[nn.Parameter]) -> None:
    """Raise MisuseError where a parameter lies on memory of another one, or of a buffer: they would be apart in the store, and
    a write to one would not be seen in the other. ``elsewhere``: parameters whose values are not in their memory."""
    parameters = [("parameter", name, one) for name, one in model.named_parameters() if one not in elsewhere]
    found = []
    for _, name, parameter in parameters:
        steps = zip(parameter.shape, parameter.stride(), strict=True)
        if _has_memory(parameter) and any(step == 0 for size, step in steps if size > 1):
            raise MisuseError(
                f"parameter {name!r} has several elements in one place of its memory, because it was expanded; they would be "
                "apart in the store: give the module a copy (.contiguous()), before zero.page"
            )
    for kind, name, tensor in (*parameters, *(("buffer", name, one) for name, one in model.named_buffers())):
        if _has_memory(tensor) and 0 not in tensor.stride():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            found.append((str(tensor.device), begin, begin + (last + 1) * tensor.itemsize, kind, name, tensor))
    reached: dict[str, Any] = {}
    for one in sorted(found, key=lambda one: one[:5]):
        where, begin, end, kind, name, tensor = one
        other = reached.get(where)
        if other is not None and begin < other[2] and tensor is not other[5] and "parameter" in (kind, other[3]):
            raise MisuseError(
                f"{other[3]} {other[4]!r} and {kind} {name!r} share memory, and would be apart in the store: give both modules "
                "the same Parameter object, or one of them a copy (.clone()), before zero.page"
            )
        if other is None or end > other[2]:
            reached[where] = one


class KnownDivision(TypedDict, total=False):
    """Arguments of ``divide``: which parameters are packed already, and which are in units of their own."""

    forms: Mapping[str, str]
    apart: Collection[str]


def _ways(
    model: nn.Module,
    store: TieredStore,
    options: PageOptions,
    limits: Limits,
    strides: dict[nn.Parameter, tuple[int, ...]],
) -> tuple[Limits, Slicing, KnownDivision]:
    """Return by which limits ``model`` is divided, what is sliced, and what else ``divide`` is told. ``strides`` gets those
    that were committed."""
    largest = options.paging.largest_unit
    slicing = Slicing(options.paging.experts == "sliced", options.paging.slice_weights)
    if options.existing == "resume":
        limits, kept, names, forms, apart = checkpoint.layout(store, options.name)
        strides |= {parameter: kept[qualified] for qualified, parameter in model.named_parameters() if qualified in kept}
        return limits, Slicing(only=names), {"forms": {} if options.policy.quantize is not None else forms, "apart": apart}
    found = {name: one.form for name, one in model.named_parameters() if isinstance(one, Deferred)}
    forms = {name: form for name, form in found.items() if form is not None}
    return limits if largest is None else replace(limits, unit=min(limits.unit, largest)), slicing, {"forms": forms}


def _asked(options: PageOptions, partition: Partition) -> Iterator[Term]:
    """Yield what all ranks have to be asked alike."""
    yield "the stage", str(partition.share()["stage"])
    yield "name=", repr(options.name)
    yield "existing=", "'resume'" if options.existing == "resume" else "'refuse' or 'overwrite'"
    yield "source=", "None" if options.source is None else "given"
    yield "micro_batch=", str(options.micro_batch)
    yield "activations=", repr(options.activations)
    yield "largest_unit=", str(options.paging.largest_unit)
    yield "policy=", str(options.policy)


def _described(model: nn.Module) -> Iterator[Term]:
    """Yield what all ranks have to have alike of a model: its parameters and buffers, in order, and which are one tensor."""
    first: dict[torch.Tensor, str] = {}
    for kind, tensors in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in tensors:
            known = first.setdefault(tensor, name)
            said = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if known is name else f"tied to {known!r}"
            frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
            yield f"{kind} {name!r}", said + frozen


def _divided(plan: ModelPlan, model: nn.Module) -> Iterator[Term]:
    """Yield what all ranks have to have alike of a model's units: where each parameter lies, and which modules hold them."""
    yield "the limits", str(plan.limits)
    for unit in plan.units:
        yield f"unit {unit.name!r}", f"{len(unit.placements)} parameters, {unit.stored_nbytes} bytes for {unit.shares} ranks"
        for at in unit.placements:
            stored = f"{at.form} at byte {at.stored_offset}"
            yield f"{at.name!r} in unit {unit.name!r}", f"{at.dtype} with strides {tuple(at.stride)}, stored as {stored}"
    for name, module in model.named_modules():
        if module in plan.held:
            yield f"module {name!r} holds", ", ".join(repr(plan.units[index].name) for index in plan.held[module])


def _refuse_taken(plan: ModelPlan, store: TieredStore, owner: Owner) -> None:
    """Raise MisuseError, before anything changes, where a unit of ``owner`` would have the key of somebody else's tensor."""
    for key in (_key_of(unit, owner) for unit in plan.units):
        if key in store and store.owner_of(key) != owner:
            raise MisuseError(
                f"{store} has a tensor {key!r} of {store.owner_of(key) or 'its user'}, and {owner} would have one of that key: "
                "give another name="
            )


def _key_of(unit: UnitPlan, owner: Owner) -> str:
    return f"{owner.name}/param/{unit.name}"


def _partition(stage: Stage | None, timeout: float | None) -> Partition:
    found = Stage3() if stage is None else stage
    found = found if timeout is None else replace(found, timeout=timeout)
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(found.group) > 1
    if not several:
        if found.group is not None or found.timeout is not None:
            raise MisuseError(
                f"timeout=, and the group of {type(found).__name__}, are for several processes: call "
                "torch.distributed.init_process_group first"
            )
        return Unsharded()
    return Sharded(Ranks(found.group, found.timeout), found)


def _refuse_newer(source: str | os.PathLike[str], store: TieredStore, partition: Partition) -> None:
    """Raise MisuseError where another training went on, in ``source``, since the commit that ``store`` has. Rank 0 looks."""
    newest = newest_set(source) if partition.rank == 0 else None
    mine, there = number_of(store.meta), 0 if newest is None else newest.number
    if there > mine:
        error = (
            f"{store} has a checkpoint already, of commit {mine}, and {source} a newer one, {there}: open the store in another "
            "folder to take that over, or leave source= out to go on from here"
        )
    if not all(partition.all_true([there <= mine], "whether a checkpoint is the newest")):
        raise MisuseError(error if there > mine else f"rank 0 finds a newer checkpoint in {source}, and says which")


def _take_over(
    model: nn.Module, store: TieredStore, options: PageOptions, limits: Limits, partition: Partition, pool: int
) -> None:
    """Have in ``store`` the checkpoint of ``options.source``, divided as the model is."""
    assert options.source is not None
    with ExitStack() as stack:
        with partition.agreeing("take over this checkpoint") as agree:
            stores = opened(options.source, stack)
            there = CheckpointSource(stores, options.name)
            strides = {p: there.stride(qualified) for qualified, p in model.named_parameters()}
            slicing = Slicing(experts=options.paging.experts == "sliced")
            plan = divide(model, limits, strides, options.policy, partition.shares, slicing)
            _refuse_small_pool(plan, model, store, pool, options, partition.shares)
            manifests = [one.manifest for one in stores]
            agree((f"store {n} of it", f"{one.store}, generation {one.generation}") for n, one in enumerate(manifests))
        reshard(there, store, plan, partition)
        partition.goes_on(number_of(stores[0].manifest.meta))


def _opened(model: nn.Module, weights: str | os.PathLike[str]) -> Pretrained:
    try:
        return Pretrained(model, weights)
    except OSError as error:
        raise _unreadable(error, weights) from error


def _unreadable(error: OSError, weights: object) -> TieredError:
    return TieredError(f"cannot read {error.filename or weights}: {error.strerror} (errno {error.errno})")


def _release(plan: ModelPlan, store: TieredStore) -> None:
    """Release the values that parameters have."""
    for unit in plan.units:
        for placement in unit.placements:
            placement.parameter.data = _nothing(placement.shape, placement.dtype, store.device)
    for sliced in plan.sliced.values():
        sliced.parameter.data = _nothing(sliced.shape, sliced.dtype, store.device)


def _nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


Buffers = list[tuple[nn.Module, str, torch.Tensor]]


def _buffers_for(model: nn.Module, store: TieredStore) -> Buffers:
    """Return the buffers that modules need where they will compute, and have elsewhere. A buffer that several modules have
    stays one."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    found: Buffers = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if buffer.device != store.device or isinstance(buffer, Deferred):
                if buffer not in moved:
                    moved[buffer] = (buffer.whole() if isinstance(buffer, Deferred) else buffer).to(store.device)
                found.append((module, name, moved[buffer]))
    return found


def _place(buffers: Buffers) -> None:
    for module, name, buffer in buffers:
        module._buffers[name] = buffer


def _staged(model: nn.Module, window: Window) -> dict[nn.Parameter, Staged]:
    """Return the parameters whose values wait in the store. Raises MisuseError for those that wait in another, or have lost
    them."""
    staged = {}
    for qualified, parameter in model.named_parameters():
        found = find(parameter)
        if found is None:
            continue
        if found.window is not window:
            raise MisuseError(
                f"parameter {qualified!r} was built by zero.init for {found.window.name}, not for {window.name}: "
                f"page the model into the store it was built for"
            )
        window.check(found, parameter)
        staged[parameter] = found
    return staged


def smallest_pool(plan: ModelPlan, model: nn.Module, *, saves: bool = False, shares: int = 1, beside: bool = False) -> int:
    """Return the bytes of the smallest pool for a model that is divided so.

    A unit, its gradient, and what the modules around it hold fit at the same time, wherever they happen to lie. Where the store
    has activations (``saves``), a piece of these has to fit, too; and the largest unit twice more, as it may lie in the middle.
    One of several ranks has what it gathers or sends of a unit beside what it receives, and its share. ``beside``: what is
    converted is in memory beside the pool, as in a store that is open for reading.
    """
    sizes = [-(-(unit.stored_nbytes if beside and unit.converted else unit.nbytes) // 4096) * 4096 for unit in plan.units]
    together = plan.held_together(model, sizes)
    converted = max((unit.stored_nbytes for unit in plan.units if unit.converted), default=0)  # it is there twice meanwhile
    converted = 0 if beside else converted
    together += (max(sizes, default=0) if shares == 1 else 4 * max(sizes, default=0)) + converted
    if saves:
        together += 2 * max(sizes, default=0)
        together = -(-together * SAVED_SHARE // (SAVED_SHARE - 1) // 4096) * 4096
    return -(-max(3 * max(sizes, default=0) + converted, together, 1 << 20) // 4096) * 4096


def _refuse_plan(
    plan: ModelPlan, model: nn.Module, store: TieredStore, pool: int, options: PageOptions, shares: int
) -> None:
    """Raise CapacityError where there is too little memory for a model that is divided so, MisuseError where its modules cannot
    do what was asked."""
    _refuse_small_pool(plan, model, store, pool, options, shares)
    together = 0 if options.existing == "resume" or options.weights is not None else _largest_meta(model)
    refuse_little_room(store, "paging this model", largest=together)
    for sliced in plan.sliced.values():
        _refuse_hooks(sliced.name, sliced.parameter, "is divided into slices, of which each has a gradient of its own")
    splits = options.micro_batch > 1 or options.activations == "recompute"
    split = split_modules(model, plan, options.micro_batch) if splits else {}
    for module, qualified in split.items() if options.micro_batch > 1 else ():
        refuse_batch_dependent(module, qualified)
    if options.activations == "recompute" and not split:
        raise MisuseError(
            "activations='recompute': no module of this model holds all of its parameters while it runs, so none can be "
            "computed again: use activations='store', or a larger memory budget"
        )


def _refuse_small_pool(
    plan: ModelPlan, model: nn.Module, store: TieredStore, pool: int, options: PageOptions, shares: int
) -> None:
    """Raise CapacityError for a pool that is smaller than ``smallest_pool``."""
    saves = options.saves
    needed = smallest_pool(plan, model, saves=saves, shares=shares, beside=store.access is Access.READ)
    if pool < needed:
        largest = max(plan.units, key=lambda unit: unit.nbytes)
        tier = min((tier for tier in store.statistics().tiers if tier.name != "nvme"), key=lambda tier: tier.capacity)
        told = (
            f"a budget of {pool:,} bytes of {tier.name.upper()} is too small for this model: the smallest that works is "
            f"{needed:,} bytes (its largest unit, {largest.name!r}, has {largest.nbytes:,})"
        )
        if options.existing == "resume":
            paging = options.paging
            if store.access is Access.READ:  # as an import divides it, whose slices have more rows than training needs
                paging = replace(paging, slice_weights=True, largest_unit=paging.largest_unit or Limits.of(pool, shares).unit)
            anew = replace(options, existing="refuse", source=None, paging=paging)
            limits, slicing, more = _ways(model, store, anew, options.limits(pool, shares), {})
            fresh = divide(model, limits, {}, options.policy, shares, slicing, **more)
            least = smallest_pool(fresh, model, saves=saves, shares=shares, beside=store.access is Access.READ)
            if least < needed:
                how = "make the store anew, with a smaller --unit where `tiered import` made it"
                if store.access is not Access.READ:
                    how = "page it into a store in another folder, with existing='resume' and source= this one's folder"
                works = "this budget" if least <= pool else f"{least:,} bytes"
                told = (
                    f"a budget of {pool:,} bytes of {tier.name.upper()} is too small for this model as it is in this store, "
                    f"which was divided for a larger one: so it needs {needed:,} bytes (its largest unit, {largest.name!r}, "
                    f"has {largest.nbytes:,}). KnownDivision anew it works with {works}: {how}"
                )
        raise CapacityError(told)


def _refuse_without_reset(model: nn.Module) -> None:
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        fresh = {p for p in module._parameters.values() if p is not None and p.is_meta} - seen
        if fresh and getattr(type(module), "reset_parameters", None) is None:
            raise MisuseError(
                f"{type(module).__name__} has meta parameters and no reset_parameters(): give page() a param_init_fn"
            )
        seen |= fresh


def _largest_meta(model: nn.Module) -> int:
    """Return the bytes of the parameters on the meta device that are given memory together: those directly on one module."""
    return max(
        (
            sum(p.numel() * p.itemsize for p in module._parameters.values() if p is not None and p.is_meta)
            for module in model.modules()
        ),
        default=0,
    )


def _replace_meta(model: nn.Module, store: TieredStore) -> dict[nn.Parameter, nn.Parameter]:
    """Replace parameters on the meta device and deferred ones, which cannot be given memory, by parameters without memory; tied
    ones stay tied.

    Returns the replaced parameter of each new one.
    """
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not (parameter.is_meta or isinstance(parameter, Deferred)):
                continue
            if parameter not in fresh:
                empty = _nothing(parameter.shape, parameter.dtype, store.device)
                fresh[parameter] = nn.Parameter(empty, parameter.requires_grad)
                own = {"contents", "meta", "_is_param"} if isinstance(parameter, Deferred) else set()
                kept = {key: value for key, value in parameter.__dict__.items() if key not in own}
                fresh[parameter].__dict__.update(kept)
            module._parameters[name] = fresh[parameter]
    return {made: meta for meta, made in fresh.items()}


def _zero_rest(memory: torch.Tensor, unit: UnitPlan) -> None:
    """Write zeros where no parameter's values come: the same model has the same bytes in every store."""
    end = 0
    for placement in sorted(unit.placements, key=lambda one: one.stored_offset):
        memory[end : placement.stored_offset].zero_()
        end = placement.stored_offset
        if placement.packing is None:
            end += placement.stored_nbytes
    memory[end:].zero_()


def _write_deferred(placement: Placement, unit: torch.Tensor, deferred: Mapping[nn.Parameter, Deferred]) -> None:
    """Write the values of a parameter, or of a slice of one, to its place in ``unit``, if they are deferred."""
    if placement.whole in deferred:
        values = deferred[placement.whole]
        if placement.packing is not None and values.form == placement.form:
            assert values.stride()[values.dim() - len(placement.stride) :] == placement.stride, placement.name
            placement.fill_packed(unit, partial(values.write_packed, placement.packing))
            return
        with placement.filling(unit) as target:
            values.write_to(target, placement.within)


@dataclass
class _Adoption:
    """One call of ``page`` as far as it moves values, and how to undo it."""

    model: nn.Module
    store: TieredStore
    window: Window
    partition: Partition
    staged: dict[nn.Parameter, Staged]
    meta: dict[nn.Parameter, nn.Parameter]
    deferred: Mapping[nn.Parameter, Deferred]
    init: Init | None
    filling: Filling | None = None
    without_memory: set[nn.Parameter] = field(default_factory=set)
    stored: dict[nn.Parameter, list[tuple[str, Placement, torch.device]]] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    owner: Owner | None = None
    """Whose the created tensors are."""

    def move(self, plan: ModelPlan, owner: Owner, trimmer: Trimmer, done: int) -> None:
        """Fill the units of ``owner``, but the first ``done``, which are in the store."""
        self.owner = owner
        modules: dict[nn.Parameter, nn.Module] = {}
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    modules.setdefault(parameter, module)
        self.without_memory = set(self.meta) - self.deferred.keys()
        expect(
            (self.deferred[placement.whole], placement.within)
            for unit in plan.units[done:]
            for placement in unit.placements
            if placement.whole in self.deferred
        )
        for number, unit in enumerate(plan.units):
            key = _key_of(unit, owner)
            if number < done:
                self._fill(key, None, unit, modules)
                continue
            self.created.append(key)
            with self.partition.filling(self.store, owner, key, unit) as memory:
                _zero_rest(memory, unit)
                self._fill(key, memory, unit, modules)
                del memory
            if self.filling is not None:
                self.created.clear()
                self.filling.filled(unit)
            trimmer.passed(unit.nbytes)
        trimmer.trim()

    @torch.no_grad()
    def _fill(
        self, key: str, memory: torch.Tensor | None, unit: UnitPlan, modules: dict[nn.Parameter, nn.Module]
    ) -> None:
        """Write the values of a unit to ``memory`` (None: they are in the store), and release them."""
        for placement in unit.placements:
            sliced, parameter = placement.sliced, placement.whole
            if memory is not None:
                if parameter in self.without_memory:
                    self._materialise(modules[parameter])
                self._write(placement, parameter, memory)
            self.stored.setdefault(parameter, []).append((key, placement, parameter.device))
            placement.parameter.data = _nothing(placement.shape, placement.dtype, self.store.device)
            if sliced is not None and placement.number == len(sliced.slices) - 1:  # the last to be stored
                parameter.data = _nothing(sliced.shape, sliced.dtype, self.store.device)
            self.window.sweep()  # the waiting value, which nothing shows any more

    def _write(self, placement: Placement, parameter: nn.Parameter, memory: torch.Tensor) -> None:
        if parameter in self.deferred:
            _write_deferred(placement, memory, self.deferred)
        else:
            with placement.filling(memory) as target:
                if parameter in self.staged:
                    self.window.copy_to(target, self.staged[parameter], placement.within)
                else:
                    target.copy_(parameter if placement.within is ALL else parameter[placement.within])

    def _materialise(self, module: nn.Module) -> None:
        """Give the parameters and buffers that are directly on ``module`` memory and their initial values.

        A tied parameter keeps the values that the first module naming it gave it; what later ones write goes to memory that is
        thrown away. So does what is written to one that waits in the store.
        """
        reset = self.init if self.init is not None else getattr(type(module), "reset_parameters", None)
        assert reset is not None
        released: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in module._parameters.values():
            if parameter is None or parameter in released:
                continue
            if parameter in self.without_memory:
                self.without_memory.remove(parameter)
            elif parameter in self.stored or parameter in self.staged:
                released[parameter] = parameter.data
            else:
                continue
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        try:
            with torch.enable_grad():
                reset(module)
        finally:
            for parameter, placeholder in released.items():
                parameter.data = placeholder

    @torch.no_grad()
    def undo(self) -> None:
        """Give the parameters back what they had, and delete what was created. Those that waited in the store wait again."""
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter in self.meta:
                    module._parameters[name] = self.meta[parameter]
        values: dict[nn.Parameter, torch.Tensor] = {}
        wanted: dict[str, list[tuple[torch.Tensor, Placement]]] = {}
        for parameter, parts in self.stored.items() if self.filling is None else ():
            if parameter in self.meta or parameter in self.deferred or self.partition.shares > 1:  # of which it has a share
                continue
            _, first, device = parts[0]
            sliced = first.sliced
            if sliced is not None and len(parts) < len(sliced.slices):
                continue  # it still has its values
            shape, stride = (first.shape, first.stride) if sliced is None else (sliced.shape, None)
            value = torch.empty(shape, dtype=first.dtype, device=device)
            value = value if stride is None else torch.empty_strided(shape, stride, dtype=first.dtype, device=device)
            values[parameter] = value
            for key, placement, _ in parts:
                wanted.setdefault(key, []).append(
                    (value if sliced is None else value[sliced.at(placement.number)], placement)
                )
        problem = self._read_back(wanted)
        for parameter, value in values.items():
            if any(key in wanted for key, *_ in self.stored[parameter]):
                continue
            unpage(parameter, value)
            if parameter in self.staged:
                found = self.staged[parameter]
                self.window.track(parameter, found.name, found.context)
        del values
        self.window.flush()
        for key in self.created:
            if key in self.store and key not in wanted:
                self.store.delete(key, owner=self.owner)
        if problem is not None:
            raise problem

    def _read_back(self, wanted: dict[str, list[tuple[torch.Tensor, Placement]]]) -> TieredError | None:
        """Fill tensors with what units have, and delete each unit that was read. Units that wait in memory for a disk that is
        full leave no room for others there: those that cannot be read yet are read when others are gone. Returns why those
        that are left in ``wanted`` could not be read."""
        refused: TieredError | None = None
        before = len(wanted) + 1
        while wanted and len(wanted) < before:
            before, refused = len(wanted), None
            for key in list(wanted):
                try:
                    with self.store.lease(key, tier="dram") as memory:
                        for value, placement in wanted[key]:
                            value.copy_(placement.values(memory))
                        del memory
                except (CapacityError, WriteError) as error:
                    refused = error
                    continue
                del wanted[key]
                if key in self.created:
                    self.store.delete(key, owner=self.owner)
        return refused
