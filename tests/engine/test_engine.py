"""What the engine decides, one behaviour at a time."""

from __future__ import annotations

import select
from collections.abc import Callable

import pytest

from tests.rig import READ, WRITE, Put, Rig, evicted, failure, fill, pending, queued, where, woken
from tiered.engine import scheduler
from tiered.engine.claims import Token
from tiered.engine.pool import MOVED, Pool
from tiered.engine.requests import Lease, Request, Room
from tiered.engine.residency import Copy, Evictability, State
from tiered.engine.scheduler import Scheduler
from tiered.engine.state import RoomSearch
from tiered.errors import CapacityError, LeaseConflict, ReadError, StoreClosed, TieredError, WriteError
from tiered.types import Direction, Transfer, Urgency

# Urgency


def test_urgent_transfers_start_first() -> None:
    rig = Rig(40, 400, limit=1, reserve=1.0)
    fill(rig, "a", "b", nbytes=4)
    for key in "ab":
        rig.state.directory.evict(rig.state.directory.entry(key).copies[0])
    rig.put("x", b"xxxx")
    rig.put("y", b"yyyy")
    rig.run()  # one write-back is on the link, the other waits
    assert pending(rig) == [("x", Direction.DOWN, Urgency.WRITEBACK)]
    rig.hint("a")
    assert queued(rig) == [("a", Direction.UP, Urgency.PREFETCH), ("y", Direction.DOWN, Urgency.WRITEBACK)]
    rig.lease("b")
    assert [key for key, _, _ in queued(rig)] == ["b", "a", "y"]
    order = []
    for _ in range(4):
        rig.run()
        order.append(next(iter(rig.links[0].pending.values())).key)
        rig.links[0].complete_all()
    assert order == ["x", "b", "a", "y"]
    rig.wind_down()


def test_a_demand_makes_a_queued_prefetch_its_own() -> None:
    rig = Rig(40, 400, limit=1)
    fill(rig, "a", "b", nbytes=4)
    evicted(rig, "a", "b")
    rig.hint("a", "b")
    assert queued(rig) == [("a", Direction.UP, Urgency.PREFETCH)], "one at a time"
    rig.lease("a")
    assert queued(rig) == [("a", Direction.UP, Urgency.DEMAND)]
    rig.wind_down()
    assert [t.key for t in rig.links[0].started if t.direction is Direction.UP].count("a") == 1


def test_small_prefetches_wait_for_the_link_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "QUEUED_SHARE", 3)  # of 40 bytes
    rig = Rig(40, 400, limit=1)
    fill(rig, *"abcde", nbytes=4)
    evicted(rig, *"abcde")
    rig.hint(*"abcde")
    assert [key for key, _, _ in queued(rig)] == ["a", "b", "c"]
    rig.lease("e")
    assert queued(rig)[0] == ("e", Direction.UP, Urgency.DEMAND), "a demand goes before all of them"
    rig.wind_down()


@pytest.mark.parametrize("what", ["write lease", "put", "delete", "flush"])
def test_who_waits_for_a_queued_write_back_hurries_it(what: str) -> None:
    rig = Rig(40, 400, limit=1, reserve=1.0)
    for key in "xab":
        rig.put(key, key.encode() * 4)
    rig.run()
    assert [key for key, _, _ in queued(rig)] == ["a", "b"]
    request = {
        "write lease": lambda: rig.lease("b", access=WRITE),
        "put": lambda: rig.put("b", b"new"),
        "delete": lambda: rig.delete("b"),
        "flush": lambda: rig.flush(),
    }[what]()
    assert request.error is None
    hurried = [key for key, _, urgency in queued(rig) if urgency is Urgency.DEMAND]
    assert hurried == (["a", "b"] if what == "flush" else ["b"])
    rig.wind_down()


def test_a_write_back_that_demand_needs_inherits_its_urgency() -> None:
    rig = Rig(8, 400, limit=1, reserve=1.0)
    rig.put("x", b"xxxx")
    rig.put("y", b"yyyy")
    rig.run()
    assert queued(rig) == [("y", Direction.DOWN, Urgency.WRITEBACK)]
    put = rig.put("z", b"zzzzzzzz")
    assert queued(rig) == [("y", Direction.DOWN, Urgency.DEMAND)]
    assert put.room.full_tiers == (0,)
    rig.wind_down()


def test_a_lease_below_waits_for_the_write_back_and_hurries_it() -> None:
    rig = Rig(40, 40, 400, limit=1, reserve=0.0)
    rig.put("x", b"xxxx")
    lease = rig.lease("x", tier=1)
    assert queued(rig) == [("x", Direction.DOWN, Urgency.DEMAND)]
    rig.settle()
    assert lease.done
    assert where(rig, "x") == [State.CLEAN, State.DIRTY, None]
    rig.wind_down()


# Room


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda rig: rig.put("x", bytes(13)), ("13 bytes can never fit", "t0", "12 bytes")),
        (lambda rig: rig.lease("a", "b", "c", "d"), ("16 bytes", "t0", "12 bytes")),
    ],
)
def test_what_can_never_fit_fails_at_once(ask: Callable[[Rig], Put | Request], named: tuple[str, ...]) -> None:
    rig = Rig(12, 400)
    fill(rig, "a", "b", "c", "d", nbytes=4)
    held = rig.lease("a")
    rig.settle()
    before = len(rig.links[0].started)
    request = ask(rig)
    assert isinstance(request.error, CapacityError)
    for words in named:
        assert words in str(request.error)
    rig.run()
    assert len(rig.links[0].started) == before, "nothing moved for it"
    rig.end(held)
    rig.wind_down()


def test_the_deadline_names_who_holds_the_room() -> None:
    rig = Rig(12, 400)
    fill(rig, "a", "b", nbytes=5)
    a, b = rig.lease("a"), rig.lease("b")
    rig.release(b)  # but what it gave lives on
    with pytest.raises(CapacityError) as raised:
        rig.engine.wait(Room(0, 6), 0.0)
    text = str(raised.value)
    assert "a put of 6 bytes" in text
    assert "10 of 12 bytes are in use" in text
    assert "'a' (5 bytes, leased)" in text
    assert "'b' (5 bytes, still referenced after its lease)" in text
    assert not rig.engine.requests.waiting, "it waits no longer"
    assert [row.held for row in rig.state.tier_statistics()] == [1, 0]
    rig.end(a)
    rig.drop(b.copies[0])
    rig.wind_down()


def test_what_is_pushed_out_is_chosen_once_and_each_that_goes_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(64, 400, reserve=0.0)
    for letter in "abcdefgh":
        rig.put(letter, letter.encode() * 8)
    rig.run()
    chosen = 0
    enough = Pool.enough

    def counting(self: Pool, nbytes: int, copies: list[Copy], most: float = MOVED) -> list[Copy] | None:
        nonlocal chosen
        chosen += 1
        return enough(self, nbytes, copies, most)

    monkeypatch.setattr(Pool, "enough", counting)
    put = rig.put("x", bytes(64))
    rig.run()
    at_first, left = chosen, [put.room.progress]
    assert at_first > 0
    for number in range(8):
        assert not put.room.done
        assert chosen == at_first, f"after {number} write-backs"
        rig.complete(0, next(iter(rig.links[0].pending)))
        rig.run()
        left.append(put.room.progress)
    assert put.install is not None
    assert put.install.done
    assert len(set(left)) >= 8, "the deadline counts anew with each"
    rig.wind_down()


def test_every_batch_that_goes_is_progress_but_not_for_ever() -> None:
    rig = Rig(64, 4000, reserve=0.0)
    request, search = Request(), RoomSearch()
    for letter in "abcdefgh":
        rig.put(letter, letter.encode() * 8)
    rig.run()
    copies = [rig.state.pools[0].copies[letter] for letter in "abcdefgh"]
    seen = set()
    for _ in range(10):
        for copy in copies:
            copy.evictability = Evictability.WRITING_BACK
        search.push(0, copies, 64)
        for copy in copies:
            assert search.pushes(0, request)
            seen.add(request.progress)
            copy.evictability = Evictability.DIRTY
        assert not search.pushes(0, request)
        seen.add(request.progress)
    assert len(seen) == 1 + 2 * 8 + 1, "twice what the tier holds"


def test_who_was_pushed_out_in_vain_is_chosen_anew() -> None:
    rig = Rig(64, 400, reserve=0.0)
    for letter in "abcdefgh":
        rig.put(letter, letter.encode() * 8)
    rig.run()
    put = rig.put("x", bytes(32))
    rig.run()
    pushed = [transfer.key for transfer in rig.links[0].pending.values()]
    assert len(pushed) == 4
    held = [rig.lease(key) for key in pushed]  # all of them are used again as they go
    rig.settle()
    assert put.install is not None
    assert put.install.done, "the other four went"
    for lease in held:
        rig.end(lease)
    rig.wind_down()


def test_the_deadline_names_orphans() -> None:
    rig = Rig(12, 400)
    fill(rig, "a", nbytes=8)
    lease = rig.lease("a")
    rig.release(lease)
    rig.delete("a")
    with pytest.raises(CapacityError, match=r"'a' \(8 bytes, still referenced after its lease\)"):
        rig.engine.wait(Room(0, 6), 0.0)
    assert rig.tiers[0].used == 8
    rig.drop(lease.copies[0])
    rig.wind_down()


def test_a_lease_that_gave_up_holds_nothing() -> None:
    rig = Rig(12, 400)
    fill(rig, "a", "b", nbytes=5)
    evicted(rig, "a", "b")
    with pytest.raises(CapacityError):
        rig.engine.wait(Lease(["a", "b"], 0, WRITE), 0.0)
    rig.settle()  # what it had begun arrives
    assert not any(entry.leased for entry in rig.state.directory.entries())
    rig.wind_down()


def test_ctrl_c_in_a_waiting_lease_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(12, 400)
    fill(rig, "a", nbytes=5)
    evicted(rig, "a")
    token = Token()
    request = Lease(["a"], 0, WRITE, rig.state.claims.watch(token))

    def interrupted(timeout: float) -> None:
        # Granted by the engine in the very moment in which the signal comes.
        for turn in (lambda: rig.links[0].complete_all(), lambda: None):
            rig.engine.lock.release()
            try:
                rig.engine.turn()
                turn()
            finally:
                rig.engine.lock.acquire()
        rig.engine.lock.release()
        rig.engine.turn()
        rig.engine.lock.acquire()
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.engine._changed, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.engine.wait(request, 60.0)
    assert request.done
    del token, interrupted
    request.views.clear()
    rig.engine.look()
    assert not any(entry.leased for entry in rig.state.directory.entries())
    rig.wind_down()


@pytest.mark.parametrize("reserve", [0.0, 1.0])
def test_a_full_bottom_is_a_capacity_error_that_says_why(reserve: float) -> None:
    rig = Rig(8, 8, reserve=reserve)
    rig.tiers[1].refusal = "no space left on device: the disk has 0 free"  # type: ignore[attr-defined]
    for key in "ab":
        rig.put(key, key.encode() * 4)
        rig.settle()
    rig.put("c", b"cccc")
    rig.settle()
    rig.put("d", b"dddd")
    rig.settle()
    put = rig.put("e", b"eeee")
    rig.settle()
    assert isinstance(put.error, CapacityError)
    assert "no space left on device: the disk has 0 free" in str(put.error)
    flush = rig.flush()
    rig.settle()
    assert isinstance(flush.error, CapacityError)
    for key in "abcd":
        lease = rig.lease(key)
        rig.settle()
        if key in "ab":
            assert isinstance(lease.error, CapacityError), "nothing above can make way for it"
        else:
            rig.end(lease)
    for key in ("a", "b"):  # the space comes back
        rig.delete(key)
    put = rig.put("e", b"eeee")
    rig.settle()
    assert put.error is None
    assert "e" in rig.newest
    rig.wind_down()


def test_what_found_the_bottom_full_is_tried_again_when_there_is_room() -> None:
    rig = Rig(8, 8, reserve=1.0)
    for key in "abcd":
        rig.put(key, key.encode() * 4)
        rig.settle()
    copy = rig.state.directory.entry("c").copies[0]
    assert copy is not None
    assert isinstance(copy.failure, CapacityError), "in the background, where nobody hears of it"
    rig.delete("a")
    rig.delete("b")
    put = rig.put("e", b"eeee")
    rig.settle()
    assert put.error is None
    assert "e" in rig.newest
    rig.wind_down()


def test_what_is_still_referenced_is_neither_evicted_nor_written_back() -> None:
    rig = Rig(12, 400, reserve=1.0)
    fill(rig, "a", nbytes=4)
    clean = rig.lease("a")
    rig.put("b", b"bbbb")
    dirty = rig.lease("b", access=WRITE)
    rig.write(dirty, lambda nbytes: b"2" * nbytes)
    rig.release(clean)
    rig.release(dirty)
    put = rig.put("c", b"c" * 8)
    rig.settle()
    assert not put.room.done
    assert where(rig, "a") == [State.CLEAN, State.CLEAN]
    assert where(rig, "b") == [State.DIRTY, None], "its bytes may still change"
    rig.drop(clean.copies[0])
    rig.drop(dirty.copies[0])
    rig.settle()
    assert rig.newest["c"] == b"c" * 8
    rig.wind_down()


def test_larger_than_the_tier_below() -> None:
    """It can be had, but not be kept; and the others go on being written back."""
    rig = Rig(16, 8, reserve=1.0)
    rig.put("big", bytes(9))
    rig.put("a", b"aaaa")
    rig.settle()
    rig.settle()
    assert where(rig, "a") == [State.CLEAN, State.CLEAN]
    flush = rig.flush()
    rig.settle()
    assert isinstance(flush.error, CapacityError)
    assert "never fit" in str(flush.error)
    rig.wind_down()


def test_nothing_is_evicted_in_vain() -> None:
    rig = Rig(12, 400, reserve=0.0)
    fill(rig, "a", "b", "c", nbytes=4)
    held = rig.lease("b")  # in the middle: 4 + 4 are free at most, not 8 in one piece
    put = rig.put("x", bytes(8))
    rig.run()
    assert not put.room.done
    assert rig.state.evictions == 0
    rig.end(held)
    rig.settle()
    assert "x" in rig.newest
    rig.wind_down()


def test_a_lease_packs_what_it_has_in_the_middle() -> None:
    rig = Rig(10, 400, reserve=0.0)
    fill(rig, "z", nbytes=3)
    fill(rig, "a", nbytes=4)
    rig.delete("z")
    evicted_b = rig.put("b", b"bbbb")  # nowhere beside a: 3 + 3 are free
    rig.settle()
    assert evicted_b.error is None
    flush = rig.flush()
    rig.settle()
    assert flush.done
    lease = rig.lease("a", "b")
    rig.settle()
    assert lease.done
    assert lease.error is None
    rig.end(lease)
    rig.wind_down()


def test_a_lease_packs_what_it_has_and_is_not_written_back() -> None:
    rig = Rig(10, 400, reserve=0.0)
    fill(rig, "b", nbytes=4)
    evicted(rig, "b")
    fill(rig, "z", nbytes=3)
    rig.put("a", b"aaaa")
    rig.delete("z")
    assert where(rig, "a") == [State.DIRTY, None], "and there are 3 bytes on either side of it"
    lease = rig.lease("a", "b")
    rig.settle()
    assert lease.done
    assert lease.error is None
    rig.end(lease)
    rig.wind_down()


def test_a_lease_packs_among_what_need_not_leave_for_each_tensor_alone() -> None:
    rig = Rig(8, 400, reserve=0.0)
    fill(rig, "a", nbytes=4)
    evicted(rig, "a")
    fill(rig, "c", nbytes=2)
    fill(rig, "d", nbytes=4)
    fill(rig, "x", "e", nbytes=1)
    rig.delete("x")
    lease = rig.lease("d", "a")  # c, d, a byte, e: the place of d suits a, and c is in the way of the next
    rig.settle()
    assert lease.done
    assert lease.error is None
    rig.end(lease)
    rig.wind_down()


def test_the_oldest_of_two_hungry_leases_makes_progress() -> None:
    rig = Rig(12, 400, limit=1, reserve=0.0)
    fill(rig, "a", "b", "c", "d", nbytes=4)
    rig.settle()
    put = rig.put("x", b"x" * 12)  # throws out the rest
    rig.settle()
    assert put.error is None
    first = rig.lease("a", "b", "c")
    second = rig.lease("b", "c", "d")
    third = rig.lease("d", "a", access=WRITE)
    rig.settle()
    assert first.done
    assert first.error is None
    assert not second.done
    rig.end(first)
    rig.settle()
    assert second.done
    assert not third.done or isinstance(third.error, LeaseConflict)
    rig.end(second)
    rig.settle()
    assert third.done
    rig.wind_down()


def test_a_middle_tier_smaller_than_a_lease() -> None:
    rig = Rig(16, 4, 400, reserve=0.0)
    fill(rig, "a", "b", "c", nbytes=4)
    rig.put("x", b"x" * 4)
    rig.put("y", b"y" * 4)
    rig.settle()
    lease = rig.lease("a", "b", "c")
    rig.settle()
    assert lease.done
    rig.end(lease)
    rig.wind_down()


# Failures


def test_a_failed_fill_fails_only_who_asked_for_that_tensor() -> None:
    rig = Rig(40, 400)
    fill(rig, "a", "b", nbytes=4)
    evicted(rig, "a", "b")
    both, a, b, again = rig.lease("a", "b"), rig.lease("a"), rig.lease("b"), rig.lease("a", access=WRITE)
    rig.run()
    for transfer in list(rig.links[0].pending.values()):
        rig.complete(0, transfer.tag, failure(transfer) if transfer.key == "a" else None)
    rig.run()
    assert [request.error is None for request in (both, a, b, again)] == [False, False, True, False]
    assert isinstance(a.error, ReadError)
    assert a.error.key == "a"
    assert where(rig, "a") == [None, State.CLEAN]
    retry = rig.lease("a")
    rig.settle()
    assert retry.error is None
    rig.wind_down()


def test_a_failed_write_back_keeps_the_bytes_and_a_flush_tries_again() -> None:
    rig = Rig(40, 400, reserve=0.0)
    rig.put("a", b"aaaa")
    flush = rig.flush()
    rig.run()
    (transfer,) = rig.links[0].pending.values()
    rig.complete(0, transfer.tag, failure(transfer))
    rig.run()
    assert isinstance(flush.error, WriteError)
    assert where(rig, "a") == [State.DIRTY, None]
    assert rig.tiers[1].used == 0
    assert rig.flushed == 0
    rig.check()
    again = rig.flush()
    rig.settle()
    assert again.error is None
    assert rig.flushed == 1
    rig.wind_down()


def test_a_failed_write_back_reaches_who_needs_the_room_and_is_tried_again() -> None:
    rig = Rig(8, 400, reserve=0.0)
    rig.put("a", b"a" * 8)
    put = rig.put("b", b"bbbb")
    rig.run()
    (transfer,) = rig.links[0].pending.values()
    rig.complete(0, transfer.tag, failure(transfer))
    rig.run()
    assert isinstance(put.error, WriteError)
    assert put.error.key == "a"
    again = rig.put("b", b"bbbb")
    rig.settle()
    assert again.error is None
    assert rig.newest["b"] == b"bbbb"
    rig.wind_down()


def test_background_write_backs_do_not_try_a_failing_one_for_ever() -> None:
    rig = Rig(8, 400, reserve=1.0)
    rig.put("a", b"aaaa")
    for _ in range(20):
        rig.run()
        for transfer in list(rig.links[0].pending.values()):
            rig.complete(0, transfer.tag, failure(transfer))
    assert len(rig.links[0].started) == 1
    rig.wind_down()


def test_a_failure_below_does_not_end_the_engine() -> None:
    """Background write-backs of tier 0 need room in tier 1, whose own write-backs fail."""
    rig = Rig(8, 4, 400, reserve=1.0)
    for number in range(12):
        rig.put("ab"[number % 2], bytes([number]) * 4)
        for _ in range(4):
            rig.run()
            rig.links[0].complete_all()
            for transfer in list(rig.links[1].pending.values()):
                rig.complete(1, transfer.tag, failure(transfer))
    assert rig.links[1].started
    rig.wind_down()


def test_a_lease_below_an_unwritable_copy_fails() -> None:
    rig = Rig(8, 8, 400, reserve=0.0)
    rig.put("a", b"aaaa")
    lease = rig.lease("a", tier=1)
    rig.run()
    (transfer,) = rig.links[0].pending.values()
    rig.complete(0, transfer.tag, failure(transfer))
    rig.run()
    assert isinstance(lease.error, WriteError)
    assert not rig.links[0].pending
    rig.wind_down()


# Flush


def test_a_flush_under_a_write_lease_raises() -> None:
    rig = Rig(8, 400)
    rig.put("a", b"aaaa")
    lease = rig.lease("a", access=WRITE)
    rig.settle()
    flush = rig.flush()
    assert isinstance(flush.error, LeaseConflict)
    rig.end(lease)
    again = rig.flush()
    rig.settle()
    assert again.error is None
    rig.wind_down()


def test_a_write_lease_during_a_flush_waits_for_its_tensor_alone() -> None:
    rig = Rig(16, 400, reserve=0.0, limit=1)
    for key in "abc":
        rig.put(key, key.encode() * 4)
    flush = rig.flush(Urgency.WRITEBACK)
    rig.run()
    lease = rig.lease("c", access=WRITE)
    other = rig.lease("b")
    rig.run()
    assert other.done, "reading waits for nothing"
    assert not lease.done
    rig.links[0].complete_all()  # of a
    rig.run()
    assert not lease.done
    rig.links[0].complete_all()  # of c, which was hurried
    rig.run()
    assert lease.done
    assert not flush.done
    rig.write(lease, lambda nbytes: b"2" * nbytes)
    rig.end(lease)
    rig.end(other)
    rig.settle()
    assert flush.error is None
    assert rig.flushed == 1
    rig.wind_down()


@pytest.mark.parametrize("what", ["put", "delete"])
def test_what_a_flush_has_still_to_write_is_replaced_or_deleted_after_that(what: str) -> None:
    rig = Rig(12, 400, reserve=0.0, limit=1)
    rig.put("a", b"aaaa")
    rig.put("b", b"bbbb")
    flush = rig.flush(Urgency.WRITEBACK)
    rig.run()
    change = rig.put("b", b"BBBB") if what == "put" else rig.delete("b")
    rig.settle()
    assert change.error is None
    assert flush.error is None
    assert rig.flushed == 1
    rig.wind_down()


def test_a_flush_waits_for_the_one_before() -> None:
    rig = Rig(12, 400, reserve=0.0, limit=1)
    rig.put("a", b"aaaa")
    first = rig.flush()
    second = rig.flush()
    rig.run()
    assert rig.flushed == 0
    rig.settle()
    assert first.done
    assert second.done
    assert rig.flushed == 2
    rig.wind_down()


def test_a_flush_copies_what_is_still_referenced() -> None:
    rig = Rig(12, 400, reserve=0.0)
    rig.put("a", b"aaaa")
    rig.settle()
    lease = rig.lease("a", access=WRITE)
    rig.write(lease, lambda nbytes: b"1" * nbytes)
    rig.release(lease)
    flush = rig.flush()
    rig.settle()
    assert flush.error is None
    (copy,) = lease.copies
    assert copy.state is State.EMPTY
    rig.tiers[0].write(copy.slot, b"late")  # through the alias: its own memory by now
    rig.expected[copy] = b"late"
    rig.check()
    rig.drop(copy)
    rig.wind_down()


def test_a_flush_under_a_read_lease() -> None:
    rig = Rig(12, 400, reserve=0.0)
    rig.put("a", b"aaaa")
    lease = rig.lease("a")
    flush = rig.flush()
    rig.settle()
    assert flush.error is None
    rig.end(lease)
    rig.wind_down()


# Waking up


def test_who_waits_is_woken_by_what_makes_room_in_a_callers_thread() -> None:
    rig = Rig(8, 400, reserve=0.0)
    fill(rig, "a", "b", nbytes=4)
    a, b = rig.lease("a"), rig.lease("b")
    rig.release(a)
    rig.release(b)
    rig.put("x", b"xxxxxxxx")
    rig.run()
    woken(rig)
    rig.drop(a.copies[0])
    assert rig.engine._sleep(select.poll()) == [], "an alias that died is looked for while somebody waits"
    assert rig.state.claims.ended
    rig.delete("a")
    assert woken(rig), "by a deletion"
    rig.drop(b.copies[0])
    rig.settle()
    assert rig.newest["x"] == b"xxxxxxxx"
    rig.wind_down()


def test_a_thread_that_was_woken_is_not_woken_again_before_it_looks() -> None:
    rig = Rig(8, 400, reserve=0.0)
    fill(rig, "a", nbytes=4)
    rig.run()
    assert not woken(rig)
    wakes = rig.engine.wakes
    for _ in range(2):
        for _ in range(3):
            rig.engine._poke()
        rig.engine.turn()
        assert not woken(rig), "what was announced has been seen"
    assert rig.engine.wakes == wakes + 2
    rig.wind_down()


def test_a_resident_lease_wakes_nobody() -> None:
    rig = Rig(8, 400, reserve=0.0)
    fill(rig, "a", nbytes=4)
    woken(rig)
    lease = rig.lease("a")
    assert lease.done
    rig.end(lease)
    assert not woken(rig)
    rig.wind_down()


def test_a_request_that_is_done_does_not_keep_the_engine_turning() -> None:
    rig = Rig(8, 400, reserve=0.0)
    fill(rig, "a", nbytes=4)
    evicted(rig, "a")
    token = Token()
    request = Lease(["a"], 0, READ, rig.state.claims.watch(token))
    rig.submit(request)
    rig.settle()
    assert request.done
    assert not rig.engine.turn()
    del token
    request.views.clear()
    rig.wind_down()


def test_a_request_is_attempted_where_something_changed() -> None:
    attempts = []

    class Counted(Lease):
        def attempt(self, scheduler: Scheduler) -> bool:
            attempts.append(self)
            return super().attempt(scheduler)

    rig = Rig(8, 400, reserve=0.0)
    fill(rig, *"ab", nbytes=4)
    evicted(rig, *"ab")
    rig.run()
    token = Token()
    request = Counted(["a", "b"], 0, READ, rig.state.claims.watch(token))
    rig.submit(request)
    attempts.clear()  # the rig has no thread, and attempts what is asked for at once
    for _ in range(3):
        rig.run()
    assert len(attempts) == 1, "who asked woke the engine; what started then brings nobody closer"
    first, second = rig.links[0].pending
    rig.complete(0, first)
    rig.run()
    assert len(attempts) == 2
    rig.complete(0, second)
    rig.run()
    assert len(attempts) == 3
    assert request.done
    del token
    request.views.clear()
    rig.wind_down()


def test_a_stopped_engine_refuses() -> None:
    rig = Rig(8, 400)
    rig.engine.start()
    rig.engine.stop()
    rig.engine.stop()
    with pytest.raises(StoreClosed):
        rig.engine.wait(Lease(["a"], 0, READ))


def test_an_internal_error_reaches_who_waits() -> None:
    rig = Rig(8, 400)
    fill(rig, "a", nbytes=4)
    evicted(rig, "a")

    def broken(transfer: Transfer) -> bool:
        raise ZeroDivisionError("in a link")

    rig.links[0].start = broken  # type: ignore[method-assign]
    rig.engine.start()
    with pytest.raises(TieredError, match="ZeroDivisionError"):
        rig.engine.wait(Lease(["a"], 0, READ), 60.0)
    rig.engine.stop()
