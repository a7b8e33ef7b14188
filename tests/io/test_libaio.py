"""The libaio backend: the contract, then what only a misbehaving kernel shows.

Faults come in two ways. strace makes system calls fail in a child process. What strace cannot make (a short completion, a
submission that is taken in part) comes from a shim around libaio's functions, linked with the ring into a library of its own.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.io_backend import BLOCK, IOBackendContract, Memory, open_direct
from tiered.errors import MisuseError
from tiered.io.probe import libaio_unavailable
from tiered.types import IORequest, Operation

unavailable = libaio_unavailable()
if unavailable:
    pytest.skip(f"libaio: {unavailable}", allow_module_level=True)

from tiered.io.libaio import LibaioBackend, LibaioConfig  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "libaio_ext"


class TestLibaio(IOBackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[LibaioBackend]:
        backend = LibaioBackend(LibaioConfig(depth=8))
        yield backend
        backend.close()


class TestLibaioOfDepthOne(IOBackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[LibaioBackend]:
        backend = LibaioBackend(LibaioConfig(depth=1))
        yield backend
        backend.close()


@pytest.mark.parametrize("depth", [0, -1, 65537])
def test_a_depth_that_cannot_be_is_refused(depth: int) -> None:
    with pytest.raises(MisuseError, match=f"libaio: depth is .* a whole number from 1 to 65,536, not {depth}"):
        LibaioConfig(depth=depth)


# ---- faults by the shim, at the C interface ----

SHIM_BLOCK = 16 * BLOCK


class Completion(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int64), ("result", ctypes.c_int64))


class Request(ctypes.Structure):
    _fields_ = (
        *(("operation", ctypes.c_int), ("fd", ctypes.c_int), ("offset", ctypes.c_int64)),
        *(("address", ctypes.c_uint64), ("nbytes", ctypes.c_uint64), ("tag", ctypes.c_int64)),
    )


class ShimmedRing:
    """The ring over the shim; the same calls as ``tiered.io._aio`` has."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = ctypes.c_void_p()
        assert library.aio_ring_open(8, ctypes.byref(self.handle)) == 0
        self.set("shim_fired", 0)
        self.set("shim_submitted", 0)

    def set(self, name: str, value: int) -> None:
        kind = ctypes.c_long if name == "shim_cut_to" else ctypes.c_int
        kind.in_dll(self.library, name).value = value

    def count(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    @property
    def fired(self) -> int:
        return self.count("shim_fired")

    def is_readable(self) -> bool:
        return bool(select.select([self.library.aio_ring_fileno(self.handle)], [], [], 30)[0])

    def submit(self, requests: list[IORequest]) -> None:
        asked = (Request * len(requests))()
        for row, r in zip(asked, requests, strict=True):
            row.operation, row.fd, row.offset = r.operation is Operation.WRITE, r.fd, r.offset
            row.address, row.nbytes, row.tag = r.address, r.nbytes, r.tag
        assert self.library.aio_ring_submit(self.handle, asked, len(requests)) == len(requests)

    def reap(self, at_least: int, timeout: float) -> dict[int, int] | int:
        """Results by tag, or a negative errno."""
        out = (Completion * 8)()
        nanoseconds = ctypes.c_int64(int(timeout * 1e9))
        count = self.library.aio_ring_reap(self.handle, at_least, nanoseconds, out, 8)
        return count if count < 0 else {out[i].tag: out[i].result for i in range(count)}

    def close(self) -> None:
        self.library.aio_ring_close(self.handle)


@pytest.fixture(scope="module")
def shimmed(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """aio_ring.c over the shim. Compiled with every warning an error, as no user's build is."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    target = tmp_path_factory.mktemp("shim") / "ring.so"
    sources = [str(SOURCES / "aio_ring.c"), str(Path(__file__).with_name("libaio_shim.c"))]
    flags = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{SOURCES}"]
    flags += os.environ.get("TIERED_RING_FLAGS", "").split()  # a sanitizer's
    wraps = ["-Wl,--wrap=io_submit", "-Wl,--wrap=io_getevents"]
    built = subprocess.run(
        ["gcc", *flags, *sources, *wraps, "-laio", "-o", str(target)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(target))


@pytest.fixture
def ring(shimmed: ctypes.CDLL) -> Iterator[ShimmedRing]:
    ring = ShimmedRing(shimmed)
    yield ring
    ring.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A descriptor (buffered) and what is in the file."""
    content = random.Random(1).randbytes(8 * SHIM_BLOCK)
    path = tmp_path / "data"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDWR)
    yield fd, content
    os.close(fd)


def requests_over(fd: int, memory: Memory, operation: Operation) -> list[IORequest]:
    return [IORequest(operation, fd, i * SHIM_BLOCK, memory.address + i * SHIM_BLOCK, SHIM_BLOCK, i) for i in range(8)]


ALL = dict.fromkeys(range(8), SHIM_BLOCK)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(
    ("faults", "fires"),
    [
        ({"shim_cuts": 8, "shim_cut_to": BLOCK}, 8),
        ({"shim_cuts": 30, "shim_cut_to": BLOCK}, 30),  # the same request again and again
        ({"shim_cuts": 8, "shim_cut_to": 777}, 8),
        ({"shim_interrupted": 8}, 8),
        ({"shim_interrupted": 3, "shim_cuts": 9, "shim_cut_to": 1}, 12),
        ({"shim_take": 1}, 7),
        ({"shim_take": 3}, 2),
        ({"shim_busy": 3}, 3),
    ],
    ids=str,
)
def test_what_the_kernel_leaves_undone_is_done(
    ring: ShimmedRing, file: tuple[int, bytes], operation: Operation, faults: dict[str, int], fires: int
) -> None:
    """Short completions, interrupted ones, submissions taken in part or not at all."""
    fd, content = file
    memory = Memory(len(content))
    for name, value in {"shim_take": 0, **faults}.items():
        ring.set(name, value)
    if operation is Operation.WRITE:
        content = memory.fill(9)
    ring.submit(requests_over(fd, memory, operation))
    assert ring.reap(8, 30.0) == ALL
    ring.set("shim_take", 0)
    assert ring.fired == fires
    assert os.pread(fd, len(content), 0) == content
    assert memory.view == content


def test_an_error_on_the_rest_of_a_transfer_is_the_error(ring: ShimmedRing, file: tuple[int, bytes]) -> None:
    fd, content = file
    memory = Memory(len(content))
    for name, value in {"shim_cuts": 1, "shim_cut_to": BLOCK, "shim_refuse_rest": 8}.items():
        ring.set(name, value)
    ring.submit(requests_over(fd, memory, Operation.READ)[:1])
    assert ring.reap(1, 30.0) == {0: -errno.EINVAL}
    ring.set("shim_refuse_rest", 0)
    assert ring.fired == 2


def test_with_direct_io_the_tail_of_a_file_is_its_end(ring: ShimmedRing, file: tuple[int, bytes], tmp_path: Path) -> None:
    """A sector moved, and EINVAL for what follows: a disk of larger sectors, and a file that ends within one."""
    fd = open_direct(tmp_path / "data")
    memory = Memory(SHIM_BLOCK)
    for name, value in {"shim_cuts": 1, "shim_cut_to": 512, "shim_refuse_rest": 1}.items():
        ring.set(name, value)
    ring.submit(requests_over(fd, memory, Operation.READ)[:1])
    assert ring.reap(1, 30.0) == {0: 512}
    assert ring.fired == 2
    os.close(fd)


def test_a_file_that_ends_within_a_sector_is_not_asked_for_more(ring: ShimmedRing, tmp_path: Path) -> None:
    path, memory = tmp_path / "odd", Memory(SHIM_BLOCK)
    path.write_bytes(bytes(BLOCK + 100))
    fd = open_direct(path)
    ring.submit(requests_over(fd, memory, Operation.READ)[:1])
    assert ring.reap(1, 30.0) == {0: BLOCK + 100}
    assert ring.count("shim_submitted") == 1
    os.close(fd)


def test_a_request_that_the_kernel_has_no_room_for_wakes_the_event_loop(ring: ShimmedRing, file: tuple[int, bytes]) -> None:
    """Nothing is in flight, so no completion will; and only a reap offers it again."""
    fd, _ = file
    memory = Memory(SHIM_BLOCK)
    ring.set("shim_busy", 1)
    ring.submit(requests_over(fd, memory, Operation.READ)[:1])
    assert ring.is_readable()
    assert ring.reap(1, 30.0) == {0: SHIM_BLOCK}
    assert ring.fired == 1


def test_an_interrupted_reap_keeps_its_completions(ring: ShimmedRing, file: tuple[int, bytes]) -> None:
    fd, content = file
    memory = Memory(len(content))
    ring.set("shim_take", 4)  # the rest is pending when the signal comes
    ring.set("shim_busy", 0)
    ring.submit(requests_over(fd, memory, Operation.READ)[:4])
    ring.set("shim_busy", 2)
    ring.submit(requests_over(fd, memory, Operation.READ)[4:])
    ring.set("shim_getevents_eintr", 1)
    first = ring.reap(8, 30.0)
    assert first in (-errno.EINTR, ALL)  # ALL: it had everything without waiting
    if first != ALL:
        assert ring.is_readable()
        assert ring.reap(8, 30.0) == ALL
    for name in ("shim_take", "shim_getevents_eintr"):
        ring.set(name, 0)
    assert memory.view == content


def test_a_failing_getevents_loses_nothing(ring: ShimmedRing, file: tuple[int, bytes]) -> None:
    fd, content = file
    memory = Memory(len(content))
    ring.submit(requests_over(fd, memory, Operation.READ))
    ring.set("shim_getevents_eio", 1)
    assert ring.reap(8, 30.0) == -errno.EIO
    assert ring.is_readable()
    assert ring.reap(8, 30.0) == ALL
    assert ring.fired == 1
    assert memory.view == content


@pytest.mark.parametrize(
    "faults", [{"shim_cuts": 8, "shim_cut_to": BLOCK}, {"shim_busy": 5}, {"shim_getevents_eintr": 2}], ids=str
)
def test_close_ends_what_was_begun(shimmed: ctypes.CDLL, file: tuple[int, bytes], faults: dict[str, int]) -> None:
    fd, content = file
    memory = Memory(len(content))
    content = memory.fill(4)
    ring = ShimmedRing(shimmed)
    for name, value in faults.items():
        ring.set(name, value)
    ring.submit(requests_over(fd, memory, Operation.WRITE))
    ring.close()
    assert ring.fired == next(iter(faults.values()))
    assert os.pread(fd, len(content), 0) == content


def test_a_kernel_that_never_has_room_is_waited_for_within_the_timeout(ring: ShimmedRing, file: tuple[int, bytes]) -> None:
    fd, _ = file
    memory = Memory(SHIM_BLOCK)
    ring.set("shim_busy", 10**6)
    ring.submit(requests_over(fd, memory, Operation.READ)[:1])
    assert ring.reap(1, 0.02) == {}
    ring.set("shim_busy", 0)
    assert ring.reap(1, 30.0) == {0: SHIM_BLOCK}
    assert ring.fired >= 3


# ---- faults by strace, in a child process ----

CHILD = """
import ctypes, json, mmap, os, sys
sys.modules["torch"] = None  # none of this needs it, and it would take seconds
sys.path.insert(0, sys.argv[2])
from tiered.io.libaio import LibaioBackend, LibaioConfig
from tiered.types import IORequest, Operation

fd = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
memory = mmap.mmap(-1, 8 * 65536, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
try:
    backend = LibaioBackend(LibaioConfig(depth=8))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
    raise SystemExit
batch = [IORequest(Operation.READ, fd, i * 65536, address + i * 65536, 65536, i) for i in range(8)]
taken = backend.submit(batch)
results = {}
while len(results) < taken:
    for done in backend.reap(taken - len(results), 30.0):
        results[done.tag] = done.result
backend.close()
right = [i for i in range(8) if memory[i * 65536 : (i + 1) * 65536] == os.pread(os.open(sys.argv[1], 0), 65536, i * 65536)]
print(json.dumps([taken, sorted(results.items()), right]))
"""


@pytest.fixture(scope="module")
def strace() -> str:
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is not installed")
    trial = subprocess.run([program, "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"strace cannot trace here: {trial.stderr.strip()}")
    return program


def under_strace(strace: str, folder: Path, inject: str) -> tuple[list[object], int]:
    """What the child printed, and how many faults fired."""
    data, log = folder / "data", folder / "strace.log"
    data.write_bytes(random.Random(2).randbytes(8 * 65536))
    os.close(open_direct(data))
    calls = "io_setup,io_submit,io_getevents,io_pgetevents"
    command = [strace, "-f", "--seccomp-bpf", "-o", str(log), "-e", f"trace={calls}", "-e", f"inject={inject}"]
    child = subprocess.run(
        [*command, sys.executable, "-c", CHILD, str(data), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout), log.read_text().count("(INJECTED)")


GOOD = [8, [[i, 65536] for i in range(8)], list(range(8))]


@pytest.mark.parametrize(
    ("inject", "fires"),
    [
        ("io_submit:error=EAGAIN:when=1..3", 3),
        ("io_submit:error=EINTR:when=1..3", 3),
        ("io_getevents,io_pgetevents:error=EINTR:when=1", 1),
    ],
)
def test_a_call_that_failed_for_now_is_made_again(strace: str, tmp_path: Path, inject: str, fires: int) -> None:
    answer, fired = under_strace(strace, tmp_path, inject)
    print(f"{inject}: {fired} fired")
    assert fired == fires
    assert answer == GOOD


@pytest.mark.parametrize("name", ["EIO", "EINVAL", "ENOSPC", "EBADF", "ENOMEM"])
def test_a_refused_submission_is_its_first_requests_error(strace: str, tmp_path: Path, name: str) -> None:
    answer, fired = under_strace(strace, tmp_path, f"io_submit:error={name}:when=1")
    print(f"{name}: {fired} fired")
    assert fired == 1
    number = getattr(errno, name)
    assert answer == [8, [[0, -number], *([i, 65536] for i in range(1, 8))], list(range(1, 8))]


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("EAGAIN", "CapacityError", "fs.aio-max-nr"),
        ("ENOMEM", "CapacityError", "memory"),
        ("ENOSYS", "TieredError", "no AIO"),
    ],
)
def test_a_ring_that_cannot_be_had_says_why(strace: str, tmp_path: Path, name: str, kind: str, says: str) -> None:
    answer, fired = under_strace(strace, tmp_path, f"io_setup:error={name}:when=1")
    assert fired == 1
    assert answer[0] == kind
    assert says in str(answer[1])


AUTO = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from tiered import TieredError, TieredStore
for backend in "auto", "libaio":
    try:
        with TieredStore.open(f"{sys.argv[1]}/{backend}", dram=1 << 20, backend=backend) as store:
            store.put("t", torch.arange(1000))
            store.commit()
            assert store.get("t").equal(torch.arange(1000))
            print(store.statistics().backend)
    except TieredError as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("EAGAIN", "CapacityError"),
        ("ENOSYS", "TieredError"),
        pytest.param("EPERM", "TieredError", marks=pytest.mark.soak),  # the errors that mean that there is none are one branch
        pytest.param("EINVAL", "TieredError", marks=pytest.mark.soak),
    ],
)
def test_a_kernel_that_refuses_aio_leaves_auto_with_posix(strace: str, tmp_path: Path, name: str, answer: str) -> None:
    """Asked for libaio itself, it says why."""
    log = tmp_path / "log"
    command = [strace, "-f", "--seccomp-bpf", "-o", str(log), "-e", "trace=io_setup", "-e", f"inject=io_setup:error={name}"]
    arguments = [sys.executable, "-c", AUTO, str(tmp_path), str(ROOT)]
    child = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert child.stdout.split() == ["posix", answer], child.stderr
    assert log.read_text().count("(INJECTED)") == 2
