"""The device link between HBM and DRAM of a CUDA device: copies on streams of their own, beside the compute streams.

Imports without CUDA; only making a link needs a device.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import cuda

from tiered.errors import MisuseError, ReadError, TieredError, TransferError, WriteError, whole_number
from tiered.interfaces import Memory
from tiered.system import Wakeup
from tiered.types import Completion, Direction, Transfer, Urgency, format_size

__all__ = ["CudaConfig", "CudaLink", "DeviceMemory", "HostMemory"]


@dataclass(frozen=True)
class CudaConfig:
    """Configuration: ``window`` is the bytes of one direction that may be accepted and unfinished before ``start`` refuses;
    each urgency counts only transfers at least as urgent.

    A stream's copies end in the order in which they were queued, so the window is what a demand may have to wait for: 64 MiB
    are 2 to 5 ms of PCIe 4 or 5. Two transfers are taken at any size: if the second were queued only after the first has ended,
    the bus would idle until the engine had noticed.
    """

    window: int = 64 << 20

    def __post_init__(self) -> None:
        whole_number("the window of a link to a device is a number of bytes", self.window)


class DeviceMemory(Memory, Protocol):
    """The upper tier: a Memory with its device."""

    @property
    def device(self) -> torch.device: ...


class HostMemory(Memory, Protocol):
    """The lower tier: a Memory whose slots all lie in one range, which can be pinned as a whole."""

    @property
    def address(self) -> int: ...


class _SideStreams:
    """The streams that the link makes; the compute streams are the caller's.

    ``up`` carries fetches: apart from the compute streams, so that the next tensors arrive while the present ones are used.
    ``down`` carries write-backs: apart from ``up``, because device and bus move both directions at once, and a fetch must not
    queue behind a write-back that waits for a kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self.up = cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.down = cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaLink:
    """Link between the device memory ``upper`` and the host memory ``lower``; both must outlive it.

    The host memory is pinned as one region from here until ``close``, so that the device copies from and to it by DMA and the
    system cannot swap it out. Pinning takes all of its pages from the system at once.

    Raises MisuseError without a CUDA device, TieredError where CUDA does not pin the memory.
    """

    def __init__(self, upper: DeviceMemory, lower: HostMemory, *, config: CudaConfig | None = None) -> None:
        if not cuda.is_available():
            raise MisuseError("no CUDA device: torch finds none; leave HBM out, or install a torch with CUDA and its driver")
        self._window = (config or CudaConfig()).window
        assert upper.streams is not None, "a device without streams"
        self.src = upper.name
        self.dst = lower.name
        self._upper = upper
        self._lower = lower
        self._streams = upper.streams
        self._owner = os.getpid()
        self._in_flight: dict[int, Transfer] = {}  # by tag, until reported
        self._ended: deque[Completion] = deque()  # the lanes' threads append
        self._closed = False
        side = _SideStreams(upper.device)
        self._address = lower.address
        self._device = upper.device
        _pin(self._address, lower.capacity, self._device)
        self._wakeup = Wakeup()
        self._lanes = {
            Direction.UP: _Lane("up", side.up, upper.device, self._end),
            Direction.DOWN: _Lane("down", side.down, upper.device, self._end),
        }

    def start(self, transfer: Transfer) -> bool:
        """Take a transfer; return False while the window of its direction is full of transfers at least as urgent."""
        assert not self._closed, "start after close"
        assert transfer.tag not in self._in_flight, f"tag {transfer.tag} is in flight"
        assert 1 <= transfer.nbytes <= min(transfer.upper.nbytes, transfer.lower.nbytes)
        before_it = [
            other.nbytes
            for other in self._in_flight.values()
            if other.direction is transfer.direction and other.urgency <= transfer.urgency
        ]
        if len(before_it) > 1 and sum(before_it) + transfer.nbytes > self._window:
            return False
        upper, _ = self._upper.tensor(transfer.upper, transfer.nbytes)
        lower, _ = self._lower.tensor(transfer.lower, transfer.nbytes)
        self._in_flight[transfer.tag] = transfer
        source, target = (upper, lower) if transfer.direction is Direction.DOWN else (lower, upper)
        lane = self._lanes[transfer.direction]
        try:
            for fence in transfer.after:
                self._streams.wait(lane.stream, fence)
            with cuda.stream(lane.stream):
                _copy(source, target)
            event = cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(lane.stream)
        except RuntimeError as error:  # CUDA's errors are late and permanent: the device runs nothing more for this process
            self._end(transfer, error)
        else:
            lane.watch(transfer, event, (source, target))
        return True

    def promote(self, tag: int, urgency: Urgency) -> None:
        """Raise the urgency that the window counts; a copy that is queued on a stream is not overtaken."""
        transfer = self._in_flight.get(tag)
        if transfer is not None and urgency < transfer.urgency:
            transfer.urgency = urgency

    def poll(self, timeout: float) -> list[Completion]:
        if self._in_flight and timeout > 0:
            self._wakeup.wait(timeout)
        self._wakeup.clear()
        ended = []
        while self._ended:
            completion = self._ended.popleft()
            del self._in_flight[completion.tag]
            ended.append(completion)
        return ended

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._owner:  # CUDA does not survive a fork, and the threads are the parent's
            return
        for lane in self._lanes.values():
            lane.close()
        _unpin(self._address, self._device)
        self._wakeup.close()

    def _end(self, transfer: Transfer, error: Exception | None) -> None:
        self._ended.append(Completion(transfer.tag, error=_failure(transfer, error, self.src) if error else None))
        self._wakeup.set()


class _Lane:
    """One direction: its stream, and a thread that waits for the ends of its copies, which come in order.

    An event has no descriptor that could be polled, and querying it repeatedly would make the engine's one thread spin or
    notice late. So this thread sleeps in the driver until an event passes (events made with ``blocking=True`` sleep, others
    spin) and makes the link's pipe readable. Each direction has a thread, so that neither waits for the other's copies.
    """

    def __init__(
        self,
        name: str,
        stream: cuda.Stream,
        device: torch.device,
        ended: Callable[[Transfer, Exception | None], None],
    ) -> None:
        self.stream = stream
        self._device = device
        self._ended = ended
        self._watched: SimpleQueue[tuple[Transfer, cuda.Event, object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tiered-cuda-{name}", daemon=True)
        self._thread.start()

    def watch(self, transfer: Transfer, event: cuda.Event, memory: object) -> None:
        """Report ``transfer`` when ``event`` has passed; refer to ``memory`` until then."""
        self._watched.put((transfer, event, memory))

    def close(self) -> None:
        """Wait for the watched transfers and end the thread."""
        self._watched.put(None)
        self._thread.join()

    def _run(self) -> None:
        with cuda.device(self._device):  # else CUDA would set up device 0 for this thread
            while (watched := self._watched.get()) is not None:
                transfer, event, _ = watched
                error: Exception | None = None
                try:
                    event.synchronize()
                except RuntimeError as caught:
                    error = caught
                self._ended(transfer, error)
                del watched, transfer, event, _, error  # no reference may stay while this thread waits for the next


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Queue a copy on the current stream. The host memory is pinned, so the call does not wait for the copy."""
    target.copy_(source, non_blocking=True)


def _pin(address: int, nbytes: int, device: torch.device) -> None:
    cudart = cuda.cudart()  # type: ignore[no-untyped-call]
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # the size has to be a multiple of the host's page size
    with cuda.device(device):  # else CUDA would set up this thread's device, which may be another
        code = cudart.cudaHostRegister(address, pages, 0)
    if int(code):
        # The error stays in this thread, and torch would report it for the next kernel: launch one now.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.float32, device=device)
        raise TieredError(
            f"CUDA does not pin the {nbytes} bytes ({format_size(nbytes)}) of the DRAM tier: cudaHostRegister gives error "
            f"{int(code)} ({cudart.cudaGetErrorString(code)}); give DRAM less, or raise the limit of locked memory (ulimit -l)"
        )


def _unpin(address: int, device: torch.device) -> None:
    cudart = cuda.cudart()  # type: ignore[no-untyped-call]
    with contextlib.suppress(RuntimeError), cuda.device(device):  # a device that failed pins nothing any more
        cudart.cudaHostUnregister(address)


def _failure(transfer: Transfer, error: Exception, tier: str) -> TransferError:
    kind = WriteError if transfer.direction is Direction.DOWN else ReadError
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    offset = transfer.upper.offset
    return kind(f"the device cannot copy ({reason})", key=transfer.key, tier=tier, path=None, offset=offset, errno=None)
