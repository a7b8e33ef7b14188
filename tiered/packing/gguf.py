"""Blocks of GGUF files, as these have them (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

A block has its codes and its scales together, and blocks follow one another: the bytes of a parameter are those of the file. A
row is whole blocks. Scales are float16 and may be anything, also infinite, as in the file. Values are computed in float32, in
the order of ``gguf.quants``, whose bits they have.

- ``Q8_0``: 32 elements; the scale, then a signed byte for each.
- ``Q4_K``: 256 elements in 8 groups; a scale for the groups' scales and one for their minimums, which have 6 bits each and lie
  in 12 bytes; then 4 bits for each element, from 0 on. A group's minimum is subtracted.
- ``Q5_K``: the same with 5 bits for each element, of which the fifth come before the others.
- ``Q6_K``: 256 elements in 16 groups; the lower 4 bits of each, the upper 2, with 32 added; the groups' scales as signed bytes;
  the scale of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tiered.packing.form import Packing

__all__ = ["BLOCKS", "Blocks"]


@dataclass(frozen=True)
class Blocks(Packing):
    """Blocks of ``elements`` elements and ``block_nbytes`` bytes."""

    elements: ClassVar[int]
    block_nbytes: ClassVar[int]

    @classmethod
    def of(cls, rows: int, columns: int) -> Packing | None:
        return None if columns % cls.elements else cls(rows, columns)

    @property
    def row_nbytes(self) -> int:
        """Return the bytes of a row."""
        return self.columns // self.elements * self.block_nbytes

    @property
    def codes_nbytes(self) -> int:
        return self.rows * self.row_nbytes

    @property
    def scales_nbytes(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return self.codes_nbytes

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (packed[: self.nbytes].view(self.rows, self.row_nbytes),)

    def _encode(self, values: torch.Tensor, packed: torch.Tensor, name: str) -> None:
        raise NotImplementedError("blocks of GGUF are taken from files as they are")

    def _unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        blocks = parts[0].reshape(-1, self.block_nbytes)
        out.view(blocks.shape[0], self.elements).copy_(self._values(blocks))

    def _call(self, kernel: Callable[..., int], parts: Sequence[torch.Tensor], out: torch.Tensor, kind: int) -> int:
        return kernel(parts[0].data_ptr(), out.numel() // self.elements, out.data_ptr(), kind)

    @staticmethod
    def _values(blocks: torch.Tensor) -> torch.Tensor:
        """Return the values of ``blocks``, uint8 of shape (n, block_nbytes), as float32 of shape (n, elements)."""
        raise NotImplementedError


def _scale(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at byte ``at`` of each block, as float32 of shape (n, 1)."""
    return blocks[:, at : at + 2].view(torch.float16).to(torch.float32)


@dataclass(frozen=True)
class Q80(Blocks):
    form = "GGUF Q8_0"
    kernel = "unpack_q8_0"
    elements, block_nbytes = 32, 34

    @staticmethod
    def _values(blocks: torch.Tensor) -> torch.Tensor:
        return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_scale(blocks, 0))


def _less_minimums(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the values of codes, uint8 of shape (n, 8, 32), of blocks that begin with scales and minimums of 6 bits."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1).to(torch.float32).mul_(_scale(blocks, 0))
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 1).to(torch.float32).mul_(_scale(blocks, 2))
    return numbers.to(torch.float32).mul_(scales[..., None]).sub_(minimums[..., None]).view(-1, 256)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes of 4 bits in the last 128 bytes of blocks, uint8 of shape (n, 8, 32)."""
    both = codes[:, -128:].reshape(-1, 4, 1, 32)
    return torch.cat((both & 15, both >> 4), 2).view(-1, 8, 32)


@dataclass(frozen=True)
class Q4K(Blocks):
    form = "GGUF Q4_K"
    kernel = "unpack_q4_k"
    elements, block_nbytes = 256, 144

    @staticmethod
    def _values(blocks: torch.Tensor) -> torch.Tensor:
        return _less_minimums(blocks, _halves(blocks))


@dataclass(frozen=True)
class Q5K(Blocks):
    form = "GGUF Q5_K"
    kernel = "unpack_q5_k"
    elements, block_nbytes = 256, 176

    @staticmethod
    def _values(blocks: torch.Tensor) -> torch.Tensor:
        fifth = torch.stack([blocks[:, 16:48] >> group & 1 for group in range(8)], 1)
        return _less_minimums(blocks, _halves(blocks) | fifth << 4)


@dataclass(frozen=True)
class Q6K(Blocks):
    form = "GGUF Q6_K"
    kernel = "unpack_q6_k"
    elements, block_nbytes = 256, 210

    @staticmethod
    def _values(blocks: torch.Tensor) -> torch.Tensor:
        lower, upper = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
        low = torch.cat((lower & 15, lower >> 4), 2).view(-1, 2, 4, 32)
        high = torch.cat((upper & 3, upper >> 2 & 3, upper >> 4 & 3, upper >> 6), 2)
        numbers = (low | high << 4).view(-1, 16, 16).to(torch.float32).sub_(32)
        scales = blocks[:, 192:208].view(torch.int8).to(torch.float32).mul_(_scale(blocks, 208))
        return numbers.mul_(scales[..., None]).view(-1, 256)


BLOCKS: dict[str, type[Blocks]] = {"Q8_0": Q80, "Q4_K": Q4K, "Q5_K": Q5K, "Q6_K": Q6K}
"""By the names that GGUF has of them."""
