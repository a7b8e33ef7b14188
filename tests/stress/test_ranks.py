"""Promise 18: where one of several ranks is lost, all others raise RankError in time, which names it; their stores reopen."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.stress.tally import Tally, counts
from tests.zero.ranks import on_ranks
from tiered import RankError, TieredStore, zero
from tiered.zero.collectives import GRACE, Ranks

PROMISE = "18 (a lost rank: all others say so in time, and their stores reopen)"
TIMEOUT = 5.0
SLACK = 30.0
"""Seconds for a busy machine."""
LAYERS, WIDTH, POOL = 6, 160, "1MiB"
TRAINING = 60
"""Collectives: a step has a few, and training goes on until it is ended."""
SAYS = re.compile(r"rank (\d+) waited for (.+), and rank ([\d, ]+) (ended|did not answer)")


@dataclass(frozen=True)
class Fault:
    """``victim`` comes to its ``number``-th collective from when it is told, or has begun that; then ``strike`` happens to it.
    """

    victim: int
    number: int
    begun: bool
    strike: Callable[[], None]


@dataclass(frozen=True)
class Told:
    """How a rank ended that was not lost: ``at`` is of ``time.monotonic``, which all processes share."""

    message: str
    at: float
    kept: torch.Tensor


class LossError(Exception):
    """A rank's own."""


def die(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def fail() -> None:
    raise LossError("the loss is not finite")


STRIKES: dict[str, tuple[Callable[[], None], str]] = {
    "SIGKILL": (partial(die, signal.SIGKILL), "ended"),
    "SIGSTOP": (partial(die, signal.SIGSTOP), "did not answer"),
    "an exception": (fail, "ended"),
}


def trained_until_lost(rank: int, folder: Path, stage: zero.Stage, fault: Fault) -> Told:
    """Commits a tensor, and trains until something is raised; what has RankError to say, and is the tensor still there?"""
    own = folder / f"store{rank}"
    model = nn.Sequential(*(module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    try:
        with TieredStore.open(own, dram=POOL) as store:
            store.put("kept", torch.full((1000,), float(rank)))
            store.commit()
            zero.page(model, store, stage=stage, timeout=TIMEOUT)
            if rank == fault.victim:  # not before: an exception while units are filled is said by whoever has it
                strike_in_collective(folder, fault)
            optimizer = zero.AdamW(model.parameters())
            while True:
                model(torch.randn(4, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except RankError as error:
        message, at = str(error), time.monotonic()
    with TieredStore.open(own, dram=POOL) as store:
        return Told(message, at, store.get("kept"))


def strike_in_collective(folder: Path, fault: Fault) -> None:
    begin, seen = Ranks._begin, [0]

    def counted(ranks: Ranks, *arguments: Any, **more: Any) -> Any:
        seen[0] += 1
        if seen[0] != fault.number:
            return begin(ranks, *arguments, **more)
        under = begin(ranks, *arguments, **more) if fault.begun else None
        (folder / "struck").write_text(str(time.monotonic()))
        fault.strike()
        return begin(ranks, *arguments, **more) if under is None else under

    Ranks._begin = counted  # type: ignore[method-assign] # this process is for one trial


def check(told: Told, rank: int, lost: int, how: str, folder: Path) -> None:
    says = SAYS.match(told.message)
    assert says, told.message
    assert says.group(1) == str(rank)
    assert says.group(2)
    assert says.group(3, 4) == (str(lost), how), told.message
    struck = float((folder / "struck").read_text())
    assert told.at - struck < TIMEOUT + GRACE + SLACK
    assert torch.equal(told.kept, torch.full((1000,), float(rank)))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.mark.parametrize("name", quick(STRIKES, ["SIGKILL", "an exception"]))
@counts(1, 20)
def test_all_others_name_the_lost_rank(tmp_path: Path, name: str, count: int, tally: Tally) -> None:
    """Rank 0 has the store where the processes met: what becomes of that must not matter."""
    source = random.Random(f"{name} {count}")
    strike, how = STRIKES[name]
    for trial in range(count):
        size, stage = source.choice([3, 3, 4]), (zero.Stage2(), zero.Stage3())[trial % 2]
        fault = Fault((trial // 2) % size, source.randint(1, TRAINING), source.random() < 0.5, strike)
        folder, hung = tmp_path / str(trial), [fault.victim] if name == "SIGSTOP" else []
        meet = f"tcp://127.0.0.1:{free_port()}"
        found = on_ranks(size, trained_until_lost, folder, stage, fault, lost=True, hung=hung, meet=meet)
        tally.count(name, int((folder / "struck").exists()))
        for rank, told in enumerate(found):
            if rank == fault.victim:
                assert told is None
            else:
                assert told is not None, (folder / f"traceback{rank}").read_text()
                check(told, rank, fault.victim, how, folder)


# -- two hosts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """Network namespaces with a cable between them; ``link`` is the name of its end in each."""

    names: tuple[str, str]
    link: str = "cable"

    def enter(self, rank: int) -> None:
        """This thread, and those that it starts, are on that host from here on."""
        with open(f"/run/netns/{self.names[rank]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = self.link

    def cut(self) -> None:
        ip("link", "set", self.link, "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test where this user cannot make them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and ip (iproute2)")
    names = f"tiered-a-{os.getpid()}", f"tiered-b-{os.getpid()}"
    hosts = Hosts(names)
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            cable = ["link", "add", hosts.link, "netns", names[0], "type", "veth"]
            ip(*cable, "peer", "name", hosts.link, "netns", names[1])
            for number, name in enumerate(names):
                ip("-n", name, "addr", "add", f"192.0.2.{number + 1}/24", "dev", hosts.link)
                for device in (hosts.link, "lo"):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield hosts
    finally:
        for name in made:
            ip("netns", "del", name)


@counts(1, 20)
def test_both_hosts_miss_each_other_when_the_cable_is_cut(tmp_path: Path, count: int, tally: Tally) -> None:
    source = random.Random(count)
    for trial in range(count):
        with two_hosts() as hosts:
            stage = (zero.Stage3(), zero.Stage2())[trial % 2]
            fault = Fault(trial % 2, source.randint(1, TRAINING), source.random() < 0.5, hosts.cut)
            folder, meet = tmp_path / str(trial), "tcp://192.0.2.1:29500"
            found = on_ranks(2, trained_until_lost, folder, stage, fault, lost=True, meet=meet, before=hosts.enter)
        tally.count("a cut cable", int((folder / "struck").exists()))
        for rank, told in enumerate(found):
            assert told is not None, (folder / f"traceback{rank}").read_text()
            check(told, rank, 1 - rank, "did not answer", folder)
