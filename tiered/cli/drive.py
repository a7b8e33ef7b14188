"""A file of a drive, read and written in blocks through an ``IOBackend``: what the drive gives, without a store around it."""

from __future__ import annotations

import ctypes
import os
import random
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from tiered import MisuseError, TieredError
from tiered.checksum import digest
from tiered.cli.fio import Mode
from tiered.cli.measure import GIB, Meter, Usage, bytes_of
from tiered.cli.stop import StopRequest
from tiered.cli.table import exact_size
from tiered.cli.walk import Order
from tiered.config import open_backend
from tiered.directio import direct_io_alignment
from tiered.interfaces import IOBackend
from tiered.locked import make_direct
from tiered.tiers.dram import DramConfig, DramTier
from tiered.types import BackendName, IORequest, Operation

__all__ = ["Blocks", "Cache", "Checksums", "Drive", "Point"]

Cache = Literal["direct", "buffered"]
Checksums = Literal["off", "on"]
LAYOUT_BLOCK = 4 << 20
UUID = bytes(16)


@dataclass(frozen=True)
class Point:
    """How blocks are moved: what is measured of each backend (and of fio)."""

    mode: Mode
    order: Order
    block: int
    depth: int
    checksums: Checksums = "off"

    def __str__(self) -> str:
        checked = ", checksums" if self.checksums == "on" else ""
        return f"{self.mode} {self.order} {exact_size(self.block)} x {self.depth}{checked}"

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "order": self.order,
            "block_bytes": self.block,
            "depth": self.depth,
            "checksums": self.checksums,
        }


@dataclass(frozen=True)
class Blocks:
    """Result of one pass: ``bytes`` that were moved, ``latencies`` in seconds, of each block from its submission to its end."""

    bytes: int
    usage: Usage
    latencies: array[float]

    @property
    def rate(self) -> float:
        return self.bytes / max(self.usage.seconds, 1e-9)

    @property
    def cpu_seconds_per_gib(self) -> float:
        return self.usage.cpu_seconds / max(self.bytes / GIB, 1e-9)


class Drive:
    """A new file ``folder/name`` of ``nbytes``, written once, and buffers of ``memory`` bytes on huge pages. Close it.

    ``cache``: "direct" is "buffered", too, where the filesystem has no direct I/O (``direct`` says). Raises MisuseError.
    """

    def __init__(self, folder: str, name: str, nbytes: int, memory: int, cache: Cache, stop: StopRequest) -> None:
        self.path, self._nbytes, self._stop = os.path.join(folder, name), nbytes, stop
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._memory = DramTier(DramConfig(max(memory, LAYOUT_BLOCK)))
        self.direct = cache == "direct" and make_direct(self._fd)
        self.alignment = max(512, direct_io_alignment(self._fd)) if self.direct else 1
        contents = bytes_of(self._memory.capacity).numpy()
        ctypes.memmove(self._memory.address, contents.ctypes.data, self._memory.capacity)

    def refuse(self, point: Point) -> None:
        """Raises MisuseError for a block that cannot be."""
        if point.block % self.alignment:
            raise MisuseError(
                f"--block {exact_size(point.block)} is not aligned: direct I/O takes multiples of {self.alignment} bytes here"
            )
        if point.block > self._nbytes:
            raise MisuseError(f"--block {exact_size(point.block)} is more than --size {exact_size(self._nbytes)}")

    def prepare(self) -> None:
        """Write all of it: written extents are written over at another rate than fresh ones."""
        whole = Point("write", "sequential", min(LAYOUT_BLOCK, self._nbytes), 1)
        self.run(whole, "posix", float("inf"))

    def run(self, point: Point, backend: BackendName, seconds: float) -> Blocks:
        """Each block of the file once, as far as ``seconds`` go; what was written is durable in the end.

        Raises TieredError when a block cannot be moved.
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

    def _pass(self, point: Point, ring: IOBackend, order: Iterator[tuple[int, int]], seconds: float) -> Blocks:
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
            self._stop.check()
        if point.mode != "read":
            os.fdatasync(self._fd)
        return Blocks(moved, meter.lap(), latencies)

    def _digest(self, request: IORequest) -> None:
        digest(UUID, 0, 0, request.offset, (ctypes.c_char * request.nbytes).from_address(request.address))

    def close(self) -> None:
        """The file stays, for whoever made the folder."""
        os.close(self._fd)
        self._memory.close()


def _failed(path: str, request: IORequest, result: int) -> str:
    why = os.strerror(-result) if result < 0 else f"{result} of {request.nbytes} bytes"
    return f"{path}: cannot {request.operation.value} at byte {request.offset}: {why}"
