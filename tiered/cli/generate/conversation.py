"""A conversation with a model: what was said so far, in messages or as one text, and what the model has computed of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tiered import ManifestError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.cli.generate.answers import Answer
    from tiered.cli.generate.models import ChatTemplate, Computed, ImportedModel, Message, StoredModel

__all__ = ["Conversation"]


class Conversation:
    """Messages by the model's chat template, or without one (``template`` None) a text that goes on.

    ``computed`` stays from one prompt to the next. ``name``: of a conversation that the store keeps; None: it ends with this
    object. Raises MisuseError for one that was begun with a template, without one."""

    def __init__(
        self, model: StoredModel, computed: Computed, template: ChatTemplate | None, name: str | None = None
    ) -> None:
        self._model, self._computed, self._template, self.name = model, computed, template, name
        self.messages: list[Message] = []
        self.tokens: list[int] = []

    @classmethod
    def in_memory(cls, model: StoredModel, template: ChatTemplate | None) -> Conversation:
        """Begin a conversation that nobody goes on with later."""
        return cls(model, model.computed(), template)

    @classmethod
    def kept(cls, model: ImportedModel, template: ChatTemplate | None, name: str) -> Conversation:
        """Go on with the conversation ``name`` in the model's store, or begin it."""
        cache = _KeptCache(model, name)
        if cache.tokens and not cache.note:
            template = None  # it was begun as a text
        found = cls(model, cache, template, name)
        found.tokens = cache.tokens
        if cache.note:
            found.messages = _messages(cache.note, name)
            if template is None:
                raise MisuseError(
                    f"the conversation {name!r} was begun with the model's chat template: leave --raw out, or give --keep "
                    "another name"
                )
        return found

    @property
    def templated(self) -> bool:
        """Whether what is said is a message in the model's chat template."""
        return self._template is not None

    def prompt(self, said: str) -> list[int]:
        """Return all tokens that the model is given, of what was said before and of ``said``."""
        if self._template is not None:
            return self._template.encode([*self.messages, {"role": "user", "content": said}])
        return self.tokens + self._model.text.encode_more(said) if self.tokens else self._model.text.encode(said)

    def resumed(self, ids: list[int]) -> dict[str, Any]:
        """Return the arguments of ``generate`` that go on from what is computed of ``ids``."""
        return self._computed.resumed(ids)

    def keep(self, given: Mapping[str, Any], said: str, ids: list[int], answer: Answer) -> None:
        """Keep the answer to ``said``, which was made with the arguments ``given``."""
        self.tokens = ids + answer.tokens
        if self._template is not None:
            self.messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer.text}]
        if isinstance(self._computed, _KeptCache):
            self._computed.note = json.dumps(self.messages) if self.messages else ""
        if answer.ended == "stopped":
            self._computed.keep_stopped(given, self.tokens)
        else:
            self._computed.keep(given, self.tokens)


class _KeptCache:
    """A ``TieredCache`` in the model's store, with the messages of the conversation as its note."""

    def __init__(self, model: ImportedModel, name: str) -> None:
        from tiered.integrations.transformers import TieredCache

        store = model.store
        kept = name in TieredCache.kept(store)
        self._cache = TieredCache.open(model.model, store, name=name) if kept else TieredCache(model.model, store, name=name)
        if len(self._cache.tokens) > 1:
            raise MisuseError(f"the cache {name!r} has {len(self._cache.tokens)} sequences, and a conversation has one")
        self.tokens: list[int] = self._cache.tokens.flatten().tolist()
        self.note = self._cache.note

    def resumed(self, ids: list[int]) -> dict[str, Any]:
        import torch

        from tiered.integrations.transformers.kv_model import ARGUMENT

        self._cache.reuse(torch.tensor([ids], dtype=torch.int64, device="cpu"))
        return {ARGUMENT: self._cache}

    def keep(self, given: Mapping[str, Any], ids: list[int]) -> None:
        import torch

        self._cache.note = self.note
        self._cache.commit(torch.tensor([ids], dtype=torch.int64, device="cpu"))

    keep_stopped = keep


def _messages(note: str, name: str) -> list[Message]:
    """Return the messages of a kept conversation."""
    try:
        found = json.loads(note)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and all(isinstance(one, dict) and set(map(type, one.values())) == {str} for one in found):
        return found
    raise ManifestError(f"what the store keeps of the conversation {name!r} is damaged: give --keep another name")
