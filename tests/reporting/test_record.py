"""What is recorded of each step of a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tiered import TieredStore, zero
from tiered.reporting import record as recording
from tiered.reporting.page import page
from tiered.reporting.record import RunRecord
from tiered.reporting.timeline import as_rows


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as opened:
        yield opened


def trained(store: TieredStore, steps: int, **options: int) -> RunRecord:
    torch.manual_seed(0)
    model = zero.page(nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))), store)
    optimizer = zero.AdamW(model.parameters(), lr=1e-3)
    record = RunRecord(store, lambda: zero.statistics(model).update_seconds, **options)
    with record.closing():
        record.begin()
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 128)).square().mean()
            loss.backward()
            optimizer.step()
            record.stepped(step + options.get("done", 0), loss.item(), 4)
    return record


def test_steps_add_up_to_what_the_store_counted(store: TieredStore) -> None:
    before = store.statistics()
    found = trained(store, 9).as_json()
    after = store.statistics()
    series = found["series"]
    assert series["step"] == list(range(1, 10))
    moved = [sum(series[name]) for name in ("read", "written")]
    assert 0 < moved[0] <= after.links[-1].up.bytes - before.links[-1].up.bytes
    assert 0 < moved[1] <= after.links[-1].down.bytes - before.links[-1].down.bytes
    for at in range(9):
        parts = sum(series[name][at] for name in ("compute", "update", "waited_reads", "waited_room"))
        assert parts >= series["seconds"][at] - 1e-9
        assert series["memory_pool"][at] <= 1 << 20
        assert series["memory_base"][at] > 0
    assert sum(series["update"]) > 0
    assert len(found["losses"]["values"]) == 9


def test_three_steps_after_five_have_a_timeline(store: TieredStore) -> None:
    found = trained(store, 9).as_json()["timeline"]
    assert [step[0] for step in found["steps"]] == ["step 6", "step 7", "step 8"]
    kinds = {item[3] for row in found["rows"] for item in row.get("items") or ()}
    assert {"forward", "backward", "update"} <= kinds
    assert kinds & {"demand", "prefetch"}
    levels = [row for row in found["rows"] if row.get("level")]
    assert levels
    assert all(0 <= share <= 1 for row in levels for _, share in row["level"])
    assert all(0 <= item[1] <= item[2] <= found["seconds"] for row in found["rows"] for item in row.get("items") or ())


def test_none_is_recorded_where_none_is_asked_for_or_the_training_is_short(store: TieredStore) -> None:
    assert trained(store, 3).as_json()["timeline"] is None
    with store.timeline():
        pass


def test_a_resumed_training_counts_on(store: TieredStore) -> None:
    found = trained(store, 7, done=100).as_json()
    assert found["series"]["step"][0] == 101
    assert [step[0] for step in found["timeline"]["steps"]] == ["step 106", "step 107"]


def test_a_long_run_keeps_every_other_step(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST", 8)
    record = RunRecord(store, steps=0)
    record.begin()
    for step in range(1, 41):
        record.stepped(step)
    found = record.as_json()
    assert len(found["series"]["step"]) <= 8
    assert found["series"]["step"] == list(range(8, 41, 8))
    assert "tokens" not in found["series"]
    assert page({"tiered": "x", **found})


def test_the_shortest_of_too_many_events_are_left_out(store: TieredStore) -> None:
    with store.timeline() as timeline:
        for number in range(40):
            with store.span("forward", f"layer {number}"):
                store.put(str(number), torch.zeros(64))
    whole, part = as_rows(timeline), as_rows(timeline, most=10)
    items = [item for row in part["rows"] for item in row.get("items") or ()]
    assert len(items) <= 10
    assert part["left_out"] + len(items) == sum(len(row.get("items") or ()) for row in whole["rows"])
