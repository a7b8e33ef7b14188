"""Promise 18, the commits: a rank is killed at any moment, also within a commit, or two hosts lose each other; all start again,
and go on from a commit that is whole and not older than what any rank was told, to the end of the run that was never killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.stress.tally import Tally, counts
from tests.stress.test_ranks import TIMEOUT, Fault, ip, strike_in_collective, two_hosts
from tests.zero.ranks import on_ranks
from tests.zero.test_rank_commits import begin, state, step
from tests.zero.test_ranks import same
from tiered import RankError, TieredStore, zero

PROMISE = "18 (ranks that are lost)"
RANKS, STEPS = 2, 6


def train(rank: int, folder: Path, where: Path, stage: str, victim: int, after: float) -> dict[str, Any]:
    """A commit after each step. ``victim`` kills itself ``after`` as many seconds of training."""
    try:
        with zero.open_store(where, dram="2MiB") as store:
            found = train_in(store, rank, folder / f"acknowledged{rank}", stage, after if rank == victim else None)
            store.close()
    except RankError as error:
        return {"lost": str(error)}
    return found


def train_on_hosts(rank: int, folder: Path, where: Path, stage: str, fault: Fault | None) -> dict[str, Any]:
    """The same, until the cable between the hosts is cut."""
    if fault is not None and rank == fault.victim:
        strike_in_collective(folder, fault)
    try:
        with zero.open_store(where, dram="2MiB") as store:
            found = train_in(store, rank, folder / f"acknowledged{rank}", stage, None, TIMEOUT)
            store.close()
    except RankError as error:
        return {"lost": str(error)}
    return found


def train_in(
    store: TieredStore, rank: int, said: Path, stage: str, after: float | None, timeout: float = 20.0
) -> dict[str, Any]:
    there = "model/checkpoint" in store
    model, optimizer, scheduler = begin(store, stage, rank, timeout=timeout, **({"existing": "resume"} if there else {}))
    extra = zero.resume(model, optimizer, scheduler=scheduler) if there else {"done": 0}
    timer = threading.Timer(after or 0.0, os.kill, (os.getpid(), signal.SIGKILL))
    if after is not None:
        timer.start()
    for number in range(extra["done"], STEPS):
        step(model, optimizer, scheduler, rank, number)
        zero.commit(model, optimizer, scheduler=scheduler, extra={"done": number + 1})
        said.write_text(str(number + 1))
    timer.cancel()
    return {**state(model, optimizer), "began": extra["done"]}


def acknowledged(folder: Path) -> int:
    told = [folder / f"acknowledged{rank}" for rank in range(RANKS)]
    return max((int(path.read_text() or 0) for path in told if path.exists()), default=0)


@counts(1, 40)
def test_ranks_that_are_killed_go_on_from_the_last_commit_of_all(tmp_path: Path, count: int, tally: Tally) -> None:
    whole = {
        stage: on_ranks(RANKS, train, tmp_path / f"whole{stage}", tmp_path / f"never{stage}", stage, -1, 0.0) for stage in "13"
    }
    for trial in range(count):
        stage, victim = "13"[trial % 2], trial // 2 % RANKS
        where, dice = tmp_path / f"state{trial}", random.Random(trial)
        lost = None
        while lost is None or any(one is not None and "model" in one for one in lost):  # it came too late
            run, after = tmp_path / f"trial{trial}-{dice.random()}", dice.uniform(0.0, 0.6)
            shutil.rmtree(where, ignore_errors=True)
            lost = on_ranks(RANKS, train, run, where, stage, victim, after, lost=True)
        tally.count(f"rank {victim} is killed", 1)
        for rank, one in enumerate(lost):
            assert rank == victim or f"rank {victim} ended" in one["lost"], one
        found = on_ranks(RANKS, train, tmp_path / f"again{trial}", where, stage, -1, 0.0)
        assert {one["began"] for one in found} in ({told} for told in range(acknowledged(run), STEPS + 1))
        for one, other in zip(found, whole[stage], strict=True):
            assert same(one["model"], other["model"])
            assert same(one["optimizer"], other["optimizer"])
        shutil.rmtree(where)


@pytest.mark.soak
@pytest.mark.parametrize("count", [10])
def test_two_hosts_go_on_once_their_cable_is_whole(tmp_path: Path, count: int, tally: Tally) -> None:
    dice = random.Random(count)
    whole = on_ranks(RANKS, train, tmp_path / "whole", tmp_path / "never", "3", -1, 0.0)
    with two_hosts() as hosts:
        on_hosts: dict[str, Any] = {"meet": "tcp://192.0.2.1:29500", "before": hosts.enter}
        for trial in range(count):
            fault = Fault(trial % 2, dice.randint(20, 60), dice.random() < 0.5, hosts.cut)
            run, where = tmp_path / f"cut{trial}", tmp_path / f"state{trial}"
            lost = on_ranks(RANKS, train_on_hosts, run, where, "3", fault, lost=True, **on_hosts)
            tally.count("a cut cable", int((run / "struck").exists()))
            for rank, one in enumerate(lost):
                assert f"rank {1 - rank} did not answer" in one["lost"], one
            for name in hosts.names:
                ip("-n", name, "link", "set", hosts.link, "up")
            found = on_ranks(RANKS, train_on_hosts, tmp_path / f"healed{trial}", where, "3", None, **on_hosts)
            assert {one["began"] for one in found} in ({told} for told in range(acknowledged(run), STEPS + 1))
            for one, other in zip(found, whole, strict=True):
                assert same(one["model"], other["model"])
                assert same(one["optimizer"], other["optimizer"])
