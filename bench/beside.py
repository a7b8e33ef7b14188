"""What training in memory loses beside a drive that is as busy as paging would make it: the floor for training from a disk.

    .venv/bin/python -m bench.beside --layers 24 --batch 2 --read 480MB --write 420MB

Steps of a GPT in memory, some alone, some while fio reads and writes that many bytes a second (direct I/O, blocks of 4 MiB),
and some with checksums over as many bytes besides, by a process of its own. In turn, and who begins changes. ``tiered bench
train`` tells how many bytes a step moves. Needs fio.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from tiered.cli.bench.trainer import Trainer, TrainerOptions
from tiered.cli.output import told_environment, told_noise
from tiered.cli.train.model import open_text
from tiered.format.data_file import digest
from tiered.measuring import fio
from tiered.measuring.meters import Noise, Spread, environment, scratch_folder, turns
from tiered.types import PIECE_BYTES, format_size, parse_size

__all__ = ["main"]

FILE = 4 << 30
SETTLE = 2.0
"""Seconds in which fio comes to its rate."""
STEPS = 2


def hash_at(rate: int) -> None:
    """Compute checksums over ``rate`` bytes a second, piece by piece of 64 MiB, until killed."""
    memory = memoryview(torch.randint(0, 256, (64 << 20,), dtype=torch.uint8).numpy())
    began, done = time.perf_counter(), 0
    while True:
        at = done % len(memory)
        digest(bytes(16), 0, 0, at, memory[at : at + PIECE_BYTES])
        done += PIECE_BYTES
        time.sleep(max(0.0, began + done / rate - time.perf_counter()))


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            time.sleep(SETTLE)
            if process.poll() is not None:
                sys.exit(f"{command[0]} ended with {process.returncode}: {' '.join(command)}")
            yield
        finally:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("context", 256), ("batch", 8), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("read", "write"):
        parser.add_argument(f"--{name}", type=parse_size, required=True, metavar="SIZE", help="bytes a second")
    parser.add_argument("--hash", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hash:
        hash_at(options.hash)
    fio.version()
    shape = (options.layers, options.width, options.heads, options.context, options.batch)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(options.dir))
        buffers = stack.enter_context(fio.huge_buffers(16 << 20))
        bench = fio.Fio(folder, FILE, buffers)
        bench.prepare()
        text = open_text(None, options.context, stack)
        trainer = Trainer(TrainerOptions(folder, None, *shape), text, None)
        busy = [*bench.command(fio.Job("mixed", "libaio", 4 << 20, 4)), "--time_based", "--runtime=3600"]
        busy += [f"--rate={options.read},{options.write}"]
        rates = [f"--read={options.read}", f"--write={options.write}"]
        hashing = [sys.executable, "-m", "bench.beside", *rates, f"--hash={options.read + options.write}"]
        ways = {"alone": [], "beside fio": [busy], "beside fio and checksums": [busy, hashing]}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2):
            trainer.step()
        noise = Noise()
        for _, names in turns(list(ways), options.rounds):
            for name in names:
                with ExitStack() as beside:
                    if not ways[name]:
                        time.sleep(SETTLE)  # as the others
                    for command in ways[name]:
                        beside.enter_context(running(command))
                    found = [trainer.step()["seconds"] for _ in range(STEPS)]
                seconds[name].append(sum(found) / STEPS)
    moved = f"{format_size(options.read)} read and {format_size(options.write)} written a second"
    print(told_environment(environment()))
    print(f"{options.layers} layers of {options.width}, {options.batch} x {options.context} tokens a step; {moved}")
    print(f"{options.rounds} rounds of {STEPS} steps each; {told_noise(noise.seen())}\n")
    print("| a step | seconds | by that alone |\n|---|---:|---:|")
    for name, found in seconds.items():
        by = Spread.by(found, seconds["alone"])
        print(f"| {name} | {Spread.of(found).shown()} | {by.shown()} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
