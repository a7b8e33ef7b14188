"""``tiered info``: the parser. What the command finds and prints is in ``machine.py``, which imports torch."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tiered.cli.arguments import DRIVE, add_drive, add_json, command

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
  tiered info --drive /mnt/nvme
  tiered info --no-measure --json           prints at once
  tiered info --machine server.json         for tiered plan --machine server.json, anywhere
"""


def add_parser(commands: Commands) -> None:
    """Add ``info`` to the commands."""
    parser = command(commands, "info", "describe this machine and measure its drive", DESCRIPTION, EXAMPLES, DRIVE)
    add_drive(parser)
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="measure no rates")
    parser.add_argument("--machine", metavar="FILE", help="measure what tiered plan needs, too, and write it to FILE")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    machine = None
    if parsed.machine is not None:
        from tiered.cli.output import INTERVAL, Progress, refuse_unwritable
        from tiered.measuring.probes import measured_machine

        refuse_unwritable(parsed.machine, "--machine")
        with Progress(sys.stderr, quiet=INTERVAL) as progress:
            machine = measured_machine(parsed.folder, progress=progress.working)
        machine.save(parsed.machine)
        print(f"machine     {parsed.machine}: read it with tiered plan --machine {parsed.machine}", file=sys.stderr)
    from tiered.cli.info.machine import info

    return info(parsed.folder, "rates" if parsed.measure else "none", parsed.json, machine)
