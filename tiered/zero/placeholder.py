"""What a parameter shows while its values are in the store."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch

__all__ = ["DevicePlaceholder", "Placeholder"]


class Placeholder:
    """A tensor of a given shape that takes the memory of one element: NaN (a stale read is loud), or 0.

    Its memory is its own, so what is written to it spoils nothing else, and ``intact`` tells. ``address`` identifies it among
    all that live: every tensor on it, however it was made, has ``untyped_storage().data_ptr() == address``.
    """

    @staticmethod
    def on(device: torch.device, shape: torch.Size, dtype: torch.dtype) -> Placeholder | DevicePlaceholder:
        return Placeholder(shape, dtype) if device.type == "cpu" else DevicePlaceholder(device, shape, dtype)

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            one = torch.zeros((), dtype=dtype, device="cpu")
            if dtype.is_floating_point or dtype.is_complex:
                one.fill_(float("nan"))
            self.pattern = bytes(one.view(1).view(torch.uint8).tolist())
            self._memory = (ctypes.c_char * dtype.itemsize).from_buffer_copy(self.pattern)
            self.address = ctypes.addressof(self._memory)
            self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(dtype).view(()).expand(shape)

    @property
    def intact(self) -> bool:
        """Whether nobody wrote to it."""
        return self._memory.raw == self.pattern

    def when_unused(self, call: Callable[..., object], *args: object) -> None:
        """Call once this object and the last tensor on its memory are gone, perhaps in the garbage collector: never block."""
        weakref.finalize(self._memory, call, *args).atexit = False

    def memory(self) -> weakref.ref[ctypes.Array[ctypes.c_char]]:
        """Dead once nobody uses the memory any more."""
        return weakref.ref(self._memory)


class DevicePlaceholder:
    """The same in a device's memory. Whether it was written to is looked at where there is one element: that waits for the
    device. torch itself refuses writes to a tensor whose elements share their memory."""

    def __init__(self, device: torch.device, shape: torch.Size, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            empty = not (dtype.is_floating_point or dtype.is_complex)
            one = torch.full((), 0 if empty else float("nan"), dtype=dtype, device=device)
            self.address = one.untyped_storage().data_ptr()
            self.tensor = one.expand(shape)
            self._first = None if empty else one  # of whole numbers any could be meant

    @property
    def intact(self) -> bool:
        return self._first is None or self.tensor.numel() != 1 or bool(self._first.isnan())
