"""What a request for a chat completion asks, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiered import MisuseError
from tiered.integrations.chat_request import ChatRequest, refusal

MESSAGES = [{"role": "user", "content": "The sea is"}]


def understood(**body: Any) -> ChatRequest:
    return ChatRequest.of(json.dumps({"messages": MESSAGES, **body}).encode())


def test_a_request_asks_little_by_default() -> None:
    assert understood() == ChatRequest(MESSAGES, drawn={"do_sample": False})


def test_what_asks_for_nothing_is_taken() -> None:
    nothing = {"n": 1, "tools": [], "response_format": {"type": "text"}, "logprobs": False, "logit_bias": None}
    assert understood(**nothing, stop=None, max_tokens=None, temperature=0, model="any") == understood()


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "The sea"}, {"type": "text", "text": " is"}]
    assert understood(messages=[{"role": "user", "content": parts}]) == understood()


def test_numbers_and_stops() -> None:
    found = understood(temperature=1, top_p=0.5, seed=3, max_tokens=7, max_completion_tokens=5, stop="x", stream=True)
    assert found.drawn == {"do_sample": True, "temperature": 1.0, "top_p": 0.5}
    assert isinstance(found.drawn["temperature"], float)
    assert (found.seed, found.tokens, found.stops, found.stream, found.usage) == (3, 5, ["x"], True, False)
    assert understood(stream_options={"include_usage": True}).usage


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"messages": []}, "messages is a list"),
        ({"messages": 3}, "messages is a list"),
        ({"messages": ["x"]}, "messages is a list"),
        ({"messages": [{"content": "hi"}]}, "objects that have a role and a content"),
        ({"messages": [{"role": "user"}]}, "the content of a message is a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "parts that are"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "parts that are"),
        ({"max_tokens": 0}, "max_tokens is a number from 1 on"),
        ({"max_tokens": "many"}, "max_tokens is a number from 1 on"),
        ({"max_tokens": 1.5}, "max_tokens is a whole number, not 1.5"),
        ({"max_tokens": float("inf")}, "max_tokens is a whole number"),
        ({"max_tokens": True}, "max_tokens is a number from 1 on"),
        ({"max_completion_tokens": -1}, "max_completion_tokens is a number from 1 on"),
        ({"temperature": -1}, "temperature is a number from 0 to 2, not -1"),
        ({"temperature": float("nan")}, "temperature is a number from 0 to 2, not NaN"),
        ({"top_p": 2}, "top_p is a number from 0 to 1, not 2"),
        ({"seed": 0.5}, "seed is a whole number"),
        ({"stop": 3}, "stop is a text"),
        ({"stop": [""]}, "stop is a text"),
        ({"n": 2}, "n is not supported: leave it out, or give 1"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"logprobs": True}, "logprobs is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused(body: dict[str, Any], told: str) -> None:
    with pytest.raises(MisuseError) as caught:
        understood(**body)
    assert told in refusal(caught.value)["error"]["message"]


@pytest.mark.parametrize("contents", [b"", b"{no json", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_what_is_no_request_is_refused(contents: bytes) -> None:
    with pytest.raises(MisuseError, match="the request is not"):
        ChatRequest.of(contents)
