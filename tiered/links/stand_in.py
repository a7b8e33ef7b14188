"""HBM and DRAM where both are the host's memory: the plain reference of a device link, and the stand-in for a device.

``MemoryLink`` alone copies when it is told to. Over ``StandInStreams`` it behaves as a device does: work is queued now and
runs later, in any order that the fences allow; here the test says in which.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from tiered.errors import MisuseError
from tiered.interfaces import Memory
from tiered.system import Wakeup
from tiered.types import Completion, Direction, Fence, Transfer, Urgency

__all__ = ["MemoryLink", "StandInFence", "StandInStreams"]

_current: contextvars.ContextVar[Hashable] = contextvars.ContextVar("stand_in_stream", default="compute")


class StandInFence:
    """Passes when the streams come to it."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class StandInStreams:
    """``Streams`` of a device that is not there. Whatever names a stream makes it.

    Each stream is a queue of launched work, of fences to let pass, and of fences to wait for. Nothing leaves it before
    ``step``, ``run`` or ``run_all`` says so; then entries of one stream go in order, and those of several in any. A fence on
    a stream with nothing queued has passed at once.

    Any thread may queue; those that step take turns.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Callable[[], object] | StandInFence | _Wait]] = {}
        self._turn = threading.RLock()  # reentrant: work may launch more, and step

    def current(self) -> Hashable:
        """``"compute"``, or what ``use`` chose in this thread."""
        return _current.get()

    @contextmanager
    def use(self, stream: Hashable) -> Iterator[None]:
        """This thread computes on ``stream`` meanwhile."""
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

    # What the test calls

    def queued(self, stream: Hashable) -> int:
        """Entries that have not run: work, and fences recorded and waited for."""
        return len(self._queue(stream))

    def ready(self) -> list[Hashable]:
        """Streams that have something queued and wait for no fence."""
        return [stream for stream in list(self._queues) if self._can_go(stream)]

    def step(self, stream: Hashable) -> bool:
        """Let one entry of ``stream`` run; False where there is none or it waits for a fence."""
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
                queue.popleft()  # only now: a fence recorded meanwhile must not find the stream idle
            return True

    def run(self, stream: Hashable) -> None:
        """Let ``stream`` run as far as it gets alone."""
        while self.step(stream):
            pass

    def run_all(self, choose: Callable[[Sequence[Hashable]], Hashable] = lambda ready: ready[0]) -> None:
        """Let everything run that can; ``choose`` says which of the streams that can go makes the next step."""
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
    """An entry that keeps those behind it until a fence has passed."""

    __slots__ = ("fence",)

    def __init__(self, fence: Fence) -> None:
        self.fence = fence


class MemoryLink:
    """Link between two memories of the host, ``upper`` and ``lower``, both of which must outlive it.

    Without ``streams`` a transfer is copied within ``start`` and reported by the next ``poll``. With them its copy is
    queued on a stream of its direction, ``"up"`` or ``"down"``, behind the fences in ``Transfer.after``, and is reported by
    the next ``poll`` after it has run. ``depth`` is how many transfers of one direction it takes at once.
    """

    def __init__(self, upper: Memory, lower: Memory, *, streams: StandInStreams | None = None, depth: int = 16) -> None:
        if depth < 1:
            raise MisuseError(f"a link of depth {depth} moves nothing")
        self.src = upper.name
        self.dst = lower.name
        self._upper = upper
        self._lower = lower
        self._streams = streams
        self._depth = depth
        self._in_flight: dict[int, Direction] = {}  # by tag, until reported
        self._ran: deque[int] = deque()  # tags of copies that are done; a stepping thread appends
        self._wakeup = Wakeup()
        self._closed = False

    def start(self, transfer: Transfer) -> bool:
        """Take a transfer; False while ``depth`` of its direction are unreported."""
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
        """Changes nothing: what was taken is copied already, or queued on a stream, where nothing overtakes."""

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
        """Let the streams run until all copies have; then release. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._streams is not None:
            self._streams.run_all()
        assert len(self._ran) == len(self._in_flight), "a transfer waits for a fence that nothing lets pass"
        self._wakeup.close()
