"""Tell that memory gets tight before it does: a process beyond its cgroup's limit is killed without a word.

``MemoryWatch.look`` compares what the process may still take with what it is known to take yet: pages of the pool that were not
used so far, and what it grew by from look to look. A paged model looks after each forward, when activations are most.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tiered.errors import MisuseError, StoreClosed, expect_type
from tiered.store.store import TieredStore
from tiered.system import to_stay_free
from tiered.telemetry import MemoryStatistics
from tiered.types import format_size, parse_size

__all__ = ["MemoryNotice", "MemoryWatch"]

logger = logging.getLogger("tiered")

LOOKS = 6
"""Looks from which growth is taken: memory of each of them is compared with that of the one before."""
LOOKS_AHEAD = 20
"""Looks ahead for which the present growth is told."""
SELDOM = 0.25
"""Seconds between two looks, at least: a look asks the system, and costs some tenths of a millisecond."""


@dataclass(frozen=True)
class MemoryNotice:
    """What a watch tells: ``left`` bytes may still be taken beyond those that the pool will take; ``growth``: bytes that the
    process takes more from look to look, of late; ``looks``: after how many of them nothing but the reserve is left, None where
    that is so now. ``memory``: where it is."""

    left: int
    growth: int
    looks: int | None
    memory: MemoryStatistics

    def __str__(self) -> str:
        found = self.memory
        where = (
            f"the process has {format_size(found.process)}, {format_size(found.beyond)} of it beyond the pool, and "
            f"{format_size(found.headroom)} of headroom, of which the pool takes {format_size(found.unused)} when it is full"
        )
        limit = "" if found.limit is None else f"; the limit of its cgroup is {format_size(found.limit)}"
        if self.looks is None:
            what = f"memory gets tight: {format_size(max(0, self.left))} left"
        else:
            what = f"memory grows by {format_size(self.growth)} a step, and gets tight after about {self.looks} more"
        return f"{what}: {where}{limit}"


class MemoryWatch:
    """Tells once that memory of the process gets tight, and again when it was not, or half as much is left.

    ``tell`` is called with a ``MemoryNotice`` (default: the logger ``tiered`` warns) in the thread that looks. ``reserve``:
    bytes (or "512MiB") that are to stay free (default: 64 MiB, or a sixteenth of what the process may take now). A model that
    is paged into ``store`` looks after each forward; a loop of your own calls ``look``. A store has one watch: a new one
    replaces it. Raises MisuseError for what is no store, and for a ``tell`` that cannot be called.
    """

    def __init__(
        self, store: TieredStore, tell: Callable[[MemoryNotice], object] | None = None, *, reserve: int | str | None = None
    ) -> None:
        expect_type(store, TieredStore, "MemoryWatch watches the process of a TieredStore")
        if tell is not None and not callable(tell):
            raise MisuseError(
                f"MemoryWatch: tell is a function that is called with a MemoryNotice, not {tell!r}; bytes that are to stay "
                "free are reserve="
            )
        self._store = weakref.ref(store)
        self._tell = tell
        found = store.statistics().memory
        least = to_stay_free(found.headroom + found.process) if reserve is None else parse_size(reserve, "reserve")
        self.reserve = least
        self._beyond: deque[int] = deque(maxlen=LOOKS)
        self._looked = float("-inf")
        self._told: int | None = None
        self._most: MemoryStatistics | None = None
        store.attached.put(MemoryWatch, self)

    @staticmethod
    def of(store: TieredStore) -> MemoryWatch:
        """Return the watch of ``store``, which is made where there is none."""
        expect_type(store, TieredStore, "the memory of a TieredStore is watched")
        found = store.attached.find(MemoryWatch)
        return MemoryWatch(store) if found is None else found

    def look(self) -> MemoryNotice | None:
        """Look at memory, at most four times a second, and tell where it gets tight; return what was told."""
        now, store = time.monotonic(), self._store()
        if store is None or now - self._looked < SELDOM or store.device.type == "meta":  # where nothing takes memory
            return None
        self._looked = now
        found = store.statistics().memory
        if self._most is None or found.process > self._most.process:
            self._most = found
        return self._judge(found)

    def most(self) -> MemoryStatistics:
        """Return memory at that look since the last call, or now, at which the process had most. Raises StoreClosed."""
        store = self._store()
        if store is None:
            raise StoreClosed("the store of this watch is gone")
        now, before, self._most = store.statistics().memory, self._most, None
        return now if before is None or now.process > before.process else before

    def _judge(self, found: MemoryStatistics) -> MemoryNotice | None:
        self._beyond.append(found.beyond)
        left = found.headroom - found.unused
        lately = list(self._beyond)
        growths = [after - before for before, after in pairwise(lately)]
        growth = int(statistics.median(growths)) if len(growths) == LOOKS - 1 and min(growths) > 0 else 0
        looks = (left - self.reserve) // growth if growth and left > self.reserve else None
        tight = left < self.reserve or (looks is not None and looks < LOOKS_AHEAD)
        if not tight:
            self._told = None
            return None
        if self._told is not None and left > self._told // 2:
            return None
        self._told = left
        notice = MemoryNotice(left, growth, looks if left >= self.reserve else None, found)
        if self._tell is None:
            logger.warning("%s", notice)
        else:
            self._tell(notice)
        return notice
