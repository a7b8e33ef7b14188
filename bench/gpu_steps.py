"""What is done with minutes on a GPU, the most useful first, so that what there was time for is kept.

    .venv/bin/python -m bench.gpu_steps --out bench/results --seconds 500      ``make gpu`` makes an environment first
    .venv/bin/python -m bench.gpu_steps --only train-device train-nvme         these steps

1. ``train-…``: a step of a Llama of 1.34 billion parameters in bf16, end to end, in five places (``bench/gpu_train.py``). The
   first one measures how many sequences a step has, the others take as many.
2. ``tests``, ``ranks``, ``compile``: tests on a device that never ran on a GPU: parameters that stay there, a default device,
   what of a model comes and goes; two ranks on one device; ``torch.compile`` (rows of ``bench/compatibility.py``).
3. ``generate``: with a model of twice the device memory, and accelerate's offload beside it (``bench/gpu_generate.py``).
4. ``copies``: between host, device and drive, by size (``bench/gpu.py``).
5. ``rows``: rows of ``bench/compatibility.py`` that had other bits on a GPU.
6. ``all-tests``: ``python -m tests.gpu``, as far as time goes.

A step is a process of its own in a session of its own, and gets its share of the time that is left, by weight: what one does
not use, later ones have. At its limit a step is interrupted, then killed with all that it started, and the next one begins.
Below ``--out`` a folder has what each step measured (``STEP.json``, written as it goes) and printed (``STEP.log``); the page
beside it is written anew whenever a step begins or ends, and says of each: done, out of time, failed and why, or not reached.
SIGTERM ends the step under way, and the page stays. Exits 0 when all steps are done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch  # imported once for all steps, which are forked: CUDA must not be used here
import torch._dynamo  # which optimizers import, and checkpointing

from bench.gpu_train import PLACES, WARM_UP
from tiered.measuring.meters import Spread, environment
from tiered.types import format_size

DONE, OUT_OF_TIME, RUNNING, NOT_REACHED = "done", "out of time", "under way", "not reached"
NEVER_RAN = (
    *("stay_on_the_device", "device_is_torchs_default", "fails_late", "read_and_write_outside", "come_into_a_model"),
    *("random_numbers_are_drawn", "state_dict_are_in_host"),
)
"""Of ``tests/zero/on_device.py``."""
RANKS = "ranks_on_devices"
OTHER_BITS = ("generation", "*phi3*"), ("gradients", "*norm*")
"""Groups and names of rows."""
NOTES = (
    "`device memory`: of torch, the store's HBM included. `process`: its resident memory, from its beginning on. `machine`:",
    "the most by which available memory fell. `losses`: how many of the steps that both made have the bits of the first row;",
    "`states` and `fsdp2` update on the CPU, which on a GPU gives other last bits.",
)
TIERS = ("hbm", "dram")
LEFT_OVER = 2.0
"""Seconds for the last page."""


@dataclass(frozen=True)
class Scale:
    """Arguments of the steps, and ``rows`` and ``tests`` in place of theirs; ``rehearses``: on the tests' fake device, and on
    the CPU where that cannot be."""

    train: tuple[str, ...] = ()
    generate: tuple[str, ...] = ()
    rows: tuple[tuple[str, str], ...] | None = None
    tests: tuple[str, ...] | None = None
    rehearses: bool = False


REHEARSAL = Scale(
    train=(
        *("--width=64", "--inner=176", "--layers=3", "--heads=4", "--vocabulary=128", "--context=16"),
        *("--moved=4194304", "--rounds=1"),
    ),
    generate=("--width=128", "--layers=6", "--vocabulary=256", "--tokens=4"),
    rows=(("gradients", "clip_grad_norm_ twice"),),
    tests=("tests/zero/on_device.py", "-k", "state_dict_are_in_host"),
    rehearses=True,
)


@dataclass(frozen=True)
class Work:
    """What a step is given. ``seconds``: how long it may take, about; ``folder``: empty, on the drive; ``json``: its file."""

    seconds: float
    folder: Path
    json: Path
    scale: Scale
    options: argparse.Namespace

    def result(self, step: str) -> dict[str, Any]:
        """Return what another step has measured."""
        return read(self.json.with_name(f"{step}.json"))


@dataclass(frozen=True)
class Step:
    """``weight``: of its share of the time. ``work`` runs in a process of its own, and returns its exit code."""

    name: str
    title: str
    weight: float
    work: Callable[[Work], int]


@dataclass
class Outcome:
    """What became of a step; ``machine``: the most by which available memory fell meanwhile."""

    state: str = NOT_REACHED
    limit: float = 0.0
    seconds: float = 0.0
    machine: int = 0


# -- the steps, each in its process -------------------------------------------------------------------------------------------


def train(place: str) -> Callable[[Work], int]:
    """Return the step that trains in ``place``."""

    def work(given: Work) -> int:
        from bench import gpu_train

        chosen = given.result("train-device").get("chosen") if place != "device" else None
        sequences = () if place == "device" else ("--sequences", str(chosen["sequences"] if chosen else 8))
        common = ("--seconds", str(given.seconds), "--dir", str(given.folder), "--json", str(given.json))
        with device(given, place != "fsdp2") as name:
            return gpu_train.main(["--place", place, "--device", name, *common, *sequences, *given.scale.train])

    return work


def generate(given: Work) -> int:
    from bench import gpu_generate

    with device(given) as name:
        return gpu_generate.main(
            ["--device", name, "--dir", str(given.folder), "--json", str(given.json), *given.scale.generate]
        )


def copies(given: Work) -> int:
    from bench import gpu

    with device(given, fake=False) as name:
        options = ["--seconds", str(given.seconds), "--dir", str(given.folder), "--json", str(given.json), "--device", name]
        return gpu.main([*options, "--out", str(given.json.with_suffix(".md"))])


def rows(*chosen: tuple[str, str]) -> Callable[[Work], int]:
    """Return the step that runs these groups' rows."""

    def work(given: Work) -> int:
        from bench import compatibility

        tier = "fake device" if given.scale.rehearses else "cuda"
        codes = []
        for group, row in given.scale.rows or chosen:
            options = ["--tier", tier, "--group", group, "--row", row, "--dir", str(given.folder), "--json", str(given.json)]
            codes.append(compatibility.main([*options, "--verbose"]))
        return max(codes)

    return work


def tests(*arguments: str) -> Callable[[Work], int]:
    """Return the step that runs ``python -m tests.gpu`` with ``arguments``."""

    def work(given: Work) -> int:
        if given.scale.rehearses:
            os.environ["TIERED_TEST_DEVICE"] = "cpu"
        from tests.gpu.__main__ import main

        os.environ["TMPDIR"] = tempfile.tempdir = str(given.folder)
        chosen = given.options.tests or given.scale.tests or arguments
        return main(["-vv", "--durations=8", "-p", "no:cacheprovider", *chosen])

    return work


@contextmanager
def device(given: Work, fake: bool = True) -> Iterator[str]:
    """Have a device to compute on, and its name."""
    if not given.scale.rehearses:
        yield given.options.device
    elif not fake:
        yield "cpu"
    else:
        from bench.compatibility import fake_device
        from tests.fake_device import NAME

        with fake_device():
            yield NAME


ON_DEVICE = "tests/zero/on_device.py"
STEPS = (
    Step("train-device", "training, all in device memory", 50, train("device")),
    Step("train-states", "training, states in DRAM", 45, train("states")),
    Step("train-dram", "training, everything in DRAM", 60, train("dram")),
    Step("train-nvme", "training, everything on NVMe", 110, train("nvme")),
    Step("train-fsdp2", "training, FSDP2 with CPUOffloadPolicy", 45, train("fsdp2")),
    Step("tests", "tests that never ran on a GPU", 30, tests(ON_DEVICE, "-k", " or ".join(NEVER_RAN))),
    Step("ranks", "two ranks on one device", 40, tests(ON_DEVICE, "-k", RANKS)),
    Step("compile", "rows with torch.compile", 25, rows(("tracing", "*compile*"))),
    Step("generate", "generation, twice the device memory", 45, generate),
    Step("copies", "copies by size", 50, copies),
    Step("rows", "rows that had other bits", 30, rows(*OTHER_BITS)),
    Step("all-tests", "all tests on the device", 10, tests()),
)


# -- running them -------------------------------------------------------------------------------------------------------------


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """This program is to end."""


def run(steps: Sequence[Step], options: argparse.Namespace, scale: Scale, page: Page) -> None:
    """Run each step within its share of the time that is left."""
    ends = time.monotonic() + options.seconds - LEFT_OVER
    for number, step in enumerate(steps):
        outcome = page.outcomes[step.name]
        left = ends - time.monotonic()
        outcome.limit = left * step.weight / sum(later.weight for later in steps[number:])
        if outcome.limit < options.least:
            continue
        outcome.state = RUNNING
        page.write()
        print(f"== {step.name}: {step.title}, at most {outcome.limit:.0f} s", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=options.dir, ignore_cleanup_errors=True) as folder:
            work = Work(0.9 * outcome.limit, Path(folder), page.file(step.name, "json"), scale, options)
            log = page.file(step.name, "log")
            try:
                outcome.state = in_process(step, work, log, outcome, options.grace)
            finally:
                outcome.seconds = time.monotonic() - began
                page.write()
        print(f"   {outcome.state} after {outcome.seconds:.0f} s", flush=True)


def in_process(step: Step, work: Work, log: Path, outcome: Outcome, grace: float) -> str:
    """Run ``step`` in a process of its own, with all it prints in ``log``. Returns what became of it."""
    before = psutil.virtual_memory().available
    ends = time.monotonic() + outcome.limit
    ended: int | None = None
    child = 0
    try:
        # A signal that ends this program must not come between fork and the line that knows whom to kill.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        child = os.fork()
        if not child:
            in_child(step, work, log)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while ended is None and time.monotonic() < ends:
            ended = waited(child)
            outcome.machine = max(outcome.machine, before - psutil.virtual_memory().available)
            time.sleep(0.02)
        if ended is None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGINT)  # pytest says then what it has
            patience = time.monotonic() + grace
            while ended is None and time.monotonic() < patience:
                ended = waited(child)
                time.sleep(0.02)
            return OUT_OF_TIME
    finally:
        if child:
            kill_session(child)
            if ended is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return DONE if ended == 0 else f"failed: {reason(ended, log)}"


def waited(child: int) -> int | None:
    """Return the exit code of ``child``, or None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def in_child(step: Step, work: Work, log: Path) -> None:
    """Do the work, and end the process."""
    code = 1
    try:
        os.setsid()
        for number in ENDING:
            signal.signal(number, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(to, stream)
        os.chdir(Path(__file__).parents[1])
        code = step.work(work)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill_session(leader: int) -> None:
    """Kill all processes of the session of ``leader``, and what it started in another one."""
    found = set()
    with suppress(psutil.Error):
        found = {child.pid for child in psutil.Process(leader).children(recursive=True)}
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) == leader:
                found.add(pid)
    for pid in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def reason(code: int, log: Path) -> str:
    """Return why a process ended with ``code``: the last line that it printed."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return lines[-1].strip("= ")[:300] if lines else f"ended with {code}"


# -- the page -----------------------------------------------------------------------------------------------------------------


def read(file: Path) -> dict[str, Any]:
    """Return what ``file`` has; nothing where there is none."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {}


@dataclass
class Page:
    """The page of results, whole at any time, and the folder of the steps' files beside it."""

    path: Path
    steps: Sequence[Step]
    head: list[str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outcomes = {step.name: Outcome() for step in self.steps}
        self.folder = self.path.with_suffix("")
        self.folder.mkdir(parents=True)

    def file(self, step: str, kind: str) -> Path:
        return self.folder / f"{step}.{kind}"

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text("\n".join(self._lines()) + "\n")
        part.replace(self.path)

    def _lines(self) -> list[str]:
        lines = [*self.head, "", "## Steps", "", "| step | | | seconds | limit |", "|---|---|---|---:|---:|"]
        for step in self.steps:
            one = self.outcomes[step.name]
            took = [f"{one.seconds:.0f}", f"{one.limit:.0f}"] if one.state != NOT_REACHED else ["", ""]
            lines.append(f"| {step.name} | {step.title} | {cell(one.state)} | {' | '.join(took)} |")
        lines += self._training()
        for step in self.steps:
            if not step.name.startswith("train-") and self.outcomes[step.name].state != NOT_REACHED:
                shown = self._shown(step.name)
                lines += ["", f"## {step.title[0].upper()}{step.title[1:]}", "", *(shown or ["Nothing was measured."])]
        return lines

    def _training(self) -> list[str]:
        found = {place: read(self.file(f"train-{place}", "json")) for place in PLACES}
        found = {place: one for place, one in found.items() if one.get("steps")}
        if not found:
            return []
        lines = ["", "## Training", "", *how_many(found)]
        titles = ["where", "sequences", "steps", "seconds a step", "tokens/s", "waited, s a step", "GB a step over each link"]
        lines += ["", f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 2)}---|"]
        for place, one in found.items():
            lines += [f"| {place} | {row} |" for row in times(one)]
        titles = ["where", "device memory", "process", "machine", "HBM of", "DRAM of", "drive", "seconds until ready", "losses"]
        lines += ["", "At most, while steps were counted:", "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for place, one in found.items():
            lines.append(f"| {place} | " + " | ".join(memory(one, self.outcomes.get(f"train-{place}"), found)) + " |")
        return [*lines, "", *NOTES]

    def _shown(self, name: str) -> list[str]:
        data = read(self.file(name, "json"))
        if name == "generate":
            return generation(data)
        if name == "copies":
            page = self.file(name, "md")
            return [re.sub("^#+ ", "### ", line) for line in page.read_text().splitlines()] if page.exists() else []
        log = self.file(name, "log")
        text = log.read_text(errors="replace") if log.exists() else ""
        return verdicts(text) if name in ("rows", "compile") else tested(text)


def fresh(folder: Path, name: str) -> Path:
    """Return the path of a page of which there is none: an earlier run's results stay."""
    number, found = 1, folder / f"{name}.md"
    while found.exists() or found.with_suffix("").exists():
        number += 1
        found = folder / f"{name}-{number}.md"
    return found


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def how_many(found: dict[str, dict[str, Any]]) -> list[str]:
    """Say how many sequences a step has, and why."""
    one = next(iter(found.values()))
    shape = f"{one['parameters']:,} parameters, sequences of {one['context']:,} tokens, layers checkpointed."
    chosen = found.get("device", {}).get("chosen")
    if not chosen:
        return [f"{shape} The number of sequences was not measured."]
    measured = ", ".join(f"{seconds:.4f} s for {number}" for number, seconds in chosen["measured"])
    return [
        f"{shape} The state takes {chosen['state']:,} bytes (12 a parameter) / {chosen['rate'] / 1e9:.2f} GB/s, the pinned "
        f"rate of this run, = {chosen['state'] / chosen['rate']:.4f} s. Computing has to take twice: {chosen['needed']:.4f} s."
        f" Forward and backward: {measured}. So **{chosen['sequences']} sequences** a step (of at most {chosen['most']})."
    ]


def times(one: dict[str, Any]) -> list[str]:
    """Return the cells of a row for each number of sequences."""
    rows = []
    counted = [step for step in one["steps"] if step["counts"]]
    for number in sorted({step["sequences"] for step in one["steps"]}, reverse=True):
        mine = [step for step in counted if step["sequences"] == number]
        if not mine:
            rows.append(f"{number} | 0 | only the first {WARM_UP} steps, which are not counted | | |")
            continue
        seconds = [step["seconds"] for step in mine]
        rate = Spread.of([number * one["context"] / each for each in seconds])
        waited = [step["waited_for_reads"] + step["waited_for_room"] for step in mine if "waited_for_reads" in step]
        links = [name for name in mine[0] if " to " in name]
        moved = ", ".join(f"{name} {statistics.median(step[name] for step in mine) / 1e9:.3g}" for name in links)
        cells = [str(number), str(len(mine)), Spread.of(seconds).shown(1, 3), rate.shown(1, 0)]
        rows.append(" | ".join([*cells, Spread.of(waited).shown(1, 3) if waited else "-", moved or "-"]))
    return rows


def memory(one: dict[str, Any], outcome: Outcome | None, found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the cells of a row: memory, and losses beside those of the first place."""
    peak, budgets = one["peak"], one.get("budgets", {})
    first = next(iter(found.values()))
    pairs = list(zip(one["steps"], first["steps"], strict=False))
    equal = sum(mine["loss"] == other["loss"] for mine, other in pairs)
    tiers = [f"{format_size(peak[name])} of {format_size(budgets[name])}" if name in budgets else "-" for name in TIERS]
    drive = f"{one['backend']}, O_DIRECT {'yes' if one['direct'] else 'no'}" if one.get("backend", "none") != "none" else "-"
    cells = [format_size(peak["device"]) if "device" in peak else "-", format_size(peak["host"])]
    cells += [format_size(outcome.machine) if outcome else "-", *tiers, drive, f"{one['ready']:.1f}"]
    return [*cells, f"{equal} of {len(pairs)} the same"]


def generation(data: dict[str, Any]) -> list[str]:
    if not data.get("ways"):
        return []
    lines = [f"{format_size(data['weights'])} of weights, {format_size(data['budget'])} of device memory for them.", ""]
    lines += ["| way | seconds a token | first token | opening | device memory | tokens |", "|---|---:|---:|---:|---:|---|"]
    right = next(iter(data["ways"].values()))["tokens"]
    for way, one in data["ways"].items():
        cells = [Spread.of(one["seconds"][1:]).shown(1, 4), f"{one['first']:.2f}", f"{one['opened']:.2f}"]
        cells += [format_size(one["peak"]) if one["peak"] else "-", "the same" if one["tokens"] == right else "OTHER TOKENS"]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines + [f"| {way} | left out: {why} | | | | |" for way, why in data.get("left_out", {}).items()]


VERDICT = re.compile(
    r"^(identical|clear error|stated limit|wrong|not valid|not installed) +[\d.]+ s .*?read  (.*)$", re.MULTILINE
)


def verdicts(log: str) -> list[str]:
    """Return what rows came out how, as far as they were run."""
    found = VERDICT.findall(log)
    if not found:
        return []
    tally = Counter(verdict for verdict, _ in found)
    lines = [f"{len(found)} rows: " + ", ".join(f"{count} {verdict}" for verdict, count in tally.items()) + "."]
    others = [f"- {verdict}: {cell(what)[:300]}" for verdict, what in found if verdict in ("wrong", "not valid")]
    return [*lines, "", *others] if others else lines


RESULT = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


def tested(log: str) -> list[str]:
    """Return how many tests had which result, as far as they were run, and which failed."""
    found = dict(RESULT.findall(log))
    if not found:
        return []
    tally = Counter(found.values())
    lines = [f"{len(found)} tests: " + ", ".join(f"{count} {kind.lower()}" for kind, count in tally.items()) + "."]
    others = [f"- {kind.lower()}: `{name}`" for name, kind in found.items() if kind in ("FAILED", "ERROR")]
    return [*lines, "", *others] if others else lines


def facts(scale: Scale) -> list[str]:
    """Return the head of the page; nothing here may begin to use CUDA, for steps are forked."""
    seen = environment()
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max", "--format=csv,noheader"]
    name = ""
    with suppress(OSError, subprocess.SubprocessError):
        name = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip().splitlines()[0]
    name = name or ("the stand-in: these numbers mean nothing" if scale.rehearses else "a device that nvidia-smi does not name")
    commit = seen["commit"] or os.environ.get("COMMIT") or "unknown"
    lines = [f"# On {name}", "", f"{time.strftime('%Y-%m-%d')}, commit {commit}."]
    lines += ["", *(f"- {what.replace('_', ' ')}: {value}" for what, value in seen.items() if what != "commit")]
    lines += [f"- CUDA: {torch.version.cuda}", "", "```", f"python -m bench.gpu_steps {' '.join(sys.argv[1:])}", "```"]
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="bench/results", help="folder of the page and the steps' files (default: %(default)s)")
    parser.add_argument("--name", default="gpu", help="of the page (default: gpu)")
    parser.add_argument("--seconds", type=float, default=500.0, help="for all steps (default: 500)")
    parser.add_argument("--dir", default=".", help="folder on the drive to measure (default: here)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; stand-in rehearses at tiny sizes (default: cuda)")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP", help="steps to run")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="what the steps of tests run in place of their own")
    parser.add_argument("--least", type=float, default=4.0, help="seconds below which a step is not begun (default: 4)")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds from interrupting a step to killing it (default: 5)")
    options = parser.parse_args(arguments)
    scale = REHEARSAL if options.device == "stand-in" else Scale()
    steps = [step for step in STEPS if options.only is None or step.name in options.only]
    page = Page(fresh(Path(options.out), options.name), steps, facts(scale))

    def stop(number: int, frame: object) -> None:
        raise Stopped

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        run(steps, options, scale, page)
    except Stopped:
        for outcome in page.outcomes.values():
            outcome.state = OUT_OF_TIME if outcome.state == RUNNING else outcome.state
        print("== ended before all was done", flush=True)
    page.write()
    print(f"== the page: {page.path}", flush=True)
    return int(any(outcome.state != DONE for outcome in page.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
