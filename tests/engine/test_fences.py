"""Kernels run long after they were queued, in every order that the fences allow, and each must find the bytes of its time.

The host's order says what each kernel has to read. Then each fence is left out once: a kernel must find wrong bytes.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.device import Device
from tests.fakes import FakeTier, ManualLink, NoDraft, fake_checksums
from tiered.engine.engine import Engine, EngineConfig
from tiered.engine.policy import LRU
from tiered.engine.pool import Pool
from tiered.engine.requests import Install
from tiered.engine.residency import Copy, Directory
from tiered.engine.snapshot import Flush
from tiered.engine.state import EngineState
from tiered.errors import CapacityError, InterruptedStore, KeyNotFound, LeaseConflict
from tiered.links.stand_in import MemoryLink
from tiered.store.commit import Generations
from tiered.store.lease import LeaseOfMany
from tiered.store.opening import Parts, _duplicator
from tiered.store.store import TieredStore
from tiered.types import Access, Fence, Slot, TensorSpec, Transfer

KEYS = ("a", "b", "c", "d", "e", "f")
STREAMS = ("one", "two", "three")
SIZES = (512, 1024)
"""Bytes; the device has room for six of the small."""
HEAP = 4 << 20
"""Bytes on the device that are not the store's."""


class WrongBytes(AssertionError):
    """A kernel, or the host, read what it should not have."""


class Struck(Exception):
    """What a signal handler raised."""


class NoHurry:
    """Where a caller would wait for the engine's thread: the test is that thread, and the device, and the disk."""

    def __init__(self, world: World) -> None:
        self._world = world

    def notify_all(self) -> None:
        pass

    def wait(self, timeout: float) -> None:
        lock = self._world.engine.lock
        lock.release()
        try:
            self._world.go_on()
        finally:
            lock.acquire()

    def acquire(self) -> bool:
        return self._world.engine.lock.acquire()

    def _is_owned(self) -> bool:
        owned: bool = self._world.engine.lock._is_owned()  # type: ignore[attr-defined]
        return owned


class Alias:
    """A tensor of a lease, perhaps of one that has ended; kernels on it run on the lease's stream. The ``since``th of the
    values that were written to its memory is the last one that they run after."""

    def __init__(self, key: str, tensor: torch.Tensor, copy: Copy, stream: str, since: int) -> None:
        self.key, self.tensor, self.copy, self.stream, self.since = key, tensor, copy, stream, since


class Held:
    """An open lease."""

    def __init__(self, lease: LeaseOfMany, access: Access, aliases: list[Alias]) -> None:
        self.lease, self.access, self.aliases = lease, access, aliases


class World:
    """A store over a device, host memory and a disk; ``value`` is what each key holds by the host's order, None undefined."""

    def __init__(self, source: random.Random, deaf: frozenset[str] = frozenset()) -> None:
        self.source = source
        self.device = device = Device(6 * 512, HEAP, source, deaf)
        dram, disk = FakeTier("dram", 6 * 512, 64), FakeTier("nvme", 1 << 16, 64)
        self.disk = ManualLink(dram, disk, checksums=fake_checksums)
        tiers, links = (device.tier, dram, disk), (MemoryLink(device.tier, dram, streams=device), self.disk)
        self.parts = Parts((device.tier, dram), None, None, tiers, links, tuple(LRU() for _ in tiers))
        self.now = 0.0
        self.idle = 0
        config = EngineConfig(60.0, source.choice((0.0, 0.5)), lambda: self.now, LRU)
        self.engine = Engine(tiers, links, self.parts.policies, config)
        self.engine._changed = NoHurry(self)  # type: ignore[assignment]
        self.store = TieredStore(self.parts, self.engine, Generations(), scratch=False)
        self.numbers = iter(range(1, HEAP // max(SIZES)))
        self.value: dict[str, int | None] = {}
        self.bytes: dict[str, int] = {}
        self.written: dict[Copy, list[int | None]] = {}  # by copy, what it held, the first first
        self.held: list[Held] = []
        self.kept: list[Alias] = []
        self.lazy = source.choice((0.05, 0.3, 1.0))
        self.hurry = source.choice((0.01, 0.1))  # how often somebody who waits gives up
        self.kernels = self.strikes = 0
        self.turning = 0
        for owner, name in ((self.engine, "turn"), (self.engine, "_recount"), (self.engine.requests, "attempt")):
            setattr(owner, name, self.by_the_engine(getattr(owner, name)))
        self.over = False  # a kernel found wrong bytes: nothing that runs after that counts

    def by_the_engine(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Its thread does this, and no signal handler runs there."""

        def called(*arguments: object) -> Any:
            self.turning += 1
            try:
                return real(*arguments)
            finally:
                self.turning -= 1

        return called

    # -- time goes by ------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """The engine turns, and the device and the disk do something; where nothing moves any more, time passes."""
        moved = self.engine.turn()
        for tag in list(self.disk.pending):
            if self.source.random() < 0.5:
                self.disk.complete(tag)
                moved = True
        ready = self.device.ready()
        self.device.some(self.source.randrange(3))
        self.idle = 0 if moved or ready or self.disk.pending else self.idle + 1
        if self.idle > 3 or self.source.random() < self.hurry:  # Ctrl-C would be the same
            self.idle = 0
            self.now += 1000.0

    def some_time(self) -> None:
        if self.source.random() < self.lazy:
            self.go_on()

    # -- kernels -----------------------------------------------------------------------------------------------------------

    def pattern(self, value: int, nbytes: int) -> Any:
        return np.full(nbytes // 8, value, dtype=np.int64).view(np.uint8)

    def find(self, found: Any, allowed: list[int | None], what: str) -> None:
        right = [self.pattern(value, len(found)) for value in allowed if value is not None]
        if not self.over and None not in allowed and not any(np.array_equal(found, each) for each in right):
            raise WrongBytes(f"{what} found {sorted(set(found.view(np.int64).tolist()))}, not {allowed}")

    def launch(self, alias: Alias, work: Callable[[Any], None]) -> None:
        """Queue ``work`` on the memory of ``alias``, without keeping the tensor alive."""
        begin = self.device.offset(alias.tensor)
        memory = self.device.arena[begin : begin + alias.tensor.nbytes]
        self.device.launch(lambda: work(memory), alias.stream)
        self.kernels += 1

    def launch_read(self, alias: Alias) -> None:
        """By who has a lease."""
        expected, what = [self.value[alias.key]], f"a kernel on {alias.key!r}"
        self.launch(alias, lambda found: self.find(found, expected, what))

    def launch_write(self, alias: Alias) -> None:
        before, after = self.value[alias.key], next(self.numbers)
        key, nbytes = alias.key, alias.tensor.nbytes

        def work(memory: Any) -> None:
            self.find(memory, [before], f"a kernel that writes {key!r}")
            memory[:] = self.pattern(after, nbytes)

        self.launch(alias, work)
        self.value[key] = after
        alias.since = len(self.written[alias.copy])
        self.written[alias.copy].append(after)

    def launch_late_read(self, alias: Alias) -> None:
        """By who had a lease: those who write to the same memory meanwhile need not wait for that."""
        seen, since, what = self.written[alias.copy], alias.since, f"a late kernel on {alias.key!r}"
        self.launch(alias, lambda found: self.find(found, seen[since:], what))

    # -- what the host does ------------------------------------------------------------------------------------------------

    @contextmanager
    def refusals(self) -> Iterator[None]:
        with suppress(CapacityError, LeaseConflict, KeyNotFound):
            yield

    @contextmanager
    def impatience(self) -> Iterator[None]:
        """Perhaps who waits gives up soon."""
        before, self.hurry = self.hurry, self.source.choice((self.hurry, self.hurry, 0.5))
        try:
            yield
        finally:
            self.hurry = before

    def lease(self) -> None:
        access = self.source.choice((Access.READ, Access.READ, Access.WRITE))
        keys = self.source.sample(KEYS, self.source.choice((1, 1, 2)))
        with self.refusals():
            self.lease_of(keys, access, self.source.choice(STREAMS), ends=self.source.random() < 0.7)

    def lease_of(self, keys: list[str], access: Access, stream: str, *, ends: bool) -> Held:
        lease = self.store.lease(keys, access=access)
        assert isinstance(lease, LeaseOfMany)
        with self.device.use(stream):
            tensors = lease.__enter__()
        assert lease._copies is not None
        aliases = []
        for key, tensor, copy in zip(keys, tensors, lease._copies, strict=True):
            seen = self.written.setdefault(copy, [self.value[key]])
            aliases.append(Alias(key, tensor, copy, stream, len(seen) - 1))
        held = Held(lease, access, aliases)
        self.held.append(held)
        del tensors, tensor, aliases
        self.use(held)
        if ends:
            self.end(held)
        return held

    def use(self, held: Held) -> None:
        for alias in held.aliases:
            for _ in range(self.source.randrange(3)):
                if held.access is Access.WRITE and self.source.random() < 0.7:
                    self.launch_write(alias)
                else:
                    self.launch_read(alias)

    def use_again(self) -> None:
        if self.held:
            self.use(self.source.choice(self.held))

    def end(self, held: Held) -> None:
        self.held.remove(held)
        for alias in list(held.aliases):
            if self.source.random() < (0.5 if held.access is Access.WRITE else 0.2):
                self.kept.append(alias)
            elif self.source.random() < 0.5:
                held.aliases.remove(alias)  # it dies before its lease ends
        with self.device.use(self.source.choice(STREAMS)):
            held.lease.__exit__(None, None, None)
        held.aliases.clear()

    def end_one(self) -> None:
        if self.held:
            self.end(self.source.choice(self.held))

    def use_late(self) -> None:
        if self.kept:
            self.launch_late_read(self.source.choice(self.kept))

    def drop(self) -> None:
        if self.kept:
            alias = self.kept.pop(self.source.randrange(len(self.kept)))
            if self.source.random() < 0.7:
                self.launch_late_read(alias)

    def put_from_the_device(self) -> None:
        """A tensor that a queued kernel is still to fill."""
        stream, key, nbytes, value = self.new()
        moving = [entry.key for entry in self.engine.state.directory.entries() if entry.in_flight]
        if moving and self.source.random() < 0.5:
            key = self.source.choice(moving)  # the put has to wait
        at = value * max(SIZES)  # of its own: else these kernels would need fences, too
        tensor = self.device.heap[at : at + nbytes]
        spec = TensorSpec("uint8", (nbytes,), 1)
        fails = self.source.random() < 0.2
        filled = self.pattern(value, nbytes)
        heap = self.device.heap.numpy()[at : at + nbytes]

        refused = self.source.random() < 0.2

        def fill(target: torch.Tensor) -> None:
            target.copy_(tensor)
            if fails:
                raise KeyNotFound("half way")
            if refused:  # another thread takes a lease between the room and the installation
                with self.refusals():
                    self.lease_of([key], Access.READ, stream, ends=False)

        with self.refusals(), self.device.use(stream), self.impatience():
            self.device.launch(lambda: heap.__setitem__(slice(None), filled), stream)
            self.store._put(key, spec, 0, fill)
            self.has(key, value, nbytes)
        self.device.launch(lambda: heap.fill(255), stream)

    def put_from_the_host(self) -> None:
        stream, key, nbytes, value = self.new()
        with self.refusals(), self.device.use(stream):
            self.store.put(key, torch.from_numpy(self.pattern(value, nbytes).copy()))
            self.has(key, value, nbytes)

    def create(self) -> None:
        stream, key, nbytes, _ = self.new()
        with self.refusals(), self.device.use(stream):
            self.store.create(key, TensorSpec("uint8", (nbytes,), 1))
            self.has(key, None, nbytes)

    def new(self) -> tuple[str, str, int, int]:
        return self.source.choice(STREAMS), self.source.choice(KEYS), self.source.choice(SIZES), next(self.numbers)

    def has(self, key: str, value: int | None, nbytes: int) -> None:
        self.value[key], self.bytes[key] = value, nbytes

    def delete(self) -> None:
        key = self.source.choice(KEYS)
        with self.refusals():
            self.store.delete(key)
            del self.value[key]

    def commit(self) -> None:
        """As a commit does it; a manifest is of no interest here."""
        with self.refusals(), self.device.use(self.source.choice(STREAMS)):
            self.engine.wait(Flush(NoDraft(), _duplicator(self.parts, self.engine)))

    def commit_under_an_alias(self) -> None:
        """What was written to is still referenced, and the room for its duplicate is still read by a kernel."""
        key, other = self.source.sample(KEYS, 2)
        with self.refusals():
            self.lease_of([other], Access.READ, self.source.choice(STREAMS), ends=True)
            held = self.lease_of([key], Access.WRITE, self.source.choice(STREAMS), ends=False)
            self.launch_write(held.aliases[0])
            self.kept.append(held.aliases[0])
            self.end(held)
            self.store.delete(other)
            del self.value[other]
            self.commit()

    def get(self) -> None:
        key = self.source.choice(KEYS)
        with self.refusals(), self.device.use(self.source.choice(STREAMS)):
            self.find(self.store.get(key).numpy(), [self.value.get(key)], f"get({key!r})")

    def fetch(self) -> None:
        """In a coroutine, where it need not wait."""
        key = self.source.choice(KEYS)
        entry = self.engine.state.directory.find(key)
        if entry is None or entry.writers or not any(copy and copy.valid for copy in entry.copies[:2]):
            return
        with self.device.use(self.source.choice(STREAMS)):
            found = asyncio.run(self.store.fetch(key))
        self.find(found.numpy(), [self.value[key]], f"fetch({key!r})")

    def host(self) -> None:
        """A lease of host memory: what it gives can be read and written at once."""
        key, access = self.source.choice(KEYS), self.source.choice(list(Access))
        with self.refusals(), self.store.lease(key, access=access, tier="dram") as tensor:
            self.find(tensor.numpy(), [self.value[key]], f"the host's lease of {key!r}")
            if access is Access.WRITE:
                self.value[key] = next(self.numbers)
                tensor.numpy()[:] = self.pattern(self.value[key], tensor.nbytes)

    def prefetch(self) -> None:
        self.store.prefetch(self.source.sample(KEYS, 2))

    def struck(self) -> None:
        """A signal handler raises within a change; whoever comes next counts anew."""
        which = self.source.choice(("end", "end", "drop", "put"))
        if which == "end" and not self.held and self.value:
            with self.refusals():
                access, stream = self.source.choice((Access.READ, Access.WRITE)), self.source.choice(STREAMS)
                self.lease_of([self.source.choice(list(self.value))], access, stream, ends=False)
        with self.one_strike():
            if which == "put":
                self.put_struck()
            elif which == "end":
                self.end_one()
            else:
                self.drop()
            self.engine.look()
        self.strikes += self.engine.state.changing

    @contextmanager
    def one_strike(self) -> Iterator[None]:
        """One of these raises, at its beginning or at its end, where it is called often enough."""
        state, places = self.engine.state, self.engine.state.pools
        owner, name = self.source.choice(
            [(state, each) for each in ("_view_ended", "lease_ended", "_room_ended", "_fenced")]
            + [(place, each) for place in places for each in ("note", "give_back", "guards")]
            + [(state.directory, "release")]
        )
        left, late, real = self.source.choice((0, 0, 1, 2)), self.source.random() < 0.5, getattr(owner, name)

        def strike(*arguments: object, **named: object) -> object:
            nonlocal left
            left -= not self.turning
            if left == -1 and not late:
                left -= 1
                raise Struck
            found = real(*arguments, **named)
            if left == -1:
                left -= 1
                raise Struck
            return found

        setattr(owner, name, strike)
        try:
            with suppress(Struck):
                yield
        finally:
            delattr(owner, name)

    def put_struck(self) -> None:
        """It has replaced the tensor, or it has not."""
        stream, key, nbytes, value = self.new()
        directory = self.engine.state.directory
        before = directory.find(key)
        try:
            with self.refusals(), self.device.use(stream):
                self.store.put(key, torch.from_numpy(self.pattern(value, nbytes).copy()))
        finally:
            found = directory.find(key)
            if found is not None and found is not before:
                self.has(key, value, nbytes)

    # -- a history ---------------------------------------------------------------------------------------------------------

    def live(self, steps: int) -> None:
        actions = [
            self.lease, self.lease, self.lease, self.lease, self.use_again, self.end_one, self.end_one, self.use_late,
            self.drop, self.drop, self.put_from_the_device, self.put_from_the_device, self.put_from_the_host, self.create,
            self.delete, self.commit, self.commit_under_an_alias, self.get, self.fetch, self.host, self.prefetch,
            self.struck, self.struck,
        ]  # fmt: skip
        try:
            with self.device.mode():
                for _ in KEYS:
                    self.put_from_the_host()
                for _ in range(steps):
                    self.source.choice(actions)()
                    if self.engine.state.changing:
                        continue
                    self.some_time()
                    self.engine.state.directory.check()
                    for place in self.engine.state.pools:
                        place.check()
                        assert place.used == place.tier.used
                self.end_all()
        except InterruptedStore as error:
            raise error.__cause__ or error from None  # a kernel found wrong bytes while a recount waited for it
        finally:
            self.over = True
            self.store.close()

    def end_all(self) -> None:
        while self.held:
            self.end(self.held[0])
        self.kept.clear()
        self.device.finish_all()
        self.hurry = 0
        for key, value in self.value.items():
            self.find(self.store.get(key).numpy(), [value], f"get({key!r}) at the end")
        for key in list(self.store):
            self.store.delete(key)
        self.engine.look()
        assert [place.used for place in self.engine.state.pools] == [0, 0, 0]


def history(seed: int | random.Random, deaf: frozenset[str] = frozenset(), steps: int = 120) -> World:
    world = World(seed if isinstance(seed, random.Random) else random.Random(seed), deaf)
    world.live(steps)
    return world


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_each_kernel_finds_the_bytes_of_its_time(source: random.Random) -> None:
    history(source, steps=30)


@pytest.mark.parametrize("seed", range(10))
def test_long_histories(seed: int) -> None:
    world = history(seed, steps=200)
    assert world.kernels > 10
    assert world.store._engine.state.evictions


@pytest.mark.soak
def test_many_long_histories() -> None:
    for seed in range(1000, 4000):
        history(seed, steps=500)


# What a caller may rely on


def test_a_lease_orders_streams_and_waits_for_no_device() -> None:
    world = World(random.Random(0))
    device, store = world.device, world.store
    with device.mode():
        with device.use("one"):
            store._put("a", TensorSpec("uint8", (512,), 1), 0, lambda target: target.copy_(world.device.heap[:512]))
        before = device.queued("one")
        with device.use("two"), store.lease("a") as tensor:
            assert device.queued("one") == before, "nothing has run"
            assert device.ready() == ["one"], "what is computed on two has to wait"
            del tensor
        device.finish_all()
        store.close()


@pytest.mark.parametrize("how", ["get", "fetch"])
def test_what_the_host_gets_is_finished(how: str) -> None:
    world = World(random.Random(0))
    device, store = world.device, world.store
    with device.mode():
        with device.use("one"):
            device.launch(lambda: device.heap.numpy().fill(7))
            store._put("a", TensorSpec("uint8", (512,), 1), 0, lambda target: target.copy_(device.heap[:512]))
        with device.use("two"):
            found = store.get("a") if how == "get" else asyncio.run(store.fetch("a"))
        assert found.tolist() == [7] * 512
        store.close()


# Mutants: the same without one fence each. ``Device.deaf`` leaves out what is recorded or waited for by functions of those
# names; the others are patched.


def without(names: str) -> Callable[[pytest.MonkeyPatch], frozenset[str]]:
    return lambda _: frozenset(names.split(" < "))


def install_forgets(patch: pytest.MonkeyPatch) -> None:
    install = Install._install

    def mutant(self: Install, state: EngineState) -> None:
        self.fences = ()
        install(self, state)

    patch.setattr(Install, "_install", mutant)


def transfers_after(keep: Callable[[Any, Transfer, Fence], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        after = Engine._after

        def mutant(self: Engine, index: int, transfer: Transfer) -> tuple[Fence, ...]:
            place = self.state.pools[index]
            return tuple(fence for fence in after(self, index, transfer) if keep(place, transfer, fence))

        patch.setattr(Engine, "_after", mutant)

    return change


def given_back_by(*names: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        give_back = Pool.give_back

        def mutant(self: Pool, slot: Slot, fences: tuple[Fence, ...] = ()) -> None:
            caller = sys._getframe(1)
            assert caller.f_back is not None
            callers = (caller.f_code.co_name, caller.f_back.f_code.co_name)
            give_back(self, slot, () if callers[: len(names)] == names else fences)

        patch.setattr(Pool, "give_back", mutant)

    return change


def passed_on_without(patch: pytest.MonkeyPatch) -> None:
    guard = Pool._guard

    def mutant(self: Pool, slot: Slot, fences: tuple[Fence, ...]) -> None:
        guard(self, slot, () if sys._getframe(1).f_code.co_name == "note" else fences)

    patch.setattr(Pool, "_guard", mutant)


def moved_without(patch: pytest.MonkeyPatch) -> None:
    move = Directory.move

    def mutant(self: Directory, copy: Copy, slot: Slot) -> Copy:
        fresh = move(self, copy, slot)
        fresh.fences = ()
        return fresh

    patch.setattr(Directory, "move", mutant)


def nothing_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Device, "synchronize", lambda self: None)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], frozenset[str] | None]] = {
    "entering a lease waits for nothing": without("enter < _granted"),
    "the end of a lease records nothing": without("_fenced < lease_ended"),
    "the death of an alias records nothing": without("_fenced < _view_ended"),
    "a put does not wait for who had its slot": without("guard < _put"),
    "a put records nothing": without("fences < _put < no except"),
    "a put that fails records nothing": without("_fence < _room_ended"),
    "a copy that was put has no fences": install_forgets,
    "transfers wait for no kernels on their copy": transfers_after(
        lambda place, transfer, fence: fence not in place.copies[transfer.key].fences
    ),
    "transfers wait for nobody who had their slot": transfers_after(
        lambda place, transfer, fence: fence not in place.guards(transfer.upper)
    ),
    "what is evicted or deleted leaves no guards": given_back_by("note"),
    "what leaves for a copy of its size leaves no guards": passed_on_without,
    "what outlived its tensor leaves no guards": given_back_by("reap_dead_alias"),
    "a put that failed leaves no guards": given_back_by("give_back", "_room_ended"),
    "a duplicate does not wait for its original": without("enter < duplicate"),
    "a duplicate does not wait for who had its slot": without("guard < duplicate"),
    "a duplicate records nothing": without("fences < duplicate"),
    "a duplicate has no fences": moved_without,
    "a recount does not wait for the device": nothing_is_waited_for,
}


def histories(count: int, deaf: frozenset[str]) -> None:
    for seed in range(count):
        history(seed, deaf, steps=200)


@pytest.mark.parametrize("name", MUTANTS)
def test_no_fence_is_superfluous(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = MUTANTS[name](monkeypatch) or frozenset()
    with pytest.raises(WrongBytes):
        histories(400, deaf)
