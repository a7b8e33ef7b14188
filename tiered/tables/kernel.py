"""Copies of rows between addresses, in one call: by C (``libaio_ext/rows.c``), or where that was not built one by one.

One call of C is whole to a signal handler, which Python runs between two bytecodes: either none of its rows is copied, or all
of them are.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

try:
    from tiered.tables._rows import lib
except ImportError:  # there was no compiler
    lib = None  # type: ignore[assignment]

__all__ = ["copy", "copy_equal", "lib"]


def copy(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes from address ``sources[i]`` to ``targets[i]``, for each i, in order."""
    if lib is not None:
        to, of, nbytes = array("Q", targets), array("Q", sources), array("Q", sizes)
        lib.rows_copy(to.buffer_info()[0], of.buffer_info()[0], nbytes.buffer_info()[0], len(to))
        return
    for target, source, size in zip(targets, sources, sizes, strict=True):
        ctypes.memmove(target, source, size)


def copy_equal(targets: torch.Tensor, sources: torch.Tensor, nbytes: int) -> None:
    """Copy ``nbytes`` bytes from address ``sources[i]`` to ``targets[i]``, for each i, in order. Both are int64, contiguous, of
    one length."""
    if lib is not None:
        lib.rows_copy_equal(targets.data_ptr(), sources.data_ptr(), nbytes, targets.numel())
        return
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)
