"""``nf4``, and other forms by a table of 16 values.

Codes are the 16 places of NormalFloat, in blocks of 64 elements that follow one another in memory, with their largest absolute
values in 8 bits, in blocks of 256 (QLoRA with double quantisation: Dettmers et al., 2023, https://arxiv.org/abs/2305.14314,
section 3). ``bitsandbytes`` packs, and its tables lie with the codes, so unpacking needs it no more, and gives its values.
What it has packed in files stays as it is: also with largest values in float32, with other tables, and rounded to the type that
it was packed from before it is cast to another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiered.errors import MisuseError
from tiered.packing.form import Packing

__all__ = ["BLOCK", "NESTED", "TABLES", "DoubleTable4", "Table4", "form_by_table"]

BLOCK, NESTED, PLACES, STEPS = 64, 256, 16, 256
"""Elements of a block, largest values of a block, and values in the tables of elements and of largest values."""


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

TABLES: tuple[type[Table4], ...] = (
    *(Table4, _Table4Bfloat16, _Table4Float16),
    *(DoubleTable4, _DoubleTable4Bfloat16, _DoubleTable4Float16),
)
"""Whether largest values are bytes, and each type to which values are rounded."""


def form_by_table(double: bool, rounded: torch.dtype | None = None) -> str:
    """Return the form of values by a table of 16, with largest values in bytes (``double``) or float32."""
    return next(one.form for one in TABLES if one.double is double and one.rounded is rounded)
