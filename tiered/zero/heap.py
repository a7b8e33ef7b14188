"""Memory that was freed goes back to the system before more is taken from it.

glibc keeps what was freed for later: after gradients and initial values of many MiB came and went, hundreds of MiB stayed
with the process, in nobody's budget. malloc_trim(3) gives them back. Elsewhere there is no such call, and this does nothing.
"""

from __future__ import annotations

import ctypes
import os

import psutil

from tiered.memory import headroom

__all__ = ["Trimmer"]

SHARE = 4
MOST = 256 << 20
"""A process may grow by this share of what it has, and of what it may still take, and so many bytes at most, before it is
trimmed."""


class Trimmer:
    """Looks after ``every`` bytes (8 MiB at least), and trims where the process has grown by more than these, and by a quarter,
    or by a quarter of what it could have grown by, beyond what it had after it was trimmed before.

    What was trimmed must be faulted in anew, page by page: a step that trims after every few gradients takes a third longer,
    one that trims its activations a tenth. So a process that has come back to the size at which it was trimmed is left alone,
    unless little is left, and trimmed again where it is larger than ever. What glibc keeps and gives out again makes nothing
    grow.
    """

    def __init__(self, every: int) -> None:
        self._every, self._passed = max(8 << 20, every), 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._most = self._resident()
        self._before = 0  # what it had when it was trimmed last

    def passed(self, nbytes: int) -> None:
        """``nbytes`` were allocated and freed."""
        self._passed += nbytes
        if self._passed >= self._every:
            self._passed = 0
            resident = self._resident()
            grown = resident - self._most
            if grown <= self._every:  # as a rule
                return
            allowed = max(self._every, min(self._most // SHARE, MOST, (headroom() + grown) // SHARE))
            if grown <= allowed:
                return
            plenty = headroom() >= min(self._before // SHARE, MOST)
            if plenty and resident <= self._before + allowed:  # it came back to that: it uses what was trimmed
                self._most = resident
            else:
                self.trim()

    def trim(self) -> None:
        self._passed = 0
        if self._trim is not None:
            self._before = self._resident()
            self._trim(0)
            self._most = max(self._most, self._resident())

    def _resident(self) -> int:
        """Bytes of memory that the process has."""
        return int(psutil.Process(os.getpid()).memory_info().rss) if self._trim is not None else 0
