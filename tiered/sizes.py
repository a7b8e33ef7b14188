"""Sizes as people write them: ``"1GiB"``, ``"500MB"``, or an int of bytes."""

from __future__ import annotations

import re

from tiered.errors import MisuseError

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP")
}
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Bytes. Raises MisuseError for what is not a size: negative, an unknown unit, no number."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise MisuseError(f"a size is an int of bytes or a text such as '256MiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise MisuseError(f"a size cannot be negative: {size}")
        return size
    match = _SIZE.fullmatch(size)
    factor = _BY_LOWER.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise MisuseError(f"{size!r} is not a size; write bytes or a unit: '268435456', '256MiB', '1.5GB'")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_size(nbytes: float) -> str:
    """For people: ``268435456`` is ``"256.0 MiB"``."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
