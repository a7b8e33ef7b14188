"""``store.timeline()``: what is recorded, that it is all that moved, and that it ends."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.rig import Rig, evicted, failure, fill
from tiered import LinkStatistics, MisuseError, TieredStore, Timeline, zero
from tiered.engine.requests import Token
from tiered.telemetry import NO_SPAN
from tiered.types import Access, Direction, Urgency

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path, dram=MIB) as opened:
        yield opened


def work(store: TieredStore) -> None:
    """Twice as much as there is memory, written and read."""
    for number in range(8):
        store.put(str(number), torch.full((MIB // 4,), number, dtype=torch.uint8))
    for number in range(8):
        with store.lease(str(number), access="write") as tensor:
            tensor.add_(1)
        del tensor
    store.prefetch(["0"])
    with store.lease(["0", "1"]) as both:
        assert [int(tensor[0]) for tensor in both] == [1, 2]
    del both


def moved(timeline: Timeline, direction: Direction) -> int:
    return sum(transfer.nbytes for transfer in timeline.transfers if transfer.direction is direction)


def quiet(store: TieredStore) -> tuple[Timeline, LinkStatistics, LinkStatistics]:
    """A timeline of some work, and what the statistics say before and after it, with nothing under way then."""
    work(store)
    store.commit()
    before = store.statistics().links[-1]
    with store.timeline() as timeline:
        work(store)
        store.commit()
    return timeline, before, store.statistics().links[-1]


def test_bytes_add_up_to_the_statistics(store: TieredStore) -> None:
    timeline, before, after = quiet(store)
    assert moved(timeline, Direction.UP) == after.up.bytes - before.up.bytes > MIB
    assert moved(timeline, Direction.DOWN) == after.down.bytes - before.down.bytes > MIB
    assert {(t.src, t.dst) for t in timeline.transfers} == {("dram", "nvme")}
    assert timeline.dropped == 0


def test_everything_lies_within_the_recording_and_in_its_order(store: TieredStore) -> None:
    with store.timeline() as timeline:
        work(store)
    assert timeline.ended is not None
    for t in timeline.transfers:
        assert timeline.began <= t.queued <= t.started <= t.ended <= timeline.ended
        assert t.error is None
    for lease in timeline.leases:
        assert lease.released is not None
        assert timeline.began <= lease.asked <= lease.granted <= lease.released <= timeline.ended
    for stall in timeline.stalls:
        assert timeline.began <= stall.began <= stall.ended <= timeline.ended
        assert stall.reason in ("reads", "room")
    assert [lease.keys for lease in timeline.leases] == [*((str(n),) for n in range(8)), ("0", "1")]
    assert [lease.access for lease in timeline.leases] == [Access.WRITE] * 8 + [Access.READ]
    assert any("a WRITE lease of '0'" in stall.what for stall in timeline.stalls)


def test_the_use_of_the_pool(store: TieredStore) -> None:
    with store.timeline() as timeline:
        work(store)
        used = store.statistics().tiers[0].peak
    dram = [sample.used for sample in timeline.pool if sample.tier == "dram"]
    assert timeline.capacity["dram"] == MIB
    assert 0 < max(dram) <= used <= MIB
    assert all(a != b for a, b in itertools.pairwise(dram))
    assert [sample.at for sample in timeline.pool] == sorted(sample.at for sample in timeline.pool)


def test_spans_are_the_callers(store: TieredStore) -> None:
    assert store.span("nobody", "looks") is NO_SPAN
    with store.timeline() as timeline:
        outer = store.span("outer", "a")
        with store.span("inner", "b"):
            pass
        outer.end()
        outer.end()
        late = store.span("late", "c")
    late.end()
    assert [(span.kind, span.name) for span in timeline.spans] == [("inner", "b"), ("outer", "a")]
    inner, around = timeline.spans
    assert around.began <= inner.began <= inner.ended <= around.ended


def test_it_is_bounded(store: TieredStore) -> None:
    with store.timeline(limit=10) as timeline:
        work(store)
    events = timeline.transfers, timeline.leases, timeline.stalls, timeline.spans, timeline.pool
    assert sum(map(len, events)) == 10
    assert timeline.dropped > 10


def test_it_ends(store: TieredStore) -> None:
    with store.timeline() as timeline:
        pass
    work(store)
    assert not timeline.transfers
    assert not timeline.leases
    with store.timeline() as another, pytest.raises(MisuseError, match="records a timeline already"), store.timeline():
        pass
    assert another.ended is not None
    generator = store.timeline()
    generator.__enter__()
    del generator  # the collector ends it
    gc.collect()
    with store.timeline():
        pass


def test_a_lease_that_outlives_it(store: TieredStore) -> None:
    store.put("w", torch.zeros(1000))
    with store.lease("w") as before:
        with store.timeline() as timeline:
            open_lease = store.lease("w")
            tensor = open_lease.__enter__()
        open_lease.__exit__(None, None, None)
    del before, tensor
    (lease,) = timeline.leases
    assert lease.released is None


async def _arrive(store: TieredStore) -> None:
    async with store.lease("0") as tensor:
        assert int(tensor[0]) == 1


def test_coroutines(store: TieredStore) -> None:
    import asyncio

    work(store)
    with store.timeline() as timeline:
        asyncio.run(_arrive(store))
        with store.lease("5"):
            pass
    assert [lease.keys for lease in timeline.leases] == [("0",), ("5",)]


def test_what_was_under_way_before_begins_with_it_and_errors_are_told() -> None:
    rig = Rig(40, 400, limit=2)
    fill(rig, "a", "b", nbytes=4)
    evicted(rig, "a", "b")
    rig.lease("a")
    rig.run()
    token = Token()
    recorder = rig.engine.record(100, token)
    assert recorder is not None
    rig.lease("b")
    rig.run()
    first, second = list(rig.links[0].pending.values())
    rig.complete(0, first.tag)
    rig.complete(0, second.tag, failure(second))
    rig.run()
    a, b = recorder.timeline.transfers
    assert (a.key, a.error, a.urgency) == ("a", None, Urgency.DEMAND)
    assert a.queued == a.started == recorder.timeline.began
    assert b.key == "b"
    assert b.error is not None
    rig.wind_down()


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
def test_what_training_computes(tmp_path: Path, update: str, micro_batch: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)))
    with TieredStore.open(tmp_path, dram=MIB, durability="none") as store:
        zero.page(model, store, micro_batch=micro_batch)
        optimizer = zero.AdamW(model.parameters(), update=update)

        def step() -> None:
            model(torch.ones(4, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with store.timeline() as timeline:
            step()
    kinds: dict[str, set[str]] = {}
    for span in timeline.spans:
        kinds.setdefault(span.kind, set()).add(span.name)
    assert set(kinds) == {"forward", "backward", "update"} | ({"recompute"} if micro_batch > 1 else set())
    assert kinds["forward"] >= {str(n) for n in range(6)}
    assert "Sequential" in kinds["forward"] & kinds["backward"]
    assert len(kinds["update"]) >= 6
    for earlier in timeline.spans:
        for later in timeline.spans:
            if earlier.began < later.began < earlier.ended:
                assert later.ended <= earlier.ended, (earlier, later)
