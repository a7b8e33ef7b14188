"""What the shims of this folder share: one store for each test, models that are moved into it, and optimizers for these."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import torch
from tiered_outcomes import engaged
from torch import nn

from tiered import TieredStore, UncommittedWarning, zero
from tiered.integrations.deepspeed import optimizers

_stores: dict[int, tuple[str, TieredStore]] = {}
"""By process, because some suites fork: the test that a store is for, and the store."""


def store(*, anew: bool = False) -> TieredStore:
    """Return the store of the present test. ``anew``: closed and opened again, as in a new process."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    kept = _stores.get(os.getpid())
    folder = None
    if kept is not None and (anew or kept[0] != test or kept[1]._closed):
        folder = kept[1].folder if kept[0] == test else None
        with warnings.catch_warnings():  # of what a test before this one did not commit; this one may count warnings
            warnings.simplefilter("ignore", UncommittedWarning)
            kept[1].close()
        kept = None
    if kept is None:
        where = folder or os.path.join(tempfile.mkdtemp(prefix="tiered-"), "store")
        kept = _stores[os.getpid()] = (test, TieredStore.open(where, dram="64MiB", keep=100))
    return kept[1]


def close() -> None:
    """Close the store of this process, at the end of a test."""
    kept = _stores.pop(os.getpid(), None)
    if kept is not None:
        kept[1].close()


def is_paged(model: nn.Module) -> bool:
    return any(hasattr(parameter, "_tiered") for parameter in model.parameters())


def moved(model: nn.Module, into: TieredStore, given: list[Any], **options: Any) -> list[Any]:
    """Page ``model``, and return ``given`` with an optimizer of ``tiered.zero`` for each of torch's that has its parameters,
    and schedulers that change these."""
    its = {id(parameter) for parameter in model.parameters()}
    groups = {
        id(one): optimizers.groups_of(model, one.param_groups)
        for one in given
        if isinstance(one, torch.optim.Optimizer)
        and not isinstance(one, zero.Optimizer)
        and all(id(parameter) in its for group in one.param_groups for parameter in group["params"])
    }
    zero.page(model, into, **options)
    engaged()
    made = {id(one): optimizers.converted(one, groups[id(one)], model) for one in given if id(one) in groups}
    for one in given:
        before = getattr(one, "optimizer", None)
        if isinstance(one, torch.optim.lr_scheduler.LRScheduler) and id(before) in made:
            follow(one, made[id(before)])
    return [made.get(id(one), one) for one in given]


def follow(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Have ``scheduler`` set the rates of ``optimizer``."""
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # has torch see the steps of this optimizer
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.optimizer = optimizer
