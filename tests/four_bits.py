"""What bitsandbytes says that codes of 4 bits mean, on every processor.

Its kernel for processors with AVX-512 (0.50.2) begins a block with each row, and has wrong values where rows are no whole
blocks; its layers compute there with other kernels, of bf16, while nothing is recorded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

__all__ = ["layers_as_elsewhere", "values_of"]


def values_of(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """Return the values of ``codes`` that ``functional.quantize_4bit`` returned with ``state``, by the published formula; and
    those of bitsandbytes' own function, where that is right, are the same."""
    functional = pytest.importorskip("bitsandbytes").functional
    largest = state.absmax
    if state.nested:
        largest = functional.dequantize_blockwise(largest, state.state2) + state.offset
    halves = codes.contiguous().view(torch.uint8).view(-1)
    numbers = torch.stack([halves >> 4, halves & 15], 1).view(-1)[: state.shape.numel()]
    blocks = largest.float().repeat_interleave(state.blocksize)[: numbers.numel()]
    values = (state.code[numbers.long()] * blocks).to(state.dtype).view(state.shape)
    if state.shape[-1] % state.blocksize == 0:
        assert torch.equal(functional.dequantize_4bit(codes, state).reshape(state.shape), values)
    return values


def layers_as_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Have layers of bitsandbytes that are made from here on compute as where there is no AVX-512."""
    patch.setattr(pytest.importorskip("bitsandbytes").nn.modules, "has_avx512bf16", lambda: False)
