"""The disk: extents in a large file inside the store's folder, or in one file on each of several drives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tiered.errors import CapacityError, ManifestError, MisuseError
from tiered.format.data_file import MINIMUM_ALIGNMENT, DataFile
from tiered.format.drives import IGNORED, LIST_FILE, MANIFEST, Drives, folders_of, open_drives
from tiered.format.folder import OpenFolder
from tiered.types import Location, Slot, format_size

__all__ = ["NvmeConfig", "NvmeTier"]

DATA_FILE = "data.0"
FILE_BITS = 48
"""A slot's offset is that in its data file, with the file's index above so many bits."""


@dataclass(frozen=True)
class NvmeConfig:
    """``path``: the store's folder. ``paths``: folders for the data files, one in each; none: in the store's own folder.

    ``capacity``: bytes of extents at most, None for all that the devices have. ``growth``: bytes by which a data file is
    extended at a time.
    """

    path: str | os.PathLike[str]
    capacity: int | None = None
    growth: int = 64 << 20
    paths: Sequence[str | os.PathLike[str]] = ()


class NvmeTier:
    """Extents of one data file or several, and which of them committed generations still need.

    With several files each new extent goes to the drive that has the fewest bytes in use; so tensors that are stored one after
    the other lie on different drives, and so do the bytes that are read. A tensor is never divided between drives: its extent
    is one range of one file.

    An extent is in use while the store or a kept generation references it. ``free`` ends the store's reference, ``release`` a
    generation's.
    """

    name = "nvme"
    folder: str
    """Path of the store's own, where the manifests are, as it was opened."""
    open_folder: OpenFolder
    """The same folder, held open: what is done in it goes by this, for its path may lead elsewhere by now."""
    uuid: bytes
    """The store's 16 bytes of identity; part of every checksum."""
    alignment: int
    """Bytes to which every extent's offset and size are aligned; what direct I/O needs here, at least 4096."""

    @classmethod
    def open(cls, config: NvmeConfig) -> NvmeTier:
        """Create the store's folder and data files, or reopen them (then ``claim`` what the manifest names).

        Raises MisuseError where a path cannot be a store's (not a folder, a symlink, not writable, holds other things; then
        nothing is touched) or the paths are not those of the store, StoreLocked while another process has it open,
        ManifestError when a data file is missing, damaged or foreign, CapacityError when the capacity is below one extent, or,
        of a new store, more than the filesystems have.
        """
        if config.growth < 1:
            raise MisuseError(f"the data file cannot grow by {config.growth} bytes at a time")
        if config.capacity is not None and config.capacity < MINIMUM_ALIGNMENT:
            raise CapacityError(
                f"an NVMe capacity of {config.capacity} bytes holds nothing: the minimum is {MINIMUM_ALIGNMENT} bytes"
            )
        folder = _absolute(config.path)
        if config.paths:
            drives = open_drives(folder, [_absolute(path) for path in config.paths], config.growth)
            return cls(folder, drives.files, drives.uuid, config.capacity, created=drives.created, drives=drives)._planned()
        file = DataFile(folder, DATA_FILE, _accept(folder), config.growth, flags=os.O_CREAT)
        try:
            created = _begin_or_adopt(file)
        except BaseException:
            file.discard()
            raise
        return cls(folder, (file,), file.uuid, config.capacity, created=created, drives=None)._planned()

    def __init__(
        self,
        folder: Path,
        files: tuple[DataFile, ...],
        uuid: bytes,
        capacity: int | None,
        *,
        created: bool,
        drives: Drives | None,
    ) -> None:
        self.files, self.created = files, created
        self.folder, self.uuid = str(folder), uuid
        self.alignment = files[0].alignment
        self._drives = drives
        self._at_close = self._close
        self.open_folder = drives.open_folder if drives else files[0].open_folder
        self._refusal: str | None = None
        self._nameless = False
        # Files that are already larger than the capacity stay usable: their space is taken from the disk either way.
        extents = sum(file.extents for file in files)
        self._limit = None if capacity is None else max(extents, capacity)
        if self._limit is not None:
            self._limit -= self._limit % self.alignment
        self._live: set[Slot] = set()  # referenced by the store
        self._kept: dict[int, set[Slot]] = {}  # generation -> what it references; few, so each is asked
        self._left: dict[int, dict[int, int]] = {}  # generation -> what it does as the last one: slots' offsets and sizes

    def _planned(self) -> NvmeTier:
        """Itself. A new store that could not have its capacity is refused here, and not after days; one that there is already
        opens in any case, for what it has must be read."""
        try:
            free = self.free_on_device()
            if self.created and self._limit is not None and self._limit - sum(file.extents for file in self.files) > free:
                folders = ", ".join(dict.fromkeys(str(file.folder) for file in self.files))
                raise CapacityError(
                    f"an NVMe capacity of {format_size(self._limit)} is more than the {format_size(free)} that {folders} has "
                    "free: give nvme= less, make room, or name another folder"
                )
        except BaseException:
            try:
                if self.created:
                    self.remove()
            finally:
                self.close()
            raise
        return self

    def leave(self, room: Callable[[], int]) -> None:
        """Files grow only where so many bytes are left on the filesystem of the store's own folder, for manifests."""
        device = os.fstat(self.open_folder.fd).st_dev
        for file in self.files:
            if file.device == device:
                file.leaves = room

    # What it is

    @property
    def direct(self) -> bool:
        """Whether all files are open for direct I/O; where the filesystem has none, reads and writes are buffered."""
        return all(file.direct for file in self.files)

    @property
    def capacity(self) -> int:
        """Bytes of extents: as configured, or what is allocated plus what the devices have free now."""
        if self._limit is not None:
            return self._limit
        return sum(file.extents for file in self.files) + self.free_on_device()

    @property
    def used(self) -> int:
        """Bytes in extents that the store or a kept generation references, padding included."""
        return sum(file.used for file in self.files)

    @property
    def file_bytes(self) -> int:
        """Bytes that the data files take on their devices."""
        return sum(file.nbytes for file in self.files)

    @property
    def refusal(self) -> str | None:
        """Why the last ``allocate`` returned None, in one line; None when it did not."""
        return self._refusal

    def free_on_device(self) -> int:
        """Bytes that the filesystems would still give us, each counted once; 0 once closed."""
        return sum({file.device: file.free_on_device() for file in self.files}.values())

    # Extents

    def allocate(self, nbytes: int) -> Slot | None:
        """An extent, with a file grown if need be; None when none can grow (``refusal`` says why)."""
        files: Sequence[DataFile] = self.files
        if len(files) > 1:  # one that was full is asked last, for asking takes system calls
            files = sorted(files, key=lambda file: (file.full, file.used))
        spare = share = None
        if self._limit is not None:  # it is for all together, and the first must not take it all ahead of its needs
            spare, share = self._limit - sum(file.extents for file in files), self._limit // len(files)
        for file in files:
            found = file.allocate(nbytes, spare, share)
            if found is not None:
                self._refusal = None
                slot = self.slot(file.index, *found)
                self._live.add(slot)
                return slot
        used_up = ""
        if self._limit is not None:
            largest = format_size(max(file.largest for file in files))
            used_up = f"the capacity of {format_size(self._limit)} in {self.folder} is used up: {largest} in one piece is left"
        self._refusal = "; ".join(dict.fromkeys(file.refusal or used_up for file in self.files))
        return None

    def reserve(self, nbytes: int) -> bool:
        """Whether extents can have so many bytes together, in pieces of whatever size; if not, ``refusal`` says why.

        A file grows for it; of several drives it is only looked at what they have.
        """
        extents = sum(file.extents for file in self.files)
        missing = nbytes - (extents - self.used)
        if self._limit is not None and missing > self._limit - extents:
            left = f"{self._limit - self.used:,} bytes of it are left"
            self._refusal = f"the capacity of {format_size(self._limit)} in {self.folder} is used up: {left}"
            return False
        self._refusal = None
        if len(self.files) == 1:
            spare = None if self._limit is None else self._limit - extents
            found = self.files[0].reserve(nbytes, spare, self._limit)
            self._refusal = self.files[0].refusal
            return found
        found = missing <= self.free_on_device()  # which drive takes what is not known yet
        if not found:
            self._refusal = f"the drives of {self.folder} have {format_size(self.free_on_device())} free"
        return found

    def free(self, slot: Slot) -> None:
        """End the store's reference; the space is free again when no kept generation references it either."""
        if slot not in self._live:
            raise AssertionError(f"free of {slot}, which the store does not hold")
        self._live.remove(slot)
        self._leave(slot)

    def restore(self, slots: Iterable[Slot]) -> None:
        """The store references exactly ``slots`` from here on; what kept generations reference stays theirs."""
        self._live = set(slots)
        self._left = {generation: {} for generation in self._kept}
        given = set(self._live)
        for generation in reversed(self._kept):  # the last one that references an extent
            for slot in self._kept[generation] - given:
                self._left[generation][slot.offset] = slot.nbytes
            given |= self._kept[generation]
        for file in self.files:
            extents = (slot for slot in given if slot.offset >> FILE_BITS == file.index)
            file.restore([(self.extent(slot)[1], slot.nbytes) for slot in extents])

    def claim(self, slot: Slot) -> None:
        """Take the extent that a manifest names: from the free space, or from kept generations that share it.

        To reopen with several kept generations: for each older one claim its extents, ``retain``, ``free`` them; then
        claim and retain those of the newest. Raises ManifestError when the extent cannot be: misaligned, beyond the end
        of the file, or overlapping another one.
        """
        last = self._last(slot)
        if slot in self._live or last is None:
            index, offset = self.extent(slot)
            if not 0 <= index < len(self.files):
                raise ManifestError(f"{self.folder}: the manifest names data file {index}; there are {len(self.files)}")
            self.files[index].claim(offset, slot.nbytes)
        else:
            del self._left[last][slot.offset]
        self._live.add(slot)

    def slot(self, index: int, offset: int, nbytes: int) -> Slot:
        """The slot at ``offset`` of a data file. Raises ManifestError for an offset that no file can have."""
        if offset >> FILE_BITS:
            raise ManifestError(f"{self.files[index].path}: an extent of {nbytes} bytes at {offset}: beyond its end")
        return Slot(index << FILE_BITS | offset, nbytes)

    def extent(self, slot: Slot) -> tuple[int, int]:
        """Index of the data file that ``slot`` is in, and offset there."""
        return slot.offset >> FILE_BITS, slot.offset & (1 << FILE_BITS) - 1

    def locate(self, slot: Slot) -> Location:
        """Where ``slot`` is, for the link."""
        file = self.files[slot.offset >> FILE_BITS]
        return Location(file.fd, slot.offset & (1 << FILE_BITS) - 1, file.path)

    def _last(self, slot: Slot) -> int | None:
        """The last of the kept generations, in order of ``retain``, that reference it."""
        for generation in reversed(self._kept):
            if slot in self._kept[generation]:
                return generation
        return None

    def _leave(self, slot: Slot) -> None:
        """The store's reference, or the last generation's, has ended."""
        last = self._last(slot)
        if last is None:
            self._give_back({slot.offset: slot.nbytes})
        else:
            self._left[last][slot.offset] = slot.nbytes

    def _give_back(self, slots: Mapping[int, int]) -> None:
        if len(self.files) == 1:
            self.files[0].free(slots)  # there a slot's offset is that in the file
            return
        for file in self.files:
            base = file.index << FILE_BITS
            file.free({offset - base: nbytes for offset, nbytes in slots.items() if offset >> FILE_BITS == file.index})

    def retain(self, generation: int, slots: Iterable[Slot]) -> None:
        """Pin the extents of a committed generation. Each must be the store's, and named once; so no two of them overlap."""
        named = list(slots)
        kept = set(named)
        if generation in self._kept:
            raise AssertionError(f"generation {generation} is kept already")
        if len(kept) != len(named) or not kept <= self._live:
            raise AssertionError(f"generation {generation} references an extent that is not in use, or one twice")
        self._kept[generation], self._left[generation] = kept, {}

    def pin(self, generation: int, slot: Slot) -> None:
        """Pin one more extent of a generation that is retained."""
        if slot not in self._live:
            raise AssertionError(f"generation {generation} references an extent that is not in use")
        self._kept[generation].add(slot)

    def pinned(self, slot: Slot) -> bool:
        """Whether a kept generation references it."""
        return self._last(slot) is not None

    def release(self, generation: int) -> None:
        """Unpin a generation. Only after whatever made it readable is durably gone."""
        if generation not in self._kept:
            raise AssertionError(f"generation {generation} is not kept")
        first = generation == next(iter(self._kept))
        del self._kept[generation]
        left = self._left.pop(generation)
        if first:  # as a rule; so no other one references these
            self._give_back(left)
            return
        for slot in left.items():
            self._leave(Slot(*slot))

    @property
    def generations(self) -> tuple[int, ...]:
        """Those that are kept, in order of ``retain``."""
        return tuple(self._kept)

    # The files

    def sync(self) -> None:
        """Make completed writes and the files' sizes durable. After an OSError they may be lost: never retry."""
        if self.files[0].fd < 0:
            raise AssertionError("the NVMe tier was closed")
        for file in self.files:
            file.sync()

    def strayed(self) -> str | None:
        """Why those who come by the paths that were opened do not find this store, or find it by other names too, with the
        mend; None where all is as it was opened. Looks at names only: a few system calls for each file."""
        if self._nameless:
            return None
        try:
            return self._drives.strayed() if self._drives else self.files[0].strayed()
        except OSError as error:
            return (
                f"{self.folder} cannot be looked at ({error.strerror}, errno {error.errno}): nothing is known to be wrong with "
                "it; see what its filesystem says, and commit again"
            )

    def drop_names(self) -> None:
        """Remove the data files' names: the system takes their space back however this process ends. Commits go on, and can be
        opened by nobody. For measurements. Raises OSError."""
        self._nameless = True
        for file in self.files:
            os.unlink(file.path)

    @property
    def closed(self) -> bool:
        return self.files[0].fd < 0

    def leave_nothing(self) -> None:
        """From here on ``close`` removes what opening a new store made: nobody could open anything there."""
        if self.created:
            self._at_close = self._remove

    def leave_everything(self) -> None:
        """``close`` removes nothing any more: there may be a commit."""
        self._at_close = self._close

    def close(self) -> None:
        """Release the locks. Idempotent. No I/O may be in flight."""
        try:
            if not self.closed:
                self._at_close()
        except OSError:  # what cannot be removed stays, and is a store without a commit
            pass
        finally:
            self._close()

    def _close(self) -> None:
        for file in self.files:
            file.close()
        if self._drives is not None:
            self._drives.close()

    def remove(self) -> None:
        """Delete the data files, and the folders that this tier made and that are empty; then close. For scratch stores."""
        if self.files[0].fd < 0:
            raise AssertionError("the NVMe tier was closed")
        self._remove()

    def _remove(self) -> None:
        for file in self.files:
            file.remove()
        if self._drives is not None:
            self._drives.remove()


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).absolute()  # drops a trailing slash, with which O_NOFOLLOW would follow a symlink


def _accept(folder: Path) -> Callable[[list[str]], None]:
    """Refuses a folder that is not empty, nor that of a store with one data file."""

    def accept(names: list[str]) -> None:
        if LIST_FILE in names:
            raise MisuseError(f"{folder} keeps its tensors in other folders: open it with {folders_of(folder)}")
        if DATA_FILE not in names:
            _refuse_foreign(folder, names)

    return accept


def _refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    if any(MANIFEST.fullmatch(name) for name in names):
        raise ManifestError(f"{folder} has a manifest, but its {DATA_FILE} is missing or empty")
    if set(names) - IGNORED:
        raise MisuseError(f"{folder} is not a tiered store; name an empty or new folder")


def _begin_or_adopt(file: DataFile) -> bool:
    """Whether the file was blank, and now is the beginning of a store."""
    if file.blank:
        _refuse_foreign(file.open_folder.path, [name for name in file.open_folder.names() if name != DATA_FILE])
        file.begin(file.wants, uuid4().bytes, 0)
        return True
    file.adopt()
    if file.index != 0:
        raise ManifestError(f"{file.path}: the header names file index {file.index}")
    return False
