"""A store as a mapping from names to tensors: what a ``dict`` of tensors can do, in terms of a store's own calls.

A store is no ``dict``: values that it returns are copies, and it is never compared, because that would read all of it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from fnmatch import fnmatchcase
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, overload

import torch

from tiered.errors import KeyNotFound, MisuseError, expect_type
from tiered.types import Key

if TYPE_CHECKING:
    import numpy

__all__ = ["MISSING", "Items", "Keys", "Pairs", "TensorMapping", "Values", "as_stored", "pairs_of"]

Default = TypeVar("Default")
MISSING: Any = object()
"""The default of an argument for which None is a value."""


class TensorMapping(ABC):
    """What is the same for any mapping from names to tensors."""

    @abstractmethod
    def __iter__(self) -> Iterator[Key]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def put(self, key: Key, tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def delete(self, key: Key) -> None: ...

    @overload
    def get(self, key: Key) -> torch.Tensor: ...
    @overload
    def get(self, key: Key, default: Default) -> torch.Tensor | Default: ...
    @abstractmethod
    def get(self, key: Key, default: Any = MISSING) -> Any: ...

    @abstractmethod
    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]: ...

    def __getitem__(self, key: Key) -> torch.Tensor:
        """Return ``get(key)``, a copy: to change a tensor in place, lease it."""
        if isinstance(key, list | tuple):
            raise MisuseError("store[key] is one tensor: get_many(keys) returns a list of them")
        return self.get(key)

    def __setitem__(self, key: Key, value: torch.Tensor | numpy.ndarray[Any, Any]) -> None:
        """Store a copy of ``value``, a tensor or a NumPy array, as ``put`` does."""
        self.put(key, as_stored(key, value))

    def __delitem__(self, key: Key) -> None:
        """Delete ``key`` as ``delete`` does."""
        self.delete(key)

    def keys(self, pattern: str | None = None) -> Keys:
        """Return a view of the keys: of all, or of those that match ``pattern``, as in a shell: ``"layer.*"``."""
        return Keys(self, pattern)

    def values(self, pattern: str | None = None) -> Values:
        """Return a view of the tensors, copies that are read one after the other as a loop asks for them."""
        return Values(self, pattern)

    def items(self, pattern: str | None = None) -> Items:
        """Return a view of pairs of key and tensor, which are read one after the other as a loop asks for them."""
        return Items(self, pattern)

    @overload
    def pop(self, key: Key) -> torch.Tensor: ...
    @overload
    def pop(self, key: Key, default: Default) -> torch.Tensor | Default: ...
    def pop(self, key: Key, default: Any = MISSING) -> Any:
        """Delete ``key`` and return what it was, or ``default`` where there is none. Two calls, ``get`` and ``delete``: what
        another thread puts in between is lost. Raises KeyNotFound without a default, and what both raise."""
        found = self.get(key, default)
        if found is default:
            return default
        try:
            self.delete(key)
        except KeyNotFound:  # of two threads that pop one tensor, one has it
            if default is MISSING:
                raise
            return default
        return found

    def popitem(self) -> tuple[Key, torch.Tensor]:
        """Delete one tensor, whichever, and return its key and what it was: ``pop`` of a key that is there. Raises KeyNotFound
        where there is none, and what ``pop`` raises."""
        while (key := self._any_key()) is not None:
            found = self.pop(key, None)
            if found is not None:  # otherwise another thread has deleted it
                return key, found
        raise KeyNotFound(f"there is no tensor to pop in {self}")

    def setdefault(self, key: Key, default: torch.Tensor | numpy.ndarray[Any, Any]) -> torch.Tensor:
        """Return ``get(key)``, where there is none after ``self[key] = default``: a copy, too. What another thread puts in
        between is replaced. Raises what ``get`` and ``put`` raise."""
        found = self.get(key, None)
        if found is None:
            self[key] = default
            found = self.get(key)
        return found

    def clear(self) -> None:
        """Delete every tensor that is there, one after the other, as ``delete`` does: after an exception those before are
        gone. Raises what ``delete`` raises."""
        for key in list(self):
            try:
                self.delete(key)
            except KeyNotFound:  # another thread has deleted it
                continue

    def update(self, tensors: Pairs = (), /, **more: torch.Tensor) -> None:
        """Put all tensors of a mapping (``model.state_dict()``, another store), or of pairs, under their names, one after the
        other: after an exception those before are stored. What has ``keys()`` and ``[key]`` is a mapping. Raises what ``put``
        raises."""
        for key, value in pairs_of(tensors, more):
            self[key] = value

    def _any_key(self) -> Key | None:
        """Return a key; None where there is none."""
        return next(iter(self), None)


class WithKeys(Protocol):
    """What ``update`` takes for a mapping, as that of ``dict`` does."""

    def keys(self) -> Iterable[Key]: ...
    def __getitem__(self, key: Key, /) -> torch.Tensor: ...


Pairs = TensorMapping | Mapping[Key, torch.Tensor] | WithKeys | Iterable[tuple[Key, torch.Tensor]]
"""What ``update`` is given."""


def pairs_of(tensors: Pairs, more: Mapping[str, torch.Tensor]) -> Iterator[tuple[Key, Any]]:
    """Iterate over the pairs of key and tensor that ``update`` is given. Raises MisuseError for what is no pair."""
    given: Any = tensors
    pairs: Iterable[Any] = given
    if isinstance(tensors, Mapping | TensorMapping):
        pairs = tensors.items()
    elif hasattr(tensors, "keys"):
        pairs = ((key, given[key]) for key in given.keys())  # noqa: SIM118 (it need not be iterable)
    else:
        expect_type(tensors, Iterable, "update is given a mapping, or pairs of a key and a tensor")
    for pair in chain(pairs, more.items()):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise MisuseError(f"update is given a mapping, or pairs of a key and a tensor, not {pair!r:.100}")
        yield pair[0], pair[1]


def as_stored(key: Key, value: Any) -> torch.Tensor:
    """Return ``value`` as a tensor, without a copy where that is possible. Raises MisuseError for what is neither a tensor nor
    a NumPy array that torch can hold."""
    if isinstance(value, torch.Tensor):
        return value
    found = sys.modules.get("numpy")
    if found is not None and isinstance(value, (found.ndarray, found.generic)):
        try:
            array = found.asarray(value)
            plain = array.flags.c_contiguous and array.flags.writeable and min(array.strides, default=0) >= 0
            return torch.from_numpy(array if plain else found.array(array, order="C"))
        except (TypeError, ValueError) as error:
            raise MisuseError(f"{key!r} is an array of {value.dtype}, which torch does not hold: convert it first") from error
    raise MisuseError(
        f"{key!r}: a store holds tensors, not {type(value).__name__}: give a tensor (torch.as_tensor makes one) or an array"
    )


class _View:
    """Keys as of when a loop begins; ``pattern`` None: all."""

    _mapping: TensorMapping

    def __init__(self, mapping: TensorMapping, pattern: str | None) -> None:
        expect_type(pattern, str | None, "a pattern is a text such as 'layer.*'")
        super().__init__(cast("Any", mapping))  # type: ignore[call-arg]
        self._pattern = pattern

    def _keys(self) -> Iterator[Key]:
        for key in self._mapping:
            if self._has(key):
                yield key

    def _has(self, key: object) -> bool:
        return isinstance(key, str) and (self._pattern is None or fnmatchcase(key, self._pattern))

    def __len__(self) -> int:
        return len(self._mapping) if self._pattern is None else sum(1 for _ in self._keys())

    def __repr__(self) -> str:
        which = "" if self._pattern is None else f" that match {self._pattern!r}"
        return f"<{type(self).__name__.lower()} of {len(self)} tensors{which} in {self._mapping}>"


class Keys(_View, KeysView[Key]):
    """Keys of a store, like those of a ``dict``: a set that is always up to date."""

    def __contains__(self, key: object) -> bool:
        return self._has(key) and key in self._mapping

    def __iter__(self) -> Iterator[Key]:
        return self._keys()


class Values(_View, ValuesView[torch.Tensor]):
    """Copies of a store's tensors."""

    def __contains__(self, value: object) -> bool:
        raise MisuseError(f"to look for a value would read all of {self._mapping}: loop over values() where that is wanted")

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._mapping.in_order(list(self._keys()))


class Items(_View, ItemsView[Key, torch.Tensor]):
    """Keys and copies of a store's tensors."""

    def __contains__(self, item: object) -> bool:
        raise MisuseError(f"{self._mapping} is not asked for a pair: compare store[key] with the tensor (torch.equal)")

    def __iter__(self) -> Iterator[tuple[Key, torch.Tensor]]:
        keys = list(self._keys())
        return zip(keys, self._mapping.in_order(keys), strict=True)
