"""What a training run was like, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiered.cli.progress import Counters
from tiered.sizes import format_size
from tiered.stats import LinkStatistics, StoreStatistics

__all__ = ["Summary", "describe"]

STATE_BYTES = 12
IN_MEMORY_BYTES = 16
"""Per parameter, fp32: value, gradient, two moments."""


@dataclass(frozen=True)
class Summary:
    """Measured from the first step's beginning to the last one's update. ``before`` and ``seen``: statistics then and now."""

    steps: int
    losses: tuple[float, ...]
    tokens: int
    parameters: int
    moved: Counters
    update_seconds: float
    before: tuple[LinkStatistics, ...]
    seen: StoreStatistics
    counted_by: str
    peak_rss: int
    baseline_rss: int
    generation: int
    folder: str
    prefetch: str

    @property
    def last_loss(self) -> float:
        """Mean of the last steps, since single ones scatter."""
        last = self.losses[-min(5, len(self.losses)) :]
        return sum(last) / len(last)

    @property
    def serial_seconds(self) -> float:
        """How long the same transfers take when nothing else goes on meanwhile: the time during which any was under way."""
        pairs = zip(self.seen.links, self.before, strict=True)
        flows = [flows for now, then in pairs for flows in ((now.up, then.up), (now.down, then.down))]
        return sum(now.busy_seconds - then.busy_seconds for now, then in flows)

    def as_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        moved, steps, dram = self.moved, self.steps, self.seen.tiers[0]
        return {
            "steps": steps,
            "seconds": moved.seconds,
            "tokens_per_second": self.tokens / moved.seconds,
            "loss": {"first": self.losses[0], "last": self.last_loss, "all": list(self.losses)},
            "parameters": self.parameters,
            "state_bytes": STATE_BYTES * self.parameters,
            "pool": {"budget_bytes": dram.capacity, "peak_bytes": dram.peak},
            "per_step": {
                "seconds": moved.seconds / steps,
                "read_bytes": moved.read / steps,
                "written_bytes": moved.written / steps,
                "read_bytes_per_parameter": moved.read / steps / self.parameters,
                "written_bytes_per_parameter": moved.written / steps / self.parameters,
            },
            "time": {
                "compute_seconds": moved.seconds - moved.stalled - self.update_seconds,
                "optimizer_seconds": self.update_seconds,
                "waiting_for_reads_seconds": moved.stalled_for_reads,
                "waiting_for_room_seconds": moved.stalled_for_room,
            },
            "io": {
                "one_after_the_other_seconds": self.serial_seconds,
                "waited_seconds": moved.stalled,
                "waited_share": moved.stalled / self.serial_seconds if self.serial_seconds else 0.0,
                "counted_by": self.counted_by,
            },
            "peak_rss_bytes": self.peak_rss,
            "in_memory_bytes": IN_MEMORY_BYTES * self.parameters,
            "backend": self.seen.backend,
            "direct": self.seen.direct,
            "prefetch": self.prefetch,
            "generation": self.generation,
            "folder": self.folder,
        }


def describe(summary: Summary, other_way: str) -> str:
    """Several lines. ``other_way`` is a command to compare with."""
    moved, steps = summary.moved, summary.steps
    dram = summary.seen.tiers[0]
    state = STATE_BYTES * summary.parameters

    def spent(what: str, seconds: float) -> str:
        return f"  {what:<22}{seconds / steps:8.2f} s {seconds / moved.seconds:6.0%}"

    def flow(what: str, nbytes: int) -> str:
        return f"{what} {_amount(nbytes / steps)} per step, {nbytes / steps / summary.parameters:.1f} bytes per parameter"

    serial = summary.serial_seconds
    share = moved.stalled / serial if serial else 0.0
    how = f"{summary.seen.backend}, {'O_DIRECT' if summary.seen.direct else 'no O_DIRECT here'}"
    return "\n".join(
        [
            "",
            f"loss      {summary.losses[0]:.3f} -> {summary.last_loss:.3f} in {steps} steps of {summary.tokens // steps:,} "
            f"tokens, {moved.seconds:.0f} s, {summary.tokens / moved.seconds:.0f} tokens/s",
            f"state     {format_size(state)}, {state / dram.capacity:.1f} times the budget of {format_size(dram.capacity)} "
            f"(the pool's peak: {format_size(dram.peak)})",
            f"memory    {format_size(summary.peak_rss)} at most, {format_size(summary.baseline_rss)} of it torch itself;",
            f"          training in memory holds {format_size(IN_MEMORY_BYTES * summary.parameters)} of parameters, gradients, "
            "states",
            f"disk      {flow('read', moved.read)}",
            f"          {flow('wrote', moved.written)}; {how}",
            "time      per step",
            spent("forward and backward", moved.seconds - moved.stalled - summary.update_seconds),
            spent("optimizer", summary.update_seconds),
            spent("waiting for reads", moved.stalled_for_reads),
            spent("waiting for writes", moved.stalled_for_room),
            spent("together", moved.seconds),
            f"overlap   one transfer after the other, this I/O takes {serial / steps:.2f} s per step;",
            f"          training waited {moved.stalled / steps:.2f} s, {share:.0%} of that",
            f"saved     {summary.folder}, generation {summary.generation}",
            "",
            f"{'without' if summary.prefetch == 'on' else 'with'} fetching ahead: {other_way}",
        ]
    )


def _amount(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
