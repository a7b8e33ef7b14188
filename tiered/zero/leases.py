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

from tiered.errors import TieredError
from tiered.store import TieredStore
from tiered.types import Owner

__all__ = ["Leases", "Opened", "Registered"]


class Leases:
    """Open leases of one owner, a model. They end with this object, which the model has: whatever an exception left open in a
    backward pass does not outlive the model."""

    def __init__(self) -> None:
        self._open: dict[Registered, None] = {}

    @staticmethod
    def of(store: TieredStore, owner: Owner) -> Leases:
        """Return those of ``owner`` in ``store``, the same for all who ask while somebody has them."""
        known = store.attached.made(_Known, _Known)
        found = known.get(owner)
        return known.setdefault(owner, Leases()) if found is None else found

    def registered(self, lease: AbstractContextManager[Any]) -> Registered:
        return Registered(self._open, lease)

    def end(self) -> None:
        """End all, because their holders are gone."""
        for lease in list(self._open):
            with suppress(TieredError):  # what was written to under READ has been told, or is given up
                lease.__exit__(None, None, None)
            self._open.pop(lease, None)


class Registered:
    """Lease that is registered from before it is granted until after it has ended. Ending it twice does no harm."""

    __slots__ = ("_lease", "_open")

    def __init__(self, books: dict[Registered, None], lease: AbstractContextManager[Any]) -> None:
        self._open = books
        self._lease: Any = lease

    def __enter__(self) -> Any:
        self._open[self] = None
        return self._lease.__enter__()

    @property
    def unsaved(self) -> bool:
        return bool(self._lease.unsaved)

    @property
    def saving(self) -> bool:
        return bool(self._lease.saving)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.__exit__(kind, error, trace)
        self._open.pop(self, None)


class Opened:
    """One lease at a time that outlives the call which takes it."""

    def __init__(self) -> None:
        self._lease: Any = None

    def open(self, lease: AbstractContextManager[Any]) -> torch.Tensor:
        """Take ``lease`` and return its tensor; end first what an interruption left."""
        self.close()
        self._lease = lease
        tensor: torch.Tensor = lease.__enter__()
        return tensor

    @property
    def unsaved(self) -> bool:
        """Whether a lease is open whose memory alone has the bytes of its tensor: see the leases of the store."""
        return self._lease is not None and bool(self._lease.unsaved)

    @property
    def saving(self) -> bool:
        """Whether a commit has yet to write the tensor of the lease that is open: see the leases of the store."""
        return self._lease is not None and bool(self._lease.saving)

    def close(self) -> None:
        """End the lease. Idempotent; the next call completes what is interrupted here."""
        if self._lease is not None:
            self._lease.__exit__(None, None, None)
            self._lease = None


class _Known(weakref.WeakValueDictionary[Owner, Leases]):
    """The open leases in a store, by their owners."""
