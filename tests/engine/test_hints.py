"""What is fetched before it is asked for, by a hint or along a known order, and what stands back for it."""

from __future__ import annotations

import pytest

from tests.rig import WRITE, Rig, evicted, failure, fill, where
from tiered.engine.policy import Touch
from tiered.engine.residency import State
from tiered.errors import ReadError
from tiered.types import Urgency


def test_a_prefetch_leaves_room_for_a_demand() -> None:
    rig = Rig(12, 400, reserve=0.0)
    fill(rig, "a", "b", "c", nbytes=4)
    evicted(rig, "a", "b", "c")
    rig.hint("a", "b", "c")
    rig.settle()
    assert [where(rig, key)[0] for key in "abc"] == [State.CLEAN, State.CLEAN, None], "the last room is not for a hint"
    rig.wind_down()


def test_a_prefetch_does_not_evict_what_was_prefetched_and_not_used() -> None:
    rig = Rig(12, 400, reserve=0.0)
    fill(rig, "a", "b", "c", "d", nbytes=4)
    evicted(rig, *[key for key in "abcd" if where(rig, key)[0]])
    rig.hint("a", "b")
    rig.settle()
    rig.hint("c")
    rig.settle()
    assert where(rig, "c")[0] is None
    rig.end(rig.lease("b"))
    rig.settle()
    assert where(rig, "c")[0] is State.CLEAN, "the use of b made slack, and there is a free place"
    rig.end(rig.lease("c"))
    rig.hint("d")
    rig.settle()
    assert [where(rig, key)[0] for key in "abcd"] == [State.CLEAN, None, State.CLEAN, State.CLEAN], "a is still to be used"
    assert (rig.state.prefetched, rig.state.prefetched_unused) == (4, 0)
    rig.wind_down()


def test_a_prefetch_does_not_evict_what_an_older_request_wants() -> None:
    rig = Rig(12, 400, reserve=0.0)
    fill(rig, "a", "b", "c", nbytes=4)
    evicted(rig, "b", "c")
    lease = rig.lease("a", "b")  # a is there, b on its way
    rig.hint("c")
    rig.run()
    assert not lease.done
    rig.run()
    assert where(rig, "a")[0] is State.CLEAN
    rig.settle()
    assert lease.done
    rig.wind_down()


@pytest.mark.parametrize("held", [False, True])
def test_a_demand_evicts_what_was_prefetched_when_nothing_else_may_leave(held: bool) -> None:
    rig = Rig(12, 400, reserve=0.0)
    fill(rig, "a", "b", "c", nbytes=4)
    evicted(rig, "a", "b", "c")
    rig.hint("a", "b")
    rig.settle()
    rig.put("x", b"xxxx")
    lease = rig.lease("x") if held else None
    rig.put("y", b"yyyy")
    rig.settle()
    assert not rig.puts, "it did not wait for ever"
    assert rig.state.prefetched_unused == held, "else what was written before is written back"
    if lease is not None:
        rig.end(lease)
    rig.wind_down()


def test_a_newer_hint_replaces_what_has_not_begun() -> None:
    rig = Rig(40, 400, limit=1)
    fill(rig, "a", "b", "c", nbytes=4)
    evicted(rig, "a", "b", "c")
    rig.hint("a", "b")
    rig.hint("c")
    rig.settle()
    assert [where(rig, key)[0] for key in "abc"] == [State.CLEAN, None, State.CLEAN]
    rig.wind_down()


def test_hints_never_fail() -> None:
    rig = Rig(12, 400)
    fill(rig, "a", nbytes=4)
    lease = rig.lease("a", access=WRITE)
    rig.hint("a", "nobody", "a")
    rig.settle()
    rig.end(lease)
    rig.hint()
    rig.wind_down()


def test_a_prefetch_passes_through_the_middle() -> None:
    rig = Rig(12, 12, 400)
    fill(rig, "a", nbytes=4)
    for copy in rig.state.directory.entry("a").copies[:2]:
        if copy is not None:
            rig.engine.scheduler.evict(copy)
    rig.hint("a")
    rig.settle()
    assert where(rig, "a") == [State.CLEAN, State.CLEAN, State.CLEAN]
    rig.end(rig.lease("a"))
    fill(rig, "b", "c", "d", "e", nbytes=4)
    assert rig.state.prefetched_unused == 0
    rig.wind_down()


def test_a_prefetch_that_fails_half_way_is_not_tried_again() -> None:
    rig = Rig(12, 12, 400)
    fill(rig, "a", nbytes=4)
    for copy in rig.state.directory.entry("a").copies[:2]:
        if copy is not None:
            rig.engine.scheduler.evict(copy)
    rig.hint("a")
    rig.run()
    (transfer,) = rig.links[1].pending.values()
    rig.complete(1, transfer.tag, failure(transfer))
    rig.run()
    assert not rig.links[1].pending
    assert not rig.engine.requests.waiting
    rig.wind_down()


@pytest.mark.parametrize("fails", ["once", "again"])
def test_a_prefetch_that_fails_says_nothing_of_a_lease_that_came_later(fails: str) -> None:
    """The disk may have been repaired since: the lease has a read of its own, whose error counts."""
    rig = Rig(12, 400)
    fill(rig, "a", nbytes=4)
    evicted(rig, "a")
    rig.hint("a")
    rig.run()
    (hinted,) = rig.links[0].pending.values()
    lease = rig.lease("a")
    rig.run()
    assert list(rig.links[0].pending.values()) == [hinted], "the lease waits for the same read"
    rig.complete(0, hinted.tag, failure(hinted))
    rig.run()
    assert not lease.done
    (own,) = rig.links[0].pending.values()
    assert own.urgency is Urgency.DEMAND
    rig.complete(0, own.tag, failure(own) if fails == "again" else None)
    rig.run()
    assert lease.done
    assert isinstance(lease.error, ReadError if fails == "again" else type(None))
    assert not rig.links[0].pending
    if lease.error is None:
        rig.end(lease)
    rig.wind_down()


def test_fetching_ahead_does_not_evict_what_a_lease_waits_with() -> None:
    rig = Rig(16, 400, reserve=0.0)
    fill(rig, *"bctuvwxyzd", nbytes=2)
    for key in "dxyztuvw":
        rig.end(rig.lease(key))
        rig.settle()
    lease = rig.lease("d", "c")
    rig.run()
    assert [where(rig, key)[0] for key in "bdc"] == [None, State.CLEAN, State.FILLING]
    rig.follow([Touch(key) for key in "byztuvw"])  # d would be the first to leave
    rig.run()
    assert [where(rig, key)[0] for key in "bdc"] == [State.FILLING, State.CLEAN, State.FILLING]
    rig.settle()
    assert lease.done
    rig.end(lease)
    rig.wind_down()


def test_a_prefetch_takes_no_room_that_a_demand_waits_for() -> None:
    rig = Rig(16, 400, reserve=0.0)
    fill(rig, *"abcd", nbytes=4)
    fill(rig, "e", nbytes=2)
    evicted(rig, *[key for key in "ace" if where(rig, key)[0]])
    b, d = rig.lease("b"), rig.lease("d")
    rig.settle()
    put = rig.put("x", bytes(9))  # 8 bytes are free, and nothing can leave
    assert not put.room.done
    rig.hint("e")
    rig.settle()
    assert where(rig, "e")[0] is None
    rig.end(b)
    rig.end(d)
    rig.settle()
    assert rig.newest["x"] == bytes(9)
    rig.wind_down()
