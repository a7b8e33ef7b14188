"""The rules of this release and the names by which they are known: the one list of optimizers, from which others derive.

A rule is named as the class in memory whose update it is, and "Rule". Records and layouts of states have no name for AdamW's,
which was the only one when the first were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tiered.zero.rules import exact, inexact
from tiered.zero.rules.rule import UpdateRule, name_of, settings_of

__all__ = ["CHOICES", "KNOWN", "OPTIMIZERS", "RULES", "KnownOptimizer", "class_in", "is_unnamed", "name_in", "recorded"]


@dataclass(frozen=True)
class KnownOptimizer:
    """A rule and its names.

    ``optimizer``: the class of ``tiered.zero`` that updates by it. ``choice``: its name in ``tiered.plan`` and ``tiered train
    --optimizer``; empty where these do not have it. ``settings``: what they give it, where that is not the rule's default.
    ``arguments``: what the class takes beside these to update by this rule.
    """

    optimizer: str
    rule: type[Any]
    choice: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def usual(self) -> UpdateRule:
        """Return the rule with its usual settings."""
        made: UpdateRule = self.rule(**self.settings)
        return made

    @property
    def in_torch(self) -> type[torch.optim.Optimizer] | None:
        """Return the class of torch whose bits the updates have; None where this torch has none."""
        return getattr(torch.optim, self.rule.__name__.removesuffix("Rule"), None)

    @property
    def takes_fused(self) -> bool:
        """Return whether the fused kernel is a setting. Then it is the default of ``tiered.zero``, and not torch's on a CPU."""
        return "fused" in settings_of(self.usual)


_BETAS = {"betas": (0.9, 0.95)}
KNOWN = (
    KnownOptimizer("AdamW", exact.AdamWRule, "adamw", _BETAS),
    KnownOptimizer("Adam", exact.AdamRule, "adam", _BETAS),
    KnownOptimizer("NAdam", exact.NAdamRule, "nadam", _BETAS),
    KnownOptimizer("RAdam", exact.RAdamRule, "radam", _BETAS),
    KnownOptimizer("Adamax", exact.AdamaxRule, "adamax", _BETAS),
    KnownOptimizer("SGD", exact.SGDRule, "sgd", {"momentum": 0.9}),
    KnownOptimizer("Adagrad", exact.AdagradRule, "adagrad"),
    KnownOptimizer("RMSprop", exact.RMSpropRule, "rmsprop"),
    KnownOptimizer("Lion", exact.LionRule, "lion"),
    KnownOptimizer("Adafactor", exact.AdafactorRule, "adafactor"),
    KnownOptimizer("Muon", exact.MuonRule),
    KnownOptimizer("AdamW", inexact.AdamWBFloat16Rule, "adamw_bf16", _BETAS, {"moments": torch.bfloat16}),
    KnownOptimizer("AdamW8bit", inexact.AdamW8bitRule, "adamw8bit", _BETAS),
    KnownOptimizer("AdamW4bit", inexact.AdamW4bitRule, "adamw4bit", _BETAS),
    KnownOptimizer("Muon", inexact.MuonBFloat16Rule, arguments={"moments": torch.bfloat16}),
    KnownOptimizer("AdamW", inexact.AdamWBFloat16RoundedRule, arguments={"moments": torch.bfloat16, "rounding": "stochastic"}),
    KnownOptimizer("AdamW8bit", inexact.AdamW8bitRoundedRule, arguments={"rounding": "stochastic"}),
    KnownOptimizer("AdamW4bit", inexact.AdamW4bitRoundedRule, arguments={"rounding": "stochastic"}),
)
CHOICES: Mapping[str, KnownOptimizer] = {one.choice: one for one in KNOWN if one.choice}
"""By the names of ``tiered train --optimizer``, which ``OptimizerName`` has, too."""
OPTIMIZERS: Mapping[str, KnownOptimizer] = {one.optimizer: one for one in KNOWN if not one.arguments}
"""By the names of the classes of ``tiered.zero``, which are those of one in memory: of torch's, bitsandbytes' or torchao's."""
RULES: Mapping[str, type[Any]] = {one.rule.__name__: one.rule for one in KNOWN}
"""By their names: rules whose updates a record may have. A name is on disk, and does not change."""

# -- AdamW's has no name -------------------------------------------------------------------------------------------------------


def is_unnamed(rule: UpdateRule) -> bool:
    """Return whether records and layouts do not name a rule: it is AdamW's."""
    return type(rule) is exact.AdamWRule


def recorded(rule: UpdateRule) -> dict[str, str]:
    """Return what the record of a param group has of its rule."""
    return {} if is_unnamed(rule) else {"rule": name_of(rule)}


def name_in(group: Mapping[str, Any]) -> str:
    """Return the name of the rule of a param group in a record."""
    found: str = group.get("rule", exact.AdamWRule.__name__)
    return found


def class_in(group: Mapping[str, Any]) -> type[Any]:
    """Return the class of the rule of a param group in a record; ``object`` for one of the caller's."""
    return RULES.get(name_in(group), object)
