"""Promise 13: a full pool waits a bounded time, then raises and lists who holds it; it never deadlocks.

Pools of one to three buffers over a disk whose completions the test holds back. The engine's clock is the test's own, too: it
goes on while somebody waits for room, so that no deadline takes any time.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.store.chains import GatedBackend
from tests.stress.contents import content
from tests.stress.fusefs import FaultyDisk, Rule
from tests.stress.tally import Tally, counts
from tiered import CapacityError, Eviction, LeaseConflict, TieredStore
from tiered.engine.engine import EngineConfig

PROMISE = "13 (a full pool)"
MIB = 1 << 20
DEADLINE = 5.0


class Clock:
    """Seconds that pass when the condition of ``engine`` is waited for, and not otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pool:
    """A store with room for ``buffers`` tensors, which is ``gated``; and who holds what."""

    def __init__(self, folder: Path, buffers: int, seed: str) -> None:
        self.disk, self.source, self.buffers = GatedBackend(), random.Random(seed), buffers
        self.size = MIB // buffers // 4096 * 4096
        self.store = TieredStore.open(folder, dram=MIB, backend=lambda: self.disk, eviction=Eviction(deadline=DEADLINE))
        self.clock = Clock()
        engine = self.store._engine
        engine.config = EngineConfig(deadline=DEADLINE, clock=self.clock)
        wait = engine._changed.wait

        def soon(timeout: float | None = None) -> bool:
            assert timeout is not None
            assert timeout <= DEADLINE
            if not (self.disk.shut or self.leases or self.aliases):
                return wait(60)  # nobody stands in the way
            happened = wait(0.005)  # of the real time; what is not done by then is taken to be stuck
            self.clock.now += 0 if happened else timeout
            return happened

        engine._changed.wait = soon  # type: ignore[method-assign]
        self.versions: dict[str, int] = {}
        self.leases: dict[str, tuple[ExitStack, torch.Tensor]] = {}
        self.aliases: dict[str, torch.Tensor] = {}
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        key = f"t{self.source.randrange(6)}"
        what = self.source.choice([*["put", "get", "lease", "end"] * 2, "keep", "forget", "commit", "gate"])
        began = self.clock.now
        try:
            getattr(self, what)(key)
            self.counts[what] += 1
        except CapacityError as error:
            self.counts["CapacityError"] += 1
            held = {*self.leases, *self.aliases}
            text = str(error)
            assert "waited" in text, text
            assert held or self.disk.shut, f"{text}, although nothing stands in the way"
            if not self.disk.shut and "on its way" not in text and "in flight" not in text:
                assert any(repr(other) in text for other in held), f"{text}; held are {held}"
            assert DEADLINE <= self.clock.now - began <= 3 * DEADLINE + 1
        except LeaseConflict:
            self.counts["LeaseConflict"] += 1
        assert self.clock.now - began <= 3 * DEADLINE + 1

    def put(self, key: str) -> None:
        version = self.versions.get(key, 0) + 1
        self.store.put(key, content(key, version, self.size - self.source.choice([0, 0, 5000])))
        self.versions[key] = version

    def get(self, key: str) -> None:
        if key in self.versions:
            self.check(key, self.store.get(key))

    def lease(self, key: str) -> None:
        if key in self.versions and key not in self.leases:
            stack = ExitStack()
            tensor = stack.enter_context(self.store.lease(key))
            self.check(key, tensor)
            self.leases[key] = stack, tensor

    def end(self, key: str) -> None:
        if key in self.leases:
            self.leases.pop(key)[0].close()

    def keep(self, key: str) -> None:
        if key in self.leases and key not in self.aliases:
            self.aliases[key] = self.leases[key][1][7:]

    def forget(self, key: str) -> None:
        self.aliases.pop(key, None)

    def commit(self, key: str) -> None:
        self.store.commit()

    def gate(self, key: str = "") -> None:
        self.disk.shut = not self.disk.shut
        if not self.disk.shut:
            self.disk.let_go()

    def check(self, key: str, tensor: torch.Tensor) -> None:
        assert tensor.equal(content(key, self.versions[key], tensor.numel())), f"{key!r} is not version {self.versions[key]}"

    def wind_down(self) -> None:
        """All is let go: whatever was refused can be had."""
        self.disk.let_go()
        while self.leases:
            self.leases.popitem()[1][0].close()
        self.aliases.clear()
        for key in self.versions:
            self.check(key, self.store.get(key))
        self.store.commit()
        pool = self.store.statistics().tiers[0]
        assert pool.held == 0
        for key in list(self.store):
            self.store.delete(key)
        assert self.store.statistics().tiers[0].used == 0
        self.store.close()


@counts(400, 12_000)
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_random_steps_while_the_disk_stalls(tmp_path: Path, buffers: int, count: int, tally: Tally) -> None:
    pool = Pool(tmp_path / "state", buffers, f"{buffers} {count}")
    for _ in range(count // 3):
        pool.step()
    pool.wind_down()
    refused = pool.counts.pop("CapacityError")
    assert refused > count // 60
    for _ in range(refused):
        tally.ran()
    assert {"put", "get", "lease", "end", "keep", "forget", "commit"} <= set(pool.counts), pool.counts


@counts(1, 10)
def test_a_stalled_drive(disk: FaultyDisk, backend: str, count: int, tally: Tally) -> None:
    """A real ring and real waiting: readers and writers of a pool of one buffer come back, and go on once the drive does."""
    for number in range(count):
        folder = disk.folder / f"{backend} {count} {number}"
        with TieredStore.open(folder, dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
            for index in range(3):
                store.put(f"t{index}", content("t", index, MIB))
            disk.add(Rule("write" if number % 2 else "read", "stall", times=-1))
            store._engine.config = EngineConfig(deadline=0.05)
            raised: list[BaseException] = []

            def ask(index: int, store: TieredStore = store, raised: list[BaseException] = raised) -> None:
                try:
                    store.put(f"t{index}", content("t", index, MIB)) if index % 2 else store.get(f"t{index}")
                except CapacityError as full:
                    raised.append(full)

            threads = [threading.Thread(target=ask, args=(index % 3,)) for index in range(6)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join(120)
                assert not any(thread.is_alive() for thread in threads), "it waits for ever"
            finally:
                fired = sum(disk.clear())
            assert raised
            assert all("waited 0." in str(error) for error in raised), raised
            tally.count("a stalled drive", fired)
            store._engine.config = EngineConfig()
            for index in range(3):
                store.put(f"t{index}", content("t", index + 10, MIB))
            for index in range(3):
                assert store.get(f"t{index}").equal(content("t", index + 10, MIB))
