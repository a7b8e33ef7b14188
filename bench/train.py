"""Training on disk beside training in memory, and the fewest bytes that its steps could move: a page of results.

    .venv/bin/python -m bench.train --drive /mnt/nvme --layers 24 --dram 400MiB > bench/results/train_<hardware>_<date>.md

Runs ``tiered bench train`` with the same options. Then trains once more and writes down what a step leases, for as long as it
is leased; ``bench/optimum.py`` says how few bytes that takes in the whole budget for somebody who knows all of it beforehand.

    .venv/bin/python -m bench.train --against CHECKOUT --layers 8 --width 512 --rounds 60

Trains in two processes, one with the package in CHECKOUT (built there), a step here and a step there in turn, first with
all of the state in DRAM and no disk, then on the disk; prints the ratios of neighbouring steps.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tiered import TieredStore
from tiered.cli.bench import trainer
from tiered.cli.train.model import open_text

if TYPE_CHECKING:
    from tiered.cli.bench.trainer import TrainerOptions

WARM = 4
"""Steps of a process before any counts: from the third on its order is known."""


def optimum(options: TrainerOptions) -> float:
    """Bytes per parameter and step."""
    from bench.watched import least_of_round, watch  # not above: --serve runs this file on other checkouts, older ones too
    from tiered.cli.bench.train import WARM_UP
    from tiered.measuring.meters import scratch_store

    with ExitStack() as stack:
        text = open_text(options.text, options.context, stack)
        store = stack.enter_context(scratch_store(options.folder, dram=options.pool, backend=options.backend))
        training = trainer.Trainer(options, text, store)
        for _ in range(WARM_UP):
            training.step()
        with watch(store) as seen:
            training.step()
    return least_of_round(seen, options.pool) / options.shape.parameters


def options_of(arguments: list[str]) -> TrainerOptions:
    """As the command reads them."""
    from tiered.cli.arguments import Parser
    from tiered.cli.bench import command

    parser = Parser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["bench", "train", *arguments])
    found: TrainerOptions = command.options_of(trainer.TrainerOptions, parsed)
    return found


def serve() -> None:
    """Answer each line, which says how to train and where the state is, with the seconds of a step."""
    with ExitStack() as stack:
        training = None
        for line in sys.stdin:
            if training is None:
                given = json.loads(line)
                kind = getattr(trainer, "TrainerOptions", None) or trainer.Options  # as it was called before
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=given["options"]["folder"]))
                known = {field.name for field in fields(kind)}
                options = kind(**{name: value for name, value in given["options"].items() if name in known})
                path = None if given["place"] == "DRAM" else Path(folder) / "store"
                dram = options.whole if path is None else options.pool
                store = stack.enter_context(TieredStore.open(path, dram=dram, backend=options.backend, durability="none"))
                text = open_text(options.text, options.context, stack)
                training = trainer.Trainer(options, text, store)
                for _ in range(WARM):
                    training.step()
            began = time.perf_counter()
            training.step()
            print(time.perf_counter() - began, flush=True)


def against(other: Path, options: TrainerOptions) -> None:
    from bench.checkouts import beside, in_turn, likely, ratio  # as above

    print("| state | s a step, there | here | there / here, median [quartiles] | 95 % confidence in that median |")
    print("|---|---:|---:|---:|---:|")
    for place in ("DRAM", "disk"):
        with beside(other, __file__) as pair:
            told = json.dumps({"options": asdict(options), "place": place})
            before, after = in_turn(pair, told, options.rounds)
            medians = f"{statistics.median(before):.3f} | {statistics.median(after):.3f}"
            print(f"| {place} | {medians} | {ratio(before, after)} | {likely(before, after)} |", flush=True)


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["--serve"]:
        serve()
        return 0
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
    if "--against" in arguments:
        at = arguments.index("--against")
        other, arguments = Path(*arguments[at + 1 : at + 2]), arguments[:at] + arguments[at + 2 :]
        options = options_of(arguments)
        against(other, replace(options, folder=str(Path(options.folder).resolve())))
        return 0
    from bench.command import tiered

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
