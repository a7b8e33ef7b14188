"""Records some steps of a training and leaves them as a trace and as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tiered import TieredStore, Timeline
from tiered.cli.plot import refuse_unplottable
from tiered.cli.report import refuse_unwritable
from tiered.cli.timeline import describe, write_timeline
from tiered.cli.timeline_plot import plot_timeline

if TYPE_CHECKING:
    from tiered.cli.course import Result
    from tiered.cli.train import Options

__all__ = ["Recording"]

WARM_UP = 5
"""Steps before: until then the order of a step is not known, and the moments are made."""


class Recording:
    """Of ``options.timeline_steps`` steps after ``WARM_UP``, or of the last ones where there are fewer.

    ``done`` were made before.
    """

    def __init__(self, options: Options, done: int = 0) -> None:
        self._options = options
        last = options.steps - done if options.steps is not None else WARM_UP + options.timeline_steps
        self._first = max(1, min(WARM_UP, last - options.timeline_steps) + 1)
        self._timeline: Timeline | None = None
        self._steps = 0

    @property
    def wanted(self) -> bool:
        return self._options.timeline is not None or self._options.plot is not None

    def refuse_unwritable(self) -> None:
        """Raises MisuseError when there could be no file in the end."""
        refuse_unwritable(self._options.timeline, "--timeline")
        refuse_unplottable(self._options.plot)

    def of(self, results: Iterator[Result], store: TieredStore) -> Iterator[Result]:
        """The same results; the steps that make some of them are recorded."""
        if not self.wanted:
            yield from results
            return
        with ExitStack() as stack:
            for number in itertools.count(1):
                if number == self._first:
                    self._timeline = stack.enter_context(store.timeline())
                with store.span("step", f"step {number}"):
                    result = next(results, None)
                if result is None:
                    return
                self._steps += self._timeline is not None and self._timeline.ended is None
                if self._steps == self._options.timeline_steps:
                    stack.close()
                yield result

    def write(self, title: str) -> str | None:
        """Leave the files; returns what there is to be told."""
        if not self.wanted:
            return None
        if self._timeline is None or not self._steps:
            return f"timeline  training ended before step {self._first}: nothing was recorded"
        if self._options.timeline is not None:
            write_timeline(self._options.timeline, self._timeline)
        if self._options.plot is not None:
            plot_timeline(self._options.plot, self._timeline, title)
        return describe(self._timeline, self._steps)
