"""Make every commit of a store a checkpoint of the models in it: write what training needs beside their tensors, and restore
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from tiered.errors import ManifestError, MisuseError, TieredError, expect_type, quoted
from tiered.packing.quantised import FORMS
from tiered.store import TieredStore
from tiered.store.at_rest import StoreAtRest
from tiered.types import TensorSpec
from tiered.zero.checkpoint import beside, loaders
from tiered.zero.checkpoint.loaders import Loader, Stateful, random_states
from tiered.zero.optimizers.average import recall_average
from tiered.zero.optimizers.optimizer import Optimizer, ours_for
from tiered.zero.paging.pager import Pager, buffer_places, name_of, pager_of, pager_of_parameter, pagers_in
from tiered.zero.paging.saved_tensors import without_grad
from tiered.zero.paging.sharding import Partition
from tiered.zero.paging.storage import CheckpointRecord, model_named
from tiered.zero.paging.unit import Unit
from tiered.zero.paging.units import OLDER_SHARE_STEP, Limits, ModelPlan, Placement, UnitPlan
from tiered.zero.paging.update import Missed, Pending, Update
from tiered.zero.record import (
    MOST,
    VERSION,
    checked,
    dumps,
    limits_of,
    loads,
    refuse_other_tensors,
    states_shown,
    states_used,
)
from tiered.zero.rules.exact import AdamWRule, refuse_lacking
from tiered.zero.rules.known import RULES, is_unnamed, recorded
from tiered.zero.rules.rule import UpdateRule, settings_of

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Training", "commit", "commit_async", "load_record", "resume", "rollback"]

TRAINING = ("optimizer", "scheduler", "scaler", "data")
"""What a record has of a training, by the fields of ``Training``: None where it has none."""
Alike = Literal["none", "floats"]
"""Which types of a buffer count as the same: see ``other_buffer``."""


class Readable(Protocol):
    """The methods of a store that reading a record needs."""

    def __contains__(self, key: object) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def get(self, key: str) -> torch.Tensor: ...

    def spec(self, key: str) -> TensorSpec: ...


@dataclass(frozen=True)
class Training:
    """What a training has beside its model, which a commit keeps. ``optimizer``: of paged parameters, or several, each of
    others; MisuseError says what to do with another one. ``extra``: returns that of a commit which nobody calls for the model.
    """

    optimizer: Optimizer | Sequence[Optimizer] | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    data: Stateful | torch.Generator | None = None
    extra: Callable[[], Mapping[str, Any] | None] = lambda: None

    def __post_init__(self) -> None:
        if self.optimizer is not None and not self.optimizers:
            raise MisuseError("optimizer= is an empty list: leave it out, or give the optimizers of the model")
        for optimizer in self.optimizers:
            name = type(optimizer).__name__
            if isinstance(optimizer, nn.Module):
                raise MisuseError(f"optimizer= is a model, a {name}: the model comes first, and the optimizer after it")
            if not isinstance(optimizer, Optimizer):
                raise MisuseError(
                    f"optimizer= is a {name}, which is none of tiered.zero: for paged parameters make {ours_for(name)}; of one "
                    "for parameters in memory give extra={'optimizer': optimizer.state_dict()}, and load what zero.resume "
                    "returns of it"
                )
            if optimizer.resident:
                raise MisuseError(
                    f"optimizer= is a {name} of parameters in memory, whose states a commit of its store has anyway: leave it "
                    "out here"
                )
        for what, given in (("scheduler", self.scheduler), ("scaler", self.scaler), ("data", self.data)):
            is_generator = what == "data" and isinstance(given, torch.Generator)
            if given is not None and not is_generator and not callable(getattr(given, "state_dict", None)):
                raise MisuseError(f"{what}= has a state_dict() and a load_state_dict(), and {quoted(given)} has none")

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers, in the order in which they were given."""
        given = self.optimizer
        return () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)  # type: ignore[return-value]

    def record(self, pager: Pager) -> dict[str, Any]:
        """Return what a record has of it."""
        data = self.data.get_state() if isinstance(self.data, torch.Generator) else _state_of(self.data)
        optimizer = _of_optimizers(self.optimizers, pager) if self.optimizers else None
        return {"optimizer": optimizer, "scheduler": _state_of(self.scheduler), "scaler": _state_of(self.scaler), "data": data}


def _state_of(one: Stateful | None) -> Mapping[str, Any] | None:
    return None if one is None else one.state_dict()


def commit(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    data: Stateful | torch.Generator | None = None,
    extra: Mapping[str, Any] | None = None,
    meta: Mapping[str, object] | None = None,
) -> int:
    """Make all that training needs to go on durable, and return the generation: ``store.commit`` with what is not in tensors.

    That is: all that ``model.state_dict()`` has (what was added or replaced after ``zero.page``, too), buffers, moments,
    masters, updates that are pending (none is applied for this, but those of parameters that several ranks gather), gradients
    that no step has used yet, so that ``zero_grad`` may stand anywhere in a loop, step counts and param groups,
    ``scheduler``, ``scaler``, the random states of Python, NumPy and torch, the position of ``data`` (a ``torch.Generator``,
    or what has ``state_dict``), and ``extra``: JSON values, tuples, tensors. So are all other tensors of the store, and in
    one process its other models, with what was given for these last, where ``zero.resume`` or a step said what that is; those
    that have an ``extra`` have a call of their own.
    Costs what is still dirty in memory. Between steps, or between backward and ``step()``; not within forward or backward.
    After an exception in one of these call ``optimizer.zero_grad()`` first (with ``update="in_backward"``, ``rollback``).

    Several ranks call it together, each with the store that ``zero.open_store`` gave it; it is acknowledged once all have
    committed. Several optimizers, each of other parameters of the model, are given as a list, here, to ``resume`` and to
    ``rollback``. ``meta`` is the store's, for people to read (default: as before). An optimizer of torch, for parameters that
    are in memory, is not given: its ``state_dict()`` goes with ``extra``. Raises MisuseError for what cannot be written down,
    and what ``TieredStore.commit`` raises.
    """
    return commit_with(model, Training(optimizer, scheduler, scaler, data), extra, meta, keeps_all=True)


def commit_with(
    model: nn.Module,
    training: Training,
    extra: Mapping[str, Any] | None,
    meta: Mapping[str, object] | None,
    *,
    keeps_all: bool,
) -> int:
    """``commit``. Without ``keeps_all`` an optimizer may be left out: the caller keeps what it has beside its states."""
    pager = pager_of(model)

    def prepare() -> None:
        prepare_commit(model, training, extra)
        _include_others(pager)

    others = ("optimizer=", training.optimizers or None), ("scheduler=", training.scheduler), ("scaler=", training.scaler)
    with pager.partition.agreeing("commit") as agree:
        agree((what, "None" if given is None else "given") for what, given in others)
        if keeps_all:
            _refuse_left_out(training.optimizers, pager)
        agree(beside.terms(model, pager))
        for one in training.optimizers:
            agree(one.terms(pager))
    _update_together(pager)
    made = pager.partition.commit(pager.store, meta, prepare, pager.checkpoint.invalidate)
    pager.given = model, training, extra is not None
    return made


def commit_async(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    data: Stateful | torch.Generator | None = None,
    extra: Mapping[str, Any] | None = None,
    meta: Mapping[str, object] | None = None,
) -> Future[int]:
    """``commit`` all as it is now, while training goes on: see ``TieredStore.commit_async``."""
    pager, training = pager_of(model), Training(optimizer, scheduler, scaler, data)
    partition = pager.partition
    if partition.shares > 1:
        raise MisuseError("ranks acknowledge a commit together, which commit_async does not: call zero.commit")
    _refuse_left_out(training.optimizers, pager)
    store = prepare_commit(model, training, extra)
    _include_others(pager)
    made = store.commit_async(partition.noted(store, meta))
    pager.given = model, training, extra is not None
    return made


def _include_others(pager: Pager) -> None:
    """Have the commit of a model be one of the others in its store, too; several ranks call it for each."""
    for other in pagers_in(pager.store):
        if other is not pager and other.partition.shares == 1 and other.in_commit is not None:
            other.in_commit(False)


def resume(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    data: Stateful | torch.Generator | None = None,
) -> Any:
    """Go on from the commit that the store was opened at; returns its ``extra`` (None where it had none).

    ``model`` was paged with ``existing="resume"`` or "continue", ``optimizer`` and the others were made anew as they were made
    then. The next step is bit for bit what it would have been. What had been added to the model, or replaced, after
    ``zero.page`` is added again before this call, which loads its values. A model that begins here (``existing="overwrite"``,
    or a store that had none of its name) has nothing to load: then nothing happens, and the result is None, so that one program
    serves every start. The commit at the end of the store's ``with`` block has what is given here, or to a later
    ``zero.commit``. Raises MisuseError where they differ from what was committed, ManifestError for a record that is damaged.
    """
    pager, training = pager_of(model), Training(optimizer, scheduler, scaler, data)
    if pager.checkpoint.begun:
        pager.given = model, training, False
        return None
    with pager.partition.agreeing("go on from this commit"):  # also where one rank cannot
        if pager.checkpoint.before is None and f"{pager.name}/checkpoint" not in pager.store:
            raise MisuseError(
                f"model {pager.name!r} was trained or changed since it was paged: call zero.resume before the first step, or, "
                "to go back to a commit, zero.rollback"
            )
        extra = load_record(model, pager, read_record(pager.store, pager.name, pager.checkpoint.before), training)
    pager.given = model, training, extra is not None
    return extra


def rollback(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    data: Stateful | torch.Generator | None = None,
    generation: int | None = None,
) -> Any:
    """Give up all since the last commit, after an exception or a loss that is not finite, say; returns its ``extra``.
    ``generation``: go back to an earlier commit, one of ``store.generations``.

    Whatever an exception left of forward, backward or ``step()``, and wherever it struck: all that models in the store hold by
    themselves (leases, gradients, updates that are pending, hooks) is thrown away. Where this call is interrupted, too, call it
    again. Moves no tensor of the model: see ``TieredStore.rollback``. Graphs of before cannot run backward any more. It is the
    whole store that goes back: call it for each model that is in it; until then the others raise but for those
    whose tensors stay as they are (tensors that were written since the last commit are read, to find that out). Raises as
    that, and as ``resume``: with nothing changed, unless a scheduler, a scaler or ``data`` cannot take over what the commit has
    of it.
    """
    training = Training(optimizer, scheduler, scaler, data)
    pager = pager_of(model)
    others = pagers_in(pager.store)
    for other in others:
        other.give_up()
    pager.partition.refuse_apart(pager.store)
    with pager.partition.agreeing("go back to this commit"):  # also where one rank cannot
        _refuse_unloadable(model, pager, training, generation)
    pager.follows = True  # it stays behind until all of it is as in the commit, also where its tensors are
    try:
        pager.store.rollback(generation, needs=[pager.checkpoint.key])
    finally:
        pager.follows = False
    if generation is not None:
        pager.partition.refuse_apart(pager.store)
    pager.gradient_sync.paused = False
    recall(pager)
    extra = load_record(model, pager, read_record(pager.store, pager.name), training)
    getattr(scaler, "_per_optimizer_states", {}).clear()  # what torch does after each step, and load_state_dict does not
    pager.replace_others()
    pager.checkpoint.unchanged()
    pager.intent.forget()
    pager.is_recorded()
    pager.given = model, training, extra is not None
    return extra


def extra_of(store: TieredStore, name: str) -> Any:
    """Return what ``resume`` will return, before there is a model: it may say how to make one. Raises as ``resume``."""
    return read_record(store, name)["extra"]


def optimizer_record(optimizer: Optimizer) -> dict[str, Any]:
    """Return the param groups and step counts of an optimizer for paged parameters; its states are in the store. What a commit
    has of it, for those who keep it elsewhere."""
    return _of_optimizers((optimizer,), pager_of_parameter(optimizer.param_groups[0]["params"][0]))


def load_optimizer(optimizer: Optimizer, record: Mapping[str, Any]) -> None:
    """Load what ``optimizer_record`` returned. Raises MisuseError where the param groups have other parameters."""
    pager = pager_of_parameter(optimizer.param_groups[0]["params"][0])
    here = [_names(group["params"], pager) for group in optimizer.param_groups]
    named = {placement.name: placement for placement in pager.placements}
    loaders.load_all([loaders.of_optimizer(optimizer, here, named, record)])


# Writing


def _update_together(pager: Pager) -> None:
    """Apply the pending updates for which ranks gather parameters: stores that are read alone could not."""
    together = [unit for unit in pager.units if unit.updates_together]
    if together:
        pager.start_anew()
    for unit in together:
        unit.apply_update()


def prepare_commit(model: nn.Module, training: Training, extra: Mapping[str, Any] | None) -> TieredStore:
    """Put everything that a commit of ``model`` needs beside the model's tensors into the store."""
    pager = pager_of(model)
    write_record(pager.store, pager.name, record_of(model, pager, training, extra))
    pager.checkpoint.begun = False
    pager.is_recorded()
    return pager.store


def record_of(model: nn.Module, pager: Pager, training: Training, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a commit needs of a model beside its tensors. Raises MisuseError and InterruptedStep where there
    can be no such commit."""
    pager.refuse_unresumed()
    pager.refuse_averaged("a commit")
    expect_type(extra, Mapping | None, "extra is a dict of JSON values, tuples and tensors, by name")
    states = getattr(training.scaler, "_per_optimizer_states", {})
    stages = [states.get(id(one), {}).get("stage") for one in training.optimizers]
    if any(getattr(stage, "name", None) == "UNSCALED" for stage in stages):  # which torch's state_dict does not tell
        raise MisuseError("the gradients are unscaled and not used yet: commit before scaler.unscale_ or after scaler.step")
    if training.optimizers:
        _refuse_left_out(training.optimizers, pager)
    pager.intent.refuse()
    pager.intent.refuse_half_updated()
    beside.refuse_forgotten(pager, "a commit")
    here = beside.beside(model, pager), beside.gone(model, pager), beside.transient(model, pager)
    if not pager.computing:
        pager.reset()  # what an exception left held
        pager.gradient_sync.synchronise()
        pager.gradient_sync.refresh()
    for unit in pager.units:
        if unit.held:
            raise MisuseError(f"the parameters of {unit.plan.shown} are in use: commit outside forward and backward")
        unit.gradients.close()
    units = [of_unit(unit) for unit in pager.units]
    averaged = None if pager.average is None else pager.average.record()
    return {
        "version": VERSION,
        "layout": layout_of([unit.plan for unit in pager.units], pager.limits, pager.partition),
        "units": units,
        **({} if averaged is None else {"average": averaged}),
        "buffers": pager.buffers(),
        "persistent": persistent(pager.buffer_places),
        **{name: found for name, found in zip(("beside", "gone", "transient"), here, strict=True) if found},
        **training.record(pager),
        "random": random_states(),
        "moment": pager.store.begun + 1,
        "extra": None if extra is None else dict(extra),
    }


def write_record(store: TieredStore, name: str, record: Mapping[str, Any]) -> None:
    """Write ``record`` as the checkpoint of model ``name``. Raises MisuseError, with nothing changed, for what cannot be
    written down."""
    larger: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> str:
        larger.append(tensor)
        return f"{name}/checkpoint/{len(larger)}"

    written = dumps(record, "the checkpoint", keep)
    before = CheckpointRecord(store, model_named(name))
    owner = before.owner
    before.invalidate()  # what comes now is another record's
    parts = {f"{name}/checkpoint/{number}": tensor for number, tensor in enumerate(larger, 1)}
    for key in [key for key in store.owned(owner) if key.startswith(f"{name}/checkpoint/") and key not in parts]:
        store.delete(key, owner=owner)
    for key, tensor in parts.items():
        store.put(key, tensor, owner=owner)
    store.put(before.key, torch.frombuffer(bytearray(written), dtype=torch.uint8), owner=owner)


def of_unit(unit: Unit) -> dict[str, Any]:
    average = unit.average
    if average is not None and average.halfway:  # an exception struck in it
        unit.apply_update()
    return {
        "gradients": unit.gradients.record(),
        "stale_masters": sorted(placement.name for placement in unit.states.stale_masters),
        "pending": None if unit.pending is None else _of_pending(unit.pending),
        **({"states": states_shown(unit.states)} if unit.states.used else {}),
        **({"averaged": average.made} if average is not None and average.made else {}),
    }


def _of_pending(pending: Pending) -> dict[str, Any]:
    pending.refuse_cut_off()
    updates = {}
    for placement, update in pending.updates.items():
        updates[placement.name] = {
            "rule": _of_rule(update.rule),
            "step": update.step,
            "scales": update.scales,
            "wide_scales": update.wide_scales,
            **({} if update.graded else {"graded": False}),
            **({} if update.missed is None else {"missed": _of_missed(update.step, update.missed)}),
        }
    return {"updates": updates, "chunks_done": pending.chunks_done, "pieces_done": pending.pieces_done}


def _of_missed(step: int, missed: Missed) -> list[tuple[Any, int]]:
    """Return the rules of missed steps after ``step``, and for how many steps each holds."""
    found: list[tuple[Any, int]] = []
    for number in range(step + 1, missed.last + 1):
        shown = _of_rule(missed.rule(number))
        if found and found[-1][0] == shown:
            found[-1] = shown, found[-1][1] + 1
        else:
            found.append((shown, 1))
    return found


def can_be_kept(rule: UpdateRule) -> bool:
    """Return whether a record can hold a pending update by ``rule``."""
    return is_unnamed(rule) or RULES.get(type(rule).__name__) is type(rule)


def _of_rule(rule: UpdateRule) -> Any:
    if is_unnamed(rule):
        return tuple(settings_of(rule).values())
    if not can_be_kept(rule):
        raise MisuseError(f"an update by {type(rule).__name__} is pending, which a checkpoint cannot hold: flush() first")
    return {"name": type(rule).__name__, "values": settings_of(rule)}


def _rule_of(found: Any) -> UpdateRule:
    """Return the rule that ``_of_rule`` wrote."""
    if isinstance(found, Mapping):
        made: UpdateRule = RULES[found["name"]](**found["values"])
        refuse_lacking(made)
        return made
    return AdamWRule(*found)


def _refuse_left_out(optimizers: Sequence[Optimizer], pager: Pager) -> None:
    """Raise MisuseError where an optimizer that has made steps of the model is none of these, nor were its parameters
    theirs since."""
    theirs = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    for other in pager.optimizers():
        left = [one for group in other.param_groups for one in group["params"] if id(one) not in theirs]
        if left and not any(other is one for one in optimizers):
            what = _names(left[:1], pager)[0]
            which = f"{type(other).__name__}, which updates {what!r}, has made steps of {pager.name!r}"
            if not optimizers:
                raise MisuseError(
                    f"an optimizer, {which}, and its states would not be in the commit: give it to zero.commit and to "
                    "zero.resume, optimizer="
                )
            raise MisuseError(
                f"another optimizer, {which}, too: give all of them to zero.commit and to zero.resume, "
                "optimizer=[first, second]; delete one that has served"
            )


def _of_optimizers(optimizers: Sequence[Optimizer], pager: Pager) -> dict[str, Any]:
    """Return the param groups of the optimizers, one after the other, and the steps of their parameters: as of one."""
    groups: list[dict[str, Any]] = []
    steps: dict[str, int] = {}
    for optimizer in optimizers:
        optimizer.refuse_turns()
        groups += [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "names": _names(group["params"], pager),
                **recorded(optimizer.rule_of(index)),
            }
            for index, group in enumerate(optimizer.param_groups)
        ]
        steps |= {placement.name: step for placement, step in optimizer.steps.items()}
    names = [name for group in groups for name in group["names"]]
    if len(set(names)) < len(names):
        raise MisuseError("two of the optimizers that were given have a parameter in common: give each parameter to one")
    return {"groups": groups, "steps": steps}


def _names(parameters: list[nn.Parameter], pager: Pager) -> list[str]:
    if any(pager_of_parameter(parameter) is not pager for parameter in parameters):
        raise MisuseError(f"the optimizer has parameters of another model than {pager.name!r}: make one for each model")
    return [name_of(parameter) for parameter in parameters]


# Reading


def read_record(store: Readable, name: str, before: torch.Tensor | None = None) -> dict[str, Any]:
    """Read the record of model ``name``, checked as a whole (``record.checked``). ``before``: where it is not in ``store`` any
    more, its bytes (``CheckpointRecord.before``). Raises MisuseError where there is none, ManifestError where it is damaged."""
    key = f"{name}/checkpoint"
    if before is not None:
        return checked(_decoded(store, name, before), f"the checkpoint of {name!r}")
    if key not in store:
        keys = list(store)
        if any(one.startswith(f"{name}/param/") for one in keys):
            raise MisuseError(
                f"{store} has parameters of model {name!r} and no checkpoint, as after a commit of the store alone: open an "
                "earlier generation"
            )
        there = [one.removesuffix("/checkpoint") for one in keys if one.endswith("/checkpoint")]
        has = f"; it has {', '.join(map(repr, there))}" if there else ""
        raise MisuseError(
            f"{store} has no model named {name!r} to go on with{has}: existing='continue' begins one where there is none"
        )
    what, spec = f"the checkpoint of {name!r}", store.spec(key)
    if spec.dtype != "uint8" or len(spec.shape) != 1 or spec.nbytes > MOST:
        shape = list(spec.shape)
        raise ManifestError(f"{what} is damaged: {key!r} is {spec.dtype} of shape {shape}, and not at most {MOST} bytes")
    return checked(_decoded(store, name, store.get(key)), what)


def _decoded(store: Readable, name: str, written: torch.Tensor) -> Any:
    """Decode the bytes of a record."""

    def fetch(larger: str) -> torch.Tensor:
        if not larger.startswith(f"{name}/checkpoint/"):
            raise ManifestError(f"it has {larger!r} for a part of it, which is none")
        return store.get(larger)

    return loads(written.numpy().tobytes(), f"the checkpoint of {name!r}", fetch)


def recall(pager: Pager) -> None:
    """Restore units and buffers as they were committed; their tensors are in the store. Raises as ``resume``, with nothing
    changed."""
    plan = [unit.plan for unit in pager.units]
    record = _fitting(pager.store, pager.name, plan, pager.limits, pager.partition, pager.buffer_places)
    recall_average(pager, record)
    for unit, found in zip(pager.units, record["units"], strict=True):
        named = {part.name: part for part in unit.parts.values()}
        unit.states.stale_masters = {named[name] for name in found["stale_masters"]}
        unit.states.used = states_used(found)
        unit.pending = None if found["pending"] is None else pending_of(found["pending"], named)
        unit.version += 1
        unit.counted_by.clear()
        unit.storage.restored()
        unit.arriving.close()
        unit.gradients.recall(found["gradients"])
    pager.checkpoint.await_resume()
    pager.not_loaded = beside.set_extra_states(pager.model, record)
    for name, value in record["buffers"].items():
        module, last = pager.buffer_places[name]
        buffer = module._buffers[last]
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype and not buffer.is_meta:
            with without_grad():
                buffer.copy_(value)
        else:
            module._buffers[last] = value.to(pager.store.device)


def pending_of(found: Mapping[str, Any], named: Mapping[str, Placement]) -> Pending:
    """Return the pending update of a unit that a record has, for the placements of these names."""
    updates = {}
    for name, update in found["updates"].items():
        scales = tuple(update["scales"]), tuple(update["wide_scales"])
        pending = Update(_rule_of(update["rule"]), update["step"], *scales, update.get("graded", True))
        if "missed" in update:
            log: dict[int, UpdateRule] = {}
            last = pending.step
            for rule, count in update["missed"]:
                log |= dict.fromkeys(range(last + 1, last + count + 1), _rule_of(rule))
                last += count
            pending = pending.then(log, last)
        updates[named[name]] = pending
    return Pending(updates, found["chunks_done"], found["pieces_done"])


def load_record(model: nn.Module, pager: Pager, record: Mapping[str, Any], training: Training) -> Any:
    """Load what a model has beside its paged parameters, what a training has, and random states from a record: all of them,
    or, where it raises, none."""
    awaited, pager.must_resume = pager.must_resume, False
    try:
        loaders.load_all(_loaders(model, pager, record, training))
    except BaseException:
        pager.must_resume = awaited
        raise
    pager.moment = record.get("moment", 0)
    pager.checkpoint.resumed()
    return record["extra"]


def _loaders(model: nn.Module, pager: Pager, record: Mapping[str, Any], training: Training) -> list[Loader]:
    """Return the loaders of what ``load_record`` loads. Raises MisuseError where a record is of other things, ManifestError
    where it is damaged."""
    for what in TRAINING:
        _refuse_other_use(what, getattr(training, what), record[what], pager)
    loading: list[Loader] = [beside.loader_of(model, pager, record)]
    named = {placement.name: placement for placement in pager.placements}
    for number, (optimizer, found) in enumerate(_by_optimizer(training.optimizers, record["optimizer"], named)):
        here = [_names(group["params"], pager) for group in optimizer.param_groups]
        loading.append(loaders.of_optimizer(optimizer, here, named, found, number if len(training.optimizers) > 1 else None))
    for what, one in (("scheduler", training.scheduler), ("scaler", training.scaler)):
        if one is not None:
            loading.append(loaders.of_stateful(one, record[what], f"{what}="))
    if isinstance(training.data, torch.Generator):
        loading.append(loaders.of_generator(training.data, record["data"]))
    elif training.data is not None:
        loading.append(loaders.of_data(training.data, record["data"]))
    # Of several models in a store, the random states of the latest moment stay, in whichever order they resume.
    moment = record.get("moment", 0)
    latest = max(other.moment for other in pagers_in(pager.store))
    return [*loading, *([loaders.of_random(record["random"])] if moment >= latest else [])]


def _refuse_other_use(what: str, given: object, found: object, pager: Pager) -> None:
    """Raise MisuseError where an object of a training is given, and a record has none, or the other way round."""
    if given is not None and found is None:
        raise MisuseError(f"{what}= was given, and the checkpoint has none: leave it out here, and make it after this call")
    if given is None and found is not None:
        unused = "; to evaluate or export, leave zero.resume out: the parameters are those of the commit"
        raise MisuseError(
            f"{what}= is missing, and the checkpoint has one: give it, as zero.commit was given it"
            f"{unused if pager.checkpoint.awaited else ''}"
        )


def _refuse_unloadable(model: nn.Module, pager: Pager, training: Training, generation: int | None) -> None:
    """Raise as ``load_record`` would after the store has gone back to ``generation``, as far as that can be known before. What
    is wrong with the generation itself the rollback says, which also tries one that cannot be read beside the open store: a
    reader needs a file in its folder."""
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(pager.store.reader())
            rest = stack.enter_context(StoreAtRest(handle.folder, paths=handle.paths, generation=generation))
        except (TieredError, OSError):
            return
        if pager.checkpoint.key in rest:
            plan = [unit.plan for unit in pager.units]
            record = _fitting(rest, pager.name, plan, pager.limits, pager.partition, pager.buffer_places)
            _loaders(model, pager, record, training)


def _by_optimizer(
    optimizers: Sequence[Optimizer], record: Mapping[str, Any], named: Mapping[str, Placement]
) -> Iterator[tuple[Optimizer, Mapping[str, Any]]]:
    """Yield each optimizer with its part of a record: as many of its param groups as it has here, the last one all that are
    left, and the steps of their parameters."""
    if len(optimizers) <= 1:
        yield from ((one, record) for one in optimizers)
        return
    first = 0
    for number, optimizer in enumerate(optimizers):
        end = first + len(optimizer.param_groups) if number + 1 < len(optimizers) else None
        groups = record["groups"][first:end]
        names = {name for group in groups for name in group["names"]}
        steps = {name: step for name, step in record["steps"].items() if name in named and _whole(named[name]) in names}
        yield optimizer, {"groups": groups, "steps": steps}
        first += len(optimizer.param_groups)


def _whole(placement: Placement) -> str:
    """Return the name of a parameter, or of the one that a slice is of."""
    return placement.name if placement.sliced is None else placement.sliced.name


def _difference(committed: Any, here: Any) -> str:
    """Describe the first difference of two layouts."""
    if committed.get("share") != here.get("share"):
        was, is_ = (f"as {found['share']}" if "share" in found else "not" for found in (committed, here))
        return f"it was divided {was}, and is {is_}"
    before, after = ({one[0]: one for _, described in layout["units"] for one in described} for layout in (committed, here))
    lost, fresh = ([one[name] for name in one if name not in other] for one, other in ((before, after), (after, before)))
    if lost and fresh:
        return f"the commit has {_parameters(lost)}, and this model {_parameters(fresh)} instead"
    if lost or fresh:
        only = f"{_parameters(lost)}, which this model has not" if lost else f"no {_parameters(fresh)}"
        return f"the commit has {only}"
    for name, one in after.items():
        if before[name] != one:
            return f"the commit has {_parameters([before[name]])}, and this model {_parameters([one])}"
    return "the commit has the same parameters in another order, or in other units"


def _parameters(several: Sequence[Any]) -> str:
    name, shape, dtype, stored = several[0][:4]
    kept = "" if stored == dtype else f", stored as {stored}"
    more = f" and {len(several) - 1} more" if len(several) > 1 else ""
    return f"{name!r} ({dtype} of shape {tuple(shape)}{kept}){more}"


def layout(
    store: TieredStore, name: str
) -> tuple[Limits, dict[str, tuple[int, ...]], dict[str, int | None], dict[str, str], set[str]]:
    """Return the limits by which model ``name`` was divided when it was committed, the strides of its parameters, of those that
    were sliced the rows of a slice by name (None: each slice is one without that dimension), the forms in which parameters
    and slices are packed, and those that are in a second unit of their module. Raises as ``resume``."""
    found = read_record(store, name)["layout"]
    parameters = [parameter for _, parameters in found["units"] for parameter in parameters]
    strides = {parameter[0]: tuple(parameter[4]) for parameter in parameters}
    forms = {parameter[0]: parameter[3] for parameter in parameters if parameter[3] in FORMS}
    rows = {sliced: rows or None for sliced, (_, rows) in found.get("sliced", {}).items()}
    for first, shape, _, _, stride in parameters:
        if first.endswith("[0]") and rows.get(first.removesuffix("[0]"), 0) is None:
            strides[first.removesuffix("[0]")] = (torch.Size(shape).numel(), *stride)
    apart = {parameter[0] for unit, described in found["units"] if unit.endswith("#1") for parameter in described}
    return limits_of(found), strides, rows, forms, apart


def persistent_buffers(model: nn.Module) -> list[str]:
    """Return the names of the buffers that ``state_dict`` has, each once."""
    return persistent(buffer_places(model))


def persistent(places: Mapping[str, tuple[nn.Module, str]]) -> list[str]:
    """Return those of the buffers in ``places`` that are there and that ``state_dict`` has."""
    return [
        name
        for name, (module, last) in places.items()
        if last not in module._non_persistent_buffers_set and module._buffers.get(last) is not None
    ]


def refuse_other(store: TieredStore, name: str, plan: ModelPlan, partition: Partition, model: nn.Module) -> None:
    """Raise MisuseError where ``model``, divided by ``plan``, is not the one that was committed as ``name``, and ManifestError
    where its record is damaged, or not of the tensors that are there."""
    places = buffer_places(model)
    record = _fitting(store, name, plan.units, plan.limits, partition, places)
    buffers, mine = record["buffers"], set(persistent(places))
    # Of another program's checkpoint a record has no other buffers than that had: those that state_dict has.
    foreign = record.get("persistent") == list(buffers)
    for fresh, (module, last) in places.items():
        if fresh not in buffers and not (foreign and fresh not in mine):
            raise _other_model(name, f"the commit has no buffer {fresh!r}")
        present = module._buffers[last]
        if fresh in mine and fresh in buffers and present is not None:  # others may grow while modules are called
            other = other_buffer(present, buffers[fresh], "floats" if foreign else "none")
            if other:
                raise _other_model(name, f"the commit has the buffer {fresh!r} as {other}")


def _other_model(name: str, why: str) -> MisuseError:
    return MisuseError(
        f"this model is not what was committed as {name!r}: {why}. Page a model that is made as that one was, or begin "
        "anew with existing='overwrite' or another name="
    )


def other_buffer(present: torch.Tensor, found: torch.Tensor, alike: Alike = "none") -> str:
    """Return how a buffer that was ``found`` differs in shape or type from the one that a model has, in words; empty where it
    does not. ``alike``: which types count as the same: "none", or "floats", because DeepSpeed's modules are narrow, and their
    buffers may be wider."""
    floats = alike == "floats" and found.is_floating_point() and present.is_floating_point()
    if found.shape == present.shape and (floats or found.dtype == present.dtype):
        return ""
    one, other = (f"{str(buffer.dtype).removeprefix('torch.')} of shape {tuple(buffer.shape)}" for buffer in (found, present))
    return f"{one}, and this model has {other}"


def _fitting(
    store: Readable,
    name: str,
    units: Sequence[UnitPlan],
    limits: Limits,
    partition: Partition,
    places: Mapping[str, tuple[nn.Module, str]],
) -> dict[str, Any]:
    """Return the record of a model with these units, and buffers in these places. Raises as ``refuse_other``."""
    record = read_record(store, name)
    committed, here = record["layout"], layout_of(units, limits, partition)
    if committed != here:
        raise _other_model(name, _difference(committed, here))
    refuse_other_tensors(store, name, record, units, limits)
    for buffer in record["buffers"]:
        module, last = places.get(buffer, (None, ""))
        if module is None or last not in module._buffers:
            raise _other_model(name, f"this model has no buffer {buffer!r}")
    return record


def layout_of(units: Sequence[UnitPlan], limits: Limits, partition: Partition) -> dict[str, Any]:
    """Describe where everything lies: of each unit its name, and of each parameter its name, shape, types and strides; and,
    where several ranks have a share each, which one this is."""
    described = [
        [
            unit.name,
            [[p.name, list(p.shape), str(p.dtype), p.form, list(p.stride)] for p in unit.placements],
        ]
        for unit in units
    ]
    layout: dict[str, Any] = {"limit": limits.unit, "chunk": limits.chunk, "units": described}
    sliced = {p.sliced.name: p.sliced for unit in units for p in unit.placements if p.sliced is not None}
    if sliced:
        layout["sliced"] = {name: (len(one.slices), one.rows or 0) for name, one in sliced.items()}
    if partition.shares == 1:
        return layout
    step = {} if limits.step == OLDER_SHARE_STEP else {"step": limits.step}
    return {**layout, **step, "share": partition.share()}
