"""The plain reference: one request after the other, with preadv and pwritev. Works everywhere."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tiered.errors import ForkedStore, MisuseError, StoreClosed
from tiered.types import IOCompletion, IORequest, Operation

__all__ = ["PosixBackend", "PosixConfig"]

_SECTOR = 512
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


@dataclass(frozen=True, slots=True)
class PosixConfig:
    """``depth``: requests that may be queued."""

    depth: int = 32


class PosixBackend:
    """An ``IOBackend`` whose I/O happens within ``reap`` (and ``close``), in the order of submission."""

    name = "posix"
    alignment = 1

    def __init__(self, config: PosixConfig | None = None) -> None:
        self.depth = (config or PosixConfig()).depth
        if self.depth < 1:
            raise MisuseError(f"posix: depth {self.depth} is less than 1")
        self._owner = os.getpid()
        self._closed = False
        self._queue: deque[IORequest] = deque()
        # Holds one byte while requests are queued: reap has something to do then.
        self._readable, self._writable = os.pipe()

    def submit(self, batch: Sequence[IORequest]) -> int:
        self._check()
        taken = batch[: self.depth - len(self._queue)]
        if taken and not self._queue:
            os.write(self._writable, b"\0")
        self._queue.extend(taken)
        return len(taken)

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        """Works through at least one request, then on until ``min_events`` are done and the time is up."""
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
        if os.getpid() == self._owner:  # a forked child's queue is its parent's, and so may be what its fds are now
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
    """Bytes moved (fewer than asked for: end of file), or a negative errno. Python itself resumes after EINTR."""
    memory = memoryview((ctypes.c_char * request.nbytes).from_address(request.address)).cast("B")
    call = os.pwritev if request.operation is Operation.WRITE else os.preadv
    moved = 0
    try:
        while True:
            count = call(request.fd, [memory[moved:]], request.offset + moved)
            moved += count
            if count == 0 or moved == request.nbytes:
                return moved
            if moved % _SECTOR and _is_direct(request.fd):  # a file's last block: to ask on from here is misaligned
                return moved
    except OSError as error:
        if error.errno == errno.EINVAL and moved and _is_direct(request.fd):  # likewise, on a disk of larger sectors
            return moved
        return -(error.errno or errno.EIO)


def _is_direct(fd: int) -> bool:
    return bool(_O_DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT)
