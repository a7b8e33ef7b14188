"""Commits and rollbacks run in threads of their own, which no Python signal handler enters.

``threading`` waits with Python code that holds a lock. An exception of a signal handler that strikes such a wait may leave the
lock held for ever. So nobody who may be struck waits for a condition or an event here, and the engine's thread starts these
threads, because ``Thread.start`` waits for an event.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut

from tiered.errors import TieredError

__all__ = ["Behind", "Outcome"]

class Outcome(Future[int]):
    """The result of a ``Behind``. Each caller of ``result`` waits for a lock of its own, which no other caller needs."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._over = False
        self._found: tuple[int, BaseException | None] = 0, None
        self._waiting: deque[threading.Lock] = deque()

    def keep(self, value: int, error: BaseException | None) -> None:
        """Wake all who wait for the result. Once."""
        self._found = value, error
        self._over = True
        while self._waiting:
            self._waiting.popleft().release()

    def tell(self) -> None:
        """Call the callbacks. May wait for ever, where an exception struck a caller in ``concurrent.futures`` itself."""
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


class Behind:
    """``work`` in a thread of its own. An exception that strikes who waits for it strikes neither the work nor its result.

    The work may say that it has ``reached`` a point for which somebody waits. Locks are what is waited with: a signal handler
    may end the wait for one, and nothing is left half way, as it is with a condition or an event.
    """

    def __init__(self, name: str, work: Callable[[], int]) -> None:
        self.future = Outcome()
        self.has_reached = False
        self.given_up = False
        """Whoever asked for it was struck: what has not begun need not."""
        self.pid = os.getpid()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)  # see _finish
        self._coming, self._running = threading.Lock(), threading.Lock()
        self._coming.acquire()
        self._running.acquire()

    def start(self) -> None:
        """By a thread that no signal handler enters. Raises TieredError where the system has no thread left."""
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
        """By the work, once."""
        self.has_reached = True
        self._coming.release()

    def wait_reached(self) -> None:
        """Until it has, or the work has ended without."""
        with self._coming:
            return

    def wait(self) -> None:
        """Until the work has ended."""
        with self._running:
            return


_unfinished: set[Behind] = set()


def _finish() -> None:
    """Who leaves the interpreter waits for commits that are under way, and not for callbacks."""
    for behind in list(_unfinished):
        if behind.pid == os.getpid():  # a forked child has none of the threads
            behind.wait()


atexit.register(_finish)
