"""The device that these tests run on, and what they do to it.

``TIERED_TEST_DEVICE`` names another than ``cuda``: ``cuda:1``, or ``cpu``, the stand-in, which shows that the tests themselves
are right where there is no device.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from tests.store.chains import numbers
from tiered import TieredStore
from tiered.tensors.specs import flat, spec_of

__all__ = ["KIB", "MIB", "NAME", "Device", "numbers", "raw", "require_device", "same", "why_not"]

KIB, MIB = 1 << 10, 1 << 20
NAME = os.environ.get("TIERED_TEST_DEVICE", "cuda")
BUSY = 30_000_000
"""Cycles of a kernel that does nothing: some 15 ms, long after the calls behind it have returned."""


def why_not() -> str | None:
    """Why nothing can run on the device, or None."""
    if torch.device(NAME).type != "cuda" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    return f"no CUDA device: torch {torch.__version__} finds none"


def require_device() -> None:
    """Called by a module of tests: without a device all of it is skipped, with one line that says why."""
    why = why_not()
    if why is not None:
        pytest.skip(why, allow_module_level=True)


class Device:
    """Streams and queued work; on the stand-in everything is done at once."""

    def __init__(self) -> None:
        self.device = torch.device(NAME)
        self.cuda = self.device.type == "cuda"
        if self.cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def streams(self, count: int) -> list[torch.cuda.Stream | None]:
        return [torch.cuda.Stream(self.device) if self.cuda else None for _ in range(count)]

    def use(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """This thread computes on ``stream`` meanwhile."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def busy(self) -> None:
        """Queue a long kernel on the current stream: what is queued behind it runs late."""
        if self.cuda:
            torch.cuda._sleep(BUSY)

    def put(self, store: TieredStore, key: str, tensor: torch.Tensor) -> None:
        """Put a device's tensor; on the stand-in, where that comes from the host, by way of a WRITE lease."""
        if self.cuda:
            store.put(key, tensor.to(self.device))
            return
        store.create(key, spec_of(tensor))
        with store.lease(key, access="write") as target:
            target.copy_(tensor)

    def pending(self, stream: torch.cuda.Stream | None) -> bool:
        """Whether something queued on ``stream`` has not run yet; the stand-in says yes."""
        return stream is None or not stream.query()

    def finish(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        """Bytes that torch has handed out on the device."""
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0


def raw(tensor: torch.Tensor) -> bytes:
    """Its bytes in row-major order, after all that is queued on the current stream."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat(dense).cpu().numpy().tobytes() if dense.numel() else b""


def same(found: torch.Tensor, put: torch.Tensor) -> None:
    assert found.dtype is put.dtype
    assert found.shape == put.shape
    assert raw(found) == raw(put)
