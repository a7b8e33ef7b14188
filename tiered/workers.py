"""Worker threads for commits and rollbacks, which no Python signal handler enters.

``threading`` waits with Python code that holds a lock. An exception of a signal handler that strikes such a wait may leave the
lock held for ever. So no thread that may be struck waits for a condition or an event here, and the engine's thread starts these
threads, because ``Thread.start`` waits for an event.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from typing import Any

from tiered.errors import TieredError

__all__ = ["Outcome", "Worker"]


class Outcome(Future[int]):
    """The result of a ``Worker``. Each caller of ``result`` waits for a lock of its own, which no other caller needs."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._over = False
        self._found: tuple[int, BaseException | None] = 0, None
        self._waiting: deque[threading.Lock] = deque()

    def keep(self, value: int, error: BaseException | None) -> None:
        """Store the result and wake all waiting callers. Called once."""
        self._found = value, error
        self._over = True
        while self._waiting:
            self._waiting.popleft().release()

    def tell(self) -> None:
        """Call the callbacks. May block for ever, where an exception struck a caller in ``concurrent.futures`` itself."""
        value, error = self._found
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> int:
        """Wait at most ``timeout`` seconds for the generation. Raises what the work raised, or ``TimeoutError``."""
        self._wait(timeout)
        value, error = self._found
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error, self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait at most ``timeout`` seconds for the end. Raises ``TimeoutError``."""
        self._wait(timeout)
        return self._found[1]

    def __await__(self) -> Generator[Any, None, int]:
        """Wait in a coroutine. To cancel that cancels nothing but the wait."""
        return asyncio.wrap_future(self).__await__()

    def done(self) -> bool:
        return self._over

    def running(self) -> bool:
        return not self._over

    def _wait(self, timeout: float | None) -> None:
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        if not self._over and not mine.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimedOut


class Worker:
    """A thread that runs ``work``. An exception that strikes the waiting caller affects neither the work nor its result.

    The work may report that it has ``reached`` a point that a caller waits for. Callers wait for locks: a signal handler may
    end such a wait, and nothing is left half done, as it is with a condition or an event.
    """

    def __init__(self, name: str, work: Callable[[], int]) -> None:
        self.future = Outcome()
        self.has_reached = False
        self.cancelled = False
        """Whether an exception struck the caller: work that has not begun is not needed."""
        self.pid = os.getpid()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)  # see _finish
        self._coming, self._running = threading.Lock(), threading.Lock()
        self._coming.acquire()
        self._running.acquire()

    def start(self) -> None:
        """Start the thread, in a thread that no signal handler enters. Raises TieredError where the system has no thread
        left."""
        _unfinished.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            _unfinished.discard(self)
            raise TieredError(f"the system starts no more threads ({error}): end some, or raise ulimit -u") from error

    def _run(self) -> None:
        value, error = 0, None
        try:
            value = self._work()
        except BaseException as raised:
            error = raised
        del self._work
        self.future.keep(value, error)
        del error
        if not self.has_reached:
            self._coming.release()
        self._running.release()
        _unfinished.discard(self)
        self.future.tell()

    def reached(self) -> None:
        """Report that the work has reached its point. Called by the work, once."""
        self.has_reached = True
        self._coming.release()

    def wait_reached(self) -> None:
        """Wait until the work has called ``reached``, or has ended."""
        with self._coming:
            return

    def wait(self) -> None:
        """Wait until the work has ended."""
        with self._running:
            return


_unfinished: set[Worker] = set()


def _finish() -> None:
    """Wait for commits in flight at interpreter exit, and not for callbacks."""
    for worker in list(_unfinished):
        if worker.pid == os.getpid():  # a forked child has none of the threads
            worker.wait()


atexit.register(_finish)
