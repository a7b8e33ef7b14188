"""Saved activations: what autograd saves in forward for backward waits in a store.

``SavedTensors`` packs and unpacks by the hooks of ``torch.autograd.graph.saved_tensors_hooks``. What is packed becomes a
``_SavedTensor``: a view (dtype, size, strides, place) of a ``_Region``, which is memory that one or several tensors show. A
region goes through three forms, and only forwards:

1. *In memory*: the region refers to the memory that autograd would keep. The newest ``keep`` bytes of regions stay so, because
   backward needs them first; so does what somebody else keeps in memory anyway (a parameter, a buffer, an input).
2. *In the store*: in pieces, each a temporary tensor. Nothing is in torch's memory.
3. *Restored*: copied out of the store. The newest ``keep`` bytes that were restored stay, for other tensors that show them.

A region, and what is in the store of it, ends with the last ``_SavedTensor`` that shows it, whatever ended the graph. Its end
is noticed by weak references, whose callbacks are C methods that append to a deque: they may run in a garbage collection, in
any thread.
"""

from __future__ import annotations

import heapq
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiered.engine.claims import Token
from tiered.errors import ChangedInPlace, KeyNotFound, MisuseError
from tiered.store.store import TieredStore, in_store_memory
from tiered.system import Trimmer
from tiered.telemetry import ActivationStatistics
from tiered.tensors.specs import TEMPORARY
from tiered.types import Access, parse_size

__all__ = [
    "KERNEL_ALIGNMENT",
    "Hooks",
    "Left",
    "SavedTensors",
    "are_offloading",
    "hooks_active",
    "offload_activations",
    "piece_of",
    "pop_hooks",
    "push_hooks",
    "refuse_one_tier",
    "users_of",
]

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs a tensor that is saved for backward, and what unpacks it."""

PIECE = 4 << 20
PIECES, SMALL_POOL, PIECES_OF_SMALL = 16, 8 << 20, 32
"""Bytes of a piece at most, and a 16th of the memory budget, of less than ``SMALL_POOL`` bytes a 32nd: then pieces find room
between tensors that are leased. What a store takes for a piece, beside the transfer, does
not depend on its size."""
KERNEL_ALIGNMENT = 64
"""Bytes: memory comes back at the same distance from a multiple of this, so that kernels take the same path."""
PART = 4
"""Of memory of which tensors show less than one byte in this many, only what they show is kept."""
WIDEST = 16
"""Bytes of the largest element type; memory is restored in a multiple of it."""
REGIONS_AHEAD = 64
"""Regions that are looked at, at most, to fetch what backward needs next."""
LATEST = 256
"""Tensors that autograd saves between two looks at memory that somebody else keeps, at most."""


# -- torch's hooks -----------------------------------------------------------------------------------------------------------


_autograd: Any = torch._C._autograd


class _Pushed(threading.local):
    """Pairs of saved-tensor hooks in force in a thread, where torch (2.6) cannot be asked: whoever pushes a pair, or
    pops one, is listened to.

    The end of a block of ``saved_tensors_hooks`` takes away its own pair, or none where that is gone. After an exception
    torch.utils.checkpoint of that version ends its block when its generator is collected, and would take another pair.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def listen(self) -> None:
        push, pop = _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks

        # Torch's stack and the list of this class change within one call of a C function: a signal handler that raises strikes
        # before both or after both.
        def pushed(pack: Any, unpack: Any) -> None:
            both = partial(push, pack, unpack), partial(self.pairs.append, (pack, unpack))
            deque(map(partial.__call__, both), maxlen=0)

        def popped() -> None:
            both = partial(pop), partial(self.pairs.__delitem__, slice(-1, None))
            try:
                deque(map(partial.__call__, both), maxlen=0)
            except RuntimeError:  # none is in force
                self.pairs.clear()
                raise

        _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks = pushed, popped
        block: Any = torch.autograd.graph.saved_tensors_hooks
        enter, leave = block.__enter__, block.__exit__

        def entered(hooks: Any) -> None:
            enter(hooks)
            hooks._pushed = hooks.pack_hook, hooks.unpack_hook

        def left(hooks: Any, *raised: Any) -> None:
            if hasattr(hooks, "_pushed"):
                _remove_hooks(hooks._pushed)
            else:  # it was entered before tiered was imported
                leave(hooks, *raised)

        block.__enter__, block.__exit__ = entered, left
        run = torch.autograd.graph._engine_run_backward

        def ran(*arguments: Any, **options: Any) -> Any:
            before = list(self.pairs)
            try:
                return run(*arguments, **options)
            finally:  # torch has put back the hooks that were in force; an exception may have left others in the list
                self.pairs[:] = before

        for module in (torch.autograd, torch.autograd.graph):
            module._engine_run_backward = ran  # type: ignore[attr-defined]


_PUSHED = None if hasattr(_autograd, "_top_saved_tensors_default_hooks") else _Pushed()
if _PUSHED is not None:
    _PUSHED.listen()


def hooks_active() -> Any:
    """Return the saved-tensor hooks in force, whoever pushed them (torch.utils.checkpoint, for one); the innermost pair wins.
    """
    if _PUSHED is not None:
        return _PUSHED.pairs[-1] if _PUSHED.pairs else None
    return _autograd._top_saved_tensors_default_hooks(True)


def push_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Put a pair of saved-tensor hooks in force until ``pop_hooks``. The context manager of torch would keep an object for the
    pair, which an exception may lose."""
    _autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_hooks() -> None:
    """Take the innermost pair of saved-tensor hooks out of force."""
    _autograd._pop_saved_tensors_default_hooks()


def _remove_hooks(hooks: Hooks) -> None:
    """Take ``hooks`` out of force in this thread, also from below others: a generator may end its block late."""
    above: list[Hooks] = []
    while (found := hooks_active()) and found != hooks:
        above.append(found)
        pop_hooks()
    if found:
        pop_hooks()
    for pair in reversed(above):
        push_hooks(*pair)


# -- what is packed ----------------------------------------------------------------------------------------------------------


class Left:
    """Tensor that stays where it is, with the check of versions that torch leaves out where there are hooks. ``pack`` may not
    return a tensor itself: one that an operation saves of its own result would keep the graph, in a cycle that nobody finds."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    def tensor(self) -> torch.Tensor:
        """Return the tensor. Raises ChangedInPlace."""
        if self._version is not None and self._tensor._version != self._version:
            raise _changed(self._tensor.dtype, self._tensor.size(), self._tensor._version, self._version)
        return self._tensor


class _SavedTensor:
    """View of a region, as one saved tensor shows it."""

    __slots__ = ("conjugate", "dtype", "negative", "offset", "owner", "region", "size", "stride", "version", "witness")

    def __init__(self, owner: SavedTensors, region: _Region, tensor: torch.Tensor, witness: torch.Tensor) -> None:
        self.owner, self.region, self.witness, self.version = owner, region, witness, tensor._version
        self.dtype, self.size, self.stride, self.offset = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        self.conjugate, self.negative = tensor.is_conj(), tensor.is_neg()

    def shown(self, memory: torch.Tensor, begin: int) -> torch.Tensor:
        """Return this view of ``memory``, whose storage has the region from byte ``begin`` on. It shares the version counter of
        ``memory``."""
        offset = self.offset + (begin - self.region.begin) // self.dtype.itemsize
        if memory.dtype is not self.dtype and memory.dtype is not torch.uint8:  # what showed it first had another type
            found = torch.empty(0, dtype=self.dtype, device=memory.device)
            found.set_(memory.untyped_storage(), offset, self.size, self.stride)
        else:
            typed = memory if memory.dtype is self.dtype else memory.view(self.dtype)
            found = typed.as_strided(self.size, self.stride, offset)
        found = torch._conj(found) if self.conjugate else found
        return torch._neg_view(found) if self.negative else found


class _Region:
    """Bytes ``begin`` to ``begin + nbytes`` of a storage, at one version.

    ``alias``: in memory, a tensor over the storage. ``pieces``: what is in the store. ``restored``: memory with the bytes,
    which begin at ``phase``.
    """

    __slots__ = (
        *("__weakref__", "alias", "begin", "device", "hinted", "nbytes", "phase", "pieces", "place", "restored"),
        *("storage", "stream", "trace", "version", "witness"),
    )

    def __init__(self, tensor: torch.Tensor, witness: torch.Tensor, begin: int, nbytes: int) -> None:
        self.alias: torch.Tensor | None = _physical(tensor.detach())
        self.witness, self.version, self.begin, self.nbytes = witness, tensor._version, begin, nbytes
        self.device, self.stream = tensor.device, _stream(tensor.device)
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        """While this exists, no other storage object has the same address."""
        phase = (tensor.untyped_storage().data_ptr() + begin) % KERNEL_ALIGNMENT
        self.phase = phase if phase % WIDEST == 0 else 0
        self.pieces: Pieces | None = None
        self.restored: torch.Tensor | None = None
        self.hinted = False
        self.place = -1
        self.trace: _RegionTrace

    @property
    def unchanged(self) -> bool:
        return self.witness._version == self.version

    def shows(self, begin: int, end: int) -> bool:
        """Return whether the region has these bytes of the storage."""
        return self.begin <= begin and end <= self.begin + self.nbytes

    def bytes(self) -> torch.Tensor:
        """Return the region in memory as uint8 of one dimension."""
        assert self.alias is not None
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        return flat.set_(self.alias.untyped_storage(), self.begin, (self.nbytes,), (1,))

    def room(self) -> torch.Tensor:
        """Return new memory for the region, uint8, of at least its bytes and at the same distance from a multiple of 64."""
        padded = -(-self.nbytes // WIDEST) * WIDEST
        return torch.empty(self.phase + padded, dtype=torch.uint8, device=self.device)[self.phase :]


class Trace(weakref.ref[Any]):
    """Weak reference to what has temporary tensors, with what has to be put right once that is gone. Its callback is a C
    method, which no signal handler can interrupt. The values are those of something of which nothing is known yet: an
    exception of a signal handler may end it there."""

    label = ""
    number: int | None = None

    def ended(self) -> None:
        """Count without what is gone. May be called twice."""


class FreeNumbers:
    """The numbers that name temporary tensors, by label: the smallest one that is free, so that each step has the same keys."""

    def __init__(self) -> None:
        self.free: dict[str, list[int]] = {}
        self.used: dict[str, int] = {}
        self.traces: dict[int, Trace] = {}  # by identity: one that is gone before it was here cannot be hashed
        self.gone: deque[Trace] = deque()

    def watch(self, trace: Trace) -> None:
        """Notice, from here on, the end of what ``trace``, which was made with ``gone.append``, refers to."""
        self.traces[id(trace)] = trace

    def take(self, trace: Trace, label: str = "") -> int:
        """Return a number that is that of ``trace`` until ``sweep`` finds it gone."""
        free = self.free.setdefault(label, [])
        number = heapq.heappop(free) if free else self.used.get(label, 0)
        self.used[label] = max(self.used.get(label, 0), number + 1)
        trace.label, trace.number = label, number
        return number

    def sweep(self) -> None:
        """Free the numbers of what is gone. Its end is noticed elsewhere, perhaps inside a garbage collection."""
        while self.gone:
            trace = self.gone[0]
            trace.ended()
            if trace.number is not None:
                # A number that an exception loses here is nobody's. That is better than twice somebody's.
                number, trace.number = trace.number, None
                heapq.heappush(self.free[trace.label], number)
            self.traces.pop(id(trace), None)
            self.gone.popleft()
        if self.used and not self.traces:  # also numbers that an exception lost
            self.free.clear()
            self.used.clear()


class Pieces:
    """Bytes that are in the store, in temporary tensors, until the last reference to this object is gone.

    ``contents``: uint8 of one dimension, in pieces of at most ``most`` bytes under ``tiered.saved/BASE``, with ``.0`` and so on
    behind it where there are several. Raises what ``put`` raises.
    """

    def __init__(self, store: TieredStore, base: str, contents: torch.Tensor, most: int) -> None:
        self._store, self._most, self._lifetime = store, most, Token()
        pieces = torch.split(contents, most)
        base = f"{TEMPORARY}{base}"
        self.keys = [base] if len(pieces) == 1 else [f"{base}.{number}" for number in range(len(pieces))]
        for key, piece in zip(self.keys, pieces, strict=True):
            store._put_temporary(key, piece, self._lifetime)

    def copy_into(self, target: torch.Tensor) -> int:
        """Copy all into ``target``, uint8 of one dimension; return the bytes that were in memory already. Raises what ``get``
        raises, and MisuseError where the store went back to a commit since."""
        there = 0
        try:
            for key, part in zip(self.keys, torch.split(target, self._most), strict=True):
                there += part.nbytes if self._store._copy_into(part, key) else 0
        except KeyNotFound as error:
            raise MisuseError(
                "this graph was made before a rollback of the store that had its activations: compute the loss again"
            ) from error
        return there


class _RegionTrace(Trace):
    """Trace of a region: where it is counted, and with how many bytes."""

    owner: Callable[[], SavedTensors | None] = staticmethod(lambda: None)
    address = -1
    """Of the storage, by which the region is found."""
    young = 0
    """Bytes that count as the newest."""
    cached = 0
    """Bytes that count as restored."""
    stored = 0
    """Bytes that are in the store."""

    def ended(self) -> None:
        owner = self.owner()
        if owner is not None:
            owner.region_ended(self)


class _Books(FreeNumbers):
    """Numbers of the regions that one store has, or will have. ``lock`` guards all of the store's ``SavedTensors``: autograd
    unpacks in threads of its own where a graph has several devices."""

    def __init__(self, pool: int) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.trimmer = Trimmer(pool)
        """Gives the system memory back that activations leave free between others: glibc would keep all of it."""

    @staticmethod
    def of(store: TieredStore) -> _Books:
        return store.attached.made(_Books, lambda: _Books(store.statistics().tier("dram").capacity))


# -- the owner ---------------------------------------------------------------------------------------------------------------


def refuse_one_tier(store: TieredStore) -> None:
    """Raise MisuseError for a store that cannot take activations: it has one tier, is open for reading, or closed."""
    if len(store.statistics().tiers) < 2:
        raise MisuseError(
            f"{store} has memory alone, where activations are anyway: open it with a path, or with hbm= and the device "
            "that computes"
        )
    if store.access is Access.READ:
        raise MisuseError(f"{store} is open for reading, and activations would be written: open it without access='read'")


def piece_of(pool: int) -> int:
    """Return the most bytes of a piece of saved memory in a store with ``pool`` bytes of memory."""
    share = PIECES_OF_SMALL if pool < SMALL_POOL else PIECES
    return max(4096, min(PIECE, pool // share) // 4096 * 4096)


class SavedTensors:
    """What autograd saved and ``store`` has, or will have when it is no more among the newest ``keep`` bytes.

    ``min_bytes``: memory of fewer bytes stays where it is. ``pack`` and ``unpack`` are a pair of saved-tensor hooks.

    Raises MisuseError for a store that has one tier, is open for reading, or closed.
    """

    def __init__(self, store: TieredStore, keep: int, min_bytes: int) -> None:
        refuse_one_tier(store)
        self.store, self.keep, self._least = store, keep, max(1, min_bytes)
        pool = min(tier.capacity for tier in store.statistics().tiers[:-1])
        self._piece = piece_of(pool)
        self._window = max(self._piece, pool // 4)
        """Bytes that are fetched ahead of backward."""
        self._devices = {"cpu", "cuda", store.device.type}
        self._books = _Books.of(store)
        self._known: dict[int, list[_RegionTrace]] = {}
        """By the address of a storage object: its regions."""
        self._young: dict[int, _RegionTrace] = {}
        self._cached: dict[int, _RegionTrace] = {}
        self._stored: dict[int, _RegionTrace] = {}
        """The newest regions, those that are restored, and those in the store, by the identity of the trace, oldest first."""
        self._young_bytes = self._cached_bytes = 0
        self.regions = 0
        """Bytes of all regions so far: of what autograd would have kept in memory."""
        self._shared: list[tuple[int, int, int, _RegionTrace]] = []
        """A heap of when to look again whether somebody else keeps a region, an order among equals, and what the wait was."""
        self._order = count()
        self._seen = self._in_store = self._placed = 0
        self._counts = dict.fromkeys(("left", "shared", "offloaded", "restored", "hidden"), 0)
        self._waited = {"forward": 0.0, "backward": 0.0}

    # -- forward -----------------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd is to keep instead of ``tensor``. Raises what the store raises."""
        if not self._is_ours(tensor):
            self._seen += 1
            self._counts["left"] += 1
            if self._shared and self._shared[0][0] <= self._seen:
                self.look_again(self._seen)
            return tensor.detach() if in_store_memory(tensor) else Left(tensor)  # whoever has the lease looks for its memory
        with self._books.lock:
            self._books.sweep()
            self._seen += 1
            witness = _witness(tensor)
            saved = _SavedTensor(self, self._region(tensor, witness), tensor, witness)
            self._let_go()
        return saved

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` may go into the store."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if (tensor.is_leaf and tensor.requires_grad) or tensor.is_inference() or tensor.device.type not in self._devices:
            return False
        try:
            storage = tensor.untyped_storage()
            there = tensor.is_meta or storage.data_ptr() != 0  # a plan's tensors have no address
            return storage.nbytes() >= self._least and there and not in_store_memory(tensor)
        except RuntimeError:  # within a transform there is no memory
            return False

    def _region(self, tensor: torch.Tensor, witness: torch.Tensor) -> _Region:
        """Return the region that ``tensor`` shows; the same for all tensors that show it unchanged."""
        storage = tensor.untyped_storage()
        begin, end = _extent(tensor)
        known = self._known.setdefault(storage._cdata, [])
        for trace in known:
            region: _Region | None = trace()
            if region is not None and region.shows(begin, end) and region.unchanged and region.version == tensor._version:
                self._counts["shared"] += tensor.nbytes
                return region
        whole = storage.nbytes()
        if (end - begin) * PART < whole:
            begin = begin // KERNEL_ALIGNMENT * KERNEL_ALIGNMENT
            end = min(whole, -(-end // KERNEL_ALIGNMENT) * KERNEL_ALIGNMENT)
        else:
            begin, end = 0, whole
        region = _Region(tensor, witness, begin, end - begin)
        trace = region.trace = _RegionTrace(region, self._books.gone.append)
        self._books.watch(trace)
        trace.owner, trace.address, trace.young = weakref.ref(self), storage._cdata, region.nbytes
        known.append(trace)
        self._young[id(trace)] = trace
        self._young_bytes += region.nbytes
        self.regions += region.nbytes
        return region

    def _let_go(self) -> None:
        """Move what is not among the newest any more into the store, but for what somebody else keeps in memory."""
        while self._young and self._young_bytes > self.keep:
            trace = self._young.pop(next(iter(self._young)))
            self._young_bytes -= trace.young
            trace.young = 0
            self._offload(trace, 1)
        self.look_again(self._seen)

    def look_again(self, due: float = math.inf) -> None:
        """Move into the store what somebody else kept in memory when it was looked at, and nobody does now; only what is
        ``due`` to be looked at (everything)."""
        with self._books.lock:
            later = []
            while self._shared and self._shared[0][0] <= due:
                _, _, wait, trace = heapq.heappop(self._shared)
                later.append((trace, wait))
            for trace, wait in later:
                self._offload(trace, min(LATEST, 2 * wait))

    def _offload(self, trace: _RegionTrace, wait: int) -> None:
        """Put a region into the store. Where somebody else keeps its memory, look again when ``wait`` more tensors were saved.
        """
        region = trace()
        if region is None or region.alias is None or not region.unchanged:
            return
        if self._is_shared(region):
            heapq.heappush(self._shared, (self._seen + wait, next(self._order), wait, trace))
            return
        contents = region.bytes()
        _follow_stream(region, contents)
        if region.nbytes < self._least:  # a small part of memory that nobody else keeps
            memory = region.room()
            memory[: region.nbytes].copy_(contents)
            region.restored, region.alias = memory.data, None
            return
        number = self._books.take(trace)
        before = self.store._waited()
        pieces = Pieces(self.store, str(number), contents, self._piece)
        self._waited["forward"] += self.store._waited() - before
        self._placed += 1
        region.place, trace.stored = self._placed, region.nbytes
        self._stored[id(trace)] = trace
        self._counts["offloaded"] += region.nbytes
        self._in_store += region.nbytes
        region.pieces, region.alias = pieces, None
        self._passed(region)

    def _passed(self, region: _Region) -> None:
        """Count the bytes of a region as allocated and freed. On the meta device it has none."""
        if region.device.type != "meta":
            self._books.trimmer.passed(region.nbytes)

    def _is_shared(self, region: _Region) -> bool:
        """Return whether somebody else keeps the memory of a region."""
        assert region.alias is not None
        regions = (trace() for trace in self._known.get(region.trace.address, ()))
        mine = sum(one is not None and one.alias is not None for one in regions)
        return users_of(region.alias)[0] >= mine

    # -- backward ----------------------------------------------------------------------------------------------------------

    def unpack(self, packed: object) -> torch.Tensor:
        """Return the tensor that ``packed`` was made of. Raises ChangedInPlace where torch would raise RuntimeError for it, and
        what the store raises."""
        if isinstance(packed, Left):
            return packed.tensor()
        if isinstance(packed, torch.Tensor):
            return packed
        assert isinstance(packed, _SavedTensor)
        return packed.owner._shown(packed)

    def _shown(self, saved: _SavedTensor) -> torch.Tensor:
        if saved.witness._version != saved.version:
            raise _changed(saved.dtype, saved.size, saved.witness._version, saved.version)
        region = saved.region
        with self._books.lock, torch.inference_mode(False), torch.no_grad():
            self._books.sweep()
            if region.alias is not None:
                self._fetch_ahead(self._placed)
                return saved.shown(region.alias, region.begin)
            return saved.shown(self._restore(region, saved), region.phase)

    def _restore(self, region: _Region, saved: _SavedTensor) -> torch.Tensor:
        """Return memory with the bytes of a region."""
        if region.restored is not None:
            if region.restored._version != 0:
                raise _changed(saved.dtype, saved.size, saved.version + region.restored._version, saved.version)
            if region.stream == _stream(region.device) or region.pieces is None:
                return region.restored
        self._fetch_ahead(region.place)
        memory = region.room()
        target, before = memory.detach()[: region.nbytes], self.store._waited()
        assert region.pieces is not None
        self._counts["hidden"] += region.pieces.copy_into(target)
        self._waited["backward"] += self.store._waited() - before
        self._counts["restored"] += region.nbytes
        region.hinted, region.stream = False, _stream(region.device)
        memory = memory.data  # whose version counter begins at 0
        self._passed(region)  # as many will be freed soon
        self._forget_restored(region.trace)
        region.restored, region.trace.cached = memory, region.nbytes
        self._cached_bytes += region.nbytes
        self._cached[id(region.trace)] = region.trace
        while self._cached and self._cached_bytes > self.keep:
            self._forget_restored(next(iter(self._cached.values())))
        return memory

    def _forget_restored(self, trace: _RegionTrace) -> None:
        """Let go of the memory to which a region was restored; whoever shows it keeps it."""
        self._cached.pop(id(trace), None)
        self._cached_bytes -= trace.cached
        trace.cached = 0
        region = trace()
        if region is not None:
            region.restored = None

    def _fetch_ahead(self, place: int) -> None:
        """Have the store fetch what backward needs next: what was stored at ``place`` and before, the newest first."""
        room, keys, device = self._window, list[str](), torch.device("cpu")
        for trace in islice(reversed(self._stored.values()), REGIONS_AHEAD):
            region = trace()
            if region is None or region.restored is not None or region.place > place:
                continue
            room -= region.nbytes
            if not region.hinted:
                region.hinted = True
                keys += region.pieces.keys if region.pieces is not None else []
                device = region.device
            if room <= 0:
                break
        if keys:
            self.store.fetch_ahead(keys, device)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def region_ended(self, trace: _RegionTrace) -> None:
        """Count without a region that is gone."""
        for books in (self._young, self._cached, self._stored):
            books.pop(id(trace), None)
        self._young_bytes -= trace.young
        self._cached_bytes -= trace.cached
        self._in_store -= trace.stored
        trace.young = trace.cached = trace.stored = 0
        known = [other for other in self._known.get(trace.address, ()) if other is not trace]
        if known:
            self._known[trace.address] = known
        else:
            self._known.pop(trace.address, None)

    def sweep(self) -> None:
        """Count anew, without what is gone."""
        with self._books.lock:
            self._books.sweep()
            self._young_bytes = sum(trace.young for trace in self._young.values())
            self._cached_bytes = sum(trace.cached for trace in self._cached.values())
            self._in_store = sum(trace.stored for trace in self._stored.values())

    def statistics(self) -> ActivationStatistics:
        """Return the counters so far."""
        with self._books.lock:
            self._books.sweep()
            return ActivationStatistics(
                saved=self._seen,
                waited_in_forward=self._waited["forward"],
                waited_in_backward=self._waited["backward"],
                in_memory=self._young_bytes + self._cached_bytes,
                in_store=self._in_store,
                **self._counts,
            )


class offload_activations:  # called as a function, as torch's own context managers are
    """Have what autograd saves in a block wait in ``store`` instead of in memory: ``with tiered.offload_activations(store):``.

    Around the forward of any torch model; backward may run within the block or after it. Results are those of memory, bit for
    bit. ``keep``: the newest bytes of what is saved that stay in memory, because backward needs them first; they are never
    written. ``min_bytes``: smaller memory stays where it is. Both are bytes or "64MiB". Parameters, tensors in the memory of a
    store, tensor subclasses, and what something else keeps in memory are left alone. What is saved twice is stored once, and
    views share what they show. In the store they are tensors named ``tiered.saved/…``, which are in no commit and end with the
    graph, however it ends.

    A tensor that is changed in place after it was saved raises ChangedInPlace in backward, as in memory. Forward raises what
    ``store.put`` raises, backward what ``store.get`` raises, and MisuseError for a graph of before ``store.rollback``.

    Raises MisuseError for what is no store, for one that has memory alone, is open for reading, or closed, and for what is no
    size.
    """

    def __init__(self, store: TieredStore, *, keep: int | str = "64MiB", min_bytes: int | str = "256KiB") -> None:
        if not isinstance(store, TieredStore):
            raise MisuseError(
                f"offload_activations takes the store in which activations wait, not {store!r}: open one, as in "
                "tiered.TieredStore.open('activations/', dram='1GiB')"
            )
        self._saved = SavedTensors(store, parse_size(keep, "keep"), parse_size(min_bytes, "min_bytes"))
        self._hooks: list[Hooks] = []

    def __enter__(self) -> offload_activations:
        hooks = _Switch(self._saved)
        self._hooks.append((hooks.pack, hooks.unpack))
        push_hooks(hooks.pack, hooks.unpack)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        hooks = self._hooks.pop()
        hooks[0].__self__.on = False  # type: ignore[attr-defined]  # where they cannot be removed from here: another thread's
        _remove_hooks(hooks)
        if kind is None:
            self._saved.look_again()
        self._saved.sweep()

    def statistics(self) -> ActivationStatistics:
        """Return what went into the store, came back, and was waited for, since this object was made."""
        return self._saved.statistics()


class _Switch:
    """Pair of hooks of one block, without effect once the block has ended."""

    def __init__(self, saved: SavedTensors) -> None:
        self.saved, self.on = saved, True

    def pack(self, tensor: torch.Tensor) -> object:
        return self.saved.pack(tensor) if self.on else Left(tensor)

    def unpack(self, packed: object) -> torch.Tensor:
        return self.saved.unpack(packed)


def are_offloading(hooks: Hooks | None) -> bool:
    """Return whether ``hooks`` are those of an ``offload_activations``."""
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), _Switch)


# -- tensors -----------------------------------------------------------------------------------------------------------------


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that has the version counter of ``tensor``."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as its memory has it: neither conjugated nor negated."""
    tensor = torch._conj(tensor) if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that ``tensor`` shows: where they begin, and end."""
    begin = int(tensor.storage_offset())
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + (reach if tensor.numel() else 0)) * tensor.itemsize


def users_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many tensors are on the memory of ``tensor`` beside it, and how many references to that memory as a storage
    Python has."""
    (tensors, objects), alone = _counted(tensor), _ALONE
    return tensors - alone[0], objects - alone[1]


def _counted(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _counted(torch.empty(1, dtype=torch.uint8, device="cpu"))


def _stream(device: torch.device) -> Any:
    """Return the stream on which this thread computes on ``device``; None where there are none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _follow_stream(region: _Region, contents: torch.Tensor) -> None:
    """Have this thread's stream wait for the one on which the region was made, and keep its memory until both have used it."""
    now = _stream(region.device)
    if now is not None and now != region.stream:
        now.wait_stream(region.stream)
        contents.record_stream(now)


def _changed(dtype: torch.dtype, size: torch.Size, version: int, expected: int) -> ChangedInPlace:
    return ChangedInPlace(
        "one of the variables needed for gradient computation has been modified by an inplace operation: it is "
        f"{dtype} {list(size)}, at version {version}; expected version {expected} instead. Write the operation that changed it "
        "so that it returns a new tensor, or clone the tensor before it"
    )
