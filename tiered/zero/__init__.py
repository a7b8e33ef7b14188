"""ZeRO-Infinity on a ``TieredStore``: parameters and Adam states paged around each layer's forward and backward."""

from tiered.zero.accumulation import no_sync
from tiered.zero.adopt import page
from tiered.zero.checkpoint import commit, commit_async, resume, rollback
from tiered.zero.construct import Construction, ConstructionStatistics, init
from tiered.zero.export import export
from tiered.zero.optimizer import AdamW
from tiered.zero.policy import Policy
from tiered.zero.rank_stores import open_store
from tiered.zero.rules import AdamWRule, UpdateRule
from tiered.zero.scaler import GradScaler
from tiered.zero.sharding import Stage, Stage1, Stage2, Stage3
from tiered.zero.summary import PagingStatistics, statistics

__all__ = [
    "AdamW",
    "AdamWRule",
    "Construction",
    "ConstructionStatistics",
    "GradScaler",
    "PagingStatistics",
    "Policy",
    "Stage",
    "Stage1",
    "Stage2",
    "Stage3",
    "UpdateRule",
    "commit",
    "commit_async",
    "export",
    "init",
    "no_sync",
    "open_store",
    "page",
    "resume",
    "rollback",
    "statistics",
]
