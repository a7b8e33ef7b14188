"""``tiered deepspeed-config``: print what becomes of each key of a DeepSpeed configuration, without beginning anything."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_json, command, count

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
Print for each key of a DeepSpeed configuration (JSON, version 0.19) whether zero.initialize honours it, does not need
it, or refuses it, and why. Nothing is run. A key that DeepSpeed does not have is an error that names the nearest one.
Values that are "auto" are filled at start, from zero.initialize(args=TrainingArguments(...)).

The exit code is 1 where a key is refused, and where batch sizes contradict each other.
"""

EXAMPLES = """\
examples:
  tiered deepspeed-config ds_config.json
  tiered deepspeed-config ds_config.json --ranks 4       batch sizes are those of 4 processes together
  tiered deepspeed-config ds_config.json --json
"""


def add_parser(commands: Commands) -> None:
    """Add ``deepspeed-config`` to the commands."""
    parser = command(commands, "deepspeed-config", "say what becomes of a DeepSpeed configuration", DESCRIPTION, EXAMPLES)
    parser.add_argument("config", metavar="CONFIG", help="the configuration: a JSON file")
    parser.add_argument(
        "--ranks", metavar="N", type=count, default=1, help="check batch sizes for so many processes (default: 1)"
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.output import refuse_unwritable, write_report
    from tiered.integrations.deepspeed.config import examined, told
    from tiered.integrations.deepspeed.table import Verdict

    refuse_unwritable(parsed.json)
    rows, batches = examined(parsed.config, parsed.ranks)
    refused = [row.path for row in rows if row.verdict is Verdict.REFUSED]
    if parsed.json != "-":
        print(told(rows))
        print()
        if batches is not None:
            print(f"refused: {batches}")
        print(f"refused: {', '.join(refused)}" if refused else f"{len(rows)} keys, none is refused")
    report: dict[str, Any] = {
        "command": "deepspeed-config",
        "ranks": parsed.ranks,
        "keys": [{"key": row.path, "value": row.value, "verdict": row.verdict.value, "why": row.why} for row in rows],
        "refused": refused,
        "batch_sizes": batches,
    }
    write_report(parsed.json, report)
    return 1 if refused or batches is not None else 0
