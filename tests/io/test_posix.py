from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.io_backend import IOBackendContract
from tiered.errors import MisuseError
from tiered.io.posix import PosixBackend, PosixConfig


class TestPosix(IOBackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[PosixBackend]:
        backend = PosixBackend(PosixConfig(depth=8))
        yield backend
        backend.close()


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"posix: depth is .* a whole number from 1 on, not 0"):
        PosixConfig(depth=0)
