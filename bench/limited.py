"""Processes in a memory cgroup: how much they used, and whether their limit killed them.

A process that says its phases (``say``) is run by ``under``: its limit holds from the end of its imports on.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    *("Ended", "Phase", "anonymous_of", "drop", "enter", "memory_cgroup", "read_peak", "ready_memory", "say", "under", "usage"),
]

MIB = 1 << 20
PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path | None]:
    """A fresh memory cgroup with ``limit`` bytes, or None where this user cannot make one."""
    v2, v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    base, knob = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = base / f"tiered-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / knob).write_text(str(limit))
    except OSError:
        group.rmdir() if group.is_dir() else None
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def limit_of(group: Path) -> Path:
    """Return the file of a memory cgroup that has its limit."""
    v1 = group / "memory.limit_in_bytes"
    return v1 if v1.exists() else group / "memory.max"


def usage(group: Path) -> int:
    """Bytes of anonymous and kernel memory in a cgroup: what cannot be dropped as the page cache can."""
    found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    if "rss" in found:  # v1, where a huge page counts in rss as well
        return int(found["rss"]) + int((group / "memory.kmem.usage_in_bytes").read_text())
    return int(found["anon"]) + int(found.get("kernel", 0))


def kills(group: Path) -> int:
    file = group / "memory.events"
    file = file if file.exists() else group / "memory.oom_control"
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))


READY = 256 << 20
"""Bytes of ready memory that are free beside what a cgroup has taken of it."""
HOLDER = """if True:
    import mmap, sys, time
    nbytes, piece, populate = int(sys.argv[1]), 2 << 20, 23  # MADV_POPULATE_WRITE
    memory = mmap.mmap(-1, nbytes + piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    began = time.perf_counter()
    memory.madvise(populate)
    print(nbytes / (time.perf_counter() - began), flush=True)
    freed = 0
    for line in sys.stdin:
        until = min(int(line) // piece * piece, nbytes)
        if until > freed:
            memory.madvise(mmap.MADV_DONTNEED, freed, until - freed)
            freed = until
"""


@contextmanager
def ready_memory(nbytes: int, group: Path) -> Iterator[float]:
    """Have ``nbytes`` of free memory ready for the processes of ``group`` within the block. Gives the bytes per second at which
    the system handed them out.

    A hypervisor takes free memory away from a virtual machine and has to find it again at its next use, which may take ten
    times as long as clearing it. What is measured then is the hypervisor. So a process outside of the cgroup has the memory
    first, and frees it as the cgroup takes it: what has been free for a second would be taken away again.
    """
    command = [sys.executable, "-c", HOLDER, str(nbytes)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    given, stop = holder.stdin, threading.Event()
    rate = float(holder.stdout.readline())
    before = _all_of(group)

    def free() -> None:
        freed = 0
        while freed < nbytes and not stop.is_set():
            wanted = min(nbytes, max(0, _all_of(group) - before) + READY)
            if wanted >= freed + READY // 8 or wanted == nbytes > freed:
                given.write(f"{wanted}\n")
                given.flush()
                freed = wanted
            stop.wait(0.005)

    freeing = threading.Thread(target=free)
    freeing.start()
    try:
        yield rate
    finally:
        stop.set()
        freeing.join()
        given.close()
        holder.wait()
        holder.stdout.close()


def _all_of(group: Path) -> int:
    """Bytes that a cgroup has, the page cache included."""
    v1 = group / "memory.usage_in_bytes"
    return int((v1 if v1.exists() else group / "memory.current").read_text())


def read_peak(group: Path | None) -> int | None:
    """Return the most bytes that a cgroup has had, the page cache included."""
    for name in PEAKS:
        if group is not None and (group / name).exists():
            return int((group / name).read_text())
    return None


def anonymous_of(pid: int) -> int:
    """Bytes of anonymous memory of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def drop(folder: Path) -> None:
    """Drop the files below ``folder`` from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def enter(group: Path | None) -> None:
    """Put this process into a cgroup."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def say(phase: str, **more: Any) -> None:
    """Begin a phase in a process that ``under`` runs: the first one is "imports", and what the last one says is the answer."""
    print(json.dumps({"phase": phase, **more}), flush=True)
    sys.stdin.readline()


@dataclass
class Phase:
    """Bytes that were in use when a phase began, and at most, and the seconds that it took."""

    name: str
    begins: int
    most: int
    seconds: float


@dataclass
class Ended:
    """What became of a process. ``killed``: how many the limit has killed; ``fresh``: bytes per second at which the system
    handed out the memory that it found ready; ``last``: what it said last."""

    code: int = -1
    imports: int = 0
    limit: int = 0
    peak: int = 0
    killed: int = 0
    fresh: float = 0.0
    phases: list[Phase] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return self.code == 0 and not self.killed

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def most(self, name: str = "") -> int:
        """Bytes that were in use at most, in phases of this name or in all."""
        return max((phase.most for phase in self.phases if name in ("", phase.name)), default=0)


def under(
    command: Sequence[str],
    extra: int | None,
    *,
    imports: int = 0,
    ready: int = 0,
    look: Callable[[int], int] | None = None,
) -> Ended:
    """Run ``python -m command`` in a cgroup whose limit, from the end of its imports on, is what they took (``imports``, if
    that is more) + ``extra``; None: no limit, and no need of a cgroup. ``ready``: bytes of memory that it finds ready then.
    ``look``: asked every millisecond or so for the bytes that the process has. Ends the program where the
    process fails for itself."""
    with memory_cgroup(1 << 40) as group, ExitStack() as stack, tempfile.TemporaryFile("w+") as errors:
        if group is None and extra is not None:
            sys.exit("no memory cgroup can be made here: run it as root")
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=lambda: enter(group),
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def used() -> int:
            return 0 if look is None else look(process.pid)

        ended, phase, began = Ended(), Phase("start", 0, 0, 0.0), time.monotonic()
        while True:
            while not select.select([process.stdout], [], [], None if look is None else 0.001)[0]:
                phase.most = max(phase.most, used())
            line = process.stdout.readline()
            if line and not line.startswith("{"):
                continue  # a library's
            phase.seconds = time.monotonic() - began
            ended.phases.append(phase)
            if not line:
                break
            now = used()
            phase.most = max(phase.most, now)
            ended.last = json.loads(line)
            phase, began = Phase(ended.last["phase"], now, now, 0.0), time.monotonic()
            if phase.name == "imports" and group is not None:
                ended.imports = usage(group)
                if extra is not None:
                    ended.limit = (max(imports, ended.imports) + extra) // 4096 * 4096
                    limit_of(group).write_text(str(ended.limit))
                ended.fresh = stack.enter_context(ready_memory(ready, group)) if ready else 0.0
                for name in PEAKS:
                    if (group / name).exists():
                        (group / name).write_text("0")
            process.stdin.write("\n")
            process.stdin.flush()
        ended.code = process.wait()
        stack.close()
        if group is not None:
            ended.killed, ended.peak = kills(group), read_peak(group) or 0
        if ended.code and not ended.killed:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} ended with {ended.code}:\n{errors.read()[-2000:]}")
        return ended
