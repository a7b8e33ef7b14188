"""Functions that run in several processes of one process group, over gloo on the loopback device."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import programs

__all__ = ["PATIENCE", "averaged", "on_ranks"]

PATIENCE = 240.0
"""Seconds until processes that do not end are killed, and the test fails."""


def averaged(model: Any, optimizer: torch.optim.Optimizer, size: int, steps: range) -> None:
    """Train in memory with the gradients that ``size`` ranks have which all compute the same: the mean, as ranks add it up."""
    for number in steps:
        optimizer.zero_grad()
        model.loss(number).backward()
        for parameter in model.parameters():
            total = parameter.grad.clone()
            for _ in range(size - 1):
                total.add_(parameter.grad)
            parameter.grad.copy_(total.div_(size))
        optimizer.step()


def _on_loopback(rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def on_ranks(
    size: int,
    scenario: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    timeout: float = 60.0,
    lost: bool = False,
    hung: Collection[int] = (),
    meet: str | None = None,
    before: Callable[[int], None] = _on_loopback,
) -> list[Any]:
    """What ``scenario(rank, folder, *arguments)`` returns on each of ``size`` ranks; all tracebacks where one fails.

    ``lost``: ranks may fail or be killed; the result of one that was is None. ``hung`` are not waited for, but killed when all
    others have ended. ``meet``: as ``init_method`` of torch.distributed (None: a file). ``before``: called with the rank first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [folder / f"job{rank}" for rank in range(size)]
    for rank, job in enumerate(jobs):
        job.write_bytes(pickle.dumps((rank, size, scenario, folder, arguments, timeout, meet, before)))
    processes = [programs.Popen([sys.executable, "-m", __name__, job], cwd=programs.ROOT) for job in jobs]
    end = time.monotonic() + PATIENCE
    late = []
    for rank, process in enumerate(processes):
        if rank not in hung:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
    for process in processes:
        process.kill()
        process.wait()
    assert not late, f"ranks {late} did not end within {PATIENCE:g} s\n{_tracebacks(folder, size)}"
    codes = [process.returncode for process in processes]
    if not lost:
        assert not _tracebacks(folder, size), _tracebacks(folder, size)
        assert not any(codes), codes
    found = [folder / f"result{rank}" for rank in range(size)]
    failed = {rank: code for rank, code in enumerate(codes) if found[rank].exists() and code}
    assert not failed, f"ranks came to their end, and their processes failed then: {failed}"
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def _tracebacks(folder: Path, size: int) -> str:
    found = [folder / f"traceback{rank}" for rank in range(size)]
    return "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in enumerate(found) if path.exists())


def _run(
    rank: int,
    size: int,
    scenario: Callable[..., Any],
    folder: Path,
    arguments: tuple[Any, ...],
    timeout: float,
    meet: str | None,
    before: Callable[[int], None],
) -> None:
    before(rank)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=meet or f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        result = scenario(rank, folder, *arguments)
        torch.save(result, folder / f"part{rank}")
        (folder / f"part{rank}").rename(folder / f"result{rank}")
    except BaseException:
        (folder / f"traceback{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None
    dist.destroy_process_group()


if __name__ == "__main__":
    _run(*pickle.loads(Path(sys.argv[1]).read_bytes()))
    threading._shutdown()  # type: ignore[attr-defined]
    os._exit(0)  # as multiprocessing ends: taking torch apart again would take as long as a small training
