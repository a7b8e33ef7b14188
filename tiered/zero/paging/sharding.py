"""Divide parameters, gradients and optimizer states among ranks: ZeRO's stages as layouts.

After Rajbhandari et al., 2020 (https://arxiv.org/abs/1910.02054). Per step and rank, of Φ parameters and N ranks, stages 1 and
2 send 2Φ(N-1)/N elements (gradients scattered, updated parameters gathered), stage 3 sends 3Φ(N-1)/N (parameters gathered in
forward and in backward, gradients scattered).

A partition knows plans of units, never units: ``reduction.gradient_sync`` makes from it what reduces gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn

from tiered.errors import CommitError, MisuseError, RankError, TieredError, expect_type, number_between
from tiered.store import TieredStore
from tiered.types import Access, Owner, TensorSpec
from tiered.zero.collectives import Agree, Ranks, Term
from tiered.zero.paging.gradients import ArrivingGradients, LocalGradients, UnitGradients
from tiered.zero.paging.storage import AllGathered, CheckpointRecord, Local, ParameterStorage, Replicated, TensorStore, in_dram
from tiered.zero.paging.units import Placement, UnitPlan
from tiered.zero.rank_stores import BEGUN, META, number_of, said_in, shared_json
from tiered.zero.rules.forms import StateForm

__all__ = ["Partition", "Sharded", "Stage", "Stage1", "Stage2", "Stage3", "Unsharded"]

FILLING = "fill the units of this model"
"""What ranks agree on before each unit's first values are exchanged, and when all of them are."""


@dataclass(frozen=True)
class Stage(ABC):
    """What ranks divide beside the optimizer's states, and which processes these are: those of ``group`` (None: all).

    ``timeout``: seconds that a rank waits for the others before all raise RankError (None: as ``group`` has it). Raises
    MisuseError for a group that is none, and a timeout that is not above 0."""

    group: dist.ProcessGroup | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            expect_type(self.group, dist.ProcessGroup, "group is what torch.distributed.new_group gives to its processes")
        if self.timeout is not None:
            number_between("timeout is how many seconds a rank waits for the others", self.timeout, 0, math.inf)

    @property
    @abstractmethod
    def early(self) -> bool:
        """Return whether gradients are reduced as soon as backward has completed a unit; otherwise they are reduced once a
        step."""
        ...

    @property
    @abstractmethod
    def replicated(self) -> bool:
        """Return whether each rank has all parameters."""
        ...


class Stage1(Stage):
    """Optimizer states are divided, among the processes of ``group`` (None: all). Each rank's store has all parameters, and its
    own gradients of all of them until ``step()``: however many backward passes there are before it, they are reduced once.

    ``timeout``: seconds that a rank waits for the others before all raise RankError (None: as ``group`` has it). Raises
    MisuseError for a group that is none, and a timeout that is not above 0."""

    early, replicated = False, True


class Stage2(Stage):
    """Optimizer states and gradients are divided, among ranks as with ``Stage1``: each backward pass reduces them, unless it is
    within ``zero.no_sync``. Each rank's store has all parameters."""

    early, replicated = True, True


class Stage3(Stage):
    """Parameters are divided, too, among ranks as with ``Stage1``: those of a unit are gathered before it computes."""

    early, replicated = True, False


class _Unfinished(str):
    """Why the last commit of a store is not known to be one of all ranks."""


def _disregard(terms: Iterable[Term]) -> None:
    """Take no terms: generators of them are not run."""


def _lost(fine: torch.Tensor) -> str:
    return "rank " + ", ".join(str(rank) for rank, one in enumerate(fine.tolist()) if not one)


class Partition(Protocol):
    """How the processes of a training divide one model."""

    shares: int
    rank: int

    @property
    def replicated(self) -> bool:
        """Return whether each process has all parameters."""
        ...

    def share(self) -> dict[str, int | str]:
        """Return what a checkpoint says of this process's share."""
        ...

    def stored(
        self, store: TieredStore, updates: TensorStore, key: str, plan: UnitPlan, checkpoint: CheckpointRecord
    ) -> ParameterStorage:
        """Make the storage of one unit's parameters. ``updates``: the store, where updates are computed."""
        ...

    def averaged(
        self, store: TieredStore, updates: TensorStore, key: str, plan: UnitPlan, checkpoint: CheckpointRecord
    ) -> ParameterStorage:
        """Make the storage of the average of one unit's parameters: of each process its share, as the unit is in use."""
        ...

    def arriving(
        self, store: TieredStore, owner: Owner, key: str, plan: UnitPlan, gradients: UnitGradients
    ) -> ArrivingGradients:
        """Return where backward's gradients of a unit go."""
        ...

    def filling(self, store: TieredStore, owner: Owner, key: str, plan: UnitPlan) -> AbstractContextManager[torch.Tensor]:
        """Give host memory for all of a unit as it is in the store (uint8), to be filled with its first values; ``key`` has
        them then."""
        ...

    def same_buffers(self, model: nn.Module) -> None:
        """Overwrite the model's buffers with the values of rank 0."""
        ...

    def agreeing(self, what: str) -> AbstractContextManager[Agree]:
        """Give what takes terms, for a block of code, at whose end all processes compare these: ``Ranks.agreeing``."""
        ...

    def all_min(self, value: int) -> int:
        """Return the minimum of the values that all processes give."""
        ...

    def all_true(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Return for each flag whether it is True in all processes."""
        ...

    def refuse_apart(self, store: TieredStore) -> None:
        """Raise MisuseError where the processes' stores are not as of one commit."""
        ...

    def goes_on(self, number: int) -> None:
        """Count on from the rank commit with this number (0: there was none), which is in other stores."""
        ...

    def noted(self, store: TieredStore, meta: Mapping[str, object] | None) -> Mapping[str, object] | None:
        """Return the meta of a commit that one process makes by itself."""
        ...

    def joins(self, store: TieredStore) -> None:
        """Note that a model in ``store`` is divided by this partition."""
        ...

    def commit(
        self, store: TieredStore, meta: Mapping[str, object] | None, prepare: Callable[[], None], undo: Callable[[], None]
    ) -> int:
        """Call ``prepare()`` and ``store.commit`` on all ranks, so that the commit counts on all of them or on none; then
        ``undo()`` what is prepared."""
        ...

    def whole(
        self, plan: UnitPlan, placement: Placement, part: torch.Tensor, what: str, form: StateForm | None = None
    ) -> torch.Tensor:
        """Return all of a parameter, or of a tensor like it, of which this rank has ``part``: in the parameter's shape and
        strides, in host memory, as ``part``. Of a state of ``form``: as ``StateForm.shaped`` gives it."""
        ...


class Unsharded:
    """Partition of one process, which has everything."""

    shares, rank, replicated = 1, 0, True

    def __init__(self) -> None:
        self._after = 0

    def share(self) -> dict[str, int | str]:
        return {"stage": "Alone", "rank": 0, "ranks": 1}

    def stored(
        self, store: TieredStore, updates: TensorStore, key: str, plan: UnitPlan, checkpoint: CheckpointRecord
    ) -> ParameterStorage:
        return Local(store, key, checkpoint, updates)

    averaged = stored

    def arriving(
        self, store: TieredStore, owner: Owner, key: str, plan: UnitPlan, gradients: UnitGradients
    ) -> ArrivingGradients:
        return gradients

    @contextmanager
    def filling(self, store: TieredStore, owner: Owner, key: str, plan: UnitPlan) -> Iterator[torch.Tensor]:
        host = in_dram(store, owner)
        host.create(key, TensorSpec("uint8", (plan.stored_nbytes,), 1))
        with host.lease(key, access=Access.WRITE) as unit:
            yield unit
            del unit

    def same_buffers(self, model: nn.Module) -> None: ...

    @contextmanager
    def agreeing(self, what: str) -> Iterator[Agree]:
        yield _disregard

    def all_min(self, value: int) -> int:
        return value

    def all_true(self, flags: Sequence[bool], what: str) -> list[bool]:
        return list(flags)

    def refuse_apart(self, store: TieredStore) -> None: ...

    def goes_on(self, number: int) -> None:
        self._after = number

    def noted(self, store: TieredStore, meta: Mapping[str, object] | None) -> Mapping[str, object] | None:
        """Return ``meta`` with the next number of a rank commit where ranks committed before, so that the newest of several
        sets of stores stays known."""
        self._after = max(self._after, number_of(store.meta))
        if not self._after:
            return meta
        self._after += 1
        return {**(store.meta if meta is None else meta), META: {"name": uuid4().hex, "number": self._after, "of": 1}}

    def joins(self, store: TieredStore) -> None: ...

    def commit(
        self, store: TieredStore, meta: Mapping[str, object] | None, prepare: Callable[[], None], undo: Callable[[], None]
    ) -> int:
        prepare()
        return store.commit(self.noted(store, meta))

    def whole(
        self, plan: UnitPlan, placement: Placement, part: torch.Tensor, what: str, form: StateForm | None = None
    ) -> torch.Tensor:
        return part


class Sharded:
    """Partition of several processes, each of which has a share."""

    def __init__(self, ranks: Ranks, stage: Stage) -> None:
        self.ranks, self.stage = ranks, stage
        self.shares, self.rank = ranks.size, ranks.rank
        self._after = 0

    @property
    def replicated(self) -> bool:
        return self.stage.replicated

    def share(self) -> dict[str, int | str]:
        return {"stage": type(self.stage).__name__, "rank": self.rank, "ranks": self.shares}

    def stored(
        self, store: TieredStore, updates: TensorStore, key: str, plan: UnitPlan, checkpoint: CheckpointRecord
    ) -> ParameterStorage:
        kind = Replicated if self.replicated else AllGathered
        return kind(store, key, checkpoint, updates, plan, self.ranks)

    def averaged(
        self, store: TieredStore, updates: TensorStore, key: str, plan: UnitPlan, checkpoint: CheckpointRecord
    ) -> ParameterStorage:
        return AllGathered(store, key, checkpoint, updates, plan.as_used(), self.ranks)

    def arriving(
        self, store: TieredStore, owner: Owner, key: str, plan: UnitPlan, gradients: UnitGradients
    ) -> ArrivingGradients:
        return LocalGradients(in_dram(store, owner), f"{key}/local", plan, gradients)

    @contextmanager
    def filling(self, store: TieredStore, owner: Owner, key: str, plan: UnitPlan) -> Iterator[torch.Tensor]:
        with ExitStack() as filled:
            with self.agreeing(FILLING):  # or what is wrong on one rank has the others wait for its values
                fill = Unsharded().filling if self.replicated else self._gathered
                unit = filled.enter_context(fill(store, owner, key, plan))
                yield unit
            self.ranks.broadcast(unit, f"the first values of unit {plan.name!r}")
            del unit

    @contextmanager
    def _gathered(self, store: TieredStore, owner: Owner, key: str, plan: UnitPlan) -> Iterator[torch.Tensor]:
        """Give memory for all of a unit, of which the store has this rank's part then."""
        share, host = plan.share_nbytes, in_dram(store, owner)
        gathered = AllGathered(store, key, CheckpointRecord(store, owner), host, plan, self.ranks)
        host.create(key, TensorSpec("uint8", (share,), 1))
        with gathered.room() as unit:
            yield unit
            gathered.write_back(unit)
            del unit

    def same_buffers(self, model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            self.ranks.broadcast(buffer, f"the buffer {name!r}")

    def agreeing(self, what: str) -> AbstractContextManager[Agree]:
        return self.ranks.agreeing(what)

    def all_min(self, value: int) -> int:
        return int(self.ranks.all_gather(torch.tensor([value], dtype=torch.int64, device="cpu"), "the smallest pool").amin())

    def all_true(self, flags: Sequence[bool], what: str) -> list[bool]:
        return self.ranks.all_gather(torch.tensor(flags, dtype=torch.uint8, device="cpu"), what).amin(0).bool().tolist()

    def refuse_apart(self, store: TieredStore) -> None:
        unfinished = store.attached.find(_Unfinished)
        if unfinished is not None:
            raise CommitError(f"{unfinished}: open the stores again with zero.open_store")
        said = said_in(store.meta, str(store))
        names = shared_json(self.ranks, None if said is None else said.name, str | None)
        if len(set(names)) > 1:
            raise MisuseError(
                f"the ranks' stores are not as of one commit (this is rank {self.rank}'s {store}, at generation "
                f"{store.generation}): open them with zero.open_store, which finds the newest that all have"
            )

    def goes_on(self, number: int) -> None:
        self._after = number

    def noted(self, store: TieredStore, meta: Mapping[str, object] | None) -> Mapping[str, object] | None:
        raise AssertionError("ranks commit together")

    def joins(self, store: TieredStore) -> None:
        store.refuse_commits(
            "the ranks' stores are committed together, by zero.commit: a commit of this one alone would take the place of one "
            "that all have"
        )

    def commit(
        self, store: TieredStore, meta: Mapping[str, object] | None, prepare: Callable[[], None], undo: Callable[[], None]
    ) -> int:
        """Commit on each rank to its own store, and acknowledge once all have. Ranks that have the generation, and those that
        do not, go back to the last one of all when the stores are opened again (``zero.open_store``)."""
        unfinished = store.attached.find(_Unfinished)
        if unfinished is not None:
            raise CommitError(
                f"{unfinished}; so some ranks have a generation that others lack, and another one could drop the last "
                "that all have: open the stores again with zero.open_store"
            )
        try:
            said, begun = self._begin(store, prepare)
        except BaseException:
            undo()  # on each rank: what is prepared is of a commit that there is not
            raise
        before = store.meta if meta is None else dict(meta)
        if not begun:  # so that a rank that has nothing has lost it, where another has a commit of all
            alone = {key: value for key, value in store.meta.items() if key != META}  # it is no commit of all
            self._commit(store, {**alone, BEGUN: True}, "could not begin to commit")
        return self._commit(store, {**before, BEGUN: True, META: said}, "could not commit; the last commit of all ranks holds")

    def _begin(self, store: TieredStore, prepare: Callable[[], None]) -> tuple[dict[str, object], bool]:
        """Return what the meta of the commit says of it, and whether all ranks have committed before."""
        error: Exception | None = None
        try:
            prepare()
        except RankError:
            raise
        except Exception as problem:
            error = problem
        name = torch.frombuffer(bytearray(uuid4().bytes), dtype=torch.uint8).clone()
        self.ranks.broadcast(name, "the name of a commit")
        number = max(self._after, number_of(store.meta)) + 1
        mine = torch.tensor([number, error is None, BEGUN in store.meta], dtype=torch.int64, device="cpu")
        told = self.ranks.all_gather(mine, "the begin of a commit")
        self._agreed(told[:, 1], error, "could not begin a commit; nothing was committed")
        self._after = int(told[:, 0].amax())
        first = META not in store.meta  # in these stores, whatever was taken over
        said = {"name": bytes(name.tolist()).hex(), "number": self._after, "of": self.shares, "first": first}
        return said, bool(told[:, 2].all())

    def _commit(self, store: TieredStore, meta: Mapping[str, object], otherwise: str) -> int:
        store.attached.put(_Unfinished, _Unfinished("a commit did not come to its end"))
        generation, error = 0, None
        store.refuse_commits(None)
        try:
            generation = store.commit(meta)
        except TieredError as problem:
            error = problem
        finally:
            self.joins(store)
        mine = torch.tensor([error is None], dtype=torch.bool, device="cpu")
        done = self.ranks.all_gather(mine, "the end of a commit").view(-1)
        if not all(done):
            store.attached.put(_Unfinished, _Unfinished(f"the commit failed on {_lost(done)}"))
        self._agreed(done, error, otherwise)
        store.attached.put(_Unfinished, None)
        return generation

    def _agreed(self, fine: torch.Tensor, error: Exception | None, what: str) -> None:
        """Raise ``error``, or CommitError where another rank has one."""
        if error is not None:
            raise error
        if not all(fine):
            raise CommitError(f"{_lost(fine)}, which says why, {what}")

    def whole(
        self, plan: UnitPlan, placement: Placement, part: torch.Tensor, what: str, form: StateForm | None = None
    ) -> torch.Tensor:
        shares = [plan.parts(rank).get(placement) for rank in range(self.shares)]
        form = form or StateForm(part.dtype)
        sizes = [0 if share is None else form.count(share.numel, placement.shape) for share in shares]
        padded = torch.zeros(max(sizes, default=0), dtype=part.dtype, device="cpu")
        padded[: part.numel()] = part.reshape(-1)
        found = self.ranks.all_gather(padded, f"{what} of {placement.name!r}")
        rows = [row[:size] for row, size in zip(found, sizes, strict=True) if size]
        flat = rows[0].clone() if form.of_whole else torch.cat(rows or [found.flatten()])
        return form.shaped(flat, placement.shape, placement.stride)
