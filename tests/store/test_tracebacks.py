"""Errors are raised from the public call: a traceback shows the caller's line, and no frames of the engine."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiered import LRU, KeyNotFound, MisuseError, TieredError, TieredStore


def held(store: TieredStore) -> None:
    with store.lease("a", access="write"), store.lease("a"):
        pass


def missing(store: TieredStore) -> None:
    with store.lease("b"):
        pass


CALLS: dict[str, Callable[[TieredStore], object]] = {
    "get": lambda store: store.get("b"),
    "lease": missing,
    "lease of many": lambda store: store.lease(["a", "b"]).__enter__(),
    "a second lease": held,
    "put": lambda store: store.put("large", torch.zeros(2 << 20)),
    "delete": lambda store: store.delete("b"),
    "spec": lambda store: store.spec("b"),
    "commit": lambda store: store.commit({"a": object()}),
    "rollback": lambda store: store.rollback(3),
    "follow": lambda store: store.follow([1]),  # type: ignore[list-item]
    "fetch": lambda store: asyncio.run(store.fetch("b")),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_last_frame_is_that_of_a_public_call(tmp_path: Path, name: str) -> None:
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        store.put("a", torch.zeros(10))
        with pytest.raises(TieredError) as caught:
            CALLS[name](store)
    frames = traceback.extract_tb(caught.value.__traceback__)
    internal = [frame.filename for frame in frames if "/tiered/engine/" in frame.filename or "/format/" in frame.filename]
    assert internal == []


def test_the_error_that_the_caller_was_handling_stays(tmp_path: Path) -> None:
    def clean_up(store: TieredStore) -> None:
        try:
            raise ZeroDivisionError
        finally:
            store.get("b")

    with TieredStore.open(None, dram="4MiB") as store, pytest.raises(TieredError) as caught:
        clean_up(store)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert not caught.value.__suppress_context__


def test_frames_of_the_callers_own_functions_stay(tmp_path: Path) -> None:
    def policy() -> LRU:
        raise MisuseError("no policy")

    with pytest.raises(MisuseError) as caught:
        TieredStore.open(None, dram="4MiB", eviction=policy)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "policy"


def test_a_missing_tensor_is_said_before_a_conflict() -> None:
    with TieredStore.open(None, dram="4MiB") as store:
        store.put("a", torch.zeros(10))
        with store.lease("a", access="write"), pytest.raises(KeyNotFound), store.lease(["a", "b"]):
            pass


def test_opening(tmp_path: Path) -> None:
    with pytest.raises(TieredError) as caught:
        TieredStore.open(tmp_path / "store", dram="1KiB")
    assert not [frame for frame in traceback.extract_tb(caught.value.__traceback__) if "opening" in frame.filename]
