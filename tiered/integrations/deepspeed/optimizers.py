"""Make the optimizer of an engine: of a configuration, of an optimizer of torch's that the caller made, or of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tiered import zero
from tiered.errors import MisuseError
from tiered.integrations.deepspeed.config import Maker
from tiered.integrations.deepspeed.table import KEYS, Verdict
from tiered.zero.optimizers.elementwise import Elementwise
from tiered.zero.optimizers.optimizer import Optimizer
from tiered.zero.rules.known import OPTIMIZERS

__all__ = ["Groups", "converted", "groups_of", "made", "resolved"]

Groups = list[dict[str, Any]]
"""Param groups: under "params" the names of parameters."""
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
USUAL: dict[str, dict[str, Any]] = {
    "adam": ADAM,
    "adamw": ADAM,
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "muon": {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
}
"""Defaults of DeepSpeed's optimizers, where they are not torch's."""
_PARAMS = "optimizer.params."
DROPPED = {key.path.removeprefix(_PARAMS) for key in KEYS if key.path.startswith(_PARAMS) and key.verdict is Verdict.UNNEEDED}
DROPPED |= {"bias_correction", "per_head_muon"}
"""Arguments that make no difference here, and two that have one value."""


def groups_of(model: nn.Module, given: Iterable[Any] | None) -> Groups:
    """Return param groups with the names of parameters: of ``given``, which are parameters, pairs of a name and a parameter, or
    param groups of these; None: all that are trained. Raises MisuseError for a parameter that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if given is None:
        return [{"params": [name for name, parameter in model.named_parameters() if parameter.requires_grad]}]
    items = list(given)
    groups = items if items and isinstance(items[0], Mapping) else [{"params": items}]
    return [{**group, "params": [_name(one, names) for one in _listed(group["params"])]} for group in groups]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _name(one: Any, names: Mapping[int, str]) -> str:
    parameter = one[1] if isinstance(one, tuple) else one
    if id(parameter) not in names:
        raise MisuseError(
            f"the optimizer has a parameter of shape {tuple(getattr(parameter, 'shape', ()))} that is not the model's: give "
            "zero.initialize the model that it was made for"
        )
    return names[id(parameter)]


def resolved(groups: Groups, model: nn.Module) -> Groups:
    """Return param groups with the parameters of a model in place of their names."""
    there = dict(model.named_parameters())
    return [{**group, "params": [there[name] for name in group["params"]]} for group in groups]


def made(maker: Maker, groups: Groups, model: nn.Module, *, split: bool) -> Optimizer:
    """Make the optimizer that a configuration names, for a model that is paged. ``split``: its parameters are all of the
    model's, which Muon divides. Raises MisuseError for a name that there is not, and for arguments that it does not have."""
    name = maker.kind.lower()
    params = {key: value for key, value in maker.params.items() if key not in DROPPED}
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    if name == "muon":
        return _muon(maker.kind, params, model, split=split)
    found = resolved(groups, model)
    if name in ("adam", "adamw"):
        name = "adamw" if params.pop("adam_w_mode", True) else name
    if name == "adagrad" or (name == "adamw" and not params.get("amsgrad")):
        params.pop("amsgrad", None)  # DeepSpeed's have the argument, and these classes do not
    known = {one.lower(): found for one, found in OPTIMIZERS.items()}.get(name)
    if known is not None:
        usual = USUAL.get(name, {})
        if name == "adamw" and maker.params.get("torch_adam"):
            usual = {**usual, "weight_decay": 0.01}
        kernel = {"fused": False} if known.takes_fused and name != "adam" else {}
        return _called(maker.kind, getattr(zero, known.optimizer), found, {**usual, **params, **kernel})
    kind = getattr(torch.optim, maker.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise MisuseError(
            f"optimizer.type {maker.kind!r} is no optimizer: there are {', '.join(OPTIMIZERS)} and the "
            "element-wise ones of torch.optim"
        )
    return _called(maker.kind, lambda groups, **given: Elementwise(kind, groups, **given), found, params)


def _called(name: str, kind: Callable[..., Optimizer], groups: Groups | nn.Module, params: Mapping[str, Any]) -> Optimizer:
    try:
        return kind(groups, **params)
    except TypeError as error:
        raise MisuseError(f"optimizer.params of {name}: {error}") from error


def _muon(name: str, params: dict[str, Any], model: nn.Module, *, split: bool) -> Optimizer:
    if not split:
        raise MisuseError("Muon divides the parameters of the model itself: leave model_parameters= out")
    params.pop("adam_w_mode", None)
    given = {**USUAL["muon"], **params}
    lr, adam_lr = given.pop("muon_lr", given["lr"]), given.pop("adam_lr", given["lr"])
    adamw = {"lr": adam_lr, "betas": given.pop("betas"), "eps": given.pop("eps"), "weight_decay": given["weight_decay"]}
    given.pop("lr")
    given |= {"lr": lr, "adamw": adamw, "adjust_lr_fn": "original"}
    return _called(name, zero.Muon, model, given)


def converted(optimizer: torch.optim.Optimizer, groups: Groups, model: nn.Module) -> Optimizer:
    """Return the optimizer of ``tiered.zero`` that makes the steps of one of torch's, with its param groups and states; itself,
    where it is one of ``tiered.zero``. ``groups``: its own, with names, from before the model was paged.

    Raises MisuseError for a class that there is no like of.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    home, name = type(optimizer).__module__, type(optimizer).__name__
    if not home.startswith("torch."):
        raise MisuseError(
            f"{home}.{name} cannot update parameters that are in a store: make one of torch.optim, "
            'or name one in the configuration ("optimizer": {"type": "AdamW", ...})'
        )
    found = resolved(groups, model)
    if name not in OPTIMIZERS:
        made: Optimizer = Elementwise(type(optimizer), found, **optimizer.defaults)
    else:
        kernels = ("foreach", "fused")
        kind = getattr(zero, name)
        known = inspect.signature(kind).parameters.keys() - kernels
        settings = {key: value for key, value in optimizer.defaults.items() if key in known}
        found = [{key: value for key, value in group.items() if key not in kernels} for group in found]
        if OPTIMIZERS[name].takes_fused:
            settings["fused"] = bool(optimizer.defaults.get("fused"))
        made = kind(found, **settings)
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    return made
