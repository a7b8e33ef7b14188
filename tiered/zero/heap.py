"""Memory that was freed goes back to the system.

glibc keeps what was freed for later: after gradients and initial values of many MiB came and went, hundreds of MiB stayed
with the process, in nobody's budget. malloc_trim(3) gives them back. Elsewhere there is no such call, and this does nothing.
"""

from __future__ import annotations

import ctypes

__all__ = ["Trimmer"]


class Trimmer:
    """Trims once ``every`` bytes (8 MiB at least) came and went. What was trimmed must be faulted in anew, so not always."""

    def __init__(self, every: int) -> None:
        self._every, self._passed = max(8 << 20, every), 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def passed(self, nbytes: int) -> None:
        """``nbytes`` were allocated and freed."""
        self._passed += nbytes
        if self._passed >= self._every:
            self.trim()

    def trim(self) -> None:
        self._passed = 0
        if self._trim is not None:
            self._trim(0)
