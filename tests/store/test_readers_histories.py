"""Random histories of one writer and several readers, against one dict for each generation."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.backends import NATIVE_HERE
from tests.stress.contents import content
from tiered import Generation, LeaseConflict, ManifestError, MisuseError, TieredStore, verify
from tiered.format import generations as protocol
from tiered.format.generations import dropped, generations
from tiered.store.at_rest import StoreAtRest
from tiered.system import Once
from tiered.types import BackendName

MIB = 1 << 20
SIZES = (0, 9, 4097, 150_000, 300_000)
State = dict[str, tuple[int, int]]
"""Version and bytes of each key."""


def expected(key: str, state: State) -> torch.Tensor:
    version, nbytes = state[key]
    return content(key, version, nbytes)


class AReader:
    """A store that is open for reading, and the state that it has to show."""

    def __init__(self, store: TieredStore, state: State) -> None:
        self.store, self.state = store, state
        self.generation = store.generation

    def check(self, chosen: list[str]) -> None:
        assert sorted(self.store) == sorted(self.state)
        for key in chosen:
            if key in self.state:
                assert torch.equal(self.store.get(key), expected(key, self.state)), (key, self.generation)

    def die(self) -> None:
        """Leave what SIGKILL leaves: a pin that nobody has locked."""
        taken = self.store._generations._rest._taken  # type: ignore[attr-defined]
        taken.pin._unlinking = Once()
        self.store.close()


class BesideAWriter(RuleBasedStateMachine):
    @initialize(backend=st.sampled_from(NATIVE_HERE), keep=st.integers(1, 3), drives=st.sampled_from([0, 0, 2]))
    def begin(self, backend: BackendName, keep: int, drives: int) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.folder = Path(self.home.name) / "state"
        self.options: dict[str, Any] = {"dram": MIB, "backend": backend}
        if drives:
            self.options["paths"] = [Path(self.home.name) / f"drive {number}" for number in range(drives)]
        self.keep, self.versions = keep, 0
        self.now: State = {}
        self.committed: dict[int, State] = {}
        self.readers: list[AReader] = []
        self.dead = 0
        self.open_writer()
        self.put("a", 4097)
        self.commit()

    def open_writer(self, **options: Any) -> None:
        self.writer = TieredStore.open(self.folder, keep=self.keep, **self.options, **options)
        self.dead = 0
        newest = self.writer.generation
        self.now = dict(self.committed.get(newest, {}))
        assert sorted(self.writer) == sorted(self.now)

    keys = st.sampled_from([f"{letter}" for letter in "abcdefgh"])
    chosen = st.lists(keys, max_size=4, unique=True)

    @rule(key=keys, nbytes=st.sampled_from(SIZES))
    def put(self, key: str, nbytes: int) -> None:
        self.versions += 1
        self.writer.put(key, content(key, self.versions, nbytes))
        self.now[key] = self.versions, nbytes

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if self.now.pop(key, None) is not None:
            self.writer.delete(key)

    @rule(key=keys)
    def write(self, key: str) -> None:
        if key in self.now:
            self.versions += 1
            self.now[key] = self.versions, self.now[key][1]
            with self.writer.lease(key, access="write") as tensor:
                tensor.copy_(expected(key, self.now))

    @rule()
    def commit(self) -> None:
        had = {*generations(self.folder), *dropped(self.folder), *(reader.generation for reader in self.readers)}
        number = self.writer.commit({"versions": self.versions})
        assert number not in had, "a number that a generation has, or a reader, is not used again"
        self.committed[number] = dict(self.now)
        self.dead = 0
        pinned = {reader.generation for reader in self.readers}
        there = generations(self.folder)
        assert there[-1] == number
        assert pinned <= {*there, *dropped(self.folder)}
        assert len(set(there) - pinned) <= self.keep, "what nobody needs is dropped"
        self.no_more_space_than_needed([*there, *dropped(self.folder)])

    def no_more_space_than_needed(self, numbers: list[int]) -> None:
        needed = {(key, *of) for number in numbers for key, of in self.committed[number].items()}
        empty = sum(not nbytes for _, nbytes in self.now.values())  # one unit each in an open store
        nvme = self.writer._parts.nvme
        assert nvme is not None
        unit = nvme.alignment
        assert nvme.used == sum(-(-nbytes // unit) * unit for _, _, nbytes in needed) + empty * unit

    @rule()
    def restart_the_writer(self) -> None:
        self.writer.close()
        self.open_writer()

    @rule(where=st.sampled_from(["set_aside", "drop", "sync"]))
    def the_writer_fails_while_it_drops(self, where: str) -> None:
        real = getattr(protocol, where)

        def fail(*given: object) -> None:
            raise ManifestError("as ordered")

        setattr(protocol, where, fail)
        try:
            number = self.writer.commit()
        finally:
            setattr(protocol, where, real)
        self.committed[number] = dict(self.now)
        self.restart_the_writer()

    @rule()
    def go_back(self) -> None:
        """To an older generation, without the newer ones."""
        self.writer.close()
        there = generations(self.folder)
        self.open_writer(generation=Generation(there[0], newer="drop"))
        assert generations(self.folder) == there[:1]

    @precondition(lambda self: len(self.readers) < 4)
    @rule(which=st.integers(0, 5))
    def open_reader(self, which: int) -> None:
        there = generations(self.folder)
        chosen = None if which >= len(there) else there[which]
        store = TieredStore.open(self.folder, access="read", generation=chosen, **self.options)
        self.dead = 0
        assert store.generation == (there[-1] if chosen is None else chosen)
        self.readers.append(AReader(store, self.committed[store.generation]))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 9))
    def a_handle_opens_the_same(self, which: int) -> None:
        reader = self.readers[which % len(self.readers)]
        if reader.generation in dropped(self.folder):
            with pytest.raises(MisuseError, match=f"no generation {reader.generation}"):
                reader.store.reader()
            return
        options = {name: value for name, value in self.options.items() if name != "paths"}
        with reader.store.reader() as handle, handle.open(**options) as other:
            AReader(other, reader.state).check(list(reader.state))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 9), chosen=chosen)
    def refresh(self, which: int, chosen: list[str]) -> None:
        reader = self.readers[which % len(self.readers)]
        reader.check(chosen)
        newest = generations(self.folder)[-1]
        assert reader.store.refresh() == newest
        reader.generation, reader.state = newest, self.committed[newest]
        reader.check(chosen)

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 9), key=keys)
    def refresh_under_a_lease(self, which: int, key: str) -> None:
        reader = self.readers[which % len(self.readers)]
        newest = generations(self.folder)[-1]
        if key not in reader.state:
            return
        with reader.store.lease(key) as tensor:
            try:
                reader.store.refresh()
                assert newest == reader.generation or self.committed[newest].get(key) == reader.state[key]
                reader.generation, was = newest, reader.state
                reader.state = self.committed[newest]
            except LeaseConflict:
                was = reader.state
                assert self.committed[newest].get(key) != was[key]
            assert torch.equal(tensor, expected(key, was))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["close", "die"]))
    def end_reader(self, which: int, how: str) -> None:
        reader = self.readers.pop(which % len(self.readers))
        if how == "die":
            self.dead += 1
            reader.die()
        else:
            reader.store.close()

    @rule()
    def look_at_rest(self) -> None:
        paths = self.options.get("paths")
        assert verify(self.folder, paths=paths).sound
        with StoreAtRest(self.folder, paths=paths) as rest:
            state = self.committed[rest.manifest.generation]
            assert sorted(rest) == sorted(state)
            for key in state:
                assert torch.equal(rest.get(key), expected(key, state))
        self.dead = 0

    @rule(chosen=chosen)
    def read(self, chosen: list[str]) -> None:
        for reader in self.readers:
            reader.check(chosen)
        for key in chosen:
            if key in self.now:
                assert torch.equal(self.writer.get(key), expected(key, self.now))

    @invariant()
    def pins_are_those_of_readers(self) -> None:
        if hasattr(self, "folder"):
            pins = [name for name in os.listdir(self.folder) if name.startswith("reader.")]
            assert len(self.readers) <= len(pins) <= len(self.readers) + self.dead

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            for reader in self.readers:
                reader.check(list(reader.state))
                reader.store.close()
            self.readers.clear()
            self.commit()
            assert dropped(self.folder) == []
            self.writer.close()
            assert not [name for name in os.listdir(self.folder) if name.startswith("reader.")]
            self.home.cleanup()


@pytest.mark.parametrize(("examples", "steps"), [(15, 25), pytest.param(400, 50, marks=pytest.mark.soak)])
def test_random_histories(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        BesideAWriter,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
