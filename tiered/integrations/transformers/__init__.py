"""Hugging Face's ``transformers`` with paged models: reading, opening and training them.

Names are imported when they are first asked for: what ``Trainer`` brings takes seconds, which a program that only generates
would wait for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.integrations.transformers.experts import ExpertStatistics, RoutedExperts, routed_experts
    from tiered.integrations.transformers.kv_cache import TieredCache
    from tiered.integrations.transformers.merged import export_merged
    from tiered.integrations.transformers.pretrained import (
        from_pretrained,
        import_model,
        open_model,
        open_tokenizer,
        quietly,
        reading_one_at_a_time,
    )
    from tiered.integrations.transformers.training import CommitCheckpoints, TieredCallback, TieredTrainer

__all__ = [
    "CommitCheckpoints",
    "ExpertStatistics",
    "RoutedExperts",
    "TieredCache",
    "TieredCallback",
    "TieredTrainer",
    "export_merged",
    "from_pretrained",
    "import_model",
    "open_model",
    "open_tokenizer",
    "quietly",
    "reading_one_at_a_time",
    "routed_experts",
]

_ELSEWHERE = {
    **dict.fromkeys(("CommitCheckpoints", "TieredCallback", "TieredTrainer"), "training"),
    **dict.fromkeys(("ExpertStatistics", "RoutedExperts", "routed_experts"), "experts"),
    "TieredCache": "kv_cache",
    "export_merged": "merged",
}
"""The files of names that are not in ``pretrained``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'pretrained')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
