"""How much memory this process may still take, by the system and by its cgroups."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["CgroupRoom", "cgroup_room", "headroom"]


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
