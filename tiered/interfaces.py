"""The interfaces that parts plug into. Each has a contract suite in ``tests/contracts`` that every implementation runs.

Full is an answer here (0, None, False), never an exception: the engine decides what happens then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tiered.types import Candidate, Completion, Fence, IOCompletion, IORequest, Key, Slot, Transfer, Urgency

if TYPE_CHECKING:
    import torch

__all__ = ["EvictionPolicy", "IOBackend", "Link", "Memory", "Movable", "Planned", "Restorable", "Streams", "Tier"]


@runtime_checkable
class IOBackend(Protocol):
    """Moves bytes between memory and file descriptors. Knows addresses, fds and offsets; never tensors.

    All calls come from one thread (the engine's). The memory of a request belongs to the backend from ``submit`` until
    its completion was handed out by ``reap``, or ``close`` has returned. A request's offset, address and nbytes are
    multiples of ``alignment`` when its fd was opened with O_DIRECT; its tag is a signed 64-bit integer.

    After ``close`` every call but ``close`` raises StoreClosed. In a forked child they raise ForkedStore, and ``close`` touches
    nothing of the parent's.
    """

    @property
    def name(self) -> str:
        """What it is called in statistics and errors."""
        ...

    @property
    def alignment(self) -> int:
        """Smallest alignment in bytes of offset, address and length that this backend can work with."""
        ...

    @property
    def depth(self) -> int:
        """How many requests may be in flight at once."""
        ...

    def submit(self, batch: Sequence[IORequest]) -> int:
        """Take requests from the front of ``batch``; how many were taken. 0 means full: reap first.

        Never blocks for a completion. A request that the kernel refuses outright is taken and completes with its errno.
        """
        ...

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        """Completions, in any order. Waits up to ``timeout`` seconds for ``min_events`` of them; may return fewer or more.

        Interrupted system calls are resumed within the timeout. With nothing in flight it returns [] at once. Short
        transfers are continued by the backend, so a result below the request's length means end of file (or errno).
        """
        ...

    def fileno(self) -> int:
        """An fd that polls readable whenever ``reap(0, 0)`` may have something to return (spurious wake-ups are allowed)."""
        ...

    def close(self) -> None:
        """Wait for everything in flight, then release. Idempotent."""
        ...


@runtime_checkable
class Tier(Protocol):
    """Owns space, moves nothing. All calls are made under the engine's lock."""

    @property
    def name(self) -> str:
        """What leases, statistics and errors call it: "hbm", "dram", "nvme"."""
        ...

    @property
    def capacity(self) -> int:
        """Bytes that can be allocated at most."""
        ...

    def allocate(self, nbytes: int) -> Slot | None:
        """A slot of at least ``nbytes`` (>= 1), or None when there is no contiguous room for it now. Slots never overlap."""
        ...

    def free(self, slot: Slot) -> None:
        """Give a slot back. Giving back what is not allocated is an AssertionError (our bug)."""
        ...


@runtime_checkable
class Restorable(Tier, Protocol):
    """A tier that can be told anew which of its slots are given. A store over one that cannot is condemned when an exception
    strikes a thread within ``allocate`` or ``free``."""

    def restore(self, slots: Iterable[Slot]) -> None:
        """Exactly ``slots`` are given from here on, whatever an ``allocate`` or a ``free`` left half done. AssertionError where
        they overlap or lie outside."""
        ...


@runtime_checkable
class Memory(Tier, Protocol):
    """A tier whose slots tensors can lie in: everything but the disk."""

    @property
    def streams(self) -> Streams | None:
        """What runs on this memory's device; None where work is done when the call that asked for it returns."""
        ...

    def tensor(self, slot: Slot, nbytes: int) -> tuple[torch.Tensor, object]:
        """A uint8 tensor of shape (nbytes,), nbytes >= 1, over the beginning of ``slot``, and its owner.

        The owner is an object that takes an attribute ``claim`` and lives until the last alias of the tensor is gone, views and
        tensors that autograd saved included. It keeps the memory mapped, also after ``close``.
        """
        ...

    def close(self) -> None:
        """Let go of the memory; what still aliases it stays valid. Idempotent."""
        ...


@runtime_checkable
class Movable(Memory, Protocol):
    """A memory in which a slot can be moved, so that holes become one. A part of its own, for not every memory can.

    Only memory without streams: a device moves bytes when its queue comes to it, so fences would have to guard the old place
    and the new one, and each lease wait for them. Here the bytes are moved when ``move`` returns.
    """

    def move(self, slot: Slot, offset: int) -> Slot:
        """The slot's bytes, padding included, in a slot of the same size at ``offset``; ``slot`` is given back.

        The two may overlap. What of the new one is not in ``slot`` must be free, else it is an AssertionError (our bug), and
        nothing has changed. Nothing may look at ``slot``: its tensors would see other bytes.
        """
        ...


@runtime_checkable
class Streams(Protocol):
    """The queues of work of one device. Any thread may call; only ``synchronize`` waits for the device.

    A stream is a value that can be compared and hashed; what it means is its implementation's.
    """

    def current(self) -> object:
        """The stream on which the calling thread computes."""
        ...

    def record(self, stream: object) -> Fence:
        """A fence that passes when all that is queued on ``stream`` now has run."""
        ...

    def wait(self, stream: object, fence: Fence) -> None:
        """What is queued on ``stream`` from now on runs after ``fence`` has passed."""
        ...

    def synchronize(self) -> None:
        """Return when all that was queued on any stream has run: every fence has passed."""
        ...


@runtime_checkable
class Link(Protocol):
    """Moves bytes between two neighbouring tiers; all calls come from the engine's thread."""

    @property
    def src(self) -> str:
        """Name of the upper tier."""
        ...

    @property
    def dst(self) -> str:
        """Name of the lower tier."""
        ...

    def start(self, transfer: Transfer) -> bool:
        """Take a transfer; False means full for what goes this way: poll first. Both slots belong to the link until its
        completion.

        The upper slot is touched only after every fence in ``transfer.after`` has passed.
        """
        ...

    def promote(self, tag: int, urgency: Urgency) -> None:
        """Make a transfer that was taken more urgent, where that still changes something; one that has ended is passed over."""
        ...

    def poll(self, timeout: float) -> list[Completion]:
        """Advance, and return what has ended, each exactly once, in any order; waits up to ``timeout`` seconds for one.

        A failed transfer ends with ``error`` set, only after no more I/O on its slots is in flight.
        """
        ...

    def fileno(self) -> int:
        """An fd that polls readable whenever ``poll(0)`` may get something done that the last call, which returned nothing, did
        not: poll until it returns nothing, and only then wait."""
        ...

    def close(self) -> None:
        """Wait for everything in flight, then release. Idempotent."""
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Decides who leaves a tier. Pure: no I/O, no clock."""

    def touched(self, key: Key) -> None:
        """``key`` was leased or brought in."""
        ...

    def forgotten(self, key: Key) -> None:
        """``key`` left the tier (evicted, superseded or deleted)."""
        ...

    def victims(self, nbytes: int, among: Mapping[Key, Candidate]) -> list[Key] | None:
        """Keys to evict, in order, that together free at least ``nbytes``; None when all of ``among`` is too little.

        All or nothing. The list is a prefix of the policy's own order: no victim could be left out at its end. ``among`` may be
        large: look keys up in it rather than going through it.
        """
        ...


@runtime_checkable
class Planned(EvictionPolicy, Protocol):
    """An eviction policy that may know who will be gone before it is needed again. A part of its own, for few policies can."""

    @property
    def plans(self) -> bool:
        """Whether ``drops`` means anything."""
        ...

    def drops(self, key: Key) -> bool:
        """Whether ``key``, as it was touched last, leaves before it is needed again. Those leave before all others."""
        ...
