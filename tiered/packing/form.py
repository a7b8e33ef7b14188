"""What every form of a packed parameter has in common: codes, scales, packing in blocks, unpacking by C or by torch.

Codes come first, and scales at the next multiple of 64 bytes. Unpacking is done by a C kernel (``libaio_ext/unpack.c``) in the
caller's thread, or where that was not built by torch, with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tiered.errors import MisuseError

try:
    from tiered.packing._unpack import lib
except ImportError:  # there was no compiler
    lib = None  # type: ignore[assignment]

__all__ = ["Loss", "Packing", "has_kernels", "powers"]

AT_ONCE = 1 << 16
"""Elements that are packed or unpacked at a time by torch: so few that they stay in the processor's cache."""
PACKED_ALIGNMENT = 64


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
    def joins(cls) -> bool:
        """Return whether matrices that are packed so are one where they follow one another, row by row."""
        return False

    @classmethod
    def rows_together(cls, columns: int) -> int:
        """Return at multiples of how many rows, as the parameter has them, it can be divided without packing it anew."""
        return 1

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes, scales, and what else it takes to unpack them, of ``packed``, uint8 of shape (nbytes,), each with
        ``rows`` as its first dimension."""
        raise NotImplementedError

    def views_by_rows(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """View all that ``packed`` consists of. What belongs to some rows has their share of the first dimension."""
        return self.parts(packed)

    def place(self, packed: torch.Tensor, part: Packing, packed_part: torch.Tensor, first: int) -> None:
        """Copy ``packed_part``, which is as ``part`` says, to ``packed``, from row ``first`` on: a multiple of
        ``rows_together``. Only where the form ``joins``."""
        for target, source in zip(self.views_by_rows(packed), part.views_by_rows(packed_part), strict=True):
            at = first * target.shape[0] // self.rows
            target[at : at + source.shape[0]].copy_(source)

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
        kind = lib.UNPACK_FLOAT32 if out.dtype is torch.float32 else lib.UNPACK_BFLOAT16
        done = self._call(getattr(lib, self.kernel), parts, out, kind)
        assert done == 0, out.dtype

    def _call(self, kernel: Callable[..., int], parts: Sequence[torch.Tensor], out: torch.Tensor, kind: int) -> int:
        """Call the kernel of this form. Returns what it does."""
        codes, scales = parts
        places = codes.data_ptr(), scales.data_ptr()
        return kernel(*places, codes.shape[0], self.columns, out.data_ptr(), kind, *self._more())

    def _more(self) -> tuple[int, ...]:
        """Return what else the kernel is given."""
        return ()


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of ``exponents`` less 127, uint8, as float32: scales of microscaling formats. 255 is infinite."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.to(torch.int32) << 23)  # 2 to the power of -127 is subnormal
    return bits.view(torch.float32)


def has_kernels() -> bool:
    """Return whether the C kernels were built."""
    return lib is not None
