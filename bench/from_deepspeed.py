"""The examples of docs/examples with DeepSpeed itself: losses, time, memory and bytes beside those of ``zero.initialize``.

    python -m bench.from_deepspeed --deepspeed /path/to/python [--rounds 3] [--steps 20] [--width 256] [--dram 4MiB]
        [--out FILE]

``--deepspeed``: a Python that has DeepSpeed 0.19.8 (``tests/integrations/deepspeed/make_theirs.py`` says how to install it).
Its script is the example with its two lines changed back: the import, and the call of ``initialize``. Both run on the CPU, in
one process, with one thread each, from the same configuration file. Seconds are those between two losses, without the first 4.
Memory is the peak of what is resident (``getrusage``); bytes are what the process read from and wrote to the disk
(/proc/PID/io), of which what stays in the page cache is not read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
LEFT_OUT = 4
"""Steps at the beginning, in which programs warm up and plans are made."""
CHANGED = (("from tiered import zero", "import deepspeed"), ("zero.initialize(", "deepspeed.initialize("))
RUN = """
import builtins, resource, runpy, sys, time
began = time.monotonic()
old = builtins.print
def timed(*what, **how):
    if what and str(what[0]).startswith("loss "):
        old(f"at {time.monotonic() - began:.6f}", flush=True)
    old(*what, **how)
builtins.print = timed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
counted = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
old("memory", peak * 1024, "read", counted["read_bytes"], "written", counted["write_bytes"], flush=True)
"""


@dataclass(frozen=True)
class Run:
    losses: list[float]
    seconds: float
    memory: int
    read: int
    written: int


def run(python: str, script: Path, arguments: list[str], folder: Path) -> Run:
    """Run a script in ``folder``, and return what it printed and took."""
    starter = folder / "starter.py"
    starter.write_text(RUN)
    where = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    where |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655"}
    where["PATH"] = f"{Path(python).parent}:{where['PATH']}"
    done = subprocess.run(
        [python, str(starter), str(script), *arguments], cwd=folder, env=where, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{python} {script.name} failed:\n{done.stderr[-4000:]}")
    losses = [float(found) for found in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]
    times = [float(found) for found in re.findall(r"^at (\S+)$", done.stdout, re.MULTILINE)]
    memory, read, written = map(int, re.findall(r"^memory (\d+) read (\d+) written (\d+)$", done.stdout, re.MULTILINE)[-1])
    between = [later - sooner for sooner, later in itertools.pairwise(times)]
    if len(between) <= LEFT_OUT:
        sys.exit(f"{script.name} makes {len(times)} passes with {' '.join(arguments)}; give it {LEFT_OUT + 2} or more")
    return Run(losses, statistics.fmean(between[LEFT_OUT:]), memory, read, written)


def compared(name: str, arguments: list[str], parsed: argparse.Namespace) -> list[str]:
    """Run one example by both, in turn, and return lines of a table."""
    ours: list[Run] = []
    theirs: list[Run] = []
    text = (EXAMPLES / f"{name}.py").read_text()
    for before, after in CHANGED:
        if text.count(before) != 1:
            sys.exit(f"{name}.py has {text.count(before)} lines with {before!r}")
        text = text.replace(before, after)
    config = json.loads((EXAMPLES / f"{name}.json").read_text())
    if parsed.dram is not None and "tiered" in config:
        config["tiered"]["dram"] = parsed.dram
    for number in range(parsed.rounds):
        for runs, python in ((ours, sys.executable), (theirs, parsed.deepspeed)):
            with tempfile.TemporaryDirectory(dir=parsed.dir) as folder:
                there = Path(folder)
                (there / "nvme").mkdir()
                (there / "config.json").write_text(json.dumps(config))
                script = EXAMPLES / f"{name}.py"
                if runs is theirs:
                    script = there / f"{name}.py"
                    script.write_text(text)
                runs.append(run(python, script, ["--config", "config.json", *arguments], there))
        print(f"{name} round {number + 1}: {ours[-1].seconds:.4f} s, DeepSpeed {theirs[-1].seconds:.4f} s", flush=True)
    pairs = list(zip(ours[0].losses, theirs[0].losses, strict=True))
    apart = [abs(mine - other) / abs(other) for mine, other in pairs]
    first = next((number for number, distance in enumerate(apart) if distance > 1e-6), len(apart))
    lines = [
        f"`{name}.py {' '.join(arguments)}`: {len(pairs)} passes; largest relative difference of a loss {max(apart):.1e}, "
        f"of the first ten {max(apart[:10]):.1e}; the first above 1e-6 is number {first + 1 if first < len(apart) else '-'}.",
        "",
        "| | seconds a pass | [least, most] | memory, MiB | read, MiB | written, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for who, runs in (("zero.initialize", ours), ("DeepSpeed 0.19.8", theirs)):
        seconds = [one.seconds for one in runs]
        sizes = [statistics.median(getattr(one, what) for one in runs) for what in ("memory", "read", "written")]
        mib = [f"{size / 2**20:,.0f}" for size in sizes]
        lines.append(
            f"| {who} | {statistics.median(seconds):.4f} | [{min(seconds):.4f}, {max(seconds):.4f}] | {' | '.join(mib)} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", required=True, metavar="PYTHON", help="a Python that has DeepSpeed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of the GPT")
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--dram", help="memory budget of the GPT by zero.initialize (default: that of its configuration)")
    parser.add_argument("--pictures", type=int, default=512, help="of the CNN")
    parser.add_argument("--dir", help="where runs are made (default: the folder for temporary files)")
    parser.add_argument("--out", type=Path, help="file for the table")
    parsed = parser.parse_args()
    if parsed.dir is not None:
        Path(parsed.dir).mkdir(parents=True, exist_ok=True)
    lines = compared("deepspeed_gpt", ["--steps", str(parsed.steps), "--width", str(parsed.width)], parsed)
    lines += compared("deepspeed_cifar", ["--pictures", str(parsed.pictures), "--epochs", "1"], parsed)
    print("\n".join(lines))
    if parsed.out is not None:
        parsed.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
