"""The disk link in C, over the ring of a backend that has one: one call for a group of transfers, none for a block.

``tiered.links.disk`` is the reference, and serves every other backend. C (libaio_ext/disk_link.c) cuts, hashes, submits, reaps
and verifies within two calls, without the GIL; here are the window, which refuses, and the words of errors.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import time
from collections.abc import Callable

from tiered.errors import CapacityError, StoreClosed, TransferError
from tiered.interfaces import IOBackend, Link, NativeBackend
from tiered.links.disk import LATENCY, DiskConfig, DiskLink, block_bytes, io_error, refuse_alignment, why_corrupt
from tiered.types import CHECKSUM_BYTES, PIECE_BYTES, Completion, Direction, Location, Slot, Transfer, Urgency

__all__ = ["NativeDiskLink", "native_link_unavailable", "open_disk_link"]

try:
    from tiered.links._disk import ffi, lib
except ImportError as error:
    _missing: str | None = (
        f"not built ({error}); install a C compiler and xxHash's header (Debian, Ubuntu: apt-get install gcc libc6-dev "
        "python3-dev libxxhash-dev), then install tiered again"
    )
else:
    _missing = None

AT_ONCE = 256
"""Transfers that one call hands over, and ends that one call returns, at most."""
LONGEST_WAIT = 1e9
"""Seconds; in nanoseconds it still fits into 63 bits beside the clock."""

_ROW = struct.Struct("@qiiqqQQQQQQQQ")
"""Packs a row that C code reads as ``disk_transfer`` of libaio_ext/disk_link.cdef.h."""
_END = struct.Struct("@qqqQQQQ")
"""Unpacks the end of a transfer, which C code writes as ``disk_end``."""
_PART = struct.Struct("@qq")
"""Packs the place of a part of a striped slot, which C code reads as ``disk_part``."""


def native_link_unavailable() -> str | None:
    """Return why there is no native disk link here, in one line with advice, or None."""
    return _missing


def open_disk_link(
    backend: IOBackend, *, address: int, locate: Callable[[Slot], Location], uuid: bytes, alignment: int, config: DiskConfig
) -> Link:
    """Return the native disk link where it is built and C code may drive the ring of ``backend``, else Python's. The arguments
    are those of ``DiskLink``."""
    if _missing is None and isinstance(backend, NativeBackend):
        return NativeDiskLink(backend, address=address, locate=locate, uuid=uuid, alignment=alignment, config=config)
    return DiskLink(backend, address=address, locate=locate, uuid=uuid, alignment=alignment, config=config)


class NativeDiskLink:
    """A ``DiskLink`` in C: the same arguments, decisions, digests and errors."""

    src, dst = DiskLink.src, DiskLink.dst

    def __init__(
        self,
        backend: NativeBackend,
        *,
        address: int,
        locate: Callable[[Slot], Location],
        uuid: bytes,
        alignment: int,
        config: DiskConfig,
    ) -> None:
        refuse_alignment(backend, alignment)
        self._backend, self._address, self._locate, self._alignment = backend, address, locate, alignment
        self._window, self._together = config.window, config.together
        self._native = backend.native
        functions = {
            "ring": ffi.cast("void *", self._native.ring),
            "submit": ffi.cast("int (*)(void *, const ring_request *, unsigned)", self._native.submit),
            "reap": ffi.cast("int (*)(void *, unsigned, int64_t, ring_completion *, unsigned)", self._native.reap),
            "now": ffi.cast("int64_t (*)(void)", self._native.now),
        }
        sizes = {
            "depth": backend.depth,
            "alignment": alignment,
            "block": block_bytes(config, alignment),
            "flight": config.flight,
            "window": config.window,
            "piece": PIECE_BYTES,
            "latency": int(LATENCY * 1e9),
            "uuid": uuid,
        }
        self._link = lib.disk_link_open(ffi.new("disk_ring *", functions), ffi.new("disk_config *", sizes))
        if self._link == ffi.NULL:
            raise CapacityError("the system has no memory for a link to a disk")
        self._counters = memoryview(ffi.buffer(lib.disk_link_counters(self._link))).cast("B").cast("Q")
        self._rows, self._ends = ffi.new("disk_transfer[]", AT_ONCE), ffi.new("disk_end[]", AT_ONCE)
        self._packed, self._answers = ffi.buffer(self._rows), memoryview(ffi.buffer(self._ends))
        self._waiting = self._unsubmitted = 0  # transfers that were started and not handed over, and their bytes
        self._jobs: dict[int, tuple[Transfer, Location, int, object]] = {}
        """Of each transfer by its tag: where it goes, its bytes with padding, and what C code refers to."""
        self._accepted = {way: [0 for _ in Urgency] for way in Direction}  # bytes of unfinished transfers
        self._closed = False

    @property
    def hashed(self) -> int:
        """Pieces that were hashed or verified so far; 0 after ``close``."""
        return self._counters[1]

    def start(self, transfer: Transfer) -> bool:
        """Take a transfer; return False while the window is full of transfers at least as urgent."""
        if self._closed:  # no assertion: C code has freed what this would write to
            raise AssertionError("start after close")
        assert transfer.tag not in self._jobs, f"tag {transfer.tag} is in flight"
        if transfer.after:
            assert all(fence.query() for fence in transfer.after), "DRAM has no streams, so nothing here waits for a fence"
        accepted, urgency = self._accepted[transfer.direction], transfer.urgency
        if sum(accepted[: urgency + 1]) >= self._window:
            return False
        length = -(-transfer.nbytes // self._alignment) * self._alignment
        assert 0 < length <= min(transfer.upper.nbytes, transfer.lower.nbytes - transfer.begin)
        location = self._locate(transfer.lower)
        fd, offset, _, parts = location
        expected = places = 0
        kept: object = None
        if transfer.direction is Direction.DOWN:
            way = lib.RING_WRITE
        else:
            way = lib.RING_READ
            if transfer.checksums:
                assert len(transfer.checksums) == -(-transfer.nbytes // PIECE_BYTES) * CHECKSUM_BYTES
                kept, expected = _address(transfer.checksums)
        if parts:
            where = b"".join(_PART.pack(part.fd, part.offset) for part in parts)
            held, places = _address(where)
            kept = kept, held
        memory, whose = self._address + transfer.upper.offset, (transfer.tensor_id, transfer.generation)
        row = (transfer.tag, way, urgency, fd, offset, memory, transfer.nbytes, *whose, transfer.begin)
        _ROW.pack_into(self._packed, self._waiting * _ROW.size, *row, expected, places, len(parts))
        self._jobs[transfer.tag] = transfer, location, length, kept
        accepted[urgency] += length
        self._waiting += 1
        self._unsubmitted += length
        if not self._counters[0] or self._unsubmitted >= self._together or self._waiting == AT_ONCE:
            self._checked(lib.disk_link_start(self._link, self._rows, self._taken()))
        return True

    def promote(self, tag: int, urgency: Urgency) -> None:
        """Raise the urgency of an unfinished transfer; one that has ended or is as urgent already stays unchanged."""
        job = self._jobs.get(tag)
        if job is None or job[0].urgency <= urgency:
            return
        transfer, _, length, _ = job
        accepted = self._accepted[transfer.direction]
        accepted[transfer.urgency] -= length
        accepted[urgency] += length
        transfer.urgency = urgency
        self._checked(lib.disk_link_promote(self._link, self._rows, self._taken(), tag, urgency))

    def poll(self, timeout: float) -> list[Completion]:
        left = min(timeout, LONGEST_WAIT)
        deadline = time.monotonic() + left if left > 0 else 0.0
        while True:
            if self._closed:  # perhaps by a signal handler, between two calls
                raise StoreClosed("this link to a disk is closed")
            waits = int(left * 1e9) if left > 0 else 0
            count = lib.disk_link_turn(self._link, self._rows, self._taken(), waits, self._ends, AT_ONCE)
            if count != -errno.EINTR:
                break
            left = deadline - time.monotonic()  # Python runs signal handlers between two calls
        if not count:
            return []
        return [self._ended(*end) for end in _END.iter_unpack(self._answers[: self._checked(count) * _END.size])]

    def fileno(self) -> int:
        return self._backend.fileno()

    def close(self) -> None:
        """Wait for the blocks in flight and close the backend; blocks that were not submitted are dropped. Idempotent."""
        if not self._closed:
            self._closed = True
            self._counters = memoryview(bytes(self._counters.nbytes)).cast("Q")
            self._backend.close()
            lib.disk_link_close(self._link)
            self._jobs.clear()

    def _taken(self) -> int:
        """Return how many transfers wait to be handed over, which the caller does now."""
        count, self._waiting, self._unsubmitted = self._waiting, 0, 0
        return count

    def _checked(self, code: int) -> int:
        if code == -errno.EPROTO:
            raise KeyError(f"the {self._backend.name} backend completed a block that is not in flight")
        if code == -errno.ENOMEM:
            raise CapacityError("the system has no memory for a transfer to or from a disk")
        if code < 0:
            raise self._native.failure(code)
        return code

    def _ended(self, tag: int, outcome: int, result: int, at: int, size: int, pieces: int, digests: int) -> Completion:
        transfer, location, length, _ = self._jobs.pop(tag)
        self._accepted[transfer.direction][transfer.urgency] -= length
        if outcome == lib.DISK_DONE:
            return Completion(tag, ctypes.string_at(digests, pieces * CHECKSUM_BYTES) if pieces else b"")
        error: TransferError
        if outcome == lib.DISK_CORRUPT:
            error = why_corrupt(transfer, location, at)
        else:
            error = io_error(transfer, location, at, size, result)
        return Completion(tag, b"", error)


def _address(data: bytes) -> tuple[object, int]:
    """Return what keeps ``data`` where it is, and its address."""
    held = ffi.from_buffer(data)
    return held, int(ffi.cast("uintptr_t", held))
