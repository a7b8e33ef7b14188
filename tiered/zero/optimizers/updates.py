"""What an optimizer asks of its parameters, which are paged, or stay in memory with states in a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

import torch

from tiered.zero.collectives import Ranks
from tiered.zero.paging.pager import Pager
from tiered.zero.paging.units import Placement
from tiered.zero.rules.rule import UpdateRule

__all__ = ["Group", "Optimizing", "Updates"]

Group = dict[str, Any]
"""A param group, as torch has it."""


class Optimizing(Protocol):
    """The optimizer whose parameters are updated."""

    param_groups: list[Group]

    def rule(self, index: int) -> UpdateRule:
        """Return the rule of a param group with the hyper-parameters of now. Raises MisuseError where it keeps other states
        than it did."""
        ...

    def rule_of(self, index: int) -> UpdateRule:
        """Return the rule of a param group, as it was when states were last kept for it."""
        ...

    def follow(self, index: int, rule: UpdateRule) -> None:
        """Have a param group that has made no step keep what ``rule`` keeps. Raises MisuseError where it has made one, and
        ``rule`` keeps other states."""
        ...


class Updates:
    """How ``optimizer`` updates its parameters, by where these are. It is referred to weakly."""

    resident = True
    """Whether parameters stay in memory, and their states alone are in a store."""
    ranks: Ranks | None = None
    """Who has a share of states that are divided, where parameters are in memory."""
    existing = "None"
    """What ranks compare of ``existing=``."""
    steps: dict[Placement, int]
    """How many steps each paged parameter has had."""

    def __init__(self, optimizer: Optimizing) -> None:
        self._optimizer = ref(optimizer)
        self.steps = {}

    @property
    def optimizer(self) -> Optimizing:
        found = self._optimizer()
        assert found is not None, "it calls"
        return found

    @property
    def groups(self) -> list[Group]:
        return self.optimizer.param_groups

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.groups for parameter in group["params"]]

    # -- parameters --------------------------------------------------------------------------------------------------------

    def pagers(self) -> Sequence[Pager]:
        """Return the pagers of the models whose parameters these are."""
        return ()

    def refuse_mixed(self) -> None:
        """Raise MisuseError where some parameters are paged and others are not, or all are where they should not be."""
        raise NotImplementedError

    def term_of(self, parameter: torch.Tensor, pager: Pager | None) -> str | None:
        """Return what ranks compare of a parameter, as far as it is of the model of ``pager`` (None: any)."""
        raise NotImplementedError

    def add(self, names: Sequence[str], rule: UpdateRule) -> None:
        """Add the last param group, which ``rule`` updates; ``names``: how errors name its parameters. Raises MisuseError, and
        changes nothing then."""
        raise NotImplementedError

    def write(self) -> Sequence[int]:
        """Write what was added; return how many steps each parameter has had, where ``optimizer.state`` has these."""
        return ()

    def keep(self, group: Group, rule: UpdateRule) -> None:
        """Have the parameters of ``group`` keep the states that ``rule`` keeps, after these were loaded."""

    def stepped(self, index: int) -> bool:
        """Return whether a parameter of a group has made a step, or may have."""
        raise NotImplementedError

    def follow(self, index: int, rule: UpdateRule) -> None:
        """Have a param group that has made no step keep what ``rule``, of the same type, keeps."""

    # -- stepping ----------------------------------------------------------------------------------------------------------

    def step(self) -> Sequence[int]:
        """Make a step; return what ``write`` returns."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool) -> None:
        raise NotImplementedError

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        raise NotImplementedError

    def grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the gradient of ``parameter``, or None where it has none."""
        raise NotImplementedError

    def flush(self) -> None:
        """Apply every pending update."""

    # -- state -------------------------------------------------------------------------------------------------------------

    def state(self, own: Any) -> Any:
        """Return ``optimizer.state``; ``own``: what torch's class has there."""
        return own

    def refuse_states(self) -> None:
        """Raise MisuseError where states cannot be given by an assignment to ``optimizer.state``."""

    def kept(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield for each parameter in turn how many steps it has had, and copies of its states."""
        raise NotImplementedError

    @contextmanager
    def loading(self, states: Mapping[int, Mapping[str, Any]], rules: Sequence[UpdateRule]) -> Iterator[None]:
        """Prepare for ``load``, and have every use of the model raise until that has ended; where the block raises ValueError,
        nothing has changed. Raises MisuseError where ``states``, by the parameters' numbers, are not those that ``rules``, by
        parameter, keep."""
        raise NotImplementedError
        yield

    def load(
        self, states: Mapping[int, Mapping[str, torch.Tensor]], steps: Mapping[int, int], rules: Sequence[UpdateRule]
    ) -> Sequence[int]:
        """Load states, and how many steps were made, by the parameters' numbers; those that are missing begin anew. Return what
        ``write`` returns."""
        raise NotImplementedError
