"""What every ``IOBackend`` must do. To run it over one of yours, subclass and say how to open it::

    class TestMine(IOBackendContract):
        @pytest.fixture
        def backend(self):
            backend = Mine(...)
            yield backend
            backend.close()

The oracle is ``os.preadv`` and ``os.pwritev`` on a descriptor of the same kind.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import select
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered.errors import ForkedStore, StoreClosed
from tiered.interfaces import IOBackend
from tiered.types import IOCompletion, IORequest, Operation

BLOCK = 4096  # fits every disk's O_DIRECT
PATIENCE = 30.0  # seconds; only a broken backend needs them

READ, WRITE = Operation.READ, Operation.WRITE


class Memory:
    """Page-aligned memory with an address."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def fill(self, seed: int) -> bytes:
        content = random.Random(seed).randbytes(len(self.view))
        self.view[:] = content
        return content


class File:
    """A file of random bytes, and the descriptor that the backend works on."""

    def __init__(self, path: Path, flags: int, nbytes: int) -> None:
        self.path = path
        self.content = bytearray(random.Random(1).randbytes(nbytes))
        path.write_bytes(self.content)
        self.fd = os.open(path, os.O_RDWR | flags)


def drain(backend: IOBackend, count: int) -> dict[int, int]:
    """Results by tag of the ``count`` requests that are in flight; a tag that comes twice fails."""
    results: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while len(results) < count:
        assert time.monotonic() < deadline, f"{count - len(results)} completions are missing"
        for done in backend.reap(1, 1.0):
            assert isinstance(done, IOCompletion)
            assert done.tag not in results, "a tag came back twice"
            results[done.tag] = done.result
    assert backend.reap(1, 1.0) == []
    return results


def run(backend: IOBackend, requests: list[IORequest]) -> dict[int, int]:
    """Everything through the backend, whatever its depth; results by tag."""
    results: dict[int, int] = {}
    waiting, in_flight = list(requests), 0
    deadline = time.monotonic() + PATIENCE
    while waiting or in_flight:
        assert time.monotonic() < deadline, f"{len(waiting)} waiting, {in_flight} in flight"
        taken = backend.submit(waiting)
        assert 0 <= taken <= len(waiting)
        waiting, in_flight = waiting[taken:], in_flight + taken
        assert in_flight <= backend.depth
        for done in backend.reap(1 if in_flight else 0, 1.0):
            assert done.tag not in results, "a tag came back twice"
            results[done.tag] = done.result
            in_flight -= 1
    assert set(results) == {request.tag for request in requests}
    return results


def open_direct(path: Path) -> int:
    """A descriptor with O_DIRECT, or skip with the reason."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except AttributeError:
        pytest.skip("this system has no O_DIRECT")
    except OSError as error:
        pytest.skip(f"the filesystem of {path.parent} refuses O_DIRECT: {error.strerror}")


class IOBackendContract:
    @pytest.fixture
    def backend(self) -> Iterator[IOBackend]:
        raise NotImplementedError("provide a fixture that opens the backend and closes it")

    @pytest.fixture(params=["buffered", "direct"])
    def open_file(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], File]]:
        """Makes files of n bytes, opened with O_DIRECT and without."""
        files: list[File] = []

        def make(nbytes: int) -> File:
            path = tmp_path / f"data{len(files)}"
            flags = 0
            if request.param == "direct":
                path.touch()
                os.close(open_direct(path))
                flags = os.O_DIRECT
            files.append(File(path, flags, nbytes))
            return files[-1]

        yield make
        for file in files:
            os.close(file.fd)

    def test_it_has_the_interface(self, backend: IOBackend) -> None:
        assert isinstance(backend, IOBackend)
        assert backend.name
        assert backend.depth >= 1
        assert backend.alignment >= 1
        assert backend.alignment & (backend.alignment - 1) == 0

    def test_a_write_is_read_back(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        file = open_file(8 * BLOCK)
        out, back = Memory(3 * BLOCK), Memory(3 * BLOCK)
        content = out.fill(7)
        assert run(backend, [IORequest(WRITE, file.fd, 2 * BLOCK, out.address, 3 * BLOCK, 1)]) == {1: 3 * BLOCK}
        assert run(backend, [IORequest(READ, file.fd, 2 * BLOCK, back.address, 3 * BLOCK, 2)]) == {2: 3 * BLOCK}
        assert back.view == content
        file.content[2 * BLOCK : 5 * BLOCK] = content
        assert file.path.read_bytes() == file.content

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(data=st.data())
    def test_any_mix_does_what_posix_does(
        self, backend: IOBackend, open_file: Callable[[int], File], data: st.DataObject
    ) -> None:
        """Requests on disjoint ranges, some past the end, in any order."""
        blocks = 24
        tail = data.draw(st.sampled_from([0, 0, 1, 512, 1000]), "bytes after the last whole block")
        file, oracle = open_file(blocks * BLOCK + tail), open_file(blocks * BLOCK + tail)
        memory, expected = Memory(32 * BLOCK), Memory(32 * BLOCK)
        expected.view[:] = memory.fill(2)

        cuts = sorted(data.draw(st.sets(st.integers(0, blocks + 4), min_size=2, max_size=16), "cuts"))
        requests = []
        for tag, (start, stop) in enumerate(pairwise(cuts)):
            operation = data.draw(st.sampled_from([READ, WRITE])) if stop <= blocks else READ
            at, size = start * BLOCK, (stop - start) * BLOCK
            requests.append(IORequest(operation, file.fd, at, memory.address + at, size, tag))
        requests = data.draw(st.permutations(requests), "order")

        results = run(backend, requests)
        for request in requests:
            at, size = request.offset, request.nbytes
            call = os.preadv if request.operation is READ else os.pwritev
            count = call(oracle.fd, [expected.view[at : at + size]], at)
            if request.operation is READ and count < size:  # what follows the end of the file is nobody's
                expected.view[at + count : at + size] = memory.view[at + count : at + size]
            assert results[request.tag] == count
        assert memory.view == expected.view
        assert file.path.read_bytes() == oracle.path.read_bytes()

    def test_more_requests_than_depth(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        count = 3 * backend.depth + 1
        file, memory = open_file(count * BLOCK), Memory(count * BLOCK)
        requests = [IORequest(READ, file.fd, i * BLOCK, memory.address + i * BLOCK, BLOCK, i) for i in range(count)]
        taken = backend.submit(requests)
        assert 1 <= taken <= backend.depth
        assert drain(backend, taken) == dict.fromkeys(range(taken), BLOCK)
        assert run(backend, requests[taken:]) == dict.fromkeys(range(taken, count), BLOCK)
        assert memory.view == file.content

    def test_full_is_an_answer(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        file, memory = open_file(BLOCK), Memory(BLOCK)
        taken = 0
        while backend.submit([IORequest(READ, file.fd, 0, memory.address, BLOCK, taken)]):
            taken += 1
        assert taken == backend.depth
        assert len(drain(backend, taken)) == taken

    def test_an_empty_batch_is_nothing(self, backend: IOBackend) -> None:
        assert backend.submit([]) == 0
        assert backend.reap(0, 0.0) == []

    def test_tags_come_back_exactly_once(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        file, memory = open_file(64 * BLOCK), Memory(64 * BLOCK)
        tags = [0, 1, -1, 2**62, -(2**62), *range(1000, 1059)]
        requests = [IORequest(READ, file.fd, i * BLOCK, memory.address + i * BLOCK, BLOCK, tag) for i, tag in enumerate(tags)]
        assert run(backend, requests) == dict.fromkeys(tags, BLOCK)
        assert backend.reap(0, 0.0) == []

    def test_the_end_of_the_file_makes_a_short_result(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        """A whole block short, part of a block short, a sector short, and wholly beyond."""
        for size in (2 * BLOCK, 2 * BLOCK + 100, 2 * BLOCK + 512):
            file, memory = open_file(size), Memory(4 * BLOCK)
            requests = [
                IORequest(READ, file.fd, 0, memory.address, 4 * BLOCK, 1),
                IORequest(READ, file.fd, 8 * BLOCK, memory.address, BLOCK, 2),
            ]
            assert run(backend, requests) == {1: size, 2: 0}
            assert memory.view[:size] == file.content

    def test_a_file_grows_by_writing_past_its_end(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        file, memory = open_file(BLOCK), Memory(BLOCK)
        content = memory.fill(3)
        assert run(backend, [IORequest(WRITE, file.fd, 3 * BLOCK, memory.address, BLOCK, 1)]) == {1: BLOCK}
        assert file.path.read_bytes() == file.content + bytes(2 * BLOCK) + content

    def test_a_bad_descriptor_fails_alone(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        """The bad one stands in the middle: it is taken, and does not keep back those behind it."""
        file, memory = open_file(3 * BLOCK), Memory(3 * BLOCK)
        closed = os.dup(file.fd)
        os.close(closed)
        fds = [file.fd, closed, file.fd]
        requests = [IORequest(READ, fd, i * BLOCK, memory.address + i * BLOCK, BLOCK, i) for i, fd in enumerate(fds)]
        assert run(backend, requests) == {0: BLOCK, 1: -errno.EBADF, 2: BLOCK}
        assert memory.view[2 * BLOCK :] == file.content[2 * BLOCK :]

    def test_a_descriptor_that_is_read_only_refuses_writes(self, backend: IOBackend, tmp_path: Path) -> None:
        path, memory = tmp_path / "data", Memory(BLOCK)
        path.write_bytes(bytes(BLOCK))
        fd = os.open(path, os.O_RDONLY)
        try:
            assert run(backend, [IORequest(WRITE, fd, 0, memory.address, BLOCK, 5)]) == {5: -errno.EBADF}
        finally:
            os.close(fd)

    def test_an_address_that_is_not_ours(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        file = open_file(BLOCK)
        assert run(backend, [IORequest(READ, file.fd, 0, BLOCK, BLOCK, 1)]) == {1: -errno.EFAULT}

    def test_misaligned_direct_io_answers_as_the_kernel_does(self, backend: IOBackend, tmp_path: Path) -> None:
        path, memory = tmp_path / "data", Memory(4 * BLOCK)
        path.write_bytes(bytes(4 * BLOCK))
        fd = open_direct(path)
        try:
            for skew_offset, skew_address, skew_size in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
                size = BLOCK + skew_size
                try:
                    os.preadv(fd, [memory.view[skew_address : skew_address + size]], skew_offset)
                except OSError as error:
                    assert error.errno == errno.EINVAL  # noqa: PT017 - what the platform does is what is asked here
                else:
                    pytest.skip(f"the filesystem of {tmp_path} takes misaligned direct I/O")
                request = IORequest(READ, fd, skew_offset, memory.address + skew_address, size, 1)
                assert run(backend, [request]) == {1: -errno.EINVAL}
        finally:
            os.close(fd)

    def test_with_nothing_in_flight_reap_returns_at_once(self, backend: IOBackend) -> None:
        before = time.monotonic()
        assert backend.reap(1, PATIENCE) == []
        assert backend.reap(0, PATIENCE) == []
        assert time.monotonic() - before < PATIENCE / 2

    def test_reap_may_be_asked_for_more_than_there_is(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        file, memory = open_file(BLOCK), Memory(BLOCK)
        assert backend.submit([IORequest(READ, file.fd, 0, memory.address, BLOCK, 1)]) == 1
        before = time.monotonic()
        assert backend.reap(10**6, PATIENCE) == [IOCompletion(1, BLOCK)]
        assert time.monotonic() - before < PATIENCE / 2

    def test_reap_waits_without_end_where_told_so(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        file, memory = open_file(BLOCK), Memory(BLOCK)
        assert backend.submit([IORequest(READ, file.fd, 0, memory.address, BLOCK, 1)]) == 1
        assert backend.reap(1, float("inf")) == [IOCompletion(1, BLOCK)]

    @pytest.mark.parametrize("fails", [False, True])
    def test_fileno_polls_readable_for_every_completion(
        self, backend: IOBackend, open_file: Callable[[int], File], fails: bool
    ) -> None:
        """An event loop that reaps only after a wake-up, and one at a time, loses nothing; refused requests count too."""
        count = min(8, backend.depth)
        file, memory = open_file(count * BLOCK), Memory(count * BLOCK)
        fd = 10**6 if fails else file.fd
        requests = [IORequest(READ, fd, i * BLOCK, memory.address + i * BLOCK, BLOCK, i) for i in range(count)]
        assert backend.submit(requests) == count
        results: list[int] = []
        while len(results) < count:
            readable, _, _ = select.select([backend.fileno()], [], [], PATIENCE)
            assert readable, f"{count - len(results)} completions never woke anybody"
            results += [done.result for done in backend.reap(0, 0.0)]
        assert results == [-errno.EBADF if fails else BLOCK] * count

    def test_close_waits_for_what_is_in_flight(self, backend: IOBackend, open_file: Callable[[int], File]) -> None:
        size = 256 * 1024
        count = min(16, backend.depth)
        file, memory = open_file(BLOCK), Memory(count * size)
        content = memory.fill(11)
        requests = [IORequest(WRITE, file.fd, i * size, memory.address + i * size, size, i) for i in range(count)]
        assert backend.submit(requests) == count
        backend.close()
        memory.view[:] = bytes(len(content))  # the memory is ours again
        assert file.path.read_bytes() == content

    def test_close_is_idempotent_and_use_after_it_raises(self, backend: IOBackend) -> None:
        backend.close()
        backend.close()
        with pytest.raises(StoreClosed):
            backend.submit([])
        with pytest.raises(StoreClosed):
            backend.reap(0, 0.0)
        with pytest.raises(StoreClosed):
            backend.fileno()

    def test_a_forked_child_is_refused_and_its_parent_unharmed(
        self, backend: IOBackend, open_file: Callable[[int], File]
    ) -> None:
        file, memory = open_file(2 * BLOCK), Memory(2 * BLOCK)
        mine = IORequest(READ, file.fd, 0, memory.address, BLOCK, 1)
        assert backend.submit([mine]) == 1
        uses: list[Callable[[], object]] = [
            lambda: backend.submit([mine]),
            lambda: backend.reap(1, PATIENCE),
            lambda: backend.fileno(),
        ]
        wakeup = backend.fileno()
        child = os.fork()
        if child == 0:
            refused = 0
            try:
                for use in uses:
                    try:
                        use()
                    except ForkedStore:
                        refused += 1
                os.dup2(file.fd, wakeup)  # the child has closed what it inherited, and the number is something else now
                backend.close()
                os.fstat(wakeup)
                refused += 1
            finally:
                os._exit(refused)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == len(uses) + 1
        assert drain(backend, 1) == {1: BLOCK}
        assert run(backend, [IORequest(READ, file.fd, BLOCK, memory.address + BLOCK, BLOCK, 2)]) == {2: BLOCK}
        assert memory.view == file.content
