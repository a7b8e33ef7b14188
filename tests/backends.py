"""The I/O backends that tests run on. They are those that ``tiered.io`` ships: whoever lists another one there has it tried."""

from __future__ import annotations

from typing import get_args

import pytest

from tiered.io.backends import BACKENDS, unavailable
from tiered.types import BackendName

__all__ = ["EACH", "HERE", "NATIVE", "NATIVE_HERE", "or_skip"]

EACH: list[BackendName] = [name for name in get_args(BackendName) if name in BACKENDS]
NATIVE: list[BackendName] = [name for name in EACH if name != "aiofiles"]
"""Without aiofiles, whose threads make the calls that posix makes."""
_WHY_NOT = unavailable()
HERE: list[BackendName] = [name for name in EACH if _WHY_NOT[name] is None]
NATIVE_HERE: list[BackendName] = [name for name in NATIVE if name in HERE]


def or_skip(backend: BackendName) -> BackendName:
    """Return a backend that works here; skip the test where it does not."""
    if _WHY_NOT[backend] is not None:
        pytest.skip(f"no {backend} here: {_WHY_NOT[backend]}")
    return backend
