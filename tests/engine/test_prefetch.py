"""Following a known order: the plan, the policy, and, in simulated time, that what is needed arrives when it is needed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.eviction import Copied, EvictionContract, NewPolicy
from tests.fakes import FakeTier, ManualLink, NoDraft, fake_checksums
from tiered.engine.claims import Token
from tiered.engine.engine import Engine, EngineConfig
from tiered.engine.policy import LRU, NEVER, NextUse, OrderPlan, Touch
from tiered.engine.requests import Install, Lease, Room
from tiered.engine.residency import State
from tiered.engine.retention import PRICES, RetentionPlan, affordable, bytes_moved, largest_streamed, plan_retention, room_for
from tiered.engine.snapshot import Flush
from tiered.types import Access, Direction, TensorSpec, Then, Transfer, Urgency, Use


def touches(keys: Sequence[str]) -> list[Touch]:
    return [Touch(key) for key in keys]


def planned(keys: str) -> OrderPlan:
    return OrderPlan(touches(keys))


# The plan


def test_next_uses_go_round() -> None:
    plan = planned("abcab")
    assert [plan.next_use(key) for key in "abc"] == [0, 1, 2]
    plan.happened("a")
    assert [plan.next_use(key) for key in "abcx"] == [3, 1, 2, NEVER]
    for key in "bcab":
        plan.happened(key)
    assert plan.cursor == 5
    assert [plan.next_use(key) for key in "abc"] == [5, 6, 7]


def test_what_is_computed_is_learnt_from_round_to_round() -> None:
    plan = planned("aab")
    assert plan.seconds_until(7) == 0.0, "nothing is known"
    for position, seconds in enumerate((1.0, 2.0, 10.0)):
        plan.took(position, seconds)
    assert [plan.seconds_until(position) for position in range(8)] == [0, 1, 3, 13, 14, 16, 26, 27]
    plan.happened("a")
    assert plan.seconds_until(4) == 13
    for position, seconds in enumerate((3.0, 2.0, 10.0)):
        plan.took(position, seconds)
    assert plan.seconds_until(4) == 14, "half of what was known, half of what is new"


def test_a_stray_touch_leaves_the_place() -> None:
    plan = planned("abcdef")
    plan.happened("a")
    plan.happened("e")  # once, out of the order
    assert plan.cursor == 1
    plan.happened("x")  # not in it at all
    plan.happened("b")
    assert plan.cursor == 2


def test_two_touches_in_a_row_tell_where_the_loop_is() -> None:
    plan = planned("abcdef")
    plan.happened("a")
    plan.happened("d")  # b and c were left out
    plan.happened("e")
    assert plan.at(plan.cursor).key == "f"
    assert plan.cursor == 5


def test_a_changed_order_is_planned_anew_from_where_it_changes() -> None:
    plan = planned("abcdef")
    for key in "abc":
        plan.happened(key)
    assert plan.replace(touches("abcdxyz")) == 3
    assert plan.at(plan.cursor).key == "d", "its place in the common beginning stays"
    assert [plan.next_use(key) for key in "dxyzaef"] == [3, 4, 5, 6, 7, NEVER, NEVER]
    assert plan.replace(touches("abcdxyz")) == 0
    assert plan.replace(touches("q")) == 1
    assert (plan.cursor, plan.next_use("q"), plan.next_use("a")) == (0, 0, NEVER)


def planned_from(cursor: int, order: list[str], key: str) -> float:
    """Looked for touch by touch, a round far."""
    return next((at for at in range(cursor, cursor + len(order)) if order[at % len(order)] == key), NEVER)


@settings(deadline=None)
@given(
    first=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12),
    second=st.lists(st.sampled_from("abcde"), min_size=1, max_size=12),
    steps=st.integers(0, 30),
)
def test_a_replaced_plan_is_like_a_new_one(first: list[str], second: list[str], steps: int) -> None:
    replaced, fresh = OrderPlan(touches(first)), OrderPlan(touches(second))
    for step in range(steps):
        replaced.happened(first[step % len(first)])
        for key in "abcd":
            assert replaced.next_use(key) == planned_from(replaced.cursor, first, key), "as if it remembered nothing"
    replaced.replace(touches(second))
    while fresh.cursor < replaced.cursor:
        fresh.happened(second[fresh.cursor % len(second)])
    for key in "abcde":
        assert replaced.next_use(key) == fresh.next_use(key)
    for position in range(fresh.cursor, fresh.cursor + 30):
        assert replaced.at(position) == fresh.at(position)


def test_an_order_may_end() -> None:
    plan = OrderPlan(touches("abcab"), "end")
    assert [plan.next_use(key) for key in "abcx"] == [0, 1, 2, NEVER]
    for key in "abc":
        plan.happened(key)
    assert [plan.next_use(key) for key in "abc"] == [3, 4, NEVER]
    assert (plan.until, plan.over) == (5, False)
    for key in "abab":
        plan.happened(key)
    assert (plan.cursor, plan.until, plan.over) == (5, 5, True)
    assert [plan.next_use(key) for key in "abc"] == [NEVER] * 3
    assert plan.seconds_until(plan.until) == 0.0
    assert plan.replace(touches("abcab")) == 0
    assert (plan.cursor, plan.next_use("c"), plan.over) == (0, 2, False), "again, and again and again"


def test_a_cycle_can_be_told_that_this_round_is_the_last() -> None:
    plan = planned("abc")
    for key in "abca":
        plan.happened(key)
    assert plan.replace(touches("abc"), "end") == 0
    assert [plan.next_use(key) for key in "abc"] == [NEVER, 1, 2]


@settings(deadline=None)
@given(
    order=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12),
    loop=st.lists(st.sampled_from("abcdx"), max_size=30),
)
def test_a_plan_that_ends_is_a_look_at_the_rest(order: list[str], loop: list[str]) -> None:
    plan = OrderPlan(touches(order), "end")
    for key in loop:
        before, due = plan.cursor, order[plan.cursor : plan.cursor + 1] == [key]
        plan.happened(key)
        assert before <= plan.cursor <= len(order)
        assert plan.cursor == before + 1 if due else plan.cursor == before or order[plan.cursor - 1] == key
        rest = order[plan.cursor :]
        for other in "abcdx":
            assert plan.next_use(other) == (plan.cursor + rest.index(other) if other in rest else NEVER)
        assert plan.over == (not rest)
        assert plan.until == len(order)


# The policy


class TestNextUse(EvictionContract):
    @pytest.fixture
    def new_policy(self) -> NewPolicy:
        order = planned("t0t1t2t3t4t5t6t7")
        return lambda: NextUse(order.next_use, lambda: order.cursor)


class TestNextUseWithAPrice(EvictionContract):
    @pytest.fixture
    def new_policy(self) -> NewPolicy:
        return lambda: NextUse(lambda key: float(ord(key[1])), lambda: 0, price=2.5)


def test_the_furthest_goes_first_and_what_never_comes_before_it() -> None:
    order = planned("abcd")
    policy = NextUse(order.next_use, lambda: order.cursor)
    for key in "abcdx":
        policy.touched(key)
    among = {key: Copied() for key in "abcdx"}
    assert list(policy.victims(among)) == ["x", "d", "c", "b", "a"]
    order.happened("a")
    policy.touched("a")
    assert list(policy.victims(among)) == ["x", "a", "d", "c", "b"]


def test_what_was_left_out_is_needed_when_it_comes_next() -> None:
    order = planned("abcd")
    policy = NextUse(order.next_use, lambda: order.cursor)
    for key in "abcd":
        policy.touched(key)
    for key in "acd":  # not b
        order.happened(key)
        policy.touched(key)
    order.happened("a")
    policy.touched("a")
    assert list(policy.victims({key: Copied() for key in "abcd"})) == ["a", "d", "c", "b"]


def test_of_those_that_never_come_the_least_recently_used_goes_first() -> None:
    order = planned("ab")
    policy = NextUse(order.next_use, lambda: order.cursor)
    for key in ("x", "z", "y", "a", "z"):
        policy.touched(key)
    assert list(policy.victims({key: Copied() for key in "axyz"})) == ["x", "y", "z", "a"]


def test_a_dirty_one_counts_as_needed_sooner_by_its_price() -> None:
    order = planned("abcdef")
    among = {"c": Copied(), "d": Copied(dirty=True), "e": Copied(dirty=True), "f": Copied(dirty=True)}
    for price, expected in ((0.0, "fedc"), (1.5, "fecd"), (2.5, "fced"), (9.0, "cfed")):
        policy = NextUse(order.next_use, lambda: order.cursor, price=price)
        for key in "abcdef":
            policy.touched(key)
        assert list(policy.victims(among)) == list(expected)


# What to keep


@settings(deadline=None, max_examples=60)
@given(
    order=st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(Use)), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=6, max_size=6),
    budget=st.integers(5, 20),
    then=st.sampled_from(["again", "end"]),
)
def test_a_decision_is_no_worse_than_belady(order: list[tuple[str, Use]], sizes: list[int], budget: int, then: Then) -> None:
    size = dict(zip("abcdef", sizes, strict=True))
    keys, uses, nbytes = [k for k, _ in order], [u for _, u in order], [size[k] for k, _ in order]
    belady = bytes_moved(keys, uses, nbytes, budget, RetentionPlan(), then)
    decision = plan_retention(keys, uses, nbytes, budget, then=then)
    assert bytes_moved(keys, uses, nbytes, budget, decision, then) <= belady


@given(
    order=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([Use.READ, Use.WRITE])), min_size=2, max_size=40),
    budget=st.integers(2, 7),
)
def test_tensors_stay_for_good_only_where_that_saves_bytes(order: list[tuple[str, Use]], budget: int) -> None:
    keys, uses = [key for key, _ in order], [use for _, use in order]
    nbytes = [100] * len(order)
    decision = plan_retention(keys, uses, nbytes, 100 * budget)
    if decision.keep is None:
        return
    lengths = [next(n for n in range(1, len(keys) + 1) if keys[(i + n) % len(keys)] == key) for i, key in enumerate(keys)]
    mean = sum(lengths) / len(lengths)
    moved = bytes_moved(keys, uses, nbytes, 100 * budget, decision)
    for price in PRICES:
        assert moved < 0.99 * bytes_moved(keys, uses, nbytes, 100 * budget, RetentionPlan(price * mean))


def test_with_room_to_spare_a_decision_says_of_each_touch_whether_to_keep() -> None:
    kept = plan_retention("abcd", [Use.READ] * 4, [1] * 4, 3, spare=1).keep
    assert kept is not None
    assert len(kept) == 4
    assert sum(kept) == 1, "beside the one that is touched there is room for one"


def test_of_tensors_that_are_read_those_of_the_largest_kind_are_streamed() -> None:
    """An embedding and a head of 10 units, and 24 layers with a norm of 1 and a matrix of 4: 24 bytes of 140 do not fit."""
    layers = [(f"{kind}{number}", size) for number in range(24) for kind, size in (("norm", 1), ("matrix", 4))]
    keys, sizes = zip(("embedding", 10), *layers, ("head", 10), strict=True)
    uses = [Use.READ] * len(keys)
    assert largest_streamed(keys, uses, sizes, 116) == 4
    kept = plan_retention(keys, uses, sizes, 116, spare=8).keep
    assert kept is not None
    left = [key for key, stays in zip(keys, kept, strict=True) if not stays]
    assert all(key.startswith("matrix") for key in left)
    numbers = [int(key.removeprefix("matrix")) for key in left]
    assert len(numbers) == 9  # 36 bytes: what does not fit, the room for read-ahead, and the one that is in use
    assert max(after - before for before, after in itertools.pairwise(numbers)) <= 3 + 1
    assert largest_streamed(keys, [Use.WRITE] * len(keys), sizes, 116) == 10, "of an order that also writes, the largest of all"


@given(
    sizes=st.lists(st.sampled_from([1, 2, 5, 9]), min_size=2, max_size=30), share=st.floats(0.2, 0.95), spare=st.integers(1, 9)
)
def test_streaming_one_kind_moves_little_more_than_belady(
    sizes: list[int], share: float, spare: int
) -> None:
    keys, uses, capacity = [str(i) for i in range(len(sizes))], [Use.READ] * len(sizes), int(sum(sizes) * share) + max(sizes)
    plan = plan_retention(keys, uses, sizes, capacity, spare=spare)
    budget = max(capacity - spare, max(sizes))
    belady = bytes_moved(keys, uses, sizes, budget, RetentionPlan())
    in_use = max(sizes)  # a tensor that always stays leaves room for each that is in use; Belady's choice changes with it
    assert bytes_moved(keys, uses, sizes, budget, plan) <= belady + in_use + sum(set(sizes))


def test_room_that_would_move_what_is_used_often_is_not_left() -> None:
    """Ten tensors that are used a hundred times a round just fit, beside a thousand that are used once."""
    keys = [f"often{number}" for _ in range(100) for number in range(10)] + [f"once{number}" for number in range(1_000)]
    uses, sizes = [Use.READ] * len(keys), [100] * len(keys)
    tight, loose = 1_100, 2_600  # the ten, and one that comes and goes; and much more
    assert affordable(keys, uses, sizes, tight, 400, "again") == 100
    assert affordable(keys, uses, sizes, loose, 400, "again") == 400
    assert affordable(keys, uses, sizes, tight, 100, "again") == 100
    assert affordable([], [], [], tight, 100, "again") == 100


# In simulated time


class Simulation:
    """A loop over an engine, and a disk that moves one transfer after the other at a rate. Time is a number."""

    def __init__(self, *, keys: int, room: int, compute: float, fetch: float, nbytes: int = 4) -> None:
        self.now, self.free_at = 0.0, 0.0
        self.compute, self.per_byte, self.nbytes = compute, fetch / nbytes, nbytes
        self.tiers = [FakeTier("dram", room * nbytes), FakeTier("nvme", 2 * keys * nbytes)]
        self.link = ManualLink(self.tiers[0], self.tiers[1], checksums=fake_checksums)
        self.engine = Engine(self.tiers, [self.link], [LRU(), LRU()], EngineConfig(0.0, 0.5, clock=lambda: self.now))
        self.ends: dict[int, float] = {}
        self.stalled, self.busy = 0.0, 0.0
        self.keys = [f"k{index:02}" for index in range(keys)]
        for key in self.keys:
            self._put(key, nbytes)
        self._run(Flush(NoDraft(), lambda *_: None))
        self.per_key = fetch

    def _submit(self, request: Room | Install | Lease | Flush) -> bool:
        with self.engine.lock:
            return self.engine._submit(request)

    def _run(self, request: Room | Install | Lease | Flush) -> None:
        request.deferred = False  # there is no thread
        done = self._submit(request)
        self.turn()
        while not done and not request.done:
            self.next_end()
        assert request.error is None, request.error

    def _put(self, key: str, nbytes: int) -> None:
        room = Room(0, nbytes)
        self._run(room)
        assert room.slot is not None
        self._run(Install(key, TensorSpec("uint8", (nbytes,), 1), room))

    def turn(self) -> None:
        while self.engine.turn():
            pass
        for tag, transfer in self.link.pending.items():
            if tag not in self.ends:
                seconds = transfer.nbytes * self.per_byte
                self.busy += seconds
                self.free_at = self.ends[tag] = max(self.now, self.free_at) + seconds

    def next_end(self) -> None:
        tag = min(self.link.pending, key=self.ends.__getitem__)
        self.now = max(self.now, self.ends.pop(tag))
        self.link.complete(tag)
        self.turn()

    def until(self, time: float) -> None:
        while any(self.ends[tag] <= time for tag in self.link.pending):
            self.next_end()
        self.now = time

    def follow(self, keys: Sequence[str], then: Then = "again", use: Use = Use.READ, room: int | None = None) -> None:
        """As the store does it; ``use`` is what it expects of each, ``room`` the bytes that are left to what comes and goes."""
        order = [Touch(key, None, use, self.nbytes) for key in keys]
        capacity = self.tiers[0].capacity
        if room is None:
            room = room_for(capacity, len(set(keys)) * self.nbytes - capacity, self.nbytes)
        sizes = [self.nbytes] * len(order)
        decision = plan_retention(keys, [use] * len(order), sizes, capacity, then=then, spare=room)
        self.engine.follow(order, lambda plan: [NextUse.along(plan, decision.price, decision.keep)], [room], then)
        self.turn()

    def touch(self, key: str, access: Access = Access.READ) -> None:
        asked = self.now
        token = Token()
        lease = Lease([key], 0, access, self.engine.state.claims.watch(token))
        self._run(lease)
        self.stalled += self.now - asked
        with self.engine.lock:
            self.engine._count(lease, asked, self.now == asked)
        self.until(self.now + self.compute)
        del token
        lease.views.clear()
        self.engine.released()
        self.turn()

    def round(self, keys: Sequence[str], access: Access = Access.READ) -> tuple[float, float, int]:
        """Seconds stalled, seconds in all and tensors moved up while every key is touched once."""
        began, stalled, moved = self.now, self.stalled, self._ups()
        for key in keys:
            self.touch(key, access)
        return self.stalled - stalled, self.now - began, self._ups() - moved

    def _ups(self) -> int:
        return sum(transfer.direction is Direction.UP for transfer in self.link.started)


def steady(simulation: Simulation, order: Sequence[str], rounds: int = 6) -> tuple[float, float, int]:
    simulation.follow(order)
    for _ in range(rounds):
        found = simulation.round(order)
    assert simulation.engine.state.prefetched_unused == 0
    assert simulation.engine.state.prefetched > 0
    simulation.engine.state.directory.check()
    for place in simulation.engine.state.pools:
        place.check()
    return found


@pytest.mark.parametrize(("room", "keys"), [(12, 40), (20, 40), (34, 40)])
@pytest.mark.parametrize(("compute", "fetch"), [(1.0, 0.2), (1.0, 0.5), (1.0, 0.9)])
def test_a_disk_that_is_quick_enough_is_never_waited_for(room: int, keys: int, compute: float, fetch: float) -> None:
    simulation = Simulation(keys=keys, room=room, compute=compute, fetch=fetch)
    stalled, seconds, moved = steady(simulation, simulation.keys)
    assert stalled == pytest.approx(0.0, abs=1e-9)
    assert seconds == pytest.approx(keys * compute)
    assert keys - room <= moved <= keys - room + room // 4 + 3, "what has room beside what is on its way is not moved"


@pytest.mark.parametrize("fetch", [1.5, 2.0, 5.0])
def test_a_slow_disk_is_waited_for_as_long_as_it_takes_and_no_longer(fetch: float) -> None:
    """Everything is missing but what lies in a few slots: a round takes what the disk needs for what it moves."""
    simulation = Simulation(keys=40, room=12, compute=1.0, fetch=fetch)
    order = simulation.keys
    simulation.follow(order)
    stalled = seconds = moved = 0.0
    for number in range(12):
        found = simulation.round(order)
        if number >= 4:
            stalled, seconds, moved = stalled + found[0], seconds + found[1], moved + found[2]
    model = max(0.0, moved * fetch - 8 * 40 * 1.0)
    edges = 3 * fetch  # what was under way when the first and the last of these rounds began
    assert stalled == pytest.approx(model, abs=edges)
    assert seconds == pytest.approx(max(moved * fetch, 8 * 40 * 1.0), abs=edges)
    assert simulation.engine.state.prefetched_unused == 0


def test_without_following_every_fetch_is_waited_for() -> None:
    simulation = Simulation(keys=40, room=12, compute=1.0, fetch=0.5)
    for _ in range(3):
        stalled, _, moved = simulation.round(simulation.keys)
    assert moved == 40
    assert stalled == pytest.approx(40 * 0.5)


def test_a_burst_is_prepared_for() -> None:
    """Ten short touches after a long one: the disk has to begin long before the first of them, for all that lack, where so
    much room is left to them."""
    simulation = Simulation(keys=40, room=30, compute=0.0, fetch=1.0)
    order = simulation.keys

    def loop() -> float:
        before = simulation.stalled
        for number, key in enumerate(order):
            simulation.compute = 20.0 if number % 10 == 0 else 0.01
            simulation.touch(key)
        return simulation.stalled - before

    simulation.follow(order, room=4 * simulation.nbytes)
    for _ in range(4):
        loop()
    assert loop() == pytest.approx(0.0, abs=1e-9)


def test_write_backs_are_made_in_time_for_what_comes() -> None:
    simulation = Simulation(keys=40, room=20, compute=1.0, fetch=0.3)
    order = simulation.keys
    simulation.follow(order, use=Use.WRITE)
    for _ in range(5):
        stalled, _, _ = simulation.round(order, Access.WRITE)
    assert stalled == pytest.approx(0.0, abs=1e-9)
    assert simulation.engine.state.prefetched_unused == 0


def test_a_fetch_begins_no_earlier_than_it_must() -> None:
    """With everything resident but one tensor, that one is fetched when its time has come, not at once."""
    simulation = Simulation(keys=20, room=19, compute=1.0, fetch=0.5)
    order = simulation.keys
    simulation.follow(order)
    for _ in range(4):
        simulation.round(order)
    early = []
    for key in order:
        for transfer in simulation.link.pending.values():
            if transfer.direction is Direction.UP:
                early.append(order.index(transfer.key) - order.index(key))
        simulation.touch(key)
    assert all(distance % 20 <= 2 for distance in early), early


def test_following_ends() -> None:
    simulation = Simulation(keys=8, room=4, compute=1.0, fetch=1.0)
    simulation.follow(simulation.keys)
    simulation.round(simulation.keys)
    assert simulation.engine.follow([], lambda plan: [], [0]) == 0
    assert simulation.engine.read_ahead is None
    before = len(simulation.link.started)
    simulation.turn()
    assert len(simulation.link.started) == before
    assert all(isinstance(place.policy, LRU) for place in simulation.engine.state.pools)


def test_nothing_is_fetched_beyond_the_end_of_an_order() -> None:
    simulation = Simulation(keys=40, room=12, compute=1.0, fetch=0.5)
    first, rest = simulation.keys[:20], simulation.keys[20:]
    simulation.follow(first, "end")
    simulation.round(first[:-1])
    assert simulation.engine.read_ahead is not None
    simulation.round(first[-1:])
    state = simulation.engine.state
    assert state.order is None
    assert all(isinstance(place.policy, LRU) for place in state.pools), "all is as before"
    ups = [transfer.key for transfer in simulation.link.started if transfer.direction is Direction.UP]
    assert sorted(ups) == first, "each once"
    assert (state.prefetched > 0, state.prefetched_unused) == (True, 0)
    assert simulation.round(rest) == (20 * 0.5, 20 * 1.5, 20), "and on demand from there on"


def test_after_the_end_of_an_order_room_is_kept_ready_again() -> None:
    simulation = Simulation(keys=8, room=8, compute=1.0, fetch=0.0)
    simulation.round(simulation.keys)
    place = simulation.engine.state.pools[0]
    simulation.follow(simulation.keys, "end")
    simulation.round(simulation.keys[:-1], Access.WRITE)
    assert place.ready == 4, "nothing has to leave, and nothing is written"
    simulation.touch(simulation.keys[-1], Access.WRITE)
    assert place.ready >= 4 * 4, "half of the tier"


def test_random_loops_stray_and_nothing_is_lost() -> None:
    source = random.Random(3)
    simulation = Simulation(keys=20, room=9, compute=0.3, fetch=0.2)
    for _ in range(6):
        order = source.choices(simulation.keys, k=30)
        simulation.follow(order, source.choice(["again", "end"]))
        for key in order:
            if source.random() < 0.15:
                simulation.touch(source.choice(simulation.keys), source.choice(list(Access)))
            if source.random() < 0.9:
                simulation.touch(key, source.choice(list(Access)))
    simulation._run(Flush(NoDraft(), lambda *_: None))
    for entry in simulation.engine.state.directory.entries():
        assert any(copy is not None and copy.state in (State.CLEAN, State.DIRTY) for copy in entry.copies)
    assert {t.urgency for t in simulation.link.started if isinstance(t, Transfer)} >= {Urgency.PREFETCH}


def test_what_is_fetched_takes_the_place_of_nothing_that_a_lease_waits_for() -> None:
    """A lease of several may want what a plan gave up."""
    source = random.Random(0)
    for _ in range(60):
        keys = source.randint(8, 20)
        room = source.randint(keys // 2 + 2, keys - 1)
        simulation = Simulation(keys=keys, room=room, compute=source.choice([0.0, 0.1]), fetch=1.0)
        order = source.sample(simulation.keys, keys)
        simulation.follow(order)
        for _ in range(4):
            for key, other in zip(order, [*order[1:], order[0]], strict=True):
                if source.random() < 0.5:
                    simulation.touch(key)
                    continue
                wanted = [source.choice(simulation.keys), key, other][source.randint(0, 1) :]
                token = Token()
                lease = Lease(wanted, 0, Access.READ, simulation.engine.state.claims.watch(token))
                if len(set(lease.keys)) == len(lease.keys):
                    simulation._run(lease)
                    del token
                    lease.views.clear()
                    simulation.engine.released()
                    simulation.turn()
        for place in simulation.engine.state.pools:
            place.check()
