"""A device without a device: torch's copies to and from its memory are queued, and run when and as the test says.

A copy between two places of the device, or from the host to it, is work on the current stream. One from the device to the host
returns when it is done, as CUDA's to pageable memory do, and everything before it on its stream.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tiered.interfaces import Streams
from tiered.links.stand_in import StandInFence, StandInStreams
from tiered.tiers.hbm import HbmConfig, HbmTier
from tiered.types import Fence

__all__ = ["Device"]


class Device(StandInStreams):
    """Streams whose work runs in an order that ``source`` chooses, a tier, and a heap beside it. One stream is slow for a
    while: it goes on only where all others wait.

    ``deaf``: names of functions; what is recorded or waited for while the three innermost callers, or these in the midst of an
    exception, are among them is left out: a mutation.
    """

    def __init__(self, capacity: int, heap: int, source: random.Random, deaf: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.tier = HbmTier(HbmConfig(capacity, "cpu"), streams=self)
        assert isinstance(self.tier.streams, Streams)
        assert self.tier._arena is not None
        self.arena: np.ndarray[Any, Any] = self.tier._arena.numpy()
        self.heap = torch.empty(heap, dtype=torch.uint8)
        self.left_out = 0
        self._source, self._deaf = source, deaf
        self._running = False
        self._slow: Hashable = None

    # -- as the engine uses it ---------------------------------------------------------------------------------------------

    def record(self, stream: object) -> Fence:
        if self._deaf and self._ignores():
            fence = StandInFence()
            fence.passed = True
            return fence
        return super().record(stream)

    def wait(self, stream: object, fence: Fence) -> None:
        if not (self._deaf and self._ignores()):
            super().wait(stream, fence)

    def _ignores(self) -> bool:
        frame, names = sys._getframe(2), set()
        for _ in range(3):
            names.add(frame.f_code.co_name)
            assert frame.f_back is not None
            frame = frame.f_back
        if sys.exc_info()[0] is not None:
            names.add("except")
        elif "except" not in self._deaf:
            names.add("no except")
        found = self._deaf <= names
        self.left_out += found
        return found

    # -- as torch uses it --------------------------------------------------------------------------------------------------

    def mode(self) -> TorchFunctionMode:
        """Within it copies are the device's."""
        return _Copies(self)

    def offset(self, tensor: torch.Tensor) -> int:
        """Where in the tier's memory ``tensor`` begins."""
        assert self.tier._arena is not None
        return tensor.data_ptr() - self.tier._arena.data_ptr()

    def has(self, tensor: torch.Tensor) -> bool:
        assert self.tier._arena is not None
        memories = (self.tier._arena, self.heap)
        return any(m.data_ptr() <= tensor.data_ptr() < m.data_ptr() + m.numel() for m in memories)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._running or not (self.has(target) or self.has(source)):
            target.copy_(source)
        elif self.has(target):
            origin = source if self.has(source) else source.clone()
            self.launch(lambda: target.copy_(origin))
        else:
            self.finish(self.current())
            target.copy_(source)

    # -- as the test uses it -----------------------------------------------------------------------------------------------

    def step(self, stream: Hashable) -> bool:
        before, self._running = self._running, True
        try:
            return super().step(stream)
        finally:
            self._running = before

    def some(self, steps: int) -> None:
        """Let up to ``steps`` entries run."""
        for _ in range(steps):
            ready = [stream for stream in self.ready() if stream != self._slow]
            if not ready:
                self._slow = None
                continue
            self.step(self._source.choice(ready))
            if self._source.random() < 0.05:
                self._slow = self._source.choice(ready)

    def finish_all(self) -> None:
        while self.ready():
            self.some(1)

    def finish(self, stream: Hashable) -> None:
        """Until all that is queued on ``stream`` has run; others run as far as it happens."""
        while self.queued(stream):
            assert self.ready(), f"stream {stream} waits for a fence that nothing lets pass"
            if stream == self._slow:
                self._slow = None
            self.some(1)


class _Copies(TorchFunctionMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and not kwargs:
            self._device.copy(*args)
            return args[0]
        return func(*args, **(kwargs or {}))
