"""ZeRO-Infinity on a ``TieredStore``: parameters and Adam states paged around each layer's forward and backward."""

from tiered.zero.build.construct import Construction, ConstructionStatistics, init
from tiered.zero.checkpoint.checkpoint import commit, commit_async, resume, rollback
from tiered.zero.checkpoint.safetensors import export
from tiered.zero.optimizers.optimizer import AdamW, GradScaler
from tiered.zero.page import Moved, PagingStatistics, gathered, no_sync, offload, onload, page, statistics
from tiered.zero.paging.sharding import Stage, Stage1, Stage2, Stage3
from tiered.zero.paging.tensors.compiling import keep_out
from tiered.zero.paging.units import Policy
from tiered.zero.rank_stores import open_store
from tiered.zero.rules import AdamWRule, UpdateRule

__all__ = [
    "AdamW",
    "AdamWRule",
    "Construction",
    "ConstructionStatistics",
    "GradScaler",
    "Moved",
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
    "gathered",
    "init",
    "no_sync",
    "offload",
    "onload",
    "open_store",
    "page",
    "resume",
    "rollback",
    "statistics",
]

keep_out(__name__.partition(".")[0])
