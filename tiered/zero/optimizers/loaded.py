"""What states must be that an optimizer is given, by those that its rules keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tiered.errors import MisuseError
from tiered.zero.rules.forms import forms_of
from tiered.zero.rules.inexact import AdamW4bitRule, AdamW8bitRule
from tiered.zero.rules.rule import UpdateRule, stores_step, torch_name

__all__ = ["beside_states", "refuse_forms", "refuse_lacking", "refuse_scalars", "refuse_state", "torch_names"]


def torch_names(rule: UpdateRule, shape: torch.Size | None = None) -> dict[str, str]:
    """Return the names of a rule's states in the store, by what torch calls them: of all, or of those that a parameter of this
    shape has."""
    forms = forms_of(rule, torch.float32)
    kept = [name for name, form in forms.items() if shape is None or form.count(max(1, shape.numel()), shape)]
    return {torch_name(rule, name): name for name in kept}


def refuse_state(name: str, shape: torch.Size, found: Mapping[str, Any], rule: UpdateRule, of: str) -> None:
    """Raise MisuseError unless ``found`` is what ``state_dict`` gives for a parameter of that shape."""
    refuse_lacking(repr(name), shape, found, rule, of)
    refuse_forms(repr(name), shape, found, rule)
    whole = [torch_name(rule, kept) for kept, form in forms_of(rule, torch.float32).items() if form.elementwise]
    for key in (*whole, "master"):
        value = found.get(key)
        if key in found and not (isinstance(value, torch.Tensor) and value.shape == shape):
            what = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {type(value).__name__}"
            raise MisuseError(f"{key!r} of {name!r} {what}, and the parameter has shape {tuple(shape)}")


def beside_states(rule: UpdateRule) -> set[str]:
    """Return what a state may have where torch has no state yet: of SGD without a momentum before the first step."""
    return {"master"} if stores_step(rule) else {"master", "step"}


def refuse_forms(name: str, shape: torch.Size, found: Mapping[str, Any], rule: UpdateRule) -> None:
    """Raise MisuseError for states of another type than ``rule`` keeps, and for those of blocks, or of rows and columns, of
    another size than a parameter of that shape has."""
    for key, form in ((torch_name(rule, name), form) for name, form in forms_of(rule, torch.float32).items()):
        value = found.get(key)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise MisuseError(f"{key!r} of {name} is {type(value).__name__}: a tensor is expected")
        fits = value.dtype.is_floating_point if form.dtype.is_floating_point else value.dtype is form.dtype
        if not fits or value.layout is not torch.strided or value.is_meta:
            kind = "a float" if form.dtype.is_floating_point else str(form.dtype)
            raise MisuseError(f"{key!r} of {name} is {value.dtype}, {value.layout}, on {value.device}: {kind} is expected")
        if not form.elementwise and value.shape != form.fitting(shape):
            due = f"the parameter has shape {tuple(shape)}, for which it has {tuple(form.fitting(shape))}"
            raise MisuseError(f"{key!r} of {name} has shape {tuple(value.shape)}, and {due}")


def refuse_lacking(name: str, shape: torch.Size, found: Mapping[str, Any], rule: UpdateRule, of: str) -> None:
    """Raise MisuseError where ``found`` has not all that ``rule`` keeps of a parameter."""
    for key in (*(["step"] if stores_step(rule) else []), *torch_names(rule, shape)):
        if key not in found:
            coded = key in AdamW8bitRule.decoded and {AdamW8bitRule.state, AdamW4bitRule.state} & found.keys()
            method = "float_state_dict()" if coded else f"state_dict() of an {of}"
            raise MisuseError(f"the state of {name} has no {key!r}: give what {method} returns")


def refuse_scalars(rule: UpdateRule, found: Mapping[str, Any]) -> None:
    """Raise MisuseError where the number of steps is none, or a state has other scalars than those that follow from it."""
    step = found.get("step", 1)
    try:
        number = float(step)
    except (TypeError, ValueError, RuntimeError):  # no number, or a tensor that has not one
        number = -1.0
    if not (0 <= number < 2**53 and number.is_integer()):
        raise MisuseError(f"'step' of this state is {step!r:.100}: it is how many steps were made")
    if not hasattr(rule, "scalars"):
        return
    wide, short = (rule.scalars(int(number), dtype) for dtype in (torch.float64, torch.float32))  # of whatever default
    for name in wide.keys() & found.keys():
        right = [float(value) for value in (short[name], wide[name], wide[name].float())]
        if float(found[name]) not in right:
            raise MisuseError(
                f"{name!r} of this state is {float(found[name])!r}, and by its param group it is {right[0]!r} after so "
                f"many steps: {', '.join(getattr(rule, 'constant', ()))} were changed while it was trained, with which "
                f"{type(rule).__name__} cannot go on"
            )
