"""Update rules: mathematics on flat tensors that moves nothing, by torch's own kernels.

A rule is a frozen dataclass with the hyper-parameters of one step, by the names that they have in a param group. ``States`` in
``paging/update.py`` gives it pieces of parameters, which begin and end at multiples of 16 elements of a unit: at other places
the fused kernels would compute what is left over at the end of a piece with other roundings than within it. torch's kernels for
one tensor, without ``fused``, compute the same bits wherever a tensor is cut. A rule whose states belong to blocks of elements
is given pieces of whole blocks, which are counted from the beginning of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch.optim import adagrad, adam, adamax, nadam, radam, rmsprop, sgd
from torch.optim.adamw import adamw

from tiered import MisuseError, TensorSpec
from tiered.packing.moments import MOMENT_4, MOMENT_8, SQUARE_4, SQUARE_8, BlockCode

__all__ = [
    *("AdafactorRule", "AdagradRule", "AdamRule", "AdamW4bitRule", "AdamW8bitRule", "AdamWBFloat16Rule", "AdamWRule"),
    *("AdamW4bitRoundedRule", "AdamW8bitRoundedRule", "AdamWBFloat16RoundedRule"),
    *("AdamaxRule", "COLUMNS", "Kept", "LARGEST_BLOCK", "LionRule", "MuonBFloat16Rule", "MuonRule", "NAdamRule", "RAdamRule"),
    *("RMSpropRule", "ROWS", "RULES", "SGDRule", "SMALLEST_BLOCK", "VECTOR"),
    *("UpdateRule", "WHOLE", "as_kept", "chance_of", "constants_of", "kept_by", "made_from", "name_of", "rounds_by_chance"),
    *("settings_of", "stores_step", "torch_name"),
]

WHOLE, SMALLEST_BLOCK, LARGEST_BLOCK = 0, 16, 1024
"""Elements: parameters are cut at multiples of the second anyway, and a chunk of states has at least as many as the third."""
ROWS, COLUMNS, VECTOR = -1, -2, -3
"""Values of a whole parameter: one for each row (of all dimensions but the last), one for each column (of all but the last
but one), neither for a parameter of fewer than two dimensions; one for each element of such a parameter, none for others."""

State = Mapping[str, torch.Tensor]


class UpdateRule(Protocol):
    """Update of one parameter, of any slice of it by itself, or of what ``granularity`` says. A rule is a frozen dataclass: its
    hyper-parameters are those of one step.

    It may say more by these attributes of its class:

    - ``granularity``: what must be updated together. "elements", as where there is none: parameters are cut anywhere, at
      multiples of 16 elements. A number: blocks of so many elements, a multiple of 16 up to 1,024, in memory order from the
      parameter's first; the last one may be smaller. "matrix": a whole parameter of two dimensions. "tensor": a whole
      parameter.
    - ``torch_names``: what ``state_dict()`` calls a state, by its name in the store, where these differ.
    - ``constant``: the fields that must stay as they are once a step was made. ``optional``: those that a state which is
      loaded need not have; they stay as they are then.
    - ``rounds``: True where parameters are bf16, have no masters, and are rounded by chance: then it has a field ``seed``.
    """

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        """Return what has to be kept for a (flat slice of a) parameter: a spec by name, of as many elements; states start as
        zeros. With blocks ``param`` has one block, and a spec any number of elements: so many are kept for each block. With
        matrices ``param`` has two dimensions, and so has what is kept. With "tensor" ``param`` has any dimensions; what is kept
        has all of them, or 1 for the last, or 1 for the last but one, and may be there only for more than one dimension, or
        only for others."""
        ...

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], step: int
    ) -> None:
        """Change ``param`` and ``state`` in place. All are flat, of equal length (of a state with another number of elements
        for each block: of what the blocks have; of "matrix" and "tensor", in the shape and strides of the parameter, or in that
        of the spec); ``step`` counts from 1.

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
        _adamw(self, param, grad, state["m"], state["v"], step)


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
        optimizer.step()  # type: ignore[no-untyped-call]
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
        optimizer.step()  # type: ignore[no-untyped-call]
        param.grad = None


@dataclass(frozen=True)
class MuonBFloat16Rule(MuonRule):
    """Muon whose momentum is bfloat16 in the store. Inexact: a step widens it, is that of ``MuonRule``, and rounds it to
    even."""

    workspace: ClassVar[int] = 32
    """Bytes as of ``MuonRule``, and the momentum in fp32."""
    torch_names: ClassVar[Mapping[str, str]] = {"momentum16": "momentum_buffer"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"momentum16": TensorSpec("bfloat16", param.shape, 2)}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        momentum = state["momentum16"].to(param.dtype)
        super().update(param, grad, {"momentum_buffer": momentum}, step)
        state["momentum16"].copy_(momentum)


# AdamW with moments in fewer bytes


class _AdamWSettings(Protocol):
    """Hyper-parameters of AdamW."""

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


def _adamw(
    rule: _AdamWSettings, param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int
) -> None:
    adamw(
        [param],
        [grad],
        [m],
        [v],
        [],
        [torch.tensor(float(step - 1), device=param.device)],  # torch's kernel counts it up itself
        fused=True,
        amsgrad=False,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=rule.maximize,
    )


@dataclass(frozen=True)
class AdamWBFloat16Rule:
    """AdamW whose moments are bfloat16 in the store. Inexact: a step widens them, is that of ``AdamWRule``, and rounds them to
    even. A second moment does not change where a step moves it by less than 1/512 of itself, as with ``betas[1]`` above 0.998
    a gradient does that is smaller than those before."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    torch_names: ClassVar[Mapping[str, str]] = {"m16": "exp_avg", "v16": "exp_avg_sq"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return dict.fromkeys(("m16", "v16"), TensorSpec("bfloat16", param.shape, 2))

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        m, v = state["m16"].to(param.dtype), state["v16"].to(param.dtype)
        _adamw(self, param, grad, m, v, step)
        state["m16"].copy_(m)
        state["v16"].copy_(v)


class _Encoded:
    """Update of AdamW whose moments are codes in the store: a step decodes them, is that of ``AdamWRule``, and encodes them."""

    codes: ClassVar[Mapping[str, BlockCode]]
    """By the name of the state, how each moment is encoded."""
    decoded: ClassVar[Mapping[str, str]]
    """By what torch calls a moment, the name of its state."""

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        found = {}
        for name, code in self.codes.items():
            found[name] = TensorSpec("uint8", (code.bytes_in_block,), 1)
            found[f"{name}_scale"] = TensorSpec("float32", (1,), 4)
        return found

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        moments = []
        for name, code in self.codes.items():
            moment = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
            if step > 1:
                code.decode(state[name], state[f"{name}_scale"], moment)
            moments.append(moment.to(param.dtype))
        _adamw(self, param, grad, moments[0], moments[1], step)  # type: ignore[arg-type]  # a dataclass with these fields
        for (name, code), moment in zip(self.codes.items(), moments, strict=True):
            code.encode(moment.float(), state[name], state[f"{name}_scale"])

    def encoded(self, name: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the states of a whole moment, any float of shape (n,) in memory order, that torch calls ``name``."""
        state = self.decoded[name]
        code, count = self.codes[state], moment.numel()
        codes = torch.empty(code.nbytes(count), dtype=torch.uint8, device="cpu")
        scales = torch.empty(code.blocks(count), device="cpu")
        code.encode(moment.to("cpu", torch.float32).contiguous(), codes, scales)
        return {state: codes, f"{state}_scale": scales}

    def decode(self, name: str, state: State, count: int) -> torch.Tensor:
        """Return the moment that torch calls ``name``, float32 of shape (count,), of a whole parameter's states (flat)."""
        found = torch.empty(count, device="cpu")
        kept = self.decoded[name]
        self.codes[kept].decode(state[kept], state[f"{kept}_scale"], found)
        return found


@dataclass(frozen=True)
class AdamW8bitRule(_Encoded):
    """AdamW with moments in 8 bits, in blocks of 256 (Dettmers and others, 2022, https://arxiv.org/abs/2110.02861). Inexact."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    granularity: ClassVar[int] = MOMENT_8.block
    codes: ClassVar[Mapping[str, BlockCode]] = {"m8": MOMENT_8, "v8": SQUARE_8}
    decoded: ClassVar[Mapping[str, str]] = {"exp_avg": "m8", "exp_avg_sq": "v8"}
    torch_names: ClassVar[Mapping[str, str]] = {
        "m8": "exp_avg_codes", "m8_scale": "exp_avg_scales",
        "v8": "exp_avg_sq_codes", "v8_scale": "exp_avg_sq_scales",
    }


@dataclass(frozen=True)
class AdamW4bitRule(_Encoded):
    """AdamW with moments in 4 bits, in blocks of 128 (after Li and others, 2023, https://arxiv.org/abs/2309.01507). Inexact."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    granularity: ClassVar[int] = MOMENT_4.block
    codes: ClassVar[Mapping[str, BlockCode]] = {"m4": MOMENT_4, "v4": SQUARE_4}
    decoded: ClassVar[Mapping[str, str]] = {"exp_avg": "m4", "exp_avg_sq": "v4"}
    torch_names: ClassVar[Mapping[str, str]] = {
        "m4": "exp_avg_codes", "m4_scale": "exp_avg_scales",
        "v4": "exp_avg_sq_codes", "v4_scale": "exp_avg_sq_scales",
    }


@dataclass(frozen=True)
class AdamWBFloat16RoundedRule(AdamWBFloat16Rule):
    """``AdamWBFloat16Rule`` for bf16 parameters without masters, which are rounded by chance (Zamirai and others, 2020,
    https://arxiv.org/abs/2010.06192). Inexact. ``seed``, the step, and a parameter's name and elements decide."""

    seed: int = 0

    rounds: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("seed",)


@dataclass(frozen=True)
class AdamW8bitRoundedRule(AdamW8bitRule):
    """``AdamW8bitRule`` for bf16 parameters without masters, as ``AdamWBFloat16RoundedRule``."""

    seed: int = 0

    rounds: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("seed",)


@dataclass(frozen=True)
class AdamW4bitRoundedRule(AdamW4bitRule):
    """``AdamW4bitRule`` for bf16 parameters without masters, as ``AdamWBFloat16RoundedRule``."""

    seed: int = 0

    rounds: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("seed",)


RULES: Mapping[str, type[Any]] = {
    rule.__name__: rule
    for rule in (
        *(SGDRule, AdamRule, AdagradRule, RMSpropRule, NAdamRule, RAdamRule, AdamaxRule, LionRule, AdafactorRule),
        *(MuonRule, MuonBFloat16Rule, AdamWBFloat16Rule, AdamW8bitRule, AdamW4bitRule),
        *(AdamWBFloat16RoundedRule, AdamW8bitRoundedRule, AdamW4bitRoundedRule),
    )
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
    _block_of(rule)
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
    return tuple(None if one is None else float(one) for one in value) if isinstance(value, tuple | list) else value


@dataclass(frozen=True)
class Kept:
    """Form of a state in the store: ``values`` of type ``dtype`` for each ``block`` elements of a parameter. A block of 0 is a
    whole parameter (``WHOLE``), with one value for each element, or as ``ROWS``, ``COLUMNS`` and ``VECTOR`` say."""

    dtype: torch.dtype
    block: int = SMALLEST_BLOCK
    values: int = SMALLEST_BLOCK

    @property
    def elementwise(self) -> bool:
        """Return whether there is one value for each element."""
        return self.values == self.block

    @property
    def unmastered(self) -> bool:
        """Return whether this is no state, and says that a narrow parameter has no master."""
        return self.block != WHOLE and self.values == 0

    @property
    def of_whole(self) -> bool:
        """Return whether the values are those of a whole parameter, and not of its elements or blocks."""
        return self.block == WHOLE and not self.elementwise

    def span(self, start: int, stop: int, shape: torch.Size) -> slice:
        """Return which values are those of elements ``start``, where a block begins, to ``stop`` of a parameter of ``shape``.
        """
        if self.elementwise:
            return slice(start, stop)
        if self.block == WHOLE:
            return slice(0, self.count(stop, shape))
        return slice(start // self.block * self.values, -(-stop // self.block) * self.values)

    def count(self, elements: int, shape: torch.Size) -> int:
        """Return how many values so many elements of a parameter of ``shape`` have."""
        if self.of_whole:
            return prod(self._reduced(shape))
        return elements if self.elementwise else -(-elements // self.block) * self.values

    def fitting(self, shape: torch.Size) -> torch.Size:
        """Return the shape of this state, in ``state_dict()``, of a whole parameter of ``shape``."""
        if self.elementwise:
            return shape
        return torch.Size(self._reduced(shape) if self.of_whole else (self.count(shape.numel(), shape),))

    def shaped(self, flat: torch.Tensor, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        """Return the values, flat, of a whole parameter of ``shape`` and ``stride`` in the shape that they have in
        ``state_dict()``."""
        return flat.as_strided(shape, stride) if self.elementwise else flat.view(self.fitting(shape))

    def _reduced(self, shape: torch.Size) -> tuple[int, ...]:
        if self.values == VECTOR:
            return (0,) if len(shape) > 1 else tuple(shape)
        if len(shape) < 2:
            return (0,)
        return (*shape[:-1], 1) if self.values == ROWS else (*shape[:-2], 1, shape[-1])

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if self.block == WHOLE:
            return f"{name}, {_WHOLES[self.values]}"
        usual = self.block == SMALLEST_BLOCK == self.values
        return name if usual else f"{name}, {self.values} for {self.block}"


_WHOLES = {WHOLE: "whole", ROWS: "rows", COLUMNS: "columns", VECTOR: "vector"}


def as_kept(shown: str) -> Kept:
    """Return the form that ``str`` gave. Raises ValueError for anything else."""
    name, _, numbers = shown.partition(", ")
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type")
    if not numbers:
        return Kept(dtype)
    for whole, word in _WHOLES.items():
        if numbers == word:
            return Kept(dtype, WHOLE, whole)
    values, _, block = numbers.partition(" for ")
    found = Kept(dtype, int(block), int(values))
    wrong = found.block % SMALLEST_BLOCK or not SMALLEST_BLOCK <= found.block <= LARGEST_BLOCK
    few = found.block == SMALLEST_BLOCK and found.values
    if wrong or few or not 0 <= found.values <= found.block or str(found) != shown:
        raise ValueError(f"{shown!r} is no form of a state")
    return found


def _block_of(rule: UpdateRule) -> int:
    """Return the elements that a rule updates together. Raises MisuseError for what parameters are not cut into."""
    found = getattr(rule, "granularity", "elements")
    if found in ("elements", "matrix", "tensor"):
        return SMALLEST_BLOCK if found == "elements" else WHOLE
    if type(found) is not int or found % SMALLEST_BLOCK or not SMALLEST_BLOCK <= found <= LARGEST_BLOCK:
        raise MisuseError(
            f"{type(rule).__name__} updates {found!r} together, and parameters are cut between elements, or between blocks: "
            "rules of granularity 'elements', 'matrix', 'tensor', or of a multiple of "
            f"{SMALLEST_BLOCK} up to {LARGEST_BLOCK} are all there are"
        )
    return found


def kept_by(rule: UpdateRule, wide: torch.dtype) -> dict[str, Kept]:
    """Return the forms of a rule's states, by name, for parameters that are updated in type ``wide``. Raises MisuseError for a
    state that has not one value for each element, where it does not belong to blocks."""
    block = _block_of(rule)
    found: dict[str, Kept] = {}
    if block == WHOLE:
        tried = [(4, 4)] if rule.granularity == "matrix" else list(_TRIED)  # type: ignore[attr-defined]  # it has one
        made = {shape: rule.state_specs(_spec(shape, wide)) for shape in tried}
        for name in dict.fromkeys(name for specs in made.values() for name in specs):
            specs = [made[shape].get(name) for shape in tried]
            shapes = tuple(None if spec is None else tuple(spec.shape) for spec in specs)
            values = WHOLE if shapes == tuple(tried) else _REDUCED.get(shapes)
            dtypes = {vars(torch).get(spec.dtype) for spec in specs if spec is not None}
            dtype = dtypes.pop()
            if values is None or dtypes or not isinstance(dtype, torch.dtype):
                raise MisuseError(
                    f"{type(rule).__name__} keeps {name!r} of shape {shapes} for parameters of shape {tuple(tried)}: a state "
                    "has one value for each element, or (of a rule of granularity 'tensor') for each row or column of two "
                    "dimensions or more, or for each element of fewer"
                )
            found[name] = Kept(dtype, block, values)
    else:
        for name, spec in rule.state_specs(_spec((block,), wide)).items():
            dtype = vars(torch).get(spec.dtype)
            some = block > SMALLEST_BLOCK and len(spec.shape) == 1 and 1 <= spec.shape[0] <= block
            fits = tuple(spec.shape) == (block,) or some
            if not fits or not isinstance(dtype, torch.dtype):
                raise MisuseError(
                    f"{type(rule).__name__} keeps {name!r} as {spec.dtype} of shape {list(spec.shape)} for a parameter of "
                    f"shape {[block]}: a state has one value for each element (of a rule with a number for granularity: up to "
                    "so many values for each block); what is the same for all can be computed from the number of the step"
                )
            found[name] = Kept(dtype, block, spec.shape[0])
    if not found and block != SMALLEST_BLOCK:
        raise MisuseError(f"{type(rule).__name__} updates more than {SMALLEST_BLOCK} elements together: keep a state of them")
    if any(name.startswith(UNMASTERED) for name in found):
        raise MisuseError(f"{type(rule).__name__} keeps a state whose name begins with {UNMASTERED!r}: give it another one")
    if rounds_by_chance(rule):
        found[f"{UNMASTERED}{block}"] = Kept(torch.uint8, block, 0)
    return found


UNMASTERED = "unmastered"


def rounds_by_chance(rule: UpdateRule) -> bool:
    """Return whether a rule's bf16 parameters have no masters, and are rounded by chance."""
    return bool(getattr(rule, "rounds", False))


def chance_of(rule: UpdateRule, step: int, name: str) -> int:
    """Return the key by which parameter ``name`` is rounded at a step: 32 bits."""
    said = f"{rule.seed} {step} {name}"  # type: ignore[attr-defined]  # it rounds by chance
    return int.from_bytes(blake2b(said.encode(), digest_size=4).digest(), "little")


_TRIED = ((2, 3, 5), (7,))
"""Shapes that a rule for whole parameters is asked about."""
_REDUCED: Mapping[tuple[tuple[int, ...] | None, ...], int] = {
    ((2, 3, 1), None): ROWS,
    ((2, 1, 5), None): COLUMNS,
    (None, (7,)): VECTOR,
}


def _spec(shape: tuple[int, ...], wide: torch.dtype) -> TensorSpec:
    return TensorSpec(str(wide).removeprefix("torch."), shape, wide.itemsize)


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
