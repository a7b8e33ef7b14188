"""The data files of a store as a space of slots: which slot an extent has, and where the bytes of a slot lie.

``NvmeTier`` allocates slots there; a store that is open for reading has those of a commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from tiered.format import stripes
from tiered.types import Location, Slot

__all__ = ["FILE_BITS", "Disk", "OpenFile"]

FILE_BITS = 48
"""Bits of a slot's offset that are the offset in its data file; the bits above are the file's index. From the index one beyond
the last on are striped slots, with the offset in the files times their number: so no two slots overlap."""


class OpenFile(Protocol):
    """A data file that is open: for reading and writing, or for reading only."""

    @property
    def fd(self) -> int:
        """-1 once the file is closed."""
        ...

    @property
    def path(self) -> str: ...


File = TypeVar("File", bound=OpenFile, covariant=True)


class Disk(Generic[File]):
    """The open data ``files`` of the store in ``folder``, in order of their indices."""

    name = "nvme"

    def __init__(self, folder: str, uuid: bytes, alignment: int, files: Sequence[File]) -> None:
        self.folder = folder
        """Path of the store's own folder, where the manifests are, as it was opened."""
        self.uuid = uuid
        """The store's UUID, 16 bytes; every checksum covers it."""
        self.alignment = alignment
        """Alignment in bytes of every extent's offset and size: what direct I/O requires here, at least 4096."""
        self.files = files
        self.drive_count = len(files)
        """Number of data files."""

    @property
    def closed(self) -> bool:
        return self.files[0].fd < 0

    def coded(self, index: int, offset: int, nbytes: int) -> Slot:
        """Return the slot at ``offset`` of a data file, or of all with the index one beyond the last; unchecked."""
        times = self.drive_count if index == self.drive_count else 1
        return Slot((index << FILE_BITS) + offset * times, nbytes)

    def extent(self, slot: Slot) -> tuple[int, int]:
        """Return the index of the data file that ``slot`` is in, and the offset there; the index of a striped one is one beyond
        the last."""
        count, index = self.drive_count, slot.offset >> FILE_BITS
        if count > 1 and index >= count:
            return count, (slot.offset - (count << FILE_BITS)) // count
        return index, slot.offset & (1 << FILE_BITS) - 1

    def ranges(self, slot: Slot) -> list[tuple[int, int, int]]:
        """Return where ``slot`` is: the index of a data file, the offset there, and bytes, for each file that has some."""
        return stripes.ranges(*self.extent(slot), slot.nbytes, self.drive_count)

    def locate(self, slot: Slot) -> Location:
        """Return the file, offset and path of ``slot``, for the link; of a striped one those of all parts."""
        index, offset = self.extent(slot)
        if index == self.drive_count:
            return stripes.striped([Location(file.fd, offset, file.path) for file in self.files])
        file = self.files[index]
        return Location(file.fd, offset, file.path)
