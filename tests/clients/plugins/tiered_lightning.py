"""Shim for Lightning's suite: a Trainer for one process on a CPU has ``TieredStrategy`` with the checkpoints that
``TIERED_CHECKPOINTS`` names, and what
``configure_optimizers`` makes of torch's becomes an optimizer of ``tiered.zero``."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from tiered_outcomes import engaged
from tiered_places import close, follow, store

from tiered import zero
from tiered.integrations.deepspeed import optimizers
from tiered.integrations.lightning import TieredStrategy


class Strategy(TieredStrategy):
    """``TieredStrategy`` that converts optimizers."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        engaged()
        module, made = self.lightning_module, {}
        for one in self.optimizers:
            if not isinstance(one, zero.Optimizer):
                made[id(one)] = optimizers.converted(one, optimizers.groups_of(module, one.param_groups), module)
        for config in self.lr_scheduler_configs:
            if id(config.scheduler.optimizer) in made:
                follow(config.scheduler, made[id(config.scheduler.optimizer)])
        self.optimizers = [made.get(id(one), one) for one in self.optimizers]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Close the store when a test has ended: the suite looks for threads that are left."""
    try:
        yield
    finally:
        close()


_init = pl.Trainer.__init__


@functools.wraps(_init)
def _with_strategy(self: Any, *given: Any, **options: Any) -> None:
    alone = options.get("accelerator", "auto") in ("auto", "cpu") and options.get("devices", "auto") in ("auto", 1, "1")
    plain = options.get("strategy", "auto") == "auto" and options.get("precision") in (None, 32, "32", "32-true")
    if not given and alone and plain and not options.get("plugins"):
        options["strategy"] = Strategy(store(), checkpoints=os.environ["TIERED_CHECKPOINTS"])
    _init(self, *given, **options)


pl.Trainer.__init__ = _with_strategy
