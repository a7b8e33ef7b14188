"""Rules that give the bits of torch's classes, by torch's own kernels; and Lion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch.optim import adagrad, adam, adamax, nadam, radam, rmsprop, sgd
from torch.optim.adamw import adamw

from tiered import TensorSpec
from tiered.zero.rules.rule import State, scalar_dtype, settings_of, step_dtype, step_within

__all__ = [
    *("AdafactorRule", "AdagradRule", "AdamRule", "AdamWRule", "AdamaxRule", "LionRule", "MuonRule", "NAdamRule", "RAdamRule"),
    *("RMSpropRule", "SGDRule", "adamw_step"),
]


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

    fused: ClassVar[bool] = True
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"m": param, "v": param}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], step: int
    ) -> None:
        adamw_step(self, param, grad, state["m"], state["v"], step)


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

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
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

    optional: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay",)  # torch 2.6 has it not
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    torch_names: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq", "largest": "max_exp_avg_sq"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"m": param, "v": param, **({"largest": param} if self.amsgrad else {})}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        decoupled: dict[str, Any] = {"decoupled_weight_decay": True} if self.decoupled_weight_decay else {}  # not in torch 2.6
        adam.adam(
            [param],
            [grad],
            [state["m"]],
            [state["v"]],
            [state["largest"]] if self.amsgrad else [],
            [_before(step, param, self.fused)],
            foreach=False,
            fused=bool(self.fused),
            **decoupled,
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

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adagrad

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

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.RMSprop

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
    they are. As torch's, it is float64 where that is torch's default dtype, else float32."""

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

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"m": param, "v": param}

    def scalars(self, step: int, dtype: torch.dtype | None = None) -> Mapping[str, torch.Tensor]:
        """Return what torch keeps beside the step, as it is after ``step`` steps of a process in which it has ``dtype``; None:
        in this one."""
        return {"mu_product": _mu_product(self.betas[0], self.momentum_decay, step, dtype or step_dtype(self))}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        nadam.nadam(
            [param],
            [grad],
            [state["m"]],
            [state["v"]],
            [_mu_product(self.betas[0], self.momentum_decay, step - 1, step_dtype(self))],
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

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.RAdam
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

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adamax

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


class AdamWSettings(Protocol):
    """Hyper-parameters of a step of AdamW, whatever type its moments have in the store."""

    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def maximize(self) -> bool: ...


def adamw_step(
    rule: AdamWSettings, param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int
) -> None:
    """Make a step of AdamW by torch's fused kernel. The moments ``m`` and ``v`` have the type of ``param``; all three change in
    place."""
    adamw(
        [param],
        [grad],
        [m],
        [v],
        [],
        [_before(step, param, fused=True)],
        fused=True,
        amsgrad=False,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=rule.maximize,
    )


def _before(step: int, param: torch.Tensor, fused: bool | None = False) -> torch.Tensor:
    """Return the count of the steps before this one, which torch's kernels count up: the fused ones on the device."""
    return torch.tensor(float(step - 1), dtype=scalar_dtype(fused), device=param.device if fused else "cpu")


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
