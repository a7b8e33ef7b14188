"""Spellings that commands had before: what was an option and is now a positional, another option, or a value of one. The
corrected command line is made here, with all other arguments of the caller; nothing else knows the earlier grammar."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Spelling"]


@dataclass(frozen=True)
class Spelling:
    """Say how options that one command had before are written now.

    ``now`` has for each what is written in its place. The metavariable of a positional: its value goes there. An option
    alone: it takes the value. An option with a value: the earlier one had none. ``otherwise``: what a line in the earlier
    grammar meant where it had none of the options that are now ``otherwise`` with another value."""

    now: dict[str, str]
    otherwise: str | None = None

    def corrected(self, parser: argparse.ArgumentParser, given: Sequence[str]) -> tuple[list[str], list[str]] | None:
        """Return the earlier options in the arguments ``given`` of ``parser``, and the arguments as they are written now:
        positionals first, then options in the order of the caller. None where no option is an earlier one."""
        positionals, options = _apart(parser, given, self.now)
        found = [name for name, values in options if self._is_earlier(parser, name, values)]
        if not found:
            return None
        places = [action.metavar for action in parser._actions if not action.option_strings]
        written: list[str] = []
        placed: dict[int, str] = {}
        for name, values in options:
            now = self.now.get(name, name)
            option, _, value = now.partition(" ")
            if now in places:
                placed[places.index(now)] = _not_an_option(values[0]) if values else now
            elif value:  # the option had no value, so that what follows it is a positional
                written += [option, value]
                positionals += values
            else:
                written += [option, *values]
        for place in sorted(placed):
            positionals.insert(place, placed[place])
        if self.otherwise is not None and self.otherwise.split()[0] not in written:
            written += self.otherwise.split()
        return list(dict.fromkeys(found)), [*positionals, *written]

    def _is_earlier(self, parser: argparse.ArgumentParser, name: str, values: list[str]) -> bool:
        """Whether ``name`` is an earlier spelling. One that is an option today, too, is that where it has a value."""
        return name in self.now and (name not in parser._option_string_actions or not values)


def _apart(
    parser: argparse.ArgumentParser, given: Sequence[str], earlier: Iterable[str]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Part arguments into positionals and options with their values, as argparse does. An ``earlier`` option has one value
    where one follows."""
    known = parser._option_string_actions
    positionals: list[str] = []
    options: list[tuple[str, list[str]]] = []
    words = list(given)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            return positionals + words, options
        if name not in known and name not in earlier and not _like_an_option(word):
            positionals.append(word)
        elif equals:
            options.append((name, [value]))
        else:
            nargs = known[name].nargs if name in known else "?" if name in earlier else 0
            most = nargs if isinstance(nargs, int) else 1 if nargs in (None, "?") else len(words)
            values: list[str] = []
            while words and len(values) < most and not _like_an_option(words[0]):
                values.append(words.pop(0))
            options.append((name, values))
    return positionals, options


def _like_an_option(word: str) -> bool:
    """Whether argparse takes ``word`` for an option: numbers and texts with spaces are none."""
    if not word.startswith("-") or word == "-" or " " in word:
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _not_an_option(value: str) -> str:
    return f"./{value}" if value.startswith("-") else value
