"""Keep an exponential moving average of a paged model's weights in the store (Polyak and Juditsky, 1992, Acceleration of
stochastic approximation by averaging).

The average of a unit is one tensor, ``UNIT/average``, of the unit's layout in use. ``EMA.update`` counts and moves nothing:
what a unit has then is taken into its average when somebody next holds the unit, right after the pending update of the
optimizer and before anything else changes the unit. So the parameters are read once a step, as ever.

To take values into an average twice would spoil it. So a piece is computed aside, and copied; after an exception the same
piece is copied again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from tiered.errors import MisuseError, expect_type, quoted
from tiered.tensors.digests import digests
from tiered.types import Access, TensorSpec
from tiered.zero.paging.pager import Pager, pager_of
from tiered.zero.paging.saved_tensors import outside_inference, without_grad
from tiered.zero.paging.storage import ParameterStorage, TensorStore
from tiered.zero.paging.unit import Unit
from tiered.zero.paging.units import Placement, UnitPlan
from tiered.zero.paging.update import UPDATED_AT_ONCE

__all__ = ["EMA", "ModelAverage", "Runs", "UnitAverage", "average_nbytes", "recall_average", "runs_of", "take_all"]

LOGGED = 256
"""After so many updates with other decays they are made of units that nobody has held meanwhile, too."""
Decay = float | Callable[[int], float]


class Runs(NamedTuple):
    """Updates of an average: how many there were (``total``), and with which decay each was made. ``decays``: up to which
    update each decay holds, from the first that some unit has yet to take into its average."""

    total: int = 0
    decays: tuple[tuple[int, float], ...] = ()

    def then(self, decay: float, needed: int) -> Runs:
        """Return these updates with one more. Those up to number ``needed`` are in all averages."""
        total = self.total + 1
        kept = tuple(run for run in self.decays if run[0] > needed)
        if kept and kept[-1][1] == decay:
            kept = kept[:-1]
        return Runs(total, (*kept, (total, decay)))

    def after(self, made: int) -> list[float]:
        """Return the decays of the updates after number ``made``, in order. That of the first of all, which copies, means
        nothing."""
        found: list[float] = []
        for last, decay in self.decays:
            found += [decay] * max(0, last - made - len(found))
        return found


class _At(NamedTuple):
    """How far an average is: ``made`` updates are in all of it, ``goal`` in its first ``pieces``; ``landing`` has the values of
    the piece that follows, which is perhaps copied."""

    made: int = 0
    goal: int = 0
    pieces: int = 0
    landing: torch.Tensor | None = None


class _Still(NamedTuple):
    """Parameters whose average another update with the same decay leaves as it is: of their bytes a digest."""

    digest: int
    decay: float
    updates: int


def average_nbytes(plan: UnitPlan) -> int:
    """Return the bytes of a unit's average: of one share of it, where ranks share the unit."""
    return plan.nbytes // plan.shares


class UnitAverage:
    """The average of one unit: ``parts`` of its parameters, in a tensor ``key`` of ``store``. ``of`` is what the average of the
    whole model knows; ``storage``: where the average comes from while the model computes with it."""

    def __init__(
        self, key: str, parts: Sequence[Placement], nbytes: int, of: ModelAverage, store: TensorStore, storage: ParameterStorage
    ) -> None:
        self.key, self.storage = key, storage
        self._of, self._store, self._nbytes = of, store, nbytes
        self._pieces = _pieces(parts)
        self._at, self._updates = _At(), -1
        self._still: _Still | None = None

    @property
    def made(self) -> int:
        """How many updates are in the average."""
        return self._at.made

    @property
    def halfway(self) -> bool:
        return self._at.pieces > 0 or self._at.landing is not None

    @property
    def due(self) -> bool:
        return self._at.made < self._of.runs.total

    @property
    def applied(self) -> bool:
        return self._of.applied

    def refuse_writing(self) -> None:
        self._of.refuse_applied("a write to a parameter")

    def begin_at(self, made: int) -> None:
        """Have the average, which is in the store, be one of so many updates."""
        self._at, self._updates, self._still = _At(made, made), -1, None

    def is_idle(self, storage: ParameterStorage, updates_made: int) -> bool:
        still, runs = self._still, self._of.runs
        if still is None or self.halfway or still.updates != updates_made:
            return False
        if any(decay != still.decay for decay in runs.after(self._at.made)):
            return False
        with storage.shard(Access.READ) as values:
            found = digests([values])[0]
            del values
        if found != still.digest:
            return False
        self._at = _At(runs.total, runs.total)
        return True

    def bring(self, storage: ParameterStorage, updates_made: int) -> None:
        if self.key not in self._store:
            self._store.create(self.key, TensorSpec("uint8", (self._nbytes,), 1))
        unchanged, self._updates = self._updates == updates_made, updates_made
        with storage.beside(self.key) as (average, values):
            if self._at == _At():
                average.zero_()  # what is between parameters, too
            moved = _take_into(self, average, values)
            still = unchanged and not moved and average.device.type == "cpu"
            found = digests([values])[0] if still else 0
            del average, values
        decays = self._of.runs.decays
        self._still = _Still(found, decays[-1][1], updates_made) if still and decays else None

    def steps(self, average: torch.Tensor, values: torch.Tensor) -> Iterator[bool]:
        """Take what is due into ``average``, a piece at a time; ``values``: the unit as it is in the store (both uint8). Yields
        whether the last update of a piece moved it."""
        while self.due:
            goal = self._at.goal if self.halfway else self._of.runs.total
            decays = self._of.runs.after(self._at.made)[: goal - self._at.made]
            for number in range(self._at.pieces, len(self._pieces)):
                part, start, stop = self._pieces[number]
                made, moved = self._at.landing, True
                if made is None:
                    made, moved = _averaged(part, start, stop, average, values, decays, first=self._at.made == 0)
                    self._at = self._at._replace(goal=goal, landing=made)
                part.flat(average, start, stop).copy_(made)
                self._at = _At(self._at.made, goal, number + 1)
                yield moved
            self._at = _At(goal, goal)


def _take_into(average: UnitAverage, memory: torch.Tensor, values: torch.Tensor) -> bool:
    """Do all ``steps`` of an average; return whether one moved it."""
    with without_grad():
        return any(list(average.steps(memory, values)))


def take_all(parts: Sequence[Placement], average: torch.Tensor, values: torch.Tensor, runs: Runs, made: int) -> None:
    """Take what is due into ``average``, which has ``made`` of the updates ``runs``; ``values``: the unit as it is in the store
    (both uint8, of a store that is not open)."""
    for part, start, stop in _pieces(parts):
        found, _ = _averaged(part, start, stop, average, values, runs.after(made), first=made == 0)
        part.flat(average, start, stop).copy_(found)


def _pieces(parts: Sequence[Placement]) -> list[tuple[Placement, int, int]]:
    step = UPDATED_AT_ONCE
    return [(part, start, min(start + step, part.numel)) for part in parts for start in range(0, part.numel, step)]


def _averaged(
    part: Placement,
    start: int,
    stop: int,
    average: torch.Tensor,
    values: torch.Tensor,
    decays: Sequence[float],
    *,
    first: bool,
) -> tuple[torch.Tensor, bool]:
    """Return elements of an average after updates with these decays, as a new tensor, and whether the last one changed bits of
    them. The first of all updates copies."""
    present = part.stored_flat(values, start, stop).to(part.dtype)
    made = before = part.flat(average, start, stop)
    for number, decay in enumerate(decays):
        before, made = made, present.clone() if first and number == 0 else _once(made, present, decay)
    return made, not torch.equal(made.view(torch.uint8), before.view(torch.uint8))


def _once(average: torch.Tensor, present: torch.Tensor, decay: float) -> torch.Tensor:
    """Return an average after one update, as torch's ``get_ema_multi_avg_fn`` computes it, as a new tensor."""
    if average.is_floating_point() or average.is_complex():
        return torch.lerp(average, present, 1 - decay)
    return (average * decay + present * (1 - decay)).to(average.dtype)


class _Now(NamedTuple):
    """The updates of an average, and the buffers that it has, by name."""

    runs: Runs = Runs()
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({})


class _Block:
    """A block of code in which a model computes with its average. The block alone keeps this object, and a weak reference tells
    whether it is still running."""

    __slots__ = ("__weakref__",)


class _Aside(NamedTuple):
    """What a block has put other things in the place of: ``buffers`` of the model (module, name in it, name in the model), and
    whether autograd recorded."""

    buffers: list[tuple[nn.Module, str, str, torch.Tensor]]
    recorded: bool


def _settle(average: weakref.ref[ModelAverage], _: object) -> None:
    """End a block that nobody keeps any more, because an exception struck its end."""
    found = average()
    if found is not None:
        found.settle()


class ModelAverage:
    """What a paged model knows of the average of its weights. The model keeps it, whoever else refers to it; ``handle`` is the
    ``EMA`` that updates it."""

    def __init__(self, pager: Pager) -> None:
        self._pager = weakref.ref(pager)
        self._now = _Now()
        self._block: weakref.ref[_Block] | None = None
        self._ended = False
        """Whether the block has ended, which somebody may keep yet."""
        self._aside: _Aside | None = None
        self.handle: weakref.ref[EMA] | None = None

    @staticmethod
    def of(pager: Pager) -> ModelAverage:
        """Return that of a model, which is made where there is none."""
        found = pager.average
        if not isinstance(found, ModelAverage):
            found = ModelAverage(pager)
            for unit in pager.units:
                if not unit.plan.read_only:  # the average of what never changes is itself
                    unit.average = _of_unit(unit, found, pager)
            pager.average = found
        return found

    @property
    def runs(self) -> Runs:
        return self._now.runs

    def _averages(self) -> list[UnitAverage]:
        pager = self._pager()
        units = () if pager is None else pager.units
        return [unit.average for unit in units if isinstance(unit.average, UnitAverage)]

    def advance(self, buffers: Mapping[str, torch.Tensor], decay: float, *, averages: bool) -> None:
        """Count an update, of parameters as they are when updates that are pending are applied, and of ``buffers`` as they are
        now. ``averages``: buffers are averaged, too, and not copied."""
        runs, before = self._now
        needed = min((average.made for average in self._averages()), default=runs.total)
        made: dict[str, torch.Tensor] = {}
        with outside_inference(), without_grad():
            for name, buffer in buffers.items():
                kept = before.get(name)
                if not averages or kept is None:
                    made[name] = buffer.detach().clone()
                elif kept.shape == buffer.shape and kept.dtype == buffer.dtype:
                    made[name] = _once(kept, buffer.detach(), decay)
                else:
                    raise MisuseError(
                        f"the buffer {name!r} was {kept.dtype} of shape {tuple(kept.shape)} when it was averaged last, and is "
                        f"{buffer.dtype} of shape {tuple(buffer.shape)}: leave out use_buffers=True"
                    )
        self._now = _Now(runs.then(decay, needed), made)

    # -- a block that computes with it ---------------------------------------------------------------------------------------

    @property
    def applied(self) -> bool:
        """Whether the model computes with the average now."""
        return not self._ended and self._block is not None and self._block() is not None

    def refuse_applied(self, what: str) -> None:
        """Raise MisuseError where the model computes with the average, and ``what`` is of the model that is trained."""
        if self.applied:
            raise MisuseError(
                f"the model computes with the average of its weights (EMA.applied), and {what} is of its weights: leave that "
                "block first"
            )

    def apply(self, block: _Block) -> None:
        """Have the model compute with the average as long as somebody keeps ``block``, or until ``end``."""
        self.settle()
        pager = self._pager()
        assert pager is not None
        names = {id(buffer): name for name, buffer in pager.buffers().items()}
        buffers = [
            (module, last, names[id(buffer)], buffer)
            for module in pager.model.modules()
            for last, buffer in module._buffers.items()
            if buffer is not None and names.get(id(buffer)) in self._now.buffers
        ]
        self._aside = _Aside(buffers, torch.is_grad_enabled())
        self._ended = False
        self._block = weakref.ref(block, partial(_settle, weakref.ref(self)))
        for module, last, name, _ in buffers:
            module._buffers[last] = self._now.buffers[name]
        torch._C._set_grad_enabled(False)  # as torch.no_grad, which a signal may strike as it ends
        torch.clear_autocast_cache()  # of the same parameters, which have other values now

    def end(self) -> None:
        """Have the model compute with its weights. What a forward has made of the average's buffers stays with the average."""
        self._ended = True
        self.settle()

    def settle(self) -> None:
        """Give the model its buffers back, and have autograd record again, where the block has ended."""
        if self._aside is None or self.applied:
            return
        (aside, recorded), (runs, buffers) = self._aside, self._now
        present = [(name, module._buffers.get(last), own) for module, last, name, own in aside]
        changed = {name: found for name, found, own in present if found is not None and found is not own}
        self._now = _Now(runs, {**buffers, **changed})
        for module, last, _, own in aside:
            module._buffers[last] = own
        torch._C._set_grad_enabled(recorded)
        torch.clear_autocast_cache()
        self._aside = None

    # -- commits -------------------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any] | None:
        """Return what a commit has of it, beside its tensors and how far each is; None where it was never updated."""
        (total, decays), buffers = self._now
        return {"updates": total, "decays": [list(run) for run in decays], "buffers": dict(buffers)} if total else None

    def recall(self, found: Mapping[str, Any] | None) -> None:
        """Be as a commit says, None: as one that was never updated."""
        self._now = _Now() if found is None else _Now(runs_of(found), dict(found["buffers"]))


def runs_of(found: Mapping[str, Any]) -> Runs:
    """Return the updates of which a record speaks."""
    return Runs(found["updates"], tuple((last, decay) for last, decay in found["decays"]))


def _of_unit(unit: Unit, model: ModelAverage, pager: Pager) -> UnitAverage:
    key, parts = f"{unit.key}/average", list(unit.parts.values())
    storage = pager.partition.averaged(pager.store, unit.states.store, key, unit.plan, pager.checkpoint)
    return UnitAverage(key, parts, average_nbytes(unit.plan), model, unit.states.store, storage)


def recall_average(pager: Pager, record: Mapping[str, Any]) -> None:
    """Have the average of a model be as its record says; its tensors are in the store. A model without an average gets that of
    the record, whose updates it goes on with once there is an ``EMA``."""
    found = record.get("average")
    if found is None and pager.average is None:
        return
    average = ModelAverage.of(pager)
    average.end()
    average.recall(found)
    for unit, said in zip(pager.units, record["units"], strict=True):
        if isinstance(unit.average, UnitAverage):
            unit.average.begin_at(said.get("averaged", 0))


class EMA:
    """Exponential moving average of a paged model's weights, in its store: that of ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn(decay)``, bit for bit where updates are computed.

    ``decay``: of each update, at least 0 and at most 1, or a function that is called with the number of updates before, as in a
    warm-up: ``lambda n: min(0.999, (1 + n) / (10 + n))``. The first update copies. ``use_buffers``: buffers are averaged, too;
    otherwise the average has those of the last update.

    The average has the types that the model computes with, and takes as many bytes of the store as the parameters have in these
    (``MODEL/param/UNIT/average``); frozen parameters have one, too, which is not written any more once it stays as it is, and
    quantised ones none. It is the model's: commits, ``zero.rollback``, ``zero.resume`` and ``existing="overwrite"`` take it
    along, also in a process that makes no ``EMA``. One that is made for a model whose commit has an average goes on with it. A
    model has one average.

    Several ranks make it together, and call its methods together; each has its share of the average. Within ``applied`` their
    forwards use the same units, in one order, with each stage.

    Raises MisuseError for a model that is not paged, or only in part, one whose average another ``EMA`` updates, parameters of
    a type that torch cannot average, and another decay.
    """

    def __init__(self, model: nn.Module, decay: Decay, *, use_buffers: bool = False) -> None:
        pager = pager_of(model)
        expect_type(use_buffers, bool, "use_buffers is True or False")
        _refuse_other_parameters(model, pager)
        self._pager, self._use_buffers = pager, use_buffers
        self.decay = decay
        average = ModelAverage.of(pager)
        if average.handle is not None and average.handle() is not None:
            raise MisuseError(
                f"model {pager.name!r} has an average that another zero.EMA updates: use that one (its decay can be set), or "
                "delete() it first"
            )
        average.handle = weakref.ref(self)

    @property
    def decay(self) -> Decay:
        """The decay of updates from now on."""
        return self._decay

    @decay.setter
    def decay(self, decay: Decay) -> None:
        if not callable(decay):
            _refuse_decay("decay is", decay)
        self._decay = decay

    @property
    def updates(self) -> int:
        """How many updates the average has had."""
        return self._average().runs.total

    def update(self) -> None:
        """Take the present weights into the average, those of after ``optimizer.step()``: ``AveragedModel.update_parameters``.

        Moves nothing: a unit's are taken into it when the unit is next held. Of a unit that no forward has held since the last
        update (an expert without tokens) this costs that its steps are not made together any more. Raises MisuseError within
        forward, backward or ``applied``, and InterruptedStep where the model cannot be gone on with; then nothing is counted.
        """
        average, pager = self._average(), self._pager
        average.refuse_applied("EMA.update")
        if pager.store.access is Access.READ:
            raise MisuseError(f"{pager.store} is open for reading: open it without access='read' to update an average in it")
        pager.refuse_unresumed()
        if pager.computing:
            raise MisuseError("the model is computing: call EMA.update after optimizer.step()")
        pager.reset()
        pager.intent.refuse_half_updated()
        count = average.runs.total
        kept = [unit for unit in pager.units if unit.is_kept]
        with pager.partition.agreeing("update the average") as agree:
            decay = self._decay(count) if callable(self._decay) else self._decay
            _refuse_decay(f"decay({count}) returned what is no decay:", decay)
            for unit in kept:
                unit.refuse_hidden()
            agree([("updates of the average before", str(count)), ("its decay", str(float(decay)))])
        pager.checkpoint.resumed()
        pager.checkpoint.note()
        average.advance(pager.buffers(), float(decay), averages=self._use_buffers)
        # What is written to a tensor that somebody kept comes after this update; decays are remembered for so many updates.
        for unit in kept if len(average.runs.decays) < LOGGED else pager.units:
            unit.apply_update()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the model compute with the average in a block of code: to evaluate, to generate, for ``state_dict`` and
        ``zero.export``.

        Nothing of the model is moved for it, and nothing is recorded for backward within it. Whatever ends the block, the model
        has its weights afterwards. ``zero.rollback`` ends it. Raises MisuseError within another such block, within forward or
        backward, and where the average was never updated. Within the block what trains, writes to a parameter, or commits
        raises.
        """
        average, pager = self._average(), self._pager
        average.refuse_applied("another EMA.applied")
        if pager.computing:
            raise MisuseError("the model is computing: enter EMA.applied between steps")
        pager.reset()
        with pager.partition.agreeing("compute with the average") as agree:
            agree([("updates of the average", str(average.runs.total))])
            if not average.runs.total:
                raise MisuseError("there is no average yet: call EMA.update first, after a step")
        for unit in pager.units if pager.partition.shares == 1 else ():
            if unit.is_kept:  # what was written to a tensor that somebody kept is the parameter's, and not the average's
                unit.hold()
                unit.drop()
        block = _Block()
        try:
            average.apply(block)
            yield
        finally:
            average.end()
            if any(unit.held for unit in pager.units):
                pager.reset()

    def delete(self) -> None:
        """Delete the average from the store. Raises MisuseError within ``applied``."""
        average, pager = self._average(), self._pager
        average.refuse_applied("EMA.delete")
        pager.reset()
        pager.checkpoint.invalidate()
        pager.average = None
        for unit in pager.units:
            found, unit.average = unit.average, None
            if found is not None and found.key in pager.store:
                pager.store.delete(found.key, owner=pager.owner)

    def _average(self) -> ModelAverage:
        found = self._pager.average
        if not isinstance(found, ModelAverage) or found.handle is None or found.handle() is not self:
            raise MisuseError("this average was deleted: make another zero.EMA")
        return found


def _refuse_decay(what: str, decay: object) -> None:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise MisuseError(f"{what} a number from 0 to 1, not {quoted(decay)}")


def _refuse_other_parameters(model: nn.Module, pager: Pager) -> None:
    """Raise MisuseError unless the parameters of ``model`` are those that ``pager`` pages, of types that can be averaged."""
    paged = {id(placement.whole): placement for placement in pager.placements}
    there: set[int] = set()
    types: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in paged:
            raise MisuseError(
                f"zero.EMA averages paged parameters, and {name!r} is none of model {pager.name!r}: add it to the model before "
                "zero.page, or average it in memory (torch.optim.swa_utils.AveragedModel)"
            )
        there.add(id(parameter))
        types.setdefault(parameter.dtype, name)
    for dtype, name in types.items():
        _refuse_type(name, dtype)
    units = {unit.plan.name for unit in pager.units}
    taken = next((name for name in units if f"{name}/average" in units), None)
    if taken is not None:
        raise MisuseError(f"{taken + '/average'!r} has the key that the average of {taken!r} would have: give it another name")
    left = next((placement for one, placement in paged.items() if one not in there), None)
    if left is not None:
        raise MisuseError(
            f"zero.EMA averages all of a paged model, and {left.name!r} is in none of these modules: give the whole model"
        )


def _refuse_type(name: str, dtype: torch.dtype) -> None:
    try:
        _once(torch.zeros(1, dtype=dtype, device="cpu"), torch.zeros(1, dtype=dtype, device="cpu"), 0.5)
    except (RuntimeError, NotImplementedError) as error:
        raise MisuseError(f"{name!r} is {dtype}, which torch cannot average") from error
