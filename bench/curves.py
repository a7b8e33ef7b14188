"""Losses of ``tiered train`` with each optimizer, from the same start and on the same batches: a table, and a picture.

    .venv/bin/python -m bench.curves --dir /mnt/nvme --plot docs/images/optimizers.png       ten minutes on 2 cores

Each optimizer trains the GPT of ``tiered train`` in a store of its own, one after the other. "Last" is the mean loss of the
last tenth of the steps, and "to adamw" its difference from that of AdamW with fp32 moments. The learning rates are those of
``RATES``: one for all kinds of AdamW, so that these can be compared; none was searched for. Without --plot there is no picture;
it needs matplotlib (pip install '.[plot]').
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.command import tiered
from tiered.cli.output import refuse_unplottable, told_environment
from tiered.cli.train.options import OPTIMIZERS
from tiered.measuring.meters import environment

__all__ = ["RATES", "main"]

RATES = {
    **dict.fromkeys(("adamw", "adamw_bf16", "adamw8bit", "adamw4bit", "adam", "nadam", "radam"), 1e-3),
    "adamax": 3e-3,
    "adafactor": 1e-2,
    "adagrad": 1e-2,
    "rmsprop": 3e-4,
    "lion": 3e-4,
    "sgd": 0.1,
}


def train(name: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train with one optimizer in a process of its own. Returns its summary."""
    report = Path(options.reports or folder) / f"{name}.json"
    if report.exists():
        kept: dict[str, Any] = json.loads(report.read_text())
        return kept
    words = [
        *("train", f"{folder}/{name}"),
        *("--optimizer", name, "--lr", str(options.rate or RATES[name]), "--steps", str(options.steps)),
        *("--layers", str(options.layers), "--width", str(options.width), "--heads", str(options.width // 64)),
        *("--dram", options.dram),
    ]
    _, found = tiered(*words)
    report.write_text(json.dumps(found))
    return found


def smoothed(losses: list[float], window: int) -> list[float]:
    return [statistics.fmean(losses[max(0, at - window) : at + 1]) for at in range(len(losses))]


def draw(path: str, curves: Mapping[str, list[float]], parameters: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=110, layout="constrained")
    whole, last = figure.subplots(1, 2)
    steps = len(next(iter(curves.values())))
    for number, (name, losses) in enumerate(curves.items()):
        style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "linewidth": 1.4}
        line = smoothed(losses, max(1, steps // 30))
        whole.plot(range(1, steps + 1), line, label=name, **style)
        last.plot(range(steps * 2 // 3, steps + 1), line[steps * 2 // 3 - 1 :], **style)
    for axes, title in (whole, "all steps"), (last, "the last third"):
        axes.set(xlabel="step", ylabel="loss (nats a byte, running mean)", title=title)
        axes.grid(alpha=0.3)
    whole.legend(fontsize=8)
    figure.suptitle(f"GPT of {parameters / 1e6:.1f} million parameters, the same start and batches")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive (default: here)")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="(default: all)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rate", type=float, help="learning rate of all (default: RATES)")
    parser.add_argument("--dram", default="8MiB", help="memory of the store (default: %(default)s)")
    parser.add_argument("--reports", metavar="FOLDER", help="keep what each run reports; what is there is not run again")
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    refuse_unplottable(options.plot)
    names = options.optimizer or list(OPTIMIZERS)
    print(told_environment(environment()) + "\n")
    found = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for name in names:
            print(f"{name} ...", end="\r", file=sys.stderr, flush=True)
            found[name] = train(name, options, folder)
    curves = {name: report["loss"]["all"] for name, report in found.items()}
    parameters = next(iter(found.values()))["parameters"]
    tail = max(1, options.steps // 10)
    last = {name: statistics.fmean(losses[-tail:]) for name, losses in curves.items()}
    print(f"{parameters:,} parameters, {options.steps} steps\n")
    print("| optimizer | learning rate | first | last | to adamw | s a step | bytes a parameter and step |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, report in found.items():
        each = report["per_step"]
        beside = f"{last[name] - last['adamw']:+.4f}" if "adamw" in last else ""
        moved = each["read_bytes_per_parameter"] + each["written_bytes_per_parameter"]
        print(
            f"| {name} | {options.rate or RATES[name]:g} | {curves[name][0]:.4f} | {last[name]:.4f} | {beside} "
            f"| {each['seconds']:.3f} | {moved:.1f} |"
        )
    if options.plot:
        draw(options.plot, curves, parameters)
    return 0


if __name__ == "__main__":
    sys.exit(main())
