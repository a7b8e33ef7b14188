"""``tiered completion``: print a script that completes the ``tiered`` command in a shell. shtab makes it from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tiered.cli.arguments import command

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

SHELLS = ("bash", "zsh")
FOLDERS = ("STORE", "FOLDER", "MODEL")
FILES = ("FILE", "FILE.png", "SOURCE")
"""Metavariables of arguments whose values a shell can complete with the names of folders or files."""

DESCRIPTION = """\
Print a script with which bash or zsh completes commands, options, their values, and the names of files and folders.
The script does not change with the contents of a store: create it again after an update of tiered.
"""

EXAMPLES = """\
examples:
  source <(tiered completion bash)                     in this shell; put the line into ~/.bashrc for all shells
  tiered completion bash > ~/.local/share/bash-completion/completions/tiered
  tiered completion zsh > ~/.zfunc/_tiered             with fpath+=~/.zfunc before compinit in ~/.zshrc
"""


def add_parser(commands: Commands, root: argparse.ArgumentParser) -> None:
    """Add ``completion`` to the commands; the script is made from the parser ``root`` as it is when the command runs."""
    parser = command(commands, "completion", "print a completion script for bash or zsh", DESCRIPTION, EXAMPLES)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" or ".join(SHELLS))
    parser.set_defaults(run=lambda parsed, given: _run(root, parsed.shell))


def _run(root: argparse.ArgumentParser, shell: str) -> int:
    """Tell shtab which values are folders and files, and print its script; returns the exit code."""
    import shtab

    for action in _actions(root):
        if action.metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(root, shell), end="")
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of ``parser`` and of all parsers below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
