"""What a generation took: seconds and bytes a token, and what more memory would bring.

With weights of W bytes, C bytes of memory and reads ahead that take some of it (the window), a token of a dense model takes
``max(compute, (W - C + window) / read rate)`` seconds. ``Pace`` measures all of these but W and C during a run.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tiered import TieredStore
from tiered.cli.output import counted, duration, rate, rate_unit
from tiered.measuring.meters import GIB
from tiered.types import format_size

if TYPE_CHECKING:
    from tiered.integrations.transformers.experts import ExpertStatistics

__all__ = ["GenerationSummary", "Pace", "Pacer", "describe", "live_line"]


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
    return (
        f"token {tokens}/{wanted}  {each:.2f} tokens/s  read {read * factor:.2f} {unit}  hits {pace.hit_share:.0%}"
        if pace.tokens
        else f"reading the prompt  read {read * factor:.2f} {unit}"
    )


@dataclass(frozen=True)
class GenerationSummary:
    """A generation: ``first`` is up to its first token, ``rest`` the tokens after it. ``weights``: bytes of all parameters in
    the store; ``routed``: those of experts, of which a token uses some. ``memory``: the store's budget. ``experts``: what
    was counted of these, the prompt included. ``kept``: keys and values are in the store, too, and what was read has them."""

    model: str
    prompt: int
    tokens: list[int]
    text: str
    opened: float
    first: Pace
    rest: Pace
    weights: int
    routed: int
    memory: int
    experts: ExpertStatistics | None = None
    kept: bool = False

    @property
    def seconds(self) -> float | None:
        """Seconds a token after the first one; None where there is no other."""
        return self.rest.seconds / self.rest.tokens if self.rest.tokens else None

    @property
    def read(self) -> float | None:
        """Bytes read a token after the first one."""
        return self.rest.read / self.rest.tokens if self.rest.tokens else None

    @property
    def compute(self) -> float | None:
        """Seconds a token without what was waited for the store."""
        return (self.rest.seconds - self.rest.stalled) / self.rest.tokens if self.rest.tokens else None

    @property
    def window(self) -> float | None:
        """Bytes of memory that did not save reading: bytes read a token beyond W - C. None where the weights fit, or a token
        does not use all of them (experts, or rows of an embedding in slices), and where keys and values were read, too."""
        if self.read is None or self.routed or self.kept or self.weights <= self.memory:
            return None
        beyond = self.read - (self.weights - self.memory)
        return beyond if beyond >= 0 else None

    def with_more(self, nbytes: int) -> float | None:
        """Return seconds a token with so much more memory, by the formula; None where nothing was read after the first token.
        Of a model with experts it is the least."""
        if self.read is None or self.compute is None or not self.read or not self.rest.read_rate:
            return None
        return max(self.compute, max(0.0, self.read - nbytes) / self.rest.read_rate)

    def as_json(self) -> dict[str, Any]:
        """Return the summary in bytes and seconds."""
        return {
            "model": self.model,
            "prompt_tokens": self.prompt,
            "tokens": self.tokens,
            "text": self.text,
            "open_seconds": self.opened,
            "first_token": {"seconds": self.first.seconds, "read_bytes": self.first.read},
            "per_token": {
                "seconds": self.seconds,
                "read_bytes": self.read,
                "compute_seconds": self.compute,
                "waiting_seconds": self.rest.stalled / self.rest.tokens if self.rest.tokens else None,
            },
            "hit_share": self.rest.hit_share if self.rest.tokens else self.first.hit_share,
            "read_bytes_per_second": self.rest.read_rate or self.first.read_rate,
            "weights_bytes": self.weights,
            "expert_bytes": self.routed,
            "experts": None if self.experts is None else {**asdict(self.experts), "hit_share": self.experts.hit_share},
            "memory_bytes": self.memory,
            "window_bytes": self.window,
            "seconds_with_one_more_gib": self.with_more(GIB),
        }


def describe(summary: GenerationSummary) -> str:
    """Format the summary in several lines."""
    first, rest = summary.first, summary.rest
    lines = [
        f"model     {format_size(summary.weights)} of weights"
        + (f", {format_size(summary.routed)} of them experts" if summary.routed else "")
        + f"; {format_size(summary.memory)} of memory",
        f"first     token after {duration(first.seconds)} ({counted(summary.prompt, 'token')} of prompt), "
        f"{_amount(first.read)} read; the store was opened in {duration(summary.opened)}",
    ]
    if summary.seconds is not None and summary.read is not None and summary.compute is not None:
        lines += [
            f"then      {duration(summary.seconds)} a token ({1 / summary.seconds:.2f} tokens/s, "
            f"{counted(rest.tokens, 'token')}), {_amount(summary.read)} read a token",
            f"          computing {duration(summary.compute)}, waiting for the store "
            f"{duration(rest.stalled / rest.tokens)} a token; {rest.hit_share:.0%} of leases waited for nothing",
        ]
    if (experts := summary.experts) is not None:
        lines.append(
            f"experts   {experts.hit_share:.0%} of those that the routers chose were in memory, {experts.hits:,} of "
            f"{experts.hits + experts.misses:,}, with the prompt's"
        )
    if summary.window is not None:
        lines.append(
            f"          weights less memory are {_amount(summary.weights - summary.memory)}; what was read beyond that, "
            f"{_amount(summary.window)}, is the window"
        )
    elif summary.kept:
        lines.append("          keys and values of the conversation are in the same memory, and what was read has them, too")
    elif summary.read is not None and not summary.routed and summary.weights > summary.memory:
        lines.append(
            f"          weights less memory are {_amount(summary.weights - summary.memory)}; a token read less, because rows "
            "of the embedding that no token uses stay on the disk"
        )
    if told := _more(summary):
        lines.append(f"memory    {told}")
    return "\n".join(lines)


def _more(summary: GenerationSummary) -> str | None:
    """Say what one more GiB of memory would bring."""
    then = summary.with_more(GIB)
    if summary.seconds is None or summary.read is None:
        return None
    if then is None:
        return "nothing was read after the first token: more would bring nothing"
    best = "at best " if summary.routed else ""
    left = _amount(max(0.0, summary.read - GIB))
    return (
        f"one more GiB (--dram {format_size(summary.memory + GIB).replace(' ', '')}) would bring {best}{duration(then)} a "
        f"token, from {duration(summary.seconds)}:\n"
        f"          the greater of computing, and reading {left} at {rate(summary.rest.read_rate)}"
    )


def _amount(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
