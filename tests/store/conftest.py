"""A watchdog, and stores of 1 MiB over each native backend."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.chains import MIB
from tests.store.opened import BACKENDS, WITHOUT, Backend, Open
from tiered import TieredStore


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """A deadlock fails with every thread's traceback instead of hanging."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["libaio", "posix"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param not in BACKENDS:
        pytest.skip(f"no libaio here: {WITHOUT}")
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def open_store(folder: Path, backend: Backend) -> Iterator[Open]:
    opened: list[TieredStore] = []

    def opening(**options: Any) -> TieredStore:
        opened.append(TieredStore.open(folder, **{"dram": MIB, "backend": backend, **options}))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Open) -> TieredStore:
    return open_store()
