"""Understand a request for a chat completion, as the clients of OpenAI's API send it, for a server of one's own.

What such a request may say is in OpenAI's reference of ``/v1/chat/completions``. What is not supported is refused where it asks
for something: a client that is answered as if it had not asked cannot know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered.errors import MisuseError, shown

__all__ = ["ChatRequest", "refusal"]

TOKENS = 256
"""Tokens of an answer at most, where a request says nothing."""
UNSUPPORTED: Mapping[str, Any] = {
    "n": 1, "tools": [], "functions": [], "response_format": {"type": "text"}, "logprobs": False, "logit_bias": {},
    "presence_penalty": 0, "frequency_penalty": 0,
}  # fmt: skip
"""What a request may have and is not done, with the value that asks for nothing."""


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks. ``messages``: each with one text; ``tokens``: at most so many of an answer (None: not said);
    ``stops``: strings before which it ends; ``drawn``: arguments of ``generate``; ``seed``: None: any; ``stream``: in pieces;
    ``usage``: with the numbers of tokens after the pieces."""

    messages: list[dict[str, Any]]
    tokens: int | None = None
    stops: list[str] = field(default_factory=list)
    drawn: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    stream: bool = False
    usage: bool = False

    @classmethod
    def of(cls, contents: bytes) -> ChatRequest:
        """Return what the JSON of a request asks. Raises MisuseError, with a text for the client."""
        try:
            text = contents.decode()
        except UnicodeDecodeError as error:
            raise MisuseError(f"the request is not UTF-8: {error}") from error
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MisuseError(f"the request is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise MisuseError("the request is not a JSON object")
        for name, nothing in UNSUPPORTED.items():
            if body.get(name) not in (None, nothing):
                mend = f"leave it out, or give {json.dumps(nothing)}" if nothing else "leave it out"
                raise MisuseError(f"{name} is not supported: {mend}")
        heat, share = _number(body, "temperature", 0, 2), _number(body, "top_p", 0, 1)
        drawn = {"do_sample": True, "temperature": float(heat), "top_p": 1.0 if share is None else float(share)} if heat else {}
        tokens = _whole(body, "max_completion_tokens", 1) or _whole(body, "max_tokens", 1)
        options = body.get("stream_options")
        return cls(
            _messages(body.get("messages")), tokens, _stops(body.get("stop")), drawn or {"do_sample": False},
            _whole(body, "seed", -(1 << 63), (1 << 63) - 1), body.get("stream") is True,
            isinstance(options, dict) and options.get("include_usage") is True,
        )  # fmt: skip

    def prompt(self, tokenizer: Any, positions: int) -> tuple[Any, int]:
        """Return the messages in the tokenizer's chat template, as inputs of a model with so many positions, and how many
        tokens the answer may have. Raises MisuseError where the template does not take them, and where they are too long."""
        try:
            inputs = tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        except Exception as error:  # a template raises what it likes
            raise MisuseError(f"the model's chat template does not take these messages: {error}") from error
        length = inputs["input_ids"].shape[1]
        room = positions - length
        if room < (self.tokens or 1):
            more = f" and {self.tokens:,} more" if self.tokens else ""
            raise MisuseError(f"the messages are {length:,} tokens{more}, too many for the model's {positions:,} positions")
        return inputs, self.tokens or min(TOKENS, room)


def refusal(error: MisuseError) -> dict[str, Any]:
    """Return the JSON of a refused request, as OpenAI's clients read it."""
    return {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}}


def _number(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> float | None:
    """Return the number that a request gives a name; None where it gives none."""
    given: float | None = body.get(name)
    if given is None:
        return None
    known = isinstance(given, int | float) and not isinstance(given, bool)
    if not known or not least <= given <= (given if most is None else most):
        raise MisuseError(f"{name} is a number from {least} {'on' if most is None else f'to {most}'}, not {_quoted(given)}")
    return given


def _whole(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    given = _number(body, name, least, most)
    if given is not None and not (math.isfinite(given) and math.floor(given) == given):
        raise MisuseError(f"{name} is a whole number, not {_quoted(given)}")
    return None if given is None else int(given)


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return messages whose contents are one text each: a chat template would print a list of parts as Python does."""
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) and _role(one) for one in given):
        raise MisuseError("messages is a list of objects that have a role and a content")
    return [{**one, "content": _text(one.get("content"))} for one in given]


def _role(message: Mapping[str, Any]) -> bool:
    role = message.get("role")
    return isinstance(role, str) and bool(role)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise MisuseError(
            "the content of a message is a text, or a list of parts that are {'type': 'text', 'text': TEXT}: not "
            f"{_quoted(content)}"
        )
    return "".join(texts)


def _stops(given: Any) -> list[str]:
    found = [given] if isinstance(given, str) else given or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise MisuseError(f"stop is a text that is not empty, or a list of such, not {_quoted(given)}")
    return found


def _quoted(given: Any) -> str:
    return shown(json.dumps(given))
