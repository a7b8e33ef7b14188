"""A folder that is held open: its descriptor, and whether the path by which it was opened still leads to it.

The path may be moved, removed or given to another folder while this one is in use; the descriptor stays with the folder. So
operations through the descriptor (``openat``, ``renameat``, ``unlinkat``) never land in another folder, and resolving the path
anew says whether a later open would find this one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from functools import partial
from pathlib import Path

from tiered.errors import MisuseError, TieredError, shown
from tiered.system import Once

__all__ = ["NO_DAMAGE", "SHORTAGES", "OpenFolder", "cannot_open", "mend_of", "names_in", "whereabouts"]

WIDEST_PATH = 300
"""Most characters of a path that cannot be opened that an error prints."""
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a process or machine that has run out of resources: they say nothing about the file."""
NO_DAMAGE = SHORTAGES | {errno.EACCES, errno.EPERM}
"""Errors of reading that say nothing about what is read."""


def names_in(folder: int) -> list[str]:
    """Return the names in the folder of which ``folder`` is a descriptor. Raises OSError.

    ``os.listdir`` of a descriptor reads at the descriptor's offset, which all threads and forked processes share: of two
    listings at once, each would miss names. So the folder is opened again for each listing.
    """
    own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.listdir(own)
    finally:
        os.close(own)


class OpenFolder:
    """A folder held open: ``fd`` is a descriptor of the folder that ``path`` led to; ``made`` says whether opening created
    it."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        """Open the folder. ``flags``: O_CREAT makes it (0700), and its parents, where absent; O_NOFOLLOW refuses a symbolic
        link as the last part of ``path``.

        Raises MisuseError, TieredError where the process has no descriptor left, and FileNotFoundError without O_CREAT.
        """
        self.path = path
        self.fd = -1
        self._closing = Once()
        self._made: list[tuple[Path, os.stat_result]] = []  # the outermost first
        try:
            for _ in range(10):
                if flags & os.O_CREAT:
                    self._make()
                try:
                    self.fd = _open(path, flags & os.O_NOFOLLOW)
                    self._closing = Once(partial(os.close, self.fd))
                    return
                except FileNotFoundError:  # whoever made it has removed it again
                    if not flags & os.O_CREAT:
                        raise
        except BaseException:
            self.unmake()
            raise
        raise MisuseError(
            f"cannot create {path}: the filesystem makes no folders there, or other processes remove them at once; name "
            "another folder"
        )

    def __str__(self) -> str:
        return str(self.path)

    @property
    def made(self) -> bool:
        return any(path == self.path for path, _ in self._made)

    def _make(self) -> None:
        try:
            missing = [self.path]
            while not missing[-1].parent.exists():
                missing.append(missing[-1].parent)
            for path in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700 if path == self.path else 0o777)
                    self._made.append((path, os.lstat(path)))
        except FileNotFoundError:  # a parent was removed meanwhile
            return
        except OSError as error:
            raise cannot_open(self.path, error, "create") from error

    def names(self) -> list[str]:
        """Return the names in the folder. Raises OSError, which has the folder's path."""
        try:
            return names_in(self.fd)
        except OSError as error:
            error.filename = str(self.path)
            raise

    def holds(self, name: str, fd: int) -> bool:
        """Return whether ``name`` in the folder leads to the file ``fd``."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def leads_here(self) -> bool:
        """Return whether ``path``, resolved anew, is this folder."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.lstat(self.path))
        except OSError:
            return False

    def strayed(self) -> str | None:
        """Return why ``path`` does not lead to this folder any more, with advice; None where it does."""
        if self.leads_here():
            return None
        try:
            os.lstat(self.path)
            now, mend = "leads to another folder by now", "Move the other one away and this one back"
        except (FileNotFoundError, NotADirectoryError):
            now, mend = "is gone", "Move it back"
        except OSError as error:
            return f"{self} cannot be accessed any more: {error.strerror} (errno {error.errno}); make it accessible again"
        where = whereabouts(self.fd)
        if where is None and os.fstat(self.fd).st_nlink:
            return (
                f"{self} {now}, and no path leads to the folder that this store opened, with its commits: another filesystem "
                "may be mounted over it (see findmnt). Unmount that and commit again"
            )
        if where is None:
            return (
                f"{self} {now}, and the folder that this store opened was deleted, with all its commits: "
                "copy what is needed out of this store (get) into one in another folder"
            )
        back = f"mv -T {shlex.quote(where)} {shlex.quote(str(self))}"
        return (
            f"{self} {now}: the folder that this store opened is {where}, and what was committed is there. "
            f"{mend} ({back}) and commit again, or close this store and open {where}"
        )

    def sync(self) -> None:
        """Make the names in the folder durable, and those of the folders that opening made. Raises OSError."""
        os.fsync(self.fd)
        for path, _ in self._made:
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._closing.run()
        self.fd = -1

    def unmake(self) -> None:
        """Remove the folders that opening made, where they are empty and still have their names; then close."""
        try:
            while self._made:
                path, found = self._made.pop()
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(found, os.lstat(path)):
                        os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            self._made.clear()
            self.close()


def whereabouts(fd: int) -> str | None:
    """Return the present path of an open file or folder; None where it has none any more, or none that can be found."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return path if os.path.samestat(os.fstat(fd), os.lstat(path)) else None
    except OSError:
        return None


def mend_of(error: OSError) -> str | None:
    """Return what a person can do about an error that says nothing about what a file holds; None for any other one."""
    if error.errno in (errno.EACCES, errno.EPERM):
        who = f"user {os.geteuid()} has no permission"
        return f"{who}: run as the owner, have it granted (chmod, chown), or name another folder"
    if error.errno in SHORTAGES:
        return "nothing is known to be wrong with it: close other files, or raise the limit (ulimit -n)"
    return _MENDS.get(error.errno or 0)


_MENDS = {
    errno.EROFS: "have it mounted for writing, or name a folder elsewhere (a store that is there opens with access='read')",
    errno.ENOTDIR: "a part of the path is a file: name another folder",
    errno.ELOOP: "its symbolic links lead in a circle: name the folder itself",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENOSPC: "make room, or name a folder on another device",
    errno.EDQUOT: "make room, or have the quota raised",
    errno.ENXIO: "it is a socket or a device, and no file: move it away",
    errno.EISDIR: "it is a folder, and no file: move it away",
}


def cannot_open(path: str | Path, error: OSError, doing: str = "open") -> TieredError:
    """Return the error to raise for a file or folder of a store that cannot be opened."""
    what, mend = f"cannot {doing} {shown(str(path), WIDEST_PATH)}", mend_of(error)
    if error.errno in SHORTAGES:
        return TieredError(f"{what} now: {error.strerror} (errno {error.errno}); {mend}")
    return MisuseError(f"{what}: {error.strerror}; {mend or 'name a folder that you may write to'}")


def _open(path: Path, nofollow: int) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | nofollow | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if nofollow and path.is_symlink():
            raise MisuseError(f"{path} is a symbolic link; name the folder that it points to") from error
        if error.errno == errno.ENOTDIR:
            raise MisuseError(f"{path} is not a folder; name an empty or new one") from error
        raise cannot_open(path, error) from error
