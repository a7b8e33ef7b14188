"""Speculative fetches: in a class of their own, which everything that somebody needs overtakes, and never at its cost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.rig import Rig, evicted, fill, queued
from tiered import MisuseError, TieredStore
from tiered.engine.policy import NextUse, Touch
from tiered.types import Direction, Urgency

UP = Direction.UP


def followed(rig: Rig, order: str, rounds: list[str]) -> None:
    """Follow ``order``, and make rounds of it with some other touches each."""
    rig.engine.follow([Touch(key) for key in order], lambda plan: [NextUse.along(plan, 0.0, None, "frequency")], ())
    for others in rounds:
        for key in order + others:
            lease = rig.lease(key)
            rig.settle()
            rig.end(lease)


def speculate(rig: Rig, *keys: str) -> None:
    rig.hint(*keys, urgency=Urgency.SPECULATIVE)


def test_one_at_a_time_and_only_where_nothing_else_comes_up() -> None:
    rig = Rig(40, 400, limit=1)
    fill(rig, "a", "b", "c", "d", nbytes=4)
    evicted(rig, "a", "b", "c", "d")
    speculate(rig, "a", "b")
    rig.run()
    assert [transfer.key for transfer in rig.links[0].pending.values()] == ["a"]
    assert not queued(rig), "b waits until a has arrived"
    rig.links[0].complete_all()
    rig.run()
    assert [transfer.key for transfer in rig.links[0].pending.values()] == ["b"]
    rig.links[0].complete_all()
    lease = rig.lease("c")
    rig.run()
    speculate(rig, "d")
    rig.run()
    assert [transfer.key for transfer in rig.links[0].pending.values()] == ["c"]
    rig.links[0].complete_all()
    rig.run()
    assert lease.done
    assert [transfer.key for transfer in rig.links[0].pending.values()] == ["d"]
    rig.wind_down()


def test_demands_and_prefetches_overtake_it() -> None:
    rig = Rig(40, 400, limit=1)
    fill(rig, "a", "b", "x", nbytes=4)
    evicted(rig, "a", "b", "x")
    busy = rig.put("w", b"wwww")
    assert busy.error is None
    speculate(rig, "x")
    assert queued(rig) == [("x", UP, Urgency.SPECULATIVE)]
    rig.lease("a")
    assert queued(rig) == [("a", UP, Urgency.DEMAND), ("x", UP, Urgency.SPECULATIVE)]
    rig.lease("x")
    assert {one[0]: one[2] for one in queued(rig)} == {"a": Urgency.DEMAND, "x": Urgency.DEMAND}, "who needs it hurries it"
    rig.wind_down()
    assert rig.state.speculated == rig.state.speculated_used == 1


def test_a_newer_one_replaces_it_and_no_prefetch() -> None:
    rig = Rig(40, 400, limit=1)
    fill(rig, *"abcd", nbytes=4)
    evicted(rig, *"abcd")
    speculate(rig, "a", "b")
    speculate(rig, "c")
    rig.hint("d")
    keys = []
    for _ in range(4):
        rig.run()
        keys += [transfer.key for transfer in rig.links[0].pending.values()]
        rig.links[0].complete_all()
    assert keys == ["a", "d", "c"], "a had begun, b had not"
    assert (rig.state.speculated, rig.state.prefetched) == (2, 1)
    rig.wind_down()


def test_nothing_leaves_for_it_that_is_expected_sooner() -> None:
    rig = Rig(12, 400)  # room for the order, and for one more

    def there() -> set[str]:
        return {key for key in "abvxz" if rig.state.directory.entry(key).copies[0] is not None}

    fill(rig, *"abvxz", nbytes=4)
    followed(rig, "ab", ["v", "v", "vx", "v", "v", "v", "v"])
    assert there() == {"a", "b", "v"}
    speculate(rig, "x", "z")
    rig.settle()
    assert there() == {"a", "b", "v"}, "rounds use v more often, and z never"
    assert not rig.engine.requests.waiting, "it is not tried again"
    lease = rig.lease("x")
    rig.settle()
    rig.end(lease)
    assert there() == {"a", "b", "x"}
    speculate(rig, "v")
    rig.settle()
    assert there() == {"a", "b", "v"}
    assert rig.state.speculated == 1
    rig.wind_down()


def test_used_and_unused_are_counted() -> None:
    rig = Rig(16, 400)
    fill(rig, *"abcd", nbytes=4)
    evicted(rig, *"abcd")
    speculate(rig, "a", "b", "c")
    rig.settle()
    assert rig.state.speculated == 3
    lease = rig.lease("b")
    rig.end(lease)
    lease = rig.lease("b")
    rig.end(lease)
    rig.settle()
    assert (rig.state.speculated_used, rig.state.speculated_unused) == (1, 0)
    evicted(rig, "b", "c")
    assert rig.state.speculated_unused == 1, "b had been used"
    evicted(rig, "a")
    assert (rig.state.speculated, rig.state.speculated_used, rig.state.speculated_unused) == (3, 1, 2)
    rig.wind_down()


def test_the_store(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        for key in "abc":
            store.put(key, torch.ones(1 << 16))
        store.offload()
        assert store.present(list("abc")) == set()
        store.speculate(["a", "no such tensor", "b"])
        ends = time.monotonic() + 60
        while store.present(["a", "b"]) != {"a", "b"}:
            assert time.monotonic() < ends
        with store.lease("a"):
            pass
        seen = store.statistics()
        assert (seen.speculated, seen.speculated_used, seen.speculated_unused) == (2, 1, 0)
        assert store.present(["a", "b", "c", "no such tensor"]) == {"a", "b"}
        assert store.present(iter("ac"), tier="dram") == {"a"}
        for call in (store.speculate, store.present):
            with pytest.raises(MisuseError, match="tier 'tape'"):
                call(["a"], tier="tape")
            with pytest.raises(MisuseError):
                call([1])  # type: ignore[list-item]
