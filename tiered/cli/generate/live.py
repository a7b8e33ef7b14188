"""Show text as it is made on stdout, and how fast it is made on stderr.

In a terminal that shows both, the line with the numbers stays below the text: what is complete of a line of text is printed
above, wrapped at words. Elsewhere stdout has the text and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

from tiered.cli.output import UNPRINTABLE, Progress, live_rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

__all__ = ["Display"]


class Display:
    """Shows text and numbers. A context manager. ``shown=False`` shows no text."""

    def __init__(self, stdout: TextIO, stderr: TextIO, *, shown: bool = True) -> None:
        self._stdout, self._shown = stdout, shown
        self._live: Live | None = None
        self._rows = ExitStack()
        self._console: Console | None = None
        self._line = ""
        self._terminal = shown and stdout.isatty()
        if self._terminal and stderr.isatty():
            from rich.console import Console

            console = Console(file=stdout, highlight=False, markup=False)
            self._console = None if console.is_dumb_terminal else console
        self._progress = Progress(stderr)
        self._ends = "\n"

    def __enter__(self) -> Display:
        if self._console is not None:
            self._live = self._rows.enter_context(live_rows(self._console, refresh_per_second=8, transient=True))
        else:
            self._progress.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is None:
            self._progress.__exit__(*exception)
            if self._shown and self._ends != "\n":
                self._stdout.write("\n")
        else:
            self._rows.close()
            if self._line and self._console is not None:
                self._console.print(self._line, soft_wrap=True)

    def text(self, text: str) -> None:
        """Show ``text`` after what was shown of the answer so far."""
        if not self._shown or not text:
            return
        if self._terminal:
            text = text.translate(UNPRINTABLE)
        if self._console is None:
            self._stdout.write(text)
            self._stdout.flush()
            self._ends = text[-1]
            return
        from rich.text import Text

        *complete, self._line = (self._line + text).split("\n")
        for line in complete:
            self._console.print(line, soft_wrap=True)
        rows = Text(self._line).wrap(self._console, self._console.width)
        for row in rows[:-1]:
            self._console.print(row)
        if len(rows) > 1:
            self._line = rows[-1].plain

    def listed(self, answers: Iterable[tuple[str, str]]) -> None:
        """Show prompts and what goes on from each."""
        for number, (prompt, text) in enumerate(answers, 1):
            self.text(f"[{number}] {prompt}\n{text}\n\n")

    def numbers(self, told: str, share: float) -> None:
        """Show numbers, and that ``share`` of the tokens are made."""
        if self._live is None:
            self._progress.working(told, share)
            return
        from rich.console import Group
        from rich.text import Text

        parts = [Text(self._line)] if self._line else []
        self._live.update(Group(*parts, Text(told, style="dim", no_wrap=True, overflow="ellipsis")))
