"""What a generation took: seconds and bytes a token, and what more memory would bring.

With weights of W bytes, C bytes of memory and reads ahead that take some of it (the window), a token of a dense model takes
``max(compute, (W - C + window) / read rate)`` seconds. ``Pace`` measures all of these but W and C during a run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tiered.cli.generate.answers import Answer, Pace
from tiered.cli.output import counted, duration, rate
from tiered.measuring.meters import GIB
from tiered.types import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.integrations.transformers.experts import ExpertStatistics

__all__ = ["GenerationSummary", "describe"]


@dataclass(frozen=True)
class GenerationSummary:
    """A generation: ``first`` is up to its first token, ``rest`` the tokens after it, of all answers at the same time.
    ``weights``: bytes of all parameters in
    the store; ``routed``: those of experts, of which a token uses some. ``memory``: the store's budget. ``experts``: what
    was counted of these, the prompt included. ``kept``: keys and values are in the store, too, and what was read has them."""

    model: str
    answers: Sequence[Answer]
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
        """Return seconds a token with so much more memory, by the formula; None where all weights fit already, or nothing was
        read after the first token. Of a model with experts it is the least."""
        if self.weights <= self.memory or self.read is None or self.compute is None or not self.read or not self.rest.read_rate:
            return None
        return max(self.compute, max(0.0, self.read - nbytes) / self.rest.read_rate)

    def as_json(self) -> dict[str, Any]:
        """Return the summary in bytes and seconds."""
        answers = [
            {"prompt_tokens": one.prompt, "tokens": one.tokens, "text": one.text, "ended": one.ended} for one in self.answers
        ]
        return {
            "model": self.model,
            **(answers[0] if len(answers) == 1 else {"answers": answers}),
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
    several = len(summary.answers)
    prompts = counted(sum(answer.prompt for answer in summary.answers), "token")
    prompts += " of prompt" if several == 1 else f" of {several} prompts"
    together = f" of all {several} together" if several > 1 else ""
    lines = [
        f"model     {format_size(summary.weights)} of weights"
        + (f" ({format_size(summary.routed)} experts)" if summary.routed else "")
        + f", {format_size(summary.memory)} of memory; opened in {duration(summary.opened)}",
        f"first     token after {duration(first.seconds)}: {prompts}, {_amount(first.read)} read",
    ]
    if summary.seconds is not None and summary.read is not None and summary.compute is not None:
        lines += [
            f"then      {duration(summary.seconds)} a token{' of each answer' if several > 1 else ''} "
            f"({several / summary.seconds:.2f} tokens/s{together}): computing {duration(summary.compute)}, waiting "
            f"{duration(rest.stalled / rest.tokens)}",
            f"disk      {_amount(summary.read)} read for a token; {rest.hit_share:.0%} of what it needs was in memory in time",
        ]
    if (experts := summary.experts) is not None:
        lines.append(
            f"experts   {experts.hit_share:.0%} of those chosen were in memory ({experts.hits:,} of "
            f"{experts.hits + experts.misses:,}, with the prompt's)"
        )
    lines += _beside(summary)
    if told := _more(summary):
        lines.append(f"memory    {told}")
    return "\n".join(lines)


def _beside(summary: GenerationSummary) -> list[str]:
    """Say why a token reads more or less than the weights for which there is no memory."""
    without = f"          {_amount(summary.weights - summary.memory)} of the weights do not fit in memory; "
    if summary.window is not None:
        return [f"{without}{_amount(summary.window)} more are", "          read, because what is read ahead takes memory, too"]
    if summary.kept:
        return ["          keys and values of the conversation are in the same memory, and what was read has them, too"]
    if summary.read is not None and not summary.routed and summary.weights > summary.memory:
        return [f"{without}less is read, because", "          rows of the embedding that no token uses stay on the disk"]
    return []


def _more(summary: GenerationSummary) -> str | None:
    """Say what one more GiB of memory would bring; of a model that has less, twice the memory."""
    small = summary.weights < GIB
    more = summary.memory if small else GIB
    then = summary.with_more(more)
    if summary.seconds is None or summary.read is None or summary.compute is None:
        return None
    if summary.weights <= summary.memory:
        return "all weights fit: more would bring nothing"
    if then is None:
        return "nothing was read after the first token: more would bring nothing"
    about = "at best" if summary.routed else "about"
    left = max(0.0, summary.read - more)
    why = "computing alone" if then == summary.compute else f"to read {_amount(left)} at {rate(summary.rest.read_rate)}"
    budget = format_size(summary.memory + more).replace(" ", "")
    return f"{'twice the memory' if small else 'one more GiB'} (--dram {budget}): {about} {duration(then)} a token, {why}"


def _amount(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
