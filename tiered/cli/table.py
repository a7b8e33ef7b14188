"""Numbers for people, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiered.errors import shown
from tiered.sizes import format_size

__all__ = ["bandwidth", "duration", "exact_size", "table", "told_environment", "told_io", "told_noise"]


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lines of ``rows``, as ``shown``; the first ``left`` columns begin at the same place, the others end at the same place."""
    rows = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in pairs]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bandwidth(bytes_per_second: float) -> str:
    """In GB/s, with three digits that mean something."""
    value = bytes_per_second / 1e9
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}" if value >= 0.01 else f"{value:.5f}"


def duration(seconds: float) -> str:
    unit, size = next((u for u in (("s", 1.0), ("ms", 1e-3)) if seconds >= u[1]), ("us", 1e-6))
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def exact_size(nbytes: int) -> str:
    """As it would be given: "4KiB"; bytes where it is not a whole number of anything larger."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size:,}{unit}"
    return f"{nbytes:,}B"


def told_environment(report: Mapping[str, Any]) -> str:
    """Of a report that holds ``measure.environment()``."""
    commit = f" (commit {report['commit']})" if report["commit"] else ""
    return (
        f"tiered {report['tiered']}{commit}, torch {report['torch']}, Python {report['python']}, {report['kernel']}, "
        f"{report['cores']} cores, {format_size(report['memory_bytes'])} of memory"
    )


def told_io(report: Mapping[str, Any]) -> str:
    """How a report's store does I/O, and a warning where that is not with the drive itself."""
    how = f"{report['backend']} on {report['filesystem'] or 'an unknown filesystem'}"
    if report["in_memory"]:
        return f"{how}: THIS IS MEMORY, not a drive"
    return f"{how}, O_DIRECT" if report["direct"] else f"{how}: NO O_DIRECT here, this measures the page cache"


def told_noise(noise: Mapping[str, float]) -> str:
    """Of what ``measure.Noise`` saw."""
    return f"meanwhile other programs used {noise['others']:.0%} of all cores' time, {noise['steal']:.0%} was stolen"
