"""What a key may hold while several threads read and write it: a register of versions, checked exactly.

A reader may find a version whose writing began before the reading ended, unless another one was written entirely after that and
entirely before the reading began. All times are ticks of one counter.
"""

from __future__ import annotations

import enum
import itertools
import threading
from dataclasses import dataclass

import torch

__all__ = ["LARGEST", "Kind", "Ledger", "Mutation", "key_of", "pattern", "version_of"]

LARGEST = 2048
"""Words of 8 bytes in the largest tensor."""
_PLACES = torch.arange(LARGEST, dtype=torch.int64)
_TICKS = itertools.count(1)


class Kind(enum.Enum):
    BYTES = "a pattern"
    UNDEFINED = "created, and not filled yet"
    ABSENT = "deleted, or never put"


@dataclass(eq=False, slots=True)
class Mutation:
    """``words`` None: as many as there were."""

    kind: Kind
    version: int
    words: int | None
    began: int
    ended: int | None = None


def pattern(key: int, version: int, words: int) -> torch.Tensor:
    """int64 of shape (words,): whose, which version, and which place each word is."""
    return _PLACES[:words] + ((key << 44) | (version << 12))


def version_of(found: torch.Tensor, key: int) -> int | None:
    """None where it is not one whole pattern of ``key``."""
    base = int(found[0])
    whole = torch.equal(found - base, _PLACES[: len(found)])
    return (base >> 12) & 0xFFFFFFFF if whole and base >> 44 == key and base & 0xFFF == 0 else None


def key_of(found: torch.Tensor) -> int | None:
    """Whose words these are, of whatever versions; None where they are not all of one key."""
    keys = found >> 44
    return int(keys[0]) if bool((keys == keys[0]).all()) else None


class Ledger:
    """Of one key."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._lock = threading.Lock()
        self._versions = itertools.count(1)
        self._mutations = [Mutation(Kind.ABSENT, 0, 0, 0, 0)]
        self._readers: dict[object, int] = {}

    def begin(self, kind: Kind, words: int | None) -> Mutation:
        with self._lock:
            mutation = Mutation(kind, next(self._versions), words, next(_TICKS))
            self._mutations.append(mutation)
            return mutation

    def failed(self, mutation: Mutation) -> None:
        """It changed nothing."""
        with self._lock:
            self._mutations.remove(mutation)

    def succeeded(self, mutation: Mutation) -> None:
        with self._lock:
            mutation.ended = next(_TICKS)
            since = min(self._readers.values(), default=next(_TICKS))
            self._mutations = [m for m in self._mutations if not self._superseded(m, since)]

    def reader(self) -> object:
        """Somebody begins to read."""
        with self._lock:
            token = object()
            self._readers[token] = next(_TICKS)
            return token

    def gone(self, token: object) -> None:
        """Reading ended without a result."""
        with self._lock:
            del self._readers[token]

    def read(self, token: object, found: torch.Tensor | None, mine: Mutation | None = None) -> None:
        """Assert that ``found`` (int64 of shape (words,); None: no such key) is what a reader may find. ``mine`` is the
        reader's own mutation, which has not happened yet."""
        with self._lock:
            began = self._readers.pop(token)
            allowed = [m for m in self._mutations if m is not mine and not self._superseded(m, began)]
        if found is None:
            good = any(m.kind is Kind.ABSENT for m in allowed)
        else:
            present = [m for m in allowed if m.kind is not Kind.ABSENT and m.words in (None, len(found))]
            version = version_of(found, self.number) if len(found) else None
            good = any(m.kind is Kind.UNDEFINED or not len(found) or m.version == version for m in present)
        if not good:
            words = None if found is None else [hex(int(word)) for word in found[:4]]
            size = None if found is None else len(found)
            raise AssertionError(f"key {self.number}: found {size} words, {words}; may be one of {allowed}")

    def _superseded(self, mutation: Mutation, before: int) -> bool:
        """Whether another one came entirely after ``mutation`` and entirely before the tick ``before``."""
        end = mutation.ended
        if end is None:
            return False
        return any(m.ended is not None and end < m.began and m.ended < before for m in self._mutations)
