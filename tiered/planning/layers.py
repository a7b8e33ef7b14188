"""Layers that are alike: what a step of a model with many of them asks of its store, by a model with four.

A step of a deep model repeats itself: in forward each layer asks what the one before has asked, and in backward the other way
round. So a model with the first two and the last two of a run of layers that are alike is trained without memory
(``dry_run``), and what the second one asks is repeated for each that was left out. That is done where the second and the third
of the four ask the same, as seen from each; where what comes before and after the layers does not depend on their number, as a
model with three of them shows; and where the four are divided into units as in the whole model. The notes are then those of
the whole model, operation by operation. Else the whole model is trained; so it is where activations wait in the store, because
all layers together decide which of them stay in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from tiered.errors import MisuseError
from tiered.planning.dry_run import Loss, TrainingSetup, dry_run, on_meta
from tiered.planning.notes import AheadNote, CreateNote, DeleteNote, EndNote, LeaseNote, Operation, StepNotes
from tiered.planning.sizes import sizes_of
from tiered.zero.paging.recompute.micro_batch import split_modules
from tiered.zero.paging.units import Absent, ModelPlan, aligned_size

__all__ = ["train"]

KEPT = 4
"""Layers of a run that are trained: the first and the last, which have other neighbours, and two to compare."""
LEAST = 6
"""Layers of a run at least: with fewer the whole model is trained in as short a time."""


def train(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss, target: Any, training: TrainingSetup
) -> StepNotes:
    """Return what a step asks of its store, as ``dry_run`` does, and raises; sooner where many layers are alike."""

    def of(part: nn.Module, setup: TrainingSetup, **follow: bool) -> StepNotes:
        return dry_run(part, args, kwargs, loss, target, setup, **follow)

    run = _longest_run(model) if training.activations != "store" else None
    if run is not None:
        plan, (short, fewer) = training.divided(model), (run.shortened(model, kept) for kept in (KEPT, KEPT - 1))
        of_short, of_fewer = (replace(training, absent=run.absent(model, plan, kept)) for kept in (KEPT, KEPT - 1))
        if run.divides_alike(model, plan, short, of_short.divided(short), training):
            try:
                notes, checked = of(short, of_short, follow=True), of(fewer, of_fewer)
            except MisuseError:  # of the whole model the reason may be another one
                return of(model, training)
            again = training.computes_again
            if _Lengthened(replace(run, count=KEPT - 1), notes, again).whole(_tensors(fewer, of_fewer)) == checked:
                found = _Lengthened(run, notes, again).whole(_tensors(model, training))
                if found is not None:
                    return found
    return of(model, training)


def _tensors(model: nn.Module, training: TrainingSetup) -> list[dict[str, int]]:
    """Return the bytes of the tensors that are there at the beginning of each step, in order: parameters, and states."""
    plan = training.divided(model)
    chunks = (chunk for unit in sizes_of(plan, training.name, training.rule) for chunk in unit.chunks)
    return [
        {f"{training.name}/param/{unit.name}": unit.share_nbytes for unit in plan.units},
        {key: spec.nbytes for chunk in chunks for key, spec in chunk.items()},
    ]


@dataclass(frozen=True)
class _Run:
    """Layers of the ``nn.ModuleList`` at ``path`` that are alike: ``count``, from ``begin`` on."""

    path: str
    begin: int
    count: int

    def shortened(self, model: nn.Module, kept: int) -> nn.Module:
        """Return a copy of ``model`` on the meta device with so many of the layers."""
        found = on_meta(model)
        layers = found.get_submodule(self.path)
        assert isinstance(layers, nn.ModuleList)
        left_out = self._left_out(kept)
        holder, _, name = self.path.rpartition(".")
        fewer = nn.ModuleList(layer for index, layer in enumerate(layers) if index not in left_out)
        setattr(found.get_submodule(holder), name, fewer)
        return found

    def whole(self, index: int) -> int:
        """Return which layer of the whole model is that one of the shortened."""
        return index if index < self.begin + KEPT // 2 else index + self.count - KEPT

    def _left_out(self, kept: int) -> range:
        return range(self.begin + KEPT // 2, self.begin + self.count - (kept - KEPT // 2))

    def absent(self, model: nn.Module, plan: ModelPlan, kept: int) -> Absent:
        """Return what a model lacks that has so many of the layers."""
        layers = list(model.get_submodule(self.path).children())
        left_out = [layers[index] for index in self._left_out(kept)]
        sizes = {parameter: aligned_size(parameter) for layer in left_out for parameter in layer.parameters()}
        sliced = sum(nbytes for parameter, nbytes in sizes.items() if parameter in plan.sliced)
        return Absent(self.path, sum(sizes.values()) - sliced, sliced)

    def divides_alike(
        self, model: nn.Module, plan: ModelPlan, short: nn.Module, of_short: ModelPlan, training: TrainingSetup
    ) -> bool:
        """Return whether the shortened model is divided as the whole one: units are held by the same modules, and the same
        modules are computed again."""
        whole, mine = _Division.of(model, plan, training), _Division.of(short, of_short, training)
        kept = whole.named(lambda name: name if self.stays(self.layer(name)) else None)
        return kept == mine.named(lambda name: self.renamed(name, self.whole))

    # -- layers in names ---------------------------------------------------------------------------------------------------

    @cached_property
    def _index(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![^/]){re.escape(self.path)}\.(\d+)(?![^./#\[])")

    def layer(self, name: str) -> int | None:
        """Return which layer a module, a unit or a tensor is of; None where it is of none of these."""
        found = self._index.search(name)
        return None if found is None else int(found[1])

    def renamed(self, name: str, move: Callable[[int], int]) -> str:
        """Return the name of what is the same in another layer."""
        return self._index.sub(lambda found: f"{self.path}.{move(int(found[1]))}", name)

    def stays(self, layer: int | None) -> bool:
        """Return whether a layer of the whole model is one of the shortened, too."""
        return layer not in self._left_out(KEPT)

    @property
    def compared(self) -> tuple[int, int]:
        """The two layers of the shortened model that have neighbours like those that were left out."""
        return self.begin + 1, self.begin + 2


@dataclass(frozen=True)
class _Division:
    """By the names of modules the names of the units that each holds, and which modules are computed again."""

    held: dict[str, list[str]]
    again: list[str]

    @classmethod
    def of(cls, model: nn.Module, plan: ModelPlan, training: TrainingSetup) -> _Division:
        names = {module: name for name, module in model.named_modules()}
        held = {names[module]: [plan.units[index].name for index in units] for module, units in plan.held.items()}
        again = split_modules(model, plan, training.micro_batch) if training.computes_again else {}
        return cls(held, list(again.values()))

    def named(self, name: Callable[[str], str | None]) -> _Division:
        """Return it with other names, without what has none."""
        kept = [(name(module), units) for module, units in self.held.items()]
        held = {module: [one for one in map(name, units) if one is not None] for module, units in kept if module is not None}
        return _Division(held, [one for one in map(name, self.again) if one is not None])


def _longest_run(model: nn.Module) -> _Run | None:
    """Return the longest run of layers that are alike; None where each is short."""
    runs = [
        _Run(path, begin, count)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and path and len(module) >= LEAST
        for begin, count in _runs(list(module), model)
    ]
    return max((run for run in runs if run.count >= LEAST), key=lambda run: run.count, default=None)


def _runs(layers: Sequence[nn.Module], model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield where layers that are alike begin, and how many there are. What a configuration has a list of, one element for each
    layer, is alike, too."""
    config = getattr(model, "config", None)
    values = vars(config).values() if config is not None and hasattr(config, "__dict__") else ()
    lists = [value for value in values if isinstance(value, list) and len(value) == len(layers)]
    begin = 0
    for index, (one, other) in enumerate(pairwise(layers), 1):
        if not (_alike(one, other) and all(value[index - 1] == value[index] for value in lists)):
            yield begin, index - begin
            begin = index
    yield begin, len(layers) - begin


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two layers that follow one another differ in nothing but values of tensors, and in numbers that count
    layers."""
    mine, theirs = dict(one.named_modules()), dict(other.named_modules())
    if mine.keys() != theirs.keys():
        return False
    for name, module in mine.items():
        beside = theirs[name]
        if type(module) is not type(beside) or module.training != beside.training:
            return False
        for tensors in ("_parameters", "_buffers"):
            if {key: _form(one) for key, one in getattr(module, tensors).items()} != {
                key: _form(one) for key, one in getattr(beside, tensors).items()
            }:
                return False
        if not _same(_plain(module), _plain(beside)) or _hooks(module) != _hooks(beside):
            return False
    return True


def _form(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _hooks(module: nn.Module) -> dict[str, list[Any]]:
    return {key: list(value.values()) for key, value in vars(module).items() if key.endswith("_hooks")}


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are its own class's."""
    return {key: value for key, value in vars(module).items() if key not in vars(_EMPTY)}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    for key, value in one.items():
        beside = other[key]
        if type(value) is not type(beside):
            return False
        if type(value) is int and beside == value + 1:  # which layer it is
            continue
        if isinstance(value, torch.Tensor):
            if _form(value) != _form(beside):
                return False
        elif value is not beside and value != beside and repr(value) != repr(beside):
            return False
    return True


_EMPTY = nn.Module()


class _Uneven(Exception):
    """What a shortened model asks does not repeat from layer to layer."""


class _Lease(NamedTuple):
    """A lease, as the ``ordinal``-th that begins in the block of ``layer`` in a sweep, from the first touch of the layer on."""

    sweep: int
    layer: int | None
    ordinal: int


class _Block(NamedTuple):
    """What is asked from the first touch of a layer until that of the next one, by position in the notes; in the first block
    also what comes before, which are ``before`` of the positions. ``layer``: of the shortened model; None where a phase touches
    none."""

    layer: int | None
    positions: list[int]
    before: int = 0


_Sweep = list[_Block]
"""A pass over all layers, in forward or in backward order."""


class _Repeated(NamedTuple):
    """An operation of the whole model: ``position`` is that of the operation of the shortened one, and ``later`` how many more
    layers come before it."""

    operation: Operation
    position: int
    later: int


class _Lengthened:
    """The notes of a model, by those of its shortened copy, in which the memory that is alive was followed."""

    def __init__(self, run: _Run, short: StepNotes, computes_again: bool) -> None:
        self._run, self._short, self._computes_again = run, short, computes_again
        found = (self._run.layer(key) for key in short.initial)
        self._layers = 1 + max((layer for layer in found if layer is not None), default=-1)
        made = {one.key for one in short.operations if isinstance(one, CreateNote)}
        first = {key for key in made if run.layer(key) == run.begin}
        self._of_all = {key for key in first if run.renamed(key, lambda index: index + 1) not in made}
        """Tensors that the first layer makes for all of them, such as the angles of positions that recomputing needs."""

    def whole(self, expected: Sequence[Mapping[str, int]]) -> StepNotes | None:
        """Return the notes of the whole model; None where its layers do not ask the same. ``expected``: the bytes of the
        tensors that are there at the beginning of each step, in order: parameters, and states."""
        try:
            return self._whole(self._initial(expected))
        except _Uneven:
            return None

    def _mover(self, layer: int | None, to: int | None) -> Callable[[int], int]:
        """Return which layer of the whole model another one is, as seen from the block of ``layer``, which becomes ``to``."""
        if layer is not None and to is not None and layer in self._run.compared:
            return lambda index: index - layer + to
        return self._run.whole

    def _renamed(self, key: str, move: Callable[[int], int]) -> str:
        return key if key in self._of_all else self._run.renamed(key, move)

    # -- what there is before a step ---------------------------------------------------------------------------------------

    def _initial(self, expected: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """Return the tensors of the whole model. Raises _Uneven where those of the shortened one are not among them."""
        run, found, known = self._run, dict[str, int](), dict[str, None]()
        left_out = () if run.count >= KEPT else run.compared[:1]
        sizes = {key: nbytes for key, nbytes in self._short.initial.items() if run.layer(key) not in left_out}
        for kind in expected:
            mine = {key: self._run.renamed(key, run.whole) for key in sizes}
            mine = {key: name for key, name in mine.items() if name in kind}
            stays = {key: nbytes for key, nbytes in kind.items() if self._run.stays(self._run.layer(key))}
            like: dict[int, dict[str, int]] = {}
            for key, nbytes in kind.items():
                if (layer := self._run.layer(key)) is not None and run.begin < layer < run.begin + run.count - 1:
                    like.setdefault(layer, {})[self._run.renamed(key, lambda _: 0)] = nbytes
            if list(stays.items()) != [(name, sizes[key]) for key, name in mine.items()] or not _all_equal(like.values()):
                raise _Uneven
            found |= kind
            known |= dict.fromkeys(mine)
        everything = self._short.initial.items()
        rest = [CreateNote(key, nbytes) for key, nbytes in everything if self._run.renamed(key, run.whole) not in found]
        if list(sizes) != [*known, *(one.key for one in rest if one.key in sizes)]:
            raise _Uneven
        repeated = self._repeated(rest, [self._sweep(rest, 0, len(rest))])
        return found | {_created(one): rest[position].nbytes for one, position, _ in repeated}

    # -- what is asked -----------------------------------------------------------------------------------------------------

    def _whole(self, initial: dict[str, int]) -> StepNotes:
        short = self._short
        sweeps = [self._sweep(short.operations, *span) for span in pairwise((0, *short.turns, len(short.operations)))]
        *passes, _ = sweeps  # the last is the step of the optimizer
        if any(sweep[0].layer is None for sweep in passes):
            raise _Uneven
        growth = [self._growth(sweep) for sweep in sweeps]
        self._refuse_gathering(growth)
        begins, ends = {0, *short.turns}, {position - 1 for position in (*short.turns, len(short.operations))}
        operations, activations, peak = list[Operation](), dict[str, int](), 0
        for operation, position, later in self._repeated(short.operations, sweeps, growth):
            operations.append(operation)
            now, until_next = self._alive(position)
            before = short.alive[position].most if position in begins else 0
            peak = max(peak, later + max(before, now if position in ends else until_next))
            if isinstance(operation, CreateNote) and _created(short.operations[position]) in short.activations:
                activations[operation.key] = operation.nbytes
        return StepNotes(operations, initial, activations, peak)

    def _refuse_gathering(self, growth: Sequence[int]) -> None:
        """Raise _Uneven where a backward pass frees with each layer something else than a forward pass has kept for it: what it
        makes itself may stay alive until its end. Without that, what is alive is all that is left of a forward pass, which may
        have had more (a cache of keys and values, that nobody uses)."""
        for forward, backward in zip(growth[:-1:2], growth[1::2], strict=True):
            if not (backward == forward or (0 <= backward < forward and not self._computes_again)):
                raise _Uneven

    def _sweep(self, operations: Sequence[Operation], begin: int, end: int) -> _Sweep:
        """Return the pass over the layers between two positions. Raises _Uneven where layers come in no order."""
        blocks, before, seen = list[_Block](), list[int](), set[int]()
        for position in range(begin, end):
            one = operations[position]
            touched = one.keys[0] if isinstance(one, LeaseNote) else _created(one)
            layer = None if touched in self._of_all else self._run.layer(touched)
            if layer is not None and layer not in seen:
                seen.add(layer)
                blocks.append(_Block(layer, before, len(before)))
                before = []
            (blocks[-1].positions if blocks else before).append(position)
        forward = list(range(self._layers))
        if blocks and [block.layer for block in blocks] not in (forward, forward[::-1]):
            raise _Uneven
        return blocks or [_Block(None, before)]

    def _growth(self, sweep: _Sweep) -> int:
        """Return by how many bytes more are alive where a layer more comes before. Raises _Uneven where two layers that have
        neighbours like those that were left out do not ask the same, or not the same number of bytes more."""
        one, other = ([block for block in sweep if block.layer == layer] for layer in self._run.compared)
        if not one:  # no layer is touched
            return 0
        pairs = zip(one[0].positions, other[0].positions, strict=False)
        more = {after - before for pair in pairs for before, after in zip(*map(self._alive, pair), strict=True)}
        found: int = next(iter(more), 0)
        if len(more) > 1:
            raise _Uneven
        return found

    def _alive(self, position: int) -> tuple[int, int]:
        """Return what is alive after an operation of the shortened model, and at most until the next one."""
        alive = self._short.alive
        return alive[position].now, alive[min(position + 1, len(alive) - 1)].most

    def _repeated(
        self, operations: Sequence[Operation], sweeps: Sequence[_Sweep], growth: Sequence[int] | None = None
    ) -> Iterator[_Repeated]:
        """Yield the operations of the whole model. Raises _Uneven where the layers that are compared do not ask the same."""
        leases, numbers = dict[int, _Lease](), dict[_Lease, int]()
        for number, sweep in enumerate(sweeps):
            for block in sweep:
                begun = [isinstance(operations[position], LeaseNote) for position in block.positions]
                ordinal = -sum(begun[: block.before])
                for position in block.positions:
                    if isinstance(lease := operations[position], LeaseNote):
                        leases[lease.number] = _Lease(number, block.layer, ordinal)
                        ordinal += 1

        def moved(one: Operation, move: Callable[[int], int]) -> Operation:
            if isinstance(one, LeaseNote):
                return one._replace(number=0, keys=tuple(self._renamed(key, move) for key in one.keys))
            if isinstance(one, CreateNote | DeleteNote):
                return one._replace(key=self._renamed(one.key, move))
            if isinstance(one, AheadNote):
                return AheadNote(tuple(self._renamed(key, move) for key in one.keys))
            return one

        def lease_of(number: int, move: Callable[[int], int]) -> _Lease:
            found = leases[number]
            return found if found.layer is None else found._replace(layer=move(found.layer))

        def seen_from(block: _Block) -> list[object]:
            """Return what is asked in a block, with layers counted from its own."""
            assert block.layer is not None
            move = self._mover(block.layer, 0)
            asked = [operations[position] for position in block.positions]
            return [lease_of(one.number, move) if isinstance(one, EndNote) else moved(one, move) for one in asked]

        for number, sweep in enumerate(sweeps):
            compared = [seen_from(block) for block in sweep if block.layer in self._run.compared]
            if not _all_equal(compared):
                raise _Uneven
            for block, to in self._unrolled(sweep):
                move = self._mover(block.layer, to)
                later = 0 if growth is None or block.layer is None or to is None else growth[number] * (to - block.layer)
                for position in block.positions:
                    one = operations[position]
                    if isinstance(one, EndNote):
                        if (ended := numbers.get(lease_of(one.number, move))) is None:
                            raise _Uneven
                        yield _Repeated(EndNote(ended), position, later)
                        continue
                    found = moved(one, move)
                    if isinstance(one, LeaseNote):
                        reference = leases[one.number]._replace(layer=to)
                        numbers[reference] = len(numbers) + 1
                        found = LeaseNote(numbers[reference], *found[1:])
                    yield _Repeated(found, position, later)

    def _unrolled(self, sweep: _Sweep) -> Iterator[tuple[_Block, int | None]]:
        """Yield the blocks of the whole model: each a block of the shortened one, and which layer it becomes."""
        run = self._run
        repeated = range(run.compared[0], run.begin + run.count - KEPT // 2)
        backward = bool(sweep[0].layer)  # layers in falling order
        for block in sweep:
            if block.layer == run.compared[0]:
                for to in reversed(repeated) if backward else repeated:
                    yield block, to
            else:
                yield block, None if block.layer is None else run.whole(block.layer)


def _created(one: Operation) -> str:
    return one.key if isinstance(one, CreateNote) else ""


def _all_equal(values: Iterable[object]) -> bool:
    return all(one == other for one, other in pairwise(values))
