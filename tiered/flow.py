"""What one direction of a link has done so far."""

from __future__ import annotations

from tiered.errors import TieredError
from tiered.stats import FlowStatistics

__all__ = ["Flow"]


class Flow:
    """Counters of one direction of one link."""

    def __init__(self) -> None:
        self.transfers = self.bytes = self.failed = self.active = 0
        self.busy, self.since = 0.0, 0.0

    def begin(self, now: float) -> None:
        if self.active == 0:
            self.since = now
        self.active += 1

    def end(self, now: float, nbytes: int, error: TieredError | None) -> None:
        self.active -= 1
        if self.active == 0:
            self.busy += now - self.since
        if error is None:
            self.transfers += 1
            self.bytes += nbytes
        else:
            self.failed += 1

    @property
    def cost(self) -> float:
        """Seconds per byte; 0 before the first transfer has ended."""
        return self.busy / self.bytes if self.bytes else 0.0

    def snapshot(self, now: float) -> FlowStatistics:
        busy = self.busy + (now - self.since if self.active else 0.0)
        return FlowStatistics(self.transfers, self.bytes, self.failed, busy)
