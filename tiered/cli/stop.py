"""Stop requests by Ctrl-C and SIGTERM: a command stops within a second, between two operations of the store."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

__all__ = ["StopNoted", "StopRequest", "Stopped"]

PATIENCE = 0.6
"""Seconds until a request that no ``check`` has noticed interrupts the running code, as in a wait for a disk that does not
answer."""


class Stopped(KeyboardInterrupt):
    """The process was asked to stop. ``exit_code``: 128 plus the number of the signal, as shells have it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


class StopNoted(Exception):
    """The process was asked to stop while no code may be interrupted. Not a KeyboardInterrupt, after which torch skips cleanup
    hooks."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopRequest:
    """While this context is open, the first signal is noted and raised by the next ``check``, the second raises at once.

    ``patience``: seconds until a request that no ``check`` has noticed interrupts the running code; with 0 any is raised at
    once, as where a line is read from a terminal.
    After ``interrupt_nothing(leave)`` no code is interrupted any more, so that the training stays consistent and can be
    committed: the first signal waits for a ``check``, and the second calls ``leave(exit code)``, which ends the process.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._signum: int | None = None
        self._before: dict[int, object] = {}
        self._leave: Callable[[int], object] | None = None

    @property
    def signum(self) -> int:
        """The number of the signal; 0 before one has arrived."""
        return self._signum or 0

    @property
    def interrupts_nothing(self) -> bool:
        """Whether a signal waits for ``check``."""
        return self._leave is not None

    def check(self) -> None:
        """Raise Stopped where a signal has arrived; StopNoted after ``interrupt_nothing``."""
        if self._signum is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Stopped(self._signum) if self._leave is None else StopNoted(self._signum)

    def interrupt_nothing(self, leave: Callable[[int], object]) -> None:
        """Let no signal interrupt code from here on. Call ``check`` next, for a signal that came before."""
        self._leave = leave

    def __enter__(self) -> StopRequest:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            self._before[signum] = signal.signal(signum, self._arrived)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None and self._leave is None:
            raise Stopped(self._signum)
        if signum == signal.SIGALRM:
            return
        if not self._patience:
            raise Stopped(signum)
        if self._signum is not None and self._leave is not None:
            self._leave(128 + signum)
        self._signum = signum
        if self._leave is None:
            signal.setitimer(signal.ITIMER_REAL, self._patience)
