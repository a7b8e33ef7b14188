"""Pack the values of a parameter into fewer bytes, for reading only, and unpack them: how quantised parameters are at rest.

A matrix of floats is kept as whole numbers ("codes") and scales. A value is ``code * scale``, computed in float32 and rounded
once to the parameter's type, ties to even. Codes come first, and scales at the next multiple of 64 bytes.

- ``int8``: codes from -127 to 127, one float32 scale for each row: that of its largest absolute value (vector-wise absmax
  quantisation: Dettmers et al., 2022, LLM.int8(), https://arxiv.org/abs/2208.07339, section 2.1).
- ``int4``: codes from -8 to 7, two in a byte, one bfloat16 scale for each group of 32 along the row (group-wise quantisation:
  Sheng et al., 2023, FlexGen, https://arxiv.org/abs/2303.06865, section 4, there with a minimum for each group). The scale is
  the one of ``DIVISORS`` with the smallest squared error (the choice of a clipping range by its error: Banner et al., 2019,
  https://arxiv.org/abs/1810.05723). With a minimum beside the scale the error is 7 % smaller and the bytes are 11 % more.

- ``nf4``: the 16 places of NormalFloat, in blocks of 64 elements that follow one another in memory, and their largest absolute
  values in 8 bits, in blocks of 256 (QLoRA with double quantisation: Dettmers et al., 2023, https://arxiv.org/abs/2305.14314,
  section 3). ``bitsandbytes`` packs, and its tables lie with the codes, so unpacking needs it no more, and gives its values.
  What it has packed in files stays as it is: also with largest values in float32, with other tables, and rounded to the type
  that it was packed from before it is cast to another one.
- ``float8_e4m3fn``: a float of 8 bits for each element, one float32 scale for each 128 times 128, from files that have it so
  (DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437, section 3.3).

A *row* is what lies together in memory: the innermost dimension, or as many of the inner ones as have 32 elements together
(of a convolution: all but the outermost). The scales of ``int8`` are so those of output features for ``torch.nn.Linear``, and
of input features for a matrix that is stored the other way round (GPT-2's Conv1D).

Unpacking is done by a C kernel (``libaio_ext/unpack.c``) in the caller's thread, or where that was not built by torch, with the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from tiered.errors import MisuseError

try:
    from tiered.packing._unpack import lib
except ImportError:  # there was no compiler
    lib = None  # type: ignore[assignment]

__all__ = [
    *("BLOCK", "FORMS", "NESTED", "QUANTIZE", "SQUARE", "TYPES", "Float8", "Loss", "Packing", "Quantize", "Table4"),
    *("cast_form", "form_by_table", "has_kernels", "packing_of", "packing_where_fit"),
]

Quantize = Literal["int8", "int4", "nf4"]
QUANTIZE: tuple[Quantize, ...] = ("int8", "int4", "nf4")

LEAST_ELEMENTS, LEAST_COLUMNS = 1024, 32
"""A parameter with fewer elements, or no row of so many, stays as it is."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that are packed."""
GROUP = 32
DIVISORS = (-8.0, -7.0, -9.0)
"""A group's scale is its element with the largest absolute value, with its sign, divided by one of these."""
AT_ONCE = 1 << 16
"""Elements that are packed or unpacked at a time by torch: so few that they stay in the processor's cache."""
PACKED_ALIGNMENT = 64
BLOCK, NESTED, PLACES, STEPS = 64, 256, 16, 256
"""Of ``nf4``: elements of a block, largest values of a block, and values in the tables of elements and of largest values."""
SQUARE = 128
"""Of floats of 8 bits: rows, and columns, that have a scale."""


@dataclass(frozen=True)
class Loss:
    """How far packed values are from those that were given: sums of squares of the differences, and of the given values."""

    error: float = 0.0
    given: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.error + other.error, self.given + other.given)

    @property
    def relative(self) -> float:
        """Return the relative error: the norm of the differences by the norm of the values; 0 where all values are 0."""
        return math.sqrt(self.error / self.given) if self.given else 0.0


@dataclass(frozen=True)
class Packing:
    """How a parameter of ``rows`` times ``columns`` elements is packed. ``form`` is the name that a record has of it."""

    rows: int
    columns: int
    form: ClassVar[str]
    kernel: ClassVar[str]
    rounded: ClassVar[torch.dtype | None] = None
    """The type to which values are rounded, whatever they are unpacked to; None: to that alone."""

    @property
    def codes_nbytes(self) -> int:
        raise NotImplementedError

    @property
    def scales_nbytes(self) -> int:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Return how many bytes the packed parameter has."""
        return self._scales_at + self.scales_nbytes

    @property
    def _scales_at(self) -> int:
        return -(-self.codes_nbytes // PACKED_ALIGNMENT) * PACKED_ALIGNMENT

    @classmethod
    def of(cls, rows: int, columns: int) -> Packing | None:
        """Return how a parameter with so many rows is packed; None where it cannot be."""
        return cls(rows, columns)

    @classmethod
    def rows_together(cls, columns: int) -> int:
        """Return at multiples of how many rows, as the parameter has them, it can be divided without packing it anew."""
        return 1

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes, scales, and what else it takes to unpack them, of ``packed``, uint8 of shape (nbytes,), each with
        ``rows`` as its first dimension."""
        raise NotImplementedError

    @torch.no_grad()
    def pack(self, values: torch.Tensor, packed: torch.Tensor, name: str) -> Loss:
        """Write ``values``, shape (rows * columns,) of a type of ``TYPES`` in host memory, to ``packed``, uint8 of shape
        (nbytes,). Returns what is lost.

        Raises MisuseError, which names the parameter ``name``, for infinity and NaN, and for values that would be infinite when
        they are unpacked.
        """
        packed[self.codes_nbytes : self._scales_at].zero_()
        self._encode(values, packed, name)
        parts, total = self.parts(packed), Loss()
        for begin, end in self._blocks():
            given = values[begin * self.columns : end * self.columns]
            found = torch.empty_like(given)
            self._unpack([part[begin:end] for part in parts], found)
            if not bool(found.isfinite().all()):
                raise MisuseError(
                    f"parameter {name!r} has values so large that they are infinite when they are quantised: leave quantize out"
                )
            wide = given.double()
            total += Loss(float((found.double() - wide).square_().sum()), float(wide.square_().sum()))
        return total

    def _encode(self, values: torch.Tensor, packed: torch.Tensor, name: str) -> None:
        """Write codes and scales of ``values``."""
        codes, scales = self.parts(packed)
        for begin, end in self._blocks():
            self._pack(self._exact(values, begin, end, name), codes[begin:end], scales[begin:end])

    def _exact(self, values: torch.Tensor, begin: int, end: int, name: str) -> torch.Tensor:
        """Return some rows as float32. Raises MisuseError for infinity and NaN."""
        exact = values[begin * self.columns : end * self.columns].view(-1, self.columns).to(torch.float32)
        if not bool(exact.isfinite().all()):
            raise MisuseError(f"parameter {name!r} has infinity or NaN, which cannot be quantised: leave quantize out")
        return exact

    @torch.no_grad()
    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of ``packed``, uint8 of shape (nbytes,), to ``out``, shape (rows * columns,) without gaps. On the
        meta device, which has no values, nothing is done: a plan would take minutes."""
        if out.is_meta:
            return
        parts = self.parts(packed)
        in_c = lib is not None and out.device.type == "cpu" == packed.device.type
        if in_c and out.dtype in (torch.float32, torch.bfloat16) and self.rounded in (None, out.dtype):
            self._unpack_in_c(parts, out)
            return
        for begin, end in self._blocks():
            self._unpack_rows([part[begin:end] for part in parts], out[begin * self.columns : end * self.columns], in_c)

    def _unpack_rows(self, parts: Sequence[torch.Tensor], out: torch.Tensor, in_c: bool) -> None:
        if self.rounded not in (None, out.dtype):
            rounded = torch.empty(out.shape, dtype=self.rounded, device=out.device)
            self._unpack_rows(parts, rounded, in_c)
            out.copy_(rounded)
        elif not in_c:
            self._unpack(parts, out)
        elif out.dtype is torch.float16:  # which is rounded by torch
            exact = torch.empty(out.shape, dtype=torch.float32, device="cpu")
            self._unpack_in_c(parts, exact)
            out.copy_(exact)
        else:
            self._unpack_in_c(parts, out)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield which rows are packed at a time."""
        step = max(1, AT_ONCE // self.columns)
        for begin in range(0, self.rows, step):
            yield begin, min(begin + step, self.rows)

    def _pack(self, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Pack some rows, float32 of shape (n, columns)."""
        raise NotImplementedError

    def _unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Unpack some rows of ``parts`` into ``out``, shape (n * columns,), by torch's functions."""
        raise NotImplementedError

    def _unpack_in_c(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Unpack some rows of ``parts`` by the C kernel into ``out``, of float32 or bfloat16."""
        codes, scales = parts
        kind = lib.UNPACK_FLOAT32 if out.dtype is torch.float32 else lib.UNPACK_BFLOAT16
        kernel = getattr(lib, self.kernel)
        done = kernel(codes.data_ptr(), scales.data_ptr(), codes.shape[0], self.columns, out.data_ptr(), kind)
        assert done == 0, out.dtype


@dataclass(frozen=True)
class _Int8(Packing):
    form = "int8 by row, float32 scales"
    kernel = "unpack_int8"

    @property
    def codes_nbytes(self) -> int:
        return self.rows * self.columns

    @property
    def scales_nbytes(self) -> int:
        return 4 * self.rows

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = packed[: self.codes_nbytes].view(torch.int8).view(self.rows, self.columns)
        return codes, packed[self._scales_at : self.nbytes].view(torch.float32)

    def _pack(self, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        scale = exact.abs().amax(1) / 127
        scales.copy_(scale)
        codes.copy_(_rounded(exact, scale[:, None], -127, 127))

    def _unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, scales = parts
        out.view(codes.shape).copy_(codes.to(torch.float32).mul_(scales[:, None]))


@dataclass(frozen=True)
class _Int4(Packing):
    form = "int4 by 32, bfloat16 scales"
    kernel = "unpack_int4"

    @property
    def groups(self) -> int:
        return -(-self.columns // GROUP)

    @property
    def codes_nbytes(self) -> int:
        return self.rows * self.groups * GROUP // 2

    @property
    def scales_nbytes(self) -> int:
        return 2 * self.rows * self.groups

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = packed[: self.codes_nbytes].view(self.rows, self.groups, GROUP // 2)
        return codes, packed[self._scales_at : self.nbytes].view(torch.bfloat16).view(self.rows, self.groups)

    def _pack(self, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        missing = self.groups * GROUP - self.columns
        groups = torch.nn.functional.pad(exact, (0, missing)).view(-1, self.groups, GROUP)
        outermost = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        share = groups / torch.where(outermost == 0, 1, outermost)  # from -1 to 1: its squares neither overflow nor vanish
        best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # error, scale, codes
        for divisor in DIVISORS:
            scale = (outermost / divisor).to(torch.bfloat16)
            step = torch.where(outermost == 0, 0, scale.to(torch.float32) / outermost)
            found = _rounded(share, step, -8, 7)
            error = (found * step).sub_(share).square_().sum(2, keepdim=True)
            if best is not None:
                worse = error >= best[0]
                error, scale = torch.where(worse, best[0], error), torch.where(worse, best[1], scale)
                found = torch.where(worse, best[2], found)
            best = error, scale, found
        assert best is not None
        scales.copy_(best[1][..., 0])
        number = (best[2] + 8).to(torch.uint8)
        codes.copy_(number[..., : GROUP // 2] | number[..., GROUP // 2 :] << 4)

    def _unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, scales = parts
        number = torch.cat((codes & 15, codes >> 4), 2).to(torch.float32).sub_(8).mul_(scales.to(torch.float32)[..., None])
        out.view(-1, self.columns).copy_(number.view(codes.shape[0], -1)[:, : self.columns])


class Views(NamedTuple):
    """What a parameter that is packed by a table consists of. Codes are uint8 of shape (blocks, 32), all else has one
    dimension: the ``largest`` value of each block, in float32 or as a byte, and the 16 values in the ``table``, float32. Of
    bytes also the largest value of each 256, what is ``added`` to all, and the 256 ``steps`` that bytes stand for, float32."""

    codes: torch.Tensor
    largest: torch.Tensor
    table: torch.Tensor
    nested: torch.Tensor
    added: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True)
class Table4(Packing):
    """A row is a block of 64 elements. After the codes: a float32 for each block, and the table."""

    form = "table of 16 by 64, float32 largest values"
    kernel = "unpack_table4"
    double = False
    """Whether largest values are bytes."""

    @classmethod
    def of(cls, rows: int, columns: int) -> Packing | None:
        return None if rows * columns % BLOCK else cls(rows * columns // BLOCK, BLOCK)

    @classmethod
    def rows_together(cls, columns: int) -> int:
        together = BLOCK * NESTED if cls.double else BLOCK
        return together // math.gcd(columns, together)

    @property
    def codes_nbytes(self) -> int:
        return self.rows * BLOCK // 2

    @property
    def scales_nbytes(self) -> int:
        return self._largest_nbytes + 4 * sum(self._numbers)

    @property
    def _largest_nbytes(self) -> int:
        return 4 * self.rows

    @property
    def _numbers(self) -> list[int]:
        """Return how many float32 there are of what follows the largest values, in this order: table, nested, added, steps."""
        return [PLACES, 0, 0, 0]

    def views(self, packed: torch.Tensor) -> Views:
        """View the parts of ``packed``."""
        largest = packed[self._scales_at :][: self._largest_nbytes]
        largest = largest[: self.rows] if self.double else largest.view(torch.float32)
        numbers = packed[self._scales_at + self._largest_nbytes : self.nbytes].view(torch.float32)
        table, nested, added, steps = torch.split(numbers, self._numbers)
        return Views(packed[: self.codes_nbytes].view(self.rows, -1), largest, table, nested, added, steps)

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes, the largest values, and, as often as there are rows, the table."""
        views = self.views(packed)
        return views.codes, self._largest(views), views.table.expand(self.rows, PLACES)

    def _largest(self, views: Views) -> torch.Tensor:
        return views.largest

    def _encode(self, values: torch.Tensor, packed: torch.Tensor, name: str) -> None:
        try:
            from bitsandbytes import functional
        except ImportError as error:
            raise MisuseError("quantize='nf4' packs with bitsandbytes: pip install bitsandbytes") from error
        packed[self._scales_at :].zero_()
        views = self.views(packed)
        largest = torch.empty(self.rows, dtype=torch.float32, device="cpu")
        for begin, end in self._blocks():
            exact = self._exact(values, begin, end, name)
            found, state = functional.quantize_4bit(exact, blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
            views.codes[begin:end].copy_(found.view(-1, BLOCK // 2))
            largest[begin:end] = state.absmax
            views.table.copy_(state.code)
        if not self.double:
            views.largest.copy_(largest)
            return
        views.added.copy_(largest.mean())
        found, state = functional.quantize_blockwise(largest - views.added, blocksize=NESTED)
        views.largest.copy_(found)
        views.nested.copy_(state.absmax)
        views.steps.copy_(state.code)

    def _unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, largest, table = parts
        at = torch.stack((codes >> 4, codes & 15), 2).view(codes.shape[0], BLOCK).to(torch.int64)
        out.view(-1, BLOCK).copy_(table.gather(1, at).mul_(largest[:, None]))

    def _unpack_in_c(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, largest, table = parts
        super()._unpack_in_c([codes, torch.cat((table[0], largest))], out)


@dataclass(frozen=True)
class DoubleTable4(Table4):
    """After the codes: a byte for each block; then, at a multiple of 4 bytes, the table, and what the bytes stand for."""

    form = "table of 16 by 64, largest values in 8 bits by 256"
    double = True

    @property
    def _largest_nbytes(self) -> int:
        return -(-self.rows // 4) * 4

    @property
    def _numbers(self) -> list[int]:
        return [PLACES, -(-self.rows // NESTED), 1, STEPS]

    def _largest(self, views: Views) -> torch.Tensor:
        nested = views.nested.repeat_interleave(NESTED)[: self.rows]
        return views.steps[views.largest.to(torch.int64)].mul_(nested).add_(views.added)


class _Table4Bfloat16(Table4):
    form, rounded = f"{Table4.form}, of bfloat16", torch.bfloat16


class _Table4Float16(Table4):
    form, rounded = f"{Table4.form}, of float16", torch.float16


class _DoubleTable4Bfloat16(DoubleTable4):
    form, rounded = f"{DoubleTable4.form}, of bfloat16", torch.bfloat16


class _DoubleTable4Float16(DoubleTable4):
    form, rounded = f"{DoubleTable4.form}, of float16", torch.float16


@dataclass(frozen=True)
class Float8(Packing):
    """A byte for each element, a float8_e4m3fn; then a float32 scale for each 128 times 128 of them, row by row."""

    form = "float8_e4m3fn by 128 x 128, float32 scales"
    kernel = "unpack_e4m3"

    @property
    def grid(self) -> tuple[int, int]:
        """Return how many scales there are along rows and columns."""
        return -(-self.rows // SQUARE), -(-self.columns // SQUARE)

    @property
    def codes_nbytes(self) -> int:
        return self.rows * self.columns

    @property
    def scales_nbytes(self) -> int:
        down, along = self.grid
        return 4 * down * along

    @classmethod
    def rows_together(cls, columns: int) -> int:
        return SQUARE

    def squares(self, packed: torch.Tensor) -> torch.Tensor:
        """View the scales in ``packed``, of shape ``grid``."""
        return packed[self._scales_at : self.nbytes].view(torch.float32).view(self.grid)

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes, and for each row its scales."""
        codes = packed[: self.codes_nbytes].view(self.rows, self.columns)
        return codes, self.squares(packed).repeat_interleave(SQUARE, 0)[: self.rows]

    def _pack(self, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        raise NotImplementedError("floats of 8 bits are taken from files as they are")

    def _unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, scales = parts
        values = codes.view(torch.float8_e4m3fn).to(torch.float32)
        out.view(codes.shape).copy_(values.mul_(scales.repeat_interleave(SQUARE, 1)[:, : self.columns]))


_BY_TABLE: tuple[type[Table4], ...] = (
    *(Table4, _Table4Bfloat16, _Table4Float16),
    *(DoubleTable4, _DoubleTable4Bfloat16, _DoubleTable4Float16),
)
_ALL: tuple[type[Packing], ...] = (_Int8, _Int4, Float8, *_BY_TABLE)
FORMS: dict[str, type[Packing]] = {one.form: one for one in _ALL}
"""By the name that a record has: it never changes its meaning."""
_OF_OPTION: dict[str, type[Packing]] = {"int8": _Int8, "int4": _Int4, "nf4": DoubleTable4}


def form_by_table(double: bool, rounded: torch.dtype | None = None) -> str:
    """Return the form of values by a table of 16, with largest values in bytes (``double``) or float32."""
    return next(one.form for one in _BY_TABLE if one.double is double and one.rounded is rounded)


def cast_form(form: str, source: torch.dtype, dtype: torch.dtype) -> str | None:
    """Return the form whose values, unpacked to ``dtype``, are those of ``form`` that were unpacked to ``source`` first; None
    where there is none."""
    kind = FORMS[form]
    if source in (dtype, torch.float32):
        return form
    return form_by_table(kind.double, source) if issubclass(kind, Table4) and dtype is torch.float32 else None


def packing_of(form: str, shape: torch.Size, stride: tuple[int, ...]) -> Packing | None:
    """Return how a parameter without gaps between its elements is packed in ``form``, one of ``FORMS``; None where it has no
    row of ``LEAST_COLUMNS``, or its elements do not fill the blocks of the form."""
    columns = _columns(shape, stride)
    return None if columns is None else FORMS[form].of(shape.numel() // columns, columns)


def packing_where_fit(
    quantize: Quantize | None, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Packing | None:
    """Return how a parameter is packed in a model that is quantised; None for one that stays as it is: of one dimension, of
    another type than ``TYPES``, or tiny."""
    if quantize is None or dtype not in TYPES or shape.numel() < LEAST_ELEMENTS:
        return None
    return packing_of(_OF_OPTION[quantize].form, shape, stride)


def has_kernels() -> bool:
    """Return whether the C kernels were built."""
    return lib is not None


def _columns(shape: torch.Size, stride: tuple[int, ...]) -> int | None:
    """Return the elements of a row: those of as few of the dimensions that are innermost in memory as have ``LEAST_COLUMNS``
    together, without the outermost one."""
    sizes = [size for _, size in sorted(zip(stride, shape, strict=True), key=lambda one: one[0]) if size > 1]
    columns = 1
    for size in sizes[:-1]:
        columns *= size
        if columns >= LEAST_COLUMNS:
            return columns
    return None


def _rounded(values: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Return the codes of ``values``, as float32."""
    divisor = torch.where(scale == 0, math.inf, scale)  # of subnormal values that are too small for any scale: 0
    return (values / divisor).round_().clamp_(least, most)
