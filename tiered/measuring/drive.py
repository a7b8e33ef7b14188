"""The drive without a store: blocks of a plain file through the I/O backends, and the rates that bounds of measurements are
computed with."""

from __future__ import annotations

import ctypes
import math
import os
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tiered.errors import MisuseError, TieredError
from tiered.format.data_file import digest
from tiered.format.locked_file import make_direct, makes_direct
from tiered.interfaces import IOBackend
from tiered.io.backends import open_backend
from tiered.measuring.fio import Mode
from tiered.measuring.meters import Meter, MovedBytes, bytes_of
from tiered.system import direct_io_alignment
from tiered.tiers.dram import DramConfig, DramTier
from tiered.types import BackendName, IORequest, Operation, exact_size

__all__ = ["Cache", "Checksums", "Drive", "Order", "Point", "read_rate", "write_rate"]

Order = Literal["sequential", "random"]
Cache = Literal["direct", "buffered"]
Checksums = Literal["off", "on"]
PIECE, DEPTH = 4 << 20, 16
"""Bytes of a block, and blocks in flight, where nothing else is asked for."""
UUID = bytes(16)


@dataclass(frozen=True)
class Point:
    """One combination of mode, order, block size, depth and checksums, which is measured with each backend and with fio."""

    mode: Mode
    order: Order
    block: int
    depth: int
    checksums: Checksums = "off"

    def __str__(self) -> str:
        checked = ", checksums" if self.checksums == "on" else ""
        return f"{self.mode} {self.order} {exact_size(self.block)} x {self.depth}{checked}"

    def as_json(self) -> dict[str, Any]:
        """Return the combination of options for a JSON report."""
        return {
            "mode": self.mode,
            "order": self.order,
            "block_bytes": self.block,
            "depth": self.depth,
            "checksums": self.checksums,
        }


class Drive:
    """Makes a file ``path`` of ``nbytes``, or opens one for ``access="read"``, whose first ``nbytes`` are read. Runs passes
    with buffers of ``memory`` bytes on huge pages, as the pool of a store is: in pages of 4 KiB a block would be 1,024 segments
    for the drive, and the rate a half of what it can do. ``check`` is called in passes, and may raise. Close it.

    Where the filesystem has no direct I/O, ``cache="direct"`` means "buffered" as well, and ``direct`` is False. Raises
    MisuseError.
    """

    def __init__(
        self,
        path: str | Path,
        nbytes: int,
        memory: int = PIECE * DEPTH,
        cache: Cache = "direct",
        check: Callable[[], object] = lambda: None,
        access: Literal["new", "read"] = "new",
    ) -> None:
        self.path, self._nbytes, self._check = str(path), nbytes, check
        new = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._fd = os.open(self.path, (os.O_RDONLY if access == "read" else new) | os.O_CLOEXEC, 0o600)
        self._memory = DramTier(DramConfig(max(memory, PIECE)))
        probe = make_direct if access == "read" else makes_direct  # the second one empties the file
        self.direct = cache == "direct" and probe(self._fd)
        self.alignment = max(512, direct_io_alignment(self._fd)) if self.direct else 1
        contents = bytes_of(self._memory.capacity).numpy()
        ctypes.memmove(self._memory.address, contents.ctypes.data, self._memory.capacity)

    def refuse(self, point: Point) -> None:
        """Raise MisuseError for a block size that this file cannot have."""
        if point.block % self.alignment:
            raise MisuseError(
                f"--block {exact_size(point.block)} is not aligned: direct I/O takes multiples of {self.alignment} bytes here"
            )
        if point.block > self._nbytes:
            raise MisuseError(f"--block {exact_size(point.block)} is more than --size {exact_size(self._nbytes)}")

    def prepare(self) -> None:
        """Write the whole file once, because new extents are written at another rate than existing ones."""
        whole = Point("write", "sequential", min(PIECE, self._nbytes), 1)
        self.run(whole, "posix")

    def reserve(self) -> None:
        """Give a new file its space, where the filesystem can: direct writes that make a file longer wait for each other."""
        with suppress(OSError):
            os.posix_fallocate(self._fd, 0, self._nbytes)

    def run(self, point: Point, backend: BackendName = "auto", seconds: float = math.inf) -> MovedBytes:
        """Move each block of the file once, for at most ``seconds``, and make the written blocks durable.

        Raises TieredError where a block cannot be moved.
        """
        blocks = list(range(self._nbytes // point.block))
        chance = random.Random(point.depth)
        if point.order == "random":
            chance.shuffle(blocks)
        ways = {"read": 0, "write": len(blocks), "mixed": len(blocks) // 2}[point.mode]
        writes = bytearray([1] * ways + [0] * (len(blocks) - ways))
        if point.mode == "mixed":
            chance.shuffle(writes)
        if not self.direct:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with closing(open_backend(backend, point.depth)) as ring:
            return self._pass(point, ring, iter(zip(blocks, writes, strict=True)), seconds)

    def _pass(self, point: Point, ring: IOBackend, order: Iterator[tuple[int, int]], seconds: float) -> MovedBytes:
        block, base, clock = point.block, self._memory.address, time.perf_counter
        free = list(range(point.depth))  # buffers; also the tags
        begun = [0.0] * point.depth
        requests: list[IORequest | None] = [None] * point.depth
        ready: deque[IORequest] = deque()
        latencies = array("d")
        in_flight = moved = 0
        meter = Meter(None)
        deadline = clock() + seconds
        while True:
            while free and clock() < deadline and (found := next(order, None)) is not None:
                number, write = found
                slot = free.pop()
                operation = Operation.WRITE if write else Operation.READ
                request = IORequest(operation, self._fd, number * block, base + slot * block, block, slot)
                requests[slot] = request
                ready.append(request)
                if write and point.checksums == "on":
                    self._digest(request)
            if ready:
                now = clock()
                taken = ring.submit(list(ready))
                in_flight += taken
                for _ in range(taken):
                    begun[ready.popleft().tag] = now
            if not in_flight:
                break
            for done in ring.reap(1, 1.0):
                latencies.append(clock() - begun[done.tag])
                in_flight -= 1
                done_request = requests[done.tag]
                assert done_request is not None
                if done.result != block:
                    raise TieredError(_failed(self.path, done_request, done.result))
                if point.checksums == "on" and done_request.operation is Operation.READ:
                    self._digest(done_request)
                moved += block
                free.append(done.tag)
            self._check()
        if point.mode != "read":
            os.fdatasync(self._fd)
        return MovedBytes.of(meter.lap(), moved, latencies)

    def _digest(self, request: IORequest) -> None:
        digest(UUID, 0, 0, request.offset, (ctypes.c_char * request.nbytes).from_address(request.address))

    def close(self) -> None:
        """Close the file and free the buffers. The file itself stays, to be removed with its folder."""
        os.close(self._fd)
        self._memory.close()


def _failed(path: str, request: IORequest, result: int) -> str:
    why = os.strerror(-result) if result < 0 else f"{result} of {request.nbytes} bytes"
    return f"{path}: cannot {request.operation.value} at byte {request.offset}: {why}"


def read_rate(files: Sequence[Path], most: int = 4 << 30) -> float:
    """Return the bytes per second at which ``files`` are read, the first ``most`` bytes of each."""
    moved, seconds = 0, 0.0
    for file in files:
        with closing(Drive(file, min(most, file.stat().st_size), access="read")) as drive:
            found = drive.run(Point("read", "sequential", PIECE, DEPTH))
        moved, seconds = moved + found.bytes, seconds + found.seconds
    return moved / seconds


def write_rate(file: Path, nbytes: int) -> float:
    """Return the bytes per second at which a new ``file`` is written, fdatasync included. Removes it."""
    try:
        with closing(Drive(file, nbytes)) as drive:
            drive.reserve()
            return drive.run(Point("write", "sequential", PIECE, DEPTH)).rate
    finally:
        file.unlink()
