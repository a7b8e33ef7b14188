"""Shim for transformers' suite: a ``Trainer`` pages its model when it is made; an optimizer of torch's that it is given becomes
one of ``tiered.zero``. Where ``TIERED_CHECKPOINTS`` is "commits", it commits where it would copy a checkpoint."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import transformers
from tiered_places import is_paged, moved, store

from tiered.integrations.transformers.training import CommitCheckpoints

_COMMITS = os.environ["TIERED_CHECKPOINTS"] == "commits"
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
        if not _COMMITS and optimizer is None and found.get("args") is not None:
            made = CommitCheckpoints.get_optimizer_cls_and_kwargs(found["args"], model)
            found.setdefault("optimizer_cls_and_kwargs", made)
    _init(**found)
    if model is not None and is_paged(self.model) and _COMMITS:
        CommitCheckpoints.adopt(self)


transformers.Trainer.__init__ = _paged
