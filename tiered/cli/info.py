"""``tiered info``: the parser. What the command finds and prints is in ``machine.py``, which imports torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tiered.cli.arguments import add_json, add_scratch_folder, command

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
Describe what this machine offers a store: versions, I/O backends, devices, the filesystem of a folder, huge pages and
limits. Then measure for a few seconds how fast the drive, the memory and the devices are. The drive is measured
through a scratch store in that folder, which is removed afterwards.
"""

EXAMPLES = """\
examples:
  tiered info                               the drive of the current folder
  tiered info --dir /mnt/nvme
  tiered info --no-measure --json           prints at once
"""


def add_parser(commands: Commands) -> None:
    """Add ``info`` to the commands."""
    parser = command(commands, "info", "describe this machine and measure its drive", DESCRIPTION, EXAMPLES)
    add_scratch_folder(parser)
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="measure no rates")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.machine import info

    return info(parsed.folder, "rates" if parsed.measure else "none", parsed.json)
