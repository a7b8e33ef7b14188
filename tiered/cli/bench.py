"""``tiered bench``: its options. torch is imported only when something runs, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

from tiered.cli.arguments import BACKENDS, add_json, command, count, positive, size, sizes

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
"""

IO_DESCRIPTION = """\
Large tensors through the store, checksums on: read in sequence with the next ones fetched ahead, written
until everything is on disk, and both at once. The rounds of all kinds are interleaved; what is printed is
the median with the least and the most. With --fio, fio does the same between them, with the buffers that
the drive likes best.
"""

IO_EXAMPLES = """\
examples:
  tiered bench io --dir /mnt/nvme --fio
  tiered bench io --dir /mnt/nvme --size 8GiB --rounds 9 --json result.json
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
    io.add_argument("--rounds", metavar="N", type=count, default=5, help="(default: %(default)s)")
    io.add_argument("--fio", action="store_true", help="put fio beside it (Debian: apt-get install fio)")
    io.set_defaults(run=_run_io)

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


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", metavar="DIR", dest="folder", default=".", help="a folder on the drive (default: this one)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="how to do I/O (default: auto)")
    add_json(parser)


def _run_io(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.bench_io import Options, bench

    beside: Literal["fio", "nothing"] = "fio" if parsed.fio else "nothing"
    return bench(Options(parsed.folder, parsed.size, parsed.dram, parsed.backend, parsed.rounds, beside), parsed.json)


def _run_store(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.bench_store import Options, bench

    return bench(Options(parsed.folder, parsed.sizes, parsed.dram, parsed.backend, parsed.seconds), parsed.json)
