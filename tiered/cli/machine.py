"""What this machine and a folder's filesystem offer. Everything is asked softly: what cannot be known is None or says why."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from tiered import MisuseError
from tiered.cli.measure import DATA_FILE, scratch_store
from tiered.config import SMALLEST_DRAM
from tiered.directio import direct_io_alignment
from tiered.memory import cgroup_room
from tiered.tiers.dram import HUGE_PAGE, DramConfig, DramTier
from tiered.types import BackendName

__all__ = ["backends", "cuda", "filesystem", "huge_pages", "limits", "store_facts"]

IN_MEMORY = ("tmpfs", "ramfs")
SMALLEST_ALIGNMENT = 4096
"""The store aligns to this or to what the drive wants, whichever is more."""


def backends() -> dict[str, str | None]:
    """Each with None where it works, or why it does not."""
    found: dict[str, str | None] = {}
    for name, module in (("libaio", "libaio"), ("aiofiles", "aiofile"), ("posix", "posix")):
        if importlib.util.find_spec(f"tiered.io.{module}") is not None:
            found[name] = _unavailable(module)
    return found


def _unavailable(module: str) -> str | None:
    probe = getattr(import_module("tiered.io.probe"), f"{module}_unavailable", None)
    try:
        if probe is not None:
            reason: str | None = probe()
            return reason
        import_module(f"tiered.io.{module}")
    except Exception as error:  # whatever it is that is wrong there, it is why this one is not available
        return " ".join(str(error).split()) or type(error).__name__
    return None


def cuda() -> dict[str, Any]:
    """``devices``, and ``why_none`` where there are none."""
    import torch

    if torch.version.cuda is None:
        return {"devices": [], "why_none": f"this torch ({torch.__version__}) is built without CUDA"}
    if not torch.cuda.is_available():
        why = "no driver is loaded" if not os.path.exists("/dev/nvidiactl") else "the driver does not give torch a device"
        return {"devices": [], "why_none": f"{why} (torch {torch.__version__}, CUDA {torch.version.cuda})"}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"index": index, "name": properties.name, "memory_bytes": properties.total_memory})
    return {"devices": devices, "why_none": None}


def filesystem(folder: str) -> dict[str, Any]:
    """Of the existing ``folder``. ``why_not`` says why nothing could be tried there. Raises MisuseError."""
    if not os.path.isdir(folder):
        what = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise MisuseError(f"{folder} {what}; name one that is there with --dir")
    found = os.statvfs(folder)
    kind, source = _mount(os.path.realpath(folder))
    facts: dict[str, Any] = {
        "folder": os.path.abspath(folder),
        "type": kind,
        "device": source,
        "in_memory": kind in IN_MEMORY,
        "total_bytes": found.f_blocks * found.f_frsize,
        "free_bytes": found.f_bavail * found.f_frsize,
        "holds_store": os.path.lexists(os.path.join(folder, DATA_FILE)),
        "o_direct": None,
        "alignment": None,
        "why_not": None,
    }
    try:
        fd, path = tempfile.mkstemp(prefix="tiered-scratch-", dir=folder)
    except OSError as error:
        return facts | {"why_not": f"cannot make a file in {folder}: {error.strerror}"}
    try:
        os.close(fd)
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return facts | {"o_direct": False, "alignment": SMALLEST_ALIGNMENT}
        try:
            return facts | {"o_direct": True, "alignment": max(SMALLEST_ALIGNMENT, direct_io_alignment(fd))}
        finally:
            os.close(fd)
    finally:
        os.unlink(path)


def store_facts(folder: str, backend: BackendName) -> dict[str, Any]:
    """How a store in ``folder`` would do its I/O; makes a scratch one to see. Raises MisuseError."""
    with scratch_store(folder, dram=SMALLEST_DRAM, backend=backend) as store:
        seen = store.statistics()
    kind = _mount(os.path.realpath(folder))[0]
    return {"backend": seen.backend, "direct": seen.direct, "filesystem": kind, "in_memory": kind in IN_MEMORY}


def _mount(path: str) -> tuple[str | None, str | None]:
    """Type and source of the filesystem that ``path`` is on, as proc(5) gives them; the last mount on a point covers others."""
    best, kind, source = "", None, None
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None, None
    for line in lines:
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left.split()[4])
        if len(point) >= len(best) and os.path.commonpath([point, path]) == point:
            best = point
            kind, source = right.split()[:2]
    return kind, source


def huge_pages() -> dict[str, Any]:
    """``pool``: whether memory that the DRAM tier maps is really backed by huge pages, as smaps shows after a touch."""
    setting = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", setting or "")
    meminfo = dict(re.findall(r"^(HugePages_\w+|Hugepagesize):\s+(\d+)", _read("/proc/meminfo") or "", re.MULTILINE))
    return {
        "transparent": chosen[1] if chosen else None,
        "pool": _pool_gets_them(),
        "reserved": int(meminfo.get("HugePages_Total", 0)),
        "reserved_free": int(meminfo.get("HugePages_Free", 0)),
        "page_bytes": int(meminfo.get("Hugepagesize", 0)) * 1024,
    }


def _pool_gets_them() -> bool | None:
    tier = DramTier(DramConfig(2 * HUGE_PAGE))
    try:
        begin, end = tier.address, tier.address + tier.capacity
        ctypes.memset(begin, 1, tier.capacity)
        smaps = _read("/proc/self/smaps")
        if smaps is None:
            return None
        inside, huge = False, 0
        for line in smaps.splitlines():
            mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if mapping:
                inside = int(mapping[1], 16) < end and int(mapping[2], 16) > begin
            elif inside and line.startswith("AnonHugePages:"):
                huge += int(line.split()[1])
        return huge > 0
    finally:
        tier.close()


def limits() -> dict[str, int | None]:
    """Bytes and numbers; None is no limit, or not known."""
    room = cgroup_room()
    return {
        "memlock_bytes": _soft(resource.RLIMIT_MEMLOCK),
        "open_files": _soft(resource.RLIMIT_NOFILE),
        "address_space_bytes": _soft(resource.RLIMIT_AS),
        "cgroup_memory_bytes": room.limit if room else None,
        "cgroup_headroom_bytes": room.headroom if room else None,
        "aio_max_nr": _number("/proc/sys/fs/aio-max-nr"),
        "aio_nr": _number("/proc/sys/fs/aio-nr"),
    }


def _soft(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _number(path: str) -> int | None:
    try:
        return int(_read(path) or "")
    except ValueError:
        return None
