"""What a command leaves in files, and which files it may write over: those that it made."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from tiered import MisuseError, __version__

__all__ = ["MADE_BY", "refuse_unwritable", "write_report"]

MADE_BY = "tiered"
"""Begins what our files say of who made them."""
_MARKS = (
    (b"\x89PNG", f"{MADE_BY} bench".encode()),
    (b"\x89PNG", f"{MADE_BY} train".encode()),
    (b"{", f'"{MADE_BY}": "'.encode()),
)
"""How a file of ours begins, and what stands near its beginning."""
_SEARCHED = 64 << 10


def refuse_unwritable(path: str | None, option: str = "--json") -> None:
    """Raises MisuseError when there could be no report in the end, or when it would replace what is not ours."""
    if path is None or path == "-":
        return
    try:
        with Path(path).open("ab") as file:
            status = os.fstat(file.fileno())
        ours = not stat.S_ISREG(status.st_mode) or not status.st_size or _is_ours(path)
    except OSError as error:
        raise MisuseError(f"cannot write {path}: {error.strerror}; name another file with {option}") from error
    if not ours:
        raise MisuseError(f"{path} is there already and is none of our reports, so it stays: name another file with {option}")


def _is_ours(path: str) -> bool:
    with Path(path).open("rb") as file:
        beginning = file.read(_SEARCHED)
    return any(beginning.startswith(magic) and mark in beginning for magic, mark in _MARKS)


def write_report(path: str | None, report: dict[str, Any]) -> None:
    """As JSON to the file ``path``, "-" for stdout; it says which version made it."""
    if path is None:
        return
    written = json.dumps({MADE_BY: __version__, **report}, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(written)
    else:
        Path(path).write_text(written, encoding="utf-8")
