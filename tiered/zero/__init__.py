"""ZeRO-Infinity on a ``TieredStore``: parameters and optimizer states paged around each layer's forward and backward.

The names of DeepSpeed's (``initialize``, ``Engine``, ...) are imported on first use, from ``tiered.integrations.deepspeed``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tiered.tuning.adaptive import AutoPlan, AutoPlanStatistics
from tiered.zero.changing import unpage
from tiered.zero.checkpoint.checkpoint import commit, commit_async, resume, rollback
from tiered.zero.checkpoint.dcp import Committed, load_dcp
from tiered.zero.checkpoint.safetensors import export
from tiered.zero.construction.construct import Construction, ConstructionStatistics, init
from tiered.zero.optimizers.average import EMA
from tiered.zero.optimizers.elementwise import Elementwise
from tiered.zero.optimizers.named import (
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW4bit,
    AdamW8bit,
    Lion,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
)
from tiered.zero.optimizers.optimizer import AdamW, GradScaler, Optimizer
from tiered.zero.page import Moved, PagingStatistics, gathered, no_sync, offload, onload, page, statistics
from tiered.zero.paging.pager import Paging
from tiered.zero.paging.sharding import Stage, Stage1, Stage2, Stage3
from tiered.zero.paging.tensors.compiling import keep_out
from tiered.zero.paging.units import Policy
from tiered.zero.rank_stores import open_store
from tiered.zero.rules.exact import (
    AdafactorRule,
    AdagradRule,
    AdamaxRule,
    AdamRule,
    AdamWRule,
    LionRule,
    MuonRule,
    NAdamRule,
    RAdamRule,
    RMSpropRule,
    SGDRule,
)
from tiered.zero.rules.inexact import (
    AdamW4bitRoundedRule,
    AdamW4bitRule,
    AdamW8bitRoundedRule,
    AdamW8bitRule,
    AdamWBFloat16RoundedRule,
    AdamWBFloat16Rule,
    MuonBFloat16Rule,
)
from tiered.zero.rules.rule import UpdateRule

if TYPE_CHECKING:
    from tiered.integrations.deepspeed.engine import Engine
    from tiered.integrations.deepspeed.initialize import Init, initialize
    from tiered.integrations.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "EMA",
    "SGD",
    "Adafactor",
    "AdafactorRule",
    "Adagrad",
    "AdagradRule",
    "Adam",
    "AdamRule",
    "AdamW",
    "AdamW4bit",
    "AdamW4bitRoundedRule",
    "AdamW4bitRule",
    "AdamW8bit",
    "AdamW8bitRoundedRule",
    "AdamW8bitRule",
    "AdamWBFloat16RoundedRule",
    "AdamWBFloat16Rule",
    "AdamWRule",
    "Adamax",
    "AdamaxRule",
    "AutoPlan",
    "AutoPlanStatistics",
    "Committed",
    "Construction",
    "ConstructionStatistics",
    "Elementwise",
    "Engine",
    "GradScaler",
    "Init",
    "LRRangeTest",
    "Lion",
    "LionRule",
    "Moved",
    "Muon",
    "MuonBFloat16Rule",
    "MuonRule",
    "NAdam",
    "NAdamRule",
    "OneCycle",
    "Optimizer",
    "Paging",
    "PagingStatistics",
    "Policy",
    "RAdam",
    "RAdamRule",
    "RMSprop",
    "RMSpropRule",
    "SGDRule",
    "Stage",
    "Stage1",
    "Stage2",
    "Stage3",
    "UpdateRule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "commit",
    "commit_async",
    "export",
    "gathered",
    "init",
    "initialize",
    "load_dcp",
    "no_sync",
    "offload",
    "onload",
    "open_store",
    "page",
    "resume",
    "rollback",
    "statistics",
    "unpage",
]

_DEEPSPEED = {
    "Engine": "engine",
    **dict.fromkeys(("Init", "initialize"), "initialize"),
    **dict.fromkeys(("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"), "schedules"),
}
"""Where the names of DeepSpeed's are: in a package above this one, whose files import from here."""


def __getattr__(name: str) -> object:
    if name not in _DEEPSPEED:
        raise AttributeError(f"module 'tiered.zero' has no attribute {name!r}")
    found = getattr(import_module(f"tiered.integrations.deepspeed.{_DEEPSPEED[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


keep_out(__name__.partition(".")[0])
