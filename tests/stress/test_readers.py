"""Promise 22: a reader beside a live writer sees one whole committed generation until it asks for a newer one.

A writer changes, deletes and commits in one process; readers in others open, read, refresh and close. Each is killed by SIGKILL
at any moment, and another one takes its place. Which tensors a generation has, and with which bytes, follows from the number of
its version, which is in its meta.
"""

from __future__ import annotations

import os
import random
import select
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stress.children import Running, forked
from tests.stress.contents import content, evict_all
from tests.stress.syscalls import Child
from tests.stress.tally import Tally
from tests.striping import lower_stripes
from tiered import TieredStore, verify
from tiered.format import generations as protocol
from tiered.format.generations import dropped, generations
from tiered.format.pins import Pins

PROMISE = "22 (readers beside a writer)"
MIB = 1 << 20
SIZES = [0, 1, 4096, 5000, 70_001, 150_000, 200_000, 250_000, 300_000, 40_000]
READERS = 3
DRIVES: list[str] = []
"""Folders of the data files, within the store's; none: the data file is in the store's own."""
AT_ONCE = 10
"""Reads between two words of a reader, and changes between two looks of a writer at its pool."""


def paths(folder: Path) -> list[Path] | None:
    return [folder / name for name in DRIVES] or None


def of(number: int, version: int) -> int | None:
    """In which version the tensor with this number was written that ``version`` has; None: it has none."""
    changed = next((at for at in range(version, max(0, version - 4), -1) if (at * 5 + number * 3) % 4 == 0), None)
    return None if changed is None or (changed * 7 + number) % 11 == 0 else changed


def state(version: int) -> dict[str, tuple[int, int]]:
    """Version and bytes of each tensor of a version."""
    found = {f"t{number}": (of(number, version), nbytes) for number, nbytes in enumerate(SIZES)}
    return {key: (written, nbytes) for key, (written, nbytes) in found.items() if written is not None}


def writer(folder: Path, seed: int) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        source = random.Random(seed)
        with TieredStore.open(folder, dram=MIB, keep=source.randint(1, 2), paths=paths(folder)) as store:
            version = int(store.meta.get("version", 0))
            whole(store, version, list(state(version)))
            child.say("begun")
            while True:
                version += 1
                wanted = state(version)
                for key in set(store) - wanted.keys():
                    store.delete(key)
                for key, (written, nbytes) in wanted.items():
                    if written == version:
                        store.put(key, content(key, version, nbytes))
                store.commit({"version": version})
                child.say("committed")
                if source.random() < 0.3:  # what is free is written over at once
                    for key, (_, nbytes) in wanted.items():
                        store.put(key, content("scribble", version, nbytes))
                    evict_all(store)
                    store.rollback()

    return body


def whole(store: TieredStore, version: int, keys: list[str]) -> None:
    wanted = state(version)
    assert sorted(store) == sorted(wanted), (version, sorted(store))
    for key in keys:
        written, nbytes = wanted[key]
        assert torch.equal(store.get(key), content(key, written, nbytes)), f"{key!r} of version {version} is another"


def reader(folder: Path, seed: int) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        source = random.Random(seed)
        while True:
            chosen = generations(folder)[0] if source.random() < 0.2 else None
            options: dict[str, Any] = {"dram": MIB, "access": "read", "paths": paths(folder)}
            try:
                store = TieredStore.open(folder, generation=chosen, **options)
            except Exception as error:
                if chosen is None or "no generation" not in str(error):  # it may be dropped between these two lines
                    raise
                continue
            with store:
                seen = store.generation
                while source.random() < 0.95:
                    version = int(store.meta["version"])
                    keys = source.choices(list(state(version)), k=AT_ONCE)
                    whole(store, version, keys)
                    assert (store.generation, store.meta["version"]) == (seen, version), "it goes nowhere by itself"
                    child.say(f"read {seen}")
                    if source.random() < 0.5:
                        seen = store.refresh()
                        assert int(store.meta["version"]) >= version

    return body


class Crowd:
    """The children, and what they say. One that is killed is replaced."""

    def __init__(self, folder: Path, seed: int, tally: Tally, kill_each: int) -> None:
        self.folder, self.source, self.tally, self.kill_each = folder, random.Random(seed), tally, kill_each
        self.reads = self.commits = self.seeds = 0
        self.places: list[ExitStack] = [ExitStack() for _ in range(1 + READERS)]
        self.running: list[Running] = []
        self.behind = 0
        """Reads of a generation that is not the newest any more."""

    def start(self, place: int) -> Running:
        self.seeds += 1
        body = (reader if place else writer)(self.folder, self.source.randrange(1 << 30))
        return self.places[place].enter_context(forked(body, patience=120))

    def hear(self) -> int:
        """Wait until somebody says something; return who."""
        channels = [running._channel for running in self.running]
        ready = select.select(channels, [], [], 120)[0]
        assert ready, "nobody says anything any more"
        place = channels.index(self.source.choice(ready))
        words = self.running[place].hear()
        assert words.startswith(("read ", "committed", "begun")), words
        if words.startswith("read "):
            self.reads += AT_ONCE
            self.behind += AT_ONCE * (int(words.split()[1]) < generations(self.folder)[-1])
        self.commits += words == "committed"
        return place

    def kill(self, place: int) -> None:
        """At any moment: it has gone on since it said something."""
        running = self.running[place]
        running.send(signal.SIGKILL)
        assert running.wait_end() == -signal.SIGKILL, running.said
        assert not any(words.startswith("Traceback") for words in running.said), running.said[-1]
        self.places[place].close()
        self.places[place] = ExitStack()
        self.tally.count(f"SIGKILL of a {'reader' if place else 'writer'}", 1)

    def run(self, reads: int, commits: int) -> None:
        self.running = [self.start(0)]
        while not self.commits:
            self.hear()
        self.running += [self.start(place) for place in range(1, 1 + READERS)]
        try:
            heard = 0
            while self.reads < reads or self.commits < commits:
                place = self.hear()
                heard += 1
                if heard % self.kill_each == 0:
                    self.kill(place)
                    self.running[place] = self.start(place)
            for place in range(1 + READERS):
                self.kill(place)
        finally:
            for one in self.places:
                one.close()


@pytest.fixture(params=["whole", "striped"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store on one drive, and of one on two with tensors that are striped over both."""
    if request.param == "striped":
        monkeypatch.setattr("tests.stress.test_readers.DRIVES", ["one", "two"])
        lower_stripes(monkeypatch, 32 << 10, 100_000)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize(
    ("reads", "commits", "kill_each"), [(500, 20, 12), pytest.param(12_000, 250, 15, marks=pytest.mark.soak)]
)
def test_readers_and_a_writer_that_are_killed(tmp_path: Path, reads: int, commits: int, kill_each: int, tally: Tally) -> None:
    folder = tmp_path / "state"
    crowd = Crowd(folder, reads, tally, kill_each)
    crowd.run(reads, commits)
    for _ in range(crowd.reads):
        tally.ran()
    assert {"SIGKILL of a reader", "SIGKILL of a writer"} <= tally.kinds.keys()
    assert crowd.behind, "no reader was ever behind the writer"
    assert verify(folder, paths=paths(folder)).sound
    with TieredStore.open(folder, dram=MIB, keep=2, paths=paths(folder)) as store:
        version = int(store.meta["version"])
        whole(store, version, list(state(version)))
        store.commit()
        there = [name for name in os.listdir(folder) if name.startswith("reader.")]
        assert (len(generations(folder)), dropped(folder), there) == (2, [], [])
        assert store._parts.nvme is not None
        most = sum(-(-nbytes // 4096) * 4096 + 4096 for nbytes in SIZES)
        assert store._parts.nvme.used <= 3 * most
        assert store._parts.nvme.striped(store.generation) == bool(DRIVES)
        store.close()


BLIND = {
    "it looks at no pins": lambda: setattr(protocol, "pins_in", lambda folder: Pins()),
    "it uses extents again at once": lambda: setattr(protocol, "retire", lambda folder, numbers: list(numbers)),
}


@pytest.mark.parametrize("how", BLIND)
def test_a_writer_that_breaks_the_protocol_is_caught(tmp_path: Path, how: str, tally: Tally) -> None:
    """These tests would show it: a reader finds bytes that are not those of its generation."""
    folder, right = tmp_path / "state", writer(tmp_path / "state", 1)

    def blind(child: Child) -> None:
        BLIND[how]()
        right(child)

    with forked(blind) as one:
        one.wait_for("committed")
        with forked(reader(folder, 1)) as other:
            while one.hear() and not any(words.startswith("Traceback") for words in other.said):
                other.hear()
            told = other.said[-1]
    assert "CorruptionError" in told, told
    tally.count(how, 1)
