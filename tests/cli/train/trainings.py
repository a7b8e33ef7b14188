"""Processes of ``tiered train``: small, told to stop or killed at a moment of the test's choice, and what they leave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.programs import ONE_THREAD
from tiered import TieredStore
from tiered.cli.stop import StopRequest
from tiered.cli.train import run

TINY = ["--layers", "2", "--width", "64", "--heads", "4", "--context", "16", "--batch", "2", "--dram", "1MiB"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tiered.cli", *map(str, arguments)]


def tiered(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return programs.run(command(*arguments), capture_output=True, text=True, env=ONE_THREAD, cwd=cwd, timeout=300)


class Training:
    """A running ``tiered train``. ``last`` is the last step that it has told of, 0 before the first."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child, self.last = child, 0

    def wait_for_step(self, number: int = 1) -> bool:
        """Until it tells of step ``number`` or a later one. False: it ended before."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith("step "):
                self.last = int(line.split("/")[0].split()[1])
            if self.last >= number:
                return True
        return False

    def end(self) -> str:
        """Its stderr, once it has ended."""
        return self.child.communicate(timeout=120)[1]


@contextmanager
def training(*arguments: object) -> Iterator[Training]:
    """Killed at the latest at the end of the block."""
    with programs.Popen(
        command("train", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD
    ) as child:
        try:
            yield Training(child)
        finally:
            child.kill()


def values(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and moments of what was committed last."""
    with TieredStore.open(folder, dram="8MiB") as store:
        found = {key: store.get(key) for key in store if not key.startswith("model/checkpoint")}
        store.close()
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(value.equal(right[key]) for key, value in left.items())


def losses(report: Path) -> list[float]:
    """Of every step since training began."""
    found: dict[str, Any] = json.loads(report.read_text())
    return list(found["loss"]["all"])


def stop_at(monkeypatch: pytest.MonkeyPatch, call: int) -> list[int]:
    """SIGINT comes at this one of the calls of ``StopRequest.check`` once training has begun (0: never). Gets all of them. A
    training ends without text that its model writes, which has calls of its own."""
    check, calls = StopRequest.check, list[int]()

    def counting(stop: StopRequest) -> None:
        if stop.interrupts_nothing:
            calls.append(len(calls) + 1)
            if calls[-1] == call:
                signal.raise_signal(signal.SIGINT)
        check(stop)

    monkeypatch.setattr(StopRequest, "check", counting)
    monkeypatch.setattr(run, "SAMPLE", 0)
    return calls
