"""``Pages``: the pages of small tensors, with what is known of where each key is.

The store has the state: pages, the log of their names, and a head whose stamp is another one after each change (``names``).
What is known of it here is as good as its stamp: each call leases the open page, compares the stamp, and reads the log anew
where it differs. So a commit, ``rollback``, ``refresh``, a reader and another process see small tensors as they see any tensor.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch

from tiered.errors import KeyNotFound, ManifestError, MisuseError, TransferError, shortened
from tiered.small.names import (
    HEAD_BYTES,
    LARGEST_PLACE,
    MOST_SPECS,
    UNIT,
    Head,
    Names,
    deletion,
    description,
    location,
    names_key,
    number_of,
    open_key,
    page_key,
    place_of,
    presence,
    spec_of,
    units,
)
from tiered.tables.kernel import copy
from tiered.tensors.specs import dtype_of, flat
from tiered.tensors.specs import spec_of as spec_of_tensor
from tiered.types import Key, TensorSpec

__all__ = ["BATCH", "HOST", "Pages", "Prepared", "Store"]

OWN = 4
"""Tensors of more than such a part of a page have a page of their own."""
QUARTER = 4
"""Pages of such a part of the pool, at most, are leased together."""
TOGETHER = 4096
"""Of these pages, at most."""
BATCH = 1024
"""Tensors that are put, or read, together, at most."""
FEW = 8
"""Pages that are half empty, and parts of the log that are superfluous, before anything is done about them."""
SHARE = 16
"""Such a part of the pages may be half empty, too."""
HOST = "dram"
"""Small tensors are copied where the processor reaches them."""

Answer = TypeVar("Answer")


class Prepared(NamedTuple):
    """A key, as it is and as UTF-8, and a contiguous tensor in host memory, with its shape and type."""

    key: Key
    encoded: bytes
    spec: TensorSpec
    source: torch.Tensor


class Store(Protocol):
    """What small tensors need of a store."""

    def put(self, key: Key, tensor: torch.Tensor) -> None: ...
    def get(self, key: Key) -> torch.Tensor: ...
    def delete(self, key: Key) -> None: ...
    def spec(self, key: Key) -> TensorSpec: ...
    def prefetch(self, keys: Sequence[Key], *, tier: str | None = None) -> None: ...
    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]: ...
    def lease(
        self, key: list[Key], *, access: str = ..., tier: str | None = ...
    ) -> AbstractContextManager[tuple[torch.Tensor, ...]]: ...
    def __contains__(self, key: object) -> bool: ...
    def __iter__(self) -> Iterator[Key]: ...


class _Changed(Exception):
    """The store went back or ahead: where keys are is to be read anew."""


class Pages:
    """The pages of the small tensors ``name`` of ``store``, of ``page`` bytes each. ``budget``: bytes of the pool. One thread
    at a time calls it."""

    def __init__(self, store: Store, name: str, page: int, budget: int) -> None:
        self.store, self.name, self.page = store, name, page
        self._together = max(1, budget // QUARTER)
        self._open = open_key(name)
        self._names: Names | None = None  # None: to be read from the store
        self._head = Head()
        self._sizes: dict[int, int] | None = None  # units of each page that is full; None: not looked for yet
        self._half: set[int] = set()  # full pages of which keys take less than a half
        self._dead: set[int] = set()  # full pages that no key needs
        self._parts_checked = 0
        self._stamps = random.Random()  # seeded by the system: no two stamps of a store are equal, in whichever process

    # -- the state, and whether it is as known -----------------------------------------------------------------------------

    def steadily(self, work: Callable[[Names], Answer]) -> Answer:
        """Call ``work`` with where each key is; again with what is read anew where it finds that the store went back or
        ahead."""
        while True:
            try:
                return work(self._names or self._read())
            except _Changed:
                self._names = None

    @contextmanager
    def _leased(self, keys: Sequence[Key], access: str = "read") -> Iterator[tuple[torch.Tensor, ...]]:
        """Lease the open page and the tensors ``keys``. Raises _Changed where the stamp is another than that of the head."""
        try:
            with self.store.lease([self._open, *keys], access=access, tier=HOST) as tensors:
                self._compare(tensors[0])
                yield tensors
        except KeyNotFound:
            self.refuse_stale()
            gone = [key for key in keys if key not in self.store]
            if not gone:
                raise _Changed from None
            raise ManifestError(f"small tensors {self.name!r}: {shortened(repr(gone))} is missing in {self.store}") from None

    def refuse_stale(self) -> None:
        """Raise _Changed where the stamp is another than that of the head."""
        try:
            with self.store.lease([self._open], tier=HOST) as (tensor,):
                self._compare(tensor)
        except KeyNotFound:
            self._refuse_gone()

    def _compare(self, opened: torch.Tensor) -> None:
        self._refuse_size(self._open, opened)
        if ctypes.c_int64.from_address(opened.data_ptr()).value != self._head.stamp:
            raise _Changed

    def _read(self) -> Names:
        """Read the head and the log."""
        while True:
            try:
                opened = self.store.get(self._open)
            except KeyNotFound:
                self._refuse_gone()
            self._refuse_size(self._open, opened)
            data = opened.numpy().tobytes()
            self._head = head = Head.from_buffer_copy(data)
            try:
                problem = head.problem(self.page)
                if problem:
                    self._refuse_damaged(problem)
                names = self._read_log(head, data[HEAD_BYTES : HEAD_BYTES + head.log])
            except (KeyNotFound, ManifestError) as error:
                try:
                    self.refuse_stale()
                except _Changed:
                    continue
                if isinstance(error, KeyNotFound):
                    self._refuse_damaged(str(error))
                raise
            try:
                self.refuse_stale()  # the parts of the log are of the same moment
            except _Changed:
                continue
            self._names, self._sizes, self._half, self._dead, self._parts_checked = names, None, set(), set(), 0
            return names

    def _read_log(self, head: Head, rest: bytes) -> Names:
        names, at = Names(), self._open
        parts = [names_key(self.name, part) for part in range(head.first, head.last + 1)] if head.used else []
        try:
            for number, part in enumerate(self.store.in_order(parts)):
                at = parts[number]
                self._refuse_size(at, part)
                names.read(part.numpy().tobytes()[: head.used if number + 1 == len(parts) else None])
            at = self._open
            names.read(rest)
        except ValueError as error:
            self._refuse_damaged(f"{at!r} is not what it should be: {error}")
        names.count()
        return names

    def _refuse_size(self, key: Key, tensor: torch.Tensor) -> None:
        if tensor.dtype is not torch.uint8 or tensor.nbytes != self.page:
            self._refuse_damaged(f"{key!r} has {tensor.nbytes} bytes of {tensor.dtype}")

    def _refuse_damaged(self, why: str) -> NoReturn:
        raise ManifestError(f"small tensors {self.name!r} in {self.store} are damaged: {why}")

    def _refuse_gone(self) -> NoReturn:
        raise KeyNotFound(f"there are no small tensors {self.name!r} in {self.store} (any more): store.small(name) makes them")

    def refuse_missing(self, key: Key) -> NoReturn:
        """Raise KeyNotFound for ``key``."""
        raise KeyNotFound(f"there is no tensor {key!r} among the small tensors {self.name!r} in {self.store}")

    # -- copies out of pages -----------------------------------------------------------------------------------------------

    def key_of(self, page: int) -> Key:
        """Return the key of the store's tensor that has ``page``."""
        return self._open if page == self._head.page else page_key(self.name, page)

    def copies(self, names: Names, keys: Sequence[Key]) -> list[torch.Tensor]:
        """Return copies of ``keys``. Raises KeyNotFound."""
        places, specs = self._places(names, keys), names.specs
        kinds = {number: (specs[number].shape, dtype_of(specs[number])) for number in {where & 0xFFFFFF for where in places}}
        found = []
        for where in places:
            self._refuse_outside(names, where)
            shape, dtype = kinds[where & 0xFFFFFF]
            found.append(torch.empty(shape, dtype=dtype, device="cpu"))
        self._gather(names, places, [tensor.data_ptr() for tensor in found], keys)
        return found

    def copy_of(self, names: Names, key: Key) -> torch.Tensor | None:
        """Return a copy of ``key``; None where there is no such tensor."""
        if key in names.where:
            return self.copies(names, [key])[0]
        self.refuse_stale()
        return None

    def stacked(self, names: Names, keys: Sequence[Key]) -> torch.Tensor:
        """Return copies of ``keys``, of which there is at least one, as one tensor. Raises KeyNotFound, and MisuseError where
        they differ in shape or type."""
        places = self._places(names, keys)
        spec = names.specs[spec_of(places[0])]
        for key, where in zip(keys, places, strict=True):
            if spec_of(where) != spec_of(places[0]):
                raise MisuseError(f"{keys[0]!r} and {key!r} differ in shape or type: get_many(keys) returns them one by one")
            self._refuse_outside(names, where)
        batch = torch.empty((len(keys), *spec.shape), dtype=dtype_of(spec), device="cpu")
        base, nbytes = batch.data_ptr(), spec.nbytes
        self._gather(names, places, [base + at * nbytes for at in range(len(keys))], keys)
        return batch

    def some(self, names: Names, keys: Sequence[Key], at: int) -> list[torch.Tensor]:
        """Return copies of the keys from ``at`` on whose pages are leased together, at least one."""
        pages: set[int] = set()
        nbytes = taken = 0
        for key in islice(keys, at, at + BATCH):
            where = names.where.get(key)
            if where is not None and where >> 56 not in pages:
                pages.add(where >> 56)
                nbytes += self._cost(names, where)
            if taken and (where is None or nbytes > self._together or len(pages) > TOGETHER):
                break
            taken += 1
        return self.copies(names, keys[at : at + taken])

    def _places(self, names: Names, keys: Sequence[Key]) -> list[int]:
        """Return where ``keys`` are. Raises KeyNotFound."""
        try:
            return [names.where[key] for key in keys]
        except KeyError as error:
            self.refuse_stale()
            self.refuse_missing(error.args[0])

    def _refuse_outside(self, names: Names, where: int) -> None:
        """Raise ManifestError for a tensor that is larger than its place: before memory is taken for it."""
        if place_of(where) < names.rooms[spec_of(where)]:
            self._refuse_damaged(f"a tensor of {names.specs[spec_of(where)].nbytes} bytes is at the place of a smaller one")

    def _cost(self, names: Names, where: int) -> int:
        """Return the bytes that the page of a location takes of the pool, about."""
        return max(self.page, UNIT * names.rooms[spec_of(where)])

    def _gather(self, names: Names, places: Sequence[int], targets: Sequence[int], keys: Sequence[Key]) -> None:
        """Copy the tensors at ``places`` to the addresses ``targets``. ``keys`` are for errors."""
        pages: dict[int, list[int]] = {}
        for at, where in enumerate(places):
            pages.setdefault(where >> 56, []).append(at)
        part: dict[int, list[int]] = {}
        nbytes = 0
        for page, members in pages.items():
            cost = self._cost(names, places[members[0]])
            if part and (nbytes + cost > self._together or len(part) == TOGETHER):
                self._gather_part(names, part, places, targets, keys)
                part, nbytes = {}, 0
            part[page] = members
            nbytes += cost
        if part:
            self._gather_part(names, part, places, targets, keys)

    def _gather_part(
        self,
        names: Names,
        pages: Mapping[int, Sequence[int]],
        places: Sequence[int],
        targets: Sequence[int],
        keys: Sequence[Key],
    ) -> None:
        """Copy those tensors that lie in ``pages``: of each the numbers of its tensors among ``places``."""
        specs, opened = names.specs, self._head.page
        closed = [page for page in pages if page != opened]
        to: list[int] = []
        of: list[int] = []
        sizes: list[int] = []
        try:
            with self._leased([page_key(self.name, page) for page in closed]) as tensors:
                ends = {
                    page: (tensor.data_ptr() + tensor.nbytes, tensor.nbytes // UNIT)
                    for page, tensor in zip((opened, *closed), tensors, strict=True)
                }
                for page, members in pages.items():
                    end, most = ends[page]
                    for at in members:
                        where = places[at]
                        place = where >> 24 & 0xFFFFFFFF
                        if place > most:
                            self._refuse_damaged(f"{keys[at]!r} is not in the page that the log says")
                        to.append(targets[at])
                        of.append(end - place * UNIT)
                        sizes.append(specs[where & 0xFFFFFF].nbytes)
                copy(to, of, sizes)
                del tensors
        except TransferError as error:
            lost = [keys[at] for page, members in pages.items() if self.key_of(page) == error.key for at in members]
            if not lost:
                raise
            which = shortened(", ".join(map(repr, dict.fromkeys(lost))))
            raise error.having(f"small tensors {which} of {self.name!r}") from None

    # -- into the open page ------------------------------------------------------------------------------------------------

    def put(self, batch: Sequence[Prepared]) -> None:
        """Put all of ``batch``, as many at a time as the open page takes."""
        done = 0

        def some(names: Names) -> int:
            return self._put_some(names, islice(batch, done, None))

        while done < len(batch):
            done += self.steadily(some)

    def _put_some(self, names: Names, batch: Iterable[Prepared]) -> int:
        """Put the first ones of ``batch`` into the open page, as many as there is room for, and return how many. Where there
        is none, the open page becomes one that is full, and the number is 0."""
        head, after = self._head, self._next()
        room, whole, quarter = self.page - HEAD_BYTES, names.numbers, self.page // OWN
        log: list[bytes] = []
        put: list[tuple[Key, int]] = []
        values: list[tuple[int, int, int]] = []
        fresh: dict[TensorSpec, int] = {}
        for key, encoded, spec, source in batch:
            number = whole.get(spec)
            entry = b""
            if number is None:
                number = fresh.get(spec)
                if number is None:
                    number = len(names.specs) + len(fresh)
                    entry = description(number, spec)
            need = UNIT * (names.rooms[number] if number < len(names.rooms) else units(spec.nbytes))
            own = need > quarter
            taken = len(entry) + len(encoded) + 24
            if after.log + after.values + taken + (0 if own else need) > room:
                break
            if number >= MOST_SPECS:
                raise MisuseError(f"small tensors {self.name!r} have {MOST_SPECS:,} different shapes; more are not possible")
            if own:
                if put:
                    break  # first those before it
                if need >= LARGEST_PLACE:
                    raise MisuseError(f"{key!r} has {spec.nbytes:,} bytes, too many for a small tensor: put it into the store itself")
                where = location(head.next_page, need // UNIT, number)
                self._put_page(head.next_page, source, need)
                after.next_page += 1
            else:
                after.values += need
                where = location(head.page, after.values // UNIT, number)
                if spec.nbytes:
                    values.append((after.values, source.data_ptr(), spec.nbytes))
            entry += presence(encoded, where)
            after.log += len(entry)
            if spec not in whole:
                fresh[spec] = number
            log.append(entry)
            put.append((key, where))
            if own:
                break
        if not put:
            self._seal()
            return 0
        self._change(after, b"".join(log), values)
        for spec in fresh:
            names.know(spec)
        for key, where in put:
            self._emptied(names, names.put(key, where))
        self._names = names
        return len(put)

    def _next(self) -> Head:
        """Return a copy of the head with a stamp of its own."""
        after = Head.from_buffer_copy(self._head)
        after.stamp = self._stamps.getrandbits(62)
        return after

    def _change(self, after: Head, log: bytes, values: Sequence[tuple[int, int, int]]) -> None:
        """Write ``values`` (distance from the end, address, bytes), ``log`` and the head ``after`` to the open page, by one
        call of C. The names that are known are forgotten, until the caller has changed them, too."""
        with self._leased([], "write") as (opened,):
            base = opened.data_ptr()
            end = base + self.page
            entries = ctypes.create_string_buffer(log, len(log))
            targets = [*(end - place for place, _, _ in values), base + HEAD_BYTES + self._head.log, base]
            sources = [*(address for _, address, _ in values), ctypes.addressof(entries), ctypes.addressof(after)]
            sizes = [*(nbytes for _, _, nbytes in values), len(log), HEAD_BYTES]
            self._names = None
            copy(targets, sources, sizes)
            del opened
        self._head = after

    def _put_page(self, page: int, source: torch.Tensor, need: int) -> None:
        """Put a tensor as a page of its own."""
        whole = torch.zeros(need, dtype=torch.uint8, device="cpu")
        whole[: source.nbytes] = flat(source)
        with self._leased([]):  # the store cannot go back meanwhile, to where a page of that number is one that counts
            self.store.put(page_key(self.name, page), whole)
        if self._sizes is not None:
            self._sizes[page] = need // UNIT

    def _seal(self) -> None:
        """Make the open page one that is full, and move its log to the log of the full pages."""
        head, after, name = self._head, self._next(), self.name
        joined = head.used > 0 and head.used + head.log <= self.page
        part = head.last if joined or not head.used else head.last + 1
        at = head.used if joined else 0
        with self._leased([]) as (opened,):
            log = opened[HEAD_BYTES : HEAD_BYTES + head.log].clone()
            if head.values:
                self.store.put(page_key(name, head.page), opened[self.page - head.values :])
            if not joined:
                self.store.put(names_key(name, part), torch.zeros(self.page, dtype=torch.uint8, device="cpu"))
            del opened
        after.log = after.values = 0
        after.last, after.used = part, at + head.log
        if head.values:
            after.page, after.next_page = head.next_page, head.next_page + 1
        names, self._names = self._names, None
        with self._leased([names_key(name, part)], "write") as (opened, names_tensor):
            self._refuse_size(names_key(name, part), names_tensor)
            copy(
                [names_tensor.data_ptr() + at, opened.data_ptr()],
                [log.data_ptr(), ctypes.addressof(after)],
                [head.log, HEAD_BYTES],
            )
            del opened, names_tensor
        self._head = after
        if head.values and self._sizes is not None and names is not None:
            self._sizes[head.page] = head.values // UNIT
            self._emptied(names, head.page)
        self._names = names

    def delete(self, names: Names, key: Key) -> bool:
        """Delete ``key``; return False where there is no such tensor."""
        while key in names.where:
            entry, after = deletion(key.encode()), self._next()
            if after.log + after.values + len(entry) > self.page - HEAD_BYTES:
                self._seal()
                continue
            after.log += len(entry)
            self._change(after, entry, [])
            self._emptied(names, names.remove(key))
            self._names = names
            return True
        self.refuse_stale()
        return False

    # -- pages that are half empty, and a log that is too long -------------------------------------------------------------

    def _emptied(self, names: Names, page: int | None) -> None:
        """Note that a tensor has left ``page``."""
        if page is not None and self._sizes is not None and page != self._head.page:
            live = names.live.get(page, 0)
            if not live:
                self._dead.add(page)
            elif 2 * live < self._sizes.get(page, 0):
                self._half.add(page)

    def tidy(self) -> None:
        """Remove what no key needs, merge pages that are half empty, and write the log anew where most of it is outdated."""
        self.steadily(self._tidy)

    def _tidy(self, names: Names) -> None:
        if self._sizes is None:
            self._sweep(names)
        assert self._sizes is not None
        if len(self._half) > FEW + len(self._sizes) // SHARE:
            self._merge(names)
        if self._dead:
            self._remove_dead()
        head = self._head
        parts = head.last - head.first + 1
        if parts > 2 * self._parts_checked + FEW:
            names = self._names or self._read()
            needed = sum(24 + len(key) for key in names.where) + sum(64 for _ in names.specs)
            if parts > 2 * (needed // self.page) + FEW:
                self._rewrite_log(names)
            self._parts_checked = self._head.last - self._head.first + 1

    def ours(self) -> list[Key]:
        """Return the keys of the store that are pages or parts of the log."""
        prefixes = (page_key(self.name, 0)[:-1], names_key(self.name, 0)[:-1])
        return [key for key in self.store if key.startswith(prefixes) and number_of(key) is not None]

    def _sweep(self, names: Names) -> None:
        """Remove pages and parts of the log that an exception left, and look how large the others are."""
        head, sizes = self._head, dict[int, int]()
        parts = range(head.first, head.last + 1) if head.used else range(0)
        prefix = page_key(self.name, 0)[:-1]
        with self._leased([]):
            for key in self.ours():
                number = number_of(key)
                assert number is not None
                if key.startswith(prefix) and number != head.page and number in names.live:
                    sizes[number] = self.store.spec(key).nbytes // UNIT
                elif key.startswith(prefix) or number not in parts:
                    self.store.delete(key)
        self._sizes = sizes
        self._half = {page for page, size in sizes.items() if 2 * names.live[page] < size}

    def _merge(self, names: Names) -> None:
        """Put the tensors of pages that are half empty again, so that nothing is left in these pages."""
        pages, self._half = self._half, set()
        keys = [key for key, where in names.where.items() if where >> 56 in pages]
        for begin in range(0, len(keys), BATCH):
            some = keys[begin : begin + BATCH]
            copies = self.copies(names, some)
            batch = [Prepared(key, key.encode(), spec_of_tensor(one), one) for key, one in zip(some, copies, strict=True)]
            done = 0
            while done < len(batch):  # not from the beginning where the store went back: what was copied is outdated then
                done += self._put_some(names, islice(batch, done, None))

    def _remove_dead(self) -> None:
        assert self._sizes is not None
        with self._leased([]):
            for page in list(self._dead):
                if page_key(self.name, page) in self.store:
                    self.store.delete(page_key(self.name, page))
                self._sizes.pop(page, None)
                self._half.discard(page)
                self._dead.discard(page)

    def _rewrite_log(self, names: Names) -> None:
        """Write the log of the full pages anew, without what is outdated."""
        head, after, name = self._head, self._next(), self.name
        after.first = part = head.last + 1
        with self._leased([]):
            buffer, at = bytearray(self.page), 0
            for entry in names.entries(head.page):
                if at + len(entry) > self.page:
                    self.store.put(names_key(name, part), torch.frombuffer(buffer, dtype=torch.uint8))
                    buffer, at, part = bytearray(self.page), 0, part + 1
                buffer[at : at + len(entry)] = entry
                at += len(entry)
            self.store.put(names_key(name, part), torch.frombuffer(buffer, dtype=torch.uint8))
        after.last, after.used = part, at
        if not at:
            after.first, after.last = part, part
        self._change(after, b"", [])
        self._names = names
        with self._leased([]):
            for old in range(head.first, head.last + 1):
                if names_key(name, old) in self.store:
                    self.store.delete(names_key(name, old))
