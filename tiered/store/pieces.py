"""Read tensors of commits from data files into memory that the caller has, with nothing of an open store but its link."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tiered.errors import ManifestError, StoreClosed, TieredError
from tiered.format.manifest import TensorRecord
from tiered.io.backends import open_backend
from tiered.links.disk import DiskConfig
from tiered.links.native import open_disk_link
from tiered.tiers.disk import Disk, OpenFile
from tiered.types import CHECKSUM_BYTES, LARGEST, PIECE_BYTES, BackendName, Direction, Slot, Transfer, Urgency

__all__ = ["DEPTH", "Arriving", "PieceReader", "aligned"]

DEPTH = 8
"""Pieces that one reader has in flight, at most."""


@dataclass(eq=False)
class Arriving:
    """A read of ``nbytes`` of a tensor, from ``begin`` on, into the memory at ``address``; ``memory`` is what must not be freed
    before it has ``ended``. ``error`` is then why they did not arrive."""

    record: TensorRecord
    begin: int
    nbytes: int
    address: int
    memory: object = None
    ended: bool = False
    error: TieredError | None = None


class PieceReader:
    """Reads of the tensors whose extents are on ``disk``. What arrives is compared with its checksums. For one thread."""

    def __init__(self, disk: Disk[OpenFile], backend: BackendName = "auto") -> None:
        """Open a link to the files of ``disk``. Raises what ``open_backend`` raises."""
        self._disk = disk
        self._link = open_disk_link(
            open_backend(backend, DEPTH),
            address=0,  # an upper slot begins at an address
            locate=disk.locate,
            uuid=disk.uuid,
            alignment=disk.alignment,
            config=DiskConfig(flight=DEPTH * PIECE_BYTES, window=LARGEST),  # what is begun waits here
        )
        self._under_way: dict[int, Arriving] = {}
        self._refused: list[Arriving] = []
        self._next_tag = 0
        self.closed = False

    def room(self, nbytes: int) -> int:
        """Return how many bytes at an aligned address ``begin`` needs for ``nbytes``."""
        return -(-nbytes // self._disk.alignment) * self._disk.alignment

    def begin(self, record: TensorRecord, begin: int, nbytes: int, address: int, memory: object = None) -> Arriving:
        """Begin to read ``nbytes`` of a tensor, up to a multiple of PIECE_BYTES or its end, from the multiple ``begin`` on."""
        arriving = Arriving(record, begin, nbytes, address, memory)
        extent, tag = record.extent, self._next_tag
        assert extent is not None
        if extent.offset % self._disk.alignment or begin + self.room(nbytes) > extent.nbytes:
            self._refused.append(arriving)
            arriving.ended, arriving.error = True, ManifestError(
                f"{self._disk.folder}: the manifest names {extent.nbytes} bytes at {extent.offset} of data file {extent.file}: "
                f"extents are aligned to {self._disk.alignment} bytes there"
            )
            return arriving
        first, end = begin // PIECE_BYTES, -(-(begin + nbytes) // PIECE_BYTES)
        transfer = Transfer(
            tag,
            record.key,
            Direction.UP,
            upper=Slot(address, self.room(nbytes)),
            lower=self._disk.coded(extent.file, extent.offset, extent.nbytes),
            nbytes=nbytes,
            urgency=Urgency.DEMAND,
            tensor_id=record.tensor_id,
            generation=record.generation,
            checksums=record.checksums[first * CHECKSUM_BYTES : end * CHECKSUM_BYTES],
            begin=begin,
        )
        self._next_tag += 1
        self._under_way[tag] = arriving
        try:
            self._link.start(transfer)
        except BaseException:
            self.close()
            raise
        return arriving

    def wait(self) -> list[Arriving]:
        """Wait until some of the reads that were begun have ended, and return these, each once."""
        try:
            ended, self._refused = self._refused, []
            if ended:
                return ended
            for completion in self._link.poll(math.inf):
                one = self._under_way.pop(completion.tag)
                one.ended, one.error = True, completion.error
                ended.append(one)
            return ended
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for what is in flight, and release the ring. Idempotent.

        An exception that strikes a call closes the reader, too, because the state of its link is not known any more.
        """
        self.closed = True
        self._link.close()
        while self._under_way:
            _, one = self._under_way.popitem()
            one.ended, one.error = True, StoreClosed(f"{self._disk.folder} was closed while it was read")


def aligned(nbytes: int, alignment: int) -> torch.Tensor:
    """Return ordinary memory of ``nbytes`` bytes, at an aligned address."""
    memory = torch.empty(nbytes + alignment, dtype=torch.uint8, device="cpu")
    skip = -memory.data_ptr() % alignment
    return memory[skip : skip + nbytes]
