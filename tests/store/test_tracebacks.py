"""Errors are raised from the public call: a traceback shows the caller's line, and no frames of the engine."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tiered import LRU, CapacityError, Eviction, KeyNotFound, MisuseError, TieredError, TieredStore


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
        TieredStore.open(None, dram="4MiB", eviction=Eviction(policy))
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


# -- exceptions that are kept ------------------------------------------------------------------------------------------


def shown(error: BaseException) -> None:
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def seen_by_a_debugger(error: BaseException) -> None:
    """Which has read the variables of each frame, as ``pdb.post_mortem`` does."""
    shown(error)
    seen = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    sys.last_value.seen = seen  # type: ignore[union-attr]


def as_context(error: BaseException) -> None:
    try:
        try:
            raise error
        finally:
            raise KeyError("another")
    except KeyError as other:
        shown(other)


def as_cause(error: BaseException) -> None:
    try:
        raise RuntimeError("because of") from error
    except RuntimeError as other:
        shown(other)


def within_a_group(error: BaseException) -> None:
    group = getattr(builtins, "BaseExceptionGroup", None)
    shown(error if group is None else group("several", [error]))


@pytest.fixture
def one(tmp_path: Path) -> Iterator[TieredStore]:
    """Two tensors, of which one is in memory at a time."""
    with TieredStore.open(tmp_path / "store", dram="1MiB", eviction=Eviction(deadline=0.1)) as store:
        for key in "ab":
            store.put(key, torch.full((150_000,), float(ord(key))))
        store.commit()
        yield store
        sys.last_type = sys.last_value = sys.last_traceback = None  # type: ignore[assignment]


def compute(tensor: torch.Tensor, within: str, more: int = 2) -> None:
    part = tensor[more:]
    if more:
        compute(part, within, more - 1)
    if within == "comprehension":
        {at: interrupt(part[at:]) for at in range(1)}  # before Python 3.12 a function, which is in its frame, and has ``part``
    list(map(lambda at: interrupt(part[at:]), range(1)))  # noqa: C417 - and a function in every version


def interrupt(_: torch.Tensor) -> None:
    raise KeyboardInterrupt


def struck(store: TieredStore, keep: Callable[[BaseException], None], within: str = "function") -> None:
    try:
        with store.lease("a") as tensor:
            compute(tensor, within)
    except KeyboardInterrupt as error:
        del tensor  # the caller's own, which still runs
        keep(error)


@pytest.mark.parametrize("within", ["comprehension", "function"])
@pytest.mark.parametrize("keep", [shown, seen_by_a_debugger, as_context, as_cause, within_a_group])
def test_what_an_exception_that_was_shown_refers_to_is_free_after_rollback(
    one: TieredStore, keep: Callable[[BaseException], None], within: str
) -> None:
    struck(one, keep, within)
    assert one.statistics().tiers[0].held == 1
    with pytest.raises(CapacityError, match=r"'a'.*still referenced after its lease"):
        one.get("b")
    one.rollback()
    assert one.statistics().tiers[0].held == 0
    assert one.get("b")[0] == ord("b")


def test_what_an_exception_refers_to_is_free_where_it_is_handled(one: TieredStore) -> None:
    def again(error: BaseException) -> None:
        one.rollback()
        assert one.get("b")[0] == ord("b")

    struck(one, again)


def test_what_a_function_shares_with_a_call_that_runs_stays(one: TieredStore) -> None:
    with one.lease("a") as tensor:
        pass
    other = tensor[1:]

    def inner() -> float:
        return tensor[0].item() / other.numel() / 0

    def again() -> float:
        return other[0].item()

    try:
        inner()
    except ZeroDivisionError as error:
        shown(error)
    del inner  # which only the traceback has from here on
    one.rollback()
    assert tensor[0] == ord("a") == again()
    assert other.numel() == 149_999


def test_what_goes_on_keeps_its_variables(one: TieredStore) -> None:
    """A function that runs, and a generator that handled an exception within it."""

    def generator() -> Iterator[float]:
        with one.lease("a") as tensor:
            pass
        try:
            compute(tensor, "function")
        except KeyboardInterrupt as error:
            shown(error)
        yield 0.0
        yield float(tensor[0])

    running, mine = generator(), "a variable of a function that runs"
    next(running)
    assert any(frame.f_code.co_flags & inspect.CO_GENERATOR for frame, _ in traceback.walk_tb(sys.last_traceback))
    try:
        compute(torch.zeros(3), "function")
    except KeyboardInterrupt as error:
        as_context(error)
        one.rollback()
    assert mine.endswith("runs")
    assert next(running) == ord("a")


def test_other_exceptions_keep_their_variables(one: TieredStore) -> None:
    def fails() -> None:
        seen = "a value that a debugger shows"
        raise ValueError(seen)

    try:
        fails()
    except ValueError as error:
        shown(error)
    one.rollback()
    assert [frame.f_locals.get("seen") for frame, _ in traceback.walk_tb(sys.last_traceback)][-1]
