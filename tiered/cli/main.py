"""The ``tiered`` command. Thin: commands parse, call what the library offers, and print.

Exit codes: 0 success, 1 failure, 2 bad usage, 130 and 143 when stopped by Ctrl-C and SIGTERM. What goes wrong is one line on
stderr that names the thing and the mend.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import TextIO

from tiered import __version__
from tiered.cli import info
from tiered.cli.arguments import Parser, launched
from tiered.cli.bench import command as bench
from tiered.cli.stores import export, import_, ls, verify
from tiered.cli.train import command as train
from tiered.errors import TieredError, shown

__all__ = ["main", "run"]

LONGEST = 4000
"""Characters of an error."""
EXAMPLE = """\
examples:
  tiered info --dir /mnt/nvme
  tiered bench io --dir /mnt/nvme
  tiered train --dir my-store --dram 256MiB
  tiered ls my-store
  tiered verify my-store
  tiered export my-store --out model

Each command has its own help: tiered train --help
"""


def run() -> None:
    """The console script. Ctrl-C counts from the first moment, and a stopped run does not wait for torch to be taken down."""
    before = signal.signal(signal.SIGINT, _stop_early)
    # torch's idle threads would spin for milliseconds after each operation, on the core that a store's own thread could use;
    # asleep at once, they come late to the next one. It is read when torch is imported; GNU's OpenMP knows both.
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
    """Names of files may hold bytes that are no text in the terminal's encoding, and names of tensors any character: shown
    escaped, as stderr does, not fatal. (In the C locale Python's own way is "surrogateescape", which fails for é.)"""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def _stop_early(signum: int, frame: FrameType | None) -> None:
    """While torch is imported, which swallows KeyboardInterrupt here and there; nothing has begun that could be lost."""
    if launched().rank == 0:
        os.write(2, b"tiered: stopped before anything began\n")
    os._exit(128 + signum)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: the process's own); returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog="tiered",
        description="Keeps tensors on device, host memory and NVMe, and brings them where they are needed in time.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tiered {__version__}")
    commands = parser.add_subparsers(metavar="command", dest="command", required=True)
    for module in info, bench, train, ls, verify, export, import_:
        module.add_parser(commands)
    mend = "lower --dram"
    try:
        options = parser.parse_args(given)
        mend = getattr(options, "memory_mend", mend)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = options.run(options, given)
        sys.stdout.flush()
    except SystemExit as exit_:  # argparse has printed its help (0) or what is wrong (2)
        return exit_.code if isinstance(exit_.code, int) else 2
    except TieredError as error:
        return _fail(str(error))
    except BrokenPipeError:  # what reads our output has left; nobody is there to be told
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
    """It may hold names that are in a file."""
    return shown(" ".join(message.split()), LONGEST)
