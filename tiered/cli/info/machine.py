"""``tiered info``: describe this machine and the filesystem of a folder, and measure rates. A question without an answer is
None in the report, or has the reason."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from tiered import MisuseError, TieredError
from tiered.cli.output import counted, rate, refuse_unwritable, write_report
from tiered.cli.stop import Stopped, StopRequest
from tiered.format.locked_file import makes_direct
from tiered.io.backends import unavailable
from tiered.links.native import native_link_unavailable
from tiered.measuring.meters import DATA_FILE, bytes_of, environment, measure, scratch_store
from tiered.planning.machine import Machine
from tiered.store.opening import SMALLEST_DRAM, default_dram
from tiered.system import cgroup_room, direct_io_alignment
from tiered.tiers.dram import HUGE_PAGE, DramConfig, DramTier
from tiered.types import BackendName, format_size

__all__ = ["cuda", "filesystem", "huge_pages", "info", "limits", "store_facts"]

IN_MEMORY = ("tmpfs", "ramfs")
SMALLEST_ALIGNMENT = 4096
"""Least alignment of the store; a drive may need more."""


def cuda() -> dict[str, Any]:
    """Describe the CUDA devices; ``why_none`` says why there are none."""
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
    """Describe the filesystem of ``folder``, which must exist; ``why_not`` says why no file could be made there. Raises
    MisuseError."""
    if not os.path.isdir(folder):
        what = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise MisuseError(f"{folder} {what}; name an existing one with --drive")
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
        direct = makes_direct(fd)
        alignment = direct_io_alignment(fd) if direct else 0
        return facts | {"o_direct": direct, "alignment": max(SMALLEST_ALIGNMENT, alignment)}
    finally:
        os.close(fd)
        os.unlink(path)


def store_facts(folder: str, backend: BackendName) -> dict[str, Any]:
    """Describe how a store in ``folder`` does its I/O, by making a scratch store. Raises MisuseError."""
    with scratch_store(folder, dram=SMALLEST_DRAM, backend=backend) as store:
        seen = store.statistics()
    kind = _mount(os.path.realpath(folder))[0]
    return {"backend": seen.backend, "direct": seen.direct, "filesystem": kind, "in_memory": kind in IN_MEMORY}


def _mount(path: str) -> tuple[str | None, str | None]:
    """Return type and source of the filesystem of ``path`` (see proc(5)). A later mount covers earlier ones."""
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
    """Describe huge pages. ``pool`` says whether the kernel backs touched memory of a DRAM tier with huge pages, according to
    /proc/self/smaps."""
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
    """Return the limits of this process; None is no limit, or not known."""
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


POOLS = (16 << 20, 256 << 20)
"""Memory of the scratch stores. A run with the small one shows whether the drive is fast enough for the large one."""
PATIENCE = 1.0
"""Most seconds of the small run before the large one is left out."""
COPIED = 128 << 20
"""Bytes of one copy in memory, or over a device's link."""


def info(folder: str, what: Literal["rates", "none"], json: str | None, measured: Machine | None = None) -> int:
    """Print the description, and the ``rates`` where ``what`` asks for them, of the drive those of the machine that was
    ``measured`` just before; returns the exit code."""
    refuse_unwritable(json)
    report: dict[str, Any] = environment()
    memory = psutil.virtual_memory()
    report |= {
        "memory_available_bytes": memory.available,
        "backends": [{"name": name, "unavailable": why} for name, why in unavailable().items()],
        "native_disk_link": {"unavailable": native_link_unavailable()},
        "cuda": cuda(),
        "filesystem": filesystem(folder),
        "huge_pages": huge_pages(),
        "limits": limits(),
        "default_dram_bytes": default_dram(),
        "rates": None,
    }
    if json != "-":
        print(describe(report), flush=True)
    if what == "rates":
        try:
            with StopRequest() as stop:
                report["rates"] = _rates(report, stop, measured)
        except Stopped as stopped:
            print("tiered: stopped while measuring; the scratch store is removed", file=sys.stderr)
            return stopped.exit_code
        if json != "-":
            print(describe_rates(report["rates"]))
    write_report(json, report)
    return 0


def _rates(report: dict[str, Any], stop: StopRequest, measured: Machine | None) -> dict[str, Any]:
    """Measure rates in bytes per second; None where impossible, and ``why_no_disk``."""
    read, write, why = None, None, _why_no_disk(report["filesystem"])
    if measured is not None:
        read, write = measured.read, measured.write
    elif why is None:
        try:
            read, write, why = _disk(report["filesystem"]["folder"], report["default_dram_bytes"], stop)
        except TieredError as error:
            why = str(error)
    source, target = bytes_of(COPIED), torch.empty(COPIED, dtype=torch.uint8, device="cpu")
    links = []
    for device in report["cuda"]["devices"]:
        stop.check()
        links.append({"index": device["index"], **_device(device["index"])})
    return {
        "disk_read": read,
        "disk_write": write,
        "why_no_disk": why,
        "memory_copy": _copies(lambda: target.copy_(source), stop),
        "memory_threads": torch.get_num_threads(),
        "devices": links,
    }


def _why_no_disk(disk: dict[str, Any]) -> str | None:
    if disk["holds_store"]:
        return f"{disk['folder']} holds a store, which stays as it is: name the folder around it with --drive"
    why: str | None = disk["why_not"]
    return why


def _disk(folder: str, memory: int, stop: StopRequest) -> tuple[float | None, float | None, str | None]:
    """Measure reading and writing through a scratch store; the third value says why that was impossible."""
    found = None
    for pool in POOLS:
        if found is not None and pool > memory:
            break
        stop.check()
        began = time.monotonic()
        with scratch_store(folder, dram=pool) as store:
            rates = measure(store)
        if rates is None:
            break
        found = rates
        if time.monotonic() - began > PATIENCE:
            break
    if found is None:
        return None, None, "the filesystem has no room for the measurement: free some, or name another folder with --drive"
    return found.read, found.write, None


def _copies(copy: Callable[[], object], stop: StopRequest) -> float:
    """Measure copies in bytes per second: the median of five, after a first one that touches the pages."""
    copy()
    seconds = []
    for _ in range(5):
        stop.check()
        began = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - began)
    return COPIED / statistics.median(seconds)


def _device(index: int) -> dict[str, float | None]:
    """Measure both directions between pinned memory and a device; None where the device has no room for it."""
    rates: dict[str, float | None] = {"to_device": None, "from_device": None}
    try:
        host = torch.empty(COPIED, dtype=torch.uint8, device="cpu", pin_memory=True)
        device = torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{index}")
        for name, target, source in (("to_device", device, host), ("from_device", host, device)):
            seconds = []
            for _ in range(6):
                torch.cuda.synchronize(index)
                began = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(index)
                seconds.append(time.perf_counter() - began)
            rates[name] = COPIED / statistics.median(seconds[1:])
    except RuntimeError:  # torch's OutOfMemoryError is one
        pass
    return rates


def describe(report: dict[str, Any]) -> str:
    """Format everything but the rates in several lines."""
    commit = f" (commit {report['commit']})" if report["commit"] else ""
    lines = [
        f"versions    tiered {report['tiered']}{commit}, torch {report['torch']}, Python {report['python']}, "
        f"{report['kernel']}",
        f"machine     {report['cores']} cores, {format_size(report['memory_bytes'])} of memory, "
        f"{format_size(report['memory_available_bytes'])} available",
    ]
    for label, backend in zip(_label("backends"), report["backends"], strict=False):
        lines.append(f"{label}{backend['name']}: {backend['unavailable'] or 'works'}")
    why = report["native_disk_link"]["unavailable"]
    which = "native (C), for the libaio backend" if why is None else f"in Python: the native one is {why}"
    lines.append(f"disk link   {which}")
    for label, device in zip(_label("CUDA"), report["cuda"]["devices"], strict=False):
        lines.append(f"{label}cuda:{device['index']}: {device['name']}, {format_size(device['memory_bytes'])}")
    if not report["cuda"]["devices"]:
        lines.append(f"CUDA        none: {report['cuda']['why_none']}")
    return "\n".join([*lines, *_filesystem(report["filesystem"]), *_pages(report["huge_pages"]), *_limits(report)])


def _label(name: str) -> list[str]:
    """Return the label of a first line, and the indentation of the lines after it."""
    return [name.ljust(12)] + [" " * 12] * 64


def _filesystem(disk: dict[str, Any]) -> list[str]:
    what = f"{disk['type'] or 'unknown type'} on {disk['device'] or 'unknown device'}"
    if disk["why_not"]:
        direct = disk["why_not"]
    elif disk["in_memory"]:
        direct = "this is memory, not a drive: rates measured here say nothing about a drive"
    elif disk["o_direct"]:
        direct = f"O_DIRECT, alignment {disk['alignment']}"
    else:
        direct = "no O_DIRECT: I/O goes through the page cache, which is slower and takes memory beside --dram"
    space = f"{format_size(disk['free_bytes'])} free of {format_size(disk['total_bytes'])}"
    if not disk["total_bytes"]:
        space = "the filesystem does not say how much is free"
    return [
        f"filesystem  {disk['folder']}: {what}",
        f"            {direct}",
        f"            {space}{', holds a store' if disk['holds_store'] else ''}",
    ]


def _pages(pages: dict[str, Any]) -> list[str]:
    pool = {True: "the store gets them", False: "the store does not get them, which makes I/O slower", None: "not known"}
    size = f" of {format_size(pages['page_bytes'])}" if pages["page_bytes"] else ""
    return [
        f"huge pages  transparent: {pages['transparent'] or 'not in this kernel'}; {pool[pages['pool']]}; "
        f"reserved: {pages['reserved']}{size}, {pages['reserved_free']} free"
    ]


def _limits(report: dict[str, Any]) -> list[str]:
    found = report["limits"]

    def size(name: str) -> str:
        return "no limit" if found[name] is None else format_size(found[name])

    cgroup = f"cgroup memory {size('cgroup_memory_bytes')}"
    if found["cgroup_memory_bytes"] is not None:
        cgroup += f", {format_size(found['cgroup_headroom_bytes'])} left"
    used, most = found["aio_nr"], found["aio_max_nr"]
    aio = "not in this kernel" if most is None or used is None else f"{used:,} of {most:,} in use"
    files = "no limit" if found["open_files"] is None else f"{found['open_files']:,}"
    return [
        f"limits      locked memory {size('memlock_bytes')}; open files {files}; address space {size('address_space_bytes')}",
        f"            {cgroup}; fs.aio {aio}",
        f"budget      {format_size(report['default_dram_bytes'])} of host memory for a store that is opened without dram=",
    ]


def describe_rates(rates: dict[str, Any]) -> str:
    """Format the rates in several lines."""
    if rates["why_no_disk"]:
        lines = [f"rates       disk not measured: {rates['why_no_disk']}"]
    else:
        lines = [f"rates       disk through a store: read {rate(rates['disk_read'])}, write {rate(rates['disk_write'])}"]
    lines.append(f"            memory copy: {rate(rates['memory_copy'])} on {counted(rates['memory_threads'], 'thread')}")
    for link in rates["devices"]:
        ways = (("to it", link["to_device"]), ("from it", link["from_device"]))
        told = ", ".join(f"{way} {'not measured' if found is None else rate(found)}" for way, found in ways)
        lines.append(f"            cuda:{link['index']}: {told}")
    return "\n".join(lines)
