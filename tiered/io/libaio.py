"""Linux native AIO over the ring in ``libaio_ext``: the fast backend, and the default where it works.

I/O is asynchronous for files opened with O_DIRECT. Other files work too; the kernel then moves the bytes within ``submit``.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tiered.errors import CapacityError, ForkedStore, StoreClosed, TieredError, whole_number
from tiered.interfaces import NativeRing
from tiered.types import IOCompletion, IORequest, Operation

__all__ = ["LibaioBackend", "LibaioConfig"]

try:
    from tiered.io._aio import ffi, lib
except ImportError as error:
    raise ImportError(
        f"the libaio backend is not built ({error}); install a C compiler and libaio's headers (Debian, Ubuntu: "
        "apt-get install gcc libc6-dev python3-dev libaio-dev), then install tiered again"
    ) from error


_FAILURES = 3  # consecutive failures of io_getevents, after which it is an error
_WRITE = Operation.WRITE  # before Python 3.12 enums look members up slowly
_LONGEST_WAIT = 1e9  # seconds; in nanoseconds it still fits into 63 bits beside the clock
_CLOSED = "this libaio backend is closed"
_REQUEST = struct.Struct("@iiqQQq")
"""Packs a request, which C code reads as ``ring_request`` of libaio_ext/requests.cdef.h."""


@dataclass(frozen=True, slots=True)
class LibaioConfig:
    """Configuration: ``depth`` is the number of requests in flight at once. PERFORMANCE: 4 to 8 blocks of 1 MiB fill a drive,
    16 of 256 KiB."""

    depth: int = 32

    def __post_init__(self) -> None:
        whole_number("libaio: depth is how many requests are in flight at once", self.depth, most=65536)


class LibaioBackend:
    """An ``IOBackend``. Tags are signed 64-bit integers.

    Raises ``CapacityError`` when the kernel has no room for a ring (fs.aio-max-nr), ``TieredError`` when it has no AIO.
    """

    name = "libaio"
    alignment = 512
    """The smallest sector size of disks. A file may require more (4096 on a 4Kn disk), which statx says."""

    def __init__(self, config: LibaioConfig | None = None) -> None:
        self.depth = (config or LibaioConfig()).depth
        opened = ffi.new("aio_ring **")
        code = lib.aio_ring_open(self.depth, opened)
        if code < 0:
            raise _refusal(-code, self.depth)
        self._opened = opened[0]
        self._closed = False
        self._completions = ffi.new("ring_completion[]", self.depth)
        self._requests = ffi.new("ring_request[]", self.depth)
        self._packed = ffi.buffer(self._requests)

    def submit(self, batch: Sequence[IORequest]) -> int:
        ring = self._opened
        if self._closed:
            raise StoreClosed(_CLOSED)
        packed = 0
        try:
            for operation, fd, offset, address, nbytes, tag in batch[: self.depth]:
                way = lib.RING_WRITE if operation is _WRITE else lib.RING_READ
                _REQUEST.pack_into(self._packed, packed * _REQUEST.size, way, fd, offset, address, nbytes, tag)
                packed += 1
        finally:  # an invalid request (a negative size) leaves those before it taken
            taken = self._checked(lib.aio_ring_submit(ring, self._requests, packed))
        return taken

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        ring = self._opened
        if self._closed:
            raise StoreClosed(_CLOSED)
        left = min(timeout, _LONGEST_WAIT)
        deadline = time.monotonic() + left if left > 0 else 0.0
        failures = 0
        while True:
            nanoseconds = int(max(left, 0.0) * 1e9)
            count = lib.aio_ring_reap(ring, max(min_events, 0), nanoseconds, self._completions, self.depth)
            failures += count < 0 and count != -errno.EINTR
            if count >= 0 or failures > _FAILURES:  # completions that were not returned stay in the ring
                break
            # Python runs signal handlers between two calls. If one raises, completions stay in the ring.
            left = deadline - time.monotonic()
        if count < 0:
            self._checked(count)
        if count == 0:
            return []
        return [IOCompletion(done.tag, done.result) for done in self._completions[0:count]]

    def fileno(self) -> int:
        if self._closed:
            raise StoreClosed(_CLOSED)
        return self._checked(lib.aio_ring_fileno(self._opened))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            lib.aio_ring_close(self._opened)

    @property
    def native(self) -> NativeRing:
        if self._closed:
            raise StoreClosed(_CLOSED)
        functions = (ffi.addressof(lib, "aio_ring_submit"), ffi.addressof(lib, "aio_ring_reap"))
        ring, submit, reap = (int(ffi.cast("uintptr_t", one)) for one in (self._opened, *functions))
        return NativeRing(ring, submit, reap, 0, _failure)

    @staticmethod
    def _checked(code: int) -> int:
        if code < 0:
            raise _failure(code)
        return code


def _failure(code: int) -> TieredError:
    if code == lib.RING_FORKED:
        return ForkedStore("a libaio backend belongs to the process that opened it; open one in the child")
    return TieredError(f"libaio: the kernel does not give completions: {os.strerror(-code)} (errno {-code})")


def _refusal(code: int, depth: int) -> TieredError:
    if code == errno.EAGAIN:
        return CapacityError(
            f"libaio: no room for a ring of depth {depth}: all of fs.aio-max-nr is in use on this machine; "
            "close other users of AIO or raise it (sysctl fs.aio-max-nr=1048576)"
        )
    if code == errno.ENOMEM:
        return CapacityError(f"libaio: the kernel has no memory for a ring of depth {depth}")
    if code in (errno.ENOSYS, errno.EPERM):
        return TieredError(f"libaio: this kernel or container offers no AIO: {os.strerror(code)} (errno {code})")
    return TieredError(f"libaio: io_setup failed: {os.strerror(code)} (errno {code})")
