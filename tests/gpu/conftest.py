from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device import MIB, NAME, Device
from tiered import TieredStore

Open = Callable[..., TieredStore]


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """A deadlock fails with every thread's traceback instead of hanging."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def gpu() -> Iterator[Device]:
    device = Device()
    yield device
    device.finish()


@pytest.fixture(params=["disk", "no disk"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Both chains: HBM-DRAM-NVMe and HBM-DRAM."""
    return tmp_path / "state" if request.param == "disk" else None


@pytest.fixture
def open_store() -> Iterator[Open]:
    """Without a disk DRAM is the bottom, and has to hold everything: it is larger then."""
    opened: list[TieredStore] = []

    def opening(path: Path | None, **options: Any) -> TieredStore:
        dram = MIB if path is not None else 8 * MIB
        opened.append(TieredStore.open(path, **{"dram": dram, "hbm": MIB, "device": NAME, **options}))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()
