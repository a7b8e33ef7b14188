"""The portable asynchronous backend: asyncio and the thread pool of ``aiofiles``. Any POSIX system is enough.

A private event loop in a thread of its own turns requests into tasks; ``aiofiles`` runs their system calls in a pool of
threads, up to ``depth`` at once. So bytes move while the caller computes, without a kernel interface for asynchronous I/O. The
calls use file descriptors, offsets and the request's own memory: nothing is copied on the way, and O_DIRECT works.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from aiofiles.os import wrap

from tiered.errors import ForkedStore, StoreClosed, whole_number
from tiered.io.posix import at_end_of_file
from tiered.system import Wakeup
from tiered.types import IOCompletion, IORequest, Operation

__all__ = ["AiofilesBackend", "AiofilesConfig"]

_OF_A_LOOP = 3  # descriptors of an event loop: epoll and a pair of sockets


@dataclass(frozen=True, slots=True)
class AiofilesConfig:
    """Configuration: ``depth`` is the number of requests in flight at once, each in a thread as far as the system gives
    threads."""

    depth: int = 16

    def __post_init__(self) -> None:
        whole_number("aiofiles: depth is how many requests are in flight at once", self.depth, most=1024)


class AiofilesBackend:
    """An ``IOBackend``. Its threads sleep while nothing is in flight, and end with ``close``.

    Raises OSError and RuntimeError where the process has no descriptor or thread left for it.
    """

    name = "aiofiles"
    alignment = 1

    def __init__(self, config: AiofilesConfig | None = None) -> None:
        self.depth = (config or AiofilesConfig()).depth
        self._owner = os.getpid()
        self._closed = False
        self._changed = threading.Condition()  # guards the next three
        self._moving = 0  # requests that were taken and are not complete
        self._done: list[IOCompletion] = []  # complete and not reaped
        self._wakeup = Wakeup()  # set while completions wait
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself refers to its tasks weakly
        self._pool = ThreadPoolExecutor(self.depth, "tiered-aiofiles-io")  # starts its threads on demand
        with contextlib.ExitStack() as undo:
            undo.callback(self._wakeup.close)
            with contextlib.ExitStack() as reserved:  # a loop that fails half-made keeps its descriptors and complains at exit
                for _ in range(_OF_A_LOOP):
                    reserved.callback(os.close, os.dup(self._wakeup.fileno()))
            self._loop = asyncio.new_event_loop()
            undo.callback(self._loop.close)
            self._worker = threading.Thread(target=self._loop.run_forever, name="tiered-aiofiles", daemon=True)
            self._worker.start()
            undo.pop_all()

    def submit(self, batch: Sequence[IORequest]) -> int:
        self._check()
        with self._changed:
            taken = batch[: self.depth - self._moving - len(self._done)]
            self._moving += len(taken)
        if taken:
            self._loop.call_soon_threadsafe(self._begin, taken)
        return len(taken)

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        self._check()
        with self._changed:
            # If a signal handler raises in here, all completions stay for the next call.
            self._changed.wait_for(
                lambda: len(self._done) >= min_events or not self._moving, min(timeout, threading.TIMEOUT_MAX)
            )
            self._wakeup.clear()
            done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        self._check()
        return self._wakeup.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._owner:  # a forked child has none of the threads, and its fds may be other files by now
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._moving)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._worker.join()
        self._loop.close()
        self._pool.shutdown()
        self._wakeup.close()

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise ForkedStore("an aiofiles backend belongs to the process that opened it; open one in the child")
        if self._closed:
            raise StoreClosed("this aiofiles backend is closed")

    # In the loop's thread

    def _begin(self, batch: Sequence[IORequest]) -> None:
        for request in batch:
            task = self._loop.create_task(self._serve(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: IORequest) -> None:
        try:
            result = await self._move(request)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        except (OverflowError, ValueError):  # sizes, offsets and fds that no system call accepts
            result = -errno.EINVAL
        with self._changed:
            self._moving -= 1
            self._done.append(IOCompletion(request.tag, result))
            self._wakeup.set()
            self._changed.notify_all()

    async def _in_thread(self, call: _Call) -> int:
        try:
            moved: int = await _made(call, executor=self._pool)
            return moved
        except RuntimeError:  # no thread: a limit, or interpreter exit. The pool may have queued the call nevertheless
            if call.begins():
                return call.make()  # in the loop's thread; other requests wait meanwhile
            return await asyncio.wrap_future(call.result)

    async def _move(self, request: IORequest) -> int:
        """Return the number of bytes moved (fewer than asked for: end of file). Python itself resumes after EINTR."""
        memory = memoryview((ctypes.c_char * request.nbytes).from_address(request.address)).cast("B")
        call = _write if request.operation is Operation.WRITE else _read
        moved = 0
        try:
            while True:
                count: int = await self._in_thread(_Call(call, request.fd, memory[moved:], request.offset + moved))
                moved += count
                if count == 0 or moved == request.nbytes or at_end_of_file(request.fd, moved):
                    return moved
        except OSError as error:
            if at_end_of_file(request.fd, moved, error):
                return moved
            raise


def _preadv(fd: int, memory: memoryview, offset: int) -> int:
    return os.preadv(fd, [memory], offset)


def _pread(fd: int, memory: memoryview, offset: int) -> int:
    """Read through a copy, on systems without preadv (macOS before 11, which has no O_DIRECT either)."""
    data = os.pread(fd, len(memory), offset)
    memory[: len(data)] = data
    return len(data)


_read = _preadv if hasattr(os, "preadv") else _pread
_write = os.pwrite


class _Call:
    """A system call that is made exactly once, by whoever begins it first: memory that was given back must not be written
    later."""

    def __init__(self, function: Callable[[int, memoryview, int], int], fd: int, memory: memoryview, offset: int) -> None:
        self.result: Future[int] = Future()
        self._function, self._fd, self._memory, self._offset = function, fd, memory, offset
        self._begun = threading.Lock()

    def begins(self) -> bool:
        """Return True for the first caller only."""
        return self._begun.acquire(blocking=False)

    def make(self) -> int:
        """Make the call and return the number of bytes moved. Raises OSError, and ValueError or OverflowError for bad
        arguments."""
        try:
            moved = self._function(self._fd, self._memory, self._offset)
        except BaseException as error:
            self.result.set_exception(error)
            raise
        self.result.set_result(moved)
        return moved


def _in_its_turn(call: _Call) -> int:
    return call.make() if call.begins() else 0


_made = wrap(_in_its_turn)
