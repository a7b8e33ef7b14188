"""The synchronous reference backend: one request after the other, with preadv and pwritev. Works everywhere."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tiered.errors import ForkedStore, StoreClosed, whole_number
from tiered.types import IOCompletion, IORequest, Operation

__all__ = ["PosixBackend", "PosixConfig", "at_end_of_file"]

_SECTOR = 512
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


@dataclass(frozen=True, slots=True)
class PosixConfig:
    """Configuration: ``depth`` is the number of requests that may be queued."""

    depth: int = 32

    def __post_init__(self) -> None:
        whole_number("posix: depth is how many requests may be queued", self.depth)


class PosixBackend:
    """An ``IOBackend`` whose I/O happens within ``reap`` (and ``close``), in the order of submission."""

    name = "posix"
    alignment = 1

    def __init__(self, config: PosixConfig | None = None) -> None:
        self.depth = (config or PosixConfig()).depth
        self._owner = os.getpid()
        self._closed = False
        self._queue: deque[IORequest] = deque()
        # Holds one byte while requests are queued, so that the fd polls readable.
        self._readable, self._writable = os.pipe()

    def submit(self, batch: Sequence[IORequest]) -> int:
        self._check()
        taken = batch[: self.depth - len(self._queue)]
        if taken and not self._queue:
            os.write(self._writable, b"\0")
        self._queue.extend(taken)
        return len(taken)

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        """Complete at least one request, then more until ``min_events`` are complete and the timeout has passed."""
        self._check()
        deadline = time.monotonic() + timeout
        done: list[IOCompletion] = []
        while self._queue and (len(done) < max(min_events, 1) or time.monotonic() < deadline):
            request = self._queue.popleft()
            done.append(IOCompletion(request.tag, _move(request)))
            if not self._queue:
                os.read(self._readable, 1)
        return done

    def fileno(self) -> int:
        self._check()
        return self._readable

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._owner:  # a forked child's queue is its parent's, and its fds may be other files by now
            while self._queue:
                _move(self._queue.popleft())
            os.close(self._readable)
            os.close(self._writable)

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise ForkedStore("a posix backend belongs to the process that opened it; open one in the child")
        if self._closed:
            raise StoreClosed("this posix backend is closed")


def _move(request: IORequest) -> int:
    """Return the number of bytes moved (fewer than asked for: end of file), or a negative errno. Python resumes after EINTR."""
    memory = memoryview((ctypes.c_char * request.nbytes).from_address(request.address)).cast("B")
    call = os.pwritev if request.operation is Operation.WRITE else os.preadv
    moved = 0
    try:
        while True:
            count = call(request.fd, [memory[moved:]], request.offset + moved)
            moved += count
            if count == 0 or moved == request.nbytes or at_end_of_file(request.fd, moved):
                return moved
    except OSError as error:
        return moved if at_end_of_file(request.fd, moved, error) else -(error.errno or errno.EIO)


def at_end_of_file(fd: int, moved: int, error: OSError | None = None) -> bool:
    """Return whether a short transfer of ``moved`` bytes ended in the last block of a file that is open for direct I/O.

    A continuation would be misaligned: part of a sector moved, or, on a disk of larger sectors, the continuation failed with
    ``error`` EINVAL.
    """
    ends = moved % _SECTOR if error is None else moved and error.errno == errno.EINVAL
    return bool(ends and _O_DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT)
