"""Record what a step touches, and have the store follow that order in the next step: it evicts by next use and prefetches.

A training step repeats, from one ``optimizer.step()`` to the next, however many passes it has; so does inference, from one
forward of the whole model to the next. Where control flow differs from round to round the order is wrong now and then, which
costs time and nothing else. Experts of a mixture are no part of the order of inference, because a router chooses others for
each token; nor are slices of an embedding, of which each token uses one.
A store follows one order, so there is one trace per store.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Literal

from tiered.store import TieredStore, Touch
from tiered.types import Others

__all__ = ["Prefetch", "StepTrace"]

Kind = Literal["training", "inference"]
Prefetch = Literal["on", "off"]

ROUNDS = 4
"""A loop repeats after this many rounds at most: two optimizers that take turns make two."""
LONGEST = 50_000
"""Touches of a round that are written down; what is longer has no end that we would see."""


class _Loop:
    """Rounds of one kind that were seen, and the rounds that are expected next, in turn."""

    def __init__(self) -> None:
        self.seen: deque[list[Touch]] = deque(maxlen=2 * ROUNDS)
        self._state: tuple[list[list[Touch]], int, bool] = [], 0, False  # one assignment changes all of it

    @property
    def expected(self) -> list[list[Touch]]:
        return self._state[0]

    def happened(self, touches: list[Touch]) -> None:
        """Note a round that has ended. Until two rounds were alike the newest is expected; one that differs later is an
        exception."""
        self.seen.append(touches)
        expected, place, repeats = self._state
        as_expected = bool(expected) and touches == expected[place]
        if expected:
            place = (place + 1) % len(expected)
        self._state = expected, place, repeats or as_expected
        if as_expected:
            return
        rounds = list(self.seen)
        for period in range(1, len(rounds) // 2 + 1):
            if rounds[-period:] == rounds[-2 * period : -period]:
                self._state = rounds[-period:], 0, True
                return
        if not repeats and not _alike(self._state[0], touches):
            self._state = rounds[-1:], 0, False

    def order(self) -> list[Touch]:
        """Return the expected touches, the next one first."""
        expected, place, _ = self._state
        turned = expected[place:] + expected[:place]
        return [touch for touches in turned for touch in touches]


def _alike(expected: list[list[Touch]], touches: list[Touch]) -> bool:
    """Return whether a round was the expected one with some touches earlier or later: so are rounds of several ranks, where it
    depends on the other ranks and the network when a reduction ends. Another order of them would be no better known."""
    return len(expected) == 1 and len(expected[0]) == len(touches) and Counter(expected[0]) == Counter(touches)


class StepTrace:
    """Trace of the steps of all models in one store. ``of`` returns the trace of a store. Used by one thread at a time, as a
    model is."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._recording = ExitStack()
        self._touches: list[Touch] = self._recording.enter_context(store.trace(most=LONGEST))
        self._loops: dict[Kind, _Loop] = {"training": _Loop(), "inference": _Loop()}
        self._kind: Kind = "training"
        self._followed: list[list[Touch]] | None = None
        self._of: Kind | None = None  # of what is followed
        self._left_out: set[str] = set()
        self._looked_up: set[str] = set()
        self.prefetch: Prefetch = "on"

    @staticmethod
    def of(store: TieredStore) -> StepTrace:
        known = store.attached.made(_Shared, _Shared)
        found = known.get("trace")
        if found is None:
            found = known["trace"] = StepTrace(store)
        return found

    @property
    def following(self) -> bool:
        """Return whether the store follows an order of the present kind."""
        return self._followed is not None and self._of == self._kind

    def leave_out(self, keys: Iterable[str]) -> None:
        """Leave ``keys`` out of the order of inference: a token uses a few of them, and each token others."""
        self._left_out.update(keys)

    def looked_up(self, keys: Iterable[str]) -> None:
        """Leave all touches of ``keys`` but the last of a round out of the order of inference. They are slices of an embedding,
        of which a token uses one; the last use is that of the output layer, with the same weights, which uses all of them."""
        self._looked_up.update(keys)

    def forward_begins(self, kind: Kind, guess: Callable[[], list[Touch]]) -> None:
        """Note that a whole model's forward begins. It ends a round of inference, but not one of training. ``guess`` makes the
        order to follow where no round of inference was seen: most models run their modules in the order of their making."""
        if "inference" in (kind, self._kind):
            self._end_round(kind)
        if kind == "inference" and self._followed is None and not self._loops[kind].expected:
            units = guess()
            last = [touch for touch in units if touch.key in self._looked_up]
            guessed = [touch for touch in units if touch.key not in self._left_out | self._looked_up] + last
            if guessed:
                self._follow(guessed)
                self._followed, self._of = [guessed], kind

    def step_ended(self) -> None:
        """Note that an optimizer step ended, and with it a round of training."""
        self._end_round("training")

    def _end_round(self, kind: Kind) -> None:
        touches = self._touches[:]
        del self._touches[: len(touches)]
        if self._kind == "inference":
            touches = self._in_order(touches)
        if 0 < len(touches) < LONGEST:
            self._loops[self._kind].happened(touches)
        self._kind = kind
        loop = self._loops[kind]
        if loop.expected and self._followed is not loop.expected and self._followed != loop.expected:
            self._follow(loop.order())
            self._followed, self._of = loop.expected, kind

    def _in_order(self, touches: list[Touch]) -> list[Touch]:
        """Return the touches of inference that do not depend on what is computed with."""
        if not self._left_out and not self._looked_up:
            return touches
        last = {touch.key: place for place, touch in enumerate(touches) if touch.key in self._looked_up}
        return [t for place, t in enumerate(touches) if t.key not in self._left_out and last.get(t.key, place) == place]

    def _follow(self, order: list[Touch]) -> None:
        others: Others = "frequency" if self._kind == "inference" and self._left_out else "recency"
        self._store.follow(order, prefetch=self.prefetch, others=others)


class _Shared(weakref.WeakValueDictionary[str, StepTrace]):
    """The one trace of a store, which it keeps alive. Models that are paged into the store keep the trace."""
