"""``tiered report``: the page of a training, from the JSON that ``tiered train --json`` wrote."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tiered.cli.arguments import command

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
Show a training as one HTML page: loss, throughput, memory by kind, the drive and waiting, the timeline of some
steps, and what was predicted beside what was measured. The page is one file and loads nothing, so it can be mailed,
and opened without a network. RUN.json is what tiered train --json wrote; with --report it has a timeline, too.
"""

EXAMPLES = """\
examples:
  tiered train --json run.json --report run.html       both at once
  tiered report run.json --out report.html             the page later, or of a run elsewhere
"""


def add_parser(commands: Commands) -> None:
    """Add ``report`` to the commands."""
    parser = command(commands, "report", "show a training as one HTML page", DESCRIPTION, EXAMPLES)
    parser.add_argument("run_json", metavar="RUN.json", help="what tiered train --json wrote")
    parser.add_argument("--out", metavar="FILE.html", default="report.html", help="the page (default: report.html)")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.reporting.page import page, read_run, refuse_foreign, write_page

    refuse_foreign(parsed.out)
    text = page(read_run(parsed.run_json), parsed.run_json)
    write_page(parsed.out, text)
    print(f"{parsed.out}: {len(text.encode()):,} bytes, one file")
    return 0
