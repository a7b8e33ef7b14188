"""Where the rows of a table lie, in blocks and in the row buffer, and how they are moved: a lease for each call.

A ``Places`` has a lock, because leases that conflict raise: calls of several threads take turns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tiered.errors import CapacityError, KeyNotFound, MisuseError, TieredError
from tiered.tables.buffer import FIRST, Placed, absent, blank, read_head, stamp_at
from tiered.tables.cache import RowCache
from tiered.tables.kernel import copy, copy_equal
from tiered.tables.layout import Layout, Run, block_prefix, buffer_key, record_key
from tiered.tensors.specs import spec_of
from tiered.types import Access, Key, Owner, TensorSpec

__all__ = [
    "Lent",
    "MovedError",
    "MovedRows",
    "Places",
    "RowStore",
    "There",
    "Wanted",
    "Writes",
    "again",
    "int64",
    "leased",
    "numbers",
    "refuse_moved",
]

LEASED_SHARE = 4
"""Blocks of such a part of the pool, at most, are leased together."""
LEASED_BLOCKS = 4096
"""Of these blocks, at most."""
Answer = TypeVar("Answer")
There = tuple[int, TensorSpec]
"""The address of a tensor, and what it is."""


class RowStore(Protocol):
    """What a table needs of a store."""

    rollbacks: int

    def put(self, key: Key, tensor: torch.Tensor, *, owner: Owner | None = None) -> None: ...
    def get(self, key: Key) -> torch.Tensor: ...
    def delete(self, key: Key, *, owner: Owner | None = None) -> None: ...
    def owned(self, owner: Owner) -> list[Key]: ...
    def table(self, name: str) -> Any: ...
    def owner_of(self, key: Key) -> Owner | None: ...
    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]: ...
    def refuse_closed(self) -> None: ...
    def watch_changes(self, stems: Sequence[str]) -> Callable[[], int]: ...
    def lease_addresses(self, keys: Sequence[Key], access: Access) -> AbstractContextManager[list[There]]: ...
    def fetch_ahead(self, keys: Sequence[Key], device: torch.device) -> None: ...
    def __contains__(self, key: object) -> bool: ...
    def __iter__(self) -> Iterator[Key]: ...


@dataclass(frozen=True)
class MovedRows:
    """Rows that are moved under one lease: ``ids[i]`` is row ``place[i]`` of ``blocks[which[i]]``, a block or a segment of the
    buffer, and row ``row[i]`` of the batch (None: i). All are int64."""

    ids: torch.Tensor
    blocks: list[int]
    which: torch.Tensor
    place: torch.Tensor
    row: torch.Tensor | None = None


class Wanted(NamedTuple):
    """Blocks of ``table`` and segments of its buffer, by number, to be leased; ``placed`` is what they were chosen by."""

    table: Places
    blocks: Sequence[int]
    placed: Placed


class Lent(NamedTuple):
    """Addresses of what was wanted of a table, in its order, and of the head of its buffer (0: there is none)."""

    bases: list[int]
    head: int


class MovedError(Exception):
    """Rows lie elsewhere than was thought: the call begins again with what is known now."""


def again(attempt: Callable[[], Answer]) -> Answer:
    """Call ``attempt`` until it does not raise ``MovedError``; return what it returns."""
    while True:
        try:
            return attempt()
        except MovedError:
            continue


class Places:
    """The places of the rows of the table ``name`` in ``store``, whose tensors are ``owner``'s; ``budget``: bytes of the pool
    in host memory.

    Rows that were read from blocks have copies in ``cache``. These are right as long as nobody else changes a block or the
    buffer: ``_watched()`` is how many such changes were begun, and ``_own`` how many by this table, since both were the same.
    """

    def __init__(self, store: RowStore, name: str, owner: Owner, layout: Layout, budget: int, cache: RowCache) -> None:
        self.store, self.name, self.owner, self.layout, self.budget = store, name, owner, layout, budget
        self.together = max(1, budget // LEASED_SHARE)
        """Bytes of blocks that are leased together, at most."""
        self.placed = absent
        """What the head of the buffer said when it was seen last."""
        self.tight = 8 * layout.buffer_room > 3 * budget
        """Whether the pool is smaller than that for which the buffer was made, so that not all of it can be leased together."""
        self.lock = threading.RLock()
        self.head_key = buffer_key(name)
        """Key of the head of the buffer, if the table has one."""
        self._prefix, self._dtype_name = block_prefix(name), str(layout.dtype).removeprefix("torch.")
        self._last, self._shape = layout.blocks - 1, layout.shape_of(0)  # of all blocks but the last
        self._blank: torch.Tensor | None = None
        self._cache, self._number = cache, cache.number(layout.rows, layout.row_nbytes)
        self._watched: Callable[[], int] | None = None
        self._own = 0
        self._anew = store.watch_changes((record_key(name),))
        self._opened = self._anew()

    # -- rows --------------------------------------------------------------------------------------------------------------

    def read(self, wanted: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the rows ``wanted`` into ``rows``, from where they lie, or from copies that an earlier look-up made."""
        number = self._copied()
        missing = None if number is None else self._cache.read(number, wanted, rows)
        if missing is not None and len(missing) < len(wanted):
            fresh = torch.empty((len(missing), *self.layout.shape), dtype=self.layout.dtype, device="cpu")
            self._read(wanted[missing], fresh, number)
            copy_equal(self.addresses_in(rows, missing), self.addresses_in(fresh, None), self.layout.row_nbytes)
            if not len(missing) or self._watched is None or self._watched() == self._own:
                return
            number = self._copied()  # somebody else changed rows meanwhile: copies are of before, and blocks of after that
        self._read(wanted, rows, number)

    def _read(self, wanted: torch.Tensor, rows: torch.Tensor, number: int | None) -> None:
        """Copy the rows ``wanted`` into ``rows``, from where they lie, and make copies of those in blocks."""
        for part in self.parts(wanted):
            self.move(part, rows, Access.READ)
        if number is not None:
            inside = self.placed.find(wanted) < 0 if len(self.placed.ids) else None
            if inside is None or bool(inside.all()):
                self._cache.keep(number, wanted, rows)
            else:
                self._cache.keep(number, wanted[inside], rows[inside])

    def _copied(self) -> int | None:
        """Return the number by which rows have copies in the cache that are right; None where they have none."""
        if self._number is None:
            return None
        if self._watched is None:
            self._watched = self.store.watch_changes((self._prefix, self.head_key))
            self._own = self._watched()
        elif self._watched() != self._own:
            self.forget_all()
        return self._number

    def forget(self, ids: torch.Tensor) -> None:
        """Forget the copies of the rows ``ids``, which will change."""
        if self._number is not None and self._watched is not None:
            self._cache.forget(self._number, ids)

    def forget_range(self, first: int, last: int) -> None:
        """Forget the copies of rows ``first`` to ``last - 1``, which will change."""
        if self._number is not None and self._watched is not None:
            self._cache.forget(self._number, numbers(first, last - first))

    def forget_all(self) -> None:
        """Forget the copies of all rows."""
        if self._number is not None and self._watched is not None:
            self._number = self._cache.number(self.layout.rows, self.layout.row_nbytes)
            self._own = self._watched()

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Put a block, the head of the buffer or a segment."""
        self.store.put(key, tensor, owner=self.owner)
        self.begun(1)

    def begun(self, count: int) -> None:
        """Count changes of ``count`` tensors that this table has begun. (Where an exception strikes before, it forgets its
        copies.)"""
        self._own += count

    def move(self, part: MovedRows, rows: torch.Tensor, access: Access) -> None:
        """Copy the rows of ``part`` from where they lie into ``rows``, or with WRITE there."""
        if access is Access.WRITE:
            self.forget(part.ids)

        def attempt() -> None:
            placed = self.current()
            now = self.part(part.ids, part.row, placed) if len(placed.ids) or self.tight else part

            def work(lent: Sequence[Lent], others: Sequence[There]) -> None:
                there, here = self.addresses(now, lent[0].bases), self.addresses_in(rows, now.row)
                to, of = (here, there) if access is Access.READ else (there, here)
                copy_equal(to, of, self.layout.row_nbytes)

            leased([Wanted(self, now.blocks, placed)], access, work)

        again(attempt)

    def set(self, part: MovedRows, values: torch.Tensor) -> None:
        """Set the rows of ``part``: in the buffer, where they go there, else where they lie."""
        placed = self.current()
        after = self.with_room(placed, part.ids)
        if after is placed:
            self.move(part, values, Access.WRITE)
            return
        self.forget(part.ids)
        later = self.part(part.ids, part.row, after)

        def work(lent: Sequence[Lent], others: Sequence[There]) -> None:
            writes = Writes()
            self.place(writes, lent[0].head, after)
            writes.add(self.addresses(later, lent[0].bases), self.addresses_in(values, later.row), self.layout.row_nbytes)
            writes.make()

        leased([Wanted(self, later.blocks, placed)], Access.WRITE, work)
        self.placed = after

    def put_block(self, run: Run, rows: torch.Tensor) -> None:
        """Set all rows of a block; again, if the store went back meanwhile to a time when some of them were in the buffer."""
        while True:
            before, first = self.store.rollbacks, run.block * self.layout.block_rows
            self.empty_rows(first, first + run.count)
            self.forget_range(first, first + run.count)
            self.put(self.key(run.block), rows)
            if self.store.rollbacks == before:
                return

    # -- the buffer --------------------------------------------------------------------------------------------------------

    def current(self) -> Placed:
        """Return what is known of the buffer. It may be old: whoever leases by it compares the stamps."""
        if self.placed.stamp is None and self.layout.buffer_rows and self.head_key in self.store:
            head = self.store.get(self.head_key)
            stamp_at(self.name, self.layout, head.data_ptr(), spec_of(head))
            self.placed = read_head(self.name, self.layout, head.data_ptr())
        return self.placed

    def now(self) -> Placed:
        """Return what is known of the buffer, and true at this moment."""

        def attempt() -> Placed:
            placed = self.current()
            refuse_moved([Wanted(self, (), placed)])
            return placed

        return again(attempt)

    def head(self, placed: Placed, leased: Iterator[There]) -> int:
        """Return the address of the head of the buffer, the next one of ``leased``; 0 where there is none. Raises MovedError
        where ``placed`` is not what the head says."""
        if placed.stamp is None:
            if self.head_key in self.store:
                if not self.layout.buffer_rows:
                    raise MisuseError(f"table {self.name!r} was deleted and made anew: open it again")
                raise MovedError
            return 0
        address, spec = next(leased)
        if stamp_at(self.name, self.layout, address, spec) != placed.stamp:
            self.placed = read_head(self.name, self.layout, address)
            raise MovedError
        return address

    def with_room(self, placed: Placed, ids: torch.Tensor) -> Placed:
        """Return what will be known once the rows ``ids`` are written: ``placed`` itself where none comes to the buffer.

        Rows go there unless their blocks get as many of them at once as they would get when the buffer is emptied. Raises
        MovedError after it made the buffer, or room in it.
        """
        layout = self.layout
        if not layout.buffer_rows or self.tight:
            return placed
        rows = torch.unique(ids[placed.find(ids) < 0])
        blocks = len(torch.unique_consecutive(rows.div(layout.block_rows, rounding_mode="floor")))
        if not len(rows) or len(rows) * layout.blocks >= layout.buffer_rows * blocks:
            return placed
        if placed.stamp is None:
            if Layout.decoded(self.name, self.store.get(record_key(self.name))) != layout:
                raise MisuseError(f"table {self.name!r} was deleted and made anew: open it again")
            head = blank(layout)
            self.put(self.head_key, head)
            self.placed = read_head(self.name, layout, head.data_ptr())
            raise MovedError
        if len(rows) > len(placed.free):
            self.empty(placed, *placed.run(layout, max(len(rows), layout.buffer_rows // 32), self.most))
            raise MovedError
        after = placed.added(rows)
        used = set(_segments(placed.slots, layout))
        for segment in set(_segments(placed.free[len(after.free) :], layout)) - used:
            key = self.key(-1 - segment)
            if key not in self.store:
                self.put(key, torch.zeros((layout.segment_rows, *layout.shape), dtype=layout.dtype, device="cpu"))
        return after

    def place(self, writes: Writes, head: int, after: Placed) -> None:
        """Have ``writes`` change the head at address ``head`` to ``after``, the stamp first: to be cut off after that is no
        harm."""
        assert after.stamp is not None and after.changed is not None
        slots, ids = after.changed
        first = int64([after.stamp, after.hand])
        writes.add(int64([head]), int64([first.data_ptr()]), first.nbytes, first)
        writes.finally_add(head + 8 * (FIRST + slots), numbers(0, len(ids)) * 8 + ids.data_ptr(), 8, ids)

    def empty_rows(self, first: int, last: int) -> None:
        """Bring rows ``first`` to ``last - 1`` back to their blocks, as far as they are in the buffer."""
        while self.layout.buffer_rows:
            placed = self.current()
            if placed.stamp is None:
                return
            begin, end = placed.within(self.layout, first, last, self.most)
            try:
                if begin == end:
                    refuse_moved([Wanted(self, (), placed)])
                    return
                self.empty(placed, begin, end)
            except MovedError:
                continue

    def empty(self, placed: Placed, begin: int, end: int) -> None:
        """Bring the rows ``placed.ids[begin:end]`` back to their blocks. Raises MovedError."""
        layout = self.layout
        if self.tight:
            end = min(end, begin + max(1, self.together // (layout.segment_room + layout.block_room)))
        ids = placed.ids[begin:end]
        now, later = self.part(ids, None, placed), self.part(ids)
        after = placed.removed(begin, end, later.blocks[-1] + (not self.tight))

        def work(lent: Sequence[Lent], others: Sequence[There]) -> None:
            bases, writes = lent[0].bases, Writes()
            of, to = self.addresses(now, bases[: len(now.blocks)]), self.addresses(later, bases[len(now.blocks) :])
            self.place(writes, lent[0].head, after)
            writes.add(to, of, layout.row_nbytes)
            writes.make()

        leased([Wanted(self, [*now.blocks, *later.blocks], placed)], Access.WRITE, work)
        self.placed = after

    # -- parts, and where they are -----------------------------------------------------------------------------------------

    @property
    def most(self) -> int:
        """How many blocks are leased together, at most."""
        return min(LEASED_BLOCKS, max(1, self.together // self.layout.block_room))

    def key(self, block: int) -> Key:
        return f"{self._prefix}{block}" if block >= 0 else buffer_key(self.name, -1 - block)

    def turn(self) -> threading.RLock:
        """Return the lock, for a ``with``. Raises MisuseError where this thread has it: a signal handler interrupted a call;
        StoreClosed, and ForkedStore in a child, whose parent may hold the lock; and what ``refuse_another`` raises."""
        self.store.refuse_closed()
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise MisuseError(
                f"a signal handler interrupted a call of table {self.name!r} and calls it, too: have the handler set a flag or "
                "raise, and use the table after that"
            )
        self.refuse_another()
        return self.lock

    def refuse_another(self) -> None:
        """Raise KeyNotFound where the store has the table no longer, and MisuseError where another one has its name."""
        changes = self._anew()
        if changes == self._opened:
            return
        if record_key(self.name) not in self.store:
            raise KeyNotFound(
                f"there is no table {self.name!r} in {self.store} any more: store.table(name, rows, columns) makes one"
            )
        if Layout.decoded(self.name, self.store.get(record_key(self.name))) != self.layout:
            raise MisuseError(f"table {self.name!r} was deleted and made anew: open the table again")
        self._opened = changes

    def part(self, wanted: torch.Tensor, row: torch.Tensor | None = None, placed: Placed = absent) -> MovedRows:
        """Return the rows ``wanted`` as one part, with its segments and its blocks in order: where they lie as ``placed`` has
        it, by default all in their blocks."""
        block = wanted.div(self.layout.block_rows, rounding_mode="floor")
        place = wanted - block * self.layout.block_rows
        if len(placed.ids):
            slots, rows = placed.find(wanted), self.layout.segment_rows
            segment = slots.div(rows, rounding_mode="floor")
            block = torch.where(slots < 0, block, -1 - segment)
            place = torch.where(slots < 0, place, slots - segment * rows)
        unique, which = torch.unique(block, return_inverse=True)
        return MovedRows(wanted, unique.tolist(), which, place, row)

    def parts(self, wanted: torch.Tensor) -> Iterator[MovedRows]:
        """Divide the rows ``wanted`` into parts whose blocks are leased together. The order of each row's values stays."""
        if not len(wanted):
            return
        most = self.most
        whole = self.part(wanted, None, self.now() if self.tight else absent)
        if len(whole.blocks) <= most and not (self.tight and whole.blocks[0] < 0):
            yield whole
            return
        if self.tight:  # segments are cut, too
            most = max(1, self.together // max(self.layout.block_room, self.layout.segment_room))
        order = torch.argsort(whole.which, stable=True)
        which = whole.which[order]
        for begin in range(0, len(whole.blocks), most):
            blocks = whole.blocks[begin : begin + most]
            low, high = torch.searchsorted(which, int64([begin, begin + len(blocks)])).tolist()
            mine = order[low:high]
            yield MovedRows(wanted[mine], blocks, which[low:high] - begin, whole.place[mine], mine)

    def addresses(self, part: MovedRows, bases: Sequence[int]) -> torch.Tensor:
        """Return the addresses of the rows of ``part`` in their blocks, which begin at ``bases``."""
        return int64(bases)[part.which].add_(part.place, alpha=self.layout.row_nbytes)

    def addresses_in(self, rows: torch.Tensor, row: torch.Tensor | None) -> torch.Tensor:
        """Return the addresses of ``rows``, contiguous, or of those among them that ``row`` names."""
        which = torch.arange(len(rows), dtype=torch.int64, device="cpu") if row is None else row
        return which * self.layout.row_nbytes + rows.data_ptr()

    def unwritten(self) -> torch.Tensor:
        """Return a block as it is before anybody writes to it."""
        if self.layout.block_nbytes > self.budget:  # also where a damaged record says so: before memory is taken
            raise CapacityError(
                f"a block of table {self.name!r} has {self.layout.block_nbytes:,} bytes, which can never be in the pool of "
                f"{self.budget:,} bytes: open the store with more room there"
            )
        if self._blank is None:
            shape = (self.layout.block_rows, *self.layout.shape)
            self._blank = torch.full(shape, self.layout.fill, dtype=self.layout.dtype, device="cpu")
        return self._blank

    def refuse_other(self, spec: TensorSpec, block: int) -> None:
        """Raise MisuseError where a tensor of ``spec`` is not a block of this layout."""
        shape = self._shape if 0 <= block < self._last else self.layout.shape_of(block)
        if spec.shape != shape or spec.dtype != self._dtype_name:
            raise MisuseError(f"{self.key(block)!r} is no block of table {self.name!r} as it was opened: open the table again")


def leased(
    wanted: Sequence[Wanted],
    access: Access,
    work: Callable[[Sequence[Lent], Sequence[There]], Answer],
    also: Sequence[Key] = (),
) -> Answer:
    """Call ``work(lent, others)`` under one lease of what is wanted of tables, with the heads of their buffers, and of the
    tensors ``also``.

    Addresses are in host memory: only rows go to a device. To be written to, blocks that do not exist are made; to be read,
    they are seen as blank. Raises MovedError where a table's rows do not lie as was thought.
    """
    store = wanted[0].table.store
    missing: set[Key] = set()
    while True:
        heads = [some.table.head_key for some in wanted if some.placed.stamp is not None]
        keys = [some.table.key(block) for some in wanted for block in some.blocks]
        there = [*heads, *keys, *also]
        if missing:
            there = [key for key in there if key not in missing]
        try:
            with store.lease_addresses(there, access) as granted:
                for some in wanted if access is Access.WRITE else ():
                    some.table.begun(len(some.blocks) + (some.placed.stamp is not None))
                rest = iter(granted)
                tops = [some.table.head(some.placed, rest) for some in wanted]
                bases = [[_base(some.table, block, missing, rest) for block in some.blocks] for some in wanted]
                return work(list(map(Lent, bases, tops)), list(rest))
        except TieredError as error:
            if not isinstance(error, KeyNotFound):  # damage, a conflict or no room, perhaps of a segment that is not needed now
                with contextlib.suppress(TieredError):
                    refuse_moved([some for some in wanted if some.blocks])
                raise
            if any(key not in store for key in also):
                raise
            for some in wanted:
                if some.placed.stamp is not None and some.table.head_key not in store:
                    some.table.placed = absent  # the store went back to a time before there was one
                    raise MovedError from None
            lacking = [(some.table, block) for some in wanted for block in some.blocks if some.table.key(block) not in store]
            if any(block < 0 for _, block in lacking):  # a segment is never blank
                refuse_moved(wanted)
                raise MisuseError(f"a table is damaged, restore a commit that has it: {error}") from None
        if access is Access.READ:
            missing = {table.key(block) for table, block in lacking}
            continue
        for table, block in lacking:
            table.put(table.key(block), table.unwritten()[: table.layout.rows_in(block)])


def refuse_moved(wanted: Sequence[Wanted]) -> None:
    """Raise MovedError where the rows of a table do not lie as was thought, because the store went back or ahead: what was
    decided by that is decided again."""
    if wanted:
        leased([some._replace(blocks=()) for some in wanted], Access.READ, lambda lent, others: None)


def _base(table: Places, block: int, missing: set[Key], leased: Iterator[There]) -> int:
    if missing and table.key(block) in missing:
        return table.unwritten().data_ptr()
    address, spec = next(leased)
    table.refuse_other(spec, block)
    return address


class Writes:
    """Copies that are made together, by one call of C. ``finally_add`` adds those that come last."""

    def __init__(self) -> None:
        self._lists: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._last: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._kept: list[torch.Tensor] = []

    def add(self, targets: torch.Tensor, sources: torch.Tensor, nbytes: int, kept: torch.Tensor | None = None) -> None:
        """Have ``nbytes`` bytes copied from each of the addresses ``sources`` to that of ``targets``; ``kept`` lives on."""
        self._add(self._lists, targets, sources, nbytes, kept)

    def finally_add(self, targets: torch.Tensor, sources: torch.Tensor, nbytes: int, kept: torch.Tensor) -> None:
        self._add(self._last, targets, sources, nbytes, kept)

    def _add(
        self,
        lists: tuple[list[int], list[int], list[int]],
        targets: torch.Tensor,
        sources: torch.Tensor,
        nbytes: int,
        kept: torch.Tensor | None,
    ) -> None:
        lists[0].extend(targets.tolist())
        lists[1].extend(sources.tolist())
        lists[2].extend([nbytes] * len(targets))
        if kept is not None:
            self._kept.append(kept)

    def make(self) -> None:
        copy(*(one + last for one, last in zip(self._lists, self._last, strict=True)))


def _segments(slots: torch.Tensor, layout: Layout) -> list[int]:
    segments: list[int] = torch.unique(slots.div(layout.segment_rows, rounding_mode="floor")).tolist()
    return segments


def numbers(begin: int, count: int) -> torch.Tensor:
    """Return the whole numbers from ``begin`` on, int64 of shape (count,)."""
    if count == 1:  # in a third of the time
        return torch.full((1,), begin, dtype=torch.int64, device="cpu")
    return torch.arange(begin, begin + count, dtype=torch.int64, device="cpu")


def int64(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


