"""fp32 masters of bf16 parameters: the parameter itself is the high half, so only 16 low bits are kept beside it.

The high half is the master rounded half up to bf16 (``(bits + 0x8000) >> 16``), the low half the master's low 16 bits. As a
signed number the low half is the master's distance from the parameter in bits, so that ``(high << 16) + low`` gives the master
back, for every bit pattern; and a parameter that was loaded is its own master once its low half is cleared.
"""

from __future__ import annotations

import math

import torch

__all__ = ["all_finite", "join", "split"]


def join(high: torch.Tensor, low: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> None:
    """Write the masters to ``out``. ``high`` (bf16), ``low`` (int16), ``out`` and ``spare`` (fp32, overwritten) are flat, of
    one length."""
    bits, shifted = out.view(torch.int32), spare.view(torch.int32)
    bits.copy_(low)
    shifted.copy_(high.view(torch.int16))
    bits.add_(shifted, alpha=0x10000)


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Write the halves of ``master`` (fp32, finite, overwritten) to ``high`` (bf16) and ``low`` (int16); flat, one length."""
    bits = master.view(torch.int32)
    low.copy_(bits)
    bits.add_(0x8000)
    bits.bitwise_right_shift_(16)
    high.view(torch.int16).copy_(bits)


def all_finite(values: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity; one pass, without a temporary tensor."""
    if not values.numel():
        return True
    smallest, largest = torch.aminmax(values)
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())
