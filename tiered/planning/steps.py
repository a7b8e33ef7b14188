"""What a paged model asks of its store in one training step, from a dry run: leases, gradients, updates, and time between them.

It follows ``zero.paging.pager`` and ``zero.paging.unit``: a unit is held while modules that need it run and from when backward
asks for what was saved of it until it asks for another; one unit's gradients are leased at a time; an update leases gradient,
unit and one chunk of states after the other. The tests compare it with the trace of a real step, touch by touch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

from torch import nn

from tiered.planning.dry_run import Cost, DryRun, Happening, Kind
from tiered.tensors.specs import TEMPORARY
from tiered.zero.paging.storage import TensorStore
from tiered.zero.paging.units import ModelPlan, Placement, UnitPlan, even_chunks
from tiered.zero.paging.update import States
from tiered.zero.rules.forms import forms_of
from tiered.zero.rules.rule import UpdateRule

__all__ = [
    *("Ahead", "Create", "Delete", "End", "Lease", "Operation", "Pause", "Reductions", "Steps", "UnitSizes", "Work"),
    "sizes_of",
]

Update = Literal["on_fetch", "in_backward"]
Reductions = Literal["overlapped", "prompt", "late"]
"""Between ranks, gradients of a unit are reduced while the next one computes, before it does, or at the end of backward."""


class Create(NamedTuple):
    """``temporary``: a saved activation, which is written behind at once where no order is known."""

    key: str
    nbytes: int
    temporary: bool = False


class Lease(NamedTuple):
    """``number`` is what ``End`` says."""

    number: int
    keys: tuple[str, ...]
    write: bool


class End(NamedTuple):
    number: int


class Delete(NamedTuple):
    key: str


class Ahead(NamedTuple):
    """Activations that are needed soon."""

    keys: tuple[str, ...]


class Work(NamedTuple):
    """Work that is not the model's: an ``update`` of so many elements, a ``gradient`` of so many bytes that is copied into the
    store, an ``activation`` that is copied into it or out of it, parameters that are ``cast``; and between ranks a ``gather``
    or ``reduce`` of a unit of so many bytes. Of the others ``nbytes`` are those of memory that are read and written."""

    kind: Literal["update", "gradient", "activation", "cast", "gather", "reduce"]
    elements: int
    nbytes: int
    pieces: int


class Pause(NamedTuple):
    """Operations of the model between two calls of the store."""

    cost: Cost


Operation = Create | Lease | End | Delete | Ahead | Work | Pause


@dataclass
class UnitSizes:
    """The tensors that a store has of one unit, in bytes: parameters, gradient (0: nothing is trained), and the states of each
    chunk by key, with the elements that are updated there. Of one of several ranks they are its share, and ``gathered`` the
    bytes of the whole unit."""

    key: str
    plan: UnitPlan
    nbytes: int
    converted: int
    gradient: int
    chunks: list[tuple[int, dict[str, int]]]
    gathered: int = 0

    @property
    def states(self) -> int:
        return sum(sum(sizes.values()) for _, sizes in self.chunks)

    @property
    def all(self) -> dict[str, int]:
        """Every tensor of the unit that there is between two steps, the gradient included."""
        found = {self.key: self.nbytes}
        for _, sizes in self.chunks:
            found |= sizes
        return found | ({f"{self.key}/grad": self.gradient} if self.gradient else {})


def sizes_of(plan: ModelPlan, name: str, rule: UpdateRule) -> list[UnitSizes]:
    """Return the tensors of each unit of a model that ``name`` is the name of, with the states that ``rule`` keeps."""
    return [_unit_sizes(unit, f"{name}/param/{unit.name}", plan.limits.chunk, rule) for unit in plan.units]


def _unit_sizes(unit: UnitPlan, key: str, chunk: int, rule: UpdateRule) -> UnitSizes:
    trained = [p for p in unit.placements if p.parameter.requires_grad and p.dtype.is_floating_point]
    gradient = max((p.offset + p.nbytes for p in trained), default=0)
    kinds = {placement.stored for placement in unit.placements}
    parts = list(unit.parts(0).values())
    states = States(cast(TensorStore, None), key, parts, even_chunks(unit.elements, chunk), kinds)
    for placement in trained:
        states.use(placement.name, forms_of(rule, states.wide))
    trained = [part for part in parts if part.parameter.requires_grad and part.dtype.is_floating_point]
    if unit.shares > 1:
        gradient = max((part.offset + part.nbytes for part in trained), default=0)
    chunks = []
    for _, keys in states.chunks(trained):
        sizes = {one: max(states.sizes(one)) * states.form_of(one).dtype.itemsize for one in keys}
        elements = max((max(states.sizes(one)) for one in keys), default=0)
        chunks.append((elements, sizes))
    if not chunks and trained:
        chunks.append((sum(p.numel for p in trained), {}))
    converted = unit.nbytes if unit.converted else 0
    gathered = unit.stored_nbytes if unit.shares > 1 else 0
    return UnitSizes(key, unit, unit.stored_nbytes // unit.shares, converted, gradient, chunks, gathered)


def _in_groups(events: Sequence[Happening], together: int) -> list[Happening]:
    """Return events with so many pieces of an activation as one, under the key of the first."""
    found: list[Happening] = []
    first: dict[str, int] = {}
    """By activation, where its newest group is."""
    for event in events:
        if event.kind is Kind.AHEAD:
            keys = tuple(key for key in event.keys if _piece(key)[1] % together == 0)
            if keys:
                found.append(replace(event, keys=keys))
        elif not event.keys or _piece(event.keys[0])[1] % together == 0:
            if event.kind is Kind.MADE:
                first[_piece(event.keys[0])[0]] = len(found)
            found.append(event)
        elif event.kind is Kind.MADE:
            at = first[_piece(event.keys[0])[0]]
            found[at] = replace(found[at], keys=found[at].keys + event.keys, nbytes=found[at].nbytes + event.nbytes)
    return found


def _piece(key: str) -> tuple[str, int]:
    """Return what the piece of an activation is a piece of, and which one; 0 for what is in one piece."""
    base, dot, number = key.rpartition(".")
    return (base, int(number)) if dot and number.isdigit() else (key, 0)


class _Unit:
    """A unit in a step: who holds it, and what is known of its gradients and of its update."""

    def __init__(self, sizes: UnitSizes) -> None:
        self.sizes = sizes
        self.holders = 0
        self.lease = self.source = self.opened = -1
        self.pending = self.has_gradient = self.has_local = False
        self.saved = 0
        self.arrived: set[Any] = set()
        self.expected: set[Any] = set()


class Steps:
    """Operations of one step after the other. ``passes`` forwards and backwards make a step (accumulation); ``update`` is when
    a unit is updated, ``reductions`` when its gradients are reduced between ranks. All units have a gradient, and with
    "on_fetch" a pending update, before the first step. So many pieces of activations in the store are taken ``together``."""

    def __init__(
        self,
        model: nn.Module,
        plan: ModelPlan,
        sizes: Sequence[UnitSizes],
        run: DryRun,
        update: Update,
        passes: int = 1,
        reductions: Reductions = "late",
        together: int = 1,
    ) -> None:
        self._events = run.events if together <= 1 else _in_groups(run.events, together)
        self._in_backward, self._passes, self._reductions = update == "in_backward", passes, reductions
        self._unreduced: list[_Unit] = []  # of one of several ranks: units that are complete
        self._reducing: tuple[_Unit, int, int] | None = None
        self._after: dict[tuple[bool, _Unit | None, _Unit], _Unit] = {}  # what was held after these two
        self._last: tuple[_Unit | None, _Unit | None] = None, None
        self._ahead: _Unit | None = None
        self._units = [_Unit(one) for one in sizes]
        names = {module: name for name, module in model.named_modules()}
        self._held = {names[module]: [self._units[i] for i in held] for module, held in plan.held.items()}
        home: dict[nn.Parameter, list[tuple[_Unit, Placement]]] = {}
        for unit, planned in zip(self._units, plan.units, strict=True):
            for placement in planned.placements:
                home.setdefault(placement.whole, []).append((unit, placement))
        self._home = [home[parameter] for parameter in model.parameters()]
        self._last_wanted: dict[int, int] = {}
        """By the number of a parameter that is sliced, the event in which backward asks for it, and then has its gradient."""
        wanted = at_wanted = -1
        for at, event in enumerate(self._events):
            if event.kind is Kind.ARRIVES:
                for unit, placement in self._home[event.parameter]:
                    unit.expected.add(placement)
                if event.parameter == wanted and self._home[wanted][0][1].sliced is not None:
                    self._last_wanted[wanted] = at_wanted
            elif event.kind is Kind.WANTED:
                wanted, at_wanted = event.parameter, at
        self._numbers = 0
        self.activations: dict[str, int] = {}
        """Bytes of activations in the store, by key."""
        self._frames: list[tuple[str, list[_Unit]]] = []
        self._backward: list[_Unit] = []
        self._graded: _Unit | None = None
        self._waiting: dict[_Unit, None] = {}
        self._in_pass = False
        for unit in self._units:
            unit.pending = unit.has_gradient = bool(unit.expected) and not self._in_backward

    def initial(self) -> dict[str, int]:
        """Return the tensors that the store has before the first step, by key, in bytes."""
        found: dict[str, int] = {}
        for unit in self._units:
            found |= unit.sizes.all
            if not unit.has_gradient:
                found.pop(f"{unit.sizes.key}/grad", None)
        return found

    def step(self) -> Iterator[Operation]:
        """Yield what one step asks of the store."""
        for _ in range(self._passes):
            yield from self._one_pass()
        for unit in self._units:
            unit.pending = bool(unit.arrived or unit.has_gradient) and not self._in_backward
        for unit in self._units:
            unit.arrived.clear()

    def _one_pass(self) -> Iterator[Operation]:
        self._in_pass, self._last = False, (None, None)
        for at, event in enumerate(self._events):
            kind = event.kind
            if kind is Kind.COST:
                assert event.cost is not None
                yield Pause(event.cost)
            elif kind is Kind.ENTER:
                yield from self._enter(event.module)
            elif kind is Kind.EXIT:
                yield from self._exit(event.module)
            elif kind is Kind.AGAIN:
                yield from self._again(event.module)
            elif event.keys:
                yield from self._of_activations(event)
            elif kind is Kind.BACKWARD:
                if self._in_pass:
                    yield from self._finish()
                yield from self._give_up_ahead()
                self._last = None, None
                self._in_pass = not self._in_pass
            elif self._in_pass and self._home[event.parameter][0][1].sliced is not None:
                yield from self._of_sliced(kind, event.parameter, at)
            else:
                for unit, placement in self._home[event.parameter]:
                    yield from self._of_parameter(kind, unit, placement)

    def _of_parameter(self, kind: Kind, unit: _Unit, placement: Placement) -> Iterator[Operation]:
        if kind is Kind.READ:
            if self._in_pass and not self._frames:  # a part of forward that is no module, and is computed again
                yield from self._visit(unit)
            elif self._frames and not unit.holders:
                yield from self._hold(unit)
                if placement.sliced is None:
                    self._frames[-1][1].append(unit)
                else:
                    yield from self._drop(unit)
        elif kind is Kind.SAVED:
            unit.saved += 1
        elif kind is Kind.FREED:
            unit.saved = max(0, unit.saved - 1)
        elif kind is Kind.WANTED:
            if not self._frames:
                yield from self._visit(unit)
            elif not unit.holders:
                yield from self._hold(unit)
                self._frames[-1][1].append(unit)
        elif kind is Kind.ARRIVES:
            yield from self._open_gradients(unit)
            yield from self._write_gradient(unit, placement)

    def _of_sliced(self, kind: Kind, parameter: int, at: int) -> Iterator[Operation]:
        """Yield what backward does with a parameter that is divided into slices: the last slice first, and the gradient of one
        before the next is needed."""
        last = self._last_wanted.get(parameter)
        for unit, placement in reversed(self._home[parameter]):
            if kind is not Kind.ARRIVES or last is None:
                yield from self._of_parameter(kind, unit, placement)
            if kind is Kind.WANTED and at == last and placement in unit.expected:
                unit.saved = 0  # its part of the graph is gone
                yield from self._of_parameter(Kind.ARRIVES, unit, placement)

    # -- forward -----------------------------------------------------------------------------------------------------------

    def _enter(self, module: str) -> Iterator[Operation]:
        if module in self._held or (not module and not self._in_pass):
            held = self._held.get(module, [])
            for unit in held:
                yield from self._hold(unit)
            self._frames.append((module, list(held)))

    def _exit(self, module: str) -> Iterator[Operation]:
        if self._frames and self._frames[-1][0] == module:
            for unit in reversed(self._frames.pop()[1]):
                yield from self._drop(unit)

    def _again(self, module: str) -> Iterator[Operation]:
        units = self._held.get(module, [])
        if not self._frames:
            yield from self._visit(*units)
        held = [unit for unit in units if not unit.holders]
        for unit in held:
            yield from self._hold(unit)
        self._frames.append((module, held))

    def _of_activations(self, event: Happening) -> Iterator[Operation]:
        """Yield what becomes of an activation in the store."""
        key = event.keys[0]
        if event.kind is Kind.MADE:
            self.activations[key] = event.nbytes
            yield Create(key, event.nbytes, key.startswith(TEMPORARY))
            yield Work("activation", 0, 2 * event.nbytes, len(event.keys))
        elif event.kind is Kind.ASKED:
            number = self._number()
            yield Lease(number, (key,), False)
            yield Work("activation", 0, 2 * self.activations[key], 1)
            yield End(number)
        elif event.kind is Kind.ENDED:
            yield Delete(key)
        else:
            yield Ahead(event.keys)

    def _hold(self, unit: _Unit) -> Iterator[Operation]:
        if not unit.holders:
            if self._ahead is not unit:
                yield from self._give_up_ahead()
                if unit.pending:
                    yield from self._apply(unit)
            yield from self._materialize(unit)
            unit.holders = 1
            if unit.sizes.gathered and self._reductions == "overlapped":
                yield from self._gather_ahead(unit)
            return
        unit.holders += 1

    def _materialize(self, unit: _Unit) -> Iterator[Operation]:
        sizes = unit.sizes
        if sizes.gathered:
            if self._ahead is not unit:
                yield from self._begin_gather(unit)
            self._ahead = None
            yield Work("gather", 0, sizes.gathered, 1)
            yield End(unit.source)
            if self._in_pass and self._reductions == "prompt":
                yield from self._reduce()
            return
        if not sizes.converted:
            unit.lease = self._number()
            yield Lease(unit.lease, (sizes.key,), False)
            return
        yield Create(f"{sizes.key}/converted", sizes.converted)
        unit.lease = self._number()
        yield Lease(unit.lease, (f"{sizes.key}/converted",), True)
        source = self._number()
        yield Lease(source, (sizes.key,), False)
        yield Work("cast", sizes.plan.elements, sizes.nbytes + sizes.converted, len(sizes.plan.placements))
        yield End(source)

    def _begin_gather(self, unit: _Unit) -> Iterator[Operation]:
        sizes = unit.sizes
        yield Create(f"{sizes.key}/gathered", sizes.gathered)
        unit.lease = self._number()
        yield Lease(unit.lease, (f"{sizes.key}/gathered",), True)
        unit.source = self._number()
        yield Lease(unit.source, (sizes.key,), False)

    def _gather_ahead(self, unit: _Unit) -> Iterator[Operation]:
        """Begin to gather the unit that followed this one in the pass before."""
        before, last = self._last
        if last is not None:
            self._after[self._in_pass, before, last] = unit
        self._last = last, unit
        follows = None if last is None else self._after.get((self._in_pass, last, unit))
        if follows is not None and not follows.holders:
            if follows.pending:
                yield from self._apply(follows)
            yield from self._begin_gather(follows)
            self._ahead = follows

    def _give_up_ahead(self) -> Iterator[Operation]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            yield End(ahead.source)
            yield End(ahead.lease)
            yield Delete(f"{ahead.sizes.key}/gathered")

    def _drop(self, unit: _Unit) -> Iterator[Operation]:
        unit.holders -= 1
        if not unit.holders:
            yield End(unit.lease)
            if unit.sizes.gathered:
                yield Delete(f"{unit.sizes.key}/gathered")
            elif unit.sizes.converted:
                yield Delete(f"{unit.sizes.key}/converted")

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- updates -----------------------------------------------------------------------------------------------------------

    def _apply(self, unit: _Unit) -> Iterator[Operation]:
        sizes = unit.sizes
        whole = self._number()
        yield Lease(whole, (sizes.key,) if unit.opened >= 0 else (f"{sizes.key}/grad", sizes.key), True)
        for elements, chunk in sizes.chunks:
            number = self._number()
            if chunk:
                yield Lease(number, tuple(chunk), True)
            width = sizes.gradient / max(1, sizes.plan.elements) if sizes.plan.elements else 4
            moved = 2 * sum(chunk.values()) + int(elements * (2 * sizes.nbytes / max(1, sizes.plan.elements) + width))
            yield Work("update", elements, moved, 1)
            if chunk:
                yield End(number)
        yield End(whole)
        unit.pending = unit.has_gradient = False
        if unit.opened >= 0:
            yield End(unit.opened)
            unit.opened = -1
        yield Delete(f"{sizes.key}/grad")

    def _apply_ready(self) -> Iterator[Operation]:
        for unit in list(self._waiting):
            if not unit.holders and not unit.saved and unit.expected <= unit.arrived and not unit.sizes.gathered:
                yield from self._update_now(unit)

    def _update_now(self, unit: _Unit) -> Iterator[Operation]:
        del self._waiting[unit]
        yield from self._apply(unit)

    # -- backward ----------------------------------------------------------------------------------------------------------

    def _visit(self, *units: _Unit) -> Iterator[Operation]:
        if all(unit in self._backward for unit in units):
            return
        if self._backward:
            yield from self._leave()
            yield from self._apply_ready()
        for unit in units:
            yield from self._hold(unit)
            self._backward.append(unit)

    def _leave(self) -> Iterator[Operation]:
        units, self._backward = self._backward, []
        for unit in units:
            yield from self._drop(unit)

    def _open_gradients(self, unit: _Unit) -> Iterator[Operation]:
        if self._graded is unit:
            return
        if self._waiting and not any(held.saved for held in self._backward):
            yield from self._leave()
        yield from self._apply_ready()
        yield from self._close_gradients()
        if self._reductions == "overlapped":
            yield from self._end_reduction()
            yield from self._begin_reduction()
        self._graded = unit

    def _write_gradient(self, unit: _Unit, placement: Placement) -> Iterator[Operation]:
        sizes = unit.sizes
        if unit.opened < 0:
            if unit.pending:
                yield from self._apply(unit)
            key, nbytes = (f"{sizes.key}/local", sizes.gathered) if sizes.gathered else (f"{sizes.key}/grad", sizes.gradient)
            if not (unit.has_local if sizes.gathered else unit.has_gradient):
                yield Create(key, nbytes)
            if sizes.gathered:
                unit.has_local = True
            else:
                unit.has_gradient = True
            unit.opened = self._number()
            yield Lease(unit.opened, (key,), True)
        yield Work("gradient", placement.numel, 2 * placement.nbytes, 1)
        unit.arrived.add(placement)
        if self._in_backward and not sizes.gathered:  # of several ranks, a gradient is final once it is reduced
            self._waiting[unit] = None

    def _close_gradients(self) -> Iterator[Operation]:
        unit, self._graded = self._graded, None
        if unit is not None and unit.opened >= 0:
            yield End(unit.opened)
            unit.opened = -1
            if unit.sizes.gathered and unit not in self._unreduced:
                self._unreduced.append(unit)

    # -- between ranks -----------------------------------------------------------------------------------------------------

    def _reduce(self) -> Iterator[Operation]:
        """Reduce all that is complete, one unit after the other."""
        if self._graded is not None and self._graded.expected <= self._graded.arrived:
            yield from self._close_gradients()
        yield from self._end_reduction()
        while self._unreduced:
            yield from self._begin_reduction()
            yield from self._end_reduction()

    def _begin_reduction(self) -> Iterator[Operation]:
        if self._unreduced:
            unit = self._unreduced.pop(0)
            key, nbytes = unit.sizes.key, unit.sizes.gathered
            local, received = self._number(), self._number()
            yield Lease(local, (f"{key}/local",), True)
            yield Create(f"{key}/received", nbytes)
            yield Lease(received, (f"{key}/received",), True)
            self._reducing = unit, local, received

    def _end_reduction(self) -> Iterator[Operation]:
        reducing, self._reducing = self._reducing, None
        if reducing is not None:
            unit, local, received = reducing
            sizes = unit.sizes
            yield Work("reduce", 0, sizes.gathered, 1)
            if sizes.gradient:
                own = self._number()
                if not unit.has_gradient:
                    yield Create(f"{sizes.key}/grad", sizes.gradient)
                yield Lease(own, (f"{sizes.key}/grad",), True)
                yield End(own)
                unit.has_gradient = True
            yield End(received)
            yield Delete(f"{sizes.key}/received")
            yield End(local)
            yield Delete(f"{sizes.key}/local")
            unit.has_local = False

    def _finish(self) -> Iterator[Operation]:
        yield from self._leave()
        yield from self._close_gradients()
        yield from self._reduce()
        if self._in_backward:
            self._waiting |= {unit: None for unit in self._units if unit.sizes.gathered and unit.has_gradient}
        for unit in list(self._waiting):
            yield from self._update_now(unit)
        if self._in_backward:
            for unit in self._units:
                unit.arrived.clear()
