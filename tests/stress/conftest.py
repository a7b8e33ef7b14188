from __future__ import annotations

import faulthandler
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.backends import EACH, or_skip
from tests.stress.fusefs import FaultyDisk, faulty_disk, why_not
from tests.stress.tally import TALLY, Tally

OUTCOME = pytest.StashKey[str]()


@pytest.fixture(autouse=True)
def _watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """A deadlock fails with every thread's traceback instead of hanging."""
    faulthandler.dump_traceback_later(7200 if request.node.get_closest_marker("soak") else 300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=EACH)
def backend(request: pytest.FixtureRequest) -> str:
    return or_skip(request.param)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts under the promise that the test's module names in ``PROMISE``; fails where a fault did not fire."""
    found = Tally(request.module.PROMISE)
    yield found
    request.node.user_properties.append((TALLY, found.as_property()))
    if request.node.stash.get(OUTCOME, "") == "passed":
        found.refuse_silence()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call":
        item.stash[OUTCOME] = report.outcome
    return report


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDisk]:
    """A filesystem with faults to order."""
    if why_not():
        pytest.skip(why_not())
    with faulty_disk(tmp_path_factory.mktemp("fuse") / "disk") as found:
        yield found


@pytest.fixture(scope="module")
def sync_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDisk]:
    """One on which writes can be short."""
    if why_not():
        pytest.skip(why_not())
    with faulty_disk(tmp_path_factory.mktemp("fuse") / "disk", "sync") as found:
        yield found
