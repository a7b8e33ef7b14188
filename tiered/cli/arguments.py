"""Command-line arguments: the parser and its error messages, the converters of option values, and the options that several
commands share. Also the environment that torchrun gives to the processes that it starts."""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from tiered.cli.spelling import Spelling
from tiered.errors import MisuseError
from tiered.types import BackendName, SizeWithUnit

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]

__all__ = [
    "BACKENDS",
    "DRIVE",
    "Formatter",
    "Launched",
    "Parser",
    "add_backend",
    "add_drive",
    "add_generation",
    "add_json",
    "add_model",
    "add_paths",
    "add_store",
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
    """This process among the ranks that torchrun started: ``rank`` of ``ranks``, and ``local`` of the ``here`` on this node.

    torchrun has started the ranks again ``restarts`` times after a failure, and does so at most ``may_restart`` times."""

    rank: int = 0
    ranks: int = 1
    here: int = 1
    restarts: int = 0
    may_restart: int = 0
    local: int = 0

    @property
    def command(self) -> list[str]:
        """The words before the arguments of ``tiered`` in a command that starts as many ranks."""
        if self.ranks == 1:
            return ["tiered"]
        nodes = ["--nnodes", str(self.ranks // self.here)] if self.here < self.ranks else []
        again = ["--max-restarts", str(self.may_restart)] if self.may_restart else []
        return ["torchrun", *nodes, "--nproc-per-node", str(self.here), *again, "-m", "tiered"]


def launched() -> Launched:
    """Read torchrun's environment variables; a process without them is the only rank."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Launched()
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    rank, ranks, here, restarts, may_restart = (int(os.environ.get(name, 0)) for name in names)
    return Launched(rank, ranks, max(1, here), restarts, may_restart, int(os.environ.get("LOCAL_RANK", 0)))


BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
LARGEST_COUNT = (1 << 63) - 1
_ITEM = r"(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\.\.\.)"
KEYWORD = re.compile(
    r"(?<![\w/'\"=.-])(?P<name>[a-z_]+)="
    rf"(?:(?P<quote>['\"]?)(?P<value>[\w.-]+)(?P=quote)|(?P<list>\[{_ITEM}(?:, {_ITEM})*\]))?(?=$|[\s,;:)])"
)
"""A keyword argument in a message: with a value, with a list of texts (or of what is left to the reader), or without."""
ASIDE = re.compile(r" \(([a-z_]+=['\"]?[\w.-]+['\"]? [^()]*)\)")
"""Advice in brackets that begins with a keyword argument."""


STORE = "STORE"
"""The metavariable of a store's folder, wherever a command takes one."""
FOLDER_OPTIONS = ("--store", "--path", "--dir", "--folder")
"""What people write before a folder, in commands that have no such option."""
MEANT = {
    **dict.fromkeys(FOLDER_OPTIONS, "--drive"),
    **dict.fromkeys(("--memory", "--mem", "--ram"), "--dram"),
    **dict.fromkeys(("--gpu-memory", "--vram"), "--hbm"),
}
"""Options that commands do not have, by other words for what an option is."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, whose options cannot be abbreviated, and which suggests what may have been meant.

    ``earlier``: the options that its command had before, for which the error is the corrected command line. ``named``: options
    that the library's keyword arguments are, where the names differ."""

    earlier: Spelling | None = None
    named: Mapping[str, str] = MappingProxyType({})
    _words: Sequence[str] = ()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **keywords})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, after a look for earlier spellings."""
        corrected = self.earlier.corrected(self, args) if self.earlier is not None and args is not None else None
        if corrected is not None:
            options, words = corrected
            line = shlex.join([*launched().command, *self.prog.split()[1:], *words])
            self.error(f"{' and '.join(options)} {'is' if len(options) == 1 else 'are'} written differently now: {line}")
        self._words = [word for word in args or () if isinstance(word, str)]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2. Of several ranks, which all have the same command line, the first one prints."""
        if launched().rank > 0:
            self.exit(2)
        words, self._words = self._words, ()
        if "required" in message:  # what is missing may be there, and mistyped
            known = self._option_string_actions
            options = (word for word in words if word.startswith("--") and word != "--")
            self.refuse_unknown(word for word in options if word.partition("=")[0] not in known)
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (help: {self.prog} --help)\n")

    def refuse_unknown(self, words: Iterable[str]) -> None:
        """Exit with an error where the command line has ``words`` that are no arguments of this parser."""
        for word in words:
            if word.startswith("-") and word != "-":
                name = word.partition("=")[0]
                self.error(f"unknown option {name}{self._mend(name)}")
            self.error(f"unexpected argument {word!r}")

    def _mend(self, name: str) -> str:
        """Return what the unknown option ``name`` was meant to be, for the end of an error."""
        places = (action.metavar for action in self._actions if not action.option_strings)
        store = next((place for place in places if place == STORE), None)
        if name in FOLDER_OPTIONS and store is not None:
            return f": {store} is given without an option, as in {self.prog} {store.lower()}/"
        if MEANT.get(name) in self._option_string_actions:
            return f", did you mean {MEANT[name]}?"
        return _meant(name, self._option_string_actions)

    def in_options(self, message: str) -> str:
        """Write the keyword arguments in a message of the library as options of this parser: ``existing='overwrite'`` is
        ``--existing overwrite``, ``paths=['a', 'b']`` is ``--paths a b``. A keyword without an option stays as it is; advice in
        brackets that begins with one goes."""

        def option(match: re.Match[str]) -> str:
            name = self.named.get(match["name"], "--" + match["name"].replace("_", "-"))
            if name not in self._option_string_actions:
                return match[0]
            if match["list"]:
                kind = self._option_string_actions[name].metavar
                items = (f"{kind} ..." if one is ... else shlex.quote(one) for one in ast.literal_eval(match["list"]))
                return " ".join([name, *items])
            return f"{name} {match['value']}" if match["value"] else name

        def aside(match: re.Match[str]) -> str:
            said = KEYWORD.sub(option, match[1])
            return "" if said == match[1] else f" ({said})"

        return KEYWORD.sub(option, ASIDE.sub(aside, message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            what = _meant(str(value), known) or f"; the commands are {', '.join(known)}"
            raise argparse.ArgumentError(None, f"unknown command {str(value)!r}{what}")
        raise argparse.ArgumentError(action, f"{str(value)!r} is none of {', '.join(known)}{_meant(str(value), known)}")


def _meant(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f", did you mean {close[0]}?" if close else ""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Formats help. argparse forgets the indentation of commands when it chooses the column of their descriptions."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


def command(
    commands: Commands, name: str, summary: str, description: str, examples: str, earlier: Spelling | None = None
) -> argparse.ArgumentParser:
    """Add the parser of the command ``name``; ``description`` and ``examples`` are printed with the line breaks they have.
    ``earlier``: options that it had before."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=Formatter,
    )
    assert isinstance(parser, Parser), "commands are made by a Parser, which gives its class to them"
    parser.earlier = earlier
    parser.set_defaults(parser=parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json [FILE]``."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write the results as JSON: to FILE and print them too, or to stdout alone where FILE is left out or '-'",
    )


def add_store(parser: argparse.ArgumentParser, what: str = "the store's folder") -> None:
    """``STORE``, and ``--paths`` for a store on several drives."""
    parser.add_argument("folder", metavar=STORE, help=what)
    add_paths(parser)


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Add ``--paths FOLDER ...``, the folders of a store on several drives."""
    parser.add_argument(
        "--paths", metavar="FOLDER", nargs="+", help="folders of the store's data files, for a store on several drives"
    )


def add_model(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--model NAME``, a model's name in a store; ``what`` is the help text."""
    parser.add_argument("--model", metavar="NAME", help=what)
    assert isinstance(parser, Parser), "made by command"
    parser.named = {"name": "--model"}


def add_generation(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--generation N``, a commit of the store; ``what`` is the help text."""
    parser.add_argument("--generation", metavar="N", type=count, help=what)


def add_backend(parser: argparse._ActionsContainer, default: str | None = "auto") -> None:
    """Add ``--backend NAME``, an I/O backend."""
    parser.add_argument("--backend", choices=BACKENDS, default=default, help="how to do file I/O (default: auto)")


DRIVE = Spelling({"--dir": "--drive"})


def add_drive(parser: argparse._ActionsContainer) -> None:
    """``--drive FOLDER`` of the commands that measure."""
    parser.add_argument(
        "--drive", metavar="FOLDER", dest="folder", default=".", help="a folder on the drive to measure (default: this one)"
    )


def count(text: str) -> int:
    """Convert a whole number from 1 on."""
    value: int = _parsed(int, text, "a whole number from 1 on", lambda v: 1 <= v <= LARGEST_COUNT)
    return value


def positive(text: str) -> float:
    """Convert a number above 0."""
    value: float = _parsed(float, text, "a number above 0", lambda v: 0 < v < float("inf"))
    return value


def fraction(text: str) -> float:
    """Convert a number from 0 on."""
    value: float = _parsed(float, text, "a number from 0 on", lambda v: 0 <= v < float("inf"))
    return value


def seed(text: str) -> int:
    """Convert a seed of random numbers."""
    value: int = _parsed(int, text, "a whole number from 0 to 2**63 - 1", lambda v: 0 <= v <= LARGEST_COUNT)
    return value


def size(text: str) -> int:
    """Bytes: at least 1, and no more than a signed 64-bit offset can count."""
    try:
        nbytes = SizeWithUnit.of(text)
    except MisuseError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 1 <= nbytes <= LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a possible size; write one like '256MiB'")
    return nbytes


def size_or_none(text: str) -> int:
    """``size``, or 0 for none."""
    return 0 if text == "0" else size(text)


def sizes(text: str) -> tuple[int, ...]:
    """Convert sizes that commas separate: ascending, without duplicates."""
    return tuple(sorted({size(part) for part in text.split(",")}))


def counts(text: str) -> tuple[int, ...]:
    """Convert numbers that commas separate: ascending, without duplicates."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def names(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Make a converter of names out of ``known`` that commas separate: in the given order, without duplicates."""

    def some(text: str) -> tuple[str, ...]:
        given = text.split(",")
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}{_meant(name, known)}")
        return tuple(dict.fromkeys(given))

    return some


def seconds(text: str) -> float:
    """Convert "90", "90s", "2min" or "1h" to seconds."""
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
