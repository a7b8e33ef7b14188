"""Make a call that changes several things leave all of them or nothing, whichever line an exception of a signal handler
strikes.

Everything is computed first, and then written down as *deeds*, each of which may be done twice. One assignment decides. An
interruption before it leaves nothing; after it, whoever uses the model next does what is left. Where neither can be had, the
reason is written down before the change and taken away after it: until then every use of the model raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiered.errors import InterruptedStep

__all__ = ["Intent", "all_or_none"]

Deed = Callable[[], object]


class _Decision:
    """Deeds that are left; they count from the moment that ``made`` is True."""

    def __init__(self, deeds: Sequence[Deed]) -> None:
        self._left = list(reversed(deeds))
        self.made = False

    def carry_out(self) -> None:
        while self._left:
            self._left[-1]()
            self._left.pop()


class Intent:
    """What calls on one model have decided and not finished."""

    def __init__(self) -> None:
        self._decision: _Decision | None = None
        self._spoiled: str | None = None
        self.behind: str | None = None
        """Why the model has other values than its tensors, to which the store went back; every use raises InterruptedStep with
        this."""
        self.updated = False
        """Some units were updated within a backward pass that has not come to its end, and others were not."""

    def ready(self) -> None:
        """Finish what was decided, and refuse a model that cannot be gone on with, before the model is used."""
        self.finish()
        self.refuse()

    def finish(self) -> None:
        """Do what was decided."""
        decision = self._decision
        if decision is not None:
            if decision.made:
                decision.carry_out()
            self._decision = None

    def refuse(self) -> None:
        """Raise InterruptedStep where the model cannot be gone on with."""
        why = self._spoiled or self.behind
        if why is not None:
            raise InterruptedStep(why)

    def begin(self, decision: _Decision) -> None:
        self._decision = decision

    def end(self) -> None:
        self._decision = None

    @property
    def spoiled(self) -> str | None:
        return self._spoiled

    def spoil(self, why: str | None) -> None:
        """Have every use from here on raise InterruptedStep with ``why`` (None: none does)."""
        self._spoiled = why

    def forget(self) -> None:
        """Forget all decisions, because everything is as a commit says."""
        self._decision, self.updated, self._spoiled, self.behind = None, False, None, None

    def half_updated(self) -> None:
        """Note that a backward pass has updated some units and will update others."""
        self.updated = True

    def all_updated(self) -> None:
        """Note that all units of the pass are updated, or that what is missing does no harm."""
        self.updated = False

    def refuse_half_updated(self) -> None:
        if self.updated:
            raise InterruptedStep(
                "a backward pass that updates parameters was interrupted: some have had the step and others have not; call "
                "zero.rollback, or optimizer.step() to go on with them as they are"
            )


def all_or_none(intents: Iterable[Intent], deeds: Sequence[Deed]) -> None:
    """Do all of ``deeds``, in order, or none of them. Each is idempotent and cannot fail."""
    decision, concerned = _Decision(deeds), list(intents)
    for intent in concerned:
        intent.ready()
        intent.begin(decision)
    decision.made = True
    decision.carry_out()
    for intent in concerned:
        intent.end()
