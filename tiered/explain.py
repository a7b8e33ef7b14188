"""Why a request waited in vain, in one line that says what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiered.requests import Request
from tiered.residency import Copy

if TYPE_CHECKING:
    from tiered.admission import Admission

__all__ = ["why_stuck"]


def why_stuck(admission: Admission, request: Request, waited: float) -> str:
    """Names the tiers that have no room for ``request``, which need not be the one it is for, and who holds them."""
    lacking = [admission.places[tier] for tier in sorted(set(request.lacks), reverse=True)]
    if not lacking:
        return f"{request} waited {waited:.1f} s for {_awaited(admission, request)}"
    held = [place for place in lacking if place.holders()]
    rooms = "; ".join(
        f"tier {place.tier.name}: {place.used:,} of {place.tier.capacity:,} bytes are in use, held by {_names(place.holders())}"
        for place in held or lacking[:1]
    )
    return (
        f"{request} waited {waited:.1f} s for room in {rooms}. Release leases and the tensors they gave, "
        f"or open the store with more room"
    )


def _awaited(admission: Admission, request: Request) -> str:
    """What keeps ``request`` where there is room enough."""
    entries = [entry for entry in map(admission.directory.find, request.wants()) if entry is not None]
    copies = [copy for entry in entries for copy in entry.copies if copy is not None and copy.dirty]
    held = [copy for copy in copies if copy.tier != request.tier and (copy.leased or copy.aliases)]
    if not held:
        return "transfers in flight: what the store lies on is too slow, or does not answer"
    return (
        f"{_names(held)} in tier {admission.places[held[0].tier].tier.name}, which can be written back after that. "
        f"Release leases and the tensors they gave"
    )


def _names(held: Sequence[Copy]) -> str:
    names = ", ".join(
        f"{c.key!r} ({c.slot.nbytes:,} bytes, {'leased' if c.leased else 'still referenced after its lease'})" for c in held[:8]
    )
    more = f" and {len(held) - 8} more" if len(held) > 8 else ""
    return f"{names or 'nobody: what is there is on its way, or lies too far apart'}{more}"
