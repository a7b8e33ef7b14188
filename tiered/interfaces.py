"""The interfaces that parts plug into. Each has a contract suite in ``tests/contracts`` that every implementation runs.

A full part answers with a value (0, None, False), never with an exception: the engine decides what to do then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from tiered.types import Candidate, Completion, Fence, IOCompletion, IORequest, Key, Slot, Transfer, Urgency

if TYPE_CHECKING:
    import torch

__all__ = [
    "EvictionPolicy",
    "IOBackend",
    "Link",
    "Memory",
    "Movable",
    "NativeBackend",
    "NativeRing",
    "Planned",
    "Restorable",
    "Returnable",
    "Streams",
    "Tier",
]


@runtime_checkable
class IOBackend(Protocol):
    """A queue of reads and writes between memory and file descriptors. It knows addresses, fds and offsets, and no tensors.

    All calls come from one thread (the engine's). The memory of a request belongs to the backend from ``submit`` until ``reap``
    has returned its completion, or ``close`` has returned. A request's offset, address and nbytes are multiples of
    ``alignment`` when its fd was opened with O_DIRECT; its tag is a signed 64-bit integer.

    After ``close`` every call but ``close`` raises StoreClosed. In a forked child they raise ForkedStore, and ``close`` leaves
    everything of the parent's alone.
    """

    @property
    def name(self) -> str:
        """Name in statistics and errors."""
        ...

    @property
    def alignment(self) -> int:
        """Smallest alignment, in bytes, of offset, address and length that this backend can work with."""
        ...

    @property
    def depth(self) -> int:
        """Most requests that may be in flight at once."""
        ...

    def submit(self, batch: Sequence[IORequest]) -> int:
        """Take requests from the front of ``batch`` and return how many were taken. 0 means full: reap first.

        Never blocks for a completion. A request that the kernel refuses outright is taken and completes with its errno.
        """
        ...

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        """Return completions, in any order. Waits up to ``timeout`` seconds for ``min_events`` of them; may return fewer or
        more.

        Interrupted system calls are resumed within the timeout. With nothing in flight it returns [] at once. Short transfers
        are continued by the backend, so a result below the request's length means end of file (or errno).
        """
        ...

    def fileno(self) -> int:
        """Return an fd that polls readable whenever ``reap(0, 0)`` may have something to return (spurious wake-ups are
        allowed)."""
        ...

    def close(self) -> None:
        """Wait for everything in flight, then release. Idempotent."""
        ...


class NativeRing(NamedTuple):
    """What C code needs of a ring, as ``disk_ring`` in libaio_ext/disk_link.cdef.h has it: the ring's address, and those of its
    functions; ``now`` 0 is the system's clock. ``failure`` returns the error to raise for a negative answer."""

    ring: int
    submit: int
    reap: int
    now: int
    failure: Callable[[int], Exception]


@runtime_checkable
class NativeBackend(IOBackend, Protocol):
    """A backend whose ring C code may drive. An interface of its own, because few can."""

    @property
    def native(self) -> NativeRing:
        """The ring. Valid until ``close``."""
        ...


@runtime_checkable
class Tier(Protocol):
    """The owner of a space from which slots are allocated; it moves no bytes. All calls are made under the engine's lock."""

    @property
    def name(self) -> str:
        """Name in leases, statistics and errors: "hbm", "dram", "nvme"."""
        ...

    @property
    def capacity(self) -> int:
        """Most bytes that can be allocated."""
        ...

    def allocate(self, nbytes: int) -> Slot | None:
        """Return a slot of at least ``nbytes`` (>= 1), or None when no contiguous range is free now. Slots never overlap."""
        ...

    def free(self, slot: Slot) -> None:
        """Give a slot back. Giving back what is not allocated is an internal error: AssertionError."""
        ...


@runtime_checkable
class Restorable(Tier, Protocol):
    """A tier whose set of allocated slots can be set anew. Without it, a store has to be reopened after an exception struck a
    thread within ``allocate`` or ``free``."""

    def restore(self, slots: Iterable[Slot]) -> None:
        """Set the allocated slots to exactly ``slots``, whatever an ``allocate`` or a ``free`` left half done. AssertionError
        where they overlap or lie outside."""
        ...


@runtime_checkable
class Memory(Tier, Protocol):
    """A tier whose slots tensors can lie in: every tier but the disk."""

    @property
    def streams(self) -> Streams | None:
        """The streams of this memory's device; None where work is done when the call that asked for it returns."""
        ...

    @property
    def slots(self) -> Sequence[Slot]:
        """The allocated slots, by offset."""
        ...

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        """Return a uint8 tensor of shape (nbytes,), nbytes >= 1, over the beginning of ``slot``, and its owner.

        The owner is an object that takes an attribute ``claim`` and lives until the last alias of the tensor is gone, views and
        tensors that autograd saved included. It keeps the memory mapped, also after ``close``.
        """
        ...

    def close(self) -> None:
        """Release the memory; tensors that still alias it stay valid. Idempotent."""
        ...


@runtime_checkable
class Returnable(Memory, Protocol):
    """A memory whose free ranges can be given back to the system. An interface of its own, because not every memory can."""

    def give_back(self) -> int:
        """Give the memory of free ranges back; return how many bytes. It comes again at the next touch."""
        ...


@runtime_checkable
class Movable(Memory, Protocol):
    """A memory whose slots can be moved, so that several holes become one. An interface of its own, because not every memory
    can.

    Only memory without streams is: a device moves bytes when its queue comes to the copy, so fences would have to guard the old
    range and the new one, and each lease would wait for them. Here the bytes are moved when ``move`` returns.
    """

    def move(self, slot: Slot, offset: int) -> Slot:
        """Move a slot's bytes, padding included, to ``offset`` and return the slot there, of the same size; ``slot`` is given
        back.

        The two may overlap. The part of the new slot that is not in ``slot`` must be free; else an AssertionError is raised,
        and nothing has changed. Nothing may alias ``slot``: its tensors would see other bytes.
        """
        ...


@runtime_checkable
class Streams(Protocol):
    """The queues of work of one device. Any thread may call; only ``synchronize`` waits for the device.

    A stream is a value that can be compared and hashed; what it stands for is up to the implementation.
    """

    def current(self) -> object:
        """Return the stream on which the calling thread computes."""
        ...

    def record(self, stream: object) -> Fence:
        """Return a fence that passes when all work that is queued on ``stream`` now has run."""
        ...

    def wait(self, stream: object, fence: Fence) -> None:
        """Make the work that is queued on ``stream`` from now on run after ``fence`` has passed."""
        ...

    def synchronize(self) -> None:
        """Block until all work that was queued on any stream has run: every fence has passed."""
        ...


@runtime_checkable
class Link(Protocol):
    """A mover of bytes between two neighbouring tiers. All calls come from the engine's thread."""

    @property
    def src(self) -> str:
        """Name of the upper tier."""
        ...

    @property
    def dst(self) -> str:
        """Name of the lower tier."""
        ...

    def start(self, transfer: Transfer) -> bool:
        """Take a transfer; return False when the link is full in that direction: poll first. Both slots belong to the link
        until the transfer completes.

        The upper slot is touched only after every fence in ``transfer.after`` has passed.
        """
        ...

    def promote(self, tag: int, urgency: Urgency) -> None:
        """Raise the urgency of a transfer that was taken, where that still changes its order. Ignores one that has ended."""
        ...

    def poll(self, timeout: float) -> list[Completion]:
        """Advance the transfers and return the completions, each exactly once, in any order; wait up to ``timeout`` seconds for
        one.

        A failed transfer completes with ``error`` set, only after no more I/O on its slots is in flight.
        """
        ...

    def fileno(self) -> int:
        """Return an fd that polls readable whenever ``poll(0)`` may get something done that the last call, which returned
        nothing, did not: poll until it returns nothing, and only then wait."""
        ...

    def close(self) -> None:
        """Wait for everything in flight, then release. Idempotent."""
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """The order in which copies leave a tier. Pure: no I/O, no clock."""

    def touched(self, key: Key) -> None:
        """Record that ``key`` was leased or brought in."""
        ...

    def forgotten(self, key: Key) -> None:
        """Record that ``key`` left the tier (evicted, superseded or deleted)."""
        ...

    def victims(self, among: Mapping[Key, Candidate]) -> Iterator[Key]:
        """Yield the keys of ``among``, each once, in the order in which they leave.

        Whoever asks takes as many as it needs, and evicts none before it has stopped asking. ``among`` may be large: look keys
        up in it rather than iterating over it.
        """
        ...


@runtime_checkable
class Planned(EvictionPolicy, Protocol):
    """An eviction policy that may know which copies leave before they are needed again. An interface of its own, because few
    do."""

    @property
    def plans(self) -> bool:
        """Whether ``drops`` has a meaning."""
        ...

    def drops(self, key: Key) -> bool:
        """Return whether ``key``, as it was touched last, leaves before it is needed again. Such copies leave before all
        others."""
        ...
