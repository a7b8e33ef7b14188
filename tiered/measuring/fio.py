"""Runs of fio, which measures the drive itself: direct I/O in blocks of 1 MiB, depth 16, with buffers on huge pages where there
are any.

The buffers decide the rate: a block in 4 KiB pages is 256 segments for the drive, and one segment in a huge page. A comparison
with fio's default buffers would favour a store that uses huge pages.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tiered.errors import MisuseError, TieredError
from tiered.measuring.meters import MovedBytes

__all__ = ["BLOCK", "DEPTH", "ENGINES", "Buffers", "Fio", "Job", "Mode", "huge_buffers", "version", "working"]

Mode = Literal["read", "write", "mixed"]

ENGINES = ("libaio", "io_uring")
RW = {"read": "read", "write": "write", "mixed": "rw"}  # half of each
BLOCK = 1 << 20
DEPTH = 16
HUGE_PAGE = 2 << 20
RESERVED = Path("/proc/sys/vm/nr_hugepages")
DURABLE = ("--end_fsync=1",)
"""Writes count when they are on disk, as in a store's commit: a drive may have a cache of its own."""


def version() -> str:
    """Return the version of fio. Raises MisuseError where fio is not installed."""
    if shutil.which("fio") is None:
        raise MisuseError("fio is not installed; install it (Debian, Ubuntu: apt-get install fio), or leave out --fio")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Buffers:
    """Options and environment variables that select fio's buffers, and a description."""

    words: str
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


PLAIN = Buffers("4 KiB pages (there are no huge pages here; the drive itself is faster)", ("--iomem=mmap",))
RESERVED_PAGES = Buffers("reserved huge pages (iomem=mmaphuge)", ("--iomem=mmaphuge", f"--hugepage-size={HUGE_PAGE}"))
TRANSPARENT = Buffers(
    "transparent huge pages (malloc advised by glibc)",
    ("--iomem=malloc", f"--iomem_align={HUGE_PAGE}"),
    {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
)


@contextmanager
def huge_buffers(nbytes: int) -> Iterator[Buffers]:
    """Choose buffers of ``nbytes``: reserved huge pages, which root reserves until the end of the context; else
    transparent huge pages; else plain pages."""
    pages = nbytes // HUGE_PAGE + 8
    added = _reserve(pages) if _free_pages() < pages else 0
    try:
        if _free_pages() >= pages:
            yield RESERVED_PAGES
        elif _transparent():
            yield TRANSPARENT
        else:
            yield PLAIN
    finally:
        if added:
            RESERVED.write_text(str(max(0, int(RESERVED.read_text()) - added)))


def _reserve(pages: int) -> int:
    """Reserve more huge pages; returns how many, which are fewer than ``pages`` where memory is fragmented, and none
    without the permission."""
    try:
        before = int(RESERVED.read_text())
        RESERVED.write_text(str(before + pages))
        return int(RESERVED.read_text()) - before
    except (OSError, ValueError):
        return 0


def _free_pages() -> int:
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    found = dict(re.findall(r"^(HugePages_Free|Hugepagesize):\s+(\d+)", meminfo, re.MULTILINE))
    return int(found.get("HugePages_Free", 0)) if int(found.get("Hugepagesize", 0)) * 1024 == HUGE_PAGE else 0


def _transparent() -> bool:
    """Whether malloc can advise huge pages, as glibc does since 2.35, and the kernel allows them."""
    library, number = platform.libc_ver()
    if library != "glibc" or tuple(map(int, number.split(".")[:2])) < (2, 35):
        return False
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


@dataclass(frozen=True)
class Job:
    """One run of fio: ``mode`` through ``engine``. It ends after ``seconds``, where given, or at the end of the file."""

    mode: Mode
    engine: str
    block: int = BLOCK
    depth: int = DEPTH
    order: Literal["sequential", "random"] = "sequential"
    cache: Literal["direct", "buffered"] = "direct"
    seconds: float | None = None

    @property
    def name(self) -> str:
        """The name in tables and reports."""
        return f"fio {self.engine}"


class Fio:
    """Runs jobs on ``nbytes`` of a file in ``folder``, from ``offset`` on. ``prepare`` writes a new file twice, so that jobs
    find existing extents."""

    def __init__(self, folder: str, nbytes: int, buffers: Buffers, name: str = "fio", offset: int = 0) -> None:
        self._file, self._nbytes, self._buffers, self._offset = os.path.join(folder, name), nbytes, buffers, offset

    def prepare(self) -> None:
        """Write the file twice."""
        for _ in range(2):
            self.run(Job("write", "libaio"))

    def run(self, job: Job) -> MovedBytes:
        """Run fio. Raises TieredError with fio's message."""
        done = subprocess.run(
            [*self.command(job), "--output-format=json"],
            capture_output=True,
            text=True,
            env=os.environ | self._buffers.environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends fio
        )
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise TieredError(f"fio with ioengine={job.engine} failed ({done.returncode}): {said[:300]}")
        return _result(done.stdout)

    def command(self, job: Job) -> Sequence[str]:
        """Return the command line. fio runs as one process, whose jobs are threads, so that it ends with this one."""
        return [
            "fio",
            "--name=tiered",
            "--thread",
            f"--filename={self._file}",
            *([f"--offset={self._offset}"] if self._offset else []),
            f"--size={self._nbytes}",
            f"--direct={int(job.cache == 'direct')}",
            f"--ioengine={job.engine}",
            f"--bs={job.block}",
            f"--iodepth={job.depth}",
            f"--rw={'rand' if job.order == 'random' else ''}{RW[job.mode]}",
            *([] if job.mode == "read" else DURABLE),
            *([] if job.seconds is None else [f"--runtime={job.seconds:.3f}s"]),
            *self._buffers.options,
        ]


def working(attempt: Callable[[str], object]) -> tuple[list[str], dict[str, str]]:
    """Return the engines with which ``attempt`` works, and why it does not with the others."""
    found, unavailable = [], {}
    for engine in ENGINES:
        try:
            attempt(engine)
        except TieredError as error:
            unavailable[engine] = str(error)
        else:
            found.append(engine)
    return found, unavailable


def _result(text: str) -> MovedBytes:
    job = json.loads(text[text.index("{") :])["jobs"][0]  # notes may come before
    seconds = max(job[way]["runtime"] for way in ("read", "write")) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return MovedBytes(job["read"]["io_bytes"] + job["write"]["io_bytes"], seconds, cpu)
