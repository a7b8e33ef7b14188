"""The drive without a store: each block once, failed blocks are no result, files that are read stay."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import ManualBackend
from tiered import TieredError
from tiered.measuring import drive, fio
from tiered.measuring.drive import Drive, Point
from tiered.types import IORequest

KIB, MIB = 1 << 10, 1 << 20


class Recording(ManualBackend):
    """Writes down what was asked, and completes it at once, in any order."""

    asked: list[tuple[str, int, int]]
    depth = 4
    fail_at = -1
    most = 0

    def reap(self, min_events: int, timeout: float) -> Any:
        self.most = max(self.most, len(self.pending))
        for request in random.Random(1).sample(list(self.pending.values()), len(self.pending)):
            self.asked.append((request.operation.value, request.offset, request.nbytes))
            self.complete(request.tag, -errno.EIO if request.offset == self.fail_at else None)
        return super().reap(min_events, timeout)

    def _move(self, request: IORequest, nbytes: int) -> int:
        return nbytes


class TestDrive:
    @pytest.fixture
    def bed(self, tmp_path: Path) -> Iterator[Drive]:
        made = Drive(tmp_path / "file", MIB, MIB)
        made.prepare()
        yield made
        made.close()

    @pytest.fixture
    def recording(self, monkeypatch: pytest.MonkeyPatch) -> Recording:
        backend = Recording()
        backend.asked = []
        monkeypatch.setattr(drive, "open_backend", lambda name, depth: backend)
        return backend

    @pytest.mark.parametrize("order", ["sequential", "random"])
    @pytest.mark.parametrize("mode", ["read", "write", "mixed"])
    def test_each_block_once(self, bed: Drive, recording: Recording, mode: fio.Mode, order: Any) -> None:
        result = bed.run(Point(mode, order, 64 * KIB, 4), "posix", 10.0)
        assert result.bytes == MIB
        assert len(result.latencies) == 16
        assert sorted(offset for _, offset, _ in recording.asked) == list(range(0, MIB, 64 * KIB))
        assert recording.most == 4
        ways = [way for way, _, _ in recording.asked]
        assert ways.count("write") == {"read": 0, "write": 16, "mixed": 8}[mode]
        first = {offset for _, offset, _ in recording.asked[:4]}
        assert (first == {0, 64 * KIB, 128 * KIB, 192 * KIB}) == (order == "sequential")

    def test_no_block_begins_when_the_time_is_up(self, bed: Drive, recording: Recording) -> None:
        assert bed.run(Point("read", "sequential", 64 * KIB, 4), "posix", 0.0).bytes == 0
        assert recording.asked == []

    def test_a_failed_block_is_no_result(self, bed: Drive, recording: Recording) -> None:
        recording.fail_at = 128 * KIB
        with pytest.raises(TieredError, match=r"file: cannot read at byte 131072: Input/output error"):
            bed.run(Point("read", "sequential", 64 * KIB, 4), "posix", 10.0)

    def test_a_short_block_is_no_result(self, bed: Drive) -> None:
        os.truncate(bed.path, MIB - 64 * KIB)
        with pytest.raises(TieredError, match=r"file: cannot read at byte 983040: 0 of 65536 bytes"):
            bed.run(Point("read", "sequential", 64 * KIB, 4), "posix", 10.0)

    def test_checksums_are_of_each_block(self, bed: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        monkeypatch.setattr(drive, "digest", lambda uuid, number, generation, offset, piece: seen.append(offset))
        for mode in "read", "write", "mixed":
            bed.run(Point(mode, "random", 64 * KIB, 4, "on"), "posix", 10.0)  # type: ignore[arg-type]
            assert sorted(seen) == list(range(0, MIB, 64 * KIB))
            seen.clear()
        bed.run(Point("mixed", "random", 64 * KIB, 4, "off"), "posix", 10.0)
        assert not seen
