"""A device link whose HBM is the host's memory: the reference implementation, and the stand-in for a device.

``MemoryLink`` alone copies when it is told to. Over ``StandInStreams`` it behaves as a device does: work is queued now and runs
later, in any order that the fences allow, which the test chooses.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from tiered.errors import whole_number
from tiered.interfaces import Memory
from tiered.system import Wakeup
from tiered.types import Completion, Direction, Fence, Transfer, Urgency

__all__ = ["MemoryLink", "StandInFence", "StandInStreams"]

_current: contextvars.ContextVar[Hashable] = contextvars.ContextVar("stand_in_stream", default="compute")


class StandInFence:
    """A fence that passes when its stream reaches it."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class StandInStreams:
    """``Streams`` without a device. A stream exists as soon as it is named.

    Each stream is a queue of launched work, of fences to pass, and of fences to wait for. Nothing leaves it before ``step``,
    ``run`` or ``run_all``; then entries of one stream run in order, and those of several in any. A fence on a stream with
    nothing queued has passed at once.

    Any thread may queue; threads that step take turns.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Callable[[], object] | StandInFence | _Wait]] = {}
        self._turn = threading.RLock()  # reentrant: work may launch more, and step

    def current(self) -> Hashable:
        """Return ``"compute"``, or the stream that ``use`` chose in this thread."""
        return _current.get()

    @contextmanager
    def use(self, stream: Hashable) -> Iterator[None]:
        """Make this thread compute on ``stream`` within the block."""
        token = _current.set(stream)
        try:
            yield
        finally:
            _current.reset(token)

    def record(self, stream: object) -> Fence:
        fence = StandInFence()
        queue = self._queue(stream)
        if queue:
            queue.append(fence)
        else:
            fence.passed = True
        return fence

    def wait(self, stream: object, fence: Fence) -> None:
        if not fence.query():
            self._queue(stream).append(_Wait(fence))

    def synchronize(self) -> None:
        self.run_all()

    def launch(self, work: Callable[[], object], stream: Hashable | None = None) -> None:
        """Queue ``work`` on ``stream``, or on the current one."""
        self._queue(self.current() if stream is None else stream).append(work)

    # The test's controls

    def queued(self, stream: Hashable) -> int:
        """Return the number of entries that have not run: work, and fences recorded and waited for."""
        return len(self._queue(stream))

    def ready(self) -> list[Hashable]:
        """Return the streams that have entries and wait for no fence."""
        return [stream for stream in list(self._queues) if self._can_go(stream)]

    def step(self, stream: Hashable) -> bool:
        """Run one entry of ``stream``; return False where there is none or it waits for a fence."""
        with self._turn:
            if not self._can_go(stream):
                return False
            queue = self._queue(stream)
            entry = queue[0]
            try:
                if isinstance(entry, StandInFence):
                    entry.passed = True
                elif not isinstance(entry, _Wait):
                    entry()
            finally:
                queue.popleft()  # after it ran: a fence recorded meanwhile must not find the stream idle
            return True

    def run(self, stream: Hashable) -> None:
        """Run the entries of ``stream`` until it is empty or waits for another one."""
        while self.step(stream):
            pass

    def run_all(self, choose: Callable[[Sequence[Hashable]], Hashable] = lambda ready: ready[0]) -> None:
        """Run everything that can run; ``choose`` says which of the ready streams makes the next step."""
        with self._turn:
            while ready := self.ready():
                self.step(choose(ready))

    def _queue(self, stream: object) -> deque[Callable[[], object] | StandInFence | _Wait]:
        assert isinstance(stream, Hashable)
        return self._queues.setdefault(stream, deque())

    def _can_go(self, stream: Hashable) -> bool:
        queue = self._queue(stream)
        if not queue:
            return False
        entry = queue[0]
        return not isinstance(entry, _Wait) or entry.fence.query()


class _Wait:
    """An entry that delays those behind it until a fence has passed."""

    __slots__ = ("fence",)

    def __init__(self, fence: Fence) -> None:
        self.fence = fence


class MemoryLink:
    """Link between two memories of the host, ``upper`` and ``lower``, both of which must outlive it.

    Without ``streams`` a transfer is copied within ``start`` and reported by the next ``poll``. With them its copy is queued on
    a stream of its direction, ``"up"`` or ``"down"``, behind the fences in ``Transfer.after``, and is reported by the next
    ``poll`` after it has run. ``depth`` is the number of transfers of one direction that it takes at once.
    """

    def __init__(self, upper: Memory, lower: Memory, *, streams: StandInStreams | None = None, depth: int = 16) -> None:
        whole_number("the depth of a link is a number of transfers", depth)
        self.src = upper.name
        self.dst = lower.name
        self._upper = upper
        self._lower = lower
        self._streams = streams
        self._depth = depth
        self._in_flight: dict[int, Direction] = {}  # by tag, until reported
        self._ran: deque[int] = deque()  # tags of completed copies; the stepping thread appends
        self._wakeup = Wakeup()
        self._closed = False

    def start(self, transfer: Transfer) -> bool:
        """Take a transfer; return False while ``depth`` of its direction are unreported."""
        assert not self._closed, "start after close"
        assert transfer.tag not in self._in_flight, f"tag {transfer.tag} is in flight"
        assert 1 <= transfer.nbytes <= min(transfer.upper.nbytes, transfer.lower.nbytes)
        if list(self._in_flight.values()).count(transfer.direction) >= self._depth:
            return False
        upper, _ = self._upper.tensor(transfer.upper, transfer.nbytes)
        lower, _ = self._lower.tensor(transfer.lower, transfer.nbytes)
        source, target = (upper, lower) if transfer.direction is Direction.DOWN else (lower, upper)

        def copy() -> None:
            target.copy_(source)
            self._ran.append(transfer.tag)
            self._wakeup.set()

        self._in_flight[transfer.tag] = transfer.direction
        if self._streams is None:
            assert all(fence.query() for fence in transfer.after), "a fence of a device that this link knows nothing of"
            copy()
        else:
            side = transfer.direction.value
            for fence in transfer.after:
                self._streams.wait(side, fence)
            self._streams.launch(copy, side)
        return True

    def promote(self, tag: int, urgency: Urgency) -> None:
        """Ignore the change: a transfer was copied already, or is queued on a stream, where nothing overtakes it."""

    def poll(self, timeout: float) -> list[Completion]:
        if self._in_flight and timeout > 0:
            self._wakeup.wait(timeout)
        self._wakeup.clear()
        ended = []
        while self._ran:
            tag = self._ran.popleft()
            del self._in_flight[tag]
            ended.append(Completion(tag))
        return ended

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def close(self) -> None:
        """Run the streams until all copies have run; then release. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._streams is not None:
            self._streams.run_all()
        assert len(self._ran) == len(self._in_flight), "a transfer waits for a fence that nothing lets pass"
        self._wakeup.close()
