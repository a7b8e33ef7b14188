"""The swapper: moves tensors between DRAM and NVMe through an IOBackend.

A transfer is cut into blocks. Blocks of all transfers share the backend's ring, the more urgent transfer's first, so
the ring does not run empty where one tensor ends and the next begins. Every completion is matched by its tag to its
block, its result is compared with what was asked for, and every piece of a tensor is checksummed on its way down and
checked on its way up, while the blocks after it are still in flight.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from tiered.errors import (
    CorruptionError,
    MisuseError,
    ReadError,
    ShortTransfer,
    TransferError,
    WriteError,
)
from tiered.interfaces import IOBackend
from tiered.types import (
    CHECKSUM_BYTES,
    PIECE_BYTES,
    Completion,
    Direction,
    IOCompletion,
    IORequest,
    Location,
    Operation,
    Slot,
    Transfer,
    Urgency,
)

__all__ = ["DiskConfig", "DiskLink"]

_CONTEXT = struct.Struct("<16sQQQ")  # store UUID, tensor id, generation, offset of the piece in the tensor


@dataclass(frozen=True)
class DiskConfig:
    """``block``: bytes of one request to the drive. ``window``: bytes that may be accepted and unfinished before
    ``start`` refuses; each urgency counts only transfers at least as urgent, so write-backs never shut out a demand.

    1 MiB blocks reach a drive's rate at a depth of 4 when the memory is on huge pages; the window should be larger than
    the ring (block times depth), so that the next transfers are at hand when the first ones' blocks complete.
    """

    block: int = 1 << 20
    window: int = 32 << 20


class _Job:
    """A transfer on its way."""

    __slots__ = ("cursor", "digests", "error", "in_flight", "length", "location", "memory", "missing", "operation", "transfer")

    def __init__(self, transfer: Transfer, location: Location, operation: Operation, memory: int, length: int) -> None:
        self.transfer = transfer
        self.location = location
        self.operation = operation
        self.memory = memory  # address of its first byte
        self.length = length  # bytes to move, padding included
        self.cursor = 0  # bytes handed to the backend; the length, too, when the rest is dropped
        self.in_flight = 0  # blocks
        self.error: TransferError | None = None
        self.digests: list[bytes] = []  # DOWN: checksums of the pieces up to the cursor
        self.missing: list[int] = []  # UP: how many bytes of each piece have not arrived; empty when nothing is checked


class DiskLink:
    """Link between ``dram`` and ``nvme``.

    ``address`` is where the DRAM arena begins (it must stay mapped until ``close``), ``locate`` says where in which file a
    lower slot is, ``uuid`` is the store's, ``alignment`` that of the extents (bytes). The link owns the backend from here on.

    Transfers move their size rounded up to ``alignment``: both slots must have that room. The padding is written as
    zeros. Reads may overtake write-backs; transfers of equal urgency start in order of arrival.
    """

    src = "dram"
    dst = "nvme"

    def __init__(
        self,
        backend: IOBackend,
        *,
        address: int,
        locate: Callable[[Slot], Location],
        uuid: bytes,
        alignment: int,
        config: DiskConfig,
    ) -> None:
        if config.block < 1 or config.window < 1:
            raise MisuseError(f"a block of {config.block} bytes in a window of {config.window} bytes moves nothing")
        if alignment % backend.alignment:
            raise MisuseError(
                f"the {backend.name} backend needs alignment to {backend.alignment} bytes; the store has {alignment}"
            )
        self._backend = backend
        self._address = address
        self._locate = locate
        self._uuid = uuid
        self._alignment = alignment
        self._block = max(alignment, config.block - config.block % alignment)
        self._window = config.window
        self._depth = backend.depth
        self._jobs: dict[int, _Job] = {}  # by the transfer's tag
        self._queues: tuple[deque[_Job], ...] = tuple(deque() for _ in Urgency)  # those with blocks to hand over
        self._accepted = [0 for _ in Urgency]  # bytes of unfinished transfers
        self._blocks: dict[int, tuple[_Job, int, int]] = {}  # in flight, by the request's tag: job, offset, length
        self._next_tag = 0
        self._arrived: list[tuple[_Job, int]] = []  # pieces to check
        self._ended: list[Completion] = []
        self._closed = False

    def start(self, transfer: Transfer) -> bool:
        """Take a transfer; False while the window is full of transfers at least as urgent."""
        assert not self._closed, "start after close"
        assert transfer.tag not in self._jobs, f"tag {transfer.tag} is in flight"
        assert all(fence.query() for fence in transfer.after), "DRAM has no streams, so nothing here waits for a fence"
        if sum(self._accepted[: transfer.urgency + 1]) >= self._window:
            return False
        length = -(-transfer.nbytes // self._alignment) * self._alignment
        assert 0 < length <= min(transfer.upper.nbytes, transfer.lower.nbytes)
        memory = self._address + transfer.upper.offset
        location = self._locate(transfer.lower)
        if transfer.direction is Direction.DOWN:
            job = _Job(transfer, location, Operation.WRITE, memory, length)
            ctypes.memset(memory + transfer.nbytes, 0, length - transfer.nbytes)
        else:
            job = _Job(transfer, location, Operation.READ, memory, length)
            if transfer.checksums:
                whole, rest = divmod(transfer.nbytes, PIECE_BYTES)
                job.missing = [PIECE_BYTES] * whole + ([rest] if rest else [])
                assert len(transfer.checksums) == len(job.missing) * CHECKSUM_BYTES
        self._jobs[transfer.tag] = job
        self._queues[transfer.urgency].append(job)
        self._accepted[transfer.urgency] += length
        self._submit()
        return True

    def promote(self, tag: int, urgency: Urgency) -> None:
        """Make an unfinished transfer more urgent; what has ended or is as urgent already stays as it is."""
        job = self._jobs.get(tag)
        if job is None or job.transfer.urgency <= urgency:
            return
        self._accepted[job.transfer.urgency] -= job.length
        self._accepted[urgency] += job.length
        if job in self._queues[job.transfer.urgency]:
            self._queues[job.transfer.urgency].remove(job)
            self._queues[urgency].append(job)
        job.transfer.urgency = urgency
        self._submit()

    def poll(self, timeout: float) -> list[Completion]:
        deadline = time.monotonic() + timeout if timeout > 0 else 0.0
        while True:
            left = max(0.0, deadline - time.monotonic()) if deadline else 0.0
            touched = [self._account(completion) for completion in self._backend.reap(1 if left else 0, left)]
            self._submit()  # the drive works on while we hash
            self._check_arrived()
            for job in touched:
                self._end(job)
            if self._ended or not left or not self._blocks:
                ended, self._ended = self._ended, []
                return ended

    def fileno(self) -> int:
        return self._backend.fileno()

    def close(self) -> None:
        """Wait for what is in flight and close the backend; what was not handed over yet is dropped. Idempotent."""
        self._closed = True
        self._backend.close()
        self._jobs.clear()
        self._blocks.clear()
        self._arrived.clear()
        self._ended.clear()
        for queue in self._queues:
            queue.clear()

    # Handing over

    def _submit(self) -> None:
        """Fill the ring, most urgent first."""
        room = self._depth - len(self._blocks)
        batch: list[IORequest] = []
        blocks: list[tuple[_Job, int, int]] = []
        for queue in self._queues:
            while queue and queue[0].cursor == queue[0].length:
                queue.popleft()
            for job in queue:
                at = job.cursor
                while at < job.length:
                    if len(batch) == room:
                        self._hand_over(batch, blocks)
                        return
                    size = min(self._block, job.length - at)
                    if job.operation is Operation.WRITE and self._unhashed(job, at + size):
                        if batch:  # hashing takes as long as the drive needs for some blocks: let it have these now
                            if not self._hand_over(batch, blocks):
                                return
                            room -= len(batch)
                            batch, blocks = [], []
                        self._hash_until(job, at + size)
                    batch.append(
                        IORequest(
                            job.operation,
                            job.location.fd,
                            job.location.offset + at,
                            job.memory + at,
                            size,
                            self._next_tag,
                        )
                    )
                    blocks.append((job, at, size))
                    self._next_tag += 1
                    at += size
        self._hand_over(batch, blocks)

    def _hand_over(self, batch: list[IORequest], blocks: list[tuple[_Job, int, int]]) -> bool:
        """Submit; whether the backend took all. What it did not take stays in its queue."""
        taken = self._backend.submit(batch) if batch else 0
        for request, block in zip(batch[:taken], blocks, strict=False):
            job, at, size = block
            self._blocks[request.tag] = block
            job.cursor = at + size
            job.in_flight += 1
        return taken == len(batch)

    def _unhashed(self, job: _Job, end: int) -> bool:
        return len(job.digests) * PIECE_BYTES < min(end, job.transfer.nbytes)

    def _hash_until(self, job: _Job, end: int) -> None:
        """Checksum the pieces that hold the transfer's first ``end`` bytes, before any of them is on its way."""
        while self._unhashed(job, end):
            job.digests.append(self._digest(job, len(job.digests)))

    def _digest(self, job: _Job, piece: int) -> bytes:
        transfer = job.transfer
        offset = piece * PIECE_BYTES
        size = min(PIECE_BYTES, transfer.nbytes - offset)
        state = xxhash.xxh3_128(_CONTEXT.pack(self._uuid, transfer.tensor_id, transfer.generation, offset))
        state.update((ctypes.c_char * size).from_address(job.memory + offset))
        return state.digest()

    # Taking back

    def _account(self, completion: IOCompletion) -> _Job:
        """Match a completion to its block; the job that it belongs to."""
        job, at, size = self._blocks.pop(completion.tag)
        job.in_flight -= 1
        if completion.result != size:
            self._fail(job, _io_error(job, at, size, completion.result))
        elif job.missing and job.error is None:
            end = min(at + size, job.transfer.nbytes)
            for piece in range(at // PIECE_BYTES, -(-end // PIECE_BYTES)):
                job.missing[piece] -= min(end, (piece + 1) * PIECE_BYTES) - max(at, piece * PIECE_BYTES)
                if not job.missing[piece]:
                    self._arrived.append((job, piece))
        return job

    def _check_arrived(self) -> None:
        for job, piece in self._arrived:
            expected = job.transfer.checksums[piece * CHECKSUM_BYTES : (piece + 1) * CHECKSUM_BYTES]
            if job.error is None and self._digest(job, piece) != expected:
                self._fail(job, _corruption(job, piece))
        self._arrived.clear()

    def _fail(self, job: _Job, error: TransferError) -> None:
        """The first error counts; what was not handed over yet is dropped."""
        job.error = job.error or error
        job.cursor = job.length

    def _end(self, job: _Job) -> None:
        """Report the job unless some of it is still to come: its slots go back to the engine."""
        transfer = job.transfer
        if job.in_flight or job.cursor < job.length or self._jobs.pop(transfer.tag, None) is None:
            return
        self._accepted[transfer.urgency] -= job.length
        checksums = b"" if job.error else b"".join(job.digests)
        self._ended.append(Completion(transfer.tag, checksums, job.error))


def _io_error(job: _Job, at: int, size: int, result: int) -> TransferError:
    transfer = job.transfer
    path, offset = job.location.path, job.location.offset + at
    verb = job.operation.value
    if result >= 0:
        what = f"{verb} {result} instead of {size} bytes of"
        return ShortTransfer(what, key=transfer.key, tier=DiskLink.dst, path=path, offset=offset, errno=None)
    kind = ReadError if job.operation is Operation.READ else WriteError
    return kind(f"cannot {verb}", key=transfer.key, tier=DiskLink.dst, path=path, offset=offset, errno=-result)


def _corruption(job: _Job, piece: int) -> CorruptionError:
    transfer = job.transfer
    path, offset = job.location.path, job.location.offset + piece * PIECE_BYTES
    return CorruptionError(
        "wrong checksum in", key=transfer.key, tier=DiskLink.dst, path=path, offset=offset, errno=None
    )
