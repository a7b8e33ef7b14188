"""A million random operations of eight threads on a store whose every tier is too small, each result checked."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import os
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.stress.ledger import LARGEST, Kind, Ledger, key_of, pattern
from tiered import Access, KeyNotFound, LeaseConflict, TieredStore
from tiered.engine.policy import Touch
from tiered.types import TensorSpec, Use

KEYS = 320
THREADS = 8
TIERS = ("hbm", "dram")
BUDGET = {"hbm": 384 << 10, "dram": 1 << 20, "nvme": 48 << 20}
"""Bytes. All tensors together take about twice what HBM and DRAM have."""
DTYPES = (torch.int64, torch.float32, torch.uint8)

EXPECTED = {
    "put", "create", "get", "fetch", "read", "write", "read many", "write many", "keep", "prefetch", "follow a trace",
    "follow keys", "follow nothing", "delete", "commit", "statistics", "list", "check",
}  # fmt: skip
"""What has to have succeeded at least once."""


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """A deadlock fails with every thread's traceback instead of hanging."""
    yield
    faulthandler.cancel_dump_traceback_later()


class Worker:
    """One thread's operations. Its choices depend on the seed alone."""

    def __init__(self, run: Run, seed: str) -> None:
        self.run, self.store, self.source = run, run.store, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.kept: list[tuple[int, torch.Tensor]] = []  # aliases that outlive their leases, with their keys
        self._operations: list[tuple[Callable[[], None], float]] = [
            (self.put, 14),
            (self.create, 2),
            (self.get, 14),
            (self.fetch, 0.5),
            (self.lease, 46),
            (self.prefetch, 8),
            (self.follow_trace, 0.4),
            (self.follow_keys, 0.3),
            (self.follow_nothing, 0.5),
            (self.delete, 3),
            (self.commit, 0.02),
            (self.look_in, 1),
        ]

    def work(self, operations: int) -> None:
        what, weights = zip(*self._operations, strict=True)
        for number, operation in enumerate(self.source.choices(what, weights, k=operations)):
            if self.run.failure is not None:
                break
            operation()
            if number % self.run.look_every == self.run.look_every // 2:
                self.run.check()
                self.counts["check"] += 1
        self.forget()

    # -- helpers -----------------------------------------------------------------------------------------------------------

    def key(self) -> int:
        """Half of the time one of a few, over which the threads quarrel."""
        return self.source.randrange(KEYS if self.source.random() < 0.5 else KEYS // 10)

    def words(self) -> int:
        return self.source.choice((0, 1, 7, 64, 500, 1500, LARGEST))

    def shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes with another dtype or shape."""
        other = tensor.view(self.source.choice(DTYPES))
        return other.view(len(tensor), -1) if len(tensor) and self.source.random() < 0.5 else other

    def forget(self) -> None:
        """Nobody wrote over what is kept, but under WRITE leases of the same key."""
        while self.kept:
            key, tensor = self.kept.pop()
            assert key_of(tensor) == key, f"the memory of an alias of key {key} has become another tensor's"

    def mutate(self, name: str, kind: Kind, key: int, words: int, action: Callable[[torch.Tensor], None]) -> None:
        ledger = self.run.ledgers[key]
        mutation = ledger.begin(kind, words)
        try:
            action(pattern(key, mutation.version, words))
        except LeaseConflict:
            ledger.failed(mutation)
            self.counts["LeaseConflict"] += 1
            return
        ledger.succeeded(mutation)
        self.counts[name] += 1

    # -- operations --------------------------------------------------------------------------------------------------------

    def put(self) -> None:
        key = self.key()
        self.mutate("put", Kind.BYTES, key, self.words(), lambda new: self.store.put(str(key), self.shaped(new)))

    def create(self) -> None:
        key, words = self.key(), self.words()
        spec = TensorSpec("int64", (words,), 8)
        self.mutate("create", Kind.UNDEFINED, key, words, lambda new: self.store.create(str(key), spec))
        self._lease([key], Access.WRITE, self.source.choice(TIERS))

    def get(self) -> None:
        key = self.key()
        ledger = self.run.ledgers[key]
        token = ledger.reader()
        try:
            found = self.store.get(str(key))
        except (KeyNotFound, LeaseConflict) as error:
            self.refused(error, {key: token})
            return
        ledger.read(token, as_words(found))
        self.counts["get"] += 1

    def fetch(self) -> None:
        keys = [self.key() for _ in range(3)]
        tokens = [self.run.ledgers[key].reader() for key in keys]

        async def several() -> list[torch.Tensor | BaseException]:
            return await asyncio.gather(*(self.store.fetch(str(key)) for key in keys), return_exceptions=True)

        for key, token, found in zip(keys, tokens, asyncio.run(several()), strict=True):
            if isinstance(found, KeyNotFound | LeaseConflict):
                self.refused(found, {key: token})
            elif isinstance(found, BaseException):
                raise found
            else:
                self.run.ledgers[key].read(token, as_words(found))
                self.counts["fetch"] += 1

    def lease(self) -> None:
        many = self.source.random() < 0.2
        keys = list({self.key() for _ in range(3 if many else 1)})
        self._lease(keys, self.source.choice((Access.READ, Access.READ, Access.WRITE)), self.source.choice(TIERS))

    def _lease(self, keys: list[int], access: Access, tier: str) -> None:
        self.forget()
        ledgers = self.run.ledgers
        writing = access is Access.WRITE
        mutations = {key: ledgers[key].begin(Kind.BYTES, None) for key in keys} if writing else {}
        tokens = {key: ledgers[key].reader() for key in keys}
        keep = self.source.random() < 0.3
        try:
            with self.store.lease([str(key) for key in keys], access=access, tier=tier) as tensors:
                for key, tensor in zip(keys, tensors, strict=True):
                    found = as_words(tensor)
                    ledgers[key].read(tokens.pop(key), found, mutations.get(key))
                    if writing:
                        mutations[key].words = len(found)
                        found.copy_(pattern(key, mutations[key].version, len(found)))
                    if keep and len(found) and key_of(found) == key:  # not so where it was created just now
                        self.kept.append((key, found))
                        self.counts["keep"] += 1
                del tensors, tensor, found
        except (KeyNotFound, LeaseConflict) as error:
            for key, mutation in mutations.items():
                ledgers[key].failed(mutation)
            self.refused(error, tokens)
            return
        for key, mutation in mutations.items():
            ledgers[key].succeeded(mutation)
        self.counts[access.value + (" many" if len(keys) > 1 else "")] += 1

    def refused(self, error: KeyNotFound | LeaseConflict, tokens: dict[int, object]) -> None:
        """No bytes; but that a key is not there is something read, too."""
        self.counts[type(error).__name__] += 1
        for key, token in tokens.items():
            if isinstance(error, KeyNotFound) and repr(str(key)) in str(error):
                self.run.ledgers[key].read(token, None)
            else:
                self.run.ledgers[key].gone(token)

    def prefetch(self) -> None:
        keys = [str(self.key()) for _ in range(self.source.randrange(1, 6))]
        self.source.choice([self.store.prefetch, self.store.speculate])(keys, tier=self.source.choice(TIERS))
        self.counts["prefetch"] += 1

    def follow_trace(self) -> None:
        """What this thread and the others do meanwhile, perhaps more than once."""
        with self.store.trace() as order:
            for _ in range(self.source.randrange(1, 30)):
                self.lease()
        self.forget()
        self.store.follow(order)
        for _ in range(self.source.randrange(3)):
            for touch in order:
                self._lease([int(touch.key)], Access.READ if touch.use is Use.READ else Access.WRITE, touch.tier or "hbm")
        self.counts["follow a trace"] += 1

    def follow_keys(self) -> None:
        """Also more than fits, and keys that are not there."""
        some = [str(self.key()) for _ in range(self.source.choice((1, 5, 40, 200)))]
        order = [Touch(key, self.source.choice((None, *TIERS)), self.source.choice(list(Use))) for key in some]
        self.store.follow(order)
        self.counts["follow keys"] += 1

    def follow_nothing(self) -> None:
        self.store.follow([])
        self.counts["follow nothing"] += 1

    def delete(self) -> None:
        key = self.key()
        token = self.run.ledgers[key].reader()
        mutation = self.run.ledgers[key].begin(Kind.ABSENT, 0)
        try:
            self.store.delete(str(key))
        except (KeyNotFound, LeaseConflict) as error:
            self.run.ledgers[key].failed(mutation)
            self.refused(error, {key: token})
            return
        self.run.ledgers[key].gone(token)
        self.run.ledgers[key].succeeded(mutation)
        self.counts["delete"] += 1

    def commit(self) -> None:
        """Refused under any open WRITE lease, so mostly."""
        try:
            self.store.commit({"by": "a thread"})
        except LeaseConflict:
            self.counts["commit refused"] += 1
        else:
            self.counts["commit"] += 1

    def look_in(self) -> None:
        if self.source.random() < 0.5:
            found = self.store.statistics()
            assert all(0 <= tier.used <= tier.peak <= tier.capacity for tier in found.tiers)
            self.counts["statistics"] += 1
        else:
            assert all(0 <= int(key) < KEYS for key in self.store)
            self.counts["list"] += 1


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int64)


class Run:
    """A store, what its keys may hold, and threads in phases; after each phase everything must be in its place.

    ``look_every``: operations of one thread between two looks at everything.
    """

    def __init__(self, folder: Path, seed: int, look_every: int) -> None:
        self.seed, self.look_every = seed, look_every
        self.store = self.open(folder)
        self.ledgers = [Ledger(number) for number in range(KEYS)]
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._phases = itertools.count()
        first = Worker(self, f"{seed} first")
        for key in range(KEYS):
            first.mutate("put", Kind.BYTES, key, 64, lambda new, key=key: self.store.put(str(key), new))

    @staticmethod
    def open(folder: Path) -> TieredStore:
        return TieredStore.open(folder, device="cpu", **BUDGET)

    def phase(self, operations: int) -> None:
        """``operations`` in all. No phase may take ten minutes."""
        faulthandler.dump_traceback_later(600, exit=True)
        number = next(self._phases)
        workers = [Worker(self, f"{self.seed} {number} {thread}") for thread in range(THREADS)]
        threads = [threading.Thread(target=self._work, args=(worker, operations // THREADS)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        for worker in workers:
            self.counts += worker.counts
        del workers, threads
        self.quiet()

    def _work(self, worker: Worker, operations: int) -> None:
        try:
            worker.work(operations)
        except BaseException as error:
            self.failure = self.failure or error

    def check(self) -> None:
        """What holds at any time."""
        engine = self.store._engine
        with engine.lock:
            engine.state.directory.check()
            for place in engine.state.pools:
                place.check()

    def quiet(self) -> None:
        """Nobody uses the store: no bytes are anybody's but those of tensors."""
        gc.collect()
        self.store.follow([])
        self.store.commit({"by": "all"})
        self.counts["commit"] += 1
        self.check()
        engine = self.store._engine
        with engine.lock:
            engine.state.reap()
            assert not engine.requests.waiting or all("prefetch" in str(r) for r in engine.requests.waiting)
            assert not engine.state.unsaved
            assert not list(engine.state.claims)
            assert not engine.state.records
            for place in engine.state.pools:
                assert not place.aliased_evicted
                assert not place.holders()
                assert place.used == sum(copy.slot.nbytes for copy in place.copies.values()), f"a slot of {place.tier.name}"
            for memory in self.store._parts.memories:
                place = engine.state.pools[self.store._parts.memories.index(memory)]
                assert memory.used == place.used  # type: ignore[attr-defined]

    def verify(self, store: TieredStore) -> None:
        """Every key, once nobody writes any more."""
        for ledger in self.ledgers:
            token = ledger.reader()
            try:
                found = as_words(store.get(str(ledger.number)))
            except KeyNotFound:
                ledger.read(token, None)
            else:
                ledger.read(token, found)

    def empty(self) -> None:
        for key in list(self.store):
            self.store.delete(key)
        assert [tier.used for tier in self.store.statistics().tiers] == [0, 0, 0]
        self.check()

    def summary(self) -> str:
        found = self.store.statistics()
        links = [f"{link.src} {link.up.transfers} up {link.down.transfers} down" for link in found.links]
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return (
            f"seed {self.seed}: {counts}; {found.evictions} evictions; {'; '.join(links)}; "
            f"{found.prefetched} prefetched, {found.prefetched_unused} in vain; "
            f"{found.hits} hits, {found.misses} misses; stalled {found.stalled:.0f} s"
        )


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes of memory that the process has."""
    gc.collect()
    return psutil.Process().memory_info().rss


def stress(folder: Path, operations: int, seed: int, look_every: int) -> None:
    phases = 10
    threads, files = set(threading.enumerate()), descriptors()
    run = Run(folder, seed, look_every)
    run.phase(operations // 5)  # the allocators warm up
    warm = resident()
    for _ in range(phases):
        run.phase(operations * 7 // 10 // phases)
    grown = resident() - warm
    assert grown < 32 << 20, f"{grown:,} bytes more than after a fifth of the operations"
    tracemalloc.start()
    run.phase(operations // 20)
    before = tracemalloc.get_traced_memory()[0]
    run.phase(operations // 20)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 1 << 20, f"{after - before:,} bytes of Python objects were left behind"
    run.verify(run.store)
    found = run.store.statistics()
    print(run.summary())
    assert set(run.counts) >= EXPECTED, f"never happened: {EXPECTED - set(run.counts)}"
    assert run.counts["LeaseConflict"]
    assert run.counts["KeyNotFound"]
    assert found.evictions > operations // 100
    assert found.prefetched
    assert all(flow.transfers > operations // 1000 for link in found.links for flow in (link.up, link.down))
    run.store.commit()
    run.store.close()
    run.store = run.open(folder)
    run.verify(run.store)
    run.empty()
    run.store.close()
    del run
    assert set(threading.enumerate()) == threads
    assert descriptors() == files


def test_some_thousand_operations(tmp_path: Path) -> None:
    stress(tmp_path / "state", 1_600, seed=1, look_every=50)


@pytest.mark.soak
def test_a_million_operations(tmp_path: Path) -> None:
    stress(tmp_path / "state", 1_000_000, seed=0, look_every=1000)
