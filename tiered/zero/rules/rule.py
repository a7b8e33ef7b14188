"""Update rules: mathematics on flat tensors that moves nothing, by torch's own kernels.

A rule is a frozen dataclass with the hyper-parameters of one step, by the names that they have in a param group. ``States`` in
``paging/update.py`` gives it pieces of parameters, which begin and end at multiples of 16 elements of a unit: at other places
the fused kernels would compute what is left over at the end of a piece with other roundings than within it. torch's kernels for
one tensor, without ``fused``, compute the same bits wherever a tensor is cut. A rule whose states belong to blocks of elements
is given pieces of whole blocks, which are counted from the beginning of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer as TorchOptimizer

from tiered.errors import MisuseError
from tiered.types import TensorSpec

__all__ = [
    *("LARGEST_BLOCK", "SMALLEST_BLOCK", "State", "WHOLE"),
    *("UpdateRule", "block_of", "chance_of", "constants_of", "made_from", "name_of", "rounds_by_chance", "scalars_of"),
    *("scalar_dtype", "settings_of", "step_dtype", "step_within", "stores_step", "terms_of", "torch_name"),
]

WHOLE, SMALLEST_BLOCK, LARGEST_BLOCK = 0, 16, 1024
"""Elements: parameters are cut at multiples of the second anyway, and a chunk of states has at least as many as the third."""

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
    - ``torch_class``: the class of torch whose states and param groups it has, or what makes one, as that is, of parameters.
    - ``constant``: the fields that must stay as they are once a step was made. ``optional``: those that a state which is
      loaded need not have; they stay as they are then.
    - ``together``: True where ``update_each(params, grads, states, step)`` does for lists, by one call, what ``update`` does
      for each, with the same bits.
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


def settings_of(rule: UpdateRule) -> dict[str, Any]:
    """Return the hyper-parameters of a rule by their names in a param group. Raises MisuseError for what is no rule."""
    block_of(rule)
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


_HOOKED = TorchOptimizer.profile_hook_step(lambda: None).__code__
"""What torch wraps around the ``step`` of each class: it calls the hooks."""


def step_within(optimizer: TorchOptimizer) -> None:
    """Make a step of an optimizer of torch that a rule is made of, for one update of a piece. Hooks of all optimizers are not
    called: they see the optimizer of the user, once."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if step.__code__ is _HOOKED else step)(optimizer)


def block_of(rule: UpdateRule) -> int:
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


def rounds_by_chance(rule: UpdateRule) -> bool:
    """Return whether a rule's bf16 parameters have no masters, and are rounded by chance."""
    return bool(getattr(rule, "rounds", False))


def chance_of(rule: UpdateRule, step: int, name: str) -> int:
    """Return the key by which parameter ``name`` is rounded at a step: 32 bits."""
    said = f"{rule.seed} {step} {name}"  # type: ignore[attr-defined]  # it rounds by chance
    return int.from_bytes(blake2b(said.encode(), digest_size=4).digest(), "little")


def torch_name(rule: UpdateRule, state: str) -> str:
    """Return what ``state_dict()`` calls a state."""
    found: str = getattr(rule, "torch_names", {}).get(state, state)
    return found


def stores_step(rule: UpdateRule) -> bool:
    """Return whether ``state_dict()`` has the number of steps, as torch's class has."""
    return bool(getattr(rule, "counts_steps", True))


def scalar_dtype(fused: bool | None) -> torch.dtype:
    """Return the dtype that torch's classes give the scalars of a state: float64 where that is torch's default dtype and the
    kernel is not the fused one, else float32."""
    return torch.float64 if torch.get_default_dtype() is torch.float64 and not fused else torch.float32


def step_dtype(rule: UpdateRule) -> torch.dtype:
    """Return the dtype of the number of steps in the state of torch's class."""
    return scalar_dtype(getattr(rule, "fused", False))


def scalars_of(rule: UpdateRule, step: int) -> dict[str, torch.Tensor]:
    """Return the scalars of a state that has had ``step`` steps, as torch's class has them."""
    found = {"step": torch.tensor(float(step), dtype=step_dtype(rule), device="cpu")} if stores_step(rule) else {}
    return {**found, **(rule.scalars(step) if hasattr(rule, "scalars") else {})}


def name_of(rule: UpdateRule) -> str:
    """Return the name by which a commit knows a rule."""
    found: str = getattr(rule, "name", type(rule).__name__)
    return found


def terms_of(rule: UpdateRule, whose: str) -> Iterator[tuple[str, str | float]]:
    """Yield what all ranks need alike of a rule so that its updates of their shares are one update: ``Ranks.agreeing``."""
    yield f"the rule of {whose}", name_of(rule)
    for name, value in settings_of(rule).items():
        if isinstance(value, tuple | list):
            for index, one in enumerate(value):
                yield f"{name}[{index}] of {whose}", _as_term(one)
        else:
            yield f"{name} of {whose}", _as_term(value)


def _as_term(value: Any) -> str | float:
    """Return a hyper-parameter as ranks compare it. A whole number up to 10,000 may be a float on another rank."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    small = type(value) is int and abs(value) <= 10_000
    return float(value) if small or isinstance(value, float) else repr(value)


def constants_of(rule: UpdateRule) -> tuple[Any, ...]:
    """Return what must stay as it is once a step was made."""
    return tuple(getattr(rule, name) for name in getattr(rule, "constant", ()))
