"""Every transfer from its admission to its end: what waits for each link, what is under way, and what the links have done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tiered.engine.residency import Copy, Entry
from tiered.errors import TieredError
from tiered.telemetry import FlowStatistics, Recorder
from tiered.types import Direction, Key, Slot, Transfer, Urgency

__all__ = ["Inbound", "LinkCounters", "TransferQueue", "TransferQueues"]

_WAYS = (Direction.UP, Direction.DOWN)
_UP = Direction.UP  # before Python 3.12 enums look members up slowly


class TransferQueue:
    """Transfers that wait for one link, by urgency; among equals those that go up first, and then by arrival.

    ``read_bytes`` are those of the upper slots of the transfers up among its ``length``.
    """

    def __init__(self) -> None:
        self._waiting = {(urgency, way): OrderedDict[int, Transfer]() for urgency in Urgency for way in _WAYS}
        self.length = self.read_bytes = 0

    def __iter__(self) -> Iterator[Transfer]:
        """Yield the transfers, the next one first."""
        for waiting in self._waiting.values():
            yield from waiting.values()

    def add(self, transfer: Transfer) -> None:
        self._waiting[transfer.urgency, transfer.direction][transfer.tag] = transfer
        self.length += 1
        self.read_bytes += transfer.upper.nbytes if transfer.direction is _UP else 0

    def take(self, refused: Mapping[Direction, Urgency]) -> Transfer | None:
        """Remove and return the next transfer that is more urgent than what was ``refused`` in its direction."""
        for (urgency, way), waiting in self._waiting.items():
            if waiting and (way not in refused or urgency < refused[way]):
                _, transfer = waiting.popitem(last=False)
                self.length -= 1
                self.read_bytes -= transfer.upper.nbytes if way is _UP else 0
                return transfer
        return None

    def put_back(self, transfer: Transfer) -> None:
        """Undo ``take``: the transfer is the next one of its urgency again."""
        self.add(transfer)
        self._queue(transfer).move_to_end(transfer.tag, last=False)

    def promote(self, transfer: Transfer, urgency: Urgency) -> bool:
        """Make a waiting transfer more urgent; return False when the transfer waits here no longer."""
        if self._queue(transfer).pop(transfer.tag, None) is None:
            return False
        transfer.urgency = urgency
        self._queue(transfer)[transfer.tag] = transfer
        return True

    def remove(self, transfer: Transfer) -> bool:
        """Remove a waiting transfer; return False when the transfer waits here no longer."""
        if self._queue(transfer).pop(transfer.tag, None) is None:
            return False
        self.length -= 1
        self.read_bytes -= transfer.upper.nbytes if transfer.direction is Direction.UP else 0
        return True

    def _queue(self, transfer: Transfer) -> OrderedDict[int, Transfer]:
        return self._waiting[transfer.urgency, transfer.direction]


@dataclass(slots=True)
class Inbound:
    """Transfers up that have not ended."""

    transfers: int = 0
    nbytes: int = 0


class TransferQueues:
    """Every transfer from its admission to its end.

    ``queues[i]`` wait for link i, between tier i and the tier below; ``started[i]`` is how many that link has; ``inbound[i]``
    counts the transfers up that have not ended; ``promotions[i]`` are started ones, by tag, that became more urgent since;
    ``counters[i]`` count what link i did.
    """

    def __init__(self, links: int) -> None:
        self.queues = [TransferQueue() for _ in range(links)]
        self.promotions: list[dict[int, Urgency]] = [{} for _ in range(links)]
        self.inbound = [Inbound() for _ in range(links)]
        self.started = [0 for _ in range(links)]
        self.counters = [{way: LinkCounters() for way in _WAYS} for _ in range(links)]
        self.waiting = 0  # in all queues
        self.snapshots: dict[int, tuple[int, Slot]] = {}  # tier and slot that a transfer down reads, to be freed after it
        self.recorder: Recorder | None = None
        self._transfers: dict[int, tuple[Entry, Transfer]] = {}  # all that have not ended
        self._refused: list[dict[Direction, Urgency]] = [{} for _ in range(links)]  # by each link, since something ended there
        self._moving: dict[Key, list[tuple[int, Transfer]]] = {}  # the same by tensor, each with its link

    def read(self) -> Iterator[Copy]:
        """Yield the copies that transfers up read, one time for each transfer."""
        for moving in self._moving.values():
            for index, transfer in moving:
                source = self._transfers[transfer.tag][0].copies[index + 1]
                if transfer.direction is Direction.UP and source is not None:
                    yield source

    def going_down(self, index: int) -> int:
        """Return the bytes of the slots below link ``index`` that its transfers down will fill."""
        found = 0
        for moving in self._moving.values():
            for link, transfer in moving:
                if link == index and transfer.direction is Direction.DOWN:
                    found += transfer.lower.nbytes
        return found

    def add(self, index: int, entry: Entry, transfer: Transfer) -> None:
        if self.recorder is not None:
            self.recorder.queued(transfer.tag)
        self._transfers[transfer.tag] = (entry, transfer)
        self._moving.setdefault(entry.key, []).append((index, transfer))
        if transfer.direction is _UP:
            self.inbound[index].transfers += 1
            self.inbound[index].nbytes += transfer.nbytes
        self.queues[index].add(transfer)
        self.waiting += 1

    def take(self, index: int, now: float) -> Transfer | None:
        """Return the next transfer for link ``index``, which may have room for it; the transfer counts as started ``now``."""
        transfer = self.queues[index].take(self._refused[index])
        if transfer is not None:
            self.waiting -= 1
            self.started[index] += 1
            transfer.begun = transfer.urgency
            self.counters[index][transfer.direction].begin(now)
        return transfer

    def put_back(self, index: int, transfer: Transfer) -> None:
        """Undo ``take``: the link had no room for the transfer, and so for nothing less urgent, until something ends there."""
        self.waiting += 1
        self.started[index] -= 1
        self.counters[index][transfer.direction].active -= 1
        self._refused[index][transfer.direction] = transfer.urgency
        transfer.urgency = self.promotions[index].pop(transfer.tag, transfer.urgency)
        self.queues[index].put_back(transfer)

    def idle(self, index: int) -> None:
        """Learn that nothing is under way on link ``index`` whose end would be a sign to ask again what it refused."""
        self._refused[index].clear()

    def end(self, index: int, tag: int, now: float, error: TieredError | None) -> tuple[Entry, Transfer]:
        """Remove and count the transfer that link ``index`` reported as ended, with ``error`` or without."""
        entry, transfer = self._transfers.pop(tag)
        self.started[index] -= 1
        self.counters[index][transfer.direction].end(now, transfer.nbytes, error)
        self._refused[index].clear()
        self.promotions[index].pop(tag, None)
        moving = self._moving[entry.key]
        moving.remove((index, transfer))
        if not moving:
            del self._moving[entry.key]
        if transfer.direction is _UP:
            self.inbound[index].transfers -= 1
            self.inbound[index].nbytes -= transfer.nbytes
        return entry, transfer

    def raise_urgency(self, key: Key, urgency: Urgency) -> None:
        """Make the transfers of ``key`` at least as urgent as ``urgency``, those that are under way too."""
        for index, transfer in self._moving.get(key, ()):
            if transfer.urgency > urgency and not self.queues[index].promote(transfer, urgency):
                self.promotions[index][transfer.tag] = urgency

    def withdraw(self, key: Key) -> int | None:
        """Remove the transfer of ``key`` that is its only one, goes down and was not started; return its link."""
        moving = self._moving.get(key, [])
        if len(moving) != 1:
            return None
        index, transfer = moving[0]
        if transfer.direction is Direction.UP or transfer.tag in self.snapshots or not self.queues[index].remove(transfer):
            return None
        self.waiting -= 1
        del self._transfers[transfer.tag], self._moving[key]
        return index

    def promoted(self, tag: int, urgency: Urgency) -> None:
        """Record that the link knows of the promotion."""
        if tag in self._transfers:
            self._transfers[tag][1].urgency = urgency


class LinkCounters:
    """Counters of one direction of one link."""

    def __init__(self) -> None:
        self.transfers = self.bytes = self.failed = self.active = 0
        self.busy, self.since = 0.0, 0.0
        self.cost = 0.0
        """Seconds per byte; 0 before the first transfer has ended."""

    def begin(self, now: float) -> None:
        if self.active == 0:
            self.since = now
        self.active += 1

    def end(self, now: float, nbytes: int, error: TieredError | None) -> None:
        self.active -= 1
        if self.active == 0:
            self.busy += now - self.since
        if error is None:
            self.transfers += 1
            self.bytes += nbytes
        else:
            self.failed += 1
        self.cost = self.busy / self.bytes if self.bytes else 0.0

    def snapshot(self, now: float) -> FlowStatistics:
        busy = self.busy + (now - self.since if self.active else 0.0)
        return FlowStatistics(self.transfers, self.bytes, self.failed, busy)
