"""Any element-wise optimizer class of torch's, as an update rule: the class itself updates each piece."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer as TorchOptimizer
from torch.optim.optimizer import ParamsT

from tiered.errors import MisuseError, expect_type
from tiered.types import TensorSpec
from tiered.zero.optimizers.named import Where
from tiered.zero.optimizers.optimizer import Optimizer
from tiered.zero.rules.known import OPTIMIZERS
from tiered.zero.rules.rule import UpdateRule, step_dtype, step_within

__all__ = ["Elementwise", "ElementwiseRule"]

SHAPE = (21, 37)
"""Of the matrix that a class is tried on: no multiple of 16 elements."""
CUT = 48
STEPS = 4

@dataclass(frozen=True)
class ElementwiseRule:
    """Update by ``kind``, made with ``given`` (names and values), for each piece. ``arguments``: names and values in its param
    group, which ``kind`` need not take as arguments and does not check there."""

    kind: type[TorchOptimizer]
    arguments: tuple[tuple[str, Any], ...]
    given: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        return f"Elementwise({self.kind.__module__}.{self.kind.__qualname__})"

    def settings(self) -> dict[str, Any]:
        return dict(self.arguments)

    def with_settings(self, values: Mapping[str, Any]) -> ElementwiseRule:
        return ElementwiseRule(self.kind, tuple(values.items()), self.given)

    def torch_class(self, params: list[torch.Tensor]) -> TorchOptimizer:
        """Return the class, made for some tensors as it was given."""
        return self.kind(params, **dict(self.given))

    def made(self, param: torch.Tensor) -> TorchOptimizer:
        """Return the class, made for one tensor."""
        with torch.device("cpu"):  # the class may make states at once
            return self.kind([{"params": [param], **self.settings()}], **dict(self.given))

    @property
    def fused(self) -> bool:
        return bool(self.settings().get("fused"))

    @property
    def counts_steps(self) -> bool:
        return "step" in _states_of(self)

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return dict.fromkeys([name for name in _states_of(self) if name != "step"], param)

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], step: int) -> None:
        optimizer = self.made(param)
        if step > 1:
            optimizer.state[param] = {**state}
            if self.counts_steps:
                optimizer.state[param]["step"] = torch.tensor(float(step - 1), dtype=step_dtype(self), device="cpu")
        param.grad = grad
        _step(optimizer)
        param.grad = None
        for name, kept in state.items():
            kept.copy_(optimizer.state[param][name])


def _step(optimizer: TorchOptimizer) -> None:
    """Make a step. The classes make the number of steps on torch's default device if not on the parameter's."""
    with torch.device("cpu"):
        step_within(optimizer)


@lru_cache(64)
def _states_of(rule: ElementwiseRule) -> tuple[str, ...]:
    """Return the names of what the class keeps for a parameter. Raises MisuseError for what does not belong to elements."""
    param = torch.zeros(16, dtype=torch.float32, device="cpu")
    param.grad = torch.ones(16, dtype=torch.float32, device="cpu")
    optimizer = rule.made(param)
    _step(optimizer)
    for name, value in optimizer.state[param].items():
        fine = isinstance(value, torch.Tensor) and value.shape == param.shape and value.dtype == param.dtype
        if not fine and not (name == "step" and isinstance(value, torch.Tensor) and float(value) == 1):
            kind = rule.kind.__name__
            if name == "step" and isinstance(value, int | float):
                raise MisuseError(f"{kind} keeps 'step' as {value!r}: keep it as a tensor, which begins as torch.zeros(())")
            raise MisuseError(
                f"{kind} keeps {name!r}, which has not one value for each element, and cannot be cut: {_instead(rule.kind)}"
            )
    return tuple(optimizer.state[param])


def _instead(kind: type[TorchOptimizer]) -> str:
    """Say what to do where a class of torch, or of the user, is not element-wise."""
    name = kind.__name__
    known = name in OPTIMIZERS and kind is getattr(torch.optim, name, None)
    return f"take zero.{name}" if known else "keep its parameters in memory, or write a rule for zero.Optimizer"


class Elementwise(Optimizer):
    """Any element-wise class of ``torch.optim``, or one that is made like them, bit for bit:
    ``zero.Elementwise(torch.optim.Adadelta, params, lr=0.5)``.

    ``kind`` is tried on a random matrix first: it must give the same bits when the matrix is cut into flat pieces at multiples
    of 16 elements, may keep only tensors like the parameter, and ``step`` (a tensor, the number of steps), and may not change
    its param groups in ``step()``. Raises MisuseError where it does not do so (Adafactor, Muon, LBFGS, SparseAdam). Arguments
    are those of ``kind``; when and where as in ``AdamW``: ``update``, ``store``, ``name``, ``existing`` and ``stage``, in
    ``where``.

    ``kind`` is made anew for each piece of a parameter, which costs time where pieces are small. An update of it cannot be
    pending in a commit: call ``flush()`` before ``zero.commit``.
    """

    def __init__(
        self, kind: type[TorchOptimizer], params: ParamsT, *, where: Where | None = None, **arguments: Any
    ) -> None:
        expect_type(kind, type, "an element-wise optimizer is made of a class of torch.optim")
        rule = _tried(kind, arguments)
        super().__init__(params, rule, **(where or {}))


def _tried(kind: type[TorchOptimizer], arguments: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of a class that is element-wise. Raises MisuseError for another one."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    whole = torch.randn(SHAPE, generator=generator, dtype=torch.float32, device="cpu")
    cut = whole.flatten().clone()
    try:
        defaults = kind([torch.zeros(SHAPE, dtype=torch.float32, device="cpu")], **arguments).defaults.items()
    except Exception as error:
        given = ", ".join(f"{name}={value!r:.50}" for name, value in arguments.items())
        raise MisuseError(f"{kind.__name__}(params, {given}) cannot be made: {error}") from error
    try:
        settings = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in defaults)
        rule = ElementwiseRule(kind, settings, tuple(arguments.items()))
        with torch.device("cpu"):
            reference = kind([whole], **arguments)
        before = copy.deepcopy({name: value for name, value in reference.param_groups[0].items() if name != "params"})
        states = {name: torch.zeros_like(cut) for name in _states_of(rule) if name != "step"}
        for step in range(1, STEPS + 1):
            whole.grad = torch.randn(SHAPE, generator=generator, dtype=torch.float32, device="cpu")
            gradient = whole.grad.flatten().clone()
            _step(reference)
            for at in (slice(begin, begin + CUT) for begin in range(0, cut.numel(), CUT)):
                rule.update(cut[at], gradient[at], {name: state[at] for name, state in states.items()}, step)
        kept = {name: reference.state[whole][name].flatten() for name in states}
    except MisuseError:
        raise
    except Exception as error:
        raise MisuseError(f"{kind.__name__} cannot update parameters in pieces ({error!r:.200}): {_instead(kind)}") from error
    if not torch.equal(cut, whole.flatten()) or not all(torch.equal(states[name], kept[name]) for name in states):
        for name, value in reference.param_groups[0].items():
            if name in before and not _same(before[name], value):
                raise MisuseError(
                    f"{kind.__name__} changes {name!r} of its param groups in step(), which the pieces of a parameter would do "
                    "many times: let a scheduler change it, or subclass an optimizer of tiered.zero, as zero.AdamW"
                )
        raise MisuseError(
            f"{kind.__name__} is not element-wise: a matrix that is cut at multiples of 16 elements is updated otherwise than "
            f"as a whole: {_instead(kind)}"
        )
    return rule


def _same(before: Any, now: Any) -> bool:
    """Return whether a hyper-parameter is what it was."""
    return torch.equal(before, now) if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor) else before == now
