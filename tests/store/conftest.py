"""A watchdog, and stores of 1 MiB over each native backend."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.backends import NATIVE, or_skip
from tests.store.chains import MIB
from tests.store.opened import Open
from tiered import TieredStore
from tiered.types import BackendName


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """A deadlock fails with every thread's traceback instead of hanging."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=NATIVE)
def backend(request: pytest.FixtureRequest) -> BackendName:
    return or_skip(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@contextmanager
def opening(folder: Path, **usual: Any) -> Iterator[Open]:
    """Open stores with options that are ``usual``; close all of them."""
    opened: list[TieredStore] = []

    def one(**options: Any) -> TieredStore:
        opened.append(TieredStore.open(folder, **{"dram": MIB, **usual, **options}))
        return opened[-1]

    yield one
    for store in opened:
        store.close()


@pytest.fixture
def open_store(folder: Path, backend: BackendName) -> Iterator[Open]:
    with opening(folder, backend=backend) as found:
        yield found


@pytest.fixture(params=[2, 3])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Folders for the data files of a store on several drives."""
    return [tmp_path / name for name in "abc"[: request.param]]


@pytest.fixture
def open_on_drives(folder: Path, paths: list[Path]) -> Iterator[Open]:
    with opening(folder, paths=paths) as found:
        yield found


@pytest.fixture
def store(open_store: Open) -> TieredStore:
    return open_store()
