"""The residency machine against a model that knows which version of its tensor's bytes every slot holds."""

from __future__ import annotations

import ast
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import tiered
from tiered.engine.residency import EDGES, Copy, Directory, Entry, State
from tiered.errors import KeyNotFound, LeaseConflict, ReadError, TieredError, WriteError
from tiered.types import Access, Direction, Slot, TensorSpec

KEYS = ("a", "b", "c")
DEPTHS = (2, 3, 4)
SPEC = TensorSpec("float32", (2,), 4)
SET_BY_BECOME = ("dirty", "state", "valid")


@dataclass(eq=False)
class Moving:
    entry: Entry
    upper: int
    direction: Direction
    version: int


class Model:
    """Does what it is told where the rules allow it, and sees to it that the machine refuses where they do not.

    Contents are version numbers: ``newest`` by key, ``holds`` by copy. A write under a WRITE lease makes a new version.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.vacated: list[Copy] = []
        self.directory = Directory(depth, self._changed)
        self.newest: dict[str, int] = {}
        self.holds: dict[Copy, int] = {}
        self.live: set[Slot] = set()  # handed in and not vacated
        self.leases: list[tuple[Copy, Access]] = []
        self.moving: list[Moving] = []
        self.done: Counter[str] = Counter()  # what was legal and happened
        self._numbers = itertools.count()
        self._versions = itertools.count(1)

    def _changed(self, copy: Copy) -> None:
        if copy.state is not State.EMPTY:
            return
        assert not copy.leased
        self.live.remove(copy.slot)
        self.holds.pop(copy, None)

    def _slot(self) -> Slot:
        slot = Slot(next(self._numbers), 8)
        self.live.add(slot)
        return slot

    def _refused(self, error: type[BaseException], call: Callable[[], object], slot: Slot | None = None) -> None:
        with pytest.raises(error):
            call()
        if slot is not None:
            self.live.remove(slot)

    def _entry(self, key: str) -> Entry | None:
        return self.directory.find(key)

    # What may be done to it

    def put(self, key: str, tier: int) -> None:
        tier %= self.depth - 1
        entry = self._entry(key)
        slot = self._slot()
        if entry is not None and entry.leased:
            self._refused(LeaseConflict, lambda: self.directory.put(key, SPEC, tier, slot), slot)
        elif entry is not None and entry.in_flight:
            self._refused(AssertionError, lambda: self.directory.put(key, SPEC, tier, slot), slot)
        else:
            fresh = self.directory.put(key, SPEC, tier, slot)
            assert entry is None or fresh.tensor_id > entry.tensor_id
            copy = fresh.copies[tier]
            assert copy is not None
            assert copy.state is State.DIRTY
            self.newest[key] = self.holds[copy] = next(self._versions)
            self.done["put"] += 1

    def restore(self, key: str) -> None:
        if self._entry(key) is not None:
            return
        entry = self.directory.restore(key, SPEC, self.directory.next_id, self._slot(), b"sum", 3)
        copy = entry.copies[-1]
        assert copy is not None
        assert (copy.state, copy.checksums, copy.generation) == (State.CLEAN, b"sum", 3)
        self.newest[key] = self.holds[copy] = next(self._versions)
        self.done["restore"] += 1

    def forget(self, key: str) -> None:
        entry = self._entry(key)
        if entry is None:
            self._refused(KeyNotFound, lambda: self.directory.forget(key))
        elif entry.leased:
            self._refused(LeaseConflict, lambda: self.directory.forget(key))
        elif entry.in_flight:
            self._refused(AssertionError, lambda: self.directory.forget(key))
        else:
            self.directory.forget(key)
            del self.newest[key]
            assert key not in self.directory
            self.done["forget"] += 1

    def begin_fill(self, key: str, tier: int) -> None:
        entry = self._entry(key)
        if entry is None:
            return
        tier %= self.depth - 1
        source, slot = entry.copies[tier + 1], self._slot()
        if source is None or not source.valid or entry.copies[tier] is not None or entry.writers:
            self._refused(AssertionError, lambda: self.directory.begin_fill(entry, tier, slot), slot)
            return
        copy = self.directory.begin_fill(entry, tier, slot)
        assert copy.state is State.FILLING
        assert source.in_flight
        self.moving.append(Moving(entry, tier, Direction.UP, self.holds[source]))
        self.done["begin_fill"] += 1

    def begin_writeback(self, key: str, tier: int) -> None:
        entry = self._entry(key)
        if entry is None:
            return
        tier %= self.depth - 1
        source, slot = entry.copies[tier], self._slot()
        legal = source is not None and source.state is State.DIRTY and not source.writers and not source.in_flight
        if not legal or entry.copies[tier + 1] is not None:
            self._refused(AssertionError, lambda: self.directory.begin_writeback(entry, tier, slot), slot)
            return
        assert source is not None
        copy = self.directory.begin_writeback(entry, tier, slot)
        assert (source.state, copy.state) == (State.WRITEBACK, State.FILLING)
        self.moving.append(Moving(entry, tier, Direction.DOWN, self.holds[source]))
        self.done["begin_writeback"] += 1

    def end(self, which: int, good: bool) -> None:
        """One of the transfers in flight ends, in any order."""
        if not self.moving:
            return
        moving = self.moving.pop(which % len(self.moving))
        entry, tier = moving.entry, moving.upper
        upper, lower = entry.copies[tier], entry.copies[tier + 1]
        assert upper is not None
        assert lower is not None
        error = None if good else failure(moving)
        if moving.direction is Direction.UP:
            assert self.holds[lower] == moving.version, "the source changed under a transfer"
            if good:
                self.holds[upper] = moving.version
            self.directory.end_fill(entry, tier, error)
            assert entry.copies[tier] is (upper if good else None)
        else:
            assert self.holds[upper] == moving.version, "the source changed under a transfer"
            if good:
                self.holds[lower] = moving.version
            self.directory.end_writeback(entry, tier, error, b"x" * 16, 7)
            assert entry.copies[tier + 1] is (lower if good else None)
            assert upper.failure is error
            assert upper.state is (State.CLEAN if good else State.DIRTY)
            if good:
                assert (lower.checksums, lower.generation) == (b"x" * 16, 7)
        self.done[f"{moving.direction.value} {'done' if good else 'failed'}"] += 1

    def grant(self, key: str, tier: int, access: Access) -> None:
        entry = self._entry(key)
        if entry is None:
            return
        tier %= self.depth
        copy = entry.copies[tier]
        if copy is None or not copy.valid:
            self._refused(AssertionError, lambda: self.directory.grant(entry, tier, access))
        elif entry.writers or (access is Access.WRITE and entry.leased):
            self._refused(LeaseConflict, lambda: self.directory.grant(entry, tier, access))
        elif access is Access.WRITE and entry.in_flight:
            self._refused(AssertionError, lambda: self.directory.grant(entry, tier, access))
        else:
            assert self.directory.grant(entry, tier, access) is copy
            self.leases.append((copy, access))
            if access is Access.WRITE:
                assert [c for c in entry.copies if c is not None] == [copy], "superseded at grant, not at release"
                assert copy.state is (State.CLEAN if tier == self.depth - 1 else State.DIRTY)
                assert copy.checksums == b"", "those of the bytes that it had"
            self.done[f"grant {access.name}"] += 1

    def write(self, which: int) -> None:
        """The holder of a WRITE lease changes the bytes."""
        held = [copy for copy, access in self.leases if access is Access.WRITE]
        if held:
            copy = held[which % len(held)]
            self.newest[copy.key] = self.holds[copy] = next(self._versions)
            self.done["write"] += 1

    def release(self, which: int) -> None:
        if self.leases:
            copy, access = self.leases.pop(which % len(self.leases))
            assert copy.state is not State.EMPTY, "a leased copy was taken away"
            self.directory.release(copy, access)
            self.done[f"release {access.name}"] += 1

    def evict(self, key: str, tier: int) -> None:
        entry = self._entry(key)
        copy = entry.copies[tier % self.depth] if entry is not None else None
        if copy is None:
            return
        at_rest = not (copy.leased or copy.in_flight or copy.aliases)
        if copy.state is not State.CLEAN or not at_rest or copy.tier == self.depth - 1:
            self._refused(AssertionError, lambda: self.directory.evict(copy))
        else:
            self.directory.evict(copy)
            self.done["evict"] += 1

    def move(self, key: str, tier: int) -> None:
        entry = self._entry(key)
        copy = entry.copies[tier % self.depth] if entry is not None else None
        if copy is None:
            return
        slot = self._slot()
        if copy.state is not State.DIRTY or copy.leased or copy.in_flight:
            self._refused(AssertionError, lambda: self.directory.move(copy, slot), slot)
            return
        version = self.holds[copy]
        fresh = self.directory.move(copy, slot)
        assert (fresh.slot, fresh.state, copy.state) == (slot, State.DIRTY, State.EMPTY)
        self.holds[fresh] = version
        self.done["move"] += 1

    def alias(self, key: str, tier: int, change: int) -> None:
        """Views outside come and go; they keep a copy from being evicted and nothing else."""
        entry = self._entry(key)
        copy = entry.copies[tier % self.depth] if entry is not None else None
        if copy is not None:
            copy.aliases = max(0, copy.aliases + change)

    # What must hold after each step

    def check(self) -> None:
        self.directory.check()
        assert set(self.directory) == set(self.newest)
        copies = list(self.copies())
        assert {copy.slot for copy in copies} == self.live, "a slot was lost or vacated early"
        assert len(copies) == len(self.live)
        for entry in self.directory.entries():
            for tier, copy in enumerate(entry.copies):
                if copy is None:
                    continue
                if copy.valid:
                    assert self.holds[copy] == self.newest[entry.key], f"tier {tier} holds old bytes and calls them valid"
                if copy.state is State.CLEAN and tier < self.depth - 1:
                    below = [c for c in entry.copies[tier + 1 :] if c is not None and c.valid]
                    assert any(self.holds[c] == self.holds[copy] for c in below), "CLEAN, and nothing below has the bytes"
            assert entry.leased == any(copy.key == entry.key for copy, _ in self.leases)
            assert entry.in_flight == any(moving.entry is entry for moving in self.moving)

    def copies(self) -> Iterator[Copy]:
        for entry in self.directory.entries():
            yield from (copy for copy in entry.copies if copy is not None)

    def wind_down(self) -> None:
        while self.leases:
            self.release(0)
        while self.moving:
            self.end(0, True)
        for key in list(self.directory):
            self.forget(key)
        self.check()
        assert not self.live
        assert not self.holds


def failure(moving: Moving) -> TieredError:
    kind = ReadError if moving.direction is Direction.UP else WriteError
    return kind("cannot move", key=moving.entry.key, tier="t", path=None, offset=0, errno=5)


keys, tiers, picks = st.sampled_from(KEYS), st.integers(0, 3), st.integers(0, 7)


class ResidencyAgainstVersions(RuleBasedStateMachine):
    @initialize(depth=st.sampled_from(DEPTHS))
    def open(self, depth: int) -> None:
        self.model = Model(depth)

    @rule(key=keys, tier=tiers)
    def put(self, key: str, tier: int) -> None:
        self.model.put(key, tier)

    @rule(key=keys)
    def restore(self, key: str) -> None:
        self.model.restore(key)

    @rule(key=keys)
    def forget(self, key: str) -> None:
        self.model.forget(key)

    @rule(key=keys, tier=tiers)
    def begin_fill(self, key: str, tier: int) -> None:
        self.model.begin_fill(key, tier)

    @rule(key=keys, tier=tiers)
    def begin_writeback(self, key: str, tier: int) -> None:
        self.model.begin_writeback(key, tier)

    @rule(which=picks, good=st.booleans())
    def end(self, which: int, good: bool) -> None:
        self.model.end(which, good)

    @rule(key=keys, tier=tiers, access=st.sampled_from(Access))
    def grant(self, key: str, tier: int, access: Access) -> None:
        self.model.grant(key, tier, access)

    @rule(which=picks)
    def write(self, which: int) -> None:
        self.model.write(which)

    @rule(which=picks)
    def release(self, which: int) -> None:
        self.model.release(which)

    @rule(key=keys, tier=tiers)
    def evict(self, key: str, tier: int) -> None:
        self.model.evict(key, tier)

    @rule(key=keys, tier=tiers)
    def move(self, key: str, tier: int) -> None:
        self.model.move(key, tier)

    @rule(key=keys, tier=tiers, change=st.sampled_from([-1, 1]))
    def alias(self, key: str, tier: int, change: int) -> None:
        self.model.alias(key, tier, change)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.wind_down()


def test_random_histories() -> None:
    quick = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)
    run_state_machine_as_test(ResidencyAgainstVersions, settings=quick)


@pytest.mark.soak
def test_many_random_histories() -> None:
    many = settings(max_examples=20_000, stateful_step_count=200, deadline=None)
    run_state_machine_as_test(ResidencyAgainstVersions, settings=many)


def step(model: Model, source: random.Random) -> None:
    """One random call. Ends and releases are as likely as all that begins, so that histories stay lively."""
    key, tier, which = source.choice(KEYS), source.randrange(4), source.randrange(8)
    good = source.random() < 0.7
    source.choice(
        [
            lambda: model.put(key, tier),
            lambda: model.restore(key),
            lambda: model.forget(key) if source.random() < 0.3 else None,
            lambda: model.begin_fill(key, tier),
            lambda: model.begin_writeback(key, tier),
            lambda: model.begin_writeback(key, tier),
            lambda: model.end(which, good),
            lambda: model.end(which, good),
            lambda: model.grant(key, tier, source.choice(list(Access))),
            lambda: model.write(which),
            lambda: model.release(which),
            lambda: model.release(which),
            lambda: model.evict(key, tier),
            lambda: model.move(key, tier),
            lambda: model.alias(key, tier, source.choice([-1, -1, 1])),
        ]
    )()
    model.check()


@pytest.fixture
def edges(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[State, State]]:
    """Every edge that is taken during the test, counted."""
    taken: Counter[tuple[State, State]] = Counter()
    become = Copy.become

    def counting(copy: Copy, state: State) -> None:
        before = copy.state
        become(copy, state)
        taken[before, state] += 1

    monkeypatch.setattr(Copy, "become", counting)
    return taken


def test_a_long_run_takes_every_legal_edge(edges: Counter[tuple[State, State]]) -> None:
    done: Counter[str] = Counter()
    for depth in DEPTHS:
        source, model = random.Random(depth), Model(depth)
        for _ in range(4000):
            step(model, source)
        done += model.done
        model.wind_down()
    assert len(EDGES) == 11
    assert set(edges) == EDGES
    assert min(edges.values()) >= 20, edges
    assert len(done) == 16, sorted(done)
    assert min(done.values()) >= 20, done


def test_a_chain_of_two_never_fills_from_above_into_dirty(edges: Counter[tuple[State, State]]) -> None:
    source, model = random.Random(0), Model(2)
    for _ in range(2000):
        step(model, source)
    model.wind_down()
    assert set(edges) == EDGES - {(State.FILLING, State.DIRTY)}


@pytest.mark.soak
def test_long_runs() -> None:
    for seed in range(180):
        source, model = random.Random(seed), Model(DEPTHS[seed % 3])
        for _ in range(4000):
            step(model, source)
        model.wind_down()


PATHS: dict[State, list[State]] = {
    State.EMPTY: [],
    State.FILLING: [State.FILLING],
    State.CLEAN: [State.FILLING, State.CLEAN],
    State.DIRTY: [State.DIRTY],
    State.WRITEBACK: [State.DIRTY, State.WRITEBACK],
}


@pytest.mark.parametrize(("before", "after"), sorted(itertools.product(State, State), key=str))
def test_only_the_edges_of_the_table(before: State, after: State) -> None:
    copy = Copy("a", 0, Slot(0, 8))
    for state in PATHS[before]:
        copy.become(state)
    assert copy.state is before
    if (before, after) in EDGES:
        copy.become(after)
        assert copy.state is after
    else:
        with pytest.raises(AssertionError, match="illegal edge"):
            copy.become(after)
        assert copy.state is before


def test_nobody_assigns_a_state() -> None:
    """Of a copy, that is: an attribute of ``self`` is of another class everywhere but in residency."""
    assigned = []
    for path in (Path(tiered.__file__).parent / "engine").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in SET_BY_BECOME:
                    own = isinstance(node.value, ast.Name) and node.value.id == "self"
                    if not own or path.name == "residency.py":
                        assigned.append((path.name, getattr(function, "name", ""), node.attr))
    assert sorted(assigned) == [("residency.py", "become", name) for name in SET_BY_BECOME]


def test_a_chain_of_one() -> None:
    model = Directory(1, lambda copy: None)
    entry = model.put("a", SPEC, 0, Slot(0, 8))
    copy = model.grant(entry, 0, Access.WRITE)
    assert copy.state is State.CLEAN
    assert entry.unsaved is None
    model.check()
    model.release(copy, Access.WRITE)
    model.put("a", SPEC, 0, Slot(8, 8))
    model.forget("a")
    assert len(model) == 0


def test_of_a_copy_at_the_bottom_only_that_it_comes_or_goes_is_told() -> None:
    told: list[tuple[int, State]] = []
    directory = Directory(2, lambda copy: told.append((copy.tier, copy.state)))

    def tells() -> list[tuple[int, State]]:
        found = told[:]
        told.clear()
        return found

    entry = directory.put("a", SPEC, 0, Slot(0, 8))
    assert tells() == [(0, State.DIRTY)]
    directory.begin_writeback(entry, 0, Slot(0, 8))
    assert tells() == [(0, State.WRITEBACK), (1, State.FILLING)]
    directory.end_writeback(entry, 0, None)
    assert tells() == [(0, State.CLEAN)]
    top = entry.copies[0]
    assert top is not None
    directory.evict(top)
    assert tells() == [(0, State.EMPTY)]
    directory.begin_fill(entry, 0, Slot(8, 8))
    assert tells() == [(0, State.FILLING)], "and not that the bottom is read"
    directory.end_fill(entry, 0, None)
    assert tells() == [(0, State.CLEAN)]
    directory.forget("a")
    assert tells() == [(0, State.EMPTY), (1, State.EMPTY)]


def test_an_empty_tensor_takes_a_slot() -> None:
    assert Entry("a", TensorSpec("float32", (0, 3), 4), 1, [None]).nbytes == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.copies.__setitem__(1, None),  # CLEAN above nothing
        lambda entry: entry.copies.__setitem__(0, None) or entry.copies.__setitem__(1, None),  # no bytes at all
        lambda entry: entry.copies[0].become(State.DIRTY),  # unsaved, and a copy below
        lambda entry: setattr(entry.copies[0], "writers", 1),  # WRITE lease beside a copy
        lambda entry: setattr(entry.copies[0], "tier", 1),
    ],
)
def test_check_sees_what_is_broken(spoil: Callable[[Entry], object]) -> None:
    directory = Directory(2, lambda copy: None)
    entry = directory.restore("a", SPEC, 1, Slot(0, 8), b"", 1)
    directory.begin_fill(entry, 0, Slot(0, 8))
    directory.end_fill(entry, 0, None)
    directory.check()
    spoil(entry)
    with pytest.raises(AssertionError):
        directory.check()
