"""Promise 20: an exception of a signal handler strikes a call of the store at any bytecode, and the same process goes on.

Afterwards the store is right, compared with a dict: each tensor has the bytes of before the struck call or of after it, nothing
is leased or held, everything can be read, written, committed and rolled back. Or it is condemned, and every call raises
InterruptedStore until it is reopened, with the last commit's bytes.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.stress.contents import content
from tests.stress.strikes import Strike, armed, interrupted_at, lines_of, struck_after_call, struck_at, struck_or_raise
from tests.stress.tally import Tally, counts
from tests.striping import lower_stripes
from tiered import Eviction, InterruptedStore, MisuseError, StoreClosed, TieredStore

PROMISE = "20 (exceptions that strike a call)"
MIB = 1 << 20
KEYS = [f"t{number:02}" for number in range(14)]
DRIVES: list[str] = []
"""Folders of the data files, within the store's; none: the data file is in the store's own."""
Contents = dict[str, int]
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
"""Python swallows an exception that strikes a finalizer, and says so."""


def nbytes_of(key: str) -> int:
    return 60_000 + 7_777 * (int(key[1:]) % 5)


def bytes_of(key: str, version: int) -> torch.Tensor:
    return content(key, version, nbytes_of(key))


class Struck:
    """A store, and what it holds: ``now``, or ``expected`` where a struck call may have got that far.

    Each commit has a number of its own in its meta; ``committed`` are the contents of each. A struck commit may go on by
    itself, with what there was when it was called.
    """

    def __init__(self, folder: Path, source: random.Random) -> None:
        self.folder, self.source = folder, source
        self.version = self.floor = 0
        self.now: Contents = {}
        self.expected: Contents | None = {}
        self.committed: dict[int, Contents | None] = {}  # None: what there is now, whatever that is
        self.marked = self.struck = 0
        self.where: Counter[str] = Counter()
        self.store = self.open()

    def open(self) -> TieredStore:
        paths = [self.folder / name for name in DRIVES] or None
        return TieredStore.open(self.folder, dram=MIB, eviction=Eviction(deadline=30.0), paths=paths)

    # -- calls: each returns what the store may hold after it was struck, besides what it held -----------------------------

    def put(self, key: str) -> Contents:
        self.version += 1
        return self._do(lambda: self.store.put(key, bytes_of(key, self.version)), self.now | {key: self.version})

    def write(self, key: str) -> Contents:
        self.version += 1
        fresh, there = bytes_of(key, self.version), self.now | {key: self.version}

        def work() -> None:
            with self.store.lease(key, access="write") as tensor:
                tensor.copy_(fresh)

        return self._do(work, there)

    def read(self, key: str) -> Contents:
        def work() -> None:
            with self.store.lease(key) as tensor:
                assert torch.equal(tensor, bytes_of(key, self.now[key]))

        return self._do(work, self.now)

    def read_many(self, key: str) -> Contents:
        keys = sorted({key, *self.source.sample(sorted(self.now), min(3, len(self.now)))})

        def work() -> None:
            with self.store.lease(keys) as tensors:
                for name, tensor in zip(keys, tensors, strict=True):
                    assert torch.equal(tensor, bytes_of(name, self.now[name]))

        return self._do(work, self.now)

    def get(self, key: str) -> Contents:
        def work() -> None:
            assert torch.equal(self.store.get(key), bytes_of(key, self.now[key]))

        return self._do(work, self.now)

    def delete(self, key: str) -> Contents:
        return self._do(lambda: self.store.delete(key), {other: v for other, v in self.now.items() if other != key})

    def prefetch(self, key: str) -> Contents:
        hint = self.source.choice([self.store.prefetch, self.store.speculate])
        return self._do(lambda: hint(sorted(self.now)[:3]), self.now)

    def follow(self, key: str) -> Contents:
        order = self.source.sample(sorted(self.now), len(self.now)) if self.source.random() < 0.7 else []
        return self._do(lambda: self.store.follow(order), self.now)

    def commit(self, key: str) -> Contents:
        self.version += 1
        self.committed[self.version] = self.now
        return self._do(lambda: self.store.commit({"version": self.version}), self.now)

    def rollback(self, key: str) -> Contents:
        if not self.store.generation:
            return self.now
        self.expected, self.floor = None, self.store.meta["version"]  # what was committed last, which may go on yet
        self.store.rollback()
        self.now = self.of_commit()
        return self.now

    def statistics(self, key: str) -> Contents:
        return self._do(self.store.statistics, self.now)

    CALLS = (put, put, write, write, read, read_many, get, get, delete, prefetch, follow, commit, rollback, statistics)

    def _do(self, work: Callable[[], object], there: Contents) -> Contents:
        self.expected = there
        work()
        self.now = there
        return there

    # -- after a strike ----------------------------------------------------------------------------------------------------

    def after(self, where: str, before: Contents) -> None:
        """Everything is as it was before, or as after the call; both for each tensor by itself are the same, as a call changes
        one, or all."""
        self.struck += 1
        try:
            self._goes_on(where, before)
        except InterruptedStore:
            self.marked += 1
            self.committed = {number: before if held is None else held for number, held in self.committed.items()}
            with pytest.raises(InterruptedStore):
                self.store.commit()
            self.reopen(where)
        except Exception as error:
            raise AssertionError(f"struck at {where}: {error!r}") from error

    def _goes_on(self, where: str, before: Contents) -> None:
        gc.collect()
        store, there = self.store, {}
        names = sorted(store)
        held_then = [before, *([self.expected] if self.expected is not None else self._last_commits())]
        assert names in [sorted(held) for held in held_then], f"{where}: {names}"
        for key in names:
            found = store.get(key)
            maybe = [held[key] for held in held_then if key in held]
            right = [version for version in maybe if torch.equal(found, bytes_of(key, version))]
            assert right, f"{where}: {key} has none of its versions {maybe}"
            there[key] = right[0]
            del found
        assert there in held_then, f"{where}: half of one and half of the other"
        self.now = there
        self.committed = {number: there if held is None else held for number, held in self.committed.items()}
        for tier in store.statistics().tiers:
            assert tier.held == 0, f"{where}: {tier}"
        for key in self.source.sample(names, min(2, len(names))):
            self.write(key)  # nobody has a lease of it
        with store._engine.lock:
            assert not store._engine.state.changing
            store._engine.state.directory.check()
            for place in store._engine.state.pools:
                place.check()

    def _last_commits(self) -> list[Contents]:
        """What a struck rollback may have gone back to: the newest of them may have come after it."""
        return [held for number, held in self.committed.items() if held is not None and number >= self.floor]

    def reopen(self, where: str) -> None:
        self.store.close()
        self.store = self.open()
        self.now = self.of_commit()
        assert sorted(self.store) == sorted(self.now), f"{where}: reopened"
        for key, version in self.now.items():
            assert torch.equal(self.store.get(key), bytes_of(key, version)), f"{where}: reopened, {key} is not {version}"
        self.committed = {self.store.meta.get("version", 0): self.now}

    def of_commit(self) -> Contents:
        """What the newest commit has."""
        held = self.committed[self.store.meta["version"]] if self.store.generation else {}
        assert held is not None
        return held

    def step(self) -> tuple[Callable[[], Contents], Contents]:
        """The next call, and what there is before it."""
        key = self.source.choice(sorted(self.now) or KEYS) if self.source.random() < 0.7 else self.source.choice(KEYS)
        call = self.source.choice(self.CALLS)
        if key not in self.now and call in (Struck.write, Struck.read, Struck.get, Struck.delete, Struck.read_many):
            call = Struck.put
        return (lambda: call(self, key)), self.now

    def fill(self) -> None:
        for key in KEYS:
            self.put(key)
        self.commit("")


@pytest.fixture(params=["whole", "striped"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store on one drive, and of one on two with tensors that are striped over both."""
    if request.param == "striped":
        monkeypatch.setattr("tests.stress.test_struck.DRIVES", ["one", "two"])
        lower_stripes(monkeypatch, 16 << 10, 70_000)


@pytest.mark.usefixtures("layout")
@counts(24, 5_000)
def test_real_signals(tmp_path: Path, count: int, tally: Tally) -> None:
    source = random.Random(count)
    world = Struck(tmp_path / "state", source)
    world.fill()
    while world.struck < count:
        call, before = world.step()
        world.expected = before
        try:
            with armed(source.choice([4e-6, 2e-5, 1e-4, 3e-4, 1e-3, 5e-3]) * (0.5 + source.random()), 0.0):
                call()
        except Strike as strike:
            where = strike.where
            world.where[where.split()[0].split(":")[0]] += 1
            if source.random() < 0.2:  # within the except clause, with the traceback still there
                world.version += 1
                world.committed[world.version] = None
                with suppress(InterruptedStore):
                    world.store.commit({"version": world.version})
        else:
            continue
        tally.count("a strike", 1)
        world.after(where, before)
        if source.random() < 0.02:
            world.commit("")
            world.reopen(where)
    world.commit("")
    world.reopen("at the end")
    print(f"{world.struck} strikes, {world.marked} condemned; by file: {world.where.most_common(12)}")
    assert world.marked <= 0.02 * world.struck
    world.store.close()


@pytest.mark.usefixtures("layout")
@counts(9, 1_000_000)
@pytest.mark.parametrize(
    "what", ["put", "put a new one", "get", "get from the disk", "read", "write", "delete", "commit", "rollback", "prefetch"]
)
def test_every_line(tmp_path: Path, what: str, count: int, tally: Tally) -> None:
    """Where ``count`` is less than the lines that there are, some of them, another choice for each call."""
    source = random.Random(what)
    world = Struck(tmp_path / "state", source)
    world.fill()

    def prepare() -> Callable[[], object]:
        key = source.choice(KEYS)
        if key not in world.now:
            world.put(key)
        if what == "put a new one":
            world.delete(key)
            return lambda: world.put(key)
        if what == "get from the disk":
            out = KEYS[(KEYS.index(key) + 1) % len(KEYS)]
            world.commit("")
            for other in KEYS * 2:
                if other in world.now and other != key:
                    world.get(other)
            del out
            return lambda: world.get(key)
        if what in ("commit", "rollback"):
            world.write(key)
        elif what != "prefetch":
            world.get(key)  # it is resident
        return lambda: getattr(world, what)(key)

    most = max(lines_of(prepare()) for _ in range(3))
    for number in range(most) if most <= count else source.sample(range(most), most):  # not each call has so many lines
        if world.struck == count:
            break
        call, before = prepare(), world.now
        world.expected = before
        where = struck_at(number, call)
        if where is not None:
            tally.count("a line", 1)
            world.after(f"line {number} of {what}, {where}", before)
    print(f"{what}: {world.struck} of {most} lines struck, {world.marked} condemned")
    world.commit("")
    world.reopen("at the end")
    world.store.close()


@counts(30, 1_000_000)
def test_a_struck_close_is_gone_on_with(tmp_path: Path, count: int, tally: Tally) -> None:
    """By the next ``close``, or by the collector: then the store can be opened, and has the last commit."""
    source = random.Random(1)

    def made(version: int) -> TieredStore:
        store = TieredStore.open(tmp_path / "state", dram=MIB)
        store.put("a", torch.full((10,), float(version)))
        store.commit()
        return store

    def folder_is_open() -> list[str]:
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        names = [os.readlink(link) for link in links if link.exists()]
        return [name for name in names if name.startswith(str(tmp_path))]

    most = lines_of(made(0).close)
    for number in range(most) if most <= count else sorted(source.sample(range(most), count)):
        store = made(number)
        where = struck_at(number, store.close)
        if where is not None:
            tally.count("a strike in close", 1)
        if source.random() < 0.5:
            store.close()
        del store
        gc.collect()
        with TieredStore.open(tmp_path / "state", dram=MIB) as store:
            assert store.get("a").tolist() == [float(number)] * 10, where
        del store
        assert not folder_is_open(), where
    print(f"{most} lines")


LIBRARY = ("/threading.py", "/_weakrefset.py", "/concurrent/futures/_base.py", "/contextlib.py")
"""Files of Python's own, whose functions hold locks while they wait."""


@pytest.mark.parametrize("call", ["commit", "commit_async", "rollback", "result", "done"])
def test_a_strike_within_pythons_library_leaves_no_thread(tmp_path: Path, call: str, tally: Tally) -> None:
    """After each call there; and who waits for a commit again gets its result."""
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.zeros(10))
        store.commit()
        number, where = 0, ""
        while where is not None:
            store.put("a", torch.full((10,), float(number)))
            if call in ("result", "done"):
                future = store.commit_async()
                where = struck_after_call(number, getattr(future, call), LIBRARY)
                assert future.result(timeout=300) == store.generation, where
            else:
                where = struck_after_call(number, getattr(store, call), LIBRARY)
                store.commit()
            if where is not None:
                tally.count("a strike in Python's library", 1)
            number += 1
        tally.ran()
    for thread in threading.enumerate():
        if thread.name.startswith("tiered-"):
            thread.join(300)
            assert not thread.is_alive(), f"{thread.name} is left"


@pytest.mark.parametrize("call", ["put", "write lease", "delete", "commit", "rollback"])
def test_a_traceback_keeps_no_lease(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Struck at the first bytecode of ``__exit__``: the lease's object lives as long as the traceback, which may be long."""
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.zeros(10))
        store.commit()

        def work() -> None:
            with store.lease("a", access="write"):
                pass

        most = lines_of(work)
        leased = 0
        for number in range(most):
            try:
                struck_or_raise(number, work)
            except Strike as strike:
                monkeypatch.setattr("sys.last_value", strike, raising=False)  # as an interactive interpreter does
                del strike
            store._engine.look()
            with store._engine.lock:
                leased += any(entry.leased for entry in store._engine.state.directory.entries())
            if call == "put":
                store.put("a", torch.zeros(10))
            elif call == "write lease":
                work()
            elif call == "delete":
                store.delete("a")
                store.put("a", torch.zeros(10))
            elif call == "commit":
                store.commit()
            else:
                store.rollback()
        assert leased, "no strike came where it was to come"


@pytest.mark.parametrize("what", ["statistics", "get", "commit", "rollback", "close"])
def test_a_handler_that_calls_the_store(tmp_path: Path, what: str) -> None:
    """It is answered, or refused where it interrupts a change; the interrupted call goes on as if nothing had been."""
    counts: Counter[str] = Counter()
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("other", torch.ones(100))
        store.commit()
        for number in range(0, lines_of(lambda: store.put("a", torch.ones(1000))), 7):

            def call() -> None:
                try:
                    {"get": lambda: store.get("other")}.get(what, getattr(store, what))()
                    counts["answered"] += 1
                except MisuseError:
                    counts["refused"] += 1

            before = store.get("a")
            fresh = torch.full((1000,), float(number))
            with suppress(StoreClosed):
                interrupted_at(number, lambda fresh=fresh: store.put("a", fresh), call)  # type: ignore[misc]
            if what == "close" and counts["answered"]:
                break
            found = store.get("a")
            assert found.equal(fresh) or (what == "rollback" and found.equal(before)), number
            assert store.get("other").eq(1).all()
            if what == "rollback":
                store.put("a", torch.ones(1000))
                store.commit()
            assert [tier.held for tier in store.statistics().tiers] == [0, 0]
    assert counts["refused"] or what == "close"


def test_a_recount_notices_a_misused_lease(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.ones(1000))
        store.commit()
        with pytest.raises(MisuseError, match="READ lease"), store.lease("a") as tensor:  # noqa: PT012 - at its end
            tensor.fill_(7)
            store._engine.state.changing = True  # as another call leaves it that is struck within a change
        assert store.get("a").eq(1).all()


def test_a_struck_trace_and_timeline_end(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.ones(10))

        def traced() -> None:
            with store.trace():
                store.get("a")

        def timed() -> None:
            with store.timeline():
                store.get("a")

        for work in (traced, timed):
            for number in range(lines_of(work)):
                struck_at(number, work)
        with store.timeline() as timeline:
            store.get("a")
        assert timeline.leases
        assert not [record for record in store._engine.state.records if record.wanted() is not None]
