"""Synchronise gradients and parameters over ranks: when gradients are reduced, and when the next unit is gathered.

``gradient_sync`` decides from a model's partition: one process needs ``NoSync``, several ``ReduceScatter``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from tiered.errors import MisuseError, RankError
from tiered.types import Access, TensorSpec
from tiered.zero.collectives import CollectiveProgress, Ranks, Under
from tiered.zero.paging.gradients import LocalGradients
from tiered.zero.paging.sharding import Partition, Sharded
from tiered.zero.paging.storage import host, in_dram
from tiered.zero.paging.unit import Unit
from tiered.zero.paging.units import Placement, UnitPlan

__all__ = ["GradientSync", "NoSync", "ReduceScatter", "gradient_sync", "overlaps"]

ROOMY = 12
"""Times the largest unit that a pool has to be so that the next unit is gathered, and another one's gradients are on their way,
while one computes: that is six tensors in use of at most this size, and wherever they lie, a seventh has room."""
BACKLOG = 2
"""Units that are complete and wait for their reduction, from which on the reduction under way is waited for."""


class GradientSync(Protocol):
    """What a model's gradients and parameters need of other processes, within passes and between them. All ranks call the same.
    """

    several: bool
    """Whether there are other processes, of which one must not hold a unit, or use a gradient, where another does not."""
    paused: bool
    """Gradients stay where they are: more backward passes come before they are used."""

    def pass_begins(self, backward: bool = False) -> None:
        """Begin a forward or backward pass: what an interrupted one left is forgotten."""
        ...

    def before_hold(self, unit: Unit) -> None:
        """Have what other processes updated of a unit that will be held now."""
        ...

    def after_hold(self, unit: Unit) -> None:
        """Begin to fetch the unit that followed this one, which is held now, in the pass before."""
        ...

    def moved_on(self) -> None:
        """Begin the reductions that are complete, as backward goes on to another unit."""
        ...

    def backward_ended(self) -> Iterable[tuple[Unit, Placement]]:
        """Reduce what is left; return what got a gradient in this pass, on any rank, and was not said to have one yet."""
        ...

    def abandon(self) -> None:
        """Wait for what is under way, and forget it: an exception struck, or all has ended."""
        ...

    def refresh(self) -> None:
        """Fetch all parameters that other processes updated."""
        ...

    def synchronise(self) -> None:
        """Reduce all gradients that were not yet, because somebody wants to use them."""
        ...

    def norms(self, partial: torch.Tensor, order: float) -> torch.Tensor:
        """Return the norms of whole gradients, given those of this process's parts, shape (parameters,)."""
        ...


class NoSync:
    """Synchronisation of one process, which does nothing: a gradient is whole as it arrives."""

    several = paused = False

    def pass_begins(self, backward: bool = False) -> None: ...

    def before_hold(self, unit: Unit) -> None: ...

    def after_hold(self, unit: Unit) -> None: ...

    def moved_on(self) -> None: ...

    def backward_ended(self) -> Iterable[tuple[Unit, Placement]]:
        return ()

    def abandon(self) -> None: ...

    def refresh(self) -> None: ...

    def synchronise(self) -> None: ...

    def norms(self, partial: torch.Tensor, order: float) -> torch.Tensor:
        return partial


class ReduceScatter:
    """Reduce-scatter of gradients over ranks. All ranks call the same; only which gradients arrive, and when, may differ.

    Reductions begin in one order on all ranks, the last unit of the model first. A reduction begins when backward goes on to
    another unit and the next unit in that order is complete; the end of backward begins and ends the reductions that are left.
    A rank whose data leave a unit out is behind with its reductions, and never in the way of a gather. One reduction is under
    way at a time; a unit that is complete earlier waits in the store. Between passes ranks first ask which gradients there are,
    by the way on which the next pass would begin (that of gathers, where parameters are gathered), so that ranks of which one
    goes on to another pass notice that there.

    Each gather within backward tells all ranks how many units are complete on every one of them. That many reductions every
    rank can begin, so a rank may wait for them: at once where one thing is done after the other, and otherwise when more than
    a few units wait. So what waits in the store stays a few units, whatever the network's rate.

    Parameters are gathered as units are held, the next one while this one computes, where the pass is as the last. Without
    room for that (``overlapped``) one thing is done after the other; without room for a reduction beside the units that are
    held (``prompt``) all reductions come at the end of backward.
    """

    several = True

    def __init__(
        self, ranks: Ranks, units: Sequence[Unit], *, early: bool, replicated: bool, overlapped: bool, prompt: bool
    ) -> None:
        self._ranks, self._early, self._overlapped, self._prompt = ranks, early, overlapped, prompt
        self._replicated, self._replicas = replicated, list(units) if replicated else []
        self.paused = False
        self._units = units
        self._order: list[Unit] = []
        self._begun = 0  # of these, in this pass
        self._progress = CollectiveProgress()  # units of these that are complete, in this pass
        self._trained = self._trained_now()  # of these all ranks know that they reduce them
        self._reducing = False  # a backward pass runs, or was interrupted, whose gradients are reduced as they arrive
        self._pending: PendingReduction | None = None
        self._backward = False
        self._after: dict[tuple[bool, Unit | None, Unit], Unit] = {}  # what was held after these two, in forward or backward
        self._last: tuple[Unit | None, Unit | None] = None, None
        self._ahead: Unit | None = None

    # -- parameters --------------------------------------------------------------------------------------------------------

    def pass_begins(self, backward: bool = False) -> None:
        """Begin a forward or backward pass: what an interrupted one left is forgotten."""
        self._give_up_ahead(None)
        self._last, self._backward = (None, None), backward
        self._forget_pass()
        self._reducing = backward and self._early and not self.paused
        if self._reducing:
            self._agree_on_trained()
        self._ranks.phase = ", in backward within no_sync" if backward and self.paused else ", in backward" if backward else ""

    def _agree_on_trained(self) -> None:
        """Compare with all ranks which parameters are trained, where some were frozen or unfrozen since. A rank where none was
        goes on to a reduction, of another size perhaps, and gloo ends a process that receives more than it expects."""
        trained = self._trained_now()
        if trained == self._trained:
            return
        mine = torch.tensor(trained, dtype=torch.uint8, device="cpu")
        told = self._ranks.all_gather(mine, "which parameters are trained now", apart=not self._replicated)
        for number, placement in enumerate(placement for unit in self._units for placement in unit.gradients.states):
            here = [rank for rank, one in enumerate(told[:, number].tolist()) if one]
            if 0 < len(here) < len(told):
                raise RankError(
                    f"the ranks train different parameters: {placement.name!r} is trained on rank {', '.join(map(str, here))}, "
                    "and frozen elsewhere. Freeze and unfreeze parameters on all ranks"
                )
        self._trained = trained

    def _trained_now(self) -> list[bool]:
        return [_is_trained(placement) for unit in self._units for placement in unit.gradients.states]

    def before_hold(self, unit: Unit) -> None:
        """Have what other processes updated of a unit that will be held now."""
        self._give_up_ahead(unit)
        self._tell_progress()
        if self._replicas:
            self._refresh(self._replicas[: self._replicas.index(unit) + 1])

    def after_hold(self, unit: Unit) -> None:
        """Begin to gather the unit that followed this one, which is held now, in the pass before."""
        self._reduce_agreed()
        before, last = self._last
        if last is not None:
            self._after[self._backward, before, last] = unit
        self._last = last, unit
        if last is None:  # the first of a pass: forward and backward may begin with the same, and go on with another
            return
        follows = None if self._replicas or not self._overlapped else self._after.get((self._backward, last, unit))
        if follows is not None and not follows.held:
            follows.apply_update()
            self._tell_progress()
            self._ahead = follows
            follows.used.prefetch()

    def _give_up_ahead(self, unit: Unit | None) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead is not unit:
            for storage in ahead.storages:
                storage.give_up()

    def refresh(self) -> None:
        self._give_up_ahead(None)
        self._refresh(self._replicas)

    def _refresh(self, units: Iterable[Unit]) -> None:
        """Fetch what other processes updated, in the order of the model and also of units that this rank skipped: ranks may use
        different ones."""
        for unit in units:
            if not unit.held:
                unit.apply_update()
                unit.storage.refresh()

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def moved_on(self) -> None:
        """Begin the reductions that are complete, as backward goes on to another unit."""
        if self._reducing and self._overlapped:
            while self._is_idle() and self._begun < len(self._order) and self._order[self._begun].gradients.has_all:
                self._begin(self._order[self._begun])

    def _tell_progress(self) -> None:
        """Have the next gather say how many units are complete here."""
        if not self._reducing or self._replicas or not (self._prompt or self._overlapped):
            self._ranks.progress = None
            return
        complete = self._begun
        while complete < len(self._order) and self._order[complete].gradients.has_all:
            complete += 1
        self._progress.here, self._ranks.progress = complete, self._progress

    def _reduce_agreed(self) -> None:
        """Reduce units that are complete on all ranks, if it is their turn."""
        while self._reducing and self._begun < self._progress.everywhere:
            if self._overlapped and not self._is_idle() and self._progress.here - self._begun < BACKLOG:
                break
            self._begin(self._order[self._begun])
            if not self._overlapped:
                self._finish_pending()

    def backward_ended(self) -> Iterable[tuple[Unit, Placement]]:
        """Reduce what is left; return what got a gradient in this pass, on any rank."""
        found: list[tuple[Unit, Placement]] = []
        if self._reducing:
            self._refresh(self._replicas)  # another rank may have used what this one did not
            for unit in self._order[self._begun :]:
                self._begin(unit)
            self._finish_pending()
            found = self._agree()
        self._forget_pass()
        return found

    def abandon(self) -> None:
        """Wait for what is under way, and forget it: an exception struck, or all has ended."""
        try:
            self._give_up_ahead(None)
            if self._reducing and not self._ranks.failed:
                self._catch_up()
        finally:
            try:
                self._finish_pending()
            finally:
                self._forget_pass()

    def _catch_up(self) -> None:
        """Begin the reductions that another rank had begun before an exception ended a backward pass, on all ranks that go on
        after it."""
        for unit in self._order[self._begun : self._progress.everywhere]:  # another rank may wait for these
            self._begin(unit)
        mine = torch.tensor([self._begun], dtype=torch.int64, device="cpu")
        begun = int(self._ranks.all_gather(mine, "how far an interrupted backward pass was", apart=True).amax())
        for unit in self._order[self._begun : begun]:
            self._begin(unit)

    def _forget_pass(self) -> None:
        self._begun, self._reducing, self._progress, self._ranks.progress = 0, False, CollectiveProgress(), None
        self._ranks.phase = ""
        self._order = [unit for unit in reversed(self._units) if any(map(_is_trained, unit.gradients.states))]

    def synchronise(self) -> None:
        self.abandon()
        self._refresh(self._replicas)
        for unit in self._units:
            _local(unit).collect()  # what somebody assigned is looked at here, too
        places = [(unit, placement) for unit in reversed(self._units) for placement in unit.gradients.states]
        some = [unit.gradients.states[placement].unreduced for unit, placement in places]
        flags = torch.tensor(some, dtype=torch.uint8, device="cpu")
        anywhere = self._ranks.all_gather(flags, "which gradients there are", apart=not self._replicated).amax(0)
        wanted: dict[Unit, list[Placement]] = {}
        for (unit, placement), there in zip(places, anywhere.tolist(), strict=True):
            if there:  # also of one that was frozen since
                wanted.setdefault(unit, []).append(placement)
        for unit, placements in wanted.items():
            self._begin(unit, placements)
        self._finish_pending()
        self._agree()

    def _begin(self, unit: Unit, placements: Sequence[Placement] | None = None) -> None:
        """Begin to reduce the gradients ``placements`` of a unit, which some rank has (None: all that are trained)."""
        self._finish_pending()
        self._begun += 1
        wanted = list(filter(_is_trained, unit.gradients.states)) if placements is None else placements
        self._pending = PendingReduction(self._ranks, unit, wanted)

    def _is_idle(self) -> bool:
        """Finish a reduction that has completed; return whether nothing is under way any more."""
        if self._pending is not None and self._pending.under.done:
            self._finish_pending()
        return self._pending is None

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    def _agree(self) -> list[tuple[Unit, Placement]]:
        """Agree with all ranks on which parameters have a gradient, and whether it is finite; return those that have one."""
        flags, owners = [], []
        for unit in reversed(self._units):
            for placement, state in unit.gradients.states.items():
                waits = 4 * state.unreduced  # was frozen between no_sync and this pass
                flags.append(int(placement.grad is not None) + (0 if state.finite else 2) + waits)
                owners.append((unit, placement))
        mine = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        everybody = self._ranks.all_gather(mine, "which parameters have a gradient")
        there, infinite, waiting = ((everybody & bit).amax(0).tolist() for bit in (1, 2, 4))
        found = []
        for (unit, placement), present, wrong, waits in zip(owners, there, infinite, waiting, strict=True):
            if unit.gradients.agree(placement, present=bool(present), finite=not wrong, more=bool(waits)):
                found.append((unit, placement))
        return found

    # -- agreeing ----------------------------------------------------------------------------------------------------------

    def norms(self, partial: torch.Tensor, order: float) -> torch.Tensor:
        everybody = self._ranks.all_gather(host(partial), f"norms of gradients, of order {order:g}")
        if order == float("inf"):
            return everybody.amax(0)
        if order == 0:  # how many elements are not zero
            return everybody.sum(0)
        if order < 0:
            raise MisuseError(f"norms of order {order} are not computed over several ranks: use 0, a positive one, or infinity")
        whole: torch.Tensor = torch.linalg.vector_norm(everybody, order, dim=0)
        return whole


def gradient_sync(partition: Partition, units: Sequence[Unit], pool: int, held: int) -> GradientSync:
    """Make what reduces the gradients of ``units``, which ``partition`` divides; ``pool``: bytes of memory in the store;
    ``held``: bytes of the units that are held at a time, at most."""
    if not isinstance(partition, Sharded):
        return NoSync()
    roomy, prompt = overlaps([unit.plan for unit in units], pool, held)
    stage = partition.stage
    return ReduceScatter(
        partition.ranks, units, early=stage.early, replicated=stage.replicated, overlapped=roomy, prompt=prompt
    )


def overlaps(units: Sequence[UnitPlan], pool: int, held: int) -> tuple[bool, bool]:
    """Return whether a pool has room to gather and reduce beside computing, and whether it has room for one reduction beside
    the units that are held. Of the latter are in use, wherever they lie: what is held, what is sent and what is received; one
    tensor more has room beside them in twice as much."""
    largest = max((unit.nbytes for unit in units), default=0)
    return pool >= ROOMY * largest, pool >= 2 * (held + 3 * largest)


class PendingReduction:
    """A reduction of one unit's gradients that is under way; ``wanted`` are those that some rank has."""

    def __init__(self, ranks: Ranks, unit: Unit, wanted: Sequence[Placement]) -> None:
        self._ranks, self._unit, self._local, self._wanted = ranks, unit, _local(unit), wanted
        self._room = ExitStack()
        whole = self._local.complete()
        key, store = f"{self._local.key}/received", in_dram(unit.store, unit.owner)
        store.create(key, TensorSpec("uint8", (whole.numel(),), 1))
        self._room.callback(store.delete, key)
        try:
            self._received = self._room.enter_context(store.lease(key, access=Access.WRITE))
            self.under: Under = ranks.all_to_all(self._received, whole, f"gradients of {unit.key!r}")
        except BaseException:
            self._received = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._room.close()
            raise

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduction, and add its result to this rank's shard."""
        try:
            self.under.wait()
            gradients = self._unit.gradients
            mean = self._ranks.add_up(self._received, self._unit.plan.placements[0].dtype)
            gradients.open(self._wanted)
            for placement in self._wanted:
                part = gradients.parts.get(placement)
                if part is None:
                    gradients.clear(gradients.states[placement])
                else:
                    gradients.write(placement, mean[part.element : part.element + part.numel])
            gradients.close()
            del mean
        finally:
            del self._received
            self._room.close()
            self._local.close()
        self._local.discard(self._wanted)  # not those of what was frozen since: they are wanted when somebody asks


def _is_trained(placement: Placement) -> bool:
    return placement.parameter.requires_grad


def _local(unit: Unit) -> LocalGradients:
    assert isinstance(unit.arriving, LocalGradients)
    return unit.arriving
