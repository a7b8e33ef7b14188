"""Take over the checkpoint of another program: its parameters and optimizer states, read by the elements of parameters.

What reads the files of such a program is a ``Foreign``. ``ForeignSource`` shows it as a checkpoint that is resharded, so that
``take_over`` writes it as the units of a model that is paged, and ``put`` as a checkpoint of a store without the model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from tiered.errors import MisuseError, TieredError, TorchFileError, shown
from tiered.store import TieredStore
from tiered.types import TensorSpec
from tiered.zero.checkpoint.checkpoint import Alike, other_buffer, recall
from tiered.zero.checkpoint.loaders import random_states
from tiered.zero.checkpoint.reshard import Elements, reshard, span_of
from tiered.zero.paging.pager import Pager
from tiered.zero.paging.sharding import Unsharded
from tiered.zero.paging.storage import model_named
from tiered.zero.paging.units import Limits, ModelPlan, Placement, UnitPlan
from tiered.zero.paging.update import flat_view, split
from tiered.zero.record import VERSION
from tiered.zero.rules.forms import forms_of
from tiered.zero.rules.known import is_unnamed, recorded
from tiered.zero.rules.rule import UpdateRule, settings_of, torch_name

__all__ = ["ONE", "Described", "Foreign", "ForeignGroup", "Sound", "put", "record_of", "replace", "take_over"]

HALF_TAKEN = "a checkpoint was being taken over, and did not come to its end: load it again, or call zero.rollback"
ONE = TensorSpec("float32", (4, 4), 4)
"""What a rule is asked about, for the names of its states."""
MASTERS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Described:
    """Parameter of a checkpoint: the type that the model has it in, and whether it is trained."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True
    steps: int = 0


@dataclass(frozen=True)
class ForeignGroup:
    """Param group: names of parameters, the rule that updates them, and its settings as a param group has them."""

    names: tuple[str, ...]
    rule: UpdateRule
    settings: Mapping[str, Any] = field(default_factory=dict)


class Foreign(Protocol):
    """A checkpoint of another program, open for reading."""

    where: str
    parameters: Mapping[str, Described]
    aliases: Mapping[str, str]
    """Other names of parameters that have several."""
    buffers: Mapping[str, torch.Tensor]

    def read(self, name: str, state: str, begin: int, end: int) -> torch.Tensor | None:
        """Return elements ``begin`` to ``end`` of a parameter, row-major: of itself ("param"; the fp32 master, where there is
        one), or of the state that torch's optimizers have by that name. None where there is none. Raises TorchFileError."""
        ...


class Sound:
    """Within the block, turn what Python and torch raise for values that are not what is expected into TorchFileError.
    ``where``: the file or folder; ``program``: what should have written it."""

    def __init__(self, where: str, program: str) -> None:
        self._where, self._program = where, program

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wrong = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RuntimeError, struct.error)
        memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
        if isinstance(error, wrong) and not isinstance(error, TieredError) and not memory:
            said = shown(" ".join(f"{type(error).__name__}: {error}".split()), 200)
            raise TorchFileError(f"{self._where}: it is not as {self._program} writes it ({said})") from error


Progress = Callable[[int, int], None]
"""Called with the elements that are read so far, and in all; it may raise, to stop."""


class ForeignSource:
    """A foreign checkpoint, as ``reshard`` reads one: for a model that is divided by ``plan``."""

    ranks = 1

    def __init__(
        self,
        foreign: Foreign,
        name: str,
        plan: ModelPlan,
        groups: Sequence[ForeignGroup],
        record: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> None:
        self.name, self._foreign, self._progress = name, foreign, progress
        self._seen: set[tuple[str, int]] = set()
        self._done, self._total = 0, sum(math.prod(one.shape) for one in foreign.parameters.values())
        self._rules = {self._known(one): group.rule for group in groups for one in group.names}
        self._wholes = {_whole(p).name: p for unit in plan.units for p in unit.placements}  # or one of its slices
        states: dict[str, dict[str, str]] = {}
        for unit in plan.units:
            for placement in unit.placements:
                known = self._known(_whole(placement).name)
                rule = self._rules.get(known)
                if rule is not None and not is_unnamed(rule):
                    wide = torch.float64 if placement.stored is torch.float64 else torch.float32
                    forms = forms_of(rule, wide)
                    found = foreign.parameters.get(known)
                    if found is not None and found.steps and not all(form.elementwise for form in forms.values()):
                        raise MisuseError(
                            f"{type(rule).__name__} has not one value for each element, and its states are not read from "
                            f"{foreign.where}: load it with an optimizer that has, and give that one's state_dict() to this one"
                        )
                    states[placement.name] = {kind: str(form) for kind, form in forms.items()}
        self.records: list[dict[str, Any]] = [{**record, "units": [{"states": states}]}]

    @property
    def names(self) -> set[str]:
        """The names of all parameters."""
        return set(self._foreign.parameters)

    def _known(self, name: str) -> str:
        return name if name in self._foreign.parameters else self._foreign.aliases.get(name, name)

    def refuse_other(self, placement: Placement) -> None:
        """Raise MisuseError where the checkpoint lacks the parameter, or has it in another shape."""
        whole = _whole(placement)
        found = self._foreign.parameters.get(self._known(whole.name))
        if found is None:
            raise MisuseError(f"{self._foreign.where} has no {whole.name!r}, which this model has")
        if tuple(whole.shape) != found.shape:
            raise MisuseError(
                f"{self._foreign.where} has {whole.name!r} of shape {found.shape}, and this model of {tuple(whole.shape)}"
            )

    def parts(self, name: str, begin: int, end: int) -> list[tuple[str, int, int]]:
        """Return where elements ``begin`` to ``end`` of a parameter are, as the checkpoint names it."""
        return [(self._known(name), begin, end)]

    def gradient(self, name: str, begin: int, end: int) -> Mapping[str, Any] | None:
        """Return what a record says of the gradient: there is none."""
        if not self._wholes[name].dtype.is_floating_point:
            return None
        return {"there": False, "scales": [], "wide_scales": [], "expected": None, "norms": {}, "orders": [], "finite": True}

    def read(self, name: str, kind: str, begin: int, end: int) -> torch.Tensor | None:
        """Return elements of a parameter: of itself ("param", as it is stored), "master", or a state."""
        stored, rule = self._wholes[name].stored, self._rules.get(self._known(name))
        if kind == "param" and self._progress is not None and (name, end) not in self._seen:
            self._seen.add((name, end))
            self._done += end - begin
            self._progress(min(self._done, self._total), self._total)
        if kind == "param":
            values = self._ordered(name, "param", begin, end)
            assert values is not None, "each parameter has values"
            return _rounded(values, stored) if rule is not None else values.to(stored)
        if kind == "grad" or rule is None or (kind == "master" and stored not in MASTERS):
            return None
        values = self._ordered(name, "param" if kind == "master" else torch_name(rule, kind), begin, end)
        return None if values is None else values.float() if kind == "master" else values

    def _ordered(self, name: str, state: str, begin: int, end: int) -> torch.Tensor | None:
        """Return elements of a parameter in memory order. Slices are row-major, as all of a parameter is that has some."""
        placement, known = self._wholes[name], self._known(name)
        blank = torch.empty_strided(placement.shape, placement.stride, dtype=placement.dtype, device="meta")
        if placement.sliced is not None or blank.is_contiguous():
            return self._foreign.read(known, state, begin, end)
        values = self._foreign.read(known, state, 0, placement.numel)
        if values is None:
            return None
        arranged = torch.empty_strided(placement.shape, placement.stride, dtype=values.dtype, device="cpu")
        return flat_view(arranged.copy_(values.view(placement.shape)))[begin:end]


def _whole(placement: Placement) -> Any:
    return placement if placement.sliced is None else placement.sliced


def _rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values that are the rounded ``master``, as updates round it: to bf16 half up."""
    if dtype is not torch.bfloat16:
        return master.to(dtype)
    high, low = (torch.empty(master.numel(), dtype=kind, device="cpu") for kind in (dtype, torch.int16))
    split(master.float().clone(), high, low)
    return high


def record_of(
    foreign: Foreign, groups: Sequence[ForeignGroup], extra: Mapping[str, Any], scheduler: Any = None
) -> dict[str, Any]:
    """Return the record of a checkpoint, without where everything lies. Random states are those that there are now."""
    named = {name for group in groups for name in group.names}
    return {
        "version": VERSION,
        "buffers": dict(foreign.buffers),
        "persistent": list(foreign.buffers),
        "optimizer": {
            "groups": [
                {
                    **settings_of(group.rule),
                    **group.settings,
                    "names": list(group.names),
                    **recorded(group.rule),
                }
                for group in groups
            ],
            "steps": {name: found.steps for name, found in foreign.parameters.items() if name in named and found.steps},
        }
        if groups
        else None,
        "scheduler": scheduler,
        "scaler": None,
        "data": None,
        "random": random_states(),
        "extra": dict(extra),
    }


def put(
    store: TieredStore,
    foreign: Foreign,
    name: str,
    groups: Sequence[ForeignGroup],
    extra: Mapping[str, Any],
    *,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint of model ``name`` to ``store``, without the model: each parameter is a unit. A model takes it over by
    ``zero.page(existing="resume", source=)``. The largest parameter has to fit into the memory budget.

    Raises MisuseError where there is a model of that name, TorchFileError, and what the store raises.
    """
    if store.owned(model_named(name)):
        raise MisuseError(f"{store} has tensors of a model named {name!r} already: give another name, or overwrite them")
    pool = min(tier.capacity for tier in store.statistics().tiers if tier.name != "nvme")
    units = []
    for index, (qualified, found) in enumerate(foreign.parameters.items()):
        blank = torch.empty(found.shape, dtype=found.dtype, device="meta")
        trained = found.trained and found.dtype.is_floating_point
        parameter = nn.Parameter(blank, requires_grad=trained)
        placement = Placement(parameter, qualified, index, blank.stride(), found.dtype)
        units.append(UnitPlan(qualified, [placement]))
    plan = ModelPlan(units, {}, Limits.of(pool))
    source = ForeignSource(foreign, name, plan, groups, record_of(foreign, groups, extra), progress)
    reshard(source, store, plan, Unsharded())


def take_over(
    pager: Pager, foreign: Foreign, groups: Sequence[ForeignGroup], record: Mapping[str, Any], alike: Alike = "none"
) -> None:
    """Replace the values and states of a paged model by those of a foreign checkpoint, as ``replace`` does; the caller loads
    the optimizer and the others of ``record``. Raises MisuseError for a buffer that the model does not have, or has in another
    shape or type (``alike``: as of ``other_buffer``), and as that."""
    _refuse_buffers(pager.model, foreign, alike)
    plan = ModelPlan([unit.plan for unit in pager.units], {}, pager.limits)
    replace(pager, ForeignSource(foreign, pager.name, plan, groups, record))


def replace(pager: Pager, source: Elements) -> None:
    """Replace the values and states of a paged model by those of a checkpoint. What the model had is gone, unless it was
    committed.

    Raises MisuseError, with nothing changed, where the model is another one; TorchFileError and what the store raises, after
    which the model has to be rolled back, or loaded again.
    """
    plan = ModelPlan([unit.plan for unit in pager.units], {}, pager.limits)
    _refuse_other_model(source, plan)
    pager.give_up()
    pager.intent.spoil(HALF_TAKEN)
    store = pager.store
    for key in [key for key in store.owned(pager.owner) if key.startswith(f"{pager.name}/param/")]:
        store.delete(key, owner=pager.owner)
    reshard(source, store, plan, pager.partition)
    recall(pager)
    pager.intent.forget()


def _refuse_other_model(source: Elements, plan: ModelPlan) -> None:
    """Raise MisuseError where a model that is divided by ``plan`` has other parameters than the checkpoint."""
    there: set[str] = set()
    for unit in plan.units:
        for placement in unit.placements:
            source.refuse_other(placement)
            there |= {name for name, _, _ in source.parts(*span_of(placement))} | {_whole(placement).name}
    lost = sorted(source.names - there)
    if lost:
        raise MisuseError(f"the checkpoint of {source.name!r} has {lost[0]!r}, which this model does not have")


def _refuse_buffers(model: nn.Module, foreign: Foreign, alike: Alike) -> None:
    """Raise MisuseError for a buffer that the model does not have, or has in another shape or type."""
    there = dict(model.named_buffers(remove_duplicate=False))
    for name, value in foreign.buffers.items():
        if name not in there:
            raise MisuseError(f"{foreign.where} has the buffer {name!r}, which this model does not have")
        other = other_buffer(there[name], value, alike)
        if other:
            raise MisuseError(f"{foreign.where} has the buffer {name!r} as {other}")
