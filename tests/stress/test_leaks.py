"""No leak of memory, descriptors, threads, rings or slots: thousands of opens and closes, and a disk that stalls at random."""

from __future__ import annotations

import gc
import os
import random
import threading
from pathlib import Path

import psutil

from tests.stress.contents import content
from tests.stress.fusefs import FaultyDisk, Rule
from tests.stress.tally import Tally, counts
from tiered import CapacityError, KeyNotFound, LeaseConflict, TieredStore
from tiered.engine.engine import EngineConfig

PROMISE = "13b (nothing leaks)"
MIB = 1 << 20




class Watched:
    """What this process has; compared at the end of the block with what it had at its beginning."""

    def __enter__(self) -> Watched:
        self.before = self._now()
        self.resident = psutil.Process().memory_info().rss
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            (fds, threads, rings), before = self._now(), self.before
            assert (fds, rings) == (before[0], before[2])
            assert threads <= before[1] + 16, "aiofiles makes as many as are in flight at most"
            grown = psutil.Process().memory_info().rss - self.resident
            assert grown < 24 * MIB, f"{grown:,} bytes more are resident"

    def _now(self) -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("[aio]")


@counts(25, 1000)
def test_opens_and_closes(tmp_path: Path, backend: str, count: int, tally: Tally) -> None:
    def once(number: int) -> None:
        with TieredStore.open(tmp_path / "state", dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
            store.put("t", content("t", number, 5000))
            with store.lease("t") as tensor:
                assert tensor.equal(content("t", number, 5000))
            if number % 3:
                store.close()

    for number in range(8):
        once(number)
    with Watched():
        for number in range(count):
            once(number)
            tally.ran()


@counts(150, 10_000)
def test_random_operations_while_the_disk_stalls(disk: FaultyDisk, backend: str, count: int, tally: Tally) -> None:
    """About one in twenty finds the disk stalled; after it, nothing is held, and every slot is free."""
    source = random.Random(backend)
    store = TieredStore.open(disk.folder / f"{backend} {count}", dram=MIB, nvme="16MiB", backend=backend)  # type: ignore[arg-type]
    now: dict[str, int] = {}

    def operate(version: int) -> None:
        key, what = f"t{source.randrange(12)}", source.randrange(10)
        try:
            if what < 3:
                store.put(key, content(key, version, 150_000))
                now[key] = version
            elif what < 6:
                assert store.get(key).equal(content(key, now[key], 150_000))
            elif what < 8:
                with store.lease(key, access="write") as tensor:
                    tensor.copy_(content(key, version, 150_000))
                now[key] = version
            elif what == 8:
                store.prefetch([key])
            else:
                store.commit()
        except (KeyNotFound, LeaseConflict, CapacityError):
            return

    for number in range(200):
        operate(number)
    with Watched():
        for number in range(count // 3):
            if number % 20 == 0:
                store._engine.config = EngineConfig(deadline=0.01)
                disk.add(Rule(source.choice(["read", "write"]), "stall", name=r"data\.0", times=-1))
            operate(1000 + number)
            if number % 20 == 2:
                fired = sum(disk.clear())
                store._engine.config = EngineConfig()
                if fired:
                    tally.count("a stall", fired)
        disk.clear()
        store._engine.config = EngineConfig()
        for key, version in now.items():
            assert store.get(key).equal(content(key, version, 150_000))
        store.commit()
    assert not store._engine.requests.waiting
    for key in list(store):
        store.delete(key)
    assert [tier.used for tier in store.statistics().tiers[:1]] == [0]
    store.commit()
    store.commit()
    assert store.statistics().tiers[-1].used == 0, "extents of the disk are lost"
    store.close()
