"""``TieredStore`` and its parts: leases, commits, opening, stores at rest, verification.

Clients of the store (models, integrations, plans) import these names from here. They are imported on first use, so that stores
at rest are read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered.engine.policy import LRU, NextUse, Touch
    from tiered.store.opening import Eviction, Generation
    from tiered.store.store import TieredStore

__all__ = ["LRU", "Eviction", "Generation", "NextUse", "TieredStore", "Touch"]

_HOME = {
    "Eviction": "tiered.store.opening",
    "Generation": "tiered.store.opening",
    "TieredStore": "tiered.store.store",
}
"""Where these are; the others are the engine's policies."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tiered.store' has no attribute {name!r}")
    found = getattr(import_module(_HOME.get(name, "tiered.engine.policy")), name)
    globals()[name] = found
    return found
