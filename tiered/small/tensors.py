"""``SmallTensors``: many small tensors by name, as a mapping, in a store."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from tiered.errors import KeyNotFound, MisuseError, TieredError, from_here, shortened
from tiered.small.names import (
    HEAD_BYTES,
    LONGEST_KEY,
    Head,
    Names,
    Record,
    names_key,
    number_of,
    open_key,
    page_key,
    page_of,
    record_key,
    spec_of,
)
from tiered.small.pages import BATCH, HOST, Pages, Prepared, Store
from tiered.tensors.mapping import MISSING, Default, TensorMapping, as_stored
from tiered.tensors.specs import listed, refuse_keys, refuse_name, refuse_unstorable
from tiered.tensors.specs import spec_of as spec_of_tensor
from tiered.types import Key, TensorSpec, parse_size

__all__ = ["SmallTensors", "open_small"]

PAGE = 64 << 10
"""Bytes of a page: a tensor that is not in memory costs the transfer of its page."""
SHARE = 16
"""A page takes at most such a part of the pool."""
BATCH_BYTES = 32 << 20
"""Bytes of tensors that ``update`` puts together, at most."""

Answer = TypeVar("Answer")
_Pairs = TensorMapping | Mapping[Key, torch.Tensor] | Iterable[tuple[Key, torch.Tensor]]


class SmallTensors(TensorMapping):
    """Many small tensors by name, in pages of a store: ``TieredStore.small`` makes and opens them.

    A mapping like the store itself, without leases: tensors are copied in and out. Each of up to some KiB costs a fraction of
    what a tensor of the store costs in memory, on the disk, and in each commit. A tensor that is put goes to the open page,
    which moves away when it is full; its former place is empty then, and pages that are more than half empty are merged.
    ``put`` and ``delete`` are atomic: an exception of a signal handler leaves the tensor as it was, or changed. Calls of
    several threads take turns.
    """

    def __init__(self, store: Store, name: str, record: Record, budget: int) -> None:
        self.name = name
        """The name; keys of the store's tensors begin with it."""
        self._pages = Pages(store, name, record.page, budget)
        self._lock = threading.RLock()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, which moves whole."""
        return self._pages.page

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
        with self._lock:
            found = self._pages.steadily(lambda names: self._pages.copy_of(names, key))
        if found is not None:
            return found
        if default is MISSING:
            self._pages.refuse_missing(key)
        return default

    @from_here
    def get_many(self, keys: Iterable[Key]) -> list[torch.Tensor]:
        """Return copies as ``get`` does, in the order of ``keys``, which may have a key more than once. Pages are leased
        together, a quarter of the pool at a time. Raises as ``get``."""
        wanted = listed(keys)
        refuse_keys(wanted)
        with self._lock:
            return self._pages.steadily(lambda names: self._pages.copies(names, wanted))

    @from_here
    def stack(self, keys: Iterable[Key]) -> torch.Tensor:
        """Return tensors of one shape and type as one, of shape ``(len(keys), *shape)``: a batch. Raises as ``get_many``, and
        MisuseError where shapes or types differ, or there are no keys."""
        wanted = listed(keys)
        refuse_keys(wanted)
        if not wanted:
            raise MisuseError("no keys: the shape of a batch of nothing is not known")
        with self._lock:
            return self._pages.steadily(lambda names: self._pages.stacked(names, wanted))

    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]:
        """Return an iterator over copies of ``keys``, in their order, of which it reads so many at a time as lie in a quarter
        of the pool. Raises as ``get``, when it comes to the key."""
        wanted = listed(keys)
        refuse_keys(wanted)
        at = 0
        while at < len(wanted):
            with self._lock:
                found = self._pages.steadily(lambda names, at=at: self._pages.some(names, wanted, at))  # type: ignore[misc]
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
        with self._lock:
            places = self._pages.steadily(lambda names: [names.where.get(key) for key in wanted])
            pages = dict.fromkeys(page_of(where) for where in places if where is not None)
            there = [self._pages.key_of(page) for page in pages]
        self._pages.store.prefetch(there, tier=HOST)

    @from_here
    def spec(self, key: Key) -> TensorSpec:
        """Return the shape and element type of ``key``; reads no page. Raises KeyNotFound."""
        refuse_keys([key])

        def found(names: Names) -> TensorSpec | None:
            self._pages.refuse_stale()
            where = names.where.get(key)
            return None if where is None else names.specs[spec_of(where)]

        with self._lock:
            spec = self._pages.steadily(found)
        if spec is None:
            self._pages.refuse_missing(key)
        return spec

    def __contains__(self, key: object) -> bool:
        """Return whether there is a tensor of that name."""
        return isinstance(key, str) and self._looked(lambda names: key in names.where)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys as of now, in no particular order."""
        return iter(self._looked(lambda names: list(names.where)))

    def __len__(self) -> int:
        """Return the number of tensors."""
        return self._looked(lambda names: len(names.where))

    def __repr__(self) -> str:
        try:
            count = f"{len(self)} tensors"
        except TieredError:
            count = "closed or dropped,"
        return f"<SmallTensors {self.name!r}: {count} in pages of {self._pages.page} bytes, in {self._pages.store}>"

    @from_here
    def _looked(self, look: Callable[[Names], Answer]) -> Answer:
        def work(names: Names) -> Answer:
            self._pages.refuse_stale()
            return look(names)

        with self._lock:
            return self._pages.steadily(work)

    # -- changing ----------------------------------------------------------------------------------------------------------

    @from_here
    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Store a copy of ``tensor`` (any strided dtype, shape, device) as ``key``, replacing the tensor of that name.

        Raises MisuseError for a key of more than 1,024 bytes or a tensor without dense contents, and what
        ``TieredStore.put`` raises.
        """
        one = _prepared(key, tensor)
        with self._lock:
            self._pages.tidy()
            self._pages.put([one])

    @from_here
    def update(self, tensors: _Pairs, /, **more: torch.Tensor) -> None:
        """Put all tensors of a mapping, or of pairs, under their names. Up to 1,024 of them, or 32 MiB, are prepared at a time:
        after an exception some are stored. Raises as ``put``."""
        pairs = tensors.items() if isinstance(tensors, Mapping | TensorMapping) else tensors
        batch: list[Prepared] = []
        nbytes = 0
        for pair in (*pairs, *more.items()) if more else pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise MisuseError(f"update is given a mapping, or pairs of a key and a tensor, not {pair!r:.100}")
            batch.append(_prepared(pair[0], as_stored(pair[0], pair[1])))
            nbytes += batch[-1].spec.nbytes
            if len(batch) == BATCH or nbytes > BATCH_BYTES:
                self._put_batch(batch)
                batch, nbytes = [], 0
        self._put_batch(batch)

    def _put_batch(self, batch: list[Prepared]) -> None:
        if batch:
            with self._lock:
                self._pages.tidy()
                self._pages.put(batch)

    @from_here
    def delete(self, key: Key) -> None:
        """Delete ``key``. Raises KeyNotFound."""
        refuse_keys([key])
        with self._lock:
            self._pages.tidy()
            there = self._pages.steadily(lambda names: self._pages.delete(names, key))
        if not there:
            self._pages.refuse_missing(key)

    @from_here
    def drop(self) -> None:
        """Delete all of these tensors, their pages and their names from the store; afterwards every call raises KeyNotFound. A
        call that was cut off is completed by another one. Raises as ``TieredStore.delete``."""
        with self._lock:
            store = self._pages.store
            for key in (*self._pages.ours(), open_key(self.name), record_key(self.name)):
                if key in store:
                    store.delete(key)


def _prepared(key: Key, tensor: torch.Tensor) -> Prepared:
    refuse_name(key)
    refuse_unstorable(key, tensor)
    encoded = key.encode()
    if len(encoded) > LONGEST_KEY:
        raise MisuseError(f"the key {shortened(repr(key))} has {len(encoded)} bytes; small tensors have keys of {LONGEST_KEY}")
    source = tensor.detach().resolve_conj().resolve_neg()
    spec = spec_of_tensor(source)
    return Prepared(key, encoded, spec, source.to("cpu").contiguous())


def open_small(store: Store, name: str, page: int | str | None, budget: int, *, may_make: bool) -> SmallTensors:
    """Open small tensors ``name`` of ``store``, or make them where ``may_make``; ``budget``: bytes of the pool in host
    memory."""
    refuse_name(name)
    if not name:
        raise MisuseError("small tensors have a name that is not empty")
    wanted = None if page is None else parse_size(page)
    key, opened = record_key(name), open_key(name)
    if key in store:
        record = Record.decoded(name, store.get(key).numpy().tobytes())
        if wanted is not None and Record.of(wanted) != record:
            raise MisuseError(
                f"small tensors {name!r} exist and have pages of {record.page} bytes, not {wanted}: leave page= out"
            )
        if opened in store or not may_make:
            return SmallTensors(store, name, record, budget)
    elif not may_make:
        raise KeyNotFound(f"there are no small tensors {name!r} in {store}, which is open for reading")
    else:
        record = Record.of(min(PAGE, budget // SHARE) if wanted is None else wanted)
        _refuse_others(store, name)
        store.put(key, torch.frombuffer(bytearray(record.encoded()), dtype=torch.uint8))
    first = torch.zeros(record.page, dtype=torch.uint8, device="cpu")
    head = Head(stamp=random.SystemRandom().getrandbits(62), page=0, next_page=1)
    ctypes.memmove(first.data_ptr(), ctypes.addressof(head), HEAD_BYTES)
    store.put(opened, first)
    return SmallTensors(store, name, record, budget)


def _refuse_others(store: Store, name: str) -> None:
    """Raise MisuseError where tensors of the store have keys that small tensors of this name would have."""
    prefixes = (page_key(name, 0)[:-1], names_key(name, 0)[:-1])
    there = [key for key in store if key == open_key(name) or (key.startswith(prefixes) and number_of(key) is not None)]
    if there:
        raise MisuseError(
            f"{store} has {shortened(repr(there[0]))}, which is of no small tensors: give these another name than {name!r}"
        )
