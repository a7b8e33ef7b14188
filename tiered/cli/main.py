"""The ``tiered`` command: build the parser, run the chosen command, and turn its exceptions into messages and exit codes.

Exit codes: 0 success, 1 failure, 2 bad usage, 130 and 143 after Ctrl-C and SIGTERM. A failure is one line on stderr that says
what is wrong and what to do about it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import TextIO

from tiered import __version__
from tiered.cli import completion
from tiered.cli.arguments import Formatter, Parser, launched
from tiered.cli.bench import command as bench
from tiered.cli.generate import command as generate
from tiered.cli.info import command as info
from tiered.cli.plan import command as plan
from tiered.cli.plan import report
from tiered.cli.stores import export, import_, ls, verify
from tiered.cli.train import command as train
from tiered.cli.train import deepspeed_config
from tiered.errors import TieredError, UncommittedWarning, shown

__all__ = ["build_parser", "main", "run"]

LONGEST = 4000
"""Most characters of an error."""
DESCRIPTION = """\
Keep PyTorch tensors in device memory, host memory and on NVMe, and train models that are larger than memory.
"""
EXAMPLES = """\
examples:
  tiered info --drive /mnt/nvme
  tiered bench io --drive /mnt/nvme
  tiered plan --dram 256MiB
  tiered train my-store --dram 256MiB
  tiered import Llama-3.2-1B/ my-llama
  tiered generate my-llama --prompt 'The sea is'
  tiered ls my-store
  tiered verify my-store
  tiered export my-store --out model
  source <(tiered completion bash)

Each command has its own help: tiered train --help
"""


def run() -> None:
    """Run the console script. Ctrl-C works from the start, and a stopped process ends without waiting for torch's cleanup."""
    before = signal.signal(signal.SIGINT, _stop_early)
    # Idle threads of OpenMP spin for milliseconds after each operation, on the core that the store's own thread needs. Threads
    # that sleep at once wake up late for the next operation. torch reads these variables when it is imported; GNU's OpenMP
    # knows both.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    _print_any_name(sys.stdout)
    code = main()
    signal.signal(signal.SIGINT, before)
    sys.stdout.flush()
    sys.stderr.flush()
    if code > 128:
        os._exit(code)
    sys.exit(code)


def _print_any_name(stream: TextIO) -> None:
    """Escape characters that the encoding of ``stream`` lacks, as stderr does, because names of files and tensors may have any.

    (In the C locale Python's default is "surrogateescape", which fails for é.)"""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def _stop_early(signum: int, frame: FrameType | None) -> None:
    """End the process before a command has begun: the import of torch would swallow a KeyboardInterrupt."""
    if launched().rank == 0:
        os.write(2, b"tiered: stopped before anything began\n")
    os._exit(128 + signum)


def build_parser() -> Parser:
    """Build the parser of all commands."""
    parser = Parser(
        prog="tiered",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"tiered {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in info, plan, bench, train, report, deepspeed_config, generate, ls, verify, export, import_:
        module.add_parser(commands)
    completion.add_parser(commands, parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: the process's own); returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    mend, chosen = "lower --dram", parser
    try:
        options, unknown = parser.parse_known_args(given)
        chosen = getattr(options, "parser", parser)
        if unknown:
            chosen.refuse_unknown(unknown)
        if "run" not in options:  # no command, or a group of commands
            chosen.print_help()
            return 0
        mend = getattr(options, "memory_mend", mend)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.simplefilter("ignore", UncommittedWarning)  # a command says itself what it commits
            code: int = options.run(options, given)
        sys.stdout.flush()
    except SystemExit as exit_:  # argparse has printed help (0) or an error (2)
        return exit_.code if isinstance(exit_.code, int) else 2
    except TieredError as error:
        return _fail(chosen.in_options(str(error)))
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        print("tiered: stopped", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)):
            raise
        return _fail(f"memory ran out: {mend}")
    return code


def _fail(message: str) -> int:
    here = launched()
    who = f"rank {here.rank}: " if here.ranks > 1 and not message.startswith(f"rank {here.rank} ") else ""
    print(f"tiered: {who}{_one_line(message)}", file=sys.stderr)
    return 1


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"tiered: note: {_one_line(str(message))}", file=sys.stderr)


def _one_line(message: str) -> str:
    """Join lines and escape control characters, because messages quote names from files."""
    return shown(" ".join(message.split()), LONGEST)
