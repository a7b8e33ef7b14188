"""``Pages``: the pages of small tensors, with what is known of where each key is.

The store has the state: pages, the log of their names, and a head whose stamp is another one after each change (``names``).
``Known`` is what is known of it, and as good as its stamp: each call leases the open page, compares the stamp, and reads the
log anew where it differs. So a commit, ``rollback``, ``refresh``, a reader and another process see small tensors as they see
any tensor. A change that takes several leases holds one of the record meanwhile, beside which the store cannot go back.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch

from tiered.errors import (
    CapacityError,
    KeyNotFound,
    LeaseConflict,
    ManifestError,
    MisuseError,
    TieredError,
    TransferError,
    shortened,
)
from tiered.small.names import (
    HEAD_BYTES,
    LARGEST_PLACE,
    MOST_SPECS,
    UNIT,
    Names,
    NamesRecord,
    PageHead,
    deletion,
    description,
    location,
    names_key,
    number_after,
    open_key,
    page_key,
    page_of,
    place_of,
    presence,
    record_key,
    small_owner,
    spec_of,
    units,
)
from tiered.tables.kernel import copy
from tiered.tensors.specs import dtype_of, flat
from tiered.tensors.specs import spec_of as spec_of_tensor
from tiered.types import Access, Key, Owner, TensorSpec

__all__ = ["BATCH", "HOST", "Known", "PageStore", "Pages", "Prepared"]

OWN = 4
"""Tensors of more than such a part of a page have a page of their own."""
QUARTER = 4
"""Pages of such a part of the pool, at most, are leased together."""
LEASED_PAGES = 4096
"""Of these pages, at most."""
BATCH = 1024
"""Tensors that are put, or read, together, at most."""
FEW = 8
"""Pages that are half empty, and parts of the log that are superfluous, before anything is done about them."""
HALF_EMPTY_SHARE = 16
"""Such a part of the pages may be half empty, too."""
HOST = "dram"
"""Small tensors are copied where the processor reaches them."""
There = tuple[int, TensorSpec]
"""The address of a tensor in host memory, and what it is."""

Answer = TypeVar("Answer")


class Prepared(NamedTuple):
    """A key, as it is and as UTF-8, and a contiguous tensor in host memory, with its shape and type."""

    key: Key
    encoded: bytes
    spec: TensorSpec
    source: torch.Tensor


class PageStore(Protocol):
    """What small tensors need of a store."""

    def put(self, key: Key, tensor: torch.Tensor, *, owner: Owner | None = None) -> None: ...
    def get(self, key: Key) -> torch.Tensor: ...
    def delete(self, key: Key, *, owner: Owner | None = None) -> None: ...
    def owned(self, owner: Owner) -> list[Key]: ...
    def owner_of(self, key: Key) -> Owner | None: ...
    def spec(self, key: Key) -> TensorSpec: ...
    def prefetch(self, keys: Sequence[Key], *, tier: str | None = None) -> None: ...
    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]: ...
    def lease_addresses(self, keys: Sequence[Key], access: Access) -> AbstractContextManager[list[There]]: ...
    def __contains__(self, key: object) -> bool: ...
    def __iter__(self) -> Iterator[Key]: ...
    def __len__(self) -> int: ...


class _Changed(Exception):
    """The store went back or ahead: what is known is to be read anew."""


class _Missing(Exception):
    """There is no small tensor of that name. Attribute: ``key``."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


@dataclass
class Known:
    """What is known of the small tensors as of ``head``, which is never changed, but replaced together with the names."""

    head: PageHead
    names: Names
    sizes: dict[int, int] | None = None
    """Units of each page that is full; None: not looked for yet."""
    half: set[int] = field(default_factory=set)
    """Full pages of which keys take less than a half."""
    dead: set[int] = field(default_factory=set)
    """Full pages that no key needs."""
    parts_checked: int = 0
    """Parts of the log when it was last looked how much of it is needed."""

    def after(self, page: int | None) -> None:
        """Note that a tensor has left ``page``."""
        if page is None or self.sizes is None or page == self.head.page:
            return
        live = self.names.live.get(page, 0)
        if not live:
            self.dead.add(page)
        elif 2 * live < self.sizes.get(page, 0):
            self.half.add(page)


class Pages:
    """The pages of the small tensors ``name`` of ``store``, of ``page`` bytes each. ``budget``: bytes of the pool.

    One thread at a time calls it. A signal handler may call it between any two bytecodes of another call: that one then finds
    another stamp than that of the head with which it began.
    """

    def __init__(self, store: PageStore, name: str, page: int, budget: int) -> None:
        self.store, self.name, self.page, self.owner = store, name, page, small_owner(name)
        self._together = max(1, budget // QUARTER)
        self._open, self._record = open_key(name), record_key(name)
        self._known: Known | None = None  # None: to be read from the store
        self._later = 0  # pages that are half empty before the next try to merge them, after one that failed
        self._stamps = random.Random()  # seeded by the system: no two stamps of a store are equal, in whichever process

    # -- the state, and whether it is as known -----------------------------------------------------------------------------

    def steadily(self, work: Callable[[Known], Answer]) -> Answer:
        """Call ``work`` with what is known; again, with what is read anew, where the store went back or ahead.

        This is the one place where an error of ``work`` is believed: whatever it refuses (other shapes, damage, a page that is
        gone or cannot be read, a conflict, no room) may follow from what is outdated, so the stamp is compared first.
        """
        while True:
            known = self._known
            try:
                if known is None:
                    known = self._read()
                return work(known)
            except _Changed:
                pass
            except _Missing as error:
                self._refuse_missing(error.key, known)
            except TieredError as error:
                missing = isinstance(error, KeyNotFound)
                if missing and (self._open not in self.store or self._record not in self.store):
                    self._refuse_gone()
                if not (missing if known is None else self._is_stale(known.head)):
                    if missing:
                        raise ManifestError(f"small tensors {self.name!r} in {self.store} are damaged: {error}") from None
                    raise
            self._known = None

    def refuse_stale(self, head: PageHead) -> None:
        """Raise _Changed where the stamp is not that of ``head``."""
        with self.store.lease_addresses([self._open], Access.READ) as leased:
            self._compare(head, leased[0])

    def _is_stale(self, head: PageHead) -> bool:
        try:
            self.refuse_stale(head)
        except (_Changed, KeyNotFound):
            return True
        except TieredError:  # the open page cannot be leased: the error that led here says why
            return False
        return False

    def _compare(self, head: PageHead, opened: There) -> None:
        address, spec = opened
        self._refuse_size(self._open, spec)
        if ctypes.c_int64.from_address(address).value != head.stamp:
            raise _Changed

    def _read(self) -> Known:
        """Read the head and the log."""
        with self.store.lease_addresses([self._record], Access.READ):
            opened = self.store.get(self._open)
            self._refuse_size(self._open, spec_of_tensor(opened))
            data = opened.numpy().tobytes()
            head = PageHead.from_buffer_copy(data)
            problem = head.problem(self.page)
            if problem is None and head.used and head.last - head.first >= len(self.store):
                problem = f"the log goes from part {head.first} to {head.last}"
            if problem:
                self._refuse_damaged(problem)
            try:
                names = self._read_log(head, data[HEAD_BYTES : HEAD_BYTES + head.log])
            except (KeyNotFound, ManifestError) as error:
                self.refuse_stale(head)
                if isinstance(error, KeyNotFound):
                    self._refuse_damaged(str(error))
                raise
            self.refuse_stale(head)  # a reader may have gone ahead
        known = self._known = Known(head, names)
        return known

    def _read_log(self, head: PageHead, rest: bytes) -> Names:
        names, at = Names(), self._open
        parts = [names_key(self.name, part) for part in range(head.first, head.last + 1)] if head.used else []
        try:
            for number, part in enumerate(self.store.in_order(parts)):
                at = parts[number]
                self._refuse_size(at, spec_of_tensor(part))
                names.read(part.numpy().tobytes()[: head.used if number + 1 == len(parts) else None])
            at = self._open
            names.read(rest)
        except ValueError as error:
            self._refuse_damaged(f"{at!r} is not what it should be: {error}")
        names.count()
        return names

    def _refuse_size(self, key: Key, spec: TensorSpec) -> None:
        """Raise ManifestError where a tensor of ``spec`` is no page; _Changed where pages have another size now, because the
        small tensors were dropped and made anew, or the store went back to before that."""
        if spec.dtype != "uint8" or spec.shape != (self.page,):
            record = flat(self.store.get(self._record)).numpy().tobytes()
            before, self.page = self.page, NamesRecord.decoded(self.name, record).page
            if self.page != before:
                raise _Changed
            self._refuse_damaged(f"{key!r} has the shape {spec.shape} of {spec.dtype}, not {self.page} bytes")

    def _refuse_damaged(self, why: str) -> NoReturn:
        raise ManifestError(f"small tensors {self.name!r} in {self.store} are damaged: {why}")

    def _refuse_gone(self) -> NoReturn:
        raise KeyNotFound(f"there are no small tensors {self.name!r} in {self.store} (any more): store.small(name) makes them")

    def _refuse_missing(self, key: Key, known: Known | None) -> NoReturn:
        said = f"there is no tensor {key!r} among the small tensors {self.name!r} in {self.store}"
        raise KeyNotFound(said, key, known.names.where if known else ())

    def where(self, known: Known, key: Key) -> int:
        """Return where ``key`` is."""
        try:
            return known.names.where[key]
        except KeyError:
            self.refuse_stale(known.head)
            raise _Missing(key) from None

    # -- copies out of pages -----------------------------------------------------------------------------------------------

    def key_of(self, head: PageHead, page: int) -> Key:
        """Return the key of the store's tensor that has ``page``."""
        return self._open if page == head.page else page_key(self.name, page)

    def copies(self, known: Known, keys: Sequence[Key]) -> list[torch.Tensor]:
        """Return copies of ``keys``."""
        head, names = known.head, known.names
        places = [self.where(known, key) for key in keys]
        specs, found = names.specs, list[torch.Tensor]()
        kinds = {number: (specs[number].shape, dtype_of(specs[number])) for number in {where & 0xFFFFFF for where in places}}
        for where in places:
            self._refuse_outside(head, names, where)
            shape, dtype = kinds[where & 0xFFFFFF]
            found.append(torch.empty(shape, dtype=dtype, device="cpu"))
        self._gather(head, names, places, [tensor.data_ptr() for tensor in found], keys)
        return found

    def stacked(self, known: Known, keys: Sequence[Key]) -> torch.Tensor:
        """Return copies of ``keys``, of which there is at least one, as one tensor. Raises MisuseError where they differ in
        shape or type."""
        head, names = known.head, known.names
        places = [self.where(known, key) for key in keys]
        number = spec_of(places[0])
        for key, where in zip(keys, places, strict=True):
            if where & 0xFFFFFF != number:
                raise MisuseError(f"{keys[0]!r} and {key!r} differ in shape or type: get_many(keys) returns them one by one")
            self._refuse_outside(head, names, where)
        spec = names.specs[number]
        batch = torch.empty((len(keys), *spec.shape), dtype=dtype_of(spec), device="cpu")
        base, nbytes = batch.data_ptr(), spec.nbytes
        self._gather(head, names, places, [base + at * nbytes for at in range(len(keys))], keys)
        return batch

    def some(self, known: Known, keys: Sequence[Key], at: int) -> list[torch.Tensor]:
        """Return copies of the keys from ``at`` on, at least one, as many as have a quarter of the pool together, and whose
        pages are leased together."""
        pages: set[int] = set()
        nbytes = copied = taken = 0
        names = known.names
        for key in islice(keys, at, at + BATCH):
            where = names.where.get(key)
            if where is None:
                break  # it raises when it is the first one
            copied += names.specs[where & 0xFFFFFF].nbytes
            if where >> 56 not in pages:
                pages.add(where >> 56)
                nbytes += self._cost(names, where)
            if taken and (max(nbytes, copied) > self._together or len(pages) > LEASED_PAGES):
                break
            taken += 1
        return self.copies(known, keys[at : at + max(1, taken)])

    def _refuse_outside(self, head: PageHead, names: Names, where: int) -> None:
        """Raise ManifestError for a tensor that is larger than its place, or than its page: before memory is taken for it."""
        room = names.rooms[where & 0xFFFFFF]
        key = page_key(self.name, where >> 56)
        large = UNIT * room > self.page // OWN
        if place_of(where) < room or (large and (where >> 56 == head.page or self.store.spec(key).nbytes < UNIT * room)):
            self._refuse_damaged(f"a tensor of {names.specs[spec_of(where)].nbytes} bytes is at the place of a smaller one")

    def _cost(self, names: Names, where: int) -> int:
        """Return the bytes that the page of a location takes of the pool, about."""
        return max(self.page, UNIT * names.rooms[where & 0xFFFFFF])

    def _gather(self, head: PageHead, names: Names, places: Sequence[int], targets: Sequence[int], keys: Sequence[Key]) -> None:
        """Copy the tensors at ``places`` to the addresses ``targets``. ``keys`` are for errors."""
        pages: dict[int, list[int]] = {}
        for at, where in enumerate(places):
            pages.setdefault(where >> 56, []).append(at)
        part: dict[int, list[int]] = {}
        nbytes = 0
        for page, members in pages.items():
            cost = self._cost(names, places[members[0]])
            if part and (nbytes + cost > self._together or len(part) == LEASED_PAGES):
                self._gather_part(head, names, part, places, targets, keys)
                part, nbytes = {}, 0
            part[page] = members
            nbytes += cost
        if part:
            self._gather_part(head, names, part, places, targets, keys)

    def _gather_part(
        self,
        head: PageHead,
        names: Names,
        pages: Mapping[int, Sequence[int]],
        places: Sequence[int],
        targets: Sequence[int],
        keys: Sequence[Key],
    ) -> None:
        """Copy those tensors that lie in ``pages``: of each the numbers of its tensors among ``places``."""
        specs, closed = names.specs, [page for page in pages if page != head.page]
        to: list[int] = []
        of: list[int] = []
        sizes: list[int] = []
        try:
            wanted = [self._open, *(page_key(self.name, page) for page in closed)]
            with self.store.lease_addresses(wanted, Access.READ) as leased:
                self._compare(head, leased[0])
                ends = {
                    page: (address + spec.nbytes, spec.nbytes // UNIT)
                    for page, (address, spec) in zip((head.page, *closed), leased, strict=True)
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
        except TransferError as error:
            lost = [keys[at] for page, members in pages.items() if self.key_of(head, page) == error.key for at in members]
            if not lost:
                raise
            which = shortened(", ".join(map(repr, dict.fromkeys(lost))))
            raise error.having(f"small tensors {which} of {self.name!r}") from None

    # -- into the open page ------------------------------------------------------------------------------------------------

    def put(self, batch: Sequence[Prepared]) -> None:
        """Put all of ``batch``, as many at a time as the open page takes."""
        done = 0

        def some(known: Known) -> int:
            return self._put_some(known, islice(batch, done, None))

        while done < len(batch):
            done += self.steadily(some)

    def _put_some(self, known: Known, batch: Iterable[Prepared]) -> int:
        """Put the first ones of ``batch`` into the open page, as many as there is room for, and return how many. Where there
        is none, the open page becomes one that is full, and the number is 0."""
        head, names = known.head, known.names
        after, room, quarter = self._next(head), self.page - HEAD_BYTES, self.page // OWN
        log: list[bytes] = []
        put: list[tuple[Key, int]] = []
        values: list[tuple[int, int, int]] = []
        fresh: dict[TensorSpec, int] = {}
        for one in batch:
            key, encoded, spec, source = one
            number, entry = names.numbers.get(spec), b""
            if number is None:
                number = fresh.get(spec)
                if number is None:
                    number = len(names.specs) + len(fresh)
                    entry = description(number, spec)
                    if number >= MOST_SPECS:
                        raise MisuseError(
                            f"small tensors {self.name!r} have {MOST_SPECS:,} different shapes, the most possible"
                        )
            need = UNIT * (names.rooms[number] if number < len(names.rooms) else units(spec.nbytes))
            own = need > quarter
            taken = len(entry) + len(encoded) + 24
            if after.log + after.values + taken + (0 if own else need) > room:
                break
            if own:
                if put:
                    break  # first those before it
                return self._put_own(known, one, number, entry, need)
            after.values += need
            where = location(head.page, after.values // UNIT, number)
            if spec.nbytes:
                values.append((after.values, source.data_ptr(), spec.nbytes))
            if entry:
                fresh[spec] = number
            entry += presence(encoded, where)
            after.log += len(entry)
            log.append(entry)
            put.append((key, where))
        if not put:
            self._seal(known)
            return 0
        self._change(known, head, after, b"".join(log), values)
        for spec in fresh:
            names.know(spec)
        for key, where in put:
            known.after(names.put(key, where))
        self._known = known
        return len(put)

    def _put_own(self, known: Known, one: Prepared, number: int, entry: bytes, need: int) -> int:
        """Put a tensor as a page of its own, and return 1. ``entry``: what is to be logged of its spec."""
        head, names, after = known.head, known.names, self._next(known.head)
        if need >= LARGEST_PLACE:
            raise MisuseError(
                f"{one.key!r} has {one.spec.nbytes:,} bytes, too many for a small tensor: put it into the store itself"
            )
        where = location(head.next_page, need // UNIT, number)
        log = entry + presence(one.encoded, where)
        after.next_page += 1
        after.log += len(log)
        whole = torch.zeros(need, dtype=torch.uint8, device="cpu")
        whole[: one.spec.nbytes] = flat(one.source)
        with self.store.lease_addresses([self._record], Access.READ):
            self.refuse_stale(head)
            try:
                self.store.put(page_key(self.name, head.next_page), whole, owner=self.owner)
            except CapacityError as error:
                raise CapacityError(f"small tensor {one.key!r}: {error}") from error
            self._change(known, head, after, log, [])
        if entry:
            names.know(one.spec)
        if known.sizes is not None:
            known.sizes[head.next_page] = need // UNIT
        known.after(names.put(one.key, where))
        self._known = known
        return 1

    def _next(self, head: PageHead) -> PageHead:
        """Return a copy of ``head`` with a stamp of its own."""
        after = PageHead.from_buffer_copy(head)
        after.stamp = self._stamps.getrandbits(62)
        return after

    def _change(
        self, known: Known, head: PageHead, after: PageHead, log: bytes, values: Sequence[tuple[int, int, int]]
    ) -> None:
        """Write ``values`` (distance from the end, address, bytes), ``log`` and the head ``after`` to the open page, by one
        call of C, where its head is ``head``. What is known is forgotten, until the caller has changed it, too."""
        with self.store.lease_addresses([self._open], Access.WRITE) as leased:
            self._compare(head, leased[0])
            base = leased[0][0]
            end = base + self.page
            entries = ctypes.create_string_buffer(log, len(log))
            targets = [*(end - place for place, _, _ in values), base + HEAD_BYTES + head.log, base]
            sources = [*(address for _, address, _ in values), ctypes.addressof(entries), ctypes.addressof(after)]
            sizes = [*(nbytes for _, _, nbytes in values), len(log), HEAD_BYTES]
            self._known = None
            copy(targets, sources, sizes)
        known.head = after

    def _seal(self, known: Known) -> None:
        """Make the open page one that is full, and move its log to the log of the full pages."""
        head, name = known.head, self.name
        after = self._next(head)
        joined = head.used > 0 and head.used + head.log <= self.page
        part = head.last if joined or not head.used else head.last + 1
        at = head.used if joined else 0
        after.log = after.values = 0
        after.last, after.used = part, at + head.log
        if head.values:
            after.page, after.next_page = head.next_page, head.next_page + 1
        with self.store.lease_addresses([self._record], Access.READ):
            log = torch.empty(head.log, dtype=torch.uint8, device="cpu")
            values = torch.empty(head.values, dtype=torch.uint8, device="cpu")
            with self.store.lease_addresses([self._open], Access.READ) as leased:
                self._compare(head, leased[0])
                base = leased[0][0]
                sources = [base + HEAD_BYTES, base + self.page - head.values]
                copy([log.data_ptr(), values.data_ptr()], sources, [head.log, head.values])
            if head.values:
                self.store.put(page_key(name, head.page), values, owner=self.owner)
            if not joined:
                self.store.put(names_key(name, part), torch.zeros(self.page, dtype=torch.uint8, device="cpu"), owner=self.owner)
            with self.store.lease_addresses([self._open, names_key(name, part)], Access.WRITE) as leased:
                self._compare(head, leased[0])
                self._refuse_size(names_key(name, part), leased[1][1])
                targets = [leased[1][0] + at, leased[0][0]]
                self._known = None
                copy(targets, [log.data_ptr(), ctypes.addressof(after)], [head.log, HEAD_BYTES])
        known.head = after
        if head.values and known.sizes is not None:
            known.sizes[head.page] = head.values // UNIT
            known.after(head.page)
        self._known = known

    def delete(self, known: Known, key: Key) -> None:
        """Log that ``key`` is deleted, in the open page; its place is empty from then on."""
        self.where(known, key)
        head, entry = known.head, deletion(key.encode())
        if head.log + head.values + len(entry) > self.page - HEAD_BYTES:
            self._seal(known)
            head = known.head
        after = self._next(head)
        after.log += len(entry)
        self._change(known, head, after, entry, [])
        known.after(known.names.remove(key))
        self._known = known

    def clear(self, known: Known) -> None:
        """Begin a log and a page without anything. What was before them is removed by the next ``tidy``."""
        head = known.head
        after = self._next(head)
        after.page, after.next_page = head.next_page, head.next_page + 1
        after.log = after.values = after.used = 0
        after.first = after.last = head.last + 1
        self._change(known, head, after, b"", [])
        self._known = Known(after, Names())

    # -- pages that are half empty, and a log that is too long -------------------------------------------------------------

    def tidy(self) -> None:
        """Remove what no key needs, merge pages that are half empty, and write the log anew where most of it is outdated.

        What cannot be done now, because a tensor is leased, a page is damaged, or there is no room, is left for later: it is
        no part of what was asked for.
        """
        with contextlib.suppress(LeaseConflict, CapacityError, TransferError):
            self.steadily(self._tidy)

    def _tidy(self, known: Known) -> None:
        if known.sizes is None:
            self._sweep(known)
        assert known.sizes is not None
        if known.dead:
            self._remove_dead(known)
        if len(known.half) > max(FEW + len(known.sizes) // HALF_EMPTY_SHARE, self._later):
            self._later = len(known.half) + FEW  # unless this ends well
            self._merge(known)
            self._later = 0
            self._remove_dead(known)
        parts = known.head.last - known.head.first + 1
        if parts > 2 * known.parts_checked + FEW:
            known.parts_checked = parts
            needed = sum(24 + len(key.encode()) for key in known.names.where) + 64 * len(known.names.specs)
            if parts > 2 * (needed // self.page) + FEW:
                self._rewrite_log(known)
                known.parts_checked = known.head.last - known.head.first + 1

    def ours(self) -> dict[Key, tuple[str, int]]:
        """Return the keys of the store that are pages or parts of the log, each with "page" or "names" and its number."""
        found: dict[Key, tuple[str, int]] = {}
        for key in self.store.owned(self.owner):
            for kind in ("page", "names"):
                number = number_after(f"{self.name}/{kind}", key)
                if number is not None:
                    found[key] = (kind, number)
        return found

    def _sweep(self, known: Known) -> None:
        """Remove pages and parts of the log that an exception left, and look how large the others are."""
        head, live, sizes = known.head, known.names.live, dict[int, int]()
        parts = range(head.first, head.last + 1) if head.used else range(0)
        with self.store.lease_addresses([self._record], Access.READ):
            self.refuse_stale(head)
            for key, (kind, number) in self.ours().items():
                if kind == "page" and number != head.page and number in live:
                    sizes[number] = self.store.spec(key).nbytes // UNIT
                elif kind == "page" or number not in parts:
                    with contextlib.suppress(LeaseConflict):
                        self.store.delete(key, owner=self.owner)
        known.sizes = sizes
        known.half = {page for page, size in sizes.items() if 2 * live[page] < size}

    def _merge(self, known: Known) -> None:
        """Put the tensors of pages that are half empty again, so that nothing is left in these pages."""
        names, half = known.names, frozenset(known.half)
        keys = [key for key, where in names.where.items() if where >> 56 in half]
        at = 0
        while at < len(keys):
            try:
                copies = self.some(known, keys, at)
            except TransferError as error:
                damaged = number_after(f"{self.name}/page", error.key)
                if damaged is None:
                    raise
                known.half.discard(damaged)  # what can be read of the others is put again
                keys, at = [key for key in keys[at:] if page_of(names.where[key]) != damaged], 0
                continue
            some = keys[at : at + len(copies)]
            batch = [Prepared(key, key.encode(), spec_of_tensor(one), one) for key, one in zip(some, copies, strict=True)]
            done = 0
            while done < len(batch):  # with these ``known``: where the store went back, the copies are outdated
                done += self._put_some(known, islice(batch, done, None))
            at += len(some)

    def _remove_dead(self, known: Known) -> None:
        assert known.sizes is not None
        with self.store.lease_addresses([self._record], Access.READ):
            self.refuse_stale(known.head)
            for page in list(known.dead):
                with contextlib.suppress(LeaseConflict):
                    if page_key(self.name, page) in self.store:
                        self.store.delete(page_key(self.name, page), owner=self.owner)
                    known.sizes.pop(page, None)
                    known.half.discard(page)
                    known.dead.discard(page)

    def _rewrite_log(self, known: Known) -> None:
        """Write the log of the full pages anew, without what is outdated."""
        head, name = known.head, self.name
        after = self._next(head)
        after.first = part = head.last + 1
        with self.store.lease_addresses([self._record], Access.READ):
            self.refuse_stale(head)
            buffer, at = bytearray(self.page), 0
            for entry in known.names.entries(head.page):
                if at + len(entry) > self.page:
                    self.store.put(names_key(name, part), torch.frombuffer(buffer, dtype=torch.uint8), owner=self.owner)
                    buffer, at, part = bytearray(self.page), 0, part + 1
                buffer[at : at + len(entry)] = entry
                at += len(entry)
            self.store.put(names_key(name, part), torch.frombuffer(buffer, dtype=torch.uint8), owner=self.owner)
            after.last, after.used = part, at
            self._change(known, head, after, b"", [])
            self._known = known
            for old in range(head.first, head.last + 1):
                with contextlib.suppress(LeaseConflict):
                    if names_key(name, old) in self.store:
                        self.store.delete(names_key(name, old), owner=self.owner)
