"""``SmallTensors``: many small tensors by name, as a mapping, in a store."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar, overload

import torch

from tiered.errors import KeyNotFound, MisuseError, TieredError, expect_type, from_here, shortened
from tiered.small.names import (
    HEAD_BYTES,
    LONGEST_KEY,
    MOST_DIMENSIONS,
    NamesRecord,
    PageHead,
    names_key,
    number_after,
    open_key,
    page_key,
    page_of,
    record_key,
    small_owner,
    spec_of,
)
from tiered.small.pages import BATCH, HOST, Known, Pages, PageStore, Prepared
from tiered.tensors.mapping import MISSING, Default, Pairs, TensorMapping, as_stored, pairs_of
from tiered.tensors.specs import PLAIN, copied, flat, listed, refuse_keys, refuse_name, refuse_unstorable
from tiered.types import Key, TensorSpec, parse_size

__all__ = ["SmallTensors", "open_small"]

PAGE = 64 << 10
"""Bytes of a page: a tensor that is not in memory costs the transfer of its page."""
PAGE_SHARE = 16
"""A page takes at most such a part of the pool."""
LARGEST_SHARE = 8
"""A page that a caller asks for takes at most such a part of the pool: a call may need some of them."""
BATCH_BYTES = 32 << 20
"""Bytes of tensors that ``update`` puts together, at most."""

Answer = TypeVar("Answer")


class SmallTensors(TensorMapping):
    """Many small tensors by name, in pages of a store: ``TieredStore.small`` makes and opens them.

    A mapping like the store itself, without leases: tensors are copied in and out. Each of up to some KiB costs a fraction of
    what a tensor of the store costs in memory, on the disk, and in each commit. A tensor that is put goes to the open page,
    which moves away when it is full; its former place is empty then, and pages that are more than half empty are merged.
    ``put`` and ``delete`` are atomic: an exception of a signal handler leaves the tensor as it was, or changed. Calls of
    several threads take turns.
    """

    def __init__(self, store: PageStore, name: str, record: NamesRecord, budget: int) -> None:
        expect_type(record, NamesRecord, "store.small makes small tensors; their constructor is given a record")
        self.name = name
        """The name; keys of the store's tensors begin with it."""
        self._record = record_key(name)
        self._pages = Pages(store, name, record.page, budget)
        self._lock = threading.RLock()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, which moves whole."""
        return self._pages.page

    def _do(self, work: Callable[[Known], Answer], *, changes: bool = False) -> Answer:
        """Call ``work`` with what is known, in turn with other threads."""
        _ = self._record in self._pages.store  # raises in a forked child, where another thread may have had the lock
        with self._lock:
            found = self._pages.steadily(work)
            if changes:
                self._pages.tidy()
        return found

    # -- reading -----------------------------------------------------------------------------------------------------------

    @overload
    def get(self, key: Key) -> torch.Tensor: ...
    @overload
    def get(self, key: Key, default: Default) -> torch.Tensor | Default: ...
    @from_here
    def get(self, key: Key, default: Any = MISSING) -> Any:
        """Return a contiguous copy of ``key`` on the CPU, or ``default``, where one is given and there is no such tensor.

        Raises KeyNotFound without a default, and what ``TieredStore.lease`` raises.
        """
        refuse_keys([key])
        pages = self._pages

        def copy(known: Known) -> Any:
            if default is MISSING or key in known.names.where:
                return pages.copies(known, [key])[0]
            pages.refuse_stale(known.head)
            return default

        return self._do(copy)

    @from_here
    def get_many(self, keys: Iterable[Key]) -> list[torch.Tensor]:
        """Return copies as ``get`` does, in the order of ``keys``, which may have a key more than once. Pages are leased
        together, a quarter of the pool at a time. Raises as ``get``."""
        wanted = listed(keys)
        refuse_keys(wanted)
        return self._do(lambda known: self._pages.copies(known, wanted))

    @from_here
    def stack(self, keys: Iterable[Key]) -> torch.Tensor:
        """Return tensors of one shape and type as one, of shape ``(len(keys), *shape)``: a batch. Raises as ``get_many``, and
        MisuseError where shapes or types differ, or there are no keys."""
        wanted = listed(keys)
        refuse_keys(wanted)
        if not wanted:
            raise MisuseError("no keys: the shape of a batch of nothing is not known")
        return self._do(lambda known: self._pages.stacked(known, wanted))

    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]:
        """Return an iterator over copies of ``keys``, in their order, of which it reads so many at a time as lie in a quarter
        of the pool. Raises as ``get``, when it comes to the key."""
        wanted = listed(keys)
        refuse_keys(wanted)
        at = 0

        def some(known: Known) -> list[torch.Tensor]:
            return self._pages.some(known, wanted, at)

        while at < len(wanted):
            found = self._do(some)
            at += len(found)
            found.reverse()
            while found:
                yield found.pop()

    @from_here
    def prefetch(self, keys: Sequence[Key]) -> None:
        """Fetch the pages of ``keys`` to DRAM, when there is room and bandwidth. A hint, as ``TieredStore.prefetch`` takes:
        never waits for a page, and an unknown key is not an error."""
        wanted = listed(keys)
        refuse_keys(wanted)

        def pages(known: Known) -> list[Key]:
            places = [known.names.where.get(key) for key in wanted]
            numbers = dict.fromkeys(page_of(where) for where in places if where is not None)
            return [self._pages.key_of(known.head, page) for page in numbers]

        self._pages.store.prefetch(self._do(pages), tier=HOST)

    @from_here
    def spec(self, key: Key) -> TensorSpec:
        """Return the shape and element type of ``key``; reads no page. Raises KeyNotFound."""
        refuse_keys([key])
        return self._looked(lambda known: known.names.specs[spec_of(self._pages.where(known, key))])

    def __contains__(self, key: object) -> bool:
        """Return whether there is a tensor of that name."""
        return isinstance(key, str) and self._looked(lambda known: key in known.names.where)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys as of now, in no particular order."""
        return iter(self._looked(lambda known: list(known.names.where)))

    def __len__(self) -> int:
        """Return the number of tensors."""
        return self._looked(lambda known: len(known.names.where))

    def __repr__(self) -> str:
        try:
            count = f"{len(self)} tensors"
        except TieredError:
            count = "closed or dropped,"
        return f"<SmallTensors {self.name!r}: {count} in pages of {self._pages.page} bytes, in {self._pages.store}>"

    @from_here
    def _looked(self, look: Callable[[Known], Answer]) -> Answer:
        """Return what ``look`` says of names that are as those in the store."""

        def work(known: Known) -> Answer:
            self._pages.refuse_stale(known.head)
            return look(known)

        return self._do(work)

    # -- changing ----------------------------------------------------------------------------------------------------------

    @from_here
    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Store a copy of ``tensor`` (any strided dtype, shape, device) as ``key``, replacing the tensor of that name.

        Raises MisuseError for a key of more than 1,024 bytes, a tensor without dense contents or with more than 64 dimensions,
        and what ``TieredStore.put`` raises.
        """
        self._put([_prepared(key, tensor)])

    @from_here
    def update(self, tensors: Pairs = (), /, **more: torch.Tensor) -> None:
        """Put all tensors of a mapping, or of pairs, under their names. Up to 1,024 of them, or 32 MiB, are copied before they
        are put: after an exception some are stored. Raises as ``put``."""
        batch: list[Prepared] = []
        nbytes = 0
        for key, value in pairs_of(tensors, more):
            # A copy, because whoever makes the pairs may use one tensor for all of them.
            one = _prepared(key, as_stored(key, value), a_copy=True)
            batch.append(one)
            nbytes += one.spec.nbytes
            if len(batch) == BATCH or nbytes > BATCH_BYTES:
                self._put(batch)
                batch, nbytes = [], 0
        self._put(batch)

    def _put(self, batch: Sequence[Prepared]) -> None:
        _ = self._record in self._pages.store
        with self._lock:
            self._pages.put(batch)
            self._pages.tidy()

    @from_here
    def delete(self, key: Key) -> None:
        """Delete the tensor ``key``; its place in the page is empty then. Raises KeyNotFound, and as ``put``."""
        refuse_keys([key])
        self._do(lambda known: self._pages.delete(known, key), changes=True)

    @from_here
    def clear(self) -> None:
        """Delete all of these tensors, by one change of the open page: all are gone, or none. More can be put afterwards.
        Raises as ``put``."""
        self._do(self._pages.clear, changes=True)

    def _any_key(self) -> Key | None:
        """Return the key that was put last; None where there is none."""
        return self._looked(lambda known: next(reversed(known.names.where), None))

    @from_here
    def drop(self) -> None:
        """Delete all of these tensors, their pages and their names from the store; afterwards reading or changing one raises
        KeyNotFound. A call that was cut off is completed by another one. Raises as ``TieredStore.delete``."""
        store = self._pages.store
        with self._lock:
            for key in (open_key(self.name), *self._pages.ours(), self._record):
                if key in store:
                    store.delete(key, owner=self._pages.owner)


@lru_cache(4096)
def _spec(dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    """Return one object for all tensors of a shape and type."""
    return TensorSpec(str(dtype).removeprefix("torch."), tuple(shape), dtype.itemsize)


def _prepared(key: Key, tensor: torch.Tensor, *, a_copy: bool = False) -> Prepared:
    """Return ``tensor`` as it is put. ``a_copy``: in memory of its own, otherwise in that of the caller where that is
    possible."""
    refuse_name(key)
    refuse_unstorable(key, tensor)
    encoded = key.encode()
    if len(encoded) > LONGEST_KEY:
        raise MisuseError(f"the key {shortened(repr(key))} has {len(encoded)} bytes; small tensors have keys of {LONGEST_KEY}")
    if tensor.dim() > MOST_DIMENSIONS:
        raise MisuseError(f"{key!r} has {tensor.dim()} dimensions; small tensors have at most {MOST_DIMENSIONS}")
    spec = _spec(tensor.dtype, tensor.shape)
    plain = type(tensor) in PLAIN  # of a subclass, memory is not where it says
    if plain and not a_copy and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return Prepared(key, encoded, spec, tensor)
    source = tensor.detach().resolve_conj().resolve_neg()
    if not plain or (a_copy and source.data_ptr() == tensor.data_ptr()):
        return Prepared(key, encoded, spec, copied(source, queued=False))
    return Prepared(key, encoded, spec, source.to("cpu").contiguous())


_MAKING = threading.Lock()
"""Of two threads that make the same small tensors, one makes them."""


def open_small(store: PageStore, name: str, page: int | str | None, budget: int, *, may_make: bool) -> SmallTensors:
    """Open small tensors ``name`` of ``store``, or make them where ``may_make``; ``budget``: bytes of the pool in host
    memory."""
    refuse_name(name)
    if not name:
        raise MisuseError("small tensors have a name that is not empty")
    wanted = None if page is None else _page(name, page, budget)
    key, opened = record_key(name), open_key(name)
    with _MAKING:
        if key in store and (opened in store or not may_make):
            if store.owner_of(key) != small_owner(name):
                raise MisuseError(
                    f"tensor {key!r} belongs to {store.owner_of(key) or 'the user'}, and is no record of small tensors: give "
                    "another name"
                )
            kept = store.get(key)
            record = NamesRecord.decoded(name, flat(kept).numpy().tobytes())
            if wanted is not None and wanted != record:
                raise MisuseError(
                    f"small tensors {name!r} exist and have pages of {record.page} bytes, not {wanted.page}: leave page= out"
                )
            return SmallTensors(store, name, record, budget)
        if not may_make:
            raise KeyNotFound(f"there are no small tensors {name!r} in {store}, which is open for reading")
        if key not in store:
            _refuse_others(store, name)
        record = NamesRecord.of(min(PAGE, budget // PAGE_SHARE)) if wanted is None else wanted
        first = torch.zeros(record.page, dtype=torch.uint8, device="cpu")
        head = PageHead(stamp=random.SystemRandom().getrandbits(62), page=0, next_page=1)
        ctypes.memmove(first.data_ptr(), ctypes.addressof(head), HEAD_BYTES)
        store.put(key, torch.frombuffer(bytearray(record.encoded()), dtype=torch.uint8), owner=small_owner(name))
        store.put(opened, first, owner=small_owner(name))  # last: without it, they are made again
        return SmallTensors(store, name, record, budget)


def _page(name: str, page: int | str, budget: int) -> NamesRecord:
    """Return the record of pages of so many bytes, as a caller gives them."""
    wanted = NamesRecord.of(parse_size(page, "page"))
    if wanted.page > max(budget // LARGEST_SHARE, NamesRecord.of(0).page):
        raise MisuseError(
            f"small tensors {name!r}: pages of {wanted.page:,} bytes are too large for a pool of {budget:,} bytes, of which a "
            "page takes an eighth at most: give a smaller page="
        )
    return wanted


def _refuse_others(store: PageStore, name: str) -> None:
    """Raise MisuseError where tensors of the store have keys that small tensors of this name would have."""
    prefixes = (page_key(name, 0)[:-1], names_key(name, 0)[:-1])
    for key in store:
        if key == open_key(name) or any(number_after(prefix, key) is not None for prefix in prefixes):
            raise MisuseError(
                f"{store} has {shortened(repr(key))}, which is of no small tensors: give these another name than {name!r}"
            )
