from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.fakes import readable
from tiered.system import Wakeup, wait_for


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()


def test_it_is_readable_from_set_until_clear(wakeup: Wakeup) -> None:
    assert not readable(wakeup.fileno())
    assert not wakeup.wait(0)
    wakeup.set()
    wakeup.set()
    assert readable(wakeup.fileno())
    assert wakeup.wait(0)
    wakeup.clear()
    wakeup.clear()
    assert not readable(wakeup.fileno())


def test_setting_never_blocks(wakeup: Wakeup) -> None:
    for _ in range(1 << 17):  # more than a pipe holds
        wakeup.set()
    wakeup.clear()
    assert not readable(wakeup.fileno())


@pytest.mark.parametrize("timeout", [60, float("inf")])
def test_another_thread_wakes_who_waits(wakeup: Wakeup, timeout: float) -> None:
    thread = threading.Thread(target=wakeup.set)
    thread.start()
    assert wakeup.wait(timeout)
    thread.join()


def test_setting_it_after_its_end_touches_no_other_file() -> None:
    wakeup = Wakeup()
    number = wakeup._writing
    wakeup.close()
    reading, writing = os.pipe()
    try:
        assert number in (reading, writing), "the number is somebody else's now"
        wakeup.set()
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


class Struck(threading.Condition):
    """Ctrl-C strikes in ``wait``, where the lock is had, or while another thread has it."""

    def __init__(self, *, without: bool) -> None:
        super().__init__(threading.RLock())
        self.without, self.waits = without, 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        if self.without:
            self.release()
        raise KeyboardInterrupt


@pytest.mark.parametrize("without", [True, False])
def test_who_is_interrupted_as_it_waits_has_the_lock(without: bool) -> None:
    changed = Struck(without=without)
    with changed:
        with pytest.raises(KeyboardInterrupt):
            wait_for(changed, 1.0)
        assert changed._is_owned()  # type: ignore[attr-defined]
    assert not changed._is_owned()  # type: ignore[attr-defined]
    assert changed.waits == 1
