"""A training step without memory: a model on the meta device is paged, and trained, over a store that takes notes.

torch runs the operations, autograd included, on tensors that have shapes and no values, and the model's own pager holds its
units, stores its gradients and updates it. A dispatch mode counts floating point operations and the bytes of operands, and
follows the memory of all tensors that are alive. Takes milliseconds for a layer, whatever its size.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tiered.errors import MisuseError, TieredError, expect_type
from tiered.planning.notes import Alive, NotingRanks, NotingStore, OperationKind, StepNotes, TensorForm, WorkNote
from tiered.planning.sizes import sizes_of
from tiered.types import TensorSpec
from tiered.zero.optimizers.paged import PagedUpdates
from tiered.zero.optimizers.updates import Group
from tiered.zero.paging.pager import Pager, PagerConfig, Paging
from tiered.zero.paging.sharding import Partition, Sharded, Stage3, Unsharded
from tiered.zero.paging.units import NOTHING_ABSENT, Absent, Limits, ModelPlan, Policy, divide
from tiered.zero.rules.rule import UpdateRule

__all__ = ["Activations", "Loss", "Repeats", "TrainingSetup", "Update", "dry_run", "on_meta"]

Activations = Literal["memory", "recompute", "store"]
Loss = Callable[[Any, Any], torch.Tensor]
Update = Literal["on_fetch", "in_backward"]


class Repeats:
    """What has ``activations`` and ``micro_batch``, as in ``zero.page``."""

    activations: Activations
    micro_batch: int

    @property
    def computes_again(self) -> bool:
        """Whether backward computes the inside of modules again."""
        return self.activations == "recompute" or self.micro_batch > 1


@dataclass(frozen=True)
class TrainingSetup(Repeats):
    """How a model is trained in a store of ``pool`` bytes: divided into units by ``limits`` and ``policy``, and updated by
    ``rule``; ``passes`` forwards and backwards make a step. ``update`` is as in ``zero.AdamW``, ``activations`` and
    ``micro_batch`` are as in ``zero.page``; ``ranks``: of so many, with ZeRO stage 3, one. ``absent``: as in ``divide``."""

    pool: int
    limits: Limits
    rule: UpdateRule
    policy: Policy = field(default_factory=Policy)
    update: Update = "on_fetch"
    passes: int = 1
    activations: Activations = "memory"
    micro_batch: int = 1
    ranks: int = 1
    name: str = "model"
    absent: Absent = NOTHING_ABSENT

    def divided(self, model: nn.Module) -> ModelPlan:
        """Return the units of a model."""
        return divide(model, self.limits, {}, self.policy, self.ranks, absent=self.absent)


class _Optimizer:
    """Optimizer of all parameters of a model, which is paged, with one rule."""

    def __init__(self, model: nn.Module, rule: UpdateRule, update: Update) -> None:
        parameters = list(model.parameters())
        self.param_groups: list[Group] = [{"params": parameters}]
        self._rule = rule
        self._updates = PagedUpdates(self, parameters, in_backward=update == "in_backward")
        self._updates.add([], rule)

    def step(self) -> None:
        """Make a step, and take the gradients away."""
        self._updates.step()
        self._updates.zero_grad(True)

    def rule(self, index: int) -> UpdateRule:
        return self._rule

    rule_of = rule

    def follow(self, index: int, rule: UpdateRule) -> None:
        """Do nothing: the rule stays."""


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on the meta device; parameters and buffers that are shared stay so. Raises MisuseError for a
    model that is paged, and for one whose parameters have no shapes yet."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "_tiered"):
            raise MisuseError(f"parameter {name!r} is paged already: plan before zero.page")
        if is_lazy(parameter):
            raise MisuseError(f"parameter {name!r} has no shape yet, as it is lazy: call the model once, then plan")
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter.detach(), device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    return copy.deepcopy(model, memo)


def dry_run(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss, target: Any, training: TrainingSetup,
    *, follow: bool = False,
) -> StepNotes:
    """Train a copy of ``model``, which is on the meta device, with these arguments and ``loss(output, target)``, and return
    what a step asks of its store. ``follow``: the notes say of each operation what is alive.

    Raises MisuseError where the model cannot run without values, with the reason, and what paging it raises.
    """
    with _cycles_end():
        return _trained(on_meta(model), args, kwargs, loss, target, training, follow)


def _trained(
    paged: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss, target: Any, training: TrainingSetup,
    follow: bool,
) -> StepNotes:
    try:
        with torch.enable_grad(), closing(NotingStore(training.pool)) as store:
            optimizer, live = _paged(paged, store, training), _Live(store)
            store.put_away, store.alive = live.watch, live.since if follow else None
            # In a first step no unit has an update that waits for its next use, and ranks have reduced nothing.
            before = 0 if training.update == "in_backward" and training.ranks == 1 else 1
            for number in range(before + 1):
                store.step_begins()
                for _ in range(training.passes):
                    with _as_on_devices(paged), live if number == before else _Uncompiled():  # type: ignore[no-untyped-call]
                        value = loss(paged(*args, **kwargs), target)
                        expect_type(value, torch.Tensor, "what loss(output, target) returns is a tensor")
                        store.turn(backward=True)
                        value.backward(torch.ones_like(value))  # type: ignore[no-untyped-call]
                        store.turn(backward=False)
                        del value
                optimizer.step()
            store.step.peak = live.peak
            return store.step
    except TieredError:
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise MisuseError(
            f"{type(paged).__name__} cannot run on the meta device, which has no values, with {_shown(args, kwargs)}: {why}. "
            "Workload(inputs=..., loss=...) gives it something else; a model whose forward depends on values is planned by its "
            "numbers (tiered.Numbers)"
        ) from error


@contextmanager
def _cycles_end() -> Iterator[None]:
    """Free what is made in here: a model and its pager refer to one another, and what paging changes in torch ends with the
    last of them. What was there before is not looked at, which takes a third of a second with torch and transformers, unless
    somebody else has the collector leave something out."""
    alone = not gc.get_freeze_count()
    if alone:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if alone:
            gc.unfreeze()


def _shown(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return what a model is given, as text: of tensors the element type and the shape."""

    def one(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return type(value).__name__
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"

    return ", ".join([*map(one, args), *(f"{name}={one(value)}" for name, value in kwargs.items())]) or "nothing"


def _paged(model: nn.Module, store: NotingStore, training: TrainingSetup) -> _Optimizer:
    """Page a model, as ``zero.page`` does, and return its optimizer."""
    partition: Partition = Unsharded()
    if training.ranks > 1:
        partition = Sharded(NotingRanks(store, training.ranks), Stage3())
    plan = training.divided(model)
    for unit in plan.units:
        store.have(f"{training.name}/param/{unit.name}", TensorSpec("uint8", (unit.share_nbytes,), 1))
    for chunk in (chunk for unit in sizes_of(plan, training.name, training.rule) for chunk in unit.chunks):
        for key, spec in chunk.items():
            store.have(key, spec)  # as after a step, which makes them
    config = PagerConfig(
        *(training.name, training.pool, partition, training.micro_batch, training.activations), Paging(prefetch="off")
    )
    pager = Pager(model, store, plan, config)
    store.units = {unit.key: unit for unit in pager.units}
    return _Optimizer(model, training.rule, training.update)


@contextmanager
def _as_on_devices(model: nn.Module) -> Iterator[None]:
    """Have attention be what it is on a CPU or a GPU, and transformers take each row of a batch for one sequence: it looks for
    several in a row by the values of positions, which there are none of; a row of one sequence has no mask for that.

    The functions are replaced where the model's modules find them. A mode of torch would be asked at each attribute of each
    tensor, too, which takes longer than all the rest.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    packed = getattr(masks, "find_packed_sequence_indices", None)
    attention = F.scaled_dot_product_attention
    files = [F, *(sys.modules[name] for name in {type(module).__module__ for module in model.modules()} & sys.modules.keys())]
    replaced: list[tuple[Any, str, Any]] = [
        (file, name, attention) for file in files for name, value in vars(file).items() if value is attention
    ]
    for file, name, _ in replaced:
        setattr(file, name, functools.partial(_fused, attention))
    if packed is not None:
        replaced.append((masks, "find_packed_sequence_indices", packed))
        masks.find_packed_sequence_indices = lambda positions: None if positions.is_meta else packed(positions)
    try:
        yield
    finally:
        for file, name, found in replaced:
            setattr(file, name, found)


EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations that write nothing."""


class _Uncompiled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has modules of ``torch.compile`` run as they are, as torch does within a dispatch mode: there is nothing to compile for.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has a store write down what a model computes, and follows the memory of all tensors that are made. What is copied into
    the store's memory, and out of it, is the pager's work."""

    def __init__(self, store: NotingStore) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store
        self._alive = self._most = self.peak = 0
        self._seen: dict[int, int] = {}
        self._unused: set[int] = set()
        self._watched: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made, given = list(_tensors_in(result)), [*_tensors_in(args), *_tensors_in(kwargs)]
        formula = flop_registry.get(func._overloadpacket)
        flops = float(formula(*args, **(kwargs or {}), out_val=result)) if formula is not None else _attention(func, args)
        shown = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in shown]
        changed, name = func._schema.is_mutable, func._overloadpacket.__name__
        leased = self._store.leased
        if changed and given[0].untyped_storage()._cdata in leased:
            self._store.note(WorkNote("gradient", given[0].numel(), 2 * given[0].nbytes, 1))
        elif name == "copy_" and not shown.isdisjoint(leased):
            pass  # an activation, which the store has noted
        elif name != "set_" and name not in EMPTY and (fresh or flops or changed):  # what gives views takes no time
            nbytes = sum(tensor.numel() * tensor.itemsize for tensor in (*given, *(made[:1] if changed else fresh)))
            kind = OperationKind(_signature(func, args, kwargs), flops, nbytes, (func, *_described((args, kwargs or {}))))
            self._store.computed(kind)
        for tensor in given if shown & self._unused else ():
            self._counts(tensor.untyped_storage())
        for tensor in fresh:
            self._lives(tensor.untyped_storage(), used=name not in EMPTY)
        return result

    def _lives(self, storage: torch.UntypedStorage, used: bool) -> None:
        """Count the memory of a tensor until it is freed, from now or, where it is not ``used`` yet, from its first use: what
        nobody has written to takes no memory."""
        name = storage._cdata
        if name not in self._seen:
            self._seen[name] = 0
            self._unused.add(name)
            weakref.finalize(storage, self._dies, name).atexit = False
        if used:
            self._counts(storage)

    def _counts(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._unused:
            self._unused.discard(storage._cdata)
            nbytes = self._seen[storage._cdata] = storage.nbytes()
            self._alive += nbytes
            if self._alive > self._most:
                self._sweep()
                self._most = max(self._most, self._alive)
                self.peak = max(self.peak, self._most)

    def watch(self, tensor: torch.Tensor) -> None:
        """Look whether the memory of ``tensor`` was freed that will have weak references, as saved activations have: in torch
        2.6 these keep the storage as an object, although not its memory."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._watched.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def look(self) -> int:
        """Return the bytes that are alive now."""
        self._sweep()
        return self._alive

    def since(self) -> Alive:
        """Return what is alive now, and the most since the last call."""
        most, self._most = self._most, self.look()
        return Alive(self._most, max(most, self._most))

    def _sweep(self) -> None:
        """Count without the memory that was freed."""
        for name in [name for name, storage in self._watched.items() if storage.expired()]:  # type: ignore[no-untyped-call]
            self._dies(name)
            del self._watched[name]  # now another storage may have this address

    def _dies(self, name: int) -> None:
        self._alive -= self._seen.pop(name, 0)
        self._unused.discard(name)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results of an operation, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_in(one)


def _described(value: Any) -> Any:
    """Return arguments with a description in the place of each tensor, which keeps no memory alive."""
    if isinstance(value, torch.Tensor):
        return TensorForm.of(value)
    if type(value) in (list, tuple):
        return type(value)(map(_described, value))
    return {name: _described(one) for name, one in value.items()} if type(value) is dict else value


def _signature(func: Any, args: Any, kwargs: Any) -> str:
    return f"{func}{_described((args, kwargs or {}))}"


def _attention(func: Any, args: Any) -> float:
    """Return the operations of an attention on the CPU, which torch's registry does not have."""
    name = func._overloadpacket.__name__
    if "flash_attention_for_cpu" not in name:
        return 0.0
    backward = name.endswith("backward")
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    once = 4.0 * float(query.numel()) * float(key.shape[-2])
    return 2.5 * once if backward else once


def _fused(func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
           scale: float | None = None, enable_gqa: bool = False) -> Any:
    """Return what attention is on a CPU or a GPU, which keep no matrix of scores, where it can."""
    plain = query.is_meta and dropout_p == 0.0 and query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if not plain or (attn_mask is not None and attn_mask.requires_grad):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
