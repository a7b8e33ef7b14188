"""``tiered verify``: check every byte of a store, and print what ``tiered.verify`` found."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_backend, add_generation, add_json, add_store, command

if TYPE_CHECKING:
    from tiered import Verification
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
Read every byte that the commits of a store need, compare the checksums, and name all damage by tensor, generation,
file and offset. A job may have the store open meanwhile, and goes on: what it has committed when the command begins
is checked, and kept until the command ends. No tensor is changed. The exit code is 0 where all bytes are sound, and 1
otherwise.
"""

LINE = 1000
"""Most characters printed of one damage; --json has all."""

EXAMPLES = """\
examples:
  tiered verify state/                      all generations
  tiered verify state/ --generation 7 --json report.json
  tiered verify state/ --paths /mnt/a /mnt/b     a store on several drives
"""


def add_parser(commands: Commands) -> None:
    """Add ``verify`` to the commands."""
    parser = command(commands, "verify", "check every byte of a store", DESCRIPTION, EXAMPLES)
    add_store(parser)
    add_generation(parser, "check only the tensors of this generation (default: of all generations)")
    add_backend(parser)
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered import verify
    from tiered.cli.output import Progress, refuse_unwritable, write_report
    from tiered.cli.stop import Stopped, StopRequest
    from tiered.types import format_size

    refuse_unwritable(parsed.json)
    began = time.monotonic()
    try:
        with StopRequest() as stop, Progress(sys.stderr) as progress:

            def advanced(done: int, total: int) -> None:
                stop.check()
                share = done / total
                progress.working(f"read {format_size(done)} of {format_size(total)}", share)

            found = verify(
                parsed.folder, paths=parsed.paths, generation=parsed.generation, backend=parsed.backend, progress=advanced
            )
    except Stopped as stopped:
        print("tiered: stopped; nothing was changed", file=sys.stderr)
        return stopped.exit_code
    if parsed.json != "-":
        print(_described(found))
    write_report(parsed.json, _as_json(found, time.monotonic() - began))
    return 0 if found.sound else 1


def _described(found: Verification) -> str:
    from tiered.cli.output import counted
    from tiered.errors import shortened, shown
    from tiered.types import format_size

    named = [one if one.key is None else dataclasses.replace(one, key=shortened(one.key)) for one in found.damages]
    lines = [f"damaged: {shown(str(damage), LINE)}" for damage in named]
    for one in found.generations:
        if one.tensors is None or one.nbytes is None:
            lines.append(f"generation {one.number}: its manifest cannot be read")
        else:
            tensors = counted(one.tensors, "tensor")
            told = f"{one.damaged} of {tensors} damaged" if one.damaged else f"{tensors} sound"
            closed = f"cannot be opened ({shown(one.obstacle, LINE)}); " if one.obstacle else ""
            lines.append(f"generation {one.number}: {closed}{told}, {format_size(one.nbytes)}")
    if not found.generations:
        lines.append("the store has no commit")
    number = counted(found.tensors, "different tensor")
    read = f"{format_size(found.read)} read, {number} in {counted(len(found.generations), 'generation')}"
    lines.append(f"{shown(found.folder, LINE)}: {'sound' if found.sound else 'DAMAGED'}; {read}")
    return "\n".join(lines)


def _as_json(found: Verification, seconds: float) -> dict[str, Any]:
    report = dataclasses.asdict(found)
    report["bytes_read"] = report.pop("read")
    for one in report["generations"]:
        one["bytes"] = one.pop("nbytes")
    for one in report["damages"]:
        one["bytes"] = one.pop("nbytes")
    return {"sound": found.sound, **report, "seconds": seconds}
