"""Register the leases of models before they are granted, so that whoever comes after an interruption can end them.

An exception of a signal handler may strike between the grant of a lease and the line that would have remembered it, or where a
``with`` block ends before it has called anything. Such a lease has no owner any more; here it is registered.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

import torch

from tiered import Owner, TieredError, TieredStore

__all__ = ["Leases", "Opened", "Registered"]

class Leases:
    """Open leases of one store's models. ``of`` returns those of a store."""

    def __init__(self) -> None:
        self._open: dict[Registered, Owner] = {}

    @staticmethod
    def of(store: TieredStore) -> Leases:
        found = _leases.get(store)
        return _leases.setdefault(store, Leases()) if found is None else found

    def registered(self, lease: AbstractContextManager[Any], owner: Owner) -> Registered:
        return Registered(self._open, lease, owner)

    def end(self, owner: Owner) -> None:
        """End the leases of ``owner``, whose holders are gone."""
        for lease in [lease for lease, holder in list(self._open.items()) if holder == owner]:
            with suppress(TieredError):  # what was written to under READ has been told, or is given up
                lease.__exit__(None, None, None)
            self._open.pop(lease, None)


class Registered:
    """Lease that is registered from before it is granted until after it has ended. Ending it twice does no harm."""

    __slots__ = ("_lease", "_open", "_owner")

    def __init__(self, books: dict[Registered, Owner], lease: AbstractContextManager[Any], owner: Owner) -> None:
        self._open, self._lease, self._owner = books, lease, owner

    def __enter__(self) -> Any:
        self._open[self] = self._owner
        return self._lease.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.__exit__(kind, error, trace)
        self._open.pop(self, None)


class Opened:
    """One lease at a time that outlives the call which takes it."""

    def __init__(self) -> None:
        self._lease: AbstractContextManager[Any] | None = None

    def open(self, lease: AbstractContextManager[Any]) -> torch.Tensor:
        """Take ``lease`` and return its tensor; end first what an interruption left."""
        self.close()
        self._lease = lease
        tensor: torch.Tensor = lease.__enter__()
        return tensor

    def close(self) -> None:
        """End the lease. Idempotent; the next call completes what is interrupted here."""
        if self._lease is not None:
            self._lease.__exit__(None, None, None)
            self._lease = None


_leases: weakref.WeakKeyDictionary[TieredStore, Leases] = weakref.WeakKeyDictionary()
"""The open leases of each store."""
