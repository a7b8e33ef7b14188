"""Update rules: mathematics on flat tensors that moves nothing, by torch's own kernels.

A rule is a frozen dataclass with the hyper-parameters of one step, by the names that they have in a param group. ``States`` in
``paging/update.py`` gives it pieces of parameters, which begin and end at multiples of 16 elements of a unit: at other places
the fused kernels would compute what is left over at the end of a piece with other roundings than within it. torch's kernels for
one tensor, without ``fused``, compute the same bits wherever a tensor is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch.optim import adagrad, adam, adamax, nadam, radam, rmsprop, sgd
from torch.optim.adamw import adamw

from tiered import MisuseError, TensorSpec

__all__ = [
    *("AdagradRule", "AdamRule", "AdamWRule", "AdamaxRule", "LionRule", "NAdamRule", "RAdamRule", "RMSpropRule", "RULES"),
    *("SGDRule", "UpdateRule", "constants_of", "kept_by", "made_from", "name_of", "settings_of", "stores_step", "torch_name"),
]

State = Mapping[str, torch.Tensor]


class UpdateRule(Protocol):
    """Update of one parameter, elementwise, so that any slice may be updated by itself. A rule is a frozen dataclass: its
    hyper-parameters are those of one step.

    It may say more by these attributes of its class:

    - ``granularity``: what must be updated together. "elements", as where there is none: parameters are cut anywhere, at
      multiples of 16 elements. There are no others yet.
    - ``torch_names``: what ``state_dict()`` calls a state, by its name in the store, where these differ.
    - ``constant``: the fields that must stay as they are once a step was made.
    """

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        """Return what has to be kept for a (flat slice of a) parameter: a spec by name, of as many elements; states start as
        zeros."""
        ...

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], step: int
    ) -> None:
        """Change ``param`` and ``state`` in place. All are flat, of equal length; ``step`` counts from 1.

        ``param`` is the fp32 master (fp64 for fp64 parameters), ``grad`` is of the same dtype, and is not changed. Before step
        1 all states are zeros.
        """
        ...


@dataclass(frozen=True)
class AdamWRule:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101), by torch's own fused
    kernel: bit-identical to ``torch.optim.AdamW(fused=True)`` wherever a tensor is cut at multiples of 16 elements. (What is
    left over at the end of a tensor, it computes in another way, with other roundings.)"""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool

    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"m": param, "v": param}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], step: int
    ) -> None:
        adamw(
            [param],
            [grad],
            [state["m"]],
            [state["v"]],
            [],
            [torch.tensor(float(step - 1), device=param.device)],  # torch's kernel counts it up itself
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
        )


@dataclass(frozen=True)
class SGDRule:
    """Stochastic gradient descent by ``torch.optim.sgd.sgd``: by the fused kernel where ``fused``, else one tensor at a time.
    torch counts no steps of it. Whether there is a momentum must stay as it is."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    fused: bool | None = True

    counts_steps: ClassVar[bool] = False

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"momentum_buffer": param} if self.momentum else {}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        buffers: list[torch.Tensor | None] = [state["momentum_buffer"] if self.momentum and step > 1 else None]
        sgd.sgd(
            [param],
            [grad],
            buffers,
            foreach=False,
            fused=bool(self.fused),
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
        )
        if self.momentum and step == 1:
            assert buffers[0] is not None
            state["momentum_buffer"].copy_(buffers[0])


@dataclass(frozen=True)
class AdamRule:
    """Adam (Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980) by ``torch.optim.adam.adam``: by the fused kernel where
    ``fused``, else one tensor at a time. Whether ``amsgrad`` is set must stay as it is."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    fused: bool | None = True
    decoupled_weight_decay: bool = False

    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq", "largest": "max_exp_avg_sq"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"m": param, "v": param, **({"largest": param} if self.amsgrad else {})}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        adam.adam(
            [param],
            [grad],
            [state["m"]],
            [state["v"]],
            [state["largest"]] if self.amsgrad else [],
            [_before(step, param, self.fused)],
            foreach=False,
            fused=bool(self.fused),
            decoupled_weight_decay=self.decoupled_weight_decay,
            amsgrad=self.amsgrad,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
        )


@dataclass(frozen=True)
class AdagradRule:
    """Adagrad (Duchi, Hazan and Singer, 2011, https://jmlr.org/papers/v12/duchi11a.html) by ``torch.optim.adagrad.adagrad``: by
    the fused kernel where ``fused``, else one tensor at a time."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    fused: bool | None = True

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"sum": param}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        if step == 1:
            state["sum"].fill_(self.initial_accumulator_value)
        adagrad.adagrad(
            [param],
            [grad],
            [state["sum"]],
            [_before(step, param, self.fused)],
            foreach=False,
            fused=bool(self.fused),
            lr=self.lr,
            weight_decay=self.weight_decay,
            lr_decay=self.lr_decay,
            eps=self.eps,
            maximize=self.maximize,
        )


@dataclass(frozen=True)
class RMSpropRule:
    """RMSprop (Hinton, 2012; centered: Graves, 2013, https://arxiv.org/abs/1308.0850) by ``torch.optim.rmsprop.rmsprop``, one
    tensor at a time. Whether it is centered, and whether there is a momentum, must stay as they are."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        names = ("square_avg", *(["momentum_buffer"] if self.momentum else []), *(["grad_avg"] if self.centered else []))
        return dict.fromkeys(names, param)

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        rmsprop.rmsprop(
            [param],
            [grad],
            [state["square_avg"]],
            [state["grad_avg"]] if self.centered else [],
            [state["momentum_buffer"]] if self.momentum else [],
            [_before(step, param)],
            foreach=False,
            maximize=self.maximize,
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            centered=self.centered,
        )


@dataclass(frozen=True)
class NAdamRule:
    """NAdam (Dozat, 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ) by ``torch.optim.nadam.nadam``, one tensor at a
    time. ``mu_product`` is computed from the number of the step, so the first of ``betas`` and ``momentum_decay`` must stay as
    they are."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = False

    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}
    constant: ClassVar[tuple[str, ...]] = ("betas", "momentum_decay")

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"m": param, "v": param}

    def scalars(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return what torch keeps beside the step, as it is after ``step`` steps."""
        return {"mu_product": _mu_product(self.betas[0], self.momentum_decay, step)}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        nadam.nadam(
            [param],
            [grad],
            [state["m"]],
            [state["v"]],
            [_mu_product(self.betas[0], self.momentum_decay, step - 1)],
            [_before(step, param)],
            foreach=False,
            decoupled_weight_decay=self.decoupled_weight_decay,
            maximize=self.maximize,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum_decay=self.momentum_decay,
            eps=self.eps,
        )


@dataclass(frozen=True)
class RAdamRule:
    """RAdam (Liu and others, 2020, https://arxiv.org/abs/1908.03265) by ``torch.optim.radam.radam``, one tensor at a time."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False

    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"m": param, "v": param}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        radam.radam(
            [param],
            [grad],
            [state["m"]],
            [state["v"]],
            [_before(step, param)],
            foreach=False,
            decoupled_weight_decay=self.decoupled_weight_decay,
            maximize=self.maximize,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
        )


@dataclass(frozen=True)
class AdamaxRule:
    """Adamax (Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980) by ``torch.optim.adamax.adamax``, one tensor at a time."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"exp_avg": param, "exp_inf": param}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        adamax.adamax(
            [param],
            [grad],
            [state["exp_avg"]],
            [state["exp_inf"]],
            [_before(step, param)],
            foreach=False,
            maximize=self.maximize,
            eps=self.eps,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True)
class LionRule:
    """Lion (Chen and others, 2023, https://arxiv.org/abs/2302.06675, algorithm 2): the sign of the momentum, looked ahead, with
    decoupled weight decay."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False

    counts_steps: ClassVar[bool] = False

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"exp_avg": param}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        if self.maximize:
            grad = -grad
        momentum = state["exp_avg"]
        param.mul_(1 - self.lr * self.weight_decay)
        ahead = momentum.mul(self.betas[0]).add_(grad.mul(1 - self.betas[0]))
        param.add_(ahead.sign_(), alpha=-self.lr)
        momentum.mul_(self.betas[1]).add_(grad, alpha=1 - self.betas[1])


RULES: Mapping[str, type[Any]] = {
    rule.__name__: rule
    for rule in (SGDRule, AdamRule, AdagradRule, RMSpropRule, NAdamRule, RAdamRule, AdamaxRule, LionRule)
}
"""Rules whose updates a record may have, by name, beside ``AdamWRule``."""


def _before(step: int, param: torch.Tensor, fused: bool | None = False) -> torch.Tensor:
    """Return the count of the steps before this one, which torch's kernels count up: the fused ones on the device."""
    return torch.tensor(float(step - 1), device=param.device if fused else "cpu")


_LAST_PRODUCTS: dict[tuple[float, float], tuple[int, torch.Tensor]] = {}


def _mu_product(beta: float, decay: float, step: int) -> torch.Tensor:
    """Return a copy of NAdam's product of momenta after ``step`` steps, by the operations of torch's kernel."""
    done, product = _LAST_PRODUCTS.get((beta, decay), (0, torch.ones((), device="cpu")))
    if done > step:
        done, product = 0, torch.ones((), device="cpu")
    product = product.clone()
    for number in range(done + 1, step + 1):
        product *= beta * (1.0 - 0.5 * (0.96 ** (float(number) * decay)))
    _LAST_PRODUCTS[beta, decay] = step, product
    return product.clone()


# What a rule says


def settings_of(rule: UpdateRule) -> dict[str, Any]:
    """Return the hyper-parameters of a rule by their names in a param group. Raises MisuseError for what is no rule."""
    granularity = getattr(rule, "granularity", "elements")
    if granularity != "elements":
        raise MisuseError(
            f"{type(rule).__name__} updates {granularity!r} together, and parameters are cut between any elements: rules of "
            "granularity 'elements' are the only ones yet"
        )
    if isinstance(rule, type) or not hasattr(rule, "__dataclass_fields__"):
        raise MisuseError(f"rule={rule!r:.100} is no rule: give a frozen dataclass with the methods of UpdateRule")
    if hasattr(rule, "settings"):
        found: dict[str, Any] = rule.settings()
        return found
    return {field.name: getattr(rule, field.name) for field in fields(rule) if field.init}  # type: ignore[arg-type]


def made_from(rule: UpdateRule, group: Mapping[str, Any]) -> UpdateRule:
    """Return ``rule`` with the hyper-parameters that ``group`` has now."""
    values = {name: _number(group[name]) for name in settings_of(rule)}
    if "lr" in values:
        values["lr"] = float(values["lr"])
    if hasattr(rule, "with_settings"):
        other: UpdateRule = rule.with_settings(values)
        return other
    made: UpdateRule = replace(rule, **values)  # type: ignore[type-var]
    return made


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(float, value)) if isinstance(value, tuple | list) else value


def kept_by(rule: UpdateRule, wide: torch.dtype) -> dict[str, torch.dtype]:
    """Return the types of a rule's states, by name, for parameters that are updated in type ``wide``. Raises MisuseError for a
    state that has not one value for each element."""
    param = TensorSpec(str(wide).removeprefix("torch."), (16,), wide.itemsize)
    found = {}
    for name, spec in rule.state_specs(param).items():
        dtype = vars(torch).get(spec.dtype)
        if tuple(spec.shape) != (16,) or not isinstance(dtype, torch.dtype):
            raise MisuseError(
                f"{type(rule).__name__} keeps {name!r} as {spec.dtype} of shape {list(spec.shape)} for a parameter of 16: a "
                "state has one value for each element; what is the same for all can be computed from the number of the step"
            )
        found[name] = dtype
    return found


def torch_name(rule: UpdateRule, state: str) -> str:
    """Return what ``state_dict()`` calls a state."""
    found: str = getattr(rule, "torch_names", {}).get(state, state)
    return found


def stores_step(rule: UpdateRule) -> bool:
    """Return whether ``state_dict()`` has the number of steps, as torch's class has."""
    return bool(getattr(rule, "counts_steps", True))


def name_of(rule: UpdateRule) -> str:
    """Return the name by which a commit knows a rule."""
    found: str = getattr(rule, "name", type(rule).__name__)
    return found


def constants_of(rule: UpdateRule) -> tuple[Any, ...]:
    """Return what must stay as it is once a step was made."""
    return tuple(getattr(rule, name) for name in getattr(rule, "constant", ()))
