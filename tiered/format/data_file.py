"""The format of a data file: a header of one alignment, then extents; and the digest of a piece.

The header holds a magic, the format version, UUID, index and checksum. Offsets are counted from the beginning of the file; the
manifest says which extent holds which tensor.

The digest of a piece covers, beside the bytes, the store, the tensor, the generation of the write and the offset in the tensor.
So an intact piece of another tensor, of an older generation, or written to the wrong place fails verification like a flipped
bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import xxhash

from tiered.allocator import FreeSpace
from tiered.errors import ManifestError, MisuseError
from tiered.format.locked_file import LockedFile, make_buffered, make_direct, open_to_lock, open_to_read, writes_direct
from tiered.system import LARGEST_ALIGNMENT, direct_io_alignment
from tiered.types import format_size

__all__ = ["MINIMUM_ALIGNMENT", "DataFile", "FileAtRest", "Piece", "digest"]

Piece = bytes | memoryview | ctypes.Array[ctypes.c_char]

_CONTEXT = struct.Struct("<16sQQQ")  # store UUID, tensor id, generation, offset of the piece in the tensor


def digest(uuid: bytes, tensor_id: int, generation: int, offset: int, piece: Piece) -> bytes:
    """Return the 16 bytes (xxh3-128) for ``piece``: PIECE_BYTES of a tensor from byte ``offset`` on, or fewer at its end.

    ``uuid`` is the store's 16 bytes, ``generation`` the one in which the tensor was written. Large pieces are hashed without
    the GIL.
    """
    state = xxhash.xxh3_128(_CONTEXT.pack(uuid, tensor_id, generation, offset))
    state.update(piece)
    return state.digest()


MAGIC = b"tiered\r\n"  # a transfer in text mode would damage it visibly
FORMAT_VERSION = 1
MINIMUM_ALIGNMENT = 4096
_FIELDS = struct.Struct("<8sII16sI")  # magic, version, alignment (= header size), UUID, file index
_DIGEST_BYTES = 16
LEAST_GROWTH, GROWTH_SHARE = 4 << 20, 8
"""A file grows by an eighth of its size, but at least by 4 MiB: what it has in vain is a small part of it."""


class DataFile:
    """A data file and its free-space allocator. The file is locked while it is open.

    The file grows in steps and never shrinks: its blocks are allocated before an extent is handed out, so a write into an
    extent does not meet a full disk. ``full`` says that the filesystem had no room when it was last asked, ``refusal`` why.
    ``leaves`` returns the number of bytes of the filesystem that growing leaves free.
    """

    leaves: Callable[[], int] = staticmethod(lambda: 0)

    def __init__(self, folder: Path, name: str, accept: Callable[[list[str]], None], growth: int, *, flags: int) -> None:
        """Open the file; then call ``begin`` where it is ``blank``, else ``adopt``. Raises as ``LockedFile``, and
        ManifestError."""
        self._file = LockedFile(folder, name, accept, flags | os.O_DIRECT)
        self.folder, self.name, self.path = str(folder), name, self._file.path
        self.open_folder = self._file.folder
        self.fd, self.direct = self._file.fd, self._file.direct
        self.full = False
        self.refusal: str | None = None
        self._growth = growth
        self._size = os.fstat(self.fd).st_size
        self.wants = max(MINIMUM_ALIGNMENT, direct_io_alignment(self.fd))
        """Alignment in bytes that direct I/O on this file requires."""
        try:
            self._header = _read(self.fd, min(self._size, LARGEST_ALIGNMENT), direct=self.direct)
        except OSError as error:
            self.close()
            raise ManifestError(f"{self.path}: the header cannot be read: {error.strerror}") from error
        self.blank = self._size <= LARGEST_ALIGNMENT and not any(self._header)
        """Whether the file has no header: created now, or by a process that died before it wrote one."""

    def begin(self, alignment: int, uuid: bytes, index: int) -> None:
        """Write the header of a new data file. Raises MisuseError where there is no room for it."""
        os.ftruncate(self.fd, 0)  # contents that an interrupted creation left
        self.direct = self.direct and writes_direct(self.fd, 0)
        self._write_header(_encode(alignment, uuid, index))
        self.direct = self.direct and make_direct(self.fd)  # of an empty file nothing was read
        self._file.sync_names()
        self._size = alignment
        self._take(alignment, uuid, index)

    def adopt(self) -> None:
        """Read the header. Raises ManifestError where it is damaged."""
        self._take(*_decode(self._header, self.path))

    def look(self) -> None:
        """Ask the filesystem of a file that is the store's whether it takes direct writes; ``direct`` says so afterwards."""
        self.direct = self.direct and (self._size % self.alignment > 0 or writes_direct(self.fd, self._size))

    def _take(self, alignment: int, uuid: bytes, index: int) -> None:
        if self.direct and alignment % self.wants:  # the file came from a drive with smaller sectors
            make_buffered(self.fd)
            self.direct = False
        self.alignment, self.uuid, self.index = alignment, uuid, index
        self.device = os.fstat(self.fd).st_dev
        self._header = b""
        self._space = FreeSpace(self._size, alignment)
        self._space.claim(0, alignment)

    # Space

    @property
    def nbytes(self) -> int:
        """Bytes that the file takes on the device."""
        return self._space.capacity

    @property
    def extents(self) -> int:
        """Bytes of all extents, used or not."""
        return self._space.capacity - self.alignment

    @property
    def used(self) -> int:
        """Bytes of allocated extents."""
        return self._space.used_bytes - self.alignment

    @property
    def largest(self) -> int:
        """Bytes of the largest extent that can be allocated without growing."""
        return self._space.largest

    def free_on_device(self) -> int:
        """Return the bytes that the filesystem has free, ``sys.maxsize`` where it does not say; 0 once closed."""
        if self.fd < 0:
            return 0
        try:
            found = os.fstatvfs(self.fd)
        except OSError:  # writing will report the error
            return sys.maxsize
        if not found.f_blocks:
            return sys.maxsize  # ramfs counts nothing
        return found.f_bavail * found.f_frsize

    # Extents

    def starts(self, nbytes: int, end: int) -> list[tuple[int, int]]:
        """Return the first and last offset of ``nbytes`` in each free range that has as many; a file that ended at ``end``
        would have them."""
        found = self._space.free_ranges()
        tail = self._space.free_at_end
        if end > self.nbytes:
            del found[len(found) - bool(tail) :]
            found.append((self.nbytes - tail, end - self.nbytes + tail))
        return [(offset, offset + size - nbytes) for offset, size in found if size >= nbytes]

    def grow(self, end: int, spare: int | None, share: int | None) -> bool:
        """Return whether the file has ``end`` bytes, growing as for ``allocate`` where it has less."""
        return end <= self.nbytes or self._grow(end, spare, share)

    def allocate(self, nbytes: int, spare: int | None, share: int | None) -> tuple[int, int] | None:
        """Return offset and size of an extent, growing the file if needed; None when it cannot grow.

        The file grows by ``spare`` bytes at most; ahead of the need, to ``share`` bytes of extents at most. None: no limit.
        """
        self.refusal = None
        found = self._space.allocate(nbytes)
        if found is None:
            need = self._space.capacity + self._space.round_up(nbytes) - self._space.free_at_end
            found = self._space.allocate(nbytes) if self._grow(need, spare, share) else None
        return found

    def free(self, extents: Mapping[int, int]) -> None:
        """Give extents back; ``extents`` maps each offset to its size."""
        self.full = False
        self._space.free_all(extents)

    def restore(self, extents: Iterable[tuple[int, int]]) -> None:
        """Set the allocated extents to exactly ``extents``, each an offset and a size."""
        self._space.restore([(0, self.alignment), *extents])

    def refuse_claim(self, offset: int, nbytes: int) -> None:
        """Raise ManifestError where the extent that a manifest names is not free."""
        if not self._space.is_free(offset, nbytes):
            why = "beyond its end" if offset + nbytes > self._space.capacity else "misaligned or named twice"
            raise ManifestError(f"{self.path}: the manifest names an extent of {nbytes} bytes at {offset}: {why}")

    def claim(self, offset: int, nbytes: int) -> None:
        """Take an extent that is free."""
        self._space.claim(offset, nbytes)

    def reserve(self, nbytes: int, spare: int | None, share: int | None) -> bool:
        """Return whether ``nbytes`` are free, in pieces of any size. The file grows as for ``allocate``."""
        missing = self._space.round_up(nbytes) - self._space.free_bytes
        return missing <= 0 or self._grow(self._space.capacity + missing, spare, share)

    def _grow(self, need: int, spare: int | None, share: int | None) -> bool:
        """Extend the file to at least ``need`` bytes."""
        old = self._space.capacity
        most = None if spare is None else old + spare - spare % self.alignment
        if most is not None and need > most:
            return False
        step = old + min(self._growth, max(LEAST_GROWTH, old // GROWTH_SHARE))
        for end in (most, None if share is None else self.alignment + share):
            step = step if end is None else min(step, end)
        return self._grow_to(max(need, step - step % self.alignment)) or self._grow_to(need)

    def _grow_to(self, end: int) -> bool:
        old = self._space.capacity
        self.refusal = None
        try:
            self._extend(old, end)
        except OSError as error:
            with contextlib.suppress(OSError):  # then the file stays longer than needed
                os.ftruncate(self.fd, old)  # a failed fallocate leaves the file extended
            self.refusal, self.full = self._why(error, end - old), True
            return False
        self._space.grow(end)
        return True

    def _why(self, error: OSError, nbytes: int) -> str:
        reason = (os.strerror(error.errno) or "no space").lower() if error.errno else "no space"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # an error other than lack of room
            return f"{self.path} cannot grow: {reason} (errno {error.errno})"
        free, leaves = self.free_on_device(), self.leaves()
        besides = f" besides {format_size(leaves)} for manifests" if leaves else ""
        has = f"{self.folder} has {format_size(free)} free, {format_size(nbytes)} needed{besides}"
        return f"{reason}: {has}; make room there, or put the store on a larger drive"

    def _extend(self, old: int, end: int) -> None:
        """Allocate the blocks up to ``end`` and the bytes that it leaves free, then cut off the latter: only the filesystem
        knows its room."""
        leaves = self.leaves()
        try:
            os.posix_fallocate(self.fd, old, end - old + leaves)
            if not leaves:
                return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            if end - old + leaves > self.free_on_device():  # nothing is reserved: a write may still fail
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        os.ftruncate(self.fd, end)

    # File operations

    def sync(self) -> None:
        """Make completed writes and the file's size durable. After an OSError (it names the file) they may be lost."""
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            error.filename = self.path
            raise

    def strayed(self) -> str | None:
        """Return why the path does not lead to this file any more, or to a file with other names too, with advice; None where
        it does."""
        return self._file.strayed()

    def close(self) -> None:
        """Release the lock. Idempotent. No I/O may be in flight."""
        self.fd = -1
        self._file.close()

    def remove(self) -> None:
        """Delete the file, and its folder if opening made that and it is empty; then close."""
        self._file.remove()
        self.close()

    def discard(self) -> None:
        """Close the file, and undo what opening made."""
        self._file.discard()
        self.close()

    def _write_header(self, header: bytes) -> None:
        try:
            with mmap.mmap(-1, len(header)) as buffer:  # page-aligned, as direct I/O requires
                buffer[:] = header
                written = os.pwrite(self.fd, buffer, 0)
            if written != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self.fd)
        except OSError as error:
            os.ftruncate(self.fd, 0)
            raise MisuseError(
                f"{self.folder} cannot hold a store: {error.strerror}; make room or name a folder on another device"
            ) from error


def _encode(alignment: int, identity: bytes, index: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, alignment, identity, index)
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(alignment, b"\0")


def _decode(header: bytes, path: str) -> tuple[int, bytes, int]:
    """Return alignment, UUID and index. Raises ManifestError unless every byte is as it was written."""
    if len(header) < _FIELDS.size + _DIGEST_BYTES or not header.startswith(MAGIC):
        raise ManifestError(f"{path} does not begin like a tiered data file: it is damaged, or another file")
    _, version, alignment, identity, index = _FIELDS.unpack_from(header)
    if version != FORMAT_VERSION:
        raise ManifestError(f"{path} has format version {version}; this program reads version {FORMAT_VERSION}")
    if header[:alignment] != _encode(min(alignment, LARGEST_ALIGNMENT), identity, index):
        raise ManifestError(f"{path}: the header is damaged (its checksum does not match)")
    if alignment < MINIMUM_ALIGNMENT or alignment & (alignment - 1):
        raise ManifestError(f"{path}: the header names an alignment of {alignment}")
    return alignment, identity, index


class FileAtRest:
    """A data file that is open for reading. ``damage`` is what is wrong with it, None where nothing is: then ``uuid``,
    ``index`` and ``alignment`` are what its header says. ``fd`` is -1 where it cannot be opened, and once it is closed.

    Its I/O is direct where the filesystem has that, and the drive no larger sectors than the extents are aligned to. No byte of
    it is in the page cache when it is opened.
    """

    def __init__(self, folder: Path, name: str, at: int | None, *, lock: bool) -> None:
        """Open ``folder/name``; ``at`` is a descriptor of the folder. With ``lock`` a shared lock keeps writers out; raises
        StoreLocked while a store has the file open."""
        self.path, self.fd, self.size, self.direct = str(folder / name), -1, 0, False
        self.alignment, self.uuid, self.index = MINIMUM_ALIGNMENT, b"", 0
        self.wants = MINIMUM_ALIGNMENT
        """Alignment in bytes that reads require."""
        self.damage: ManifestError | OSError | None = None
        try:
            self.fd = (open_to_lock if lock else open_to_read)(folder, name, at)
            self._look()
        except (ManifestError, OSError) as error:
            self.damage = error.with_traceback(None)
            if isinstance(error, OSError):
                error.filename = self.path
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        self.size = os.fstat(self.fd).st_size
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            self.alignment, self.uuid, self.index = _read_header(self.fd, self.path)
        finally:
            needed = max(MINIMUM_ALIGNMENT, direct_io_alignment(self.fd))
            self.direct = self.alignment % needed == 0 and make_direct(self.fd)  # else it came from a drive of smaller sectors
            self.wants = needed if self.direct else MINIMUM_ALIGNMENT

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _read_header(fd: int, path: str) -> tuple[int, bytes, int]:
    """Return the alignment, UUID and index in the header of an open data file. Raises ManifestError for damage, and OSError."""
    first = _read(fd, MINIMUM_ALIGNMENT, direct=False)
    alignment = _FIELDS.unpack_from(first)[2] if len(first) >= _FIELDS.size else 0
    # No byte more: a writer may be writing to the extents that follow, past the page cache.
    return _decode(_read(fd, max(MINIMUM_ALIGNMENT, min(alignment, LARGEST_ALIGNMENT)), direct=False), path)


def _read(fd: int, nbytes: int, *, direct: bool) -> bytes:
    """Return the file's first ``nbytes``, or fewer at its end."""
    if nbytes == 0:
        return b""
    length = -(-nbytes // LARGEST_ALIGNMENT) * LARGEST_ALIGNMENT if direct else nbytes
    with mmap.mmap(-1, length) as buffer:
        return buffer[: os.preadv(fd, [buffer], 0)]
