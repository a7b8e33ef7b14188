"""What a store says of memory, and when a watch tells that it gets tight."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tiered import MemoryNotice, MemoryStatistics, MemoryWatch, MisuseError, TieredStore, zero
from tiered.store import memory_watch
from tiered.types import format_size

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram="8MiB") as opened:
        yield opened


def memory(beyond: int, headroom: int, touched: int = 8) -> MemoryStatistics:
    return MemoryStatistics(8 * MIB, touched * MIB, touched * MIB, (beyond + touched) * MIB, headroom * MIB, None)


def told(store: TieredStore, looks: list[MemoryStatistics], reserve: str = "64MiB") -> list[MemoryNotice | None]:
    watch = MemoryWatch(store, lambda notice: None, reserve=reserve)
    return [watch._judge(one) for one in looks]


def test_statistics_say_where_memory_is(store: TieredStore) -> None:
    store.put("w", torch.zeros(MIB // 2))
    before = store.statistics().memory
    assert (before.budget, before.pool, before.touched) == (8 * MIB, 2 * MIB, 2 * MIB)
    assert before.unused == 6 * MIB
    assert before.beyond == before.process - before.touched > 0
    assert before.headroom > 0
    held = torch.ones(64 * MIB)  # 256 MiB that are no tensor of the store; what was freed before may go back meanwhile
    after = store.statistics().memory
    assert after.beyond - before.beyond > 128 * MIB
    assert after.pool == before.pool
    del held
    assert f"{format_size(before.process)}" in str(replace(store.statistics(), memory=before))


def test_nothing_is_told_while_there_is_room(store: TieredStore) -> None:
    assert told(store, [memory(100, 500)] * 10) == [None] * 10


def test_pages_that_the_pool_will_take_count_as_taken(store: TieredStore) -> None:
    calm = told(store, [memory(100, 71, touched=8)])
    full = told(store, [memory(100, 71, touched=0)])
    assert calm == [None]
    assert full[0] is not None
    assert full[0].left == 63 * MIB
    assert full[0].looks is None


def test_it_is_told_once_and_again_when_half_is_left(store: TieredStore) -> None:
    found = told(store, [memory(100, room) for room in (500, 60, 60, 55, 29, 28, 200, 50)])
    assert [one is not None for one in found] == [False, True, False, False, True, False, False, True]


def test_what_cannot_be_told_is_refused_at_once(store: TieredStore) -> None:
    with pytest.raises(MisuseError, match="reserve="):
        MemoryWatch(store, 3)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="watches the process of a TieredStore, not 'store'"):
        MemoryWatch("store")  # type: ignore[arg-type]


def test_growth_is_told_before_memory_is_tight(store: TieredStore) -> None:
    growing = [memory(100 + 10 * look, 300 - 10 * look) for look in range(12)]
    found = [one for one in told(store, growing) if one is not None]
    assert len(found) == 1
    assert found[0].growth == 10 * MIB
    assert found[0].left > 64 * MIB  # not yet
    assert found[0].looks is not None
    assert 0 < found[0].looks < memory_watch.LOOKS_AHEAD
    assert "grows by 10.0 MiB a step" in str(found[0])


def test_use_that_rises_and_falls_is_no_growth(store: TieredStore) -> None:
    assert told(store, [memory(100 + 40 * (look % 2), 200 - 40 * (look % 2)) for look in range(20)]) == [None] * 20


def test_looks_are_seldom_and_the_logger_warns(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = MemoryWatch(store, reserve="1TiB")
    clock = iter([0.0, 0.1, 0.3])
    monkeypatch.setattr(memory_watch.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.WARNING, "tiered"):
        first, second, third = watch.look(), watch.look(), watch.look()
    assert first is not None
    assert second is None
    assert third is None  # it was told
    assert [record.message for record in caplog.records] == [str(first)]
    assert "memory gets tight" in str(first)


def test_a_paged_model_looks_after_each_forward(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "SELDOM", 0.0)
    notices: list[MemoryNotice] = []
    MemoryWatch(store, notices.append, reserve="1TiB")
    model = zero.page(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), store)
    assert notices == []
    model(torch.ones(2, 16)).sum().backward()
    assert len(notices) == 1
    assert notices[0].memory.budget == 8 * MIB


def test_a_store_has_one_watch_which_does_not_keep_it(store: TieredStore) -> None:
    first = MemoryWatch.of(store)
    assert MemoryWatch.of(store) is first
    second = MemoryWatch(store, print)
    assert MemoryWatch.of(store) is second
    assert not [name for name, value in vars(second).items() if value is store]
