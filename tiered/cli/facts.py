"""What ``tiered info`` finds, and how it tells."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import psutil
import torch

from tiered import TieredError
from tiered.cli.arguments import BACKENDS
from tiered.cli.machine import backends, cuda, filesystem, huge_pages, limits
from tiered.cli.measure import bytes_of, environment, scratch_store
from tiered.cli.rates import measure
from tiered.cli.report import refuse_unwritable, write_report
from tiered.cli.stop import Stopped, StopRequest
from tiered.cli.table import bandwidth
from tiered.config import default_dram
from tiered.sizes import format_size

__all__ = ["info"]

POOLS = (16 << 20, 256 << 20)
"""A small scratch store says whether the drive is quick enough to measure with a large one in the same second."""
PATIENCE = 1.0
"""Seconds that the small one may take for that."""
COPIED = 128 << 20
"""Bytes of one copy in memory, or over a device's link."""


def info(folder: str, what: Literal["rates", "none"], json: str | None) -> int:
    """Print what there is; returns the exit code."""
    refuse_unwritable(json)
    report: dict[str, Any] = environment()
    memory = psutil.virtual_memory()
    report |= {
        "memory_available_bytes": memory.available,
        "backends": [{"name": name, "unavailable": why} for name, why in backends().items()],
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
                report["rates"] = _rates(report, stop)
        except Stopped as stopped:
            print("tiered: stopped while measuring; the scratch store is removed", file=sys.stderr)
            return stopped.exit_code
        if json != "-":
            print(describe_rates(report["rates"]))
    write_report(json, report)
    return 0


# Measuring


def _rates(report: dict[str, Any], stop: StopRequest) -> dict[str, Any]:
    """Bytes per second; None where it could not be measured, and ``why_no_disk``."""
    read, write, why = None, None, _why_no_disk(report["filesystem"])
    if why is None:
        try:
            read, write, why = _disk(report["filesystem"]["folder"], report["default_dram_bytes"], stop)
        except TieredError as error:
            why = str(error)
    source, target = bytes_of(COPIED), torch.empty(COPIED, dtype=torch.uint8)
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
        return f"{disk['folder']} holds a store, which stays as it is: name the folder around it with --dir"
    why: str | None = disk["why_not"]
    return why


def _disk(folder: str, memory: int, stop: StopRequest) -> tuple[float | None, float | None, str | None]:
    """Read and write bytes per second through a scratch store, and why not."""
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
        return None, None, "the filesystem has no room for it: make some, or name another folder with --dir"
    return found.read, found.write, None


def _copies(copy: Callable[[], object], stop: StopRequest) -> float:
    """Bytes of the contents per second, median of some copies after a first one that touches the pages."""
    copy()
    seconds = []
    for _ in range(5):
        stop.check()
        began = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - began)
    return COPIED / statistics.median(seconds)


def _device(index: int) -> dict[str, float | None]:
    """Both directions of the link to a device, from and to pinned memory; None where the device has no room for it."""
    rates: dict[str, float | None] = {"to_device": None, "from_device": None}
    try:
        host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
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


# Telling


def describe(report: dict[str, Any]) -> str:
    """Several lines, all but the rates."""
    commit = f" (commit {report['commit']})" if report["commit"] else ""
    lines = [
        f"versions    tiered {report['tiered']}{commit}, torch {report['torch']}, Python {report['python']}, "
        f"{report['kernel']}",
        f"machine     {report['cores']} cores, {format_size(report['memory_bytes'])} of memory, "
        f"{format_size(report['memory_available_bytes'])} available",
    ]
    for label, backend in zip(_label("backends"), report["backends"], strict=False):
        works = "works" if backend["name"] in BACKENDS else "works; no option chooses it yet"
        lines.append(f"{label}{backend['name']}: {backend['unavailable'] or works}")
    for label, device in zip(_label("CUDA"), report["cuda"]["devices"], strict=False):
        lines.append(f"{label}cuda:{device['index']}: {device['name']}, {format_size(device['memory_bytes'])}")
    if not report["cuda"]["devices"]:
        lines.append(f"CUDA        none: {report['cuda']['why_none']}")
    return "\n".join([*lines, *_filesystem(report["filesystem"]), *_pages(report["huge_pages"]), *_limits(report)])


def _label(name: str) -> list[str]:
    """For a first line and those after it."""
    return [name.ljust(12)] + [" " * 12] * 64


def _filesystem(disk: dict[str, Any]) -> list[str]:
    what = f"{disk['type'] or 'unknown type'} on {disk['device'] or 'unknown device'}"
    if disk["why_not"]:
        direct = disk["why_not"]
    elif disk["in_memory"]:
        direct = "this is memory, not a drive: what is measured here says nothing about one"
    elif disk["o_direct"]:
        direct = f"O_DIRECT, alignment {disk['alignment']}"
    else:
        direct = "no O_DIRECT: I/O goes through the page cache, slower and with memory that is not in the budget"
    space = f"{format_size(disk['free_bytes'])} free of {format_size(disk['total_bytes'])}"
    if not disk["total_bytes"]:
        space = "it does not say how much is free"
    return [
        f"filesystem  {disk['folder']}: {what}",
        f"            {direct}",
        f"            {space}{', holds a store' if disk['holds_store'] else ''}",
    ]


def _pages(pages: dict[str, Any]) -> list[str]:
    pool = {True: "the pool gets them", False: "the pool does not get them, which slows the drive down", None: "not known"}
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
        f"budget      {format_size(report['default_dram_bytes'])} of DRAM, unless a store is opened with another",
    ]


def describe_rates(rates: dict[str, Any]) -> str:
    """Several lines."""
    if rates["why_no_disk"]:
        lines = [f"rates       disk not measured: {rates['why_no_disk']}"]
    else:
        lines = [
            f"rates       disk through a store: read {bandwidth(rates['disk_read'])}, "
            f"write {bandwidth(rates['disk_write'])} GB/s"
        ]
    lines.append(f"            memory copy: {bandwidth(rates['memory_copy'])} GB/s on {rates['memory_threads']} threads")
    for link in rates["devices"]:
        ways = (("to it", link["to_device"]), ("from it", link["from_device"]))
        told = ", ".join(f"{way} {'not measured' if rate is None else bandwidth(rate) + ' GB/s'}" for way, rate in ways)
        lines.append(f"            cuda:{link['index']}: {told}")
    return "\n".join(lines)
