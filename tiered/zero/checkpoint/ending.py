"""A commit is a checkpoint of each model that is paged in the store, also of those that it was not called for: at the end of
the store's ``with`` block, and where ``zero.commit`` is called for another model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from tiered.errors import InterruptedStep, MisuseError, UncommittedWarning
from tiered.tensors.digests import digest_of
from tiered.zero.checkpoint.checkpoint import (
    TRAINING,
    Training,
    can_be_kept,
    commit_with,
    of_unit,
    prepare_commit,
    read_record,
    record_of,
    write_record,
)
from tiered.zero.optimizers.optimizer import Optimizer
from tiered.zero.paging.pager import Pager
from tiered.zero.paging.storage import model_named
from tiered.zero.record import dumps

__all__ = ["include_in_commits", "record"]

SCHEDULED = {"initial_lr", "lr", "max_lr", "min_lr", "swa_lr", "momentum", "betas", "base_momentum", "max_momentum"}
"""Of a param group: what the schedulers of torch set."""


def record(pager: Pager) -> None:
    """Put into the store what makes the next commit a checkpoint of a model that nothing has been trained of: random states of
    any other moment are later ones."""
    write_record(pager.store, pager.name, {**record_of(pager.model, pager, Training(), None), "moment": 0})
    pager.is_recorded()


def include_in_commits(pager: Pager) -> None:
    """Have commits at the end of the store's ``with`` block, and of other models in the store, be checkpoints of this model,
    with what ``zero.commit`` or ``resume`` was given for it last."""
    pager.in_commit = partial(_include, ref(pager))


def _include(pager: Callable[[], Pager | None], leaving: bool) -> str | None:
    """``leaving``: at the end of a block, whose commit has the last word, and warns of what it lacks. Returns why there must be
    no such commit; None where there may be one."""
    found = pager()
    begins = found is not None and found.checkpoint.begun and found.given is None
    if found is None or (not leaving and (begins or not found.rests)):
        return None
    model, training, extra = found.given or (found.model, Training(), False)
    store, name, optimizers = found.store, found.name, _optimizers(found, training)
    training = replace(training, optimizer=optimizers or None)
    lacks: str | None = None
    try:
        unchanged = _unchanged(model, found, training)
        if unchanged is not None:
            if not found.checkpoint.current:
                write_record(store, name, unchanged)
                found.is_recorded()
            store.note_unchanged(model_named(name))
            return None
        if extra:  # which is of the last commit, and of no other moment
            return (
                f"the last commit of model {name!r} has extra=, which is of that moment: commit once more after the last step "
                "or change, with zero.commit, or by the checkpoint of what trains it (such as Trainer)"
            )
        if leaving and found.partition.noted(store, None) is not None:  # ranks committed here: the next number is this one's
            commit_with(model, training, training.extra(), None, keeps_all=True)
        else:
            if any(mark() is None for unit in found.units for mark in unit.counted_by.values()):
                raise MisuseError("an optimizer that made steps of it is gone: call zero.commit before, with all of them")
            for unit in found.units:  # updates that can be kept stay pending
                if unit.pending is not None and not all(can_be_kept(update.rule) for update in unit.pending.updates.values()):
                    unit.apply_update()
            prepare_commit(model, training, training.extra())
    except (MisuseError, InterruptedStep) as error:
        lacks = f"is no checkpoint of model {name!r}: {error}"
        if leaving and found.checkpoint.was:  # the last one stays the newest commit
            return lacks
    else:
        if training.scheduler is None and any("initial_lr" in group for one in optimizers for group in one.param_groups):
            lacks = f"has no scheduler of model {name!r}: give scheduler= to zero.resume, or to zero.commit after the last step"
    if leaving and lacks is not None:
        warnings.warn(f"the commit at the end of the with block of {store} {lacks}", UncommittedWarning, stacklevel=6)
    return None


def _optimizers(pager: Pager, training: Training) -> list[Optimizer]:
    """Return the optimizers of a model: what ``zero.commit`` or ``resume`` was given, but for those whose parameters another
    one has taken over, and those that have made steps; else the last that was made."""
    counting = [one for one in (*pager.optimizers(), pager.optimizer) if isinstance(one, Optimizer)]
    given = [one for one in training.optimizers if any(one is other for other in counting) or not one.is_superseded()]
    found = list({id(one): one for one in (*given, *counting)}.values())
    made = pager.made()
    return found or ([made] if isinstance(made, Optimizer) else [])


def _unchanged(model: nn.Module, pager: Pager, training: Training) -> dict[str, Any] | None:
    """Return the record of the last checkpoint as it is now, where nothing of the model has changed since but that updates were
    applied which were pending; else None. A record that has more of the training than is at hand counts as such."""
    checkpoint = pager.checkpoint
    if checkpoint.before is None and not checkpoint.current:
        return None
    recorded = read_record(pager.store, pager.name, checkpoint.before)
    recorded["units"] = [of_unit(unit) for unit in pager.units]
    if checkpoint.awaited:
        return recorded
    now = record_of(model, pager, training, None)
    if any(now[what] is None and recorded[what] is not None for what in TRAINING):
        return recorded
    return recorded if _written(_unscheduled(now, recorded)) == _written(recorded) else None


def _unscheduled(now: dict[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without what a scheduler sets in param groups when it is made, where one was made since ``recorded``: the
    next run makes one, too."""
    optimizer, before = now["optimizer"], recorded["optimizer"]
    if optimizer is None or before is None or len(optimizer["groups"]) != len(before["groups"]):
        return now
    groups = [
        {key: was[key] if key in SCHEDULED else value for key, value in group.items() if key not in SCHEDULED or key in was}
        if "initial_lr" in group and "initial_lr" not in was
        else group
        for group, was in zip(optimizer["groups"], before["groups"], strict=True)
    ]
    return {**now, "optimizer": {**optimizer, "groups": groups}}


def _written(record: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """Return what is written of a record, without what changes while nothing of the model does, and digests of its tensors."""
    larger: list[str] = []

    def keep(tensor: torch.Tensor) -> str:
        larger.append(digest_of(tensor))
        return str(len(larger))

    kept = {what: found for what, found in record.items() if what not in ("random", "moment", "extra")}
    return dumps(kept, "the checkpoint", keep), larger
