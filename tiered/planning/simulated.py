"""A store whose tiers have places and no memory, whose drive has rates and no file, and whose clock is a number.

Everything that decides is the store's own: leases, the pool, next-use eviction, read-ahead and write-behind are those of
``tiered.engine``, which runs without its thread. So what a rehearsal counts is what a store of that size would move.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tiered.allocator import FreeSpace
from tiered.engine.claims import Token
from tiered.engine.engine import Engine, EngineConfig
from tiered.engine.requests import Request, why_stuck
from tiered.errors import CapacityError
from tiered.interfaces import Streams
from tiered.store import LRU, TieredStore
from tiered.store.commit import Generations
from tiered.store.opening import Parts
from tiered.types import PIECE_BYTES, Completion, Direction, Key, Slot, TensorSpec, Transfer, Urgency

__all__ = ["Clock", "DriveRates", "SimulatedDrive", "SimulatedMemory", "SimulatedStore"]

SLOT_ALIGNMENT = 4096
"""Bytes: that of the slots of a store with a disk."""
ENDLESS = 1 << 60
"""Bytes of a drive that never is full."""
WINDOW = 64 << 20
"""Bytes that a link takes in one direction, as ``DiskConfig.window``."""


class Clock:
    """The time of a simulation, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Owner:
    """What stands for the memory of a tensor that has none. Nobody keeps it, so no alias ever pins a slot."""

    __slots__ = ("__weakref__", "claim")


class SimulatedMemory:
    """A tier that has places and no bytes; its tensors are on the meta device."""

    streams: Streams | None = None

    def __init__(self, name: str, capacity: int, alignment: int = SLOT_ALIGNMENT) -> None:
        self.name, self.alignment = name, alignment
        self._space = FreeSpace(capacity, alignment)
        self.capacity = self._space.capacity

    def allocate(self, nbytes: int) -> Slot | None:
        return self._space.allocate(nbytes)

    @property
    def slots(self) -> Sequence[Slot]:
        """The allocated slots, by offset."""
        return self._space.slots

    def free(self, slot: Slot) -> None:
        self._space.free(slot.offset, slot.nbytes)

    def restore(self, slots: Iterable[Slot]) -> None:
        self._space.restore((slot.offset, slot.nbytes) for slot in slots)

    def move(self, slot: Slot, offset: int) -> Slot:
        self._space.move(slot.offset, slot.nbytes, offset)
        return Slot(offset, slot.nbytes)

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta"), _Owner()

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


@dataclass(frozen=True)
class DriveRates:
    """What a link between two tiers does: bytes per second up (``read``) and down (``write``), one way at a time, and
    ``transfer`` seconds for each tensor beside its bytes. ``block``: bytes that it moves before it looks for more urgent
    transfers; a rehearsal of very many bytes takes larger blocks."""

    read: float
    write: float
    transfer: float = 0.0
    block: int = PIECE_BYTES


class _Job:
    __slots__ = ("left", "nbytes", "transfer", "up")

    def __init__(self, transfer: Transfer, alignment: int) -> None:
        self.transfer = transfer
        self.nbytes = self.left = -(-transfer.nbytes // alignment) * alignment
        self.up = transfer.direction is Direction.UP


class SimulatedDrive:
    """A link that moves one block after the other, of the most urgent transfer first: reads and writes at the same time are
    not faster than one after the other (PERFORMANCE in ``docs/performance.md`` says where that was measured)."""

    def __init__(self, src: str, dst: str, rates: DriveRates, clock: Clock, alignment: int = SLOT_ALIGNMENT) -> None:
        self.src, self.dst, self.rates = src, dst, rates
        self._clock, self._alignment = clock, alignment
        self._jobs: dict[Urgency, deque[_Job]] = {urgency: deque() for urgency in Urgency}
        self._taken = {direction: [0] * len(Urgency) for direction in Direction}
        self._current: tuple[_Job, int] | None = None
        self.ends = math.inf
        """When the block that is under way ends; infinite where none is."""
        self.busy = 0.0
        """Seconds that the drive worked."""
        self._ended: list[Completion] = []

    def start(self, transfer: Transfer) -> bool:
        taken = self._taken[transfer.direction]
        ahead = sum(taken[: transfer.urgency + 1])
        if ahead and ahead + transfer.nbytes > WINDOW:
            return False
        taken[transfer.urgency] += transfer.nbytes
        self._jobs[transfer.urgency].append(_Job(transfer, self._alignment))
        self._next()
        return True

    def promote(self, tag: int, urgency: Urgency) -> None:
        for found, jobs in self._jobs.items():
            job = next((job for job in jobs if job.transfer.tag == tag), None)
            if job is not None and urgency < found:
                jobs.remove(job)
                self._taken[job.transfer.direction][found] -= job.transfer.nbytes
                self._taken[job.transfer.direction][urgency] += job.transfer.nbytes
                job.transfer.urgency = urgency
                self._jobs[urgency].append(job)
                return

    def _next(self) -> None:
        if self._current is not None:
            return
        jobs = next((jobs for jobs in self._jobs.values() if jobs), None)
        if jobs is None:
            self.ends = math.inf
            return
        job = jobs[0]
        block = min(job.left, self.rates.block)
        seconds = block / (self.rates.read if job.up else self.rates.write)
        if job.left == job.nbytes:
            seconds += self.rates.transfer
        self._current = job, block
        self.ends = self._clock.now + seconds
        self.busy += seconds

    def advance(self) -> None:
        """End the block that is under way, whose time has come, and begin the next one."""
        assert self._current is not None and self.ends <= self._clock.now
        (job, block), self._current = self._current, None
        job.left -= block
        if not job.left:
            transfer = job.transfer
            self._jobs[transfer.urgency].remove(job)
            self._taken[transfer.direction][transfer.urgency] -= transfer.nbytes
            self._ended.append(Completion(transfer.tag))
        self._next()

    def poll(self, timeout: float) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def fileno(self) -> int:
        raise NotImplementedError("a simulated drive has no descriptor")

    def close(self) -> None:
        """Do nothing: nothing is in flight in real time."""


class _SimulatedEngine(Engine):
    """An engine in simulated time: to wait is to have the drives go on."""

    clock: Clock
    drives: list[SimulatedDrive]

    def settle(self) -> None:
        """Have everything decided that can be, at this moment."""
        while self.turn():
            pass

    def pass_until(self, until: float) -> None:
        """Let time pass, and the drives work."""
        self.settle()
        while (ends := min(drive.ends for drive in self.drives)) <= until:
            self._to(ends)
        self.clock.now = until

    def _to(self, moment: float) -> None:
        self.clock.now = moment
        for drive in self.drives:
            if drive.ends <= moment:
                drive.advance()
        self.settle()

    def _wait_for(self, request: Request, began: float, patience: float, told: bool = False) -> bool:
        self.settle()
        while not request.done:
            before, ends = self.clock.now, min(drive.ends for drive in self.drives)
            if ends == math.inf:
                raise CapacityError(why_stuck(self.state, request, before - began))
            self._to(ends)
            self._stalled(request, self.clock.now - before, request.short)
            request.short = bool(request.full_tiers)
        return True

    def stop(self) -> None:
        super().stop()
        self._wake.close()


class SimulatedStore(TieredStore):
    """A ``TieredStore`` of ``dram`` bytes over a drive of given rates, without memory, files or threads.

    ``put`` and ``get`` of values are not for it; ``create``, ``lease``, ``delete``, ``trace`` and ``follow`` are. ``clock.now``
    is its time in seconds. With ``hbm`` there is a device tier above, and ``link`` joins the two.
    """

    def __init__(self, dram: int, drive: DriveRates, hbm: int = 0, link: DriveRates | None = None) -> None:
        self.clock = Clock()
        memories = [SimulatedMemory("dram", dram)]
        self.drive = SimulatedDrive("dram", "nvme", drive, self.clock)
        links = [self.drive]
        if hbm:
            memories.insert(0, SimulatedMemory("hbm", hbm))
            links.insert(0, SimulatedDrive("hbm", "dram", drive if link is None else link, self.clock))
        self._bottom = SimulatedMemory("nvme", ENDLESS)
        tiers = (*memories, self._bottom)
        policies = tuple(LRU() for _ in tiers)
        parts = Parts(tuple(memories), None, None, tiers, tuple(links), policies)
        engine = _SimulatedEngine(tiers, links, policies, EngineConfig(deadline=math.inf, clock=self.clock, eviction=LRU))
        engine.clock, engine.drives = self.clock, links
        self._simulated = engine
        super().__init__(parts, engine, Generations(), scratch=True)

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def place(self, sizes: Mapping[Key, int]) -> None:
        """Have tensors on the drive, each of so many bytes, as if they had been there before."""
        state = self._simulated.state
        for key, nbytes in sizes.items():
            slot = self._bottom.allocate(max(1, nbytes))
            assert slot is not None
            state.pools[-1].account(slot)
            state.directory.restore(key, _spec(nbytes), state.directory.next_id, slot, b"", 0)

    def make(self, key: Key, nbytes: int, tier: str | None = None) -> None:
        """Create a tensor of so many bytes."""
        self.create(key, _spec(nbytes), tier=tier)

    def make_temporary(self, key: Key, nbytes: int) -> Token:
        """Put a saved activation of so many bytes, which is there until nobody has the token."""
        lifetime = Token()
        self._put(key, _spec(nbytes), self._parts.dram, None, lifetime)
        return lifetime

    def has_in_memory(self, key: Key) -> bool:
        """Return whether the bytes of a tensor are in DRAM."""
        return bool(self._simulated.present([key], self._parts.dram))

    def hint(self, keys: Sequence[Key]) -> None:
        """Have activations fetched ahead, unless an order says what is."""
        self.fetch_ahead(keys, torch.device("cpu"))

    def compute(self, seconds: float) -> None:
        """Let so much time pass between two calls."""
        self._simulated.pass_until(self.clock.now + seconds)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that were read from the drive, and written to it."""
        up, down = (self._simulated.state.transfers.counters[-1][direction] for direction in Direction)
        return up.bytes, down.bytes

    @property
    def waited(self) -> float:
        """Seconds that callers have waited so far."""
        return self._waited()

    @property
    def transfers(self) -> int:
        """Number of transfers from the drive and to it."""
        flows = self._simulated.state.transfers.counters[-1]
        return flows[Direction.UP].transfers + flows[Direction.DOWN].transfers


def _spec(nbytes: int) -> TensorSpec:
    return TensorSpec("uint8", (nbytes,), 1)
