"""Parameters of a test of which every run takes a few, and the long one all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["quick"]


def quick(values: Iterable[Any], in_every_run: Collection[Any]) -> list[Any]:
    """Return ``values`` as parameters; those that are not ``in_every_run`` run with ``make soak`` only."""
    values = list(values)
    assert all(value in values for value in in_every_run), f"of {list(in_every_run)} some are not among {values}"
    return [
        value
        if value in in_every_run
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.soak)
        for value in values
    ]
