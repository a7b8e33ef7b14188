"""DeepSpeed's ``async_io`` beside a store: rates in interleaved rounds, and the same errors injected into both.

    .venv/bin/python -m bench.peers --dir /mnt/nvme --venv ~/peers > bench/results/peers_MACHINE_DATE.md

``--venv`` names a folder that becomes a virtual environment of its own (DeepSpeed, ninja; torch is the one that runs this),
made by the first run and used again by later ones; its extension is built there. That takes a C++ compiler, Python's and
libaio's headers, and some minutes. Where it cannot be built, one line says why, and nothing is measured. Errors are injected
with strace.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.io import rounds
from tiered.cli.arguments import count, size
from tiered.cli.bench.series import Run, Setup, StoreWorkload, in_rounds, ratios, series_as_json
from tiered.cli.info.machine import store_facts
from tiered.cli.output import Progress, told_environment, told_io, told_noise
from tiered.cli.stop import Stopped, StopRequest
from tiered.measuring.meters import MovedBytes, Noise, Spread, environment, scratch_folder, scratch_store
from tiered.types import format_size

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("peers_worker.py")
PACKAGES = ("deepspeed==0.19.8", "ninja")
SECOND_EIO = ("-e", "inject=io_getevents,io_pgetevents:error=EIO:when=2")
LATE_SUBMIT = ("-e", "inject=io_submit:delay_enter=1000000")  # microseconds: the file is cut meanwhile


class Unavailable(Exception):
    """Why there is no peer to compare with."""


@dataclass(frozen=True)
class Engine:
    """Who reads and writes: ``python`` with the worker's first word."""

    name: str
    python: str
    environment: dict[str, str]

    def command(self, *words: str) -> list[str]:
        return [self.python, str(WORKER), self.name, *words]

    def ask(self, *words: str) -> dict[str, Any]:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, env=self.environment)
        if done.returncode:
            raise Unavailable(" ".join(done.stderr.split())[-600:] or f"it ended with {done.returncode}")
        return _answer(done.stdout)


def _answer(printed: str) -> dict[str, Any]:
    """The last line that is JSON; the peer prints other things, too. Empty where there is none."""
    found = [line for line in printed.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(found[-1]) if found else {}
    return answer


def ours() -> Engine:
    return Engine("tiered", sys.executable, os.environ | {"PYTHONPATH": str(ROOT)})


def peer(folder: Path) -> Engine:
    """DeepSpeed in an environment of its own in ``folder``, made where there is none. Raises Unavailable."""
    python = folder / "bin" / "python"
    if not python.exists():
        if folder.exists() and any(folder.iterdir()):
            raise Unavailable(f"{folder} is no virtual environment and not empty; name a new folder with --venv")
        print(f"making {folder} and installing {', '.join(PACKAGES)}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "torch_of_the_caller.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "DS_ACCELERATOR": "cpu",
        "MAX_JOBS": str(os.cpu_count() or 1),
    }
    environment.pop("PYTHONPATH", None)
    words = [str(python), "-m", "pip", "install", "-q", "--no-build-isolation", *PACKAGES]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise Unavailable(f"pip cannot install {', '.join(PACKAGES)}: {' '.join(done.stderr.split())[-400:]}")
    engine = Engine("deepspeed", str(python), environment)
    print("building its async_io where that is not built yet", file=sys.stderr)
    engine.ask("probe")
    return engine


# Rates


@contextmanager
def serving(engine: Engine, folder: str, nbytes: int) -> Iterator[Callable[[str], MovedBytes]]:
    """A process of the peer's that runs a round of each mode when it is asked to."""
    words = engine.command("serve", folder, str(nbytes))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=engine.environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        lines = (line for line in child.stdout if line.startswith("{"))

        def run(mode: str) -> MovedBytes:
            assert child.stdin is not None
            print(mode, file=child.stdin, flush=True)
            return MovedBytes(**json.loads(next(lines)))

        try:
            if next(lines, None) is None:
                raise Unavailable("it ended before it was ready")
            yield run
        finally:
            child.stdin.close()
            child.wait()


def rates(options: argparse.Namespace, engine: Engine) -> str:
    setup = Setup.of(size=options.size, dram=256 << 20, backend="auto")
    noise = Noise()
    report = environment() | store_facts(options.dir, "auto")
    with (
        StopRequest() as stop,
        Progress(sys.stderr) as progress,
        scratch_folder(options.dir) as folder,
        serving(engine, folder, setup.moved) as asked,
        scratch_store(options.dir, dram=setup.pool) as store,
    ):
        walk = StoreWorkload(store, setup, stop)
        walk.prepare()
        runs: dict[str, dict[str, Run]] = {}
        for mode, run in (("read", walk.read), ("write", walk.write), ("mixed", walk.mixed)):
            runs[mode] = {"tiered": run, "async_io": lambda mode=mode: asked(mode)}  # type: ignore[misc]
        measured = in_rounds(runs, options.rounds, stop, progress)
    as_json = {"rounds": options.rounds, "modes": {mode: series_as_json(series) for mode, series in measured.items()}}
    lines = [
        told_environment(report),
        told_io(report),
        f"{setup.tensors} tensors of {format_size(setup.tensor)} each way; {options.rounds} rounds, interleaved: median "
        f"[least - most]; {told_noise(noise.seen())}",
        "tiered: 256 MiB of memory, checksums on, each write ends with a commit",
        "async_io: two handles of depth 32, 1 MiB blocks, overlapping events, 8 locked buffers each; fdatasync after writing",
    ]
    rows = ["| | tiered GB/s | async_io GB/s | tiered by async_io | CPU s per GiB: tiered | async_io |", "|---" * 6 + "|"]
    for mode, series in measured.items():
        mine, other = series
        shown = [Spread.of(one.rates).shown(1e-9) for one in series]
        by = ratios(series)[other.name].shown()
        cpu = [f"{Spread.of(one.cpu).median:.2f}" for one in (mine, other)]
        rows.append("| " + " | ".join([mode, *shown, by, *cpu]) + " |")
    told = "\n".join(lines)
    return f"## Rates\n\n```\n{told}\n```\n\n" + "\n".join(rows) + f"\n\nRounds, GB/s:\n\n{rounds(as_json)}"


# Errors


@dataclass(frozen=True)
class Fault:
    """``inject``: strace's options; ``read`` or ``cut``: what the worker does; ``mark``: what strace writes where it fired."""

    name: str
    work: str
    inject: tuple[str, ...] = ()
    mark: str = ""


FAULTS = (
    Fault("no fault", "read"),
    Fault("EIO at the 2nd io_getevents (io_pgetevents)", "read", SECOND_EIO, "(INJECTED)"),
    Fault("short read: the file is cut in half while its reads are submitted", "cut", LATE_SUBMIT, "(DELAYED)"),
    Fault("one bit of the file flipped between write and read", "read"),
)


def suffer(engine: Engine, fault: Fault, parent: str) -> str:
    """What a process saw that read 16 MiB under ``fault``, in one line."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="tiered-scratch-") as folder:
        where = os.path.join(folder, "data")
        if engine.name == "deepspeed":
            os.mkdir(where)
        done = subprocess.run(engine.command("make", where), capture_output=True, text=True, env=engine.environment)
        if done.returncode:
            return f"cannot be tried: {done.stderr.strip()[-300:]}"
        if "bit" in fault.name:
            found = engine.ask("find", where)
            _flip(found["file"], found["offset"] + (5 << 20) + 77)
        log = os.path.join(folder, "log")
        strace = ["strace", "-f", "-o", log, "-e", "trace=io_getevents,io_pgetevents,io_submit", *fault.inject]
        words = [*(strace if fault.inject else []), *engine.command(fault.work, where)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, env=engine.environment, timeout=120)
        except subprocess.TimeoutExpired:
            return "it hangs: ended after 120 s"
        if fault.mark and fault.mark not in Path(log).read_text(errors="replace"):
            return "the fault did not fire"
        return _told(done, where)


def _flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def _told(done: subprocess.CompletedProcess[str], folder: str) -> str:
    answer = _answer(done.stdout)
    if done.returncode or not answer:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        code = done.returncode - 128 if done.returncode > 128 else -done.returncode  # of strace, which ends as its child did
        how = f"the process ended with signal {code}" if code > 0 else f"the process ended with {done.returncode}"
        why = next((line for line in said if "Assertion" in line), said[-1] if said else "")
        return f"{how}: {why.rpartition('/')[2]}"
    if "raised" in answer:
        says, other = (answer[name].replace(os.path.abspath(folder), "DIR") for name in ("says", "other"))
        return f"{answer['raised']}: {says}. Another tensor then: {other}"
    wrong = answer["wrong_bytes"]
    told = "the right bytes" if not wrong else f"SUCCESS, and {wrong:,} of {answer['bytes']:,} bytes are wrong"
    return f"{told} ({answer['returned']})"


def errors(options: argparse.Namespace, engine: Engine) -> str:
    if shutil.which("strace") is None:
        return "## Errors\n\nNot tried: strace is not installed."
    rows = ["| what is done to 16 MiB that are read | async_io | tiered |", "|---|---|---|"]
    for fault in FAULTS:
        print(f"injecting: {fault.name}", file=sys.stderr)
        cells = [suffer(one, fault, options.dir).replace("|", "\\|") for one in (engine, ours())]
        rows.append(f"| {fault.name} | " + " | ".join(cells) + " |")
    strace = subprocess.run(["strace", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    how = (
        f"Each in a process of its own, traced by {strace}. async_io: a handle with 1 MiB blocks, depth 8, overlapping events, "
        "its extension built as DeepSpeed builds it; the buffer was filled with 0xAA before."
    )
    injected = "\n".join(f"strace -f {shlex.join(fault.inject)}" for fault in FAULTS if fault.inject)
    return f"## Errors\n\n{how}\n\n" + "\n".join(rows) + f"\n\n```\n{injected}\n```"


def main() -> None:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--dir", default=".", help="a folder on the drive (default: this one)")
    parser.add_argument("--venv", type=Path, required=True, help="folder for the peer's own virtual environment")
    parser.add_argument("--what", choices=("both", "rates", "errors"), default="both")
    parser.add_argument("--size", type=size, default=1 << 30, help="bytes each way in a round (default: 1GiB)")
    parser.add_argument("--rounds", type=count, default=7)
    options = parser.parse_args()
    try:
        engine = peer(options.venv.expanduser().absolute())
        versions = engine.ask("probe")
        parts = [rates(options, engine)] if options.what != "errors" else []
        parts += [errors(options, engine)] if options.what != "rates" else []
    except Unavailable as why:
        print(f"skipped: DeepSpeed's async_io is not to be had here: {why}")
        return
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
    given = list(sys.argv[1:])
    for option in "--dir", "--venv":  # where it was is nobody's concern
        if option in given:
            given[given.index(option) + 1] = "..."
    print("# DeepSpeed's async_io beside a store\n")
    print(f"```\npython -m bench.peers {shlex.join(given)}\n```\n")
    print(
        f"DeepSpeed {versions['deepspeed']} (async_io, built by itself with {_compiler()}), torch {versions['torch']}, "
        f"Python {platform.python_version()}, {told_environment(environment()).split(', torch')[0]}.\n"
    )
    print("\n\n".join(parts))


def _compiler() -> str:
    done = subprocess.run(["c++", "--version"], capture_output=True, text=True)
    return done.stdout.splitlines()[0]


if __name__ == "__main__":
    main()
