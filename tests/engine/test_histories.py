"""Random histories of an engine: each step is one thing that a thread, the collector or a device may do next."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.fakes import FakeTier, MovableTier
from tests.rig import WRITE, Put, Rig, failure
from tiered.engine.policy import Touch
from tiered.engine.requests import Lease, Request
from tiered.engine.snapshot import Flush
from tiered.errors import CapacityError, CommitError, KeyNotFound, LeaseConflict, ReadError, TransferError
from tiered.types import Access, Urgency, Use

KEYS = ("a", "b", "c", "d", "e")
LARGEST = 4
SHAPES = (
    (12, 400),
    (9, 400),
    (12, 16, 400),
    (12, 12, 400),
    (16, 8, 400),  # a middle tier smaller than the top
    (12, 14, 9, 400),
)
WITHOUT_DISK = ((12,), (9,), (12, 16), (9, 30), (12, 9))
TOUCHES = st.builds(Touch, st.sampled_from(KEYS), st.sampled_from((None, "t0", "t1")), st.sampled_from(Use))


class Histories(RuleBasedStateMachine):
    """Each rule is one thing that a thread, the collector or a device may do next."""

    @initialize(
        shape=st.sampled_from((*SHAPES, *WITHOUT_DISK)),
        limit=st.sampled_from([1, 2, 100]),
        reserve=st.sampled_from([0.0, 0.5, 1.0]),
        memory=st.sampled_from([FakeTier, MovableTier]),
    )
    def open(self, shape: tuple[int, ...], limit: int, reserve: float, memory: type[FakeTier]) -> None:
        self.disk = shape in SHAPES
        self.rig = Rig(*shape, limit=limit, reserve=reserve, memories=len(shape) - self.disk, memory=memory)
        self.numbers = iter(range(1, 1 << 30))
        self.failures = 0
        self.seen: list[Request | Put] = []
        self.order: list[Touch] = []

    def data(self, nbytes: int) -> bytes:
        return next(self.numbers).to_bytes(4, "little")[:nbytes].ljust(nbytes, b"-")

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(1, LARGEST), tier=st.sampled_from([0, 0, 1, 2]))
    def put(self, key: str, nbytes: int, tier: int) -> None:
        self.seen.append(self.rig.put(key, self.data(nbytes), tier % self.rig.memories))

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        tier=st.integers(0, 2),
        access=st.sampled_from(Access),
    )
    def lease(self, keys: list[str], tier: int, access: Access) -> None:
        self.seen.append(self.rig.lease(*keys, tier=tier % self.rig.memories, access=access))

    @rule(which=st.integers(0, 7))
    def write(self, which: int) -> None:
        writing = [lease for lease in self.rig.held if lease.access is WRITE]
        if writing:
            self.rig.write(writing[which % len(writing)], self.data)

    @rule(which=st.integers(0, 7))
    def release(self, which: int) -> None:
        if self.rig.held:
            self.rig.release(self.rig.held[which % len(self.rig.held)])

    @rule(which=st.integers(0, 7))
    def drop(self, which: int) -> None:
        """Also while the lease is open: nobody has to keep what it gave."""
        if self.rig.aliases:
            self.rig.drop(self.rig.aliases[which % len(self.rig.aliases)])

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: str) -> None:
        self.seen.append(self.rig.delete(key))

    @rule(
        keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True),
        tier=st.integers(0, 2),
        urgency=st.sampled_from([Urgency.PREFETCH, Urgency.SPECULATIVE]),
    )
    def hint(self, keys: list[str], tier: int, urgency: Urgency) -> None:
        self.rig.hint(*keys, tier=tier % self.rig.memories, urgency=urgency)

    @rule(order=st.lists(TOUCHES, max_size=12))
    def follow(self, order: list[Touch]) -> None:
        """Also one that does not fit, or is not followed; an empty one ends it."""
        there = [touch for touch in order if touch.tier != "t1" or self.rig.memories > 1]
        self.order = there
        self.rig.follow(there)

    @rule(drop=st.integers(0, 11), add=st.lists(TOUCHES, max_size=3))
    def follow_another(self, drop: int, add: list[Touch]) -> None:
        """It begins as the last one did."""
        self.follow([*self.order[:drop], *add])

    @rule(which=st.integers(0, 7))
    def obey(self, which: int) -> None:
        """Do what the order says next."""
        ahead = self.rig.engine.read_ahead
        if ahead is not None:
            touch = ahead.order.plan.at(ahead.order.plan.cursor)
            tier = 0 if touch.tier is None else int(touch.tier[1:])
            if touch.use is Use.PUT:
                self.put(touch.key, 1 + which % LARGEST, tier)
            else:
                self.lease([touch.key], tier, Access(touch.use.value))

    @rule()
    def flush(self) -> None:
        if self.disk:
            self.seen.append(self.rig.flush())

    @rule(which=st.integers(0, 7))
    def abandon(self, which: int) -> None:
        if self.rig.waiting:
            self.rig.abandon(self.rig.waiting.pop(which % len(self.rig.waiting)))
        elif self.rig.puts:
            self.rig.abandon(self.rig.puts.pop(which % len(self.rig.puts)))

    @rule(link=st.integers(0, 2), which=st.integers(0, 7), good=st.sampled_from([True, True, True, False]))
    def complete(self, link: int, which: int, good: bool) -> None:
        busy = [index for index, found in enumerate(self.rig.links) if found.pending]
        if busy:
            index = busy[link % len(busy)]
            pending = self.rig.links[index].pending
            transfer = list(pending.values())[which % len(pending)]
            self.failures += not good
            self.rig.complete(index, transfer.tag, None if good else failure(transfer))

    @rule()
    def turn(self) -> None:
        self.rig.turn()

    @rule()
    def run(self) -> None:
        self.rig.run()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.wind_down()
        for request in self.seen:
            error = request.error
            if isinstance(error, TransferError):
                assert self.failures
                assert not (isinstance(error, ReadError) and error.key not in getattr(request, "keys", ())), (
                    f"{request} got the error of another tensor: {error}"
                )
            elif isinstance(error, CapacityError):
                assert not self.disk or isinstance(request, Lease)
                assert not self.disk or "never" in str(error)
            elif isinstance(error, CommitError):
                assert isinstance(request, Flush)
                assert request.abandoned
            else:
                assert error is None or isinstance(error, KeyNotFound | LeaseConflict), error


def test_random_histories() -> None:
    quick = settings(
        max_examples=60,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(Histories, settings=quick)


@pytest.mark.soak
def test_many_random_histories() -> None:
    many = settings(max_examples=20_000, stateful_step_count=150, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Histories, settings=many)


def touches(source: random.Random) -> list[Touch]:
    tiers = (None, "t0", "t1")
    some = range(source.choice((0, 3, 6, 12)))
    return [Touch(source.choice(KEYS), source.choice(tiers), source.choice(list(Use))) for _ in some]


def history(seed: int, steps: int) -> Rig:
    """The same, without hypothesis: longer, and nothing is shrunk."""
    source = random.Random(seed)
    machine = Histories()
    shape, memory = source.choice((*SHAPES, *WITHOUT_DISK)), source.choice([FakeTier, MovableTier])
    machine.open(shape, source.choice([1, 2, 100]), source.choice([0.0, 0.5, 1.0]), memory)
    for _ in range(steps):
        which = source.randrange(8)
        source.choice(
            [
                lambda: machine.put(source.choice(KEYS), source.randint(1, LARGEST), source.choice([0, 0, 1, 2])),
                lambda: machine.lease(
                    source.sample(KEYS, source.choice([1, 1, 2, 3])), source.randrange(3), source.choice(list(Access))
                ),
                lambda which=which: machine.write(which),
                lambda which=which: machine.release(which),
                lambda which=which: machine.release(which),
                lambda which=which: machine.drop(which),
                lambda which=which: machine.drop(which),
                lambda which=which: machine.drop(which),
                lambda: machine.delete(source.choice(KEYS)) if source.random() < 0.2 else None,
                lambda: machine.hint(
                    source.sample(KEYS, source.randrange(4)),
                    source.randrange(3),
                    source.choice([Urgency.PREFETCH, Urgency.SPECULATIVE]),
                ),
                lambda: machine.follow(touches(source)) if source.random() < 0.15 else None,
                lambda: machine.follow_another(source.randrange(12), touches(source)[:3]) if source.random() < 0.3 else None,
                lambda which=which: machine.obey(which),
                lambda which=which: machine.obey(which),
                lambda: machine.flush() if source.random() < 0.3 else None,
                lambda which=which: machine.abandon(which) if source.random() < 0.2 else None,
                lambda which=which: machine.complete(source.randrange(3), which, source.random() < 0.9),
                lambda which=which: machine.complete(source.randrange(3), which, source.random() < 0.9),
                lambda: machine.run(),
                lambda: machine.turn(),
            ]
        )()
        machine.holds()
    machine.teardown()
    return machine.rig


@pytest.mark.parametrize("seed", range(30))
def test_long_histories(seed: int) -> None:
    rig = history(seed, 400)
    assert not rig.links or any(link.started for link in rig.links)


def test_in_some_of_them_tensors_are_moved_out_of_the_way() -> None:
    assert any(history(seed, 400).moved for seed in (4, 8, 27))


@pytest.mark.soak
def test_many_long_histories() -> None:
    for seed in range(1000, 3000):
        history(seed, 2000)
