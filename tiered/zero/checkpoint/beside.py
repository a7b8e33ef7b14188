"""What a model has beside what it was paged with: modules and parameters that were added or replaced after ``zero.page``, their
buffers, and extra states. They are in memory, and a checkpoint has their values.

``state_dict`` says what there is. A parameter that is paged is in the store, under whatever name the model has it now, and a
buffer that the model was paged with is in the record, as it was then named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tiered.errors import MisuseError
from tiered.tensors.digests import digest_of
from tiered.zero.checkpoint.loaders import Loader
from tiered.zero.collectives import Term
from tiered.zero.paging.pager import Pager, StateListing, pager_of_parameter
from tiered.zero.paging.saved_tensors import without_grad

__all__ = ["beside", "gone", "loader_of", "refuse_forgotten", "set_extra_states", "terms", "transient"]

EXTRA = "_extra_state"
"""How the name of what ``get_extra_state`` returns ends in a ``state_dict``."""


def beside(model: nn.Module, pager: Pager) -> dict[str, Any]:
    """Return what ``model.state_dict()`` has beside paged parameters and the buffers that the model was paged with, each once:
    tensors, and extra states. ``model``: the one that was paged, or one that has it inside.

    Raises MisuseError for what cannot be committed, by its name: a parameter without values, or of another paged model, and
    what a hook adds that is neither a parameter nor a buffer.
    """
    paged_with = {id(buffer) for buffer in pager.buffers().values()}
    own = {id(one) for one in (*model.parameters(), *model.buffers())}
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(destination=StateListing(), keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            if not name.endswith(EXTRA):
                raise _unknown(name)
            found[name] = value
        elif hasattr(value, "_tiered"):
            if (other := pager_of_parameter(value)) is not pager:
                raise MisuseError(
                    f"parameter {name!r} is of another paged model, {other.name!r}, than {pager.name!r}: call this for each of "
                    "the models that zero.page was given"
                )
        elif id(value) not in own and not name.endswith(EXTRA):
            raise _unknown(name)
        elif id(value) not in paged_with and id(value) not in seen:
            seen.add(id(value))
            _refuse_blank(name, value)
            found[name] = value
    return found


def terms(model: nn.Module, pager: Pager) -> Iterator[Term]:
    """Yield what all ranks have to have alike of these: names, types and shapes, and the values of parameters, whose gradients
    nothing averages. Buffers and extra states may have other values, as those that the model was paged with have between steps.
    """
    for name, value in beside(model, pager).items():
        added = f"{name!r}, which was added or replaced after zero.page"
        if not isinstance(value, torch.Tensor):
            yield added, "an extra state"
            continue
        yield added, f"{value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, nn.Parameter):
            yield f"the values of {added} (average its gradients over the ranks, or page the model with it)", digest_of(value)


def _unknown(name: str) -> MisuseError:
    return MisuseError(
        f"{name!r} of the model's state_dict is neither a parameter nor a buffer, so a commit would not have it: leave out the "
        "hook that adds it, or register it as a buffer"
    )


def _refuse_blank(name: str, value: torch.Tensor) -> None:
    if is_lazy(value) or value.is_meta:
        raise MisuseError(f"{name!r} was added after zero.page, and has no values yet: give it values before a commit")
    if type(value.data) is not torch.Tensor:
        raise MisuseError(
            f"{name!r} was added after zero.page, and is a {type(value.data).__name__}, which a checkpoint does not hold: make "
            "it a plain tensor, or add it before zero.page"
        )


def gone(model: nn.Module, pager: Pager) -> list[str]:
    """Return the paged parameters that ``model`` does not have any more, by the names that they were paged by."""
    there = {id(one) for one in model.parameters()}
    names = {sliced.name: sliced.parameter for sliced in pager.sliced.values()}
    names |= {placement.name: placement.parameter for placement in pager.placements if placement.sliced is None}
    return [name for name, parameter in names.items() if id(parameter) not in there]


def transient(model: nn.Module, pager: Pager) -> dict[str, torch.Tensor]:
    """Return the buffers that were added after paging and that ``state_dict`` leaves out: what modules keep between calls."""
    paged_with = {id(buffer) for buffer in pager.buffers().values()}
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and id(buffer) not in paged_with and not buffer.is_meta and type(buffer) is torch.Tensor:
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    return found


def loader_of(model: nn.Module, pager: Pager, record: Mapping[str, Any]) -> Loader:
    """Return the loader of what ``beside`` and ``transient`` returned. Raises MisuseError where ``model`` has other parameters
    and buffers, or has them in other shapes or types."""
    here, found = beside(model, pager), dict(record.get("beside", {}))
    for name in found:
        if name not in here:
            raise MisuseError(
                f"this model is not what was committed as {pager.name!r}: it has no {name!r}, which had been added, or "
                "replaced, after zero.page: do so again, before this call"
            )
    for name, value in here.items():
        if name not in found:
            raise MisuseError(
                f"this model is not what was committed as {pager.name!r}: that had no {name!r}: add it after this call"
            )
        committed = found[name]
        if isinstance(value, torch.Tensor) and not name.endswith(EXTRA) and (
            not isinstance(committed, torch.Tensor) or (committed.shape, committed.dtype) != (value.shape, value.dtype)
        ):
            had = f"{tuple(committed.shape)}, {committed.dtype}" if isinstance(committed, torch.Tensor) else "no tensor"
            raise MisuseError(
                f"this model is not what was committed as {pager.name!r}: {name!r} was {had}, and is {tuple(value.shape)}, "
                f"{value.dtype}"
            )
    kept = transient(model, pager)
    found |= {
        name: value
        for name, value in record.get("transient", {}).items()
        if name in kept and (kept[name].shape, kept[name].dtype) == (value.shape, value.dtype)
    }
    here |= {name: kept[name] for name in found.keys() & kept.keys()}
    before = {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in here.items()}

    def put(values: Mapping[str, Any]) -> None:
        with without_grad():
            for name, value in here.items():
                if name.endswith(EXTRA):
                    _owner(model, name).set_extra_state(values[name])
                elif 0 in value.stride():  # it was expanded: several elements are one, to which torch does not write
                    value.data = values[name].clone()
                else:
                    value.copy_(values[name])

    def load() -> None:
        put(found)
        pager.not_loaded = ()

    return Loader("the model", load, lambda: put(before))


def set_extra_states(model: nn.Module, record: Mapping[str, Any]) -> tuple[str, ...]:
    """Set the extra states of modules that ``model`` has, as they were committed. Return the names of what is left to load."""
    there = dict(model.named_modules())
    left = []
    for name, value in record.get("beside", {}).items():
        if name.endswith(EXTRA) and _prefix(name) in there:
            _owner(model, name).set_extra_state(value)
        else:
            left.append(name)
    return tuple(left)


def _prefix(name: str) -> str:
    return name.removesuffix(EXTRA).rstrip(".")


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module of an extra state."""
    return model.get_submodule(_prefix(name))


def refuse_forgotten(pager: Pager, what: str) -> None:
    """Raise MisuseError where the checkpoint that a model was paged from has more, which nobody has loaded: ``what`` would be
    without it."""
    if pager.not_loaded:
        raise MisuseError(
            f"the checkpoint of {pager.name!r} has {pager.not_loaded[0]!r}, which had been added, or replaced, after "
            f"zero.page, and {what} would be without it: do so again, and call zero.resume, before"
        )
