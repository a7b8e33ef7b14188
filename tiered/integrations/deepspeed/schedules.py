"""DeepSpeed's learning rate schedules as schedulers of torch's.

Formulas: https://deepspeed.readthedocs.io/en/latest/schedulers.html, and the values of the classes in DeepSpeed 0.19.8. They
count iterations: the constructor sets what holds for the first step, and the k-th ``step()``, from 0 on, the value of iteration
k. torch's count, ``last_epoch``, is one more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from tiered import MisuseError
from tiered.errors import expect_type
from tiered.integrations.deepspeed.config import Maker

__all__ = ["SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "scheduler_of"]

SCHEDULED = "a schedule is for a torch.optim.Optimizer"
Rates = float | Sequence[float]


class _Schedule(LRScheduler):
    """Scheduler whose rates are a formula of the iteration."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        if last_batch_iteration != -1:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
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
        return list(self.rates(self.last_batch_iteration))

    def rates(self, iteration: int) -> Sequence[float]:
        """Return the learning rate of each param group in ``iteration``; -1: before the first."""
        raise NotImplementedError


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
        expect_type(optimizer, Optimizer, SCHEDULED)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _each(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _each(optimizer, warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type), warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> Sequence[float]:
        if iteration < 0:
            return self.min_lrs
        risen = self._risen(iteration)
        return [least + (most - least) * risen for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _risen(self, iteration: int) -> float:
        return _risen(iteration, self.warmup_num_steps, self.warmup_type) if iteration < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
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
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _risen(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._risen(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - self.warmup_num_steps))


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
        expect_type(optimizer, Optimizer, SCHEDULED)
        self.total_num_steps, self.warmup_min_ratio, self.cos_min_ratio = total_num_steps, warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type), warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> Sequence[float]:
        return [float(rate) * self._ratio(iteration) for rate in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            risen = _risen(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + risen * (1.0 - self.warmup_min_ratio)
        falling = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (iteration - self.warmup_num_steps + 1) / falling)
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))


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
        expect_type(optimizer, Optimizer, SCHEDULED)
        if lr_range_test_step_size < 1:
            raise MisuseError(f"lr_range_test_step_size is {lr_range_test_step_size}: it is at least 1")
        self.min_lrs = _each(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate, self.staircase = (
            lr_range_test_step_size,
            lr_range_test_step_rate,
            lr_range_test_staircase,
        )
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> Sequence[float]:
        intervals = (iteration + 1) / self.step_size
        grown = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [least * grown for least in self.min_lrs]


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
        expect_type(optimizer, Optimizer, SCHEDULED)
        self.min_lrs = _each(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _each(optimizer, cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate = decay_lr_rate
        self.first = float(cycle_first_step_size)
        self.second = self.first if cycle_second_step_size is None else float(cycle_second_step_size)
        if self.first <= 0 or self.second < 0:
            raise MisuseError("cycle_first_step_size is a number of steps above 0, cycle_second_step_size one from 0 on")
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_stairs, self.second_stairs = cycle_first_stair_count, stairs
        self.decay_step_size, self.decay_mom_rate = decay_step_size, decay_mom_rate
        self.min_moms = _each(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = _each(optimizer, cycle_max_mom, "cycle_max_mom")
        self.momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        super().__init__(optimizer, last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates and betas of the next iteration, or of the one with this number."""
        super().step(last_batch_iteration)
        if self.momentum:
            betas = self.first_betas(self.last_batch_iteration)
            for group, first in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = (first, 0.99)

    def rates(self, iteration: int) -> Sequence[float]:
        if iteration < self.first + self.second:
            height = self._height(iteration)
            return [least + (most - least) * height for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [least / self._decayed(iteration, self.decay_lr_rate) for least in self.min_lrs]

    def first_betas(self, iteration: int) -> Sequence[float]:
        """Return the first of the betas of each param group in ``iteration``."""
        if iteration < 0:
            return self.min_moms  # as DeepSpeed begins
        if iteration < self.first + self.second:
            height = self._height(iteration)
            return [most - (most - least) * height for least, most in zip(self.min_moms, self.max_moms, strict=True)]
        return [most * self._decayed(iteration, self.decay_mom_rate) for most in self.max_moms]

    def _decayed(self, iteration: int, rate: float) -> float:
        if not self.decay_step_size:
            return 1.0
        return 1 + rate * ((iteration - (self.first + self.second) + 1) / self.decay_step_size)

    def _height(self, iteration: int) -> float:
        """Return how far the cycle is from its bottom, from 0 to 1."""
        whole = self.first + self.second
        at, ratio = iteration + 1, self.first / whole
        x = 1.0 + at / whole - math.floor(1 + at / whole)
        height, stairs = (x / ratio, self.first_stairs) if x <= ratio else ((x - 1) / (ratio - 1), self.second_stairs)
        if stairs > 0:  # from the whole number, as rounding could put a boundary one stair lower
            within = at % whole
            position = within * stairs / self.first if within <= self.first else (whole - within) * stairs / self.second
            height = math.floor(position) / stairs
        return height


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


def _each(optimizer: Optimizer, given: Rates, name: str) -> list[float]:
    """Return one number for each param group."""
    count = len(optimizer.param_groups)
    if isinstance(given, Sequence):
        if len(given) != count:
            raise MisuseError(f"{name} has {len(given)} numbers, and the optimizer {count} param groups: give one for each")
        return [float(rate) for rate in given]
    return [float(given)] * count


def _warmup(steps: int, kind: str) -> int:
    if type(steps) is not int or steps < 0:
        raise MisuseError(f"warmup_num_steps is {steps!r}: it is a whole number from 0 on")
    if kind not in ("log", "linear"):
        raise MisuseError(f"warmup_type is 'log' or 'linear', not {kind!r}")
    return max(2, steps)


def _risen(iteration: int, steps: int, kind: str) -> float:
    """Return which share of a warm-up is done."""
    return 1.0 / math.log(steps) * math.log(iteration + 1) if kind == "log" else iteration / steps
