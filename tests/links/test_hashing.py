"""Checksums on several threads: the same as on one, in order, and on one where the system gives no more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiered.links.hashing import LARGE, Hashing


def digest(piece: bytes) -> bytes:
    return xxhash.xxh3_128_digest(piece)


@given(st.lists(st.sampled_from([1, LARGE - 1, LARGE, LARGE + 4096, 4 * LARGE]), max_size=9), st.integers(1, 4))
def test_the_same_as_on_one_thread(sizes: list[int], threads: int) -> None:
    pieces, hashing = [bytes([number]) * size for number, size in enumerate(sizes)], Hashing(threads)
    try:
        for _ in range(2):
            assert hashing.digests(pieces, digest, sizes) == list(map(digest, pieces))
    finally:
        hashing.close()
        hashing.close()


def test_large_pieces_are_hashed_at_the_same_time() -> None:
    hashing, both = Hashing(2), threading.Barrier(2, timeout=60)

    def met(piece: bytes) -> bytes:
        both.wait()
        return digest(piece)

    pieces = [b"a" * LARGE, b"b" * LARGE]
    assert hashing.digests(pieces, met, [LARGE, LARGE]) == list(map(digest, pieces))  # else the barrier breaks
    hashing.close()


def test_small_pieces_stay_in_the_callers_thread() -> None:
    hashing, threads = Hashing(4), set()

    def seen(piece: bytes) -> bytes:
        threads.add(threading.get_ident())
        return digest(piece)

    hashing.digests([b"a", b"b", b"c" * LARGE], seen, [1, 1, LARGE])
    assert threads == {threading.get_ident()}
    assert hashing._pool is None


def test_a_system_without_a_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    hashing, pieces = Hashing(3), [b"a" * LARGE, b"b" * LARGE]
    assert hashing.digests(pieces, digest, [LARGE, LARGE]) == list(map(digest, pieces))
    assert hashing.threads == 1
    hashing.close()


def test_an_error_of_a_piece_is_raised() -> None:
    def fails(piece: bytes) -> bytes:
        if piece[:1] == b"b":
            raise ValueError("b")
        return digest(piece)

    hashing = Hashing(2)
    with pytest.raises(ValueError, match="b"):
        hashing.digests([b"a" * LARGE, b"b" * LARGE], fails, [LARGE, LARGE])
    hashing.close()
