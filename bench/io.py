"""The drive through the store beside fio, as a page for ``bench/results/``.

    .venv/bin/python -m bench.io --drive /mnt/nvme --size 2GiB --rounds 9 > bench/results/io_MACHINE_DATE.md

Options are those of ``tiered bench io``; without fio installed, say ``--no-fio``. Prints what that prints, then every round:
medians hide a drive that changes its mind halfway.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

from bench.command import tiered


def page(title: str, command: list[str], printed: str) -> str:
    return f"# {title}\n\n```\ntiered {shlex.join(command)}\n```\n\n```\n{printed.rstrip()}\n```\n"


def rounds(report: dict[str, Any]) -> str:
    """A row per round; GB/s."""
    columns = [(mode, name) for mode, found in report["modes"].items() for name in found if name != "ratios"]
    lines = ["| round | " + " | ".join(f"{mode}, {name}" for mode, name in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for turn in range(report["rounds"]):
        rates = [report["modes"][mode][name]["bytes_per_second"]["all"][turn] / 1e9 for mode, name in columns]
        lines.append(f"| {turn + 1} | " + " | ".join(f"{rate:.2f}" for rate in rates) + " |")
    return "\n".join(lines)


def main() -> None:
    given = sys.argv[1:]
    if {"-h", "--help"} & set(given):
        print(__doc__)
        return
    beside = [] if "--no-fio" in given else ["--fio"]
    command = ["bench", "io", *beside, *(word for word in given if word != "--no-fio")]
    printed, report = tiered(*command)
    print(page("Large tensors through the store" + (", beside fio" if beside else ""), command, printed))
    if report.get("modes"):
        print(f"Rounds, GB/s:\n\n{rounds(report)}")
    if "command" in report.get("fio", {}):
        print(f"\nfio, its writes with libaio:\n\n```\n{report['fio']['command']}\n```")


if __name__ == "__main__":
    main()
