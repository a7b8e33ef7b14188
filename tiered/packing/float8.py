"""Floats of 8 bits, from files that have weights so, with a scale for each block of them: 128 times 128 (DeepSeek-AI, 2024,
https://arxiv.org/abs/2412.19437, section 3.3), a row, 32 of a row (OCP Microscaling Formats, 2023, MXFP8), or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch

from tiered.packing.form import Packing

__all__ = ["ELEMENTS", "FLOATS8", "Float8"]

ELEMENTS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
"""Bits of the mantissa."""
DOWN, ALONG = (1, 32, 64, 128, 256, None), (32, 64, 128, 256, None)
"""Rows, and columns, that may have a scale together; None: all."""


@dataclass(frozen=True)
class Float8(Packing):
    """A byte for each element, a float of the type ``element``; then a float32 scale for each ``down`` times ``along`` of them
    (None: all), row by row."""

    kernel = "unpack_float8"
    element: ClassVar[torch.dtype]
    down: ClassVar[int | None]
    along: ClassVar[int | None]
    block: ClassVar[tuple[int | None, int | None]]

    @classmethod
    def scales_of(cls, rows: int, columns: int) -> tuple[int, int]:
        """Return how many scales there are along rows and columns."""
        return -(-rows // (cls.down or rows)), -(-columns // (cls.along or columns))

    @property
    def grid(self) -> tuple[int, int]:
        """Return how many scales there are along rows and columns."""
        return self.scales_of(self.rows, self.columns)

    @property
    def codes_nbytes(self) -> int:
        return self.rows * self.columns

    @property
    def scales_nbytes(self) -> int:
        down, along = self.grid
        return 4 * down * along

    @classmethod
    def joins(cls) -> bool:
        return cls.down is not None

    @classmethod
    def rows_together(cls, columns: int) -> int:
        return cls.down or 1

    def squares(self, packed: torch.Tensor) -> torch.Tensor:
        """View the scales in ``packed``, of shape ``grid``."""
        return packed[self._scales_at : self.nbytes].view(torch.float32).view(self.grid)

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes, and for each row its scales."""
        codes = packed[: self.codes_nbytes].view(self.rows, self.columns)
        return codes, self.squares(packed).repeat_interleave(self.down or self.rows, 0)[: self.rows]

    def views_by_rows(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return packed[: self.codes_nbytes].view(self.rows, self.columns), self.squares(packed)

    def _pack(self, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        raise NotImplementedError("floats of 8 bits are taken from files as they are")

    def _unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, scales = parts
        spread = scales.repeat_interleave(self.along or self.columns, 1)[:, : self.columns]
        out.view(codes.shape).copy_(codes.view(self.element).to(torch.float32).mul_(spread))

    def _more(self) -> tuple[int, ...]:
        return self.along or self.columns, ELEMENTS[self.element]


def _made(element: torch.dtype, down: int | None, along: int | None) -> type[Float8]:
    block = f"{'all' if down is None else down} x {'all' if along is None else along}"
    named = f"{str(element).removeprefix('torch.')} by {block}, float32 scales"
    return type("Float8", (Float8,), {"element": element, "down": down, "along": along, "block": (down, along), "form": named})


FLOATS8: tuple[type[Float8], ...] = tuple(_made(*one) for one in product(ELEMENTS, DOWN, ALONG))
"""Each type, and each block that may have a scale."""
