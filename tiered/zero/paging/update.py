"""Update parameters chunk by chunk: masters of narrow parameters, and the optimizer states of one unit.

``States`` has a unit's states and masters in chunks of a few
MiB in the store, and applies a pending update to one chunk after the other, so that an interrupted update goes on where it
stopped.

The fp32 master of a bf16 parameter is the parameter, its high half, and 16 low bits beside it. The high half is the master
rounded half up to bf16 (``(bits + 0x8000) >> 16``), the low half the master's low 16 bits. As a signed number the low half is
the master's distance from the parameter in bits, so that ``(high << 16) + low`` gives the master back, for every bit pattern;
and a parameter that was loaded is its own master once its low half is cleared.
"""

from __future__ import annotations

import math
import operator
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tiered.errors import InterruptedStep, MisuseError
from tiered.packing.moments import round_by_chance
from tiered.types import Access, TensorSpec
from tiered.zero.collectives import Term
from tiered.zero.paging.saved_tensors import without_grad
from tiered.zero.paging.storage import TensorStore
from tiered.zero.paging.units import Placement
from tiered.zero.rules.forms import StateForm, are_of_whole
from tiered.zero.rules.rule import SMALLEST_BLOCK, WHOLE, UpdateRule, chance_of, rounds_by_chance

__all__ = ["Chunk", "Missed", "Pending", "States", "Update", "all_finite", "flat_view", "join", "split"]


def join(high: torch.Tensor, low: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> None:
    """Write the masters to ``out``. ``high`` (bf16), ``low`` (int16), ``out`` and ``spare`` (fp32, overwritten) are flat, of
    one length."""
    bits, shifted = out.view(torch.int32), spare.view(torch.int32)
    bits.copy_(low)
    shifted.copy_(high.view(torch.int16))
    bits.add_(shifted, alpha=0x10000)


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Write the halves of ``master`` (fp32, finite, overwritten) to ``high`` (bf16) and ``low`` (int16); flat, one length."""
    bits = master.view(torch.int32)
    low.copy_(bits)
    bits.add_(0x8000)
    bits.bitwise_right_shift_(16)
    high.view(torch.int16).copy_(bits)


def all_finite(values: torch.Tensor) -> bool:
    """Return whether ``values`` have neither NaN nor infinity, in one pass and without a temporary tensor. On the meta device
    there are no values."""
    if values.is_meta or not values.numel():
        return True
    smallest, largest = torch.aminmax(values)
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())


UPDATED_AT_ONCE, PIECES = 1 << 18, 4
"""Elements that are updated at a time: all buffers of one piece stay in the processor's cache. A chunk has no more pieces than
the second, which is what the largest has that ``Limits.of`` makes."""


_MASTER = StateForm(torch.float32)
_NARROW = {torch.bfloat16: "lo", torch.float16: "master"}
"""What is kept of a master, beside the moments."""
_OF_LO = "lo.value"
"""Bits of the bf16 values to which ``lo`` belongs. It is no identifier, so no rule has a state of this name."""


@dataclass(frozen=True)
class Missed:
    """Steps with a gradient of zero, which follow one another. Of each of ``logs``: the rules by the number of the step, and
    the last step that it is meant for. Slices share the log of their optimizer, so that one that misses many steps needs no
    memory for them."""

    logs: tuple[tuple[Mapping[int, UpdateRule], int], ...]

    @property
    def last(self) -> int:
        return self.logs[-1][1]

    def rule(self, step: int) -> UpdateRule:
        """Return the rule of a step."""
        return next(log for log, last in self.logs if step <= last)[step]

    def until(self, log: Mapping[int, UpdateRule], step: int) -> Missed:
        """Return these steps and those up to number ``step``, whose rules are in ``log``."""
        before = self.logs[:-1] if self.logs[-1][0] is log else self.logs
        return Missed((*before, (log, step)))


@dataclass(frozen=True)
class Update:
    """Step of one parameter, frozen when ``step()`` was called. ``scales`` multiply the gradient first; then ``wide_scales``
    do, in the type of the master.

    A slice of a parameter may have no gradient in a step in which another slice has one. Its gradient is then zero, as it is in
    the whole parameter, and torch updates it nevertheless: moments decay, and the parameter with them. ``graded`` is False for
    such a step. ``missed``: the steps of that kind that follow this one.
    """

    rule: UpdateRule
    step: int
    scales: tuple[torch.Tensor, ...] = ()
    wide_scales: tuple[torch.Tensor, ...] = ()
    graded: bool = True
    missed: Missed | None = None

    def terms(self, name: str) -> Iterator[Term]:
        """Yield what all ranks need alike of this step of parameter ``name``, beside its rule."""
        yield f"the step of {name!r}", str(self.step)
        for number, scale in enumerate((*self.scales, *self.wide_scales)):
            yield f"factor {number} of the gradient of {name!r}", float(scale)

    @property
    def last(self) -> int:
        """Return the number of the last step that this has."""
        return self.step if self.missed is None else self.missed.last

    def then(self, log: Mapping[int, UpdateRule], step: int) -> Update:
        """Return this update with missed steps up to ``step`` after it; ``log`` has the rules of those after ``last``."""
        return replace(self, missed=Missed(((log, step),)) if self.missed is None else self.missed.until(log, step))


class Pending:
    """Deferred update of a unit. It counts the chunks that are done, and the pieces of the next chunk, so that an interrupted
    update goes on where it stopped. Between ``begin`` and ``done`` a piece is neither as it was nor updated."""

    def __init__(
        self,
        updates: dict[Placement, Update],
        chunks_done: int = 0,
        pieces_done: int = 0,
        elsewhere: Sequence[Placement] = (),
    ) -> None:
        """Initialise. ``elsewhere``: parameters that other ranks gather for their updates, in order; this one has nothing of
        them."""
        self.updates, self.elsewhere = updates, elsewhere
        self._place = chunks_done, pieces_done
        self._begun: tuple[int, int] | None = None

    @property
    def chunks_done(self) -> int:
        return self._place[0]

    @property
    def pieces_done(self) -> int:
        return self._place[1]

    @property
    def started(self) -> bool:
        """Return whether a part of it was applied."""
        return self._place != (0, 0) or self._begun is not None

    @property
    def graded(self) -> bool:
        """Return whether it needs gradients."""
        return any(update.graded for update in self.updates.values())

    def begin(self) -> None:
        """Begin the next piece. Raises InterruptedStep if it was begun before and is not done."""
        self.refuse_cut_off()
        self._begun = self._place

    def refuse_cut_off(self) -> None:
        """Raise InterruptedStep if a piece was begun and is not done."""
        if self._begun == self._place:
            raise InterruptedStep(
                "an exception struck in the middle of an optimizer update, and some parameters are neither as they were nor "
                "updated: call zero.rollback, or open the store again, which goes back to the last commit"
            )

    def as_it_was(self) -> None:
        """Note that the piece that was begun is unchanged."""
        self._begun = None

    def done(self, pieces: int = 1) -> None:
        """Count the piece that was begun, or several, by one assignment: an interruption leaves them counted or not."""
        self._place = self._place[0], self._place[1] + pieces

    def chunk_done(self) -> None:
        self._place = self._place[0] + 1, 0


class _Piece(NamedTuple):
    """Elements of a parameter that are updated together. ``forms``: its states and their forms; ``spans``: for each of them,
    and for what is kept of a master, the number of its tensor in the chunk, and where in that its values are. ``whole``: one of
    its states is of the whole parameter."""

    placement: Placement
    elements: range
    forms: Mapping[str, StateForm]
    spans: Mapping[str, tuple[int, slice]]
    whole: bool


class _Together:
    """Pieces that follow one another and are updated by one call of their rule, up to ``most`` elements: of small parameters a
    call takes longer than the update."""

    def __init__(self, pending: Pending, most: int) -> None:
        self._pending, self._most = pending, most
        self._update: Update | None = None
        self._params: list[torch.Tensor] = []
        self._grads: list[torch.Tensor] = []
        self._states: list[dict[str, torch.Tensor]] = []
        self._elements = 0

    def takes(
        self, piece: _Piece, update: Update, param: torch.Tensor, grad: torch.Tensor | None, state: dict[str, torch.Tensor]
    ) -> bool:
        """Return whether the piece is updated with others, by ``update``; else those before it are updated now."""
        joins = (
            grad is not None
            and getattr(update.rule, "together", False)
            and update.step > 1
            and update.missed is None
            and not (update.scales or update.wide_scales or piece.whole)
            and param.dtype not in _NARROW
            and not param.is_meta
        )
        before = self._update
        if before is not None and not (joins and update.step == before.step and update.rule == before.rule):
            self.update()
        if not joins:
            return False
        assert grad is not None
        self._update = update
        self._params.append(param)
        self._grads.append(grad)
        self._states.append(state)
        self._elements += param.numel()
        if self._elements >= self._most:
            self.update()
        return True

    def update(self) -> None:
        """Update the pieces that were taken."""
        if (update := self._update) is None:
            return
        rule: Any = update.rule
        self._pending.begin()
        rule.update_each(self._params, self._grads, self._states, update.step)
        self._pending.done(len(self._params))
        self._update, self._elements = None, 0
        self._params, self._grads, self._states = [], [], []


class Chunk(NamedTuple):
    """One chunk, as an update of some parameters goes through it: its ``number``, the ``keys`` of its tensors, the ``pieces``
    in order, and ``most``: how large each tensor is once all of the unit's parameters have states."""

    number: int
    keys: list[str]
    pieces: list[_Piece]
    most: list[int]


class States:
    """Optimizer states of one unit's parameters. A chunk is one tensor per kind of state, over the same elements of the unit:
    over ``chunk_elements``, and where a state belongs to blocks, over all of a block whose first element is among these. Of a
    state with another number of values than its block has elements, a chunk has the values of its blocks one after the other.

    Which states a parameter has is its update rule's to say (``use``); where nobody did, they are ``m`` and ``v``, fp32 (fp64
    for fp64 parameters). The fp32 master of a bf16 parameter is the parameter and ``lo`` (int16), that of an fp16 parameter is
    ``master``; other parameters are their own masters. ``kinds``: the types in the store of all of the unit's parameters, where
    ``placements`` are a rank's share of it. ``used``: forms of states by their names, by the names of the parameters that have
    others than ``m`` and ``v``.
    """

    def __init__(
        self,
        store: TensorStore,
        key: str,
        placements: Sequence[Placement],
        chunk_elements: int,
        kinds: Collection[torch.dtype] = (),
        used: Mapping[str, Mapping[str, StateForm]] | None = None,
    ) -> None:
        self.store, self.key, self.chunk_elements = store, key, chunk_elements
        self._placements = sorted(placements, key=operator.attrgetter("element"))
        self._elements = [placement.element for placement in self._placements]
        self.update_seconds = 0.0
        self.stale_masters = set(placements)  # whose fp32 master does not yet have the parameter's value
        kinds = kinds or {placement.stored for placement in placements}
        self.wide = torch.float64 if torch.float64 in kinds else torch.float32
        """The type that updates are computed in."""
        self._masters: dict[str, StateForm] = {}
        if torch.bfloat16 in kinds:
            self._masters["lo"] = StateForm(torch.int16)
        if torch.float16 in kinds:
            self._masters["master"] = StateForm(torch.float32)
        self._usual: dict[str, StateForm] = {"m": StateForm(self.wide), "v": StateForm(self.wide)}
        self.used: dict[str, dict[str, StateForm]] = {}
        self._before: dict[tuple[int, str, int, int], dict[Placement, int]] = {}
        self._planned: tuple[tuple[Placement, ...], list[Chunk]] | None = None
        self.gather: Callable[[Placement, torch.Tensor, str], torch.Tensor] | None = None
        """Returns all of a parameter, or of a tensor like it, of which ranks have parts; all call it together."""
        for name, states in (used or {}).items():
            self.use(name, states)

    def follow(self) -> None:
        """Have an update begin with the values that bf16 parameters have, where somebody else wrote to them since the last one.
        So ``lo`` is kept with the values that it belongs to. (Who writes to paged parameters makes their masters stale.)"""
        if "lo" in self._masters:
            self._masters[_OF_LO] = StateForm(torch.int16)
            self._planned = None

    def may_lack(self, key: str) -> bool:
        """Return whether an earlier release did not write the tensor of this key."""
        return _kind(key) == _OF_LO

    def use(self, name: str, states: Mapping[str, StateForm]) -> None:
        """Have the parameter of this name keep ``states``: forms by name. Raises what ``refuse`` raises."""
        self.refuse(name, states)
        self._planned = None
        if dict(states) == self._usual:
            self.used.pop(name, None)
        else:
            self.used[name] = dict(states)

    def refuse(self, name: str, states: Mapping[str, StateForm]) -> None:
        """Raise MisuseError where the parameter of this name cannot keep ``states``, because another one keeps a state of that
        name and another form."""
        present = {kind: form for other, kept in self.used.items() if other != name for kind, form in kept.items()}
        for kind, form in states.items():
            if kind in ("lo", "master") or not kind.isidentifier():
                raise MisuseError(f"an update rule keeps a state named {kind!r}: give it another name, which is an identifier")
            other = {**present, **self._usual}.get(kind, form)
            if other != form:
                raise MisuseError(
                    f"an update rule keeps {kind!r} of parameters in {self.key!r} as {form}, and another one as {other}: give "
                    "the state another name"
                )

    def others(
        self, kept: Mapping[Placement, Mapping[str, StateForm]]
    ) -> list[tuple[Placement, Mapping[str, StateForm]]]:
        """Return those of ``kept`` that are not what their parameters keep."""
        used, usual = self.used, self._usual
        return [(placement, forms) for placement, forms in kept.items() if used.get(placement.name, usual) != forms]

    def states_of(self, placement: Placement) -> Mapping[str, StateForm]:
        """Return the states that a parameter keeps, without its master: forms by name, in the order of their keys."""
        return self.used.get(placement.name, self._usual)

    def _stored_of(self, placement: Placement) -> dict[str, StateForm]:
        """Return the states of which a parameter has any values."""
        states, shape = self.states_of(placement), placement.full_shape
        return {name: form for name, form in states.items() if form.count(placement.numel, shape)}

    def _masters_of(self, placement: Placement) -> dict[str, StateForm]:
        """Return the forms of what is kept of a parameter's master, if it has one."""
        without = any(form.unmastered for form in self.states_of(placement).values())
        return {} if without else self._masters

    @property
    def uniform(self) -> bool:
        """Return whether all parameters keep the same states."""
        return all(self.states_of(placement) == self.states_of(self._placements[0]) for placement in self._placements)

    def form_of(self, key: str) -> StateForm:
        """Return the form of the tensor of this key, which ``chunks`` returned."""
        kind = _kind(key)
        everything = [self._masters, *self.used.values(), self._usual]
        return next(states[kind] for states in everything if kind in states)

    def _block(self, placement: Placement) -> int:
        """Return the elements that are updated together of a parameter."""
        block = max((form.block for form in self.states_of(placement).values()), default=SMALLEST_BLOCK)
        return max(1, placement.numel) if block == WHOLE else block

    def chunks(self, placements: Iterable[Placement]) -> list[tuple[int, list[str]]]:
        """Return the chunks that ``placements`` lie in, in order: index and keys."""
        found: dict[int, tuple[dict[str, StateForm], dict[str, StateForm]]] = {}
        for placement in placements:
            if not placement.numel:
                continue
            block = self._block(placement)
            masters = self._masters_of(placement)
            first = placement.element // self.chunk_elements
            last = (placement.element + (placement.numel - 1) // block * block) // self.chunk_elements
            for index in range(first, last + 1):
                if self._within(placement, index, block):
                    states, beside = found.setdefault(index, ({}, {}))
                    states.update(self._stored_of(placement))
                    beside.update(masters)
        return [
            (index, [f"{self.key}/{name}#{index}" for name in (*states, *beside)])
            for index, (states, beside) in sorted(found.items())
        ]

    def plan(self, placements: Iterable[Placement]) -> list[Chunk]:
        """Return how an update of ``placements`` goes through their chunks. What is returned is kept, because the next step
        mostly updates the same parameters."""
        wanted = tuple(placements)
        if self._planned is None or self._planned[0] != wanted:
            self._planned = wanted, [self._chunk(index, keys, wanted) for index, keys in self.chunks(wanted)]
        return self._planned[1]

    def _chunk(self, index: int, keys: list[str], placements: Sequence[Placement]) -> Chunk:
        pieces = []
        for placement, elements in self._pieces(placements, index):
            forms = self._stored_of(placement)
            kept = {**forms, **self._masters_of(placement)}
            spans = {
                kind: (number, self._span(placement, index, kept[kind], elements))
                for number, kind in enumerate(map(_kind, keys))
                if kind in kept
            }
            whole = are_of_whole(forms)
            pieces.append(_Piece(placement, elements, forms, spans, whole))
        return Chunk(index, keys, pieces, [max(self.sizes(key), default=0) for key in keys])

    def _near(self, index: int) -> tuple[list[Placement], list[Placement]]:
        """Return the parameters of which chunk number ``index`` may have values, and those that begin after it, in order."""
        begin = index * self.chunk_elements
        first = max(0, bisect_left(self._elements, begin) - 1)  # it may reach into the chunk
        last = bisect_left(self._elements, begin + self.chunk_elements, first)
        return self._placements[first:last], self._placements[last:]

    def _within(self, placement: Placement, index: int, block: int = 0) -> range:
        """Return which elements of a parameter chunk number ``index`` has: those of the blocks (of ``block`` elements, or as
        its states say) that begin there."""
        block = block or self._block(placement)
        begin = index * self.chunk_elements - placement.element
        start, stop = (min(max(0, -(-at // block) * block), placement.numel) for at in (begin, begin + self.chunk_elements))
        return range(start, stop)

    def _span(self, placement: Placement, index: int, form: StateForm, elements: range) -> slice:
        """Return where in chunk number ``index`` the values of these elements of a parameter are. ``elements`` begin where a
        block does."""
        if form.elementwise:
            first = placement.element - index * self.chunk_elements
            return slice(first + elements.start, first + elements.stop)
        span = form.span(elements.start, elements.stop, placement.full_shape)
        first = self._values_before(index, form)[placement]
        return slice(first + span.start, first + span.stop)

    def _values_before(self, index: int, form: StateForm) -> Mapping[Placement, int]:
        """Return for each parameter how many values the parameters before it have in a chunk, if all have a state of this form,
        less those of its own that are in chunks before."""
        key = index, form.per, form.block, form.values
        if key not in self._before:
            count, found = 0, {}
            for placement in self._placements:
                here = self._within(placement, index, form.block or max(1, placement.numel))
                found[placement] = count - form.count(here.start, placement.full_shape) if here.start else count
                count += form.count(len(here), placement.full_shape) if here else 0
            self._before[key] = found
        return self._before[key]

    def needed(self, placement: Placement, states: Mapping[str, StateForm]) -> int:
        """Return the bytes of the largest chunk that a parameter lies in, if it keeps ``states`` and is updated as a whole."""
        elements = max(self.chunk_elements, placement.element % self.chunk_elements + placement.numel)
        masters = {} if any(form.unmastered for form in states.values()) else self._masters
        forms = [*states.values(), *masters.values()]
        return sum(form.dtype.itemsize * form.count(elements, placement.full_shape) for form in forms)

    def sizes(self, key: str) -> list[int]:
        """Return the sizes that the tensor of this key may have: with all parameters up to each, in order."""
        here, after = self._near(int(key.rpartition("#")[2]))
        return self._sizes(key, here, after)

    def _sizes(self, key: str, here: Iterable[Placement], after: Iterable[Placement]) -> list[int]:
        """Return ``sizes`` where no other parameters than these have states: of those that ``_near`` returns."""
        kind, index = _kind(key), int(key.rpartition("#")[2])
        found = {self._size(kind, index, placement) for placement in here}
        found.add(next(filter(None, (self._size(kind, index, placement) for placement in after)), 0))  # the others say the same
        return sorted(found - {0})

    def _size(self, kind: str, index: int, placement: Placement) -> int:
        """Return how large chunk number ``index`` of a kind of state has to be for a parameter, or for one before it; 0 for a
        parameter that does not keep it."""
        form = {**self._masters_of(placement), **self.states_of(placement)}.get(kind)
        if form is None:
            return 0
        end = placement.element + placement.numel - index * self.chunk_elements
        least = max(0, min(self.chunk_elements, end)) if form.elementwise else 0
        here = self._within(placement, index)
        if not here or not form.count(placement.numel, placement.full_shape):
            return least
        last: int = self._span(placement, index, form, here).stop
        return max(least, last)

    def _create(self, index: int, keys: list[str], placements: Iterable[Placement]) -> None:
        """Create a chunk of zeros where there is none, as large as the parameters that need states; enlarge one that is
        smaller."""
        wanted = set(placements)
        here, after = (
            [one for one in near if one in wanted or one.parameter.requires_grad] for near in self._near(index)
        )
        lengths = dict(zip(keys, self._lengths(keys), strict=True))
        for key in reversed(keys):  # the first tells that all are there
            size, dtype = max(self._sizes(key, here, after), default=0), self.form_of(key).dtype
            found = lengths[key]
            if found >= size:
                continue
            if found:  # a parameter was unfrozen since
                grown = torch.zeros(size, dtype=dtype, device="cpu")
                grown[:found] = self.store.get(key)[:found]
                self.store.put(key, grown)
                continue
            self.store.create(key, TensorSpec(str(dtype).removeprefix("torch."), (size,), dtype.itemsize))
            with self.store.lease(key, access=Access.WRITE) as chunk:
                chunk.zero_()
            del chunk

    def _lengths(self, keys: list[str]) -> list[int]:
        """Return how many values the tensor of each of these keys has; 0 where there is none."""
        return [0 if spec is None else spec.shape[0] for spec in self.store.specs(keys)]

    # -- the update --------------------------------------------------------------------------------------------------------

    def apply(self, pending: Pending, unit: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Update the parameters in ``unit``, whose gradients are in ``gradient`` (both uint8, of the unit's layout). None: all
        gradients are zero.

        Raises MisuseError for a bf16 parameter whose master would no longer be finite, with all of that piece as it was, and
        InterruptedStep where an exception struck in the middle of a piece before.
        """
        scratch = _Scratch(unit.device)
        first = min((part.of.element for part in self._placements), default=math.inf)
        self._help([placement for placement in pending.elsewhere if placement.element < first])
        for index, keys, pieces, most in self.plan(pending.updates)[pending.chunks_done :]:
            there = self._lengths(keys)
            blank = {_kind(key) for key, length in zip(keys, there, strict=True) if not length}
            untold = _OF_LO in blank and "lo" not in blank  # an earlier release took all values for those that it had written
            if any(map(operator.lt, there, most)):
                self._create(index, keys, pending.updates)
            with (
                self._lease(keys) as chunk,
                without_grad(),
                self.store.span("update", f"{self.key}#{index}"),
            ):
                began = time.perf_counter()
                together = _Together(pending, max(UPDATED_AT_ONCE, self.chunk_elements // PIECES))
                for piece in pieces[pending.pieces_done :]:
                    placement, (start, stop) = piece.placement, (piece.elements.start, piece.elements.stop)
                    state = {kind: chunk[number][span] for kind, (number, span) in piece.spans.items()}
                    update = pending.updates[placement]
                    param, grad = placement.stored_flat(unit, start, stop), None
                    if untold and _OF_LO in state:
                        _drop_strange(state["lo"], param)
                        state[_OF_LO].copy_(param.view(torch.int16))
                    if update.graded:
                        assert gradient is not None
                        grad = placement.flat(gradient, start, stop)
                    if together.takes(piece, update, param, grad, state):
                        del state, param, grad
                        continue
                    pending.begin()
                    try:
                        self._update_piece(piece, update, param, grad, state, scratch)
                    except MisuseError:
                        pending.as_it_was()
                        raise
                    pending.done()
                    del state, param, grad
                together.update()
                self.update_seconds += time.perf_counter() - began
                del chunk  # the last alias: the chunk may go to disk as soon as the lease ends
            pending.chunk_done()
        self._help([placement for placement in pending.elsewhere if placement.element >= first])
        self.stale_masters.difference_update(pending.updates)

    def _help(self, placements: Iterable[Placement]) -> None:
        """Take part in what the ranks gather that update ``placements``, of which this one has nothing."""
        assert self.gather is not None or not placements
        for placement in placements:
            empty = torch.empty(0, dtype=self.wide, device="cpu")
            for what in ("the parameter", "the gradient"):
                self.gather(placement, empty, what)  # type: ignore[misc]
            for name, form in self._stored_of(placement).items():
                if form.elementwise:
                    self.gather(placement, empty.to(form.dtype), name)  # type: ignore[misc]

    def _lease(self, keys: list[str]) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Lease a chunk. A rule without states has none."""
        return self.store.lease(keys, access=Access.WRITE) if keys else nullcontext(())

    def _pieces(self, placements: Iterable[Placement], index: int) -> list[tuple[Placement, range]]:
        """Return the pieces of one chunk: parameter, and which elements of it."""
        pieces = []
        if self.gather is not None:  # all ranks gather in one order
            of_whole = {p: are_of_whole(self.states_of(p)) for p in placements}
            placements = sorted(of_whole, key=lambda placement: placement.element if of_whole[placement] else -1)
        at_once = max(UPDATED_AT_ONCE, self.chunk_elements // PIECES)
        here = set(self._near(index)[0])
        for placement in filter(here.__contains__, placements):
            block = self._block(placement)
            whole, step = self._within(placement, index, block), max(1, at_once // block) * block
            pieces += [
                (placement, range(start, min(whole.stop, start + step))) for start in range(whole.start, whole.stop, step)
            ]
        return pieces

    def _update_piece(
        self,
        piece: _Piece,
        update: Update,
        param: torch.Tensor,
        grad: torch.Tensor | None,
        state: dict[str, torch.Tensor],
        scratch: _Scratch,
    ) -> None:
        """Update one piece. All tensors are flat, and those that are not of blocks of one length. ``grad``: None is zero. There
        is nothing to compute on the meta device."""
        if param.is_meta:
            return
        placement, forms, size = piece.placement, piece.forms, param.numel()
        if grad is None:
            grad = scratch.take("scaled", placement.dtype, size).zero_()
        if update.step == 1:  # of a fresh optimizer, whatever an earlier one left here
            for kept in state.values():
                kept.zero_()
            self.stale_masters.add(placement)
        stale = placement in self.stale_masters
        for scale in update.scales:
            grad = torch.mul(grad, scale, out=scratch.take("scaled", grad.dtype, size))
        moments = {name: state[name] for name in forms}
        matrix = (placement, forms) if piece.whole else None
        if param.dtype not in _NARROW:
            for scale in update.wide_scales:
                grad = torch.mul(grad, scale, out=scratch.take("scaled", grad.dtype, size))
            self._steps(update, param, grad, moments, scratch, matrix)
            return
        wide = scratch.take("wide", torch.float32, size).copy_(grad)
        for scale in update.wide_scales:
            wide.mul_(scale)
        if rounds_by_chance(update.rule):
            self._round(placement, update, param, wide, moments, scratch, piece.elements.start)
            return
        if param.dtype is torch.float16:
            master = state["master"]
            if stale:
                master.copy_(param)
            self._steps(update, master, wide, moments, scratch, matrix)
            param.copy_(master)
            return
        master = scratch.take("master", torch.float32, size)
        if stale:
            state["lo"].zero_()
        elif _OF_LO in state:
            _restart(state["lo"], state[_OF_LO], param)
        join(param, state["lo"], master, scratch.take("spare", torch.float32, size))
        before = {
            name: scratch.take(f"before {name}", moment.dtype, moment.numel()).copy_(moment) for name, moment in moments.items()
        }
        updated = self._steps(update, master, wide, moments, scratch, matrix)
        if not all_finite(updated):
            for name, moment in before.items():
                moments[name].copy_(moment)
            raise _not_finite(placement)
        split(master, param, state["lo"])
        if _OF_LO in state:
            state[_OF_LO].copy_(param.view(torch.int16))

    def _round(
        self,
        placement: Placement,
        update: Update,
        param: torch.Tensor,
        grad: torch.Tensor,
        moments: dict[str, torch.Tensor],
        scratch: _Scratch,
        begin: int,
    ) -> None:
        """Make the step of ``update``, and the missed ones that follow, of bf16 elements without a master: each in fp32, after
        which they are rounded by chance."""
        name, first = placement.of.name, getattr(placement, "begin", 0) + begin
        if placement.sliced is not None:
            name, first = placement.sliced.name, placement.sliced.element(placement.number) + begin
        before = {
            key: scratch.take(f"before {key}", moment.dtype, moment.numel()).copy_(moment) for key, moment in moments.items()
        }
        made = scratch.take("rounded", torch.bfloat16, param.numel()).copy_(param)
        for step in range(update.step, update.last + 1):
            rule = update.rule if step == update.step or update.missed is None else update.missed.rule(step)
            master = scratch.take("master", torch.float32, param.numel()).copy_(made)
            rule.update(master, grad if step == update.step else grad.zero_(), moments, step)
            if not all_finite(master):
                for key, moment in before.items():
                    moments[key].copy_(moment)
                raise _not_finite(placement)
            round_by_chance(master, made, chance_of(rule, step, name), first)
        param.copy_(made)

    def _steps(
        self,
        update: Update,
        param: torch.Tensor,
        grad: torch.Tensor,
        moments: dict[str, torch.Tensor],
        scratch: _Scratch,
        matrix: tuple[Placement, Mapping[str, StateForm]] | None,
    ) -> torch.Tensor:
        """Make the step of ``update``, and the missed ones that follow. ``matrix``: the parameter whose shape all are given,
        and the forms of its states. Returns what was updated: ``param``, or all of a parameter of which this rank has a part.

        A part is gathered, with its gradient and states, and all ranks that have one compute the same.
        """
        if matrix is None or matrix[0].numel == matrix[0].of.numel:
            _steps(update, param, grad, moments, scratch, matrix)
            return param
        (part, forms), gather = matrix, self.gather
        assert gather is not None and update.missed is None
        begin = getattr(part, "begin", 0)
        own = slice(begin, begin + part.numel)
        whole, gradient = (
            gather(part.of, tensor, what).to(param.device)
            for tensor, what in ((param, "the parameter"), (grad, "the gradient"))
        )
        states = {
            name: gather(part.of, flat, name).to(flat.device)
            if forms[name].elementwise
            else forms[name].shaped(flat, part.full_shape, part.full_stride)
            for name, flat in moments.items()
        }
        update.rule.update(whole, gradient, states, update.step)
        param.copy_(flat_view(whole)[own])
        for name, flat in moments.items():
            if forms[name].elementwise:
                flat.copy_(flat_view(states[name])[own])
        return flat_view(whole)

    # -- by parameter ------------------------------------------------------------------------------------------------------

    def blank(self, placement: Placement) -> dict[str, torch.Tensor]:
        """Return the ``copies`` of a parameter that has no element here."""
        kept = () if _NARROW.get(placement.stored) is None or not self._masters_of(placement) else ("master",)
        forms, shape = self.states_of(placement), placement.shape
        kinds = {name: form.dtype for name, form in forms.items() if form.count(max(1, placement.numel), shape)}
        kinds |= dict.fromkeys(kept, torch.float32)
        return {name: torch.empty(0, dtype=dtype, device="cpu") for name, dtype in kinds.items()}

    def copies(self, placement: Placement, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies of its states and, for bf16 and fp16 parameters, of ``master`` (fp32), in the parameter's shape and
        strides. A state with another number of values than its block has elements has one dimension, and so has that of rows or
        columns where ``placement`` is a part.

        ``param`` is the parameter, flat, in host memory; so are they.
        """
        forms = self.states_of(placement)
        return {
            name: forms.get(name, _MASTER).shaped(copy, placement.shape, placement.stride)
            if placement.shape == placement.full_shape or forms.get(name, _MASTER).elementwise
            else copy
            for name, copy in self.flat_copies(placement, param).items()
        }

    def known(self, placement: Placement) -> bool:
        """Return whether there are states of all elements of a parameter."""
        for index, keys in self.chunks([placement]):
            if not keys:
                continue
            last = self._span(placement, index, self.form_of(keys[0]), self._within(placement, index)).stop
            if self._lengths(keys[:1])[0] < last:
                return False
        return True

    def flat_copies(self, placement: Placement, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``copies`` as tensors of one dimension."""
        narrow = _NARROW.get(placement.stored) if self._masters_of(placement) else None
        kept: tuple[str, ...] = () if narrow is None or placement in self.stale_masters else (narrow,)
        chunks = self.chunks([placement])
        if "lo" in kept and _OF_LO in self._masters and all(self._lengths([f"{self.key}/{_OF_LO}#{i}" for i, _ in chunks])):
            kept += (_OF_LO,)
        forms = {**self._stored_of(placement), **{name: self._masters[name] for name in kept}}
        shape = placement.full_shape
        flat = {
            name: torch.empty(form.count(placement.numel, shape), dtype=form.dtype, device="cpu")
            for name, form in forms.items()
        }
        for index, _ in chunks:
            here = self._within(placement, index)
            for name, copy in flat.items():
                with self.store.lease(f"{self.key}/{name}#{index}") as chunk:
                    form = forms[name]
                    copy[form.span(here.start, here.stop, shape)] = chunk[self._span(placement, index, form, here)]
                del chunk
        if _OF_LO in flat:
            _restart(flat["lo"], flat.pop(_OF_LO), param)
        elif "lo" in flat:
            _drop_strange(flat["lo"], param)
        if "lo" in flat:
            flat["master"] = torch.empty(placement.numel, dtype=torch.float32, device="cpu")
            join(param, flat.pop("lo"), flat["master"], torch.empty_like(flat["master"]))
        elif narrow is not None and not kept:
            flat["master"] = param.to(torch.float32)
        return flat

    def load(self, placement: Placement, param: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Take over what ``copies`` returned; ``param`` as there. A master that is missing, or does not round to the parameter,
        starts from the parameter again."""
        flat, shape = {}, placement.full_shape
        forms = {**self.states_of(placement), **self._masters_of(placement)}
        for name, value in state.items():
            form = _MASTER if name == "master" else forms[name]
            if not form.elementwise:
                count = form.count(placement.numel, shape)
                flat[name] = torch.empty(count, dtype=form.dtype, device="cpu").copy_(value.reshape(-1))
                continue
            arranged = torch.empty_strided(placement.shape, placement.stride, dtype=form.dtype, device="cpu")
            flat[name] = flat_view(arranged.copy_(value))
        self.stale_masters.add(placement)
        master = flat.pop("master", None)
        narrow = _NARROW.get(placement.stored) if self._masters_of(placement) else None
        if master is not None and narrow is not None and all_finite(master):
            rounded, low = torch.empty_like(param), torch.empty(placement.numel, dtype=torch.int16, device="cpu")
            if narrow == "lo":
                split(master, rounded, low)
            else:
                rounded.copy_(master)
            if torch.equal(rounded, param):
                flat[narrow] = low if narrow == "lo" else master
                if _OF_LO in self._masters and narrow == "lo":
                    flat[_OF_LO] = param.view(torch.int16)
                self.stale_masters.discard(placement)
        for index, keys in self.chunks([placement]):
            self._create(index, keys, [placement])
            here = self._within(placement, index)
            for name, value in flat.items():
                form = forms[name]
                with self.store.lease(f"{self.key}/{name}#{index}", access=Access.WRITE) as chunk:
                    chunk[self._span(placement, index, form, here)] = value[form.span(here.start, here.stop, shape)]
                del chunk


def _restart(low: torch.Tensor, of: torch.Tensor, values: torch.Tensor) -> None:
    """Clear ``low`` where ``values`` (bf16) are not the ones ``of`` which it is (their bits), so that each of those is its own
    master."""
    low.masked_fill_(of != values.view(torch.int16), 0)


def _drop_strange(low: torch.Tensor, values: torch.Tensor) -> None:
    """Clear ``low`` where it would make NaN of ``values`` (bf16) that are zero: no master that rounds to zero has it."""
    low.masked_fill_((values == 0) & (low < 0), 0)


def _not_finite(placement: Placement) -> MisuseError:
    return MisuseError(
        f"the update of {placement.name!r} would make it infinite or NaN, which a bfloat16 parameter in the store cannot be: "
        "look at the gradients and the learning rate"
    )


def _steps(
    update: Update,
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: dict[str, torch.Tensor],
    scratch: _Scratch,
    matrix: tuple[Placement, Mapping[str, StateForm]] | None,
) -> None:
    """Make the step of ``update``, and the missed ones that follow. ``matrix``: the parameter whose shape all are given, and
    the forms of its states."""
    if matrix is not None:
        whole, forms = matrix
        param, grad = (flat.as_strided(whole.full_shape, whole.full_stride) for flat in (param, grad))
        moments = {name: forms[name].shaped(flat, whole.full_shape, whole.full_stride) for name, flat in moments.items()}
    update.rule.update(param, grad, moments, update.step)
    if update.missed is not None and update.missed.last > update.step:
        zero = scratch.take("zero", grad.dtype, grad.numel()).zero_()
        for step in range(update.step + 1, update.missed.last + 1):
            update.missed.rule(step).update(param, zero, moments, step)


def _kind(key: str) -> str:
    """Return the name of the state, or master, of which ``key`` is a chunk."""
    return key.rpartition("/")[2].partition("#")[0]


class _Scratch:
    """Buffers for one piece, by name, which are made when they are first needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer[:size]


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of ``tensor``, which is dense, in memory order and without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))
