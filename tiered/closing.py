"""Descriptors are closed once, also where an exception of a signal handler strikes the call that closes them."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller

__all__ = ["Once"]


class Once:
    """Steps that are made once each: ``run``, where it was struck, goes on with the one after the last that was begun.

    A step is a function of C's with its arguments (``partial(os.close, fd)``). To take it and to make it is one call, so no
    signal handler runs between these two.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._left = map(methodcaller("__call__"), iter(steps))
        self._count = len(steps)

    def run(self) -> None:
        """Make the steps that are left. What the system answers counts for nothing."""
        for _ in range(self._count):
            try:  # noqa: SIM105 - nothing but builtins: a module is empty when the interpreter ends, and finalizers run then
                next(self._left, None)
            except OSError:
                pass
