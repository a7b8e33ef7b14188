"""Shim for peft's suite: the models that its tests put adapters on are paged."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from tiered_outcomes import engaged
from tiered_places import close, store

from tiered import zero

_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have each module's stand-in for transformers' classes give paged models."""
    for module in {getattr(item, "module", None) for item in items}:
        wrapper = getattr(module, "MockTransformerWrapper", None)
        if wrapper is not None:
            wrapper.from_pretrained = functools.partial(_paged, wrapper.from_pretrained)


def _paged(made: Any, *given: Any, **options: Any) -> Any:
    model = made(*given, **options)
    zero.page(model, store(), name=f"base{next(_numbers)}")
    engaged()
    return model


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    close()
