"""Transfers from their admission to their end: what waits for its link, and what is under way.

What one direction of a link has done so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tiered.engine.residency import Copy, Entry
from tiered.errors import TieredError
from tiered.telemetry import FlowStatistics, Recorder
from tiered.types import Direction, Key, Slot, Transfer, Urgency

__all__ = ["Backlog", "Flow", "Traffic"]

_WAYS = (Direction.UP, Direction.DOWN)


class Backlog:
    """A queue by urgency; among equals what goes up first, and then by arrival. ``reads`` counts the transfers up among its
    ``length``."""

    def __init__(self) -> None:
        self._waiting = {(urgency, way): OrderedDict[int, Transfer]() for urgency in Urgency for way in _WAYS}
        self.length = self.reads = 0

    def __iter__(self) -> Iterator[Transfer]:
        """The next one first."""
        for waiting in self._waiting.values():
            yield from waiting.values()

    def add(self, transfer: Transfer) -> None:
        self._queue(transfer)[transfer.tag] = transfer
        self.length += 1
        self.reads += transfer.direction is Direction.UP

    def take(self, refused: Mapping[Direction, Urgency]) -> Transfer | None:
        """Remove and return the next one that is more urgent than what was ``refused`` that way."""
        for (urgency, way), waiting in self._waiting.items():
            if waiting and (way not in refused or urgency < refused[way]):
                _, transfer = waiting.popitem(last=False)
                self.length -= 1
                self.reads -= way is Direction.UP
                return transfer
        return None

    def put_back(self, transfer: Transfer) -> None:
        """Undo ``take``: it is the next one of its urgency again."""
        self.add(transfer)
        self._queue(transfer).move_to_end(transfer.tag, last=False)

    def promote(self, transfer: Transfer, urgency: Urgency) -> bool:
        """Make it more urgent; False when it waits here no longer."""
        if self._queue(transfer).pop(transfer.tag, None) is None:
            return False
        transfer.urgency = urgency
        self._queue(transfer)[transfer.tag] = transfer
        return True

    def _queue(self, transfer: Transfer) -> OrderedDict[int, Transfer]:
        return self._waiting[transfer.urgency, transfer.direction]


@dataclass(slots=True)
class Rising:
    """Transfers up that have not ended."""

    transfers: int = 0
    nbytes: int = 0


class Traffic:
    """Of all links. ``queues[i]`` wait for link i, between tier i and the one below; ``rising[i]`` counts the
    transfers up that have not ended; ``promotions[i]`` are started ones, by tag, that became more urgent since."""

    def __init__(self, links: int) -> None:
        self.queues = [Backlog() for _ in range(links)]
        self.promotions: list[dict[int, Urgency]] = [{} for _ in range(links)]
        self.rising = [Rising() for _ in range(links)]
        self.snapshots: dict[int, tuple[int, Slot]] = {}  # tier and slot that a transfer down reads, to be given back after it
        self.recorder: Recorder | None = None
        self._transfers: dict[int, tuple[Entry, Transfer]] = {}  # all that have not ended
        self._refused: list[dict[Direction, Urgency]] = [{} for _ in range(links)]  # by each link, since something ended there
        self._moving: dict[Key, list[tuple[int, Transfer]]] = {}  # the same by tensor, each with its link

    @property
    def waits(self) -> bool:
        """Whether a link could be given something."""
        for queue, promotions in zip(self.queues, self.promotions, strict=True):  # noqa: SIM110 - on the path of every lease
            if queue.length or promotions:
                return True
        return False

    def read(self) -> Iterator[Copy]:
        """The copies that transfers up read, one time for each."""
        for moving in self._moving.values():
            for index, transfer in moving:
                source = self._transfers[transfer.tag][0].copies[index + 1]
                if transfer.direction is Direction.UP and source is not None:
                    yield source

    def going_down(self, index: int) -> int:
        """Bytes of the slots below link ``index`` that its transfers down have and will fill."""
        under_way = (pair for moving in self._moving.values() for pair in moving)
        return sum(t.lower.nbytes for link, t in under_way if link == index and t.direction is Direction.DOWN)

    def add(self, index: int, entry: Entry, transfer: Transfer) -> None:
        if self.recorder is not None:
            self.recorder.queued(transfer.tag)
        self._transfers[transfer.tag] = (entry, transfer)
        self._moving.setdefault(entry.key, []).append((index, transfer))
        if transfer.direction is Direction.UP:
            self.rising[index].transfers += 1
            self.rising[index].nbytes += transfer.nbytes
        self.queues[index].add(transfer)

    def take(self, index: int) -> Transfer | None:
        """The next transfer for link ``index``, which may have room for it; it is started from here on."""
        return self.queues[index].take(self._refused[index])

    def put_back(self, index: int, transfer: Transfer) -> None:
        """The link had no room for it, and so for nothing that is not more urgent, until something ends there."""
        self._refused[index][transfer.direction] = transfer.urgency
        transfer.urgency = self.promotions[index].pop(transfer.tag, transfer.urgency)
        self.queues[index].put_back(transfer)

    def idle(self, index: int) -> None:
        """Nothing is under way on link ``index``, whose end would be a sign to ask again what it refused."""
        self._refused[index].clear()

    def end(self, index: int, tag: int) -> tuple[Entry, Transfer]:
        """Link ``index`` reported the transfer's end."""
        entry, transfer = self._transfers.pop(tag)
        self._refused[index].clear()
        self.promotions[index].pop(tag, None)
        moving = self._moving[entry.key]
        moving.remove((index, transfer))
        if not moving:
            del self._moving[entry.key]
        if transfer.direction is Direction.UP:
            self.rising[index].transfers -= 1
            self.rising[index].nbytes -= transfer.nbytes
        return entry, transfer

    def hurry(self, key: Key, urgency: Urgency) -> None:
        """Transfers of ``key`` inherit ``urgency``, those that are under way too."""
        for index, transfer in self._moving.get(key, ()):
            if transfer.urgency > urgency and not self.queues[index].promote(transfer, urgency):
                self.promotions[index][transfer.tag] = urgency

    def promoted(self, tag: int, urgency: Urgency) -> None:
        """The link knows."""
        if tag in self._transfers:
            self._transfers[tag][1].urgency = urgency


class Flow:
    """Counters of one direction of one link."""

    def __init__(self) -> None:
        self.transfers = self.bytes = self.failed = self.active = 0
        self.busy, self.since = 0.0, 0.0

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

    @property
    def cost(self) -> float:
        """Seconds per byte; 0 before the first transfer has ended."""
        return self.busy / self.bytes if self.bytes else 0.0

    def snapshot(self, now: float) -> FlowStatistics:
        busy = self.busy + (now - self.since if self.active else 0.0)
        return FlowStatistics(self.transfers, self.bytes, self.failed, busy)
