"""The NVMe tier: extents in one data file inside the store's folder, or in one data file on each of several drives."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tiered.errors import CapacityError, ManifestError, MisuseError, whole_number
from tiered.format import stripes
from tiered.format.data_file import MINIMUM_ALIGNMENT, DataFile
from tiered.format.drives import DATA_FILE, IGNORED, LIST_FILE, MANIFEST, Drives, folders_of, open_drives
from tiered.format.folder import OpenFolder
from tiered.tiers.disk import FILE_BITS, Disk
from tiered.types import Slot, format_size

__all__ = ["NvmeConfig", "NvmeTier"]

_EXTENTS, _USED = operator.attrgetter("extents"), operator.attrgetter("used")

MEND = ": open the store with a larger nvme=, delete tensors, or keep fewer generations (keep=1)"


@dataclass(frozen=True)
class NvmeConfig:
    """Configuration: ``path`` is the store's folder, ``paths`` folders for the data files, one in each (none: the store's
    folder).

    ``capacity``: most bytes of extents, None for all that the devices have. ``growth``: most bytes by which a data file is
    extended at a time; a small file grows by less.
    """

    path: str | os.PathLike[str]
    capacity: int | None = None
    growth: int = 64 << 20
    paths: Sequence[str | os.PathLike[str]] = ()

    def __post_init__(self) -> None:
        whole_number("growth is by how many bytes a data file grows at a time", self.growth)


class NvmeTier(Disk[DataFile]):
    """The extents of the data files, with the references of the store and of committed generations to them.

    With several files each new extent goes to the drive that has the fewest bytes in use; so tensors that are stored one after
    the other lie on different drives, and reads of them use several drives. An extent for more than ``stripes.LARGEST_WHOLE``
    bytes is striped: it has a part at the same offset of every file. Where the files have no such range in common, and cannot
    grow to have one, it is one range of one file as all others.

    An extent is in use while the store or a retained generation references it. ``free`` ends the store's reference, ``release``
    a generation's.
    """

    open_folder: OpenFolder
    """The store's folder, held open: all operations use it, because the path may lead elsewhere by now."""
    why_besides: Callable[[], str] = staticmethod(lambda: "")
    """Returns what takes room besides the store and the generations that it keeps, in words; empty where nothing does."""

    @classmethod
    def open(cls, config: NvmeConfig) -> NvmeTier:
        """Create the store's folder and data files, or reopen them (then ``claim`` the extents that the manifest names).

        Raises MisuseError where a path cannot be a store's (not a folder, a symlink, not writable, holds other files; then
        nothing is touched) or the paths are not those of the store, StoreLocked while another process has it open,
        ManifestError when a data file is missing, damaged or foreign, CapacityError when the capacity is below one extent, or,
        for a new store, more than the filesystems have.
        """
        if config.capacity is not None and config.capacity < MINIMUM_ALIGNMENT:
            raise CapacityError(
                f"an NVMe capacity of {config.capacity} bytes holds nothing: the minimum is {MINIMUM_ALIGNMENT} bytes"
            )
        folder = _absolute(config.path)
        if config.paths:
            drives = open_drives(folder, [_absolute(path) for path in config.paths], config.growth)
            tier = cls(folder, drives.files, drives.uuid, config.capacity, created=drives.created, drives=drives)
            return tier._refuse_excess()
        file = DataFile(folder, DATA_FILE, _accept(folder), config.growth, flags=os.O_CREAT)
        try:
            created = _begin_or_adopt(file)
        except BaseException:
            file.discard()
            raise
        return cls(folder, (file,), file.uuid, config.capacity, created=created, drives=None)._refuse_excess()

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
        super().__init__(str(folder), uuid, files[0].alignment, files)
        self.created = created
        self._drives = drives
        self._at_close = self._close
        self.open_folder = drives.open_folder if drives else files[0].open_folder
        self._refusal: str | None = None
        self._nameless = False
        # Files that are larger than the capacity already stay usable: their blocks are allocated in any case.
        extents = sum(file.extents for file in files)
        self._limit = None if capacity is None else max(extents, capacity)
        if self._limit is not None:
            self._limit -= self._limit % self.alignment
        self._live: set[Slot] = set()  # referenced by the store
        self._retained: dict[int, set[Slot]] = {}  # generation -> its extents; few, so each is searched
        self._freed_with: dict[int, dict[int, int]] = {}  # generation -> offsets and sizes that end with it

    def _refuse_excess(self) -> NvmeTier:
        """Refuse a new store whose capacity exceeds the free space, now and not after days; return the tier. An existing store
        opens in any case, because its tensors must be readable."""
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

    def keep_free(self, room: Callable[[], int]) -> None:
        """Have files grow only while ``room()`` bytes stay free for manifests on the filesystem of the store's own folder."""
        device = os.fstat(self.open_folder.fd).st_dev
        for file in self.files:
            if file.device == device:
                file.leaves = room

    # Properties

    @property
    def capacity(self) -> int:
        """Bytes of extents: as configured, or what is allocated plus what the devices have free now."""
        if self._limit is not None:
            return self._limit
        return sum(file.extents for file in self.files) + self.free_on_device()

    @property
    def used(self) -> int:
        """Bytes in extents that the store or a retained generation references, padding included."""
        found: int = sum(map(_USED, self.files))
        return found

    @property
    def file_bytes(self) -> int:
        """Bytes that the data files take on their devices."""
        return sum(file.nbytes for file in self.files)

    @property
    def refusal(self) -> str | None:
        """Why the last ``allocate`` returned None, in one line; None when it did not."""
        return self._refusal and self._refusal + self.why_besides()

    def free_on_device(self) -> int:
        """Return the bytes that the filesystems have free, each counted once; 0 once closed."""
        return sum({file.device: file.free_on_device() for file in self.files}.values())

    @property
    def direct(self) -> bool:
        """Whether all files are open for direct I/O; where the filesystem has none, reads and writes are buffered."""
        return all(file.direct for file in self.files)

    @property
    def drive_folders(self) -> tuple[str, ...] | None:
        """Folders of the data files of a store on several drives; None where the data file is in the store's folder."""
        return tuple(file.folder for file in self.files) if self._drives else None

    # Extents

    def allocate(self, nbytes: int) -> Slot | None:
        """Return an extent, growing a file if needed; None when none can grow (``refusal`` says why)."""
        files: Sequence[DataFile] = self.files
        if len(files) > 1 and nbytes > stripes.LARGEST_WHOLE:
            slot = self._allocate_striped(-(-nbytes // self.alignment) * self.alignment)
            if slot is not None:
                return slot
        if len(files) > 1:  # full ones last: asking them takes system calls
            files = sorted(files, key=lambda file: (file.full, file.used))
        spare = share = None
        if self._limit is not None:  # a limit of all files together; the first must not preallocate all of it
            spare, share = self._limit - sum(file.extents for file in files), self._limit // len(files)
        for file in files:
            found = file.allocate(nbytes, spare, share)
            if found is not None:
                self._refusal = None
                slot = self.coded(file.index, *found)
                self._live.add(slot)
                return slot
        used_up = ""
        if self._limit is not None:
            largest = format_size(max(file.largest for file in files))
            used_up = f"{self._used_up()}: {largest} in one piece is left{MEND}"
        self._refusal = "; ".join(dict.fromkeys(file.refusal or used_up for file in self.files))
        return None

    def _used_up(self) -> str:
        assert self._limit is not None
        return f"the capacity of {format_size(self._limit)} in {self.folder} is used up"

    def _allocate_striped(self, nbytes: int) -> Slot | None:
        """Return a striped extent; None where the files have no range in common, and cannot grow to have one."""
        count = len(self.files)
        parts = [(self.files[index], part) for index, _, part in stripes.ranges(count, 0, nbytes, count)]
        offset = stripes.tightest([file.starts(part, file.nbytes) for file, part in parts])
        if offset is None:
            offset = self._grow_together(parts)
        if offset is None:
            return None
        for file, part in parts:
            file.claim(offset, part)
        self._refusal = None
        slot = self.slot(count, offset, nbytes)
        self._live.add(slot)
        return slot

    def _grow_together(self, parts: Sequence[tuple[DataFile, int]]) -> int | None:
        """Grow files until each has its part free at the same offset, and return that; None where not all can grow."""
        offset = stripes.lowest([file.starts(part, 1 << FILE_BITS) for file, part in parts])
        if offset is None:
            return None
        missing = [max(0, offset + part - file.nbytes) for file, part in parts]
        wanted, left = Counter[int](), dict[int, int]()
        for (file, _), more in zip(parts, missing, strict=True):
            if file.full and more:
                return None
            wanted[file.device] += more
            left[file.device] = file.free_on_device() - file.leaves()
        if any(more > left[device] for device, more in wanted.items()):
            return None  # before one of them grows, because files never shrink, and what they grow by counts for the limit
        for place, (file, part) in enumerate(parts):
            spare = share = None
            if self._limit is not None:  # what the files after this one miss is not its to take
                spare = self._limit - sum(file.extents for file in self.files) - sum(missing[place + 1 :])
                share = self._limit // len(self.files)
                if missing[place] > spare:
                    return None
            if not file.grow(offset + part, spare, share):
                return None
        return offset

    def reserve(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` of extents are available in pieces of any size; if not, ``refusal`` says why.

        A single file grows for it; of several drives only the free space is compared.
        """
        extents: int = sum(map(_EXTENTS, self.files))
        missing = nbytes - (extents - self.used)
        if self._limit is not None and missing > self._limit - extents:
            self._refusal = f"{self._used_up()}: {self._limit - self.used:,} bytes of it are left{MEND}"
            return False
        self._refusal = None
        if len(self.files) == 1:
            spare = None if self._limit is None else self._limit - extents
            found = self.files[0].reserve(nbytes, spare, self._limit)
            self._refusal = self.files[0].refusal
            return found
        found = missing <= self.free_on_device()  # the drives of the bytes are not known yet
        if not found:
            self._refusal = f"the drives of {self.folder} have {format_size(self.free_on_device())} free"
        return found

    def free(self, slot: Slot) -> None:
        """End the store's reference; the extent is free again when no retained generation references it either."""
        if slot not in self._live:
            raise AssertionError(f"free of {slot}, which the store does not hold")
        self._live.remove(slot)
        self._unreference(slot)

    def restore(self, slots: Iterable[Slot]) -> None:
        """Set the store's references to exactly ``slots``; the references of retained generations stay."""
        self._live = set(slots)
        self._freed_with = {generation: {} for generation in self._retained}
        given = set(self._live)
        for generation in reversed(self._retained):  # the last one that references an extent frees it
            for slot in self._retained[generation] - given:
                self._freed_with[generation][slot.offset] = slot.nbytes
            given |= self._retained[generation]
        extents: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for slot in given:
            for index, offset, nbytes in self.ranges(slot):
                extents[index].append((offset, nbytes))
        for file in self.files:
            file.restore(extents[file.index])

    def claim(self, slot: Slot) -> None:
        """Take the extent that a manifest names: from the free space, or from retained generations that share it.

        To reopen with several retained generations: for each older one claim its extents, ``retain``, ``free`` them; then claim
        and retain those of the newest. Raises ManifestError when the extent is misaligned, beyond the end of the file, or
        overlaps another one.
        """
        last = self._last(slot)
        if slot in self._live or last is None:
            found = self.ranges(slot)
            if not all(0 <= index < len(self.files) for index, _, _ in found):
                raise ManifestError(f"{self.folder}: the manifest names data file {found[0][0]}; there are {len(self.files)}")
            for index, offset, nbytes in found:
                self.files[index].refuse_claim(offset, nbytes)
            for index, offset, nbytes in found:
                self.files[index].claim(offset, nbytes)
        else:
            del self._freed_with[last][slot.offset]
        self._live.add(slot)

    def slot(self, index: int, offset: int, nbytes: int) -> Slot:
        """Return the slot at ``offset`` of a data file, or of all with the index one beyond the last. Raises ManifestError for
        an offset that no file can have."""
        if offset >> FILE_BITS:
            path = self.files[index].path if index < len(self.files) else self.folder
            raise ManifestError(f"{path}: an extent of {nbytes} bytes at {offset}: beyond its end")
        return self.coded(index, offset, nbytes)

    def striped(self, generation: int) -> bool:
        """Return whether a retained generation references striped extents."""
        first = self.drive_count << FILE_BITS
        return self.drive_count > 1 and any(slot.offset >= first for slot in self._retained[generation])

    def _last(self, slot: Slot) -> int | None:
        """Return the last generation, in order of ``retain``, that references the slot; None where none does."""
        for generation in reversed(self._retained):
            if slot in self._retained[generation]:
                return generation
        return None

    def _unreference(self, slot: Slot) -> None:
        """Record that the store's reference, or a generation's, has ended."""
        last = self._last(slot)
        if last is None:
            self._give_back({slot.offset: slot.nbytes})
        else:
            self._freed_with[last][slot.offset] = slot.nbytes

    def _give_back(self, slots: Mapping[int, int]) -> None:
        if len(self.files) == 1:
            self.files[0].free(slots)  # a slot's offset is that in the file
            return
        extents: list[dict[int, int]] = [{} for _ in self.files]
        for slot in slots.items():
            for index, offset, nbytes in self.ranges(Slot(*slot)):
                extents[index][offset] = nbytes
        for file in self.files:
            file.free(extents[file.index])

    def retain(self, generation: int, slots: Iterable[Slot]) -> None:
        """Pin the extents of a committed generation. The store must hold each, and each is named once, so no two overlap."""
        named = list(slots)
        kept = set(named)
        if generation in self._retained:
            raise AssertionError(f"generation {generation} is kept already")
        if len(kept) != len(named) or not kept <= self._live:
            raise AssertionError(f"generation {generation} references an extent that is not in use, or one twice")
        self._retained[generation], self._freed_with[generation] = kept, {}

    def pin(self, generation: int, slot: Slot) -> None:
        """Pin one more extent of a generation that is retained."""
        if slot not in self._live:
            raise AssertionError(f"generation {generation} references an extent that is not in use")
        self._retained[generation].add(slot)

    def pinned(self, slot: Slot) -> bool:
        """Return whether a retained generation references the slot."""
        return self._last(slot) is not None

    def release(self, generation: int) -> None:
        """Unpin a generation. Only after its manifest is durably gone."""
        if generation not in self._retained:
            raise AssertionError(f"generation {generation} is not kept")
        first = generation == next(iter(self._retained))
        del self._retained[generation]
        left = self._freed_with.pop(generation)
        if first:  # the usual case: no earlier one references these
            self._give_back(left)
            return
        for slot in left.items():
            self._unreference(Slot(*slot))

    @property
    def generations(self) -> tuple[int, ...]:
        """Retained generations, in order of ``retain``."""
        return tuple(self._retained)

    # File operations

    def sync(self) -> None:
        """Make completed writes and the files' sizes durable. After an OSError they may be lost: never retry."""
        if self.files[0].fd < 0:
            raise AssertionError("the NVMe tier was closed")
        for file in self.files:
            file.sync()

    def strayed(self) -> str | None:
        """Return why the opened paths do not lead to this store any more, or to files with other names too, with advice; None
        where all do. Looks at names only: a few system calls for each file."""
        if self._nameless:
            return None
        try:
            return self._drives.strayed() if self._drives else self.files[0].strayed()
        except OSError as error:
            return (
                f"{self.folder} cannot be accessed ({error.strerror}, errno {error.errno}): nothing is known to be wrong with "
                "it; see what its filesystem says, and commit again"
            )

    def drop_names(self) -> None:
        """Remove the data files' names, so that the system frees their space however this process ends. Commits go on, but
        nobody can open them. For measurements. Raises OSError."""
        self._nameless = True
        for file in self.files:
            os.unlink(file.path)

    def leave_nothing(self) -> None:
        """Have ``close`` remove what opening a new store made, because it holds no commit."""
        if self.created:
            self._at_close = self._remove

    def leave_everything(self) -> None:
        """Have ``close`` keep all files, because a commit may exist."""
        self._at_close = self._close

    def close(self) -> None:
        """Release the locks. Idempotent. No I/O may be in flight."""
        try:
            if not self.closed:
                self._at_close()
        except OSError:  # a file that cannot be removed stays, as a store without a commit
            pass
        finally:
            self._close()

    def _close(self) -> None:
        for file in self.files:
            file.close()
        if self._drives is not None:
            self._drives.close()

    def remove(self) -> None:
        """Delete the data files, and the folders that this tier made where they are empty; then close. For scratch stores."""
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
    """Return a check that refuses a folder unless it is empty or that of a store with one data file."""

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
    """Write the header of a blank file or read that of an existing one; return whether the store is new."""
    if file.blank:
        _refuse_foreign(file.open_folder.path, [name for name in file.open_folder.names() if name != DATA_FILE])
        file.begin(file.wants, uuid4().bytes, 0)
        return True
    file.adopt()
    if file.index != 0:
        raise ManifestError(f"{file.path}: the header names file index {file.index}")
    file.look()
    return False
