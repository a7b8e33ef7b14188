"""An fd that polls readable from ``set`` until ``clear``: how a private worker reaches whoever waits in an event loop."""

from __future__ import annotations

import contextlib
import os
import select
from functools import partial
from typing import Protocol

from tiered.closing import Once

__all__ = ["OwnedWakeup", "Wakeup", "wait_for"]

_AT_ONCE = 4096  # bytes
_LONGEST_WAIT = 1e6  # seconds; poll(2) counts milliseconds in an int


class _Condition(Protocol):
    """A ``threading.Condition``."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def acquire(self) -> bool: ...


def wait_for(changed: _Condition, seconds: float) -> None:
    """``changed.wait``, which Ctrl-C leaves without the lock if it strikes as that is taken again; here it is had in any case.

    The lock is an RLock: another one would let a thread release what is not its own.
    """
    try:
        changed.wait(seconds)
    except BaseException:
        while True:  # whatever else strikes meanwhile: the first exception is told
            try:
                while not changed._is_owned():  # type: ignore[attr-defined]
                    changed.acquire()
                break
            except BaseException:
                continue
        raise


class Wakeup:
    """A pipe, since eventfd is Linux's. Any thread may ``set``; whoever closes makes sure that nobody sets it any more.

    Clear it before looking at what it announces, then nothing is missed: what comes later sets it again. After ``close``
    setting it does nothing: a collection that finds it together with who sets it may end the two in either order.
    """

    _reading = _writing = -1  # also where the system refuses the pipe
    _closing = Once()

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self._closing = Once(partial(os.close, self._reading), partial(os.close, self._writing))
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)

    def fileno(self) -> int:
        return self._reading

    def set(self) -> None:
        if self._writing >= 0:
            with contextlib.suppress(BlockingIOError):  # a full pipe is readable
                os.write(self._writing, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._reading, _AT_ONCE)) == _AT_ONCE:
                pass

    def wait(self, timeout: float) -> bool:
        """Whether it is set, after at most ``timeout`` seconds."""
        poller = select.poll()
        poller.register(self._reading, select.POLLIN)
        return bool(poller.poll(min(max(timeout, 0.0), _LONGEST_WAIT) * 1000))

    def close(self) -> None:
        self._reading = self._writing = -1  # their numbers may be another file's soon
        self._closing.run()


class OwnedWakeup(Wakeup):
    """Closed with its last reference and not before: a finalizer may set it as long as it holds who has it."""

    def __del__(self) -> None:
        self.close()
