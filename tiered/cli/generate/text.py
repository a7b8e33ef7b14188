"""Turn prompts into tokens, and tokens into text as they come: by the tokenizer that a store keeps, or a byte a token."""

from __future__ import annotations

import codecs
from typing import Any, Protocol

from tiered import MisuseError
from tiered.integrations.kept import TOKENIZER

__all__ = ["ByteText", "GeneratedText", "TokenizerText", "text_of"]

BYTES = 256


class GeneratedText(Protocol):
    """One generation's tokens and text."""

    def another(self) -> GeneratedText:
        """Return the text of another generation by the same tokenizer."""

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""

    def encode_more(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on after other tokens: none that mark its beginning."""

    def add(self, token: int) -> str:
        """Return the text that is complete with the next token; empty where a character is not."""

    def end(self) -> str:
        """Return the text of what is incomplete after the last token."""


class ByteText:
    """A token is a byte of UTF-8. Others have no text, and are shown by number."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def another(self) -> ByteText:
        return ByteText()

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode(errors="replace"))

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def add(self, token: int) -> str:
        if token < BYTES:
            return self._decoder.decode(bytes([token]))
        return f"{self.end()}<{token}>"

    def end(self) -> str:
        left = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return left


class TokenizerText:
    """Tokens of a ``tokenizer.json``, which is ``tokenizers.Tokenizer``. Special tokens have no text."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream: Any = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._shown = 0

    @classmethod
    def of(cls, contents: bytes) -> TokenizerText:
        """Return the text by a tokenizer whose file has ``contents``. Raises MisuseError for a damaged one."""
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_buffer(contents))
        except Exception as error:  # the package raises nothing more special
            raise MisuseError(f"the store's {TOKENIZER} cannot be read: {error}") from error

    def another(self) -> TokenizerText:
        return TokenizerText(self._tokenizer)

    def encode(self, prompt: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(_text(prompt)).ids
        return tokens

    def encode_more(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(_text(text), add_special_tokens=False).ids
        return tokens

    def add(self, token: int) -> str:
        self._tokens.append(token)
        text: str = self._stream.step(self._tokenizer, token) or ""
        self._shown += len(text)
        return text

    def end(self) -> str:
        whole: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return whole[self._shown :]


def _text(prompt: str) -> str:
    """Return ``prompt``. Raises MisuseError for bytes of a command line that are not UTF-8, which a tokenizer does not take."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        where = f"at character {error.start}"
        raise MisuseError(f"the prompt is not UTF-8 text ({where}), and this model's tokenizer reads text") from None
    return prompt


def text_of(contents: bytes | None, vocabulary: int) -> GeneratedText:
    """Return the text of a model with so many tokens, whose ``tokenizer.json`` has ``contents`` (None: there is none).

    Raises MisuseError where there is none and the model cannot have a token for each byte, and for a damaged one."""
    if contents is not None:
        try:
            return TokenizerText.of(contents)
        except ImportError as error:
            raise MisuseError("the store's tokenizer needs tokenizers: pip install '.[hf]' in a clone") from error
    if vocabulary < BYTES:
        raise MisuseError(
            f"the store keeps no {TOKENIZER} of this model, and bytes are no tokens of one with {vocabulary} tokens: import it "
            "from a folder with its tokenizer"
        )
    return ByteText()
