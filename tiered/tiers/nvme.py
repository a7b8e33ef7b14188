"""The disk: extents in a large file inside the store's folder.

The data file begins with a header of one alignment (magic, format version, the store's UUID, checksum); extents follow,
at offsets counted from the beginning of the file. Which extent holds which tensor is the manifest's to say.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tiered.directio import LARGEST_ALIGNMENT, direct_io_alignment
from tiered.errors import CapacityError, ManifestError, MisuseError, StoreLocked
from tiered.sizes import format_size
from tiered.space import FreeSpace
from tiered.types import Slot

__all__ = ["NvmeConfig", "NvmeTier"]

DATA_FILE = "data.0"
MAGIC = b"tiered\r\n"  # a transfer as text would damage it visibly
FORMAT_VERSION = 1
_FIELDS = struct.Struct("<8sII16sI")  # magic, version, alignment (= header size), UUID, file index
_DIGEST_BYTES = 16
_MINIMUM_ALIGNMENT = 4096
_MANIFEST = re.compile(r"manifest\.\d+")
_IGNORED = {"lost+found"}  # the folder may be the root of a drive's filesystem


@dataclass(frozen=True)
class NvmeConfig:
    """``path``: the store's folder. ``capacity``: bytes of extents at most, None for all that the device has.

    ``growth``: bytes by which the data file is extended at a time.
    """

    path: str | os.PathLike[str]
    capacity: int | None = None
    growth: int = 64 << 20


class NvmeTier:
    """Extents of one data file, and which of them committed generations still need.

    The file is locked while the tier is open; the lock is on the very descriptor that does the I/O, so it outlives a
    killed process for as long as that process's writes may still land. The file grows in steps and never shrinks: its
    blocks are allocated before an extent is handed out, so a write into an extent does not meet a full disk.

    An extent is in use while the store or a kept generation references it. ``free`` ends the store's reference,
    ``release`` a generation's.
    """

    name = "nvme"

    @classmethod
    def open(cls, config: NvmeConfig) -> NvmeTier:
        """Create the store's folder and data file, or reopen them (then ``claim`` what the manifest names).

        Raises MisuseError where the path cannot be a store (not a folder, a symlink, not writable, holds other things;
        then nothing is touched), StoreLocked while another process has it open, ManifestError when the data file is
        damaged, CapacityError when the capacity is below one extent.
        """
        return cls(config)

    def __init__(self, config: NvmeConfig) -> None:
        if config.growth < 1:
            raise MisuseError(f"the data file cannot grow by {config.growth} bytes at a time")
        if config.capacity is not None and config.capacity < _MINIMUM_ALIGNMENT:
            raise CapacityError(
                f"an NVMe capacity of {config.capacity} bytes holds nothing: the minimum is {_MINIMUM_ALIGNMENT} bytes"
            )
        folder = Path(config.path).absolute()  # drops a trailing slash, with which O_NOFOLLOW would follow a symlink
        self._growth = config.growth
        self._pid = os.getpid()
        self._refusal: str | None = None
        self._fd = -1
        self._made_folder = _make_folder(folder)
        self._folder = folder
        folder_fd = _open_folder(folder)
        try:
            self._fd, self._direct = _open_data(folder, folder_fd)
            self._adopt(folder_fd, config.capacity)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder_fd)
        self._live: set[Slot] = set()  # referenced by the store
        self._kept: dict[int, tuple[Slot, ...]] = {}  # generation -> what it references
        self._references: dict[Slot, int] = {}  # how many kept generations reference it

    def _adopt(self, folder_fd: int, capacity: int | None) -> None:
        """Read the header, or write it where there is none yet."""
        size = os.fstat(self._fd).st_size
        alignment = max(_MINIMUM_ALIGNMENT, direct_io_alignment(self._fd))
        try:
            header = _read(self._fd, min(size, LARGEST_ALIGNMENT), self._direct)
        except OSError as error:
            raise ManifestError(f"{self.path}: the header cannot be read: {error.strerror}") from error
        self.created = _is_blank(header, size, os.listdir(folder_fd), self._folder)
        if self.created:
            self._uuid = uuid.uuid4().bytes
            self._alignment = alignment
            self._truncate(0)  # what an interrupted creation left
            self._write_header(_encode(alignment, self._uuid, 0))
            os.fsync(folder_fd)
            if self._made_folder:
                _sync_folder(self._folder.parent)
            size = alignment
        else:
            self._alignment, self._uuid = _decode(header, self._folder / DATA_FILE)
            if self._direct and self._alignment % alignment:  # the folder came from a drive with smaller sectors
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                self._direct = False
        # A file that is already larger than the capacity stays usable: its space is taken from the disk either way.
        self._limit = None if capacity is None else self._round_down(max(size, self._alignment + capacity))
        self._space = FreeSpace(size, self._alignment)
        self._space.claim(0, self._alignment)

    # What it is

    @property
    def folder(self) -> str:
        return str(self._folder)

    @property
    def path(self) -> str:
        """The data file."""
        return str(self._folder / DATA_FILE)

    @property
    def fd(self) -> int:
        """Descriptor of the data file, for the link."""
        return self._fd

    @property
    def uuid(self) -> bytes:
        """The store's 16 bytes of identity; part of every checksum."""
        return self._uuid

    @property
    def alignment(self) -> int:
        """Bytes to which every extent's offset and size are aligned; what direct I/O needs here, at least 4096."""
        return self._alignment

    @property
    def direct(self) -> bool:
        """Whether the file is open for direct I/O; where the filesystem has none, reads and writes are buffered."""
        return self._direct

    @property
    def capacity(self) -> int:
        """Bytes of extents: as configured, or what is allocated plus what the device has free now."""
        if self._limit is not None:
            return self._limit - self._alignment
        return self._space.capacity - self._alignment + self.free_on_device()

    @property
    def used(self) -> int:
        """Bytes in extents that the store or a kept generation references, padding included."""
        return self._space.used_bytes - self._alignment

    @property
    def file_bytes(self) -> int:
        """Bytes that the data file takes on the device."""
        return self._space.capacity

    @property
    def refusal(self) -> str | None:
        """Why the last ``allocate`` returned None, in one line; None when it did not."""
        return self._refusal

    def free_on_device(self) -> int:
        """Bytes that the filesystem would still give us; 0 once closed."""
        if self._fd < 0:
            return 0
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize  # ramfs counts nothing

    # Extents

    def allocate(self, nbytes: int) -> Slot | None:
        """An extent, with the file grown if need be; None when it cannot grow (``refusal`` says why)."""
        found = self._space.allocate(nbytes)
        if found is None and self._grow(nbytes):
            found = self._space.allocate(nbytes)
        if found is None:
            return None
        self._refusal = None
        slot = Slot(*found)
        self._live.add(slot)
        return slot

    def free(self, slot: Slot) -> None:
        """End the store's reference; the space is free again when no kept generation references it either."""
        if slot not in self._live:
            raise AssertionError(f"free of {slot}, which the store does not hold")
        self._live.remove(slot)
        if slot not in self._references:
            self._space.free(slot.offset, slot.nbytes)

    def claim(self, slot: Slot) -> None:
        """Take the extent that a manifest names: from the free space, or from kept generations that share it.

        To reopen with several kept generations: for each older one claim its extents, ``retain``, ``free`` them; then
        claim and retain those of the newest. Raises ManifestError when the extent cannot be: misaligned, beyond the end
        of the file, or overlapping another one.
        """
        if slot not in self._references or slot in self._live:
            if not self._space.is_free(slot.offset, slot.nbytes):
                why = (
                    "beyond its end"
                    if slot.offset + slot.nbytes > self._space.capacity
                    else "misaligned or named twice"
                )
                raise ManifestError(
                    f"{self.path}: the manifest names an extent of {slot.nbytes} bytes at {slot.offset}: {why}"
                )
            self._space.claim(slot.offset, slot.nbytes)
        self._live.add(slot)

    def retain(self, generation: int, slots: Iterable[Slot]) -> None:
        """Pin the extents of a committed generation. Each must be in use, and named once."""
        kept = tuple(slots)
        if generation in self._kept:
            raise AssertionError(f"generation {generation} is kept already")
        if len(set(kept)) != len(kept) or not all(slot in self._live or slot in self._references for slot in kept):
            raise AssertionError(f"generation {generation} references an extent that is not in use, or one twice")
        self._kept[generation] = kept
        for slot in kept:
            self._references[slot] = self._references.get(slot, 0) + 1

    def release(self, generation: int) -> None:
        """Unpin a generation. Only after whatever made it readable is durably gone."""
        if generation not in self._kept:
            raise AssertionError(f"generation {generation} is not kept")
        for slot in self._kept.pop(generation):
            self._references[slot] -= 1
            if not self._references[slot]:
                del self._references[slot]
                if slot not in self._live:
                    self._space.free(slot.offset, slot.nbytes)

    @property
    def generations(self) -> tuple[int, ...]:
        """Those that are kept, in order of ``retain``."""
        return tuple(self._kept)

    # The file

    def sync(self) -> None:
        """Make completed writes and the file's size durable. After an OSError they may be lost: never retry."""
        if self._fd < 0:
            raise AssertionError("the NVMe tier was closed")
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Release the lock. Idempotent. No I/O may be in flight."""
        fd, self._fd = self._fd, -1  # first: a second call must not close a descriptor that is someone else's by then
        if fd < 0:
            return
        if os.getpid() == self._pid:
            # A forked child shares the lock through its copy of the descriptor and would keep it, or end it for us.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def remove(self) -> None:
        """Delete the data file, and the folder if this tier made it and it is empty; then close. For scratch stores."""
        if self._fd < 0:
            raise AssertionError("the NVMe tier was closed")
        try:
            if os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        if self._made_folder:
            try:
                os.rmdir(self._folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        self.close()

    def _grow(self, nbytes: int) -> bool:
        """Extend the file so that ``nbytes`` fit at its end."""
        old = self._space.capacity
        need = old + self._space.round_up(nbytes) - self._space.free_at_end
        if self._limit is not None and need > self._limit:
            self._refusal = (
                f"the capacity of {format_size(self._limit - self._alignment)} in {self.folder} is used up: "
                f"{format_size(self._space.largest)} in one piece is left"
            )
            return False
        step = max(need, self._round_down(old + self._growth))
        for end in (min(step, self._limit) if self._limit is not None else step, need):
            try:
                self._extend(old, end)
            except OSError as error:
                self._truncate(old)  # a failed fallocate leaves the file extended
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                reason = (os.strerror(error.errno) or "no space").lower()
                free = format_size(self.free_on_device())
                self._refusal = f"{reason}: {self.folder} has {free} free, {format_size(need - old)} needed"
            else:
                self._space.grow(end)
                return True
        return False

    def _extend(self, old: int, end: int) -> None:
        try:
            os.posix_fallocate(self._fd, old, end - old)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(self._fd, end)  # no reservations on this filesystem: a full disk shows as a WriteError

    def _truncate(self, end: int) -> None:
        os.ftruncate(self._fd, end)

    def _write_header(self, header: bytes) -> None:
        try:
            with mmap.mmap(-1, len(header)) as buffer:  # page-aligned, as direct I/O wants it
                buffer[:] = header
                written = os.pwrite(self._fd, buffer, 0)
            if written != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._fd)
        except OSError as error:
            self._truncate(0)
            raise MisuseError(
                f"{self.folder} cannot hold a store: {error.strerror}; make room or name a folder on another device"
            ) from error

    def _round_down(self, nbytes: int) -> int:
        return nbytes - nbytes % self._alignment


# Opening


def _make_folder(folder: Path) -> bool:
    """Create the folder (0700) and its parents where absent; whether it was."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            return False
    except OSError as error:
        raise MisuseError(f"cannot create {folder}: {error.strerror}; name a folder that you may write to") from error
    return True


def _open_folder(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if folder.is_symlink():
            raise MisuseError(f"{folder} is a symbolic link; name the folder that it points to") from error
        if error.errno == errno.ENOTDIR:
            raise MisuseError(f"{folder} is not a folder; name an empty or new one") from error
        raise MisuseError(f"cannot open {folder}: {error.strerror}; name a folder that you may write to") from error


def _open_data(folder: Path, folder_fd: int) -> tuple[int, bool]:
    """The data file's descriptor, locked, and whether it does direct I/O. Creates the file, empty, where absent."""
    for _ in range(10):
        _refuse_foreign(folder, os.listdir(folder_fd))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        direct = True
        try:
            try:
                fd = os.open(DATA_FILE, flags | os.O_DIRECT, 0o600, dir_fd=folder_fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                direct = False
                fd = os.open(DATA_FILE, flags, 0o600, dir_fd=folder_fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise MisuseError(f"{folder / DATA_FILE} is a symbolic link; a store's files are not") from error
            raise MisuseError(
                f"cannot open {folder / DATA_FILE}: {error.strerror}; name a folder that you may write to"
            ) from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise MisuseError(f"{folder / DATA_FILE} is not a regular file; name an empty or new folder")
            _lock(fd, folder)
            if _is_still(fd, folder_fd):
                return fd, direct
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its last owner, a scratch store, ended between our open and our lock
    raise StoreLocked(f"{folder} is being created and removed by other processes; name another folder")


def _is_still(fd: int, folder_fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(DATA_FILE, dir_fd=folder_fd, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _refuse_foreign(folder: Path, names: list[str]) -> None:
    if DATA_FILE in names:
        return
    if any(_MANIFEST.fullmatch(name) for name in names):
        raise ManifestError(f"{folder} has a manifest, but its {DATA_FILE} is missing or empty")
    if set(names) - _IGNORED:
        raise MisuseError(f"{folder} is not a tiered store; name an empty or new folder")


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise MisuseError(f"the filesystem of {folder} cannot lock files: {error.strerror}") from error
        pid = _lock_holder(fd)
        holder = f"process {pid}" if pid else "another process"
        raise StoreLocked(f"{folder} is in use by {holder}; close it there or name another folder") from error


def _lock_holder(fd: int) -> int | None:
    """Pid of who holds the file's lock, where ``/proc/locks`` shows it."""
    found = os.fstat(fd)
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # "1: FLOCK  ADVISORY  WRITE 512 fe:00:1234 0 EOF"
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5] == name and int(words[4]) > 0:
            return int(words[4])
    return None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# The header


def _encode(alignment: int, identity: bytes, index: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, alignment, identity, index)
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(alignment, b"\0")


def _decode(header: bytes, path: Path) -> tuple[int, bytes]:
    """Alignment and UUID. Raises ManifestError unless every byte is as it was written."""
    if len(header) < _FIELDS.size + _DIGEST_BYTES or not header.startswith(MAGIC):
        raise ManifestError(f"{path} does not begin like a tiered data file; it is damaged or not one")
    _, version, alignment, identity, index = _FIELDS.unpack_from(header)
    if version != FORMAT_VERSION:
        raise ManifestError(f"{path} has format version {version}; this program reads version {FORMAT_VERSION}")
    if header[:alignment] != _encode(min(alignment, LARGEST_ALIGNMENT), identity, index):
        raise ManifestError(f"{path}: the header is damaged (its checksum does not match)")
    if alignment < _MINIMUM_ALIGNMENT or alignment & (alignment - 1) or index != 0:
        raise ManifestError(f"{path}: the header names an alignment of {alignment} and file index {index}")
    return alignment, identity


def _is_blank(header: bytes, size: int, names: list[str], folder: Path) -> bool:
    """Whether the data file was only just created, now or by a process that died before the header was written."""
    if size > LARGEST_ALIGNMENT or any(header):
        return False
    _refuse_foreign(folder, [name for name in names if name != DATA_FILE])
    return True


def _read(fd: int, nbytes: int, direct: bool) -> bytes:
    """The file's first ``nbytes``, or fewer at its end."""
    if nbytes == 0:
        return b""
    length = -(-nbytes // LARGEST_ALIGNMENT) * LARGEST_ALIGNMENT if direct else nbytes
    with mmap.mmap(-1, length) as buffer:
        return buffer[: os.preadv(fd, [buffer], 0)]
