"""What a loop puts into a store, what it leases and for how long, as a trace for the offline optimum.

A tensor must be in memory for as long as its lease lasts. The trace says so by repeating, after each lease that begins and
each put, a read of all that are held: a plan that dropped one of them in between would have to fetch it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bench.optimum import lower_bound
from bench.traces import Access, Trace
from tiered import TensorSpec, TieredStore

__all__ = ["Watched", "least_of_round", "watch"]

_WAYS = {"read": Access.READ, "write": Access.WRITE}


class Watched:
    """``rounds``: the accesses between two calls of ``cut``."""

    def __init__(self) -> None:
        self.rounds: list[list[tuple[str, Access]]] = [[]]
        self.sizes: dict[str, int] = {}
        self.held: list[str] = []

    def cut(self) -> None:
        self.rounds.append([])

    def touched(self, keys: list[str], way: Access, store: TieredStore) -> None:
        for key in keys:
            nbytes = store.spec(key).nbytes
            self.sizes[key] = -(-nbytes // 4096) * 4096
            self.rounds[-1].append((key, way))

    def still(self) -> None:
        self.rounds[-1] += [(key, Access.READ) for key in self.held]

    def trace(self, rounds: list[list[tuple[str, Access]]]) -> Trace:
        accesses = tuple(access for accesses in rounds for access in accesses)
        return Trace({key: self.sizes[key] for key, _ in accesses}, accesses)


def least_of_round(seen: Watched, budget: int) -> float:
    """Return the fewest bytes that cross the link in a round like the first one, of many that follow each other."""
    two, four = (lower_bound(seen.trace(seen.rounds[:1] * count), budget, final_writeback=False) for count in (2, 4))
    return (four - two) / 2


class _WatchedLease:
    """A lease whose begin and end are written down. All else of it is asked of the lease itself."""

    def __init__(self, lease: Any, found: Watched, names: list[str], touched: Callable[[], object]) -> None:
        self._lease, self._found, self._names, self._touched = lease, found, names, touched

    def __enter__(self) -> Any:
        given = self._lease.__enter__()
        self._touched()
        self._found.held += self._names
        self._found.still()
        return given

    def __exit__(self, *raised: Any) -> Any:
        for name in self._names:
            self._found.held.remove(name)
        return self._lease.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)


@contextmanager
def watch(store: TieredStore) -> Iterator[Watched]:
    """Write down what ``store`` is asked for meanwhile."""
    found = Watched()
    lease, create, put, put_temporary, copy_into = (
        *(store.lease, store.create, store.put),
        *(store._put_temporary, store._copy_into),  # of activations
    )

    def watched_lease(keys: Any, *, access: Any = "read", **more: Any) -> _WatchedLease:
        names = [keys] if isinstance(keys, str) else list(keys)
        way = _WAYS[getattr(access, "value", access)]
        return _WatchedLease(lease(keys, access=access, **more), found, names, partial(found.touched, names, way, store))

    def watched_create(key: str, spec: TensorSpec, **more: Any) -> None:
        create(key, spec, **more)
        found.touched([key], Access.PUT, store)
        found.still()

    def watched_put(key: str, tensor: torch.Tensor, **more: Any) -> None:
        put(key, tensor, **more)
        found.touched([key], Access.PUT, store)
        found.still()

    def watched_put_temporary(key: str, contents: torch.Tensor, lifetime: Any) -> None:
        put_temporary(key, contents, lifetime)
        found.touched([key], Access.PUT, store)
        found.still()

    def watched_copy_into(target: torch.Tensor, key: str) -> bool:
        was_there = copy_into(target, key)
        found.touched([key], Access.READ, store)
        found.still()
        return was_there

    watched = {
        "lease": watched_lease,
        "create": watched_create,
        "put": watched_put,
        "_put_temporary": watched_put_temporary,
        "_copy_into": watched_copy_into,
    }
    vars(store).update(watched)
    try:
        yield found
    finally:
        for name in watched:
            delattr(store, name)
