"""Answers of a model while it makes them: tokens, text, where it ends, and what all of it takes."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from tiered import TieredStore
from tiered.cli.output import counted, rate_unit
from tiered.integrations.stop_strings import StopStrings

if TYPE_CHECKING:
    from tiered.cli.generate.live import Display
    from tiered.cli.generate.text import GeneratedText
    from tiered.cli.stop import StopRequest

__all__ = ["Answer", "Answers", "Ended", "Pace"]

Ended = Literal["length", "token", "stop", "stopped"]
"""Why an answer has no more tokens: it has as many as were asked for; the model made one that ends texts; its text has a stop
string; somebody asked to stop."""
AGAIN = 0.5
"""Seconds of which the live line shows the pace, at least."""


class Answering(Protocol):
    """What answers need of a model: its store, its tokenizer, and the tokens that end a text."""

    store: TieredStore
    text: GeneratedText
    ends: Collection[int]


class Answer:
    """The answer to one prompt, of so many tokens. ``ends``: the tokens that end a text. A stop string is in no ``text``."""

    def __init__(self, prompt: int, text: GeneratedText, ends: Collection[int], stops: Sequence[str]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text = ""
        self.ended: Ended | None = None
        self._made, self._ends, self._stops = text, ends, StopStrings(stops)

    def add(self, token: int) -> str:
        """Take the next token; returns the text that it adds."""
        self.tokens.append(token)
        return self._more(self._made.add(token), "token" if token in self._ends else None)

    def end(self, why: Ended) -> str:
        """End the answer, unless it has ended; returns the text that it adds."""
        if self.ended is not None:
            return ""
        return self._more("", why)

    def _more(self, text: str, why: Ended | None) -> str:
        more = self._stops.add(text if why is None else text + self._made.end())
        self.ended = "stop" if self._stops.found else why
        if self.ended is not None:
            more += self._stops.end()
        self.text += more
        return more


@dataclass(frozen=True)
class Pace:
    """Totals of some tokens, or at one moment: ``busy`` seconds during which the disk was read, ``leases`` of which ``hits``
    were granted at once, ``stalled`` seconds for the store."""

    tokens: int
    seconds: float
    read: int
    busy: float
    leases: int
    hits: int
    stalled: float

    def since(self, earlier: Pace) -> Pace:
        """Return what was counted between ``earlier``, another reading, and this one."""
        names = self.__dataclass_fields__
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in names})

    @property
    def hit_share(self) -> float:
        """The share of leases that were granted at once: the bytes were in memory, or read ahead in time."""
        return self.hits / self.leases if self.leases else 1.0

    @property
    def read_rate(self) -> float:
        """Bytes per second of the disk while it was read."""
        return self.read / self.busy if self.busy > 0 else 0.0


class Pacer:
    """Reads the counters of a store."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def now(self, tokens: int) -> Pace:
        """Return the totals after so many tokens."""
        seen = self._store.statistics()
        up = seen.links[-1].up
        return Pace(tokens, time.perf_counter(), up.bytes, up.busy_seconds, seen.leases, seen.hits, seen.stalled)


def live_line(pace: Pace, tokens: int, wanted: int) -> str:
    """Describe how fast the last tokens were made."""
    read = pace.read / pace.seconds
    unit, factor = rate_unit(read)
    each = pace.tokens / pace.seconds
    waiting = f"waiting for the disk {pace.stalled / pace.seconds:.0%} of the time"
    return f"token {tokens}/{wanted}  {each:.2f} tokens/s, disk reads {read * factor:.2f} {unit}, {waiting}"


class Answers:
    """The answers to prompts that a model is given together, and their pace. The text of an only one is shown as it comes."""

    def __init__(
        self, answers: Sequence[Answer], wanted: int, store: TieredStore, display: Display, stop: StopRequest
    ) -> None:
        self.all, self._wanted, self._display, self._stop = answers, wanted, display, stop
        self._pacer = Pacer(store)
        self._began = self._shown = self._first = self._last = self._pacer.now(0)
        display.numbers(f"reading {counted(sum(answer.prompt for answer in answers), 'token')} of prompt", 0.0)

    @classmethod
    def of(
        cls, model: Answering, prompts: Sequence[Sequence[int]], stops: Sequence[str], wanted: int, display: Display,
        stop: StopRequest,
    ) -> Answers:  # fmt: skip
        """Begin the answers of ``model`` to ``prompts``, each of which ends at one of ``stops`` or after ``wanted`` tokens."""
        answers = [Answer(len(prompt), model.text.another(), model.ends, stops) for prompt in prompts]
        return cls(answers, wanted, model.store, display, stop)

    @property
    def first(self) -> Pace:
        """What the first token took, of all answers together."""
        return self._first.since(self._began)

    @property
    def rest(self) -> Pace:
        """What the tokens after the first one took."""
        return self._last.since(self._first)

    @property
    def made(self) -> int:
        """Return the number of tokens of the longest answer."""
        return max(len(answer.tokens) for answer in self.all)

    def check(self) -> None:
        """Raise where somebody asked to stop."""
        self._stop.check()

    def take(self, tokens: Sequence[int]) -> list[bool]:
        """Take the next token of each answer (of one that has ended, any); returns of each whether it has ended."""
        for answer, token in zip(self.all, tokens, strict=True):
            if answer.ended is None:
                self._say(answer.add(token))
        self._last = self._pacer.now(self.made)
        if self.made == 1:
            self._first = self._shown = self._last
        elif self._last.seconds - self._shown.seconds >= AGAIN or self.made == self._wanted:
            self._display.numbers(live_line(self._last.since(self._shown), self.made, self._wanted), self.made / self._wanted)
            self._shown = self._last
        self.check()
        return [answer.ended is not None for answer in self.all]

    def end(self, why: Ended) -> None:
        """End all answers that have not ended."""
        for answer in self.all:
            self._say(answer.end(why))

    def _say(self, text: str) -> None:
        if len(self.all) == 1:
            self._display.text(text)
