"""What a cache learns from a model of ``transformers``: which of its layers have which state, and which ids its forwards have.

A model that has caches is watched by hooks around its forward. ``generate`` gives a forward only the ids that the cache lacks,
so ids are compared one call earlier, in ``prepare_inputs_for_generation``, which is given all of them.
"""

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, get_layer_types_and_kwargs
from transformers.generation.utils import GenerationMixin

from tiered.errors import MisuseError

__all__ = ["ARGUMENT", "NO_STATE", "RecentCache", "WatchingCache", "unwatch", "watch", "windows"]

NAMES = ("cache", "past_key_values")
"""What ``transformers`` calls the cache among a forward's arguments: since 5.24, and before it."""
ARGUMENT = next(name for name in NAMES if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)
"""Which of them the installed one does."""

FULL, WINDOWED = ("full_attention",), ("sliding_attention", "chunked_attention")
"""Kinds of layers whose state is the keys and values of tokens, in the words of ``transformers``."""
WATCH = "_tiered_caches"
"""The attribute of a model that has its ``_Watch``."""
NO_STATE = "no state"
"""A layer that has no keys and values of its own: it uses another layer's, or is no attention."""


class WatchingCache(Cache):
    """A cache that is told of the forwards it is given to."""

    @abstractmethod
    def begin(self, model: Any, given: Mapping[str, Any]) -> None:
        """Note the arguments of a forward of ``model`` that begins. Raises MisuseError where it cannot go on from the cache."""

    @abstractmethod
    def end(self, output: Any) -> None:
        """Note that the forward has ended; ``output`` is None where an exception ended it."""

    @abstractmethod
    def new_of(self, input_ids: Any, new: int | None) -> int | None:
        """Return how many of ``input_ids`` are to be computed, of which ``generate`` says ``new``; None: all, because these are
        the new ones only. Raises MisuseError where those before are not the cache's."""


def windows(model: Any) -> list[Any]:
    """Return of each layer its window, None for one without, ``NO_STATE`` for one without keys and values of its own.

    Raises MisuseError for a model that has other states.
    """
    config = getattr(model, "config", None)
    if config is None or not isinstance(model, torch.nn.Module):
        raise MisuseError(f"TieredCache(model, store): the model is one of transformers, not {model!r:.100}")
    kind = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise MisuseError(f"a {kind} attends to an encoder, too, whose keys and values a TieredCache does not keep")
    if config.get_text_config(decoder=True) is not config:
        raise MisuseError(f"a {kind} sees more than text, and a TieredCache knows its tokens by their ids")
    found: list[Any] = []
    for layer, given in zip(*get_layer_types_and_kwargs(config), strict=True):
        if layer not in (*FULL, *WINDOWED, "dummy"):
            raise MisuseError(
                f"a {kind} has layers of {layer!r}, whose state is more than the keys and values of tokens: generate without "
                "a TieredCache"
            )
        found.append(NO_STATE if layer == "dummy" else given.get("sliding_window"))
    return found


class RecentCache:
    """Keys and values of the tokens that a model was last given, in memory, from one ``generate`` to the next."""

    def __init__(self, model: Any) -> None:
        self._model, self._ids = model, list[int]()
        self._cache: Any = None
        try:
            self._crops = all(window in (None, NO_STATE) for window in windows(model))
        except MisuseError:  # a model with other states
            self._crops = False

    def resumed(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of ``generate`` that go on from what is computed of ``ids``: all but the last at most."""
        cache, self._cache = self._cache, None
        shared = next((n for n, (a, b) in enumerate(zip(self._ids, ids[:-1], strict=False)) if a != b), None)
        shared = min(len(self._ids), len(ids) - 1) if shared is None else shared
        if cache is None or not shared or (shared < len(self._ids) and not self._crops):
            cache = DynamicCache(config=self._model.config)
        elif shared < len(self._ids):
            cache.crop(shared - len(self._ids))
        return {ARGUMENT: cache}

    def keep(self, given: Mapping[str, Any], ids: Sequence[int]) -> None:
        """Keep what ``generate`` has computed with the arguments ``given``. ``ids``: all tokens, of which the last is not."""
        self._cache, self._ids = given[ARGUMENT], list(ids[:-1])

    def keep_stopped(self, given: Mapping[str, Any], ids: Sequence[int]) -> None:
        """Keep it where an exception has ended ``generate``, unless that was within a forward: some layers then have a token
        that others have not."""
        found = {layer.get_seq_length() for layer in given[ARGUMENT].layers} if self._crops else set()
        if found - {0} == {len(ids) - 1}:
            self.keep(given, ids)


def _given(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a forward by their names."""
    return {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs} if args else kwargs


def _cache_of(given: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a forward, by either of its names."""
    return next((given[name] for name in NAMES if given.get(name) is not None), None)


def _before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = _given(model, args, kwargs)
    past = _cache_of(given)
    if isinstance(past, WatchingCache):
        past.begin(model, given)
    elif isinstance(past, EncoderDecoderCache) and (
        isinstance(past.self_attention_cache, WatchingCache) or isinstance(past.cross_attention_cache, WatchingCache)
    ):
        raise MisuseError("a TieredCache is not part of an EncoderDecoderCache: give it alone")


def _after(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    past = _cache_of(_given(model, args, kwargs))
    if isinstance(past, WatchingCache):
        past.end(output)


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``prepare_inputs_for_generation`` of a model's class that compares ids first: only there are all of them seen."""

    @wraps(original)
    def prepare_inputs_for_generation(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        past = _cache_of(kwargs)
        if isinstance(past, WatchingCache):
            kwargs["next_sequence_length"] = past.new_of(input_ids, kwargs.get("next_sequence_length"))
        return original(self, input_ids, *args, **kwargs)

    return prepare_inputs_for_generation


class _Watch:
    """The hooks of a model that has ``caches``. The model has it, and a copy of the model one without caches."""

    def __init__(self) -> None:
        self.caches: weakref.WeakSet[WatchingCache] = weakref.WeakSet()
        self.handles: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()

    @staticmethod
    def of(model: Any) -> _Watch | None:
        found: _Watch | None = model.__dict__.get(WATCH)
        return found

    def begin(self, model: Any) -> None:
        model.__dict__[WATCH] = self
        if _before not in model._forward_pre_hooks.values():  # a copy of a model that is watched has its hooks
            self.handles = [
                model.register_forward_pre_hook(_before, with_kwargs=True),
                model.register_forward_hook(_after, with_kwargs=True, always_call=True),
            ]
            original = getattr(type(model), "prepare_inputs_for_generation", None)
            if original is not None:
                model.prepare_inputs_for_generation = MethodType(_checking(original), model)

    def end(self, model: Any) -> None:
        for handle in self.handles:
            handle.remove()
        model.__dict__.pop("prepare_inputs_for_generation", None)
        model.__dict__.pop(WATCH, None)


def watch(model: Any, cache: WatchingCache) -> None:
    found = _Watch.of(model)
    if found is None:
        found = _Watch()
        found.begin(model)
    found.caches.add(cache)
    weakref.finalize(cache, _unwatch_gone, weakref.ref(model))


def unwatch(model: Any, cache: WatchingCache) -> None:
    found = _Watch.of(model)
    if found is not None:
        found.caches.discard(cache)
        _unwatch_gone(weakref.ref(model))


def _unwatch_gone(reference: Callable[[], Any]) -> None:
    model = reference()
    found = None if model is None else _Watch.of(model)
    if found is not None and next(iter(found.caches), None) is None:  # not its length, which counts the one that goes now
        found.end(model)
