"""What a commit costs, beside writing the same tensors with ``torch.save`` and ``torch.distributed.checkpoint``: Markdown.

    .venv/bin/python -m bench.commits --dir /mnt/nvme > bench/results/commits_<hardware>_<date>.md

- "written back": 4 GiB in 10,000 tensors, every one rewritten since the last commit and on the disk already; new meta.
- "dirty": tensors of 16 MiB that are in memory alone, half a pool of 1 GiB; the ceiling is fio's rate in the same round.
- "open": of a store that was killed (not closed) after its last commit.
- "training": blocks of ten steps of a GPT that begins a commit with each of them, by those of one that never commits, in turn.
- the others write the state of 4 GiB anew each time, with fsync at the end, as ours does; each load is not measured.

Medians of the rounds, with the least and the most. Needs 30 GB of disk, 8 GB of memory, and fio.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch

from tiered import TensorSpec, TieredStore, zero
from tiered.cli.arguments import size
from tiered.cli.bench.trainer import Trainer, TrainerOptions
from tiered.cli.output import told_environment
from tiered.cli.train.model import open_text
from tiered.measuring import fio
from tiered.measuring.meters import Meter, Spread, bytes_of, environment, scratch_folder, scratch_store
from tiered.types import PIECE_BYTES

__all__ = ["main"]

GIB = 1 << 30
LARGE = 16 << 20


def rewrite(store: TieredStore, key: str, nbytes: int) -> None:
    """New contents, as a WRITE lease leaves them, made in place."""
    store.create(key, TensorSpec("uint8", (nbytes,), 1))
    with store.lease(key, access="write") as tensor:
        tensor[::PIECE_BYTES].add_(1)


def push_out(store: TieredStore, pool: int) -> None:
    """One tensor as large as the pool: all others leave it, the changed ones by being written."""
    store.create("ballast", TensorSpec("uint8", (pool,), 1))
    store.delete("ballast")
    assert store.statistics().tiers[0].used == 0


def timed(store: TieredStore, round_: int) -> tuple[float, int, int]:
    """Seconds of a commit with new meta, bytes that the kernel moved for it, and the store's writes."""
    meter = Meter(store)
    began = time.perf_counter()
    store.commit({"round": round_})
    seconds = time.perf_counter() - began
    usage = meter.lap()
    return seconds, usage.kernel_written or 0, usage.written


def written_back(folder: str, rounds: int, tensors: int, total: int) -> tuple[list[float], list[int], list[float]]:
    """Seconds and kernel's bytes of commits, seconds of opening."""
    pool, nbytes = 64 << 20, total // tensors // 4096 * 4096
    seconds: list[float] = []
    moved: list[int] = []
    opening: list[float] = []
    for round_ in range(rounds + 3):
        child = os.fork()
        if child == 0:  # it dies with the store open
            store = TieredStore.open(folder, dram=pool, keep=2)
            for number in range(tensors):
                rewrite(store, f"layers.{number}.weight", nbytes)
            push_out(store, pool)
            took, kernel, ours = timed(store, round_)
            assert ours == 0, "nothing was dirty"
            Path(f"{folder}.found").write_text(f"{took} {kernel}")
            rewrite(store, "layers.0.weight", nbytes)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        told = Path(f"{folder}.found").read_text().split()
        began = time.perf_counter()
        store = TieredStore.open(folder, dram=pool)
        if round_ >= 3:
            opening.append(time.perf_counter() - began)
            seconds.append(float(told[0]))
            moved.append(int(told[1]))
        assert store.meta == {"round": round_}
        assert len(store) == tensors
        store.close()
    return seconds, moved, opening


def dirty(folder: str, rounds: int, beside: fio.Fio) -> list[tuple[float, float, float]]:
    """Of each round: bytes, seconds, and fio's bytes per second."""
    pool = GIB
    found: list[tuple[float, float, float]] = []
    with TieredStore.open(folder, dram=pool, keep=2) as store:
        keys = [f"w/{number}" for number in range(pool // 2 // LARGE)]
        for round_ in range(rounds + 3):
            for key in keys:
                rewrite(store, key, LARGE)
            ceiling = max(beside.run(fio.Job("write", engine)).rate for engine in fio.ENGINES)
            seconds, _, ours = timed(store, round_)
            if round_ >= 3:
                found.append((ours, seconds, ceiling))
        store.close()
    return found


def training(folder: str, rounds: int) -> list[float]:
    """Of each round, the seconds of ten steps after a commit was begun, that commit's end included, by those of ten without.

    Two trainings take turns, each with a store of its own. In each round either commits once, while the other does not; so
    where the stores lie on the drive, who comes first, and what drifts, cancels out.
    """
    options = TrainerOptions(folder, None, 8, 512, 8, 128, 4)
    with ExitStack() as stack:
        text = open_text(None, options.context, stack)
        trainers = []
        for _ in range(2):
            store = stack.enter_context(scratch_store(folder, dram=options.pool, backend=options.backend))
            trainers.append(Trainer(options, text, store))

        def ten(trainer: Trainer, *, commits: bool) -> float:
            began = time.perf_counter()
            assert isinstance(trainer.optimizer, zero.AdamW)
            open_commit = zero.commit_async(trainer.model, trainer.optimizer) if commits else None
            for _ in range(10):
                trainer.step()
            if open_commit is not None:
                open_commit.result()
            return time.perf_counter() - began

        found = []
        for _ in range(3 + rounds):
            ratio = 1.0
            for one in trainers:
                for trainer in trainers:
                    ratio *= ten(trainer, commits=True) if trainer is one else 1 / ten(trainer, commits=False)
            found.append(ratio**0.5)
        return found[3:]  # the first learns the order of a step, and three commits take fresh parts of the drive


def others(folder: str, rounds: int, tensors: int, total: int) -> dict[str, list[tuple[float, int]]]:
    """Seconds and kernel's bytes of each round."""
    from torch.distributed import checkpoint as dcp

    whole = bytes_of(total)
    each = total // tensors // 4096 * 4096
    state = {f"layers.{number}.weight": whole[number * each : (number + 1) * each] for number in range(tensors)}
    meter = Meter(None)

    def save(path: str) -> None:
        with open(path, "wb") as file:
            torch.save({key: tensor.clone() for key, tensor in state.items()}, file)
            os.fsync(file.fileno())

    def distributed(path: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.save(state, checkpoint_id=path)  # type: ignore[attr-defined]

    found: dict[str, list[tuple[float, int]]] = {}
    for round_ in range(rounds):
        for name, way in (("torch.save", save), ("torch.distributed.checkpoint", distributed)):
            path = os.path.join(folder, f"{name}.{round_ % 2}")
            shutil.rmtree(path, ignore_errors=True)
            if os.path.isfile(path):
                os.unlink(path)
            meter.lap()
            began = time.perf_counter()
            way(path)
            seconds = time.perf_counter() - began
            found.setdefault(name, []).append((seconds, meter.lap().kernel_written or 0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.commits", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dir", default=".", help="a folder on the drive (default: this one)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--size", type=size, default=4 * GIB, help="bytes of all tensors (default: 4GiB)")
    parser.add_argument("--training", action="store_true", help="only commits of a training")
    options = parser.parse_args()
    print(told_environment(environment()), flush=True)
    if options.training:
        with scratch_folder(options.dir) as folder:
            ratios = Spread.of(training(folder, options.rounds))
            print("\n| what | ratio |\n|---|---:|")
            print(f"| ten steps with a commit, by ten without | {ratios.shown(digits=3)} |", flush=True)
        return 0
    with scratch_folder(options.dir) as folder, fio.huge_buffers(fio.BLOCK * fio.DEPTH) as buffers:
        seconds, moved, opening = written_back(f"{folder}/back", options.rounds, options.tensors, options.size)
        shutil.rmtree(f"{folder}/back")
        print("\n| what | seconds | bytes written |\n|---|---:|---:|")
        of = f"{options.size / GIB:.1f} GiB in {options.tensors:,} tensors"
        print(f"| commit, written back: {of} | {Spread.of(seconds).shown(digits=4)} | {max(moved):,} |", flush=True)
        print(f"| open after SIGKILL: the same | {Spread.of(opening).shown(digits=3)} | |", flush=True)
        beside = fio.Fio(folder, GIB, buffers)
        beside.prepare()
        found = dirty(f"{folder}/dirty", options.rounds, beside)
        shutil.rmtree(f"{folder}/dirty")
        spread = Spread.of([seconds for _, seconds, _ in found])
        print(f"| commit, dirty: 16 MiB each | {spread.shown(digits=3)} | {int(found[0][0]):,} |", flush=True)
        times = Spread.of([seconds / (nbytes / ceiling) for nbytes, seconds, ceiling in found])
        print(f"| … by what fio takes for as many bytes | {times.shown()} | |", flush=True)
        for name, rows in others(folder, options.rounds, options.tensors, options.size).items():
            spread = Spread.of([seconds for seconds, _ in rows])
            print(f"| {name}: {of} | {spread.shown()} | {max(nbytes for _, nbytes in rows):,} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
