"""The lock file of a store: a file opened or made in a folder, without following a symbolic link, and locked with flock(2).

The folder stays open with the file, and every name is relative to it; see ``OpenFolder``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shlex
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tiered.errors import MisuseError, StoreLocked
from tiered.format.folder import OpenFolder, cannot_open, whereabouts
from tiered.system import LARGEST_ALIGNMENT, Once, direct_io_alignment

__all__ = [
    "LockedFile",
    "holder",
    "make_buffered",
    "make_direct",
    "makes_direct",
    "open_to_lock",
    "open_to_read",
    "writes_direct",
]


class LockedFile:
    """``folder/name``, open for reading and writing, and locked while it is open.

    The lock is on the very descriptor that does the I/O, so it outlives a killed process for as long as that process's writes
    may still land. ``made`` says whether the file was created by opening it. ``folder`` is open as long as the file is.
    """

    def __init__(self, folder: Path, name: str, accept: Callable[[list[str]], None], flags: int) -> None:
        """Open and lock the file. ``accept`` is given the folder's names and raises for a foreign folder; then nothing is
        touched.

        ``flags``: O_CREAT makes the folder (0700) and the file (0600), empty, where absent; O_DIRECT opens the file for direct
        I/O where its filesystem has that. Raises MisuseError (also for a file with several names: writing to one would change
        the others), StoreLocked, and FileNotFoundError without O_CREAT.
        """
        self.name, self.fd, self.made = name, -1, False
        self._pid = os.getpid()
        self._unlocking = self._closing = Once()
        self.folder = OpenFolder(folder, flags | os.O_NOFOLLOW)
        try:
            for _ in range(10):
                if self._take(accept, flags):
                    return
                if not self.folder.leads_here():
                    self.folder.unmake()
                    self.folder = OpenFolder(folder, flags | os.O_NOFOLLOW)
        except BaseException:
            self.folder.unmake()
            raise
        self.folder.unmake()
        raise StoreLocked(f"{folder} is being created and removed by other processes; name another folder")

    def _take(self, accept: Callable[[list[str]], None], flags: int) -> bool:
        """Open and lock the file. Return False where its last owner removed or replaced it before the lock was taken."""
        accept(self.folder.names())
        try:
            self.fd, self.direct, self.made = _open(self.folder, self.name, flags)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            return False  # the folder itself was removed
        try:
            if (links := os.fstat(self.fd).st_nlink) > 1:
                raise MisuseError(
                    f"{self.path} has {links} names: others are hard links to it (as cp -al and rsync --link-dest make), and "
                    f"what is written here would destroy what they hold. Open a real copy ({_real_copy(self.folder)}), or open "
                    "this one with access='read', or delete the others"
                )
            _lock(self.fd, self.folder.path, fcntl.LOCK_EX)
            if self.is_there() and self.folder.leads_here():
                self._at_close()
                return True
            self._let_go()
        except BaseException as error:
            if self.made and not isinstance(error, StoreLocked):
                with contextlib.suppress(OSError):
                    self._unlink()
            self._let_go()
            raise
        return False

    def _at_close(self) -> None:
        self._unlocking, self._closing = Once(partial(fcntl.flock, self.fd, fcntl.LOCK_UN)), Once(partial(os.close, self.fd))

    def _let_go(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _unlink(self) -> None:
        if self.is_there():
            os.unlink(self.name, dir_fd=self.folder.fd)

    @property
    def path(self) -> str:
        """Path by which the file was opened."""
        return os.path.join(self.folder.path, self.name)

    def is_there(self) -> bool:
        """Return whether its name in the folder still leads to this file."""
        return self.folder.holds(self.name, self.fd)

    def strayed(self) -> str | None:
        """Return why the path does not lead to this file any more, or to a file with other names too, with advice; None where
        it does."""
        why = self.folder.strayed()
        if why is not None:
            return why
        if not self.folder.holds(self.name, self.fd):
            where = whereabouts(self.fd)
            if where is None and os.fstat(self.fd).st_nlink:
                return (
                    f"{self.path} is not the file that this store opened, and no path of this system leads to that one: "
                    "another filesystem may be mounted over it (see findmnt). Unmount that and commit again"
                )
            if where is None:
                return (
                    f"{self.path} was removed or replaced, and the file that this store opened is deleted: copy what is needed "
                    "out of this store (get) into one in another folder"
                )
            return (
                f"{self.path} is not the file that this store opened: that one is {where}. "
                f"Move it back (mv -T {shlex.quote(where)} {shlex.quote(self.path)}) and commit again"
            )
        links = os.fstat(self.fd).st_nlink
        if links > 1:
            return (
                f"{self.path} has {links} names by now: a hard link to it was made (as cp -al and rsync --link-dest do), and "
                f"later commits would destroy what that holds. Make a real copy instead ({_real_copy(self.folder)}), delete "
                "the link, and commit again"
            )
        return None

    def replace(self, data: bytes) -> None:
        """Replace the file's contents by ``data``, durably and atomically: a crash leaves the old contents or the new. Raises
        OSError."""
        name, at = f"{self.name}.tmp", self.folder.fd
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)  # not overwritten, because it may have other names
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before the rename: whoever opens the name finds the file locked
            if os.pwrite(fd, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
            os.rename(name, self.name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=at)
            raise
        old, self.fd = self.fd, fd
        self._at_close()
        os.close(old)
        self.sync_names()

    def sync_names(self) -> None:
        """Make the file's name durable, and that of the folder where it was made."""
        self.folder.sync()

    def close(self) -> None:
        """Release the lock. Idempotent. No I/O may be in flight."""
        self.folder.close()
        if os.getpid() == self._pid:
            # A forked child shares the lock through its copy of the descriptor; it must neither keep the lock nor release it
            # for us.
            self._unlocking.run()  # closing ends it as well
        self._closing.run()  # Linux closes it whatever close(2) returns; what counts was synced before
        self.fd = -1

    def remove(self) -> None:
        """Delete the file, and the folders that opening made where they are empty; then close."""
        if self.fd < 0:
            raise AssertionError(f"{self.path} was closed")
        self._unlink()
        self.folder.unmake()
        self.close()

    def discard(self) -> None:
        """Close the file, and undo what opening made."""
        if self.fd >= 0 and self.made:
            self.remove()
        self.close()


def _real_copy(folder: OpenFolder) -> str:
    """Return the command that copies the store with a data file of its own."""
    return f"cp -a --reflink=auto {shlex.quote(str(folder))} {shlex.quote(f'{folder}.copy')}"


def open_to_read(folder: Path, name: str, at: int | None = None) -> int:
    """Open ``folder/name`` for reading, without a lock, and return the descriptor. ``at``: a descriptor of the folder.

    Nothing is written, so a filesystem that is mounted read-only is enough. The kernel reads nothing ahead: a writer may be
    writing to the bytes that come next, past the page cache. Raises OSError, also for a file that is not regular.
    """
    path = str(folder / name)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags) if at is None else os.open(name, flags, dir_fd=at)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_to_lock(folder: Path, name: str, at: int | None = None) -> int:
    """Open the file as ``open_to_read`` does, under a shared lock, which keeps writers out. Raises StoreLocked while a store
    has the file open, and OSError."""
    fd = open_to_read(folder, name, at)
    try:
        _lock(fd, folder, fcntl.LOCK_SH)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open(folder: OpenFolder, name: str, flags: int) -> tuple[int, bool, bool]:
    """Return the file's descriptor, whether it does direct I/O, and whether it was made."""
    always, path = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, folder.path / name
    try:
        made = False
        try:
            fd = os.open(name, always, dir_fd=folder.fd)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            try:
                fd, made = os.open(name, always | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder.fd), True
            except FileExistsError:
                fd = os.open(name, always, dir_fd=folder.fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MisuseError(f"{path} is a symbolic link; a store's files are not") from error
        raise cannot_open(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise MisuseError(f"{path} is not a regular file: move it away, or name an empty or new folder")
        return fd, bool(flags & os.O_DIRECT) and make_direct(fd), made
    except BaseException:
        os.close(fd)
        raise


def make_direct(fd: int) -> bool:
    """Set ``fd``, open for reading, to direct I/O; return whether the filesystem has it.

    Some filesystems (Lustre, FUSE) take the flag and refuse the first read or write with it, so a page is read. Whoever writes
    asks ``writes_direct`` too.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    with mmap.mmap(-1, _probe_bytes(fd)) as page:
        return _is_direct(fd, lambda: os.preadv(fd, [page], 0))


def writes_direct(fd: int, end: int) -> bool:
    """Return whether a file that does direct I/O takes a write, too; where it does not, make its I/O buffered. ``end``: the
    file's size, a multiple of the alignment; a page is written behind it and cut off again. (A process that is killed in
    between leaves a file that is a page longer.)"""
    try:
        with mmap.mmap(-1, _probe_bytes(fd)) as page:
            return _is_direct(fd, lambda: os.pwrite(fd, page, end))
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, end)


def makes_direct(fd: int) -> bool:
    """Set an empty file, open for reading and writing, to direct I/O; return whether its filesystem takes reads and writes."""
    os.ftruncate(fd, LARGEST_ALIGNMENT)  # where there is nothing, reading need not ask the filesystem
    try:
        return make_direct(fd) and writes_direct(fd, LARGEST_ALIGNMENT)
    finally:
        os.ftruncate(fd, 0)


def make_buffered(fd: int) -> None:
    """Set ``fd`` to I/O through the page cache."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _probe_bytes(fd: int) -> int:
    return max(mmap.PAGESIZE, direct_io_alignment(fd))


def _is_direct(fd: int, probe: Callable[[], int]) -> bool:
    try:
        probe()
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            make_buffered(fd)
            return False
    return True  # another error is none of the flag's: whoever reads or writes reports it


def _lock(fd: int, folder: Path, how: int) -> None:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise MisuseError(f"the filesystem of {folder} cannot lock files: {error.strerror}") from error
        who, beside = holder(fd), " (access='read' reads beside it)" if how == fcntl.LOCK_EX else ""
        mend = "close it there or name another folder"
        if who == f"process {os.getpid()}":
            mend = "which is this one: use the TieredStore that is open already, or close it first"
        raise StoreLocked(f"{folder} is in use by {who}{',' if mend.startswith('which') else ';'} {mend}{beside}") from error


def holder(fd: int) -> str:
    """Return who holds the file's lock, in words, as far as ``/proc`` shows it."""
    found = os.fstat(fd)
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return "another process"
    # "1: FLOCK  ADVISORY  WRITE 512 fe:00:1234 0 EOF": the process that took it, which may have ended since.
    words = [line.split() for line in lines]
    taken = next((int(word[4]) for word in words if len(word) >= 6 and word[1] == "FLOCK" and word[5] == inode), 0)
    if taken <= 0:
        return "another process"
    if _has_lock(taken, inode):
        return f"process {taken}"
    ended = "" if os.path.exists(f"/proc/{taken}") else " and has ended"
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if _has_lock(pid, inode):
            return f"process {pid}, which was forked from process {taken}, which opened it{ended}"
    if ended:
        return f"a process that was forked from process {taken}, which has ended, or its writes have not landed yet"
    return f"process {taken}"


def _has_lock(pid: int, inode: str) -> bool:
    """Return whether a descriptor of that process holds the lock; False where the process cannot be inspected."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fdinfo"):
            with contextlib.suppress(OSError):
                # Not stat: the process's other files may be on a filesystem that does not answer.
                lines = Path(f"/proc/{pid}/fdinfo/{name}").read_text().splitlines()
                if any(line.startswith("lock:") and "FLOCK" in line and inode in line.split() for line in lines):
                    return True
    return False
