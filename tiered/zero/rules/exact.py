"""Rules that round no state: those with the bits of torch's classes, by torch's own kernels, and Lion, which torch has not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import signature
from typing import Any, ClassVar

import torch
from torch.optim import adagrad, adam, adamax, nadam, radam, rmsprop, sgd
from torch.optim.adamw import adamw

from tiered.errors import MisuseError
from tiered.types import TensorSpec
from tiered.zero.rules.rule import State, UpdateRule, scalar_dtype, settings_of, step_dtype, step_within

__all__ = [
    *("AdafactorRule", "AdagradRule", "AdamRule", "AdamWRule", "AdamaxRule", "LionRule", "MuonRule", "NAdamRule", "RAdamRule"),
    *("RMSpropRule", "SGDRule", "adamw_step", "refuse_lacking"),
]

Function = Callable[..., None]
"""Of torch: the step of one of its classes, for lists of tensors (https://docs.pytorch.org/docs/stable/optim.html)."""


class _TorchRule:
    """Update by the function that ``torch_class`` calls for lists of tensors: by the fused kernel where ``fused``, else one
    tensor at a time.

    ``_function`` takes, after parameters and gradients, lists of the states ``lists``; those that ``needs`` names are there
    where the hyper-parameter is not 0 or False, which must stay as it is. ``kept``: the states that are stored, if not all.
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]]
    _function: ClassVar[Function]
    lists: ClassVar[tuple[str, ...]]
    needs: ClassVar[Mapping[str, str]] = {}
    kept: ClassVar[tuple[str, ...] | None] = None
    together: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "update" in vars(cls) and "together" not in vars(cls):
            cls.together = False  # ``update_each`` of a class above would leave this ``update`` out

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        names = self.lists if self.kept is None else self.kept
        return {name: param for name in names if name not in self.needs or getattr(self, self.needs[name])}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        self.update_each([param], [grad], [state], step)

    def update_each(
        self, params: list[torch.Tensor], grads: list[torch.Tensor], states: Sequence[State], step: int
    ) -> None:
        made: Any = self
        lists = [[state[name] for state in states if name in state] for name in self.lists]
        _call(self._stepped_by(), made, params, grads, lists, step)

    def _stepped_by(self) -> Function:
        return type(self)._function


def _call(
    function: Function,
    rule: UpdateRule,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    lists: Sequence[list[Any]],
    step: int,
) -> None:
    arguments, counts = _arguments(function, rule)  # type: ignore[arg-type]  # a frozen dataclass, which can be hashed
    steps = [[_before(step, param, arguments.get("fused")) for param in params]] if counts else []
    function(params, grads, *lists, *steps, **arguments)


@lru_cache(1024)
def _arguments(function: Function, rule: UpdateRule) -> tuple[Mapping[str, Any], bool]:
    """Return what ``function`` takes of the hyper-parameters of ``rule``, and whether it counts steps."""
    found, taken = settings_of(rule), _taken(function)
    found |= {"foreach": False, "amsgrad": found.get("amsgrad", False), "fused": bool(getattr(rule, "fused", False))}
    if "betas" in found:
        found |= {"beta1": found["betas"][0], "beta2": found["betas"][1]}
    return {name: value for name, value in found.items() if name in taken}, "state_steps" in taken


@cache
def _taken(function: Function) -> frozenset[str]:
    return frozenset(signature(function).parameters)


@dataclass(frozen=True)
class AdamWRule(_TorchRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101), by torch's own fused
    kernel: bit-identical to ``torch.optim.AdamW(fused=True)`` wherever a tensor is cut at multiples of 16 elements. (What is
    left over at the end of a tensor, it computes in another way, with other roundings.)"""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    fused: ClassVar[bool] = True
    together: ClassVar[bool] = True
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}
    _function: ClassVar[Function] = staticmethod(adamw)
    lists: ClassVar[tuple[str, ...]] = ("m", "v", "largest")
    kept: ClassVar[tuple[str, ...]] = ("m", "v")


@dataclass(frozen=True)
class SGDRule(_TorchRule):
    """Stochastic gradient descent. torch counts no steps of it. Whether there is a momentum must stay as it is."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    fused: bool | None = True

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    _function: ClassVar[Function] = staticmethod(sgd.sgd)
    lists: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    needs: ClassVar[Mapping[str, str]] = {"momentum_buffer": "momentum"}
    counts_steps: ClassVar[bool] = False

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        buffers: list[torch.Tensor | None] = [state["momentum_buffer"] if self.momentum and step > 1 else None]
        _call(sgd.sgd, self, [param], [grad], [buffers], step)
        if self.momentum and step == 1:
            assert buffers[0] is not None
            state["momentum_buffer"].copy_(buffers[0])


@dataclass(frozen=True)
class AdamRule(_TorchRule):
    """Adam (Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980). Whether ``amsgrad`` is set must stay as it is."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    fused: bool | None = True
    decoupled_weight_decay: bool = False

    together: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay",)  # torch 2.6 has it in AdamW alone
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq", "largest": "max_exp_avg_sq"}
    _function: ClassVar[Function] = staticmethod(adam.adam)
    lists: ClassVar[tuple[str, ...]] = ("m", "v", "largest")
    needs: ClassVar[Mapping[str, str]] = {"largest": "amsgrad"}

    def _stepped_by(self) -> Function:
        """Return AdamW's function, which has the same kernels, where Adam's has no weight decay that is decoupled."""
        lacks = self.decoupled_weight_decay and "decoupled_weight_decay" not in _taken(adam.adam)
        return adamw if lacks else super()._stepped_by()


@dataclass(frozen=True)
class AdagradRule(_TorchRule):
    """Adagrad (Duchi, Hazan and Singer, 2011, https://jmlr.org/papers/v12/duchi11a.html)."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    fused: bool | None = True

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adagrad
    _function: ClassVar[Function] = staticmethod(adagrad.adagrad)
    lists: ClassVar[tuple[str, ...]] = ("sum",)

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        if step == 1:
            state["sum"].fill_(self.initial_accumulator_value)
        super().update(param, grad, state, step)


@dataclass(frozen=True)
class RMSpropRule(_TorchRule):
    """RMSprop (Hinton, 2012; centered: Graves, 2013, https://arxiv.org/abs/1308.0850). Whether it is centered, and whether
    there is a momentum, must stay as they are."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.RMSprop
    _function: ClassVar[Function] = staticmethod(rmsprop.rmsprop)
    lists: ClassVar[tuple[str, ...]] = ("square_avg", "grad_avg", "momentum_buffer")
    needs: ClassVar[Mapping[str, str]] = {"grad_avg": "centered", "momentum_buffer": "momentum"}
    kept: ClassVar[tuple[str, ...]] = ("square_avg", "momentum_buffer", "grad_avg")


@dataclass(frozen=True)
class NAdamRule(_TorchRule):
    """NAdam (Dozat, 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ). ``mu_product`` is computed from the number of
    the step, so the first of ``betas`` and ``momentum_decay`` must stay as they are. As torch's, it is float64 where that is
    torch's default dtype, else float32."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = False

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.NAdam
    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}
    constant: ClassVar[tuple[str, ...]] = ("betas", "momentum_decay")
    _function: ClassVar[Function] = staticmethod(nadam.nadam)
    lists: ClassVar[tuple[str, ...]] = ("m", "v", "mu_product")
    kept: ClassVar[tuple[str, ...]] = ("m", "v")

    def scalars(self, step: int, dtype: torch.dtype | None = None) -> Mapping[str, torch.Tensor]:
        """Return what torch keeps beside the step, as it is after ``step`` steps of a process in which it has ``dtype``; None:
        in this one."""
        return {"mu_product": _mu_product(self.betas[0], self.momentum_decay, step, dtype or step_dtype(self))}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        super().update(param, grad, {**state, **self.scalars(step - 1)}, step)


@dataclass(frozen=True)
class RAdamRule(_TorchRule):
    """RAdam (Liu and others, 2020, https://arxiv.org/abs/1908.03265)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.RAdam
    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}
    _function: ClassVar[Function] = staticmethod(radam.radam)
    lists: ClassVar[tuple[str, ...]] = ("m", "v")


@dataclass(frozen=True)
class AdamaxRule(_TorchRule):
    """Adamax (Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980)."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adamax
    _function: ClassVar[Function] = staticmethod(adamax.adamax)
    lists: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_inf")


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


@dataclass(frozen=True)
class AdafactorRule:
    """Adafactor (Shazeer and Stern, 2018, https://arxiv.org/abs/1804.04235) by ``torch.optim.Adafactor(foreach=False)``, for a
    whole parameter at a time: second moments of rows and of columns, and of the elements of vectors."""

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    maximize: bool = False

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adafactor
    granularity: ClassVar[str] = "tensor"
    workspace: ClassVar[int] = 24
    """Bytes beside the store for each element of a parameter while it is updated: of a narrow parameter its master, its
    gradient and what its halves are joined with in fp32; the estimate, a negative gradient, and one temporary tensor of
    torch's."""

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        if len(param.shape) < 2:
            return {"variance": param}
        rows, columns = (*param.shape[:-1], 1), (*param.shape[:-2], 1, param.shape[-1])
        return {
            name: TensorSpec(param.dtype, shape, param.itemsize) for name, shape in (("row_var", rows), ("col_var", columns))
        }

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        optimizer = torch.optim.Adafactor([{"params": [param], **settings_of(self)}], foreach=False)
        optimizer.state[param] = {"step": _before(step, param), **state}
        param.grad = grad
        step_within(optimizer)
        param.grad = None


@dataclass(frozen=True)
class MuonRule:
    """Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon/) by ``torch.optim.Muon`` (of torch 2.9): momentum whose
    singular values a Newton-Schulz iteration in bfloat16 brings near 1, for a whole matrix at a time."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None

    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = getattr(torch.optim, "Muon", None)
    granularity: ClassVar[str] = "matrix"
    counts_steps: ClassVar[bool] = False
    workspace: ClassVar[int] = 28
    """Bytes beside the store for each element of a matrix while it is updated: of a narrow parameter its master, its gradient
    and a copy of its momentum in fp32; the update in fp32; six of its size in bf16, as two products of the matrix with itself
    are at most."""

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"momentum_buffer": param}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        optimizer = torch.optim.Muon([{"params": [param], **settings_of(self)}])
        optimizer.state[param]["momentum_buffer"] = state["momentum_buffer"]
        param.grad = grad
        step_within(optimizer)
        param.grad = None


def refuse_lacking(rule: UpdateRule | type[UpdateRule]) -> None:
    """Raise MisuseError where torch lacks the class that makes the steps of ``rule``."""
    if getattr(rule, "torch_class", rule) is None:
        raise MisuseError(f"this torch ({torch.__version__}) has no Muon: it came with 2.9")


def adamw_step(
    rule: UpdateRule, param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int
) -> None:
    """Make a step of AdamW by torch's fused kernel, with the hyper-parameters of ``rule``. The moments ``m`` and ``v`` have the
    type of ``param``; all three change in place."""
    _call(adamw, rule, [param], [grad], [[m], [v], []], step)


def _before(step: int, param: torch.Tensor, fused: bool | None = False) -> torch.Tensor:
    """Return the count of the steps before this one, which torch's kernels count up: the fused ones on the device."""
    return torch.full((), float(step - 1), dtype=scalar_dtype(fused), device=param.device if fused else "cpu")


_LAST_PRODUCTS: dict[tuple[float, float, torch.dtype], tuple[int, torch.Tensor]] = {}


def _mu_product(beta: float, decay: float, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of NAdam's product of momenta after ``step`` steps, by the operations of torch's kernel."""
    none = 0, torch.ones((), dtype=dtype, device="cpu")
    done, product = _LAST_PRODUCTS.get((beta, decay, dtype), none)
    if done > step:
        done, product = none
    product = product.clone()
    for number in range(done + 1, step + 1):
        product *= beta * (1.0 - 0.5 * (0.96 ** (float(number) * decay)))
    _LAST_PRODUCTS[beta, decay, dtype] = step, product
    return product.clone()
