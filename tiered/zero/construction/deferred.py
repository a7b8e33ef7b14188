"""Tensors whose values are read when they are written to the store.

``Files.open`` gives the tensors of a safetensors file as ``Deferred`` tensors, which have shape and type but no memory. What
torch functions make of them alone is ``Deferred``, too: the call is recorded instead of run. ``write_to`` then computes the
values, or a part of them along the first dimension, at the place where they are wanted. Copies, casts, concatenations,
stacks and views along dimensions read what the part needs, from the files straight to that place; anything else is computed
whole, by the same calls on the tensors in memory, and the last such result is kept, because slices of one parameter follow each
other. So code that converts weights as it reads them (``transformers``) fills units without a copy of the weights anywhere.

A function that needs values (``torch.equal``, ``item()``), draws random numbers, or takes tensors in memory as well, runs at
once and returns what it always does. One that writes to a ``Deferred`` tensor raises MisuseError; ``Files.refused`` names it.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tiered.errors import MisuseError
from tiered.format.safetensors import CODES, WeightFiles
from tiered.packing.form import Packing
from tiered.packing.gguf import Blocks
from tiered.packing.quantised import FORMS, LEAST_COLUMNS, cast_form
from tiered.tensors.steps import written_by
from tiered.zero.paging.units import ALL

__all__ = ["CODES", "Deferred", "Files", "expect"]

READ_AT_ONCE = 4 << 20
"""Bytes that are read, or cast, at a time where values do not go straight to their place."""
COMPARED_AT_ONCE = 1 << 20
"""Elements of two tensors that are compared at a time."""

Region = tuple[tuple[int, int], ...]
"""The first and the last index but one along each dimension."""


def _all(shape: Sequence[int]) -> Region:
    return tuple((0, size) for size in shape)


def _sizes(region: Region) -> list[int]:
    return [stop - start for start, stop in region]


Read = tuple["_InFile", int, int]
"""A tensor of a file, the first byte of it, and the number of bytes."""


class _Values:
    """Values that can be computed: ``shape`` and ``dtype`` of them, and how."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    def write(self, target: torch.Tensor, region: Region) -> None:
        """Write the values in ``region`` to ``target``, which has its shape, as ``target.copy_`` of them would."""
        raise NotImplementedError

    def reads(self, region: Region) -> Iterator[Read]:
        """Yield what ``write`` reads straight from files, in that order. What needs other reads may be left out."""
        yield from ()

    def matrices(self) -> tuple[list[list[_Packed]], int]:
        """Return, for each index along all dimensions but the last two, matrices that files have packed, of which the rows
        follow one another; and how many casts these have gone through. Nothing where there are none."""
        return [], 0

    @cached_property
    def packed(self) -> _Parts:
        rows, casts = self.matrices()
        found = [one for several in rows for one in several]
        if len(found) > 1:
            kind, columns = FORMS[found[0].form], found[0].shape[-1]
            alike = {(one.form, one.dtype, one.shape[-1], len(one.shape)) for one in found}
            whole = all(one.shape[0] % kind.rows_together(columns) == 0 for one in found[:-1])
            matrices = len(found[0].shape) == 2 and columns >= LEAST_COLUMNS
            if not kind.joins() or len(alike) > 1 or not matrices or not whole:
                found = []
        return _Parts(found, casts)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Values:
        return self  # it never changes


class _Parts(NamedTuple):
    """Matrices that files have packed, which make one as they follow one another."""

    parts: list[_Packed]
    casts: int


class Files:
    """Safetensors files, one of which is open at a time. A context manager: afterwards nothing is read any more."""

    def __init__(self) -> None:
        self._open: WeightFiles | None = None
        self._closed = False
        self.refused = ""
        """The function that could not be recorded, where there was one."""
        self.at_once = False
        """Whether functions that compute are called at once, not recorded."""
        self.last: tuple[_Values, list[torch.Tensor]] | None = None
        """The result of the last function that had to be computed whole, or a matrix that was unpacked."""

    def open(self, path: str | os.PathLike[str]) -> dict[str, Deferred]:
        """Return the tensors of a file by name. Raises OSError, SafetensorsError for a file that is damaged or cut short, and
        MisuseError for an element type that this torch does not have."""
        return self.tensors_of(WeightFiles(path))

    def tensors_of(self, files: WeightFiles) -> dict[str, Deferred]:
        """Return the tensors of a reader, which is closed, by name. Raises MisuseError for an element type that this torch does
        not have."""
        files.close()
        for name, entry in files.entries.items():
            if not hasattr(torch, entry.spec.dtype):
                kind = f"{entry.spec.dtype}, which torch {torch.__version__} does not have"
                raise MisuseError(f"{name!r} of {files.path} is of {kind}")
        return {
            name: Deferred(_InFile(self, files, name, entry.spec.shape, getattr(torch, entry.spec.dtype)))
            for name, entry in files.entries.items()
        }

    def read(self, files: WeightFiles, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor. Raises MisuseError after the end, SafetensorsError, OSError."""
        if self._closed:
            raise MisuseError(f"{name!r} of {files.path} is read after its files were closed: page the model before")
        if self._open is not None and self._open is not files:
            self._open.close()
        self._open = files
        files.read(name, start, into)

    def expect(self, reads: Iterable[Read]) -> None:
        """Tell what will be read, in that order; see ``WeightFiles.expect``."""
        found: dict[WeightFiles, list[tuple[str, int, int]]] = {}
        for tensor, start, nbytes in reads:
            found.setdefault(tensor.files, []).append((tensor.name, start, nbytes))
        for files, of_these in found.items():
            files.expect(of_these)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        self.last = None
        if self._open is not None:
            self._open.close()


class _InFile(_Values):
    """A tensor of a file, row major."""

    def __init__(self, opened: Files, files: WeightFiles, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.opened, self.files, self.name = opened, files, name

    def write(self, target: torch.Tensor, region: Region) -> None:
        if target.numel():
            self._write(target, 0, self.shape, region)

    def reads(self, region: Region) -> Iterator[Read]:
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        start, stop = region[0] if region else (0, 1)
        if region[1:] == _all(self.shape[1:]) and row * (stop - start):
            yield self, start * row, (stop - start) * row

    def _write(self, target: torch.Tensor, begin: int, shape: Sequence[int], region: Region) -> None:
        """Write ``region`` of the tensor of ``shape`` that begins at element ``begin``."""
        if not shape:
            self._read(target.view(1), begin)
            return
        (start, stop), inside = region[0], region[1:]
        row = math.prod(shape[1:])
        if inside == _all(shape[1:]) and self._fits(target):
            self._read(target, begin + start * row)
        elif row * self.dtype.itemsize <= READ_AT_ONCE:
            step = READ_AT_ONCE // max(1, row * self.dtype.itemsize)
            for first in range(start, stop, step):
                last = min(stop, first + step)
                rows = torch.empty((last - first, *shape[1:]), dtype=self.dtype, device="cpu")
                self._read(rows, begin + first * row)
                target[first - start : last - start].copy_(_part(rows, ((0, last - first), *inside)))
        else:
            for index in range(start, stop):
                self._write(target[index - start], begin + index * row, shape[1:], inside)

    def _fits(self, target: torch.Tensor) -> bool:
        return target.dtype is self.dtype and target.is_contiguous() and target.device.type == "cpu"

    def _read(self, target: torch.Tensor, begin: int) -> None:
        if self._fits(target):
            memory = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
            self.opened.read(self.files, self.name, begin * self.dtype.itemsize, memory)
        else:
            value = torch.empty(target.shape, dtype=self.dtype, device="cpu")
            self._read(value, begin)
            target.copy_(value)


class _Cast(_Values):
    def __init__(self, source: _Values, dtype: torch.dtype) -> None:
        super().__init__(source.shape, dtype)
        self.source = source

    def write(self, target: torch.Tensor, region: Region) -> None:
        if target.dtype is self.dtype or _keeps(self.source.dtype, self.dtype):
            self.source.write(target, region)
            return
        row = math.prod(_sizes(region)[1:]) * max(self.dtype.itemsize, self.source.dtype.itemsize)
        step = max(1, READ_AT_ONCE // max(1, row))
        for first, last, inside in _pieces(region, step):
            between = torch.empty(_sizes(inside), dtype=self.dtype, device="cpu")
            self.source.write(between, inside)
            (target[first:last] if region else target).copy_(between)

    def reads(self, region: Region) -> Iterator[Read]:
        return self.source.reads(region)

    def matrices(self) -> tuple[list[list[_Packed]], int]:
        found, casts = self.source.matrices()
        return found, casts + 1


class _Joined(_Values):
    """``torch.cat`` along ``dim``."""

    def __init__(self, parts: Sequence[_Values], dim: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._parts, self._dim = parts, dim

    def write(self, target: torch.Tensor, region: Region) -> None:
        start = region[self._dim][0]
        for part, first, last, inside in self._overlapping(region):
            part.write(target.narrow(self._dim, first - start, last - first), inside)

    def reads(self, region: Region) -> Iterator[Read]:
        for part, _, _, inside in self._overlapping(region):
            yield from part.reads(inside)

    def matrices(self) -> tuple[list[list[_Packed]], int]:
        found = [part.matrices() for part in self._parts]
        if self._dim != len(self.shape) - 2 or not all(rows for rows, _ in found):
            return [], 0
        together = zip(*(rows for rows, _ in found), strict=True)
        return [[one for several in index for one in several] for index in together], max(casts for _, casts in found)

    def _overlapping(self, region: Region) -> Iterator[tuple[_Values, int, int, Region]]:
        """Yield the parts that have something of ``region``: from which index to which, and the region in the part."""
        dim, (start, stop), begin = self._dim, region[self._dim], 0
        for part in self._parts:
            size = part.shape[dim]
            first, last = max(start, begin), min(stop, begin + size)
            if first < last:
                yield part, first, last, (*region[:dim], (first - begin, last - begin), *region[dim + 1 :])
            begin += size


class _Stacked(_Values):
    """``torch.stack`` along ``dim``."""

    def __init__(self, parts: Sequence[_Values], dim: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._parts, self._dim = parts, dim

    def write(self, target: torch.Tensor, region: Region) -> None:
        start, stop = region[self._dim]
        inside = region[: self._dim] + region[self._dim + 1 :]
        for index in range(start, stop):
            self._parts[index].write(target.select(self._dim, index - start), inside)

    def reads(self, region: Region) -> Iterator[Read]:
        inside = region[: self._dim] + region[self._dim + 1 :]
        for index in range(*region[self._dim]):
            yield from self._parts[index].reads(inside)

    def matrices(self) -> tuple[list[list[_Packed]], int]:
        found = [part.matrices() for part in self._parts]
        if self._dim or not all(rows for rows, _ in found):
            return [], 0
        return [index for rows, _ in found for index in rows], max(casts for _, casts in found)


class _Narrowed(_Values):
    """Indices from ``start`` on along ``dim``, of which ``shape`` says how many."""

    def __init__(self, source: _Values, dim: int, start: int, shape: Sequence[int]) -> None:
        super().__init__(shape, source.dtype)
        self._source, self._dim, self._start = source, dim, start

    def write(self, target: torch.Tensor, region: Region) -> None:
        self._source.write(target, self._inside(region))

    def reads(self, region: Region) -> Iterator[Read]:
        return self._source.reads(self._inside(region))

    def _inside(self, region: Region) -> Region:
        dim, (start, stop) = self._dim, region[self._dim]
        return (*region[:dim], (start + self._start, stop + self._start), *region[dim + 1 :])


class _Selected(_Values):
    """One index along ``dim``."""

    def __init__(self, source: _Values, dim: int, index: int) -> None:
        super().__init__(source.shape[:dim] + source.shape[dim + 1 :], source.dtype)
        self._source, self._dim, self._index = source, dim, index

    def write(self, target: torch.Tensor, region: Region) -> None:
        self._source.write(target.unsqueeze(self._dim), self._inside(region))

    def reads(self, region: Region) -> Iterator[Read]:
        return self._source.reads(self._inside(region))

    def _inside(self, region: Region) -> Region:
        return (*region[: self._dim], (self._index, self._index + 1), *region[self._dim :])


class _Permuted(_Values):
    """Dimension ``i`` is dimension ``dims[i]`` of the source."""

    def __init__(self, source: _Values, dims: Sequence[int]) -> None:
        super().__init__([source.shape[dim] for dim in dims], source.dtype)
        self.source, self.dims, self._back = source, dims, [dims.index(dim) for dim in range(len(dims))]

    def write(self, target: torch.Tensor, region: Region) -> None:
        self.source.write(target.permute(self._back), tuple(region[dim] for dim in self._back))

    def reads(self, region: Region) -> Iterator[Read]:
        return self.source.reads(tuple(region[dim] for dim in self._back))


class _Computed(_Values):
    """Output number ``index`` of a function of torch, which is called with the values in memory. ``opened``: where its result
    is kept."""

    def __init__(
        self, opened: Files, call: Callable[..., Any], args: Any, kwargs: Any, index: int, meta: torch.Tensor
    ) -> None:
        super().__init__(meta.shape, meta.dtype)
        self.opened, self._call, self._args, self._kwargs, self._index = opened, call, args, kwargs, index
        self.first: _Computed = self
        """The first output of the same call."""

    def write(self, target: torch.Tensor, region: Region) -> None:
        target.copy_(_part(self._result()[self._index], region))

    def _result(self) -> list[torch.Tensor]:
        last = self.opened.last
        if last is None or last[0] is not self.first:
            self.opened.last = None  # its memory first
            with torch.no_grad():
                found = self._call(*_in_memory(self._args), **_in_memory(self._kwargs))
            last = self.opened.last = self.first, list(found) if isinstance(found, list | tuple) else [found]
        return last[1]


class _ByRow(_Values):
    """Rows, of all dimensions but the last, that are made some at a time."""

    def write(self, target: torch.Tensor, region: Region) -> None:
        *outer, (start, stop), along = region
        step = max(1, READ_AT_ONCE // (4 * max(1, self.shape[-1])))
        for index in product(*(range(*one) for one in outer)) if target.numel() else ():
            place, before = target, 0
            for at, (first, _), size in zip(index, outer, self.shape, strict=False):
                place, before = place[at - first], before * size + at
            before *= self.shape[-2]
            for first in range(start, stop, step):
                last = min(stop, first + step)
                rows = self.rows(before + first, before + last)
                place[first - start : last - start].copy_(rows[:, slice(*along)])

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Return some rows, in memory."""
        raise NotImplementedError


class _Converted(_ByRow):
    """Rows that ``convert`` makes of rows of a matrix."""

    def __init__(
        self, source: _Values, convert: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        super().__init__(shape, dtype)
        self._source, self._convert = source, convert

    def rows(self, first: int, last: int) -> torch.Tensor:
        given = torch.empty((last - first, self._source.shape[1]), dtype=self._source.dtype, device="cpu")
        self._source.write(given, ((first, last), (0, self._source.shape[1])))
        return self._convert(given)


class RowOrder:
    """Which rows there are of several matrices. ``sizes``: how many each matrix has; ``order``, int64 of shape (n,): numbers of
    rows of all matrices, counted on from one to the next. Runs of rows are kept, not rows."""

    def __init__(self, sizes: Sequence[int], order: torch.Tensor) -> None:
        self.count = order.numel()
        self._ends = list(accumulate(sizes))
        begins = torch.cat((order.new_zeros(1), (order.diff() != 1).nonzero().view(-1) + 1))
        self._starts, self._begins = order[begins].tolist(), begins.tolist()

    @property
    def straight(self) -> bool:
        """Return whether these are all rows of one matrix, as they follow one another."""
        return self._starts == [0] and [self.count] == self._ends

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first row of each run, the row behind its last, and where it is, of some rows."""
        for number in range(bisect_right(self._begins, first) - 1, len(self._begins)):
            begin = max(first, self._begins[number])
            if begin >= last:
                return
            end = min(last, self._begins[number + 1] if number + 1 < len(self._begins) else self.count)
            start = self._starts[number] + begin - self._begins[number]
            yield start, start + end - begin, begin - first

    def write(self, target: torch.Tensor, first: int, read: Callable[[int, int, torch.Tensor], None]) -> None:
        """Write as many rows as ``target`` has, from number ``first`` on. ``read`` writes rows of a matrix, whose number it is
        given with that of its first row, to a tensor. Rows that lie near to one another are read together."""
        runs = list(self._runs(first, first + target.shape[0]))
        low, high = min(run[0] for run in runs), max(run[1] for run in runs)
        owner = bisect_right(self._ends, low)
        if runs[1:] and high - low <= 2 * target.shape[0] and high <= self._ends[owner]:
            span = torch.empty((high - low, *target.shape[1:]), dtype=target.dtype, device="cpu")
            read(owner, low - self._before(owner), span)
            order = torch.cat([torch.arange(*run[:2], dtype=torch.int64, device="cpu") for run in runs])
            target.copy_(span[order - low])
            return
        for start, end, at in runs:
            while start < end:
                owner = bisect_right(self._ends, start)
                stop = min(end, self._ends[owner])
                read(owner, start - self._before(owner), target[at : at + stop - start])
                start, at = stop, at + stop - start

    def _before(self, owner: int) -> int:
        return self._ends[owner - 1] if owner else 0


class _Gathered(_ByRow):
    """Rows of ``parts``, matrices of one type, in an order."""

    def __init__(self, parts: Sequence[_Values], order: RowOrder, shape: Sequence[int]) -> None:
        super().__init__(shape, parts[0].dtype)
        self._parts, self._order = parts, order

    def rows(self, first: int, last: int) -> torch.Tensor:
        found = torch.empty((last - first, self.shape[-1]), dtype=self.dtype, device="cpu")
        self._order.write(found, first, self._read)
        return found

    def _read(self, owner: int, first: int, target: torch.Tensor) -> None:
        self._parts[owner].write(target, ((first, first + target.shape[0]), (0, self.shape[-1])))


class _Packed(_ByRow):
    """A matrix, or several along the dimensions before, that files have packed in ``form``, row major. ``pack`` copies some of
    the elements: it is given how they are packed, uint8 of as many bytes, and the number of elements before these."""

    def __init__(
        self,
        opened: Files,
        shape: Sequence[int],
        dtype: torch.dtype,
        form: str,
        pack: Callable[[Packing, torch.Tensor, int], None],
    ) -> None:
        super().__init__(shape, dtype)
        self.opened, self.form, self.pack = opened, form, pack

    def write(self, target: torch.Tensor, region: Region) -> None:
        if FORMS[self.form].rows_together(self.shape[-1]) == 1 and region[-1] == (0, self.shape[-1]):
            super().write(target, region)
            return
        if len(self.shape) > 2:
            for index in range(*region[0]):
                self._of(index).write(target[index - region[0][0]], region[1:])
            return
        last = self.opened.last
        if last is None or last[0] is not self:
            self.opened.last = None  # its memory first
            last = self.opened.last = self, [self.rows(0, math.prod(self.shape[:-1])).view(self.shape)]
        target.copy_(_part(last[1][0], region))

    def matrices(self) -> tuple[list[list[_Packed]], int]:
        return [[self]], 0

    def _of(self, index: int) -> _Packed:
        """Return one index along the first dimension."""
        shape = self.shape[1:]
        before = index * math.prod(shape)

        def pack(packing: Packing, packed: torch.Tensor, inside: int) -> None:
            self.pack(packing, packed, before + inside)

        return _Packed(self.opened, shape, self.dtype, self.form, pack)

    def rows(self, first: int, last: int) -> torch.Tensor:
        values = torch.empty((last - first, self.shape[-1]), dtype=self.dtype, device="cpu")
        packing = FORMS[self.form].of(*values.shape)
        assert packing is not None, "an odd number of elements"
        packed = torch.empty(packing.nbytes, dtype=torch.uint8, device="cpu")
        self.pack(packing, packed, first * self.shape[-1])
        packing.unpack(packed, values.view(-1))
        return values


def _part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def _pieces(region: Region, step: int) -> Iterator[tuple[int, int, Region]]:
    """Divide ``region`` along the first dimension: where in it each piece is, and its region."""
    if not region:
        yield 0, 1, region
        return
    (start, stop), inside = region[0], region[1:]
    for first in range(start, stop, step):
        last = min(stop, first + step)
        yield first - start, last - start, ((first, last), *inside)


_MANTISSA = {torch.float16: (5, 10), torch.bfloat16: (8, 7), torch.float32: (8, 23), torch.float64: (11, 52)}
"""Bits of exponent and mantissa."""


def _keeps(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether each value of ``source`` is one of ``dtype``."""
    if source is dtype:
        return True
    if source not in _MANTISSA or dtype not in _MANTISSA:
        return False
    return all(mine <= theirs for mine, theirs in zip(_MANTISSA[source], _MANTISSA[dtype], strict=True))


# -- what torch sees -----------------------------------------------------------------------------------------------------------


def expect(tensors: Iterable[tuple[Deferred, int | slice]]) -> None:
    """Tell that ``write_to`` will be called for these tensors, with these indices, in this order. Files are then read ahead."""
    reads = [read for tensor, at in tensors for read in tensor.contents.reads(tensor._region(at))]
    if reads:
        reads[0][0].opened.expect(reads)


class _ReadBy(_Values):
    """Rows that a function reads."""

    def __init__(self, read: Callable[[torch.Tensor, int, int], None], shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._read = read

    def write(self, target: torch.Tensor, region: Region) -> None:
        if list(region[1:]) == list(_all(self.shape[1:])):
            first, last = region[0] if region else (0, 1)
            self._read(target, first, last)
            return
        rows = torch.empty([_sizes(region)[0], *self.shape[1:]], dtype=target.dtype, device="cpu")
        self._read(rows, *region[0])
        target.copy_(rows[(slice(None),) + tuple(slice(start, stop) for start, stop in region[1:])])  # noqa: RUF005


class Deferred(torch.Tensor):
    """A tensor on the CPU, as far as shape, strides and type tell, whose values are computed by ``write_to``."""

    contents: _Values
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, values: _Values, meta: torch.Tensor | None = None) -> Deferred:
        meta = torch.empty(values.shape, dtype=values.dtype, device="meta") if meta is None else meta
        made: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
        )
        made.contents, made.meta = values, meta
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse to assign ``data``, of which ``__torch_dispatch__`` is not told."""
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                raise _refused(args[0], "assigning data")
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MisuseError("a tensor whose values are still in a file cannot be saved: page the model first")

    @torch.no_grad()
    def write_to(self, target: torch.Tensor, at: int | slice = ALL) -> None:
        """Write the values, or what they are ``at`` an index along the first dimension, to ``target``, which has that shape."""
        self.contents.write(target.unsqueeze(0) if isinstance(at, int) else target, self._region(at))

    @staticmethod
    def packed(
        part: Deferred, shape: Sequence[int], dtype: torch.dtype, form: str, pack: Callable[[Packing, torch.Tensor, int], None]
    ) -> Deferred:
        """Return a matrix that files have packed, ``part`` among them; see ``_Packed``."""
        return Deferred(_Packed(_files_of([part]), shape, dtype, form, pack))

    @staticmethod
    def converted(
        rows: Deferred, convert: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Deferred:
        """Return what ``convert`` makes of rows of a matrix, some at a time."""
        return Deferred(_Converted(rows.contents, convert, shape, dtype))

    @staticmethod
    def gathered(parts: Sequence[Deferred], order: torch.Tensor, shape: Sequence[int]) -> Deferred:
        """Return rows of ``parts``, matrices of one type, in the order that ``RowOrder`` is given. ``shape``: of which all
        dimensions but the last are rows. Parts that are packed alike in blocks of rows stay so."""
        values = [part.contents for part in parts]
        first, rows = values[0], RowOrder([one.shape[0] for one in values], order)
        if rows.straight and isinstance(first, _InFile):
            return Deferred(_InFile(first.opened, first.files, first.name, shape, first.dtype))
        forms = {one.form if isinstance(one, _Packed) else None for one in values}
        form = forms.pop()
        if form is None or forms or not issubclass(FORMS[form], Blocks):
            return Deferred(_Gathered(values, rows, shape))
        return Deferred(_Packed(_files_of(parts), shape, first.dtype, form, partial(_pack_rows, values, rows)))

    @staticmethod
    def computed(call: Callable[[torch.Tensor], torch.Tensor], source: Deferred, shape: Sequence[int]) -> Deferred:
        """Return what ``call`` makes of a tensor in memory, of the same type."""
        meta = torch.empty(tuple(shape), dtype=source.dtype, device="meta")
        return Deferred(_Computed(_files_of([source]), call, (source,), {}, 0, meta))

    @staticmethod
    def read_by(
        read: Callable[[torch.Tensor, int, int], None], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Deferred:
        """Return a tensor of which ``read`` writes rows to a tensor, from one number to another."""
        meta = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
        return Deferred(_ReadBy(read, shape, dtype), meta)

    def in_bytes(self) -> Deferred:
        """Return the bytes of a tensor of a file, of shape (nbytes,)."""
        values = self.contents
        assert isinstance(values, _InFile)
        nbytes = math.prod(values.shape) * values.dtype.itemsize
        return Deferred(_InFile(values.opened, values.files, values.name, (nbytes,), torch.uint8))

    @property
    def form(self) -> str | None:
        """The form, one of ``quantised.FORMS``, in which files have the values; None where they have them as they are, or more
        has to be done with them than to unpack and to cast them."""
        found = self._packed()
        return None if not found else cast_form(found[0].form, found[0].dtype, self.dtype)

    def _packed(self) -> list[_Packed]:
        """Return what files have packed, where its elements, one part after the other, are those of this in the order of
        memory, but for one cast; none otherwise."""
        contents, dims, casts = self.contents, list(range(self.dim())), 0
        while isinstance(contents, _Cast | _Permuted):
            if isinstance(contents, _Permuted):
                dims = [contents.dims[dim] for dim in dims]
            else:
                casts += 1
            contents = contents.source
        row_major = torch.empty(contents.shape, dtype=contents.dtype, device="meta").stride()
        if casts + contents.packed.casts > 1 or self.stride() != tuple(row_major[dim] for dim in dims):
            return []
        return contents.packed.parts

    def write_packed(self, packing: Packing, packed: torch.Tensor, before: int) -> None:
        """Copy what files have of a matrix with a ``form`` to ``packed``: as many elements as ``packing`` has, after
        ``before``."""
        found = self._packed()
        if len(found) == 1:
            found[0].pack(packing, packed, before)
            return
        packed.zero_()
        end, begin = before + packing.rows * packing.columns, 0
        for one in found:
            first, last = max(begin, before), min(begin + math.prod(one.shape), end)
            if first < last:
                part = type(packing)((last - first) // packing.columns, packing.columns)
                of_part = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")
                one.pack(part, of_part, first - begin)
                packing.place(packed, part, of_part, (first - before) // packing.columns)
            begin += math.prod(one.shape)

    def _region(self, at: int | slice) -> Region:
        region = _all(self.contents.shape)
        if at == ALL:
            return region
        start, stop, _ = at.indices(self.contents.shape[0]) if isinstance(at, slice) else (at, at + 1, 1)
        return ((start, stop), *region[1:])

    def cast(self, dtype: torch.dtype) -> Deferred:
        """Return the values in that type."""
        return self if dtype is self.contents.dtype else Deferred(_Cast(self.contents, dtype), self.meta.to(dtype))

    def whole(self) -> torch.Tensor:
        """Return the values, in memory, with the strides that this tensor shows: sums and products depend on them."""
        found = torch.empty_strided(self.meta.shape, self.meta.stride(), dtype=self.meta.dtype, device="cpu")
        self.write_to(found)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        mine = [one for one in tensors if isinstance(one, Deferred)]
        written = written_by(func, args, kwargs)
        for one in written:
            if isinstance(one, Deferred):
                raise _refused(one, str(func))
        if func is torch.ops.aten.copy_.default and len(mine) == 1 and args[0].shape == args[1].shape:
            args[1].write_to(args[0])
            return args[0]
        if func is torch.ops.aten.equal.default:
            return _equal(*args)
        name = func.overloadpacket.__name__
        if name.startswith("new_") or name.endswith("_like"):  # it takes no values
            given = {"device": "cpu", **kwargs}
            return func(*tree_map(_meta_of, args), **({**given, "device": "cpu"} if given["device"] is None else given))
        if len(mine) == len(tensors) and not written and torch.Tag.nondeterministic_seeded not in func.tags:
            with suppress(NotImplementedError, RuntimeError):  # torch knows no result without values
                return _recorded(func, args, kwargs, mine)
        return func(*_in_memory(args), **_in_memory(kwargs))


def _pack_rows(parts: Sequence[Any], order: RowOrder, packing: Packing, packed: torch.Tensor, before: int) -> None:
    """Copy blocks of rows, which come after ``before`` elements, to ``packed``."""
    assert isinstance(packing, Blocks)

    def read(owner: int, first: int, target: torch.Tensor) -> None:
        rows = replace(packing, rows=target.shape[0])
        parts[owner].pack(rows, target.view(-1), first * packing.columns)

    order.write(packed.view(packing.rows, packing.row_nbytes), before // packing.columns, read)


def _refused(tensor: Deferred, what: str) -> MisuseError:
    _files_of([tensor]).refused = what
    return MisuseError(f"{what} writes to a tensor whose values are still in a file: page the model first")


def _meta_of(value: Any) -> Any:
    return value.meta if isinstance(value, Deferred) else value


def _in_memory(given: Any) -> Any:
    return tree_map(lambda value: value.whole() if isinstance(value, Deferred) else value, given)


def _files_of(tensors: Sequence[Deferred]) -> Files:
    found = [tensors[0].contents]
    while not isinstance(found[0], _InFile | _Computed | _Packed):
        one: Any = found[0]
        found = [getattr(one, "source", None) or getattr(one, "_source", None) or one._parts[0]]
    return found[0].opened


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.dim():
        return torch.equal(_in_memory(one), _in_memory(other))
    step = max(1, COMPARED_AT_ONCE // max(1, math.prod(one.shape[1:])))
    for first, last, _ in _pieces(_all(one.shape), step):
        halves = []
        for tensor in one, other:
            part = torch.empty((last - first, *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, Deferred):
                tensor.write_to(part, slice(first, last))
            else:
                part.copy_(tensor[first:last])
            halves.append(part)
        if not torch.equal(*halves):
            return False
    return True


def _recorded(func: Any, args: Any, kwargs: dict[str, Any], mine: list[Deferred]) -> Any:
    """Return what ``func`` returns, recorded. Raises where torch cannot tell its shape without values."""
    on_meta = {name: torch.device("meta") if name == "device" else value for name, value in kwargs.items()}
    found = func(*tree_map(_meta_of, args), **tree_map(_meta_of, on_meta))
    outputs = list(found) if isinstance(found, list | tuple) else [found]
    if not all(isinstance(one, torch.Tensor) for one in outputs):
        raise NotImplementedError(str(func))
    values = _moved(func, args, kwargs, outputs)
    if values is None:
        opened = _files_of(mine)
        if opened.at_once:
            raise NotImplementedError(str(func))
        computed = [_Computed(opened, func, args, kwargs, index, one) for index, one in enumerate(outputs)]
        for one in computed:
            one.first = computed[0]
        values = [*computed]
    made = [Deferred(value, meta) for value, meta in zip(values, outputs, strict=True)]
    return made if isinstance(found, list) else tuple(made) if isinstance(found, tuple) else made[0]


_SAME = {"alias", "detach", "clone", "contiguous", "lift_fresh", "_to_copy", "view_as"}


def _moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> list[_Values] | None:
    """Return the values that ``func`` only moves; None for any other function."""
    name, out = func.overloadpacket.__name__, outputs[0]
    if name in ("cat", "stack"):
        parts = [one.contents for one in args[0]]
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(1, out.dim())
        if any(part.dtype is not out.dtype for part in parts) or any(len(part.shape) != len(parts[0].shape) for part in parts):
            return None
        return [(_Joined if name == "cat" else _Stacked)(parts, dim, out.shape, out.dtype)]
    first = args[0]
    if not isinstance(first, Deferred) or any(isinstance(one, torch.Tensor) for one in args[1:]):
        return None
    source, rank = first.contents, first.dim()
    if name in _SAME:
        return [source if out.dtype is source.dtype else _Cast(source, out.dtype)]
    if name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze") and out.shape == first.shape:
        return [source]
    if name in ("t", "transpose", "permute"):
        if name == "permute":
            dims = [dim % rank for dim in args[1]]
        else:
            dims = list(range(rank))
            one, other = (0, 1) if name == "t" else (args[1] % rank, args[2] % rank)
            if rank > 1:
                dims[one], dims[other] = dims[other], dims[one]
        return [_Permuted(source, dims)]
    if name == "select":
        dim = args[1] % rank
        return [_Selected(source, dim, args[2] % first.shape[dim])]
    if name == "slice":
        dim = (args[1] if len(args) > 1 else 0) % rank
        step = args[4] if len(args) > 4 else 1
        start = slice(args[2] if len(args) > 2 else None, None).indices(first.shape[dim])[0]
        return [_Narrowed(source, dim, start, out.shape)] if step == 1 and not kwargs else None
    if name in ("split", "split_with_sizes", "unbind") and not kwargs:
        dim = (args[1] if name == "unbind" and len(args) > 1 else args[2] if len(args) > 2 else 0) % rank
        if name == "unbind":
            return [_Selected(source, dim, index) for index in range(len(outputs))]
        starts = [sum(one.shape[dim] for one in outputs[:index]) for index in range(len(outputs))]
        return [_Narrowed(source, dim, start, one.shape) for start, one in zip(starts, outputs, strict=True)]
    return None
