"""AdamW for paged parameters: ``step()`` marks, each unit is updated when it is next needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from tiered.errors import MisuseError
from tiered.zero.gradients import SpentGradient
from tiered.zero.home import placement_of
from tiered.zero.paging import Pager
from tiered.zero.rules import AdamWRule
from tiered.zero.states import Update
from tiered.zero.unit import Unit
from tiered.zero.units import Placement

__all__ = ["AdamW"]


class AdamW(Optimizer):
    """``torch.optim.AdamW(fused=True)`` for a model that went through ``tiered.zero.page``, bit for bit.

    Moments are fp32 (fp64 for fp64 parameters), and so are the masters of bf16 and fp16 parameters: what is updated is the
    master, and the parameter is the master rounded: bf16 half up (so that the master is the parameter and 16 more bits), fp16
    to even. All of it is read and written in chunks of a few MiB, so that memory does not grow with the model.

    ``update`` says when:

    - "on_fetch": ``step()`` only freezes learning rate, betas, decay, step count and clip factor of each unit; the update is
      applied when the unit is next leased: by the next forward, by evaluation, by ``state_dict``. Gradients are kept till then.
    - "in_backward": each backward is a step. A unit is updated within it as soon as backward is done with it, with the
      hyper-parameters of that moment, and its gradients are deleted: they need neither room nor transfers. ``step()`` closes
      the step (after it ``grad`` is None). What needs all gradients at once raises MisuseError: clipping, loss scaling, a
      second backward before ``step()``. Units that take part in reentrant checkpoints, or that get fewer gradients than in the
      step before, are updated at the end of backward. After an exception in backward some are updated and others are not.

    Parameters whose gradient is None are left alone. ``lr``, ``betas``, ``eps``, ``weight_decay``, ``maximize`` as in torch
    (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101). Raises MisuseError for parameters that are not paged.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        update: str = "on_fetch",
    ) -> None:
        if update not in ("on_fetch", "in_backward"):
            raise MisuseError(f"update is 'on_fetch' or 'in_backward', not {update!r}")
        self._in_backward = update == "in_backward"
        self._group_of: dict[Placement, int] = {}
        for what, value, wrong in (
            ("lr", lr, lr < 0),
            ("eps", eps, eps < 0),
            ("weight_decay", weight_decay, weight_decay < 0),
            ("betas", betas, not all(0 <= beta < 1 for beta in betas)),
        ):
            if wrong:
                raise MisuseError(f"{what}={value} is out of range")
        self.steps: dict[Placement, int] = {}
        """How many each parameter has had."""
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; every parameter must be paged."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for parameter in group["params"]:
                _, unit, _ = placement_of(parameter)
                kinds = {placement.dtype for placement in unit.gradients.states}
                if torch.float64 in kinds and len(kinds) > 1:
                    raise MisuseError(f"unit {unit.plan.name!r} mixes float64 with other element types: use one of them")
        except MisuseError:
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            _, unit, placement = placement_of(parameter)
            self._group_of[placement] = len(self.param_groups) - 1
            unit.claim(placement, self._update_now if self._in_backward else None)

    # -- stepping ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One AdamW step for every parameter that has a gradient. ``closure`` as in torch; returns what it returns, else None.

        Applies updates of an earlier step that nothing has asked for yet; so it may wait for the store, and raise what that
        raises. Raises MisuseError where a gradient has infinity or NaN. After either no parameter has had this step:
        ``zero_grad`` leaves it out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: dict[Unit, dict[Placement, Update]] = {}
        for pager in self._pagers():
            pager.reset()
            pager.exchange.synchronise()
            pager.exchange.refresh()
        for group in self.param_groups:
            rule = _rule(group)
            for parameter in group["params"]:
                _, unit, placement = placement_of(parameter)
                unit.gradients.close_step(placement)
                if parameter.grad is not None:
                    unit.gradients.refuse_infinite(placement)
                    unit.gradients.close()
                    step = self.steps.get(placement, 0) + 1
                    updates.setdefault(unit, {})[placement] = Update(rule, step)
        for unit in updates:  # the last that can fail, before anything is marked
            unit.settle()  # an earlier update that nothing has asked for yet
        for unit, changed in updates.items():
            self._mark(unit, changed)
        for rehearsal in dict.fromkeys(pager.rehearsal for pager in self._pagers()):
            rehearsal.step_ended()
        return loss

    def _mark(self, unit: Unit, changed: dict[Placement, Update]) -> None:
        for placement, update in changed.items():
            state = unit.gradients.states[placement]
            changed[placement] = Update(update.rule, update.step, tuple(state.scales), tuple(state.wide_scales))
            self.steps[placement] = update.step
        unit.mark(changed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; with ``set_to_none=False`` they become zeros (hence an update follows), as in torch.

        After an exception in forward or backward nothing is held any more, and all is as before that step (with
        ``update="in_backward"``, where units may have been updated by then, ``zero.rollback`` does that).
        """
        for pager in self._pagers():
            if not pager.computing:
                pager.reset()  # what an exception left held
        units: dict[Unit, list[Placement]] = {}
        for parameter in self._parameters():
            _, unit, placement = placement_of(parameter)
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
            elif parameter.grad is not None:
                units.setdefault(unit, []).append(placement)
        if set_to_none:
            for placement in (placement for placements in units.values() for placement in placements):
                placement.parameter.grad = None
            for unit in self._units():  # also of one that no parameter shows, when an exception struck as it was stored
                unit.forget_gradients()
        else:
            for unit, placements in units.items():
                unit.settle()
                for placement in placements:
                    unit.gradients.take(placement, torch.zeros((), dtype=placement.dtype).expand(placement.shape))
                unit.gradients.close()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together and return it (0-d): ``torch.nn.utils.clip_grad_norm_``, bit for bit
        where all gradients have one dtype.

        The norm of each whole gradient, then the norm of these in ``model.parameters()`` order; the factor is applied when
        the update is. Raises RuntimeError for a norm that is not finite when ``error_if_nonfinite``.
        """
        self._refuse_in_backward("clip_grad_norm_")
        order = float(norm_type)
        for pager in self._pagers():
            pager.reset()
            pager.exchange.synchronise()
        graded = [placement_of(p) for p in self._parameters() if p.grad is not None]
        if not graded:
            return torch.tensor(0.0)
        graded.sort(key=lambda found: found[2].index)
        norms = self._norms(graded, order)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"The total norm of order {norm_type} of the gradients is not finite: {total.item()}")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for _, unit, placement in graded:
            unit.gradients.scale(placement, factor)
        return total

    def _norms(self, graded: Sequence[tuple[Pager, Unit, Placement]], order: float) -> list[torch.Tensor]:
        """Of each whole gradient."""
        norms: dict[Placement, torch.Tensor] = {}
        for pager in dict.fromkeys(pager for pager, _, _ in graded):
            mine = [(unit, placement) for home, unit, placement in graded if home is pager]
            here = [unit.gradients.norm(placement, order) for unit, placement in mine]
            if pager.partition.shares > 1:
                here = list(pager.exchange.norms(torch.stack(here).double(), order).float())
            norms.update(zip((placement for _, placement in mine), here, strict=True))
        return [norms[placement] for _, _, placement in graded]

    def grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A copy of the gradient of ``parameter``, of its shape and dtype, or None when it has none. Raises MisuseError for a
        parameter that is not paged."""
        pager, unit, placement = placement_of(parameter)
        if not pager.computing:
            pager.exchange.synchronise()
        return unit.gradient(placement)

    def flush(self) -> None:
        """Apply every pending update now. Raises what the store raises."""
        for unit in self._units():
            unit.settle()

    # -- state -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies, in the form of ``torch.optim.AdamW``'s: step, exp_avg and exp_avg_sq per parameter, and the param groups.

        bf16 and fp16 parameters also have their fp32 ``master``.
        """
        packed = super().state_dict()
        state = {}
        for index, parameter in enumerate(self._parameters()):
            _, unit, placement = placement_of(parameter)
            if placement in self.steps:
                kept = unit.state_copies(placement)
                state[index] = {
                    "step": torch.tensor(float(self.steps[placement])),
                    "exp_avg": kept["m"],
                    "exp_avg_sq": kept["v"],
                }
                if "master" in kept:
                    state[index]["master"] = kept["master"]
        packed["state"] = state
        for group in packed["param_groups"]:  # so that torch's takes the same kernel
            group.update(fused=True, foreach=None, amsgrad=False, capturable=False, differentiable=False)
            group["decoupled_weight_decay"] = True
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave, here or from ``torch.optim.AdamW``. Pending updates are applied first.

        Load the model's values before: a master that is another value than its parameter has is not taken.
        """
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise MisuseError("this state was trained with amsgrad=True, which tiered.zero.AdamW does not have")
        self.flush()
        moments = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        self.steps.clear()
        for index, parameter in enumerate(self._parameters()):
            _, unit, placement = placement_of(parameter)
            found = moments.get(index)
            if found is None:
                continue
            state = {"m": found["exp_avg"], "v": found["exp_avg_sq"]}
            if "master" in found:
                state["master"] = found["master"]
            unit.load_state(placement, state)
            self.steps[placement] = int(found["step"])

    # -- within ------------------------------------------------------------------------------------------------------------

    def _update_now(self, placement: Placement) -> Update:
        """Called within backward when a gradient is complete: counts one step, and returns it."""
        step = self.steps[placement] = self.steps.get(placement, 0) + 1
        return Update(_rule(self.param_groups[self._group_of[placement]]), step)

    def _unscale(self, factor: torch.Tensor) -> list[bool]:
        """Multiply all gradients by ``factor`` (0-d) when they are used; says of each whether it was finite before."""
        self._refuse_in_backward("GradScaler")
        for pager in self._pagers():
            pager.reset()
            pager.exchange.synchronise()
        graded = [placement_of(p) for p in self._parameters() if p.grad is not None]
        return [unit.gradients.unscale(placement, factor) for _, unit, placement in graded]

    def _refuse_in_backward(self, what: str) -> None:
        """Raise MisuseError where the gradients are gone when ``step()`` is called."""
        if self._in_backward:
            raise MisuseError(
                f'{what} needs all gradients before the first update, and this optimizer updates during backward: make it with '
                'update="on_fetch"'
            )

    def _parameters(self) -> Iterable[torch.nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _units(self) -> Iterable[Unit]:
        return dict.fromkeys(placement_of(parameter)[1] for parameter in self._parameters())

    def _pagers(self) -> Iterable[Pager]:
        return dict.fromkeys(placement_of(parameter)[0] for parameter in self._parameters())


def _rule(group: dict[str, Any]) -> AdamWRule:
    return AdamWRule(float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"], group["maximize"])
