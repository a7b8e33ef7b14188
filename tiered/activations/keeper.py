"""Keep what autograd saves for backward: the newest in memory, the rest in a store.

The unit is the memory (torch: storage) that saved tensors show, as bytes: tensors that are saved twice, and views of one
another, are one *saved memory*. A ``SavedTensor`` is what autograd gets instead of a tensor; it refers to its saved memory,
whose tensor in the store is deleted some time after the last of these is gone.

Saved memory that something else uses as well (a parameter, a buffer, a batch of the caller, a tensor that a cast keeps) stays
where it is: to write it would free nothing. It is looked at again later.

A thread of the keeper writes memory of the CPU, and deletes; forward waits for it only where more than ``keep`` bytes are
alone in memory. The thread ends when nothing is saved any more. On another device the caller's thread writes, on its stream.
"""

from __future__ import annotations

import heapq
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tiered import KeyNotFound, MisuseError, StoreClosed, TieredStore
from tiered.activations.aliases import has_aliases

__all__ = ["Keeper", "SavedTensor"]

ALIGNMENT = 64
"""Bytes: memory comes back at the same distance from a multiple of this, so that kernels take the same path."""
PIECES = 16
"""A tensor of the store has at most this fraction of the memory budget."""
AHEAD = 4
"""What backward needs next is prefetched up to this fraction of the memory budget."""
LOOKED_AT = 16
"""Of memory that something else used, so many are looked at again whenever a tensor is saved."""


@contextmanager
def _plain() -> Iterator[None]:
    """Have functions of torch do what they say: record nothing, and be recorded, or redirected, by nobody."""
    with torch.no_grad():
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                yield
        else:
            yield


class _Slot:
    """What is known of one saved memory, in the store or not: its bytes ``low`` to ``high`` are, or will be, in the store under
    ``keys``. ``counted``: among the bytes that are in memory for the sake of backward alone."""

    __slots__ = (
        *("counted", "device", "high", "identity", "keys", "low", "nbytes", "number", "phase", "sequence", "store"),
        *("stored", "writing"),
    )

    def __init__(self, store: TieredStore, storage: torch.UntypedStorage, sequence: int, number: int) -> None:
        self.store = store  # which is open as long as a graph needs it
        self.sequence, self.number, self.identity = sequence, number, storage._cdata
        self.nbytes, self.device = storage.nbytes(), storage.device
        self.phase = storage.data_ptr() % ALIGNMENT
        if self.phase % 16:  # the size of the largest element: it would not be aligned itself
            self.phase = 0
        self.low, self.high = self.nbytes, 0
        self.keys: list[str] = []
        self.counted = self.stored = self.writing = False


class SavedMemory:
    """Memory of a tensor that was saved. ``bytes_here``: it, or its bytes from ``begin`` on, where they are in memory."""

    __slots__ = ("__weakref__", "begin", "bytes_here", "slot")

    def __init__(self, slot: _Slot, bytes_here: torch.Tensor) -> None:
        self.slot, self.begin = slot, 0
        self.bytes_here: torch.Tensor | None = bytes_here


class _Trace(weakref.ref[SavedMemory]):
    """Weak reference to a saved memory, and what outlives it. Its callback is of C, where no signal handler can strike."""

    __slots__ = ("slot",)
    slot: _Slot


class SavedTensor:
    """What autograd keeps instead of a tensor.

    ``source`` is the saved memory, or the tensor itself where that stays in memory. ``_counter`` has the version counter of the
    tensor, which each write to it advances, and no memory.
    """

    __slots__ = ("_counter", "_version", "conj", "dtype", "keeper", "neg", "offset", "size", "source", "stride")

    def __init__(self, keeper: Keeper, tensor: torch.Tensor, source: SavedMemory | None) -> None:
        self.keeper, self._counter, self._version = keeper, tensor.detach(), tensor._version
        self.source: SavedMemory | torch.Tensor = self._counter if source is None else source
        if source is not None:
            self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset() * tensor.itemsize
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()

    def refuse_written(self) -> None:
        """Raise RuntimeError, as torch does, where the tensor was written to since it was saved."""
        if self._counter._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.dtype} {list(self.size)}] is at version {self._counter._version}; expected version {self._version} "
                "instead. Hint: torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute its gradient"
            )

    def shown(self, memory: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the tensor; ``memory`` (uint8) has the bytes from ``begin`` on."""
        at = memory.storage_offset() + self.offset - begin
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        made.set_(memory.untyped_storage(), at // self.dtype.itemsize, self.size, self.stride)
        made = torch._conj(made) if self.conj else made
        return torch._neg_view(made) if self.neg else made


@dataclass
class Counters:
    """Since the keeper was made, in bytes and seconds. ``saved``: of memory that was saved. ``offloaded`` was written to the
    store, ``restored`` came back, ``ready`` of that without waiting for the disk. ``forward_waited``, ``backward_waited``: for
    room in memory, and for what was needed."""

    tensors: int = 0
    saved: int = 0
    offloaded: int = 0
    restored: int = 0
    ready: int = 0
    forward_waited: float = 0.0
    backward_waited: float = 0.0
    largest_held: int = 0

    def copy(self) -> Counters:
        return replace(self)


@dataclass
class _Books:
    """Saved memories by what happened to them."""

    known: dict[int, weakref.ref[SavedMemory]] = field(default_factory=dict)  # by address of the storage's object
    waiting: deque[weakref.ref[SavedMemory]] = field(default_factory=deque)  # to be written, the oldest first
    elsewhere: deque[weakref.ref[SavedMemory]] = field(default_factory=deque)  # which something else uses
    restored: deque[weakref.ref[SavedMemory]] = field(default_factory=deque)  # in memory and in the store
    slots: dict[int, _Slot] = field(default_factory=dict)  # by sequence
    traces: set[_Trace] = field(default_factory=set)


class Keeper:
    """Keep what autograd saves: up to ``keep`` bytes that nothing else uses in memory, the rest in ``store`` under
    ``PREFIX/NUMBER``. Memory of fewer than ``least`` bytes stays.

    Keys below the prefix that are there already, an earlier process left, and are deleted. May be used by several threads.
    """

    def __init__(self, store: TieredStore, prefix: str, keep: int, least: int) -> None:
        self._store, self._prefix = weakref.ref(store), prefix
        self.keep, self.least = keep, least
        self.counters = Counters()
        self._state = threading.Condition(threading.RLock())
        self._restoring = threading.RLock()
        self._books = _Books()
        self._free: list[int] = []
        self._numbers = self._sequence = self._held = 0
        self._inbox: SimpleQueue[_Trace | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._nothing_to_write = True
        self._writers = 0
        self._failure: BaseException | None = None
        self._in_thread = store.device.type == "cpu"
        budget = store.statistics().tier("dram").capacity
        self._piece = max(4096, budget // PIECES // 4096 * 4096)
        self._ahead, self._announced = budget // AHEAD, -1
        for key in [key for key in store if key.startswith(f"{prefix}/")]:
            store.delete(key)

    # -- forward -----------------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to keep instead of ``tensor``: itself where it is of no ordinary kind.

        Raises what the store raised as something older was written.
        """
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_inference():
            return tensor
        if tensor.is_quantized or tensor.is_nested or tensor.is_meta or torch._C._are_functorch_transforms_active():
            return tensor
        with _plain():
            storage = tensor.untyped_storage()
            if (
                isinstance(tensor, nn.Parameter)
                or isinstance(tensor._base, nn.Parameter)
                or not tensor.numel()
                or storage.nbytes() < self.least
            ):
                return SavedTensor(self, tensor, None)
            with self._state:
                self._sweep()
                saved = SavedTensor(self, tensor, self._memory_of(tensor, storage))
            self._make_room()
        return saved

    def _memory_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> SavedMemory:
        reference = self._books.known.get(storage._cdata)
        found = None if reference is None else reference()
        if found is None or found.slot.writing or found.bytes_here is None:
            found = self._new(storage)
        begin, end = _span(tensor)
        slot = found.slot
        slot.low = min(slot.low, begin // ALIGNMENT * ALIGNMENT)
        slot.high = max(slot.high, min(slot.nbytes, -(-end // ALIGNMENT) * ALIGNMENT))
        return found

    def _new(self, storage: torch.UntypedStorage) -> SavedMemory:
        number = heapq.heappop(self._free) if self._free else self._numbers
        self._numbers = max(self._numbers, number + 1)
        store = self._store()
        if store is None:
            raise MisuseError("the store of these activations is gone: keep a reference to it, or use it in a with block")
        slot = _Slot(store, storage, self._sequence, number)
        self._sequence += 1
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        made = SavedMemory(slot, whole)
        trace = _Trace(made, self._inbox.put)
        trace.slot = slot
        self._books.traces.add(trace)
        self._books.slots[slot.sequence] = slot
        self._books.known[storage._cdata] = trace
        self._books.waiting.append(trace)
        self._count(slot, True)
        self.counters.tensors += 1
        self.counters.saved += slot.nbytes
        return made

    def _count(self, slot: _Slot, counted: bool) -> None:
        if slot.counted != counted:
            slot.counted = counted
            self._held += slot.nbytes if counted else -slot.nbytes
            self.counters.largest_held = max(self.counters.largest_held, self._held)

    def _make_room(self) -> None:
        """Have the oldest written where there is too much, and wait for that where there is far too much."""
        with self._state:
            self._raise_failure()
            self._look_elsewhere()
            if self._held <= self.keep // 2:
                return
            self._nothing_to_write = False
        if not self._in_thread:
            self._write()
        with self._state:
            self._start()
            self._inbox.put(None)
            began = time.perf_counter()
            while self._held > self.keep and not self._nothing_to_write and self._failure is None:
                self._state.wait()
            self.counters.forward_waited += time.perf_counter() - began
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- writing -----------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        with self._state:
            self._writers += 1
        try:
            while self._write_oldest():
                pass
        finally:
            with self._state:
                self._writers -= 1
                self._state.notify_all()

    def _write_oldest(self) -> bool:
        """Write the oldest memory that nothing else uses, where more than half of ``keep`` is in memory. Return whether there
        was one."""
        with self._state:
            memory = self._oldest()
            if memory is None:
                self._nothing_to_write = True
                self._state.notify_all()
                return False
            slot, whole = memory.slot, memory.bytes_here
            assert whole is not None
            slot.writing = True
            self._books.known.pop(slot.identity, None)
        try:
            for number, part in enumerate(torch.split(whole[slot.low : slot.high], self._piece)):
                slot.keys.append(f"{self._prefix}/{slot.number}" + (f".{number}" if number else ""))
                slot.store.put(slot.keys[-1], part)
                del part
            slot.stored = True
        finally:
            with self._state:
                slot.writing = False
                if slot.stored:
                    memory.bytes_here = whole = None
                    self._count(slot, False)
                    self.counters.offloaded += slot.high - slot.low
                else:
                    self._books.waiting.appendleft(weakref.ref(memory))
                    self._delete(slot)
                self._state.notify_all()
        return True

    def _oldest(self) -> SavedMemory | None:
        books = self._books
        while books.waiting and self._held > self.keep // 2:
            reference = books.waiting.popleft()
            memory = reference()
            if memory is None or memory.bytes_here is None or memory.slot.stored:
                continue
            if not has_aliases(memory.bytes_here):
                return memory
            self._count(memory.slot, False)
            books.elsewhere.append(reference)
        return None

    def _look_elsewhere(self) -> None:
        """Look again at memory that something else used."""
        books = self._books
        for _ in range(min(LOOKED_AT, len(books.elsewhere))):
            reference = books.elsewhere.popleft()
            memory = reference()
            if memory is None or memory.bytes_here is None:
                continue
            if has_aliases(memory.bytes_here):
                books.elsewhere.append(reference)
            else:
                self._count(memory.slot, True)
                books.waiting.appendleft(reference)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tiered-activations", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """Write and delete until nothing is saved any more."""
        with torch.no_grad():
            while True:
                trace = self._inbox.get()
                try:
                    with self._state:
                        if trace is not None:
                            self._dispose(trace)
                        self._sweep()
                    if self._in_thread:
                        self._write()
                except BaseException as error:
                    with self._state:
                        self._failure = error.with_traceback(None)  # which would keep memory
                        self._state.notify_all()
                del trace
                with self._state:
                    if not self._books.traces and self._inbox.empty():
                        self._thread = None
                        return

    # -- the end of saved memory -------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Delete what is gone."""
        while True:
            try:
                trace = self._inbox.get_nowait()
            except Empty:
                return
            if trace is not None:
                self._dispose(trace)

    def _dispose(self, trace: _Trace) -> None:
        if trace not in self._books.traces:
            return
        slot = trace.slot
        try:
            self._delete(slot)
        except BaseException:
            self._inbox.put(trace)
            raise
        self._count(slot, False)
        if self._books.known.get(slot.identity) is trace:
            del self._books.known[slot.identity]
        self._books.traces.discard(trace)
        if self._books.slots.pop(slot.sequence, None) is not None:
            heapq.heappush(self._free, slot.number)

    def _delete(self, slot: _Slot) -> None:
        while slot.keys:
            with suppress(KeyNotFound, StoreClosed):
                slot.store.delete(slot.keys[-1])
            slot.keys.pop()

    @property
    def alive(self) -> int:
        """Return how many saved memories there are, once nothing is being written any more."""
        with self._state:
            while self._writers:
                self._state.wait()
            self._sweep()
            for trace in [trace for trace in self._books.traces if trace() is None]:  # the thread was told of it just now
                self._dispose(trace)
            return len(self._books.traces)

    # -- backward ----------------------------------------------------------------------------------------------------------

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """Return the tensor, which needs no gradient. Raises RuntimeError where it was written to since, what the store raises,
        and MisuseError where the store was rolled back to a commit since."""
        saved.refuse_written()
        source = saved.source
        if isinstance(source, torch.Tensor):
            return source
        with _plain(), self._restoring:
            memory, begin = self._bring(source)
            return saved.shown(memory, begin)

    def _bring(self, memory: SavedMemory) -> tuple[torch.Tensor, int]:
        slot = memory.slot
        self._announce(slot)
        with self._state:
            if memory.bytes_here is not None:
                return memory.bytes_here, memory.begin
        began, tier = time.perf_counter(), "dram" if slot.device.type == "cpu" else None
        ready = len(slot.store.present(slot.keys, tier=tier)) == len(slot.keys)
        nbytes = slot.high - slot.low
        room = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=slot.device)
        room = room[slot.phase : slot.phase + nbytes]
        try:
            for key, part in zip(slot.keys, torch.split(room, self._piece), strict=True):
                with slot.store.lease(key, tier=tier) as stored:
                    part.copy_(stored)
                    del stored
        except KeyNotFound:
            raise MisuseError("this graph was made before the store was rolled back: compute the loss again") from None
        with self._state:
            memory.bytes_here, memory.begin = room, slot.low
            self._count(slot, True)
            self._books.restored.append(weakref.ref(memory))
            self._forget_restored(memory)
            self.counters.restored += nbytes
            self.counters.ready += nbytes if ready else 0
            self.counters.backward_waited += time.perf_counter() - began
        return room, slot.low

    def _forget_restored(self, but: SavedMemory) -> None:
        """Let go of what is in the store as well, where too much is in memory."""
        for _ in range(len(self._books.restored)):
            if self._held <= self.keep:
                return
            reference = self._books.restored.popleft()
            memory = reference()
            if memory is but:
                self._books.restored.append(reference)
            elif memory is not None:
                memory.bytes_here = None
                self._count(memory.slot, False)

    def _announce(self, slot: _Slot) -> None:
        """Have the store fetch what backward needs next: what was saved before ``slot``, the last first."""
        keys: list[str] = []
        with self._state:
            if slot.sequence == self._announced:
                return
            self._announced = slot.sequence
            left = self._ahead
            for before in reversed(self._books.slots.values()):
                if before.sequence > slot.sequence or not before.stored or before.counted:
                    continue
                left -= before.high - before.low
                if left < 0:
                    break
                keys += before.keys
        if keys:
            slot.store.prefetch(keys, tier="dram" if slot.device.type == "cpu" else None)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor that is not empty in its memory, and the one after its last."""
    begin = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + reach + 1) * tensor.itemsize
