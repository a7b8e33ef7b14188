"""A memory cgroup below the one that we are in, v1 or v2: a limit that the kernel holds a process to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["cgroup", "enter"]

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextmanager
def cgroup(nbytes: int) -> Iterator[Path]:
    """A memory cgroup with this limit, below the one that we are in."""
    name = f"tiered-test-{os.getpid()}"
    root, limit = (V1, "memory.limit_in_bytes") if (V1 / "memory.limit_in_bytes").exists() else (V2, "memory.max")
    folder = root / name
    try:
        folder.mkdir()
        (folder / limit).write_text(str(nbytes))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def enter(folder: Path) -> None:
    """This process, from here on; what it has already counts where it was."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
