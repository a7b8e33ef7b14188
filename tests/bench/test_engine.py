"""``bench/engine.py`` over its null backend: what is counted, and that checksums are compared."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import engine
from bench.engine import WAYS, Bench, checksum_rate
from tiered import CorruptionError

KIB = 1 << 10


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(str(tmp_path), 256 * KIB, pool=8 << 20)
    yield found
    found.close()


@pytest.mark.parametrize("way", WAYS)
def test_each_tensor_of_a_round_moves(bench: Bench, way: str) -> None:
    links = bench.store.statistics().links[-1]
    found = bench.round(way, 2 * bench.count)
    moved = bench.store.statistics().links[-1]
    if way == "write":  # what is left in memory is written later
        assert moved.down.transfers - links.down.transfers >= bench.count
    else:
        assert moved.up.bytes - links.up.bytes >= 2 * bench.count * bench.nbytes
    assert found["bytes"] == pytest.approx(found["tensors"] * bench.nbytes)


def test_bytes_that_no_read_brought_have_a_wrong_checksum(bench: Bench) -> None:
    bench.store.put("other", torch.zeros(bench.nbytes, dtype=torch.uint8))
    with pytest.raises(CorruptionError):  # of the first that comes to the place where those were
        bench.round("read", 2 * bench.count)


def test_tensors_that_are_there_already_are_no_measurement(bench: Bench) -> None:
    bench.round("read", 8)
    bench._at = 0
    with pytest.raises(RuntimeError, match="0 moved"):
        bench.round("read", 8)


def test_the_rate_of_all_cores_is_counted_over_whole_pieces() -> None:
    assert checksum_rate((ctypes.c_char * (16 << 20))(), seconds=0.01) > 0


def test_figures_of_all_rounds_are_written(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    small = ["--size", "256KiB", "--pool", "8MiB", "--dir", str(tmp_path)]
    assert engine.main([*small, "--way", "read", "--rounds", "2", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["size"], row["way"], len(row["tensors"])) == (256 * KIB, "read", 2)
    for share, moved, cores in zip(row["share"], row["bytes"], row["cores"], strict=True):
        assert share == pytest.approx(moved / cores)
