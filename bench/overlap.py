"""How much of the I/O hides behind the compute: ``tiered train`` with and without fetching ahead, in interleaved pairs.

    .venv/bin/python -m bench.overlap --pairs 2 --steps 12

Prints a Markdown table: a row per run, then the medians. "Disk by itself" is how long the same bytes take at the
rates that each run measures right after its training, when nothing else goes on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

from bench.command import tiered
from tiered.cli.output import told_environment, told_noise
from tiered.measuring.meters import Noise, environment


def numbers(summary: dict[str, Any]) -> list[float]:
    steps, time, io = summary["steps"], summary["time"], summary["io"]
    return [
        summary["per_step"]["seconds"],
        time["compute_seconds"] / steps,
        time["optimizer_seconds"] / steps,
        io["waited_seconds"] / steps,
        io["one_after_the_other_seconds"] / steps,
        100 * io["waited_share"],
        io["read_bytes_per_second_alone"] / 1e9,
        io["write_bytes_per_second_alone"] / 1e9,
        summary["per_step"]["read_bytes_per_parameter"],
        summary["per_step"]["written_bytes_per_parameter"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    print(told_environment(environment()) + "\n")
    columns = ["prefetch", "s/step", "compute", "optimizer", "waited", "disk by itself", "waited, % of it"]
    columns += ["read GB/s", "write GB/s", "B/param read", "written"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    rows: dict[str, list[list[float]]] = {"on": [], "off": []}
    noise = Noise()
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-overlap-") as folder:
        command = ["train", f"{folder}/store", "--existing", "overwrite", "--steps", str(options.steps)]
        for _ in range(options.pairs):
            for name, more in (("on", []), ("off", ["--no-prefetch"])):
                _, summary = tiered(*command, *more)
                rows[name].append(numbers(summary))
                print(f"| {name} | " + " | ".join(f"{n:.2f}" for n in rows[name][-1]) + " |", flush=True)
    for name, found in rows.items():
        print(f"| {name}, median | " + " | ".join(f"{statistics.median(n):.2f}" for n in zip(*found, strict=True)) + " |")
    print(f"\n{told_noise(noise.seen())}")


if __name__ == "__main__":
    main()
