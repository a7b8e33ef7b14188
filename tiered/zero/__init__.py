"""ZeRO-Infinity on a ``TieredStore``: parameters and Adam states paged around each layer's forward and backward."""

from tiered.zero.adopt import page
from tiered.zero.construct import Construction, ConstructionStatistics, init
from tiered.zero.optimizer import AdamW
from tiered.zero.paging import PagingStatistics, statistics
from tiered.zero.policy import Policy
from tiered.zero.rules import AdamWRule, UpdateRule
from tiered.zero.scaler import GradScaler

__all__ = [
    "AdamW",
    "AdamWRule",
    "Construction",
    "ConstructionStatistics",
    "GradScaler",
    "PagingStatistics",
    "Policy",
    "UpdateRule",
    "init",
    "page",
    "statistics",
]
