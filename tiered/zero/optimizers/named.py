"""Optimizers with the names and arguments of torch's, each bit for bit torch's class in memory; Lion; and AdamW with moments in
fewer bits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict

import torch
from torch.optim.optimizer import ParamsT

from tiered.errors import MisuseError, one_of
from tiered.store import TieredStore
from tiered.zero.optimizers.optimizer import (
    Optimizer,
    refuse_betas,
    refuse_other_than_numbers,
    refuse_out_of_range,
    stride_of,
)
from tiered.zero.paging.sharding import Stage
from tiered.zero.rules.exact import (
    AdafactorRule,
    AdagradRule,
    AdamaxRule,
    AdamRule,
    AdamWRule,
    LionRule,
    MuonRule,
    NAdamRule,
    RAdamRule,
    RMSpropRule,
    SGDRule,
    refuse_lacking,
)
from tiered.zero.rules.inexact import AdamW4bitRoundedRule, AdamW4bitRule, AdamW8bitRoundedRule, AdamW8bitRule, MuonBFloat16Rule
from tiered.zero.rules.rule import UpdateRule, made_from, settings_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    *("SGD", "Adafactor", "Adagrad", "Adam", "AdamW4bit", "AdamW8bit", "Adamax", "Lion", "Muon", "NAdam", "RAdam", "RMSprop"),
    "Where",
]

Number = float | torch.Tensor


class Where(TypedDict, total=False):
    """When parameters are updated, and where their states are: see ``AdamW``."""

    update: str
    store: TieredStore | None
    name: str
    existing: str
    stage: Stage | None


class _Torchs(UpdateRule, Protocol):
    """Rule whose bits are those of a class of torch."""

    torch_class: ClassVar[type[torch.optim.Optimizer]]


class _Named(Optimizer):
    """Optimizer of which torch has a class: its param groups have what those of that class have."""

    _rule_type: ClassVar[type[_Torchs]]

    def __init_subclass__(cls, rule: type[_Torchs] | None = None, **kwargs: Any) -> None:
        """Other classes that derive from one of these (Lightning makes such) keep its rule."""
        super().__init_subclass__(**kwargs)
        if rule is not None:
            cls._rule_type = rule

    def __init__(self, params: ParamsT, settings: dict[str, Any], where: Where) -> None:
        if settings.get("fused", False) is None:
            settings["fused"] = True
        self._refuse_group(settings)
        if any(isinstance(value, torch.Tensor) and value.numel() != 1 for value in settings.values()):
            raise MisuseError(f"a hyper-parameter of {type(self).__name__} is a tensor of several elements: give one")
        if "betas" in settings:
            refuse_betas(settings["betas"])
            settings["betas"] = tuple(map(float, settings["betas"]))
        known = inspect.signature(self._rule_type.torch_class).parameters
        refuse_other_than_numbers(_numbers(settings, known))
        theirs = {name: value for name, value in settings.items() if name in known}  # torch 2.6's Adam decouples no decay
        try:
            defaults = self._rule_type.torch_class([torch.zeros(1, dtype=torch.float32, device="cpu")], **theirs).defaults
        except ValueError as error:  # what is out of range
            raise MisuseError(str(error)) from error
        self._torch_defaults = {**defaults, **settings}
        rule = made_from(self._rule_type(), self._torch_defaults)
        super().__init__(params, rule, **where)

    def _hyper_parameters(self, rule: UpdateRule) -> dict[str, Any]:
        return self._torch_defaults

    def _refuse_group(self, group: Mapping[str, Any]) -> None:
        for name in ("foreach", "capturable", "differentiable"):
            if group.get(name):
                raise MisuseError(
                    f"{name}=True: {type(self).__name__} updates pieces of one parameter at a time, outside of graphs: leave "
                    f"{name}= out"
                )


def _numbers(settings: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return those of the settings that are numbers by their defaults in the signature of a class of torch."""
    return {name: value for name, value in settings.items() if name in known and type(known[name].default) in (int, float)}


class SGD(_Named, rule=SGDRule):
    """``torch.optim.SGD``, bit for bit: with ``fused=True``, which is the default, that of ``fused=True``; with ``fused=False``
    that of ``foreach=False``, torch's default on a CPU.

    A state for each element where ``momentum`` is not 0, else none. Whether it is 0 stays as it was at the first step, so a
    scheduler may set one before; an optimizer that goes on with states in a store is then given one. ``where`` as in
    ``AdamW``.
    Raises MisuseError for arguments out of range, and for ``foreach=True`` and ``differentiable=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: Number = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "momentum": momentum, "dampening": dampening}
        settings |= {"weight_decay": weight_decay, "nesterov": nesterov}
        settings |= {"maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, settings, where)


class Adam(_Named, rule=AdamRule):
    """``torch.optim.Adam``, bit for bit, with ``amsgrad``, too: with ``fused=True``, which is the default, that of
    ``fused=True``; with ``fused=False`` that of ``foreach=False``, torch's default on a CPU.

    Two states for each element, three with ``amsgrad``, which stays as it was. ``where`` as in ``AdamW``. Raises MisuseError
    for arguments out of range, and for ``foreach=True``, ``capturable=True`` and ``differentiable=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "amsgrad": amsgrad}
        settings |= {"foreach": foreach, "maximize": maximize, "capturable": capturable, "differentiable": differentiable}
        settings |= {"fused": fused, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, settings, where)


class Adagrad(_Named, rule=AdagradRule):
    """``torch.optim.Adagrad``, bit for bit: with ``fused=True``, which is the default, that of ``fused=True``; with
    ``fused=False`` that of ``foreach=False``, torch's default on a CPU.

    One state for each element. ``where`` as in ``AdamW``. Raises MisuseError for arguments out of range, and for
    ``foreach=True`` and ``differentiable=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        settings["foreach"] = foreach
        settings |= {"initial_accumulator_value": initial_accumulator_value, "maximize": maximize, "fused": fused}
        super().__init__(params, settings | {"differentiable": differentiable}, where)


class RMSprop(_Named, rule=RMSpropRule):
    """``torch.optim.RMSprop(foreach=False)``, torch's default on a CPU, bit for bit.

    One state for each element, one more where ``momentum`` is not 0, and one more where ``centered``; both stay as they were.
    ``where`` as in ``AdamW``. Raises MisuseError for arguments out of range, and for ``foreach=True``, ``capturable=True`` and
    ``differentiable=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        settings |= {"centered": centered, "capturable": capturable, "foreach": foreach, "maximize": maximize}
        super().__init__(params, settings | {"differentiable": differentiable}, where)


class NAdam(_Named, rule=NAdamRule):
    """``torch.optim.NAdam(foreach=False)``, torch's default on a CPU, bit for bit.

    Two states for each element. ``mu_product`` is computed from the number of the step: ``betas`` and ``momentum_decay`` stay
    as they were, and ``step`` and ``load_state_dict`` raise MisuseError where they did not. ``where`` as in ``AdamW``. Raises
    MisuseError for arguments out of range, and for ``foreach=True``, ``capturable=True`` and ``differentiable=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "momentum_decay": momentum_decay}
        settings |= {"decoupled_weight_decay": decoupled_weight_decay, "foreach": foreach, "maximize": maximize}
        super().__init__(params, settings | {"capturable": capturable, "differentiable": differentiable}, where)


class RAdam(_Named, rule=RAdamRule):
    """``torch.optim.RAdam(foreach=False)``, torch's default on a CPU, bit for bit.

    Two states for each element. ``where`` as in ``AdamW``. Raises MisuseError for arguments out of range, and for
    ``foreach=True``, ``capturable=True`` and ``differentiable=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        settings |= {"decoupled_weight_decay": decoupled_weight_decay, "foreach": foreach, "capturable": capturable}
        super().__init__(params, settings | {"differentiable": differentiable}, where)


class Adamax(_Named, rule=AdamaxRule):
    """``torch.optim.Adamax(foreach=False)``, torch's default on a CPU, bit for bit.

    Two states for each element. ``where`` as in ``AdamW``. Raises MisuseError for arguments out of range, and for
    ``foreach=True``, ``capturable=True`` and ``differentiable=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "foreach": foreach}
        settings |= {"maximize": maximize, "differentiable": differentiable, "capturable": capturable}
        super().__init__(params, settings, where)


class Adafactor(_Named, rule=AdafactorRule):
    """``torch.optim.Adafactor(foreach=False)``, torch's default on a CPU, bit for bit.

    A state for each row and each column of a parameter of two dimensions or more, and one for each element of others. A
    parameter is in memory as a whole while it is updated, with its gradient. ``where`` as in ``AdamW``. Raises MisuseError for
    arguments out of range, for ``foreach=True``, and for parameters that are divided into slices; CapacityError, with the
    number, where the store has too little memory for a parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        settings |= {"weight_decay": weight_decay, "foreach": foreach, "maximize": maximize}
        super().__init__(params, settings, where)


class Lion(Optimizer):
    """Lion (Chen and others, 2023, https://arxiv.org/abs/2302.06675, algorithm 2), with decoupled weight decay: the parameter
    is decayed, then moved by ``lr`` against the sign of the momentum, looked ahead with the first of ``betas``.

    One state for each element, ``exp_avg``. torch has no such class: the bits are those of the algorithm, written down with
    torch's ``mul_`` and ``add_``. ``where`` as in ``AdamW``. Raises MisuseError for arguments out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **where: Unpack[Where],
    ) -> None:
        refuse_out_of_range(lr, betas, weight_decay)
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, LionRule(**settings), **where)


class Muon(Optimizer):
    """``torch.optim.Muon`` for matrices, bit for bit, and AdamW for what is none.

    ``params``: parameters of two dimensions, or param groups, as in torch; a group may have another ``"rule"``. Or a model:
    then its matrices go to Muon, and embeddings, the head and what has not two dimensions go to ``AdamWRule`` with the
    arguments ``adamw`` (``lr``, ``betas``, ``eps``, ``weight_decay``, ``maximize``; by default those of ``zero.AdamW``, and
    ``lr`` of this). A head is a linear layer that has as many outputs as an embedding of the model has rows, or that
    ``model.get_output_embeddings()`` returns. ``split`` has by name of each parameter of a model the rule that it got.

    A matrix is in memory as a whole while it is updated, with its momentum: one state for each element. Momentum and masters of
    narrow parameters are fp32. ``moments=torch.bfloat16``: the momentum is bf16 in the store, half as many bytes. That is
    inexact: a step widens it, is that of fp32, and rounds it to even. (``momentum`` is torch's argument, the factor.)
    ``where`` as in ``AdamW``. Needs torch 2.9.

    Among ranks a matrix that lies in one rank's share is updated there alone. One that is cut is gathered, with its gradient
    and its momentum, and each rank that has a part of it computes the whole update; that needs ``update="on_fetch"``. With
    ``stage=`` each matrix has one owner. Raises MisuseError for arguments out of range, for parameters of other dimensions, for
    DTensors, and for those that are divided into slices; CapacityError, with the number, where the store has too little memory
    for a matrix.
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: Number = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = MuonRule.ns_coefficients,
        eps: float = MuonRule.eps,
        ns_steps: int = MuonRule.ns_steps,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        moments: torch.dtype | None = None,
        **where: Unpack[Where],
    ) -> None:
        if moments not in (None, torch.float32, torch.bfloat16) or isinstance(momentum, torch.dtype):
            raise MisuseError(
                f"moments={moments} and momentum={momentum}: momentum is a factor, as torch has it; moments is the type in "
                "which what it makes is kept, float32 or bfloat16"
            )
        refuse_lacking(MuonRule)
        settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        settings |= {"nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients), "eps": eps, "ns_steps": ns_steps}
        settings["adjust_lr_fn"] = adjust_lr_fn
        refuse_other_than_numbers(_numbers(settings, inspect.signature(torch.optim.Muon).parameters))
        try:
            torch.optim.Muon([torch.zeros(1, 1, dtype=torch.float32, device="cpu")], **settings)
        except ValueError as error:  # what is out of range
            raise MisuseError(str(error)) from error
        if not 0 < ns_steps < 100 or len(settings["ns_coefficients"]) != 3:
            raise MisuseError(f"ns_steps={ns_steps} or ns_coefficients={ns_coefficients} is out of range")
        kind = MuonBFloat16Rule if moments is torch.bfloat16 else MuonRule
        self.split: dict[str, str] = {}
        if isinstance(params, torch.nn.Module):
            usual = {**settings_of(AdamWRule()), "lr": lr}
            given = {**usual, **(adamw or {})}
            if given.keys() - usual.keys():
                raise MisuseError(f"adamw={adamw} has what AdamWRule does not: give lr, betas, eps, weight_decay or maximize")
            refuse_out_of_range(given["lr"], given["betas"], given["weight_decay"], given["eps"])
            params = self._divided(params, AdamWRule(**given), kind.__name__)
        elif adamw is not None:
            raise MisuseError("adamw= goes with a model; of param groups give one with its rule: zero.AdamWRule(...)")
        super().__init__(params, kind(**settings), **where)

    def _divided(self, model: torch.nn.Module, other: UpdateRule, matrices_by: str) -> list[dict[str, Any]]:
        """Return the param groups of a model, and set ``split``."""
        tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        rows = {module.num_embeddings for module in tables}
        heads: list[Any] = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features in rows]
        if callable(getattr(model, "get_output_embeddings", None)):
            heads.append(model.get_output_embeddings())  # type: ignore[operator]
        apart = {p for module in (*tables, *heads) if module is not None for p in module.parameters(recurse=False)}
        matrices: list[tuple[str, torch.nn.Parameter]] = []
        rest: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            fits = parameter.dim() == 2 and parameter not in apart
            (matrices if fits else rest).append((name, parameter))
            self.split[name] = matrices_by if fits else type(other).__name__
        if not matrices:
            raise MisuseError("this model has no matrices but embeddings and heads: take zero.AdamW")
        return [{"params": matrices}, *([{"params": rest, "rule": other}] if rest else [])]


class _Encoded(Optimizer):
    """AdamW whose moments are codes."""

    def _encode(self, params: ParamsT, rule: AdamW8bitRule | AdamW4bitRule, where: Where) -> None:
        """Initialise. Raises MisuseError for what is out of range."""
        refuse_out_of_range(rule.lr, rule.betas, rule.weight_decay, rule.eps)
        made: UpdateRule = rule
        super().__init__(params, made, **where)

    def float_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` with moments as fp32 ``exp_avg`` and ``exp_avg_sq``: what ``zero.AdamW``, torch's AdamW and
        this class load. They are what the codes say; when this class encodes them again, the scales of some blocks are others.
        """
        found = self.state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        rules = [rule for rule, group in zip(self._rules, self.param_groups, strict=True) for _ in group["params"]]
        for index, state in found["state"].items():
            rule, parameter = rules[index], parameters[index]
            if not isinstance(rule, AdamW8bitRule | AdamW4bitRule):
                continue
            moments = rule.decode(state.pop(rule.state), parameter.numel())
            for name, moment in zip(rule.decoded, moments, strict=True):
                state[name] = moment.as_strided(parameter.shape, stride_of(parameter))
        for group in found["param_groups"]:
            group.update(fused=True, foreach=None, amsgrad=False, capturable=False, differentiable=False)
            group["decoupled_weight_decay"] = True
        return found


class AdamW8bit(_Encoded):
    """AdamW with moments in 8 bits: a quarter of the bytes of ``AdamW``'s. **Inexact.**

    The codes are those of bitsandbytes (Dettmers and others, 2022, 8-bit Optimizers via Block-wise Quantization,
    https://arxiv.org/abs/2110.02861): for each block of 256 elements the largest absolute value (fp32), and for each element
    the nearest of 256 values of a dynamic map. A step decodes, is that of ``AdamW``, and encodes; the parameter is updated with
    moments before they are rounded. Blocks are counted from the beginning of each parameter, in memory order. All parameters
    are encoded, small ones too: give those that should have fp32 moments, as embeddings and vectors, a param group with
    ``"rule": zero.AdamWRule(...)``.

    ``state_dict()`` has ``moments8``: for each block a record of 520 bytes, which are the codes of the first moment, those of
    the second, and both scales. ``float_state_dict()`` has fp32 moments, and ``load_state_dict`` takes both.
    ``rounding="stochastic"`` and ``seed``, for bf16 parameters without masters, as in ``AdamW``. ``where`` as in ``AdamW``.
    Raises MisuseError for arguments out of range, and for parameters that are divided within a block: in slices, and among
    ranks in stores of earlier releases.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        rounding: str | None = None,
        seed: int = 0,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        rounded = _by_chance(rounding)
        self._encode(params, AdamW8bitRoundedRule(**settings, seed=seed) if rounded else AdamW8bitRule(**settings), where)


class AdamW4bit(_Encoded):
    """AdamW with moments in 4 bits: an eighth of the bytes of ``AdamW``'s. **Inexact.**

    As ``AdamW8bit``, with blocks of 128 and maps of 16 values: the dynamic map for the first moment, and multiples of 1/16
    without zero for the second (Li and others, 2023, Memory Efficient Optimizers with 4-bit States,
    https://arxiv.org/abs/2309.01507, which has scales for rows and columns where here each block has one). Two codes are in a
    byte; ``state_dict()`` has ``moments4``, with records of 136 bytes.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        rounding: str | None = None,
        seed: int = 0,
        **where: Unpack[Where],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        rounded = _by_chance(rounding)
        self._encode(params, AdamW4bitRoundedRule(**settings, seed=seed) if rounded else AdamW4bitRule(**settings), where)


def _by_chance(rounding: str | None) -> bool:
    """Return whether parameters are rounded by chance; else there are masters. Raises MisuseError for another word."""
    one_of("rounding", rounding, ("stochastic", None))
    return rounding is not None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a tensor without gaps, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
