"""What the drive gives at best, by fio: blocks x depths x what holds the data, in interleaved rounds.

    .venv/bin/python -m bench.fio_baseline --dir /mnt/nvme --size 2GiB --rounds 5

Prints a Markdown table, GB/s, median [least - most] of the rounds. "Huge pages" are what ``tiered bench io --fio`` compares
with, "4 KiB pages" are what fio takes by itself.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from tiered.cli.arguments import count, size, sizes
from tiered.cli.output import exact_size, told_environment, told_noise
from tiered.cli.stop import Stopped, StopRequest
from tiered.errors import TieredError
from tiered.measuring import fio
from tiered.measuring.meters import Noise, Spread, environment, scratch_folder

SMALL = fio.Buffers("4 KiB pages", ("--iomem=malloc",))
MODES: tuple[fio.Mode, ...] = ("read", "write", "mixed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", dest="folder", default=".")
    parser.add_argument("--size", type=size, default=1 << 30, help="of the file (default: 1GiB)")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--engine", choices=fio.ENGINES, default="libaio")
    parser.add_argument("--blocks", type=sizes, default=sizes("256KiB,1MiB,4MiB"))
    parser.add_argument("--depths", type=lambda text: [count(part) for part in text.split(",")], default=[4, 16])
    options = parser.parse_args()
    try:
        with StopRequest() as stop:
            measure(options, stop)
    except Stopped as stopped:
        return stopped.exit_code
    except TieredError as error:
        print(f"fio_baseline: {error}", file=sys.stderr)
        return 1
    return 0


def measure(options: argparse.Namespace, stop: StopRequest) -> None:
    noise, most = Noise(), max(options.blocks) * max(options.depths)
    print(f"{told_environment(environment())}\n{fio.version()}, {options.engine}, direct, a file of {exact_size(options.size)}")
    with scratch_folder(options.folder) as folder, fio.huge_buffers(most) as huge:
        benches = {buffers.words: fio.Fio(folder, options.size, buffers) for buffers in (huge, SMALL)}
        benches[huge.words].prepare()
        jobs = [
            (words, fio.Job(mode, options.engine, block, depth))
            for words, block, depth, mode in itertools.product(benches, options.blocks, options.depths, MODES)
        ]
        rates: dict[tuple[str, fio.Job], list[float]] = {job: [] for job in jobs}
        for _ in range(options.rounds):
            for words, job in jobs:
                stop.check()
                rates[words, job].append(benches[words].run(job).rate)
    print(f"{options.rounds} rounds, interleaved; {told_noise(noise.seen())}\n")
    print(f"| buffers | block | depth | {' | '.join(MODES)} |\n|{'---|' * (3 + len(MODES))}")
    for words, block, depth in itertools.product(benches, options.blocks, options.depths):
        found = [Spread.of(rates[words, fio.Job(mode, options.engine, block, depth)]).shown(1e-9) for mode in MODES]
        print(f"| {words} | {exact_size(block)} | {depth} | {' | '.join(found)} |")


if __name__ == "__main__":
    sys.exit(main())
