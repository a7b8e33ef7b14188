"""An engine without its thread: the test takes the turns, and releases the transfers in any order and with any end."""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable, Iterator, Sequence

from tests.fakes import FakeTier, ManualLink, fake_checksums
from tiered.engine.claims import Token
from tiered.engine.engine import Engine, EngineConfig
from tiered.engine.policy import LRU, NextUse, Touch
from tiered.engine.requests import Delete, Install, Lease, Prefetch, Request, Room
from tiered.engine.residency import Copy, Entry, State
from tiered.engine.retention import plan_retention, room_for
from tiered.engine.scheduler import Scheduler
from tiered.engine.snapshot import Flush
from tiered.engine.state import EngineState
from tiered.errors import ReadError, TieredError, TransferError, WriteError
from tiered.types import Access, Direction, Slot, TensorSpec, Transfer, Urgency

READ, WRITE = Access.READ, Access.WRITE


def spec(nbytes: int) -> TensorSpec:
    return TensorSpec("uint8", (nbytes,), 1)


class CheckedLease(Lease):
    """Looks at the bytes in the moment of the grant."""

    def __init__(self, rig: Rig, keys: Sequence[str], tier: int, access: Access) -> None:
        self.token: Token | None = Token()
        super().__init__(keys, tier, access, rig.state.claims.watch(self.token))
        self.rig = rig

    def attempt_here(self, state: EngineState) -> bool:
        return self.seen(super().attempt_here(state))

    def attempt(self, scheduler: Scheduler) -> bool:
        return self.seen(super().attempt(scheduler))

    def seen(self, done: bool) -> bool:
        if done:
            assert [copy.key for copy in self.copies] == list(self.keys)
            for copy in self.copies:
                assert copy.tier == self.tier
                assert self.rig.bytes_of(copy) == self.rig.newest[copy.key], f"{copy.key!r} was granted with old bytes"
            for copy, token in zip(self.copies, self.views, strict=True):
                self.rig.on_loan(copy, token)
            self.views.clear()
        return done

    def give_up(self) -> None:
        """Whoever waits for it is struck, before or after it was granted."""
        self.token = None
        if self.done:
            for copy in self.copies:
                self.rig.drop(copy)
        self.rig.engine.released()


class CheckedInstall(Install):
    def __init__(self, rig: Rig, key: str, data: bytes, room: Room) -> None:
        super().__init__(key, spec(len(data)), room)
        self.rig, self.data = rig, data

    def attempt_here(self, state: EngineState) -> bool:
        return self.seen(super().attempt_here(state))

    def attempt(self, scheduler: Scheduler) -> bool:
        return self.seen(super().attempt(scheduler))

    def seen(self, done: bool) -> bool:
        if done:
            self.rig.newest[self.key] = self.data
        return done


class CheckedDraft:
    """Everything has to come to the bottom with the bytes that it had when the flush began."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.missing: dict[str, bytes] = {}

    def begin(self, entries: Iterator[Entry], frozen: dict[str, None]) -> None:
        assert set(self.rig.state.directory) == set(self.rig.newest)
        self.missing = {key: self.rig.newest[key] for key in frozen}
        for entry in entries:
            if entry.key not in frozen:
                self.see(entry, self.rig.newest[entry.key])

    def see(self, entry: Entry, wanted: bytes) -> None:
        copy = entry.copies[-1]
        assert copy is not None
        assert copy.state is State.CLEAN
        assert self.rig.bytes_of(copy) == wanted, f"{entry.key!r} was flushed with other bytes"

    def add(self, entry: Entry) -> None:
        self.see(entry, self.missing.pop(entry.name))

    def end(self) -> None:
        assert not self.missing
        self.rig.flushed += 1

    def drop(self) -> None:
        pass


class CheckedDelete(Delete):
    def __init__(self, rig: Rig, key: str) -> None:
        super().__init__(key)
        self.rig = rig

    def attempt_here(self, state: EngineState) -> bool:
        return self.seen(super().attempt_here(state))

    def attempt(self, scheduler: Scheduler) -> bool:
        return self.seen(super().attempt(scheduler))

    def seen(self, done: bool) -> bool:
        if done:
            del self.rig.newest[self.key]
        return done


class Put:
    """As the store does it: room, then the bytes, then the installation."""

    def __init__(self, rig: Rig, key: str, data: bytes, tier: int) -> None:
        self.rig, self.key, self.data, self.tier = rig, key, data, tier
        self.token: Token | None = Token()
        self.room = Room(tier, len(data), holder=rig.state.claims.watch(self.token))
        self.install: CheckedInstall | None = None

    def go_on(self) -> bool:
        """Whether it has ended."""
        if self.token is None:
            return True
        if self.install is None and self.room.done:
            if self.room.error is not None:
                return True
            assert self.room.slot is not None
            self.rig.tiers[self.tier].write(self.room.slot, self.data)
            self.install = CheckedInstall(self.rig, self.key, self.data, self.room)
            self.rig.submit(self.install)
        if self.install is not None and self.install.done and self.install.error is not None:
            self.give_up()
        return self.install is not None and self.install.done

    def give_up(self) -> None:
        self.token = None
        self.rig.engine.released()

    @property
    def error(self) -> TieredError | None:
        return self.room.error or (self.install.error if self.install else None)

    @property
    def waiting(self) -> Request:
        return self.install or self.room


class Rig:
    """An engine between fakes, and what every copy must hold: ``newest`` by key, ``expected`` by copy on loan.

    ``memories``: how many tiers tensors can lie in; all but the last one, unless there is no disk. They are of type ``memory``.
    The clock goes on by a millisecond whenever it is asked.
    """

    def __init__(
        self,
        *capacities: int,
        limit: int = 1 << 30,
        reserve: float = 0.5,
        memories: int | None = None,
        memory: type[FakeTier] = FakeTier,
    ) -> None:
        self.memories = len(capacities) - 1 if memories is None else memories
        kinds = [memory if index < self.memories else FakeTier for index in range(len(capacities))]
        self.tiers = [kind(f"t{index}", capacity) for index, (kind, capacity) in enumerate(zip(kinds, capacities, strict=True))]
        self.links = [
            ManualLink(upper, lower, limit, fake_checksums if lower is self.tiers[-1] else None)
            for upper, lower in zip(self.tiers, self.tiers[1:], strict=False)
        ]
        ticks = itertools.count()
        config = EngineConfig(0.0, reserve, lambda: next(ticks) / 1000, LRU)
        self.engine = Engine(self.tiers, self.links, [LRU() for _ in self.tiers], config)
        self.state = self.engine.state
        self.bottom = len(self.tiers) - 1
        self.newest: dict[str, bytes] = {}
        self.puts: list[Put] = []
        self.waiting: list[Request] = []
        self.held: list[CheckedLease] = []  # granted, and not released
        self.aliases: list[Copy] = []  # one for each view that is still reachable
        self.tokens: list[tuple[Copy, Token]] = []  # theirs
        self.expected: dict[Copy, bytes] = {}
        self.lent: dict[Copy, Slot] = {}  # where the views of it are
        self.flushed = 0

    # One step each

    def submit(self, request: Request) -> Request:
        with self.engine.lock:
            self.engine._submit(request)
        return request

    def lease(self, *keys: str, tier: int = 0, access: Access = READ) -> CheckedLease:
        request = CheckedLease(self, keys, tier, access)
        asked = self.engine.config.clock()
        self.submit(request)
        self.engine._count(request, asked, request.done)
        self.waiting.append(request)
        self.look()
        return request

    def put(self, key: str, data: bytes, tier: int = 0) -> Put:
        put = Put(self, key, data, tier)
        self.submit(put.room)
        self.puts.append(put)
        self.look()
        return put

    def delete(self, key: str) -> Delete:
        request = CheckedDelete(self, key)
        self.submit(request)
        self.waiting.append(request)
        self.look()
        return request

    def flush(self, urgency: Urgency = Urgency.DEMAND) -> Flush:
        request = Flush(CheckedDraft(self), self._duplicate, urgency)
        request.deferred = False  # the rig has no thread
        self.submit(request)
        self.waiting.append(request)
        self.look()
        return request

    def hint(self, *keys: str, tier: int = 0, urgency: Urgency = Urgency.PREFETCH) -> None:
        self.engine.hint(keys, tier, urgency)

    def follow(self, order: Sequence[Touch]) -> None:
        """As the store does it."""
        found = self.engine.sizes({touch.key for touch in order})
        keys, uses = [touch.key for touch in order], [touch.use for touch in order]
        sizes = [max(1, found.get(key, 1)) for key in keys]
        rooms = [room_for(tier.capacity, tier.capacity, max(sizes, default=0)) for tier in self.tiers[: self.bottom]]
        decisions = [
            plan_retention(keys, uses, sizes, tier.capacity, spare=room)
            for tier, room in zip(self.tiers[: self.bottom], rooms, strict=True)
        ]
        self.engine.follow(order, lambda plan: [NextUse.along(plan, one.price, one.keep) for one in decisions], rooms)

    def write(self, lease: Lease, data: Callable[[int], bytes]) -> None:
        assert lease.access is WRITE
        for copy in [copy for copy in lease.copies if copy in self.aliases]:  # without a view nobody writes
            fresh = data(len(self.newest[copy.key]))
            self.tiers[copy.tier].write(copy.slot, fresh)
            self.newest[copy.key] = self.expected[copy] = fresh

    def release(self, lease: CheckedLease) -> None:
        self.held.remove(lease)
        lease.token = None
        self.engine.released()

    def drop(self, copy: Copy) -> None:
        """The last reference to one view of it is gone."""
        self.aliases.remove(copy)
        if copy not in self.aliases:
            self.expected.pop(copy, None)
            self.lent.pop(copy, None)
        del self.tokens[next(index for index, (other, _) in enumerate(self.tokens) if other is copy)]

    def end(self, lease: CheckedLease) -> None:
        self.release(lease)
        for copy in lease.copies:
            self.drop(copy)

    def abandon(self, waiting: Request | Put) -> None:
        """What ``Engine.wait`` and its caller do when its deadline passes or Ctrl-C comes."""
        request = waiting.waiting if isinstance(waiting, Put) else waiting
        with self.engine.lock:
            request.abandoned = True
            self.engine._withdraw(request)
        if isinstance(waiting, Put | CheckedLease):
            waiting.give_up()

    def complete(self, link: int, tag: int, error: TieredError | None = None) -> None:
        self.links[link].complete(tag, error)

    def turn(self) -> bool:
        moved = self.engine.turn()
        assert not any(self.state.transfers.promotions), "the links have been told"
        self.look()
        return moved

    def run(self) -> None:
        """Turn until nothing moves by itself."""
        for _ in range(200):
            if not self.turn():
                self.check_urgency()
                return
        raise AssertionError("the engine turns and turns")

    def settle(self) -> None:
        """Every transfer ends well, until nothing is left to move."""
        for _ in range(500):
            self.run()
            if not any(link.pending for link in self.links):
                return
            for link in self.links:
                link.complete_all()
        raise AssertionError("transfers without end")

    @property
    def moved(self) -> int:
        """Bytes that went to another place in their tier."""
        return sum(row.moved for row in self.state.tier_statistics())

    # Bookkeeping

    def on_loan(self, copy: Copy, token: Token) -> None:
        self.aliases.append(copy)
        self.tokens.append((copy, token))
        self.expected[copy] = self.bytes_of(copy)
        self.lent[copy] = copy.slot

    def bytes_of(self, copy: Copy) -> bytes:
        return self.tiers[copy.tier].read(copy.slot, self.state.directory.entry(copy.key).nbytes)

    def look(self) -> None:
        """Take note of what got done."""
        moved = True
        while moved:
            ended = [put for put in self.puts if put.go_on()]
            self.puts = [put for put in self.puts if put not in ended]
            moved = bool(ended)
        for request in [r for r in self.waiting if r.done]:
            self.waiting.remove(request)
            if isinstance(request, Lease):
                assert request.error is None or not request.copies
                if request.error is None and isinstance(request, CheckedLease):
                    self.held.append(request)

    def _duplicate(self, copy: Copy, target: Slot, nbytes: int) -> None:
        self.tiers[copy.tier].write(target, self.tiers[copy.tier].read(copy.slot, nbytes))

    def copies(self) -> Iterator[Copy]:
        directory = self.state.directory
        for entry in (*directory.entries(), *directory.set_aside_entries()):
            yield from (copy for copy in entry.copies if copy is not None)

    def check(self) -> None:
        self.state.directory.check()
        for place in self.state.pools:
            place.check()
        assert set(self.state.directory) == set(self.newest)
        for copy in self.copies():
            if copy.valid and copy.key in self.newest:  # what was set aside has another key
                assert self.bytes_of(copy) == self.newest[copy.key], f"{copy.key!r} is {copy.state} with old bytes"
        for copy, data in self.expected.items():
            assert copy.slot == self.lent[copy], f"{copy.key!r} was moved under an alias"
            found = self.tiers[copy.tier].read(copy.slot, len(data))
            assert found == data, f"the memory of {copy.key!r} changed under an alias"
        self.check_traffic()
        rooms = [(put.tier, put.room.slot) for put in self.puts if put.room.done and put.room.slot is not None]
        for index, (tier, row) in enumerate(zip(self.tiers, self.state.tier_statistics(), strict=True)):
            assert row.used == tier.used <= row.capacity
            assert row.used <= row.peak <= row.capacity
            slots = {copy.slot for copy in self.copies() if copy.tier == index}
            slots |= {copy.slot for copy in self.aliases if copy.tier == index}
            slots |= {slot for at, slot in rooms if at == index}
            slots |= {slot for at, slot in self.state.transfers.snapshots.values() if at == index}
            assert sum(slot.nbytes for slot in slots) <= tier.used
            if not self.state.claims.ended:
                assert sum(slot.nbytes for slot in slots) == tier.used, f"a slot of {tier.name} was lost"

    def check_traffic(self) -> None:
        """What is kept of transfers is what counting anew gives."""
        traffic = self.state.transfers
        for index, (queue, link) in enumerate(zip(traffic.queues, self.links, strict=True)):
            mine = [t for moving in traffic._moving.values() for at, t in moving if at == index]
            queued = list(queue)
            assert queue.length == len(queued)
            assert queue.read_bytes == sum(t.upper.nbytes for t in queued if t.direction is Direction.UP)
            rising = [t.nbytes for t in mine if t.direction is Direction.UP]
            assert (traffic.inbound[index].transfers, traffic.inbound[index].nbytes) == (len(rising), sum(rising))
            started = {t.tag for t in mine} - {t.tag for t in queued}
            assert set(link.pending) <= started
            assert set(traffic.promotions[index]) <= started

    def check_urgency(self) -> None:
        """At rest, what a lease waits for is as urgent as the lease."""
        moving = self.state.transfers._moving
        for request in self.waiting:
            if isinstance(request, Lease) and not request.done:
                for at, transfer in [found for key in request.keys for found in moving.get(key, ())]:
                    if at == request.tier and transfer.direction is Direction.UP:
                        assert transfer.urgency is Urgency.DEMAND, f"{request} waits for {transfer}"

    def wind_down(self) -> None:
        """Everything that waits gets done once leases have ended and transfers go well; nothing is lost on the way."""
        if self.memories > self.bottom:  # without a disk room may never come: then their deadline does
            for waiting in [*self.waiting, *self.puts]:
                self.abandon(waiting)
            self.waiting, self.puts = [], []
        for _ in range(100):
            self.settle()
            if not self.held and not self.aliases and not any(link.pending for link in self.links):
                break
            for lease in list(self.held):
                self.release(lease)
            for copy in list(self.aliases):
                self.drop(copy)
        self.check()
        stuck = [*self.waiting, *(put.waiting for put in self.puts)]
        assert not stuck, f"these wait for ever: {[str(request) for request in stuck]}"
        assert not [r for r in self.engine.requests.waiting if not isinstance(r, Prefetch)]
        for key in list(self.newest):
            self.delete(key)
        self.settle()
        self.check()
        assert not self.newest
        for tier in self.tiers:
            assert (tier.used, tier.largest) == (0, tier.capacity), f"a slot of {tier.name} was lost"
        self.engine.stop()


def failure(transfer: Transfer, where: str = "t") -> TransferError:
    kind = ReadError if transfer.direction is Direction.UP else WriteError
    return kind("cannot move", key=transfer.key, tier=where, path=None, offset=0, errno=5)


def fill(rig: Rig, *keys: str, nbytes: int) -> None:
    """Put and write back; where there is room the copies stay above, too."""
    for key in keys:
        put = rig.put(key, key[:1].encode() * nbytes)
        rig.settle()
        assert put.install is not None
        assert put.install.done
    flush = rig.flush()
    rig.settle()
    assert flush.done
    assert flush.error is None


def where(rig: Rig, key: str) -> list[State | None]:
    return [copy.state if copy else None for copy in rig.state.directory.entry(key).copies]


def pending(rig: Rig, link: int = 0) -> list[tuple[str, Direction, Urgency]]:
    return [(t.key, t.direction, t.urgency) for t in rig.links[link].pending.values()]


def queued(rig: Rig, link: int = 0) -> list[tuple[str, Direction, Urgency]]:
    waiting = sorted(rig.state.transfers.queues[link], key=lambda t: (t.urgency, t.tag))
    return [(t.key, t.direction, t.urgency) for t in waiting]


def woken(rig: Rig) -> bool:
    """Whether the engine's thread would take a turn now; answers once."""
    found = bool(select.select([rig.engine._wake.fileno()], [], [], 0)[0])
    rig.engine._wake.clear()
    rig.engine._woken = False
    return found


def evicted(rig: Rig, *keys: str) -> None:
    for key in keys:
        copy = rig.state.directory.entry(key).copies[0]
        assert copy is not None
        rig.engine.scheduler.evict(copy)
