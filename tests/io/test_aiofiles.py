from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.contracts.io_backend import BLOCK, PATIENCE, READ, WRITE, File, IOBackendContract, Memory, drain, run
from tiered.errors import MisuseError, TieredError
from tiered.io import aiofiles
from tiered.io.aiofiles import AiofilesBackend, AiofilesConfig
from tiered.io.backends import open_backend
from tiered.types import IOCompletion, IORequest


@pytest.fixture
def backend() -> Iterator[AiofilesBackend]:
    backend = AiofilesBackend(AiofilesConfig(depth=8))
    yield backend
    backend.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


class TestAiofiles(IOBackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[AiofilesBackend]:
        backend = AiofilesBackend(AiofilesConfig(depth=8))
        yield backend
        backend.close()


class TestAiofilesOfDepthOne(IOBackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[AiofilesBackend]:
        backend = AiofilesBackend(AiofilesConfig(depth=1))
        yield backend
        backend.close()


class TestAiofilesWithoutPreadv(IOBackendContract):
    """As on a macOS before 11, which has no O_DIRECT either."""

    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[AiofilesBackend]:
        monkeypatch.setattr(aiofiles, "_read", aiofiles._pread)
        backend = AiofilesBackend()
        yield backend
        backend.close()

    @pytest.fixture
    def open_file(self, tmp_path: Path) -> Iterator[Callable[[int], File]]:
        files: list[File] = []

        def make(nbytes: int) -> File:
            files.append(File(tmp_path / f"data{len(files)}", 0, nbytes))
            return files[-1]

        yield make
        for file in files:
            os.close(file.fd)

    @pytest.mark.skip(reason="without preadv the copy is Python's own, and a wild address is a crash")
    def test_an_address_that_is_not_ours(self) -> None: ...

    @pytest.mark.skip(reason="without preadv there is no direct I/O: the memory that is read into is Python's own")
    def test_misaligned_direct_io_answers_as_the_kernel_does(self) -> None: ...


@pytest.mark.parametrize("depth", [0, -1, 1025])
def test_a_depth_that_cannot_be_is_refused(depth: int) -> None:
    with pytest.raises(MisuseError, match=f"aiofiles: depth is .* a whole number from 1 to 1,024, not {depth}"):
        AiofilesConfig(depth)


def test_depth_requests_move_at_once(backend: AiofilesBackend, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody passes the barrier before all have reached it."""
    barrier = threading.Barrier(backend.depth, timeout=PATIENCE)

    def together(fd: int, memory: memoryview, offset: int) -> int:
        barrier.wait()
        return len(memory)

    monkeypatch.setattr(aiofiles, "_read", together)
    memory = Memory(BLOCK)
    requests = [IORequest(READ, fd, 0, memory.address, BLOCK, tag) for tag in range(backend.depth)]
    assert run(backend, requests) == dict.fromkeys(range(backend.depth), BLOCK)


@pytest.mark.parametrize("operation", [READ, WRITE])
def test_short_transfers_are_continued(
    backend: AiofilesBackend, fd: int, monkeypatch: pytest.MonkeyPatch, operation: object
) -> None:
    def pieces(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, memory, offset: call(fd, memory[:1000], offset)

    monkeypatch.setattr(aiofiles, "_read", pieces(aiofiles._preadv))
    monkeypatch.setattr(aiofiles, "_write", pieces(os.pwrite))
    memory = Memory(3 * BLOCK)
    content = memory.fill(5)
    request = IORequest(READ if operation is READ else WRITE, fd, 100, memory.address, 3 * BLOCK, 1)
    assert run(backend, [request]) == {1: 3 * BLOCK}
    assert memory.view == os.pread(fd, 3 * BLOCK, 100)
    assert (memory.view == content) is (operation is WRITE)


def test_an_error_after_a_part_is_the_error(backend: AiofilesBackend, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(fd: int, memory: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, "broken")
        return os.preadv(fd, [memory[: len(memory) // 2]], offset)

    monkeypatch.setattr(aiofiles, "_read", half)
    memory = Memory(2 * BLOCK)
    assert run(backend, [IORequest(READ, fd, 0, memory.address, 2 * BLOCK, 1)]) == {1: -errno.EIO}


def test_what_is_no_request_completes_all_the_same(backend: AiofilesBackend, fd: int) -> None:
    memory = Memory(BLOCK)
    requests = [
        IORequest(READ, 1 << 40, 0, memory.address, BLOCK, 1),
        IORequest(READ, fd, -BLOCK, memory.address, BLOCK, 2),
        IORequest(READ, fd, 0, memory.address, -5, 3),
        IORequest(READ, fd, 0, memory.address, 0, 4),
    ]
    assert run(backend, requests) == {1: -errno.EINVAL, 2: -errno.EINVAL, 3: -errno.EINVAL, 4: 0}


class Gate:
    """Reads wait until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        monkeypatch.setattr(aiofiles, "_read", self._read)

    def _read(self, fd: int, memory: memoryview, offset: int) -> int:
        assert self.open.wait(PATIENCE)
        return os.preadv(fd, [memory], offset)


def test_reap_returns_what_there_is_when_the_time_is_up(
    backend: AiofilesBackend, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, memory = Gate(monkeypatch), Memory(2 * BLOCK)
    assert backend.submit([IORequest(READ, fd, 0, memory.address, BLOCK, 1)]) == 1
    assert backend.reap(1, 0.0) == []
    assert backend.submit([IORequest(WRITE, fd, 0, memory.address + BLOCK, BLOCK, 2)]) == 1
    assert backend.reap(1, PATIENCE) == [IOCompletion(2, BLOCK)]
    gate.open.set()
    assert drain(backend, 1) == {1: BLOCK}


@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_during_reap_loses_nothing(
    backend: AiofilesBackend, fd: int, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    gate, memory = Gate(monkeypatch), Memory(BLOCK)

    def handler(number: int, frame: FrameType | None) -> None:
        gate.open.set()
        if raises:
            raise InterruptedError("by the handler")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        assert backend.submit([IORequest(READ, fd, 0, memory.address, BLOCK, 1)]) == 1
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        if raises:
            with pytest.raises(InterruptedError, match="by the handler"):
                backend.reap(1, PATIENCE)
        assert backend.reap(1, PATIENCE) == [IOCompletion(1, BLOCK)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_close_ends_every_thread(fd: int) -> None:
    before = set(threading.enumerate())
    backend = AiofilesBackend()
    memory = Memory(BLOCK)
    assert run(backend, [IORequest(READ, fd, 0, memory.address, BLOCK, 1)]) == {1: BLOCK}
    assert set(threading.enumerate()) > before
    backend.close()
    assert set(threading.enumerate()) == before


def test_close_waits_for_a_slow_device(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = AiofilesBackend()
    gate, memory, seen = Gate(monkeypatch), Memory(BLOCK), list[bool]()
    assert backend.submit([IORequest(READ, fd, 0, memory.address, BLOCK, 1)]) == 1
    closing = threading.Thread(target=lambda: (backend.close(), seen.append(gate.open.is_set())))
    closing.start()
    gate.open.set()
    closing.join()
    assert seen == [True]
    assert memory.view == os.pread(fd, BLOCK, 0)


def test_it_works_under_an_event_loop_of_the_callers(fd: int) -> None:
    """The private loop has nothing to do with the one that runs in this thread."""
    import asyncio

    async def body() -> dict[int, int]:
        backend = AiofilesBackend()
        memory = Memory(BLOCK)
        readable = asyncio.Event()
        assert backend.submit([IORequest(READ, fd, 0, memory.address, BLOCK, 9)]) == 1
        loop = asyncio.get_running_loop()
        loop.add_reader(backend.fileno(), readable.set)
        await readable.wait()
        loop.remove_reader(backend.fileno())
        done = backend.reap(1, 0.0)
        backend.close()
        return {completion.tag: completion.result for completion in done}

    assert asyncio.run(body()) == {9: BLOCK}


@pytest.mark.parametrize("threads", range(9))
def test_without_threads_requests_are_made_all_the_same_and_once(
    fd: int, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The system gives no more of them. What the pool has queued nevertheless must not move bytes after its completion."""
    backend, start, left = AiofilesBackend(AiofilesConfig(depth=8)), threading.Thread.start, [threads]

    def start_if_there_is_one(thread: threading.Thread) -> None:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    calls = []

    def counted(fd: int, memory: memoryview, offset: int) -> int:
        calls.append(offset)
        return os.preadv(fd, [memory], offset)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_one)
    monkeypatch.setattr(aiofiles, "_read", counted)
    memory = Memory(8 * BLOCK)
    requests = [IORequest(READ, fd, tag, memory.address + tag * BLOCK, BLOCK, tag) for tag in range(8)]
    for _ in range(3):
        calls.clear()
        assert run(backend, requests) == dict.fromkeys(range(8), BLOCK)
        assert sorted(calls) == list(range(8))
        assert memory.view == b"".join(os.pread(fd, BLOCK, tag) for tag in range(8))
    backend.close()
    assert sorted(calls) == list(range(8))


@pytest.mark.parametrize("lacks", ["thread", "descriptor"])
def test_a_backend_that_cannot_be_opened_keeps_nothing(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    before = set(os.listdir("/proc/self/fd"))

    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread") if lacks == "thread" else OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        if lacks == "descriptor":
            patch.setattr("asyncio.new_event_loop", none_left)
        with pytest.raises((RuntimeError, OSError)):
            AiofilesBackend()
        with pytest.raises(TieredError, match="aiofiles backend cannot be opened"):
            open_backend("aiofiles", 8)
    assert set(os.listdir("/proc/self/fd")) == before
