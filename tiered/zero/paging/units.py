"""Divide a model's parameters into units, which are paged together, and say where each parameter lies in its unit.

A *unit* is one tensor of bytes in the store. It holds the parameters of the largest module (one whose forward is called) that
fits the limit. A module that is larger is divided into its children; parameters directly on it are a unit of their own, and a
parameter that is larger than the limit is a unit by itself. A tied parameter belongs to the first place that names it.

Some parameters are divided into *slices* along their first dimension (``Sliced``). Those that have one matrix for each expert
of a mixture: each expert's slices are a unit, so that only the experts that tokens are routed to are fetched. And the weight of
an embedding or a linear layer that is larger than a third of the memory budget: some rows each. A slice is a parameter by
itself, and a placement of its own.

The type of a parameter in the store may differ from the type that modules compute with, or it is quantised there (``Policy``).
This file decides where everything lies; ``quantised.py`` is what the bytes of a quantised parameter are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from tiered.errors import MisuseError, one_of
from tiered.packing.form import Loss, Packing
from tiered.packing.quantised import FORMS, QUANTIZE, Quantize, packing_of, packing_where_fit
from tiered.tensors.specs import expect_dtype

__all__ = [
    "ALL",
    "NOTHING_ABSENT",
    "PARAMETER_ALIGNMENT",
    "SAVED_SHARE",
    "Absent",
    "Limits",
    "ModelPlan",
    "Placement",
    "Policy",
    "Sliced",
    "Slicing",
    "UnitPlan",
    "aligned_size",
    "divide",
    "even_chunks",
    "experts_of",
    "is_called",
    "is_dense",
]

@dataclass(frozen=True)
class Policy:
    """Parameters of type ``compute`` are stored as ``storage`` (None: as they are); others as they are.

    ``Policy(storage=torch.bfloat16, compute=torch.float32)`` is for processors without fast bf16: a step moves the bytes of
    bf16 parameters, and modules compute in fp32 with the bf16 values. The model is built in fp32; its parameters are rounded
    (to even) when they are paged and when values are loaded, and gradients are fp32. Masters are as for parameters of type
    ``storage``.

    ``quantize="int8"``, ``"int4"`` or ``"nf4"`` is inexact: matrices are packed into 8 or 4 bits an element (and scales) when
    they are paged, and unpacked to the type that they compute with whenever they are used, in backward too
    (the files of ``packing`` describe the forms; bitsandbytes packs nf4, and has to be installed then). Parameters of one
    dimension, tiny ones and those that are not floats are not packed. Nor are adapters of peft, which are trained as ever; and
    where most parameters (by elements) are frozen as the model is paged, nor are those that are not frozen. Else nobody said
    what to train, and all are packed. What is packed, and what is frozen with it, cannot be trained or written to.

    Raises MisuseError for types other than bfloat16 or float16, and float32; for another ``quantize``.
    """

    storage: torch.dtype | None = None
    compute: torch.dtype = torch.float32
    quantize: Quantize | None = None

    def __post_init__(self) -> None:
        one_of("quantize", self.quantize, (*QUANTIZE, None))
        expect_dtype("storage", self.storage, (torch.bfloat16, torch.float16, None))
        expect_dtype("compute", self.compute, (torch.float32,))

    @property
    def converts(self) -> bool:
        """Return whether parameters are stored otherwise than they are used."""
        return self.storage is not None or self.quantize is not None

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in the store of a parameter that is ``dtype``."""
        return self.storage if self.storage is not None and dtype is self.compute else dtype


ALL = slice(None)
"""Index of everything along the first dimension."""
PARAMETER_ALIGNMENT = 64
"""Bytes: parameters start at multiples of this in their unit, as torch's own allocations do: kernels take the same path."""


UNIT_SHARE, LARGEST_UNIT = 8, 1 << 30
"""A unit is at most this fraction of the pool, and at most ``LARGEST_UNIT`` bytes, where single parameters allow it: nothing of
a unit is computed until all of it is there, and what a lease costs is nothing beside a GiB."""
THIRD, WITH_SAVED, SLACK = 3, 4, 1 << 16
"""So many weights of the largest size have to fit the pool; and where activations wait in the store, so many in the part of the
pool that is not theirs, less bytes for sizes that are rounded up."""
SAVED_SHARE = 32
"""A piece of an activation that waits in the store has at most this fraction of the pool."""
BLOCK, TAIL = 512, 64
"""Of a model for reading, rows of a slice are a multiple of BLOCK, and its last slice has at least TAIL, even where that makes
a unit larger than it should be: products with some rows at a time then had the bits of the whole product (MKL in fp32, batches
of 1 to 128 rows, 64 to 11,008 columns; a last slice of 1 or 4 rows had others)."""
CHUNK_SHARE, SMALL_POOL, SHARE_OF_SMALL = 16, 8 << 20, 64
"""A chunk of optimizer state is at most this fraction of the pool, and at most ``LARGEST_CHUNK`` bytes of fp32. In less than
``SMALL_POOL`` bytes it is the smaller fraction: what a forward holds leaves little room there."""
FROZEN_APART = 1 << 16
"""Bytes: a lease takes about as long as to write so many, which a step would do with what is frozen beside what is updated."""
LARGEST_CHUNK = 4 << 20
SHARE_STEP, OLDER_SHARE_STEP = 256, PARAMETER_ALIGNMENT // 2
"""Elements at multiples of which parameters begin, and shares of ranks end: so the blocks of which states are kept are whole in
each share. The second, 64 bytes of the smallest type that can be trained, is that of commits that do not say, and of very many
ranks with little memory."""


@dataclass(frozen=True)
class Limits:
    """Limits by which a model is divided: bytes of a unit, elements of a chunk of optimizer state, and, where ranks share it,
    elements at multiples of which they do; and bytes of a weight that is not sliced (by default so many that three fit a pool
    of eight units)."""

    unit: int
    chunk: int
    step: int = OLDER_SHARE_STEP
    whole: int | None = None

    @classmethod
    def of(cls, pool: int, shares: int = 1, *, saves: bool = False, converts: bool = False) -> Limits:
        """Return the limits for a store with ``pool`` bytes of memory. Several ranks have more tensors of a unit's size in use
        at a time. More of the largest weight have to fit where activations wait in the store (``saves``), and half of one more
        where a weight is in memory twice, as it is stored, too (``converts``)."""
        share = UNIT_SHARE if shares == 1 else 2 * UNIT_SHARE
        part = pool // (SHARE_OF_SMALL if pool < SMALL_POOL else CHUNK_SHARE)
        chunk = max(4096, min(LARGEST_CHUNK, part) // 4096 * 4096) // 4
        unit = pool // share
        fits = shares > 1 and 4 * shares * SHARE_STEP <= unit  # the smallest unit there may be, in fp32
        step = SHARE_STEP if fits else OLDER_SHARE_STEP
        whole = UNIT_SHARE * unit // THIRD
        if saves or converts:
            room = max(0, pool - SLACK) * (SAVED_SHARE - saves) // SAVED_SHARE
            whole = 2 * room // (2 * (WITH_SAVED if saves else THIRD) + converts)
        return cls(min(LARGEST_UNIT, unit), chunk, step, whole)

    @staticmethod
    def pool_for(weight: int, *, saves: bool = False, converts: bool = False) -> int:
        """Return the bytes of the smallest pool in which a weight of so many bytes is whole, for one process."""
        if not saves and not converts:
            return THIRD * weight
        halves = weight * (2 * (WITH_SAVED if saves else THIRD) + converts)
        return -(-halves * SAVED_SHARE // (2 * (SAVED_SHARE - saves))) + SLACK + SAVED_SHARE


class Absent(NamedTuple):
    """Bytes of parameters that were below the module at ``path``, and are not there: of those that are whole, and of those that
    are sliced."""

    path: str
    whole: int
    sliced: int

    def is_below(self, prefix: str) -> bool:
        """Return whether they were below the module at ``prefix``."""
        return f"{self.path}.".startswith(f"{prefix}." if prefix else "")


NOTHING_ABSENT = Absent("", 0, 0)


@dataclass(eq=False)
class Placement:
    """Place of one parameter: ``offset`` in bytes in the unit, ``element`` in elements of its optimizer state.

    In the store the parameter is of type ``stored`` and at ``stored_offset``, which is elsewhere where that is another type; or
    it is packed as ``packing`` says, and its values are read with ``load``, and written once, with ``filling``.

    ``stride`` is given as the parameter has it; it is kept where it is dense, and row major otherwise.
    """

    parameter: nn.Parameter
    name: str
    index: int  # in model.parameters()
    stride: tuple[int, ...]
    stored: torch.dtype
    offset: int = 0
    stored_offset: int = 0
    element: int = 0
    sliced: Sliced | None = None
    """What this is a slice of, number ``number``; None: it is all of its parameter."""
    number: int = 0
    packing: Packing | None = None
    loss: Loss | None = None
    """What ``filling`` lost of a packed parameter."""
    shape: torch.Size = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.parameter.shape, self.parameter.dtype
        if not is_dense(self.shape, self.stride):
            self.stride = _row_major(self.shape)

    def quantised(self, quantize: Quantize | None, forms: Mapping[str, str]) -> Placement:
        """Have the parameter packed in the store, if it is one to pack, or has one of ``forms``. Returns this placement."""
        form = forms.get(self.name, forms.get(self.sliced.name) if self.sliced is not None else None)
        if form is not None:
            self.packing = packing_of(form, self.shape, self.stride)
        else:
            self.packing = packing_where_fit(quantize, self.shape, self.stride, self.dtype)
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """Return ``parameter.grad``, without asking the class of a parameter that nobody holds."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.parameter.grad = grad

    @property
    def stored_nbytes(self) -> int:
        return self.numel * self.stored.itemsize if self.packing is None else self.packing.nbytes

    @property
    def form(self) -> str:
        """Return what a record calls the form in the store: the type, or that of the packing."""
        return str(self.stored) if self.packing is None else self.packing.form

    @property
    def whole(self) -> nn.Parameter:
        """Return the model's parameter that has these values: where this is a slice, the one that is sliced."""
        return self.parameter if self.sliced is None else self.sliced.parameter

    @property
    def within(self) -> int | slice:
        """Return the index of these values in ``whole``."""
        return ALL if self.sliced is None else self.sliced.at(self.number)

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def of(self) -> Placement:
        """Return what this is the whole of, or a rank's part of."""
        return self

    @property
    def full_shape(self) -> torch.Size:
        """Return the shape of what this is the whole of, or a rank's part of."""
        return self.of.shape

    @property
    def full_stride(self) -> tuple[int, ...]:
        """Return the strides of what this is the whole of, or a rank's part of."""
        return self.of.stride

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of ``whole``, which has the parameter's shape."""
        return whole

    def view(self, unit: torch.Tensor) -> torch.Tensor:
        """View this parameter in ``unit``, a uint8 tensor of the unit's layout (or of the beginning of it)."""
        flat = unit[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def flat(self, unit: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """View elements ``start`` to ``stop`` in memory order, shape (stop - start,)."""
        size = self.dtype.itemsize
        return unit[self.offset + start * size : self.offset + stop * size].view(self.dtype)

    def stored_flat(self, unit: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """View elements ``start`` to ``stop`` in ``unit`` as it is in the store."""
        assert self.packing is None, f"{self.name!r} is packed"
        size = self.stored.itemsize
        return unit[self.stored_offset + start * size : self.stored_offset + stop * size].view(self.stored)

    def stored_view(self, unit: torch.Tensor) -> torch.Tensor:
        """View this parameter in ``unit``, a uint8 tensor as it is in the store."""
        return self.stored_flat(unit, 0, self.numel).as_strided(self.shape, self.stride)

    def load(self, unit: torch.Tensor, target: torch.Tensor) -> None:
        """Write the values of this parameter, from ``unit`` as it is in the store, to ``target``, which has its shape (where it
        is packed, its strides, too)."""
        if self.packing is None:
            target.copy_(self.stored_view(unit))
        else:
            self.packing.unpack(self._packed(unit), target.as_strided((self.numel,), (1,)))

    def values(self, unit: torch.Tensor) -> torch.Tensor:
        """Return the values of this parameter from ``unit`` as it is in the store, of the type in which they are stored; a copy
        in host memory where it is packed."""
        if self.packing is None:
            return self.stored_view(unit)
        found = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        self.load(unit, found)
        return found

    @contextmanager
    def filling(self, unit: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give a tensor of the parameter's shape for a block of code, which writes all of its values there; after the block
        they are in ``unit`` as it is in the store. Where the parameter is packed that is memory of its own, and ``loss`` says
        what was lost. Raises as ``Packing.pack``."""
        if self.packing is None:
            yield self.stored_view(unit)
            return
        values = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        yield values
        self.loss = self.packing.pack(values.as_strided((self.numel,), (1,)), self._packed(unit), self.name)

    def fill_packed(self, unit: torch.Tensor, write: Callable[[torch.Tensor, int], None]) -> None:
        """Have ``write`` write the packed parameter to its place in ``unit`` as it is in the store. It is given that place, and
        the number of elements of the whole parameter that are before this."""
        write(self._packed(unit), 0 if self.sliced is None else self.sliced.element(self.number))
        self.loss = Loss()

    def _packed(self, unit: torch.Tensor) -> torch.Tensor:
        return unit[self.stored_offset : self.stored_offset + self.stored_nbytes]


@dataclass(eq=False)
class Part(Placement):
    """Elements of a parameter that are in one rank's share, the first of them ``begin`` elements after the parameter's first in
    memory order: a placement of one dimension in that share."""

    begin: int = 0
    _whole: Placement = field(init=False)

    @classmethod
    def made(cls, whole: Placement, begin: int, end: int, at: int) -> Part:
        """Make the part with elements ``begin`` to ``end`` of ``whole``, which are at element ``at`` of the rank's share."""
        size, stored = whole.dtype.itemsize, whole.stored.itemsize
        offsets = at * size, at * stored, at
        part = cls(whole.parameter, whole.name, whole.index, whole.stride, whole.stored, *offsets, begin=begin)
        part._whole = whole
        part.shape, part.stride = torch.Size((end - begin,)), (1,)
        return part

    @property
    def of(self) -> Placement:
        return self._whole

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        dense = torch.empty_strided(self._whole.shape, self._whole.stride, dtype=whole.dtype, device="cpu").copy_(whole)
        return dense.as_strided((dense.numel(),), (1,))[self.begin : self.begin + self.numel]


@dataclass(frozen=True)
class Slicing:
    """Which parameters may be sliced. ``experts``: those of experts, too. ``weights``: those of embeddings and linear layers
    wherever they are larger than a unit, and not only where three of them are larger than the pool. ``only``: these names,
    each with the rows of a slice if these are known (None: any name)."""

    experts: bool = True
    weights: bool = False
    only: Mapping[str, int | None] | None = None

    def allows(self, name: str) -> bool:
        return self.only is None or name in self.only

    def rows(self, name: str) -> int | None:
        """Return the rows of a slice of a weight, where they are known."""
        return None if self.only is None else self.only.get(name)


class Slice(nn.Parameter):
    """One slice. ``parameter[i]`` returns it where that is a slice. In memory that is a new tensor each time, and what is asked
    of it here goes with it; of this one it would stay, and come again with each use."""

    def register_hook(self, hook: object) -> NoReturn:
        raise _of_one_slice("register_hook")

    def retain_grad(self) -> NoReturn:
        raise _of_one_slice("retain_grad")

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        raise _of_one_slice("requires_grad_")


def _of_one_slice(name: str) -> MisuseError:
    return MisuseError(
        f"{name} of one expert of a parameter that is divided into slices: use a copy (parameter[i].clone()), or page the "
        "model with zero.page(paging=zero.Paging(experts='whole'))"
    )


@dataclass(eq=False)
class Sliced:
    """Parameter that is divided along its first dimension: slice ``i`` is a parameter with the values of ``parameter[i]``, or,
    where there are ``rows`` of them in a slice, of ``parameter[i * rows : (i + 1) * rows]``. It has memory of its own where a
    unit gives it some. Its name is ``NAME[i]``. ``most``: of more slices only the first so many are made. ``stride``: of a
    slice (None: row major)."""

    parameter: nn.Parameter
    name: str
    stored: torch.dtype
    rows: int | None = None
    most: int | None = None
    stride: tuple[int, ...] | None = None
    slices: list[nn.Parameter] = field(init=False)
    shape: torch.Size = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        whole = self.parameter
        self.shape, self.dtype = whole.shape, whole.dtype
        count, inside = whole.shape[0], whole.shape[1:]
        if self.rows is None:
            shapes = [inside] * count
        else:
            starts = range(0, count, self.rows)[: self.most]
            shapes = [torch.Size((min(self.rows, count - at), *inside)) for at in starts]
        with torch.inference_mode(False):
            nothing = torch.zeros((), dtype=whole.dtype, device="meta" if whole.is_meta else "cpu")
            self.slices = [Slice(nothing.data.expand(shape), whole.requires_grad) for shape in shapes]  # each its own version

    def at(self, number: int) -> int | slice:
        """Return the index of a slice in the whole."""
        return number if self.rows is None else slice(number * self.rows, (number + 1) * self.rows)

    def element(self, number: int) -> int:
        """Return how many elements of the whole are before a slice."""
        return number * (self.rows or 1) * self.shape[1:].numel()

    def placements(self, index: int) -> list[Placement]:
        """Return the placement of each slice; ``index``: the parameter's in the model."""
        return [
            Placement(
                *(one, f"{self.name}[{i}]", index, self.stride or _row_major(one.shape), self.stored), sliced=self, number=i
            )
            for i, one in enumerate(self.slices)
        ]


@dataclass(eq=False)
class UnitPlan:
    """Placements of one unit, those that need a gradient first, so that gradients and states cover only the beginning of the
    unit.

    ``step``: elements at multiples of which parameters begin and shares end. ``nbytes``: those of the unit in use,
    ``stored_nbytes``: of the whole unit as stores have it, all shares together (``share_nbytes``: of one of them);
    ``converted``: as stored it is not the same bytes as in use.
    ``read_only``: its parameters are the frozen ones of a model that is quantised, and nothing writes to them; placements are
    as they were given.

    With several ``shares`` the unit is one row of elements of one type (``divide`` sees to it), padded so that all shares are
    equal: the same row in the unit, in the store, in gradients and in states.
    """

    name: str
    placements: list[Placement]
    shares: int = 1
    nbytes: int = 0
    stored_nbytes: int = 0
    elements: int = 0  # of each kind of optimizer state; of one share
    read_only: bool = False
    step: int = OLDER_SHARE_STEP

    def __post_init__(self) -> None:
        if not self.read_only:
            self.placements.sort(key=lambda placement: not placement.parameter.requires_grad)
        if self.shares > 1:
            self._lay_out_shares()
            return
        offset = stored = element = 0
        for placement in self.placements:
            placement.offset, placement.stored_offset, placement.element = offset, stored, element
            offset += _round_up(placement.nbytes, PARAMETER_ALIGNMENT)
            stored += _round_up(placement.stored_nbytes, PARAMETER_ALIGNMENT)
            element += _round_up(placement.numel, PARAMETER_ALIGNMENT // 4)
        self.nbytes, self.stored_nbytes = max(PARAMETER_ALIGNMENT, offset), max(PARAMETER_ALIGNMENT, stored)
        self.elements = max(PARAMETER_ALIGNMENT // 4, element)

    @property
    def shown(self) -> str:
        """Return how errors name the unit: by its module, or by some of its parameters where that is the model itself."""
        if self.name != ".":
            return repr(self.name)
        return ", ".join(repr(placement.name) for placement in self.placements[:3]) + ", ..." * (len(self.placements) > 3)

    def _lay_out_shares(self) -> None:
        step, row = self.step, 0
        for placement in self.placements:
            placement.offset, placement.stored_offset = row * placement.dtype.itemsize, row * placement.stored.itemsize
            placement.element = row
            row += _round_up(placement.numel, step)
        self.elements = max(step, _round_up(math.ceil(row / self.shares), step))
        first = self.placements[0]
        self.nbytes = self.shares * self.elements * first.dtype.itemsize
        self.stored_nbytes = self.shares * self.elements * first.stored.itemsize

    @property
    def share_nbytes(self) -> int:
        return self.stored_nbytes // self.shares

    def as_used(self) -> UnitPlan:
        """Return the plan of a unit that is in the store as this one is in use."""
        made = copy(self)
        made.stored_nbytes = self.nbytes
        return made

    def parts(self, rank: int) -> dict[Placement, Placement]:
        """Return by parameter the part of it in one share; parameters without an element in the share are left out."""
        if self.shares == 1:
            return {placement: placement for placement in self.placements}
        begin = rank * self.elements
        parts: dict[Placement, Placement] = {}
        for placement in self.placements:
            start = max(placement.element, begin)
            stop = min(placement.element + placement.numel, begin + self.elements)
            if start < stop:
                own = Part.made(placement, start - placement.element, stop - placement.element, start - begin)
                parts[placement] = own
        return parts

    @property
    def cut(self) -> set[Placement]:
        """Return the parameters of which several ranks have a share."""
        if self.shares == 1:
            return set()
        found = [(p, p.element, p.element + p.numel - 1) for p in self.placements if p.numel]
        return {p for p, first, last in found if first // self.elements != last // self.elements}

    @property
    def of_expert(self) -> bool:
        """Return whether this is an expert of a mixture, which is used by the tokens that are routed to it."""
        return any(one.sliced is not None and one.sliced.rows is None for one in self.placements)

    @property
    def converted(self) -> bool:
        return any(placement.stored is not placement.dtype or placement.packing for placement in self.placements)

    @property
    def packed(self) -> bool:
        return any(placement.packing is not None for placement in self.placements)

    @property
    def for_reading(self) -> str | None:
        """Why the unit cannot be written to, where it is of the frozen parameters of a model that is quantised."""
        if not self.read_only:
            return None
        return (
            f"the parameters of {self.name!r} are those of a quantised model, which is for reading only: train an adapter over "
            "it (peft.get_peft_model), or, to train or write to these, page or import the model without quantize"
        )

    def refuse_writing(self) -> None:
        """Raise MisuseError where the unit is for reading."""
        if self.read_only:
            raise MisuseError(self.for_reading)


@dataclass(eq=False)
class ModelPlan:
    """Units of a model. ``held[module]``: the units that must be in memory during that module's forward, by index in ``units``.
    """

    units: list[UnitPlan]
    held: dict[nn.Module, list[int]]
    limits: Limits
    sliced: dict[nn.Parameter, Sliced] = field(default_factory=dict)

    @property
    def read_only(self) -> bool:
        return any(unit.read_only for unit in self.units)

    @property
    def largest(self) -> int:
        return max((unit.nbytes for unit in self.units), default=0)

    def held_together(self, model: nn.Module, sizes: list[int] | None = None) -> int:
        """Return the most bytes that the forward of a module of ``model`` and of those around it hold at a time. ``sizes``: of
        each unit, if not those in memory."""
        nbytes = [unit.nbytes for unit in self.units] if sizes is None else sizes

        def deepest(module: nn.Module, above: frozenset[int]) -> int:
            here = above | frozenset(self.held.get(module, ()))
            return max([sum(nbytes[i] for i in here), *(deepest(child, here) for child in module.children())])  # noqa: F821 - until the last call

        found = deepest(model, frozenset()) if self.units else 0
        del deepest  # which refers to itself, and would keep what is here until the collector comes
        return found


def divide(
    model: nn.Module,
    limits: Limits,
    strides: Mapping[nn.Parameter, tuple[int, ...]],
    policy: Policy,
    shares: int = 1,
    slicing: Slicing | None = None,
    *,
    largest_alone: bool = False,
    absent: Absent = NOTHING_ABSENT,
    forms: Mapping[str, str] = MappingProxyType({}),
    apart: Collection[str] | None = None,
) -> ModelPlan:
    """Divide ``model``'s parameters into units of at most ``limits.unit`` bytes where a single parameter allows it.

    ``strides``: those of parameters that do not show their own, because they were released. ``shares``: by how many ranks each
    unit is divided in turn; then parameters of different types, and those that need no gradient, are in units of their own, and
    none is sliced. ``slicing``: which may be (None: all that can). ``largest_alone``: of each weight that is sliced, make the
    first slice alone, which is as large as any: enough to say what budget the model needs. ``absent``: of a part of a model,
    what else there is of it: the part is divided as it is in the whole. ``forms``: by name, those of ``quantised.FORMS`` in
    which parameters, or slices of them, are packed already. ``apart``: names of parameters that are in units of their own
    (None: those that are frozen beside others that are trained, where they have ``FROZEN_APART`` bytes), so that no step writes
    them.
    """
    order = {parameter: index for index, parameter in enumerate(model.parameters())}
    plan, limit = ModelPlan([], {}, limits), limits.unit
    home: dict[nn.Parameter, int] = {}
    slicing = Slicing() if slicing is None else slicing
    quantize = policy.quantize
    packs = quantize is not None or bool(forms)
    exact_ones = _exact(model) if packs else set()
    if packs and shares > 1:
        raise MisuseError("a quantised model is of one process: leave out quantize, or open it in each process by itself")
    experts = {} if shares > 1 else _experts(model, strides, slicing, forms)
    large = {} if shares > 1 else _too_large(model, strides, limits, slicing, forms)
    outside = {parameter for alike in experts.values() for _, parameter in alike} | large.keys()

    def make(name: str, named: list[tuple[str, nn.Parameter]]) -> None:
        kinds: dict[object, list[tuple[str, nn.Parameter]]] = {}
        alone = _frozen_apart(named) if apart is None else apart
        for qualified, parameter in named:
            kind: object = parameter in exact_ones if packs else qualified in alone
            kind = (parameter.dtype, parameter.requires_grad) if shares > 1 else kind
            kinds.setdefault(kind, []).append((qualified, parameter))
        for number, alike in enumerate(kinds.values()):
            for _, parameter in alike:
                home[parameter] = len(plan.units)
            placements = [Placement(p, n, order[p], strides.get(p, p.stride()), policy.stored(p.dtype)) for n, p in alike]
            plan.units.append(made(f"{name}#{number}" if number else name, placements, alike[0][1] in exact_ones))

    def made(name: str, placements: list[Placement], exact: bool) -> UnitPlan:
        if not exact:
            placements = [placement.quantised(quantize, forms) for placement in placements]
        return UnitPlan(name, placements, shares, read_only=packs and not exact, step=limits.step)

    def fresh(named: Iterator[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in named if parameter not in home and parameter not in outside]

    def visit(module: nn.Module, prefix: str) -> None:
        mine = fresh(module.named_parameters(prefix))
        if not mine:
            return
        more = absent.whole if absent.is_below(prefix) else 0
        if is_called(module) and sum(aligned_size(p) for _, p in mine) + more <= limit:
            make(prefix or ".", mine)
            return
        direct = fresh(module.named_parameters(prefix, recurse=False))
        if direct and sum(aligned_size(p) for _, p in direct) <= limit:
            make(direct[0][0] if len(direct) == 1 else f"{prefix}.*".lstrip("."), direct)
        else:
            for name, parameter in direct:
                make(name, [(name, parameter)])
        for name, child in module.named_children():
            visit(child, f"{prefix}.{name}".lstrip("."))  # noqa: F821 - until the last call

    visit(model, "")
    del visit  # as in ``held_together``
    for prefix, alike in experts.items():
        found = [
            Sliced(parameter, name, policy.stored(parameter.dtype), stride=_slice_stride(parameter, strides))
            for name, parameter in alike
        ]
        plan.sliced |= {one.parameter: one for one in found}
        exact = any(parameter in exact_ones for _, parameter in alike)
        for placements in zip(*(one.placements(order[one.parameter]) for one in found), strict=True):
            plan.units.append(made(f"{prefix}[{placements[0].number}]".lstrip("."), list(placements), exact))
    for parameter, (name, rows) in large.items():
        most = 1 if largest_alone else None
        one = plan.sliced[parameter] = Sliced(parameter, name, policy.stored(parameter.dtype), rows, most)
        exact = parameter in exact_ones
        plan.units += [made(placement.name, [placement], exact) for placement in one.placements(order[parameter])]
    _hold(model, home, limit, plan, absent)
    return plan


def _frozen_apart(named: Sequence[tuple[str, nn.Parameter]]) -> set[str]:
    """Return the names of those of a module's parameters that are units of their own because they are frozen."""
    frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
    mixed = 0 < len(frozen) < len(named)
    return set(frozen) if mixed and sum(map(aligned_size, frozen.values())) >= FROZEN_APART else set()


def _exact(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that stay exact in a model that is quantised: those of peft's adapters, whether they are trained or
    not, and where most of the others are frozen, those that are to be trained over them. (A model may have some that are never
    trained, such as positions.)"""
    adapters: set[nn.Parameter] = set()
    for module in model.modules():
        for name in (*getattr(module, "adapter_layer_names", ()), "modules_to_save", "prompt_encoder"):
            layers = getattr(module, name, None)
            if isinstance(layers, nn.Module):
                adapters.update(layers.parameters())
            elif isinstance(layers, nn.ParameterDict):
                adapters.update(layers.values())
    others = [parameter for parameter in model.parameters() if parameter not in adapters]
    trained = {parameter for parameter in others if parameter.requires_grad}
    most_are_frozen = 2 * sum(parameter.numel() for parameter in trained) < sum(parameter.numel() for parameter in others)
    return adapters | trained if most_are_frozen else adapters


def experts_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return by name the parameters directly on ``module`` that have something for each expert along their first dimension.

    It is taken for a module of experts where at least two of its parameters have three dimensions, and all of these the same
    first one; a vector for each expert counts as well. Not among them is what is not floating point, and what has another
    number of elements for each expert than a multiple of 16, because the bits of an update would not be those of all together.
    """
    direct = [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
    counts = [parameter.shape[0] for _, parameter in direct if parameter.dim() >= 3]
    if len(counts) < 2 or len(set(counts)) > 1 or counts[0] < 2:
        return []
    return [
        (name, parameter)
        for name, parameter in direct
        if parameter.dim() >= 2
        and parameter.shape[0] == counts[0]
        and parameter.dtype.is_floating_point
        and (parameter.numel() // counts[0]) % 16 == 0
        and parameter.numel()
    ]


def _experts(
    model: nn.Module, strides: Mapping[nn.Parameter, tuple[int, ...]], slicing: Slicing, forms: Mapping[str, str]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return the parameters to slice, with their names, by the name of their module. Not sliced is one that several modules
    have, and one that is not row major; where it is packed its slices need to lie one after the other only."""
    uses = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
    found = {}
    for prefix, module in model.named_modules():
        alike = [
            (f"{prefix}.{name}".lstrip("."), parameter)
            for name, parameter in experts_of(module)
            if uses[parameter] == 1
        ]
        alike = [
            (name, parameter)
            for name, parameter in alike
            if _will_be_row_major(parameter, strides)
            or (forms.keys() & {name, f"{name}[0]"} and _slice_stride(parameter, strides) is not None)
        ]
        alike = [(name, parameter) for name, parameter in alike if slicing.allows(name)]
        if alike and slicing.experts:
            found[prefix] = alike
    return found


def _too_large(
    model: nn.Module,
    strides: Mapping[nn.Parameter, tuple[int, ...]],
    limits: Limits,
    slicing: Slicing,
    forms: Mapping[str, str],
) -> dict[nn.Parameter, tuple[str, int]]:
    """Return the weights, of embeddings and linear layers alone, that are larger than a third of the pool, or than a unit where
    ``slicing`` says so: name, and rows in a slice. A slice is as large as a unit may be, and its elements are a multiple of 16,
    or of what is packed together.
    """
    used: dict[nn.Parameter, list[bool]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fits = name == "weight" and isinstance(module, nn.Embedding | nn.Linear) and parameter.dim() == 2
                used.setdefault(parameter, []).append(fits)
    found = {}
    for name, parameter in model.named_parameters():
        plain = all(used[parameter]) and parameter.dtype.is_floating_point
        nbytes = parameter.numel() * parameter.dtype.itemsize
        known = slicing.rows(name)
        large = nbytes > (limits.unit if slicing.weights else limits.whole or UNIT_SHARE * limits.unit // THIRD)
        if plain and (large or known) and slicing.allows(name) and _will_be_row_major(parameter, strides):
            columns = parameter.shape[1]
            step = math.lcm(16 // math.gcd(columns, 16), FORMS[forms[name]].rows_together(columns) if name in forms else 1)
            fitting = limits.unit // (columns * parameter.dtype.itemsize)
            rows = known or (_blocks(fitting, parameter.shape[0]) if slicing.weights else max(step, fitting // step * step))
            rows = rows if known else -(-rows // step) * step
            if rows < parameter.shape[0]:
                found[parameter] = name, rows
    return found


def _blocks(fitting: int, count: int) -> int:
    """Return the rows of a slice of ``count`` rows of which a unit has room for ``fitting``: see BLOCK."""
    rows = max(BLOCK, fitting // BLOCK * BLOCK)
    while rows < count and 0 < count % rows < TAIL:
        rows += BLOCK
    return rows


def even_chunks(elements: int, limit: int) -> int:
    """Return the elements of each chunk when ``elements`` are divided evenly into as few chunks as ``limit`` allows."""
    step = 4096 // 4
    return min(limit, _round_up(math.ceil(elements / math.ceil(elements / limit)), step))


def is_called(module: nn.Module) -> bool:
    """Return whether the module has a forward (a ModuleList has not; its parent's runs instead)."""
    return getattr(type(module), "forward", None) is not nn.Module.forward  # a scripted module has it in no attribute


def _hold(model: nn.Module, home: dict[nn.Parameter, int], limit: int, plan: ModelPlan, absent: Absent) -> None:
    """Fill ``plan.held``: a module holds the units of its own parameters, and where all parameters below it fit the limit,
    theirs too."""

    def visit(module: nn.Module, prefix: str, seen: set[nn.Module]) -> list[nn.Parameter]:
        """Return the parameters that the nearest enclosing module with a forward has to hold."""
        if module in seen:
            return []
        seen.add(module)
        own = list(module.parameters(recurse=False))
        for name, child in module.named_children():
            own += visit(child, f"{prefix}.{name}".lstrip("."), seen)  # noqa: F821 - until the last call
        if not is_called(module):
            return own
        everything = list(module.parameters())
        more = absent.whole + absent.sliced if absent.is_below(prefix) else 0
        wanted = everything if sum(aligned_size(p) for p in everything) + more <= limit else own
        units = sorted({home[parameter] for parameter in wanted if parameter in home})  # without those that are sliced
        if units:
            plan.held[module] = units
        return []

    visit(model, "", set())
    del visit  # as in ``held_together``


def aligned_size(parameter: nn.Parameter) -> int:
    """Return the bytes that a parameter takes in a unit."""
    return _round_up(parameter.numel() * parameter.dtype.itemsize, PARAMETER_ALIGNMENT)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _will_be_row_major(parameter: nn.Parameter, strides: Mapping[nn.Parameter, tuple[int, ...]]) -> bool:
    """Return whether a parameter is row major in its unit, as one is that has no memory yet."""
    stride = strides.get(parameter, parameter.stride())
    return stride == _row_major(parameter.shape) or not is_dense(parameter.shape, stride)


def _slice_stride(parameter: nn.Parameter, strides: Mapping[nn.Parameter, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the strides that an index of a parameter along its first dimension has in memory; None where these do not lie one
    after the other."""
    stride, inside = strides.get(parameter, parameter.stride()), parameter.shape[1:]
    if not is_dense(parameter.shape, stride):
        return _row_major(inside)
    return stride[1:] if stride[0] == inside.numel() else None


def is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Return whether each element has one place without gaps: sorted by stride, each stride is the product of the smaller
    dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return shape.numel() > 0
