"""Fakes whose completions the test releases, in the order and with the results that it chooses.

They may be used from two threads: a test releases while an engine waits in ``reap`` or ``poll``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import xxhash

from tiered.allocator import FreeSpace
from tiered.engine.residency import Entry
from tiered.errors import CorruptionError, TieredError
from tiered.interfaces import IOBackend, NativeRing, Streams
from tiered.types import (
    CHECKSUM_BYTES,
    PIECE_BYTES,
    Completion,
    Direction,
    IOCompletion,
    IORequest,
    Key,
    Operation,
    Slot,
    Transfer,
    Urgency,
)

__all__ = [
    "FakeTier",
    "InstantBackend",
    "ManualBackend",
    "ManualLink",
    "MovableTier",
    "NativeOver",
    "NoDraft",
    "PythonOver",
    "fake_checksums",
    "in_child",
    "readable",
    "wait_readable",
]


def in_child(body: Callable[[], object]) -> str:
    """What ``body`` returns, as a string, when run in a forked child; fails with its traceback or exit status."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = f"returned {body()}"
        except BaseException:
            answer = traceback.format_exc()
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}"
    assert answer.startswith("returned "), answer
    return answer.removeprefix("returned ")


class _Signal:
    """An fd that is readable while it is set."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def readable(fd: int) -> bool:
    """Whether ``fd`` polls readable now."""
    return bool(select.select([fd], [], [], 0)[0])


def wait_readable(fd: int) -> None:
    """Wait until ``fd`` polls readable; fails where it never does."""
    assert select.select([fd], [], [], 60)[0], "the descriptor did not become readable"


class ManualBackend:
    """IOBackend over files in memory. Nothing completes before the test says so.

    ``files`` holds a bytearray per fd number (the numbers are made up). Bytes move at ``complete``.
    ``refuse_after(n)`` lets the next ``submit`` take at most ``n``.
    """

    name = "manual"

    def __init__(self, depth: int = 16, alignment: int = 512, files: dict[int, bytearray] | None = None) -> None:
        self.depth = depth
        self.alignment = alignment
        self.files = files if files is not None else {}
        self.pending: dict[int, IORequest] = {}  # by tag, in order of submission
        self.submitted: list[IORequest] = []  # all that were ever taken
        self.offered: list[int] = []  # how many each submit was given
        self.batches: list[int] = []  # and how many it took
        self.closed = False
        self._most_taken: int | None = None
        self._done: list[IOCompletion] = []
        self._signal = _Signal()
        self._changed = threading.Condition()

    # what the code under test calls

    def submit(self, batch: Sequence[IORequest]) -> int:
        with self._changed:
            assert not self.closed, "submit after close"
            self.offered.append(len(batch))
            room = self.depth - len(self.pending) - len(self._done)
            if self._most_taken is not None:
                room, self._most_taken = min(room, self._most_taken), None
            taken = batch[:room]
            for request in taken:
                assert request.tag not in self.pending, f"tag {request.tag} is in flight twice"
                assert not (request.offset | request.address | request.nbytes) % self.alignment, (
                    f"misaligned: {request}"
                )
                assert request.nbytes > 0
                self.pending[request.tag] = request
            self.submitted.extend(taken)
            self.batches.append(len(taken))
            return len(taken)

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        with self._changed:
            if min_events > 0:
                self._changed.wait_for(
                    lambda: len(self._done) >= min_events or not (self.pending or self._done), timeout
                )
            done, self._done = self._done, []
            self._signal.clear()
            return done

    def fileno(self) -> int:
        return self._signal.fd

    def close(self) -> None:
        """What is in flight ends as it would on a healthy device."""
        if not self.closed:
            self.complete_all()
            self.closed = True
            self._signal.close()

    # what the test calls

    def complete(self, tag: int, result: int | None = None) -> None:
        """End one request: whole (None), short (so many bytes) or with a negative errno."""
        with self._changed:
            request = self.pending.pop(tag)
            if result is None:
                result = request.nbytes
            if result > 0:
                result = self._move(request, result)
            self._done.append(IOCompletion(tag, result))
            self._signal.set()
            self._changed.notify_all()

    def complete_all(self, order: Callable[[list[int]], Iterable[int]] = lambda tags: tags) -> None:
        """End all that is in flight now, whole, in the order that ``order`` makes of their tags."""
        with self._changed:  # a test and an engine may both end what is there
            for tag in list(order(list(self.pending))):
                self.complete(tag)

    def refuse_after(self, taken: int) -> None:
        self._most_taken = taken

    def _move(self, request: IORequest, nbytes: int) -> int:
        file = self.files.setdefault(request.fd, bytearray())
        end = request.offset + nbytes
        if request.operation is Operation.WRITE:
            file.extend(bytes(max(0, end - len(file))))
            file[request.offset : end] = ctypes.string_at(request.address, nbytes)
            return nbytes
        data = bytes(file[request.offset : end])
        ctypes.memmove(request.address, data, len(data))
        return len(data)


class InstantBackend(ManualBackend):
    """The same files in memory; everything that was submitted is complete at the next ``reap``."""

    name = "instant"

    def submit(self, batch: Sequence[IORequest]) -> int:
        taken = super().submit(batch)
        self._signal.set()
        return taken

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        self.complete_all()
        return super().reap(0, 0)


class PythonOver:
    """An ``IOBackend`` over another one, whose ring no C code may drive."""

    def __init__(self, backend: IOBackend) -> None:
        self.name, self.alignment, self.depth = backend.name, backend.alignment, backend.depth
        self.submit, self.reap, self.fileno, self.close = backend.submit, backend.reap, backend.fileno, backend.close


class NativeOver:
    """A ``NativeBackend`` over one of Python's: C code calls back into it. Needs the native disk link."""

    def __init__(self, backend: IOBackend) -> None:
        from tiered.links._disk import ffi

        self.backend, self._ffi = backend, ffi
        self.name, self.alignment, self.depth = backend.name, backend.alignment, backend.depth
        self.submit, self.reap, self.fileno, self.close = backend.submit, backend.reap, backend.fileno, backend.close
        self._functions = [
            ffi.callback("int(void *, const ring_request *, unsigned)", self._submitted, error=-errno.EIO),
            ffi.callback("int(void *, unsigned, int64_t, ring_completion *, unsigned)", self._reaped, error=-errno.EIO),
            ffi.callback("int64_t(void)", lambda: int(time.monotonic() * 1e9)),
        ]

    @property
    def native(self) -> NativeRing:
        submit, reap, now = (int(self._ffi.cast("uintptr_t", one)) for one in self._functions)
        return NativeRing(0, submit, reap, now, lambda code: AssertionError(f"the fake answered {code}"))

    def _submitted(self, _: object, requests: Any, count: int) -> int:
        found = [requests[number] for number in range(count)]
        ways = (Operation.READ, Operation.WRITE)
        return self.backend.submit(
            [IORequest(ways[one.operation], one.fd, one.offset, one.address, one.nbytes, one.tag) for one in found]
        )

    def _reaped(self, _: object, at_least: int, timeout: int, out: Any, room: int) -> int:
        completions = self.backend.reap(at_least, timeout / 1e9)
        assert len(completions) <= room
        for number, completion in enumerate(completions):
            out[number].tag, out[number].result = completion
        return len(completions)

class FakeTier:
    """A tier of any name over plain memory."""

    streams: Streams | None = None

    def __init__(self, name: str, capacity: int, alignment: int = 1) -> None:
        self.name = name
        self.closed = False
        self._space = FreeSpace(capacity, alignment)
        self.alignment = alignment
        self.arena = (ctypes.c_char * max(1, capacity))()

    @property
    def capacity(self) -> int:
        return self._space.capacity

    @property
    def address(self) -> int:
        return ctypes.addressof(self.arena)

    @property
    def used(self) -> int:
        return self._space.used_bytes

    @property
    def largest(self) -> int:
        return self._space.largest

    def allocate(self, nbytes: int) -> Slot | None:
        return self._space.allocate(nbytes)

    @property
    def slots(self) -> Sequence[Slot]:
        return self._space.slots

    def free(self, slot: Slot) -> None:
        self._space.free(slot.offset, slot.nbytes)

    def restore(self, slots: Iterable[Slot]) -> None:
        self._space.restore((slot.offset, slot.nbytes) for slot in slots)

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        assert not self.closed, "tensor after close"
        assert 1 <= nbytes <= slot.nbytes
        owner = (ctypes.c_char * nbytes).from_buffer(self.arena, slot.offset)
        return torch.frombuffer(owner, dtype=torch.uint8), owner

    def close(self) -> None:
        self.closed = True

    def read(self, slot: Slot, nbytes: int) -> bytes:
        assert nbytes <= slot.nbytes
        return ctypes.string_at(self.address + slot.offset, nbytes)

    def write(self, slot: Slot, data: bytes) -> None:
        assert len(data) <= slot.nbytes
        ctypes.memmove(self.address + slot.offset, data, len(data))


class MovableTier(FakeTier):
    """One whose slots can be moved."""

    def move(self, slot: Slot, offset: int) -> Slot:
        self._space.move(slot.offset, slot.nbytes, offset)
        ctypes.memmove(self.address + offset, self.address + slot.offset, slot.nbytes)
        return Slot(offset, slot.nbytes)


def fake_checksums(transfer: Transfer, data: bytes) -> bytes:
    """Checksums that a ManualLink may use: of the right shape, and dependent on tensor, generation and bytes."""
    context = f"{transfer.tensor_id} {transfer.generation} ".encode()
    pieces = (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
    return b"".join(xxhash.xxh3_128_digest(context + piece) for piece in pieces)


class ManualLink:
    """Link between two FakeTiers. Bytes move at ``complete``, which the test calls.

    ``limit`` is how many transfers it takes at once. With ``checksums`` (such as ``fake_checksums``) it behaves as a
    disk does: a DOWN transfer reports them, an UP transfer that names others ends with CorruptionError.
    """

    def __init__(
        self,
        upper: FakeTier,
        lower: FakeTier,
        limit: int = 1 << 30,
        checksums: Callable[[Transfer, bytes], bytes] | None = None,
    ) -> None:
        self.src, self.dst = upper.name, lower.name
        self.upper, self.lower, self.limit = upper, lower, limit
        self.pending: dict[int, Transfer] = {}  # by tag, in order of start
        self.started: list[Transfer] = []  # all that were ever taken
        self.promoted: list[int] = []  # tags, in the order in which they became more urgent
        self.refused = 0
        self.closed = False
        self._checksums = checksums
        self._done: list[Completion] = []
        self._signal = _Signal()
        self._changed = threading.Condition()

    # what the code under test calls

    def start(self, transfer: Transfer) -> bool:
        with self._changed:
            assert not self.closed, "start after close"
            if len(self.pending) + len(self._done) >= self.limit:
                self.refused += 1
                return False
            assert transfer.tag not in self.pending, f"tag {transfer.tag} is in flight twice"
            assert 1 <= transfer.nbytes <= min(transfer.upper.nbytes, transfer.lower.nbytes)
            for other in self.pending.values():
                for mine, theirs in ((transfer.upper, other.upper), (transfer.lower, other.lower)):
                    apart = mine.offset + mine.nbytes <= theirs.offset or theirs.offset + theirs.nbytes <= mine.offset
                    assert apart, f"{transfer} uses a slot of {other}, which is in flight"
            self.pending[transfer.tag] = transfer
            self.started.append(transfer)
            self._changed.notify_all()
            return True

    def promote(self, tag: int, urgency: Urgency) -> None:
        """Only remembered: the test decides what completes first."""
        with self._changed:
            if tag in self.pending and self.pending[tag].urgency > urgency:
                self.pending[tag].urgency = urgency
                self.promoted.append(tag)

    def poll(self, timeout: float) -> list[Completion]:
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(lambda: self._done or not self.pending, timeout)
            done, self._done = self._done, []
            self._signal.clear()
            return done

    def fileno(self) -> int:
        return self._signal.fd

    def close(self) -> None:
        """What is in flight ends well."""
        if not self.closed:
            self.complete_all()
            self.closed = True
            self._signal.close()

    # what the test calls

    def complete(self, tag: int, error: TieredError | None = None) -> None:
        """End one transfer: its bytes move now, or, with ``error``, do not."""
        with self._changed:
            transfer = self.pending.pop(tag)
            checksums = b""
            if error is None:
                checksums, error = self._move(transfer)
            self._done.append(Completion(tag, checksums, error))
            self._signal.set()
            self._changed.notify_all()

    def complete_all(self, order: Callable[[list[int]], Iterable[int]] = lambda tags: tags) -> None:
        for tag in list(order(list(self.pending))):
            self.complete(tag)

    def wait_started(self, count: int = 1, timeout: float = 60) -> None:
        """Wait until ``count`` transfers are in flight (for tests with an engine thread)."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.pending) >= count, timeout), f"{len(self.pending)} started"

    def _move(self, transfer: Transfer) -> tuple[bytes, TieredError | None]:
        if transfer.direction is Direction.DOWN:
            data = self.upper.read(transfer.upper, transfer.nbytes)
            self.lower.write(transfer.lower, data)
            return (self._checksums(transfer, data) if self._checksums else b""), None
        data = self.lower.read(transfer.lower, transfer.nbytes)
        if self._checksums and transfer.checksums:
            assert len(transfer.checksums) % CHECKSUM_BYTES == 0
            if self._checksums(transfer, data) != transfer.checksums:
                where = transfer.lower.offset
                return b"", CorruptionError(
                    "wrong checksum in", key=transfer.key, tier=self.dst, path=None, offset=where, errno=None
                )
        self.upper.write(transfer.upper, data)
        return b"", None


class NoDraft:
    """A flush's ``Draft`` that nobody reads."""

    def begin(self, entries: Iterator[Entry], frozen: dict[Key, None]) -> None: ...

    def add(self, entry: Entry) -> None: ...

    def end(self) -> None: ...

    def drop(self) -> None: ...
