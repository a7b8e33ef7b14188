"""``tiered bench``: its options. torch is imported only when something runs, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tiered.cli.arguments import BACKENDS, add_json, command, count, counts, names, positive, seconds, size, sizes
from tiered.cli.train.command import DEMO

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
Measure this machine's drive through the store. Everything happens in a new folder inside of DIR, which is
removed afterwards, also after Ctrl-C; what else is in DIR stays as it is.
"""

EXAMPLES = """\
examples:
  tiered bench io --dir /mnt/nvme           large tensors: what the drive gives
  tiered bench store --dir /mnt/nvme        4 KiB to 1 GiB: how long each call takes
  tiered bench step --dir /mnt/nvme --fio   an optimizer step whose state is on disk
  tiered bench train --dir /mnt/nvme        training on disk beside training in memory
"""

IO_DESCRIPTION = """\
Large tensors through the store, checksums on: read in sequence with the next ones fetched ahead, written
until everything is on disk, and both at once. The rounds of all kinds are interleaved; what is printed is
the median with the least and the most, and how long one tensor took. With --fio, fio does the same
between them, with the buffers that the drive likes best.

Mode "flood" tells how long a lease waits while another thread writes as fast as it can, beside alone.
--duration writes for that long and tells how the rate changes. --sweep goes without the store: blocks
of a plain file, for every block, depth, backend and order. There checksums can be switched off and on;
a store's are always on.
"""

IO_EXAMPLES = """\
examples:
  tiered bench io --dir /mnt/nvme --fio
  tiered bench io --dir /mnt/nvme --size 8GiB --rounds 9 --json result.json --plot result.png
  tiered bench io --dir /mnt/nvme --mode flood
  tiered bench io --dir /mnt/nvme --duration 5min
  tiered bench io --dir /mnt/nvme --sweep --block 64KiB,1MiB --depth 1,8,32 --backends libaio --fio
"""

STORE_DESCRIPTION = """\
Every call of the store on tensors of many sizes: put, get, lease and prefetch, of tensors that are in
memory and of tensors that are not; how many a second, and how long one takes. Sizes that do not fit are
listed with the reason.
"""

STORE_EXAMPLES = """\
examples:
  tiered bench store --dir /mnt/nvme
  tiered bench store --dir /mnt/nvme --sizes 64KiB,16MiB --dram 1GiB --seconds 2 --json result.json
"""

STEP_DESCRIPTION = """\
An optimizer step whose parameters and Adam states are on disk and whose computing is next to nothing: how
long it takes, how many bytes it moves for each parameter, and how long the disk needs for these bytes alone,
which with --fio is what fio gets out of it between the steps.
"""

STEP_EXAMPLES = """\
examples:
  tiered bench step --dir /mnt/nvme --fio
  tiered bench step --dir /mnt/nvme --parameters 200000000 --dram 1GiB --dtype bfloat16
  tiered bench step --dir /mnt/nvme --update in_backward --json result.json
"""

TRAIN_DESCRIPTION = """\
One model trained three times, side by side: in memory with torch.optim.AdamW, in a store without a disk,
and on disk with little memory. Each is a process of its own; a step of each follows a step of another. What
a step takes, phase by phase, what the kernel counted, how much memory each had, and whether their losses
are the same bit by bit. Without options: 113 million parameters, some minutes, 6 GB of memory.
"""

TRAIN_EXAMPLES = """\
examples:
  tiered bench train --dir /mnt/nvme
  tiered bench train --layers 24 --batch 16 --micro-batch 4 --dram 400MiB --rounds 9 --json result.json
  tiered bench train --update in_backward --dram 128MiB
"""

BLOCKS = "256KiB,1MiB,4MiB"
DEPTHS = "1,4,16"
SIZES = "4KiB,64KiB,1MiB,16MiB,256MiB,1GiB"


def add_parser(commands: Commands) -> None:
    """Add ``bench`` to the commands, with those below it."""
    group = command(commands, "bench", "how fast stores are on this drive", DESCRIPTION, EXAMPLES)
    below = group.add_subparsers(metavar="what", dest="what", required=True)

    io = command(below, "io", "large tensors: what the drive gives", IO_DESCRIPTION, IO_EXAMPLES)
    _add_common(io)
    io.add_argument(
        "--size", metavar="SIZE", type=size, default=1 << 30, help="bytes that each round moves each way (default: 1GiB)"
    )
    io.add_argument("--dram", metavar="SIZE", type=size, default=256 << 20, help="memory of the store (default: 256MiB)")
    modes = names("read", "write", "mixed", "flood")
    io.add_argument("--mode", metavar="M,...", type=modes, help="some of read,write,mixed,flood (default: the first three)")
    orders = names("sequential", "random")
    io.add_argument("--order", metavar="O,...", type=orders, help="sequential or random; with --sweep both (default)")
    io.add_argument("--rounds", metavar="N", type=count, help="(default: 5; with --sweep 3)")
    io.add_argument("--fio", action="store_true", help="put fio beside it (Debian: apt-get install fio)")
    io.add_argument("--plot", metavar="FILE.png", help="draw it (pip install '.[plot]')")
    instead = io.add_mutually_exclusive_group()
    instead.add_argument("--duration", metavar="TIME", type=seconds, help="write for so long, like 60s or 5min")
    instead.add_argument("--sweep", action="store_true", help="blocks of a plain file instead of a store's tensors")
    sweep = io.add_argument_group("with --sweep")
    sweep.add_argument("--block", metavar="SIZE,...", type=sizes, help=f"(default: {BLOCKS})")
    sweep.add_argument("--depth", metavar="N,...", type=counts, help=f"requests in flight (default: {DEPTHS})")
    known = names(*(name for name in BACKENDS if name != "auto"))
    sweep.add_argument("--backends", metavar="B,...", type=known, help="(default: libaio,aiofiles,posix)")
    sweep.add_argument("--checksums", metavar="C,...", type=names("off", "on"), help="off, on, or off,on (default: off)")
    sweep.add_argument("--buffered", action="store_const", const="buffered", help="through the page cache, not O_DIRECT")
    sweep.add_argument("--seconds", metavar="S", type=positive, help="of one pass at most (default: 0.5)")
    io.set_defaults(run=partial(_run_io, io))

    store = command(below, "store", "every call, on tensors of many sizes", STORE_DESCRIPTION, STORE_EXAMPLES)
    _add_common(store)
    store.add_argument("--sizes", metavar="SIZE,...", type=sizes, default=sizes(SIZES), help=f"(default: {SIZES})")
    store.add_argument(
        "--dram", metavar="SIZE", type=size, help="most memory of a store (default: 4GiB, or half of what is available)"
    )
    store.add_argument(
        "--seconds", metavar="S", type=positive, default=0.5, help="for each line of the table (default: %(default)s)"
    )
    store.set_defaults(run=_run_store)


    step = command(below, "step", "an optimizer step whose state is on disk", STEP_DESCRIPTION, STEP_EXAMPLES)
    _add_common(step)
    step.add_argument("--parameters", metavar="N", type=count, default=50_000_000, help="about so many (default: 50000000)")
    step.add_argument("--dram", metavar="SIZE", type=size, help="memory of the store (default: a tenth of the state)")
    step.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: float32)")
    updates = ("on_fetch", "in_backward")
    step.add_argument("--update", choices=updates, default="on_fetch", help="when units are updated (default: on_fetch)")
    step.add_argument("--passes", metavar="N", type=count, default=1, help="forward and backward per step (default: 1)")
    step.add_argument("--micro-batch", metavar="K", type=count, default=1, help="parts of a batch inside units (default: 1)")
    step.add_argument("--threads", metavar="N", type=count, help="that torch computes with (default: all but one)")
    step.add_argument("--rounds", metavar="N", type=count, default=5, help="(default: 5)")
    step.add_argument("--fio", action="store_true", help="let fio say what the disk gives (Debian: apt-get install fio)")
    step.set_defaults(run=_run_step)

    train = command(below, "train", "training on disk beside training in memory", TRAIN_DESCRIPTION, TRAIN_EXAMPLES)
    _add_common(train)
    train.add_argument("--text", metavar="FILE", help="text to learn (default: the Shakespeare that ships with this)")
    told = {
        "layers": "transformer blocks",
        "width": "a multiple of --heads",
        "heads": "attention heads",
        "context": "bytes of text that are seen at once",
        "batch": "texts at once",
        "accumulate": "batches per step",
    }
    for name, what in told.items():
        train.add_argument(f"--{name}", metavar="N", type=count, default=DEMO[name], help=f"{what} (default: %(default)s)")
    train.add_argument("--micro-batch", metavar="K", type=count, default=1, help="parts of a batch inside units (default: 1)")
    train.add_argument("--dram", metavar="SIZE", type=size, help="memory of the store on disk (default: a tenth of the state)")
    train.add_argument("--update", choices=updates, default="on_fetch", help="when units are updated (default: on_fetch)")
    train.add_argument("--rounds", metavar="N", type=count, default=5, help="(default: 5)")
    train.set_defaults(run=partial(_run_train, train))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", metavar="DIR", dest="folder", default=".", help="a folder on the drive (default: this one)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="how to do I/O (default: auto)")
    add_json(parser)


def _run_io(parser: argparse.ArgumentParser, parsed: argparse.Namespace, given: list[str]) -> int:
    modes: Any = parsed.mode or ("read", "write", "mixed")
    orders: Any = parsed.order or ("sequential", "random")
    beside: Literal["fio", "nothing"] = "fio" if parsed.fio else "nothing"
    if parsed.sweep:
        if "flood" in modes or parsed.backend != "auto":
            parser.error("--sweep has no mode flood, and --backends instead of --backend")
        from tiered.cli.bench import sweep

        return sweep.sweep(
            sweep.Options(
                parsed.folder,
                parsed.size,
                modes,
                orders,
                parsed.block or sizes(BLOCKS),
                parsed.depth or counts(DEPTHS),
                parsed.backends or ("libaio", "aiofiles", "posix"),
                parsed.checksums or ("off",),
                parsed.buffered or "direct",
                parsed.seconds or 0.5,
                parsed.rounds or 3,
                beside,
                parsed.plot,
            ),
            parsed.json,
        )
    for name in "block", "depth", "backends", "checksums", "buffered", "seconds":
        if getattr(parsed, name) is not None:
            parser.error(f"--{name} is for --sweep")
    if len(orders) > 1 and parsed.order:
        parser.error("several orders are for --sweep: name one")
    if parsed.duration and (parsed.mode or parsed.order or parsed.rounds or parsed.fio):
        parser.error("--duration only writes: without --mode, --order, --rounds and --fio")
    from tiered.cli.bench.series import Setup

    setup = Setup.of(size=parsed.size, dram=parsed.dram, backend=parsed.backend, order=orders[0])
    if parsed.duration:
        from tiered.cli.bench.sustained import sustained

        return sustained(parsed.folder, setup, parsed.duration, parsed.json, parsed.plot)
    from tiered.cli.bench.io import Options, bench

    if parsed.plot and modes == ("flood",):
        parser.error("--plot draws rates: name another --mode, too")
    return bench(Options(parsed.folder, modes, parsed.rounds or 5, beside, parsed.plot), setup, parsed.json)


def _run_store(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.bench.store import Options, bench

    return bench(Options(parsed.folder, parsed.sizes, parsed.dram, parsed.backend, parsed.seconds), parsed.json)


def _run_train(parser: argparse.ArgumentParser, parsed: argparse.Namespace, given: list[str]) -> int:
    if parsed.width % parsed.heads:
        parser.error(f"--width {parsed.width} is not a multiple of --heads {parsed.heads}")
    from dataclasses import fields

    from tiered.cli.bench.train import bench
    from tiered.cli.bench.trainer import Options

    return bench(Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)}), parsed.json)


def _run_step(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.bench.step import Options, bench

    return bench(
        Options(
            parsed.folder,
            parsed.parameters,
            parsed.dram,
            parsed.dtype,
            parsed.update,
            parsed.passes,
            parsed.micro_batch,
            parsed.backend,
            parsed.rounds,
            "fio" if parsed.fio else "nothing",
            parsed.threads,
        ),
        parsed.json,
    )
