"""Commits: what is there after closing, and what is not."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.store.chains import hurried, numbers, same
from tests.store.opened import Open, push_out
from tiered import (
    CapacityError,
    LeaseConflict,
    MisuseError,
    TieredError,
    TieredStore,
)
from tiered.format.generations import generations


def test_what_was_not_committed_is_gone(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.ones(10))
    store.put("b", torch.ones(10))
    assert store.commit({"step": 1}) == 1
    store.put("a", torch.zeros(10))
    store.delete("b")
    store.put("c", torch.zeros(10))
    push_out(store)
    store.close()
    again = open_store()
    assert sorted(again) == ["a", "b"]
    assert again.get("a").eq(1).all()
    assert (again.generation, again.meta) == (1, {"step": 1})


def test_leaving_the_block_commits_and_an_exception_does_not(open_store: Open) -> None:
    with open_store() as store:
        store.put("a", torch.ones(10))

    def failing() -> None:
        with open_store() as store:
            assert store.get("a").eq(1).all()
            store.put("a", torch.zeros(10))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    with open_store() as store:
        assert store.get("a").eq(1).all()
        assert store.generation == 1
    with open_store() as store:
        assert store.generation == 1, "nothing changed, nothing was written"
        store.close()  # inside the block: commits nothing, and leaving is no error


def test_meta(open_store: Open) -> None:
    meta = {"step": 7, "nested": {"list": [1, 2.5, None, True, "text"]}, "empty": {}}
    store = open_store()
    assert (store.generation, store.meta) == (0, {})
    assert store.commit(meta) == 1
    assert store.meta == meta
    assert store.commit() == 2, "an explicit commit is one"
    store.close()
    store = open_store()
    assert (store.generation, store.meta) == (2, meta)
    store.meta["step"] = 8
    assert store.meta["step"] == 7
    store.commit({})
    assert store.meta == {}


@pytest.mark.parametrize("meta", [{"x": object()}, {"x": torch.ones(1)}, {1: 2}, {"x": float("nan")}, {"x": {1, 2}}])
def test_meta_that_is_not_json_is_refused_and_nothing_else_suffers(open_store: Open, meta: Any) -> None:
    store = open_store()
    store.put("a", torch.ones(10))  # dirty: the snapshot happens in the engine's thread
    with pytest.raises(TieredError):
        store.commit(meta)
    store.put("b", torch.ones(10))
    assert store.get("a").eq(1).all()
    assert store.commit({"fine": 1}) == 1
    store.close()
    assert sorted(open_store()) == ["a", "b"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_generations_that_are_kept(open_store: Open, folder: Path, keep: int) -> None:
    store = open_store(keep=keep)
    for number in range(1, 7):
        store.put("t", torch.full((1000,), float(number)))
        store.put(f"only {number}", torch.full((50_000,), float(number)))
        if number > 1:
            store.delete(f"only {number - 1}")
        assert store.commit() == number
        assert generations(folder) == list(range(max(1, number - keep + 1), number + 1))
    size = os.path.getsize(folder / "data.0")
    for _ in range(20):
        store.put("t", torch.full((1000,), 6.0))
        store.commit()
    assert os.path.getsize(folder / "data.0") == size, "what dropped generations had is used again"
    store.close()
    again = open_store(keep=keep)
    assert sorted(again) == ["only 6", "t"]
    assert again.get("only 6").eq(6).all()


def test_fewer_are_kept_after_reopening(open_store: Open, folder: Path) -> None:
    store = open_store(keep=3)
    for number in range(3):
        store.put("t", torch.tensor(number))
        store.commit()
    store.close()
    store = open_store(keep=1)
    assert generations(folder) == [1, 2, 3]
    store.put("t", torch.tensor(3))
    store.commit()
    assert generations(folder) == [4]
    assert store.get("t").item() == 3
    with pytest.raises(MisuseError):
        open_store(keep=0)


def test_commit_under_leases(open_store: Open) -> None:
    store = open_store()
    store.put("a", numbers(1000))
    with store.lease("a") as a:
        assert store.commit() == 1
        same(a, numbers(1000))
    with store.lease("a", access="write") as a, pytest.raises(LeaseConflict, match="'a'"):
        store.commit()
    assert store.generation == 1
    del a
    store.close()
    same(open_store().get("a"), numbers(1000))


def test_what_an_alias_writes_after_its_lease_is_not_stored(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.zeros(1000))
    with store.lease("a", access="write") as a:
        a.fill_(1)
    store.commit()  # while a is alive
    a.fill_(2)
    assert store.get("a").eq(1).all()
    assert a.eq(2).all()
    store.commit()
    push_out(store)
    a.fill_(3)
    assert store.get("a").eq(1).all()
    store.close()
    assert a.eq(3).all()
    assert open_store().get("a").eq(1).all()


def test_a_commit_without_room_for_a_copy_gives_up(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.zeros(600 << 10, dtype=torch.uint8))
    with store.lease("a", access="write") as a:
        a.fill_(1)
    with pytest.raises(CapacityError, match=r"'a' .*still referenced after its lease"), hurried(store, 0.3):
        store.commit()
    del a
    assert store.commit() == 1
    store.close()
    assert open_store().get("a").eq(1).all()


def test_commits_from_many_threads(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.ones(10))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(store.commit())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 9))


def test_what_a_commit_says_of_bytes(open_store: Open, folder: Path) -> None:
    """The same of the same bytes, wherever they are opened, and nothing of a tensor that has changed since."""
    store = open_store()
    for key in "abc":
        store.put(key, torch.ones(10))
    assert store.committed("abc") == {}
    store.commit()
    said = store.committed(["a", "b", "c", "none"])
    assert [*said] == ["a", "b", "c"]
    assert len({*said.values()}) == 3  # of other tensors with the same bytes, too
    with store.lease("b", access="write") as b:
        assert store.committed(["a", "b"]) == {"a": said["a"]}
        b[3] = 2
    store.delete("c")
    assert store.committed(said) == {"a": said["a"]}
    store.rollback()
    assert store.committed(said) == said
    store.put("b", torch.ones(10))
    store.commit()
    assert store.committed(["a"]) == {"a": said["a"]}
    assert store.committed(["b"])["b"] != said["b"]
    now = store.committed(said)
    store.close()
    assert open_store().committed(said) == now
    with TieredStore.open(folder, dram="1MiB", access="read") as reading:
        assert reading.committed([*said, "none"]) == now
