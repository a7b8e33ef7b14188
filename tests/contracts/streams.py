"""What every Streams must do. Subclass ``StreamsContract`` and provide the fixture ``desk``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import pytest

from tiered.interfaces import Streams


class Desk(Protocol):
    """Streams, and cells of device memory (numbered from 0, each 0 at first) that queued work writes and copies."""

    streams: Streams

    def stream(self) -> object:
        """One more stream."""
        ...

    def use(self, stream: object) -> AbstractContextManager[object]:
        """This thread computes on ``stream`` meanwhile."""
        ...

    def write(self, stream: object, cell: int, value: int) -> None:
        """Queue work, of some length, that sets a cell."""
        ...

    def copy(self, stream: object, source: int, target: int) -> None:
        """Queue work that copies a cell."""
        ...

    def finish(self) -> None:
        """Let the device run all that is queued, and wait for that."""
        ...

    def read(self, cell: int) -> int:
        """What a cell holds, after ``finish``."""
        ...


class StreamsContract:
    @pytest.fixture
    def desk(self) -> Desk:
        raise NotImplementedError

    def test_is_streams(self, desk: Desk) -> None:
        assert isinstance(desk.streams, Streams)

    def test_streams_can_be_compared_and_hashed(self, desk: Desk) -> None:
        one, other = desk.stream(), desk.stream()
        assert one != other
        assert len({one, other, one}) == 2
        assert desk.streams.current() == desk.streams.current()

    def test_each_thread_has_a_current_stream(self, desk: Desk) -> None:
        before, side = desk.streams.current(), desk.stream()
        seen: list[object] = []
        with desk.use(side):
            assert desk.streams.current() == side
            thread = threading.Thread(target=lambda: seen.append(desk.streams.current()))
            thread.start()
            thread.join()
        assert desk.streams.current() == before
        assert seen == [before]

    def test_a_fence_passes(self, desk: Desk) -> None:
        stream = desk.stream()
        idle = desk.streams.record(stream)
        desk.write(stream, 0, 1)
        busy = desk.streams.record(stream)
        desk.finish()
        assert idle.query()
        assert busy.query()
        assert desk.read(0) == 1
        assert busy.query(), "it stays so"

    def test_once_synchronized_every_fence_has_passed(self, desk: Desk) -> None:
        first, second = desk.stream(), desk.stream()
        desk.write(first, 0, 7)
        desk.streams.wait(second, desk.streams.record(first))
        desk.copy(second, 0, 1)
        fences = [desk.streams.record(first), desk.streams.record(second)]
        desk.streams.synchronize()
        assert all(fence.query() for fence in fences)
        assert desk.read(1) == 7

    def test_what_waits_for_a_fence_sees_what_was_before_it(self, desk: Desk) -> None:
        first, second = desk.stream(), desk.stream()
        desk.write(first, 0, 7)
        desk.streams.wait(second, desk.streams.record(first))
        desk.copy(second, 0, 1)
        desk.finish()
        assert desk.read(1) == 7

    def test_what_comes_after_the_wait_does_not_harm_what_was_before_the_fence(self, desk: Desk) -> None:
        first, second = desk.stream(), desk.stream()
        desk.write(first, 0, 7)
        desk.copy(first, 0, 1)
        desk.streams.wait(second, desk.streams.record(first))
        desk.write(second, 0, 9)
        desk.finish()
        assert (desk.read(0), desk.read(1)) == (9, 7)

    def test_one_stream_may_wait_for_many_and_many_for_one(self, desk: Desk) -> None:
        writers, readers = [desk.stream() for _ in range(3)], [desk.stream() for _ in range(3)]
        join = desk.stream()
        for number, writer in enumerate(writers):
            desk.write(writer, number, number + 1)
            desk.streams.wait(join, desk.streams.record(writer))
        joined = desk.streams.record(join)
        for number, reader in enumerate(readers):
            desk.streams.wait(reader, joined)
            desk.copy(reader, number, number + 3)
        desk.finish()
        assert [desk.read(number) for number in range(3, 6)] == [1, 2, 3]

    def test_a_stream_may_wait_for_itself_and_twice(self, desk: Desk) -> None:
        stream = desk.stream()
        desk.write(stream, 0, 3)
        fence = desk.streams.record(stream)
        desk.streams.wait(stream, fence)
        desk.streams.wait(stream, fence)
        desk.copy(stream, 0, 1)
        desk.finish()
        assert desk.read(1) == 3

    def test_a_fence_that_has_passed_holds_nothing_up(self, desk: Desk) -> None:
        first, second = desk.stream(), desk.stream()
        desk.write(first, 0, 4)
        fence = desk.streams.record(first)
        desk.finish()
        desk.streams.wait(second, fence)
        desk.copy(second, 0, 1)
        desk.finish()
        assert desk.read(1) == 4

    def test_any_thread_may_record_and_wait(self, desk: Desk) -> None:
        first, second = desk.stream(), desk.stream()

        def elsewhere(call: Callable[[], object]) -> None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        desk.write(first, 0, 6)
        elsewhere(lambda: desk.streams.wait(second, desk.streams.record(first)))
        desk.copy(second, 0, 1)
        desk.finish()
        assert desk.read(1) == 6
