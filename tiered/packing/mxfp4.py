"""Floats of 4 bits, e2m1, from files that have weights so: 32 of them have a power of two as their scale (OCP Microscaling
Formats, 2023, MXFP4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiered.packing.form import Packing, powers

__all__ = ["GROUP", "Mxfp4"]

GROUP = 32
HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes without a sign stand for: 2 bits of exponent, 1 of mantissa."""
LARGEST = 255


@dataclass(frozen=True)
class Mxfp4(Packing):
    """A row is a group of 32 elements that follow one another in memory, two in a byte, the first in its low half. After all of
    them: a byte for each group, the power of two with 127 added. 255 is 2 to the power of 128, as transformers computes it, and
    not NaN: codes of 0 are 0, those of 0.5 are 2 to the power of 127, and all others are infinite."""

    form = "float4_e2m1 by 32, scales of powers of two"
    kernel = "unpack_mxfp4"

    @classmethod
    def of(cls, rows: int, columns: int) -> Packing | None:
        return None if rows * columns % GROUP else cls(rows * columns // GROUP, GROUP)

    @classmethod
    def rows_together(cls, columns: int) -> int:
        return GROUP // math.gcd(columns, GROUP)

    @property
    def codes_nbytes(self) -> int:
        return self.rows * GROUP // 2

    @property
    def scales_nbytes(self) -> int:
        return self.rows

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return packed[: self.codes_nbytes].view(self.rows, GROUP // 2), packed[self._scales_at : self.nbytes]

    def _pack(self, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        raise NotImplementedError("floats of 4 bits are taken from files as they are")

    def _unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, scales = parts
        table = torch.tensor([*HALF, *(-value for value in HALF)], dtype=torch.float32, device=codes.device)
        at = torch.stack((codes & 15, codes >> 4), 2).view(-1, GROUP).to(torch.int64)
        largest = scales == LARGEST
        halved = table[at].mul_(powers(scales - largest.byte())[:, None])
        out.view(-1, GROUP).copy_(halved.mul_(1 + largest.float()[:, None]))
