"""What the kernel says that direct I/O needs."""

from __future__ import annotations

import ctypes

__all__ = ["LARGEST_ALIGNMENT", "direct_io_alignment"]

LARGEST_ALIGNMENT = 1 << 20
"""Bytes: no drive needs more, and a store's header has at most this size."""


class _Statx(ctypes.Structure):
    """``struct statx`` up to the two fields that are wanted; see statx(2)."""

    _fields_ = [
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_char * 148),
        ("memory_alignment", ctypes.c_uint32),
        ("offset_alignment", ctypes.c_uint32),
        ("after", ctypes.c_char * 96),
    ]


def direct_io_alignment(fd: int) -> int:
    """What the kernel says direct I/O on this file needs, in bytes; 0 where it does not say (before Linux 6.1)."""
    at_empty_path, statx_dioalign = 0x1000, 0x2000
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return 0
    found = _Statx()
    if statx(fd, b"", at_empty_path, statx_dioalign, ctypes.byref(found)) != 0 or not found.mask & statx_dioalign:
        return 0
    needed = max(int(found.memory_alignment), int(found.offset_alignment))
    return needed if needed <= LARGEST_ALIGNMENT else 0
