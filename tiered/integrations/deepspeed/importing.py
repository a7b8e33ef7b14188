"""Go on from a checkpoint that DeepSpeed wrote: in an engine that has the model, or in a store, without the model."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from tiered.errors import MisuseError, TorchFileError, quoted
from tiered.format.foreign.pickled import Instance
from tiered.integrations.deepspeed.saved import SavedCheckpoint, SavedGroup
from tiered.store import TieredStore
from tiered.zero.checkpoint import checkpoint
from tiered.zero.checkpoint.foreign import ONE, ForeignGroup, put, record_of, replace, take_over
from tiered.zero.checkpoint.loaders import Stateful
from tiered.zero.checkpoint.reshard import CheckpointSource, opened
from tiered.zero.optimizers.optimizer import Optimizer
from tiered.zero.paging.pager import name_of, pager_of
from tiered.zero.rules.known import CHOICES
from tiered.zero.rules.rule import UpdateRule, settings_of, torch_name

__all__ = ["import_saved", "load_imported", "load_saved"]

IMPORTED = ("adagrad", "adam", "adamw", "lion", "sgd")
"""Optimizers, as a configuration names them, whose checkpoints become commits without an engine that has one."""
SCALE = (("left", "cur_hysteresis", 1), ("steps", "cur_iter", 0), ("last_overflow", "last_overflow_iter", -1))
"""Of a dynamic loss scale: our name, DeepSpeed's, and what holds where that is missing."""
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""What torch's schedulers write into param groups, and read from them."""
LARGEST = sys.float_info.max


def load_saved(
    saved: SavedCheckpoint,
    model: torch.nn.Module,
    optimizer: Optimizer | None,
    scheduler: Stateful | None,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """Replace what a paged model, its optimizer and its scheduler have by what is in a checkpoint. Returns what
    ``engine.save_checkpoint`` commits beside them. ``sizes``: passes of a step, its samples, samples of a pass on one rank.

    Raises MisuseError where the model is another one, or the optimizer updates by another rule; TorchFileError.
    """
    pager = pager_of(model)
    groups = [] if optimizer is None else _groups_of(optimizer, saved)
    _refuse_stateless(groups, saved)
    extra = _extra(saved, sizes)
    record = record_of(saved, groups, extra)
    if scheduler is not None:
        rates = [float(group.settings.get("lr", math.nan)) for group in groups]
        record["scheduler"] = _schedule(scheduler, saved.scheduler, rates, saved.where)
    take_over(pager, saved, groups, record, alike="floats")
    record = checkpoint.read_record(pager.store, pager.name)
    checkpoint.load_record(pager.model, pager, record, checkpoint.Training(optimizer, scheduler))
    return extra


def load_imported(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizer | None,
    scheduler: Stateful | None,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """Do as ``load_saved``, from a store that ``tiered import`` made of such a checkpoint. Raises as that, and
    ManifestError."""
    pager = pager_of(model)
    with ExitStack() as stack:
        source = CheckpointSource(opened(folder, stack), pager.name)
        before = source.records[0]
        extra = dict(before["extra"] or {})
        if not {"engine", "sizes", "loss_scale", "client_state"} <= extra.keys():
            raise MisuseError(f"{folder} has a commit that is no checkpoint of an engine: zero.page(source=) takes it over")
        schedule = before["scheduler"]
        if scheduler is not None and schedule is None:
            rates = [float(group["lr"]) for group in (before["optimizer"] or {"groups": []})["groups"]]
            schedule = _schedule(scheduler, extra.get("lr_scheduler"), rates, str(folder))
        replace(pager, source)
    record = {**checkpoint.read_record(pager.store, pager.name), "scheduler": schedule if scheduler is not None else None}
    if optimizer is None:
        record["optimizer"] = None
    checkpoint.load_record(pager.model, pager, record, checkpoint.Training(optimizer, scheduler))
    engine = {**extra["engine"], "micro_steps": extra["engine"]["global_steps"] * sizes["passes"]}
    return {**extra, "engine": engine, "sizes": _sizes(sizes)}


def _sizes(sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Return what an engine's checkpoint has of these sizes, between two steps."""
    return sizes["passes"], sizes["samples"], sizes["micro"], 0


def import_saved(
    saved: SavedCheckpoint, store: TieredStore, name: str = "model", *, progress: Any = None
) -> dict[str, Any]:
    """Write a checkpoint into ``store`` as one of model ``name``, which is not at hand: ``zero.page(existing="resume",
    source=)`` and ``engine.load_checkpoint`` take it over. The optimizer is that of the configuration in it. Returns its
    ``extra``.

    Raises MisuseError for an optimizer that there is no rule for, TorchFileError, and what the store raises.
    """
    groups = [
        ForeignGroup(_in_order(group, saved), _rule(saved, group), _scheduled(group.settings, saved)) for group in saved.groups
    ]
    _refuse_stateless(groups, saved)
    config = saved.config
    sizes = {
        "passes": _whole(config.get("gradient_accumulation_steps"), 1),
        "samples": _whole(config.get("train_batch_size"), 1),
        "micro": _whole(config.get("train_micro_batch_size_per_gpu"), 1),
    }
    extra = {**_extra(saved, sizes), "lr_scheduler": saved.scheduler}
    put(store, saved, name, groups, extra, progress=progress)
    return extra


def _in_order(group: SavedGroup, saved: SavedCheckpoint) -> tuple[str, ...]:
    """Return the names of a group in the model's order: stage 1 to 3 may flatten them in another."""
    inside = set(group.names)
    return tuple(name for name in saved.parameters if name in inside)


def _whole(value: Any, usual: int) -> int:
    return value if type(value) is int and value > 0 else usual


def _extra(saved: SavedCheckpoint, sizes: Mapping[str, int]) -> dict[str, Any]:
    counters = saved.counters
    return {
        "engine": {
            "micro_steps": counters.global_steps * sizes["passes"],
            "global_steps": counters.global_steps,
            "global_samples": counters.global_samples,
            "skipped_steps": counters.skipped_steps,
        },
        "sizes": _sizes(sizes),
        "loss_scale": _scale(saved.scaler),
        "client_state": saved.client_state,
    }


def _scale(scaler: Any) -> dict[str, Any]:
    """Return the state of the loss scale, as ``LossScale`` has it."""
    state = scaler.state if isinstance(scaler, Instance) and isinstance(scaler.state, dict) else {}
    scale = state.get("cur_scale")
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise TorchFileError(f"the checkpoint has {quoted(scale, 40)} for its loss scale")
    found: dict[str, Any] = {"scale": float(scale)}
    for name, theirs, usual in SCALE:
        value = state.get(theirs, usual)
        found[name] = value if type(value) is int else usual
    return found


def _groups_of(optimizer: Optimizer, saved: SavedCheckpoint) -> list[ForeignGroup]:
    """Return the param groups of an optimizer, with the settings that its parameters have in the checkpoint."""
    home = {name: group for group in saved.groups for name in group.names}
    found = []
    for index, group in enumerate(optimizer.param_groups):
        names = tuple(name_of(parameter) for parameter in group["params"])
        theirs = [home[one] for name in names if (one := saved.aliases.get(name, name)) in home]
        rule = optimizer.rule_of(index)
        first = theirs[0].settings if theirs else {}
        usual = {key: one for key, one in settings_of(rule).items() if key != "fused"}  # a kernel, which the optimizer chooses
        known = {key: _sound(key, first[key], one, saved) for key, one in usual.items() if key in first}
        known.update(_scheduled(first, saved))
        settings = {**{key: group[key] for key in settings_of(rule)}, **known}
        for other in theirs:
            found_there = {key: _sound(key, one, known[key], saved) for key, one in other.settings.items() if key in known}
            if found_there != known:
                raise MisuseError(
                    f"param group {index} of this optimizer has parameters of several groups of {saved.where}, with other "
                    "settings: divide the parameters as they were divided for DeepSpeed"
                )
        found.append(ForeignGroup(names, rule, settings))
    return found


def _scheduled(settings: Mapping[str, Any], saved: SavedCheckpoint) -> dict[str, Any]:
    """Return what a scheduler wrote into a param group."""
    return {key: _sound(key, settings[key], 0.0, saved) for key in SCHEDULED if key in settings}


def _setting(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _sound(name: str, value: Any, usual: Any, saved: SavedCheckpoint) -> Any:
    """Return a setting of a param group. Raises TorchFileError for a value that is no number where ``usual`` is one."""
    given: Any = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else _setting(value)
    pairs = [(given, usual)]
    if isinstance(usual, tuple):
        alike = isinstance(given, tuple) and len(given) == len(usual)
        pairs = list(zip(given, usual, strict=True)) if alike else [(None, 0.0)]
    for one, expected in pairs:
        if type(expected) in (int, float) and not (type(one) in (int, float) and -LARGEST <= one <= LARGEST):
            raise TorchFileError(f"{saved.where} has {quoted(value, 60)} for the setting {name!r} of a param group")
    return given


def _rule(saved: SavedCheckpoint, group: SavedGroup) -> UpdateRule:
    """Return the rule that updates a group, by the configuration in a checkpoint."""
    section, kind = saved.config.get("optimizer"), _kind(saved)
    params = section.get("params") if isinstance(section, dict) else None
    choice = "adamw" if kind is None else kind  # None: an optimizer of the caller's, and its states are compared
    if kind == "adam" and not (isinstance(params, dict) and params.get("adam_w_mode") is False):
        choice = "adamw"
    if choice not in IMPORTED:
        raise MisuseError(
            f"{saved.where} was trained with {kind!r:.60}, which tiered import has no rule for ({', '.join(IMPORTED)}): "
            "engine.load_checkpoint loads it into an engine that has that optimizer"
        )
    rule = CHOICES[choice].rule
    usual = settings_of(rule(weight_decay=0.0))
    given = {key: _sound(key, value, usual[key], saved) for key, value in group.settings.items() if key in usual}
    if CHOICES[choice].takes_fused:
        given["fused"] = False
    made: UpdateRule = rule(**{**usual, **given})
    return made


def _kind(saved: SavedCheckpoint) -> str | None:
    """Return the optimizer that the configuration in a checkpoint names, in lower case."""
    section = saved.config.get("optimizer")
    kind = section.get("type") if isinstance(section, dict) else None
    return kind.lower() if isinstance(kind, str) else None


def _refuse_stateless(groups: list[ForeignGroup], saved: SavedCheckpoint) -> None:
    """Raise MisuseError where parameters were updated, and the checkpoint has other states than the rule keeps."""
    unused = {"exp_avg_sq"} if _kind(saved) == "lion" else set()  # which DeepSpeed's Lion keeps, and does not use
    for group in groups:
        for name in group.names:
            known = saved.aliases.get(name, name)
            if known not in saved.parameters or not saved.parameters[known].steps or known not in saved.trained:
                continue
            kept = [torch_name(group.rule, state) for state in group.rule.state_specs(ONE)]
            lacks = [state for state in kept if not saved.has(known, state)]
            other = [state for state in saved.states_of(known) if state not in {*kept, *unused}]
            if lacks or other:
                has = f"has no {lacks[0]!r} of {name!r}, which" if lacks else f"has {other[0]!r} of {name!r}, which no"
                raise MisuseError(
                    f"{saved.where} {has} {type(group.rule).__name__} keeps: it was trained with another optimizer; name that "
                    "one, or load with load_optimizer_states=False"
                )


def _schedule(scheduler: Stateful, theirs: Any, rates: Sequence[float], where: str) -> Any:
    """Return the state of a scheduler: what it has, at the iteration that the checkpoint says. ``rates``: those of groups."""
    mine = scheduler.state_dict()
    if not isinstance(theirs, dict):
        return mine
    if "last_batch_iteration" not in theirs:
        counters = {key for key, value in mine.items() if isinstance(value, Counter)} if isinstance(mine, dict) else set()
        return {key: Counter(value) if key in counters and isinstance(value, dict) else value for key, value in theirs.items()}
    last = theirs["last_batch_iteration"]
    if type(last) is not int or last < -1:
        raise TorchFileError(f"{where} has {quoted(last, 40)} for the iteration of its scheduler")
    if not isinstance(mine, dict) or "last_epoch" not in mine:
        raise MisuseError(f"{where} has a schedule of DeepSpeed's, and lr_scheduler= is a {type(scheduler).__name__}")
    return {**mine, "last_epoch": last + 1, "_step_count": last + 2, "_last_lr": list(rates)}
