"""What torchrun tells the processes that it starts, in their environment.

What options are made of: conversions that name what is wrong, and those that several commands share.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from tiered.errors import MisuseError
from tiered.types import parse_size

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = [
    "BACKENDS",
    "Launched",
    "Parser",
    "add_json",
    "command",
    "count",
    "counts",
    "fraction",
    "launched",
    "names",
    "positive",
    "seconds",
    "seed",
    "size",
    "size_or_none",
    "sizes",
]

@dataclass(frozen=True)
class Launched:
    """``here``: ranks on this node, of which this is number ``local``; ``may_restart``: how often torchrun starts all of them
    again, when one fails."""

    rank: int = 0
    ranks: int = 1
    here: int = 1
    restarts: int = 0
    may_restart: int = 0
    local: int = 0

    @property
    def command(self) -> list[str]:
        """What comes before the arguments of ``tiered``, to start as many again."""
        if self.ranks == 1:
            return ["tiered"]
        nodes = ["--nnodes", str(self.ranks // self.here)] if self.here < self.ranks else []
        return ["torchrun", *nodes, "--nproc-per-node", str(self.here), "-m", "tiered"]


def launched() -> Launched:
    """One rank where torchrun did not start this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Launched()
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    rank, ranks, here, restarts, may_restart = (int(os.environ.get(name, 0)) for name in names)
    return Launched(rank, ranks, max(1, here), restarts, may_restart, int(os.environ.get("LOCAL_RANK", 0)))


BACKENDS = ("auto", "libaio", "aiofiles", "posix")
LARGEST_COUNT = (1 << 63) - 1


class Parser(argparse.ArgumentParser):
    """All ranks have the same command line: the first says what is wrong with it."""

    def error(self, message: str) -> NoReturn:
        if launched().rank > 0:
            self.exit(2)
        super().error(message)


def command(commands: Commands, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser for the command ``name``, with text that stays as it is written."""
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json [FILE]``."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write it as JSON: to FILE, beside what is printed, or to stdout instead of it when FILE is left out or '-'",
    )


def count(text: str) -> int:
    value: int = _parsed(int, text, "a whole number from 1 on", lambda v: 1 <= v <= LARGEST_COUNT)
    return value


def positive(text: str) -> float:
    value: float = _parsed(float, text, "a number above 0", lambda v: 0 < v < float("inf"))
    return value


def fraction(text: str) -> float:
    value: float = _parsed(float, text, "a number from 0 on", lambda v: 0 <= v < float("inf"))
    return value


def seed(text: str) -> int:
    value: int = _parsed(int, text, "a whole number from 0 to 2**63 - 1", lambda v: 0 <= v <= LARGEST_COUNT)
    return value


def size(text: str) -> int:
    """Bytes; more than none, and as many as an address can count."""
    try:
        nbytes = parse_size(text)
    except MisuseError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 1 <= nbytes <= LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size that can be; write one like '256MiB'")
    return nbytes


def size_or_none(text: str) -> int:
    """``size``, or 0."""
    return 0 if text == "0" else size(text)


def sizes(text: str) -> tuple[int, ...]:
    """Sizes with commas between them: each once, the smallest first."""
    return tuple(sorted({size(part) for part in text.split(",")}))


def counts(text: str) -> tuple[int, ...]:
    """Numbers with commas between them: each once, the smallest first."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def names(*known: str) -> Callable[[str], tuple[str, ...]]:
    """What converts some of ``known`` with commas between them: each once, as given."""

    def some(text: str) -> tuple[str, ...]:
        given = text.split(",")
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return tuple(dict.fromkeys(given))

    return some


def seconds(text: str) -> float:
    """Of "90", "90s", "2min" or "1h"."""
    found = re.fullmatch(r"(.*?)\s*(s|min|h|)", text, re.DOTALL)
    assert found is not None, "the last group may be empty"
    try:
        return positive(str(positive(found[1]) * {"": 1, "s": 1, "min": 60, "h": 3600}[found[2]]))  # the product may be inf
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write one like '60s' or '5min'") from None


def _parsed(convert: Callable[[str], Any], text: str, wanted: str, allowed: Callable[[Any], bool]) -> Any:
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not allowed(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value
