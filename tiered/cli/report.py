"""What a command leaves in files, and which files it may write over: those that it made."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

from tiered import MisuseError, __version__

__all__ = ["MADE_BY", "refuse_unwritable", "write_report"]

MADE_BY = "tiered"
"""Begins what our files say of who made them."""
# How a file of ours begins:
_REPORT = re.compile(rf'\{{\s*"{MADE_BY}": "'.encode())
_PICTURE = re.compile(rb"\x89PNG.*" + f"{MADE_BY} (bench|train)".encode(), re.DOTALL)
_SEARCHED = 64 << 10


def refuse_unwritable(path: str | None, option: str = "--json") -> None:
    """Raises MisuseError when there could be no report in the end, or when it would replace what is not ours."""
    if path is None or path == "-":
        return
    try:
        _check_writable(path)
        free = _may_be_replaced(path)
    except OSError as error:
        raise MisuseError(f"cannot write {path}: {error.strerror}; name another file with {option}") from error
    if not free:
        raise MisuseError(f"{path} is there already and is none of our reports, so it stays: name another file with {option}")


def _check_writable(path: str) -> None:
    """Raises OSError unless it can be written to. Nothing is left behind, and no FIFO is opened: there may be no reader yet."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        new = os.path.realpath(path)  # what a dangling link points to
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(new)
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISREG(mode):
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _may_be_replaced(path: str) -> bool:
    """Whether nothing is lost: it is not there, is no file, is empty or ours."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return True
    with Path(path).open("rb") as file:
        beginning = file.read(_SEARCHED)
    return bool(_REPORT.match(beginning) or _PICTURE.match(beginning))


def write_report(path: str | None, report: dict[str, Any]) -> None:
    """As JSON to the file ``path``, "-" for stdout; it says which version made it."""
    if path is None:
        return
    written = json.dumps({MADE_BY: __version__, **report}, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(written)
    else:
        Path(path).write_text(written, encoding="utf-8")
