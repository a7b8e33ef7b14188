"""What a paged model asks of its store in one training step, as notes, and the store that takes them.

Nothing here follows a pager: the pager itself asks ``NotingStore``, which has places for no bytes and gives tensors on the meta
device. A step that was written down so is played in a simulated store (``rehearsal``) as often as one likes.
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tiered.planning.simulated import DriveRates, SimulatedStore
from tiered.tensors.specs import dtype_of, spec_of
from tiered.types import Access, Key, Owner, TensorSpec, Use
from tiered.zero.collectives import Agree, CollectiveProgress, Ranks, Under
from tiered.zero.paging.unit import Unit

__all__ = [
    *("AheadNote", "Alive", "Cost", "CreateNote", "DeleteNote", "EndNote", "LeaseNote", "NotingRanks", "NotingStore"),
    *("Operation", "OperationKind", "PauseNote", "StepNotes", "TensorForm", "WorkNote", "in_groups", "slices_in_groups"),
    "slices_of",
]


@dataclass(frozen=True)
class TensorForm:
    """Shape, strides and element type of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True)
class OperationKind:
    """An operation of torch on tensors of given shapes: all that are equal take the same time.

    ``signature`` says what is equal; ``call`` has what is called and its arguments, on the meta device. ``flops``: floating
    point operations, ``nbytes``: bytes of operands and results.
    """

    signature: str
    flops: float = field(compare=False)
    nbytes: float = field(compare=False)
    call: tuple[Any, Any, Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Cost:
    """Operations that follow one another. ``backward``: they are of a backward pass."""

    operations: tuple[OperationKind, ...]
    backward: bool = False

    @property
    def flops(self) -> float:
        return sum(one.flops for one in self.operations)

    @property
    def nbytes(self) -> float:
        return sum(one.nbytes for one in self.operations)


class CreateNote(NamedTuple):
    """``temporary``: a saved activation, which is written behind at once where no order is known."""

    key: str
    nbytes: int
    temporary: bool = False


class LeaseNote(NamedTuple):
    """``number`` is what ``EndNote`` says."""

    number: int
    keys: tuple[str, ...]
    write: bool


class EndNote(NamedTuple):
    number: int


class DeleteNote(NamedTuple):
    key: str


class AheadNote(NamedTuple):
    """Activations that are needed soon."""

    keys: tuple[str, ...]


class WorkNote(NamedTuple):
    """Work that is not the model's: an ``update`` of so many elements, a ``gradient`` of so many bytes that is copied into the
    store, an ``activation`` that is copied into it or out of it, parameters that are ``cast``; and between ranks a ``gather``
    or ``reduce`` of a unit of so many bytes. Of the others ``nbytes`` are those of memory that are read and written. A ``call``
    of the store is one that asks for nothing more."""

    kind: Literal["update", "gradient", "activation", "cast", "gather", "reduce", "call"]
    elements: int
    nbytes: int
    pieces: int


class PauseNote(NamedTuple):
    """Operations of the model between two calls of the store."""

    cost: Cost


class Alive(NamedTuple):
    """Bytes that are alive after an operation, and at most since the one before."""

    now: int
    most: int


Operation = CreateNote | LeaseNote | EndNote | DeleteNote | AheadNote | WorkNote | PauseNote


@dataclass
class StepNotes:
    """What one training step asks of a store, in order; the next one asks the same. ``initial``: the bytes of the tensors that
    there are before it, by key; ``activations``: of those that wait in the store within it. ``peak``: bytes that are alive at
    most, of tensors that the passes made, without parameters and with one gradient at a time. ``turns``: how many operations
    there were at each beginning and each end of a backward pass; ``alive``: where that was asked for, of each operation the
    bytes of such tensors."""

    operations: list[Operation] = field(default_factory=list)
    initial: dict[str, int] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    turns: list[int] = field(default_factory=list, compare=False)
    alive: list[Alive] = field(default_factory=list, compare=False)

    def touches(self) -> tuple[list[Key], list[Use], list[int]]:
        """Return what is touched, in order: keys, uses, and the bytes of tensors, which are those that are moved."""
        sizes = dict(self.initial)
        keys, uses = list[Key](), list[Use]()
        for one in self.operations:
            if isinstance(one, CreateNote):
                sizes[one.key] = one.nbytes
                keys.append(one.key)
                uses.append(Use.PUT)
            elif isinstance(one, LeaseNote):
                keys += one.keys
                uses += [Use.WRITE if one.write else Use.READ] * len(one.keys)
        return keys, uses, [sizes[key] for key in keys]

    @property
    def costs(self) -> Iterator[Cost]:
        """Yield what the model computes."""
        return (one.cost for one in self.operations if isinstance(one, PauseNote))

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs)


def in_groups(step: StepNotes, together: int) -> StepNotes:
    """Return a step with so many pieces of an activation as one, under the key of the first."""
    if together <= 1:
        return step
    sizes, counts = dict[str, int](), dict[str, int]()
    first = {key: key if _piece(key)[1] % together == 0 else "" for key in step.activations}
    for key, nbytes in step.activations.items():
        base, number = _piece(key)
        group = f"{base}.{number // together * together}" if number else key
        sizes[group] = sizes.get(group, 0) + nbytes
        counts[group] = counts.get(group, 0) + 1
    found: list[Operation] = []
    left: set[int] = set()  # leases
    key, pieces = "", 1  # of the activation that was named last
    for one in step.operations:
        if isinstance(one, CreateNote | DeleteNote | LeaseNote) and _named(one) in first:
            key = first[_named(one)]
            pieces = counts[key] if key and isinstance(one, CreateNote) else 1
            if key:
                found.append(one._replace(nbytes=sizes[key]) if isinstance(one, CreateNote) else one)
            elif isinstance(one, LeaseNote):
                left.add(one.number)
        elif isinstance(one, AheadNote):
            keys = tuple(one for one in one.keys if first[one])
            found += [AheadNote(keys)] if keys else []
        elif isinstance(one, WorkNote) and one.kind == "activation":
            found += [one._replace(nbytes=2 * sizes[key], pieces=pieces)] if key else []
        elif not isinstance(one, EndNote) or one.number not in left:
            found.append(one)
    return replace(step, operations=found, activations=sizes)


def slices_of(step: StepNotes) -> tuple[int, int, int]:
    """Return how many touches of a step are of tensors of slices, such as experts, of how many slices at most a parameter
    consists, and the bytes of the largest of these tensors."""
    touches, most = 0, 0
    for one in step.operations:
        for key in one.keys if isinstance(one, LeaseNote) else (one.key,) if isinstance(one, CreateNote) else ():
            if found := _SLICE.search(key):
                touches, most = touches + 1, max(most, int(found[1]) + 1)
    return touches, most, max((nbytes for key, nbytes in step.initial.items() if _SLICE.search(key)), default=0)


def slices_in_groups(step: StepNotes, together: int) -> StepNotes:
    """Return a step with so many slices of a parameter as one, under the key of the first: the bytes of all are asked for where
    the first is. What they take of the processor stays where it was."""
    if together <= 1:
        return step

    def first(key: str) -> str:
        return _SLICE.sub(lambda found: f"[{int(found[1]) // together * together}]", key, count=1)

    def summed(sizes: Mapping[str, int]) -> dict[str, int]:
        found = dict[str, int]()
        for key, nbytes in sizes.items():
            found[first(key)] = found.get(first(key), 0) + nbytes
        return found

    created = summed({one.key: one.nbytes for one in step.operations if isinstance(one, CreateNote)})
    found, left = list[Operation](), set[int]()  # leases
    for one in step.operations:
        if isinstance(one, CreateNote | DeleteNote | LeaseNote):
            keys = one.keys if isinstance(one, LeaseNote) else (one.key,)
            kept = tuple(key for key in keys if first(key) == key)
            if isinstance(one, LeaseNote) and (kept or not keys):
                found.append(one._replace(keys=kept))
            elif kept:
                found.append(one._replace(nbytes=created[kept[0]]) if isinstance(one, CreateNote) else one)
            else:
                found.append(WorkNote("call", 0, 0, 1))
                if isinstance(one, LeaseNote):
                    left.add(one.number)
        elif not isinstance(one, EndNote) or one.number not in left:
            found.append(one)
    return replace(step, operations=found, initial=summed(step.initial))


_SLICE = re.compile(r"\[(\d+)\]")
"""What names a slice of a parameter in the keys of its tensors."""


def _named(one: CreateNote | DeleteNote | LeaseNote) -> str:
    return one.keys[0] if isinstance(one, LeaseNote) else one.key


def _piece(key: str) -> tuple[str, int]:
    """Return what the piece of an activation is a piece of, and which one; 0 for what is in one piece."""
    base, dot, number = key.rpartition(".")
    return (base, int(number)) if dot and number.isdigit() else (key, 0)


class _NotedLease:
    """Lease of tensors on the meta device."""

    unsaved = saving = False
    """There is nothing to save."""

    def __init__(self, store: NotingStore, keys: tuple[Key, ...], access: Access, one: bool) -> None:
        self._store, self._keys, self._access, self._one = store, keys, access, one
        self._number = 0
        self._memory = set[int]()

    def __enter__(self) -> Any:
        self._number = self._store.begin(self._keys, self._access)
        with _disable_current_modes():
            made = tuple(self._store.memory_of(key) for key in self._keys)
        self._memory = {one.untyped_storage()._cdata for one in made}
        self._store.leased |= self._memory
        return made[0] if self._one else made

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._number:
            self._store.end(self._number, self._keys)
            self._store.leased -= self._memory
            self._number = 0


class NotingStore(SimulatedStore):
    """A store of ``pool`` bytes that holds nothing, and writes down what a model, its optimizer and what saves its activations
    ask of it: all of ``TensorStore``, and what ``SavedTensors`` uses. The rest is that of a store in which nothing is."""

    def __init__(self, pool: int) -> None:
        super().__init__(pool, DriveRates(1.0, 1.0))
        self.step = StepNotes()
        self.units: Mapping[str, Unit] = {}
        """The units of the model, by key: what an update or a cast is of."""
        self.leased: set[int] = set()
        """Memory of leases, by the number that stands for it."""
        self.put_away: Callable[[torch.Tensor], None] = lambda _: None
        """Is given an activation whose memory ends elsewhere than with the last tensor."""
        self.alive: Callable[[], Alive] | None = None
        """Returns what is alive, where that is to be written down."""
        self._there: dict[Key, TensorSpec] = {}
        self._converting: set[Key] = set()
        self._operations: list[OperationKind] = []
        self._backward = False
        self._numbers = 0

    # -- notes -------------------------------------------------------------------------------------------------------------

    def note(self, operation: Operation) -> None:
        """Write down what was asked, after what the model has computed until then."""
        self._end_pause()
        self._append(operation)

    def turn(self, backward: bool) -> None:
        """Note that a backward pass begins, or ends."""
        self._end_pause()
        self._backward = backward
        self.step.turns.append(len(self.step.operations))

    def _end_pause(self) -> None:
        if self._operations:
            self._append(PauseNote(Cost(tuple(self._operations), self._backward)))
            self._operations = []

    def _append(self, operation: Operation) -> None:
        self.step.operations.append(operation)
        if self.alive is not None:
            self.step.alive.append(self.alive())

    def computed(self, operation: OperationKind) -> None:
        """Write down what the model computes."""
        self._operations.append(operation)

    def step_begins(self) -> None:
        """Write down a step anew."""
        self._operations, self._numbers = [], 0
        self.step = StepNotes(initial={key: spec.nbytes for key, spec in self._there.items()})

    def begin(self, keys: tuple[Key, ...], access: Access) -> int:
        """Note a lease, and return its number."""
        self._numbers += 1
        self.note(LeaseNote(self._numbers, keys, access is Access.WRITE))
        self._note_activation(keys[0])
        return self._numbers

    def end(self, number: int, keys: tuple[Key, ...]) -> None:
        """Note the end of a lease."""
        if f"{keys[0]}/converted" in self._converting:
            plan = self.units[keys[0]].plan
            self._converting.discard(f"{keys[0]}/converted")
            self.note(WorkNote("cast", plan.elements, plan.nbytes + plan.stored_nbytes, len(plan.placements)))
        self.note(EndNote(number))

    def _note_activation(self, key: Key) -> None:
        nbytes = self.step.activations.get(key)
        if nbytes is not None:
            self.note(WorkNote("activation", 0, 2 * nbytes, 1))

    # -- what is asked -----------------------------------------------------------------------------------------------------

    def have(self, key: Key, spec: TensorSpec) -> None:
        """Have a tensor from the beginning."""
        self._there[key] = spec

    def memory_of(self, key: Key) -> torch.Tensor:
        """Return new memory for a tensor, without bytes."""
        spec = self._there[key]
        return torch.empty(spec.shape, dtype=dtype_of(spec), device="meta")

    def __contains__(self, key: object) -> bool:
        return key in self._there

    def specs(self, keys: Iterable[Key]) -> list[TensorSpec | None]:
        return [self._there.get(key) for key in keys]

    def create(self, key: Key, spec: Any, **_: Any) -> None:
        self._there[key] = spec
        if key.endswith("/converted"):
            self._converting.add(key)
        self.note(CreateNote(key, spec.nbytes))

    def put(self, key: Key, tensor: torch.Tensor, *, owner: Owner | None = None) -> None:
        self._there[key] = spec_of(tensor)
        self.step.activations[key] = tensor.nbytes
        self.note(CreateNote(key, tensor.nbytes))
        self._note_activation(key)

    def delete(self, key: Key, *, owner: Owner | None = None) -> None:
        del self._there[key]
        self.note(DeleteNote(key))

    def lease(self, key: Any, *, access: Access | str = Access.READ, tier: str | None = None) -> Any:
        assert isinstance(access, Access)
        return _NotedLease(self, (key,) if isinstance(key, str) else tuple(key), access, isinstance(key, str))

    def span(self, kind: str, name: str) -> Any:
        """Note the update of a chunk."""
        if kind == "update":
            key, _, number = name.rpartition("#")
            unit = self.units[key]
            assert unit.pending is not None
            chunks = unit.states.plan(unit.pending.updates)
            chunk = chunks[bisect_left(chunks, int(number), key=attrgetter("number"))]
            self.note(WorkNote("update", sum(len(piece.elements) for piece in chunk.pieces), 0, 1))
        return super().span(kind, name)

    def _put_temporary(self, key: Key, contents: torch.Tensor, lifetime: Any) -> None:
        self._there[key] = spec_of(contents)
        self.step.activations[key] = contents.nbytes
        self.put_away(contents)
        self.note(CreateNote(key, contents.nbytes, True))
        self._note_activation(key)
        weakref.finalize(lifetime, self._ended, key).atexit = False

    def _ended(self, key: Key) -> None:
        if key in self._there:
            self.delete(key)

    def _copy_into(self, target: torch.Tensor, key: Key) -> bool:
        number = self.begin((key,), Access.READ)
        self.note(EndNote(number))
        return True

    def fetch_ahead(self, keys: Sequence[Key], device: torch.device) -> None:
        self.note(AheadNote(tuple(keys)))

    def _waited(self) -> float:
        return 0.0


class _Noted(Under):
    """Collective of ranks that do the same at the same time: it is noted when it is waited for."""

    def __init__(self, store: NotingStore, work: WorkNote, progress: CollectiveProgress | None = None) -> None:
        self._store, self._work, self._progress = store, work, progress
        self._here = 0 if progress is None else progress.here

    @property
    def done(self) -> bool:
        return True

    def agree(self) -> None:
        """Do nothing: they agree."""

    def wait(self) -> None:
        self._store.note(self._work)
        if self._progress is not None:
            self._progress.everywhere = max(self._progress.everywhere, self._here)


class NotingRanks(Ranks):
    """The first of so many ranks, all of which do the same at the same time."""

    def __init__(self, store: NotingStore, size: int) -> None:
        self.rank, self.size = 0, size
        self.failed, self.progress, self.phase = False, None, ""
        self._store = store

    def gather(self, whole: torch.Tensor, own: torch.Tensor, what: str, *, ahead: bool = False) -> Under:
        return _Noted(self._store, WorkNote("gather", 0, whole.nbytes, 1), self.progress)

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, what: str) -> Under:
        return _Noted(self._store, WorkNote("reduce", 0, whole.nbytes, 1))

    def add_up(self, received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return received.view(dtype).view(self.size, -1)[0]

    def all_gather(self, own: torch.Tensor, what: str, *, apart: bool = False) -> torch.Tensor:
        return own.view(1, -1).expand(self.size, -1)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Do nothing: there are no values."""

    @contextmanager
    def agreeing(self, what: str) -> Iterator[Agree]:
        yield lambda terms: None
