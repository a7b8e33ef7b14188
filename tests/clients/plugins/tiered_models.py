"""Shim for the tests that all models of transformers share: a model is paged when its test first moves it to a device, or has
it train or evaluate, and then trained by ``zero.SGD`` in place of torch's."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from tiered_outcomes import engaged
from tiered_places import close, is_paged, store

from tiered import zero

_numbers = itertools.count()


def _page(model: Any) -> None:
    parameters = list(model.parameters())
    if parameters and not is_paged(model) and not any(parameter.is_meta for parameter in parameters):
        zero.page(model, store(), name=f"model{next(_numbers)}")
        engaged()


def _paging(method: Any) -> Any:
    @functools.wraps(method)
    def paged(self: Any, *given: Any, **options: Any) -> Any:
        _page(self)
        return method(self, *given, **options)

    return paged


def _sgd(given: Any, *settings: Any, **options: Any) -> Any:
    parameters = list(given)
    paged = any(hasattr(one, "_tiered") for one in parameters)
    return (zero.SGD if paged else _torch_sgd)(parameters, *settings, **options)


_torch_sgd = torch.optim.SGD
torch.optim.SGD = _sgd  # type: ignore[misc, assignment]
for _name in ("to", "train", "eval"):
    setattr(transformers.PreTrainedModel, _name, _paging(getattr(transformers.PreTrainedModel, _name)))


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    close()
