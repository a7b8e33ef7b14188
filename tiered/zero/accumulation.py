"""Several backward passes for one step, over several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tiered import MisuseError
from tiered.zero.home import placement_of

__all__ = ["no_sync"]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes in this block only add up their gradients in this rank's store; the next one outside of it, or
    ``optimizer.step()``, reduces the sums: once, as in ``DistributedDataParallel.no_sync``. Raises MisuseError for a model
    that is not paged. With one process, and with ``zero.Stage1``, that is how it is anyway."""
    for parameter in model.parameters():
        exchange = placement_of(parameter)[0].exchange
        break
    else:
        raise MisuseError("this model has no parameters")
    before, exchange.paused = exchange.paused, True
    try:
        yield
    finally:
        exchange.paused = before
