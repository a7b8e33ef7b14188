"""Shim for accelerate's suite: ``prepare`` pages models that are not paged, with optimizers of ``tiered.zero``, and registers
the accelerator. Models that a test of hooks makes are paged as soon as they are made."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
from tiered_places import is_paged, moved, store
from torch import nn

from tiered.integrations.accelerate import register

_prepare = accelerate.Accelerator.prepare


def _into_store(self: Any, *given: Any, **options: Any) -> Any:
    """Page before ``prepare``: for the first model of a test, or of a further accelerator, the store is opened anew."""
    arguments = list(given)
    for model in given:
        if isinstance(model, nn.Module) and any(True for _ in model.parameters()) and not is_paged(model):
            place = store(anew=getattr(self, "_tiered_store", None) is None)
            arguments = moved(model, place, arguments, existing="overwrite")
            register(self, place)
    return _prepare(self, *arguments, **options)


accelerate.Accelerator.prepare = _into_store


@pytest.fixture(autouse=True)
def _models_of_hooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page what tests/test_hooks.py makes of its class ``ModelForTest``."""
    kind = getattr(request.module, "ModelForTest", None)
    if kind is None or not request.module.__name__.endswith("test_hooks"):
        return
    made = []

    def make(*given: Any, **options: Any) -> Any:
        model = kind(*given, **options)
        moved(model, store(), [], name=f"model{len(made)}")
        made.append(model)
        return model

    monkeypatch.setattr(request.module, "ModelForTest", make)
