"""The disk link: moves tensors between DRAM and NVMe through an IOBackend.

A transfer is cut into blocks. Blocks of all transfers share the backend's ring, the more urgent transfer's first, so the ring
does not run empty where one tensor ends and the next begins. Every completion is matched by its tag to its block, and its
result is compared with the request; every piece of a tensor is checksummed on its way down and verified on its way up. To keep
the drive busy, pieces to be written next are hashed before the ring has room for them.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiered.errors import CorruptionError, MisuseError, ReadError, ShortTransfer, TransferError, WriteError, whole_number
from tiered.format import stripes
from tiered.format.data_file import digest
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

__all__ = ["DiskConfig", "DiskLink", "block_bytes", "io_error", "refuse_alignment", "why_corrupt"]


LATENCY = 0.006
"""Seconds that a demand may wait for write-backs in flight; where half of ``flight`` takes longer, it may wait for that."""


_READ, _WRITE, _DOWN = Operation.READ, Operation.WRITE, Direction.DOWN  # before Python 3.12 enums look members up slowly
_SPECULATIVE, _WRITEBACK = Urgency.SPECULATIVE, Urgency.WRITEBACK


@dataclass(frozen=True)
class DiskConfig:
    """Configuration, sizes in bytes. ``block``: one request to the drive. ``flight``: most bytes in flight; write-backs without
    a waiting caller have half of it, and more on a drive that writes more within LATENCY. ``window``: bytes that ``start``
    accepts in each direction before it refuses; each urgency counts only transfers at least as urgent, so write-backs never
    shut out a demand.

    On huge pages a block of 4 MiB is two segments and as fast as a smaller one, at a quarter of the calls of 1 MiB. 8 MiB in
    flight reach a drive's rate (PERFORMANCE), as long as the next blocks are submitted at once; a late demand waits for
    everything in flight. So of speculative reads only one block is, and none beside others. The window should be larger, so
    that the next transfers are at hand when blocks complete.

    ``together``: while blocks are in flight, transfers that are started wait for the next ``poll``, or until they have that
    many bytes together: a system call for each small one took an eighth of the time of its transfer.
    """

    block: int = PIECE_BYTES
    flight: int = 24 << 20
    window: int = 64 << 20
    together: int = 512 << 10

    def __post_init__(self) -> None:
        for name in ("block", "flight", "window"):
            whole_number(f"{name} of a link to a disk is a number of bytes", getattr(self, name))


class _Job:
    """A transfer that has not ended."""

    __slots__ = (
        "cursor", "digests", "error", "in_flight", "length", "location", "memory", "missing", "transfer", "unchecked", "way"
    )  # fmt: skip

    def __init__(self, transfer: Transfer, location: Location, way: Operation, memory: int, length: int) -> None:
        self.transfer = transfer
        self.location = location
        self.way = way
        self.memory = memory  # address of its first byte
        self.length = length  # bytes to move, padding included
        self.cursor = 0  # bytes submitted to the backend; equals the length, too, when the rest is dropped
        self.in_flight = 0  # number of blocks
        self.error: TransferError | None = None
        self.digests: list[bytes] = []  # DOWN: checksums of its first pieces
        self.missing: list[int] = []  # UP: bytes of each piece that have not arrived; empty when nothing is verified
        self.unchecked = 0  # UP: pieces that have arrived completely and wait to be verified

    def unhashed(self, end: int) -> bool:
        """Return whether some of the first ``end`` bytes, which are to be written, have no checksum yet."""
        return self.way is _WRITE and len(self.digests) * PIECE_BYTES < min(end, self.transfer.nbytes)


class DiskLink:
    """Link between ``dram`` and ``nvme``.

    ``address`` is where the DRAM arena begins (it must stay mapped until ``close``), ``locate`` returns the file and offset of
    a lower slot, ``uuid`` is the store's, ``alignment`` that of the extents (bytes). The link owns the backend from here on.

    Transfers move their size rounded up to ``alignment``: both slots must have that room. The padding is written as zeros.
    Reads may overtake write-backs; transfers of equal urgency start in order of arrival.
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
        refuse_alignment(backend, alignment)
        self._backend = backend
        self._address = address
        self._locate = locate
        self._uuid = uuid
        self._alignment = alignment
        self._block = block_bytes(config, alignment)
        self._flight = config.flight
        self._window, self._together = config.window, config.together
        self._depth = backend.depth
        self._jobs: dict[int, _Job] = {}  # by the transfer's tag
        self._queues = {(urgency, way): deque[_Job]() for urgency in Urgency for way in Operation}  # jobs with blocks to submit
        self._by_urgency = [
            (self._queues[urgency, _READ], self._queues[urgency, _WRITE]) for urgency in Urgency
        ]
        self._accepted = {way: [0 for _ in Urgency] for way in Operation}  # bytes of unfinished transfers
        self._blocks: dict[int, tuple[_Job, int, int]] = {}  # in flight, by the request's tag: job, offset, length
        self._bytes_in_flight = dict.fromkeys(Operation, 0)
        self._writeback_limit = config.flight // 2  # most bytes of write-backs in flight
        self._counted, self._since = 0, 0.0  # bytes written without a pause, and the time when that began
        self._next_tag = 0
        self._arrived: deque[tuple[_Job, int]] = deque()  # pieces to verify
        self._unhashed: deque[_Job] = deque()  # jobs to be written that may lack checksums
        self._ended: list[Completion] = []
        self._unsubmitted = 0  # bytes of transfers that were started since blocks were submitted last
        self.hashed = 0
        """Pieces that were hashed or verified so far."""
        self._closed = False

    def start(self, transfer: Transfer) -> bool:
        """Take a transfer; return False while the window is full of transfers at least as urgent."""
        assert not self._closed, "start after close"
        assert transfer.tag not in self._jobs, f"tag {transfer.tag} is in flight"
        if transfer.after:
            assert all(fence.query() for fence in transfer.after), "DRAM has no streams, so nothing here waits for a fence"
        way = _WRITE if transfer.direction is _DOWN else _READ
        if sum(self._accepted[way][: transfer.urgency + 1]) >= self._window:
            return False
        length = -(-transfer.nbytes // self._alignment) * self._alignment
        assert 0 < length <= min(transfer.upper.nbytes, transfer.lower.nbytes - transfer.begin)
        job = _Job(transfer, self._locate(transfer.lower), way, self._address + transfer.upper.offset, length)
        if way is _WRITE:
            if length > transfer.nbytes:
                ctypes.memset(job.memory + transfer.nbytes, 0, length - transfer.nbytes)
            self._unhashed.append(job)
            if not any(self._accepted[way]):  # after a pause the drive's rate may have changed
                self._counted, self._since, self._writeback_limit = 0, time.monotonic(), self._flight // 2
        elif transfer.checksums:
            whole, rest = divmod(transfer.nbytes, PIECE_BYTES)
            job.missing = [PIECE_BYTES] * whole + ([rest] if rest else [])
            assert len(transfer.checksums) == len(job.missing) * CHECKSUM_BYTES
        self._jobs[transfer.tag] = job
        self._queues[transfer.urgency, way].append(job)
        self._accepted[way][transfer.urgency] += length
        self._unsubmitted += length
        if not self._blocks or self._unsubmitted >= self._together:
            self._submit()
        return True

    def promote(self, tag: int, urgency: Urgency) -> None:
        """Raise the urgency of an unfinished transfer; one that has ended or is as urgent already stays unchanged."""
        job = self._jobs.get(tag)
        if job is None or job.transfer.urgency <= urgency:
            return
        accepted, queue = self._accepted[job.way], self._queues[job.transfer.urgency, job.way]
        accepted[job.transfer.urgency] -= job.length
        accepted[urgency] += job.length
        if job in queue:
            queue.remove(job)
            self._queues[urgency, job.way].append(job)
        job.transfer.urgency = urgency
        self._submit()

    def poll(self, timeout: float) -> list[Completion]:
        deadline = time.monotonic() + timeout if timeout > 0 else 0.0
        while True:
            left = max(0.0, deadline - time.monotonic()) if deadline else 0.0
            if self._unsubmitted:
                self._submit()
            wait = 0.0 if self._arrived or (self._unhashed and self._to_hash()) else left
            completions = self._backend.reap(1 if wait else 0, wait)
            for completion in completions:
                self._account(completion)
            if completions:
                if self._counted >= self._window:
                    self._measure()
                if any(self._queues.values()):
                    self._submit()
            worked = bool(self._arrived or self._unhashed) and self._hash_some()
            if self._ended or not (worked or (left and self._blocks)):
                ended, self._ended = self._ended, []
                return ended

    def fileno(self) -> int:
        return self._backend.fileno()

    def close(self) -> None:
        """Wait for the blocks in flight and close the backend; blocks that were not submitted are dropped. Idempotent."""
        self._closed = True
        self._backend.close()
        self._jobs.clear()
        self._blocks.clear()
        self._arrived.clear()
        self._unhashed.clear()
        self._ended.clear()
        for queue in self._queues.values():
            queue.clear()

    # Submission

    def _submit(self) -> None:
        """Fill the ring, the most urgent blocks first. The room that is left is kept for an urgent block that is too large for
        it. A job leaves its queue with its last block."""
        self._unsubmitted = 0
        batch: list[IORequest] = []
        for queue, most in self._by_turn():
            while queue:
                job = queue[0]
                while job.cursor < job.length:
                    size = min(self._block, job.length - job.cursor)
                    if job.location.parts:  # a block is in one file
                        size = min(size, stripes.rest(job.cursor))
                    in_flight = self._bytes_in_flight[_READ] + self._bytes_in_flight[_WRITE]
                    if len(self._blocks) == self._depth or (in_flight and in_flight + size > self._flight):
                        self._submit_batch(batch)
                        return
                    if in_flight and self._bytes_in_flight[job.way] + size > most:
                        break  # this direction has its share: continue with the others
                    if job.way is _WRITE and job.unhashed(job.cursor + size):
                        if batch and not self._submit_batch(batch):  # hashing takes time, so the drive gets these now
                            return
                        batch = []
                        self._hash_next(job)
                        while job.unhashed(job.cursor + size):
                            self._hash_next(job)
                    batch.append(self._begin_block(job, size))
                if job.cursor < job.length:
                    break
                queue.popleft()
        if batch:
            self._submit_batch(batch)

    def _by_turn(self) -> list[tuple[deque[_Job], int]]:
        """Return the queues, the most urgent first, each with the bytes that its direction may have in flight. Among equals
        reads go first, because a computation waits for them; but a quarter of the flight is the writes'. Write-backs have their
        own limit."""
        found = []
        for urgency, (reads, writes) in enumerate(self._by_urgency):
            if reads and writes:
                found.append((writes, self._flight // 4))
            if reads:
                found.append((reads, self._block if urgency == _SPECULATIVE else self._flight))
            if writes:
                found.append((writes, self._writeback_limit if urgency == _WRITEBACK else self._flight))
        return found

    def _begin_block(self, job: _Job, size: int) -> IORequest:
        """Return the next block of ``job`` as a request, in flight from here on."""
        tag, at = self._next_tag, job.cursor
        self._next_tag += 1
        self._blocks[tag] = (job, at, size)
        self._bytes_in_flight[job.way] += size
        job.cursor += size
        job.in_flight += 1
        fd, offset, _, parts = job.location
        if parts:
            fd, offset, _, _ = stripes.located(job.location, job.transfer.begin + at)
        else:
            offset += job.transfer.begin + at
        return IORequest(job.way, fd, offset, job.memory + at, size, tag)

    def _end_block(self, tag: int) -> tuple[_Job, int, int]:
        """Undo ``_begin_block``, but for the cursor; return job, offset and length."""
        job, at, size = self._blocks.pop(tag)
        self._bytes_in_flight[job.way] -= size
        job.in_flight -= 1
        return job, at, size

    def _submit_batch(self, batch: list[IORequest]) -> bool:
        """Submit the batch; return whether the backend took all. Blocks that it did not take wait in their queues again."""
        taken = self._backend.submit(batch) if batch else 0
        for request in reversed(batch[taken:]):
            job, at, _ = self._end_block(request.tag)
            if job.cursor == job.length:  # it has left its queue
                self._queues[job.transfer.urgency, job.way].appendleft(job)
            job.cursor = at
        return taken == len(batch)

    # Checksums

    def _hash_some(self) -> bool:
        """Verify pieces that have arrived, then hash pieces to be written, about one piece in all; return False if there was
        none."""
        left = PIECE_BYTES
        while left > 0 and self._arrived:
            left -= self._check(*self._arrived.popleft())
        while left > 0 and (job := self._to_hash()) is not None:
            left -= self._hash_next(job)
        return left < PIECE_BYTES

    def _to_hash(self) -> _Job | None:
        """Return the job whose pieces to hash next, if any; of a large one no more than the ring takes, because others wait."""
        while self._unhashed:
            job = self._unhashed[0]
            if job.error is None and job.unhashed(job.length):
                return job if job.unhashed(job.cursor + self._flight) else None
            self._unhashed.popleft()
        return None

    def _check(self, job: _Job, piece: int) -> int:
        """Verify a piece that has arrived; return its bytes."""
        found, nbytes = self._digest(job, piece)
        if job.error is None and found != job.transfer.checksums[piece * CHECKSUM_BYTES : (piece + 1) * CHECKSUM_BYTES]:
            self._fail(job, why_corrupt(job.transfer, job.location, piece * PIECE_BYTES))
        job.unchecked -= 1
        self._end_if_over(job)
        return nbytes

    def _hash_next(self, job: _Job) -> int:
        """Hash the next piece of ``job``, which is to be written; return its bytes."""
        found, nbytes = self._digest(job, len(job.digests))
        job.digests.append(found)
        return nbytes

    def _digest(self, job: _Job, piece: int) -> tuple[bytes, int]:
        transfer, offset = job.transfer, piece * PIECE_BYTES
        nbytes = min(PIECE_BYTES, transfer.nbytes - offset)
        memory = (ctypes.c_char * nbytes).from_address(job.memory + offset)
        self.hashed += 1
        return digest(self._uuid, transfer.tensor_id, transfer.generation, transfer.begin + offset, memory), nbytes

    # Completions

    def _account(self, completion: IOCompletion) -> None:
        """Match a completion to its block, and update the piece and the job that it belongs to."""
        job, at, size = self._end_block(completion.tag)
        if job.way is _WRITE and completion.result == size:
            self._counted += size
        # Of a read the tensor's own bytes are enough: a file that was cut off within padding has lost nothing.
        own = max(0, job.transfer.nbytes - at)
        if completion.result != size and not (job.way is _READ and own <= completion.result < size):
            self._fail(job, io_error(job.transfer, job.location, at, size, completion.result))
        elif job.missing and job.error is None:
            end = min(at + size, job.transfer.nbytes)
            for piece in range(at // PIECE_BYTES, -(-end // PIECE_BYTES)):
                job.missing[piece] -= min(end, (piece + 1) * PIECE_BYTES) - max(at, piece * PIECE_BYTES)
                if not job.missing[piece]:
                    job.unchecked += 1
                    self._arrived.append((job, piece))
        if not job.unchecked:
            self._end_if_over(job)

    def _measure(self) -> None:
        """Set the limit of write-backs by the drive's rate: what a late demand may find before it in the ring."""
        now = time.monotonic()
        rate = self._counted / max(now - self._since, 1e-9)
        self._writeback_limit = min(self._flight, max(self._flight // 2, int(rate * LATENCY)))
        self._counted, self._since = 0, now

    def _fail(self, job: _Job, error: TransferError) -> None:
        """Record the first error of the job, and drop its blocks that were not submitted."""
        job.error = job.error or error
        job.cursor = job.length

    def _end_if_over(self, job: _Job) -> None:
        """Report the job when its last block and check have ended; its slots then go back to the engine."""
        if job.in_flight or job.unchecked or job.cursor < job.length:
            return
        transfer = job.transfer
        del self._jobs[transfer.tag]
        self._accepted[job.way][transfer.urgency] -= job.length
        checksums = b"" if job.error else b"".join(job.digests)
        self._ended.append(Completion(transfer.tag, checksums, job.error))


def refuse_alignment(backend: IOBackend, alignment: int) -> None:
    """Raise MisuseError where ``backend`` needs more than the ``alignment`` of the extents."""
    if alignment % backend.alignment:
        raise MisuseError(f"the {backend.name} backend needs alignment to {backend.alignment} bytes; the store has {alignment}")


def block_bytes(config: DiskConfig, alignment: int) -> int:
    """Return the bytes of a whole block."""
    return max(alignment, config.block - config.block % alignment)


def io_error(transfer: Transfer, location: Location, at: int, size: int, result: int) -> TransferError:
    """Return the error of a transfer whose block of ``size`` bytes at byte ``at`` came back with ``result``."""
    _, offset, path, _ = stripes.located(location, transfer.begin + at)
    way = _WRITE if transfer.direction is _DOWN else _READ
    verb = way.value
    if result >= 0:
        what = f"{verb} {result} instead of {size} bytes of"
        return ShortTransfer(what, key=transfer.key, tier=DiskLink.dst, path=path, offset=offset, errno=None)
    kind = ReadError if way is _READ else WriteError
    return kind(f"cannot {verb}", key=transfer.key, tier=DiskLink.dst, path=path, offset=offset, errno=-result)


def why_corrupt(transfer: Transfer, location: Location, at: int) -> CorruptionError:
    """Return the error of a transfer whose piece at byte ``at`` has another digest."""
    _, offset, path, _ = stripes.located(location, transfer.begin + at)
    return CorruptionError("wrong checksum in", key=transfer.key, tier=DiskLink.dst, path=path, offset=offset, errno=None)
