"""``offload_activations``: what autograd saves within a block goes to a store, and comes back in backward."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import TracebackType

from torch.autograd.graph import saved_tensors_hooks

from tiered import MisuseError, TieredStore
from tiered.activations.keeper import Counters, Keeper
from tiered.types import Access, format_size, parse_size

__all__ = ["PREFIX", "ActivationOffload", "ActivationStatistics", "offload_activations", "statistics_of"]

PREFIX = "activations"
"""Keys of saved activations are below it. Nobody else's: what a process left there, the next one deletes."""


@dataclass(frozen=True)
class ActivationStatistics:
    """What happened to activations that were saved for backward.

    ``tensors``: how many pieces of memory were saved, ``saved``: their bytes; views of one piece count once. ``offloaded``:
    bytes that were written to the store, ``restored``: bytes that were read from it, ``ready``: of these, bytes that were in
    the memory of the store when backward asked for them. ``forward_waited``: seconds that forward waited for room in memory;
    ``backward_waited``: seconds that backward took for what was not in memory, copies included. ``largest_held``: the most
    bytes that were in memory for the sake of backward alone. ``alive``: pieces that a graph still needs.
    """

    tensors: int
    saved: int
    offloaded: int
    restored: int
    ready: int
    forward_waited: float
    backward_waited: float
    largest_held: int
    alive: int

    def __str__(self) -> str:
        if not self.offloaded:
            return f"{format_size(self.saved)} of activations saved, none offloaded: all fit in what is kept in memory"
        share = self.ready / self.restored if self.restored else 0.0
        return (
            f"{format_size(self.saved)} of activations saved, {format_size(self.offloaded)} offloaded, "
            f"{format_size(self.restored)} restored ({share:.0%} were there in time); forward waited "
            f"{self.forward_waited:.2f} s, backward {self.backward_waited:.2f} s"
        )


def statistics_of(keeper: Keeper, since: Counters | None = None) -> ActivationStatistics:
    """Return what a keeper counted, as far as that adds up: ``since`` an earlier state."""
    alive, now = keeper.alive, keeper.counters
    before = Counters() if since is None else since
    return ActivationStatistics(
        tensors=now.tensors - before.tensors,
        saved=now.saved - before.saved,
        offloaded=now.offloaded - before.offloaded,
        restored=now.restored - before.restored,
        ready=now.ready - before.ready,
        forward_waited=now.forward_waited - before.forward_waited,
        backward_waited=now.backward_waited - before.backward_waited,
        largest_held=now.largest_held,
        alive=alive,
    )


class ActivationOffload:
    """Context manager that ``offload_activations`` returns. It may be entered again, once for each step."""

    def __init__(self, keeper: Keeper, keep: int, least: int) -> None:
        self._keeper, self._keep, self._least = keeper, keep, least
        self._since = keeper.counters.copy()
        self._hooks: list[saved_tensors_hooks] = []

    def statistics(self) -> ActivationStatistics:
        """Return what happened since ``offload_activations`` was called, in all blocks on this store."""
        return statistics_of(self._keeper, self._since)

    def __enter__(self) -> ActivationOffload:
        self._keeper.keep, self._keeper.least = self._keep, self._least
        hooks = saved_tensors_hooks(self._keeper.pack, self._keeper.unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.pop().__exit__(kind, error, trace)


def offload_activations(store: TieredStore, keep: int | str = "64MiB", min_bytes: int | str = "256KiB") -> ActivationOffload:
    """Keep in ``store`` what autograd saves for backward within the block::

        with tiered.offload_activations(store):
            loss = model(batch).sum()
        loss.backward()

    For any model of torch on the CPU or on the store's device. Forward writes what was saved first, while it goes on; backward
    has it fetched before it is needed, in reverse order. Values, strides and element types are those that were saved, so that
    gradients have the same bits. A tensor that is saved twice, or views of it, is stored once.

    ``keep``: bytes of what was saved last that stay in memory, and are not written; of what nothing else uses. Writing begins
    at half of it, and forward waits where it is exceeded. ``min_bytes``: smaller tensors stay in memory. What something else
    uses, such as parameters, buffers and the batch of the caller, stays where it is while that is so. As in torch, backward
    raises RuntimeError where a saved tensor was written to.

    Tensors in the store are named ``activations/NUMBER`` and deleted with the graph. A commit while a graph is alive has them,
    too; they are deleted when a process next calls this.

    Returns a context manager; its ``statistics()`` say what happened. Blocks on one store share their memory, and ``keep`` and
    ``min_bytes`` are those of the block that was entered last.

    Raises MisuseError for sizes that are none, and for a store that is open for reading. Within the block functions of torch
    raise what the store raises when something cannot be written (WriteError, CapacityError): the forward has failed then, and
    the next one may be tried. Backward raises what the store raises when something cannot be read (ReadError, CorruptionError).
    """
    if store.access is Access.READ:
        raise MisuseError(f"{store} is open for reading: activations are written, so open it with access='write'")
    most, least = parse_size(keep), parse_size(min_bytes)
    keeper = _keepers.get(store)
    if keeper is None:
        keeper = _keepers[store] = Keeper(store, PREFIX, most, least)
    return ActivationOffload(keeper, most, least)


_keepers: weakref.WeakKeyDictionary[TieredStore, Keeper] = weakref.WeakKeyDictionary()
"""By open store: graphs of several blocks may be alive at a time."""
