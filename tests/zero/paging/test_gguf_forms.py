"""Blocks of GGUF files: unpacked by C and by torch as ggml describes them, and with the bits of the library ``gguf``."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zero.paging.test_quantised import BIT_PATTERN, single
from tiered.packing import form
from tiered.packing.gguf import BLOCKS, Blocks
from tiered.packing.quantised import FORMS, TYPES, packing_of

SCALES_AT = {"Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EXTREME = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01]
"""Zeros, subnormal, least and largest normal, infinite scales, and NaN."""


def blocks_of(name: str, rows: int, columns: int, seed: int, scales: list[int]) -> tuple[Blocks, torch.Tensor]:
    """Return random blocks, some of which have one of ``scales``."""
    way = BLOCKS[name].of(rows, columns)
    assert isinstance(way, Blocks)
    torch.manual_seed(seed)
    packed = torch.randint(0, 256, (way.nbytes,), dtype=torch.uint8)
    blocks = packed.view(-1, way.block_nbytes)
    for number, scale in enumerate(scales):
        at = SCALES_AT[name][number % len(SCALES_AT[name])]
        blocks[number % len(blocks), at : at + 2] = torch.tensor([scale & 255, scale >> 8], dtype=torch.uint8)
    return way, packed


def oracle(name: str, block: bytes) -> list[float]:
    """Return the values of one block, element after element."""

    def half(at: int) -> float:
        return struct.unpack_from("<e", block, at)[0]  # type: ignore[no-any-return]

    if name == "Q8_0":
        return [single(code * half(0)) for code in struct.unpack_from("<32b", block, 2)]
    found = []
    for i in range(256):
        if name in ("Q4_K", "Q5_K"):
            group, six = i // 32, block[4:16]
            scale, least = (
                (six[group] & 63, six[group + 4] & 63)
                if group < 4
                else (six[group + 4] & 15 | six[group - 4] >> 6 << 4, six[group + 4] >> 4 | six[group] >> 6 << 4)
            )
            byte = block[-128:][group // 2 * 32 + i % 32]
            code = byte >> 4 if group % 2 else byte & 15
            if name == "Q5_K":
                code |= (block[16 + i % 32] >> group & 1) << 4
            found.append(single(single(single(half(0) * scale) * code) - single(half(2) * least)))
        else:
            part, inside = divmod(i, 128)
            low = block[part * 64 + inside % 64] >> 4 * (inside // 64) & 15
            high = block[128 + part * 32 + inside % 32] >> 2 * (inside // 32) & 3
            (scale,) = struct.unpack_from("<b", block, 192 + i // 16)
            found.append(single(single(half(208) * scale) * ((low | high << 4) - 32)))
    return found


def unpacked(way: Blocks, packed: torch.Tensor, dtype: torch.dtype, in_c: bool) -> torch.Tensor:
    out = torch.full((way.rows * way.columns + 1,), 7.0, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(form, "lib", None)
        way.unpack(packed, out[:-1])
    assert out[-1] == 7, "it wrote past the end"
    return out[:-1]


def assert_alike(one: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(*(each.nan_to_num(1.0, torch.inf, -torch.inf).view(BIT_PATTERN[one.dtype]) for each in (one, other)))


@settings(deadline=None, max_examples=20)
@given(
    name=st.sampled_from(sorted(BLOCKS)),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 3),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 1000),
    scales=st.lists(st.sampled_from(EXTREME), max_size=4),
)
def test_blocks_are_unpacked_as_they_are_described(
    name: str, rows: int, blocks: int, dtype: torch.dtype, seed: int, scales: list[int]
) -> None:
    way, packed = blocks_of(name, rows, blocks * BLOCKS[name].elements, seed, scales)
    values = [value for one in packed.view(-1, way.block_nbytes) for value in oracle(name, one.numpy().tobytes())]
    expected = torch.tensor(values, dtype=torch.float64).to(torch.float32).to(dtype)
    for in_c in (True, False) if form.has_kernels() else (False,):
        assert_alike(unpacked(way, packed, dtype, in_c), expected)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_blocks_have_the_values_of_gguf(name: str) -> None:
    """Large shapes; every code, and scales of every kind."""
    gguf, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    way, packed = blocks_of(name, 130, 2048, 0, EXTREME * 2)
    with numpy.errstate(all="ignore"):
        found = gguf.quants.dequantize(packed.view(way.rows, -1).numpy(), gguf.GGMLQuantizationType[name])
    expected = torch.from_numpy(found).view(-1)
    assert expected.isinf().any()
    for dtype in TYPES:
        for in_c in (True, False):
            assert_alike(unpacked(way, packed, dtype, in_c), expected.to(dtype))


def test_what_gguf_quantises_is_taken_as_it_is() -> None:
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    values = torch.randn(64, 320)
    values[3, :32] = 0
    packed = torch.from_numpy(gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)).view(-1)
    way = packing_of("GGUF Q8_0", values.shape, values.stride())
    assert isinstance(way, Blocks)
    assert way.nbytes == packed.numel() == 64 * 10 * 34
    found = unpacked(way, packed, torch.float32, True).view(values.shape)
    assert (found - values).abs().max() < 0.02
    assert torch.equal(found[3, :32], torch.zeros(32))


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_rows_are_whole_blocks_and_stand_alone(name: str) -> None:
    columns = 2 * BLOCKS[name].elements
    way, packed = blocks_of(name, 5, columns, 1, [])
    assert FORMS[f"GGUF {name}"] is BLOCKS[name]
    assert way.rows_together(columns) == 1
    assert BLOCKS[name].of(5, columns + 16) is None
    whole = unpacked(way, packed, torch.float32, True).view(5, columns)
    some, few = BLOCKS[name](2, columns), packed[2 * way.row_nbytes : 4 * way.row_nbytes]
    assert_alike(unpacked(some, few, torch.float32, True).view(2, columns), whole[2:4])
    shown: Any = torch.empty(0)
    with pytest.raises(NotImplementedError, match="taken from files"):
        way.pack(shown, packed, "w")
