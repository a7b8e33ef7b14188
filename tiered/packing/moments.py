"""Encode the moments of optimizers in 8 or 4 bits, and decode them: codes and one scale for each block. Round to bfloat16 by
chance.

A block's scale is its largest absolute value. A code stands for a value of a *map* of 256 or 16 numbers between -1 and 1: that
which is nearest to the element divided by the scale, of two that are equally near the smaller one. A decoded element is the
map's value times the scale. All is computed in float32.

- ``MOMENT_8``, ``SQUARE_8``: blocks of 256 and the dynamic map of bitsandbytes, with a sign and without (Dettmers et al., 2022,
  8-bit Optimizers via Block-wise Quantization, https://arxiv.org/abs/2110.02861, section 2 and appendix F).
- ``MOMENT_4``, ``SQUARE_4``: blocks of 128; the dynamic map of 4 bits with a sign, and for second moments the multiples of 1/16
  without zero (Li et al., 2023, Memory Efficient Optimizers with 4-bit States, https://arxiv.org/abs/2309.01507, section 4;
  there with scales for rows and columns, here with one for each block, as torchao has them). Two codes are in a byte: byte j of
  a block has element j in its low and element j + 64 in its high half.
- ``MOMENTS_8``, ``MOMENTS_4``: both moments of a block in one record.

Where a block has infinity or NaN, or is zero, its codes are those of zero (the smallest value of a map without zero); its
scale times any value then is NaN, infinite, or zero.

``round_by_chance`` rounds a number that lies between two of bfloat16 to either, with a probability that makes the mean of many
the number. What decides is a hash of a key and of the element's number: whoever has these has the same bits.

A C kernel (``libaio_ext/moments.c``) computes in the caller's thread; where it was not built, and elsewhere than in host
memory, torch computes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

try:
    from tiered.packing._unpack import lib
except ImportError:  # there was no compiler
    lib = None  # type: ignore[assignment]

__all__ = [
    *("MOMENTS_4", "MOMENTS_8", "MOMENT_4", "MOMENT_8", "SQUARE_4", "SQUARE_8", "BlockCode", "MomentsCode"),
    *("round_by_chance", "round_by_chance_by_torch"),
]


@dataclass(frozen=True)
class BlockCode:
    """Code of ``bits`` (8 or 4) with one scale for each ``block`` elements, and ``values``: its map, in increasing order."""

    bits: int
    block: int
    values: tuple[float, ...]

    @property
    def bytes_in_block(self) -> int:
        return self.block * self.bits // 8

    def blocks(self, count: int) -> int:
        """Return how many blocks ``count`` elements have."""
        return -(-count // self.block)

    @torch.no_grad()
    def encode(self, given: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of ``given``, float32 of shape (n,) without gaps, to ``codes``, uint8 of shape (blocks(n),
        bytes_in_block), and their scales to ``scales``, float32 of shape (blocks(n),). Blocks of both may have gaps between
        them. All are on one device. The codes of a last block beyond ``n`` are 0."""
        self._check(given, codes, scales)
        if not self._in_c(given):
            self.encode_by_torch(given, codes, scales)
            return
        encode = lib.moments_encode8 if self.bits == 8 else lib.moments_encode4
        places = codes.data_ptr(), codes.stride(0), scales.data_ptr(), 4 * scales.stride(0)
        encode(given.data_ptr(), given.numel(), *places, self._starts.data_ptr(), self._bounds.data_ptr())

    @torch.no_grad()
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the elements of ``codes`` and ``scales`` to ``out``, float32 of shape (n,); shapes as in ``encode``."""
        self._check(out, codes, scales)
        if not self._in_c(out):
            self.decode_by_torch(codes, scales, out)
            return
        decode = lib.moments_decode8 if self.bits == 8 else lib.moments_decode4
        places = codes.data_ptr(), codes.stride(0), scales.data_ptr(), 4 * scales.stride(0)
        decode(*places, out.numel(), out.data_ptr(), self._map.data_ptr())

    def encode_by_torch(self, given: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Do what ``encode`` does by torch's functions."""
        count = self.blocks(given.numel())
        blocks = torch.nn.functional.pad(given, (0, count * self.block - given.numel())).view(count, self.block)
        scale = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1).view(torch.float32)  # NaN is larger than infinity
        fine = (scale.isfinite() & (scale > 0))[:, None]
        shares = torch.where(fine, blocks / scale[:, None], torch.zeros((), dtype=torch.float32, device=given.device))
        found = torch.bucketize(shares, self._bounds[:-1].to(given.device)).to(torch.uint8)
        scales.copy_(scale)
        found.view(-1)[given.numel() :] = 0
        half = self.block // 2
        codes.copy_(found if self.bits == 8 else found[:, :half] | found[:, half:] << 4)

    def decode_by_torch(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Do what ``decode`` does by torch's functions."""
        numbers = codes if self.bits == 8 else torch.cat((codes & 15, codes >> 4), 1)
        found = self._map.to(out.device)[numbers.long()].mul_(scales[:, None])
        out.copy_(found.view(-1)[: out.numel()])

    def _check(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        count = self.blocks(values.numel())
        assert values.dtype is torch.float32 is scales.dtype and codes.dtype is torch.uint8
        assert codes.shape == (count, self.bytes_in_block), (values.shape, codes.shape)
        assert scales.shape == (count,), (values.shape, scales.shape)
        assert values.is_contiguous() and codes.stride(1) == 1

    @staticmethod
    def _in_c(values: torch.Tensor) -> bool:
        return values.device.type == "cpu" and hasattr(lib, "moments_encode8")

    @cached_property
    def _map(self) -> torch.Tensor:
        return torch.tensor(self.values, dtype=torch.float32, device="cpu")

    @cached_property
    def _bounds(self) -> torch.Tensor:
        """Return for each code the largest float32 that is as near to its value as to the next one's; of the last, infinity."""
        exact = self._map.double()
        middle = (exact[:-1] + exact[1:]) / 2
        bounds = middle.float()
        down = torch.nextafter(bounds, torch.full_like(bounds, -torch.inf))
        bounds = torch.where(bounds.double() > middle, down, bounds)
        return torch.cat((bounds, torch.full((1,), torch.inf, dtype=torch.float32, device="cpu")))

    @cached_property
    def _starts(self) -> torch.Tensor:
        """Return the code of the smallest number of those float32 between -1 and 1 that have the same upper 16 bits, by these
        bits. The code of any of them is that or the next one."""
        upper = torch.arange(1 << 16, dtype=torch.int32, device="cpu") << 16
        ends = [(upper | low).view(torch.float32) for low in (0, 0xFFFF)]
        ends = [torch.where(ends[0].abs() <= 1, end.clamp(-1, 1), 0) for end in ends]
        codes = [torch.bucketize(end, self._bounds[:-1]) for end in ends]
        first, last = torch.minimum(*codes), torch.maximum(*codes)
        assert bool((last - first <= 1).all())
        return first.to(torch.uint8)


_WORD = 0xFFFFFFFF


@torch.no_grad()
def round_by_chance(given: torch.Tensor, out: torch.Tensor, key: int, first: int) -> None:
    """Round ``given``, finite float32 of shape (n,), to ``out``, bfloat16 of that shape. ``key``: 32 bits; ``first``: the
    number of the first element, of which 32 bits count. Both without gaps, on one device."""
    assert given.dtype is torch.float32 and out.dtype is torch.bfloat16 and given.numel() == out.numel()
    assert given.is_contiguous() and out.is_contiguous()
    if given.device.type == "cpu" and hasattr(lib, "moments_round"):
        lib.moments_round(given.data_ptr(), given.numel(), out.data_ptr(), key, first & _WORD)
        return
    round_by_chance_by_torch(given, out, key, first)


@torch.no_grad()
def round_by_chance_by_torch(given: torch.Tensor, out: torch.Tensor, key: int, first: int) -> None:
    """Do what ``round_by_chance`` does by torch's functions: 32-bit numbers as int64, whose upper halves are cleared."""
    numbers = torch.arange(given.numel(), dtype=torch.int64, device=given.device) + (first & _WORD)
    value = (numbers * 0x9E3779B9 + key) & _WORD
    value = ((value ^ value >> 16) * 0x85EBCA6B) & _WORD
    value = ((value ^ value >> 13) * 0xC2B2AE35) & _WORD
    value ^= value >> 16
    bits = given.view(torch.int32).to(torch.int64) & _WORD
    total = bits + (value >> 16)
    total = torch.where(total & 0x7F800000 == 0x7F800000, bits, total) >> 16
    out.view(torch.int16).copy_(torch.where(total >= 0x8000, total - 0x10000, total))


def _dynamic(bits: int, signed: bool) -> tuple[float, ...]:
    """Return the dynamic map: with each decade below 1 the intervals between 0.1 and 1 times its power of ten are half as many,
    down to one (two without a sign); the values are their middles, 0 and 1."""
    decades = bits - 1
    found = [0.0, 1.0]
    for decade in range(decades):
        intervals = 2**decade * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (number + 0.5) / intervals) * 10.0 ** (decade - decades + 1) for number in range(intervals)]
        found += [*middles, *([-middle for middle in middles] if signed else [])]
    return tuple(sorted(found))


MOMENT_8 = BlockCode(8, 256, _dynamic(8, True))
SQUARE_8 = BlockCode(8, 256, _dynamic(8, False))
MOMENT_4 = BlockCode(4, 128, _dynamic(4, True))
SQUARE_4 = BlockCode(4, 128, tuple(number / 16 for number in range(1, 17)))


@dataclass(frozen=True)
class MomentsCode:
    """Code of both moments of Adam in one record for each block: the codes of the ``first``, those of the ``second``, and the
    scale of each. What is read and written together is one tensor."""

    first: BlockCode
    second: BlockCode

    @property
    def block(self) -> int:
        """Elements of a block."""
        return self.first.block

    @property
    def record_bytes(self) -> int:
        return 2 * self.first.bytes_in_block + 8

    def records(self, kept: torch.Tensor, which: slice) -> torch.Tensor:
        """Return the records of the elements ``which``, uint8 of shape (blocks, record_bytes): a view of ``kept``, uint8 of
        shape (n,). ``which`` begins at a multiple of ``block``, and ends at one or at the end."""
        found = kept.view(-1, self.record_bytes)
        return found[which.start // self.block : self.first.blocks(which.stop)]

    def encode(self, moments: Sequence[torch.Tensor], records: torch.Tensor) -> None:
        """Write the codes and scales of both moments, each float32 of shape (n,), to ``records``."""
        for (code, codes, scales), moment in zip(self._fields(records), moments, strict=True):
            code.encode(moment, codes, scales)

    def decode(self, records: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """Write the elements of ``records`` to both moments, each float32 of shape (n,)."""
        for (code, codes, scales), moment in zip(self._fields(records), moments, strict=True):
            code.decode(codes, scales, moment)

    def _fields(self, records: torch.Tensor) -> Iterator[tuple[BlockCode, torch.Tensor, torch.Tensor]]:
        """Yield the code, the codes and the scales of each moment."""
        size = self.first.bytes_in_block
        scales = records[:, 2 * size :].view(torch.float32)
        yield self.first, records[:, :size], scales[:, 0]
        yield self.second, records[:, size : 2 * size], scales[:, 1]


MOMENTS_8 = MomentsCode(MOMENT_8, SQUARE_8)
MOMENTS_4 = MomentsCode(MOMENT_4, SQUARE_4)
