"""Temporary tensors: written at once, in no snapshot, and gone with their token, whatever is under way."""

from __future__ import annotations

import pytest

from tests.rig import READ, Rig, failure, fill, pending, queued, spec, where
from tiered.engine.claims import Token
from tiered.engine.requests import Install, Room
from tiered.engine.residency import State
from tiered.engine.snapshot import Flush
from tiered.types import Direction, Urgency


def put(rig: Rig, key: str, nbytes: int = 4) -> Token:
    """Put a temporary tensor; return what keeps it."""
    lifetime, making = Token(), Token()
    room = Room(0, nbytes, key, rig.state.claims.watch(making))
    rig.submit(room)
    rig.settle()
    assert room.slot is not None
    data = key[:1].encode() * nbytes
    rig.tiers[0].write(room.slot, data)
    rig.submit(Install(key, spec(nbytes), room, lifetime=rig.state.claims.watch(lifetime)))
    assert key in rig.state.directory
    rig.newest[key] = data
    return lifetime


def gone(rig: Rig, *keys: str) -> None:
    for key in keys:
        assert key not in rig.state.directory
        rig.newest.pop(key, None)


def test_it_is_written_at_once_where_no_order_is_followed() -> None:
    rig = Rig(100, 400, reserve=0.0)
    lifetime = put(rig, "a")
    rig.run()
    assert pending(rig) == [("a", Direction.DOWN, Urgency.WRITEBACK)]
    rig.settle()
    assert where(rig, "a") == [State.CLEAN, State.CLEAN]
    del lifetime
    rig.engine.look()
    gone(rig, "a")
    rig.wind_down()


def test_it_goes_down_one_tier_at_once_and_further_for_room() -> None:
    rig = Rig(100, 400, 4000, reserve=0.0)
    lifetime = put(rig, "a")
    rig.settle()
    assert where(rig, "a") == [State.CLEAN, State.DIRTY, None]
    del lifetime
    rig.engine.look()
    gone(rig, "a")
    rig.wind_down()


def test_a_write_back_that_has_not_started_is_withdrawn() -> None:
    rig = Rig(100, 400, reserve=0.0, limit=1)
    lifetimes: list[Token] = []
    for key in "abc":
        making = Token()
        room = Room(0, 4, key, rig.state.claims.watch(making))
        rig.submit(room)
        assert room.slot is not None
        rig.tiers[0].write(room.slot, key.encode() * 4)
        lifetimes.append(Token())
        rig.submit(Install(key, spec(4), room, lifetime=rig.state.claims.watch(lifetimes[-1])))
        rig.newest[key] = key.encode() * 4
    rig.run()
    assert [key for key, _, _ in pending(rig)] == ["a"]
    assert [key for key, _, _ in queued(rig)] == ["b", "c"]
    lifetimes.pop()
    lifetimes.pop()
    rig.engine.released()
    rig.turn()
    gone(rig, "b", "c")
    assert queued(rig) == []
    rig.check()
    lifetimes.clear()
    rig.engine.released()
    rig.turn()
    assert "a" in rig.state.directory, "what has started ends first"
    rig.complete(0, next(iter(rig.links[0].pending)))
    rig.turn()
    gone(rig, "a")
    assert rig.state.doomed == {}
    rig.wind_down()


def test_a_write_back_that_fails_changes_nothing() -> None:
    rig = Rig(100, 400, reserve=0.0)
    lifetime = put(rig, "a")
    rig.run()
    transfer = next(iter(rig.links[0].pending.values()))
    rig.complete(0, transfer.tag, failure(transfer))
    rig.run()
    assert where(rig, "a")[0] is State.DIRTY
    del lifetime
    rig.engine.look()
    gone(rig, "a")
    rig.wind_down()


def test_it_stays_while_it_is_leased() -> None:
    rig = Rig(100, 400, reserve=0.0)
    lifetime = put(rig, "a")
    rig.settle()
    lease = rig.lease("a", access=READ)
    del lifetime
    rig.engine.look()
    assert "a" in rig.state.directory
    rig.end(lease)
    rig.newest.pop("a")
    rig.turn()
    gone(rig, "a")
    rig.wind_down()


def test_a_later_tensor_of_its_name_stays() -> None:
    rig = Rig(100, 400, reserve=0.0)
    old = put(rig, "a")
    rig.settle()
    new = put(rig, "a", nbytes=8)
    del old
    rig.engine.look()
    assert rig.state.directory.entry("a").nbytes == 8
    del new
    rig.engine.look()
    rig.settle()
    gone(rig, "a")
    rig.wind_down()


@pytest.mark.parametrize("written", [False, True])
def test_it_is_in_no_snapshot(written: bool) -> None:
    rig = Rig(100, 400, reserve=0.0)
    fill(rig, "k", nbytes=4)
    lifetime = put(rig, "a")
    if written:
        rig.settle()
    seen: list[str] = []

    class Draft:
        def begin(self, entries, frozen):  # type: ignore[no-untyped-def]
            seen.extend(entry.key for entry in entries)
            assert list(frozen) == []

        def add(self, entry):  # type: ignore[no-untyped-def]
            raise AssertionError("nothing was frozen")

        def end(self) -> None:
            seen.append("end")

        def drop(self) -> None:
            raise AssertionError("nothing failed")

    flush = Flush(Draft(), lambda *_: None)
    flush.deferred = False
    rig.submit(flush)
    rig.settle()
    assert flush.done
    assert seen == ["k", "end"]
    del lifetime
    rig.engine.look()
    rig.settle()
    gone(rig, "a")
    rig.wind_down()


def test_after_a_recount_it_is_gone_too() -> None:
    rig = Rig(100, 400, reserve=0.0)
    lifetime, other = put(rig, "a"), put(rig, "b")
    rig.settle()
    del lifetime
    rig.state.claims.ended.clear()  # whoever applied it was struck
    rig.state.changing = True
    rig.turn()
    gone(rig, "a")
    assert "b" in rig.state.directory
    del other
    rig.engine.look()
    gone(rig, "b")
    rig.wind_down()
