"""DeepSpeed's learning rate schedules as schedulers of torch's.

Formulas: https://deepspeed.readthedocs.io/en/latest/schedulers.html, and the values of the classes in DeepSpeed 0.19.8. They
count iterations: the constructor sets what holds for the first step, and the k-th ``step()``, from 0 on, the value of iteration
k. torch's count, ``last_epoch``, is one more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from tiered.errors import MisuseError, expect_type, one_of, whole_number
from tiered.integrations.deepspeed.config import Maker

__all__ = ["SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "scheduler_of"]

Rates = float | Sequence[float]
"""One number, or one for each param group."""
Share = Callable[[int], float]
"""How far a schedule is from its lower rates (0) to its upper ones (1) in an iteration; -1: before the first."""
Formula = Callable[[int], list[float]]
"""What each param group has in an iteration; -1: before the first."""


class _Schedule(LRScheduler):
    """Scheduler whose rates are a formula of the iteration. ``said``: what the formula is of, which scripts read by DeepSpeed's
    names, as ``scheduler.max_lrs``."""

    def __init__(self, optimizer: Optimizer, rates: Formula, last_batch_iteration: int, **said: Any) -> None:
        if last_batch_iteration != -1:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        self._rates, self._said = rates, tuple(said)
        vars(self).update(said)
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """Return the number of the last iteration; -1: there was none."""
        return self.last_epoch - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next iteration, or of the one with this number."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param group in the present iteration."""
        return [*self._rates(self.last_batch_iteration)]

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` takes: where the schedule is. Its formula is that of the constructor."""
        left_out = ("_said", "_rates", "_betas", *self._said)
        return {name: value for name, value in super().state_dict().items() if name not in left_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a schedule was, by the formula of this one, whatever the state says of another."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name not in self._said})


class WarmupLR(_Schedule):
    """Raise the learning rate from ``warmup_min_lr`` to ``warmup_max_lr`` (default: that of each param group)
    in ``warmup_num_steps`` steps, and leave it there.

    min + (max - min) * g, where g is log(i + 1) / log(n) with ``warmup_type`` "log" and i / n with "linear", and 1 from n on.
    0 and 1 steps are 2, as DeepSpeed had them before it refused 0, which Hugging Face's Trainer fills in for "auto".
    Both rates may be lists, one number for each param group. Raises MisuseError for arguments out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        low = _each(optimizer, warmup_min_lr, "warmup_min_lr")
        given = warmup_max_lr if warmup_max_lr is not None else [float(group["lr"]) for group in optimizer.param_groups]
        high = _each(optimizer, given, "warmup_max_lr")
        steps = _steps(warmup_num_steps)
        rates = _between(low, high, _risen(steps, warmup_type, then=lambda iteration: 1.0))
        said = {"warmup_num_steps": steps, "warmup_type": warmup_type}
        super().__init__(optimizer, rates, last_batch_iteration, min_lrs=low, max_lrs=high, **said)


class WarmupDecayLR(_Schedule):
    """``WarmupLR``, then a linear decay to 0 at ``total_num_steps``: g is (total - i) / (total - n) from n on, at least 0."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        low, high = _each(optimizer, warmup_min_lr, "warmup_min_lr"), _each(optimizer, warmup_max_lr, "warmup_max_lr")
        steps = _steps(warmup_num_steps)
        falling = max(1.0, total_num_steps - steps)
        share = _risen(steps, warmup_type, then=lambda iteration: max(0.0, (total_num_steps - iteration) / falling))
        said = {"warmup_num_steps": steps, "warmup_type": warmup_type, "total_num_steps": total_num_steps}
        super().__init__(optimizer, _between(low, high, share), last_batch_iteration, min_lrs=low, max_lrs=high, **said)


class WarmupCosineLR(_Schedule):
    """Raise the learning rate from ``warmup_min_ratio`` of the optimizer's to all of it in ``warmup_num_steps`` steps, then let
    it fall along a cosine to ``cos_min_ratio`` of it at ``total_num_steps``. The first step has a learning rate of 0."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        high = [float(group.get("initial_lr", group["lr"])) for group in _groups(optimizer)]
        low, steps = [0.0] * len(high), _steps(warmup_num_steps)
        falling = max(1, total_num_steps - steps)

        def fallen(iteration: int) -> float:
            progress = min(1.0, (iteration - steps + 1) / falling)
            return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))

        risen = _risen(steps, warmup_type, then=fallen)

        def share(iteration: int) -> float:
            if not 0 <= iteration < steps:
                return risen(iteration)
            return warmup_min_ratio + risen(iteration) * (1.0 - warmup_min_ratio)

        said = {"warmup_num_steps": steps, "warmup_type": warmup_type, "warmup_min_ratio": warmup_min_ratio}
        said |= {"total_num_steps": total_num_steps, "cos_min_ratio": cos_min_ratio}
        super().__init__(optimizer, _between(low, high, share), last_batch_iteration, **said)


class LRRangeTest(_Schedule):
    """Let the learning rate grow: ``lr_range_test_min_lr`` * (1 + rate * (i + 1) / size), in whole numbers of (i + 1) / size
    with ``lr_range_test_staircase`` (Smith, 2018, https://arxiv.org/abs/1803.09820)."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        low = _each(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        if lr_range_test_step_size < 1:
            raise MisuseError(f"lr_range_test_step_size is {lr_range_test_step_size}: it is at least 1")

        def rates(iteration: int) -> list[float]:
            intervals = (iteration + 1) / lr_range_test_step_size
            grown = 1 + lr_range_test_step_rate * (math.floor(intervals) if lr_range_test_staircase else intervals)
            return [least * grown for least in low]

        super().__init__(optimizer, rates, last_batch_iteration, min_lrs=low)


class OneCycle(_Schedule):
    """Raise the learning rate from ``cycle_min_lr`` to ``cycle_max_lr`` and back, once, then let it decay (Smith, 2018,
    https://arxiv.org/abs/1803.09820). Where the optimizer has betas and ``cycle_momentum`` is true, the first beta goes the
    other way, from ``cycle_max_mom`` to ``cycle_min_mom`` and back; the second is 0.99. Each of the four is a number, or a
    list of one for each param group. The way back may have 0 steps.

    With stair counts the rates move in so many stairs. After the cycle the learning rate is min / (1 + rate * k / size), k from
    1 on, where ``decay_step_size`` and ``decay_lr_rate`` are not 0; the first beta max * (1 + rate * k / size).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        low, high = _each(optimizer, cycle_min_lr, "cycle_min_lr"), _each(optimizer, cycle_max_lr, "cycle_max_lr")
        least, most = _each(optimizer, cycle_min_mom, "cycle_min_mom"), _each(optimizer, cycle_max_mom, "cycle_max_mom")
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0 or second < 0:
            raise MisuseError("cycle_first_step_size is a number of steps above 0, cycle_second_step_size one from 0 on")
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        whole, height = first + second, _height(first, second, cycle_first_stair_count, stairs)
        up, down = _between(low, high, height), _between(most, least, height)

        def decay(iteration: int, rate: float) -> float:
            return 1 + rate * ((iteration - whole + 1) / decay_step_size) if decay_step_size else 1.0

        def rates(iteration: int) -> list[float]:
            return up(iteration) if iteration < whole else [one / decay(iteration, decay_lr_rate) for one in low]

        def betas(iteration: int) -> list[float]:
            if iteration < 0:
                return least  # as DeepSpeed begins
            return down(iteration) if iteration < whole else [one * decay(iteration, decay_mom_rate) for one in most]

        has_betas = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        self._betas = betas if has_betas else None
        super().__init__(optimizer, rates, last_batch_iteration, min_lrs=low, max_lrs=high)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates and betas of the next iteration, or of the one with this number."""
        super().step(last_batch_iteration)
        if self._betas is not None:
            for group, first in zip(self.optimizer.param_groups, self._betas(self.last_batch_iteration), strict=True):
                group["betas"] = (first, 0.99)


SCHEDULES: dict[str, type[LRScheduler]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def scheduler_of(maker: Maker, optimizer: Optimizer) -> LRScheduler:
    """Make the scheduler that a configuration names. Raises MisuseError for arguments that it does not have, or lacks."""
    kind = SCHEDULES[maker.kind]
    known = [name for name in inspect.signature(kind).parameters if name != "optimizer"]
    strange = [name for name in maker.params if name not in known]
    if strange:
        raise MisuseError(f"{maker.kind} has no {strange[0]!r}: scheduler.params may have {', '.join(known)}")
    whole = {name for name in known if name.endswith(("_num_steps", "_step_size", "_stair_count", "_iteration"))}
    given = {name: int(value) if name in whole else value for name, value in maker.params.items()}
    try:
        return kind(optimizer, **given)
    except TypeError as error:
        raise MisuseError(f"scheduler.params of {maker.kind}: {error}") from error


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    expect_type(optimizer, Optimizer, "a schedule is for a torch.optim.Optimizer")
    return optimizer.param_groups


def _each(optimizer: Optimizer, given: Rates, name: str) -> list[float]:
    """Return one number for each param group."""
    count = len(_groups(optimizer))
    if isinstance(given, Sequence):
        if len(given) != count:
            raise MisuseError(f"{name} has {len(given)} numbers, and the optimizer {count} param groups: give one for each")
        return [float(rate) for rate in given]
    return [float(given)] * count


def _between(low: Sequence[float], high: Sequence[float], share: Share) -> Formula:
    """Return the formula of rates that go from ``low`` to ``high`` as ``share`` goes from 0 to 1."""

    def rates(iteration: int) -> list[float]:
        done = share(iteration)
        return [least + (most - least) * done for least, most in zip(low, high, strict=True)]

    return rates


def _steps(given: int) -> int:
    """Return how many steps a warm-up has: at least 2."""
    whole_number("warmup_num_steps is a number of steps", given, least=0)
    return max(2, given)


def _risen(steps: int, kind: str, *, then: Share) -> Share:
    """Return which share of a warm-up is done, and what comes ``then``."""
    one_of("warmup_type", kind, ("log", "linear"))

    def share(iteration: int) -> float:
        if iteration >= steps:
            return then(iteration)
        if iteration < 0:
            return 0.0
        return 1.0 / math.log(steps) * math.log(iteration + 1) if kind == "log" else iteration / steps

    return share


def _height(first: float, second: float, first_stairs: int, second_stairs: int) -> Share:
    """Return how far a cycle of ``first`` steps up and ``second`` steps down is from its bottom."""
    whole = first + second
    ratio = first / whole

    def share(iteration: int) -> float:
        at = iteration + 1
        x = 1.0 + at / whole - math.floor(1 + at / whole)
        height, stairs = (x / ratio, first_stairs) if x <= ratio else ((x - 1) / (ratio - 1), second_stairs)
        if stairs > 0:  # from the whole number, as rounding could put a boundary one stair lower
            within = at % whole
            position = within * stairs / first if within <= first else (whole - within) * stairs / second
            height = math.floor(position) / stairs
        return height

    return share
