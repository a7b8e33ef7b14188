"""Keep the optimizer states of parameters that stay in memory in a store: of a model, of a DTensor's shard, or of a replica's
share.

The elements of a param group that are of one type are a row. It is cut into *rounds*, each of which has a chunk of states for
every rank that has a share, and of which each is updated, and gathered, before the next but one begins. So what a step takes
beside the parameters does not grow with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer as TorchOptimizer

from tiered.errors import CapacityError, ManifestError, MisuseError
from tiered.store import TieredStore
from tiered.types import Owner
from tiered.zero.collectives import Ranks, Under
from tiered.zero.optimizers.belonging import Belonging
from tiered.zero.optimizers.loaded import refuse_forms, refuse_lacking
from tiered.zero.optimizers.paged import mixed, refuse_masters
from tiered.zero.optimizers.resident_shard import LocalShard
from tiered.zero.optimizers.updates import Optimizing, Updates
from tiered.zero.paging.pager import Pager
from tiered.zero.paging.storage import TensorStore, host, in_dram
from tiered.zero.paging.units import Limits, Placement
from tiered.zero.paging.update import Pending, States, Update
from tiered.zero.rank_stores import shared_json
from tiered.zero.record import MOST, MOST_STEPS, refuse_other_states
from tiered.zero.rules.forms import StateForm, forms_of, updates_whole
from tiered.zero.rules.known import is_unnamed, name_in
from tiered.zero.rules.rule import SMALLEST_BLOCK, UpdateRule, constants_of, name_of, terms_of

__all__ = ["ResidentUpdates"]

VERSION = 1
ROUND = 8 << 20
"""Elements of all ranks' shares of a round at most: what is gathered at once has room twice."""
STEP = 16
"""Elements at multiples of which parameters are cut: within them the kernel computes as it would on the whole, and not as it
computes what is left over at the end of a tensor."""
ROUNDS_AHEAD = 2
"""Rounds whose states are asked for before they are needed."""
ELEMENTWISE = StateForm(torch.float32)
NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


_Steps = list[Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]]


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    """How the parameters of a group are divided among the ranks, and what they were."""

    version: int
    rank: int
    ranks: int
    limit: Annotated[int, msgspec.Meta(ge=STEP, le=ROUND, multiple_of=STEP)]
    parameters: list[list[Any]]
    rule: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Of a group that another rule than AdamW's updates: its name, and the forms of its states by name."""


@dataclass(eq=False)
class ShardSegment(Placement):
    """Elements ``begin`` to ``end`` of a ``LocalShard``, whose states are at ``element`` of a chunk."""

    begin: int = 0
    end: int = 0
    local: LocalShard = field(kw_only=True)
    _here: torch.Tensor | None = None  # its values in host memory, while they are updated there
    _gradient: torch.Tensor | None = None

    @classmethod
    def made(cls, local: LocalShard, begin: int, end: int, element: int) -> ShardSegment:
        return cls(
            local.parameter, local.name, 0, (1,), local.dtype, element=element, begin=begin, end=end, local=local
        )

    @property
    def full_shape(self) -> torch.Size:
        return self.local.shape

    @property
    def full_stride(self) -> tuple[int, ...]:
        return self.local.stride

    def __post_init__(self) -> None:
        self.shape, self.dtype = torch.Size((self.end - self.begin,)), self.local.dtype

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Have values and gradient in host memory meanwhile; values that are elsewhere are written back."""
        self._here, self._gradient = host(self.all), host(self.local.gradient[self.begin : self.end])
        try:
            yield
        finally:
            if self._here.device != self.local.values.device:
                self.all.copy_(self._here)
            self._here = self._gradient = None

    def stored_flat(self, unit: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        assert self._here is not None
        return self._here[start:stop]

    def flat(self, unit: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        assert self._gradient is not None
        return self._gradient[start:stop]

    @property
    def all(self) -> torch.Tensor:
        """Return the values, in their own memory."""
        return self.local.values[self.begin : self.end]

    def take(self, row: torch.Tensor) -> torch.Tensor:
        """Return this segment's elements of ``row``, a rank's chunk or what is as long."""
        return row[self.element : self.element + self.numel]


class Round:
    """One round: ``segments[rank]`` in order; ``share``: elements of each rank's chunk."""

    def __init__(
        self, store: TensorStore, key: str, segments: list[list[ShardSegment]], share: int, rank: int, rule: UpdateRule
    ) -> None:
        self.segments, self.share, self.rank = segments, share, rank
        self.own = segments[rank]
        self.dtype = segments[0][0].dtype
        self.states = States(store, key, self.own, share, {self.dtype})
        self.keep(rule)
        self.states.follow()
        self.states.stale_masters.clear()  # a first step begins with the parameter anyway

    @property
    def group(self) -> int:
        """Return the number of the param group that this is of."""
        return next(segment.local.group for mine in self.segments for segment in mine)

    def keep(self, rule: UpdateRule) -> None:
        """Have the parameters of all ranks keep what ``rule`` keeps."""
        for name in {segment.name for mine in self.segments for segment in mine}:
            self.states.use(name, forms_of(rule, self.states.wide))

    def concerns(self, locals_: Mapping[LocalShard, object]) -> bool:
        return any(segment.local in locals_ for mine in self.segments for segment in mine)

    def keys(self, locals_: Mapping[LocalShard, object]) -> list[str]:
        """Return the keys of the store that ``update`` will use."""
        return [key for _, keys in self.states.chunks(s for s in self.own if s.local in locals_) for key in keys]

    def update(self, updates: Mapping[LocalShard, Update]) -> None:
        mine: dict[Placement, Update] = {s: updates[s.local] for s in self.own if s.local in updates}
        if self.dtype is torch.float16:
            for segment in self.own:
                if segment in mine and mine[segment].step > 1:
                    self._follow(segment)
        with ExitStack() as at_hand:
            for segment in self.own:
                if segment in mine:
                    at_hand.enter_context(segment.at_hand())
            self.states.apply(Pending(mine), NOTHING, NOTHING)

    def _follow(self, segment: ShardSegment) -> None:
        """Restart the fp16 master of elements whose value was changed since the last step. (``States.follow`` has an update do
        so for bf16.)"""
        value = host(segment.all)
        copies = self.states.copies(segment, value)
        kept = copies["master"].to(torch.float16) == value
        if not bool(kept.all()):
            self.load(segment, {**copies, "master": torch.where(kept, copies["master"], value.float())})

    def load(self, segment: ShardSegment, state: dict[str, torch.Tensor]) -> None:
        """Load a state as ``States.load`` does, with a master made from the value where there is none, or that of another
        value."""
        value = host(segment.all)
        self.states.load(segment, value, state)
        if segment in self.states.stale_masters and segment.dtype in (torch.bfloat16, torch.float16):
            self.states.load(segment, value, {**state, "master": value.float()})
        self.states.stale_masters.discard(segment)

    # -- what the ranks tell each other --------------------------------------------------------------------------------------

    def gather(self, ranks: Ranks, updates: Mapping[LocalShard, Update]) -> tuple[Under, torch.Tensor]:
        """Begin to gather the values that each rank has updated."""
        size = self.share * self.dtype.itemsize
        whole = torch.empty(ranks.size * size, dtype=torch.uint8, device="cpu")
        own = whole[self.rank * size : (self.rank + 1) * size]
        values = own.view(self.dtype)
        for segment in self.own:
            if segment.local in updates:
                segment.take(values).copy_(segment.all)
        return ranks.gather(whole, own, f"the updated parameters of {self.states.key!r}"), whole

    def scatter(self, whole: torch.Tensor, updates: Mapping[LocalShard, Update]) -> None:
        """Take over the updated values of the other ranks."""
        rows = whole.view(self.dtype).view(len(self.segments), -1)
        for rank, segments in enumerate(self.segments):
            for segment in segments if rank != self.rank else ():
                if segment.local in updates:
                    segment.all.copy_(segment.take(rows[rank]))

    def copies(self, into: Mapping[LocalShard, dict[str, torch.Tensor]], ranks: Ranks | None) -> None:
        """Copy all states of this round, those of other ranks too, into flat tensors of each parameter's size."""
        flat = {s: self.states.flat_copies(s, host(s.all)) for s in self.own if s.local in into}
        if ranks is None:
            for segment, found in flat.items():
                for name, value in found.items():
                    self._place(into[segment.local], segment, name, value)
            return
        first = self.segments[0][0]
        forms = dict(self.states.states_of(first))
        if "master" in self.states.blank(first):
            forms["master"] = ELEMENTWISE
        for name, form in forms.items():
            counts = [[form.count(s.numel, s.local.shape) for s in segments] for segments in self.segments]
            own = [
                flat[s][name] if s in flat and count else torch.zeros(count, dtype=form.dtype, device="cpu")
                for s, count in zip(self.own, counts[self.rank], strict=True)
            ]
            row = torch.zeros(max(map(sum, counts)), dtype=form.dtype, device="cpu")
            if own:
                row[: sum(counts[self.rank])] = torch.cat(own)
            rows: Any = ranks.all_gather(row, f"{name} of {self.states.key!r}") if len(row) else []
            for here, segments, sizes in zip(rows, self.segments, counts, strict=len(row) > 0):
                for segment, value in zip(segments, here[: sum(sizes)].split(sizes), strict=True):
                    if segment.local in into and len(value):
                        self._place(into[segment.local], segment, name, value)

    def _place(self, whole: dict[str, torch.Tensor], segment: ShardSegment, name: str, value: torch.Tensor) -> None:
        """Copy a segment's values of one state to their place in its parameter's."""
        form, shape = self.states.states_of(segment).get(name, ELEMENTWISE), segment.local.shape
        count = form.count(segment.local.numel, shape)
        kept = whole.setdefault(name, torch.empty(count, dtype=value.dtype, device="cpu"))
        kept[form.span(segment.begin, segment.end, shape)] = value


class ResidentUpdates(Updates):
    """Updates of parameters that stay in memory, with states under ``name``. ``ranks``: who has a share of each (None: this
    process has all).

    ``NAME/steps`` says how many steps each parameter has had. While a step is under way it is not there, so that neither a
    commit nor a step goes on from one that was interrupted. It is what counts: after ``store.rollback()`` it is the older one.
    """

    def __init__(
        self, optimizer: Optimizing, store: TieredStore, name: str, existing: str, ranks: Ranks | None
    ) -> None:
        super().__init__(optimizer)
        self.owner = Owner("optimizer", name)
        self._held = store.owned(self.owner)
        if existing == "continue":
            existing = "resume" if self._held else "refuse"
        self.store, self.name, self.ranks, self._resume = store, name, ranks, existing == "resume"
        going_on = "'resume'" if self._resume else "'refuse' or 'overwrite'"
        self.existing = f"{going_on}, as {name!r}"
        self.locals: list[LocalShard] = []
        self._rounds: list[Round] = []
        self._layouts: list[bytes] = []
        self._rules: list[UpdateRule] = []
        self._written = False
        self._forward = True
        self._belonging = Belonging(store, self.owner, self._note, found=existing)
        pool = store.statistics().tier("dram").capacity
        if ranks is not None:
            pool = int(ranks.all_gather(torch.tensor([pool], dtype=torch.int64, device="cpu"), "the smallest pool").amin())
        self._limit = min(Limits.of(pool).chunk, max(1, ROUND // self._size // STEP) * STEP)
        if self._held and existing == "refuse":
            raise MisuseError(
                f"the store already holds {len(self._held)} tensor{'' if len(self._held) == 1 else 's'} under {name!r}: give "
                "another name=, existing='overwrite', or existing='continue' to go on with the states that an optimizer left "
                "there"
            )
        if self._resume and not self._held:
            raise MisuseError(f"{store} has no states under {name!r} to go on with: leave existing='resume' out")
        if self._resume and self._key not in store:
            raise MisuseError(
                f"what {store} has under {name!r} are no states to go on with: not an optimizer's, or of a step that was "
                "interrupted; then open an earlier generation"
            )

    @property
    def _size(self) -> int:
        return 1 if self.ranks is None else self.ranks.size

    @property
    def _rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def _key(self) -> str:
        return f"{self.name}/steps"

    # -- parameters --------------------------------------------------------------------------------------------------------

    def refuse_mixed(self) -> None:
        paged = [hasattr(parameter, "_tiered") for parameter in self.parameters]
        if any(paged):
            both = "these parameters are paged, and their states are kept beside them: leave store= out"
            raise MisuseError(both) if all(paged) else mixed(self.parameters)

    def term_of(self, parameter: torch.Tensor, pager: Pager | None) -> str | None:
        return f"{parameter.dtype} of shape {tuple(parameter.shape)}, strides {tuple(parameter.stride())}"

    def add(self, names: Sequence[str], rule: UpdateRule) -> None:
        group = len(self._layouts)
        parameters = self.groups[group]["params"]
        for name, parameter in zip(names, parameters, strict=True):
            refuse_masters(name, parameter.dtype, rule)
        fresh = [LocalShard(parameter, name, group) for parameter, name in zip(parameters, names, strict=True)]
        for local in fresh:
            if local.divided and self.ranks is not None:
                raise MisuseError(f"{local.name} is a DTensor, whose states are divided as it is: leave stage= out")
            _refuse_cut(local, rule)
            if updates_whole(rule):
                self._refuse_small_pool(local, rule)
        key = f"{self.name}/{group}/layout"
        limit = self._limit
        layout = self._layout(fresh, limit, rule)
        if self._resume and key in self.store:
            committed = _read(self.store, key)
            layout["limit"] = limit = committed["limit"]
            expected, said_then = layout, committed.get("rule")
            if "rule" in layout and isinstance(said_then, dict) and "constants" not in said_then:  # of a time before they were
                expected = {**layout, "rule": {name: said for name, said in layout["rule"].items() if name != "constants"}}
            if committed != expected:
                difference = _difference(committed, expected)
                raise MisuseError(f"param group {group} is not what was committed as {self.name!r}: {difference}")
        rounds = self._divided(fresh, group, limit, rule)
        for one in rounds if self._resume else ():
            refuse_other_states(self.store, one.states, one.own)
        self._rounds += rounds
        self._rules.append(rule)
        self._layouts.append(json.dumps(layout).encode())
        self.locals += fresh

    def _layout(self, locals_: Sequence[LocalShard], limit: int, rule: UpdateRule) -> dict[str, Any]:
        """Return what a later process compares of a param group, as JSON has it."""
        layout: dict[str, Any] = {
            "version": VERSION,
            "rank": self._rank,
            "ranks": self._size,
            "limit": limit,
            "parameters": [local.describe() for local in locals_],
        }
        if not is_unnamed(rule):
            kept = {name: f"torch.{form}" for name, form in forms_of(rule, torch.float32).items()}
            layout["rule"] = {"name": name_of(rule), "states": kept}
            if constants_of(rule):  # what states were computed with
                layout["rule"]["constants"] = json.loads(json.dumps(constants_of(rule)))
        return layout

    def follow(self, group: int, rule: UpdateRule) -> None:
        mine = [local for local in self.locals if local.group == group]
        limit = json.loads(self._layouts[group])["limit"]
        self._rules[group], self._layouts[group] = rule, json.dumps(self._layout(mine, limit, rule)).encode()
        for one in self._rounds:
            if one.group == group:
                one.keep(rule)

    def stepped(self, group: int) -> bool:
        if self._key not in self.store:  # in a step that was interrupted
            return True
        return any(step for local, step in zip(self.locals, self.counts(), strict=True) if local.group == group)

    def _write_layout(self, group: int) -> None:
        """Write what a later process compares of a param group, where it is not in the store."""
        key, layout = f"{self.name}/{group}/layout", self._layouts[group]
        if key not in self.store or self.store.get(key).numpy().tobytes() != layout:
            self.store.put(key, torch.frombuffer(bytearray(layout), dtype=torch.uint8), owner=self.owner)

    def _divided(self, locals_: Sequence[LocalShard], group: int, limit: int, rule: UpdateRule) -> list[Round]:
        rounds: list[Round] = []
        for dtype in dict.fromkeys(local.dtype for local in locals_):
            row = [local for local in locals_ if local.dtype is dtype]
            if updates_whole(rule):
                for share, cut in self._owned(row, limit):
                    key = f"{self.name}/{group}/{len(rounds)}"
                    rounds.append(Round(in_dram(self.store, self.owner), key, cut, share, self._rank, rule))
                continue
            step = _step(rule)
            share = _even(math.ceil(sum(_up(local.numel, step) for local in row) / self._size), limit, step)
            rows: list[list[list[ShardSegment]]] = []
            at = share * self._size
            for local in row:
                begin = 0
                while begin < local.numel:
                    if at == share * self._size:
                        rows.append([[] for _ in range(self._size)])
                        at = 0
                    rank, element = divmod(at, share)
                    end = min(local.numel, begin + share - element)
                    rows[-1][rank].append(ShardSegment.made(local, begin, end, element))
                    at, begin = at + _up(end - begin, step), end
            first = len(rounds)
            for number, segments in enumerate(rows, first):
                key = f"{self.name}/{group}/{number}"
                rounds.append(Round(in_dram(self.store, self.owner), key, segments, share, self._rank, rule))
        return rounds

    def write(self) -> list[int]:
        """Write what was added to the store; return ``counts``. Raises MisuseError where the ranks' stores differ in these."""
        self._compare_shards()
        fresh = not self._written and not self._resume
        counted = torch.zeros(0, dtype=torch.int64, device="cpu") if fresh else self._counted()
        more = max(0, len(self.locals) - len(counted))
        steps = torch.cat([counted, torch.zeros(more, dtype=torch.int64, device="cpu")])
        mine: list[int] = steps.tolist()
        everybody = self._everybody(steps)
        if any(counted != mine for counted in everybody):
            raise MisuseError(
                f"the stores of the ranks have states of different steps under {self.name!r} (this one's: {_in_words(mine)}; "
                f"of all: {'; '.join(map(_in_words, everybody))}): open generations of one step"
            )
        for key in () if self._resume else self._held:
            self.store.delete(key, owner=self.owner)
        self._held, self._written = [], True
        self._belonging.begin()
        for group in range(len(self._layouts)):
            if f"{self.name}/{group}/layout" not in self.store:
                self._write_layout(group)
        if more:
            self.store.put(self._key, steps, owner=self.owner)
        return mine[: len(self.locals)]

    def _compare_shards(self) -> None:
        """Raise RankError, on all ranks that have shards of the same DTensors, where these, or what updates them, differ."""
        for group in dict.fromkeys(group for local in self.locals for group in local.groups()):
            if dist.get_world_size(group) == 1:
                continue
            with Ranks.of(group).agreeing("make this optimizer of DTensors") as agree:
                for index, rule in enumerate(self._rules):
                    mine = [local for local in self.locals if local.group == index and group in local.groups()]
                    agree(terms_of(rule, f"param group {index}") if mine else ())
                    agree((f"{local.name} of param group {index}", local.shown_whole()) for local in mine)

    def _everybody(self, steps: torch.Tensor) -> list[list[int]]:
        """Return the step counts of all ranks that have a share of the same states, or of the same parameters."""
        if self.ranks is not None:
            return shared_json(self.ranks, steps.tolist(), _Steps)  # of another length where a rank's store is another
        found: list[list[int]] = []
        for group in dict.fromkeys(group for local in self.locals for group in local.groups()):
            if dist.get_world_size(group) > 1:
                found += shared_json(Ranks.of(group), steps.tolist(), _Steps)
        return found

    # -- stepping ----------------------------------------------------------------------------------------------------------

    def counts(self) -> list[int]:
        """Return how many steps each parameter has had. Raises MisuseError after a step that was interrupted."""
        found = [int(step) for step in self._counted()]
        if len(found) != len(self.locals):
            raise MisuseError(
                f"{self.name!r} was committed with {len(found)} parameters, and this optimizer has {len(self.locals)}: add the "
                "param groups that it had"
            )
        return found

    def _counted(self) -> torch.Tensor:
        if self._key not in self.store:
            raise MisuseError(
                f"a step of {self.name!r} was interrupted, and some parameters were updated, others not: go back to the last "
                "commit (store.rollback(), and the parameters of then), or load_state_dict"
            )
        spec = self.store.spec(self._key)
        if spec.dtype != "int64" or len(spec.shape) != 1:
            raise ManifestError(f"{self._key!r} is damaged: {spec.dtype} of shape {list(spec.shape)} are no step counts")
        found = self.store.get(self._key)
        if bool(((found < 0) | (found > MOST_STEPS)).any()):
            raise ManifestError(f"{self._key!r} is damaged: step counts go from 0 to {MOST_STEPS}")
        return found

    @torch.no_grad()
    def step(self) -> list[int]:
        """Update all parameters that have a gradient. Returns ``counts``. All ranks call it."""
        rules = [self.optimizer.rule(index) for index in range(len(self.groups))]
        steps = self._agreed_steps(rules)
        self._refuse_different()
        updates = {
            local: Update(rules[local.group], step + 1)
            for local, step in zip(self.locals, steps, strict=True)
            if local.parameter.grad is not None
        }
        if not updates:
            return steps
        try:
            for local in updates:
                local.bind()
                local.refuse_infinite()
            self._belonging.change()
            self.store.delete(self._key, owner=self.owner)
            for group in {local.group for local, update in updates.items() if update.step == 1}:
                self._write_layout(group)  # its rule may be another one than when the group was added
            self._run(updates)
        finally:
            for local in updates:
                local.unbind()
        steps = [step + (local in updates) for local, step in zip(self.locals, steps, strict=True)]
        self.store.put(self._key, torch.tensor(steps, dtype=torch.int64, device="cpu"), owner=self.owner)
        return steps

    def _agreed_steps(self, rules: Sequence[UpdateRule]) -> list[int]:
        """Return ``counts``, once all ranks that have shares are about to make the same step."""
        if self.ranks is None:
            return self._fitting_steps()
        with self.ranks.agreeing("make this step") as agree:
            steps = self._fitting_steps()
            for index, rule in enumerate(rules):
                agree(terms_of(rule, f"param group {index}"))
            agree((f"steps of parameter {number}", str(step)) for number, step in enumerate(steps))
        return steps

    def _fitting_steps(self) -> list[int]:
        """Return ``counts``. Raises MisuseError where the states belong to other values than the parameters have."""
        steps = self.counts()
        problem = self._belonging.problem(self.locals, steps)
        if problem:
            raise MisuseError(problem)
        return steps

    def _note(self) -> None:
        """Have a commit say which values the states belong to. Within a step it has none to go on from."""
        if self._key in self.store and self.store.spec(self._key).numel == len(self.locals):
            self._belonging.note(self.locals)

    def _refuse_different(self) -> None:
        """Raise MisuseError, on all ranks, where one has a gradient that another has not."""
        if self.ranks is None or not self.locals:
            return
        flags = torch.tensor([local.parameter.grad is not None for local in self.locals], dtype=torch.uint8, device="cpu")
        everybody = self.ranks.all_gather(flags, "which parameters have a gradient")
        different = (everybody.amax(0) != everybody.amin(0)).nonzero().flatten().tolist()
        if different:
            raise MisuseError(
                f"{self.locals[different[0]].name} has a gradient on some ranks and none on others: stage=Stage1() is for "
                "gradients that are the same everywhere, as those of DistributedDataParallel are"
            )

    def _owned(self, row: Sequence[LocalShard], limit: int) -> Iterator[tuple[int, list[list[ShardSegment]]]]:
        """Yield rounds in which each parameter is one rank's, as a whole: the elements of each rank's share, and the segments.
        The largest come first, so that what is gathered is padded little."""
        waiting = sorted((local for local in row if local.numel), key=lambda local: -local.numel)
        while waiting:
            share = max(limit, _up(waiting[0].numel, STEP))
            owned: list[list[ShardSegment]] = [[] for _ in range(self._size)]
            filled, left = [0] * self._size, []
            for local in waiting:
                rank = filled.index(min(filled))
                if filled[rank] + _up(local.numel, STEP) > share:
                    left.append(local)
                    continue
                owned[rank].append(ShardSegment.made(local, 0, local.numel, filled[rank]))
                filled[rank] += _up(local.numel, STEP)
            yield max(filled), owned
            waiting = left

    def _refuse_small_pool(self, local: LocalShard, rule: UpdateRule) -> None:
        """Raise CapacityError where the states of a parameter, and its master, do not fit the store's memory."""
        wide = torch.float64 if local.dtype is torch.float64 else torch.float32
        forms = [*forms_of(rule, wide).values(), *([ELEMENTWISE] if local.dtype is torch.float16 else [])]
        needed = sum(form.dtype.itemsize * form.count(local.numel, local.shape) for form in forms)
        needed += 2 * local.numel if local.dtype is torch.bfloat16 else 0
        needed = -(-needed // 4096) * 4096
        pool = self.store.statistics().tier("dram").capacity
        if pool < needed:
            raise CapacityError(
                f"{type(rule).__name__} updates whole parameters, and the states of {local.name} take {needed:,} bytes of "
                f"DRAM, of which the store has {pool:,}: open it with dram={needed}, or give the parameter another rule"
            )

    def _run(self, updates: Mapping[LocalShard, Update]) -> None:
        """Update round after round, forward and backward in turn: what a step used last, the next uses first, and it may still
        be in memory."""
        rounds = [found for found in self._rounds if found.concerns(updates)]
        if not self._forward:
            rounds.reverse()
        self._forward = not self._forward
        under: tuple[Round, Under, torch.Tensor] | None = None
        for number, here in enumerate(rounds):
            coming = [key for later in rounds[number + 1 : number + 1 + ROUNDS_AHEAD] for key in later.keys(updates)]
            self.store.prefetch([key for key in coming if key in self.store], tier="dram")
            here.update(updates)
            if self.ranks is not None:
                _finish(under, updates)
                under = here, *here.gather(self.ranks, updates)
        _finish(under, updates)

    def zero_grad(self, set_to_none: bool) -> None:
        optimizer: Any = self.optimizer
        TorchOptimizer.zero_grad(optimizer, set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm, norm_type, error_if_nonfinite)

    def grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return None if parameter.grad is None else parameter.grad.detach().clone()

    # -- state -------------------------------------------------------------------------------------------------------------

    def kept(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        yield from zip(self.counts(), self.copies(), strict=True)

    @contextmanager
    def loading(self, states: Mapping[int, Mapping[str, Any]], rules: Sequence[UpdateRule]) -> Iterator[None]:
        for index, found in states.items():
            if index < len(rules):
                shape = self.locals[index].shape
                refuse_lacking(f"parameter {index}", shape, found, rules[index], type(self.optimizer).__name__)
                refuse_forms(f"parameter {index}", shape, found, rules[index])
        for local, rule in zip(self.locals, rules, strict=False):
            self.optimizer.follow(local.group, rule)
        yield

    def copies(self) -> list[dict[str, torch.Tensor]]:
        """Return for each parameter its states and, for bf16 and fp16, ``master``, all like it; nothing for one without a
        step. All ranks call it."""
        if self.ranks is None:
            steps = self._fitting_steps()
        else:
            with self.ranks.agreeing("gather states"):
                steps = self._fitting_steps()
        found: dict[LocalShard, dict[str, torch.Tensor]] = {
            local: {} for local, step in zip(self.locals, steps, strict=True) if step
        }
        try:
            for local in found:
                local.bind()
                if not local.numel:
                    empty = States(in_dram(self.store, self.owner), "", [], 1, {local.dtype})
                    empty.use(local.name, forms_of(self._rules[local.group], empty.wide))
                    found[local] = dict(empty.blank(ShardSegment.made(local, 0, 0, 0)))
            for here in self._rounds:
                if here.concerns(found):
                    here.copies(found, self.ranks)
        finally:
            for local in found:
                local.unbind()
        return [self._shaped(local, found.get(local, {})) for local in self.locals]

    def _shaped(self, local: LocalShard, flat: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return states in the shape of their parameter, but for those that have another number of elements."""
        wide = torch.float64 if local.dtype is torch.float64 else torch.float32
        forms = forms_of(self._rules[local.group], wide)
        return {
            name: local.like(value)
            if forms.get(name, ELEMENTWISE).elementwise
            else forms[name].shaped(value, local.shape, local.stride)
            for name, value in flat.items()
        }

    def load(
        self, states: Mapping[int, Mapping[str, torch.Tensor]], steps: Mapping[int, int], rules: Sequence[UpdateRule]
    ) -> list[int]:
        given = {self.locals[index]: state for index, state in states.items()}
        flat: dict[LocalShard, dict[str, torch.Tensor]] = {}
        try:
            for local, state in given.items():
                local.bind()
                wide = torch.float64 if local.dtype is torch.float64 else torch.float32
                forms = forms_of(self._rules[local.group], wide)
                flat[local] = {
                    name: local.flat(value, wide) if name not in forms or forms[name].elementwise else value.flatten()
                    for name, value in state.items()
                }
            self._belonging.change()
            if self._key in self.store:
                self.store.delete(self._key, owner=self.owner)
            for group in range(len(self._layouts)):
                self._write_layout(group)
            for here in self._rounds:
                for segment in here.own:
                    if segment.local in flat:
                        kept = here.states.states_of(segment)
                        shape = segment.local.shape
                        spans = {name: form.span(segment.begin, segment.end, shape) for name, form in kept.items()}
                        usual = slice(segment.begin, segment.end)
                        parts = {name: value[spans.get(name, usual)] for name, value in flat[segment.local].items()}
                        here.load(segment, parts)
        finally:
            for local in given:
                local.unbind()
        counts = [steps.get(index, 0) for index in range(len(self.locals))]
        self.store.put(self._key, torch.tensor(counts, dtype=torch.int64, device="cpu"), owner=self.owner)
        return counts


def _finish(under: tuple[Round, Under, torch.Tensor] | None, updates: Mapping[LocalShard, Update]) -> None:
    if under is not None:
        here, moving, whole = under
        moving.wait()
        here.scatter(whole, updates)


def _even(elements: int, limit: int, step: int) -> int:
    """Return the elements of each chunk, a multiple of ``step``, where ``elements`` are cut evenly into as few chunks as
    ``limit`` allows."""
    limit = max(step, limit // step * step)
    return max(step, min(limit, _up(math.ceil(elements / max(1, math.ceil(elements / limit))), step)))


def _up(elements: int, step: int) -> int:
    return -(-elements // step) * step


def _step(rule: UpdateRule) -> int:
    """Return the elements at multiples of which parameters are cut."""
    return max((form.block for form in forms_of(rule, torch.float32).values()), default=SMALLEST_BLOCK)


def _refuse_cut(local: LocalShard, rule: UpdateRule) -> None:
    """Raise MisuseError where ``rule`` updates what a parameter is not, or is divided within."""
    name = type(rule).__name__
    if updates_whole(rule) and local.divided:
        raise MisuseError(
            f"{name} updates whole parameters, and {local.name} is a DTensor, of which each rank has a shard: page the model "
            "(zero.page), whose ranks gather what is divided, or take another rule"
        )
    if getattr(rule, "granularity", "") == "matrix" and len(local.shape) != 2:
        raise MisuseError(
            f"{name} updates whole matrices, and {local.name} has the shape {tuple(local.shape)}: give it a param group with "
            "another rule"
        )
    block = _step(rule)
    if block > STEP and local.divided and not local.ends_at(block):
        raise MisuseError(
            f"{name} keeps states for blocks of {block} elements, and {local.name} is a DTensor whose shards end within a "
            "block: take zero.AdamW for it, with moments=torch.bfloat16 where its states are to be smaller"
        )


def _in_words(steps: Sequence[int]) -> str:
    return f"{len(steps)} parameters, at most at step {max(steps, default=0)}"


def _read(store: TieredStore, key: str) -> dict[str, Any]:
    """Read the layout of a param group. Raises ManifestError."""
    try:
        spec = store.spec(key)
        if spec.dtype != "uint8" or len(spec.shape) != 1 or spec.nbytes > MOST:
            raise ValueError(f"{spec.dtype} of shape {list(spec.shape)}")
        found = json.loads(store.get(key).numpy().tobytes())
        if isinstance(found, dict) and found.get("version") != VERSION:
            raise ValueError(f"version {found.get('version')!r:.100}, and this release reads {VERSION}")
        msgspec.convert(found, _Layout, strict=True)
    except (ValueError, RecursionError, OverflowError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise ManifestError(f"{key!r} is damaged, or of another version: {error!r:.200}") from error
    made: dict[str, Any] = found
    return made


def _difference(committed: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe the first difference of two layouts."""
    for what in ("ranks", "rank"):
        if committed.get(what) != here[what]:
            return f"it was {what} {committed.get(what)}, and is {what} {here[what]}"
    before, now = ((found.get("rule") or {"name": name_in({})}) for found in (committed, here))
    if before != now:
        return f"it was updated by {before}, and is by {now}"
    old, new = committed["parameters"], here["parameters"]
    if len(old) != len(new):
        return f"it had {len(old)} parameters, and has {len(new)}"
    index = next(index for index, (before, after) in enumerate(zip(old, new, strict=True)) if before != after)
    return f"parameter {index} was {old[index]} (shape, strides, type), and is {new[index]}"
