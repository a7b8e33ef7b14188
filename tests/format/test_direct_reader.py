"""Ranges of a file are read as they are, wherever they begin and end, cached or not, and nothing writes to the caller's memory
after an exception."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered.errors import SafetensorsError
from tiered.format import direct_reader
from tiered.format.direct_reader import PIECE, DirectReader
from tiered.format.safetensors import DIRECT_BYTES, WeightFiles, entry_of
from tiered.format.safetensors_writer import Shards
from tiered.types import TensorSpec

SIZE = 3 * PIECE + 70_001


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


def uncached(path: Path) -> int:
    """Open a file, whose pages leave the page cache."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


@pytest.mark.parametrize("where", ["on disk", "written just now"])
def test_any_range(file: Path, where: str) -> None:
    source, data = random.Random(1), file.read_bytes()
    fd = uncached(file)
    if where == "written just now":
        data = data[:PIECE] + bytes(PIECE) + data[2 * PIECE :]
        os.pwrite(fd, bytes(PIECE), PIECE)
    reader = DirectReader(str(file), fd)
    if not reader.direct:
        pytest.skip("this filesystem has no direct I/O")
    places = [(0, SIZE), (SIZE - 1, 1), (PIECE - 1, 2), (1, SIZE - 1), (4096, PIECE)]
    places += [(at := source.randrange(SIZE), source.randrange(1, SIZE - at + 1)) for _ in range(40)]
    for at, length in places:
        into = bytearray(length + 20)
        assert reader.read(at, memoryview(into)[10 : 10 + length]) == length
        assert into[10 : 10 + length] == data[at : at + length]
        assert into[:10] == into[-10:] == bytes(10)
    reader.close()
    reader.close()
    os.close(fd)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    rows = 3 * DIRECT_BYTES // 4
    spec = TensorSpec("float32", (rows,), 4)
    Shards(tmp_path, [entry_of("weight", spec)], "1GB", "refuse").write(iter([memoryview(bytes(4 * rows))]))
    path = tmp_path / "model.safetensors"
    with WeightFiles(path) as files:
        os.close(uncached(path))
        os.truncate(path, 2 * DIRECT_BYTES)
        with pytest.raises(SafetensorsError, match="became shorter"):
            files.read("weight", 0, memoryview(bytearray(4 * rows)))


def test_an_exception_leaves_nobody_who_writes_to_the_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even threads that still read. The next read is right."""
    fd = uncached(file)
    reader = DirectReader(str(file), fd)
    if not reader.direct:
        pytest.skip("this filesystem has no direct I/O")
    copy, copies = direct_reader._copied, []

    def interrupted(*given: object) -> object:
        copies.append(given)
        if len(copies) == 2:
            raise KeyboardInterrupt
        return copy(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(direct_reader, "_copied", interrupted)
    into = bytearray(SIZE)
    threads = reader._threads
    with pytest.raises(KeyboardInterrupt):
        reader.read(0, memoryview(into))
    assert threads is reader._threads is None
    before = bytes(into)
    assert before[PIECE:] == bytes(SIZE - PIECE)
    again = bytearray(SIZE)
    assert reader.read(0, memoryview(again)) == SIZE
    assert again == file.read_bytes()
    assert into == before
    reader.close()
    os.close(fd)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)), max_size=5),
    asked=st.lists(st.one_of(st.integers(0, 4), st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE))), max_size=8),
    size=st.integers(1 << 16, SIZE),
)
def test_what_is_expected_changes_no_byte(
    file: Path, ranges: list[tuple[int, int]], asked: list[int | tuple[int, int]], size: int
) -> None:
    """Ranges that were told before, others, and parts of them, in any order; past the end of the file, too."""
    data = file.read_bytes()
    fd = os.open(file, os.O_RDWR)
    reader = DirectReader(str(file), fd)
    if not reader.direct:
        pytest.skip("this filesystem has no direct I/O")
    reader.expect(ranges)
    for one in asked:
        at, length = one if isinstance(one, tuple) else ranges[one % len(ranges)] if ranges else (0, SIZE)
        while length:
            into = bytearray(min(size, length))
            count = reader.read(at, memoryview(into))
            assert count == max(0, min(len(into), SIZE - at))
            assert into[:count] == data[at : at + count]
            assert not any(into[count:])
            if count < len(into):
                break
            at, length = at + count, length - count
    reader.close()
    os.close(fd)


def test_it_reads_on_where_the_next_range_is_known(file: Path) -> None:
    """Beyond the range that is asked for; then from another place, whose range is known as well."""
    fd = uncached(file)
    reader = DirectReader(str(file), fd)
    if not reader.direct:
        pytest.skip("this filesystem has no direct I/O")
    half = PIECE // 2
    expected = [(0, half), (2 * PIECE, half), (PIECE, half), (SIZE - 1, 1)]
    reader.expect(expected)
    reader.read(0, memoryview(bytearray(half)))
    assert [(piece.begin, piece.end - piece.begin) for piece in reader._ahead] == expected[1:]
    reader.read(PIECE, memoryview(bytearray(half)))
    assert [(piece.begin, piece.end - piece.begin) for piece in reader._ahead] == expected[3:]
    reader.close()
    os.close(fd)
