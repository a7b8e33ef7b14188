"""The HBM tier: one arena in a torch device's memory, cut into slots that tensors can lie in."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from tiered.allocator import FreeSpace
from tiered.errors import CapacityError, MisuseError, TieredError
from tiered.interfaces import Streams
from tiered.types import Fence, Slot, format_size

__all__ = ["CudaStreams", "HbmConfig", "HbmTier", "device_named"]

DEVICE_ALIGNMENT = 512
"""Bytes; the alignment of CUDA's own allocator, so kernels find operands aligned as usual."""


@dataclass(frozen=True)
class HbmConfig:
    """Configuration: ``capacity`` is a hard limit in bytes, ``device`` torch's name of it (``cuda``, ``cuda:1``; ``cpu`` as a
    stand-in)."""

    capacity: int
    device: str = "cuda"


class CudaStreams:
    """The streams of one CUDA device; a stream is a ``torch.cuda.Stream``, a fence a ``torch.cuda.Event``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> object:
        """Return the stream that ``torch.cuda.stream`` chose in this thread, else the default stream."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: object) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(cast(torch.cuda.Stream, stream))
        return cast(Fence, event)

    def wait(self, stream: object, fence: Fence) -> None:
        cast(torch.cuda.Stream, stream).wait_event(cast(torch.cuda.Event, fence))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class HbmTier:
    """Slots in one uint8 tensor on the device, allocated at once, so that nothing else can use the memory up.

    The arena lives as long as the tier or any tensor on a slot. torch's allocator reuses its memory in the order of the stream
    that was current when the tier was made. ``close`` waits for all other streams; after it, whoever drops the last tensor must
    wait.

    ``streams`` are those of the device: ``CudaStreams``, or None on a CPU, unless others are given.

    Raises MisuseError for a device that does not exist, CapacityError where it has no room.
    """

    name = "hbm"

    def __init__(self, config: HbmConfig, *, streams: Streams | None = None) -> None:
        self._device = _device(config.device)
        self._space = FreeSpace(max(0, config.capacity), DEVICE_ALIGNMENT)
        self.capacity, self.alignment = self._space.capacity, self._space.alignment
        """Bytes; the capacity is a multiple of the alignment."""
        if self.capacity == 0:
            raise CapacityError(
                f"an HBM budget of {config.capacity} bytes holds nothing: the minimum is {DEVICE_ALIGNMENT} bytes"
            )
        self._arena: torch.Tensor | None = _allocate(self._space.capacity, self._device)
        self._view = _host_view if self._device.type == "cpu" else _device_view
        self._streams = streams or (CudaStreams(self._device) if self._device.type == "cuda" else None)

    @property
    def device(self) -> torch.device:
        """The device, with its index where it has one."""
        return self._device

    @property
    def streams(self) -> Streams | None:
        return self._streams

    @property
    def address(self) -> int:
        """Address of the arena on the device; 0 once the tier is closed."""
        return 0 if self._arena is None else self._arena.data_ptr()

    @property
    def used(self) -> int:
        """Bytes in allocated slots, padding included."""
        return self._space.used_bytes

    @property
    def largest(self) -> int:
        """Size in bytes of the largest request that would be granted now."""
        return self._space.largest

    def allocate(self, nbytes: int) -> Slot | None:
        return self._space.allocate(nbytes)

    @property
    def slots(self) -> Sequence[Slot]:
        """The allocated slots, by offset."""
        return self._space.slots

    def free(self, slot: Slot) -> None:
        self._space.free(slot.offset, slot.nbytes)

    def restore(self, slots: Iterable[Slot]) -> None:
        self._space.restore((slot.offset, slot.nbytes) for slot in slots)

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        """Return the slot's first bytes as a uint8 tensor of shape (nbytes,) on the device, and its owner, which torch refers
        to."""
        assert 1 <= nbytes <= slot.nbytes
        if self._arena is None:
            raise AssertionError("the HBM tier was closed")
        return self._view(self._arena, slot.offset, nbytes)

    def close(self) -> None:
        """Wait for the device, then release the arena. Idempotent; aliases stay valid."""
        if self._arena is not None and self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # the device failed before, or this is a forked child: nothing runs
                torch.cuda.synchronize(self._device)
        self._arena = None


# Views. Slices of the arena would share its storage, so nothing could tell when the last tensor on a slot is gone. Hence every
# view has a storage of its own, over an object that torch refers to as long as that storage lives.


class _Range:
    """Memory of a CUDA device in a form that torch adopts without a copy (numba's CUDA array interface, version 2)."""

    __slots__ = ("__cuda_array_interface__", "__weakref__", "_arena", "claim")

    def __init__(self, arena: torch.Tensor, offset: int, nbytes: int) -> None:
        self._arena = arena
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "data": (arena.data_ptr() + offset, False),  # address, read-only
        }


def _device_view(arena: torch.Tensor, offset: int, nbytes: int) -> tuple[torch.Tensor, object]:
    owner = _Range(arena, offset, nbytes)
    return torch.as_tensor(owner, device=arena.device), owner


def _host_view(arena: torch.Tensor, offset: int, nbytes: int) -> tuple[torch.Tensor, object]:
    owner = _array_type(nbytes).from_address(arena.data_ptr() + offset)
    owner.arena = arena  # type: ignore[attr-defined]  # a ctypes array has room for attributes
    return torch.frombuffer(owner, dtype=torch.uint8), owner


@functools.lru_cache(maxsize=1024)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes  # making a type is slow, and sizes recur


# Opening


def device_named(name: str) -> torch.device:
    """Return a device, which need not be there. Raises MisuseError for a name of none, and for another kind."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MisuseError(f"{name!r} is not a device; name cuda, cuda:1, ... or cpu") from error
    if device.type not in ("cpu", "cuda"):
        raise MisuseError(f"device {name}: HBM is kept on CUDA devices (or cpu, as a stand-in)")
    return device if device.type == "cuda" else torch.device("cpu")


def _device(name: str) -> torch.device:
    device = device_named(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise MisuseError(
            f"no CUDA device: torch finds none for {name!r}; leave hbm= out, try the program with device='cpu', where host "
            "memory stands in, or install a torch with CUDA and its driver"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise MisuseError(f"no CUDA device {index}: this machine has {count}, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate ``nbytes`` on the device, aligned to DEVICE_ALIGNMENT."""
    if device.type == "cpu":
        try:
            arena = torch.empty(nbytes + DEVICE_ALIGNMENT, dtype=torch.uint8, device="cpu")
        except (RuntimeError, TypeError) as error:  # TypeError: more than 63 bits
            raise CapacityError(
                f"the system refuses {format_size(nbytes)} of memory for the HBM tier on the CPU: ask for less"
            ) from error
        skip = -arena.data_ptr() % DEVICE_ALIGNMENT
        return arena[skip : skip + nbytes]
    try:
        arena = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # The allocator may return memory that queued kernels still use: correct for the stream that they are on, but the tier
        # uses others. So the device is waited for once, here.
        torch.cuda.synchronize(device)
        return arena
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise CapacityError(
            f"{device} refuses {nbytes} bytes ({format_size(nbytes)}) for the HBM tier: {format_size(free)} of "
            f"{format_size(total)} are free; ask for less, or end other programs on the device"
        ) from error
    except (RuntimeError, TypeError) as error:
        raise TieredError(f"{device} cannot give the HBM tier {nbytes} bytes: {str(error).splitlines()[0]}") from error
