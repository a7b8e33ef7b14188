"""``tiered import``: put the tensors of safetensors files into a store."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tiered.cli.arguments import add_paths, command, size

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
Put the tensors of a safetensors file, or of a folder with several such files and their index, into a store under
their names, and commit. The store is made where absent. The command needs --dram of memory, however large the files
are; the largest single tensor must fit. A command that is stopped has committed nothing.
"""

EXAMPLES = """\
examples:
  tiered import model.safetensors --dir state/
  tiered import llama/ --dir state/ --dram 2GiB --existing overwrite
"""


def add_parser(commands: Commands) -> None:
    """Add ``import`` to the commands."""
    parser = command(commands, "import", "put safetensors into a store", DESCRIPTION, EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="a .safetensors file, or a folder with model.safetensors or an index")
    parser.add_argument("--dir", metavar="STORE", required=True, help="the store's folder")
    add_paths(parser)
    parser.add_argument("--dram", metavar="SIZE", type=size, help="host memory of the store (default: half of what is free)")
    parser.add_argument(
        "--existing",
        choices=("refuse", "overwrite"),
        default="refuse",
        help="what to do with tensors that have the same name in the store (default: refuse)",
    )
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered import TieredStore, import_safetensors
    from tiered.cli.output import Progress, counted
    from tiered.cli.stop import Stopped, StopRequest
    from tiered.errors import shown
    from tiered.types import format_size

    read = 0
    try:
        with StopRequest() as stop, Progress(sys.stderr) as progress:

            def advanced(done: int, total: int) -> None:
                nonlocal read
                stop.check()
                read = done
                progress.working(f"read {format_size(done)} of {format_size(total)}", done / total)

            store = TieredStore.open(parsed.dir, dram=parsed.dram, paths=parsed.paths)
            try:
                tensors = import_safetensors(store, parsed.source, existing=parsed.existing, progress=advanced)
                generation = store.commit()
            finally:
                store.close()
    except Stopped as stopped:
        print("tiered: stopped; nothing was committed", file=sys.stderr)
        return stopped.exit_code
    print(f"{shown(parsed.dir, 1000)}: {counted(tensors, 'tensor')}, {format_size(read)}, in generation {generation}")
    return 0
