"""Striped extents of a few KiB: stripes, pieces and the size from which tensors are striped, lowered for a test."""

from __future__ import annotations

import sys

import pytest

import tiered.store.verify  # so that no module is imported meanwhile, which would keep what is lowered
import tiered.zero  # noqa: F401
from tiered.format import stripes

__all__ = ["lower_stripes"]


def lower_stripes(patch: pytest.MonkeyPatch, stripe: int, whole: int) -> None:
    """Have stripes and pieces of ``stripe`` bytes, and every tensor of more than ``whole`` bytes striped."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "tiered" and hasattr(module, "PIECE_BYTES"):
            patch.setattr(module, "PIECE_BYTES", stripe)
    patch.setattr(stripes, "STRIPE_BYTES", stripe)
    patch.setattr(stripes, "LARGEST_WHOLE", whole)
