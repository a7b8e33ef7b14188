"""``tiered bench``: the parsers of its four commands. torch is imported only when a measurement runs, so that ``--help`` is
quick."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import (
    BACKENDS,
    DRIVE,
    add_backend,
    add_drive,
    add_json,
    command,
    count,
    counts,
    names,
    positive,
    seconds,
    size,
    sizes,
)
from tiered.cli.train.options import MODEL_HELP, OPTIMIZERS, UPDATES, default_of

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser", "options_of"]

DESCRIPTION = """\
Measure the drive of this machine through a store. Everything happens in a new folder inside FOLDER, which is
removed afterwards, also after Ctrl-C. Nothing else in FOLDER is changed.
"""

EXAMPLES = """\
examples:
  tiered bench io --drive /mnt/nvme           large tensors: the rates of the drive
  tiered bench store --drive /mnt/nvme        4 KiB to 1 GiB: the time of each call
  tiered bench step --drive /mnt/nvme --fio   an optimizer step whose state is on disk
  tiered bench train --drive /mnt/nvme        training on disk beside training in memory

Each command has its own help: tiered bench io --help
"""

IO_DESCRIPTION = """\
Move large tensors through a store, with checksums: read them in sequence with prefetching, write them until all
bytes are on disk, and do both at once. Rounds of all modes are interleaved. The table has the median with the least
and the most, and the time of one tensor. With --fio, rounds of fio stand between them, with the buffers that are
fastest on this machine.

The mode "flood" measures how long a lease waits while another thread writes as fast as it can. --duration writes for
that long and shows how the rate changes. --sweep uses no store: it reads and writes blocks of a plain file, for every
combination of block, depth, backend and order. Checksums, which a store always has, can be off there.
"""

IO_EXAMPLES = """\
examples:
  tiered bench io --drive /mnt/nvme --fio
  tiered bench io --drive /mnt/nvme --size 8GiB --rounds 9 --json result.json --plot result.png
  tiered bench io --drive /mnt/nvme --mode flood
  tiered bench io --drive /mnt/nvme --duration 5min
  tiered bench io --drive /mnt/nvme --sweep --block 64KiB,1MiB --depth 1,8,32 --backends libaio --fio
"""

STORE_DESCRIPTION = """\
Time every call of a store on tensors of many sizes: put, get, lease and prefetch, of tensors in memory and of
tensors on disk. The table has the calls per second and the time of one call. Sizes that do not fit are listed with
the reason.
"""

STORE_EXAMPLES = """\
examples:
  tiered bench store --drive /mnt/nvme
  tiered bench store --drive /mnt/nvme --sizes 64KiB,16MiB --dram 1GiB --seconds 2 --json result.json
"""

STEP_DESCRIPTION = """\
Run optimizer steps whose parameters and states are on disk and which compute almost nothing. The table has the time
of a step, the bytes that it moves per parameter, and the time that the disk alone needs for these bytes. The rates of
the disk are measured between the steps, with --fio by fio.
"""

STEP_EXAMPLES = """\
examples:
  tiered bench step --drive /mnt/nvme --fio
  tiered bench step --drive /mnt/nvme --parameters 200000000 --dram 1GiB --dtype bfloat16
  tiered bench step --drive /mnt/nvme --update in_backward --json result.json
  tiered bench step --drive /mnt/nvme --optimizer adamw8bit
"""

TRAIN_DESCRIPTION = """\
Train one model three times side by side: in memory with torch.optim.AdamW, in a store without a disk, and on disk
with little memory. Each training is a process of its own, and their steps take turns. The table has the time of a
step by phase, the bytes that the kernel counted and the memory of each process; then the command says whether the
losses are the same bit by bit. Without options: 113 million parameters, some minutes, 6 GB of memory.
"""

TRAIN_EXAMPLES = """\
examples:
  tiered bench train --drive /mnt/nvme
  tiered bench train --layers 24 --batch 16 --micro-batch 4 --dram 400MiB --rounds 9 --json result.json
  tiered bench train --update in_backward --dram 128MiB
"""

BLOCKS = "256KiB,1MiB,4MiB"
SWEPT = tuple(name for name in BACKENDS if name != "auto")
DEPTHS = "1,4,16"
SIZES = "4KiB,64KiB,1MiB,16MiB,256MiB,1GiB"
MODES = ("read", "write", "mixed", "flood")
ORDERS = ("sequential", "random")
FIO = "measure fio beside it (Debian: apt-get install fio)"


def add_parser(commands: Commands) -> None:
    """Add ``bench`` to the commands, with the commands below it."""
    group = command(commands, "bench", "measure how fast stores are on this drive", DESCRIPTION, EXAMPLES)
    below = group.add_subparsers(title="commands", metavar="COMMAND", dest="what")
    _add_io(below)
    _add_store(below)
    _add_step(below)
    _add_train(below)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    add_drive(parser)
    add_backend(parser)
    add_json(parser)


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", metavar="N", type=count, default=5, help="number of rounds (default: %(default)s)")


def _add_update(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--update", choices=UPDATES, default=UPDATES[0], help="when parameters are updated (default: %(default)s)"
    )


def _add_model_option(parser: argparse.ArgumentParser, name: str) -> None:
    option = "--" + name.replace("_", "-")
    what = f"{MODEL_HELP[name]} (default: %(default)s)"
    parser.add_argument(option, metavar="N", type=count, default=default_of(name), help=what)


def _add_io(below: Commands) -> None:
    io = command(below, "io", "large tensors: the rates of the drive", IO_DESCRIPTION, IO_EXAMPLES, DRIVE)
    _add_common(io)
    io.add_argument(
        "--size", metavar="SIZE", type=size, default=1 << 30, help="bytes that each round moves each way (default: 1GiB)"
    )
    io.add_argument("--dram", metavar="SIZE", type=size, default=256 << 20, help="host memory of the store (default: 256MiB)")
    io.add_argument("--mode", metavar="M,...", type=names(*MODES), help=f"some of {','.join(MODES)} (default: the first three)")
    io.add_argument("--order", metavar="O,...", type=names(*ORDERS), help="sequential (default) or random; with --sweep both")
    io.add_argument("--rounds", metavar="N", type=count, help="number of rounds (default: 5; with --sweep 3)")
    io.add_argument("--fio", action="store_true", help=FIO)
    io.add_argument("--plot", metavar="FILE.png", help="draw the results (pip install '.[plot]')")
    instead = io.add_mutually_exclusive_group()
    instead.add_argument("--duration", metavar="TIME", type=seconds, help="write for this long, like 60s or 5min")
    instead.add_argument("--sweep", action="store_true", help="measure blocks of a plain file instead of tensors of a store")
    sweep = io.add_argument_group("with --sweep")
    sweep.add_argument("--block", metavar="SIZE,...", type=sizes, help=f"sizes of blocks (default: {BLOCKS})")
    sweep.add_argument("--depth", metavar="N,...", type=counts, help=f"numbers of requests in flight (default: {DEPTHS})")
    sweep.add_argument(
        "--backends", metavar="B,...", type=names(*SWEPT), help=f"I/O backends (default: {','.join(SWEPT)})"
    )
    sweep.add_argument("--checksums", metavar="C,...", type=names("off", "on"), help="off, on, or off,on (default: off)")
    sweep.add_argument("--buffered", action="store_const", const="buffered", help="use the page cache, not O_DIRECT")
    sweep.add_argument("--seconds", metavar="S", type=positive, help="longest time of one pass (default: 0.5)")
    io.set_defaults(run=partial(_run_io, io))


def _add_store(below: Commands) -> None:
    store = command(below, "store", "every call, on tensors of many sizes", STORE_DESCRIPTION, STORE_EXAMPLES, DRIVE)
    _add_common(store)
    store.add_argument(
        "--sizes", metavar="SIZE,...", type=sizes, default=sizes(SIZES), help=f"sizes of tensors (default: {SIZES})"
    )
    store.add_argument(
        "--dram", metavar="SIZE", type=size, help="most host memory of a store (default: 4GiB, or half of what is free)"
    )
    store.add_argument(
        "--seconds", metavar="S", type=positive, default=0.5, help="time for each line of the table (default: %(default)s)"
    )
    store.set_defaults(run=_run_store)


def _add_step(below: Commands) -> None:
    step = command(below, "step", "an optimizer step whose state is on disk", STEP_DESCRIPTION, STEP_EXAMPLES, DRIVE)
    _add_common(step)
    step.add_argument(
        "--parameters", metavar="N", type=count, default=50_000_000, help="approximate number (default: %(default)s)"
    )
    step.add_argument("--dram", metavar="SIZE", type=size, help="host memory of the store (default: a tenth of the state)")
    step.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of parameters (default: %(default)s)"
    )
    step.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="what updates the parameters (default: %(default)s)"
    )
    _add_update(step)
    step.add_argument(
        "--passes", metavar="N", type=count, default=1, help="forward and backward passes per step (default: %(default)s)"
    )
    _add_model_option(step, "micro_batch")
    step.add_argument("--threads", metavar="N", type=count, help="threads that torch computes with (default: all but one)")
    _add_rounds(step)
    step.add_argument("--fio", action="store_true", help="measure the disk with fio (Debian: apt-get install fio)")
    step.set_defaults(run=_run_step)


def _add_train(below: Commands) -> None:
    train = command(below, "train", "training on disk beside training in memory", TRAIN_DESCRIPTION, TRAIN_EXAMPLES, DRIVE)
    _add_common(train)
    train.add_argument("--text", metavar="FILE", help="text to learn, any bytes (default: the Shakespeare of this package)")
    for name in MODEL_HELP:
        _add_model_option(train, name)
    train.add_argument(
        "--dram", metavar="SIZE", type=size, help="host memory of the store on disk (default: a tenth of the state)"
    )
    _add_update(train)
    _add_rounds(train)
    train.set_defaults(run=partial(_run_train, train))


def _run_io(parser: argparse.ArgumentParser, parsed: argparse.Namespace, given: list[str]) -> int:
    modes: Any = parsed.mode or MODES[:3]
    orders: Any = parsed.order or ORDERS
    if parsed.sweep:
        if "flood" in modes:
            parser.error("--sweep has no mode flood")
        if parsed.backend != "auto":
            parser.error("--sweep takes --backends instead of --backend")
        from tiered.cli.bench import sweep

        return sweep.sweep(
            sweep.SweepOptions(
                folder=parsed.folder,
                size=parsed.size,
                modes=modes,
                orders=orders,
                blocks=parsed.block or sizes(BLOCKS),
                depths=parsed.depth or counts(DEPTHS),
                backends=parsed.backends or SWEPT,
                checksums=parsed.checksums or ("off",),
                cache=parsed.buffered or "direct",
                seconds=parsed.seconds or 0.5,
                rounds=parsed.rounds or 3,
                beside=_beside(parsed),
                plot=parsed.plot,
            ),
            parsed.json,
        )
    for name in "block", "depth", "backends", "checksums", "buffered", "seconds":
        if getattr(parsed, name) is not None:
            parser.error(f"--{name} needs --sweep")
    if len(orders) > 1 and parsed.order:
        parser.error("only --sweep takes several orders: name one")
    if parsed.duration and (parsed.mode or parsed.order or parsed.rounds or parsed.fio):
        parser.error("--duration only writes: leave out --mode, --order, --rounds and --fio")
    if parsed.plot and modes == ("flood",):
        parser.error("--plot draws rates: name a --mode besides flood")
    from tiered.cli.bench.series import Setup

    setup = Setup.of(size=parsed.size, dram=parsed.dram, backend=parsed.backend, order=orders[0])
    if parsed.duration:
        from tiered.cli.bench.sustained import sustained

        return sustained(parsed.folder, setup, parsed.duration, parsed.json, parsed.plot)
    from tiered.cli.bench.io import IoOptions, bench

    return bench(IoOptions(parsed.folder, modes, parsed.rounds or 5, _beside(parsed), parsed.plot), setup, parsed.json)


def _run_store(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.bench.store import StoreJobOptions, bench

    return bench(options_of(StoreJobOptions, parsed), parsed.json)


def _run_train(parser: argparse.ArgumentParser, parsed: argparse.Namespace, given: list[str]) -> int:
    if parsed.width % parsed.heads:
        parser.error(f"--width {parsed.width} is not a multiple of --heads {parsed.heads}")
    from tiered.cli.bench.train import bench
    from tiered.cli.bench.trainer import TrainerOptions

    return bench(options_of(TrainerOptions, parsed), parsed.json)


def _run_step(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.bench.step import StepOptions, bench

    parsed.beside = _beside(parsed)
    return bench(options_of(StepOptions, parsed), parsed.json)


def _beside(parsed: argparse.Namespace) -> Any:
    return "fio" if parsed.fio else "nothing"


def options_of(kind: Any, parsed: argparse.Namespace) -> Any:
    """Make the options of a command from the arguments that have the names of its fields."""
    return kind(**{field.name: getattr(parsed, field.name) for field in fields(kind) if field.name in parsed})
