"""Random histories of an engine: each step is one thing that a thread, the collector or a device may do next."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.rig import WRITE, Put, Rig, failure
from tiered.errors import CapacityError, KeyNotFound, LeaseConflict, ReadError, TransferError
from tiered.requests import Lease, Request
from tiered.types import Access

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


class Histories(RuleBasedStateMachine):
    """Each rule is one thing that a thread, the collector or a device may do next."""

    @initialize(shape=st.sampled_from(SHAPES), limit=st.sampled_from([1, 2, 100]), reserve=st.sampled_from([0.0, 0.5, 1.0]))
    def open(self, shape: tuple[int, ...], limit: int, reserve: float) -> None:
        self.rig = Rig(*shape, limit=limit, reserve=reserve)
        self.numbers = iter(range(1, 1 << 30))
        self.failures = 0
        self.seen: list[Request | Put] = []

    def data(self, nbytes: int) -> bytes:
        return next(self.numbers).to_bytes(4, "little")[:nbytes].ljust(nbytes, b"-")

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(1, LARGEST))
    def put(self, key: str, nbytes: int) -> None:
        self.seen.append(self.rig.put(key, self.data(nbytes)))

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        tier=st.integers(0, 2),
        access=st.sampled_from(Access),
    )
    def lease(self, keys: list[str], tier: int, access: Access) -> None:
        self.seen.append(self.rig.lease(*keys, tier=tier % self.rig.bottom, access=access))

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

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True), tier=st.integers(0, 2))
    def hint(self, keys: list[str], tier: int) -> None:
        self.rig.hint(*keys, tier=tier % self.rig.bottom)

    @rule()
    def flush(self) -> None:
        self.seen.append(self.rig.flush())

    @rule(which=st.integers(0, 7))
    def abandon(self, which: int) -> None:
        if self.rig.waiting:
            self.rig.abandon(self.rig.waiting.pop(which % len(self.rig.waiting)))
        elif self.rig.puts:
            self.rig.abandon(self.rig.puts.pop(which % len(self.rig.puts)).waiting)

    @rule(link=st.integers(0, 2), which=st.integers(0, 7), good=st.sampled_from([True, True, True, False]))
    def complete(self, link: int, which: int, good: bool) -> None:
        pending = self.rig.links[link % self.rig.bottom].pending
        if pending:
            transfer = list(pending.values())[which % len(pending)]
            self.failures += not good
            self.rig.complete(link % self.rig.bottom, transfer.tag, None if good else failure(transfer))

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
                assert isinstance(request, Lease)
                assert "never" in str(error)
            else:
                assert error is None or isinstance(error, KeyNotFound | LeaseConflict), error


def test_random_histories() -> None:
    quick = settings(
        max_examples=150,
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


def history(seed: int, steps: int) -> Rig:
    """The same, without hypothesis: longer, and nothing is shrunk."""
    source = random.Random(seed)
    machine = Histories()
    machine.open(source.choice(SHAPES), source.choice([1, 2, 100]), source.choice([0.0, 0.5, 1.0]))
    for _ in range(steps):
        which = source.randrange(8)
        source.choice(
            [
                lambda: machine.put(source.choice(KEYS), source.randint(1, LARGEST)),
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
                lambda: machine.hint(source.sample(KEYS, source.randrange(4)), source.randrange(3)),
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


@pytest.mark.parametrize("seed", range(20))
def test_long_histories(seed: int) -> None:
    rig = history(seed, 400)
    assert any(link.started for link in rig.links)


@pytest.mark.soak
def test_many_long_histories() -> None:
    for seed in range(1000, 3000):
        history(seed, 2000)
