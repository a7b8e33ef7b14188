"""Training on disk beside training in memory, and the fewest bytes that its steps could move: a page of results.

    .venv/bin/python -m bench.train --drive /mnt/nvme --layers 24 --dram 400MiB > bench/results/train_<hardware>_<date>.md

Runs ``tiered bench train`` with the same options. Then trains once more and writes down what a step leases, for as long as it
is leased; ``bench/optimum.py`` says how few bytes that takes in the whole budget for somebody who knows all of it beforehand.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack

from bench.command import tiered
from bench.watched import least_of_round, watch
from tiered.cli.arguments import Parser
from tiered.cli.bench import command
from tiered.cli.bench.train import WARM_UP
from tiered.cli.bench.trainer import Trainer, TrainerOptions
from tiered.cli.train.model import open_text
from tiered.measuring.meters import scratch_store


def optimum(options: TrainerOptions) -> float:
    """Bytes per parameter and step."""
    with ExitStack() as stack:
        text = open_text(options.text, options.context, stack)
        store = stack.enter_context(scratch_store(options.folder, dram=options.pool, backend=options.backend))
        trainer = Trainer(options, text, store)
        for _ in range(WARM_UP):
            trainer.step()
        with watch(store) as seen:
            trainer.step()
    return least_of_round(seen, options.pool) / options.shape.parameters


def options_of(arguments: list[str]) -> TrainerOptions:
    """As the command reads them."""
    parser = Parser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["bench", "train", *arguments])
    found: TrainerOptions = command.options_of(TrainerOptions, parsed)
    return found


def main() -> int:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
    options = options_of(arguments)
    printed, report = tiered("bench", "train", *arguments)
    least = optimum(options)
    moved = report["variants"]["disk"]["bytes_per_parameter"]
    kernel = [moved[name]["median"] for name in ("kernel_read", "kernel_written") if moved[name] is not None]
    own = sum(kernel) if kernel else moved["read"]["median"] + moved["written"]["median"]
    print(f"```\n$ tiered bench train {shlex.join(arguments)}\n{printed.rstrip()}\n```\n")
    print(f"Bytes per parameter and step: {own:.2f}; the offline optimum {least:.2f}, ours by it {own / least:.3f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
