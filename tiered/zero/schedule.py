"""What comes next, learnt from what came last time. Pure: names in, names out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Successors"]

Event = TypeVar("Event", bound=Hashable)


class Successors(Generic[Event]):
    """Remembers which event followed each pair of events, and the single one where the pair is new.

    A training step repeats, so this predicts it after one round; where control flow differs from round to round it is wrong now
    and then, which costs a prefetch and nothing else.
    """

    def __init__(self) -> None:
        self._after_pair: dict[tuple[Event | None, Event], Event] = {}
        self._after_one: dict[Event, Event] = {}
        self._before: Event | None = None
        self._last: Event | None = None

    def happened(self, event: Event) -> None:
        if self._last is not None:
            self._after_pair[(self._before, self._last)] = event
            self._after_one[self._last] = event
        self._before, self._last = self._last, event

    def coming(self) -> Iterator[Event]:
        """Predicted events, the nearest first; ends where nothing is known or the prediction goes round in a circle."""
        before, last = self._before, self._last
        seen: set[tuple[Event | None, Event]] = set()
        while last is not None and (before, last) not in seen:
            seen.add((before, last))
            following = self._after_pair.get((before, last), self._after_one.get(last))
            if following is None:
                return
            before, last = last, following
            yield following
