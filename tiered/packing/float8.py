"""Floats of 8 bits, from files that have weights so: one float32 scale for each 128 times 128 (DeepSeek-AI, 2024,
https://arxiv.org/abs/2412.19437, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiered.packing.form import Packing

__all__ = ["SQUARE", "Float8"]

SQUARE = 128
"""Rows, and columns, that have a scale."""


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
