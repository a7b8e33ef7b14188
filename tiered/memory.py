"""How much memory this process has, and may still take, by the system and by its cgroups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

from tiered.errors import CapacityError

__all__ = ["CgroupRoom", "anonymous", "beside_pool", "cgroup_room", "headroom", "refuse_without_room"]

POOL_SHARE = 10
BESIDE_POOL = 128 << 20
"""Beside its pool a process takes this fraction of it and so many bytes, after its imports; a model's activations apart."""
SPENT = 16 << 20
"""Bytes of these that are taken, or that the kernel takes for the process, when a model is first built."""
BESIDE_LARGEST = 96 << 20
"""Bytes beside a parameter, or a gradient, that is as large as all of that."""


def beside_pool(pool: int, largest: int = 0) -> int:
    """Bytes that building, loading, paging and training take at most beside a pool of ``pool`` bytes, activations apart.

    ``largest``: bytes of the largest parameter, or gradient, that is whole in ordinary memory.
    """
    return max(pool // POOL_SHARE + BESIDE_POOL - SPENT, largest + BESIDE_LARGEST)


def anonymous() -> int:
    """Bytes of anonymous memory of this process: heap, stacks, what was touched of a pool. 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def refuse_without_room(what: str, nbytes: int, mend: str) -> None:
    """Raises CapacityError if this process's cgroup leaves less than ``nbytes``, which ``what`` may take from here on: beyond
    its limit the kernel kills it. ``mend``: what to do about it, beside raising the limit."""
    room = cgroup_room()
    if room is not None and nbytes > room.headroom:
        raise CapacityError(
            f"{what} may take {nbytes:,} bytes more, and the memory cgroup {room.folder} leaves {room.headroom:,} of its limit "
            f"of {room.limit:,}: {mend}, or raise the limit by {nbytes - room.headroom:,} bytes"
        )


def headroom() -> int:
    """Bytes that this process may still take: what the system has, or its memory cgroup allows, whichever is less."""
    available: int = psutil.virtual_memory().available
    room = cgroup_room()
    return available if room is None else min(available, room.headroom)


class CgroupRoom(NamedTuple):
    """``headroom``: bytes that processes may still take; what the page cache has of ``limit`` is theirs for the asking."""

    folder: str
    limit: int
    headroom: int


def cgroup_room() -> CgroupRoom | None:
    """The least that this process's memory cgroup (v2 or v1) and those above it allow; None where none sets a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[CgroupRoom] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder == root.parent:
                break
            try:
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                cached = _page_cache(folder / "memory.stat")
            except (OSError, ValueError):
                continue  # "max", or a hierarchy that is mounted elsewhere
            found.append(CgroupRoom(str(folder), most, max(0, most - used + cached)))
    limited = [room for room in found if room.limit < 1 << 60]  # v1 writes "none" as nearly 2**63
    return min(limited, key=lambda room: room.headroom, default=None)


def _page_cache(statistics: Path) -> int:
    """Bytes of file pages that the kernel takes back when a cgroup is full: without those of tmpfs. 0 where it does not
    say: the limit holds all the same."""
    try:
        values = dict(line.split(maxsplit=1) for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    total = "total_" if "total_inactive_file" in values else ""  # v1 counts those of the cgroups below apart
    return sum(int(values.get(f"{total}{name}", 0)) for name in ("inactive_file", "active_file"))
