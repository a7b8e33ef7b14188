"""Promise 17: a pool that a limit cannot hold is refused at open, with the number; one that fits is usable to its end."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.stress.cgroups import cgroup, enter
from tests.stress.children import forked
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tiered import CapacityError, TieredStore
from tiered.system import _page_cache, cgroup_room

PROMISE = "17 (limits)"
MIB = 1 << 20


def opening(path: Path | None, dram: int, before: Callable[[], object]) -> Callable[[Child], None]:
    """Under the limit that ``before`` sets; what is opened is used to its last byte."""

    def body(child: Child) -> None:
        before()
        try:
            with TieredStore.open(path, dram=dram) as store:
                for index in range(dram // MIB):
                    store.put(f"t{index}", torch.full((MIB,), index % 251, dtype=torch.uint8))
                for index in range(dram // MIB):
                    assert store.get(f"t{index}").eq(index % 251).all()
                child.say("used")
                store.close()
        except CapacityError as error:
            child.say(f"refused: {error}")

    return body


@counts(3, 12)
@pytest.mark.skipif(os.geteuid() != 0, reason="making a cgroup needs root")
def test_memory_cgroups(tmp_path: Path, count: int, tally: Tally) -> None:
    for number in range(count):
        limit = (400 + 40 * number) * MIB  # this process itself takes some of it
        with cgroup(limit) as folder:
            for dram, fits in ((limit + MIB, False), (4 * limit, False), (limit // 4 // MIB * MIB, True)):
                path = tmp_path / f"{number} {dram}" if number % 2 else None
                with forked(opening(path, dram, lambda: enter(folder))) as running:
                    assert running.wait_end() == 0, f"{dram:,} of {limit:,}: {running.said}"
                (said,) = running.said
                if fits:
                    assert said == "used"
                else:
                    numbers = [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]+", said)]
                    assert said.startswith("refused")
                    assert str(folder) in said
                    assert dram in numbers
                    assert limit in numbers
                    assert path is None or not path.exists(), "a folder was made for what was refused"
                    tally.count("a cgroup", 1)


@counts(3, 12)
@pytest.mark.parametrize(("name", "flag"), [("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")])
def test_limits_of_the_process(tmp_path: Path, name: str, flag: str, count: int, tally: Tally) -> None:
    which = getattr(resource, name)
    for number in range(count):
        limit = (32 << 30) + number * (1 << 30) if name == "RLIMIT_AS" else (8 << 30) + number * (1 << 30)
        for dram in (limit, 4 * limit):

            def lower(limit: int = limit) -> None:
                resource.setrlimit(which, (limit, resource.getrlimit(which)[1]))

            with forked(opening(tmp_path / "state" if number % 2 else None, dram, lower)) as running:
                assert running.wait_end() == 0, running.said
            (said,) = running.said
            assert said.startswith("refused: "), said
            assert f"ulimit {flag} is {limit:,} bytes" in said or "memory cgroup" in said, said
            tally.count(name, 1)


def test_what_the_page_cache_has_is_free(tmp_path: Path, tally: Tally) -> None:
    """A job that has read its data set may open a store."""
    limit = 320 * MIB
    with cgroup(limit) as folder:
        data = tmp_path / "data set"

        def read_much() -> None:
            enter(folder)
            with data.open("wb") as file:
                for _ in range(300):
                    file.write(bytes(MIB))
                file.flush()
                os.fsync(file.fileno())
            room = cgroup_room()
            assert room is not None
            assert room.limit == limit

        with forked(opening(tmp_path / "state", 120 * MIB, read_much)) as running:
            assert running.wait_end() == 0, running.said
        assert running.said == ["used"]
        tally.count("a cgroup full of page cache", 1)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("anon 5\ninactive_file 30\nactive_file 4\n", 34),
        ("inactive_file 30\nactive_file 4\ntotal_inactive_file 300\ntotal_active_file 40\n", 340),
        ("anon 5\nactive_file 4\n", 4),
        ("total_inactive_file 30\n", 30),
        ("", 0),
    ],
)
def test_what_memory_stat_says(tmp_path: Path, text: str, nbytes: int) -> None:
    """Not every kernel and container says all of it."""
    (tmp_path / "memory.stat").write_text(text)
    assert _page_cache(tmp_path / "memory.stat") == nbytes
