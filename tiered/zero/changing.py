"""Take a paged model out of its store, or give its parameters other types and shapes there.

A model whose parameters get another type (``model.half()``), or one of which gets another shape (``weight.data = larger``, as
``resize_token_embeddings`` does), is paged anew: units are filled with what the units of before have, one at a time, and take
their place in the store when all are whole. What fails in between leaves the model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tiered.errors import CapacityError, MisuseError, UncommittedWarning, expect_type
from tiered.system import memory_of_process
from tiered.types import Access, format_size
from tiered.zero.checkpoint.ending import record
from tiered.zero.construction.deferred import Deferred
from tiered.zero.construction.shown import shown_anew
from tiered.zero.intent import all_or_none
from tiered.zero.paging.pager import Pager, pager_of, pager_of_parameter

__all__ = ["change", "unpage"]

PageAgain = Callable[[Mapping[nn.Parameter, Deferred]], nn.Module]
"""Pages a model as it was paged, in its own place, with these values of parameters that show no memory."""


def unpage(model: nn.Module) -> nn.Module:
    """Make a paged ``model`` an ordinary one, with its parameters in memory (on ``store.device``). Returns ``model``.

    The parameters stay the objects that they are, with the values of now (pending updates are applied), the types that modules
    compute with, and their gradients; what is quantised is unpacked. Hooks, attributes and modules that were added since
    ``zero.page`` stay, too. Optimizers of ``tiered.zero`` do not update the model any more: what a torch optimizer needs is
    ``optimizer.state_dict()``, which has to be taken before.

    The store keeps the model's tensors and its checkpoint, as of now: ``zero.page(existing="resume")`` takes this training up
    again, and ``existing="overwrite"`` pages the model as it is then. Commits have no changes that are made after this call.

    Several processes call it together, and each has the whole model then. A model that several calls of ``zero.page`` have
    paged becomes an ordinary one as a whole.

    Raises CapacityError, with the number of bytes, where memory has no room for the model; MisuseError for a model that is not
    paged, for a part of one, within forward, backward or ``zero.gathered``, and where the forward of a module was replaced
    after ``zero.page``. Then the model is paged as before.
    """
    expect_type(model, nn.Module, "what is taken out of its store is a torch.nn.Module")
    pagers = _pagers_of(model)
    for pager in pagers:
        if pager.computing:
            raise MisuseError("the model is computing: take it out of its store between steps")
        pager.refuse_averaged("zero.unpage")
        pager.reset()
        pager.refuse_wrapped()
    _refuse_little_room(pagers)
    for pager in pagers:
        with pager.partition.agreeing("take this model out of its store"), torch.inference_mode(False):
            values = {one: pager.value(one).to(pager.store.device) for one in pager.wholes}
            _record(pager)
        all_or_none([pager.intent], [*pager.leaving(values, "zero.unpage"), *shown_anew(pager.model)])
        pager.intent.spoil(f"model {pager.name!r} was taken out of its store (zero.unpage): page it, and make this anew")
    return model


def _pagers_of(model: nn.Module) -> list[Pager]:
    """Return the pagers of a model, all of whose parameters it has. Raises MisuseError where it has a part of them, or none."""
    parameters = set(model.parameters())
    pagers = list(dict.fromkeys(pager_of_parameter(one) for one in parameters if hasattr(one, "_tiered")))
    if not pagers:
        raise MisuseError("this model is not paged, so its parameters are in memory")
    for pager in pagers:
        names = {one: name for name, one in pager.model.named_parameters()}
        apart = next((name for one, name in names.items() if one not in parameters and hasattr(one, "_tiered")), None)
        if apart is not None:
            raise MisuseError(
                f"this {type(model).__name__} is a part of model {pager.name!r}, which has {apart!r}, too: unpage the whole "
                "model"
            )
    return pagers


def _refuse_little_room(pagers: list[Pager]) -> None:
    """Raise CapacityError where memory has no room for what models have in their stores."""
    for pager in pagers:
        needed = sum(one.numel() * one.itemsize for one in pager.model.parameters())
        needed += sum(one.grad.numel() * one.grad.itemsize for one in pager.model.parameters() if one.grad is not None)
        on_device = pager.store.device.type == "cuda"
        room = torch.cuda.mem_get_info(pager.store.device)[0] if on_device else memory_of_process().headroom
        if needed > room:
            raise CapacityError(
                f"model {pager.name!r} is {format_size(needed)} with its gradients, and {pager.store.device} has "
                f"{format_size(room)} free: use it in its store, or write it to a file with zero.export"
            )


def _record(pager: Pager) -> None:
    """Have the store keep a checkpoint of the model as it is now. Warns where it cannot be one."""
    if pager.store.access is Access.READ or pager.in_commit is None:
        return
    if pager.checkpoint.begun and pager.given is None:
        record(pager)
        return
    why = pager.in_commit(False)
    if why is None and pager.checkpoint.current:
        return
    warnings.warn(
        f"{pager.store} has the tensors of model {pager.name!r} of now, and no checkpoint to go on from: "
        f"{why or 'no zero.commit of it came before'}",
        UncommittedWarning,
        stacklevel=4,
    )


def change(
    page_again: PageAgain,
    put_back: Callable[[], None],
    pager: Pager,
    new: Mapping[nn.Parameter, torch.dtype | torch.Tensor],
) -> None:
    """Give parameters of a paged model another type, or the shape, the type and the values of a tensor. They stay the objects
    that they are; others keep their values. The disk has to have room for both, memory for what a step takes.

    ``page_again`` pages the model anew, ``put_back`` has the units of before have their names where that was cut off. Raises
    MisuseError where it cannot be, with nothing changed, and what ``zero.page`` raises; then the model is as before.
    """
    _refuse_change(pager, new)
    views = {one: dict(_handle(one).views) for one in pager.wholes if one not in new}
    values = {one: _values_of(pager, one) for one in pager.wholes}
    for one, other in new.items():
        values[one] = _values_in(other) if isinstance(other, torch.Tensor) else values[one].cast(other)
    placeholders = {one: _nothing(pager.store.device, value) for one, value in values.items()}
    in_commit = pager.in_commit
    try:
        all_or_none([pager.intent], [*pager.leaving(placeholders, "a change of types or shapes")])
        page_again(values)
    except BaseException:
        pager.intent.finish()  # where it was cut off between
        made = [_owner_of(one) for one in pager.model.parameters() if one in values]
        if any(one is None or one.change is None for one in made):
            for half in made:
                if half is not None and half is not pager:  # it was being made
                    half.leave_modules()
            put_back()
            pager.enter_again()
            pager.in_commit = in_commit
        raise
    pager_of(pager.model).given = pager.given
    for one, shown in views.items():
        if hasattr(one, "_tiered"):  # else its module was replaced, and the model has it no more
            _handle(one).views.update(shown)


def _owner_of(parameter: nn.Parameter) -> Pager | None:
    """Return the pager of a parameter; None where it has none, or that is gone."""
    owner: Pager | None = _handle(parameter).owner() if hasattr(parameter, "_tiered") else None
    return owner


def _handle(parameter: nn.Parameter) -> Any:
    return parameter.__dict__["_tiered"]


def _refuse_change(pager: Pager, new: Mapping[nn.Parameter, torch.dtype | torch.Tensor]) -> None:
    """Raise MisuseError where parameters of a model cannot get another type or shape now."""
    name = next(one.name for whole in new for _, one in pager.parts(whole))
    said = f"the type or the shape of parameter {name!r} cannot change in the store"
    if pager.partition.shares > 1 or pager.gradient_sync.several:
        raise MisuseError(f"{said}, of which several ranks have shares: change it before zero.page")
    if pager.store.access is Access.READ:
        raise MisuseError(f"{said}, which is open for reading: open it without access='read'")
    if pager.computing:
        raise MisuseError(f"{said} while the model is computing: change it between steps")
    pager.refuse_unresumed()
    pager.refuse_averaged("a change of types or shapes")
    pager.reset()
    pager.refuse_wrapped()
    packed = next((one.name for one in pager.placements if one.packing is not None), None)
    if packed is not None:
        raise MisuseError(f"{said}, where {packed!r} is packed: give the type as the model is made, or page it exact")
    units = {key for unit in pager.units for key in (unit.key, unit.gradients.key)} | {pager.checkpoint.key}
    state = next((key for key in pager.store.owned(pager.owner) if key not in units and not _of_record(key, pager)), None)
    if state is not None or pager.made() is not None or pager.optimizers() or pager.average is not None:
        made = "a zero.EMA" if pager.average is not None else "an optimizer"
        what = f"{state!r} is in it" if state is not None else f"{made} of the model has been made"
        raise MisuseError(
            f"{said} once {made} keeps states ({what}): change it before {made} is made, or take the model out (zero.unpage), "
            "change it, and page it with existing='overwrite'"
        )
    if any(one.grad is not None for one in pager.wholes):
        raise MisuseError(f"{said} while there are gradients: call zero_grad() before")


def _of_record(key: str, pager: Pager) -> bool:
    return key.startswith(f"{pager.checkpoint.key}/")


def _values_in(tensor: torch.Tensor) -> Deferred:
    """Return the values that a tensor in memory has now."""
    tensor = tensor.detach().clone()

    def read(target: torch.Tensor, first: int, last: int) -> None:
        target.copy_(tensor[first:last] if tensor.dim() else tensor)

    return Deferred.read_by(read, tensor.shape, tensor.stride(), tensor.dtype)


def _values_of(pager: Pager, parameter: nn.Parameter) -> Deferred:
    """Return the values that the store has of a parameter, read when they are written to another unit."""
    parts, store = pager.parts(parameter), pager.store
    rows = parameter.shape[0] if parameter.dim() else 1
    per_part = pager.sliced[parameter].rows or 1 if parameter in pager.sliced else rows

    def read(target: torch.Tensor, first: int, last: int) -> None:
        for number, (unit, placement) in enumerate(parts):
            begin, end = number * per_part, min((number + 1) * per_part, rows)
            low, high = max(first, begin), min(last, end)
            if low >= high:
                continue
            with store.lease(unit.key, tier="dram") as memory:
                values = placement.values(memory)
                values = values if values.dim() == parameter.dim() else values.unsqueeze(0)
                into = target if not target.dim() else target[low - first : high - first]
                into.copy_(values if not values.dim() else values[low - begin : high - begin])
                del memory, values

    return Deferred.read_by(read, parameter.shape, parameter.stride(), parameter.dtype)


def _nothing(device: torch.device, like: Deferred) -> torch.Tensor:
    """Return what reads as NaN, where that has one, with the shape and the type of ``like``."""
    value = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)
