"""``tiered info``: its options. What it asks is in ``machine.py``, what it prints in ``facts.py``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tiered.cli.arguments import add_json, command

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
What this machine offers a store: versions, I/O backends, devices, the filesystem of a folder, huge pages,
limits; and how fast the drive, memory and devices are, measured in a few seconds through a store of its
own in that folder, which is removed afterwards.
"""

EXAMPLES = """\
examples:
  tiered info                               of the current folder's drive
  tiered info --dir /mnt/nvme
  tiered info --no-measure --json           at once, nothing but questions
"""


def add_parser(commands: Commands) -> None:
    """Add ``info`` to the commands."""
    parser = command(commands, "info", "what this machine and its drive offer", DESCRIPTION, EXAMPLES)
    parser.add_argument("--dir", metavar="DIR", dest="folder", default=".", help="a folder on the drive (default: this one)")
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="do not measure rates")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.machine import info

    return info(parsed.folder, "rates" if parsed.measure else "none", parsed.json)
