"""Small files of text and JSON that people and other programs write: machines, reports, configurations.

Reading trusts nothing: the size is limited before memory is taken, and what a file says is within bounds that the rest of the
package can compute with and print. Needs no torch.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from itertools import chain
from typing import Any

from tiered.errors import MisuseError, shown

__all__ = ["json_of", "problem_of", "text_of"]

MOST_BYTES = 64 << 20
"""Bytes of a file of JSON, unless the caller says otherwise."""
DEEPEST = 64
"""Levels of nesting."""
MOST_BITS = 128
"""Bits of an integer: with very large ones a float overflows."""


def text_of(path: str | os.PathLike[str], most: int = MOST_BYTES) -> str:
    """Return the text of a file of at most ``most`` bytes. Raises MisuseError for a pipe, a device, a folder, a name that no
    file can have, and a file that is large or not UTF-8; OSError."""
    told = shown(os.fspath(path), 1000)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is refused, not waited for
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise MisuseError(f"{told} is not the name of a file: {error}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise MisuseError(f"{told} is not a regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(fd)
    try:
        if len(data) > most:
            raise ValueError(f"it has more than {most:,} bytes")
        return data.decode()
    except ValueError as error:
        raise MisuseError(f"{told} is damaged: {error}") from None


def json_of(path: str | os.PathLike[str], most: int = MOST_BYTES) -> Any:
    """Return the JSON of a file, as ``text_of``. Raises MisuseError for a file that cannot be read, is not JSON, or has what
    ``problem_of`` names."""
    told = shown(os.fspath(path), 1000)
    try:
        value = json.loads(text_of(path, most))
        problem = problem_of(value)
    except OSError as error:
        raise MisuseError(f"cannot read {told}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{told} is damaged, or not JSON: {shown(str(error), 200)}") from None
    if problem:
        raise MisuseError(f"{told} is damaged, or not of this program: it has {problem}")
    return value


def problem_of(value: Any) -> str | None:
    """Return what is in ``value``, of lists, dicts and plain values, that a document may not have; None where there is nothing:
    deep nesting, integers of more than 128 bits, texts that are not Unicode."""
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        for one in levels[-1]:
            if isinstance(one, str):
                if not one.isascii() and any("\ud800" <= letter <= "\udfff" for letter in one):
                    return f"the text {shown(one, 60)!r}, which is not Unicode"
            elif isinstance(one, int):
                if one.bit_length() > MOST_BITS:
                    return f"an integer of {one.bit_length():,} bits; the limit is {MOST_BITS}"
            elif isinstance(one, dict | list | tuple):
                if len(levels) > DEEPEST:
                    return f"values that are nested deeper than {DEEPEST} levels"
                levels.append(chain(one.keys(), one.values()) if isinstance(one, dict) else iter(one))
                break
        else:
            levels.pop()
    return None
