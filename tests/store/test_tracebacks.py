"""Errors are raised from the public call: a traceback shows the caller's line, and no frames of the engine. What keeps a
traceback keeps no memory of a store."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from tiered import LRU, CapacityError, KeyNotFound, MisuseError, TieredError, TieredStore
from tiered.store.lease import LeaseOfOne


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


class Kept:
    """Whoever keeps an exception after it was handled."""

    value: object
    earlier = False
    """Whether the comprehension is struck, and not the function after it."""


def as_error(error: BaseException) -> None:
    Kept.value = error


def as_traceback(error: BaseException) -> None:
    Kept.value = error.__traceback__


def by_an_interpreter(error: BaseException) -> None:
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def by_a_debugger(error: BaseException) -> None:
    """Which has read the variables of each frame, as ``pdb.post_mortem`` does."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    Kept.value = frames, [frame.f_locals for frame in frames[-2:]]


def as_context(error: BaseException) -> None:
    try:
        try:
            raise error
        finally:
            raise KeyError("another")
    except KeyError as other:
        Kept.value = other


def as_cause(error: BaseException) -> None:
    try:
        raise RuntimeError("because of") from error
    except RuntimeError as other:
        Kept.value = other


def within_a_group(error: BaseException) -> None:
    Kept.value = getattr(builtins, "BaseExceptionGroup", lambda _, errors: errors)("several", [error])


def in_a_log(error: BaseException) -> None:
    info = (type(error), error, error.__traceback__)
    Kept.value = logging.LogRecord("name", logging.ERROR, __file__, 1, "message", (), info)


KEEPERS = [as_error, as_traceback, by_an_interpreter, by_a_debugger, as_context, as_cause, within_a_group, in_a_log]


@pytest.fixture
def deadline() -> float:
    return 20.0


@pytest.fixture
def store(tmp_path: Path, deadline: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredStore]:
    """Two tensors, of which one is in memory at a time."""
    monkeypatch.setattr("tiered.engine.engine.SOON", 0.02)
    with TieredStore.open(tmp_path / "store", dram="1MiB", deadline=deadline) as store:
        for key in "ab":
            store.put(key, torch.full((150_000,), float(ord(key))))
        store.commit()
        yield store
        Kept.value = sys.last_type = sys.last_value = sys.last_traceback = None  # type: ignore[assignment]


def compute(tensor: torch.Tensor, more: int = 2) -> None:
    part = tensor[more:]
    if more:
        compute(part, more - 1)
    {at: interrupt(part[at:]) for at in range(1)}  # before Python 3.12 a function, which is in its frame, and has ``part``
    list(map(lambda at: interrupt(part[at:]), range(1)))  # noqa: C417 - and a function in every version


def interrupt(_: torch.Tensor) -> None:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    if frame.f_back.f_code.co_name == "<lambda>" or Kept.earlier:
        raise KeyboardInterrupt


def struck(store: TieredStore, keep: Callable[[BaseException], None]) -> None:
    try:
        with store.lease("a") as tensor:
            compute(tensor)
    except KeyboardInterrupt as error:
        del tensor  # the caller's own, which still runs
        keep(error)


@pytest.mark.parametrize("keep", KEEPERS)
def test_what_a_kept_traceback_refers_to_is_free_after_rollback(
    store: TieredStore, keep: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for earlier in (False, True):
        monkeypatch.setattr(Kept, "earlier", earlier)
        struck(store, keep)
        assert store.statistics().tiers[0].held == 1
        store.rollback()
        assert store.statistics().tiers[0].held == 0


def test_what_a_function_shares_with_a_call_that_runs_stays(store: TieredStore) -> None:
    with store.lease("a") as tensor:
        pass
    other = tensor[1:]

    def inner() -> float:
        return tensor[0].item() / other.numel() / 0

    def again() -> float:
        return other[0].item()

    try:
        inner()
    except ZeroDivisionError as error:
        Kept.value = error
    del inner  # which only the traceback has from here on
    store.rollback()
    assert tensor[0] == ord("a") == again()
    assert other.numel() == 149_999
    tensor = other = again = None  # type: ignore[assignment]
    store.rollback()
    assert store.statistics().tiers[0].held == 0


@pytest.mark.parametrize("keep", KEEPERS)
def test_what_a_kept_traceback_refers_to_makes_room(store: TieredStore, keep: Callable[..., None]) -> None:
    struck(store, keep)
    with store.lease("b") as tensor:
        assert tensor[0] == ord("b")
    del tensor
    struck(store, keep)
    assert asyncio.run(store.fetch("b"))[0] == ord("b")
    assert store.get("a")[0] == ord("a")


@pytest.mark.parametrize("deadline", [0.1])
def test_what_a_caller_refers_to_stays(store: TieredStore) -> None:
    """A variable of a function that runs, or of a generator that goes on after an exception within it."""

    def generator() -> Iterator[float]:
        with store.lease("a") as tensor:
            pass
        try:
            compute(tensor)
        except KeyboardInterrupt as error:
            as_error(error)
        yield 0.0
        yield float(tensor[0])

    running = generator()
    next(running)
    try:
        compute(torch.zeros(3))
    except KeyboardInterrupt as error:
        as_context(error)
        store.rollback()
        with pytest.raises(CapacityError, match=r"'a'.*still referenced after its lease"):
            store.get("b")
    assert next(running) == ord("a")


def test_other_tracebacks_keep_their_variables(store: TieredStore) -> None:
    def fails() -> None:
        seen = "a value that a debugger shows"
        raise ValueError(seen)

    try:
        fails()
    except ValueError as error:
        other = error
    struck(store, as_error)
    store.rollback()
    assert [frame.f_locals.get("seen") for frame, _ in traceback.walk_tb(other.__traceback__)][1]
    assert not [frame.f_locals.get("part") for frame, _ in traceback.walk_tb(Kept.value.__traceback__)][1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", ["commit", "rollback", "lease"])
def test_a_lease_whose_end_was_struck_ends_whoever_keeps_the_traceback(store: TieredStore, call: str) -> None:
    def at_its_end(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is LeaseOfOne.__exit__.__code__:
            raise KeyboardInterrupt

    try:
        with store.lease("a", access="write") as tensor:
            before = sys.gettrace()
            sys.settrace(at_its_end)
    except KeyboardInterrupt as error:
        as_error(error)
    finally:
        sys.settrace(before)
    del tensor
    if call == "lease":
        with store.lease("a", access="write"):
            pass
    else:
        getattr(store, call)()
