"""Shim for transformers' suite: a ``Trainer`` pages its model when it is made, and commits where it would copy a checkpoint
(``CommitCheckpoints``); an optimizer of torch's that it is given becomes one of ``tiered.zero``."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from tiered_places import is_paged, moved, store

from tiered.integrations.transformers.training import CommitCheckpoints

_init = transformers.Trainer.__init__


@functools.wraps(_init)
def _paged(self: Any, *given: Any, **options: Any) -> None:
    found = inspect.signature(_init).bind(self, *given, **options).arguments
    model = found.get("model")
    if model is not None and any(True for _ in model.parameters()):
        optimizer, scheduler = found.get("optimizers", (None, None))
        if not is_paged(model):
            optimizer, scheduler = moved(model, store(anew=True), [optimizer, scheduler], existing="overwrite")
            found["optimizers"] = (optimizer, scheduler)
    _init(**found)
    if model is not None and is_paged(self.model):
        CommitCheckpoints.adopt(self)


transformers.Trainer.__init__ = _paged
