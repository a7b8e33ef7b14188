"""What the tests of ``tiered.zero`` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiered import TieredStore


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TieredStore]:
    """A store with a disk, and as much memory as the test's module says in ``DRAM``, else 1 MiB."""
    with TieredStore.open(tmp_path / "store", dram=getattr(request.module, "DRAM", "1MiB")) as opened:
        yield opened
        opened.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small for more, and threads that wait for each other on a busy machine cost minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
