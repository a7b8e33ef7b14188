"""A file of a store, and the lock that says whose it is: found or made in a folder, without following a symbolic link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from tiered.errors import MisuseError, StoreLocked

__all__ = ["LockedFile", "make_direct", "open_to_read"]


class LockedFile:
    """``folder/name``, open for reading and writing, and locked for as long as it is.

    The lock is on the very descriptor that does the I/O, so it outlives a killed process for as long as that process's writes
    may still land. ``made`` and ``made_folder``: whether it was not there before.
    """

    def __init__(self, folder: Path, name: str, accept: Callable[[list[str]], None], flags: int) -> None:
        """``accept`` is given the folder's names and raises for a folder that is not ours; then nothing is touched.

        ``flags``: O_CREAT makes the folder (0700) and the file (0600), empty, where absent; O_DIRECT opens the file for direct
        I/O where its filesystem has that. Raises MisuseError, StoreLocked, and FileNotFoundError without O_CREAT.
        """
        self.folder, self.name = folder, name
        self.made = self.made_folder = False
        self._pid = os.getpid()
        self.fd = -1
        for _ in range(10):
            if flags & os.O_CREAT:
                self.made_folder |= _make_folder(folder)
            folder_fd = _open_folder(folder)
            try:
                accept(os.listdir(folder_fd))
                self.fd, self.direct, self.made = _open(folder, folder_fd, name, flags)
                try:
                    _lock(self.fd, folder, fcntl.LOCK_EX)
                    if self.is_there():
                        return
                except BaseException:
                    os.close(self.fd)
                    raise
                os.close(self.fd)  # its last owner removed it between our open and our lock, or put another in its place
            finally:
                os.close(folder_fd)
        raise StoreLocked(f"{folder} is being created and removed by other processes; name another folder")

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.name)

    def is_there(self) -> bool:
        """Whether what has its name is this file."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def replace(self, data: bytes) -> None:
        """Put ``data`` in its place, durably and at once: a crash leaves the old contents or the new. Raises OSError."""
        name = os.path.join(self.folder, f"{self.name}.tmp")
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before it has the name: who opens that finds it locked
            if os.pwrite(fd, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
            os.rename(name, self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        old, self.fd = self.fd, fd
        os.close(old)
        self.sync_names()

    def sync_names(self) -> None:
        """Make the name durable, and the folder's where it was made."""
        _sync_folder(self.folder)
        if self.made_folder:
            _sync_folder(self.folder.parent)

    def close(self) -> None:
        """Release the lock. Idempotent. No I/O may be in flight."""
        fd, self.fd = self.fd, -1  # first: a second call must not close a descriptor that is someone else's by then
        if fd < 0:
            return
        if os.getpid() == self._pid:
            # A forked child shares the lock through its copy of the descriptor and would keep it, or end it for us.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def remove(self) -> None:
        """Delete the file, and the folder if it was made here and is empty; then close."""
        if self.fd < 0:
            raise AssertionError(f"{self.path} was closed")
        if self.is_there():
            os.unlink(self.path)
        if self.made_folder:
            try:
                os.rmdir(self.folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        self.close()

    def discard(self) -> None:
        """Close, and undo what opening made."""
        if self.fd >= 0 and self.made:
            self.remove()
        self.close()


def open_to_read(folder: Path, name: str) -> int:
    """A descriptor of ``folder/name`` that only reads, with a lock that others who only read share.

    Nothing is written, so a filesystem that is mounted read-only will do. Raises StoreLocked while a store has the file open,
    and OSError, also for what is no regular file.
    """
    path = str(folder / name)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        _lock(fd, folder, fcntl.LOCK_SH)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
    except FileNotFoundError:
        raise
    except OSError as error:
        if folder.is_symlink():
            raise MisuseError(f"{folder} is a symbolic link; name the folder that it points to") from error
        if error.errno == errno.ENOTDIR:
            raise MisuseError(f"{folder} is not a folder; name an empty or new one") from error
        raise MisuseError(f"cannot open {folder}: {error.strerror}; name a folder that you may write to") from error


def _open(folder: Path, folder_fd: int, name: str, flags: int) -> tuple[int, bool, bool]:
    """The file's descriptor, whether it does direct I/O, and whether it was made."""
    always = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        made = False
        try:
            fd = os.open(name, always, dir_fd=folder_fd)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            try:
                fd, made = os.open(name, always | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder_fd), True
            except FileExistsError:
                fd = os.open(name, always, dir_fd=folder_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MisuseError(f"{folder / name} is a symbolic link; a store's files are not") from error
        raise MisuseError(f"cannot open {folder / name}: {error.strerror}; name a folder that you may write to") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise MisuseError(f"{folder / name} is not a regular file; name an empty or new folder")
        return fd, bool(flags & os.O_DIRECT) and make_direct(fd), made
    except BaseException:
        os.close(fd)
        raise


def make_direct(fd: int) -> bool:
    """Whether the filesystem has direct I/O, which ``fd`` does from here on."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _lock(fd: int, folder: Path, how: int) -> None:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
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
